// Vectors of the machine's width, and the few operations that need an instruction by name.
#pragma once
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "../core.h"

// Width in bits of the vectors that instructions are named for; 0: only what the compiler makes of plain
// vectors.
#if defined(GCCOMM_PORTABLE)
#define GCCOMM_SIMD 0
#elif defined(__AVX512BW__) && defined(__AVX512DQ__)
#define GCCOMM_SIMD 512
#elif defined(__AVX2__) && defined(__F16C__)
#define GCCOMM_SIMD 256
#elif defined(__SSE4_1__)
#define GCCOMM_SIMD 128
#else
#define GCCOMM_SIMD 0
#endif

namespace gccomm::GCCOMM_LEVEL {

constexpr int kVectorBytes = GCCOMM_SIMD == 0 ? 16 : GCCOMM_SIMD / 8;
constexpr int kLanes = kVectorBytes / 4;  // 32-bit lanes of a vector
constexpr int kLineBytes = 64;            // of the cache

typedef float F __attribute__((vector_size(kVectorBytes)));
typedef i32 I __attribute__((vector_size(kVectorBytes)));
typedef u32 U __attribute__((vector_size(kVectorBytes)));
typedef i64 I64 __attribute__((vector_size(kVectorBytes)));
typedef short I16 __attribute__((vector_size(kVectorBytes)));
typedef u16 W16 __attribute__((vector_size(kVectorBytes)));
typedef u16 U16 __attribute__((vector_size(kVectorBytes / 2)));  // as many lanes as U
typedef double D __attribute__((vector_size(kVectorBytes)));     // half as many lanes as F

// The unit in which loops move: neighbouring vectors.
constexpr int kPair = 2 * kLanes;
struct Pair {
    F low, high;
};

template <class V>
GCCOMM_FN V load(const void* address) {
    V v;
    __builtin_memcpy(&v, address, sizeof v);
    return v;
}

template <class V>
GCCOMM_FN void store(void* address, V v) {
    __builtin_memcpy(address, &v, sizeof v);
}

// Into the first-level cache, and into the second: what is on its way to the first one holds up other loads.
GCCOMM_FN void prefetch(const void* address) { __builtin_prefetch(address, 0, 3); }
GCCOMM_FN void prefetch_second(const void* address) { __builtin_prefetch(address, 0, 2); }

GCCOMM_FN U iota() {
    U v{};
    for (int i = 0; i < kLanes; i++) v[i] = static_cast<u32>(i);
    return v;
}

GCCOMM_FN I iota_int() { return (I)iota(); }

GCCOMM_FN I larger(I a, I b) { return a > b ? a : b; }
GCCOMM_FN I smaller(I a, I b) { return a < b ? a : b; }
GCCOMM_FN U select(I mask, U yes, U no) { return mask ? yes : no; }

// Nearest integer, ties to even; x must be within the integers' range.
GCCOMM_FN I nearest(F x) {
#if GCCOMM_SIMD == 512
    return (I)_mm512_cvtps_epi32((__m512)x);
#elif GCCOMM_SIMD == 256
    return (I)_mm256_cvtps_epi32((__m256)x);
#elif GCCOMM_SIMD == 128
    return (I)_mm_cvtps_epi32((__m128)x);
#else
    I y{};
    for (int i = 0; i < kLanes; i++) y[i] = static_cast<i32>(__builtin_rintf(x[i]));
    return y;
#endif
}

// Between -limit and limit; NaN becomes limit.
GCCOMM_FN F clamped(F x, float limit) {
    const F high = F{} + limit;
#if GCCOMM_SIMD == 512
    return (F)_mm512_max_ps(_mm512_min_ps((__m512)x, (__m512)high), (__m512)-high);
#elif GCCOMM_SIMD == 256
    return (F)_mm256_max_ps(_mm256_min_ps((__m256)x, (__m256)high), (__m256)-high);
#elif GCCOMM_SIMD == 128
    return (F)_mm_max_ps(_mm_min_ps((__m128)x, (__m128)high), (__m128)-high);
#else
    const F below = x < high ? x : high;
    return below > -high ? below : -high;
#endif
}

// table[index], lane by lane.
GCCOMM_FN I gathered(const i32* table, I index) {
#if GCCOMM_SIMD == 512
    return (I)_mm512_i32gather_epi32((__m512i)index, table, 4);
#elif GCCOMM_SIMD == 256
    return (I)_mm256_i32gather_epi32(table, (__m256i)index, 4);
#else
    I found{};
    for (int k = 0; k < kLanes; k++) found[k] = table[index[k]];
    return found;
#endif
}

// The lanes i and i ^ stride change places.
template <int stride>
GCCOMM_FN F exchanged(F x) {
#if GCCOMM_SIMD == 512
    if constexpr (stride == 1) return (F)_mm512_permute_ps((__m512)x, 0xB1);
    if constexpr (stride == 2) return (F)_mm512_permute_ps((__m512)x, 0x4E);
    if constexpr (stride == 4) return (F)_mm512_shuffle_f32x4((__m512)x, (__m512)x, 0xB1);
    if constexpr (stride == 8) return (F)_mm512_shuffle_f32x4((__m512)x, (__m512)x, 0x4E);
#elif GCCOMM_SIMD == 256
    if constexpr (stride == 1) return (F)_mm256_permute_ps((__m256)x, 0xB1);
    if constexpr (stride == 2) return (F)_mm256_permute_ps((__m256)x, 0x4E);
    if constexpr (stride == 4) return (F)_mm256_permute2f128_ps((__m256)x, (__m256)x, 1);
#else
    if constexpr (stride == 1) return __builtin_shufflevector(x, x, 1, 0, 3, 2);
    if constexpr (stride == 2) return __builtin_shufflevector(x, x, 2, 3, 0, 1);
#endif
}

// a + b in lane i and a - b in lane i + stride, where these hold a and b. (A multiplication by 1 or -1 is
// exact, so fused or not the bits are the same.)
template <int stride>
GCCOMM_FN F lane_butterfly(F x) {
    const U upper = (iota() & static_cast<u32>(stride)) << (31 - floor_log2(stride));
#if GCCOMM_SIMD == 512
    return (F)_mm512_fmadd_ps((__m512)x, (__m512)(upper | 0x3F800000u), (__m512)exchanged<stride>(x));
#elif GCCOMM_SIMD == 256
    return (F)_mm256_fmadd_ps((__m256)x, (__m256)(upper | 0x3F800000u), (__m256)exchanged<stride>(x));
#else
    return exchanged<stride>(x) + (F)((U)x ^ upper);
#endif
}

// 1, which the compiler does not know to be that.
GCCOMM_FN F one_apart() {
    F one = F{} + 1.0f;
#if GCCOMM_SIMD == 512
    __asm__("" : "+v"(one));
#endif
    return one;
}

// a - b. Where vectors are so long that sums and products each have one unit of the processor, it is done by
// that for products: the product by 1 is exact.
GCCOMM_FN F difference(F a, F b, [[maybe_unused]] F one) {
#if GCCOMM_SIMD == 512
    return (F)_mm512_fmsub_ps((__m512)a, (__m512)one, (__m512)b);
#else
    return a - b;
#endif
}

#if GCCOMM_SIMD == 512
// Lane i + n, mod 16, in lane i.
template <int n>
GCCOMM_FN F turned(F x) {
    return (F)_mm512_alignr_epi32((__m512i)x, (__m512i)x, n % 16);
}
#endif

// The sum, or the largest, of all lanes.
template <int stride = kLanes / 2>
GCCOMM_FN u32 sum_of_lanes(U x) {
    if constexpr (stride > 0)
        return sum_of_lanes<stride / 2>(x + (U)exchanged<stride>((F)x));
    else
        return x[0];
}

template <int stride = kLanes / 2>
GCCOMM_FN i32 largest_lane(I x) {
    if constexpr (stride > 0)
        return largest_lane<stride / 2>(larger(x, (I)exchanged<stride>((F)x)));
    else
        return x[0];
}

// x, negated where the top bit of `words << n` is set.
GCCOMM_FN F flipped(F x, U words, int n) {
    const U top = U{} + 0x80000000u;
#if GCCOMM_SIMD == 512
    return (F)_mm512_ternarylogic_epi32((__m512i)x, (__m512i)(words << n), (__m512i)top, 0x78);
#else
    return (F)((U)x ^ ((words << n) & top));
#endif
}

// Each lane with its bits rolled to the left by n, 0 <= n < 32.
GCCOMM_FN U rolled(U x, int n) {
#if GCCOMM_SIMD == 512
    return (U)_mm512_rolv_epi32((__m512i)x, (__m512i)(U{} + static_cast<u32>(n)));
#else
    return (x << n) | ((x >> 1) >> (31 - n));
#endif
}

// The bits of `yes` where those of `mask` are set, elsewhere the opposite of those of `no`.
GCCOMM_FN U selected(u32 mask, U yes, U no) {
#if GCCOMM_SIMD == 512
    return (U)_mm512_ternarylogic_epi32((__m512i)yes, (__m512i)(U{} + mask), (__m512i)no, 0xD1);
#else
    return (yes & mask) | ~(no | mask);
#endif
}

GCCOMM_FN U widen(U16 x) { return __builtin_convertvector(x, U); }

// Two vectors of numbers below 2^16 as one of 16-bit numbers. (Named instructions: gcc makes long shuffles of
// the plain conversion.)
GCCOMM_FN W16 narrow(U low, U high) {
#if GCCOMM_SIMD == 512
    const __m512i even = (__m512i)(iota() * 0x00040004u + 0x00020000u);  // 0, 2, 4 ... 62
    return (W16)_mm512_permutex2var_epi16((__m512i)low, even, (__m512i)high);
#elif GCCOMM_SIMD == 256
    return (W16)_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)low, (__m256i)high), 0xD8);
