// Lane codecs, forward: scale, round with shared dither, pack; residuals and check words on the way.
#pragma once
#include "energy.h"
#include "lanes.h"

namespace gccomm::GCCOMM_LEVEL {

// Noise of the coordinates of a block.
struct BlockNoise {
    BlockKey key;
    static constexpr u32 step = static_cast<u32>(kLanes) * kGolden;
    GCCOMM_FN U counter(int i) const { return (iota() + static_cast<u32>(i)) * kGolden + key.k0; }
    GCCOMM_FN U bits(U counter) const { return noise(counter, key.k1); }
};

GCCOMM_FN BlockNoise noise_of(const Block& b) {
    return {block_key(b.segment->key0, b.segment->key1, static_cast<u32>(b.number))};
}

struct Rounding {
    float factor;
    i32 limit;
    u32 shift;  // in the upper half
    BlockNoise noise;
};

// What the sinks that round have in common: values become integers, whose check words are summed.
template <bool checked, bool even>
class Rounder {
 public:
    static constexpr bool columns = false;
    GCCOMM_FN explicit Rounder(const Rounding& r) : r_(r), first_(r.noise.counter(0)) {}

    Check check;

 protected:
    GCCOMM_FN I round(F v, U counter) {
        const U h = r_.noise.bits(counter);
        const I q = quantise<VectorOps, even>(v, r_.factor, r_.limit, h + r_.shift);
        if constexpr (checked) check.add(q, h);
        return q;
    }
    GCCOMM_FN U counter(int i) const { return first_ + static_cast<u32>(i) * kGolden; }

 private:
    const Rounding r_;
    const U first_;
};

// Pairs come one after the other if `ordered`; integers go to `q`.
template <bool checked, bool even, bool ordered>
class RoundingSink : public Rounder<checked, even> {
 public:
    GCCOMM_FN RoundingSink(const Rounding& r, i32* q)
        : Rounder<checked, even>(r), out_(q), next_(this->counter(0)) {}

    GCCOMM_FN void put(int i, Pair v) {
        const U c = ordered ? next_ : this->counter(i);
        store(out_ + i, this->round(v.low, c));
        store(out_ + i + kLanes, this->round(v.high, c + BlockNoise::step));
        if constexpr (ordered) next_ += 2 * BlockNoise::step;
    }

 private:
    i32* out_;
    U next_;
};

// Packs as it rounds: for blocks of 1024 in 4, 8 or 16 bits, where coordinates 256 apart share words.
template <bool checked, int width>
class PackingSink : public Rounder<checked, true> {
 public:
    static constexpr bool columns = true;
    GCCOMM_FN PackingSink(const Rounding& r, u32* words) : Rounder<checked, true>(r), words_(words) {}

    GCCOMM_FN void put_column(int j, const F (&low)[4], const F (&high)[4]) {
        put_vectors(j, low);
        put_vectors(j + kLanes, high);
    }

 private:
    GCCOMM_FN void put_vectors(int j, const F (&v)[4]) {
        U q[4];
        unrolled<4>([&](auto k)
                        GCCOMM_INLINE { q[k.at] = (U)this->round(v[k.at], this->counter(j + 256 * k.at)); });
        if constexpr (width == 16) {
            store(words_ + j, q[0] + (q[2] << 16));
            store(words_ + j + 256, q[1] + (q[3] << 16));
            return;
        }
        const U word = q[0] + (q[1] << 8) + (q[2] << 16) + (q[3] << 24);
        if (width == 8 || j < 128) return store(words_ + j, word);
        u32* other = words_ + j - 128;
        store(other, load<U>(other) + (word << 4));
    }

    u32* words_;
};

// Where the words of a block go, and what else is asked for, or null.
struct Outputs {
    u32* words;
    int count;
    u32 *check, *own;  // check words; the scale word that the block has of its own
};

// What a lane codec does to one block, the block's own scale apart.
class Encoder {
 public:
    explicit Encoder(const EncodeArgs& args)
        : args_(args),
          clamp_(args.clamp != 0 ? args.clamp : args.limit),
          even_(float_below(clamp_) == static_cast<double>(clamp_)),
          limit_(float_below(args.limit)),
          unit_(static_cast<float>(65536.0 / args.limit)),
          rotator_(args.rotations),
          measure_(args.rotations) {
        zero_after(q_, 0);
    }

