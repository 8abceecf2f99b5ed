"""Rotations, energies, ratios, clamps and own maxima: native kernels and reference agree bit for bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gccomm import kernels
from gccomm import lanes as ln
from gccomm.kernels import reference
from gccomm.kernels.reference import Grid, Rotation
from tests.word_batches import FLOATS, Array, Batch, Tensor, assert_same, every_level, make

SIZES = (1, 63, 64, 65, 127, 320, 700, 768, 960, 1000, 1023, 1024, 1025)
LARGEST_LIMIT = 32767 * 65536


@dataclasses.dataclass
class Options:
    """What a codec may ask of the kernels."""

    rotations: int
    width: int
    limit: int
    clamp: int
    shift: int
    n: int
    ratios: bool
    subtract: bool
    mean: bool
    offset: int
    grid: Grid | None = None

    @classmethod
    def draw(cls, rotations: int, rng: np.random.Generator) -> Options:
        width, n = int(rng.choice(ln.WIDTHS)), int(rng.choice([1, 2, 3, 4, 17]))
        safe = ln.safe_limit(min(width, 16), n)
        flags = [bool(flag) for flag in rng.random(3) < 0.5]
        clamp = int(rng.choice([0, safe, 3, LARGEST_LIMIT, 2**24 + 1])) or (safe if flags[0] else 0)
        offset = int(rng.choice([0, 0, 16384, -5]))
        grid = draw_grid(rng) if flags[0] and rng.random() < 0.4 else None
        return cls(rotations, width, safe, clamp, ln.rank_shift(n // 2, n), n, *flags, offset, grid)

    def grid_table(self) -> Array | int:
        if self.grid is None:
            return 0
        return np.concatenate([[len(self.grid.low)], *self.grid]).astype(np.int32)

    def words(self, _: Tensor, length: int) -> int:
        return ln.words(self.width, self.padded(length))

    def padded(self, length: int) -> int:
        return reference.padded(length) if self.rotations else length

    def rotation(self, tensor: Tensor, numbers: Array) -> Rotation | None:
        if not self.rotations:
            return None
        return Rotation(reference.sign_words(np, *tensor.signs, numbers), self.rotations)


def draw_grid(rng: np.random.Generator) -> Grid:
    steps = int(rng.choice([1, 2, 3, 20, 45, 1023]))
    inner = 1 + np.flatnonzero(rng.random(steps - 1) < rng.random())
    points = np.array([0, *inner, steps], np.int32)
    at = np.searchsorted(points, np.arange(steps), side="right") - 1
    return Grid(points[at], np.diff(points)[at].astype(np.int32))


def draw_scales(maxima: Array, wide: bool, rng: np.random.Generator) -> Array:
    """Return agreed scales: those given, those of other blocks, and predicted ones that fit badly."""
    choice = rng.random(maxima.size)
    agreed = np.where(choice < 0.4, np.maximum(maxima, rng.permutation(maxima)), maxima)
    step = rng.integers(-16, 4, maxima.size) << (20 if wide else 23)
    finite = (maxima > 0) & (maxima < (0x7FF00000 if wide else 0x7F800000))
    near = np.clip(maxima.astype(np.int64) + step, 1, 0x7FEFFFFF if wide else 0x7F7FFFFF)
    far = rng.choice([1, 0x00000123, 0x3F800000, 0x7F000000], maxima.size)
    agreed = np.where((choice > 0.7) & finite, near, agreed)
    return np.where(choice > 0.95, far, agreed).astype(np.uint32)


def draw_ratios(blocks: int, p: Options, rng: np.random.Generator) -> Array | None:
    low, high = (-40, 40) if rng.random() < 0.2 else (-15, 1)
    ratios = (np.exp2(rng.uniform(low, high, blocks)) * (rng.random(blocks) < 0.9)).astype(np.float32)
    return ratios if p.ratios else None


def draw_gains(blocks: int, p: Options, rng: np.random.Generator) -> Array | None:
    gains = np.exp2(rng.uniform(-2, 3, blocks)).astype(np.float32)
    return gains if p.shift % 2 else None


class Specified:
    """What the reference says of a tensor."""

    def __init__(self, tensor: Tensor, p: Options) -> None:
        self.tensor, self.p = tensor, p

    def measure(self) -> tuple[Array, Array]:
        """Return scale words and energies."""

        def blocks(numbers: Array, index: Array, _: int) -> tuple[Array, ...]:
            rotation = self.p.rotation(self.tensor, numbers)
            return reference.maxima_and_energies(np, self.tensor.x[index], self.tensor.rest(index), rotation)

        words, energies = self.tensor.map_blocks(blocks)
        return np.array(words, np.uint32), np.array(energies, np.uint32)

    def encode(self, scales: Array, ratios: Array | None, gains: Array | None) -> list[list[Array]]:
        """Return words, residuals, check words and own maxima."""
        p, tensor = self.p, self.tensor

        def blocks(numbers: Array, index: Array, length: int) -> tuple[Array, ...]:
            rotation, rest = p.rotation(tensor, numbers), tensor.rest(index)
            part = None if ratios is None else ratios[numbers]
            x, s, hashes = tensor.x[index], scales[numbers], tensor.hashes(numbers, p.padded(length))
            sent = reference.encode(
                np, x, s, hashes, p.shift, width=p.width, limit=p.limit, residual=rest,
                clamp=p.clamp, ratios=part, rotation=rotation, subtract=p.subtract, grid=p.grid,
                gains=None if gains is None else gains[numbers],
            )  # fmt: skip
            return *sent, reference.encoded_maxima(np, x, s, rest, part, rotation)

        return tensor.map_blocks(blocks)

    def decode(self, scales: Array, ratios: Array | None, words: list[Array]) -> list[list[Array]]:
        """Return values, check words and energies."""
        p, tensor = self.p, self.tensor

        def blocks(numbers: Array, index: Array, length: int) -> tuple[Array, ...]:
            hashes = tensor.hashes(numbers, p.padded(length))
            summed = np.stack([words[k] for k in numbers])
            part = None if ratios is None else ratios[numbers]
            how: dict[str, Any] = {"n": p.n, "subtract": p.subtract, "offset": p.offset}
            values = reference.decode(
                np, summed, scales[numbers], hashes, length=length, width=p.width, limit=p.limit,
                mean=p.mean, dtype=tensor.dtype, ratios=part, rotation=p.rotation(tensor, numbers), **how,
            )  # fmt: skip
            sums = reference.unpack(np, summed, p.width, p.padded(length))
            centred = reference.centred_sums(np, sums, hashes, **how)
            energies = reference.block_energy(np, centred, p.width)
            return values, reference.check_words(np, hashes, sums), energies

        return tensor.map_blocks(blocks)


class Case:
    """A batch, its scales and what the reference makes of it."""

    def __init__(self, tensors: list[Tensor], p: Options, rng: np.random.Generator) -> None:
        self.p, self.tensors = p, tensors
        self.batch = Batch(tensors, p.words)
        self.cuts = tuple(rng.random(2))
        known = [Specified(tensor, p) for tensor in tensors]
        self.measured = [one.measure() for one in known]
        wide = [tensor.dtype == "float64" for tensor in tensors]
        pairs = zip(self.measured, wide, strict=True)
        scales = [draw_scales(maxima, is_wide, rng) for (maxima, _), is_wide in pairs]
        ratios = [draw_ratios(s.size, p, rng) for s in scales]
        gains = [draw_gains(s.size, p, rng) for s in scales]
        given_gains = [g for g in gains if g is not None]
        self.gains = np.concatenate(given_gains) if given_gains else 0
        self.scales = np.concatenate(scales)
        given_ratios = [r for r in ratios if r is not None]
        self.ratios = np.concatenate(given_ratios) if given_ratios else 0
        self.sums = rng.integers(0, 2**32, self.batch.words.size).astype(np.uint32)
        blocks = np.split(self.sums, self.batch.word_starts[1:-1])
        starts = zip(self.batch.starts[:-1], self.batch.starts[1:], strict=True)
        split = [blocks[a:b] for a, b in starts]
        self.sent = [one.encode(*args) for one, *args in zip(known, scales, ratios, gains, strict=True)]
        self.got = [one.decode(*args) for one, *args in zip(known, scales, ratios, split, strict=True)]

    def check_maxima(self) -> None:
        found, energy = (np.full(self.batch.blocks, 77, np.uint32) for _ in range(2))
        out = ("blocks", found), ("blocks", energy), self.p.rotations
        self.batch.run(kernels.maxima, *out, cuts=self.cuts)
        assert_same(found, [m for m, _ in self.measured])
        assert_same(energy, [e for _, e in self.measured])
        found[:] = 77
        self.batch.run(kernels.maxima, ("blocks", found), 0, self.p.rotations, cuts=self.cuts)
        assert_same(found, [m for m, _ in self.measured])

    def check_encode(self, extras: bool, residual: bool) -> None:
        p, batch = self.p, self.batch
        check = np.full((batch.blocks, 2), 77, np.uint32)
        own = np.full(batch.blocks, 77, np.uint32)
        batch.words[:] = 77
        batch.table["res_out"] = [kernels.address(rest) * residual for rest in batch.rests]
        batch.run(
            kernels.encode, self.scales, ("words", batch.words), p.width, p.limit, p.shift,
            ("blocks", check) if extras else 0, p.clamp, self.ratios, p.rotations,
            ("blocks", own) if extras else 0, p.subtract, p.grid_table(), self.gains, cuts=self.cuts,
        )  # fmt: skip
        assert_same(batch.words, [word for one in self.sent for word in one[0]])
        if extras:
            assert_same(check, [pair for one in self.sent for pair in one[2]])
            assert_same(own, [word for one in self.sent for word in one[3]])
        for rest, sent in zip(batch.rests, self.sent, strict=True):
            if residual:
                assert_same(rest, sent[1])

    def check_decode(self, extras: bool, stream: bool) -> None:
        p, batch = self.p, self.batch
        check = np.full((batch.blocks, 2), 77, np.uint32)
        energy = np.full(batch.blocks, 77, np.uint32)
        for result in batch.results:
            result[:] = 77
        batch.run(
            kernels.decode, self.scales, ("words", self.sums), p.width, p.limit, p.n, p.subtract, p.mean,
            stream, ("blocks", check) if extras else 0, ("blocks", energy) if extras else 0, self.ratios,
            p.rotations, p.offset, cuts=self.cuts,
        )  # fmt: skip
        for result, values, tensor in zip(batch.results, self.got, self.tensors, strict=True):
            assert_same(result, values[0], tensor.dtype)
        if extras:
            assert_same(check, [pair for one in self.got for pair in one[1]])
            assert_same(energy, [e for one in self.got for e in one[2]])

    def run(self) -> None:
        for _ in every_level():
            self.check_maxima()
            for extras in (True, False):
                self.check_encode(extras, residual=extras)
                self.check_decode(extras, stream=not extras)
        self.check_encode(extras=True, residual=False)
        self.check_encode(extras=False, residual=True)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rotations", [0, 1, 2])
def test_all_sizes(rotations: int, dtype: str) -> None:
    for size in SIZES:
        rng = np.random.default_rng([rotations, FLOATS.index(dtype), size])
        for _ in range(2):
            Case([make(dtype, size, rng)], Options.draw(rotations, rng), rng).run()
        Case([make(dtype, 3 * 768, rng, row=768)], Options.draw(rotations, rng), rng).run()
        Case([make(dtype, 8 * 1024, rng)], Options.draw(rotations, rng), rng).run()


@pytest.mark.parametrize("width", ln.WIDTHS)
@pytest.mark.parametrize("rotations", [0, 1, 2])
def test_all_widths(rotations: int, width: int) -> None:
    rng = np.random.default_rng([rotations, width])
    for _ in range(4):
        tensors = [make(dtype, 2048 + 200, rng) for dtype in FLOATS]
        Case(tensors, dataclasses.replace(Options.draw(rotations, rng), width=width), rng).run()


@st.composite
def shapes(draw: st.DrawFn) -> tuple[list[tuple[str, int, int]], int, int]:
    found = []
    for _ in range(draw(st.integers(1, 5))):
        row = draw(st.one_of(st.integers(512, 2100), st.sampled_from([512, 768, 1024, 2048])))
        flat = draw(st.booleans())
        size = draw(st.integers(1, 3000)) if flat else row * draw(st.integers(1, 4))
        found.append((draw(st.sampled_from(FLOATS)), size, size if flat else row))
    return found, draw(st.integers(0, 2)), draw(st.integers(0, 2**32))


@settings(derandomize=True, deadline=None, max_examples=80)
@given(shapes())
def test_batches_in_pieces(case: tuple[list[tuple[str, int, int]], int, int]) -> None:
    rng = np.random.default_rng(case[2])
    tensors = [make(dtype, size, rng, row=row) for dtype, size, row in case[0]]
    for tensor in tensors:
        tensor.key, tensor.signs = (tuple(rng.integers(0, 2**32, 2).tolist()) for _ in range(2))
    Case(tensors, Options.draw(case[1], rng), rng).run()


@pytest.mark.parametrize("rotations", [0, 1, 2])
@pytest.mark.parametrize("magnitude", [3.4028235e38, 1e38, 1e-45, 1e-38, 2.0**-100, 2.0**-84, -0.0])
def test_ends_of_the_range(magnitude: float, rotations: int) -> None:
    rng = np.random.default_rng(5)
    x = rng.choice([-1, 1], 2048) * np.full(2048, magnitude)
    x[:1024] = magnitude
    tensors = [Tensor(x.astype(kind), kind, 2048) for kind in ("float32", "float64")]
    for _ in range(3):
        Case(tensors, Options.draw(rotations, rng), rng).run()


@pytest.mark.parametrize("width", ln.WIDTHS)
@pytest.mark.parametrize("rotations", [0, 1, 2])
def test_results_at_the_start_of_cache_lines(rotations: int, width: int) -> None:
    """Whole blocks, of which one is finished while the next one begins; others between them."""
    rng = np.random.default_rng([rotations, width, 1])
    for n in (1, 2, 3, 4, 64):
        kinds = ["float32", "float32", "float64", "float32", "bfloat16", "float32"]
        sizes = [4096, 3 * 1024, 2048, 1024, 1024, 2048 + 100]
        tensors = [make(kind, size, rng) for kind, size in zip(kinds, sizes, strict=True)]
        for tensor, power in zip(tensors, (0, 20, 0, -40, 0, 31), strict=True):
            if tensor.dtype == "float32":
                tensor.x = np.ldexp(rng.standard_normal(tensor.x.size), power).astype(np.float32)
        p = Options.draw(rotations, rng)
        safe = ln.safe_limit(min(width, 16), n)
        p = dataclasses.replace(p, width=width, limit=safe, n=n, ratios=False, subtract=True, grid=None)
        case = Case(tensors, dataclasses.replace(p, clamp=0), rng)
        for k, result in enumerate(case.batch.results):
            aligned = kernels.pool_empty(result.nbytes).view(result.dtype)
            assert kernels.address(aligned) % 64 == 0
            case.batch.results[k] = aligned
            case.batch.table["dst"][k] = kernels.address(aligned)
        for _ in every_level():
            case.check_decode(extras=False, stream=True)
            case.check_decode(extras=False, stream=False)
