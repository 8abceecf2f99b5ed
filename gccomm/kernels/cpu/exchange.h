// Reductions through slots of memory that the ranks of a host share, chunk by chunk and without Python in
// between: while a chunk waits for the other ranks, the work goes on with the next one.
//
// A call that has to wait returns, and goes on where it stopped when it is called again.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "dispatch.h"
#include "flags.h"
#include "ways.h"

namespace gccomm {

// The slots and flags of all ranks, and how far an exchange has come; mirrors EXCHANGE in table.py.
struct Exchange {
    std::uint64_t slots, up, down;  // addresses of tables of addresses: slots, shape (turns, ranks); flags
    std::uint64_t own;              // address of as much memory as two slots have, of this rank alone
    std::int64_t slot_bytes, turns, ranks, rank, spins;
    WayTimes times;
    std::int64_t posted, finished, event;  // 0 at first
    double encode_s, decode_s;
    std::uint32_t number;  // of the last message before
    std::uint32_t kept;    // a bit for each of two chunks: whether its rotated blocks were kept
    std::uint32_t apart;   // the same: whether this rank's part is to be read where it was copied from
    std::uint32_t unused;
};
static_assert(sizeof(Exchange) == 208);

inline std::uint32_t bit_of(std::int64_t chunk) { return 1u << (chunk % 2); }

// The messages of an exchange, finished in the order in which they are posted.
class Messages {
 public:
    explicit Messages(Exchange& at) : at_(at), ways_(at.times) {}

    // Copies chunk k into a slot.
    void put(std::int64_t k, const void* data, void* slot, std::int64_t nbytes, Way way) {
        ways_.copy(data, slot, nbytes, way);
        at_.apart = (at_.apart & ~bit_of(k)) | (way == Way::past ? bit_of(k) : 0);
    }

    // The same of one that has been written there, past the caches, along with this rank's own.
    void written(std::int64_t k) { at_.apart |= bit_of(k); }

    Way way(std::int64_t nbytes) { return ways_.next(nbytes); }

    bool timed() const { return ways_.timed(); }

    // The slots of all ranks, but for this rank's part, which is read at `own` if it went past the caches.
    const std::uint64_t* parts(const std::uint64_t* slots, std::int64_t k, const void* own) {
        if ((at_.apart & bit_of(k)) == 0) return slots;
        parts_.assign(slots, slots + at_.ranks);
        parts_[static_cast<std::size_t>(at_.rank)] = reinterpret_cast<std::uint64_t>(own);
        return parts_.data();
    }

    // This rank's next slot, once all ranks have finished what was in it, or null.
    void* free() const {
        const auto flags = reinterpret_cast<const std::uint64_t*>(at_.down);
        const std::uint32_t last = number(at_.posted) - static_cast<std::uint32_t>(at_.turns);
        if (!flags::await(flags, at_.ranks, last, at_.spins)) return nullptr;
        return reinterpret_cast<void*>(slots(at_.posted)[at_.rank]);
    }

    void post() { raise(at_.up, ++at_.posted); }

    // The slots of the message that is to be finished next, once all ranks have posted it, or null.
    const std::uint64_t* arrived() const {
        const auto flags = reinterpret_cast<const std::uint64_t*>(at_.up);
        if (!flags::await(flags, at_.ranks, number(at_.finished), at_.spins)) return nullptr;
        return slots(at_.finished);
    }

    void finish() { raise(at_.down, ++at_.finished); }

 private:
    std::uint32_t number(std::int64_t k) const { return at_.number + 1 + static_cast<std::uint32_t>(k); }

    const std::uint64_t* slots(std::int64_t k) const {
        const std::int64_t turn = number(k) % static_cast<std::uint32_t>(at_.turns);
        return reinterpret_cast<const std::uint64_t*>(at_.slots) + turn * at_.ranks;
    }

    void raise(std::uint64_t table, std::int64_t count) const {
        const std::uint64_t flag = reinterpret_cast<const std::uint64_t*>(table)[at_.rank];
        flags::raise(reinterpret_cast<std::uint32_t*>(flag), number(count - 1));
    }

