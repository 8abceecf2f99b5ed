// One block between the user's memory, in any float dtype, and a buffer in the first-level cache.
#pragma once
#include "cursor.h"
#include "flow.h"

namespace gccomm::GCCOMM_LEVEL {

// Staged values.
struct alignas(kLineBytes) Floats {
    float at[kBlock];
};
struct alignas(kLineBytes) Doubles {
    double at[kBlock];
};

GCCOMM_FN bool is_wide(DType dtype) { return dtype == DType::float64; }

inline int size_of(DType dtype) {
    constexpr u8 sizes[] = {4, 8, 2, 2, 1, 2, 4, 8, 1, 2, 4, 8, 1};
    return sizes[static_cast<int>(dtype)];
}

// Address of element `offset` of the array at `base`; null stays null.
template <class T>
GCCOMM_FN T* element(u64 base, i64 offset) {
    return base == 0 ? nullptr : reinterpret_cast<T*>(base) + offset;
}

inline void* block_address(u64 base, const Block& b) {
    return element<u8>(base, b.offset * size_of(b.segment->dtype));
}

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

// n values of a float dtype other than float64 -> float32.
inline void load_floats(DType dtype, const void* in, int n, float* out) {
    with_source(dtype, in, [&](auto source) { flow(source, FloatSink<Memory::near>{{out}}, n); });
}

inline void load_doubles(const double* in, int n, double* out) {
    int i = 0;
    for (; i + 8 <= n; i += 8) {
        prefetch_second(in + i + kAhead);
        __builtin_memcpy(out + i, in + i, 8 * sizeof(double));
    }
    for (; i < n; i++) out[i] = in[i];
}

// The nearest number that is finite; NaN stays NaN.
inline float saturate(float x) {
    constexpr float top = __FLT_MAX__;
    return x > top ? top : x < -top ? -top : x;
}

inline double saturate(double x) {
    constexpr double top = __DBL_MAX__;
    return x > top ? top : x < -top ? -top : x;
}

// A finite value stays finite; what is inf or NaN stays so.
template <class T>
inline void add_residual(T* values, const T* residual, int n) {
    for (int i = 0; i < n; i++) {
        const T x = values[i], sum = x + residual[i];
        values[i] = x - x == 0 ? saturate(sum) : sum;
    }
}

// x, or x + residual, of a block that is not float64.
inline void block_values(const Block& b, float* out) {
    const Segment& s = *b.segment;
    const float* residual = element<const float>(s.res_in, b.offset);
    if (s.src == 0)
        __builtin_memset(out, 0, sizeof *out * static_cast<u32>(b.length));
    else
        load_floats(s.dtype, block_address(s.src, b), b.length, out);
    if (residual != nullptr) add_residual(out, residual, b.length);
}

// The same of a float64 block.
inline void wide_values(const Block& b, double* out) {
    const Segment& s = *b.segment;
    const double* residual = element<const double>(s.res_in, b.offset);
    if (s.src == 0)
        __builtin_memset(out, 0, sizeof *out * static_cast<u32>(b.length));
    else
        load_doubles(element<const double>(s.src, b.offset), b.length, out);
    if (residual != nullptr) add_residual(out, residual, b.length);
}

// The same, with zeros up to the padded length.
inline void padded_values(const Block& b, float* out) {
    block_values(b, out);
    __builtin_memset(out + b.length, 0, sizeof *out * static_cast<u32>(padded(b.length) - b.length));
}

inline void padded_values(const Block& b, double* out) {
    wide_values(b, out);
    __builtin_memset(out + b.length, 0, sizeof *out * static_cast<u32>(padded(b.length) - b.length));
}

// Rounded to odd, so that rounding the result to 16 bits equals rounding x at once.
inline float to_odd(double x) {
    const float near = static_cast<float>(x);
    const double back = near;
    const u32 above = __builtin_fabs(back) > __builtin_fabs(x) ? 1u : 0u;
    return back == x || x != x ? near : float_of((bits_of(near) - above) | 1u);
}

// float64 values on their way to a narrower dtype.
inline void narrow_doubles(DType dtype, const double* in, int n, float* out) {
    if (dtype == DType::float32)
        for (int i = 0; i < n; i++) out[i] = static_cast<float>(in[i]);
    else
        for (int i = 0; i < n; i++) out[i] = to_odd(in[i]);
}

// Any float block as float64.
inline void values_as_doubles(const Block& b, Floats& staged, Doubles& out) {
    if (is_wide(b.segment->dtype)) return wide_values(b, out.at);
    block_values(b, staged.at);
    for (int i = 0; i < b.length; i++) out.at[i] = staged.at[i];
}

// n float32 values -> a dtype other than float64.
inline void store_floats(DType dtype, const float* in, int n, void* out, bool streaming) {
    with_sink(dtype, out, streaming, [&](auto sink) { flow(NearFloats{in}, sink, n); });
}

inline void store_doubles(const double* in, int n, double* out) {
    __builtin_memcpy(out, in, sizeof(double) * static_cast<u32>(n));
}

// Sets the residual of a block to zero.
inline void clear_residual(const Block& b) {
    const u32 size = is_wide(b.segment->dtype) ? 8 : 4;
    u8* out = element<u8>(b.segment->res_out, b.offset * size);
    if (out != nullptr) __builtin_memset(out, 0, size * static_cast<u32>(b.length));
}

// Leaves the residual of a block as it was, zero if there was none.
inline void keep_residual(const Block& b) {
    const u32 size = is_wide(b.segment->dtype) ? 8 : 4;
    u8* out = element<u8>(b.segment->res_out, b.offset * size);
    const u8* old = element<u8>(b.segment->res_in, b.offset * size);
    if (old == nullptr) return clear_residual(b);
    if (out != nullptr) __builtin_memmove(out, old, size * static_cast<u32>(b.length));
}

}  // namespace gccomm::GCCOMM_LEVEL
