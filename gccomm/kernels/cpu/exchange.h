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
    std::uint64_t own;              // address of as much memory as three slots have, of this rank alone
    std::int64_t slot_bytes, turns, ranks, rank, spins;
    WayTimes times;
    std::int64_t posted, finished, event;  // 0 at first
    double encode_s, decode_s;
    std::uint32_t number;    // of the last message before
    std::uint32_t kept;      // a bit for each open chunk: whether its rotated blocks were kept
    std::uint32_t apart;     // the same: whether this rank's part is to be read where it was copied from
    std::uint32_t in_turns;  // whether lanes are encoded and decoded block by block in turns
};
static_assert(sizeof(Exchange) == 208);

constexpr std::int64_t kOpen = 3;   // chunks at most that have been begun and not finished: OPEN in window.py
constexpr std::int64_t kNone = -1;  // no chunk

inline std::uint32_t bit_of(std::int64_t chunk) { return 1u << (chunk % kOpen); }

// The messages of an exchange, finished in the order in which they are posted.
class Messages {
 public:
    explicit Messages(Exchange& at) : at_(at), ways_(at.times) {}

    // Copies chunk k into a slot.
    void put(std::int64_t k, const void* data, void* slot, std::int64_t nbytes, Way way) {
        ways_.copy(data, slot, nbytes, way);
        written(k, way);
    }

    // Notes how chunk k has been written there without a copy: past the caches, along with this rank's own.
    void written(std::int64_t k, Way way) {
        at_.apart = (at_.apart & ~bit_of(k)) | (way == Way::past ? bit_of(k) : 0);
    }

    Way way(std::int64_t nbytes) { return ways_.next(nbytes); }

    bool timed() const { return ways_.timed(); }

    bool near() const { return ways_.near(); }

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

// The blocks' scales are agreed and their lanes summed, two or three chunks of blocks on their way.
//
// Encoding reads memory and takes arithmetic, decoding writes memory. Both may be done in turns, block by
// block, so that memory has always something to do: where scales are not agreed, so that what is encoded
// comes from memory, and for ranks near each other, who share the way to it. The blocks that are rotated have
// arithmetic enough on either side. Otherwise, where scales are agreed, every second rank does the two in
// another order than the rest: while one works in its caches, the other has the memory.
class LaneExchange {
    using Index = std::int64_t;
    using Clock = std::chrono::steady_clock;

 public:
    LaneExchange(Exchange& at, const LaneJob& job)
        : at_(at), job_(job), messages_(at), chunks_((job.blocks + job.chunk - 1) / job.chunk) {}

    // Returns whether all is done. Four events a chunk: maxima of the next one posted, maxima of this one
    // agreed, its lanes posted, the lanes of one before decoded.
    bool run() {
        if (at_.event == 0) at_.in_turns = in_turns() ? 1 : 0;
        const Index behind = at_.in_turns != 0 && !job_.agree ? 2 : 1;
        for (; at_.event < 4 * (chunks_ + behind + 1); at_.event++)
            if (!step(at_.event % 4, at_.event / 4 - 1, behind)) return false;
        return true;
    }

 private:
    bool in_turns() const { return job_.rotations == 0 && (!job_.agree || messages_.near()); }

