// Conversions between float32 and the 16-bit formats; exact, ties to even, NaNs stay NaNs and become quiet.
#pragma once
#include "simd.h"

namespace gccomm::GCCOMM_LEVEL {

struct BFloat16 {
    static GCCOMM_FN F to_float(U16 x) { return (F)(widen(x) << 16); }
    static GCCOMM_FN W16 from_floats(Pair x) { return upper_halves(rounded(x.low), rounded(x.high)); }

 private:
    static GCCOMM_FN U rounded(F x) {
        const U bits = (U)x;
        const U nearest = bits + 0x7FFFu + ((bits >> 16) & 1u);
        return select(x != x, bits | 0x00400000u, nearest);
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
    static GCCOMM_FN W16 from_floats(Pair x) { return narrow(rounded(x.low), rounded(x.high)); }

 private:
    static GCCOMM_FN U rounded(F x) {
        const U bits = (U)x & 0x7FFFFFFFu;
        const U sign = ((U)x >> 16) & 0x8000u;
        const U normal = (bits - (112u << 23) + 0xFFFu + ((bits >> 13) & 1u)) >> 13;
        const U tiny = (U)((F)bits + 0.5f) - (126u << 23);  // the addition rounds at 2^-24
        const U finite = select((I)bits < (113 << 23), tiny, normal);
        const U infinite = select((I)bits >= (143 << 23), U{} + 0x7C00u, finite);
        const U nan = 0x7E00u | ((bits >> 13) & 0x3FFu);
        return select((I)bits > 0x7F800000, nan, infinite) | sign;
    }
};

#if GCCOMM_SIMD == 512
struct Float16 {
    static GCCOMM_FN F to_float(U16 x) { return (F)_mm512_cvtph_ps((__m256i)x); }
    static GCCOMM_FN W16 from_floats(Pair x) {
        const __m512i low = _mm512_castsi256_si512(_mm512_cvtps_ph((__m512)x.low, 0));
        return (W16)_mm512_inserti64x4(low, _mm512_cvtps_ph((__m512)x.high, 0), 1);
    }
};
#elif GCCOMM_SIMD == 256
struct Float16 {
    static GCCOMM_FN F to_float(U16 x) { return (F)_mm256_cvtph_ps((__m128i)x); }
    static GCCOMM_FN W16 from_floats(Pair x) {
        return (W16)_mm256_set_m128i(_mm256_cvtps_ph((__m256)x.high, 0), _mm256_cvtps_ph((__m256)x.low, 0));
    }
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

}  // namespace gccomm::GCCOMM_LEVEL
