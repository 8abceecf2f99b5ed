// Chunks of consecutive coordinates of a whole tensor: their energies, and those that are chosen, taken out
// of the tensor and put back. A warp does a chunk at a time, or a thread a coordinate. The table has one
// segment, which is all of its tensor; to put chunks, another that says where results go, and of what dtype.
#pragma once
#include "values.cuh"

namespace gccomm {
namespace GCCOMM_LEVEL {

struct Chunks {
    const Segment* tensor;
    int size;   // coordinates of a chunk; the last one may be short
    int power;  // of two, that values are multiplied by

    __device__ i64 count() const { return (tensor->size + size - 1) / size; }
    __device__ i64 start(i64 number) const { return number * size; }
    __device__ int length(i64 number) const {
        const i64 room = tensor->size - start(number);
        return static_cast<int>(room < size ? room : size);
    }
    // A place in the tensor from which coordinates are read and written.
    __device__ Block at(i64 offset) const { return {tensor, 0, 0, 0, offset, 0, 0}; }
};

// Every lane of a warp gets the sum of all lanes' numbers, added in pairs 16, 8, 4, 2 and 1 apart.
__device__ inline double warp_sum(double x) {
    for (int other = 16; other > 0; other /= 2) {
        const u64 bits = bits_of(x);
        const u32 low = __shfl_xor_sync(0xFFFFFFFFu, static_cast<u32>(bits), other);
        const u32 high = __shfl_xor_sync(0xFFFFFFFFu, static_cast<u32>(bits >> 32), other);
        x += double_of(static_cast<u64>(high) << 32 | low);
    }
    return x;
}

template <class Real>
__device__ void chunk_energies_of(const Chunks& chunks, double* out) {
    const Power<double> power(chunks.power);
    const int lane = thread() % 32;
    const i64 every = i64(gridDim.x) * kWarps, count = chunks.count();
    for (i64 number = i64(blockIdx.x) * kWarps + thread() / 32; number < count; number += every) {
        const Block b = chunks.at(chunks.start(number));
        const int length = chunks.length(number);
        double sum = 0;
        for (int i = lane; i < length; i += 32) {
            const double v = static_cast<double>(load_value<Real>(b, i)) * power.first * power.second;
            sum += v * v;
        }
        sum = warp_sum(sum);
        if (lane == 0) out[number] = sum;
    }
}

__device__ inline void chunk_energies(const Chunks& chunks, double* out) {
    if (is_wide(*chunks.tensor))
        chunk_energies_of<double>(chunks, out);
    else
        chunk_energies_of<float>(chunks, out);
}

// Takes `count` chosen chunks, one behind the other.
template <class Real>
__device__ void chunk_take_as(const Chunks& chunks, const i64* chosen, i64 count, Real* out) {
    const Power<Real> power(chunks.power);
    const i64 end = count == 0 ? 0 : (count - 1) * chunks.size + chunks.length(chosen[count - 1]);
    for (i64 i = i64(blockIdx.x) * kThreads + thread(); i < end; i += i64(gridDim.x) * kThreads) {
        const i64 place = i / chunks.size;
        const Block b = chunks.at(chunks.start(chosen[place]) + i - place * chunks.size);
        out[i] = load_value<Real>(b, 0) * power.first * power.second;
    }
}

__device__ inline void chunk_take(const Chunks& chunks, const i64* chosen, i64 count, void* out) {
    if (is_wide(*chunks.tensor))
        chunk_take_as(chunks, chosen, count, static_cast<double*>(out));
    else
        chunk_take_as(chunks, chosen, count, static_cast<float*>(out));
}

struct PutArgs {
    const i32* places;  // of each chunk among those that were chosen, or -1
    const void *sums, *rest;
    i64 n;  // what sums are divided by
};

template <class Real>
__device__ void chunk_put_as(const Chunks& chunks, const Segment& s, const PutArgs& a) {
    const Power<Real> narrow(chunks.power);
    const Power<double> wide(chunks.power);
    const Real* sums = static_cast<const Real*>(a.sums);
    const Real* rest = static_cast<const Real*>(a.rest);
    for (i64 i = i64(blockIdx.x) * kThreads + thread(); i < s.size; i += i64(gridDim.x) * kThreads) {
        const i64 number = i / chunks.size, place = a.places[number];
        const i64 from = place * chunks.size + i - number * chunks.size;
        Real* residual = element<Real>(s.res_out, i);  // before the result: that may lie where the input does
        if (residual != nullptr)
            *residual =
                place < 0 ? load_value<Real>(chunks.at(i), 0) : rest[from] * narrow.first * narrow.second;
        with_format_of<Real>(s.dtype, [&](auto format) {
            auto* out = element<typename decltype(format)::Pattern>(s.dst, i);
            if (place < 0)
                *out = format.write(Real{0});
            else if (chunks.power == 0)
                *out = format.write(a.n > 1 ? sums[from] / static_cast<Real>(a.n) : sums[from]);
            else  // divided first, in float64: the mean of numbers near the largest is no larger
                *out = format.write(static_cast<double>(sums[from]) / static_cast<double>(a.n) * wide.first *
                                    wide.second);
        });
    }
}

// Writes the result, which is 0 outside of what was chosen, and the residual, as the segment `to` says.
__device__ inline void chunk_put(const Chunks& chunks, const Segment& to, const PutArgs& args) {
    if (is_wide(to))
        chunk_put_as<double>(chunks, to, args);
    else
        chunk_put_as<float>(chunks, to, args);
}

}  // namespace GCCOMM_LEVEL
}  // namespace gccomm
