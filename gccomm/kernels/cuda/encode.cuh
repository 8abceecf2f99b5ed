// Lane codecs, forward: scale, rotate, round with shared dither or to a table, pack; residuals, check words
// and the blocks' own maxima on the way.
#pragma once
#include "lanes.cuh"
#include "measure.cuh"

namespace gccomm {
namespace GCCOMM_LEVEL {

struct EncodeArgs {
    const u32* scales;  // of block lo and on, as ratios and gains
    u32* words;         // of block lo, at offset `base` in the batch
    i64 base;
    int width;
    i32 limit;
    u32 shift;
    u32* check;  // two a block, or null
    i32 clamp;
    const float* ratios;  // or null
    int rotations;
    u32* maxima;  // one a block, or null
    bool subtract;
    const i32* grid;     // [g, low of each step, gap of each step], or null
    const float* gains;  // or null
};

// What a lane codec does to the blocks of a batch.
class Encoder {
 public:
    __device__ Encoder(Team& team, const Batch& batch, const EncodeArgs& args)
        : team_(team),
          batch_(batch),
          a_(args),
          g_(args.grid == nullptr ? 0 : args.grid[0]),
          clamp_(g_ != 0           ? g_ << 15
                 : args.clamp != 0 ? args.clamp
                                   : args.limit),
          limit_(float_below(args.limit)),
          unit_(static_cast<float>(65536.0 / args.limit)) {}

    __device__ void run() {
        each_block(batch_, LaneWords{a_.width, a_.rotations != 0}, [&](const Block& b) {
            if (is_wide(*b.segment))
                encode<double>(b);
            else
                encode<float>(b);
        });
    }

 private:
    template <class Real>
    __device__ void encode(const Block& b) {
        const i64 at = b.index - batch_.lo;
        const u32 s = a_.scales[at];
        const float ratio = a_.ratios == nullptr ? 1 : a_.ratios[at];
        if (a_.rotations != 0) set_signs(team_, b, a_.rotations);
        if (s == 0 || nonfinite_scale(s, is_double<Real>) || ratio == 0) return skip<Real>(b, s);
        const Scale scale = split_scale(s, is_double<Real>);
        level_ = scale.mant * (a_.ratios == nullptr ? unit_ : ratio);
        factor_ = a_.ratios == nullptr ? limit_ / scale.mant : 65536.0f / level_;
        if (a_.gains != nullptr) factor_ *= a_.gains[at];
        noise_ = noise_of(b);
        Real v[kHeld];
        float y[kHeld];
        load_values(b, v);
        if (a_.rotations == 0) {
            if (a_.maxima != nullptr) leave_maximum(at, measure_values(team_, b, v, 0, false).word);
            normalise(v, -scale.e, y);
            round<Runs>(y, b.length, at);
        } else {
            const int n = padded(b.length);
            normalise_parts(v, n, -scale.e, y);
            rotate(team_, y, n, a_.rotations);
            if (a_.maxima != nullptr) leave_rotated_maximum<Real>(b, y, scale.e);
            __syncthreads();  // the transform's last reads are over
            round<Columns>(y, n, at);
        }
        __syncthreads();
        const int n = carried(b);
        pack(team_, n, a_.width, b.words, words(b));
        if (b.segment->res_out == 0) return;
        sent_values(y, n);
        if (a_.rotations == 0) return leave_residual<Runs>(b, v, y, scale.e);
        unrotate(team_, y, n, a_.rotations);
        for (int k = 0; k < kHeld; k++)
            v[k] = Columns::at(k) < b.length ? load_value<Real>(b, Columns::at(k)) : Real{0};
        leave_residual<Columns>(b, v, y, scale.e);
    }

    __device__ int carried(const Block& b) const { return a_.rotations == 0 ? b.length : padded(b.length); }
    __device__ u32* words(const Block& b) const { return a_.words + (b.word - a_.base); }

    __device__ void leave_maximum(i64 at, u32 word) const {
        if (thread() == 0) a_.maxima[at] = word;
    }

