// Checked headroom between its sums: energies as ranks share them, steps, check words by span, and what a sum
// says about the next steps. All of it is float64, one operation after the other.
#pragma once
#include "blocks.h"

namespace gccomm::GCCOMM_LEVEL {

template <bool wide>
GCCOMM_FN double scale_value(u32 s) {
    if constexpr (wide) return double_of(static_cast<u64>(s) << 32);
    return static_cast<double>(float_of(s));
}

GCCOMM_FN double scale_value(u32 s, bool wide) { return wide ? scale_value<true>(s) : scale_value<false>(s); }

template <bool wide>
void share_all(const ShareArgs& a) {
    const double factor = 2.0 / static_cast<double>(a.ranks);
    const double most = static_cast<double>((i64{1} << 31) / a.ranks);
    for (i64 i = 0; i < a.blocks; i++) {
        const u32 own = a.own[i], scale = a.scales[i];
        const bool finite = own != 0 && !nonfinite_scale(scale, wide);
        const double part = scale_value<wide>(finite ? own : 0) / scale_value<wide>(finite ? scale : 1);
        double word = __builtin_ceil(static_cast<double>(a.energy[i]) * (part * part) * factor);
        word = word < 1 ? 1 : word;
        word = word > most ? most : word;
        a.out[i] = finite ? static_cast<u32>(word) : 0;
    }
}

// Writes this rank's energies relative to the agreed maxima: at least 1 where there is any.
inline void share_energies(const ShareArgs& args) {
    const FloatEnvironment environment;
    args.wide ? share_all<true>(args) : share_all<false>(args);
}

// Writes each block's step over its maximum, rounded up to float32.
inline void choose_steps(const Batch& batch, const StepArgs& a) {
    const FloatEnvironment environment;
    for (Cursor<NoWords> c(batch, {}); c.next();) {
        const Segment& s = *c.block.segment;
        const i64 i = c.index;
        double step = a.safe;
        if (a.energies != nullptr && !nonfinite_scale(a.scales[i], is_wide(s.dtype))) {
            const double energy = static_cast<double>(a.energies[i]);
            const double mean = energy * a.unit / static_cast<double>(padded(c.block.length));
            const double sum = a.ratios[&s - batch.table] * mean / a.bracket;
            const double wanted = a.deviations * __builtin_sqrt(sum);
            step = wanted < step ? wanted : step;
        }
        step = step < a.least ? a.least : step;
        // A step that is no float32 is rounded up, so that the clamp at 32767 levels does not bind.
        float near = static_cast<float>(step);
        if (near < step) near = float_of(bits_of(near) + 1);
        a.out[i] = a.scales[i] == 0 ? 0.0f : near;
    }
}

// Adds up check words by span, or marks with 1 the spans whose sums are not those expected, the others with
// 0; returns how many are marked.
inline i64 sum_spans(const SpanArgs& a) {
    i64 wrong = 0;
    for (i64 i = 0; i < a.spans; i++) {
        const i64 end = i + 1 < a.spans ? a.starts[i + 1] : a.blocks;
        u32 first = 0, second = 0;
        for (i64 block = a.starts[i]; block < end; block++) {
            first += a.check[2 * block];
            second += a.check[2 * block + 1];
        }
        if (a.expected == nullptr) {
            a.out[2 * i] = first;
            a.out[2 * i + 1] = second;
            continue;
        }
        a.out[i] = first != a.expected[2 * i] || second != a.expected[2 * i + 1] ? 1 : 0;
        wrong += a.out[i];
    }
    return wrong;
}

// e with 2^(e - 1) <= x < 2^e, for any x >= 0; of zero, 0.
GCCOMM_FN int exponent_of(double x) {
    if (x == 0) return 0;
    const int biased = static_cast<int>(__builtin_bit_cast(u64, x) >> 52);
    if (biased != 0) return biased - 1022;
    return static_cast<int>(__builtin_bit_cast(u64, x * 0x1p64) >> 52) - 1022 - 64;
}

class Learner {
 public:
    explicit Learner(const LearnArgs& args) : a_(args) {}

    // Of the blocks of one segment, numbers lo to hi.
    Learnt of(const Batch& batch, const Segment& s) {
        const i64 lo = s.base, hi = s.base + s.nblocks;
        const bool wide = is_wide(s.dtype);
        Learnt sums{0, 0, 0, -1100, 1};
        for (i64 i = lo; i < hi; i++) {
            if (nonfinite_scale(a_.scales[i], wide)) sums.valid = 0;
            const int exponent = exponent_of(value(i, wide));
            sums.exponent = exponent > sums.exponent ? exponent : sums.exponent;
        }
        // Values are at most 2^exponent, so that the first factor leaves them exact where there are two.
        const int down = -sums.exponent, first = down < 1000 ? down : 1000;
        const double factors[] = {pow2_wide(first), pow2_wide(down - first)};
        for (Cursor<NoWords> c({batch.table, batch.segments, lo, hi}, {}); c.next();) {
            const double scale = value(c.index, wide) * factors[0] * factors[1];
            add(sums, c.index, scale * scale, padded(c.block.length));
        }
        return sums;
    }

 private:
    // A block's maximum, 0 where it is not finite.
    GCCOMM_FN double value(i64 i, bool wide) const {
        const u32 scale = a_.scales[i];
        return nonfinite_scale(scale, wide) ? 0 : scale_value(scale, wide);
    }

    GCCOMM_FN void add(Learnt& sums, i64 i, double square, int carried) const {
        if (a_.redone != nullptr && a_.redone[i] != 0) return;
        const double step = static_cast<double>(a_.steps[i]), squares = step * step * square;
        const double energy = static_cast<double>(a_.energy[i]) * a_.unit;
        sums.energy += energy * squares;
        if (energy > 0) sums.noise += a_.noise * static_cast<double>(carried) * squares;
        if (a_.energies != nullptr) sums.parts += static_cast<double>(a_.energies[i]) * a_.part * square;
    }

    const LearnArgs& a_;
};

// Writes what the sum of each segment says.
inline void learn_energies(const Batch& batch, const LearnArgs& args) {
    const FloatEnvironment environment;
    Learner learner(args);
    for (i64 i = 0; i < batch.segments; i++) args.out[i] = learner.of(batch, batch.table[i]);
}

}  // namespace gccomm::GCCOMM_LEVEL
