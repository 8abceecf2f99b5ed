"""How the native kernels walk batches, segments, rows and blocks, and what they leave alone.

That their arithmetic is the reference's is tested in ``test_word_equality.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gccomm import kernels
from gccomm.lanes import WIDTHS
from tests.kernel_batches import WIRES, Array, Batch, Part, convert, lane_batch, level, normal

__all__ = ["level"]


def on_every_level(function: Callable[[], Sequence[Array]]) -> list[list[bytes]]:
    """Return the bytes that `function` computes on each instruction-set level."""
    before, results = kernels.isa(), []
    for name in kernels.isas():
        kernels.set_isa(name)
        results.append([x.tobytes() for x in function()])
    kernels.set_isa(before)
    return results


@pytest.mark.parametrize("width", WIDTHS[:-1])
@pytest.mark.parametrize("size", [0, 1, 7, 15, 16, 17, 33, 1023, 1024, 1025])
def test_round_trip_at_edge_lengths(level: str, width: int, size: int) -> None:
    x, limit = normal(size), ((1 << (width - 1)) - 1) << 16
    batch = lane_batch(width, Part(x))
    scales = batch.maxima()
    decoded = batch.decode(scales, batch.encode(scales, width, limit), width, limit)
    if size == 0:
        assert batch.blocks == 0
        assert decoded == []
        return
    step = scales.view(np.float32).max() / ((1 << (width - 1)) - 1)
    assert np.abs(decoded[0] - x).max() <= step * 0.501


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_maxima(level: str, dtype: str) -> None:
    numpy = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    x = (normal(4 * 1500) * np.float32(7)).astype(numpy)
    x[3000 + 5] = -np.inf
    storage = x.view(np.uint16) if dtype == "bfloat16" else x
    found = Batch(Part(storage, dtype, row=1500)).maxima()
    blocks = [x[r * 1500 + a : r * 1500 + b] for r in range(4) for a, b in ((0, 1024), (1024, 1500))]
    largest = np.array([np.abs(b.astype(np.float64)).max() for b in blocks])
    if dtype == "float64":
        bits = largest.view(np.uint64)
        assert np.array_equal(found, (bits + np.uint64(0xFFFFFFFF)) >> np.uint64(32))
    else:
        assert np.array_equal(found, largest.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize(("row", "start", "count"), [(0, 2, 3), (1500, 3, 4), (512, 1, 3), (2048, 3, 2)])
def test_a_segment_is_a_slice_of_its_tensor(level: str, row: int, start: int, count: int) -> None:
    x, limit = normal(row * 5 if row else 7000), 1 << 22
    whole, part = Part(x, row=row), Part(x, row=row, start=start, count=count)
    batch, inner = lane_batch(8, whole), lane_batch(8, part)
    scales = batch.maxima()
    assert np.array_equal(inner.maxima(), scales[start : start + count])
    words = batch.encode(scales, 8, limit)
    cut = words[batch.offsets[start] : batch.offsets[start + count]]
    assert np.array_equal(inner.encode(inner.maxima(), 8, limit), cut)
    (expected,) = batch.decode(scales, words, 8, limit)
    (found,) = inner.decode(inner.maxima(), cut.copy(), 8, limit)
    assert np.array_equal(found, np.concatenate([whole.out[p] for p in part.places]))
    assert expected.size == x.size


@pytest.mark.parametrize("width", [5, 8])
@pytest.mark.parametrize("stream", [False, True])
def test_a_batch_is_its_segments(level: str, width: int, stream: bool) -> None:
    def parts() -> list[Part]:
        half = normal(1300, 4).astype(np.float16)
        first = Part(normal(3000, 1), key=(1, 2))
        return [
            first,
            Part(np.zeros(0, dtype=np.float32)),
            Part(normal(1, 2)),
            Part(half, "float16"),
            Part(normal(3 * 700, 3), row=700, start=1, count=1),
        ]

    limit = 1 << 21
    batch = lane_batch(width, *parts())
    scales = batch.maxima()
    words = batch.encode(scales, width, limit)
    single = [lane_batch(width, part) for part in parts()]
    assert np.array_equal(words, np.concatenate([b.encode(b.maxima(), width, limit) for b in single]))
    expected = [b.decode(b.maxima(), b.encode(b.maxima(), width, limit), width, limit) for b in single]
    found = batch.decode(scales, words, width, limit, stream=stream)
    assert [x.tobytes() for x in found] == [x.tobytes() for xs in expected for x in xs]
    for lo, hi in [(0, 1), (2, 5), (3, 4), (batch.blocks - 1, batch.blocks), (4, 4)]:
        piece = words[batch.offsets[lo] : batch.offsets[hi]]
        assert np.array_equal(batch.encode(scales, width, limit, lo, hi), piece)
    assert np.array_equal(batch.encode(scales, width, limit, 0, batch.blocks), words)


def test_blocks_beyond_the_table_are_not_touched(level: str) -> None:
    part = Part(normal(2000))
    batch = lane_batch(8, part)
    out = np.full(8, 9, dtype=np.uint32)
    kernels.maxima(*batch.head, 0, 8, kernels.address(out))
    assert out[2:].tolist() == [9] * 6
    kernels.maxima(*batch.head, 5, 8, kernels.address(out))
    assert out[2:].tolist() == [9] * 6
    batch.table["nblocks"] = 5  # more than the tensor has
    kernels.maxima(*batch.head, 0, 5, kernels.address(out))
    assert out[2:].tolist() == [9] * 6


@pytest.mark.parametrize("offset", [0, 1, 4, 15, 16])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_results_at_any_alignment(level: str, offset: int, dtype: Any) -> None:
    x, limit = normal(2100).astype(dtype), 1 << 22
    expected: list[Array] = []
    for stream in (False, True):
        part = Part(x, np.dtype(dtype).name)
        part.guarded = np.full(x.size + 64, 77, dtype=dtype)
        start = -kernels.address(part.guarded) % 64 // part.guarded.itemsize + offset
        part.out = part.guarded[start : start + x.size]
        batch = lane_batch(8, part)
        scales = batch.maxima()
        words = batch.encode(scales, 8, limit)
        where = (kernels.address(scales), kernels.address(words), 0)
        kernels.decode(*batch.head, 0, batch.blocks, *where, 8, limit, 2, True, True, stream)
        assert (part.guarded[:start] == 77).all()
        assert (part.guarded[start + x.size :] == 77).all()
        expected.append(part.out.copy())
    assert np.array_equal(*expected)


def test_residual_is_what_was_not_sent(level: str) -> None:
    x, residual, limit = normal(2500), normal(2500, 1) * np.float32(0.01), 127 << 16
    part = Part(x, residual=residual)
    batch = lane_batch(8, part)
    scales = batch.maxima()
    assert scales.view(np.float32).max() == np.abs(x + residual).max()
    words = batch.encode(scales, 8, limit)
    for place, lo, hi, scale in zip(part.places, batch.offsets, batch.offsets[1:], scales, strict=False):
        lifted = words[lo:hi] + np.uint32(0x80808080)
        lane = [(lifted >> np.uint32(8 * k) & np.uint32(0xFF)).astype(np.float32) - 128 for k in range(4)]
        q = np.concatenate(lane)[: place.stop - place.start]
        step = np.uint32(scale).view(np.float32) / np.float32(127)
        assert np.allclose(part.rest[place], (x + residual)[place] - q * step, atol=1e-6)
        assert np.abs(part.rest[place]).max() <= step


def test_absent_input_counts_as_zeros(level: str) -> None:
    zeros = np.zeros(1500, dtype=np.float32)
    residual = normal(1500, 5)
    outputs = []
    for absent in (False, True):
        part = Part(zeros, residual=residual, absent=absent)
        batch = lane_batch(6, part)
        scales = batch.maxima()
        outputs.append((scales, batch.encode(scales, 6, 1 << 20), part.rest.copy()))
    assert all(np.array_equal(a, b) for a, b in zip(*outputs, strict=True))
    assert np.array_equal(outputs[0][0].view(np.float32)[0], np.abs(residual[:1024]).max())
    batch = lane_batch(6, Part(zeros, absent=True))
    assert not batch.maxima().any()
    assert not batch.encode(batch.maxima(), 6, 1 << 20).any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nonfinite_blocks(level: str, dtype: str) -> None:
    x, residual = normal(2048).astype(dtype), np.ones(2048, dtype=dtype)
    x[1500] = np.nan
    part = Part(x, dtype, residual=residual)
    batch = lane_batch(8, part)
    assert kernels.nonfinite(*batch.head, 0, 1) == 0
    assert kernels.nonfinite(*batch.head, 0, 2) == 1
    scales = batch.maxima()
    words = batch.encode(scales, 8, 1 << 22)
    assert not words[256:].any()
    assert (part.rest[1024:] == 1).all()
    (result,) = batch.decode(scales, words, 8, 1 << 22)
    assert np.isfinite(result[:1024]).all()
    assert np.isnan(result[1024:]).all()


def test_levels_agree_bit_for_bit() -> None:
    def everything() -> list[Array]:
        rng = np.random.default_rng(9)
        outputs: list[Array] = []
        for dtype in WIRES:
            x = normal(5 * 1300, 6) * 10.0 ** rng.uniform(-42, 30, 5 * 1300).astype(np.float32)
            x = x.astype(np.float64 if dtype == "float64" else np.float32)
            if dtype in {"float16", "bfloat16"}:
                with np.errstate(over="ignore", under="ignore"):
                    x = convert(x, "float32", dtype)
            residual = normal(x.size, 7).astype(np.float64 if dtype == "float64" else np.float32)
            part = Part(x, dtype, row=1300, residual=residual)
            for width in (3, 8, 16):
                batch = lane_batch(width, part)
                scales = batch.maxima()
                words = batch.encode(scales, width, 77777)
                batch.decode(scales, words, width, 77777, n=3, stream=True)
                outputs += [scales, words.copy(), part.rest.copy(), part.out.copy()]
        return outputs

    first, *others = on_every_level(everything)
    assert all(other == first for other in others)
