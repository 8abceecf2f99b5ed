// Lane codecs, back: unpack the sums, take the shared dither off, scale, store.
#pragma once
#include "encode.h"
#include "flow.h"
#include "word_sum.h"

namespace gccomm::GCCOMM_LEVEL {

struct Unrounding {
    float first, second;  // factors, applied one after the other
    bool twice;           // whether there is a second
    i32 offset;           // added to the sums
    int coarse;           // energies are those of the sums shifted right by so much
    Centre centre;
    BlockNoise noise;
};

// Sum of the squares of a block.
struct Energy {
    U squares{};
    GCCOMM_FN void add(I v, I inside, int shift) {
        const U level = (U)(((v + (1 << (shift - 1))) >> shift) & inside);
        squares += level * level;
    }
    GCCOMM_FN u32 total() const { return sum_of_lanes(squares); }
};

// What goes into a sum besides the values.
enum Extras { none = 0, check_words = 1, energies = 2 };

// Decoded values. `broad`: of 32-bit lanes, which do not fit a fixed-point number.
template <bool subtract, int extras, bool broad>
class SumSource {
 public:
    GCCOMM_FN SumSource(const Integers& q, const Unrounding& r) : q_(q), r_(r), noise_(r.noise) {}

    GCCOMM_FN void seek(int i) { noise_.seek(i); }

    GCCOMM_FN Pair next(int i) {
        const F low = vector(i, hash(i));
        return {low, vector(i + kLanes, hash(i + kLanes))};
    }

    GCCOMM_FN Pair part(int i, int count) {
        seek(i);
        const F low = vector(i, hash(i), iota_int() < count);
        return {low, vector(i + kLanes, hash(i + kLanes), iota_int() < count - kLanes)};
    }

    // At i, in the first half of a whole block, and half a block behind it.
    GCCOMM_FN void both(int i, Pair (&out)[2]) {
        const U low = hash(i), high = hash(i + kLanes);
        out[0] = {vector(i, low), vector(i + kLanes, high)};
        out[1] = {vector(i + kHalf, BlockNoise::later<whole>(low)),
                  vector(i + kHalf + kLanes, BlockNoise::later<whole>(high))};
    }

    Check check;
    Energy energy;

 private:
    static constexpr bool whole = (extras & check_words) != 0;

    GCCOMM_FN U hash(int i) {
        if constexpr (subtract || whole) return noise_.next(i);
        return U{};
    }

    // Lanes that are not inside the block do not count.
    GCCOMM_FN F vector(int i, U h, I inside = I{} - 1) {
        const I sum = load<I>(q_.at + i);
        I correction = I{} + r_.offset;
        if constexpr (subtract) correction = undither<VectorOps>(h, r_.centre, r_.offset);
        if constexpr (whole) check.add(sum & inside, h);
        F value;
        if constexpr (broad) {
            value = __builtin_convertvector(sum, F) * 32768.0f + __builtin_convertvector(correction, F);
        } else {
            const I v = (sum << 15) + correction;
            value = __builtin_convertvector(v, F);
            if constexpr (extras & energies) energy.add(v, inside, r_.coarse);
        }
        return r_.twice ? value * r_.first * r_.second : value * r_.first;
    }

    const Integers& q_;
    const Unrounding r_;
    NoiseInOrder<whole> noise_;
};

// The same of a whole block in lanes that fill words, from words in which the bias was added to every lane.
template <int width, bool subtract>
class LaneSource {
    static constexpr int kWords = kBlock * width / 32;
    static constexpr u32 kField = ((1u << width) - 1) << 15;  // a lane times 2^15
    static constexpr u32 kBias = 1u << (width + 14);          // that of the words
    static constexpr bool kSelects = GCCOMM_SIMD == 512;

 public:
    GCCOMM_FN LaneSource(const u32* words, const Unrounding& r)
        : words_(words), r_(r), counter_(r.noise.counter(0)), constant_(constant(r)) {}

