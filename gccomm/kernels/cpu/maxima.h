// The largest magnitude of each block, as a scale word.
#pragma once
#include "blocks.h"

namespace gccomm::GCCOMM_LEVEL {

// Largest pattern without its sign bit, of n signed integers of type T in vectors V. Integers order the
// patterns of floats as the floats, with inf and NaN on top.
template <class V, class T>
inline T largest_pattern(const T* x, int n) {
    constexpr int step = kVectorBytes / static_cast<int>(sizeof(T));
    constexpr T mask = static_cast<T>(~(T{1} << (8 * sizeof(T) - 1)));
    V high[2] = {};
    int i = 0;
    for (; i + 2 * step <= n; i += 2 * step) {
        prefetch_second(x + i + kAhead);
        prefetch_second(x + i + step + kAhead);
        for (int k = 0; k < 2; k++) {
            const V v = load<V>(x + i + k * step) & mask;
            high[k] = v > high[k] ? v : high[k];
        }
    }
    high[0] = high[1] > high[0] ? high[1] : high[0];
    T top = 0;
    for (int k = 0; k < step; k++) top = high[0][k] > top ? high[0][k] : top;
    for (; i < n; i++) {
        const T v = load<T>(x + i) & mask;
        top = v > top ? v : top;
    }
    return top;
}

inline u32 largest_half(const void* x, int n) {
    return static_cast<u32>(largest_pattern<I16>(static_cast<const short*>(x), n));
}

inline u32 largest_float(const void* x, int n) {
    return static_cast<u32>(largest_pattern<I>(static_cast<const i32*>(x), n));
}

inline u64 largest_double(const void* x, int n) {
    return static_cast<u64>(largest_pattern<I64>(static_cast<const i64*>(x), n));
}

// Scale word of what lies in memory.
inline u32 plain_maximum(DType dtype, const void* x, int n) {
    switch (dtype) {
        case DType::float64:
            return wide_scale(largest_double(x, n));
        case DType::bfloat16:
            return largest_half(x, n) << 16;
        case DType::float16:
            return bits_of(half_to_float<Float16>(static_cast<u16>(largest_half(x, n))));
        default:
            return largest_float(x, n);
    }
}

// Scale word of x, or of x + residual.
inline u32 block_maximum(const Block& b) {
    const Segment& s = *b.segment;
    if (s.src != 0 && s.res_in == 0) return plain_maximum(s.dtype, block_address(s.src, b), b.length);
    if (is_wide(s.dtype)) {
        Doubles staged;
        wide_values(b, staged.at);
        return plain_maximum(DType::float64, staged.at, b.length);
    }
    Floats staged;
    block_values(b, staged.at);
    return plain_maximum(DType::float32, staged.at, b.length);
}

inline bool nonfinite(const Batch& batch) {
    const FloatEnvironment environment;
    for (Cursor<NoWords> c(batch, {}); c.next();)
        if (nonfinite_scale(block_maximum(c.block), is_wide(c.block.segment->dtype))) return true;
    return false;
}

}  // namespace gccomm::GCCOMM_LEVEL
