// Lanes that are quantised again on their way: blocks against their own largest value, and the sum of such
// blocks of all ranks against its own.
#pragma once
#include "encode.h"

namespace gccomm::GCCOMM_LEVEL {

// Rotates each block once: its scale is its own, so that no other rank need be asked before it is rounded.
class HopEncoder {
 public:
    explicit HopEncoder(const HopEncodeArgs& args)
        : measure_(args.rotations),
          blocks_(coding(args, args.rotations)),
          kept_blocks_(coding(args, 0)),
          encoder_(blocks_),
          kept_encoder_(kept_blocks_) {}

    // Returns the scale word. `normal`: no number has been subnormal so far, after measuring.
    template <class Normal>
    u32 encode(const Block& b, u32* words, int count, Normal normal) {
        const Segment& s = *b.segment;
        const bool keeps = !is_wide(s.dtype) && s.res_out == 0;
        const u32 scale = measure_.scale(b, nullptr, keeps ? kept_.at : nullptr);
        const Outputs out{words, count, nullptr, nullptr, 1.0f};
        if (!keeps || !normal()) {
            encoder_.encode(b, scale, nullptr, out);
            return scale;
        }
        Segment rotated = s;
        rotated.src = reinterpret_cast<u64>(kept_.at);
        rotated.res_in = 0;
        rotated.dtype = DType::float32;
        kept_encoder_.encode({&rotated, b.number, 0, padded(b.length)}, scale, nullptr, out);
        return scale;
    }

 private:
    static EncodeArgs coding(const HopEncodeArgs& a, int rotations) {
        return {nullptr,   {nullptr, 0}, a.width, a.limit, a.shift, nullptr, 0,      nullptr,
                rotations, nullptr,      true,    nullptr, nullptr, 0,       nullptr};
    }

    Measure measure_;
    const EncodeArgs blocks_, kept_blocks_;
    Encoder encoder_, kept_encoder_;
    Floats kept_;
};

inline void hop_encode(const Batch& batch, const HopEncodeArgs& args) {
    const FloatEnvironment environment;
    HopEncoder encoder(args);
    u32* scale = args.scales;
    for (Cursor<LaneWords> c(batch, LaneWords(args.width, true)); c.next();)
        *scale++ = encoder.encode(c.block, args.words.data + (c.word - args.words.base), c.words,
                                  [&] { return environment.normal(); });
}

// The blocks of all ranks, added up in the order of the ranks in float32, and rounded again.
class HopFolder {
 public:
    explicit HopFolder(const HopFoldArgs& args)
        : args_(args), limit_(float_below(args.limit)), unit_(static_cast<float>(2.0 / args.limit)) {
        zero_after(q_, 0);
    }

    // Block number `place` of the parts, whose lanes are `at` words behind their first one. `again`: the
    // segment with the noise of the sum.
    void fold(const Block& b, const Segment* again, i64 place, i64 at, int count) {
        u32* words = args_.out + at;
        u32& scale = args_.out[args_.lane_words + place];
        const bool wide = is_wide(b.segment->dtype);
        const int top = largest_exponent(place, wide);
        scale = 0;
        u32 largest = 0;
        if (top == kLost)
            scale = wide ? 0x7FF80000u : 0x7FC00000u;
        else if (top != kNothing)
            largest = add(b, top, place, at, count, wide);
        if (largest == 0) return void(__builtin_memset(words, 0, sizeof(u32) * static_cast<u32>(count)));
        const int power = top - args_.down;
        scale = wide ? Measure::wide_word(largest, power) : pattern_times_power(largest, power);
        if (scale == 0) return void(__builtin_memset(words, 0, sizeof(u32) * static_cast<u32>(count)));
        round({again, b.number, b.offset, b.length}, split_scale(scale, wide), power);
        pack(args_.width, q_, count, words);
    }

 private:
    static constexpr int kLost = 1 << 20, kNothing = -kLost;
    static constexpr int kFar = 60;  // what is so many powers of two below the largest does not count