    // `ratio`: the step as a multiple of the scale, or null.
    void encode(const Block& b, u32 s, const float* ratio, const Outputs& out) {
        const bool wide = is_wide(b.segment->dtype);
        if (out.own != nullptr && args_.rotations == 0) *out.own = block_maximum(b);
        if (nonfinite_scale(s, wide) || s == 0 || (ratio != nullptr && *ratio == 0)) {
            __builtin_memset(out.words, 0, sizeof(u32) * static_cast<u32>(out.count));
            if (out.check != nullptr) out.check[0] = out.check[1] = 0;
            if (out.own != nullptr && args_.rotations != 0) *out.own = measure_.scale(b, nullptr);
            return skip(b, nonfinite_scale(s, wide));
        }
        const Scale scale = split_scale(s, wide);
        level_ = scale.mant * (ratio == nullptr ? unit_ : *ratio);
        const float factor = ratio == nullptr ? limit_ / scale.mant : 65536.0f / level_;
        Rounding r{factor, clamp_, args_.shift << 16, noise_of(b)};
        packed_ = false;
        if (args_.rotations != 0)
            encode_rotated(b, scale, r, out);
        else if (wide)
            encode_wide(b, scale, r, out.check);
        else
            encode_floats(b, scale, r, out.check);
        if (packed_) return;
        const int n = args_.rotations == 0 ? b.length : padded(b.length);
        if (n < kBlock) zero_after(q_, n);
        pack(args_.width, q_, out.count, out.words);
        if (b.segment->res_out != 0) leave_residual(b, scale);
    }

 private:
    // Calls f with the sink for rounding.
    template <bool ordered, class Function>
    void with_rounding(const Rounding& r, u32* check, Function f) {
        if (check == nullptr) {
            if (even_) return with_sink(RoundingSink<false, true, ordered>(r, q_.at), nullptr, f);
            return with_sink(RoundingSink<false, false, ordered>(r, q_.at), nullptr, f);
        }
        if (even_) return with_sink(RoundingSink<true, true, ordered>(r, q_.at), check, f);
        with_sink(RoundingSink<true, false, ordered>(r, q_.at), check, f);
    }

    template <class Sink, class Function>
    GCCOMM_FN void with_sink(Sink sink, u32* check, Function f) {
        f(sink);
        if (check != nullptr) sink.check.store_to(check);
    }

    // n values -> integers. (Beyond the block, part() gives zeros, which become zeros.)
    template <class Source>
    void quantise(const Source& source, int n, const Rounding& r, u32* check) {
        with_rounding<true>(r, check, [&](auto& sink) GCCOMM_INLINE {
            int i = 0;
            for (; i + kPair <= n; i += kPair) sink.put(i, source.next(i));
            if (i < n) sink.put(i, source.part(i, n - i));
        });
    }

    // The last pass of the rotation of a block of 1024, rounding and, if it can be, packing.
    void round_whole(const Block& b, const Rounding& r, const Outputs& out) {
        const auto finish = [&](auto& sink) GCCOMM_INLINE { rotator_.finish_whole(sink); };
        const auto packing = [&]<int width>() {
            packed_ = true;
            if (out.check == nullptr)
                return with_sink(PackingSink<false, width>(r, out.words), nullptr, finish);
            with_sink(PackingSink<true, width>(r, out.words), out.check, finish);
        };
        const int width = even_ && b.segment->res_out == 0 ? args_.width : 0;
        if (width == 4) return packing.template operator()<4>();
        if (width == 8) return packing.template operator()<8>();
        if (width == 16) return packing.template operator()<16>();
        with_rounding<false>(r, out.check, finish);
    }

    // Whether a block is read where it lies.
    static bool direct(const Segment& s) { return s.src != 0 && s.res_in == 0 && s.res_out == 0; }

    // 2^-e goes into the factor where that is exact.
    void encode_floats(const Block& b, Scale scale, Rounding& r, u32* check) {
        const Segment& s = *b.segment;
        const int exponent = static_cast<int>(bits_of(r.factor) >> 23) - scale.e;
        const bool folds = exponent >= 1 && exponent <= 254;
        if (folds) r.factor = float_of(bits_of(r.factor) - (static_cast<u32>(scale.e) << 23));
        if (folds && direct(s))
            return with_source(s.dtype, block_address(s.src, b),
                               [&](auto source) { quantise(source, b.length, r, check); });
        block_values(b, x_.at);
        if (folds) return quantise(NearFloats{x_.at}, b.length, r, check);
        for (int i = 0; i < b.length; i++) scaled_.at[i] = x_.at[i];
        scale_by_power(scaled_.at, b.length, -scale.e);
        quantise(NearFloats{scaled_.at}, b.length, r, check);
    }

    void encode_wide(const Block& b, Scale scale, const Rounding& r, u32* check) {
        const Power power(-scale.e);
        const double* x = element<const double>(b.segment->src, b.offset);
        if (!direct(*b.segment)) {
            wide_values(b, wide_.at);
            x = wide_.at;
        }
        quantise(ScaledDoubles{x, power.first, power.second}, b.length, r, check);
    }

    void encode_rotated(const Block& b, Scale scale, const Rounding& r, const Outputs& out) {
        const Segment& s = *b.segment;
        const bool wide = is_wide(s.dtype), in_place = direct(s) && b.length == padded(b.length);
        const auto power = [&](int part) { return -scale.e - floor_log2(static_cast<u32>(part)); };
        rotator_.set(b);
        if (wide) {
            const double* x = in_place ? element<const double>(s.src, b.offset) : wide_.at;
            if (!in_place) padded_values(b, wide_.at);
            const Power p(-scale.e);
            round_rotated(ScaledDoubles{x, p.first, p.second}, b, r, out,
                          [](int part) { return 1.0f / static_cast<float>(part); });
        } else if (in_place && power(kSmallestPart) <= 127 && power(kBlock) >= -126) {
            with_source(s.dtype, block_address(s.src, b), [&](auto source) {
                round_rotated(source, b, r, out, [&](int part) { return pow2(power(part)); });
            });
        } else {
            padded_values(b, x_.at);
            round_staged(b, power, r, out);
        }
        if (out.own != nullptr) own_maximum(b, scale.e, out.own);
    }

