// Floats on the wire, uncompressed or in 16 bits.
#pragma once
#include "encode.h"
#include "flow.h"

namespace gccomm::GCCOMM_LEVEL {

// A float32 source whose values are divided by the number of ranks.
template <class Source>
struct MeanSource {
    Source source;
    float ranks, inverse;  // of which the inverse serves if it is exact
    bool exact;
    GCCOMM_FN void seek(int i) const { source.seek(i); }
    GCCOMM_FN Pair next(int i) const { return divided(source.next(i)); }
    GCCOMM_FN Pair part(int i, int count) const { return divided(source.part(i, count)); }
    GCCOMM_FN Pair divided(Pair v) const {
        return exact ? Pair{v.low * inverse, v.high * inverse} : Pair{v.low / ranks, v.high / ranks};
    }
};

constexpr int kRun = 64 * kBlock;  // most coordinates that are converted in one go

class FloatCodec {
 public:
    explicit FloatCodec(const FloatArgs& args) : args_(args), wide_wire_(is_wide(args.wire)) {}

    // Whether blocks of a segment need no buffer, so that they may be joined.
    bool is_plain(const Segment& s) const { return !wide_wire_ && !is_wide(s.dtype); }
    bool is_plain_input(const Segment& s) const {
        return is_plain(s) && s.src != 0 && s.res_in == 0 && s.res_out == 0;
    }

    void encode(const Block& b, void* wire) {
        const Segment& s = *b.segment;
        if (is_plain_input(s))
            return convert(s.dtype, block_address(s.src, b), b.length, args_.wire, wire, args_.stream);
        if (is_wide(s.dtype)) return encode_wide(b, wire);
        encode_staged(b, wire);
    }

    void decode(const Block& b, const void* wire) {
        if (b.segment->dst == 0) return;
        if (!is_plain(*b.segment)) return decode_wide(b, wire);
        void* dst = block_address(b.segment->dst, b);
        if (!args_.mean) return convert(args_.wire, wire, b.length, b.segment->dtype, dst, args_.stream);
        const float ranks = static_cast<float>(args_.n);
        with_source(args_.wire, wire, [&]<class Source>(Source source) {
            const MeanSource<Source> mean{source, ranks, 1.0f / ranks, (args_.n & (args_.n - 1)) == 0};
            with_sink(b.segment->dtype, dst, args_.stream, [&](auto sink) { flow(mean, sink, b.length); });
        });
    }

 private:
    static void convert(DType from, const void* in, int n, DType to, void* out, bool streaming) {
        with_source(from, in, [&](auto source) {
            with_sink(to, out, streaming, [&](auto sink) { flow(source, sink, n); });
        });
    }

    void encode_staged(const Block& b, void* wire) {
        block_values(b, x_.at);
        if (wide_wire_) {
            double* out = static_cast<double*>(wire);
            for (int i = 0; i < b.length; i++) out[i] = x_.at[i];
        } else {
            store_floats(args_.wire, x_.at, b.length, wire, false);
        }
        float* residual = element<float>(b.segment->res_out, b.offset);
        if (residual == nullptr) return;
        if (!wide_wire_) load_floats(args_.wire, wire, b.length, y_.at);
        const float* sent = wide_wire_ ? x_.at : y_.at;
        keep_rest(x_.at, sent, b.length, element<const float>(b.segment->res_in, b.offset), residual);
    }

    void encode_wide(const Block& b, void* wire) {
        wide_values(b, wide_.at);
        if (wide_wire_) {
            store_doubles(wide_.at, b.length, static_cast<double*>(wire));
        } else {
            narrow_doubles(args_.wire, wide_.at, b.length, x_.at);
            store_floats(args_.wire, x_.at, b.length, wire, false);
        }
        double* residual = element<double>(b.segment->res_out, b.offset);
        if (residual == nullptr) return;
        sent_as_doubles(wire, b.length);
        keep_rest(wide_.at, sent_.at, b.length, element<const double>(b.segment->res_in, b.offset), residual);
    }

    // Wire values as float64; in float32 as well if they are no wider.
    void sent_as_doubles(const void* wire, int n) {
        if (wide_wire_) return load_doubles(static_cast<const double*>(wire), n, sent_.at);
        load_floats(args_.wire, wire, n, y_.at);
        for (int i = 0; i < n; i++) sent_.at[i] = y_.at[i];
    }

    // residual = v - sent; where what was sent is not finite, the old residual.
    template <class T>
    static void keep_rest(const T* v, const T* sent, int n, const T* old, T* residual) {
        for (int i = 0; i < n; i++) {
            const bool finite = sent[i] - sent[i] == 0;
            residual[i] = finite ? v[i] - sent[i] : old == nullptr ? 0 : old[i];
        }
    }

    void decode_wide(const Block& b, const void* wire) {
        sent_as_doubles(wire, b.length);
        if (args_.mean && wide_wire_) {
            divide(sent_.at, b.length);
        } else if (args_.mean) {
            divide(y_.at, b.length);
            for (int i = 0; i < b.length; i++) sent_.at[i] = y_.at[i];
        }
        if (is_wide(b.segment->dtype))
            return store_doubles(sent_.at, b.length, element<double>(b.segment->dst, b.offset));
        narrow_doubles(b.segment->dtype, sent_.at, b.length, x_.at);
        store_floats(b.segment->dtype, x_.at, b.length, block_address(b.segment->dst, b), args_.stream);
    }

    template <class T>
    void divide(T* values, int n) const {
        const T ranks = static_cast<T>(args_.n);
        for (int i = 0; i < n; i++) values[i] /= ranks;
    }

    const FloatArgs& args_;
    bool wide_wire_;
    Floats x_, y_;
    Doubles wide_, sent_;
};

inline void float_encode(const Batch& batch, const FloatArgs& args) {
    const FloatEnvironment environment;
    FloatCodec codec(args);
    u8* wire = static_cast<u8*>(args.buffer);
    for (Cursor<NoWords> c(batch, {}); c.next();) {
        if (codec.is_plain_input(*c.block.segment)) c.extend(kRun);
        codec.encode(c.block, wire);
        wire += c.block.length * size_of(args.wire);
    }
    if (args.stream) stream_fence();
}

inline void float_decode(const Batch& batch, const FloatArgs& args) {
    const FloatEnvironment environment;
    FloatCodec codec(args);
    const u8* wire = static_cast<const u8*>(args.buffer);
    for (Cursor<NoWords> c(batch, {}); c.next();) {
        if (codec.is_plain(*c.block.segment)) c.extend(kRun);
        codec.decode(c.block, wire);
        wire += c.block.length * size_of(args.wire);
    }
    if (args.stream) stream_fence();
}

}  // namespace gccomm::GCCOMM_LEVEL