    Exchange& at_;
    Ways ways_;
    std::vector<std::uint64_t> parts_;
};

// An array, of which `chunk` elements are reduced at once.
struct ArrayJob {
    const char* send;
    char* recv;
    std::int64_t count, item, chunk;
    Joining kind;
    bool stream;
};

// Returns whether all is done.
inline bool run(Exchange& at, const ArrayJob& job) {
    Messages messages(at);
    const std::int64_t chunks = (job.count + job.chunk - 1) / job.chunk;
    const auto length = [&](std::int64_t k) { return std::min(job.chunk, job.count - k * job.chunk); };
    while (at.finished < chunks) {
        while (at.posted < chunks && at.posted < at.finished + 2) {
            void* slot = messages.free();
            if (slot == nullptr) return false;
            const char* data = job.send + at.posted * job.chunk * job.item;
            const std::int64_t nbytes = length(at.posted) * job.item;
            if (slot != data) messages.put(at.posted, data, slot, nbytes, messages.way(nbytes));
            messages.post();
        }
        const std::uint64_t* slots = messages.arrived();
        if (slots == nullptr) return false;
        const std::int64_t from = at.finished * job.chunk * job.item;
        const std::uint64_t* parts = messages.parts(slots, at.finished, job.send + from);
        kernels().join_parts({parts, at.ranks, job.recv + from, length(at.finished), job.kind, job.stream});
        messages.finish();
    }
    return true;
}

// Blocks that are sent in lanes; mirrors LANES in table.py.
struct LaneJob {
    std::uint64_t table;       // of segments
    std::uint64_t kept_table;  // the same over rotated blocks, as if they lay from address 0 on, or 0
    std::uint64_t kept;        // address of room for the rotated blocks of two chunks
    std::uint64_t places;      // of each block among the rotated ones, and the end, in coordinates: int64
    std::uint64_t words;       // the same of its words: int64
    std::uint64_t scales;      // of the blocks: uint32, written if `agree`
    std::uint64_t maxima;      // where the blocks' own scale words go, or 0
    std::int64_t segments, blocks, chunk;
    std::int32_t width, limit;
    std::uint32_t shift, tag;
    std::uint8_t rotations, agree, subtract, mean, stream, unused[3];
};
static_assert(sizeof(LaneJob) == 104);

// The blocks' scales are agreed and their lanes summed, two chunks of blocks on their way.
class LaneExchange {
    using Index = std::int64_t;
    using Clock = std::chrono::steady_clock;

 public:
    LaneExchange(Exchange& at, const LaneJob& job)
        : at_(at), job_(job), messages_(at), chunks_((job.blocks + job.chunk - 1) / job.chunk) {}

    // Returns whether all is done. Four events a chunk: maxima of the next one posted, maxima of this one
    // agreed, its lanes posted, the lanes of the one before decoded. Where scales are agreed, every second
    // rank does the last two the other way round: while one works in its caches, the other has the memory.
    bool run() {
        const bool swapped = job_.agree && at_.rank % 2 == 1;
        for (; at_.event < 4 * (chunks_ + 2); at_.event++) {
            const Index what = at_.event % 4, k = at_.event / 4 - 1;
            if (!step(swapped && what >= 2 ? 5 - what : what, k)) return false;
        }
        return true;
    }

 private:
    bool step(Index what, Index k) {
        switch (what) {
            case 0:
                return !job_.agree || k + 1 >= chunks_ || post_maxima(k + 1);
            case 1:
                return !job_.agree || !inside(k) || agree(k);
            case 2:
                return !inside(k) || post_lanes(k);
            default:
                return !inside(k - 1) || decode(k - 1);
        }
    }

    bool inside(Index k) const { return k >= 0 && k < chunks_; }

    Index first(Index k) const { return std::min(k * job_.chunk, job_.blocks); }

    // The segments that have blocks of a chunk, of many perhaps.
    Batch batch(Index k) const {
        const auto* table = reinterpret_cast<const Segment*>(job_.table);
        const auto* end = table + job_.segments;
        const auto starts_later = [](Index block, const Segment& s) { return block < s.base; };
        const auto* from = std::upper_bound(table, end, first(k), starts_later);
        if (from != table) from--;
        const auto* to = std::upper_bound(from, end, first(k + 1) - 1, starts_later);
        return {from, to - from, first(k), first(k + 1)};
    }

    template <class T>
    static T* at_block(std::uint64_t address, Index block) {
        return address == 0 ? nullptr : reinterpret_cast<T*>(address) + block;
    }

    Words words(void* data, Index k) const {
        return {static_cast<std::uint32_t*>(data), *at_block<const Index>(job_.words, first(k))};
    }

    Index word_count(Index k) const {
        return *at_block<const Index>(job_.words, first(k + 1)) -
               *at_block<const Index>(job_.words, first(k));
    }

    std::uint32_t tag(Index k) const { return job_.tag + static_cast<std::uint32_t>(k) * 0x9E3779B1u; }

    // Where the rotated blocks of a chunk are kept.
    float* room(Index k) const {
        return reinterpret_cast<float*>(job_.kept) + k % 2 * job_.chunk * Index{1024};
    }

