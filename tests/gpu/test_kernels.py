"""Words, scales, results and residuals of every dtype and lane width, bit for bit those of the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gccomm.kernels import reference
from tests import test_chunks as chunks
from tests import test_word_equality_rotations as rotations
from tests.gpu.bridge import Bridged
from tests.test_cuda_kernels import (
    test_absent_inputs_and_empty_tensors,
    test_ends_of_the_range,
    test_exact_words,
    test_float_wires,
    test_floats_of_several_segments_from_any_block_on,
    test_integers,
    test_lane_codec,
    test_lane_codec_on_batches_in_pieces,
    test_rotations_in_all_widths,
    test_rotations_on_all_sizes,
)
from tests.word_batches import FLOATS

__all__ = [
    "test_absent_inputs_and_empty_tensors",
    "test_ends_of_the_range",
    "test_exact_words",
    "test_float_wires",
    "test_floats_of_several_segments_from_any_block_on",
    "test_integers",
    "test_lane_codec",
    "test_lane_codec_on_batches_in_pieces",
    "test_rotations_in_all_widths",
    "test_rotations_on_all_sizes",
]


def test_rotations_on_batches_in_pieces(device: Bridged) -> None:
    rotations.test_batches_in_pieces()


@pytest.mark.parametrize("size", [1, 32, 64, 100, 1500, 65536])
@pytest.mark.parametrize("dtype", FLOATS)
def test_chunks(device: Any, dtype: str, size: int) -> None:
    rng = np.random.default_rng([size, FLOATS.index(dtype)])
    for tensor in (chunks.make(dtype, 5003, rng), chunks.finite(dtype, 7000, rng)):
        want = reference.chunk_energies(chunks.values(tensor), size)
        found = chunks.energies(device, tensor, size, 0)
        np.testing.assert_array_equal(chunks.bits(found), chunks.bits(want))
    tensor = chunks.finite(dtype, 2600, rng)
    count = -(-2600 // size)
    for power in (0, 5, -70):
        chosen = np.flatnonzero(rng.random(count) < 0.4)
        chunks.one_case(device, tensor, size, chosen, power, n=3)
