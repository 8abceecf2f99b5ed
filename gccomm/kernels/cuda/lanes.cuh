// Integers of a block in shared memory <-> words of lanes: lane k of word j holds coordinate k * words + j.
#pragma once
#include "team.cuh"

namespace gccomm {
namespace GCCOMM_LEVEL {

// Lane widths as types, so that loops over the lanes of a word are unrolled.
template <int bits>
struct Width {
    static constexpr int value = bits;
};

template <class Function>
__device__ void with_width(int width, Function f) {
    switch (width) {
        case 2:
            return f(Width<2>{});
        case 3:
            return f(Width<3>{});
        case 4:
            return f(Width<4>{});
        case 5:
            return f(Width<5>{});
        case 6:
            return f(Width<6>{});
        case 8:
            return f(Width<8>{});
        case 10:
            return f(Width<10>{});
        case 16:
            return f(Width<16>{});
        default:
            return f(Width<32>{});
    }
}

// Packs the integers of n coordinates, at place(i).
__device__ inline void pack(const Team& team, int n, int width, int words, u32* out) {
    with_width(width, [&](auto w) {
        constexpr int bits = decltype(w)::value;
        for (int j = thread(); j < words; j += kThreads) {
            u32 word = 0;
            for (int k = 0; k < lanes_of(bits); k++)
                if (k * words + j < n) word += team.at[place(k * words + j)] << (bits * k);
            out[j] = word;
        }
    });
}

// Unpacks the sums of n coordinates to place(i).
__device__ inline void unpack(Team& team, const u32* in, int n, int width, int words) {
    with_width(width, [&](auto w) {
        constexpr int bits = decltype(w)::value;
        constexpr u32 bias = lane_bias(bits);
        for (int j = thread(); j < words; j += kThreads) {
            const u32 word = in[j], unbiased = bits == 32 ? word : (word + bias) ^ bias;
            for (int k = 0; k < lanes_of(bits); k++)
                if (k * words + j < n)
                    team.at[place(k * words + j)] = static_cast<u32>(lane<i32>(unbiased, k, bits));
        }
    });
}

}  // namespace GCCOMM_LEVEL
}  // namespace gccomm
