// Sinks that turn the values of a block into integers, with shared dither.
#pragma once
#include "lanes.h"
#include "rotate.h"

namespace gccomm::GCCOMM_LEVEL {

// Noise of the coordinates of a block.
struct BlockNoise {
    BlockKey key;
    static constexpr u32 step = static_cast<u32>(kLanes) * kGolden;
    GCCOMM_FN U counter(int i) const { return (iota() + static_cast<u32>(i)) * kGolden + key.k0; }
    GCCOMM_FN U bits(U counter) const { return noise(counter, key.k1); }
};

GCCOMM_FN BlockNoise noise_of(const Block& b) {
    return {block_key(b.segment->key0, b.segment->key1, static_cast<u32>(b.number))};
}

struct Rounding {
    float factor;
    i32 limit;
    u32 shift;  // in the upper half
    BlockNoise noise;
};

// What the sinks that round have in common: values become integers, whose check words are summed.
template <bool checked, bool even>
class Rounder {
 public:
    static constexpr bool columns = false;
    GCCOMM_FN explicit Rounder(const Rounding& r) : r_(r), first_(r.noise.counter(0)) {}

    Check check;

 protected:
    GCCOMM_FN I round(F v, U counter) {
        const U h = r_.noise.bits(counter);
        const I q = quantise<VectorOps, even>(v, r_.factor, r_.limit, h + r_.shift);
        if constexpr (checked) check.add(q, h);
        return q;
    }
    GCCOMM_FN I dithered(F v, U counter) const {
        return GCCOMM_LEVEL::dithered<VectorOps, even>(v, r_.factor, r_.limit, shifted(bits(counter)));
    }
    GCCOMM_FN U bits(U counter) const { return r_.noise.bits(counter); }
    GCCOMM_FN U shifted(U h) const { return h + r_.shift; }
    GCCOMM_FN I fixed(F v) const {
        return VectorOps::round(VectorOps::clamp(v * r_.factor, static_cast<float>(r_.limit)));
    }
    GCCOMM_FN U counter(int i) const { return first_ + static_cast<u32>(i) * kGolden; }

 private:
    const Rounding r_;
    const U first_;
};

// Pairs come one after the other if `ordered`; integers go to `q`.
template <bool checked, bool even, bool ordered>
class RoundingSink : public Rounder<checked, even> {
 public:
    GCCOMM_FN RoundingSink(const Rounding& r, i32* q)
        : Rounder<checked, even>(r), out_(q), next_(this->counter(0)) {}

    GCCOMM_FN void put_part(int i, Pair v, int) { put(i, v); }  // zeros become zeros

    GCCOMM_FN void put(int i, Pair v) {
        const U c = ordered ? next_ : this->counter(i);
        store(out_ + i, this->round(v.low, c));
        store(out_ + i + kLanes, this->round(v.high, c + BlockNoise::step));
        if constexpr (ordered) next_ += 2 * BlockNoise::step;
    }

 private:
    i32* out_;
    U next_;
};

// A sink that keeps the largest pattern of what it sees.
template <class Sink>
class WatchingSink : public Sink {
 public:
    using Sink::Sink;
    GCCOMM_FN void put(int i, Pair v) {
        const I low = (I)v.low & 0x7FFFFFFF, up = (I)v.high & 0x7FFFFFFF;
        high_ = larger(high_, larger(low, up));
        Sink::put(i, v);
    }
    GCCOMM_FN void put_part(int i, Pair v, int) { put(i, v); }
    GCCOMM_FN void put_column(int j, const F (&low)[4], const F (&high)[4]) {
        unrolled<4>([&](auto k) GCCOMM_INLINE {
            const I a = (I)low[k.at] & 0x7FFFFFFF, b = (I)high[k.at] & 0x7FFFFFFF;
            high_ = larger(high_, larger(a, b));
        });
        Sink::put_column(j, low, high);
    }
    GCCOMM_FN u32 largest() const { return static_cast<u32>(largest_lane(high_)); }