    // At i and half a block behind it, in the order of the first half.
    GCCOMM_FN void both(int i, Pair (&out)[2]) {
        const int j = i % kWords, k = i / kWords;
        vectors(j, k, out[0].low, out[1].low);
        vectors(j + kLanes, k, out[0].high, out[1].high);
    }

 private:
    static GCCOMM_FN u32 constant(const Unrounding& r) {
        const u32 plain = static_cast<u32>(r.offset) - kBias;
        if constexpr (!subtract) return plain;
        return plain + static_cast<u32>(r.centre.offset) + (kSelects ? kField + 0x8000u - 0x7FFFu : 0u);
    }

    GCCOMM_FN void vectors(int j, int k, F& first, F& second) {
        // Of 16 bits, the first half is in the lower lanes of all words; of less, in all lanes of the first
        // ones.
        constexpr int later = 16 / width;
        const U word = load<U>(words_ + j);
        if constexpr (subtract) {
            const U dither = VectorOps::times_upper(r_.noise.bits(counter_), r_.centre.ranks);
            first = undithered(word, k, dither >> 17);
            second = undithered(word, k + later, (dither << 16) >> 17);
            counter_ += BlockNoise::step;
        } else {
            first = value(field(word, k));
            second = value(field(word, k + later));
        }
    }

    // Where one instruction does it, the complement goes below the lane, with ones above the lane.
    GCCOMM_FN F undithered(U word, int k, U dither) const {
        if constexpr (kSelects)
            return value(selected(kField, rolled(word, (47 - width * k) % 32), dither));
        else
            return value(field(word, k) - dither);
    }

    GCCOMM_FN F value(U sum) const { return __builtin_convertvector((I)(sum + constant_), F) * r_.first; }

    static GCCOMM_FN U field(U word, int k) {
        return (word << (32 - width * (k + 1))) >> (17 - width) & kField;
    }

    const u32* words_;
    const Unrounding r_;
    U counter_;
    const u32 constant_;
};

class Decoder {
 public:
    explicit Decoder(const DecodeArgs& args)
        : args_(args),
          centre_(centre_of(static_cast<u32>(args.dithers))),
          half_step_(static_cast<float>(2.0 / args.limit)),
          inverse_(static_cast<float>(1.0 / static_cast<double>(args.n))),
          rotator_(args.rotations) {
        zero_after(q_, 0);
    }

    void decode(const Block& b, u32 s, const float* ratio, const u32* words, int count, u32* check,
                u32* energy) {
        const bool wide = is_wide(b.segment->dtype);
        const Scale scale = split_scale(s, wide);
        const float step =
            scale.mant * (ratio == nullptr ? half_step_ : *ratio) * (ratio == nullptr ? 1.0f : 0x1p-15f);
        Unrounding r{step, 1.0f, false, args_.offset, args_.width + 4, centre_, noise_of(b)};
        if (s == 0) r.first = 0;
        if (nonfinite_scale(s, wide)) r.first = float_of(0x7FC00000u);
        const int later = wide ? wide_factors(scale.e) : factors(scale.e, r);
        void* dst = block_address(b.segment->dst, b);
        if (energy != nullptr) *energy = 0;
        if (args_.rotations != 0 && b.length == kBlock && dst != nullptr && later == 0 && args_.width != 32)
            return rotate_back(b, r, scale.e, words, check, energy);
        finish();
        const bool lined = !args_.stream || reinterpret_cast<u64>(dst) % kLineBytes == 0;
        const bool whole =
            args_.rotations == 0 && b.length == kBlock && dst != nullptr && later == 0 && lined;
        const bool plain = !r.twice && check == nullptr && energy == nullptr;
        // 16-bit lanes come from memory as fast the other way.
        if (GCCOMM_SIMD == 512 && whole && plain && (args_.width == 4 || args_.width == 8))
            return decode_whole(b, r, dst, scale.e, words);
        unpack(args_.width, words, count, q_);
        if (args_.rotations != 0) return decode_rotated(b, r, scale.e, later, check, energy);

        if (dst == nullptr || later != 0 || args_.width == 32) {
            stage(b.length, r, x_.at, check, energy);
            if (dst != nullptr) store_values(b, dst, x_.at, wide ? scale.e : later);
            return;
        }
        const auto go = [&](auto sink) { dequantise(sink, b.length, r, check, energy); };
        with_any_sink(b, dst, scale.e, args_.stream, go);
    }

