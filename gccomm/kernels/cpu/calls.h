// Calls whose steps are known: agreement on a header, and the sum behind it, without Python in between.
#pragma once
#include <cstring>

#include "../core.h"
#include "exchange.h"

namespace gccomm {

// A call on one tensor; mirrors CALL in table.py.
struct CallJob {
    std::uint64_t header, agreed;  // addresses of words: this rank's header; the message that is agreed on
    std::uint64_t table, twin;     // of the tensor's one segment; of one with the same keys, or 0
    std::uint64_t lanes;           // of a LaneJob, or 0: floats are summed
    std::uint64_t sums;            // of floats, where they are converted, or 0: from and to the tensor itself
    std::uint64_t places;          // of the coordinates before each block: int64
    std::int64_t header_words, words, compared, values, step_at;
    std::int64_t blocks, count, item, chunk, n;
    std::uint32_t key0, key1, tag;
    std::int32_t phase, kind, wire;
    std::uint8_t mean, unused[7];
};
static_assert(sizeof(CallJob) == 168);

enum class Answer { waits, done, differs };

// Writes down what is of one call alone: where its tensor lies, its noise, its header, its tag.
inline void begin(CallJob& job, std::uint64_t src, std::uint64_t dst, std::uint64_t step, bool slow) {
    auto* table = reinterpret_cast<Segment*>(job.table);
    table->src = src;
    table->dst = dst;
    const auto key = GCCOMM_LEVEL::step_key(job.key0, job.key1, step);
    for (auto* segment : {table, reinterpret_cast<Segment*>(job.twin)}) {
        if (segment == nullptr) continue;
        segment->key0 = segment->sign0 = key.t0;
        segment->key1 = segment->sign1 = key.t1;
    }
    auto* header = reinterpret_cast<std::uint32_t*>(job.header);
    header[job.step_at] = static_cast<std::uint32_t>(step);
    header[job.step_at + 1] = ~header[job.step_at];
    header[job.compared] = slow ? 1 : 0;
    auto* agreed = reinterpret_cast<std::uint32_t*>(job.agreed);
    std::copy_n(header, job.header_words, agreed);
    std::fill(agreed + job.header_words, agreed + job.words, 0u);
    job.tag = 0;
    for (std::int64_t i = 0; i < job.values; i++) job.tag = job.tag * 0x01000193u ^ header[2 * i];
    job.phase = 0;
}

// Floats that are converted on both sides: blocks when the chunk that they begin in is sent, and when the one
// that they end in has come.
class FloatExchange {
    using Index = std::int64_t;
    using Clock = std::chrono::steady_clock;

 public:
    FloatExchange(Exchange& at, const CallJob& job)
        : at_(at), job_(job), messages_(at), chunks_((job.count + job.chunk - 1) / job.chunk) {}

    bool run() {
        while (at_.finished < chunks_) {
            while (at_.posted < chunks_ && at_.posted < at_.finished + 2)
                if (!post(at_.posted)) return false;
            if (!finish(at_.finished)) return false;
        }
        return true;
    }

 private:
    bool post(Index k) {
        void* slot = messages_.free();
        if (slot == nullptr) return false;
        const auto start = Clock::now();
        const Batch blocks = batch(begun(first(k)), begun(first(k + 1)));
        kernels().float_encode(blocks, args(blocks.lo, 1, false));
        const Index nbytes = length(k) * job_.item;
        messages_.put(k, sums(first(k)), slot, nbytes, messages_.way(nbytes));
        messages_.post();
        at_.encode_s += since(start);
        return true;
    }

    bool finish(Index k) {
        const std::uint64_t* slots = messages_.arrived();
        if (slots == nullptr) return false;
        const auto start = Clock::now();
        const std::uint64_t* parts = messages_.parts(slots, k, sums(first(k)));
        kernels().join_parts(
            {parts, at_.ranks, sums(first(k)), length(k), static_cast<Joining>(job_.kind), false});
        messages_.finish();
        const Batch blocks = batch(ended(first(k)), ended(first(k + 1)));
        kernels().float_decode(blocks, args(blocks.lo, job_.n, job_.mean != 0));
        at_.decode_s += since(start);
        return true;
    }

    Index first(Index k) const { return std::min(k * job_.chunk, job_.count); }

    Index length(Index k) const { return first(k + 1) - first(k); }

    char* sums(Index place) const { return reinterpret_cast<char*>(job_.sums) + place * job_.item; }

    // Coordinates before each block.
    const Index* places() const { return reinterpret_cast<const Index*>(job_.places); }

    // How many blocks begin, or have ended, before a coordinate.
    Index begun(Index place) const {
        return std::lower_bound(places(), places() + job_.blocks, place) - places();
    }

    Index ended(Index place) const {
        return std::upper_bound(places(), places() + job_.blocks + 1, place) - places() - 1;
    }

    Batch batch(Index lo, Index hi) const {
        return {reinterpret_cast<const Segment*>(job_.table), 1, lo, hi};
    }

    FloatArgs args(Index block, Index n, bool mean) const {
        return {sums(places()[block]), static_cast<DType>(job_.wire), n, mean, false};
    }

    static double since(Clock::time_point start) {
        return std::chrono::duration<double>(Clock::now() - start).count();
    }

    Exchange& at_;
    const CallJob& job_;
    Messages messages_;
    Index chunks_;
};

// What follows is an exchange of its own.
inline void next_exchange(Exchange& at) {
    at.number += static_cast<std::uint32_t>(at.finished);
    at.posted = at.finished = at.event = 0;
    at.kept = at.apart = 0;
}

inline bool sum(Exchange& at, const CallJob& job) {
    if (job.lanes != 0) {
        auto& lanes = *reinterpret_cast<LaneJob*>(job.lanes);
        lanes.tag = job.tag * 0x9E3779B1u + 0x7F4A7C15u;  // that of the first sum
        return LaneExchange(at, lanes).run();
    }
    if (job.sums != 0) return FloatExchange(at, job).run();
    const auto& tensor = *reinterpret_cast<const Segment*>(job.table);
    return run(at, {reinterpret_cast<const char*>(tensor.src), reinterpret_cast<char*>(tensor.dst), job.count,
                    job.item, job.chunk, static_cast<Joining>(job.kind), false});
}

// Goes on with a call. Where ranks differ in what they call, nothing is summed.
inline Answer run(Exchange& at, CallJob& job) {
    if (job.phase == 0) {
        auto* agreed = reinterpret_cast<char*>(job.agreed);
        if (!run(at, {agreed, agreed, job.words, 4, job.words, Joining::max_words, false}))
            return Answer::waits;
        const auto compared = static_cast<std::size_t>(job.compared) * sizeof(std::uint32_t);
        if (std::memcmp(agreed, reinterpret_cast<const void*>(job.header), compared) != 0)
            return Answer::differs;
        next_exchange(at);
        job.phase = 1;
    }
    return sum(at, job) ? Answer::done : Answer::waits;
}

}  // namespace gccomm
