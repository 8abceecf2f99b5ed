"""The blocks of one or more tensors in a piece, and how they go over the wire without a scale.

What needs no codec's arithmetic is here: where blocks and words lie, pairs of words, integers and floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gccomm import kernels
from gccomm.kernels.table import DTYPE_CODES, SEGMENT
from gccomm.layout import BLOCK, SPAN, Geometry, LeafSpec, Range
from gccomm.steps import Buffer, Context, Words

if TYPE_CHECKING:
    from gccomm.codecs.base import Codec
    from gccomm.sketch import Sketch

__all__ = ["CUT_BLOCKS", "Batch", "Sample", "segment_table"]

CUT_BLOCKS = 1024  # operands of whole tensors are summed so many blocks at a time
CUT_ROOM = (BLOCK + 40) * CUT_BLOCKS
PORTION = 128  # blocks that each thread of a kernel does, before what is on its way goes on


def segment_table(segments: Sequence[Range], specs: Sequence[LeafSpec]) -> npt.NDArray[np.void]:
    """Return the table of segments for the kernels, without addresses and keys."""
    table = np.zeros(len(segments), dtype=SEGMENT)
    if not segments:
        return table
    geometries = [Geometry.of(spec.row_shape) for spec in specs]
    table["size"] = [geometries[s.leaf].size for s in segments]
    table["row"] = [geometries[s.leaf].row for s in segments]
    table["block0"] = [s.start for s in segments]
    table["nblocks"] = [s.blocks for s in segments]
    table["dtype"] = [DTYPE_CODES[specs[s.leaf].dtype] for s in segments]
    return table


class Sample(NamedTuple):
    """What a measured decode of blocks lo to hi left behind: integer energies in lanes of ``width`` bits,
    scales, steps over scales, and how much energy a unit of it stands for.
    """

    lo: int
    hi: int
    energy: Words
    width: int
    scales: Words
    steps: Any
    weight: int


class Batch:
    """Blocks of tensors that share codec and op.

    Attributes
    ----------
    blocks, words, coordinates : int
        Blocks, their wire words (or floats) and their coordinates.
    lengths : array of int64
        Coordinates of each block.
    segments : list of Range
        Where the blocks come from.
    bounds : array of int64, shape (segments + 1,)
        First block of each segment, and the end.
    keys : array of uint32, shape (segments, 2)
        Step keys, equal on all ranks.
    room : int
        Most words that the blocks may need.
    float64 : bool
        Some tensor is float64 (its scales are upper halves of float64 patterns).
    samples : list of Sample
        What measured decodes left behind.
    sketch : Sketch or None
        Of the errors, where they are measured.
    ranks : int
        Number of ranks n.
    kernels : module or DeviceKernels
        The functions on blocks of :mod:`gccomm.kernels`, where the tensors lie.
    clamps : int
        Coordinates of all ranks that a predicted scale clamped.
    lost : bool
        Blocks became NaN though their scale, which was predicted, is finite.
    inputs : array of table.SEGMENT
        Where the kernels read: the table itself, but where hosts add up inputs before.
    meanwhile : callable or None
        What kernels of lanes call after every `PORTION` blocks, where other pieces are on a slow link.
    """

    def __init__(
        self, codec: Codec, specs: Sequence[LeafSpec], segments: Sequence[Range], table: Any
    ) -> None:
        self.codec = codec
        self.mean = specs[segments[0].leaf].mean
        self.segments = list(segments)
        self.table = table
        self.address = self.source = kernels.address(table)
        self.count = len(self.segments)
        self.specs = [specs[s.leaf] for s in self.segments]
        self.kernels: Any = kernels.of_device(self.specs[0].worked_on)
        self.geometries = geometries = [Geometry.of(spec.row_shape) for spec in self.specs]
        pairs = list(zip(geometries, self.segments, strict=True))
        self.lengths = np.concatenate([g.lengths(s.start, s.blocks) for g, s in pairs])
        self.blocks = len(self.lengths)
        self.bounds = np.cumsum([0, *(s.blocks for s in self.segments)], dtype=np.int64)
        self.coordinates = int(self.lengths.sum())
        self.float64 = any(spec.dtype == "float64" for spec in self.specs)
        extents = [g.offset(s.start + s.blocks) - g.offset(s.start) for g, s in pairs]
        weights = [codec.weight(spec.item_bytes) for spec in self.specs]
        # Besides lanes: padding of short blocks, check words, words by block.
        carried = int(codec.carried(self.lengths).sum())  # which may travel in words of their own
        self.room = (
            max(math.ceil(sum(e * w for e, w in zip(extents, weights, strict=True))), carried)
            + 40 * self.blocks
        )
        self.overflows: dict[int, int] = {}  # by leaf: sums that its dtype cannot hold
        self.direct: tuple[str, Buffer, Buffer] | None = None  # dtype, input, result: one range of one array
        self.keys: npt.NDArray[np.uint32] = np.zeros((self.count, 2), dtype=np.uint32)
        self.ranks = 1
        self.clamps, self.lost = 0, False
        self.alive: Any = None  # arrays that only this operand refers to
        self.rotated: Any = None  # what describes its blocks when they are rotated, and where they lie
        self.forget()
        self._place(codec.block_words(self.lengths))

    def forget(self) -> None:
        """Let go of what belongs to one call."""
        self.overflows, self.direct, self.clamps, self.lost = {}, None, 0, False
        self.samples: list[Sample] = []
        self.sketch: Sketch | None = None
        self.inputs, self.source = self.table, self.address
        self.meanwhile: Callable[[], object] | None = None
        if self.rotated is not None:
            self.rotated[0].meanwhile = None

    def portions(self, lo: int, hi: int) -> Iterable[tuple[int, int]]:
        """Return the blocks, from and to, that kernels do at a time."""
        return ((lo, hi),) if self.meanwhile is None else self._portions(lo, hi, self.meanwhile)

    @staticmethod
    def _portions(lo: int, hi: int, meanwhile: Callable[[], object]) -> Iterator[tuple[int, int]]:
        portion = PORTION * kernels.threads()
        for low in range(lo, hi, portion):
            if low > lo:
                meanwhile()
            yield low, min(low + portion, hi)

    def read_from(self, table: Any) -> None:
        """Read inputs by another table of the same segments for the rest of the call."""
        self.inputs, self.source = table, kernels.address(table)

    @property
    def on_host(self) -> bool:
        """Whether tensors lie where the CPU's kernels reach them."""
        return self.kernels is kernels

    @property
    def feedback(self) -> bool:
        """Whether residuals are kept."""
        return bool(self.table["res_out"].any())

    @property
    def message_room(self) -> int:
        """Most words of this operand in one message."""
        return min(self.room, CUT_ROOM) if self.codec.unit == "tensor" else self.room

    def _counts(self) -> list[int]:
        return [s.blocks for s in self.segments]

    def _place(self, block_words: npt.NDArray[np.int64]) -> None:
        """Lay the blocks' words out one after the other."""
        self.offsets = np.zeros(self.blocks + 1, dtype=np.int64)
        np.cumsum(block_words, out=self.offsets[1:])
        for table in (self.table,) if self.inputs is self.table else (self.table, self.inputs):
            table["base"] = self.bounds[:-1]
            table["word0"] = self.offsets[self.bounds[:-1]]

    @property
    def words(self) -> int:
        """Wire words (or floats) of all blocks."""
        return int(self.offsets[-1])

    def size(self, lo: int, hi: int) -> int:
        """Return the words of blocks ``lo`` to ``hi``."""
        return int(self.offsets[hi] - self.offsets[lo])

    @cached_property
    def span_starts(self) -> npt.NDArray[np.int64]:
        """The first block of every span: 64 blocks of one tensor, counted from its beginning."""
        starts: list[Any] = []
        for i, segment in enumerate(self.segments):
            first = int(self.bounds[i])
            inner = np.arange(segment.start // SPAN * SPAN + SPAN, segment.start + segment.blocks, SPAN)
            starts += [[first], inner - segment.start + first]
        return np.concatenate(starts).astype(np.int64)

    @cached_property
    def span_counts(self) -> list[int]:
        """How many spans each segment reaches into."""
        return [-(-(s.start + s.blocks) // SPAN) - s.start // SPAN for s in self.segments]

    def report(self, clamps: int = 0, *, lost: bool = False) -> None:
        """Count clamped coordinates of all ranks, and note whether blocks were lost to inf or NaN."""
        self.clamps += clamps
        self.lost |= lost

    # Small tensors in two words a coordinate

    def encode_exact(self, lo: int, hi: int, out: Words, scales: Words, ctx: Context) -> None:
        """Write two words a coordinate."""
        self.kernels.exact_encode(
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
        self.kernels.exact_decode(
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
        self.kernels.int_range(self.address, self.count, kernels.address(out))

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
        self.kernels.int_encode(self.address, self.count, lo, hi, kernels.address(out), int(self.offsets[lo]))

    def decode_integers(self, lo: int, hi: int, words: Words, ctx: Context) -> None:
        """Write the exact sums; count those that a leaf's dtype cannot hold in ``overflows``."""
        base, count = self._offset_of(lo), ctx.size
        if not self.kernels.int_decode(self.address, self.count, lo, hi, kernels.address(words), base, count):
            return
        starts = self.bounds.tolist()
        for segment, start, stop in zip(self.segments, starts, starts[1:], strict=False):
            first, end = max(start, lo), min(stop, hi)
            at = kernels.address(words) + 4 * (self._offset_of(first) - base)
            if first >= end:
                continue
            place = self._offset_of(first)
            bad = self.kernels.int_decode(self.address, self.count, first, end, at, place, count)
            if bad:
                self.overflows[segment.leaf] = self.overflows.get(segment.leaf, 0) + bad

    def _offset_of(self, block: int) -> int:
        return int(self.offsets[block])

    # Floats on the wire

    def encode_floats(self, lo: int, hi: int, out: Buffer, wire: str) -> None:
        """Convert to the wire's float type."""
        self.kernels.float_encode(self.source, self.count, lo, hi, kernels.address(out), DTYPE_CODES[wire])

    def decode_floats(self, lo: int, hi: int, buffer: Buffer, wire: str, ctx: Context) -> None:
        """Convert back, dividing by n for a mean."""
        code = DTYPE_CODES[wire]
        self.kernels.float_decode(
            self.address,
            self.count,
            lo,
            hi,
            kernels.address(buffer),
            code,
            ctx.divisor,
            self.mean,
            ctx.streams(),
        )

    def nonfinite(self) -> set[int]:
        """Return the leaves of which this rank holds inf or NaN."""
        if not self.kernels.nonfinite(self.address, self.count, 0, self.blocks):
            return set()
        starts = self.bounds.tolist()
        spans = zip(self.segments, starts, starts[1:], strict=False)
        return {s.leaf for s, lo, hi in spans if self.kernels.nonfinite(self.address, self.count, lo, hi)}
