// Vectors from a source to a sink in one pass: values are converted in registers on the way.
//
// A source has next(i), the vector at coordinate i, and part(i, count), of which only `count` lanes are real (no
// memory beyond them is touched). A sink has head(n), the coordinates before its first aligned address, and put(i, v).
#pragma once
#include "blocks.h"

namespace gccomm::GCCOMM_LEVEL {

template <class Source, class Sink>
GCCOMM_FN void put_part(Source& source, const Sink& sink, int i, int count) {
    typename Sink::Element staged[kLanes];
    typename Sink::Near{staged}.put(0, source.part(i, count));
    __builtin_memcpy(sink.out + i, staged, sizeof staged[0] * static_cast<u32>(count));
}

// Moves n coordinates.
template <class Source, class Sink>
GCCOMM_FN void flow(Source&& source, const Sink sink, int n) {
    int i = sink.head(n);
    if (i > 0) put_part(source, sink, 0, i);
    source.seek(i);
    for (; i + kLanes <= n; i += kLanes) sink.put(i, source.next(i));
    if (i < n) put_part(source, sink, i, n - i);
}

// ---- sinks -------------------------------------------------------------------------------------------------

// Asks for the line that will be written some blocks later.
GCCOMM_FN void fetch_to_write(const void* address) {
    __builtin_prefetch(static_cast<const u8*>(address) + sizeof(float) * kAhead, 1, 3);
}

enum class Store { near, cached, streaming };  // a staging buffer, memory, memory past the caches

template <Store kind>
struct FloatSink {
    using Element = float;
    using Near = FloatSink<Store::near>;
    float* out;
    GCCOMM_FN int head(int n) const {
        if constexpr (kind != Store::streaming) return 0;
        const int before = static_cast<int>((-reinterpret_cast<u64>(out) % kVectorBytes) / sizeof(float));
        return before < n ? before : n;
    }
    GCCOMM_FN void put(int i, F v) const {
        if constexpr (kind == Store::streaming) {
            stream(out + i, (U)v);
        } else {
            if constexpr (kind == Store::cached) fetch_to_write(out + i);
            store(out + i, v);
        }
    }
};

template <class Half, Store kind>
struct HalfSink {
    using Element = u16;
    using Near = HalfSink<Half, Store::near>;
    u16* out;
    GCCOMM_FN int head(int) const { return 0; }
    GCCOMM_FN void put(int i, F v) const {
        if constexpr (kind == Store::cached) fetch_to_write(out + i);
        store(out + i, Half::from_float(v));
    }
};

// Calls f with the sink of a dtype other than float64.
template <class Function>
GCCOMM_FN void with_sink(DType dtype, void* out, bool streaming, Function f) {
    switch (dtype) {
        case DType::float16:
            return f(HalfSink<Float16, Store::cached>{static_cast<u16*>(out)});
        case DType::bfloat16:
            return f(HalfSink<BFloat16, Store::cached>{static_cast<u16*>(out)});
        default:
            if (streaming && reinterpret_cast<u64>(out) % sizeof(float) == 0)
                return f(FloatSink<Store::streaming>{static_cast<float*>(out)});
            return f(FloatSink<Store::cached>{static_cast<float*>(out)});
    }
}

// ---- sources -----------------------------------------------------------------------------------------------

// How the elements of a format become float32.
struct FloatFormat {
    using Element = float;
    static GCCOMM_FN F load_from(const float* x) { return load<F>(x); }
};
template <class Half>
struct HalfFormat {
    using Element = u16;
    static GCCOMM_FN F load_from(const u16* x) { return Half::to_float(load<U16>(x)); }
};

// An array in memory, fetched ahead.
template <class Format>
struct ArraySource {
    using Element = typename Format::Element;
    const Element* x;
    GCCOMM_FN void seek(int) {}
    GCCOMM_FN F next(int i) const {
        prefetch(x + i + kAhead);
        return Format::load_from(x + i);
    }
    GCCOMM_FN F part(int i, int count) const {
        Element staged[kLanes] = {};
        __builtin_memcpy(staged, x + i, sizeof(Element) * static_cast<u32>(count));
        return Format::load_from(staged);
    }
};

// Calls f with the source of a dtype other than float64.
template <class Function>
GCCOMM_FN void with_source(DType dtype, const void* x, Function f) {
    switch (dtype) {
        case DType::float16:
            return f(ArraySource<HalfFormat<Float16>>{static_cast<const u16*>(x)});
        case DType::bfloat16:
            return f(ArraySource<HalfFormat<BFloat16>>{static_cast<const u16*>(x)});
        default:
            return f(ArraySource<FloatFormat>{static_cast<const float*>(x)});
    }
}

}  // namespace gccomm::GCCOMM_LEVEL