    bool post_maxima(Index k) {
        void* slot = messages_.free();
        if (slot == nullptr) return false;
        const auto start = Clock::now();
        float* kept = job_.kept_table == 0 ? nullptr : room(k);
        const bool usable =
            kernels().maxima(batch(k), {static_cast<std::uint32_t*>(slot), nullptr, job_.rotations, kept});
        at_.kept = (at_.kept & ~bit_of(k)) | (kept != nullptr && usable ? bit_of(k) : 0);
        messages_.post();
        at_.encode_s += since(start);
        return true;
    }

    bool agree(Index k) {
        const std::uint64_t* parts = messages_.arrived();
        if (parts == nullptr) return false;
        auto* scales = at_block<std::uint32_t>(job_.scales, first(k));
        kernels().join_parts({parts, at_.ranks, scales, first(k + 1) - first(k), Joining::max_words, false});
        messages_.finish();
        return true;
    }

    bool post_lanes(Index k) {
        void* slot = messages_.free();
        if (slot == nullptr) return false;
        const auto start = Clock::now();
        const bool kept = job_.agree && (at_.kept & bit_of(k)) != 0;
        EncodeArgs args{};
        args.scales = at_block<const std::uint32_t>(job_.scales, 0);
        const Index nbytes = (word_count(k) + 1) * Index{sizeof(std::uint32_t)};
        const Way way = messages_.way(nbytes);
        void* written = way == Way::direct ? slot : own(k);
        args.words = words(written, k);
        args.width = job_.width;
        args.limit = job_.limit;
        args.shift = job_.shift;
        args.rotations = kept ? 0 : job_.rotations;
        args.maxima = at_block<std::uint32_t>(job_.maxima, first(k));
        args.subtract = !kept && job_.subtract;
        args.ahead = job_.agree && job_.rotations == 0 ? 2 * job_.chunk : 0;
        const bool twice = way == Way::past && !messages_.timed();
        args.twin = twice ? static_cast<std::uint32_t*>(slot) : nullptr;
        kernels().encode(kept ? kept_batch(k) : batch(k), args);
        args.words.data[word_count(k)] = tag(k);
        if (twice) {
            args.twin[word_count(k)] = tag(k);
            messages_.written(k);
        } else if (way == Way::direct) {
            at_.apart &= ~bit_of(k);
        } else {
            messages_.put(k, written, slot, nbytes, way);
        }
        messages_.post();
        at_.encode_s += since(start);
        return true;
    }

    bool decode(Index k) {
        const std::uint64_t* slots = messages_.arrived();
        if (slots == nullptr) return false;
        const auto start = Clock::now();
        const std::uint64_t* parts = messages_.parts(slots, k, own(k));
        check_tag(parts, k);
        DecodeArgs args{};
        args.scales = at_block<const std::uint32_t>(job_.scales, 0);
        args.words = words(nullptr, k);
        args.parts = parts;
        args.ranks = at_.ranks;
        args.width = job_.width;
        args.limit = job_.limit;
        args.n = args.dithers = at_.ranks;
        args.subtract = job_.subtract;
        args.mean = job_.mean;
        args.stream = job_.stream;
        args.rotations = job_.rotations;
        kernels().decode(batch(k), args);
        messages_.finish();
        at_.decode_s += since(start);
        return true;
    }

    void check_tag(const std::uint64_t* parts, Index k) const {
        std::uint32_t sum = 0;
        for (Index r = 0; r < at_.ranks; r++)
            sum += reinterpret_cast<const std::uint32_t*>(parts[r])[word_count(k)];
        if (sum != tag(k) * static_cast<std::uint32_t>(at_.ranks))
            throw std::runtime_error("a tag is wrong: messages of different calls were added");
    }

    // The same over the rotated blocks of the chunk, where they are kept.
    Batch kept_batch(Index k) {
        Batch found = batch(k);
        const auto* from = reinterpret_cast<const Segment*>(job_.kept_table) +
                           (found.table - reinterpret_cast<const Segment*>(job_.table));
        const auto before = static_cast<std::uint64_t>(*at_block<const Index>(job_.places, first(k)));
        const auto start = reinterpret_cast<std::uint64_t>(room(k)) - sizeof(float) * before;
        kept_.assign(from, from + found.segments);
        for (Segment& segment : kept_) segment.src += start;
        found.table = kept_.data();
        return found;
    }

    // Where the words of a chunk that is copied are written first.
    void* own(Index k) const { return reinterpret_cast<char*>(at_.own) + k % 2 * at_.slot_bytes; }

    static double since(Clock::time_point start) {
        return std::chrono::duration<double>(Clock::now() - start).count();
    }

    Exchange& at_;
    const LaneJob& job_;
    Messages messages_;
    Index chunks_;
    std::vector<Segment> kept_;
};

}  // namespace gccomm
