// The threads that work on one block, what they share, and how they add up.
#pragma once
#include "table.cuh"

namespace gccomm {
namespace GCCOMM_LEVEL {

constexpr int kThreads = 128;             // of a thread block, which does one block of a tensor at a time
constexpr int kHeld = kBlock / kThreads;  // coordinates of a block that a thread has
constexpr int kWarps = kThreads / 32;
constexpr int kSums = 2;  // most numbers that are joined at once

// Where coordinate i of a block lies in shared memory: no two threads of a warp meet in a bank, neither when
// each has eight in a row nor when they are 64 apart.
GCCOMM_FN int place(int i) { return i + (i >> 5); }

struct Team {
    u32 at[kBlock + kBlock / 32];
    u32 signs[2 * 32];
    u32 slots[kSums][kWarps];
};

__device__ inline int thread() { return static_cast<int>(threadIdx.x); }

// The two ways in which the coordinates of a block are dealt out: runs of eight, or one of every 128.
struct Runs {
    static constexpr bool in_runs = true;
    static __device__ int at(int k) { return kHeld * thread() + k; }
};
struct Columns {
    static constexpr bool in_runs = false;
    static __device__ int at(int k) { return thread() + kThreads * k; }
};

struct Add {
    __device__ u32 operator()(u32 a, u32 b) const { return a + b; }
};
struct Larger {
    __device__ u32 operator()(u32 a, u32 b) const { return a > b ? a : b; }
};

// Every thread gets what all threads' numbers come to; all must call it.
template <class Join, int count>
__device__ void join(Team& team, u32 (&x)[count], Join joined) {
    static_assert(count <= kSums, "there are slots for two");
    for (int k = 0; k < count; k++) {
        for (int other = 16; other > 0; other /= 2)
            x[k] = joined(x[k], __shfl_xor_sync(0xFFFFFFFFu, x[k], other));
        if (thread() % 32 == 0) team.slots[k][thread() / 32] = x[k];
    }
    __syncthreads();
    for (int k = 0; k < count; k++) {
        x[k] = team.slots[k][0];
        for (int warp = 1; warp < kWarps; warp++) x[k] = joined(x[k], team.slots[k][warp]);
    }
    __syncthreads();
}

template <class Join>
__device__ u32 join(Team& team, u32 x, Join joined) {
    u32 one[1] = {x};
    join(team, one, joined);
    return one[0];
}

// Operations on one number for the templates of core.h.
struct ScalarOps {
    using F = float;
    using I = i32;
    using U = u32;
    static __device__ I round(F x) { return __float2int_rn(x); }
    // Between -limit and limit; NaN becomes limit.
    static __device__ F clamp(F x, float limit) {
        const F below = x < limit ? x : limit;
        return below > -limit ? below : -limit;
    }
    static __device__ I clamp(I x, i32 limit) { return x > limit ? limit : x < -limit ? -limit : x; }
    static __device__ I as_int(U x) { return static_cast<I>(x); }
    static __device__ I at_least(I a, I b, I x) { return a >= b ? x : 0; }
    static __device__ U times_upper(U x, u32 n) { return (x >> 16) * n << 16; }
};

// Noise of the coordinates of a block.
struct BlockNoise {
    BlockKey key;
    __device__ u32 bits(int i) const {
        const u32 h = noise(static_cast<u32>(i % kHalf) * kGolden + key.k0, key.k1);
        return i < kHalf ? h : later_noise(h);
    }
};

__device__ inline BlockNoise noise_of(const Block& b) {
    return {block_key(b.segment->key0, b.segment->key1, b.number)};
}

// Sums mod 2^32 of H q and rotl(H, 16) q.
struct Check {
    u32 sums[2] = {0, 0};
    __device__ void add(i32 q, u32 h) {
        sums[0] += h * static_cast<u32>(q);
        sums[1] += (h << 16 | h >> 16) * static_cast<u32>(q);
    }
    __device__ void store_to(Team& team, u32* out) {
        join(team, sums, Add{});
        if (thread() < 2) out[thread()] = sums[thread()];
    }
};

}  // namespace GCCOMM_LEVEL
}  // namespace gccomm
