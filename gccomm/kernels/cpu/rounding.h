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

    // That of half a block later; without check words only its upper half counts.
    template <bool whole>
    static GCCOMM_FN U later(U h) {
        if constexpr (whole) return later_noise(h);
        return h << 16;
    }

    // Of the vector at coordinate i, a multiple of its length.
    template <bool whole>
    GCCOMM_FN U at(int i) const {
        const U h = bits(counter(i % kHalf));
        return i < kHalf ? h : later<whole>(h);
    }
};

// The same, vector after vector, from any coordinate on.
template <bool whole>
class NoiseInOrder {
 public:
    GCCOMM_FN explicit NoiseInOrder(const BlockNoise& noise) : noise_(noise) { seek(0); }

    GCCOMM_FN void seek(int i) { counter_ = noise_.counter(i % kHalf); }

    // Of the vector at i, which follows the last one.
    GCCOMM_FN U next(int i) {
        U h;
        if (i >= kHalf)
            h = BlockNoise::later<whole>(noise_.bits(counter_));
        else if (i + kLanes <= kHalf)
            h = noise_.bits(counter_);
        else
            h = across(i);
        counter_ += BlockNoise::step;
        if (i < kHalf && i + kLanes >= kHalf) seek(i + kLanes);
        return h;
    }

 private:
    // Of a vector with coordinates of both halves.
    GCCOMM_FN U across(int i) const {
        const U place = iota() + static_cast<u32>(i), half = U{} + static_cast<u32>(kHalf);
        const U h = noise_.bits((place & (half - 1)) * kGolden + noise_.key.k0);
        return select((I)(place >= half), BlockNoise::later<whole>(h), h);
    }

    const BlockNoise noise_;
    U counter_;
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
    GCCOMM_FN explicit Rounder(const Rounding& r) : r_(r) {}

    Check check;

 protected:
    // By noise h of its coordinates.
    GCCOMM_FN I round(F v, U h) {
        const I q = quantise<VectorOps, even>(v, r_.factor, r_.limit, shifted(h));
        if constexpr (checked) check.add(q, h);
        return q;
    }
    GCCOMM_FN U bits(U counter) const { return r_.noise.bits(counter); }
    GCCOMM_FN U later(U h) const { return BlockNoise::later<checked>(h); }
    GCCOMM_FN U at(int i) const { return r_.noise.template at<checked>(i); }
    GCCOMM_FN U shifted(U h) const { return h + r_.shift; }
    // Shifts the dither in either half.
    GCCOMM_FN U shifted_both(U h) const { return (U)((W16)h + (W16)(U{} + (r_.shift | r_.shift >> 16))); }
    GCCOMM_FN I fixed(F v) const {
        return VectorOps::round(VectorOps::clamp(v * r_.factor, static_cast<float>(r_.limit)));
    }

 private:
    const Rounding r_;
};

// Pairs come one after the other; integers go to `q`.
template <bool checked, bool even>
class RoundingSink : public Rounder<checked, even> {
 public:
    GCCOMM_FN RoundingSink(const Rounding& r, i32* q) : Rounder<checked, even>(r), out_(q), noise_(r.noise) {}

    GCCOMM_FN void put_part(int i, Pair v, int) { put(i, v); }  // zeros become zeros

    GCCOMM_FN void put(int i, Pair v) {
        store(out_ + i, this->round(v.low, noise_.next(i)));
        store(out_ + i + kLanes, this->round(v.high, noise_.next(i + kLanes)));
    }

 private:
    i32* out_;
    NoiseInOrder<checked> noise_;
};

// The same for blocks of 1024, whose columns of coordinates 256 apart come one after the other.
template <bool checked, bool even>
class ColumnSink : public Rounder<checked, even> {
 public:
    static constexpr bool columns = true;
    GCCOMM_FN ColumnSink(const Rounding& r, i32* q)
        : Rounder<checked, even>(r), out_(q), next_(r.noise.counter(0)) {}

    GCCOMM_FN void put_column(int j, const F (&low)[4], const F (&high)[4]) {
        put_vectors(j, low);
        put_vectors(j + kLanes, high);
    }

 private:
    GCCOMM_FN void put_vectors(int j, const F (&v)[4]) {
        unrolled<2>([&](auto k) GCCOMM_INLINE {
            const U h = this->bits(next_ + 256 * static_cast<u32>(k.at) * kGolden);
            i32* out = out_ + j + 256 * k.at;
            store(out, this->round(v[k.at], h));
            store(out + kHalf, this->round(v[k.at + 2], this->later(h)));
        });
        next_ += BlockNoise::step;
    }

    i32* out_;
    U next_;  // counter of the next vector
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
        : Rounder<checked, true>(r), words_(words), next_(r.noise.counter(0)) {}

    GCCOMM_FN void put_column(int j, const F (&low)[4], const F (&high)[4]) {
        put_vectors(j, low);
        put_vectors(j + kLanes, high);
    }

 private:
    GCCOMM_FN void put_vectors(int j, const F (&v)[4]) {
        const U even_lanes = two(v[0], v[2], next_), odd_lanes = two(v[1], v[3], next_ + 256 * kGolden);
        next_ += BlockNoise::step;
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

    // The integers of two vectors half a block apart, in lanes of 16 bits.
    GCCOMM_FN U two(F first, F second, U counter) {
        const U h = this->bits(counter);
        if constexpr (checked) {
            const U q = (U)this->round(first, h);
            return q + ((U)this->round(second, this->later(h)) << 16);
        }
        const U dither = this->shifted_both(h);
        const I y = this->fixed(first) + (I)(dither >> 16);
        // What is above the point of the second is where it belongs already.
        const I z = this->fixed(second) + (I)(dither & 0xFFFFu);
        return (U)(y >> 16) + ((U)z & 0xFFFF0000u);
    }

    u32* words_;
    U next_;  // counter of the next vector
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
        const U h = this->at(i);
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
