// Integers of a block <-> words of lanes: lane k of word j holds coordinate k * words + j.
#pragma once
#include "blocks.h"

namespace gccomm::GCCOMM_LEVEL {

// Signed integers of a block. Beyond the block: zeros as far as lanes may read, room as far as they may
// write.
struct alignas(kLineBytes) Integers {
    static constexpr int room = kBlock + 32;
    i32 at[room];
};

// Whether lanes fill words, and a block of 1024 whole vectors of words.
GCCOMM_FN constexpr bool fits(int width) { return width == 4 || width == 8 || width == 16; }

GCCOMM_FN void zero_after(Integers& q, int n) {
    __builtin_memset(q.at + n, 0, sizeof q.at[0] * static_cast<u32>(Integers::room - n));
}

template <int width>
GCCOMM_FN U pack_vector(const i32* q, int words) {
    U sum{};
    for (int k = 0; k < lanes_of(width); k++) sum += load<U>(q + k * words) << (width * k);
    return sum;
}

// `q` must be zero from the end of the block on.
template <int width>
inline void pack(const Integers& q, int words, u32* out) {
    if (words < kLanes) {
        u32 staged[kLanes];
        store(staged, pack_vector<width>(q.at, words));
        __builtin_memcpy(out, staged, sizeof(u32) * static_cast<u32>(words));
        return;
    }
    for (int j = 0; j < words - kLanes; j += kLanes) store(out + j, pack_vector<width>(q.at + j, words));
    const int last = words - kLanes;  // may overlap the one before
    store(out + last, pack_vector<width>(q.at + last, words));
}

template <int width>
GCCOMM_FN void unpack_vector(U word, i32* q, int words) {
    constexpr u32 bias = lane_bias(width);
    const U unbiased = (word + bias) ^ bias;
    for (int k = 0; k < lanes_of(width); k++) store(q + k * words, lane<I>(unbiased, k, width));
}

// Leaves anything from the end of the last lane on.
template <int width>
inline void unpack(const u32* in, int words, Integers& q) {
    if (words < kLanes) {
        u32 staged[kLanes] = {};
        __builtin_memcpy(staged, in, sizeof(u32) * static_cast<u32>(words));
        unpack_vector<width>(load<U>(staged), q.at,
                             words);  // each lane overwrites what the one before left over
        return;
    }
    for (int j = 0; j < words - kLanes; j += kLanes) unpack_vector<width>(load<U>(in + j), q.at + j, words);
    const int last = words - kLanes;
    unpack_vector<width>(load<U>(in + last), q.at + last, words);
}

// Calls f with the width as a compile-time constant: f.template operator()<w>().
template <class Function>
inline void with_width(int width, Function f) {
    switch (width) {
        case 2:
            return f.template operator()<2>();
        case 3:
            return f.template operator()<3>();
        case 4:
            return f.template operator()<4>();
        case 5:
            return f.template operator()<5>();
        case 6:
            return f.template operator()<6>();
        case 8:
            return f.template operator()<8>();
        case 10:
            return f.template operator()<10>();
        case 16:
            return f.template operator()<16>();
        default:
            return f.template operator()<32>();
    }
}

inline void pack(int width, const Integers& q, int words, u32* out) {
    with_width(width, [&]<int w>() { pack<w>(q, words, out); });
}

inline void unpack(int width, const u32* in, int words, Integers& q) {
    with_width(width, [&]<int w>() { unpack<w>(in, words, q); });
}

// The two check words of a block: sums mod 2^32 of H q and rotl(H, 16) q. As rotl(H, 16) = (H >> 16) + (H <<
// 16), the second is the sum of (H >> 16) q plus the first << 16.
class Check {
 public:
    GCCOMM_FN void add(I q, U noise_bits) {
        first_ += noise_bits * (U)q;
        upper_ += (noise_bits >> 16) * (U)q;
    }
    GCCOMM_FN void store_to(u32* out) const {
        const u32 first = sum_of_lanes(first_);
        out[0] = first;
        out[1] = sum_of_lanes(upper_) + (first << 16);
    }

 private:
    U first_{}, upper_{};
};

}  // namespace gccomm::GCCOMM_LEVEL
