// The arrays of several ranks, reduced element by element in the order of the ranks: all ranks that do it get
// the same bits.
#pragma once
#include "halves.h"
#include "table.h"

namespace gccomm::GCCOMM_LEVEL {

// How elements of one kind are read, joined and written, a vector's worth at a time.
template <class T, class V>
struct Sums {
    using Element = T;
    using Value = V;
    static GCCOMM_FN V read(const T* x) { return load<V>(x); }
    static GCCOMM_FN V join(V a, V b) { return a + b; }
    static GCCOMM_FN V written(V v) { return v; }
};

struct Maxima : Sums<u32, U> {
    static GCCOMM_FN U join(U a, U b) { return a > b ? a : b; }
};

// 16-bit floats: added in float32, rounded once.
template <class Half>
struct HalfParts {
    using Element = u16;
    using Value = Pair;
    static GCCOMM_FN Pair read(const u16* x) {
        return {Half::to_float(load<U16>(x)), Half::to_float(load<U16>(x + kLanes))};
    }
    static GCCOMM_FN Pair join(Pair a, Pair b) { return {a.low + b.low, a.high + b.high}; }
    static GCCOMM_FN W16 written(Pair v) { return Half::from_floats(v); }
};

template <class Kind>
class PartSums {
    using T = typename Kind::Element;
    static constexpr i64 kStep = kVectorBytes / sizeof(T);
    static constexpr i64 kFetch = 2048 / sizeof(T);  // ahead

 public:
    explicit PartSums(const Parts& p) : p_(p), out_(static_cast<T*>(p.out)) {}

    void run() const {
        const bool streams = p_.stream && reinterpret_cast<u64>(out_) % sizeof(T) == 0;
        i64 i = 0;
        if (streams) {
            const i64 before = static_cast<i64>(-reinterpret_cast<u64>(out_) % kLineBytes / sizeof(T));
            const i64 head = before < p_.count ? before : p_.count;
            for (; i < head; i += kStep) few(i, head - i < kStep ? head - i : kStep);
            i = head;
        }
        i = streams ? all<true>(i) : all<false>(i);
        if (i < p_.count) few(i, p_.count - i);
        if (streams) stream_fence();
    }

 private:
    GCCOMM_FN const T* part(i64 rank) const { return reinterpret_cast<const T*>(p_.parts[rank]); }

    template <bool streams>
    i64 all(i64 i) const {
        return p_.ranks == 2 ? whole<streams>(i, 2) : whole<streams>(i, p_.ranks);
    }

    template <bool streams>
    GCCOMM_FN i64 whole(i64 i, i64 ranks) const {
        for (; i + kStep <= p_.count; i += kStep) {
            prefetch(part(0) + i + kFetch);
            typename Kind::Value sum = Kind::read(part(0) + i);
            for (i64 r = 1; r < ranks; r++) {
                prefetch(part(r) + i + kFetch);
                sum = Kind::join(sum, Kind::read(part(r) + i));
            }
            if constexpr (streams)
                stream(out_ + i, Kind::written(sum));
            else
                store(out_ + i, Kind::written(sum));
        }
        return i;
    }

    // Less than a vector: no memory is touched beyond.
    void few(i64 i, i64 count) const {
        const u64 bytes = static_cast<u64>(count) * sizeof(T);
        T staged[kStep] = {};
        __builtin_memcpy(staged, part(0) + i, bytes);
        typename Kind::Value sum = Kind::read(staged);
        for (i64 r = 1; r < p_.ranks; r++) {
            __builtin_memcpy(staged, part(r) + i, bytes);
            sum = Kind::join(sum, Kind::read(staged));
        }
        store(staged, Kind::written(sum));
        __builtin_memcpy(out_ + i, staged, bytes);
    }

    const Parts& p_;
    T* out_;
};

inline void join_parts(const Parts& p) {
    const FloatEnvironment environment;
    switch (p.kind) {
        case Joining::add_words:
            return PartSums<Sums<u32, U>>(p).run();
        case Joining::max_words:
            return PartSums<Maxima>(p).run();
        case Joining::add_float32:
            return PartSums<Sums<float, F>>(p).run();
        case Joining::add_float64:
            return PartSums<Sums<double, D>>(p).run();
        case Joining::add_bfloat16:
            return PartSums<HalfParts<BFloat16>>(p).run();
        case Joining::add_float16:
            return PartSums<HalfParts<Float16>>(p).run();
    }
}

}  // namespace gccomm::GCCOMM_LEVEL
