// All kernels for one instruction-set level: compiled once per level, each time into a namespace of its own
// (GCCOMM_LEVEL), so that no inline function of one level can stand in for another's. Uses no inline function
// of the standard library for the same reason.
#include "chunks.h"
#include "copy.h"
#include "counters.h"
#include "decode.h"
#include "digest.h"
#include "exact.h"
#include "floats.h"
#include "headroom.h"
#include "integers.h"
#include "operations.h"
#include "parts.h"
#include "rehop.h"
#include "sketch.h"
#include "turns.h"

namespace gccomm::GCCOMM_LEVEL {

extern const Kernels kernels;

const Kernels kernels = {
    maxima,
    encode,
    decode,
    encode_and_decode,
    hop_encode,
    hop_fold,
    widen_lanes,
    exact_encode,
    exact_decode,
    int_range,
    int_encode,
    int_decode,
    float_encode,
    float_decode,
    nonfinite,
    chunk_energies,
    add_halves<BFloat16>,
    add_halves<Float16>,
    saturating_add,
    exponent_add,
    exponent_encode,
    exponent_decode,
    join_parts,
    count_intervals,
    highest_intervals,
    predict_scales,
    digest,
    share_energies,
    choose_steps,
    sum_spans,
    learn_energies,
    project_errors,
    sum_inputs,
    stream_copy,
};

}  // namespace gccomm::GCCOMM_LEVEL
