// The reductions of words that are no sums, and the exponent format: four bytes a word, each 0 for zero or
// sign << 7 | e for +-2^-e.
#pragma once
#include "simd.h"
#include "table.h"

namespace gccomm::GCCOMM_LEVEL {

typedef u8 B __attribute__((vector_size(kVectorBytes)));
typedef u8 Codes __attribute__((vector_size(kLanes)));  // as many lanes as U

// out[i] = op(a[i], b[i], i) in vectors of words; `op` gets the number of the first word. `out` may be `a` or
// `b`.
template <class Op>
GCCOMM_FN void each_pair(const WordPair& pair, Op op) {
    i64 i = 0;
    for (; i + kLanes <= pair.count; i += kLanes)
        store(pair.out + i, op(load<U>(pair.a + i), load<U>(pair.b + i), i));
    if (i == pair.count) return;
    const unsigned long rest = static_cast<unsigned long>(pair.count - i) * sizeof(u32);
    U a{}, b{};
    __builtin_memcpy(&a, pair.a + i, rest);
    __builtin_memcpy(&b, pair.b + i, rest);
    const U sum = op(a, b, i);
    __builtin_memcpy(pair.out + i, &sum, rest);
}

// ---- saturating lanes

template <int width>
GCCOMM_FN U add_saturating(U a, U b) {
    constexpr u32 sign = lane_bias(width);    // the top bit of every lane
    constexpr u32 one = sign >> (width - 1);  // the lowest bit
    constexpr u32 low = sign - one;           // all bits but the top one: the largest number
    // Fields in two's complement, nothing above the lanes.
    const U x = ((a + sign) ^ sign) & (sign | low);
    const U y = ((b + sign) ^ sign) & (sign | low);
    const U sum = ((x & low) + (y & low)) ^ ((x ^ y) & sign);  // no carry leaves a lane
    const U over = ~(x ^ y) & (x ^ sum) & sign;                // operands of one sign, a sum of the other
    const U whole = over | (over - (over >> (width - 1)));
    const U bound = (((x & sign) >> (width - 1)) << 1) + low;  // largest, or smallest number of the range
    const U kept = (sum & ~whole) | (bound & whole);
    const U lowest = kept & ~((kept & low) + low) & sign;  // lanes that hold -2^(width - 1)
    return ((kept | (lowest >> (width - 1))) ^ sign) - sign;
}

template <int width>
void add_lanes(const WordPair& pair) {
    each_pair(pair, [](U a, U b, i64) { return add_saturating<width>(a, b); });
}

inline void saturating_add(const WordPair& pair, int width) {
    switch (width) {
        case 2:
            return add_lanes<2>(pair);
        case 3:
            return add_lanes<3>(pair);
        case 4:
            return add_lanes<4>(pair);
        case 5:
            return add_lanes<5>(pair);
        case 6:
            return add_lanes<6>(pair);
        case 8:
            return add_lanes<8>(pair);
        case 10:
            return add_lanes<10>(pair);
        default:
            return add_lanes<16>(pair);
    }
}

// ---- exponents

// 127 + floor(log2(x >> 1)), or 0 for x < 2; and so many of them are the leading zeros of 126, at most 31.
GCCOMM_FN U scaled_log2(U x) {
    // A bit pattern 10... cannot round up to the next power of two, in any rounding mode.
    const U safe = (x >> 1) & ~(x >> 2);
    return (U) __builtin_convertvector((I)safe, F) >> 23;
}

// min(leading zeros, 31) of the noise of the four bytes of each word, as bytes. `counter` is that of byte 0.
GCCOMM_FN B zero_runs(U counter, u32 k1) {
    U packed{};
    for (int k = 0; k < 4; k++) {
        const U bits = noise(counter + static_cast<u32>(k) * kGolden, k1);
#if defined(__AVX512CD__) && GCCOMM_SIMD == 512
        packed |= (U)_mm512_lzcnt_epi32((__m512i)(bits | 1u)) << (8 * k);
#else
        packed |= scaled_log2(bits) << (8 * k);
#endif
    }
#if defined(__AVX512CD__) && GCCOMM_SIMD == 512
    return (B)packed;
#else
    const B zeros = 157 - (B)packed;
    return zeros < 31 ? zeros : B{} + u8{31};
#endif
}

GCCOMM_FN B add_exponents(B a, B b, B zeros) {
    const B ones = B{} + u8{1};
    // The number of halvings from 1/2; zero becomes 255, which is smaller than any by more than 31 of them.
    const B m = (a & u8{127}) - ones, other = (b & u8{127}) - ones;
    const B first = (B)(m <= other);
    const B top = first ? m : other;
    const B distance = (first ? other : m) - top;
    const B sign = (first ? a : b) & u8{128};
    const B opposite = (B)((a ^ b) > u8{127});  // all ones, that is -1
    const B moved = (B)(zeros >= distance + opposite);
    const B down = top - (moved & opposite);  // one more halving
    const B up = down + (moved & ~opposite & (B)(top != u8{0}));
    const B vanished = (B)(top == u8{255}) | (opposite & (B)(distance == u8{0}));
    return ((up + ones) | sign) & ~vanished;
}

inline void exponent_add(const WordPair& pair, u32 seed, i64 start) {
    const u32 k0 = fmix(seed ^ 0x243F6A88u), k1 = fmix(seed + 0x85A308D3u);
    const U places = iota() * (4 * kGolden) + (k0 + 4 * static_cast<u32>(start) * kGolden);
    each_pair(pair, [=](U a, U b, i64 i) {
        const U counter = places + static_cast<u32>(i) * (4 * kGolden);
        return (U)add_exponents((B)a, (B)b, zero_runs(counter, k1));
    });
}

// The code of each number, in the low byte.
GCCOMM_FN U exponent_codes(U bits, U noise_bits) {
    const U magnitude = bits & 0x7FFFFFFFu;
    const U widened = select((I)(magnitude < 0x00800000u), magnitude << 1, magnitude + 0x00800000u);
    U k = (widened + (noise_bits >> 9)) >> 23;
    k = select((I)(k < 127u), k, U{} + 127u);
    return select((I)(k == 0u), U{}, ((bits >> 24) & 128u) | (128u - k));
}

inline void exponent_encode(const float* values, u32* out, i64 count, u32 k0, u32 k1, i64 start) {
    const U places = iota() * kGolden + (k0 + static_cast<u32>(start) * kGolden);
    u8* bytes = reinterpret_cast<u8*>(out);
    const auto codes = [=](U bits, i64 i) {
        return __builtin_convertvector(
            exponent_codes(bits, noise(places + static_cast<u32>(i) * kGolden, k1)), Codes);
    };
    i64 i = 0;
    for (; i + kLanes <= count; i += kLanes) store(bytes + i, codes(load<U>(values + i), i));
    if (i == count) return;
    U bits{};  // zeros encode as zeros, up to the end of the last word
    __builtin_memcpy(&bits, values + i, static_cast<unsigned long>(count - i) * sizeof(float));
    const Codes last = codes(bits, i);
    __builtin_memcpy(bytes + i, &last, static_cast<unsigned long>((count - i + 3) / 4 * 4));
}

inline void exponent_decode(const u32* words, float* out, i64 count) {
    const u8* bytes = reinterpret_cast<const u8*>(words);
    const auto numbers = [](Codes codes) {
        const U code = __builtin_convertvector(codes, U), e = code & 127u;
        const U power = select((I)(e == 127u), U{} + 0x00400000u, (127u - e) << 23);
        return select((I)(e == 0u), U{}, ((code >> 7) << 31) | power);
    };
    i64 i = 0;
    for (; i + kLanes <= count; i += kLanes) store(out + i, numbers(load<Codes>(bytes + i)));
    if (i == count) return;
    Codes last{};
    __builtin_memcpy(&last, bytes + i, static_cast<unsigned long>(count - i));
    const U rest = numbers(last);
    __builtin_memcpy(out + i, &rest, static_cast<unsigned long>(count - i) * sizeof(float));
}

}  // namespace gccomm::GCCOMM_LEVEL
