// Values from a source to a sink in one pass, converted in registers on the way.
//
// A source has next(i), the pair of vectors at coordinate i, and part(i, count), a pair of which only `count`
// lanes are real: the others are zero, and no memory is touched for them. seek(i) says where next() will go
// on. A sink has head(n), the coordinates before its first whole cache line (a line of which only a part is
// streamed is slow), put(i, pair), and near(buffer), the same sink for a buffer in the cache.
#pragma once
#include "halves.h"
#include "table.h"

namespace gccomm::GCCOMM_LEVEL {

constexpr int kAhead = 2 * kBlock;  // how many elements ahead of the arithmetic memory is fetched

enum class Memory { near, far, streamed };  // a staging buffer, memory, memory past the caches

template <class Source, class Sink>
GCCOMM_FN void put_part(Source& source, const Sink& sink, int i, int count) {
    typename Sink::Element staged[kPair];
    sink.near(staged).put(0, source.part(i, count));
    __builtin_memcpy(sink.out + i, staged, sizeof staged[0] * static_cast<u32>(count));
}

// Moves n coordinates.
template <class Source, class Sink>
GCCOMM_FN void flow(Source&& source, const Sink sink, int n) {
    const int head = sink.head(n);
    int i = 0;
    for (; i < head; i += kPair) put_part(source, sink, i, head - i < kPair ? head - i : kPair);
    i = head;
    source.seek(i);
    for (; i + kPair <= n; i += kPair) sink.put(i, source.next(i));
    if (i < n) put_part(source, sink, i, n - i);
}

// Fetches what lies some blocks ahead of a pair at `address`: into the second-level cache, or for writing.
enum class Fetch { second, write };

template <Fetch where, class Element>
GCCOMM_FN void fetch_ahead(const Element* address) {
    const Element* ahead = address + kAhead;
    for (u32 i = 0; i < kPair; i += kLineBytes / sizeof(Element)) {
        if constexpr (where == Fetch::write)
            __builtin_prefetch(ahead + i, 1, 3);
        else
            prefetch_second(ahead + i);
    }
}

// ---- sinks
// -------------------------------------------------------------------------------------------------

template <class T, Memory memory>
struct SinkBase {
    static constexpr bool columns = false;  // of rotate.h
    using Element = T;
    T* out;

    GCCOMM_FN int head(int n) const {
        if constexpr (memory != Memory::streamed) return 0;
        const int before = static_cast<int>(-reinterpret_cast<u64>(out) % kLineBytes / sizeof(T));
        return before < n ? before : n;
    }

