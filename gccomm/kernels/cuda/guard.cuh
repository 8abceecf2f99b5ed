// Checks of words that the host does not look at.
#pragma once
#include "team.cuh"

namespace gccomm {
namespace GCCOMM_LEVEL {

struct Compared {
    const u32* got;
    const u32* expected;
    i32 count;
};

// Where words are not those expected, or something was wrong before, or the host has given up (flags[1], as
// flags[0] in its memory): says so in flags[0], and makes NaNs of what was to be used: of floats of any
// format, and of scales.
__device__ inline void guard(Team& team, const Compared& words, volatile u32* flags, u32 bit, u16* spoilt,
                             i64 halves) {
    if (thread() == 0) {                    // one of each thread block reads the host's memory
        const bool doomed = flags[1] != 0;  // then the words may be anything
        u32 wrong = doomed ? 4u : 0u;
        for (i32 i = 0; i < words.count; i++)
            if (!doomed && words.got[i] != words.expected[i]) wrong = bit;
        const u32 before = flags[0];
        if (wrong != 0 && blockIdx.x == 0) flags[0] = before | wrong;
        team.at[0] = wrong | before;
    }
    __syncthreads();
    if (team.at[0] == 0) return;
    const i64 first = static_cast<i64>(blockIdx.x) * kThreads + thread();
    for (i64 i = first; i < halves; i += static_cast<i64>(gridDim.x) * kThreads) spoilt[i] = 0xFFFFu;
}

}  // namespace GCCOMM_LEVEL
}  // namespace gccomm
