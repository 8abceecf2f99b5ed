// Checked headroom between its sums: energies as ranks share them, steps, and check words by span. A thread
// does a block, or a span. All of it is float64, one operation after the other, as NumPy has it.
#pragma once
#include "team.cuh"

namespace gccomm {
namespace GCCOMM_LEVEL {

__device__ inline double scale_value(u32 s, bool wide) {
    return wide ? double_of(static_cast<u64>(s) << 32) : static_cast<double>(float_of(s));
}

// f(i) for i below `count`, by all threads together.
template <class Function>
__device__ void each_of(i64 count, Function f) {
    const i64 every = i64(gridDim.x) * kThreads;
    for (i64 i = i64(blockIdx.x) * kThreads + thread(); i < count; i += every) f(i);
}

struct ShareArgs {
    const u32 *own, *energy;  // this rank's maxima, and its energies relative to them
    const u32* scales;        // agreed maxima
    double factor;            // 2 / n
    double most;              // 2^31 / n
    u32* out;
};

// This rank's energies relative to the agreed maxima: at least 1 where there is any.
__device__ inline void share(const Batch& batch, const ShareArgs& a) {
    each_of(batch.hi, [&](i64 i) {
        const bool wide = is_wide(*find_block(batch, i, NoWords{}).segment);
        const u32 own = a.own[i], scale = a.scales[i];
        double word = 0;
        if (own != 0 && !nonfinite_scale(scale, wide)) {
            const double part = scale_value(own, wide) / scale_value(scale, wide);
            word = ceil(a.energy[i] * (part * part) * a.factor);
            word = word > a.most ? a.most : word > 1 ? word : 1;
        }
        a.out[i] = static_cast<u32>(word);
    });
}

struct StepArgs {
    const u32 *scales, *energies;  // energies: of all ranks, or null
    const double* ratios;          // c of each segment's key
    double unit;                   // of energies
    double deviations, bracket;
    double safe, least;  // the largest and the smallest step
    float* out;
};

// Each block's step over its maximum, rounded up to float32.
__device__ inline void steps(const Batch& batch, const StepArgs& a) {
    each_of(batch.hi, [&](i64 i) {
        const Block b = find_block(batch, i, NoWords{});
        const u32 scale = a.scales[i];
        double step = a.safe;
        if (a.energies != nullptr && !nonfinite_scale(scale, is_wide(*b.segment))) {
            const double mean = a.energies[i] * a.unit / padded(b.length);
            const double wanted = a.deviations * sqrt(a.ratios[b.segment - batch.table] * mean / a.bracket);
            if (wanted < step) step = wanted;
        }
        if (step < a.least) step = a.least;
        float near = static_cast<float>(step);
        if (near < step) near = float_of(bits_of(near) + 1);
        a.out[i] = scale == 0 ? 0.0f : near;
    });
}

struct SpanArgs {
    const u32* check;  // two a block
    const i64* starts;
    i64 spans, blocks;
    const u32* expected;  // two a span, or null
    u32* out;             // sums, two a span; or, with `expected`, 1 where they differ, one a span
};

__device__ inline void span_checks(const SpanArgs& a) {
    each_of(a.spans, [&](i64 i) {
        const i64 end = i + 1 < a.spans ? a.starts[i + 1] : a.blocks;
        u32 first = 0, second = 0;
        for (i64 block = a.starts[i]; block < end; block++) {
            first += a.check[2 * block];
            second += a.check[2 * block + 1];
        }
        if (a.expected != nullptr) {
            a.out[i] = first != a.expected[2 * i] || second != a.expected[2 * i + 1];
            return;
        }
        a.out[2 * i] = first;
        a.out[2 * i + 1] = second;
    });
}

}  // namespace GCCOMM_LEVEL
}  // namespace gccomm
