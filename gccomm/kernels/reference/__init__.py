"""The specification of the kernels, as pure functions over an array namespace.

The same lines run under ``numpy``, where they are what the C++ kernels are compared with word for word, and
under ``jax.numpy`` inside ``jax.jit``, where they are the in-graph path.  The first argument of a function is
the namespace; arrays have shape (blocks, length), all blocks of one length.  There are no in-place writes, no
boolean masks and no Python branch on values, so that step keys, block numbers, rank shift and scales may be
traced; widths, limits, the number of ranks and flags are Python values.  Under JAX everything is 32 bits
wide, and float64 and 64-bit integers exist under NumPy only.

XLA reads subnormal numbers as zero and flushes them: there, equality with NumPy holds for blocks whose
maximum is 2**-90 or more, or exactly zero.
"""

from __future__ import annotations

from gccomm.kernels.reference.chunks import chunk_energies
from gccomm.kernels.reference.counters import count_intervals, highest_intervals, predict_scales
from gccomm.kernels.reference.dequantise import (
    block_energy,
    centred_sums,
    decode,
    dequantise,
    wide_sums,
)
from gccomm.kernels.reference.digest import digest
from gccomm.kernels.reference.energies import encoded_maxima, maxima_and_energies
from gccomm.kernels.reference.exact import exact_decode, exact_encode
from gccomm.kernels.reference.floats import float_decode, float_encode
from gccomm.kernels.reference.hashing import block_hashes, block_keys, check_words, coordinate_hash, fmix
from gccomm.kernels.reference.headroom import (
    choose_steps,
    learn_energies,
    share_energies,
    sum_spans,
)
from gccomm.kernels.reference.hops import hop_fold, widen_lanes
from gccomm.kernels.reference.integers import integer_decode, integer_encode, integer_range
from gccomm.kernels.reference.operations import (
    exponent_add,
    exponent_add_bytes,
    exponent_decode,
    exponent_encode,
    indexed_hash,
    leading_zeros,
    saturating_add,
)
from gccomm.kernels.reference.packing import pack, unpack
from gccomm.kernels.reference.quantise import Encoded, Grid, encode, quantise
from gccomm.kernels.reference.rotation import Rotation, padded, rotate, sign_words, unrotate
from gccomm.kernels.reference.scales import (
    add_residual,
    maxima,
    narrow,
    nonfinite,
    split_scale,
    usable,
    widen,
)
from gccomm.kernels.reference.sketches import project_errors, sum_inputs

__all__ = [
    "Encoded",
    "Grid",
    "Rotation",
    "add_residual",
    "block_energy",
    "block_hashes",
    "block_keys",
    "centred_sums",
    "check_words",
    "choose_steps",
    "chunk_energies",
    "coordinate_hash",
    "count_intervals",
    "decode",
    "dequantise",
    "digest",
    "encode",
    "encoded_maxima",
    "exact_decode",
    "exact_encode",
    "exponent_add",
    "exponent_add_bytes",
    "exponent_decode",
    "exponent_encode",
    "float_decode",
    "float_encode",
    "fmix",
    "highest_intervals",
    "hop_fold",
    "indexed_hash",
    "integer_decode",
    "integer_encode",
    "integer_range",
    "leading_zeros",
    "learn_energies",
    "maxima",
    "maxima_and_energies",
    "narrow",
    "nonfinite",
    "pack",
    "padded",
    "predict_scales",
    "project_errors",
    "quantise",
    "rotate",
    "saturating_add",
    "share_energies",
    "sign_words",
    "split_scale",
    "sum_inputs",
    "sum_spans",
    "unpack",
    "unrotate",
    "usable",
    "wide_sums",
    "widen",
    "widen_lanes",
]
