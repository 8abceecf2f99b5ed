// Lane codecs, forward: scale, round with shared dither, pack; residuals and check words on the way.
#pragma once
#include "lanes.h"
#include "maxima.h"

namespace gccomm::GCCOMM_LEVEL {

// 2^k in two factors, each within the range of float64.
struct Power {
    double first, second;
    GCCOMM_FN explicit Power(int k) : first(pow2_wide(k >> 1)), second(pow2_wide(k - (k >> 1))) {}
};

GCCOMM_FN void scale_by_power(double* x, int n, int k) {
    const Power power(k);
    for (int i = 0; i < n; i++) x[i] = x[i] * power.first * power.second;
}

GCCOMM_FN void scale_by_power(float* x, int n, int k) {
    const float first = pow2(k >> 1), second = pow2(k - (k >> 1));
    for (int i = 0; i < n; i++) x[i] = x[i] * first * second;
}

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

// A sink that rounds: integers go to `out`, their check words are summed.
template <bool checked, bool even>
class RoundingSink {
 public:
    GCCOMM_FN RoundingSink(const Rounding& r, Integers& q)
        : r_(r), out_(q.at), counter_(r.noise.counter(0)) {}

    GCCOMM_FN void put(int i, Pair v) {
        put_vector(i, v.low);
        put_vector(i + kLanes, v.high);
    }

    Check check;

 private:
    GCCOMM_FN void put_vector(int i, F v) {
        const U h = r_.noise.bits(counter_);
        const I q = quantise<VectorOps, even>(v, r_.factor, r_.limit, h + r_.shift);
        store(out_ + i, q);
        if constexpr (checked) check.add(q, h);
        counter_ += BlockNoise::step;
    }

    const Rounding r_;
    i32* out_;
    U counter_;
};

// n values -> integers. (Beyond the block, part() gives zeros, which become zeros.)
template <bool checked, bool even, class Source>
inline void quantise_block(const Source& source, int n, const Rounding& r, Integers& q, u32* check) {
    RoundingSink<checked, even> sink(r, q);
    int i = 0;
    for (; i + kPair <= n; i += kPair) sink.put(i, source.next(i));
    if (i < n) sink.put(i, source.part(i, n - i));
    if constexpr (checked) sink.check.store_to(check);
}

// What a lane codec does to one block, the block's own scale apart.
class Encoder {
 public:
    explicit Encoder(const EncodeArgs& args)
        : args_(args), limit_(float_below(args.limit)), unit_(static_cast<float>(65536.0 / args.limit)) {
        zero_after(q_, 0);
    }

    void encode(const Block& b, u32 s, u32* words, int count, u32* check) {
        const bool wide = is_wide(b.segment->dtype);
        if (nonfinite_scale(s, wide) || s == 0) {
            __builtin_memset(words, 0, sizeof(u32) * static_cast<u32>(count));
            if (check != nullptr) check[0] = check[1] = 0;
            return skip(b, s);
        }
        const Scale scale = split_scale(s, wide);
        Rounding r{limit_ / scale.mant, args_.limit, args_.shift << 16, noise_of(b)};
        if (wide)
            encode_wide(b, scale, r, check);
        else
            encode_floats(b, scale, r, check);
        if (b.length < kBlock) zero_after(q_, b.length);
        pack(args_.width, q_, count, words);
        if (b.segment->res_out == 0) return;
        if (wide)
            wide_residual(b, scale);
        else
            residual(b, scale);
    }

 private:
    template <class Source>
    void quantise(const Source& source, const Block& b, const Rounding& r, u32* check) {
        if (limit_ == static_cast<double>(args_.limit))
            quantise<true>(source, b, r, check);
        else
            quantise<false>(source, b, r, check);
    }

    template <bool even, class Source>
    void quantise(const Source& source, const Block& b, const Rounding& r, u32* check) {
        if (check != nullptr)
            quantise_block<true, even>(source, b.length, r, q_, check);
        else
            quantise_block<false, even>(source, b.length, r, q_, nullptr);
    }

    // 2^-e goes into the factor where that is exact.
    void encode_floats(const Block& b, Scale scale, Rounding& r, u32* check) {
        const Segment& s = *b.segment;
        const int exponent = static_cast<int>(bits_of(r.factor) >> 23) - scale.e;
        const bool folds = exponent >= 1 && exponent <= 254;
        if (folds) r.factor = float_of(bits_of(r.factor) - (static_cast<u32>(scale.e) << 23));
        if (folds && s.src != 0 && s.res_in == 0 && s.res_out == 0)
            return with_source(s.dtype, block_address(s.src, b),
                               [&](auto source) { quantise(source, b, r, check); });
        block_values(b, x_.at);
        if (folds) return quantise(NearFloats{x_.at}, b, r, check);
        for (int i = 0; i < b.length; i++) scaled_.at[i] = x_.at[i];
        scale_by_power(scaled_.at, b.length, -scale.e);
        quantise(NearFloats{scaled_.at}, b, r, check);
    }

    void encode_wide(const Block& b, Scale scale, const Rounding& r, u32* check) {
        const Segment& s = *b.segment;
        const Power power(-scale.e);
        const double* x = element<const double>(s.src, b.offset);
        if (s.src == 0 || s.res_in != 0 || s.res_out != 0) {
            wide_values(b, wide_.at);
            x = wide_.at;
        }
        quantise(ScaledDoubles{x, power.first, power.second}, b, r, check);
    }

    // What the integers leave over. (float32: the product is at least 2^-31, so one multiplication by 2^e
    // rounds as two do.)
    void residual(const Block& b, Scale scale) {
        float* out = element<float>(b.segment->res_out, b.offset);
        const float unit = scale.mant * unit_, power = pow2(scale.e);
        for (int i = 0; i < b.length; i++)
            out[i] = x_.at[i] - saturate(static_cast<float>(q_.at[i]) * unit * power);
    }

    void wide_residual(const Block& b, Scale scale) {
        double* out = element<double>(b.segment->res_out, b.offset);
        const float unit = scale.mant * unit_;
        const double power = pow2_wide(scale.e);
        for (int i = 0; i < b.length; i++)
            out[i] = wide_.at[i] - saturate(static_cast<double>(static_cast<float>(q_.at[i]) * unit) * power);
    }

    // Residual of a block that sends nothing: all of it if its scale is zero, unchanged if that is not
    // finite.
    void skip(const Block& b, u32 s) {
        const Segment& segment = *b.segment;
        if (segment.res_out == 0) return;
        if (s != 0) return keep_residual(b);
        if (is_wide(segment.dtype)) {
            wide_values(b, wide_.at);
            store_doubles(wide_.at, b.length, element<double>(segment.res_out, b.offset));
        } else {
            block_values(b, x_.at);
            store_floats(DType::float32, x_.at, b.length, element<float>(segment.res_out, b.offset), false);
        }
    }

    const EncodeArgs& args_;
    float limit_, unit_;  // limit_: the largest float32 that is not above the limit
    Integers q_;
    Floats x_, scaled_;
    Doubles wide_;
};

inline void encode(const Batch& batch, const EncodeArgs& args) {
    const FloatEnvironment environment;
    Encoder encoder(args);
    for (Cursor<LaneWords> c(batch, LaneWords(args.width)); c.next();) {
        u32* check = args.check == nullptr ? nullptr : args.check + 2 * (c.index - batch.lo);
        u32* words = args.words.data + (c.word - args.words.base);
        encoder.encode(c.block, args.scales[c.index], words, c.words, check);
    }
}

}  // namespace gccomm::GCCOMM_LEVEL
