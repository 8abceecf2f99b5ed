// The largest magnitude of each block, as a scale word.
#pragma once
#include "blocks.h"

namespace gccomm::GCCOMM_LEVEL {

// Largest pattern of |x|; integers order the patterns as floats, with inf and NaN on top.
inline u32 largest_float(Values v, int n) {
    I high[2] = {};
    int i = 0;
    for (; i + 2 * kLine <= n; i += 2 * kLine) {
        prefetch(v.ahead + i);
        prefetch(v.ahead + i + kLine);
        for (int j = i; j < i + 2 * kLine; j += 2 * kLanes)
            for (int k = 0; k < 2; k++) high[k] = larger(high[k], load<I>(v.data + j + k * kLanes) & 0x7FFFFFFF);
    }
    for (; i < n; i += kLanes) high[0] = larger(high[0], load<I>(v.data + i) & 0x7FFFFFFF);
    high[0] = larger(high[0], high[1]);
    i32 top = 0;
    for (int k = 0; k < kLanes; k++) top = high[0][k] > top ? high[0][k] : top;
    return static_cast<u32>(top);
}

// Largest pattern without its sign bit, of n integers of type T in vectors V.
template <class V, class T>
inline T largest_pattern(const T* x, int n) {
    constexpr int step = kVectorBytes / static_cast<int>(sizeof(T));
    constexpr T mask = static_cast<T>(~(T{1} << (8 * sizeof(T) - 1)));
    V high[2] = {};
    int i = 0;
    for (; i + 2 * step <= n; i += 2 * step) {
        prefetch(x + i + kAhead);
        prefetch(x + i + step + kAhead);
        for (int k = 0; k < 2; k++) {
            const V v = load<V>(x + i + k * step) & mask;
            high[k] = v > high[k] ? v : high[k];
        }
    }
    high[0] = high[1] > high[0] ? high[1] : high[0];
    T top = 0;
    for (int k = 0; k < step; k++) top = high[0][k] > top ? high[0][k] : top;
    for (; i < n; i++) {
        const T v = x[i] & mask;
        top = v > top ? v : top;
    }
    return top;
}

inline u32 largest_half(const u16* x, int n) {
    return static_cast<u32>(largest_pattern<I16>(reinterpret_cast<const short*>(x), n));
}

inline u64 largest_double(const double* x, int n) {
    return static_cast<u64>(largest_pattern<I64>(reinterpret_cast<const i64*>(x), n));
}

// Scale word of x, or of x + residual.
inline u32 block_maximum(const Block& b) {
    const Segment& s = *b.segment;
    const bool plain = s.src != 0 && s.res_in == 0;
    if (s.dtype == DType::float64) {
        if (plain) return wide_scale(largest_double(element<const double>(s.src, b.offset), b.length));
        Doubles buffer;
        wide_values(b, buffer);
        return wide_scale(largest_double(buffer.at, b.length));
    }
    if (plain && s.dtype == DType::bfloat16) return largest_half(element<const u16>(s.src, b.offset), b.length) << 16;
    if (plain && s.dtype == DType::float16) {
        const u32 top = largest_half(element<const u16>(s.src, b.offset), b.length);
        return bits_of(half_to_float<Float16>(static_cast<u16>(top)));
    }
    Floats buffer;
    return largest_float(block_values(b, buffer), b.length);
}

inline void maxima(const Batch& batch, u32* out) {
    const FloatEnvironment environment;
    for (Cursor<NoWords> c(batch, {}); c.next();) out[c.index - batch.lo] = block_maximum(c.block);
}

inline bool nonfinite(const Batch& batch) {
    const FloatEnvironment environment;
    for (Cursor<NoWords> c(batch, {}); c.next();)
        if (nonfinite_scale(block_maximum(c.block), is_wide(c.block.segment->dtype))) return true;
    return false;
}

}  // namespace gccomm::GCCOMM_LEVEL
