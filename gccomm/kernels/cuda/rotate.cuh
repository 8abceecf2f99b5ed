// Rotations of blocks: random signs and Hadamard matrices, their butterflies in the order that the reference
// has, in passes of up to three strides each, between which coordinates change threads through shared memory.
#pragma once
#include "values.cuh"

namespace gccomm {
namespace GCCOMM_LEVEL {

// Length of the part of a padded block of n coordinates that coordinate i < n is rotated in: parts begin at
// multiples of their own length, so the highest bit in which i and n differ is it.
__device__ inline int part_at(int n, int i) { return 1 << floor_log2(static_cast<u32>(n ^ i)); }

// All threads' coordinates, dealt out anew.
template <class From>
__device__ void put(Team& team, const float (&y)[kHeld]) {
    for (int k = 0; k < kHeld; k++) team.at[place(From::at(k))] = bits_of(y[k]);
}
template <class To>
__device__ void get(const Team& team, float (&y)[kHeld]) {
    for (int k = 0; k < kHeld; k++) y[k] = float_of(team.at[place(To::at(k))]);
}

__device__ inline void columns_to_runs(Team& team, float (&y)[kHeld]) {
    __syncthreads();
    put<Columns>(team, y);
    __syncthreads();
    get<Runs>(team, y);
}

// Butterflies between coordinates whose numbers k differ in one bit, lowest first; `apply(k, stride)` says
// whether the pair (k, k + stride) is one.
template <class Apply>
__device__ void butterflies(float (&y)[kHeld], Apply apply) {
    for (int stride = 1; stride < kHeld; stride *= 2)
        for (int k = 0; k < kHeld; k++) {
            if ((k & stride) != 0 || !apply(k, stride)) continue;
            const float a = y[k], b = y[k + stride];
            y[k] = a + b;
            y[k + stride] = a - b;
        }
}

constexpr int kRow = 16, kSpan = kRow * kRow;  // of longer parts, rows and runs of them

// A pass over the coordinates `base` + k * `step`, which come back at `to(i)`.
template <class Apply, class To>
__device__ void pass(Team& team, int base, int step, Apply apply, To to) {
    float y[kHeld];
    __syncthreads();
    for (int k = 0; k < kHeld; k++) y[k] = float_of(team.at[place(base + k * step)]);
    butterflies(y, apply);
    __syncthreads();  // another thread's coordinate may be at the place
    for (int k = 0; k < kHeld; k++) team.at[place(to(base + k * step))] = bits_of(y[k]);
}

// The strides 16, 32 and 64, as far as `apply(i, stride)` wants them. A warp has two rows of all eight.
template <class Apply>
__device__ void middle_strides(Team& team, Apply apply) {
    const int t = thread(), base = (t & 15) | (t >> 4 & 1) << 9 | t >> 5 << 7;
    pass(
        team, base, kRow, [&](int k, int stride) { return apply(base + kRow * k, kRow * stride); },
        [](int i) { return i; });
}

// Transforms the parts of a block of n coordinates, padded, or transforms them `back`: from runs into
// columns.
template <bool back>
__device__ void transform(Team& team, float (&y)[kHeld], int n) {
    const auto length = [&](int i) { return n == kBlock ? kBlock : i < n ? part_at(n, i) : 0; };
    const auto is_short = [&](int i, int stride) { return length(i) < kSpan && stride < length(i); };
    const auto is_long = [&](int i, int) { return length(i) >= kSpan; };
    const bool shorts = n % kSpan != 0;  // parts of 64 and 128: strides from 1 on
    const int t = thread();
    if (shorts) butterflies(y, [&](int k, int stride) { return is_short(Runs::at(k), stride); });
    __syncthreads();
    put<Runs>(team, y);
    if (shorts) {  // 8: the others are in other passes
        const int base = (t & 1) | t >> 5 << 1 | (t >> 1 & 15) << 6;
        pass(
            team, base, 8, [&](int k, int stride) { return stride == 1 && is_short(base + 8 * k, 8); },
            [](int i) { return i; });
    }
    middle_strides(team, [&](int i, int stride) { return is_long(i, stride) || is_short(i, stride); });
    // 128, then each row is turned.
    const auto turned = [&](int i) {
        const int row = i / kRow, turn = back ? row : -row;
        return is_long(i, 0) ? (i & ~(kRow - 1)) | ((i + turn) & (kRow - 1)) : i;
    };
    pass(
        team, t, kThreads, [&](int k, int stride) { return stride == 1 && is_long(t + kThreads * k, 0); },
        turned);
    middle_strides(team, is_long);
    __syncthreads();
    get<Columns>(team, y);
    butterflies(y, [&](int k, int stride) {  // 128, 256, 512
        const int i = Columns::at(k);
        return is_long(i, 0) && kThreads * stride < length(i);
    });
}

// The signs of the rotations of a block, for all threads.
__device__ inline void set_signs(Team& team, const Block& b, int rotations) {
    const BlockKey key = block_key(b.segment->sign0, b.segment->sign1, b.number);
    const int j = thread();
    if (j < 32 * rotations)
        team.signs[j] = sign_word(static_cast<u32>(kBlock + j) * kGolden + key.k0, key.k1);
    __syncthreads();
}

template <class Places>
__device__ void flip(const Team& team, int rotation, float (&y)[kHeld]) {
    for (int k = 0; k < kHeld; k++) {
        const int i = Places::at(k);
        const u32 negated = team.signs[32 * rotation + (i & 31)] >> (i >> 5) << 31;
        y[k] = float_of(bits_of(y[k]) ^ negated);
    }
}

// Rotates a block of n coordinates, padded, whose coordinates are multiplied already by what parts need: from
// runs into columns. Needs set_signs().
__device__ inline void rotate(Team& team, float (&y)[kHeld], int n, int rotations) {
    flip<Runs>(team, 0, y);
    transform<false>(team, y, n);
    if (rotations == 2) {
        for (int k = 0; k < kHeld; k++) y[k] *= 1.0f / 32;
        flip<Columns>(team, 1, y);
        columns_to_runs(team, y);
        return transform<false>(team, y, n);
    }
    for (int k = 0; k < kHeld; k++)
        if (Columns::at(k) < n) y[k] *= part_scale(part_at(n, Columns::at(k)));
}

// Rotates back: from runs into columns.
__device__ inline void unrotate(Team& team, float (&y)[kHeld], int n, int rotations) {
    if (Runs::at(0) < n) {
        const int length = part_at(n, Runs::at(0));
        const float factor = rotations == 2 ? 32.0f / static_cast<float>(length) : part_unscale(length);
        for (int k = 0; k < kHeld; k++) y[k] *= factor;
    }
    transform<true>(team, y, n);
    if (rotations == 2) {
        flip<Columns>(team, 1, y);
        columns_to_runs(team, y);
        transform<true>(team, y, n);
    }
    flip<Columns>(team, 0, y);
}

// This thread's run, which is rotated, times 2^e over the length of its part: in two steps where that is no
// normal number.
__device__ inline void scale_parts(float (&y)[kHeld], int n, int e) {
    if (Runs::at(0) >= n) return;
    const int total = e - floor_log2(static_cast<u32>(part_at(n, Runs::at(0))));
    const int first = total > 127 ? 127 : total < -126 ? -126 : total;
    for (int k = 0; k < kHeld; k++) y[k] = y[k] * pow2(first) * pow2(total - first);
}

}  // namespace GCCOMM_LEVEL
}  // namespace gccomm
