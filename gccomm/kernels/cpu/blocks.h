// One block between the user's memory, in any float dtype, and a buffer in the first-level cache.
#pragma once
#include "cursor.h"
#include "halves.h"

namespace gccomm::GCCOMM_LEVEL {

constexpr int kAhead = 2 * kBlock;  // how far ahead of the arithmetic memory is fetched

// Staged values; zero padded to whole lines.
struct alignas(64) Floats {
    float at[kBlock + kPad];
};
struct alignas(64) Doubles {
    double at[kBlock + kPad];
};

// Values to work on, and where to prefetch from while doing so (the values themselves if there is nothing to fetch).
struct Values {
    const float* data;
    const float* ahead;
};

GCCOMM_FN bool is_wide(DType dtype) { return dtype == DType::float64; }

GCCOMM_FN int whole_lines(int n) { return (n + kLine - 1) / kLine * kLine; }

inline int size_of(DType dtype) {
    constexpr u8 sizes[] = {4, 8, 2, 2, 1, 2, 4, 8, 1, 2, 4, 8, 1};
    return sizes[static_cast<int>(dtype)];
}

// Address of element `offset` of the array at `base`; null stays null.
template <class T>
GCCOMM_FN T* element(u64 base, i64 offset) {
    return base == 0 ? nullptr : reinterpret_cast<T*>(base) + offset;
}

inline void* block_address(u64 base, const Block& b) {
    return element<u8>(base, b.offset * size_of(b.segment->dtype));
}

template <class T>
inline void pad_line(T* values, int n) {
    for (int i = n; i < whole_lines(n); i++) values[i] = 0;
}

inline void copy_floats(const float* in, int n, float* out) {
    int i = 0;
    for (; i + kLine <= n; i += kLine) {
        prefetch(in + i + kAhead);
        for (int j = i; j < i + kLine; j += kLanes) store(out + j, load<U>(in + j));
    }
    for (; i < n; i++) out[i] = in[i];
    pad_line(out, n);
}

// n values of a float dtype other than float64 -> float32, zero padded.
inline void load_floats(DType dtype, const void* in, int n, float* out) {
    switch (dtype) {
        case DType::float16:
            return halves_to_floats<Float16>(static_cast<const u16*>(in), n, out, kAhead);
        case DType::bfloat16:
            return halves_to_floats<BFloat16>(static_cast<const u16*>(in), n, out, kAhead);
        default:
            return copy_floats(static_cast<const float*>(in), n, out);
    }
}

inline void load_doubles(const double* in, int n, double* out) {
    for (int i = 0; i < n; i++) {
        if (i % 8 == 0) prefetch(in + i + kAhead);
        out[i] = in[i];
    }
    pad_line(out, n);
}

template <class T>
inline void add_residual(T* values, const T* residual, int n) {
    for (int i = 0; i < n; i++) values[i] += residual[i];
}

// x, or x + residual, of a block that is not float64.
inline Values block_values(const Block& b, Floats& buffer) {
    const Segment& s = *b.segment;
    const float* residual = element<const float>(s.res_in, b.offset);
    const void* src = block_address(s.src, b);
    if (s.dtype == DType::float32 && src != nullptr && residual == nullptr && b.length == kBlock) {
        const float* x = static_cast<const float*>(src);
        return {x, x + kAhead};
    }
    if (src == nullptr) {
        for (int i = 0; i < whole_lines(b.length); i++) buffer.at[i] = 0;
    } else {
        load_floats(s.dtype, src, b.length, buffer.at);
    }
    if (residual != nullptr) add_residual(buffer.at, residual, b.length);
    return {buffer.at, buffer.at};
}

// The same of a float64 block.
inline void wide_values(const Block& b, Doubles& buffer) {
    const Segment& s = *b.segment;
    const double* residual = element<const double>(s.res_in, b.offset);
    if (s.src == 0) {
        for (int i = 0; i < whole_lines(b.length); i++) buffer.at[i] = 0;
    } else {
        load_doubles(element<const double>(s.src, b.offset), b.length, buffer.at);
    }
    if (residual != nullptr) add_residual(buffer.at, residual, b.length);
}

// Any float block as float64.
inline void values_as_doubles(const Block& b, Floats& staged, Doubles& out) {
    if (is_wide(b.segment->dtype)) return wide_values(b, out);
    const float* x = block_values(b, staged).data;
    for (int i = 0; i < whole_lines(b.length); i++) out.at[i] = x[i];
}

// Copies n values past the caches where the alignment allows it.
template <class T>
inline void stream_out(const T* in, int n, T* out) {
    constexpr int step = kVectorBytes / static_cast<int>(sizeof(T));
    const u64 address = reinterpret_cast<u64>(out);
    int i = 0;
    if (address % sizeof(T) == 0) {
        const int head = static_cast<int>(-address % kVectorBytes / sizeof(T));
        for (; i < head && i < n; i++) out[i] = in[i];
        for (; i + step <= n; i += step) stream(out + i, load<U>(in + i));
    }
    for (; i < n; i++) out[i] = in[i];
}

// n float32 values -> a dtype other than float64. `in` must be readable to a whole line.
inline void store_floats(DType dtype, const float* in, int n, void* out, bool streaming) {
    switch (dtype) {
        case DType::float16:
            return floats_to_halves<Float16>(in, n, static_cast<u16*>(out));
        case DType::bfloat16:
            return floats_to_halves<BFloat16>(in, n, static_cast<u16*>(out));
        default:
            if (streaming) return stream_out(in, n, static_cast<float*>(out));
            __builtin_memcpy(out, in, sizeof(float) * static_cast<u32>(n));
    }
}

inline void store_doubles(const double* in, int n, double* out, bool streaming) {
    if (streaming) return stream_out(in, n, out);
    __builtin_memcpy(out, in, sizeof(double) * static_cast<u32>(n));
}

// Sets the residual of a block to zero.
inline void clear_residual(const Block& b) {
    const u32 size = is_wide(b.segment->dtype) ? 8 : 4;
    u8* out = element<u8>(b.segment->res_out, b.offset * size);
    if (out != nullptr) __builtin_memset(out, 0, size * static_cast<u32>(b.length));
}

// Leaves the residual of a block as it was, zero if there was none.
inline void keep_residual(const Block& b) {
    const u32 size = is_wide(b.segment->dtype) ? 8 : 4;
    u8* out = element<u8>(b.segment->res_out, b.offset * size);
    const u8* old = element<u8>(b.segment->res_in, b.offset * size);
    if (old == nullptr) return clear_residual(b);
    if (out != nullptr) __builtin_memmove(out, old, size * static_cast<u32>(b.length));
}

}  // namespace gccomm::GCCOMM_LEVEL
