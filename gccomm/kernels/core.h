// The arithmetic that every target shares: noise, scales, rounding, lanes.
//
// Compiled by the host compiler once per instruction-set level, and fit for NVRTC: no headers, 32-bit
// integers, float32, no multiply-add that a compiler might contract. `Ops` names the types F (float), I
// (int), U (unsigned) and the few operations that differ between scalars and vectors. All results are the
// same bits everywhere.
#ifndef GCCOMM_CORE_H
#define GCCOMM_CORE_H

#ifndef GCCOMM_LEVEL
#define GCCOMM_LEVEL device
#endif
#ifdef __CUDACC__
#define GCCOMM_FN __host__ __device__ __forceinline__
#else
#define GCCOMM_FN inline __attribute__((always_inline))
#endif

namespace gccomm {
namespace GCCOMM_LEVEL {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i32 = int;
#ifdef __CUDACC__
using u64 = unsigned long long;
using i64 = long long;
#else
using u64 = __UINT64_TYPE__;
using i64 = __INT64_TYPE__;
#endif

constexpr int kBlock = 1024;          // coordinates in a full block
constexpr int kHalf = kBlock / 2;     // of which pairs so far apart share their noise
constexpr u32 kGolden = 0x9E3779B9u;  // step of the position counter
constexpr u32 kMix1 = 0x7FEB352Du;    // multipliers of a two-round integer mixer
constexpr u32 kMix2 = 0x846CA68Bu;
constexpr u32 kStepSalt0 = 0x243F6A88u;  // first digits of pi
constexpr u32 kStepSalt1 = 0x85A308D3u;
constexpr float kMaxFixed = 2147418112.0f;  // 32767 * 65536: the largest rounded value, exact in float32

GCCOMM_FN float float_of(u32 bits) {
#ifdef __CUDACC__
    return __uint_as_float(bits);
#else
    return __builtin_bit_cast(float, bits);
#endif
}

GCCOMM_FN u32 bits_of(float x) {
#ifdef __CUDACC__
    return __float_as_uint(x);
#else
    return __builtin_bit_cast(u32, x);
#endif
}

GCCOMM_FN double double_of(u64 bits) {
#ifdef __CUDACC__
    return __longlong_as_double(static_cast<i64>(bits));
#else
    return __builtin_bit_cast(double, bits);
#endif
}

GCCOMM_FN int floor_log2(u32 x) {
#ifdef __CUDACC__
    return 31 - __clz(static_cast<int>(x));
#else
    return 31 - __builtin_clz(x);
#endif
}

// ---- noise
// -------------------------------------------------------------------------------------------------

GCCOMM_FN u32 fmix(u32 x) {
    x ^= x >> 16;
    x *= kMix1;
    x ^= x >> 15;
    x *= kMix2;
    return x ^ (x >> 16);
}

struct StepKey {
    u32 t0, t1;
};

// Noise words of one step from a tensor key.
GCCOMM_FN StepKey step_key(u32 a, u32 b, u64 step) {
    const u32 low = static_cast<u32>(step), high = static_cast<u32>(step >> 32);
    return {fmix(a + fmix(low ^ kStepSalt0)), fmix(b ^ fmix(low + high * kGolden + kStepSalt1))};
}

struct BlockKey {
    u32 k0, k1;
};

// Key of one block from the step key of its tensor and its number in the tensor.
GCCOMM_FN BlockKey block_key(u32 t0, u32 t1, u32 block) {
    return {fmix(t0 + block * kGolden), fmix(t1 + fmix(block ^ t0))};
}

// 32 noise bits of a position; `counter` is position * kGolden + k0. U is u32 or a vector of u32. They are
// those of a coordinate of the first half of a block.
template <class U>
GCCOMM_FN U noise(U counter, u32 k1) {
    U x = counter;
    x ^= x >> 16;
    x *= kMix1;
    x = x ^ (x >> 15) ^ k1;
    x *= kMix2;
    return x;
}

// Those of the coordinate half a block behind one with noise x: its upper half, which is dither, is the lower
// half of x.
template <class U>
GCCOMM_FN U later_noise(U x) {
    return (x << 16) | ((x * kMix1) >> 16);
}

// ---- scales
// ------------------------------------------------------------------------------------------------

struct Scale {
    float mant;  // in [1, 2)
    int e;       // the block maximum is mant * 2^e (float64: rounded up to 21 significant bits)
};

GCCOMM_FN bool nonfinite_scale(u32 s, bool wide) { return s >= (wide ? 0x7FF00000u : 0x7F800000u); }

GCCOMM_FN Scale split_scale(u32 s, bool wide) {
    const int mantissa_bits = wide ? 20 : 23;
    const u32 mask = (1u << mantissa_bits) - 1;
    const int widen = 23 - mantissa_bits;
    if (s == 0) return {1.0f, 0};
    if (s > mask) {
        const int e = static_cast<int>(s >> mantissa_bits) - (wide ? 1023 : 127);
        return {float_of(((s & mask) << widen) | 0x3F800000u), e};
    }
    const int top = floor_log2(s);  // subnormal
    const u32 fraction = (s << (mantissa_bits - top)) & mask;
    return {float_of((fraction << widen) | 0x3F800000u), top - (wide ? 1042 : 149)};
}

// The scale word of the largest |x| of float64 numbers, given as its bit pattern.
GCCOMM_FN u32 wide_scale(u64 magnitude) {
    if (magnitude > 0x7FF0000000000000ull) return 0x7FF80000u;
    if (magnitude == 0x7FF0000000000000ull) return 0x7FF00000u;
    const u32 s = static_cast<u32>(magnitude >> 32) + (static_cast<u32>(magnitude) != 0 ? 1u : 0u);
    return s < 0x7FEFFFFFu ? s : 0x7FEFFFFFu;
}

// A finite non-negative float32 times 2^e, -300 <= e <= 300: rounded up, and no further than the largest one.
GCCOMM_FN u32 pattern_times_power(u32 pattern, int e) {
    if (pattern == 0) return 0;
    const int biased = static_cast<int>(pattern >> 23);
    u32 whole = pattern & 0x007FFFFFu;
    if (biased != 0) whole |= 0x00800000u;
    const int shift = 23 - floor_log2(whole);
    whole <<= shift;
    const int place = (biased == 0 ? 1 : biased) - shift + e;
    if (place >= 255) return 0x7F7FFFFFu;
    if (place >= 1) return static_cast<u32>(place) << 23 | (whole & 0x007FFFFFu);
    const int down = 1 - place < 24 ? 1 - place : 24;
    return (whole + (1u << down) - 1) >> down;
}

// 2^k for -149 <= k <= 127, subnormals included.
GCCOMM_FN float pow2(int k) {
    return float_of(k >= -126 ? static_cast<u32>(k + 127) << 23 : 1u << (k + 149));
}

// 2^k for -1074 <= k <= 1023, subnormals included.
GCCOMM_FN double pow2_wide(int k) {
    return double_of(k >= -1022 ? static_cast<u64>(k + 1023) << 52 : 1ull << (k + 1074));
}

// The largest float32 that is not above `limit`.
GCCOMM_FN float float_below(i32 limit) {
    const float nearest = static_cast<float>(limit);
    return static_cast<double>(nearest) > limit ? float_of(bits_of(nearest) - 1) : nearest;
}

// ---- rounding with shared dither
// ---------------------------------------------------------------------------

// The integer of one coordinate: `x * factor` in 16-bit fixed point, clamped, plus dither, floored. `dither`
// is the noise plus the rank's shift << 16; only its upper half counts. `even` promises that the limit is a
// float32: then clamping before rounding is the same as clamping after it, and cheaper.
template <class Ops, bool even>
GCCOMM_FN typename Ops::I quantise(typename Ops::F x, float factor, i32 limit, typename Ops::U dither) {
    typename Ops::I y;
    if constexpr (even)
        y = Ops::round(Ops::clamp(x * factor, static_cast<float>(limit)));
    else
        y = Ops::clamp(Ops::round(Ops::clamp(x * factor, kMaxFixed)), limit);
    return (y + Ops::as_int(dither >> 16)) >> 16;
}

// The same where only some of the integers 0 ... g, the grid points, may come out: `u` is the coordinate in
// 16-bit fixed point, 0 ... g << 16; `low` the grid point below it and `gap` how far the next one is. Less
// (g + 1) / 2.
template <class Ops>
GCCOMM_FN typename Ops::I to_grid(typename Ops::I u, typename Ops::I low, typename Ops::I gap, i32 g,
                                  typename Ops::U dither) {
    const typename Ops::I reached = u - (low << 16) + Ops::as_int(dither >> 16) * gap;
    return low + Ops::at_least(reached, gap << 16, gap) - (g + 1) / 2;
}

struct Centre {
    u32 ranks;   // n mod 2^16, in the upper half as well
    i32 offset;  // 2^14 - gcd(n, 2^16) / 4
};

GCCOMM_FN Centre centre_of(u32 n) {
    const u32 low = n & 0xFFFFu;
    const u32 gcd = low == 0 ? 0x10000u : low & (0u - low);
    return {low, 16384 - static_cast<i32>(gcd >> 2)};
}

// What is added to a decoded sum in units of half a step * 2^-14 to take the shared dither off.
template <class Ops>
GCCOMM_FN typename Ops::I undither(typename Ops::U noise_bits, Centre centre, i32 offset) {
    return (centre.offset + offset) - Ops::as_int(Ops::times_upper(noise_bits, centre.ranks) >> 17);
}

// ---- rotations
// ---------------------------------------------------------------------------------------------

constexpr int kSmallestPart = 64;  // a rotated block is a multiple of it

GCCOMM_FN constexpr int padded(int length) { return (length + kSmallestPart - 1) & -kSmallestPart; }

// Length of the part that begins where `left` coordinates of a padded block are left.
GCCOMM_FN int part_of(int left) { return 1 << floor_log2(static_cast<u32>(left)); }

// Word j of 32 of the signs of rotation 0 or 1, or of a vector of them: `counter` is that of the position
// kBlock + 32 * rotation + j, behind the block's own.
template <class U>
GCCOMM_FN U sign_word(U counter, u32 k1) {
    const U h = noise(counter, k1);
    return h ^ (h >> 16);
}

// After a part of L coordinates is rotated once, each is multiplied by sqrt(L / 1024).
GCCOMM_FN constexpr float part_scale(int length) {
    switch (length) {
        case 512:
            return 0.70710678118654752f;
        case 256:
            return 0.5f;
        case 128:
            return 0.35355339059327376f;
        case 64:
            return 0.25f;
        default:
            return 1.0f;
    }
}

// What it is multiplied by before it is rotated back: 32 / sqrt(L).
GCCOMM_FN constexpr float part_unscale(int length) {
    switch (length) {
        case 512:
            return 1.4142135623730951f;
        case 256:
            return 2.0f;
        case 128:
            return 2.8284271247461903f;
        case 64:
            return 4.0f;
        default:
            return 1.0f;
    }
}

// ---- lanes
// -------------------------------------------------------------------------------------------------

GCCOMM_FN constexpr int lanes_of(int width) { return 32 / width; }

GCCOMM_FN constexpr int words_of(int length, int width) {
    const int lanes = lanes_of(width);
    return (length + lanes - 1) / lanes;
}

// Half a lane in every lane: adding it makes every lane of a word non-negative.
GCCOMM_FN constexpr u32 lane_bias(int width) {
    u32 bias = 0;
    for (int k = 0; k < lanes_of(width); k++) bias |= 1u << (width - 1 + width * k);
    return bias;
}

// Lane k as a signed number, from a word that went through `(word + bias) ^ bias`.
template <class I, class U>
GCCOMM_FN I lane(U unbiased, int k, int width) {
    return ((I)(unbiased << (32 - width * (k + 1)))) >> (32 - width);
}

}  // namespace GCCOMM_LEVEL
}  // namespace gccomm
#endif