    const u32* part(i64 rank) const { return reinterpret_cast<const u32*>(args_.parts[rank]); }
    u32 scale_of(i64 rank, i64 place) const { return part(rank)[args_.lane_words + place]; }

    int largest_exponent(i64 place, bool wide) const {
        int top = kNothing;
        for (i64 r = 0; r < args_.ranks; r++) {
            const u32 s = scale_of(r, place);
            if (nonfinite_scale(s, wide)) return kLost;
            if (s == 0) continue;
            const int e = split_scale(s, wide).e;
            top = e > top ? e : top;
        }
        return top;
    }

    // Leaves the sum times 2^-top; returns the pattern of the largest magnitude.
    u32 add(const Block& b, int top, i64 place, i64 at, int count, bool wide) {
        const int n = padded(b.length);
        const BlockNoise noise = noise_of(b);
        for (int i = 0; i < n; i += kLanes) {
            store(noise_ + i, noise.at<false>(i));
            store(sum_.at + i, F{});
        }
        for (i64 r = 0; r < args_.ranks; r++) {
            const u32 s = scale_of(r, place);
            const Scale scale = split_scale(s, wide);
            if (s == 0 || scale.e < top - kFar) continue;
            unpack(args_.width, part(r) + at, count, q_);
            const float level = scale.mant * unit_ * pow2(scale.e - top);
            const u32 shift = args_.shifts[r];
            for (int i = 0; i < n; i += kLanes) {
                const U dither = ((load<U>(noise_ + i) >> 16) + shift) & 0xFFFF;
                const I v = (load<I>(q_.at + i) << 15) - (I)(dither >> 1) + 16384;
                store(sum_.at + i, load<F>(sum_.at + i) + __builtin_convertvector(v, F) * level);
            }
        }
        return largest_float(sum_.at, n);
    }

    void round(const Block& b, Scale scale, int power) {
        const int n = padded(b.length);
        const float first = pow2(power - scale.e), factor = limit_ / scale.mant;
        const BlockNoise noise = noise_of(b);
        for (int i = 0; i < n; i += kLanes)
            store(q_.at + i, quantise<VectorOps, true>(load<F>(sum_.at + i) * first, factor, args_.limit,
                                                       noise.at<false>(i)));
        zero_after(q_, n);
    }

    const HopFoldArgs& args_;
    const float limit_, unit_;
    Integers q_;
    Floats sum_;
    u32 noise_[kBlock];
};

// The sums of narrow lanes, in wide ones.
inline void widen_lanes(const Batch& batch, const WidenArgs& args) {
    Integers q, sum;
    zero_after(sum, 0);
    u32* out = args.out;
    for (Cursor<LaneWords> c(batch, LaneWords(args.from, args.padded)); c.next();) {
        const int n = args.padded ? padded(c.block.length) : c.block.length;
        const i64 at = c.word - args.base;
        unpack(args.from, reinterpret_cast<const u32*>(args.parts[0]) + at, c.words, sum);
        for (i64 r = 1; r < args.ranks; r++) {
            unpack(args.from, reinterpret_cast<const u32*>(args.parts[r]) + at, c.words, q);
            for (int i = 0; i < n; i += kLanes) store(sum.at + i, load<I>(sum.at + i) + load<I>(q.at + i));
        }
        zero_after(sum, n);
        const int count = words_of(n, args.to);
        pack(args.to, sum, count, out);
        out += count;
    }
}

inline void hop_fold(const Batch& batch, const HopFoldArgs& args) {
    const FloatEnvironment environment;
    HopFolder folder(args);
    for (Cursor<LaneWords> c(batch, LaneWords(args.width, true)); c.next();) {
        const Segment* again = args.again + (c.block.segment - batch.table);
        folder.fold(c.block, again, c.index - batch.lo, c.word - args.base, c.words);
    }
}

}  // namespace gccomm::GCCOMM_LEVEL