    // Does what is left of the last block.
    void finish() {
        if (later_ == nullptr) return;
        FloatSink<Memory::streamed> sink{{later_}};
        rotator_.finish_whole_back(sink, [](int) GCCOMM_INLINE {});
        later_ = nullptr;
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
        r.twice = args_.rotations != 0 || !inside || (bits_of(r.second) & 0x7FFFFFu) != 0;
        if (!r.twice) r.first *= r.second;
        return 0;
    }

    // Calls f with the sink for the dtype of a block; the float64 one multiplies by 2^e and 1/n for a mean.
    template <class Function>
    void with_any_sink(const Block& b, void* dst, int e, bool stream, Function f) const {
        if (!is_wide(b.segment->dtype)) return with_sink(b.segment->dtype, dst, stream, f);
        double* out = static_cast<double*>(dst);
        if (stream && can_stream<double>(dst)) return f(DoubleSink<Memory::streamed>(out, wide_factor(e)));
        f(DoubleSink<Memory::far>(out, wide_factor(e)));
    }

    // A whole block that was not rotated, without extras.
    void decode_whole(const Block& b, const Unrounding& r, void* dst, int e, const u32* words) {
        with_any_sink(b, dst, e, args_.stream, [&](auto sink) GCCOMM_INLINE {
            with_lanes(r, words, [&](auto& source) GCCOMM_INLINE { put_all(source, sink); });
        });
    }

    // Calls f with the source of the decoded values of a whole block.
    template <class Function>
    void with_lanes(const Unrounding& r, const u32* words, Function f) {
        if (args_.subtract)
            with_lanes<true>(r, words, f);
        else
            with_lanes<false>(r, words, f);
    }

    template <bool subtract, class Function>
    void with_lanes(const Unrounding& r, const u32* words, Function f) {
        const auto all = [&]<int width>() {
            constexpr u32 bias = lane_bias(width);
            u32* lanes = reinterpret_cast<u32*>(q_.at);
            for (int j = 0; j < kBlock * width / 32; j += kLanes) {
                prefetch_second(words + j + 2 * (kBlock * width / 32));
                store(lanes + j, load<U>(words + j) + bias);
            }
            LaneSource<width, subtract> source(lanes, r);
            f(source);
        };
        if (args_.width == 4) return all.template operator()<4>();
        if (args_.width == 8) return all.template operator()<8>();
        all.template operator()<16>();
    }

    // A whole block.
    void rotate_back(const Block& b, Unrounding r, int e, const u32* words, u32* check, u32* energy) {
        void* dst = block_address(b.segment->dst, b);
        const bool stream = args_.stream && reinterpret_cast<u64>(dst) % kLineBytes == 0;
        const bool plain = check == nullptr && energy == nullptr && fits(args_.width);
        float last = r.second;
        if (one_factor(r, e)) {
            r.first *= r.second;
            last = 1;
        }
        r.twice = false;
        r.first *= rotator_.unscale(kBlock);
        if (GCCOMM_SIMD == 512 && plain && stream && last == 1 && args_.subtract &&
            b.segment->dtype == DType::float32)
            return rotate_back_later(b, r, words, static_cast<float*>(dst));
        finish();
        rotator_.set(b);
        if (!plain) {
            unpack(args_.width, words, words_of(kBlock, args_.width), q_);
            stage(kBlock, r, x_.at, check, energy);
        } else {
            const NearSink sink{{x_.at}};
            with_lanes(r, words, [&](auto& source) GCCOMM_INLINE { put_all(source, sink); });
        }
        NearFloats source{x_.at};
        rotator_.start_whole_back(source);
        with_any_sink(b, dst, e, stream,
                      [&](auto sink) GCCOMM_INLINE { rotator_.finish_whole_back(sink, last); });
    }