#elif GCCOMM_SIMD == 128
    return (W16)_mm_packus_epi32((__m128i)low, (__m128i)high);
#else
    W16 all{};
    for (int i = 0; i < kLanes; i++) {
        all[i] = static_cast<u16>(low[i]);
        all[i + kLanes] = static_cast<u16>(high[i]);
    }
    return all;
#endif
}

// The upper halves of the lanes of two vectors.
GCCOMM_FN W16 upper_halves(U low, U high) {
#if GCCOMM_SIMD == 512
    const __m512i odd = (__m512i)(iota() * 0x00040004u + 0x00030001u);  // 1, 3, 5 ... 63
    return (W16)_mm512_permutex2var_epi16((__m512i)low, odd, (__m512i)high);
#else
    return narrow(low >> 16, high >> 16);
#endif
}

GCCOMM_FN F narrow(D low, D high) {
#if GCCOMM_SIMD == 512
    const __m512 first = _mm512_castps256_ps512(_mm512_cvtpd_ps((__m512d)low));
    return (F)_mm512_insertf32x8(first, _mm512_cvtpd_ps((__m512d)high), 1);
#elif GCCOMM_SIMD == 256
    return (F)_mm256_set_m128(_mm256_cvtpd_ps((__m256d)high), _mm256_cvtpd_ps((__m256d)low));
#elif GCCOMM_SIMD == 128
    return (F)_mm_movelh_ps(_mm_cvtpd_ps((__m128d)low), _mm_cvtpd_ps((__m128d)high));
#else
    F all{};
    for (int i = 0; i < kLanes / 2; i++) {
        all[i] = static_cast<float>(low[i]);
        all[i + kLanes / 2] = static_cast<float>(high[i]);
    }
    return all;
#endif
}

