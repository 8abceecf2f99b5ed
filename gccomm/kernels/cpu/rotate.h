// Rotations of blocks: random signs and Hadamard matrices, their butterflies in the order that the reference
// has. A first pass does those within runs of `kSpan` coordinates, a last one those between runs; what comes
// before the first and after the last is a source or sink of flow.h.
#pragma once
#include "blocks.h"

namespace gccomm::GCCOMM_LEVEL {

constexpr int kRow = 16, kSpan = kRow * kRow;  // of longer parts, rows and runs of them
constexpr int kRadix = kBlock / kSpan;

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

// Butterflies between vectors whose numbers differ in one bit, lowest bit first. `one`: see one_apart().
template <int count, int stride = 1>
GCCOMM_FN void vector_butterflies(F (&v)[count], F one) {
    if constexpr (stride < count) {
        unrolled<count>([&](auto i) GCCOMM_INLINE {
            if constexpr ((i.at & stride) == 0) {
                const F a = v[i.at], b = v[i.at + stride];
                v[i.at] = a + b;
                v[i.at + stride] = difference(a, b, one);
            }
        });
        vector_butterflies<count, 2 * stride>(v, one);
    }
}

template <int stride = 1>
GCCOMM_FN F lane_butterflies(F x) {
    if constexpr (stride < kLanes)
        return lane_butterflies<2 * stride>(lane_butterfly<stride>(x));
    else
        return x;
}

// All strides within spans of up to 128, in registers.
template <int span, class Source>
GCCOMM_FN void short_pass(Source& source, int from, int to, float* out) {
    constexpr int count = span / kLanes;
    const F one = one_apart();
    for (int i = from; i < to; i += span) {
        F v[count];
        unrolled<count / 2>([&](auto k) GCCOMM_INLINE {
            const Pair pair = source.next(i + k.at * kPair);
            v[2 * k.at] = lane_butterflies(pair.low);
            v[2 * k.at + 1] = lane_butterflies(pair.high);
        });
        vector_butterflies(v, one);
        unrolled<count>([&](auto k) GCCOMM_INLINE { store(out + i + k.at * kLanes, v[k.at]); });
    }
}

#if GCCOMM_SIMD == 512
// Runs: butterflies between rows, then row v turned by v, and butterflies between rows again. A row is a
// vector.
template <bool back, class Source>
GCCOMM_FN void run_pass(Source& source, int from, int to, float* out) {
    const F one = one_apart();
    for (int i = from; i < to; i += kSpan) {
        F v[kRow];
        unrolled<kRow / 2>([&](auto k) GCCOMM_INLINE {
            const Pair pair = source.next(i + k.at * kPair);
            v[2 * k.at] = pair.low;
            v[2 * k.at + 1] = pair.high;
        });
        vector_butterflies(v, one);
        unrolled<kRow>([&](auto k) GCCOMM_INLINE { v[k.at] = turned<back ? kRow - k.at : k.at>(v[k.at]); });
        vector_butterflies(v, one);
        unrolled<kRow>([&](auto k) GCCOMM_INLINE { store(out + i + k.at * kRow, v[k.at]); });
    }
}
#else
// Butterflies between rows whose numbers differ in `stride`, then in twice that; `load` and `put` are called
// with places in a run.
template <int stride, class Load, class Put>
GCCOMM_FN void four_rows(Load load, Put put) {
    const F one = one_apart();
    for (int row = 0; row < kRow; row += (row + 1) % stride == 0 ? 3 * stride + 1 : 1)
        for (int at = kRow * row; at < kRow * (row + 1); at += kPair) {
            F low[4], high[4];
            unrolled<4>([&](auto k) GCCOMM_INLINE {
                const Pair pair = load(at + k.at * stride * kRow);
                low[k.at] = pair.low;
                high[k.at] = pair.high;
            });
            vector_butterflies(low, one);
            vector_butterflies(high, one);
            unrolled<4>([&](auto k)
                            GCCOMM_INLINE { put(at + k.at * stride * kRow, {low[k.at], high[k.at]}); });
        }
}

// Runs: butterflies between rows, then row v turned by v, and butterflies between rows again. With fewer
// registers than rows: in memory, where rows that are turned are read from the midst of two of a kind.
template <bool back, class Source>
inline void run_pass(Source& source, int from, int to, float* out) {
    alignas(kLineBytes) float rows[kSpan], twice[2 * kSpan];
    const auto place = [](int at) { return 2 * at - at % kRow; };
    const NearFloats near{rows};
    const FloatSink<Memory::near> keep{{rows}}, first{{twice}}, second{{twice + kRow}};
    for (int i = from; i < to; i += kSpan) {
        four_rows<1>([&](int at) GCCOMM_INLINE { return source.next(i + at); },
                     [&](int at, Pair v) GCCOMM_INLINE { keep.put(at, v); });
        four_rows<4>([&](int at) GCCOMM_INLINE { return near.next(at); },
                     [&](int at, Pair v) GCCOMM_INLINE {
                         first.put(place(at), v);
                         second.put(place(at), v);
                     });
        four_rows<1>(
            [&](int at) GCCOMM_INLINE {
                const int turn = back ? (kRow - at / kRow) % kRow : at / kRow;
                return NearFloats{twice}.next(place(at) + turn);
            },
            [&](int at, Pair v) GCCOMM_INLINE { keep.put(at, v); });
        const FloatSink<Memory::near> done{{out + i}};
        four_rows<4>([&](int at) GCCOMM_INLINE { return near.next(at); },
                     [&](int at, Pair v) GCCOMM_INLINE { done.put(at, v); });
    }
}
#endif

// The butterflies within `radix` parts of `length` coordinates are done; this does those between them. They
// go to `sink` times `scale`; to a sink of columns, all that lie length / radix apart at a time. `meanwhile`
// is called with the place of each pair that is done.
template <int radix, bool scaled, class Sink, class Function>
GCCOMM_FN void last_pass(const float* x, int from, int length, float scale, Sink& sink, Function meanwhile) {
    const int stride = length / radix;
    const F one = one_apart();
    for (int j = from; j < from + stride; j += kPair) {
        F low[radix], high[radix];
        unrolled<radix>([&](auto k) GCCOMM_INLINE {
            low[k.at] = load<F>(x + j + k.at * stride);
            high[k.at] = load<F>(x + j + k.at * stride + kLanes);
        });
        vector_butterflies(low, one);
        vector_butterflies(high, one);
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

// Transforms one part of any length in place, but for what is within runs.
inline void finish_part(float* x, int length, float scale) {
    const NearSink sink{{x}};
    if (length == 4 * kSpan) return last_pass<4, true>(x, 0, length, scale, sink);
    if (length == 2 * kSpan) return last_pass<2, true>(x, 0, length, scale, sink);
    last_pass<1, true>(x, 0, length, scale, sink);
}

// The 32 sign words of one rotation of a block.
struct alignas(kLineBytes) Signs {
    u32 words[32];
    void set(const Block& b, int rotation) {
        const Segment& s = *b.segment;
        const BlockKey key = block_key(s.sign0, s.sign1, static_cast<u32>(b.number));
        set(key, static_cast<u32>(kBlock + 32 * rotation));
    }
    void set(BlockKey key, u32 first) {
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
            begin<false>(flipped, i, part);
            finish_part(y_.at + i, part, count_ == 1 ? part_scale(part) : 1.0f);
            if (count_ == 2) again(i, part);
        }
    }

    // A block of 1024, all but the last pass, which is finish_whole().
    template <class Source>
    GCCOMM_FN void start_whole(Source source, float factor) {
        FlippedSource<Source> flipped{source, signs_[0], factor};
        begin<false>(flipped, 0, kBlock);
        if (count_ < 2) return;
        last_pass<kRadix, false>(y_.at, 0, kBlock, 1, near_);
        NearFloats staged{y_.at};
        FlippedSource<NearFloats> second{staged, signs_[1], 1.0f / 32};
        begin<false>(second, 0, kBlock);
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
            begin<true>(scaled, i, part);
            finish_part(y_.at + i, part, 1);
            for (int t = count_ - 1; t >= 0; t--) unflip(i, part, t, t == 0 ? factor : 1.0f);
        }
    }

    // The same of a block of 1024, all but the last pass; the source has multiplied by unscale(kBlock).
    template <class Source>
    GCCOMM_FN void start_whole_back(Source& source) {
        begin<true>(source, 0, kBlock);
        if (count_ < 2) return;
        FlippedSink<const NearSink> second{near_, signs_[1], 1};
        last_pass<kRadix, false>(y_.at, 0, kBlock, 1, second);
        NearFloats staged{y_.at};
        begin<true>(staged, 0, kBlock);
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
    // The first pass, of the transform or of its inverse.
    template <bool back, class Source>
    GCCOMM_FN void begin(Source& source, int from, int part) {
        if (part >= kSpan)
            run_pass<back>(source, from, from + part, y_.at);
        else if (part == kSmallestPart)
            short_pass<kSmallestPart>(source, from, from + part, y_.at);
        else
            short_pass<2 * kSmallestPart>(source, from, from + part, y_.at);
    }

    void again(int from, int part) {
        NearFloats staged{y_.at};
        FlippedSource<NearFloats> flipped{staged, signs_[1], 1.0f / 32};
        begin<false>(flipped, from, part);
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
        begin<true>(flipped, from, part);
        finish_part(y_.at + from, part, 1);
    }

    int count_;
    Signs signs_[2];
    Floats y_;
    const NearSink near_{{y_.at}};
};

}  // namespace gccomm::GCCOMM_LEVEL
