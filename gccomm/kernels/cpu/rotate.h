// Rotations of blocks: random signs and a fast Walsh-Hadamard transform, its strides ascending, as the
// reference says. A first pass does the strides within `kSpan` coordinates in registers, a last one the rest;
// what comes before the first and after the last is a source or sink of flow.h.
#pragma once
#include "blocks.h"

namespace gccomm::GCCOMM_LEVEL {

#if GCCOMM_SIMD == 512
constexpr int kSpan = 256, kRadix = 4;
#else
constexpr int kSpan = 64, kRadix = 4;  // with half the registers: a pass more
#endif

template <int value>
struct Constant {
    static constexpr int at = value;
};

// f(Constant<0>), f(Constant<1>) ... : a loop whose counter is a constant.
template <int n, int i = 0, class Function>
GCCOMM_FN void unrolled(Function f) {
    if constexpr (i < n) {
        f(Constant<i>{});
        unrolled<n, i + 1>(f);
    }
}
#define GCCOMM_INLINE __attribute__((always_inline))

// Butterflies between vectors whose numbers differ in one bit, lowest bit first.
template <int count, int stride = 1>
GCCOMM_FN void vector_butterflies(F (&v)[count]) {
    if constexpr (stride < count) {
        unrolled<count>([&](auto i) GCCOMM_INLINE {
            if constexpr ((i.at & stride) == 0) {
                const F a = v[i.at], b = v[i.at + stride];
                v[i.at] = a + b;
                v[i.at + stride] = a - b;
            }
        });
        vector_butterflies<count, 2 * stride>(v);
    }
}

template <int stride = 1>
GCCOMM_FN F lane_butterflies(F x) {
    if constexpr (stride < kLanes)
        return lane_butterflies<2 * stride>(lane_butterfly<stride>(x));
    else
        return x;
}

// Butterfly n of those of vector_butterflies(), in the same order.
template <int n, int count>
GCCOMM_FN void vector_butterfly(F (&v)[count]) {
    constexpr int stride = 1 << n / (count / 2), place = n % (count / 2);
    constexpr int i = (place & -stride) * 2 + place % stride;
    const F a = v[i], b = v[i + stride];
    v[i] = a + b;
    v[i + stride] = a - b;
}

// Butterflies between the lanes of vectors 2 k and 2 k + 1 of the span at i; between them and after them
// `meanwhile` is called with 0 and 1.
template <int k, int count, class Source, class Function>
GCCOMM_FN void first_lanes(Source& source, int i, F (&v)[count], Function meanwhile) {
    const Pair pair = source.next(i + k * kPair);
    v[2 * k] = lane_butterflies(pair.low);
    meanwhile(Constant<0>{});
    v[2 * k + 1] = lane_butterflies(pair.high);
    meanwhile(Constant<1>{});
}

// With many registers, the vectors of one span and the lanes of the next have their butterflies by turns:
// they wait for other units of the processor, and each for its own results.
template <int span, class Source>
GCCOMM_FN void first_pass(Source& source, int from, int to, float* out) {
    constexpr int count = span / kLanes;
    constexpr bool by_turns = GCCOMM_SIMD == 512 && count == 16;
    F v[count], next[count];
    const auto lanes = [&](int i, F(&target)[count], auto meanwhile) GCCOMM_INLINE {
        unrolled<count / 2>([&](auto k) GCCOMM_INLINE {
            first_lanes<k.at>(source, i, target, [&](auto part) GCCOMM_INLINE { meanwhile(k, part); });
        });
    };
    const auto nothing = [](auto, auto) GCCOMM_INLINE {};
    const auto two = [&](auto k, auto part) GCCOMM_INLINE {
        if constexpr (by_turns) {
            vector_butterfly<4 * k.at + 2 * part.at>(v);
            vector_butterfly<4 * k.at + 2 * part.at + 1>(v);
        }
    };
    if constexpr (by_turns) lanes(from, v, nothing);
    for (int i = from; i < to; i += span) {
        const bool more = by_turns && i + span < to;
        if constexpr (!by_turns) lanes(i, v, nothing);
        if (more)
            lanes(i + span, next, two);
        else
            vector_butterflies(v);
        unrolled<count>([&](auto k) GCCOMM_INLINE { store(out + i + k.at * kLanes, v[k.at]); });
        if (more) unrolled<count>([&](auto k) GCCOMM_INLINE { v[k.at] = next[k.at]; });
    }
}

// The strides from 1 to length / 2 / radix of `length` coordinates are done; this does the others. They go to
// `sink` times `scale`; to a sink of columns, all that lie length / radix apart at a time. `meanwhile` is
// called with the place of each pair that is done.
template <int radix, bool scaled, class Sink, class Function>
GCCOMM_FN void last_pass(const float* x, int from, int length, float scale, Sink& sink, Function meanwhile) {
    const int stride = length / radix;
    for (int j = from; j < from + stride; j += kPair) {
        F low[radix], high[radix];
        unrolled<radix>([&](auto k) GCCOMM_INLINE {
            low[k.at] = load<F>(x + j + k.at * stride);
            high[k.at] = load<F>(x + j + k.at * stride + kLanes);
        });
        vector_butterflies(low);
        vector_butterflies(high);
        if constexpr (Sink::columns) {
            sink.put_column(j, low, high);
        } else {
            unrolled<radix>([&](auto k) GCCOMM_INLINE {
                const Pair pair{low[k.at], high[k.at]};
                if constexpr (scaled)
                    sink.put(j + k.at * stride, {pair.low * scale, pair.high * scale});
                else
                    sink.put(j + k.at * stride, pair);
            });
        }
        meanwhile(j);
    }
}

template <int radix, bool scaled, class Sink>
GCCOMM_FN void last_pass(const float* x, int from, int length, float scale, Sink& sink) {
    last_pass<radix, scaled>(x, from, length, scale, sink, [](int) GCCOMM_INLINE {});
}

using NearSink = FloatSink<Memory::near>;

// Butterflies in place, with the strides kSpan up to what the last pass does.
inline void middle_pass(float* x, int length) {
    const NearSink sink{{x}};
    if (kSpan * kRadix * 4 == length)
        for (int i = 0; i < length; i += kSpan * 4) last_pass<4, false>(x, i, kSpan * 4, 1, sink);
    else if (kSpan * kRadix * 2 == length)
        for (int i = 0; i < length; i += kSpan * 2) last_pass<2, false>(x, i, kSpan * 2, 1, sink);
}

// Transforms one part of any length in place, but for the strides within kSpan.
inline void finish_part(float* x, int length, float scale) {
    const NearSink sink{{x}};
    middle_pass(x, length);
    if (length >= kSpan * 4) return last_pass<4, true>(x, 0, length, scale, sink);
    if (length >= kSpan * 2) return last_pass<2, true>(x, 0, length, scale, sink);
    last_pass<1, true>(x, 0, length, scale, sink);
}

// The 32 sign words of one rotation of a block.
struct alignas(kLineBytes) Signs {
    u32 words[32];
    void set(const Block& b, int rotation) {
        const Segment& s = *b.segment;
        const BlockKey key = block_key(s.sign0, s.sign1, static_cast<u32>(b.number));
        const u32 first = static_cast<u32>(kBlock + 32 * rotation);
        for (u32 j = 0; j < 32; j += kLanes)
            store(words + j, sign_word((iota() + (first + j)) * kGolden + key.k0, key.k1));
    }
    GCCOMM_FN Pair flip(int i, Pair v) const {
        const u32* at = words + (i & 31);
        const int n = 31 - (i >> 5);
        return {flipped(v.low, load<U>(at), n), flipped(v.high, load<U>(at + kLanes), n)};
    }
};

// Values times a factor, then signs.
template <class Source>
struct FlippedSource {
    Source& source;
    const Signs& signs;
    float factor;
    GCCOMM_FN Pair next(int i) {
        const Pair v = source.next(i);
        return signs.flip(i, {v.low * factor, v.high * factor});
    }
};

template <class Source>
struct ScaledSource {
    Source& source;
    float factor;
    GCCOMM_FN Pair next(int i) {
        const Pair v = source.next(i);
        return {v.low * factor, v.high * factor};
    }
};

// Signs, then values times a factor.
template <class Sink>
struct FlippedSink {
    static constexpr bool columns = false;
    Sink& sink;
    const Signs& signs;
    float factor;
    GCCOMM_FN void put(int i, Pair v) {
        const Pair w = signs.flip(i, v);
        sink.put(i, {w.low * factor, w.high * factor});
    }
};

template <class Sink>
struct SignedSink {
    static constexpr bool columns = false;
    Sink& sink;
    const Signs& signs;
    GCCOMM_FN void put(int i, Pair v) { sink.put(i, signs.flip(i, v)); }
};

// Rotates blocks; sources give whole pairs up to the padded length.
class Rotator {
 public:
    explicit Rotator(int count) : count_(count) {}
    Rotator(const Rotator&) = delete;
    Rotator& operator=(const Rotator&) = delete;

