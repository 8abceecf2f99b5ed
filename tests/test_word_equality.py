"""The native kernels give the same words and results, bit for bit, as the reference under NumPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gccomm import kernels, noise
from gccomm import lanes as ln
from gccomm.kernels import reference

Array: TypeAlias = np.ndarray[Any, Any]
FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")
WIDTHS = ln.WIDTHS[:-1]
RANKS = (1, 2, 3, 4, 17)
LARGEST_LIMIT = 32767 * 65536
STORED = {"bfloat16": np.dtype(np.uint16)}  # NumPy has no bfloat16: bit patterns
# Exponents of the smallest and largest block maximum, subnormals included.
EXPONENTS = {"float32": (-149, 126), "float64": (-1000, 996), "float16": (-24, 14), "bfloat16": (-133, 126)}


@pytest.fixture(params=kernels.isas(), autouse=True, scope="module")
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run everything on every instruction-set level of this machine."""
    before = kernels.isa()
    kernels.set_isa(request.param)
    yield request.param
    kernels.set_isa(before)


@dataclasses.dataclass
class Tensor:
    """A tensor in rows, as the kernels see it."""

    x: Array
    dtype: str
    row: int
    residual: Array | None = None
    key: tuple[int, int] = (0x7F7050B9, 0xC7CA7E30)

    def lengths(self) -> Array:
        """Return the length of each block."""
        row = [1024] * (self.row // 1024) + [self.row % 1024] * (self.row % 1024 > 0)
        return np.array(row * (self.x.size // self.row if self.row else 0), dtype=np.int64)

    def map_blocks(self, function: Callable[[Array, Array, int], tuple[Array, ...]]) -> list[list[Array]]:
        """Call `function(numbers, index, length)` on blocks of one length; return its outputs in block order."""
        lengths = self.lengths()
        starts = np.cumsum(lengths) - lengths
        found: dict[int, tuple[Array, ...]] = {}
        for length in sorted(set(lengths.tolist())):
            numbers = np.flatnonzero(lengths == length)
            index = starts[numbers][:, None] + np.arange(length)
            outputs = function(numbers, index, length)
            found.update(zip(numbers.tolist(), zip(*outputs, strict=True), strict=True))
        return [list(column) for column in zip(*(found[k] for k in range(len(lengths))), strict=True)]

    def hashes(self, numbers: Array, length: int) -> Array:
        return np.asarray(
            reference.coordinate_hash(np, *reference.block_keys(np, *self.key, numbers), length)
        )

    def rest(self, index: Array) -> Array | None:
        return None if self.residual is None else self.residual[index]


def flat(blocks: list[Array], dtype: Any) -> Array:
    return np.concatenate(blocks) if blocks else np.zeros(0, dtype)


def make(dtype: str, size: int, rng: np.random.Generator, *, row: int = 0, residual: bool = False) -> Tensor:
    """Make a tensor whose blocks range over all magnitudes, some of them zero, infinite or NaN."""
    low, high = EXPONENTS[dtype]
    blocks = size // 512 + 1
    power = np.exp2(rng.integers(low, high, blocks).astype(np.float64))
    power[rng.random(blocks) < 0.2] = 0
    magnitude = np.repeat(power, 512)[:size]
    x = np.clip(rng.standard_normal(size), -1.99, 1.99) * magnitude
    rest = (rng.uniform(-1, 1, size) * magnitude / 64).astype("f8" if dtype == "float64" else "f4")
    x[rng.random(size) < 0.02] = 0
    if size > 1 and rng.random() < 0.5:
        x[rng.integers(0, size, 2)] = rng.choice([np.inf, -np.inf, np.nan], 2)
    return Tensor(reference.narrow(np, x, dtype), dtype, row or size, rest if residual else None)


def make_integers(dtype: str, size: int, rng: np.random.Generator, bits: int) -> Tensor:
    if dtype == "bool":
        return Tensor(rng.random(size) < 0.5, dtype, size)
    info = np.iinfo(dtype)
    low, high = max(int(info.min), -(2**bits)), min(int(info.max), 2**bits - 1)
    x = rng.integers(low, high, size, dtype=dtype, endpoint=True)
    x[::5], x[1::5] = low, high
    return Tensor(x, dtype, size)


class Batch:
    """Tensors behind one another, with room for what the kernels write."""

    def __init__(self, tensors: list[Tensor], words: Callable[[int], int]) -> None:
        self.tensors = tensors
        self.table = np.zeros(len(tensors), kernels.SEGMENT)
        lengths = [tensor.lengths() for tensor in tensors]
        self.starts = np.cumsum([0, *map(len, lengths)])
        self.word_starts = np.cumsum([0, *(words(int(k)) for part in lengths for k in part)])
        self.results = [np.zeros_like(tensor.x) for tensor in tensors]
        self.rests = [np.full(t.x.size, 7, "f8" if t.dtype == "float64" else "f4") for t in tensors]
        for k, tensor in enumerate(tensors):
            self._describe(k, tensor)

    def _describe(self, k: int, tensor: Tensor) -> None:
        rest = tensor.residual
        self.table[k] = (
            kernels.address(tensor.x),
            kernels.address(self.results[k]),
            0 if rest is None else kernels.address(rest),
            0 if tensor.dtype in INTEGERS else kernels.address(self.rests[k]),
            tensor.x.size,
            tensor.row,
            0,
            len(tensor.lengths()),
            self.starts[k],
            self.word_starts[self.starts[k]],
            *tensor.key,
            kernels.DTYPE_CODES[tensor.dtype],
            0,
            0,
        )

    @property
    def blocks(self) -> int:
        return int(self.starts[-1])

    def run(self, kernel: Callable[..., Any], *args: Any, pieces: tuple[float, ...] = (), **kwargs: Any) -> int:
        """Call a kernel on the batch, cut at some fractions of it; arrays in `args` become addresses.

        A pair (words, True) stands for the address of the first block's words and its offset, (array, False)
        for the address of the first block's row.
        """
        cuts = sorted({0, self.blocks, *(int(part * self.blocks) for part in pieces)})
        total = 0
        for lo, hi in zip(cuts[:-1], cuts[1:], strict=True):
            plain: list[Any] = []
            for arg in args:
                if isinstance(arg, tuple) and arg[1]:
                    start = int(self.word_starts[lo])
                    plain += [kernels.address(arg[0]) + start * arg[0].itemsize, start]
                elif isinstance(arg, tuple):
                    plain.append(kernels.address(arg[0]) + lo * arg[0].strides[0])
                else:
                    plain.append(kernels.address(arg) if isinstance(arg, np.ndarray) else arg)
            total += kernel(kernels.address(self.table), len(self.table), lo, hi, *plain, **kwargs) or 0
        return total


def assert_same(found: Array, expected: Array, dtype: str = "") -> None:
    """Compare bit patterns; any NaN equals any other."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    if expected.dtype.kind == "f" or dtype == "bfloat16":
        nans = [np.isnan(reference.widen(np, a)) for a in (found, expected)]
        np.testing.assert_array_equal(*nans)
        unsigned = f"u{expected.itemsize}"
        found, expected = (np.where(n, 0, a.view(unsigned)) for n, a in zip(nans, (found, expected), strict=True))
    np.testing.assert_array_equal(found, expected)