GCCOMM_FN D widen_low(F x) {
#if GCCOMM_SIMD == 512
    return (D)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x));
#elif GCCOMM_SIMD == 256
    return (D)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)x));
#elif GCCOMM_SIMD == 128
    return (D)_mm_cvtps_pd((__m128)x);
#else
    D half{};
    for (int i = 0; i < kLanes / 2; i++) half[i] = x[i];
    return half;
#endif
}

GCCOMM_FN D widen_high(F x) {
#if GCCOMM_SIMD == 512
    return (D)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)x, 1));
#elif GCCOMM_SIMD == 256
    return (D)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)x, 1));
#elif GCCOMM_SIMD == 128
    return (D)_mm_cvtps_pd(_mm_movehl_ps((__m128)x, (__m128)x));
#else
    D half{};
    for (int i = 0; i < kLanes / 2; i++) half[i] = x[i + kLanes / 2];
    return half;
#endif
}

// A store that goes round the caches; the address must be a multiple of the vector's size.
template <class V>
GCCOMM_FN void stream(void* address, V v) {
    static_assert(sizeof v == kVectorBytes);
#if GCCOMM_SIMD == 512
    _mm512_stream_si512(static_cast<__m512i*>(address), (__m512i)v);
#elif GCCOMM_SIMD == 256
    _mm256_stream_si256(static_cast<__m256i*>(address), (__m256i)v);
#elif GCCOMM_SIMD == 128
    _mm_stream_si128(static_cast<__m128i*>(address), (__m128i)v);
#else
    store(address, v);
#endif
}

