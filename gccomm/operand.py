"""What a codec computes on: the blocks of one or more tensors in a piece, through one native call each.

An operand hides where the coordinates lie and of which dtype they are. Its kernels read each tensor where it
lies and write each result where it belongs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gccomm import kernels
from gccomm.layout import Geometry, LeafSpec, Range
from gccomm.steps import Buffer, Context, Words

if TYPE_CHECKING:
    from gccomm.codecs.base import Codec

__all__ = ["Operand"]


class Operand:
    """Blocks of tensors that share codec and op.

    Attributes
    ----------
    blocks, words, coordinates : int
        Blocks, their wire words (or floats) and their coordinates.
    segments : list of Range
        Where the blocks come from.
    room : int
        Most words that the blocks may need.
    float64 : bool
        Some tensor is float64 (its scales are upper halves of float64 patterns).
    """

    def __init__(
        self, codec: Codec, specs: Sequence[LeafSpec], segments: Sequence[Range], table: Any
    ) -> None:
        self.codec = codec
        self.mean = specs[segments[0].leaf].mean
        self.segments = list(segments)
        self.table = table
        self.address = kernels.address(table)
        self.count = len(self.segments)
        geometries = [Geometry.of(specs[s.leaf].row_shape) for s in self.segments]
        pairs = list(zip(geometries, self.segments, strict=True))
        self.lengths = np.concatenate([g.lengths(s.start, s.blocks) for g, s in pairs])
        self.blocks = len(self.lengths)
        self.coordinates = int(self.lengths.sum())
        self.float64 = any(specs[s.leaf].dtype == "float64" for s in self.segments)
        extents = [g.offset(s.start + s.blocks) - g.offset(s.start) for g, s in pairs]
        weights = [codec.weight(specs[s.leaf].item_bytes) for s in self.segments]
        self.room = sum(e * w for e, w in zip(extents, weights, strict=True))
        self.overflows: dict[int, int] = {}  # by leaf: sums that its dtype cannot hold
        self.direct: tuple[str, Buffer, Buffer] | None = None  # dtype, input, result: one range of one array
        self.energy: npt.NDArray[np.float32] | None = None
        self.scales: Words | None = None
        self.limit = 0
        self._place(codec.block_words(self.lengths))

    def _counts(self) -> list[int]:
        return [s.blocks for s in self.segments]

    def _place(self, block_words: npt.NDArray[np.int64]) -> None:
        """Lay the blocks' words out one after the other."""
        self.offsets = np.zeros(self.blocks + 1, dtype=np.int64)
        np.cumsum(block_words, out=self.offsets[1:])
        base = np.cumsum([0, *self._counts()])[:-1]
        self.table["base"] = base
        self.table["word0"] = self.offsets[base]

    @property
    def words(self) -> int:
        """Wire words (or floats) of all blocks."""
        return int(self.offsets[-1])

    # Lane codecs

    def maxima(self, out: Words) -> None:
        """Write the maximum of each block as a scale word."""
        kernels.maxima(self.address, self.count, 0, self.blocks, kernels.address(out))

    def encode(
        self, lo: int, hi: int, out: Words, scales: Words, width: int, limit: int, ctx: Context
    ) -> None:
        """Quantise blocks ``lo`` to ``hi`` against ``scales`` into lanes."""
        kernels.encode(
            self.address,
            self.count,
            lo,
            hi,
            kernels.address(scales),
            kernels.address(out),
            int(self.offsets[lo]),
            width,
            limit,
            ctx.shift,
            0,
        )

    def decode(
        self,
        lo: int,
        hi: int,
        words: Words,
        scales: Words,
        width: int,
        limit: int,
        ctx: Context,
        *,
        subtract: bool = False,
    ) -> None:
        """Write the results of blocks ``lo`` to ``hi`` from the summed lanes."""
        energy = 0
        if ctx.measure:
            if self.energy is None:
                self.energy = np.empty(self.blocks, dtype=np.float32)
            self.scales, self.limit = scales.copy(), limit
            energy = kernels.address(self.energy) + 4 * lo
        kernels.decode(
            self.address,
            self.count,
            lo,
            hi,
            kernels.address(scales),
            kernels.address(words),
            int(self.offsets[lo]),
            width,
            limit,
            ctx.size,
            subtract,
            self.mean,
            ctx.stream,
            0,
            energy,
        )

    def squared_steps(self) -> npt.NDArray[np.longdouble]:
        """Return the squared step of each block of the last measured decode; 0 where the block is not
        finite.
        """
        assert self.scales is not None
        infinity = 0x7FF00000 if self.float64 else 0x7F800000
        finite = np.where(self.scales < infinity, self.scales, 0).astype(np.uint32)
        wide = (finite.astype(np.uint64) << np.uint64(32)).view(np.float64)
        maxima: npt.NDArray[Any] = wide if self.float64 else finite.view(np.float32)
        steps: npt.NDArray[np.longdouble] = (maxima.astype(np.longdouble) * 65536 / self.limit) ** 2
        return steps

    # Small tensors in two words a coordinate

    def encode_exact(self, lo: int, hi: int, out: Words, scales: Words, ctx: Context) -> None:
        """Write two words a coordinate."""
        kernels.exact_encode(
            self.address,
            self.count,
            lo,
            hi,
            kernels.address(scales),
            kernels.address(out),
            int(self.offsets[lo]),
            ctx.size,
        )

    def decode_exact(self, lo: int, hi: int, words: Words, scales: Words, ctx: Context) -> None:
        """Write the results from the summed pairs of words."""
        kernels.exact_decode(
            self.address,
            self.count,
            lo,
            hi,
            kernels.address(scales),
            kernels.address(words),
            int(self.offsets[lo]),
            ctx.size,
            self.mean,
        )

    # Integers

    def ranges(self, out: Words) -> None:
        """Write one word a segment: the bit length of its largest magnitude."""
        kernels.int_range(self.address, self.count, kernels.address(out))

    def set_formats(self, formats: Sequence[tuple[int, int]]) -> tuple[tuple[int, int, int], ...]:
        """Fix (lane width, digits) of each segment; return the lanes of the batch."""
        widths, digits = np.array(formats, dtype=np.int64).T
        self.table["width"], self.table["digits"] = widths, digits
        counts = self._counts()
        lanes, digits = np.repeat(32 // widths, counts), np.repeat(digits, counts)
        self._place(np.where(digits > 0, digits * self.lengths, -(-self.lengths // lanes)))
        ends = [*self.table["word0"].tolist(), self.words]
        spans = zip(ends, ends[1:], formats, strict=False)
        return tuple((lo, hi, width) for lo, hi, (width, _) in spans if hi > lo)

    def encode_integers(self, lo: int, hi: int, out: Words) -> None:
        """Write integers into lanes or digits."""
        kernels.int_encode(self.address, self.count, lo, hi, kernels.address(out), int(self.offsets[lo]))

    def decode_integers(self, lo: int, hi: int, words: Words, ctx: Context) -> None:
        """Write the exact sums; count those that a leaf's dtype cannot hold in ``overflows``."""
        base, count = self._offset_of(lo), ctx.size
        if not kernels.int_decode(self.address, self.count, lo, hi, kernels.address(words), base, count):
            return
        starts = [*self.table["base"].tolist(), self.blocks]
        for segment, start, stop in zip(self.segments, starts, starts[1:], strict=False):
            first, end = max(start, lo), min(stop, hi)
            at = kernels.address(words) + 4 * (self._offset_of(first) - base)
            if first >= end:
                continue
            bad = kernels.int_decode(self.address, self.count, first, end, at, self._offset_of(first), count)
            if bad:
                self.overflows[segment.leaf] = self.overflows.get(segment.leaf, 0) + bad

    def _offset_of(self, block: int) -> int:
        return int(self.offsets[block])

    # Floats on the wire

    def encode_floats(self, lo: int, hi: int, out: Buffer, wire: str) -> None:
        """Convert to the wire's float type."""
        kernels.float_encode(
            self.address, self.count, lo, hi, kernels.address(out), kernels.DTYPE_CODES[wire]
        )

    def decode_floats(self, lo: int, hi: int, buffer: Buffer, wire: str, ctx: Context) -> None:
        """Convert back, dividing by n for a mean."""
        code = kernels.DTYPE_CODES[wire]
        kernels.float_decode(
            self.address, self.count, lo, hi, kernels.address(buffer), code, ctx.size, self.mean, ctx.stream
        )

    def nonfinite(self) -> set[int]:
        """Return the leaves of which this rank holds inf or NaN."""
        if not kernels.nonfinite(self.address, self.count, 0, self.blocks):
            return set()
        starts = [*self.table["base"].tolist(), self.blocks]
        spans = zip(self.segments, starts, starts[1:], strict=False)
        return {s.leaf for s, lo, hi in spans if kernels.nonfinite(self.address, self.count, lo, hi)}
