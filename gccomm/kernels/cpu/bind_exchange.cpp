// Exchanges through memory that ranks share, for Python.
#define GCCOMM_LEVEL any  // of what little arithmetic there is here
#include "bind.h"
#include "calls.h"
#include "swaps.h"

namespace gccomm {
namespace {

Exchange& exchange(Address address) {
    Exchange& at = *pointer<Exchange>(address);
    require(at.turns >= 2 && at.ranks >= 1 && at.rank >= 0 && at.rank < at.ranks, "no such slots or ranks");
    return at;
}

bool exchange_array(Address state, Address send, Address recv, Index count, Index item, Index chunk, int kind,
                    bool stream) {
    require(count >= 0 && item >= 1 && chunk >= 1, "count, item and chunk must be positive");
    require(kind >= 0 && kind < kJoinings, "kind outside 0 ... 5");
    return run(exchange(state), {pointer<const char>(send), pointer<char>(recv), count, item, chunk,
                                 static_cast<Joining>(kind), stream});
}

void check_job(const Exchange& at, const LaneJob& job) {
    require(at.turns >= 4, "too few slots");
    check_lanes(job.width, job.limit);
    check_rotations(job.rotations);
    require(job.segments >= 0 && job.blocks >= 0 && job.chunk >= 1, "blocks and chunk must be positive");
    require(job.kept_table == 0 || (job.rotations != 0 && job.agree), "only rotated blocks are kept");
}

bool exchange_lanes(Address state, Address record) {
    Exchange& at = exchange(state);
    const LaneJob& job = *pointer<const LaneJob>(record);
    check_job(at, job);
    return LaneExchange(at, job).run();
}

void begin_call(Address record, Address src, Address dst, std::uint64_t step, bool slow) {
    begin(*pointer<CallJob>(record), src, dst, step, slow);
}

int exchange_call(Address state, Address record) {
    Exchange& at = exchange(state);
    CallJob& job = *pointer<CallJob>(record);
    if (job.lanes != 0) check_job(at, *pointer<const LaneJob>(job.lanes));
    require(job.words >= 1 && job.words * 4 <= at.slot_bytes, "the message must fit into a slot");
    require(job.count >= 0 && job.item >= 1 && job.chunk >= 1, "count, item and chunk must be positive");
    require(job.chunk * job.item <= at.slot_bytes, "a chunk must fit into a slot");
    require(job.kind >= 0 && job.kind < kJoinings, "kind outside 0 ... 5");
    require(job.wire >= 0 && job.wire <= 3, "wire must be the code of a float dtype");
    return static_cast<int>(run(at, job));
}

Swap swap(Address record) {
    const CallJob& job = *pointer<const CallJob>(record);
    require(job.values >= 0, "values must not be negative");
    require(job.header_words >= 0 && job.count >= 0 && job.item >= 1,
            "words, count and item must be positive");
    require(job.kind >= 0 && job.kind < kJoinings, "kind outside 0 ... 5");
    require(job.wire >= 0 && job.wire <= 3, "wire must be the code of a float dtype");
    if (job.lanes != 0) {
        const LaneJob& lanes = *pointer<const LaneJob>(job.lanes);
        check_lanes(lanes.width, lanes.limit);
        check_rotations(lanes.rotations);
        require(lanes.segments == 1 && lanes.blocks >= 0, "only single tensors are swapped");
    }
    return Swap(job);
}

nanobind::tuple swap_bytes(Address record) {
    const Swap made = swap(record);
    return nanobind::make_tuple(made.nbytes(), made.message_bytes());
}

void swap_pack(Address record, Address out) { swap(record).pack(pointer<char>(out)); }

int swap_finish(Address record, Address messages, Address shifts, Index ranks, Index rank) {
    require(ranks >= 1 && rank >= 0 && rank < ranks, "no such ranks");
    const auto* all = pointer<const std::uint64_t>(messages);
    return static_cast<int>(
        swap(record).finish({all, all + ranks}, pointer<const std::uint32_t>(shifts), rank));
}

}  // namespace

void bind_exchange(nanobind::module_& m) {
    using namespace nanobind::literals;
    using Released = nanobind::call_guard<nanobind::gil_scoped_release>;
    m.def("exchange_array", &exchange_array, "exchange"_a, "send"_a, "recv"_a, "count"_a, "item"_a, "chunk"_a,
          "kind"_a, "stream"_a, Released());
    m.def("exchange_lanes", &exchange_lanes, "exchange"_a, "job"_a, Released());
    m.def("begin_call", &begin_call, "call"_a, "src"_a, "dst"_a, "step"_a, "slow"_a);
    m.def("exchange_call", &exchange_call, "exchange"_a, "call"_a, Released());
    m.def("swap_bytes", &swap_bytes, "call"_a);
    m.def("swap_pack", &swap_pack, "call"_a, "out"_a);
    m.def("swap_finish", &swap_finish, "call"_a, "messages"_a, "shifts"_a, "ranks"_a, "rank"_a);
}

}  // namespace gccomm
