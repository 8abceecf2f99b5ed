// The functions of checked headroom and of the measured error, for Python.
#include "bind.h"
#include "dispatch.h"

namespace gccomm {
namespace {

using Words32 = const std::uint32_t;

void share_energies(Address own, Address energy, Address scales, Index blocks, bool wide, Index ranks,
                    Address out) {
    require(blocks >= 0, "blocks must not be negative");
    require(ranks >= 1, "ranks must be positive");
    kernels().share_energies({pointer<Words32>(own), pointer<Words32>(energy), pointer<Words32>(scales),
                              blocks, wide, ranks, pointer<std::uint32_t>(out)});
}

void choose_steps(Address table, Index segments, Index blocks, Address scales, Address energies,
                  Address ratios, double unit, double deviations, double bracket, double safe, double least,
                  Address out) {
    require(blocks >= 0, "blocks must not be negative");
    kernels().choose_steps(
        batch(table, segments, 0, blocks),
        {pointer<Words32>(scales), pointer<Words32>(energies), pointer<const double>(ratios), unit,
         deviations, bracket, safe, least, pointer<float>(out)});
}

Index sum_spans(Address check, Address starts, Index spans, Index blocks, Address out, Address expected) {
    require(blocks >= 0, "blocks must not be negative");
    require(spans >= 0, "spans must not be negative");
    return kernels().sum_spans({pointer<Words32>(check), pointer<const Index>(starts), spans, blocks,
                                pointer<Words32>(expected), pointer<std::uint32_t>(out)});
}

void learn_energies(Address table, Index segments, Index blocks, Address scales, Address steps,
                    Address energies, Address energy, Address redone, double unit, double noise, double part,
                    Address out) {
    require(blocks >= 0, "blocks must not be negative");
    kernels().learn_energies(batch(table, segments, 0, blocks),
                             {pointer<Words32>(scales), pointer<const float>(steps),
                              pointer<Words32>(energies), pointer<Words32>(energy),
                              pointer<const std::uint8_t>(redone), unit, noise, part, pointer<Learnt>(out)});
}

void project_errors(Address errors, bool wide, Address starts, Address lengths, Address blocks, Index count,
                    Address out) {
    require(count >= 0, "count must not be negative");
    kernels().project_errors({pointer<const void>(errors), wide, pointer<const Index>(starts),
                              pointer<const Index>(lengths), pointer<const Index>(blocks), count,
                              pointer<double>(out)});
}

void sum_inputs(Address table, Index segments, Index lo, Index hi, int power, Address out) {
    require(power >= -2000 && power <= 2000, "power outside -2000 ... 2000");
    kernels().sum_inputs(batch(table, segments, lo, hi), power, pointer<double>(out));
}

}  // namespace

void bind_headroom(nanobind::module_& m) {
    using namespace nanobind::literals;
    using Released = nanobind::call_guard<nanobind::gil_scoped_release>;
    m.def("share_energies", &share_energies, "own"_a, "energy"_a, "scales"_a, "blocks"_a, "wide"_a, "ranks"_a,
          "out"_a, Released());
    m.def("choose_steps", &choose_steps, "table"_a, "nseg"_a, "blocks"_a, "scales"_a, "energies"_a,
          "ratios"_a, "unit"_a, "deviations"_a, "bracket"_a, "safe"_a, "least"_a, "out"_a, Released());
    m.def("sum_spans", &sum_spans, "check"_a, "starts"_a, "spans"_a, "blocks"_a, "out"_a, "expected"_a = 0,
          Released());
    m.def("learn_energies", &learn_energies, "table"_a, "nseg"_a, "blocks"_a, "scales"_a, "steps"_a,
          "energies"_a, "energy"_a, "redone"_a, "unit"_a, "noise"_a, "part"_a, "out"_a, Released());
    m.def("project_errors", &project_errors, "errors"_a, "wide"_a, "starts"_a, "lengths"_a, "blocks"_a,
          "count"_a, "out"_a, Released());
    m.def("sum_inputs", &sum_inputs, "table"_a, "nseg"_a, "lo"_a, "hi"_a, "power"_a, "out"_a, Released());
}

}  // namespace gccomm