    float* values() { return y_.at; }  // where rotated blocks are left

    void set(const Block& b) {
        for (int t = 0; t < count_; t++) signs_[t].set(b, t);
    }

    // Into values(). `factor(L)` is what coordinates of a part of L are multiplied by first.
    template <class Source, class Factor>
    void rotate(Source source, int length, Factor factor) {
        const int n = padded(length);
        for (int i = 0; i < n; i += part_of(n - i)) {
            const int part = part_of(n - i);
            FlippedSource<Source> flipped{source, signs_[0], factor(part)};
            begin(flipped, i, part);
            finish_part(y_.at + i, part, count_ == 1 ? part_scale(part) : 1.0f);
            if (count_ == 2) again(i, part);
        }
    }

    // A block of 1024, all but the last pass, which is finish_whole().
    template <class Source>
    GCCOMM_FN void start_whole(Source source, float factor) {
        FlippedSource<Source> flipped{source, signs_[0], factor};
        begin(flipped, 0, kBlock);
        middle_pass(y_.at, kBlock);
        if (count_ < 2) return;
        last_pass<kRadix, false>(y_.at, 0, kBlock, 1, near_);
        NearFloats staged{y_.at};
        FlippedSource<NearFloats> second{staged, signs_[1], 1.0f / 32};
        begin(second, 0, kBlock);
        middle_pass(y_.at, kBlock);
    }

