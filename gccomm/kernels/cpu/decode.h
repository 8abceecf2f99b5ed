// Lane codecs, back: unpack the sums, take the shared dither off, scale, store.
#pragma once
#include "encode.h"
#include "flow.h"

namespace gccomm::GCCOMM_LEVEL {

struct Unrounding {
    float first, second;  // factors, applied one after the other
    Centre centre;
    BlockNoise noise;
};

// What a decoded block tells besides its values.
struct Extras {
    Check sums;
    F squares{};
    GCCOMM_FN float energy() const {
        float total = 0;
        for (int k = 0; k < kLanes; k++) total += squares[k];
        return total;
    }
};

// Decoded values, vector by vector.
template <bool subtract, bool extras>
class SumSource {
   public:
    GCCOMM_FN SumSource(const Integers& q, const Unrounding& r) : q_(q), r_(r), counter_(r.noise.start()) {}

    GCCOMM_FN void seek(int i) { counter_ = r_.noise.start() + static_cast<u32>(i) * kGolden; }

    GCCOMM_FN F next(int i) {
        const I sum = load<I>(q_.at + i);
        return decode(sum, sum);
    }

    GCCOMM_FN F part(int i, int count) {
        const I sum = load<I>(q_.at + i);
        return decode(sum, sum & (iota_int() < count), iota_int() < count);
    }

    Extras extra;

   private:
    // `counted` is what goes into the check words.
    GCCOMM_FN F decode(I sum, I counted, I inside = I{} - 1) {
        I v = sum << 15;
        if constexpr (subtract || extras) {
            const U h = noise(counter_, r_.noise.key.k1);
            if constexpr (subtract) v = undither<VectorOps>(sum, h, r_.centre);
            if constexpr (extras) extra.sums.add(counted, h);
            counter_ += BlockNoise::step;
        }
        const F value = __builtin_convertvector(v, F);
        if constexpr (extras) {
            const F level = (F)((I)(value * 0x1p-15f) & inside);
            extra.squares += level * level;
        }
        return value * r_.first * r_.second;
    }

    const Integers& q_;
    const Unrounding r_;
    U counter_;
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

    void decode(const Block& b, u32 s, const u32* words, u32* check, float* energy) {
        const bool wide = is_wide(b.segment->dtype);
        const Scale scale = split_scale(s, wide);
        Unrounding r{scale.mant * half_step_, 1.0f, centre_, noise_of(b)};
        if (s == 0) r.first = 0;
        if (nonfinite_scale(s, wide)) r.first = float_of(0x7FC00000u);
        const int later = wide ? 0 : factors(scale.e, r);
        unpack(args_.width, words, words_of(b.length, args_.width), q_);

        void* dst = block_address(b.segment->dst, b);
        if (!wide && later == 0 && dst != nullptr)
            return with_sink(b.segment->dtype, dst, args_.stream,
                             [&](auto sink) { dequantise(sink, b.length, r, check, energy); });
        dequantise(FloatSink<Store::near>{x_.at}, b.length, r, check, energy);
        if (dst == nullptr) return;
        if (wide) return store_wide(b, scale.e);
        scale_by_power(x_.at, b.length, later);
        store_floats(b.segment->dtype, x_.at, b.length, dst, args_.stream);
    }

   private:
    // Sets the second factor: 2^e, and 1/n for a mean. Returns the power of two that has to be applied afterwards.
    int factors(int e, Unrounding& r) const {
        if (!args_.mean) {
            r.second = e < 128 ? pow2(e) : 1.0f;
            return 0;
        }
        const bool fits = e >= -64 && e <= 64;  // no intermediate value leaves the normal range
        r.second = fits ? inverse_ * pow2(e) : inverse_;
        return fits || e >= 128 ? 0 : e;
    }

    template <class Sink>
    void dequantise(const Sink& sink, int n, const Unrounding& r, u32* check, float* energy) const {
        if (check == nullptr && energy == nullptr) {
            if (args_.subtract)
                flow(SumSource<true, false>(q_, r), sink, n);
            else
                flow(SumSource<false, false>(q_, r), sink, n);
            return;
        }
        if (args_.subtract)
            dequantise_with_extras<true>(sink, n, r, check, energy);
        else
            dequantise_with_extras<false>(sink, n, r, check, energy);
    }

    template <bool subtract, class Sink>
    void dequantise_with_extras(const Sink& sink, int n, const Unrounding& r, u32* check, float* energy) const {
        SumSource<subtract, true> source(q_, r);
        flow(source, sink, n);
        if (check != nullptr) source.extra.sums.store_to(check);
        if (energy != nullptr) *energy = source.extra.energy();
    }

    void store_wide(const Block& b, int e) {
        const double inverse = args_.mean ? 1.0 / static_cast<double>(args_.n) : 1.0;
        const int k = e < 1024 ? e : 0;
        const double first = pow2_wide(k >> 1), second = pow2_wide(k - (k >> 1));
        for (int i = 0; i < b.length; i++) wide_.at[i] = static_cast<double>(x_.at[i]) * inverse * first * second;
        store_doubles(wide_.at, b.length, element<double>(b.segment->dst, b.offset), args_.stream);
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
    for (Cursor<LaneWords> c(batch, {args.width}); c.next();) {
        const i64 place = c.index - batch.lo;
        u32* check = args.check == nullptr ? nullptr : args.check + 2 * place;
        float* energy = args.energy == nullptr ? nullptr : args.energy + place;
        decoder.decode(c.block, args.scales[c.index], args.words.data + (c.word - args.words.base), check, energy);
    }
    if (args.stream) stream_fence();
}

}  // namespace gccomm::GCCOMM_LEVEL
