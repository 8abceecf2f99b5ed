// Lane codecs, forward: scale, round with shared dither, pack; residuals and check words on the way.
#pragma once
#include "copy.h"
#include "energy.h"
#include "rounding.h"

namespace gccomm::GCCOMM_LEVEL {

// Where the words of a block go, and what else is asked for, or null.
struct Outputs {
    u32* words;
    int count;
    u32 *check, *own;  // check words; the scale word that the block has of its own
    float gain;        // what values are multiplied by before they are rounded
};

// What a lane codec does to one block, the block's own scale apart.
class Encoder {
 public:
    explicit Encoder(const EncodeArgs& args)
        : args_(args),
          clamp_(args.grid != nullptr ? *args.grid << 15
                 : args.clamp != 0    ? args.clamp
                                      : args.limit),
          even_(float_below(clamp_) == static_cast<double>(clamp_)),
          limit_(float_below(args.limit)),
          unit_(static_cast<float>(65536.0 / args.limit)),
          rotator_(args.rotations),
          measure_(args.rotations) {
        zero_after(q_, 0);
        if (args.grid != nullptr) grid_.set(args.grid);
    }

    // `ratio`: the step as a multiple of the scale, or null.
    void encode(const Block& b, u32 s, const float* ratio, const Outputs& out) {
        const bool wide = is_wide(b.segment->dtype);
        if (nonfinite_scale(s, wide) || s == 0 || (ratio != nullptr && *ratio == 0)) {
            __builtin_memset(out.words, 0, sizeof(u32) * static_cast<u32>(out.count));
            if (out.check != nullptr) out.check[0] = out.check[1] = 0;
            if (out.own != nullptr) *out.own = measure_.scale(b, nullptr);
            return skip(b, nonfinite_scale(s, wide));
        }
        const Scale scale = split_scale(s, wide);
        level_ = scale.mant * (ratio == nullptr ? unit_ : *ratio);
        const float factor = (ratio == nullptr ? limit_ / scale.mant : 65536.0f / level_) * out.gain;
        Rounding r{factor, clamp_, args_.shift << 16, noise_of(b)};
        packed_ = false;
        if (args_.rotations != 0)
            encode_rotated(b, scale, r, out);
        else if (wide)
            encode_wide(b, scale, r, out);
        else
            encode_floats(b, scale, r, out);
        if (packed_) return;
        const int n = args_.rotations == 0 ? b.length : padded(b.length);
        if (n < kBlock) zero_after(q_, n);
        pack(args_.width, q_, out.count, out.words);
        if (b.segment->res_out != 0) leave_residual(b, scale);
    }

 private:
    // Calls f with the sink for rounding, a ColumnSink or RoundingSink.
    template <template <bool, bool> class Sink, class Function>
    void with_rounding(const Rounding& r, u32* check, Function f) {
        if (check == nullptr) {
            if (even_) return with_sink(Sink<false, true>(r, q_.at), nullptr, f);
            return with_sink(Sink<false, false>(r, q_.at), nullptr, f);
        }
        if (even_) return with_sink(Sink<true, true>(r, q_.at), check, f);
        with_sink(Sink<true, false>(r, q_.at), check, f);
    }

    // The largest pattern of the values is found on the way.
    template <class Function>
    void watch(const Rounding& r, Function f) {
        if (even_) {
            WatchingSink<RoundingSink<false, true>> sink(r, q_.at);
            f(sink);
            *watch_ = sink.largest();
        } else {
            WatchingSink<RoundingSink<false, false>> sink(r, q_.at);
            f(sink);
            *watch_ = sink.largest();
        }
    }

    template <class Sink, class Function>
    GCCOMM_FN void with_sink(Sink sink, u32* check, Function f) {
        f(sink);
        if (check != nullptr) sink.check.store_to(check);
    }

    // n values -> integers.
    template <class Source>
    void quantise(const Source& source, int n, const Rounding& r, u32* check) {
        const auto round = [&](auto& sink) GCCOMM_INLINE {
            int i = 0;
            for (; i + kPair <= n; i += kPair) sink.put(i, source.next(i));
            if (i < n) sink.put_part(i, source.part(i, n - i), n - i);
        };
        if (args_.grid == nullptr) {
            if (check == nullptr && watch_ != nullptr) return watch(r, round);
            return with_rounding<RoundingSink>(r, check, round);
        }
        if (check == nullptr) return with_sink(GridSink<false>(r, grid_, q_.at), nullptr, round);
        with_sink(GridSink<true>(r, grid_, q_.at), check, round);
    }