    // The scale word of the rotated values, which are normalised by 2^e.
    template <class Real>
    __device__ void leave_rotated_maximum(const Block& b, const float (&y)[kHeld], int e) const {
        const u32 largest = join(team_, largest_word(y), Larger{});
        const i64 at = b.index - batch_.lo;
        if (largest >= kInfinity) return leave_maximum(at, measure<Real>(team_, b, a_.rotations, false).word);
        leave_maximum(at, is_double<Real> ? wide_word(largest, e) : pattern_times_power(largest, e));
    }

    // A block that sends zeros: its residual is all of it, or unchanged if the scale is not finite.
    template <class Real>
    __device__ void skip(const Block& b, u32 s) const {
        const i64 at = b.index - batch_.lo;
        for (int j = thread(); j < b.words; j += kThreads) words(b)[j] = 0;
        if (a_.check != nullptr && thread() < 2) a_.check[2 * at + thread()] = 0;
        if (a_.maxima != nullptr) leave_maximum(at, measure<Real>(team_, b, a_.rotations, false).word);
        if (nonfinite_scale(s, is_double<Real>)) return keep_residual<Real>(b);
        Real* out = element<Real>(b.segment->res_out, b.offset);
        if (out == nullptr) return;
        for (int i = thread(); i < b.length; i += kThreads) out[i] = load_value<Real>(b, i);
    }

    // The integer of a value, with the noise of its coordinate.
    __device__ i32 rounded(float y, u32 h) const {
        const u32 dither = h + (a_.shift << 16);
        if (g_ == 0) return quantise<ScalarOps, false>(y, factor_, clamp_, dither);
        const i32 fixed = ScalarOps::round(ScalarOps::clamp(y * factor_, static_cast<float>(clamp_)));
        const i32 u = fixed + (g_ << 15), step = u >> 16 < g_ - 1 ? u >> 16 : g_ - 1;
        return to_grid<ScalarOps>(u, a_.grid[1 + step], a_.grid[1 + g_ + step], g_, dither);
    }

    // Leaves the integers of n coordinates at their places.
    template <class Places>
    __device__ void round(const float (&y)[kHeld], int n, i64 at) {
        Check check;
        for (int k = 0; k < kHeld; k++) {
            const int i = Places::at(k);
            if (i >= n) continue;
            const u32 h = noise_.bits(i);
            const i32 q = rounded(y[k], h);
            team_.at[place(i)] = static_cast<u32>(q);
            if (a_.check != nullptr) check.add(q, h);
        }
        if (a_.check != nullptr) check.store_to(team_, a_.check + 2 * at);
    }

    // What the integers stand for, without the scale's exponent, as runs.
    __device__ void sent_values(float (&y)[kHeld], int n) const {
        const float half = g_ % 2 == 0 ? 0.0f : 0.5f;  // by which integers of an odd grid are off
        const float unit = level_ * 0x1p-15f;
        for (int k = 0; k < kHeld; k++) {
            const int i = Runs::at(k);
            const i32 q = i < n ? static_cast<i32>(team_.at[place(i)]) : 0;
            const u32 dither = ((noise_.bits(i) >> 16) + a_.shift) & 0xFFFFu;
            if (a_.subtract && g_ == 0)
                y[k] = static_cast<float>(q * 32768 - static_cast<i32>(dither >> 1) + 16384) * unit;
            else
                y[k] = (static_cast<float>(q) + half) * level_;
            if (i >= n) y[k] = 0;
        }
    }

    // What the integers leave over.
    template <class Places, class Real>
    __device__ void leave_residual(const Block& b, const Real (&v)[kHeld], const float (&sent)[kHeld],
                                   int e) const {
        const Power<Real> power(e);
        Real* out = element<Real>(b.segment->res_out, b.offset);
        Real rest[kHeld];
        for (int k = 0; k < kHeld; k++)
            rest[k] = saturate(v[k] - saturate(static_cast<Real>(sent[k]) * power.first * power.second));
        for (int k = 0; k < kHeld; k++)
            if (Places::at(k) < b.length) out[Places::at(k)] = rest[k];
    }

    Team& team_;
    const Batch& batch_;
    const EncodeArgs& a_;
    const i32 g_;      // steps of the grid, 0 without one
    const i32 clamp_;  // the largest fixed-point value
    const float limit_, unit_;
    float level_ = 0, factor_ = 0;  // of the block, without the scale's exponent
    BlockNoise noise_{};
};

}  // namespace GCCOMM_LEVEL
}  // namespace gccomm
