// Conversions between float32 and the 16-bit formats, a vector at a time; exact, ties to even, NaNs quieted.
#pragma once
#include "simd.h"

namespace gccomm::GCCOMM_LEVEL {

GCCOMM_FN U widen(U16 x) { return __builtin_convertvector(x, U); }

// Lanes must be below 2^16. (Named instructions: compilers make long shuffles of the plain conversion.)
GCCOMM_FN U16 narrow(U x) {
#if defined(__AVX512F__)
    return (U16)_mm512_cvtepi32_epi16((__m512i)x);
#elif defined(__AVX2__)
    const __m256i v = (__m256i)x;
    return (U16)_mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
#elif defined(__SSE4_1__)
    const __m128i packed = _mm_packus_epi32((__m128i)x, (__m128i)x);
    return load<U16>(&packed);
#else
    return __builtin_convertvector(x, U16);
#endif
}

struct BFloat16 {
    static GCCOMM_FN F to_float(U16 x) { return (F)(widen(x) << 16); }
    static GCCOMM_FN U16 from_float(F x) {
        const U bits = (U)x;
        const U rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
        return narrow(select(x != x, bits >> 16 | 0x0040u, rounded));
    }
};

// IEEE half precision in integer arithmetic.
struct PortableFloat16 {
    static GCCOMM_FN F to_float(U16 x) {
        const U half = widen(x);
        const U shifted = (half & 0x7FFFu) << 13;
        const U exponent = shifted & 0x0F800000u;
        const U normal = shifted + (112u << 23);
        const U special = shifted + (224u << 23);
        const U quiet = select((I)special > 0x7F800000, special | 0x00400000u, special);
        const U tiny = (U)((F)(normal + (1u << 23)) - float_of(113u << 23));
        const U finite = select((I)exponent == 0, tiny, normal);
        return (F)(select((I)exponent == 0x0F800000, quiet, finite) | (half & 0x8000u) << 16);
    }
    static GCCOMM_FN U16 from_float(F x) {
        const U bits = (U)x & 0x7FFFFFFFu;
        const U sign = ((U)x >> 16) & 0x8000u;
        const U normal = (bits - (112u << 23) + 0xFFFu + ((bits >> 13) & 1u)) >> 13;
        const U tiny = (U)((F)bits + 0.5f) - (126u << 23);  // the addition rounds at 2^-24
        const U finite = select((I)bits < (113 << 23), tiny, normal);
        const U infinite = select((I)bits >= (143 << 23), U{} + 0x7C00u, finite);
        const U nan = 0x7E00u | ((bits >> 13) & 0x3FFu);
        return narrow(select((I)bits > 0x7F800000, nan, infinite) | sign);
    }
};

#if defined(__AVX512F__)
struct Float16 {
    static GCCOMM_FN F to_float(U16 x) { return (F)_mm512_cvtph_ps((__m256i)x); }
    static GCCOMM_FN U16 from_float(F x) { return (U16)_mm512_cvtps_ph((__m512)x, 0); }
};
#elif defined(__F16C__)
struct Float16 {
    static GCCOMM_FN F to_float(U16 x) { return (F)_mm256_cvtph_ps((__m128i)x); }
    static GCCOMM_FN U16 from_float(F x) { return (U16)_mm256_cvtps_ph((__m256)x, 0); }
};
#else
using Float16 = PortableFloat16;
#endif

// One half as a float32, for the maximum of a block.
template <class Half>
GCCOMM_FN float half_to_float(u16 x) {
    U16 v{};
    v[0] = x;
    return Half::to_float(v)[0];
}

// n halves -> floats, zero padded to whole lines; prefetches `ahead` halves on.
template <class Half>
inline void halves_to_floats(const u16* in, int n, float* out, int ahead = 0) {
    int i = 0;
    for (; i + kLine <= n; i += kLine) {
        prefetch(in + i + ahead);
        for (int j = i; j < i + kLine; j += kLanes) store(out + j, Half::to_float(load<U16>(in + j)));
    }
    if (i == n) return;
    u16 last[kLine] = {};
    __builtin_memcpy(last, in + i, sizeof(u16) * static_cast<u32>(n - i));
    for (int j = 0; j < kLine; j += kLanes) store(out + i + j, Half::to_float(load<U16>(last + j)));
}

// n floats -> halves; `in` must be readable to a whole line.
template <class Half>
inline void floats_to_halves(const float* in, int n, u16* out) {
    int i = 0;
    for (; i + kLine <= n; i += kLine)
        for (int j = i; j < i + kLine; j += kLanes) store(out + j, Half::from_float(load<F>(in + j)));
    if (i == n) return;
    u16 last[kLine];
    for (int j = 0; j < kLine; j += kLanes) store(last + j, Half::from_float(load<F>(in + i + j)));
    __builtin_memcpy(out + i, last, sizeof(u16) * static_cast<u32>(n - i));
}

// inout += in, elementwise in float32: the body of an MPI reduction.
template <class Half>
inline void add_halves(void* in, void* inout, int* length, void*) {
    const FloatEnvironment environment;
    const u16* a = static_cast<const u16*>(in);
    u16* b = static_cast<u16*>(inout);
    int i = 0;
    for (; i + kLanes <= *length; i += kLanes) {
        const F sum = Half::to_float(load<U16>(b + i)) + Half::to_float(load<U16>(a + i));
        store(b + i, Half::from_float(sum));
    }
    for (; i < *length; i++) {
        U16 x{}, y{};
        x[0] = a[i];
        y[0] = b[i];
        b[i] = Half::from_float(Half::to_float(y) + Half::to_float(x))[0];
    }
}

}  // namespace gccomm::GCCOMM_LEVEL