    // Whether a block is packed as it is rounded.
    bool packs(const Block& b, const Outputs& out) const {
        const bool plain = args_.grid == nullptr && b.segment->res_out == 0;
        return fits(args_.width) && even_ && plain && b.length == kBlock &&
               (out.own == nullptr || out.check == nullptr);
    }

    // Rounds and packs what `finish` puts into a sink of columns.
    template <class Function>
    void pack_whole(const Rounding& r, const Outputs& out, Function finish) {
        const auto packing = [&]<int width>() {
            packed_ = true;
            if (out.own != nullptr) {
                WatchingSink<PackingSink<false, width>> sink(r, out.words);
                finish(sink);
                largest_ = sink.largest();
                return;
            }
            if (out.check == nullptr)
                return with_sink(PackingSink<false, width>(r, out.words), nullptr, finish);
            with_sink(PackingSink<true, width>(r, out.words), out.check, finish);
        };
        if (args_.width == 4) return packing.template operator()<4>();
        if (args_.width == 8) return packing.template operator()<8>();
        packing.template operator()<16>();
    }

    // The last pass of the rotation of a block of 1024.
    void round_whole(const Block& b, const Rounding& r, const Outputs& out) {
        const auto finish = [&](auto& sink) GCCOMM_INLINE { rotator_.finish_whole(sink); };
        if (packs(b, out)) return pack_whole(r, out, finish);
        with_rounding<ColumnSink>(r, out.check, finish);
    }

    // A block of 1024 where it lies, which is fetched in its order.
    template <class Source>
    void pack_columns(const Source& source, const Block& b, const Rounding& r, const Outputs& out) {
        const bool inside = b.number - b.segment->block0 + args_.ahead < b.segment->nblocks;
        const i64 later = inside ? args_.ahead * kBlock : 0;
        pack_whole(r, out, [&](auto& sink) GCCOMM_INLINE {
            for (int j = 0; j < kBlock / 4; j += kPair) {
                if (later != 0)
                    for (int k = 0; k < 4; k++) source.fetch_later(later + 4 * j + k * kPair);
                F low[4], high[4];
                unrolled<4>([&](auto k) GCCOMM_INLINE {
                    source.fetch(4 * j + k.at * kPair);
                    const Pair v = source.at(j + k.at * kBlock / 4);
                    low[k.at] = v.low;
                    high[k.at] = v.high;
                });
                sink.put_column(j, low, high);
            }
        });
    }

    // Whether a block is read where it lies.
    static bool direct(const Segment& s) { return s.src != 0 && s.res_in == 0 && s.res_out == 0; }

    // 2^-e goes into the factor where that is exact.
    void encode_floats(const Block& b, Scale scale, Rounding& r, const Outputs& out) {
        const Segment& s = *b.segment;
        const int before = static_cast<int>(bits_of(r.factor) >> 23), after = before - scale.e;
        const bool folds = before >= 1 && before <= 254 && after >= 1 && after <= 254;
        if (folds) r.factor = float_of(bits_of(r.factor) - (static_cast<u32>(scale.e) << 23));
        if (folds && direct(s)) return encode_direct(b, r, out);
        if (out.own != nullptr) *out.own = block_maximum(b);
        block_values(b, x_.at);
        if (folds) return quantise(NearFloats{x_.at}, b.length, r, out.check);
        for (int i = 0; i < b.length; i++) scaled_.at[i] = x_.at[i];
        scale_by_power(scaled_.at, b.length, -scale.e);
        quantise(NearFloats{scaled_.at}, b.length, r, out.check);
    }

    void encode_direct(const Block& b, const Rounding& r, const Outputs& out) {
        const Segment& s = *b.segment;
        u32 largest = 0;
        watch_ = out.own == nullptr || out.check != nullptr || args_.grid != nullptr ? nullptr : &largest;
        const bool watched = watch_ != nullptr, packing = packs(b, out);
        with_source(s.dtype, block_address(s.src, b), [&](auto source) {
            packing ? pack_columns(source, b, r, out) : quantise(source, b.length, r, out.check);
        });
        watch_ = nullptr;
        if (out.own == nullptr) return;
        if (packing) largest = largest_;
        *out.own = watched && largest < kInfinity ? largest : block_maximum(b);
    }

    void encode_wide(const Block& b, Scale scale, const Rounding& r, const Outputs& out) {
        if (out.own != nullptr) *out.own = block_maximum(b);
        const Power power(-scale.e);
        const double* x = element<const double>(b.segment->src, b.offset);
        if (!direct(*b.segment)) {
            wide_values(b, wide_.at);
            x = wide_.at;
        }
        quantise(ScaledDoubles{x, power.first, power.second}, b.length, r, out.check);
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
        if (b.length == kBlock && args_.grid == nullptr && (out.own == nullptr || packs(b, out))) {
            rotator_.start_whole(source, factor(kBlock));
            return round_whole(b, r, out);
        }
        rotator_.rotate(source, b.length, factor);
        quantise(NearFloats{rotator_.values()}, padded(b.length), r, out.check);
    }