 private:
    I high_{};
};

// Packs as it rounds: for blocks of 1024 in 4, 8 or 16 bits, where coordinates 256 apart share words. Columns
// come one after the other.
template <bool checked, int width>
class PackingSink : public Rounder<checked, true> {
 public:
    static constexpr bool columns = true;
    GCCOMM_FN PackingSink(const Rounding& r, u32* words)
        : Rounder<checked, true>(r), words_(words), next_(this->counter(0)) {}

    GCCOMM_FN void put_column(int j, const F (&low)[4], const F (&high)[4]) {
        put_vectors(j, low);
        next_ += BlockNoise::step;
        put_vectors(j + kLanes, high);
        next_ += BlockNoise::step;
    }

 private:
    GCCOMM_FN void put_vectors(int j, const F (&v)[4]) {
        U even_lanes, odd_lanes;  // of the word of four: each two in lanes of 16 bits
        if constexpr (checked) {
            U q[4];
            unrolled<4>([&](auto k)
                            GCCOMM_INLINE { q[k.at] = (U)this->round(v[k.at], column_counter(k.at)); });
            even_lanes = q[0] + (q[2] << 16);
            odd_lanes = q[1] + (q[3] << 16);
        } else {
            I y[4];  // what is above the point of the third and fourth is where it belongs already
            unrolled<4>([&](auto k)
                            GCCOMM_INLINE { y[k.at] = this->dithered(v[k.at], column_counter(k.at)); });
            even_lanes = (U)(y[0] >> 16) + ((U)y[2] & 0xFFFF0000u);
            odd_lanes = (U)(y[1] >> 16) + ((U)y[3] & 0xFFFF0000u);
        }
        if constexpr (width == 16) {
            store(words_ + j, even_lanes);
            store(words_ + j + 256, odd_lanes);
            return;
        }
        const U word = even_lanes + (odd_lanes << 8);
        if (width == 8 || j < 128) return store(words_ + j, word);
        u32* other = words_ + j - 128;
        store(other, load<U>(other) + (word << 4));
    }

    GCCOMM_FN U column_counter(int column) const { return next_ + 256 * static_cast<u32>(column) * kGolden; }

    u32* words_;
    U next_;  // counter of the next column's first vector
};

// The points of a grid: for each of g steps, the point below in the upper half, the way to the next in the
// lower.
struct Grid {
    i32 g = 0;
    i32 steps[kBlock];

    // From [g, low of each step, gap of each step].
    void set(const i32* table) {
        g = table[0];
        for (int i = 0; i < g; i++) steps[i] = (table[1 + i] << 16) | table[1 + g + i];
    }
};

// Rounds to the points of a grid.
template <bool checked>
class GridSink : public Rounder<checked, true> {
 public:
    GCCOMM_FN GridSink(const Rounding& r, const Grid& grid, i32* q)
        : Rounder<checked, true>(r), grid_(grid), out_(q) {}

    GCCOMM_FN void put(int i, Pair v) { put_part(i, v, kPair); }

    // Coordinates from `count` on do not count, though zeros may become other integers.
    GCCOMM_FN void put_part(int i, Pair v, int count) {
        put_vector(i, v.low, iota_int() < count);
        put_vector(i + kLanes, v.high, iota_int() < count - kLanes);
    }

 private:
    GCCOMM_FN void put_vector(int i, F v, I inside) {
        const U h = this->bits(this->counter(i));
        const I u = this->fixed(v) + (grid_.g << 15);
        const I index = smaller(u >> 16, I{} + (grid_.g - 1));
        const I step = gathered(grid_.steps, index);
        const I q = inside & to_grid<VectorOps>(u, step >> 16, step & 0xFFFF, grid_.g, this->shifted(h));
        store(out_ + i, q);
        if constexpr (checked) this->check.add(q, h);
    }

    const Grid& grid_;
    i32* out_;
};

}  // namespace gccomm::GCCOMM_LEVEL