    // Whether both factors may be applied before the rotation: the second is a power of two, and no number on
    // the way leaves the normal range.
    bool one_factor(const Unrounding& r, int e) const {
        return args_.ratios == nullptr && (bits_of(r.second) & 0x7FFFFFu) == 0 && e >= -32 && e <= 32;
    }

    // All but the last pass, which is done while the next block's values are staged, where there are
    // registers for both: memory takes what goes past the caches at a slower pace than the pass alone would
    // give it.
    void rotate_back_later(const Block& b, const Unrounding& r, const u32* words, float* dst) {
        const NearSink staged{{x_.at}};
        with_lanes<true>(r, words, [&](auto& source) GCCOMM_INLINE {
            if (later_ == nullptr) return put_all(source, staged);
            FloatSink<Memory::streamed> sink{{later_}};
            rotator_.finish_whole_back(sink, [&](int j) GCCOMM_INLINE {
                for (int i = 2 * j; i < 2 * (j + kPair); i += kPair) put_both(source, staged, i);
            });
        });
        rotator_.set(b);
        NearFloats source{x_.at};
        rotator_.start_whole_back(source);
        later_ = dst;
    }

    template <class Source, class Sink>
    static GCCOMM_FN void put_all(Source& source, const Sink& sink) {
        for (int i = 0; i < kHalf; i += kPair) put_both(source, sink, i);
    }

    template <class Source, class Sink>
    static GCCOMM_FN void put_both(Source& source, const Sink& sink, int i) {
        Pair v[2];
        source.both(i, v);
        sink.put(i, v[0]);
        sink.put(i + kHalf, v[1]);
    }

    void decode_rotated(const Block& b, Unrounding r, int e, int later, u32* check, u32* energy) {
        void* dst = block_address(b.segment->dst, b);
        const float last = prepare(b, r);
        stage(padded(b.length), r, x_.at, check, energy);
        if (dst == nullptr) return;
        NearFloats source{x_.at};
        rotator_.unrotate(source, b.length, last);
        store_values(b, dst, rotator_.values(), is_wide(b.segment->dtype) ? e : later);
    }

    // Returns the factor that is applied after the rotation.
    float prepare(const Block& b, Unrounding& r) {
        const float last = r.twice ? r.second : 1.0f;
        r.twice = false;
        rotator_.set(b);
        return last;
    }

    // Decoded values into a buffer.
    void stage(int n, const Unrounding& r, float* out, u32* check, u32* energy) const {
        const NearSink sink{{out}};
        if (args_.width != 32) return dequantise(sink, n, r, check, energy);
        if (args_.subtract)
            broad<true>(sink, n, r, check);
        else
            broad<false>(sink, n, r, check);
    }

    template <bool subtract>
    void broad(const NearSink& sink, int n, const Unrounding& r, u32* check) const {
        SumSource<subtract, check_words, true> source(q_, r);
        flow(source, sink, n);
        if (check != nullptr) source.check.store_to(check);
    }

    template <class Sink>
    void dequantise(const Sink& sink, int n, const Unrounding& r, u32* check, u32* energy) const {
        constexpr bool lines = kPair * sizeof(typename Sink::Element) >= kLineBytes;  // in a pair
        const bool halves = n == kBlock && sink.head(n) == 0 && (lines || !args_.stream);
        with_sums(r, check, energy, [&](auto& source) GCCOMM_INLINE {
            if (halves)
                put_all(source, sink);
            else
                flow(source, sink, n);
        });
    }

