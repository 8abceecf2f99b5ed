// Maxima and energies of blocks, of their coordinates or of the rotated ones.
#pragma once
#include "maxima.h"
#include "rotate.h"

namespace gccomm::GCCOMM_LEVEL {

constexpr u32 kInfinity = 0x7F800000u;
constexpr u32 kSmall =
    27u << 23;  // 2^-100: blocks whose maximum is below are computed from 2^64 times as much

// A sink that keeps only the largest pattern.
struct LargestSink {
    static constexpr bool columns = false;
    I high{};
    GCCOMM_FN void put(int, Pair v) {
        const I low = (I)v.low & 0x7FFFFFFF, up = (I)v.high & 0x7FFFFFFF;
        high = larger(high, larger(low, up));
    }
    GCCOMM_FN u32 largest() const { return static_cast<u32>(largest_lane(high)); }
};

// One that stores what it sees, too.
struct KeepingSink : LargestSink {
    float* out;
    GCCOMM_FN explicit KeepingSink(float* address) : out(address) {}
    GCCOMM_FN void put(int i, Pair v) {
        LargestSink::put(i, v);
        store(out + i, v.low);
        store(out + i + kLanes, v.high);
    }
};

// Sum of rint(|x| * 1024 / M)^2, `largest` the pattern of M; 0 where that is zero or not finite.
template <class Source>
inline u32 energy_of(const Source& source, int n, u32 largest) {
    if (largest == 0 || largest >= kInfinity) return 0;
    const float factor = 1024.0f / float_of(largest);
    I sum{};
    const auto add = [&](F x) GCCOMM_INLINE {
        const I z = nearest(x * factor);
        sum += z * z;
    };
    int i = 0;
    for (; i + kPair <= n; i += kPair) {
        const Pair v = source.next(i);
        add(v.low);
        add(v.high);
    }
    if (i < n) {
        const Pair v = source.part(i, n - i);
        add(v.low);
        add(v.high);
    }
    return sum_of_lanes((U)sum);
}

// Scale words with energies, or of rotated blocks.
class Measure {
 public:
    explicit Measure(int rotations) : rotations_(rotations), rotator_(rotations) {}

    // Leaves the rotated block at `kept`, if that is not null (float64: never).
    u32 scale(const Block& b, u32* energy, float* kept) {
        kept_ = kept;
        return scale(b, energy);
    }

    u32 scale(const Block& b, u32* energy) {
        if (rotations_ == 0) return energy == nullptr ? block_maximum(b) : plain(b, *energy);
        rotator_.set(b);
        return is_wide(b.segment->dtype) ? rotated_wide(b, energy) : rotated(b, energy);
    }

 private:
    u32 plain(const Block& b, u32& energy) {
        const Segment& s = *b.segment;
        const u32 word = block_maximum(b);
        energy = 0;
        if (word == 0 || nonfinite_scale(word, is_wide(s.dtype))) return word;
        if (is_wide(s.dtype)) {
            wide_values(b, wide_.at);
            const Power power(-split_scale(word, true).e);
            flow(ScaledDoubles{wide_.at, power.first, power.second}, NearSink{{x_.at}}, b.length);
            energy = energy_of(NearFloats{x_.at}, b.length, largest_float(x_.at, b.length));
        } else if (word >= kSmall && s.src != 0 && s.res_in == 0) {
            with_source(s.dtype, block_address(s.src, b),
                        [&](auto source) { energy = energy_of(source, b.length, word); });
        } else {
            block_values(b, x_.at);
            if (word < kSmall) raise(b.length);
            energy = energy_of(NearFloats{x_.at}, b.length, largest_float(x_.at, b.length));
        }
        return word;
    }

    void raise(int n) {
        for (int i = 0; i < n; i++) x_.at[i] *= 0x1p64f;
    }

    template <class Source>
    u32 largest(Source source, int length, u32* energy) {
        const auto factor = [](int part) { return 1.0f / static_cast<float>(part); };
        if (length == kBlock && energy == nullptr) {
            rotator_.start_whole(source, factor(kBlock));
            if (kept_ != nullptr) return finish(KeepingSink(kept_));
            return finish(LargestSink{});
        }
        rotator_.rotate(source, length, factor);
        if (kept_ != nullptr)
            __builtin_memcpy(kept_, rotator_.values(), sizeof(float) * static_cast<u32>(padded(length)));
        const u32 found = largest_float(rotator_.values(), padded(length));
        if (energy != nullptr) *energy = energy_of(NearFloats{rotator_.values()}, padded(length), found);
        return found;
    }

    template <class Sink>
    u32 finish(Sink sink) {
        rotator_.finish_whole(sink);
        return sink.largest();
    }

    u32 rotated(const Block& b, u32* energy) {
        const Segment& s = *b.segment;
        u32 found = 0;
        if (s.src != 0 && s.res_in == 0 && b.length == padded(b.length)) {
            with_source(s.dtype, block_address(s.src, b),
                        [&](auto source) { found = largest(source, b.length, energy); });
        } else {
            padded_values(b, x_.at);
            found = largest(NearFloats{x_.at}, b.length, energy);
        }
        if (found >= kInfinity) return 0x7FC00000u;
        return found >= kSmall || block_maximum(b) == 0 ? found : small(b, energy);
    }

    u32 small(const Block& b, u32* energy) {
        kept_ = nullptr;  // subnormal numbers were seen
        padded_values(b, x_.at);
        raise(b.length);
        const u32 word = pattern_times_power(largest(NearFloats{x_.at}, b.length, energy), -64);
        return word == 0 ? 1 : word;
    }

    u32 rotated_wide(const Block& b, u32* energy) {
        const u32 word = block_maximum(b);
        if (energy != nullptr) *energy = 0;
        if (nonfinite_scale(word, true)) return 0x7FF80000u;
        if (word == 0) return 0;
        padded_values(b, wide_.at);
        const int e = split_scale(word, true).e;
        const Power power(-e);
        const u32 found = largest(ScaledDoubles{wide_.at, power.first, power.second}, b.length, energy);
        return wide_word(found, e);
    }

 public:
    // The float64 scale word of a float32 pattern times 2^e.
    static u32 wide_word(u32 pattern, int e) {
        const Power power(e);
        const double value = static_cast<double>(float_of(pattern)) * power.first * power.second;
        const u32 word = wide_scale(__builtin_bit_cast(u64, value));
        return word < 0x7FEFFFFFu ? word : 0x7FEFFFFFu;
    }

 private:
    int rotations_;
    float* kept_ = nullptr;
    Rotator rotator_;
    Floats x_;
    Doubles wide_;
};

inline bool maxima(const Batch& batch, const MaximaArgs& args) {
    const FloatEnvironment environment;
    Measure measure(args.rotations);
    float* kept = args.kept;
    for (Cursor<NoWords> c(batch, {}); c.next();) {
        const i64 place = c.index - batch.lo;
        u32* energy = args.energy == nullptr ? nullptr : args.energy + place;
        args.out[place] = measure.scale(c.block, energy, kept);
        if (kept != nullptr) kept += padded(c.block.length);
    }
    return environment.normal();
}

}  // namespace gccomm::GCCOMM_LEVEL
