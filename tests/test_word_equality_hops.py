"""Lanes with scales of their own, and their sums rounded again: kernels and reference agree by word."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gccomm import kernels, lanes
from gccomm.kernels import reference
from gccomm.kernels.reference import Rotation
from tests.word_batches import FLOATS, Array, Batch, Tensor, assert_same, every_level, make

SIZES = (1, 63, 64, 65, 700, 1000, 1023, 1024, 1025, 3072)
WIDTHS = (2, 3, 4, 5, 6, 8, 10, 16)


def limit_of(width: int) -> int:
    return ((1 << (width - 1)) - 1) << 16


def specify(tensor: Tensor, width: int, shift: int, rotations: int) -> tuple[list[Array], list[Array]]:
    """Return the words, residuals and scales that the reference makes of a tensor."""

    def blocks(numbers: Array, index: Array, length: int) -> tuple[Array, ...]:
        rotation = Rotation(reference.sign_words(np, *tensor.signs, numbers), rotations)
        x, rest = tensor.x[index], tensor.rest(index)
        scales, _ = reference.maxima_and_energies(np, x, rest, rotation)
        sent = reference.encode(
            np, x, scales, tensor.hashes(numbers, reference.padded(length)), shift, width=width,
            limit=limit_of(width), residual=rest, rotation=rotation, subtract=True,
        )  # fmt: skip
        return sent.words, sent.residual, scales

    words, rests, scales = tensor.map_blocks(blocks)
    return words, [*rests, *scales]


@pytest.mark.parametrize("width", WIDTHS)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_encoding(width: int, seed: int) -> None:
    """Own maxima and words in one pass, with residuals and without, of all dtypes and magnitudes."""
    rng = np.random.default_rng(seed)
    rotations, shift = int(rng.integers(1, 3)), int(rng.integers(0, 1 << 16))
    tensors = [make(str(rng.choice(FLOATS)), int(rng.choice(SIZES)), rng) for _ in range(3)]
    keep = rng.random() < 0.5
    if not keep:
        tensors = [replace(tensor, residual=None) for tensor in tensors]
    for _ in every_level():
        batch = Batch(tensors, lambda _, n: lanes.words(width, reference.padded(n)))
        if not keep:
            batch.table["res_out"] = 0
        scales = np.zeros(batch.blocks, np.uint32)
        args = ("blocks", scales), ("words", batch.words), width, limit_of(width), shift, rotations
        batch.run(kernels.hop_encode, *args, cuts=(0.3, 0.7))
        for k, tensor in enumerate(tensors):
            words, more = specify(tensor, width, shift, rotations)
            at = slice(int(batch.starts[k]), int(batch.starts[k + 1]))
            lo, hi = batch.word_starts[at.start], batch.word_starts[at.stop]
            assert_same(batch.words[lo:hi], words)
            assert_same(scales[at], more[len(words) :])
            if keep:
                assert_same(batch.rests[k], more[: len(words)])


def draw_scales(ranks: int, blocks: int, wide: bool, rng: np.random.Generator) -> Array:
    """Return scales of all magnitudes, some of them near each other, zeros, infinities and NaN."""
    top = 0x7FF00000 if wide else 0x7F800000
    middle = rng.integers(1, top, blocks)
    near = middle + rng.integers(-40, 40, (ranks, blocks)) * (1 << (20 if wide else 23))
    scales = np.clip(near + rng.integers(0, 1 << 20, (ranks, blocks)), 1, top - 1)
    choice = rng.random((ranks, blocks))
    scales = np.where(choice < 0.2, 0, scales)
    scales = np.where((choice > 0.2) & (choice < 0.25), rng.integers(1, 50), scales)
    scales = np.where(choice > 0.98, top + rng.integers(0, 2) * 0x400000, scales)
    scales[:, rng.random(blocks) < 0.2] = 0
    return scales.astype(np.uint32)


@pytest.mark.parametrize("width", WIDTHS)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_folding(width: int, seed: int) -> None:
    """Any lanes and any scales, of ranks of very different magnitudes; cut anywhere."""
    rng = np.random.default_rng(seed)
    dtype, ranks = str(rng.choice(["float32", "float64"])), int(rng.choice([2, 3, 5, 16]))
    tensors = [make(dtype, int(rng.choice(SIZES)), rng) for _ in range(3)]
    again = [replace(tensor, key=(tensor.key[0] ^ 5, tensor.key[1] + 1)) for tensor in tensors]
    batch = Batch(tensors, lambda _, n: lanes.words(width, reference.padded(n)))
    twin = Batch(again, lambda _, n: lanes.words(width, reference.padded(n)))
    words = rng.integers(0, 2**32, (ranks, batch.words.size), dtype=np.uint64).astype(np.uint32)
    scales = draw_scales(ranks, batch.blocks, dtype == "float64", rng)
    if rng.random() < 0.2:  # nothing of the sum is left
        words[1::2], scales[1::2] = words[0], scales[0]
    shifts = rng.integers(0, 1 << 16, ranks).astype(np.uint32)
    down = (ranks - 1).bit_length() + 1
    expected = [
        fold_blocks(one, other, batch, k, words, scales, shifts, width, down)
        for k, (one, other) in enumerate(zip(tensors, again, strict=True))
    ]
    ends = sorted({0, batch.blocks // 2, batch.blocks})
    for _ in every_level():
        for lo, hi in pairwise(ends):
            a, b = int(batch.word_starts[lo]), int(batch.word_starts[hi])
            parts = [np.concatenate([words[r, a:b], scales[r, lo:hi]]) for r in range(ranks)]
            addresses = np.array([kernels.address(part) for part in parts], np.uint64)
            out = np.full(b - a + hi - lo, 7, np.uint32)
            kernels.hop_fold(
                kernels.address(batch.table), kernels.address(twin.table), len(tensors), lo, hi,
                kernels.address(addresses), ranks, kernels.address(shifts), kernels.address(out), a, b - a,
                width, limit_of(width), down,
            )  # fmt: skip
            found = [np.concatenate(column)[lo:hi] for column in zip(*[e[1:] for e in expected], strict=True)]
            flat = [one for e in expected for one in e[0]][lo:hi]
            assert_same(out[: b - a], flat)
            np.testing.assert_array_equal(out[b - a :], found[0])


def fold_blocks(
    tensor: Tensor, other: Tensor, batch: Batch, k: int, words: Array, scales: Array, shifts: Array,
    width: int, down: int,
) -> tuple[list[Array], Array]:  # fmt: skip
    """Return the words and scales of the sums of a tensor's blocks by the reference."""
    first, starts = int(batch.starts[k]), batch.word_starts

    def blocks(numbers: Array, _: Array, length: int) -> tuple[Array, ...]:
        places = numbers + first
        parts = np.array([[row[starts[b] : starts[b + 1]] for b in places] for row in words])
        n = reference.padded(length)
        return reference.hop_fold(
            parts, scales[:, places], tensor.hashes(numbers, n), other.hashes(numbers, n), shifts,
            width=width, limit=limit_of(width), down=down, wide=tensor.dtype == "float64",
        )  # fmt: skip

    sums, found = tensor.map_blocks(blocks)
    return sums, np.array(found, np.uint32)


def test_arguments_are_checked() -> None:
    table = np.zeros(1, kernels.SEGMENT)
    at = kernels.address(table)
    for width, limit, rotations in ((7, 1, 1), (32, 1, 1), (4, 0, 1), (4, 1, 0), (4, 1, 3)):
        with pytest.raises(ValueError, match=r"width|limit|rotation|rotated"):
            kernels.hop_encode(at, 0, 0, 0, at, at, 0, width, limit, 0, rotations)
    for ranks, width, down in ((0, 4, 1), (1, 7, 1), (1, 4, 31), (1, 4, -1)):
        with pytest.raises(ValueError, match=r"ranks|width|down"):
            kernels.hop_fold(at, at, 0, 0, 0, at, ranks, at, at, 0, 0, width, 1, down)
    with pytest.raises(ValueError, match="dithers"):
        kernels.decode(at, 0, 0, 0, at, at, 0, 4, 1, 2, True, False, False, dithers=3)