    // The scale word of the rotated values, which are normalised by 2^e.
    void own_maximum(const Block& b, int e, u32* own) {
        const u32 largest = packed_ ? largest_ : largest_float(rotator_.values(), padded(b.length));
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
                out[i] = saturate(wide_.at[i] - saturate(static_cast<double>(sent[i]) * power));
            return;
        }
        float* out = element<float>(b.segment->res_out, b.offset);
        const float power = pow2(scale.e);
        for (int i = 0; i < b.length; i++) out[i] = saturate(x_.at[i] - saturate(sent[i] * power));
    }

    // What the integers stand for, without the scale's exponent.
    const float* sent_values(const Block& b) {
        const int n = args_.rotations == 0 ? b.length : padded(b.length);
        const float half = grid_.g % 2 == 0 ? 0.0f : 0.5f;  // by which integers of an odd grid are off
        if (args_.subtract && args_.grid == nullptr)
            undithered(b, n);
        else
            for (int i = 0; i < n; i++) scaled_.at[i] = (static_cast<float>(q_.at[i]) + half) * level_;
        if (args_.rotations == 0) return scaled_.at;
        NearFloats source{scaled_.at};
        rotator_.unrotate(source, b.length, 1);
        return rotator_.values();
    }

    // The integers less this rank's own dither, times the level.
    void undithered(const Block& b, int n) {
        const BlockNoise noise = noise_of(b);
        const float unit = level_ * 0x1p-15f;
        for (int i = 0; i < n; i += kLanes) {
            const U dither = ((noise.at<false>(i) >> 16) + args_.shift) & 0xFFFF;
            const I v = (load<I>(q_.at + i) << 15) - (I)(dither >> 1) + 16384;
            store(scaled_.at + i, __builtin_convertvector(v, F) * unit);
        }
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
    u32 largest_ = 0;           // of the values of a block that was packed as it was rounded
    u32* watch_ = nullptr;      // where to leave the largest pattern, if anywhere
    float level_ = 0;           // of the block, without the scale's exponent
    Grid grid_;
    Integers q_;
    Rotator rotator_;
    Measure measure_;
    Floats x_, scaled_;
    Doubles wide_;
};

// Encodes the blocks of a batch, one after the other.
class Encoding {
 public:
    Encoding(const Batch& batch, const EncodeArgs& args)
        : args_(args),
          lo_(batch.lo),
          cursor_(batch, LaneWords(args.width, args.rotations != 0)),
          encoder_(args),
          left_(args.words.data),
          end_(left_) {}

    // Does the next block; false where there is none.
    bool next() {
        Cursor<LaneWords>& c = cursor_;
        if (!c.next()) return false;
        const i64 place = c.index - lo_;
        u32* check = args_.check == nullptr ? nullptr : args_.check + 2 * place;
        u32* own = args_.maxima == nullptr ? nullptr : args_.maxima + place;
        const float* ratio = args_.ratios == nullptr ? nullptr : args_.ratios + c.index;
        u32* words = args_.words.data + (c.word - args_.words.base);
        const float gain = args_.gains == nullptr ? 1.0f : args_.gains[c.index];
        for (int i = 0; i < c.words; i += kLineBytes / 4)  // other ranks may have had them last
            __builtin_prefetch(words + 2 * c.words + i, 1, 3);
        encoder_.encode(c.block, args_.scales[c.index], ratio, {words, c.words, check, own, gain});
        end_ = words + c.words;
        // Block by block, so that memory takes it while the next one is encoded.
        if (args_.twin != nullptr) left_ = stream_lines(left_, end_, twin());
        return true;
    }

    void finish() {
        if (args_.twin == nullptr) return;
        __builtin_memcpy(twin(), left_, sizeof(u32) * static_cast<u64>(end_ - left_));
        stream_fence();
    }

 private:
    u32* twin() const { return args_.twin + (left_ - args_.words.data); }

    const EncodeArgs& args_;
    const i64 lo_;
    Cursor<LaneWords> cursor_;
    Encoder encoder_;
    const u32 *left_, *end_;  // what the twin has not yet
};

inline void encode(const Batch& batch, const EncodeArgs& args) {
    const FloatEnvironment environment;
    Encoding encoding(batch, args);
    while (encoding.next()) {
    }
    encoding.finish();
}

}  // namespace gccomm::GCCOMM_LEVEL
