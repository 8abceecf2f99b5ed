// Copies past the caches.
#pragma once
#include "simd.h"

namespace gccomm::GCCOMM_LEVEL {

// `to` must lie at the start of a cache line.
inline void stream_copy(const void* from, void* to, i64 nbytes) {
    constexpr i64 kFetch = 2048;  // bytes ahead
    const char* in = static_cast<const char*>(from);
    char* out = static_cast<char*>(to);
    i64 i = 0;
    for (; i + kLineBytes <= nbytes; i += kLineBytes) {
        prefetch(in + i + kFetch);
        for (int k = 0; k < kLineBytes; k += kVectorBytes) stream(out + i + k, load<U>(in + i + k));
    }
    __builtin_memcpy(out + i, in + i, static_cast<u64>(nbytes - i));
    stream_fence();
}

}  // namespace gccomm::GCCOMM_LEVEL
