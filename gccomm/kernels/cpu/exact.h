// Small tensors: two words a coordinate, exact to 2^-61 of the block's maximum or so.
#pragma once
#include "encode.h"

namespace gccomm::GCCOMM_LEVEL {

inline int ceil_log2(i64 n) {
    int bits = 0;
    while ((i64{1} << bits) < n) bits++;
    return bits;
}

class Exact {
 public:
    explicit Exact(const ExactArgs& args) : args_(args), spare_(ceil_log2(args.n)) {}

    void encode(const Block& b, u32 s, u32* words) {
        const Segment& segment = *b.segment;
        const bool wide = is_wide(segment.dtype);
        i32* high = reinterpret_cast<i32*>(words);
        i32* low = high + b.length;
        if (s == 0 || nonfinite_scale(s, wide)) {
            __builtin_memset(words, 0, 2 * sizeof(u32) * static_cast<u32>(b.length));
            return s == 0 ? clear_residual(b) : keep_residual(b);
        }
        values_as_doubles(b, staged_, x_);
        scale_by_power(x_.at, b.length, 30 - spare_ - (split_scale(s, wide).e + 1));
        const double unit = pow2_wide(31 - spare_);
        for (int i = 0; i < b.length; i++) {
            const double whole = __builtin_rint(x_.at[i]);
            high[i] = static_cast<i32>(whole);
            low[i] = static_cast<i32>(__builtin_rint((x_.at[i] - whole) * unit));
        }
        clear_residual(b);
    }

    void decode(const Block& b, u32 s, const u32* words) {
        const Segment& segment = *b.segment;
        if (segment.dst == 0) return;
        const bool wide = is_wide(segment.dtype);
        const i32* high = reinterpret_cast<const i32*>(words);
        sum(high, high + b.length, b.length, s, wide);
        if (wide) return store_doubles(x_.at, b.length, element<double>(segment.dst, b.offset));
        narrow_doubles(segment.dtype, x_.at, b.length, staged_.at);
        store_floats(segment.dtype, staged_.at, b.length, block_address(segment.dst, b), false);
    }

 private:
    void sum(const i32* high, const i32* low, int n, u32 s, bool wide) {
        if (s == 0 || nonfinite_scale(s, wide)) {
            const double fill = s == 0 ? 0.0 : double_of(0x7FF8000000000000ull);
            for (int i = 0; i < n; i++) x_.at[i] = fill;
            return;
        }
        const double unit = pow2_wide(spare_ - 31);
        for (int i = 0; i < n; i++) x_.at[i] = high[i] + low[i] * unit;
        if (args_.mean) {  // before the scaling: the mean of 1e308 is 1e308
            const double ranks = static_cast<double>(args_.n);
            for (int i = 0; i < n; i++) x_.at[i] /= ranks;
        }
        scale_by_power(x_.at, n, split_scale(s, wide).e + 1 + spare_ - 30);
    }

    const ExactArgs& args_;
    int spare_;  // bits left free for the sum over ranks
    Floats staged_;
    Doubles x_;
};

inline void exact_encode(const Batch& batch, const ExactArgs& args) {
    const FloatEnvironment environment;
    Exact exact(args);
    for (Cursor<ExactWords> c(batch, {}); c.next();)
        exact.encode(c.block, args.scales[c.index], args.words.data + (c.word - args.words.base));
}

inline void exact_decode(const Batch& batch, const ExactArgs& args) {
    const FloatEnvironment environment;
    Exact exact(args);
    for (Cursor<ExactWords> c(batch, {}); c.next();)
        exact.decode(c.block, args.scales[c.index], args.words.data + (c.word - args.words.base));
}

}  // namespace gccomm::GCCOMM_LEVEL