GCCOMM_FN void stream_fence() {
#if GCCOMM_SIMD
    _mm_sfence();
#endif
}

// Vector operations for the templates of core.h.
struct VectorOps {
    using F = GCCOMM_LEVEL::F;
    using I = GCCOMM_LEVEL::I;
    using U = GCCOMM_LEVEL::U;
    static GCCOMM_FN I round(F x) { return nearest(x); }
    static GCCOMM_FN F clamp(F x, float limit) { return clamped(x, limit); }
    static GCCOMM_FN I as_int(U x) { return (I)x; }
    static GCCOMM_FN I clamp(I x, i32 limit) {
        const I high = I{} + limit;
        return larger(smaller(x, high), -high);
    }
    // x where a >= b, else 0.
    static GCCOMM_FN I at_least(I a, I b, I x) { return (a >= b) & x; }
    // x * n, of which the upper half of each lane must be ((x >> 16) * n) mod 2^16.
    static GCCOMM_FN U times_upper(U x, u32 n) { return (U)((W16)x * static_cast<u16>(n)); }
};

// Round to nearest even with subnormals kept, whatever the caller's thread has set; put back at the end.
class FloatEnvironment {
 public:
#if defined(__SSE2__)
    FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
    ~FloatEnvironment() { _mm_setcsr(saved_); }

    // Whether since the construction no number was subnormal, as operand or inexact result.
    bool normal() const { return (_mm_getcsr() & 0x12u) == 0; }

 private:
    unsigned saved_;
#elif defined(__aarch64__)
    FloatEnvironment() {
        __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
        __asm__ volatile("msr fpcr, %0" : : "r"(u64{0}));
    }
    ~FloatEnvironment() { __asm__ volatile("msr fpcr, %0" : : "r"(saved_)); }
    bool normal() const { return false; }  // not known

 private:
    u64 saved_ = 0;
#else
    FloatEnvironment() {}
    ~FloatEnvironment() {}
    bool normal() const { return false; }  // not known
#endif
    FloatEnvironment(const FloatEnvironment&) = delete;
    FloatEnvironment& operator=(const FloatEnvironment&) = delete;
};

}  // namespace gccomm::GCCOMM_LEVEL
