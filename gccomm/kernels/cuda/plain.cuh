// What needs no scale of a lane codec: two exact words a coordinate, floats on the wire, norms of chunks.
#pragma once
#include "values.cuh"

namespace gccomm {
namespace GCCOMM_LEVEL {

// ---- small tensors: two words a coordinate, exact to 2^-61 of the block's maximum or so

struct ExactArgs {
    const u32* scales;  // of block lo and on
    u32* words;
    i64 base, n;
    bool mean;
};

__device__ inline int ceil_log2(i64 n) {
    int bits = 0;
    while ((i64{1} << bits) < n) bits++;
    return bits;
}

template <class Real>
__device__ void exact_encode_block(const Block& b, u32 s, const ExactArgs& a) {
    u32* high = a.words + (b.word - a.base);
    u32* low = high + b.length;
    const bool lost = nonfinite_scale(s, is_double<Real>), sends = s != 0 && !lost;
    const int spare = ceil_log2(a.n);  // bits left free for the sum over ranks
    const Power<double> power(30 - spare - (split_scale(s, is_double<Real>).e + 1));
    const double unit = pow2_wide(31 - spare);
    for (int i = thread(); i < b.length; i += kThreads) {
        const double x = sends ? static_cast<double>(load_value<Real>(b, i)) : 0;
        const double fixed = x * power.first * power.second, whole = rint(fixed);
        high[i] = static_cast<u32>(static_cast<i32>(whole));
        low[i] = static_cast<u32>(static_cast<i32>(rint((fixed - whole) * unit)));
    }
    if (lost) return keep_residual<Real>(b);
    clear_residual<Real>(b);
}

__device__ inline void exact_encode(const Batch& batch, const ExactArgs& args) {
    each_block(batch, ExactWords{}, [&](const Block& b) {
        const u32 s = args.scales[b.index - batch.lo];
        if (is_wide(*b.segment))
            exact_encode_block<double>(b, s, args);
        else
            exact_encode_block<float>(b, s, args);
    });
}

__device__ inline void exact_decode_block(const Block& b, u32 s, const ExactArgs& a) {
    const bool wide = is_wide(*b.segment);
    const u32* high = a.words + (b.word - a.base);
    const u32* low = high + b.length;
    const int spare = ceil_log2(a.n);
    const Power<double> power(split_scale(s, wide).e + 1 + spare - 30);
    const double unit = pow2_wide(spare - 31), ranks = static_cast<double>(a.n);
    with_format(b.segment->dtype, [&](auto format) {
        auto* out = element<typename decltype(format)::Pattern>(b.segment->dst, b.offset);
        for (int i = thread(); i < b.length; i += kThreads) {
            double x = static_cast<i32>(high[i]) + static_cast<i32>(low[i]) * unit;
            if (a.mean) x /= ranks;  // before the scaling: the mean of 1e308 is 1e308
            x = x * power.first * power.second;
            if (s == 0) x = 0;
            if (nonfinite_scale(s, wide)) x = double_of(0x7FF8000000000000ull);
            out[i] = format.write(x);
        }
    });
}

__device__ inline void exact_decode(const Batch& batch, const ExactArgs& args) {
    each_block(batch, ExactWords{}, [&](const Block& b) {
        if (b.segment->dst != 0) exact_decode_block(b, args.scales[b.index - batch.lo], args);
    });
}

// ---- floats on the wire

struct FloatArgs {
    void* buffer;  // values of block lo, at offset `base` in the batch
    i64 base;
    DType wire;
    i64 n;
    bool mean;
};

template <class Real, class Wire>
__device__ void float_encode_block(const Block& b, typename Wire::Pattern* wire) {
    const Real* old = element<const Real>(b.segment->res_in, b.offset);
    Real* residual = element<Real>(b.segment->res_out, b.offset);
    for (int i = thread(); i < b.length; i += kThreads) {
        const Real v = load_value<Real>(b, i);
        wire[i] = Wire::write(v);
        if (residual == nullptr) continue;
        const Real sent = static_cast<Real>(Wire::read(wire[i]));
        residual[i] = sent - sent == 0 ? v - sent : old == nullptr ? Real{0} : old[i];
    }
}

__device__ inline void float_encode(const Batch& batch, const FloatArgs& args) {
    each_block(batch, FloatWords{}, [&](const Block& b) {
        with_format(args.wire, [&](auto format) {
            using Wire = decltype(format);
            auto* wire = static_cast<typename Wire::Pattern*>(args.buffer) + (b.word - args.base);
            if (is_wide(*b.segment))
                float_encode_block<double, Wire>(b, wire);
            else
                float_encode_block<float, Wire>(b, wire);
        });
    });
}

__device__ inline void float_decode(const Batch& batch, const FloatArgs& args) {
    each_block(batch, FloatWords{}, [&](const Block& b) {
        if (b.segment->dst == 0) return;
        with_format(args.wire, [&](auto from) {
            const auto* wire =
                static_cast<const typename decltype(from)::Pattern*>(args.buffer) + (b.word - args.base);
            with_format(b.segment->dtype, [&](auto to) {
                auto* out = element<typename decltype(to)::Pattern>(b.segment->dst, b.offset);
                for (int i = thread(); i < b.length; i += kThreads) {
                    auto x = from.read(wire[i]);
                    if (args.mean) x /= static_cast<decltype(x)>(args.n);
                    out[i] = to.write(x);
                }
            });
        });
    });
}

}  // namespace GCCOMM_LEVEL
}  // namespace gccomm
