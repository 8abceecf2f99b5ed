"""Batches of tensors of all dtypes and magnitudes, for comparing the native kernels with the reference."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np

from gccomm import kernels
from gccomm.kernels import reference

Array: TypeAlias = np.ndarray[Any, Any]
FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")
# Range of the exponents of block maxima, subnormals included.
EXPONENTS = {"float32": (-149, 128), "float64": (-1074, 1024), "float16": (-24, 16), "bfloat16": (-133, 128)}


def every_level() -> Iterator[str]:
    """Switch through the instruction-set levels of this machine."""
    before = kernels.isa()
    for level in kernels.isas():
        kernels.set_isa(level)
        yield level
    kernels.set_isa(before)


@dataclasses.dataclass
class Tensor:
    """A tensor in rows, as the kernels see it; bfloat16 as bit patterns."""

    x: Array
    dtype: str
    row: int
    residual: Array | None = None
    key: tuple[int, int] = (0x7F7050B9, 0xC7CA7E30)
    signs: tuple[int, int] = (0x2545F491, 0x9B60B5A3)
    width: int = 0
    digits: int = 0

    @property
    def wide(self) -> str:
        return "f8" if self.dtype == "float64" else "f4"

    def lengths(self) -> list[int]:
        """Return the length of each block."""
        row = [1024] * (self.row // 1024) + [self.row % 1024] * (self.row % 1024 > 0)
        return row * (self.x.size // self.row) if self.row else []

    def map_blocks(self, function: Callable[[Array, Array, int], tuple[Array, ...]]) -> list[list[Array]]:
        """Call ``function(numbers, index, length)`` on the blocks of each length; outputs in block order."""
        lengths = np.array(self.lengths())
        starts = np.cumsum(lengths) - lengths
        found: dict[int, tuple[Array, ...]] = {}
        for length in sorted(set(lengths.tolist())):
            numbers = np.flatnonzero(lengths == length)
            index = starts[numbers][:, None] + np.arange(length)
            rows = zip(*function(numbers, index, length), strict=True)
            found.update(zip(numbers.tolist(), rows, strict=True))
        return [list(column) for column in zip(*(found[k] for k in range(len(lengths))), strict=True)]

    def hashes(self, numbers: Array, length: int) -> Array:
        k0, k1 = reference.block_keys(np, *self.key, numbers)
        return np.asarray(reference.block_hashes(np, k0, k1, length))

    def rest(self, index: Array) -> Array | None:
        return None if self.residual is None else self.residual[index]


def make(dtype: str, size: int, rng: np.random.Generator, *, row: int = 0) -> Tensor:
    """Make a tensor of all magnitudes, with zero blocks, infinities, NaNs and, by chance, a residual."""
    low, high = EXPONENTS[dtype]
    pieces = size // 512 + 1
    power = np.exp2(rng.integers(low, high, pieces).astype(np.float64))
    power[rng.random(pieces) < 0.2] = 0
    magnitude = np.repeat(power, 512)[:size]
    x = np.clip(rng.standard_normal(size), -1.99, 1.99) * magnitude
    x[rng.random(size) < 0.02] = 0
    if size > 1 and rng.random() < 0.4:
        x[rng.integers(0, size, 2)] = rng.choice([np.inf, -np.inf, np.nan], 2)
    rest = (rng.uniform(-1, 1, size) * magnitude / 64).astype("f8" if dtype == "float64" else "f4")
    return Tensor(reference.narrow(np, x, dtype), dtype, row or size, rest if rng.random() < 0.5 else None)


class Batch:
    """Tensors behind one another, with room for what the kernels write."""

    def __init__(self, tensors: list[Tensor], words: Callable[[Tensor, int], int]) -> None:
        self.table = np.zeros(len(tensors), kernels.SEGMENT)
        counts = [[words(tensor, length) for length in tensor.lengths()] for tensor in tensors]
        self.starts = np.cumsum([0, *map(len, counts)])
        self.word_starts = np.cumsum([0, *(count for part in counts for count in part)])
        self.words = np.zeros(self.word_starts[-1], np.uint32)
        # One element off, so that results are not aligned to vectors.
        self.results = [np.zeros(tensor.x.size + 1, tensor.x.dtype)[1:] for tensor in tensors]
        self.rests = [np.full(tensor.x.size, 7, tensor.wide) for tensor in tensors]
        for k, tensor in enumerate(tensors):
            addresses = map(kernels.address, (tensor.x, self.results[k]))
            rest = 0 if tensor.residual is None else kernels.address(tensor.residual)
            left = 0 if tensor.dtype in INTEGERS else kernels.address(self.rests[k])
            place = len(counts[k]), self.starts[k], self.word_starts[self.starts[k]]
            code = kernels.DTYPE_CODES[tensor.dtype], tensor.width, tensor.digits
            keys = *tensor.key, *tensor.signs
            self.table[k] = (*addresses, rest, left, tensor.x.size, tensor.row, 0, *place, *keys, *code)

    @property
    def blocks(self) -> int:
        return int(self.starts[-1])

    def run(self, kernel: Callable[..., Any], *args: Any, cuts: tuple[float, ...] = ()) -> int:
        """Call a kernel on the batch in pieces; return the sum of what it returns.

        An array in `args` becomes its address; ("words", array) the address of the piece's first word and its
        offset, ("values", array) only that address, ("blocks", array) the address of the first block's entry.
        """
        ends = sorted({0, self.blocks, *(int(cut * self.blocks) for cut in cuts)})
        total = 0
        for lo, hi in itertools.pairwise(ends):
            plain: list[Any] = []
            for arg in args:
                kind, array = arg if isinstance(arg, tuple) else ("all", arg)
                if not isinstance(array, np.ndarray):
                    plain.append(array)
                    continue
                offset = {"all": 0, "blocks": lo}.get(kind, int(self.word_starts[lo]))
                plain.append(kernels.address(array) + offset * (array.strides[0] if array.size else 0))
                if kind == "words":
                    plain.append(offset)
            total += kernel(kernels.address(self.table), len(self.table), lo, hi, *plain) or 0
        return total


def assert_same(found: Array, expected: list[Array], dtype: str = "") -> None:
    """Compare bit patterns with those of all blocks; any NaN equals any other."""
    wanted = np.concatenate([np.atleast_1d(one) for one in expected]) if expected else found[:0]
    found = found.reshape(-1)
    assert found.dtype == wanted.dtype
    if wanted.dtype.kind == "f" or dtype == "bfloat16":
        nans = [np.isnan(reference.widen(np, a)) for a in (found, wanted)]
        np.testing.assert_array_equal(nans[0], nans[1])
        unsigned = f"u{wanted.itemsize}"
        found, wanted = (np.where(nans[0], 0, a.view(unsigned)) for a in (found, wanted))
    np.testing.assert_array_equal(found, wanted)


def specify_maxima(tensor: Tensor) -> list[Array]:
    def blocks(_: Array, index: Array, __: int) -> tuple[Array, ...]:
        return (reference.maxima(np, tensor.x[index], tensor.rest(index)),)

    return tensor.map_blocks(blocks)[0]


def agree(
    tensors: list[Tensor], rng: np.random.Generator, *, clamp: bool = True
) -> tuple[list[Array], Array]:
    """Return the scales of each tensor's blocks, and agreed ones.

    Some blocks are larger on other ranks; with `clamp`, some have a scale below their own maximum.
    """
    local, agreed = [], []
    for tensor in tensors:
        maxima = np.array(specify_maxima(tensor), np.uint32)
        s = maxima
        low = s < (0x7FF00000 if tensor.dtype == "float64" else 0x7F800000)
        smaller = np.maximum(s, 2) - np.minimum(np.maximum(s, 2) - 1, rng.integers(1, 2**24, s.size))
        choice = rng.random(s.size)
        s = np.where(choice < 0.4, np.maximum(s, rng.permutation(s)), s)
        local.append(maxima)
        agreed.append(np.where((choice > 0.8) & clamp & low & (s != 0), smaller, s).astype(np.uint32))
    return local, np.concatenate(agreed)
