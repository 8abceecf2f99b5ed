"""Batches of tensor parts for the native kernels, and what their tests share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import pytest

from gccomm import kernels
from gccomm.lanes import lanes

Array: TypeAlias = np.ndarray[Any, Any]
BLOCK = 1024
GUARD = 8  # elements around every output that must stay as they are
WIRES = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": np.uint16}


@pytest.fixture(params=kernels.isas())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = kernels.isa()
    kernels.set_isa(request.param)
    yield request.param
    kernels.set_isa(before)


@dataclasses.dataclass
class Part:
    """Blocks ``start`` to ``start + count`` of a tensor; by default all of it."""

    x: Array
    dtype: str = "float32"
    row: int = 0
    start: int = 0
    count: int = -1
    residual: Array | None = None
    key: tuple[int, int] = (0x13579BDF, 0x2468ACE0)
    absent: bool = False  # no input: zeros
    width: int = 0
    digits: int = 0

    def __post_init__(self) -> None:
        self.row = self.row or self.x.size
        self.guarded = np.full(self.x.size + 2 * GUARD, 77, dtype=self.x.dtype)
        self.out = self.guarded[GUARD:-GUARD]
        kind = np.float64 if self.dtype == "float64" else np.float32
        self.rest = np.full(self.x.size, 77, dtype=kind)
        per_row = -(-self.row // BLOCK) if self.row else 0
        blocks = per_row * (self.x.size // self.row) if self.row else 0
        if self.count < 0:
            self.count = blocks - self.start
        self.places = []
        for block in range(self.start, self.start + self.count):
            row, column = divmod(block, per_row)
            first = row * self.row + column * BLOCK
            self.places.append(slice(first, first + min(BLOCK, self.row - column * BLOCK)))

    def untouched(self) -> bool:
        """Whether nothing was written outside the part's blocks."""
        outside = np.ones(self.guarded.size, dtype=bool)
        for place in self.places:
            outside[GUARD + place.start : GUARD + place.stop] = False
        return bool((self.guarded[outside] == np.full(1, 77, dtype=self.x.dtype)).all())


class Batch:
    """A table of parts and the kernels on it."""

    def __init__(self, *parts: Part, words: Callable[[Part, int], int] = lambda _part, _length: 0) -> None:
        self.parts = parts
        self.table = np.zeros(len(parts), dtype=kernels.SEGMENT)
        self.offsets = [0]
        base = 0
        for entry, part in zip(self.table, parts, strict=True):
            entry["src"] = 0 if part.absent else kernels.address(part.x)
            entry["dst"], entry["res_out"] = kernels.address(part.out), kernels.address(part.rest)
            entry["res_in"] = 0 if part.residual is None else kernels.address(part.residual)
            entry["size"], entry["row"] = part.x.size, part.row
            entry["block0"], entry["nblocks"], entry["base"] = part.start, part.count, base
            entry["word0"] = self.offsets[-1]
            entry["key0"], entry["key1"] = part.key
            entry["dtype"] = kernels.DTYPE_CODES[part.dtype]
            entry["width"], entry["digits"] = part.width, part.digits
            base += part.count
            self.offsets += [
                self.offsets[-1] + total
                for total in np.cumsum([words(part, p.stop - p.start) for p in part.places]).tolist()
            ]
        self.blocks = base
        self.head = (kernels.address(self.table), len(parts))

    def maxima(self) -> Array:
        out = np.zeros(self.blocks, dtype=np.uint32)
        kernels.maxima(*self.head, 0, self.blocks, kernels.address(out))
        return out

    def encode(self, scales: Array, width: int, limit: int, lo: int = 0, hi: int | None = None) -> Array:
        hi = self.blocks if hi is None else hi
        count = self.offsets[hi] - self.offsets[lo]
        guarded = np.full(count + 2 * GUARD, 0xABABABAB, dtype=np.uint32)
        words = guarded[GUARD : GUARD + count]
        where = (kernels.address(scales), kernels.address(words), self.offsets[lo])
        kernels.encode(*self.head, lo, hi, *where, width, limit, 0)
        assert (np.r_[guarded[:GUARD], guarded[GUARD + count :]] == 0xABABABAB).all()
        return words

    def decode(self, scales: Array, words: Array, width: int, limit: int, **options: Any) -> list[Array]:
        lo, hi = options.get("lo", 0), options.get("hi", self.blocks)
        where = (kernels.address(scales), kernels.address(words), self.offsets[lo])
        stream = options.get("stream", False)
        kernels.decode(*self.head, lo, hi, *where, width, limit, options.get("n", 1), True, False, stream)
        assert all(part.untouched() for part in self.parts)
        return [np.concatenate([part.out[p] for p in part.places]) for part in self.parts if part.places]


def lane_batch(width: int, *parts: Part) -> Batch:
    return Batch(*parts, words=lambda _part, length: -(-length // lanes(width)))


def normal(size: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def convert(x: Array, dtype: str, wire: str) -> Array:
    """Convert `x` of type `dtype` through float_encode."""
    part = Part(x, dtype)
    batch, out = Batch(part), np.zeros(x.size, dtype=WIRES[wire])
    kernels.float_encode(*batch.head, 0, batch.blocks, kernels.address(out), kernels.DTYPE_CODES[wire])
    return out