    bool step(Index what, Index k, Index behind) {
        if (what == 0) return !job_.agree || k + 1 >= chunks_ || post_maxima(k + 1);
        if (what == 1) return !job_.agree || !inside(k) || agree(k);
        if (at_.in_turns != 0) return what == 3 || work(k, k - behind);
        const bool decodes_first = job_.agree && at_.rank % 2 == 1;
        return (what == 2) != decodes_first ? work(k, kNone) : work(kNone, k - behind);
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

    // Encodes a chunk and posts its lanes, and decodes another one, where there are such.
    bool work(Index ahead, Index behind) {
        const bool encodes = inside(ahead), decodes = inside(behind);
        void* slot = encodes ? messages_.free() : nullptr;
        if (encodes && slot == nullptr) return false;
        const std::uint64_t* slots = decodes ? messages_.arrived() : nullptr;
        if (decodes && slots == nullptr) return false;
        const auto start = Clock::now();
        const Sending sending = encodes ? send_to(slot, ahead) : Sending{};
        const DecodeArgs back = decodes ? decode_args(slots, behind) : DecodeArgs{};
        if (encodes && decodes)
            kernels().encode_and_decode(source(ahead), sending.args, batch(behind), back);
        else if (encodes)
            kernels().encode(source(ahead), sending.args);
        else if (decodes)
            kernels().decode(batch(behind), back);
        if (encodes) send(sending, ahead);
        if (decodes) messages_.finish();
        const double seconds = since(start) / (encodes && decodes ? 2 : 1);
        if (encodes) at_.encode_s += seconds;
        if (decodes) at_.decode_s += seconds;
        return true;
    }

    // How the lanes of a chunk go into a slot.
    struct Sending {
        void *slot, *written;
        Index nbytes;
        Way way;
        EncodeArgs args;
    };

    Sending send_to(void* slot, Index k) {
        const Index nbytes = (word_count(k) + 1) * Index{sizeof(std::uint32_t)};
        const Way way = messages_.way(nbytes);
        Sending sending{slot, way == Way::direct ? slot : own(k), nbytes, way, {}};
        EncodeArgs& args = sending.args;
        args.scales = at_block<const std::uint32_t>(job_.scales, 0);
        args.words = words(sending.written, k);
        args.width = job_.width;
        args.limit = job_.limit;
        args.shift = job_.shift;
        args.rotations = kept(k) ? 0 : job_.rotations;
        args.maxima = at_block<std::uint32_t>(job_.maxima, first(k));
        args.subtract = !kept(k) && job_.subtract;
        args.ahead = job_.agree && job_.rotations == 0 ? 2 * job_.chunk : 0;
        if (way == Way::past && !messages_.timed()) args.twin = static_cast<std::uint32_t*>(slot);
        return sending;
    }

    void send(const Sending& s, Index k) {
        s.args.words.data[word_count(k)] = tag(k);
        if (s.args.twin != nullptr) {
            s.args.twin[word_count(k)] = tag(k);
            messages_.written(k, Way::past);
        } else if (s.way == Way::direct) {
            messages_.written(k, Way::direct);
        } else {
            messages_.put(k, s.written, s.slot, s.nbytes, s.way);
        }
        messages_.post();
    }

    DecodeArgs decode_args(const std::uint64_t* slots, Index k) {
        DecodeArgs args{};
        args.scales = at_block<const std::uint32_t>(job_.scales, 0);
        args.words = words(nullptr, k);
        args.parts = messages_.parts(slots, k, own(k));
        args.ranks = at_.ranks;
        args.width = job_.width;
        args.limit = job_.limit;
        args.n = args.dithers = at_.ranks;
        args.subtract = job_.subtract;
        args.mean = job_.mean;
        args.stream = job_.stream;
        args.rotations = job_.rotations;
        check_tag(args.parts, k);
        return args;
    }

    void check_tag(const std::uint64_t* parts, Index k) const {
        std::uint32_t sum = 0;
        for (Index r = 0; r < at_.ranks; r++)
            sum += reinterpret_cast<const std::uint32_t*>(parts[r])[word_count(k)];
        if (sum != tag(k) * static_cast<std::uint32_t>(at_.ranks))
            throw std::runtime_error("a tag is wrong: messages of different calls were added");
    }

    bool kept(Index k) const { return job_.agree && (at_.kept & bit_of(k)) != 0; }

    // The blocks of a chunk: rotated ones, where they are kept.
    Batch source(Index k) {
        Batch found = batch(k);
        if (!kept(k)) return found;
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
    void* own(Index k) const { return reinterpret_cast<char*>(at_.own) + k % kOpen * at_.slot_bytes; }

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
