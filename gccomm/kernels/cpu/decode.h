// Lane codecs, back: unpack the sums, take the shared dither off, scale, store.
#pragma once
#include "encode.h"
#include "flow.h"

namespace gccomm::GCCOMM_LEVEL {

struct Unrounding {
    float first, second;  // factors, applied one after the other
    bool twice;           // whether there is a second
    Centre centre;
    BlockNoise noise;
};

// Sum of the squares of a block, in levels.
struct Energy {
    F squares{};
    GCCOMM_FN void add(F value, I inside) {
        const F level = (F)((I)(value * 0x1p-15f) & inside);
        squares += level * level;
    }
    GCCOMM_FN float total() const {
        float sum = 0;
        for (int k = 0; k < kLanes; k++) sum += squares[k];
        return sum;
    }
};

// What goes into a sum besides the values.
enum Extras { none = 0, check_words = 1, energies = 2 };

// Decoded values.
template <bool subtract, int extras>
class SumSource {
 public:
    GCCOMM_FN SumSource(const Integers& q, const Unrounding& r) : q_(q), r_(r) {}

    GCCOMM_FN void seek(int i) { counter_ = r_.noise.counter(i); }

    GCCOMM_FN Pair next(int i) { return {vector(i), vector(i + kLanes)}; }

    GCCOMM_FN Pair part(int i, int count) {
        seek(i);
        const F low = vector(i, iota_int() < count);
        return {low, vector(i + kLanes, iota_int() < count - kLanes)};
    }

    Check check;
    Energy energy;

 private:
    // Lanes that are not inside the block do not count.
    GCCOMM_FN F vector(int i, I inside = I{} - 1) {
        const I sum = load<I>(q_.at + i);
        I v = sum << 15;
        if constexpr (subtract || (extras & check_words)) {
            const U h = r_.noise.bits(counter_);
            if constexpr (subtract) v = undither<VectorOps>(sum, h, r_.centre);
            if constexpr (extras & check_words) check.add(sum & inside, h);
            counter_ += BlockNoise::step;
        }
        const F value = __builtin_convertvector(v, F);
        if constexpr (extras & energies) energy.add(value, inside);
        return r_.twice ? value * r_.first * r_.second : value * r_.first;
    }

    const Integers& q_;
    const Unrounding r_;
    U counter_{};
};

class Decoder {
 public:
    explicit Decoder(const DecodeArgs& args)
        : args_(args),
          centre_(centre_of(static_cast<u32>(args.n))),
          half_step_(static_cast<float>(2.0 / args.limit)),
          inverse_(static_cast<float>(1.0 / static_cast<double>(args.n))) {
        zero_after(q_, 0);
    }

    void decode(const Block& b, u32 s, const u32* words, int count, u32* check, float* energy) {
        const bool wide = is_wide(b.segment->dtype);
        const Scale scale = split_scale(s, wide);
        Unrounding r{scale.mant * half_step_, 1.0f, false, centre_, noise_of(b)};
        if (s == 0) r.first = 0;
        if (nonfinite_scale(s, wide)) r.first = float_of(0x7FC00000u);
        const int later = wide ? wide_factors(scale.e) : factors(scale.e, r);
        unpack(args_.width, words, count, q_);

        void* dst = block_address(b.segment->dst, b);
        if (dst == nullptr || later != 0) {
            dequantise(FloatSink<Memory::near>{{x_.at}}, b.length, r, check, energy);
            if (dst == nullptr) return;
            return store_later(b, dst, later);
        }
        const auto go = [&](auto sink) { dequantise(sink, b.length, r, check, energy); };
        if (!wide) return with_sink(b.segment->dtype, dst, args_.stream, go);
        double* out = static_cast<double*>(dst);
        if (args_.stream && can_stream<double>(dst))
            return go(DoubleSink<Memory::streamed>(out, wide_factor(scale.e)));
        go(DoubleSink<Memory::far>(out, wide_factor(scale.e)));
    }

 private:
    // Sets the second factor, 2^e and 1/n for a mean, or makes one of both where that rounds the same: no
    // value then leaves the normal range, and one factor is a power of two. Returns the power of two to be
    // applied afterwards.
    int factors(int e, Unrounding& r) const {
        if (e >= 128) return 0;  // not finite
        const bool inside = e >= -64 && e <= 64;
        if (args_.mean && !inside) {
            r.second = inverse_;
            r.twice = true;
            return e;
        }
        r.second = args_.mean ? inverse_ * pow2(e) : pow2(e);
        r.twice = !inside || (bits_of(r.second) & 0x7FFFFFu) != 0;
        if (!r.twice) r.first *= r.second;
        return 0;
    }

    template <class Sink>
    void dequantise(const Sink& sink, int n, const Unrounding& r, u32* check, float* energy) const {
        if (args_.subtract)
            dequantise<true>(sink, n, r, check, energy);
        else
            dequantise<false>(sink, n, r, check, energy);
    }

    template <bool subtract, class Sink>
    void dequantise(const Sink& sink, int n, const Unrounding& r, u32* check, float* energy) const {
        if (check == nullptr && energy == nullptr) return flow(SumSource<subtract, none>(q_, r), sink, n);
        if (energy == nullptr) {
            SumSource<subtract, check_words> source(q_, r);
            flow(source, sink, n);
            return source.check.store_to(check);
        }
        SumSource<subtract, check_words | energies> source(q_, r);
        flow(source, sink, n);
        if (check != nullptr) source.check.store_to(check);
        *energy = source.energy.total();
    }

    // The same for float64, whose second factor is applied in float64 as it is stored.
    int wide_factors(int e) const { return (e >= -900 && e <= 900) || e >= 1024 ? 0 : e; }

    double wide_factor(int e) const {
        const double inverse = args_.mean ? 1.0 / static_cast<double>(args_.n) : 1.0;
        return e < 1024 ? inverse * pow2_wide(e) : inverse;
    }

    // The last factor in two exact steps: next to the ends of the range.
    void store_later(const Block& b, void* dst, int e) {
        if (!is_wide(b.segment->dtype)) {
            scale_by_power(x_.at, b.length, e);
            return store_floats(b.segment->dtype, x_.at, b.length, dst, args_.stream);
        }
        const double inverse = wide_factor(0);
        for (int i = 0; i < b.length; i++) wide_.at[i] = static_cast<double>(x_.at[i]) * inverse;
        scale_by_power(wide_.at, b.length, e);
        store_doubles(wide_.at, b.length, static_cast<double*>(dst));
    }

    const DecodeArgs& args_;
    Centre centre_;
    float half_step_, inverse_;
    Integers q_;
    Floats x_;
    Doubles wide_;
};

inline void decode(const Batch& batch, const DecodeArgs& args) {
    const FloatEnvironment environment;
    Decoder decoder(args);
    for (Cursor<LaneWords> c(batch, LaneWords(args.width)); c.next();) {
        const i64 place = c.index - batch.lo;
        u32* check = args.check == nullptr ? nullptr : args.check + 2 * place;
        float* energy = args.energy == nullptr ? nullptr : args.energy + place;
        const u32* words = args.words.data + (c.word - args.words.base);
        decoder.decode(c.block, args.scales[c.index], words, c.words, check, energy);
    }
    if (args.stream) stream_fence();
}

}  // namespace gccomm::GCCOMM_LEVEL
