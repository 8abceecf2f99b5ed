// The Python module: addresses are plain integers, and the GIL is released while kernels run.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <stdexcept>

#include "bind.h"
#include "dispatch.h"
#include "flags.h"
#include "pool.h"
#include "workers.h"

namespace nb = nanobind;

namespace gccomm {
namespace {

void require_ranks(Index n) { require(n >= 1 && n < Index{1} << 31, "n outside 1 ... 2^31 - 1"); }

bool maxima(Address table, Index segments, Index lo, Index hi, Address out, Address energy, int rotations,
            Address kept, Address places) {
    check_rotations(rotations);
    require(kept == 0 || rotations != 0, "only rotated blocks are kept");
    require((kept == 0) == (places == 0), "kept blocks need their places");
    const Batch all = batch(table, segments, lo, hi);
    const MaximaArgs args{pointer<std::uint32_t>(out), pointer<std::uint32_t>(energy), rotations,
                          pointer<float>(kept)};
    std::atomic<bool> normal{true};
    share_blocks(lo, hi, [&](Index from, Index to) {
        MaximaArgs mine = args;
        mine.out += from - lo;
        if (mine.energy != nullptr) mine.energy += from - lo;
        if (kept != 0) mine.kept += pointer<const Index>(places)[from] - pointer<const Index>(places)[lo];
        if (!kernels().maxima({all.table, all.segments, from, to}, mine)) normal = false;
    });
    return normal;
}

void encode(Address table, Index segments, Index lo, Index hi, Address scales, Address words, Index word_base,
            int width, std::int32_t limit, std::uint32_t shift, Address check, std::int32_t clamp,
            Address ratios, int rotations, Address maxima, bool subtract, Address grid, Address gains) {
    check_lanes(width, ratios == 0 ? limit : 1);
    check_rotations(rotations);
    require(clamp != 0 || ratios == 0 || grid != 0, "with ratios a clamp or a grid is needed");
    require(ratios != 0 || grid == 0, "a grid needs ratios");
    require(
        grid == 0 || (*pointer<const std::int32_t>(grid) >= 1 && *pointer<const std::int32_t>(grid) <= 1023),
        "a grid has 1 to 1023 steps");
    require(clamp >= 0 && clamp <= 2147418112, "clamp outside 1 ... 32767 * 65536");
    const Batch all = batch(table, segments, lo, hi);
    const EncodeArgs args{pointer<const std::uint32_t>(scales),
                          {pointer<std::uint32_t>(words), word_base},
                          width,
                          limit,
                          shift,
                          pointer<std::uint32_t>(check),
                          clamp,
                          pointer<const float>(ratios),
                          rotations,
                          pointer<std::uint32_t>(maxima),
                          subtract,
                          pointer<const std::int32_t>(grid),
                          pointer<const float>(gains),
                          0,
                          nullptr};
    share_blocks(lo, hi, [&](Index from, Index to) {
        EncodeArgs mine = args;
        if (mine.check != nullptr) mine.check += 2 * (from - lo);
        if (mine.maxima != nullptr) mine.maxima += from - lo;
        kernels().encode({all.table, all.segments, from, to}, mine);
    });
}

void decode(Address table, Index segments, Index lo, Index hi, Address scales, Address words, Index word_base,
            int width, std::int32_t limit, Index n, bool subtract, bool mean, bool stream, Address check,
            Address energy, Address ratios, int rotations, std::int32_t offset, Index dithers) {
    check_lanes(width, ratios == 0 ? limit : 1);
    check_rotations(rotations);
    require_ranks(n);
    require(dithers >= 0 && dithers <= n, "dithers outside 0 ... n");
    const Batch all = batch(table, segments, lo, hi);
    const DecodeArgs args{pointer<const std::uint32_t>(scales),
                          {pointer<std::uint32_t>(words), word_base},
                          width,
                          limit,
                          n,
                          subtract,
                          mean,
                          stream,
                          pointer<std::uint32_t>(check),
                          pointer<std::uint32_t>(energy),
                          pointer<const float>(ratios),
                          rotations,
                          offset,
                          dithers == 0 ? n : dithers,
                          nullptr,
                          0};
    share_blocks(lo, hi, [&](Index from, Index to) {
        DecodeArgs mine = args;
        if (mine.check != nullptr) mine.check += 2 * (from - lo);
        if (mine.energy != nullptr) mine.energy += from - lo;
        kernels().decode({all.table, all.segments, from, to}, mine);
    });
}

void hop_encode(Address table, Index segments, Index lo, Index hi, Address scales, Address words,
                Index word_base, int width, std::int32_t limit, std::uint32_t shift, int rotations) {
    check_lanes(width, limit);
    check_rotations(rotations);
    require(rotations != 0 && width <= 16, "blocks are rotated, in lanes of at most 16 bits");
    kernels().hop_encode(batch(table, segments, lo, hi), {pointer<std::uint32_t>(scales),
                                                          {pointer<std::uint32_t>(words), word_base},
                                                          width,
                                                          limit,
                                                          shift,
                                                          rotations});
}

void hop_fold(Address table, Address again, Index segments, Index lo, Index hi, Address parts, Index ranks,
              Address shifts, Address out, Index word_base, Index lane_words, int width, std::int32_t limit,
              int down) {
    check_lanes(width, limit);
    require(width <= 16, "lanes have at most 16 bits");
    require(ranks >= 1 && lane_words >= 0, "ranks and lane_words must not be negative, nor ranks 0");
    require(down >= 0 && down <= 30, "down outside 0 ... 30");
    kernels().hop_fold(batch(table, segments, lo, hi),
                       {pointer<const Segment>(again), pointer<const std::uint64_t>(parts), ranks,
                        pointer<const std::uint32_t>(shifts), pointer<std::uint32_t>(out), word_base,
                        lane_words, width, limit, down});
}

void widen_lanes(Address table, Index segments, Index lo, Index hi, Address parts, Index ranks, Address out,
                 Index word_base, int from, int to, bool padded) {
    check_lanes(from, 1);
    check_lanes(to, 1);
    require(from <= to && to <= 16, "lanes widen, to at most 16 bits of width");
    require(ranks >= 1, "ranks must be positive");
    kernels().widen_lanes(batch(table, segments, lo, hi),
                          {pointer<const std::uint64_t>(parts), ranks, pointer<std::uint32_t>(out), word_base,
                           from, to, padded});
}

ExactArgs exact_args(Address scales, Address words, Index word_base, Index n, bool mean) {
    require(n >= 1 && n <= Index{1} << 29, "n outside 1 ... 2^29");
    return {pointer<const std::uint32_t>(scales), {pointer<std::uint32_t>(words), word_base}, n, mean};
}

void exact_encode(Address table, Index segments, Index lo, Index hi, Address scales, Address words,
                  Index word_base, Index n) {
    kernels().exact_encode(batch(table, segments, lo, hi), exact_args(scales, words, word_base, n, false));
}

void exact_decode(Address table, Index segments, Index lo, Index hi, Address scales, Address words,
                  Index word_base, Index n, bool mean) {
    kernels().exact_decode(batch(table, segments, lo, hi), exact_args(scales, words, word_base, n, mean));
}

void int_range(Address table, Index segments, Address out) {
    kernels().int_range(pointer<const Segment>(table), segments, pointer<std::uint32_t>(out));
}

void int_encode(Address table, Index segments, Index lo, Index hi, Address words, Index word_base) {
    kernels().int_encode(batch(table, segments, lo, hi), {pointer<std::uint32_t>(words), word_base});
}

Index int_decode(Address table, Index segments, Index lo, Index hi, Address words, Index word_base, Index n) {
    require_ranks(n);
    return kernels().int_decode(batch(table, segments, lo, hi), {pointer<std::uint32_t>(words), word_base});
}

FloatArgs float_args(Address buffer, int wire, Index n, bool mean, bool stream) {
    require(wire >= 0 && wire <= 3, "wire must be the code of a float dtype");
    require_ranks(n);
    return {pointer<void>(buffer), static_cast<DType>(wire), n, mean, stream};
}

// From so many blocks on, the buffer would leave the caches before it is sent: it is written past them.
constexpr Index kStreamBlocks = 8192;

void float_encode(Address table, Index segments, Index lo, Index hi, Address buffer, int wire) {
    const bool stream = hi - lo >= kStreamBlocks;
    kernels().float_encode(batch(table, segments, lo, hi), float_args(buffer, wire, 1, false, stream));
}

void float_decode(Address table, Index segments, Index lo, Index hi, Address buffer, int wire, Index n,
                  bool mean, bool stream) {
    kernels().float_decode(batch(table, segments, lo, hi), float_args(buffer, wire, n, mean, stream));
}

int nonfinite(Address table, Index segments, Index lo, Index hi) {
    return kernels().nonfinite(batch(table, segments, lo, hi)) ? 1 : 0;
}

void chunk_energies(Address table, int size, int power, Address out) {
    require(size >= 1, "chunks of less than one coordinate");
    kernels().chunk_energies(*pointer<const Segment>(table), {size, power, pointer<double>(out)});
}

Address reduce_op(const std::string& name) {
    if (name == "bfloat16") return reinterpret_cast<Address>(kernels().add_bfloat16);
    if (name == "float16") return reinterpret_cast<Address>(kernels().add_float16);
    throw std::invalid_argument("no reduction for \"" + name + "\"; there are: bfloat16, float16");
}

WordPair word_pair(Address a, Address b, Address out, Index count) {
    require(count >= 0, "count must not be negative");
    return {pointer<const std::uint32_t>(a), pointer<const std::uint32_t>(b), pointer<std::uint32_t>(out),
            count};
}

void saturating_add(Address a, Address b, Address out, Index count, int width) {
    check_lanes(width, 1);
    require(width <= 16, "saturating lanes have at most 16 bits");
    kernels().saturating_add(word_pair(a, b, out, count), width);
}

void exponent_add(Address a, Address b, Address out, Index count, std::uint32_t seed, Index start) {
    kernels().exponent_add(word_pair(a, b, out, count), seed, start);
}

void exponent_encode(Address values, Address out, Index count, std::uint32_t key0, std::uint32_t key1,
                     Index start) {
    require(count >= 0, "count must not be negative");
    kernels().exponent_encode(pointer<const float>(values), pointer<std::uint32_t>(out), count, key0, key1,
                              start);
}

void exponent_decode(Address words, Address out, Index count) {
    require(count >= 0, "count must not be negative");
    kernels().exponent_decode(pointer<const std::uint32_t>(words), pointer<float>(out), count);
}

void join_parts(Address parts, Index ranks, Address out, Index count, int kind, bool stream) {
    require(ranks >= 1 && count >= 0, "ranks and count must not be negative, nor ranks 0");
    require(kind >= 0 && kind < kJoinings, "kind outside 0 ... 5");
    kernels().join_parts({pointer<const std::uint64_t>(parts), ranks, pointer<void>(out), count,
                          static_cast<Joining>(kind), stream});
}

void check_counters(Index blocks, int bits) {
    require(blocks >= 0, "blocks must not be negative");
    require(bits == 4 || bits == 8 || bits == 16 || bits == 32, "counters have 4, 8, 16 or 32 bits");
}

Index count_intervals(Address own, Address scales, Index blocks, bool wide, int bits, Address counters) {
    check_counters(blocks, bits);
    return kernels().count_intervals({pointer<const std::uint32_t>(own), pointer<const std::uint32_t>(scales),
                                      blocks, wide, bits, pointer<std::uint32_t>(counters), nullptr,
                                      nullptr});
}

int highest_intervals(Address counters, Index blocks, int bits, Index ranks, Address intervals) {
    check_counters(blocks, bits);
    return kernels().highest_intervals(
        {nullptr, nullptr, blocks, false, bits, pointer<std::uint32_t>(counters),
         pointer<std::uint32_t>(intervals), nullptr},
        ranks);
}

void predict_scales(Address scales, Address intervals, Index blocks, bool wide, Address predicted) {
    check_counters(blocks, 4);
    kernels().predict_scales({nullptr, pointer<const std::uint32_t>(scales), blocks, wide, 4, nullptr,
                              pointer<std::uint32_t>(intervals), pointer<std::uint32_t>(predicted)});
}

std::uint64_t digest(Address data, Index nbytes, std::uint64_t seed) {
    require(nbytes >= 0, "nbytes must not be negative");
    return kernels().digest(pointer<const void>(data), nbytes, seed);
}

void raise_flag(Address flag, std::uint32_t number) { flags::raise(pointer<std::uint32_t>(flag), number); }

bool await_flags(Address table, Index count, std::uint32_t number, Index spins) {
    return flags::await(pointer<const std::uint64_t>(table), count, number, spins);
}

// A block of the pool for as long as an array of Python's refers to it.
struct Lease {
    void* block;
    std::size_t bytes;
    explicit Lease(std::size_t n) : block(Pool::instance().take(n)), bytes(n) {}
    ~Lease() { Pool::instance().give_back(block, bytes); }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
};

using Bytes = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>;

Bytes pool_empty(Index nbytes) {
    require(nbytes >= 0, "nbytes must not be negative");
    auto lease = std::make_unique<Lease>(static_cast<std::size_t>(nbytes));
    void* block = lease->block;
    nb::capsule owner(lease.get(), [](void* p) noexcept { delete static_cast<Lease*>(p); });
    lease.release();
    return Bytes(block, {static_cast<std::size_t>(nbytes)}, owner);
}

nb::dict pool_stats() {
    const PoolStats stats = Pool::instance().stats();
    nb::dict result;
    result["outstanding"] = stats.outstanding;
    result["free"] = stats.free;
    result["high_water"] = stats.high_water;
    return result;
}

// The start of every NumPy array object: stable since NumPy's first release, and all that is needed here.
struct ArrayHead {
    PyObject head;
    void* data;
};

// numpy.ndarray, once it is known that ArrayHead describes it.
PyTypeObject* array_type() {
    nb::object numpy = nb::module_::import_("numpy");
    nb::object probe = numpy.attr("zeros")(1);
    const nb::object expected = probe.attr("__array_interface__")["data"][0];
    if (nb::cast<Address>(expected) !=
        reinterpret_cast<Address>(reinterpret_cast<ArrayHead*>(probe.ptr())->data))
        throw std::runtime_error("this NumPy lays out its arrays in an unknown way");
    return reinterpret_cast<PyTypeObject*>(nb::object(numpy.attr("ndarray")).release().ptr());
}

Address address(nb::handle array) {
    static PyTypeObject* const type = array_type();
    if (!PyObject_TypeCheck(array.ptr(), type)) {
        if (!nb::hasattr(array, "address")) throw nb::type_error("address() takes a NumPy array");
        return nb::cast<Address>(array.attr("address"));  // of a device
    }
    return reinterpret_cast<Address>(reinterpret_cast<ArrayHead*>(array.ptr())->data);
}

void choose_from_environment() {
    const char* name = std::getenv("GCCOMM_ISA");
    if (name != nullptr && *name != '\0') choose_level(name);
    const char* count = std::getenv("GCCOMM_NUM_THREADS");
    if (count != nullptr && *count != '\0') choose_threads(count);
}

}  // namespace
}  // namespace gccomm

