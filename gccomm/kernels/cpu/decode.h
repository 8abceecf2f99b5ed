// Lane codecs, back: unpack the sums, take the shared dither off, scale, store.
#pragma once
#include "encode.h"

namespace gccomm::GCCOMM_LEVEL {

struct Unrounding {
    float first, second;  // factors, applied one after the other
    Centre centre;
    BlockNoise noise;
};

// n sums -> values, whole lines at a time; check words and energy if `extras`.
template <bool subtract, bool extras>
inline void dequantise_block(const Integers& q, int n, const Unrounding& r, float* out, u32* check, float* energy) {
    U counter = r.noise.start();
    Check sums;
    F squares{};
    for (int i = 0; i < n; i += kLanes) {
        const I sum = load<I>(q.at + i);
        I v = sum << 15;
        if constexpr (subtract || extras) {
            const U h = noise(counter, r.noise.key.k1);
            if constexpr (subtract) v = undither<VectorOps>(sum, h, r.centre);
            if constexpr (extras) sums.add(sum, h);
            counter += BlockNoise::step;
        }
        const F value = __builtin_convertvector(v, F);
        store(out + i, value * r.first * r.second);
        if constexpr (extras) {
            const I inside = iota_int() < n - i;
            const F term = (F)((I)(value * 0x1p-15f) & inside);
            squares += term * term;
        }
    }
    if (!extras) return;
    if (check != nullptr) sums.store_to(check);
    if (energy == nullptr) return;
    float total = 0;
    for (int k = 0; k < kLanes; k++) total += squares[k];
    *energy = total;
}

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
        if (check != nullptr || energy != nullptr) zero_after(q_, b.length);
        dequantise(b.length, r, check, energy);
        if (later != 0) scale_by_power(x_.at, b.length, later);
        if (b.segment->dst == 0) return;
        if (wide) return store_wide(b, scale.e);
        void* dst = block_address(b.segment->dst, b);
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

    void dequantise(int n, const Unrounding& r, u32* check, float* energy) {
        const bool extras = check != nullptr || energy != nullptr;
        if (args_.subtract)
            extras ? dequantise_block<true, true>(q_, n, r, x_.at, check, energy)
                   : dequantise_block<true, false>(q_, n, r, x_.at, nullptr, nullptr);
        else
            extras ? dequantise_block<false, true>(q_, n, r, x_.at, check, energy)
                   : dequantise_block<false, false>(q_, n, r, x_.at, nullptr, nullptr);
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
