// As much of CUDA as the kernels use, for a host compiler: the threads of a thread block are fibres that take
// turns at barriers, in an order that the caller chooses; thread blocks run one after the other.
#pragma once
#include <cmath>

#define __global__
#define __device__
#define __forceinline__ inline
#if defined(__SANITIZE_ADDRESS__)
#define __shared__ static  // with guards around it
#else
#define __shared__ static __attribute__((section("gccomm_shared")))  // to find it and fill it with rubbish
#endif
#define __launch_bounds__(threads)

struct Index {
    unsigned x, y, z;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

extern Index threadIdx, blockIdx, blockDim, gridDim;

void __syncthreads();
unsigned __shfl_xor_sync(unsigned mask, unsigned value, int lanes);

inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyintf(x)); }

inline unsigned atomicAdd(unsigned* at, unsigned x) {
    const unsigned before = *at;
    *at += x;
    return before;
}
inline unsigned atomicMax(unsigned* at, unsigned x) {
    const unsigned before = *at;
    if (x > before) *at = x;
    return before;
}