    template <class Sink>
    GCCOMM_FN void finish_whole(Sink& sink) {
        last_pass<kRadix, false>(y_.at, 0, kBlock, 1, sink);
    }

    // Rotates a block back and multiplies it by `factor`: from `source` into values().
    template <class Source>
    void unrotate(Source& source, int length, float factor) {
        const int n = padded(length);
        for (int i = 0; i < n; i += part_of(n - i)) {
            const int part = part_of(n - i);
            ScaledSource<Source> scaled{source, unscale(part)};
            begin(scaled, i, part);
            finish_part(y_.at + i, part, 1);
            for (int t = count_ - 1; t >= 0; t--) unflip(i, part, t, t == 0 ? factor : 1.0f);
        }
    }

    // The same of a block of 1024, all but the last pass; the source has multiplied by unscale(kBlock).
    template <class Source>
    GCCOMM_FN void start_whole_back(Source& source) {
        begin(source, 0, kBlock);
        middle_pass(y_.at, kBlock);
        if (count_ < 2) return;
        FlippedSink<const NearSink> second{near_, signs_[1], 1};
        last_pass<kRadix, false>(y_.at, 0, kBlock, 1, second);
        NearFloats staged{y_.at};
        begin(staged, 0, kBlock);
        middle_pass(y_.at, kBlock);
    }

    template <class Sink>
    GCCOMM_FN void finish_whole_back(Sink& sink, float factor) {
        FlippedSink<Sink> flipped{sink, signs_[0], factor};
        finish_whole(flipped);
    }

    // The same, without a factor; `meanwhile` as of last_pass().
    template <class Sink, class Function>
    GCCOMM_FN void finish_whole_back(Sink& sink, Function meanwhile) {
        SignedSink<Sink> flipped{sink, signs_[0]};
        last_pass<kRadix, false>(y_.at, 0, kBlock, 1, flipped, meanwhile);
    }

    // What a part is multiplied by before it is rotated back.
    float unscale(int part) const {
        return count_ == 2 ? 32.0f / static_cast<float>(part) : part_unscale(part);
    }

 private:
    template <class Source>
    GCCOMM_FN void begin(Source& source, int from, int part) {
        if (part >= kSpan)
            first_pass<kSpan>(source, from, from + part, y_.at);
        else if (part == kSmallestPart)
            first_pass<kSmallestPart>(source, from, from + part, y_.at);
        else
            first_pass<2 * kSmallestPart>(source, from, from + part, y_.at);
    }

    void again(int from, int part) {
        NearFloats staged{y_.at};
        FlippedSource<NearFloats> flipped{staged, signs_[1], 1.0f / 32};
        begin(flipped, from, part);
        finish_part(y_.at + from, part, 1);
    }

    // Takes the signs of rotation t off, and transforms once more if there is another below it.
    void unflip(int from, int part, int t, float factor) {
        NearFloats staged{y_.at};
        FlippedSource<NearFloats> flipped{staged, signs_[t], factor};
        if (t == 0) {
            for (int i = from; i < from + part; i += kPair) near_.put(i, flipped.next(i));
            return;
        }
        begin(flipped, from, part);
        finish_part(y_.at + from, part, 1);
    }

    int count_;
    Signs signs_[2];
    Floats y_;
    const NearSink near_{{y_.at}};
};

}  // namespace gccomm::GCCOMM_LEVEL
