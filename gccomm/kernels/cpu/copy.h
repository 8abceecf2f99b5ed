// Copies past the caches.
#pragma once
#include "simd.h"

namespace gccomm::GCCOMM_LEVEL {

// Copies the whole lines before `end`, and returns where the rest begins; `to` must lie at the start of a
// cache line. Not complete before a stream_fence().
inline const u32* stream_lines(const u32* from, const u32* end, u32* to) {
    constexpr int kLine = kLineBytes / sizeof(u32);
    for (; end - from >= kLine; from += kLine, to += kLine)
        for (int k = 0; k < kLine; k += kLanes) stream(to + k, load<U>(from + k));
    return from;
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
