// Maxima and energies of blocks, of their coordinates or of the rotated ones.
#pragma once
#include "rotate.cuh"

namespace gccomm {
namespace GCCOMM_LEVEL {

constexpr u32 kSmall =
    27u << 23;  // 2^-100: blocks whose maximum is below are computed from 2^64 times as much

// Normalised values: v * 2^k, as float32.
__device__ inline void normalise(const float (&v)[kHeld], int k, float (&y)[kHeld]) {
    const Power<float> power(k);
    for (int i = 0; i < kHeld; i++) y[i] = v[i] * power.first * power.second;
}
__device__ inline void normalise(const double (&v)[kHeld], int k, float (&y)[kHeld]) {
    const Power<double> power(k);
    for (int i = 0; i < kHeld; i++) y[i] = static_cast<float>(v[i] * power.first * power.second);
}

// The same, times what parts are multiplied by before they are rotated.
__device__ inline void normalise_parts(const float (&v)[kHeld], int n, int k, float (&y)[kHeld]) {
    for (int i = 0; i < kHeld; i++) y[i] = v[i];
    scale_parts(y, n, k);
}
__device__ inline void normalise_parts(const double (&v)[kHeld], int n, int k, float (&y)[kHeld]) {
    normalise(v, k, y);
    scale_parts(y, n, 0);
}

// The float64 scale word of a float32 pattern times 2^e.
__device__ inline u32 wide_word(u32 pattern, int e) {
    const Power<double> power(e);
    const u32 word = wide_scale(bits_of(static_cast<double>(float_of(pattern)) * power.first * power.second));
    return word < 0x7FEFFFFFu ? word : 0x7FEFFFFFu;
}

// Sum of rint(|y| * 1024 / M)^2, `largest` the pattern of M; 0 where that is zero or not finite.
__device__ inline u32 energy_of(Team& team, const float (&y)[kHeld], u32 largest) {
    if (largest == 0 || largest >= kInfinity) return 0;
    const float factor = 1024.0f / float_of(largest);
    u32 sum = 0;
    for (int k = 0; k < kHeld; k++) {
        const i32 z = __float2int_rn(y[k] * factor);
        sum += static_cast<u32>(z * z);
    }
    return join(team, sum, Add{});
}

struct Measured {
    u32 word, energy;  // the energy only where it is asked for
};

// Scale word and energy of float32 values, given as runs. `plain`: the largest pattern of the values
// themselves.
__device__ inline Measured measure_values(Team& team, const Block& b, const float (&v)[kHeld], int rotations,
                                          bool energy) {
    const u32 plain = join(team, largest_word(v), Larger{});
    if (rotations == 0 && !energy) return {plain, 0};
    const int n = rotations == 0 ? b.length : padded(b.length);
    float y[kHeld];
    u32 found = plain;
    const auto take = [&](float factor) {
        for (int k = 0; k < kHeld; k++) y[k] = v[k] * factor;
        if (rotations != 0) {
            scale_parts(y, n, 0);
            rotate(team, y, n, rotations);
        }
        found = join(team, largest_word(y), Larger{});
    };
    take(1.0f);
    u32 word = found;
    if (found < kSmall && plain != 0) {
        take(18446744073709551616.0f);  // 2^64
        const u32 lowered = pattern_times_power(found, -64);
        word = lowered == 0 ? 1 : lowered;
    }
    if (rotations == 0)
        word = plain;
    else if (word >= kInfinity)
        word = 0x7FC00000u;
    return {word, energy ? energy_of(team, y, found) : 0};
}

// The same of float64.
__device__ inline Measured measure_values(Team& team, const Block& b, const double (&v)[kHeld], int rotations,
                                          bool energy) {
    const u32 plain = join(team, largest_word(v), Larger{});
    if (rotations == 0 && !energy) return {plain, 0};
    if (nonfinite_scale(plain, true)) return {rotations == 0 ? plain : 0x7FF80000u, 0};
    if (plain == 0) return {0, 0};
    const int n = padded(b.length), e = split_scale(plain, true).e;
    float y[kHeld];
    if (rotations == 0) {
        normalise(v, -e, y);
    } else {
        normalise_parts(v, n, -e, y);
        rotate(team, y, n, rotations);
    }
    const u32 found = join(team, largest_word(y), Larger{});
    const u32 word = rotations == 0 ? plain : wide_word(found, e);
    return {word, energy ? energy_of(team, y, found) : 0};
}

// Of a block as it lies in memory. Needs set_signs() where it is rotated.
template <class Real>
__device__ Measured measure(Team& team, const Block& b, int rotations, bool energy) {
    Real v[kHeld];
    load_values(b, v);
    return measure_values(team, b, v, rotations, energy);
}

struct MaximaArgs {
    u32 *out, *energy;  // one a block from block lo on; energy may be null
    int rotations;
};

__device__ inline void maxima(Team& team, const Batch& batch, const MaximaArgs& args) {
    each_block(batch, NoWords{}, [&](const Block& b) {
        if (args.rotations != 0) set_signs(team, b, args.rotations);
        const bool energy = args.energy != nullptr;
        const Measured found = is_wide(*b.segment) ? measure<double>(team, b, args.rotations, energy)
                                                   : measure<float>(team, b, args.rotations, energy);
        if (thread() != 0) return;
        args.out[b.index - batch.lo] = found.word;
        if (energy) args.energy[b.index - batch.lo] = found.energy;
    });
}

// Sets the flag if a block has inf or NaN.
__device__ inline void nonfinite(Team& team, const Batch& batch, u32* flag) {
    each_block(batch, NoWords{}, [&](const Block& b) {
        const bool wide = is_wide(*b.segment);
        const u32 word =
            wide ? measure<double>(team, b, 0, false).word : measure<float>(team, b, 0, false).word;
        if (thread() == 0 && nonfinite_scale(word, wide)) *flag = 1;
    });
}

}  // namespace GCCOMM_LEVEL
}  // namespace gccomm
