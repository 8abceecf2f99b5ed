// Coordinates between the tensors, in any float dtype, and a thread's registers.
#pragma once
#include "team.cuh"

namespace gccomm {
namespace GCCOMM_LEVEL {

constexpr u32 kInfinity = 0x7F800000u;
constexpr float kLargest = 3.402823466385288598e38f;
constexpr double kLargestDouble = 1.797693134862315708e308;

__device__ inline u64 bits_of(double x) {
#ifdef __CUDACC__
    return static_cast<u64>(__double_as_longlong(x));
#else
    return __builtin_bit_cast(u64, x);
#endif
}

// ---- 16-bit formats: exact, ties to even, NaNs stay NaNs and become quiet

GCCOMM_FN float from_bfloat16(u16 x) { return float_of(static_cast<u32>(x) << 16); }

GCCOMM_FN u16 to_bfloat16(float x) {
    const u32 bits = bits_of(x);
    const u32 nearest = bits + 0x7FFFu + (bits >> 16 & 1u);
    return static_cast<u16>((x != x ? bits | 0x00400000u : nearest) >> 16);
}

GCCOMM_FN float from_float16(u16 x) {
    const u32 shifted = (x & 0x7FFFu) << 13, exponent = shifted & 0x0F800000u;
    const u32 sign = (x & 0x8000u) << 16, normal = shifted + (112u << 23);
    if (exponent == 0x0F800000u) {
        const u32 special = shifted + (224u << 23);
        return float_of((special > kInfinity ? special | 0x00400000u : special) | sign);
    }
    const float tiny = float_of(normal + (1u << 23)) - float_of(113u << 23);
    return float_of((exponent == 0 ? bits_of(tiny) : normal) | sign);
}

GCCOMM_FN u16 to_float16(float x) {
    const u32 bits = bits_of(x) & 0x7FFFFFFFu, sign = bits_of(x) >> 16 & 0x8000u;
    const u32 normal = (bits - (112u << 23) + 0xFFFu + (bits >> 13 & 1u)) >> 13;
    const u32 tiny = bits_of(float_of(bits) + 0.5f) - (126u << 23);  // the addition rounds at 2^-24
    const u32 finite = bits < (113u << 23) ? tiny : normal;
    const u32 infinite = bits >= (143u << 23) ? 0x7C00u : finite;
    const u32 nan = 0x7E00u | (bits >> 13 & 0x3FFu);
    return static_cast<u16>((bits > kInfinity ? nan : infinite) | sign);
}

// float64 rounded to odd, so that rounding the result to 16 bits equals rounding x at once.
GCCOMM_FN float to_odd(double x) {
    const float near = static_cast<float>(x);
    const double back = near;
    const bool above = (back < 0 ? -back : back) > (x < 0 ? -x : x);
    return back == x || x != x ? near : float_of((bits_of(near) - (above ? 1u : 0u)) | 1u);
}

// ---- numbers of the two widths that values are computed in

GCCOMM_FN float saturate(float x) { return x > kLargest ? kLargest : x < -kLargest ? -kLargest : x; }
GCCOMM_FN double saturate(double x) {
    return x > kLargestDouble ? kLargestDouble : x < -kLargestDouble ? -kLargestDouble : x;
}

// x + residual: a finite value stays finite; what is inf or NaN stays so.
template <class Real>
__device__ Real added(Real x, Real residual) {
    const Real sum = x + residual;
    return x - x == 0 ? saturate(sum) : sum;
}

// 2^k in two factors.
template <class Real>
struct Power;
template <>
struct Power<float> {
    float first, second;
    __device__ explicit Power(int k) : first(pow2(k >> 1)), second(pow2(k - (k >> 1))) {}
};
template <>
struct Power<double> {
    double first, second;
    __device__ explicit Power(int k) : first(pow2_wide(k >> 1)), second(pow2_wide(k - (k >> 1))) {}
};

template <class Real>
constexpr bool is_double = sizeof(Real) == 8;

// ---- runs of patterns: eight elements in a row, 16 bytes at a time where they are aligned

template <class Pattern>
__device__ bool in_line(const Pattern* address, int first, int length) {
    return first + kHeld <= length && reinterpret_cast<u64>(address + first) % 16 == 0;
}

__device__ inline u32 part(const uint4& q, int i) { return i == 0 ? q.x : i == 1 ? q.y : i == 2 ? q.z : q.w; }

__device__ inline void unpack_quad(const uint4& q, u16* out) {
    for (int i = 0; i < 8; i++) out[i] = static_cast<u16>(part(q, i / 2) >> 16 * (i % 2));
}
__device__ inline void unpack_quad(const uint4& q, u32* out) {
    for (int i = 0; i < 4; i++) out[i] = part(q, i);
}
__device__ inline void unpack_quad(const uint4& q, u64* out) {
    for (int i = 0; i < 2; i++) out[i] = part(q, 2 * i) | static_cast<u64>(part(q, 2 * i + 1)) << 32;
}
__device__ inline uint4 packed_quad(const u16* x) {
    const auto two = [&](int i) { return x[2 * i] | static_cast<u32>(x[2 * i + 1]) << 16; };
    return uint4{two(0), two(1), two(2), two(3)};
}
__device__ inline uint4 packed_quad(const u32* x) { return uint4{x[0], x[1], x[2], x[3]}; }
__device__ inline uint4 packed_quad(const u64* x) {
    return uint4{static_cast<u32>(x[0]), static_cast<u32>(x[0] >> 32), static_cast<u32>(x[1]),
                 static_cast<u32>(x[1] >> 32)};
}

template <class Pattern>
constexpr int kQuads = static_cast<int>(kHeld * sizeof(Pattern) / 16);

// This thread's run of the array; zeros from `length` on.
template <class Pattern>
__device__ void load_run(const Pattern* from, int length, Pattern (&out)[kHeld]) {
    const int first = Runs::at(0);
    if (in_line(from, first, length)) {
        const uint4* quads = reinterpret_cast<const uint4*>(from + first);
        for (int i = 0; i < kQuads<Pattern>; i++) unpack_quad(quads[i], out + i * (kHeld / kQuads<Pattern>));
        return;
    }
    for (int k = 0; k < kHeld; k++) out[k] = first + k < length ? from[first + k] : Pattern{0};
}

template <class Pattern>
__device__ void store_run(Pattern* to, int length, const Pattern (&x)[kHeld]) {
    const int first = Runs::at(0);
    if (in_line(to, first, length)) {
        uint4* quads = reinterpret_cast<uint4*>(to + first);
        for (int i = 0; i < kQuads<Pattern>; i++) quads[i] = packed_quad(x + i * (kHeld / kQuads<Pattern>));
        return;
    }
    for (int k = 0; k < kHeld; k++)
        if (first + k < length) to[first + k] = x[k];
}

// ---- what is done with a value of a format: `pattern` <-> number

template <class Real>
struct Plain;
template <>
struct Plain<float> {
    using Pattern = u32;
    static __device__ float read(u32 x) { return float_of(x); }
    static __device__ u32 write(float x) { return bits_of(x); }
};
template <>
struct Plain<double> {
    using Pattern = u64;
    static __device__ double read(u64 x) { return double_of(x); }
    static __device__ u64 write(double x) { return bits_of(x); }
    static __device__ u64 write(float x) { return bits_of(static_cast<double>(x)); }
};
struct Single : Plain<float> {
    using Plain<float>::write;
    static __device__ u32 write(double x) { return bits_of(static_cast<float>(x)); }
};
struct Half {
    using Pattern = u16;
    static __device__ float read(u16 x) { return from_float16(x); }
    static __device__ u16 write(float x) { return to_float16(x); }
    static __device__ u16 write(double x) { return to_float16(to_odd(x)); }
};
struct BrainHalf {
    using Pattern = u16;
    static __device__ float read(u16 x) { return from_bfloat16(x); }
    static __device__ u16 write(float x) { return to_bfloat16(x); }
    static __device__ u16 write(double x) { return to_bfloat16(to_odd(x)); }
};

// Calls f with the format of a float dtype.
template <class Function>
__device__ void with_format(DType dtype, Function f) {
    if (dtype == DType::float32) return f(Single{});
    if (dtype == DType::float16) return f(Half{});
    if (dtype == DType::bfloat16) return f(BrainHalf{});
    f(Plain<double>{});
}

// The format of a block that is computed in `Real`: float64 in double, all others in float.
template <class Real, class Function>
__device__ void with_format_of(DType dtype, Function f) {
    if constexpr (is_double<Real>)
        f(Plain<double>{});
    else if (dtype == DType::float32)
        f(Single{});
    else if (dtype == DType::float16)
        f(Half{});
    else
        f(BrainHalf{});
}

// ---- coordinates of a block

// x, or x + residual, of this thread's run; zeros beyond the block.
template <class Real>
__device__ void load_values(const Block& b, Real (&v)[kHeld]) {
    const Segment& s = *b.segment;
    for (int k = 0; k < kHeld; k++) v[k] = 0;
    if (s.src != 0)
        with_format_of<Real>(s.dtype, [&](auto format) {
            typename decltype(format)::Pattern x[kHeld];
            load_run(element<const typename decltype(format)::Pattern>(s.src, b.offset), b.length, x);
            for (int k = 0; k < kHeld; k++) v[k] = format.read(x[k]);
        });
    if (s.res_in == 0) return;
    using Bits = typename Plain<Real>::Pattern;
    Bits rest[kHeld];
    load_run(element<const Bits>(s.res_in, b.offset), b.length, rest);
    for (int k = 0; k < kHeld; k++) v[k] = added(v[k], Plain<Real>::read(rest[k]));
}

// The same of coordinate i.
template <class Real>
__device__ Real load_value(const Block& b, int i) {
    const Segment& s = *b.segment;
    Real v = 0;
    if (s.src != 0)
        with_format_of<Real>(s.dtype, [&](auto format) {
            v = format.read(element<const typename decltype(format)::Pattern>(s.src, b.offset)[i]);
        });
    return s.res_in == 0 ? v : added(v, element<const Real>(s.res_in, b.offset)[i]);
}

// Stores this thread's values as the result: runs, or columns.
template <class Places, class Real>
__device__ void store_values(const Block& b, const Real (&v)[kHeld]) {
    const Segment& s = *b.segment;
    with_format_of<Real>(s.dtype, [&](auto format) {
        using Pattern = typename decltype(format)::Pattern;
        Pattern* out = element<Pattern>(s.dst, b.offset);
        if constexpr (Places::in_runs) {
            Pattern x[kHeld];
            for (int k = 0; k < kHeld; k++) x[k] = format.write(v[k]);
            store_run(out, b.length, x);
        } else {
            for (int k = 0; k < kHeld; k++)
                if (Places::at(k) < b.length) out[Places::at(k)] = format.write(v[k]);
        }
    });
}

// Sets the residual of a block to zero.
template <class Real>
__device__ void clear_residual(const Block& b) {
    Real* out = element<Real>(b.segment->res_out, b.offset);
    if (out == nullptr) return;
    for (int i = thread(); i < b.length; i += kThreads) out[i] = 0;
}

// Leaves the residual of a block as it was, zero if there was none.
template <class Real>
__device__ void keep_residual(const Block& b) {
    const Real* old = element<const Real>(b.segment->res_in, b.offset);
    Real* out = element<Real>(b.segment->res_out, b.offset);
    if (old == nullptr) return clear_residual<Real>(b);
    if (out == nullptr) return;
    for (int i = thread(); i < b.length; i += kThreads) out[i] = old[i];
}

// The largest scale word of this thread's values.
__device__ inline u32 largest_word(const float (&v)[kHeld]) {
    u32 most = 0;
    for (int k = 0; k < kHeld; k++) most = Larger{}(most, bits_of(v[k]) & 0x7FFFFFFFu);
    return most;
}
__device__ inline u32 largest_word(const double (&v)[kHeld]) {
    u32 most = 0;
    for (int k = 0; k < kHeld; k++) most = Larger{}(most, wide_scale(bits_of(v[k]) & 0x7FFFFFFFFFFFFFFFull));
    return most;
}

}  // namespace GCCOMM_LEVEL
}  // namespace gccomm
