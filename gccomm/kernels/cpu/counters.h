// Counters beside the lanes of blocks, by which a SUM tells how the ranks' maxima lie to the predicted ones.
#pragma once
#include "simd.h"
#include "table.h"

namespace gccomm::GCCOMM_LEVEL {

constexpr int kCounters = 8;
constexpr int kClamped = 6, kNonfinite = 7;                 // the last two
constexpr double kEdges[] = {0.2, 0.35, 0.46, 0.54, 0.64};  // of a maximum over its prediction
constexpr double kFactors[] = {0.5, 0.75, 0.9, 0.98, 1.04, 1.3, 1, 1, 2.25};  // of the next prediction
constexpr int kAgreed = 8;                                                    // stands for no prediction

// Scale words of one kind as numbers, and back.
struct NarrowScales {
    using Value = float;
    static constexpr u32 kInfinity = 0x7F800000u;
    static constexpr float kTop = __FLT_MAX__;
    static GCCOMM_FN float value(u32 word) { return float_of(word); }
    static GCCOMM_FN u32 word(float finite) { return bits_of(finite); }
};

struct WideScales {
    using Value = double;
    static constexpr u32 kInfinity = 0x7FF00000u;
    static constexpr double kTop = __DBL_MAX__;
    static GCCOMM_FN double value(u32 word) { return double_of(static_cast<u64>(word) << 32); }
    static GCCOMM_FN u32 word(double finite) {  // rounded up, but not to infinity
        const u64 bits = __builtin_bit_cast(u64, finite);
        const u32 up = static_cast<u32>(bits >> 32) + (static_cast<u32>(bits) != 0 ? 1u : 0u);
        return up < kInfinity ? up : kInfinity - 1;
    }
};

template <class Scales>
GCCOMM_FN u32 interval_of(u32 own, u32 predicted) {
    using Value = typename Scales::Value;
    const Value part = Scales::value(own) / Scales::value(predicted > 1 ? predicted : 1);
    u32 interval = 5;
    for (const double edge : kEdges) interval -= part <= static_cast<Value>(edge) ? 1u : 0u;
    if (own <= predicted) return interval;
    return own >= Scales::kInfinity ? kNonfinite : kClamped;
}

template <class Scales>
void count_all(const CounterArgs& args) {
    if (args.bits == 4) {
        for (i64 i = 0; i < args.blocks; i++)
            args.counters[i] = 1u << (4 * interval_of<Scales>(args.own[i], args.scales[i]));
        return;
    }
    const u32 bits = static_cast<u32>(args.bits), words = kCounters * bits / 32;
    __builtin_memset(args.counters, 0, sizeof(u32) * words * static_cast<u64>(args.blocks));
    for (i64 i = 0; i < args.blocks; i++) {
        const u32 at = bits * interval_of<Scales>(args.own[i], args.scales[i]);
        args.counters[words * i + at / 32] = 1u << at % 32;
    }
}

// Writes a one into the counter of each block's interval; returns how many blocks lie beyond the prediction.
inline i64 count_intervals(const CounterArgs& args) {
    const FloatEnvironment environment;
    args.wide ? count_all<WideScales>(args) : count_all<NarrowScales>(args);
    i64 beyond = 0;
    for (i64 i = 0; i < args.blocks; i++) beyond += args.own[i] > args.scales[i] ? 1 : 0;
    return beyond;
}

// Sums of at most 15 ranks: one word a block.
inline bool highest_digits(const CounterArgs& args, u32 ranks) {
    u32 wrong = 0;
    for (i64 i = 0; i < args.blocks; i++) {
        const u32 word = args.counters[i];
        u32 highest = 0;
        for (int k = 1; k < kCounters; k++) highest += word >> (4 * k) != 0 ? 1u : 0u;
        args.intervals[i] = highest;
        const u32 pairs = (word & 0x0F0F0F0Fu) + (word >> 4 & 0x0F0F0F0Fu);
        wrong |= (pairs * 0x01010101u >> 24) ^ ranks;
    }
    return wrong == 0;
}

inline bool highest_counters(const CounterArgs& args, u64 ranks) {
    const u32 bits = static_cast<u32>(args.bits), words = kCounters * bits / 32, per = 32 / bits;
    const u32 mask = static_cast<u32>((u64{1} << bits) - 1);
    bool right = true;
    for (i64 i = 0; i < args.blocks; i++) {
        u64 total = 0;
        u32 highest = 0;
        for (u32 k = 0; k < kCounters; k++) {
            const u32 count = args.counters[words * i + k / per] >> (k % per * bits) & mask;
            total += count;
            if (count != 0) highest = k;
        }
        args.intervals[i] = highest;
        right = right && total == ranks;
    }
    return right;
}

// Writes the highest interval that some rank is in; returns the highest of all, or -1 if some block's
// counters do not count all ranks.
inline int highest_intervals(const CounterArgs& args, i64 ranks) {
    const bool right = args.bits == 4 ? highest_digits(args, static_cast<u32>(ranks))
                                      : highest_counters(args, static_cast<u64>(ranks));
    u32 most = 0;
    for (i64 i = 0; i < args.blocks; i++) most = args.intervals[i] > most ? args.intervals[i] : most;
    return right ? static_cast<int>(most) : -1;
}

template <class Scales>
void predict_all(const CounterArgs& args) {
    using Value = typename Scales::Value;
    Value factors[16] = {};
    for (int k = 0; k <= kAgreed; k++) factors[k] = static_cast<Value>(kFactors[k]);
    for (i64 i = 0; i < args.blocks; i++) {
        const Value next = Scales::value(args.scales[i]) * factors[args.intervals[i] & 15u];
        args.predicted[i] = Scales::word(next < Scales::kTop ? next : Scales::kTop);  // NaN: the top
    }
}

// Writes the next prediction of each block.
inline void predict_scales(const CounterArgs& args) {
    const FloatEnvironment environment;
    args.wide ? predict_all<WideScales>(args) : predict_all<NarrowScales>(args);
}

}  // namespace gccomm::GCCOMM_LEVEL
