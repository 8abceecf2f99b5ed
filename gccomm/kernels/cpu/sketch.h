// Projections by random signs, which tell how large the error of a sum is.
#pragma once
#include "blocks.h"
#include "rotate.h"

namespace gccomm::GCCOMM_LEVEL {

constexpr u32 kErrorSigns[] = {0x13198A2Eu, 0x03707344u};  // keys of signs: more digits of pi
constexpr u32 kInputSigns[] = {0xA4093822u, 0x299F31D0u};
constexpr int kProjectionParts = 16;

// The signs that have a number, the same on all ranks and steps.
inline void set_signs(Signs& signs, const u32 (&keys)[2], i64 number) {
    signs.set(block_key(keys[0], keys[1], static_cast<u32>(number)), static_cast<u32>(kBlock));
}

GCCOMM_FN float negated(float x, u32 top) { return float_of(bits_of(x) ^ top); }
GCCOMM_FN double negated(double x, u32 top) {
    return double_of(__builtin_bit_cast(u64, x) ^ (static_cast<u64>(top) << 32));
}

// The top bit where coordinate i + k is negated; both must lie in one run of 32 coordinates.
GCCOMM_FN u32 top_bit(const Signs& signs, int i, int k) {
    return (signs.words[(i & 31) + k] << (31 - (i >> 5))) & 0x80000000u;
}

// In 16 partial sums, of coordinates that many apart, which are then added in pairs 8, 4, 2 and 1 apart.
template <class T>
inline double projection(const T* x, int n, const Signs& signs) {
    alignas(kLineBytes) double parts[kProjectionParts] = {};
    int i = 0;
    for (; i + kProjectionParts <= n; i += kProjectionParts)
        for (int k = 0; k < kProjectionParts; k++)
            parts[k] += static_cast<double>(negated(x[i + k], top_bit(signs, i, k)));
    for (int k = 0; i + k < n; k++) parts[k] += static_cast<double>(negated(x[i + k], top_bit(signs, i, k)));
    for (int apart = kProjectionParts / 2; apart > 0; apart /= 2)
        for (int k = 0; k < apart; k++) parts[k] += parts[k + apart];
    return parts[0];
}

template <class T>
inline void project_all(const ProjectionArgs& args) {
    const T* errors = static_cast<const T*>(args.errors);
    Signs signs;
    i64 among = 0;  // of those of one block
    for (i64 p = 0; p < args.count; p++) {
        const i64 block = args.blocks[p];
        among = p > 0 && args.blocks[p - 1] == block ? among + 1 : 0;
        set_signs(signs, kErrorSigns, among);
        args.out[p] = projection(errors + args.starts[block], static_cast<int>(args.lengths[block]), signs);
    }
}

// Projections of blocks of errors.
inline void project_errors(const ProjectionArgs& args) {
    const FloatEnvironment environment;
    args.wide ? project_all<double>(args) : project_all<float>(args);
}

// All blocks of inputs, residuals included, added up with signs of their own, times 2^power.
inline void sum_inputs(const Batch& batch, int power, double* out) {
    const FloatEnvironment environment;
    const Power factor(power);
    Floats staged;
    Doubles values, sums{};
    Signs signs;
    for (Cursor<NoWords> c(batch, {}); c.next();) {
        const int n = c.block.length;
        values_as_doubles(c.block, staged, values);
        for (int i = n; i < kBlock; i++) values.at[i] = 0;
        set_signs(signs, kInputSigns, c.index);
        for (int row = 0; row < 32; row++) {
            const double* x = values.at + 32 * row;
            double* sum = sums.at + 32 * row;
            for (int k = 0; k < 32; k++)
                sum[k] += negated(x[k], top_bit(signs, 32 * row, k)) * factor.first * factor.second;
        }
    }
    __builtin_memcpy(out, sums.at, sizeof sums.at);
}

}  // namespace gccomm::GCCOMM_LEVEL
