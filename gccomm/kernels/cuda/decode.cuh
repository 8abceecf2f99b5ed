// Lane codecs, back: unpack the sums, take the shared dither off, rotate back, scale, store.
#pragma once
#include "lanes.cuh"
#include "measure.cuh"

namespace gccomm {
namespace GCCOMM_LEVEL {

struct DecodeArgs {
    const u32* scales;  // of block lo and on, as ratios
    const u32* words;   // of block lo, at offset `base` in the batch
    i64 base;
    int width;
    i32 limit;
    i64 n;
    bool subtract, mean;
    u32* check;           // two a block, or null
    u32* energy;          // one a block, or null
    const float* ratios;  // or null
    int rotations;
    i32 offset;
    i64 dithers;  // whose sum is taken off: n, or 1 where sums were rounded again
};

class Decoder {
 public:
    __device__ Decoder(Team& team, const Batch& batch, const DecodeArgs& args)
        : team_(team),
          batch_(batch),
          a_(args),
          centre_(centre_of(static_cast<u32>(args.dithers))),
          half_step_(static_cast<float>(2.0 / args.limit)),
          inverse_(1.0 / static_cast<double>(args.n)) {}

    __device__ void run() const {
        each_block(batch_, LaneWords{a_.width, a_.rotations != 0}, [&](const Block& b) {
            if (is_wide(*b.segment))
                decode<double>(b);
            else
                decode<float>(b);
        });
    }

 private:
    template <class Real>
    __device__ void decode(const Block& b) const {
        const i64 at = b.index - batch_.lo;
        const u32 s = a_.scales[at];
        const Scale scale = split_scale(s, is_double<Real>);
        float step = a_.ratios == nullptr ? scale.mant * half_step_ : scale.mant * a_.ratios[at] * 0x1p-15f;
        if (s == 0) step = 0;
        const int n = a_.rotations == 0 ? b.length : padded(b.length);
        unpack(team_, a_.words + (b.word - a_.base), n, a_.width, b.words);
        __syncthreads();
        float y[kHeld];
        sums(b, n, step, y);
        if (b.segment->dst == 0) return;
        if (a_.rotations == 0) return finish<Runs, Real>(b, y, s, scale.e);
        set_signs(team_, b, a_.rotations);
        unrotate(team_, y, n, a_.rotations);
        finish<Columns, Real>(b, y, s, scale.e);
    }

    // Decoded values in units of 2^e, as runs; check words and energies of the sums.
    __device__ void sums(const Block& b, int n, float step, float (&y)[kHeld]) const {
        const i64 at = b.index - batch_.lo;
        const BlockNoise noise = noise_of(b);
        const bool needs_noise = a_.subtract || a_.check != nullptr;
        const int coarse = a_.width + 4;
        Check check;
        u32 energy = 0;
        for (int k = 0; k < kHeld; k++) {
            const int i = Runs::at(k);
            y[k] = 0;
            if (i >= n) continue;
            const i32 sum = static_cast<i32>(team_.at[place(i)]);
            const u32 h = needs_noise ? noise.bits(i) : 0;
            const i32 correction = a_.subtract ? undither<ScalarOps>(h, centre_, a_.offset) : a_.offset;
            if (a_.check != nullptr) check.add(sum, h);
            if (a_.width == 32) {
                y[k] = (static_cast<float>(sum) * 32768.0f + static_cast<float>(correction)) * step;
                continue;
            }
            const i32 centred = sum * 32768 + correction;
            const u32 level = static_cast<u32>((centred + (1 << (coarse - 1))) >> coarse);
            energy += level * level;
            y[k] = static_cast<float>(centred) * step;
        }
        if (a_.check != nullptr) check.store_to(team_, a_.check + 2 * at);
        if (a_.energy == nullptr) return;
        energy = join(team_, energy, Add{});
        if (thread() == 0) a_.energy[at] = a_.width == 32 ? 0 : energy;
    }

    // 2^e and 1/n come last: near the end of the range only a result out of range may overflow.
    template <class Places, class Real>
    __device__ void finish(const Block& b, const float (&y)[kHeld], u32 s, int e) const {
        const Power<Real> power(e);
        const Real inverse = static_cast<Real>(inverse_);
        const bool lost = nonfinite_scale(s, is_double<Real>);
        Real v[kHeld];
        for (int k = 0; k < kHeld; k++) {
            v[k] = y[k];
            if (a_.mean) v[k] *= inverse;
            v[k] = v[k] * power.first * power.second;
            if (lost) v[k] = float_of(0x7FC00000u);
        }
        store_values<Places>(b, v);
    }

    Team& team_;
    const Batch& batch_;
    const DecodeArgs& a_;
    const Centre centre_;
    const float half_step_;
    const double inverse_;
};

}  // namespace GCCOMM_LEVEL
}  // namespace gccomm
