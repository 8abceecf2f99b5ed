// Lane codecs, forward: scale, round with shared dither, pack; residuals and check words on the way.
#pragma once
#include "lanes.h"
#include "maxima.h"

namespace gccomm::GCCOMM_LEVEL {

// x * 2^k in two exact steps, so that no factor leaves the range of the type.
template <class T>
GCCOMM_FN void scale_by_power(T* x, int n, int k) {
    T first, second;
    if constexpr (sizeof(T) == 8) {
        first = pow2_wide(k >> 1);
        second = pow2_wide(k - (k >> 1));
    } else {
        first = pow2(k >> 1);
        second = pow2(k - (k >> 1));
    }
    for (int i = 0; i < n; i++) x[i] = x[i] * first * second;
}

struct BlockNoise {
    BlockKey key;
    GCCOMM_FN U start() const { return iota() * kGolden + key.k0; }
    static constexpr u32 step = static_cast<u32>(kLanes) * kGolden;
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

// n values -> integers, whole lines at a time.
template <bool checked>
inline void quantise_block(Values v, int n, const Rounding& r, Integers& q, u32* check) {
    U counter = r.noise.start();
    Check sums;
    for (int i = 0; i < n; i += kLine) {
        prefetch(v.ahead + i);
        for (int j = i; j < i + kLine; j += kLanes) {
            const U h = noise(counter, r.noise.key.k1);
            const I y = quantise<VectorOps>(load<F>(v.data + j), r.factor, r.limit, h + r.shift);
            store(q.at + j, y);
            if constexpr (checked) sums.add(y, h);
            counter += BlockNoise::step;
        }
    }
    if constexpr (checked) sums.store_to(check);
}

// What a lane codec does to one block, the block's own scale apart.
class Encoder {
   public:
    explicit Encoder(const EncodeArgs& args)
        : args_(args),
          limit_(float_below(args.limit)),
          unit_(static_cast<float>(65536.0 / args.limit)) {
        zero_after(q_, 0);
    }

    void encode(const Block& b, u32 s, u32* words, u32* check) {
        const bool wide = is_wide(b.segment->dtype);
        const int count = words_of(b.length, args_.width);
        if (nonfinite_scale(s, wide) || s == 0) {
            __builtin_memset(words, 0, sizeof(u32) * static_cast<u32>(count));
            if (check != nullptr) check[0] = check[1] = 0;
            skip(b, s);
            return;
        }
        const Scale scale = split_scale(s, wide);
        Rounding r{limit_ / scale.mant, args_.limit, args_.shift << 16, noise_of(b)};
        const Values v = wide ? scaled_wide(b, scale) : scaled(b, scale, r);
        if (check != nullptr)
            quantise_block<true>(v, b.length, r, q_, check);
        else
            quantise_block<false>(v, b.length, r, q_, nullptr);
        if (b.length < kBlock) zero_after(q_, b.length);
        pack(args_.width, q_, count, words);
        if (b.segment->res_out != 0) wide ? wide_residual(b, scale) : residual(b, scale);
    }

   private:
    // Values that quantise_block multiplies by r.factor; 2^-e goes into the factor where that is exact.
    Values scaled(const Block& b, Scale scale, Rounding& r) {
        const Values v = block_values(b, x_);
        v_ = v.data;
        const int exponent = static_cast<int>(bits_of(r.factor) >> 23) - scale.e;
        if (exponent >= 1 && exponent <= 254) {
            r.factor = float_of(bits_of(r.factor) - (static_cast<u32>(scale.e) << 23));
            return v;
        }
        const int n = whole_lines(b.length);
        for (int i = 0; i < n; i++) scaled_.at[i] = v.data[i];
        scale_by_power(scaled_.at, n, -scale.e);
        return {scaled_.at, scaled_.at};
    }

    Values scaled_wide(const Block& b, Scale scale) {
        wide_values(b, wide_);
        const int n = whole_lines(b.length), k = -scale.e;
        const double first = pow2_wide(k >> 1), second = pow2_wide(k - (k >> 1));
        for (int i = 0; i < n; i++) scaled_.at[i] = static_cast<float>(wide_.at[i] * first * second);
        return {scaled_.at, scaled_.at};
    }

    // What the integers leave over. (float32: the product is at least 2^-31, so one multiplication by 2^e rounds
    // as two do.)
    void residual(const Block& b, Scale scale) {
        float* out = element<float>(b.segment->res_out, b.offset);
        const float unit = scale.mant * unit_, power = pow2(scale.e);
        for (int i = 0; i < b.length; i++) out[i] = v_[i] - static_cast<float>(q_.at[i]) * unit * power;
    }

    void wide_residual(const Block& b, Scale scale) {
        double* out = element<double>(b.segment->res_out, b.offset);
        const float unit = scale.mant * unit_;
        const double power = pow2_wide(scale.e);
        for (int i = 0; i < b.length; i++)
            out[i] = wide_.at[i] - static_cast<double>(static_cast<float>(q_.at[i]) * unit) * power;
    }

    // Residual of a block that sends nothing: all of it if its scale is zero, unchanged if that is not finite.
    void skip(const Block& b, u32 s) {
        const Segment& segment = *b.segment;
        if (segment.res_out == 0) return;
        if (s != 0) return keep_residual(b);
        if (is_wide(segment.dtype)) {
            wide_values(b, wide_);
            store_doubles(wide_.at, b.length, element<double>(segment.res_out, b.offset), false);
        } else {
            const float* v = block_values(b, x_).data;
            store_floats(DType::float32, v, b.length, element<float>(segment.res_out, b.offset), false);
        }
    }

    const EncodeArgs& args_;
    float limit_, unit_;
    const float* v_ = nullptr;  // of the current block, unless float64
    Integers q_;
    Floats x_, scaled_;
    Doubles wide_;
};

inline void encode(const Batch& batch, const EncodeArgs& args) {
    const FloatEnvironment environment;
    Encoder encoder(args);
    for (Cursor<LaneWords> c(batch, {args.width}); c.next();) {
        u32* check = args.check == nullptr ? nullptr : args.check + 2 * (c.index - batch.lo);
        encoder.encode(c.block, args.scales[c.index], args.words.data + (c.word - args.words.base), check);
    }
}

}  // namespace gccomm::GCCOMM_LEVEL