NB_MODULE(_native, m) {
    using namespace nb::literals;
    using Released = nb::call_guard<nb::gil_scoped_release>;
    namespace g = gccomm;
    m.doc() = "Kernels on blocks of tensors; see gccomm.kernels.";
    m.def("maxima", &g::maxima, "table"_a, "nseg"_a, "lo"_a, "hi"_a, "out"_a, "energy"_a = 0,
          "rotations"_a = 0, "kept"_a = 0, "places"_a = 0, Released());
    m.def("encode", &g::encode, "table"_a, "nseg"_a, "lo"_a, "hi"_a, "scales"_a, "words"_a, "word_base"_a,
          "width"_a, "limit"_a, "shift"_a, "check"_a = 0, "clamp"_a = 0, "ratios"_a = 0, "rotations"_a = 0,
          "maxima"_a = 0, "subtract"_a = false, "grid"_a = 0, "gains"_a = 0, Released());
    m.def("decode", &g::decode, "table"_a, "nseg"_a, "lo"_a, "hi"_a, "scales"_a, "words"_a, "word_base"_a,
          "width"_a, "limit"_a, "n"_a, "subtract"_a, "mean"_a, "stream"_a, "check"_a = 0, "energy"_a = 0,
          "ratios"_a = 0, "rotations"_a = 0, "offset"_a = 0, "dithers"_a = 0, Released());
    m.def("hop_encode", &g::hop_encode, "table"_a, "nseg"_a, "lo"_a, "hi"_a, "scales"_a, "words"_a,
          "word_base"_a, "width"_a, "limit"_a, "shift"_a, "rotations"_a, Released());
    m.def("hop_fold", &g::hop_fold, "table"_a, "again"_a, "nseg"_a, "lo"_a, "hi"_a, "parts"_a, "ranks"_a,
          "shifts"_a, "out"_a, "word_base"_a, "lane_words"_a, "width"_a, "limit"_a, "down"_a, Released());
    m.def("widen_lanes", &g::widen_lanes, "table"_a, "nseg"_a, "lo"_a, "hi"_a, "parts"_a, "ranks"_a, "out"_a,
          "word_base"_a, "narrow"_a, "width"_a, "padded"_a, Released());
    m.def("exact_encode", &g::exact_encode, "table"_a, "nseg"_a, "lo"_a, "hi"_a, "scales"_a, "words"_a,
          "word_base"_a, "n"_a, Released());
    m.def("exact_decode", &g::exact_decode, "table"_a, "nseg"_a, "lo"_a, "hi"_a, "scales"_a, "words"_a,
          "word_base"_a, "n"_a, "mean"_a, Released());
    m.def("int_range", &g::int_range, "table"_a, "nseg"_a, "out"_a, Released());
    m.def("int_encode", &g::int_encode, "table"_a, "nseg"_a, "lo"_a, "hi"_a, "words"_a, "word_base"_a,
          Released());
    m.def("int_decode", &g::int_decode, "table"_a, "nseg"_a, "lo"_a, "hi"_a, "words"_a, "word_base"_a, "n"_a,
          Released());
    m.def("float_encode", &g::float_encode, "table"_a, "nseg"_a, "lo"_a, "hi"_a, "buffer"_a, "wire"_a,
          Released());
    m.def("float_decode", &g::float_decode, "table"_a, "nseg"_a, "lo"_a, "hi"_a, "buffer"_a, "wire"_a, "n"_a,
          "mean"_a, "stream"_a, Released());
    m.def("nonfinite", &g::nonfinite, "table"_a, "nseg"_a, "lo"_a, "hi"_a, Released());
    m.def("chunk_energies", &g::chunk_energies, "table"_a, "size"_a, "power"_a, "out"_a, Released());
    m.def("reduce_op", &g::reduce_op, "name"_a);
    m.def("pool_empty", &g::pool_empty, "nbytes"_a);
    m.def("pool_stats", &g::pool_stats);
    m.def("pool_trim", [] { g::Pool::instance().trim(); });
    m.def("address", &g::address, "array"_a.none());
    m.def("isas", &g::usable_levels);
    m.def("isa", &g::current_level);
    m.def("set_isa", &g::choose_level, "name"_a);
    m.def("saturating_add", &g::saturating_add, "a"_a, "b"_a, "out"_a, "count"_a, "width"_a, Released());
    m.def("exponent_add", &g::exponent_add, "a"_a, "b"_a, "out"_a, "count"_a, "seed"_a, "start"_a,
          Released());
    m.def("exponent_encode", &g::exponent_encode, "values"_a, "out"_a, "count"_a, "key0"_a, "key1"_a,
          "start"_a, Released());
    m.def("exponent_decode", &g::exponent_decode, "words"_a, "out"_a, "count"_a, Released());
    m.def("join_parts", &g::join_parts, "parts"_a, "ranks"_a, "out"_a, "count"_a, "kind"_a,
          "stream"_a = false, Released());
    m.def("count_intervals", &g::count_intervals, "own"_a, "scales"_a, "blocks"_a, "wide"_a, "bits"_a,
          "counters"_a, Released());
    m.def("highest_intervals", &g::highest_intervals, "counters"_a, "blocks"_a, "bits"_a, "ranks"_a,
          "intervals"_a, Released());
    m.def("predict_scales", &g::predict_scales, "scales"_a, "intervals"_a, "blocks"_a, "wide"_a,
          "predicted"_a, Released());
    m.def("digest", &g::digest, "data"_a, "nbytes"_a, "seed"_a, Released());
    m.def("threads", &g::threads);
    m.def("raise_flag", &g::raise_flag, "flag"_a, "number"_a);
    m.def("await_flags", &g::await_flags, "flags"_a, "count"_a, "number"_a, "spins"_a, Released());
    g::bind_headroom(m);
    g::bind_exchange(m);
    g::choose_from_environment();
}
