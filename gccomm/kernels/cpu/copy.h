// Copies past the caches.
#pragma once
#include "simd.h"

namespace gccomm::GCCOMM_LEVEL {

// Of any number of words at any place; not complete before a stream_fence().
inline void stream_words(const u32* from, u32* to, int count) {
    const bool whole = reinterpret_cast<u64>(to) % kLineBytes == 0 && count % (kLineBytes / 4) == 0;
    if (!whole) return static_cast<void>(__builtin_memcpy(to, from, sizeof(u32) * static_cast<u64>(count)));
    for (int i = 0; i < count; i += kLanes) stream(to + i, load<U>(from + i));
}

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