    // Where a power is not that of a normal number: in two steps.
    template <class Exponent>
    void round_staged(const Block& b, Exponent power, const Rounding& r, const Outputs& out) {
        const auto first = [&](int part) {
            const int k = power(part);
            return k > 127 ? 127 : k < -126 ? -126 : k;
        };
        const int n = padded(b.length);
        for (int i = 0, part; i < n; i += part) {
            part = part_of(n - i);
            const float factor = pow2(first(part));
            for (int j = i; j < i + part; j++) scaled_.at[j] = x_.at[j] * factor;
        }
        round_rotated(NearFloats{scaled_.at}, b, r, out,
                      [&](int part) { return pow2(power(part) - first(part)); });
    }

    template <class Source, class Factor>
    void round_rotated(Source source, const Block& b, const Rounding& r, const Outputs& out, Factor factor) {
        if (b.length == kBlock && out.own == nullptr) {
            rotator_.start_whole(source, factor(kBlock));
            return round_whole(b, r, out);
        }
        rotator_.rotate(source, b.length, factor);
        quantise(NearFloats{rotator_.values()}, padded(b.length), r, out.check);
    }

    // The scale word of the rotated values, which are normalised by 2^e.
    void own_maximum(const Block& b, int e, u32* own) {
        const u32 largest = largest_float(rotator_.values(), padded(b.length));
        if (largest >= kInfinity)
            *own = measure_.scale(b, nullptr);
        else if (is_wide(b.segment->dtype))
            *own = Measure::wide_word(largest, e);
        else
            *own = pattern_times_power(largest, e);
    }

    // What the integers leave over. (float32: what was sent is a multiple of 2^-54, so one multiplication by
    // 2^e rounds as two do.)
    void leave_residual(const Block& b, Scale scale) {
        const float* sent = sent_values(b);
        if (is_wide(b.segment->dtype)) {
            double* out = element<double>(b.segment->res_out, b.offset);
            const double power = pow2_wide(scale.e);
            for (int i = 0; i < b.length; i++)
                out[i] = wide_.at[i] - saturate(static_cast<double>(sent[i]) * power);
            return;
        }
        float* out = element<float>(b.segment->res_out, b.offset);
        const float power = pow2(scale.e);
        for (int i = 0; i < b.length; i++) out[i] = x_.at[i] - saturate(sent[i] * power);
    }

    // What the integers stand for, without the scale's exponent.
    const float* sent_values(const Block& b) {
        const int n = args_.rotations == 0 ? b.length : padded(b.length);
        for (int i = 0; i < n; i++) scaled_.at[i] = static_cast<float>(q_.at[i]) * level_;
        if (args_.rotations == 0) return scaled_.at;
        NearFloats source{scaled_.at};
        rotator_.unrotate(source, b.length, 1);
        return rotator_.values();
    }

    // Residual of a block that sends nothing: all of it, or unchanged if the scale is not finite.
    void skip(const Block& b, bool lost) {
        const Segment& segment = *b.segment;
        if (segment.res_out == 0) return;
        if (lost) return keep_residual(b);
        if (is_wide(segment.dtype)) {
            wide_values(b, wide_.at);
            store_doubles(wide_.at, b.length, element<double>(segment.res_out, b.offset));
        } else {
            block_values(b, x_.at);
            store_floats(DType::float32, x_.at, b.length, element<float>(segment.res_out, b.offset), false);
        }
    }

    const EncodeArgs& args_;
    const i32 clamp_;
    const bool even_;           // whether the clamp is a float32
    const float limit_, unit_;  // limit_: the largest float32 that is not above the limit
    bool packed_ = false;       // whether the words of the block are written
    float level_ = 0;           // of the block, without the scale's exponent
    Integers q_;
    Rotator rotator_;
    Measure measure_;
    Floats x_, scaled_;
    Doubles wide_;
};

inline void encode(const Batch& batch, const EncodeArgs& args) {
    const FloatEnvironment environment;
    Encoder encoder(args);
    for (Cursor<LaneWords> c(batch, LaneWords(args.width, args.rotations != 0)); c.next();) {
        const i64 place = c.index - batch.lo;
        u32* check = args.check == nullptr ? nullptr : args.check + 2 * place;
        u32* own = args.maxima == nullptr ? nullptr : args.maxima + place;
        const float* ratio = args.ratios == nullptr ? nullptr : args.ratios + c.index;
        u32* words = args.words.data + (c.word - args.words.base);
        encoder.encode(c.block, args.scales[c.index], ratio, {words, c.words, check, own});
    }
}

}  // namespace gccomm::GCCOMM_LEVEL