 protected:
    template <class V>
    GCCOMM_FN void put_vector(int i, V v) const {
        if constexpr (memory == Memory::streamed)
            stream(out + i, v);
        else
            store(out + i, v);
    }
    GCCOMM_FN void fetch(int i) const {
        if constexpr (memory == Memory::far) fetch_ahead<Fetch::write>(out + i);
    }
};

template <Memory memory>
struct FloatSink : SinkBase<float, memory> {
    GCCOMM_FN static FloatSink<Memory::near> near(float* buffer) { return {{buffer}}; }
    GCCOMM_FN void put(int i, Pair v) const {
        this->fetch(i);
        this->put_vector(i, v.low);
        this->put_vector(i + kLanes, v.high);
    }
};

template <class Half, Memory memory>
struct HalfSink : SinkBase<u16, memory> {
    GCCOMM_FN static HalfSink<Half, Memory::near> near(u16* buffer) { return {{buffer}}; }
    GCCOMM_FN void put(int i, Pair v) const {
        this->fetch(i);
        this->put_vector(i, Half::from_floats(v));
    }
};

// float64: the values times a factor, in float64.
template <Memory memory>
struct DoubleSink : SinkBase<double, memory> {
    double factor;
    GCCOMM_FN DoubleSink(double* address, double f) : SinkBase<double, memory>{address}, factor(f) {}
    GCCOMM_FN DoubleSink<Memory::near> near(double* buffer) const { return {buffer, factor}; }
    GCCOMM_FN void put(int i, Pair v) const {
        this->fetch(i);
        this->put_vector(i, widen_low(v.low) * factor);
        this->put_vector(i + kLanes / 2, widen_high(v.low) * factor);
        this->put_vector(i + kLanes, widen_low(v.high) * factor);
        this->put_vector(i + kLanes + kLanes / 2, widen_high(v.high) * factor);
    }
};

// Whether stores to elements of T at this address may go past the caches.
template <class T>
GCCOMM_FN bool can_stream(const void* address) {
    return reinterpret_cast<u64>(address) % sizeof(T) == 0;
}

// Calls f with the sink of a dtype other than float64.
template <class Function>
GCCOMM_FN void with_sink(DType dtype, void* out, bool streaming, Function f) {
    float* floats = static_cast<float*>(out);
    u16* halves = static_cast<u16*>(out);
    if (dtype == DType::float32) {
        if (streaming && can_stream<float>(out)) return f(FloatSink<Memory::streamed>{{floats}});
        return f(FloatSink<Memory::far>{{floats}});
    }
    const bool past = streaming && can_stream<u16>(out);
    if (dtype == DType::float16) {
        if (past) return f(HalfSink<Float16, Memory::streamed>{{halves}});
        return f(HalfSink<Float16, Memory::far>{{halves}});
    }
    if (past) return f(HalfSink<BFloat16, Memory::streamed>{{halves}});
    return f(HalfSink<BFloat16, Memory::far>{{halves}});
}

// ---- sources
// -----------------------------------------------------------------------------------------------

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

template <class Format, Memory memory>
struct ArraySource {
    using Element = typename Format::Element;
    const Element* x;
    GCCOMM_FN void seek(int) const {}
    GCCOMM_FN Pair next(int i) const {
        if constexpr (memory == Memory::far) fetch_ahead<Fetch::second>(x + i);
        return at(i);
    }
    // The same for coordinates that are not taken in their order, after fetch(), which is.
    GCCOMM_FN Pair at(int i) const { return {Format::load_from(x + i), Format::load_from(x + i + kLanes)}; }
    GCCOMM_FN void fetch(int i) const { fetch_ahead<Fetch::second>(x + i); }
    // Fetches what comes later into the second-level cache.
    GCCOMM_FN void fetch_later(i64 i) const { fetch_ahead<Fetch::second>(x + i - kAhead); }
    GCCOMM_FN Pair part(int i, int count) const {
        Element staged[kPair] = {};
        __builtin_memcpy(staged, x + i, sizeof(Element) * static_cast<u32>(count));
        return {Format::load_from(staged), Format::load_from(staged + kLanes)};
    }
};
using NearFloats = ArraySource<FloatFormat, Memory::near>;

// float64 times two factors, rounded to float32.
struct ScaledDoubles {
    const double* x;
    double first, second;
    GCCOMM_FN void seek(int) const {}
    GCCOMM_FN Pair next(int i) const {
        fetch_ahead<Fetch::second>(x + i);
        return {vector(x + i), vector(x + i + kLanes)};
    }
    GCCOMM_FN Pair part(int i, int count) const {
        double staged[kPair] = {};
        __builtin_memcpy(staged, x + i, sizeof(double) * static_cast<u32>(count));
        return {vector(staged), vector(staged + kLanes)};
    }

 private:
    GCCOMM_FN F vector(const double* at) const {
        return narrow(load<D>(at) * first * second, load<D>(at + kLanes / 2) * first * second);
    }
};

// Calls f with the source of a dtype other than float64.
template <class Function>
GCCOMM_FN void with_source(DType dtype, const void* x, Function f) {
    switch (dtype) {
        case DType::float16:
            return f(ArraySource<HalfFormat<Float16>, Memory::far>{static_cast<const u16*>(x)});
        case DType::bfloat16:
            return f(ArraySource<HalfFormat<BFloat16>, Memory::far>{static_cast<const u16*>(x)});
        default:
            return f(ArraySource<FloatFormat, Memory::far>{static_cast<const float*>(x)});
    }
}

// ---- sums of 16-bit floats
// ---------------------------------------------------------------------------------

template <class Half>
struct HalfSums {
    ArraySource<HalfFormat<Half>, Memory::near> a, b;
    GCCOMM_FN void seek(int) const {}
    GCCOMM_FN Pair next(int i) const { return sum(a.next(i), b.next(i)); }
    GCCOMM_FN Pair part(int i, int count) const { return sum(a.part(i, count), b.part(i, count)); }
    static GCCOMM_FN Pair sum(Pair x, Pair y) { return {x.low + y.low, x.high + y.high}; }
};

// inout += in, elementwise in float32: the body of an MPI reduction.
template <class Half>
inline void add_halves(void* in, void* inout, int* length, void*) {
    const FloatEnvironment environment;
    u16* out = static_cast<u16*>(inout);
    flow(HalfSums<Half>{{out}, {static_cast<const u16*>(in)}}, HalfSink<Half, Memory::near>{{out}}, *length);
}

}  // namespace gccomm::GCCOMM_LEVEL