    // Calls f with the source of the decoded values.
    template <class Function>
    void with_sums(const Unrounding& r, u32* check, u32* energy, Function f) const {
        if (args_.subtract)
            with_sums<true>(r, check, energy, f);
        else
            with_sums<false>(r, check, energy, f);
    }

    template <bool subtract, class Function>
    void with_sums(const Unrounding& r, u32* check, u32* energy, Function f) const {
        if (check == nullptr && energy == nullptr) {
            SumSource<subtract, none, false> source(q_, r);
            return f(source);
        }
        if (energy == nullptr) {
            SumSource<subtract, check_words, false> source(q_, r);
            f(source);
            return source.check.store_to(check);
        }
        SumSource<subtract, check_words | energies, false> source(q_, r);
        f(source);
        if (check != nullptr) source.check.store_to(check);
        *energy = source.energy.total();
    }

    // The same for float64, whose second factor is applied in float64 as it is stored.
    int wide_factors(int e) const { return (e >= -900 && e <= 900) || e >= 1024 ? 0 : e; }

    double wide_factor(int e) const {
        const double inverse = args_.mean ? 1.0 / static_cast<double>(args_.n) : 1.0;
        return e < 1024 ? inverse * pow2_wide(e) : inverse;
    }

    // Stores values of a block times 2^e; float64, 1/n for a mean as well. Next to the ends of the range in
    // two exact steps.
    void store_values(const Block& b, void* dst, float* x, int e) {
        const int n = b.length;
        if (!is_wide(b.segment->dtype)) {
            if (e != 0) scale_by_power(x, n, e);
            return store_floats(b.segment->dtype, x, n, dst, args_.stream);
        }
        if (wide_factors(e) == 0)
            return with_any_sink(b, dst, e, args_.stream, [&](auto sink) { flow(NearFloats{x}, sink, n); });
        const double inverse = wide_factor(0);
        for (int i = 0; i < n; i++) wide_.at[i] = static_cast<double>(x[i]) * inverse;
        scale_by_power(wide_.at, n, e);
        store_doubles(wide_.at, n, static_cast<double*>(dst));
    }

    const DecodeArgs& args_;
    Centre centre_;
    float half_step_, inverse_;
    Integers q_;
    Rotator rotator_;
    Floats x_;
    Doubles wide_;
    float* later_ = nullptr;  // where the block goes whose last pass is left
};

// Decodes the blocks of a batch, one after the other.
class Decoding {
 public:
    Decoding(const Batch& batch, const DecodeArgs& args)
        : args_(args),
          lo_(batch.lo),
          cursor_(batch, LaneWords(args.width, args.rotations != 0)),
          decoder_(args) {}

    // Does the next block; false where there is none.
    bool next() {
        Cursor<LaneWords>& c = cursor_;
        if (!c.next()) return false;
        const i64 place = c.index - lo_, at = c.word - args_.words.base;
        u32* check = args_.check == nullptr ? nullptr : args_.check + 2 * place;
        u32* energy = args_.energy == nullptr ? nullptr : args_.energy + place;
        const float* ratio = args_.ratios == nullptr ? nullptr : args_.ratios + c.index;
        const u32* words = args_.parts == nullptr ? args_.words.data + at : sum_.of(args_, at, c.words);
        decoder_.decode(c.block, args_.scales[c.index], ratio, words, c.words, check, energy);
        return true;
    }

    void finish() {
        decoder_.finish();
        if (args_.stream) stream_fence();
    }

 private:
    const DecodeArgs& args_;
    const i64 lo_;
    Cursor<LaneWords> cursor_;
    Decoder decoder_;
    WordSum sum_;
};

inline void decode(const Batch& batch, const DecodeArgs& args) {
    const FloatEnvironment environment;
    Decoding decoding(batch, args);
    while (decoding.next()) {
    }
    decoding.finish();
}

}  // namespace gccomm::GCCOMM_LEVEL
