// Noise of its own for every launch of a graph, whose tables are the same each time.
#pragma once
#include "team.cuh"

namespace gccomm {
namespace GCCOMM_LEVEL {

// Counts a launch, or changes the keys of all segments by the count: in one thread block. Shared keys stay
// equal on all ranks, which launch as often.
__device__ inline void renew(Segment* table, i64 segments, u32* counter, u32 tick) {
    if (blockIdx.x != 0) return;
    if (tick != 0) {
        if (thread() == 0) *counter += tick;
        return;
    }
    const u32 first = fmix(*counter), second = fmix(first ^ 0x9E3779B9u);
    for (i64 i = thread(); i < segments; i += kThreads) {
        Segment& segment = table[i];
        segment.key0 ^= first;
        segment.sign0 ^= first;
        segment.key1 ^= second;
        segment.sign1 ^= second;
    }
}

}  // namespace GCCOMM_LEVEL
}  // namespace gccomm
