"""From leaves to blocks to pieces: pure functions of keys, shapes, dtypes, codecs and the number of ranks.

Blocks belong to the tensor, so a result does not depend on how tensors are fused. A *piece* is what travels
in one message: consecutive ranges of blocks of one or more tensors, small enough to stay in the caches
between encode, wire and decode, but where the back end goes through it chunk by chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from gccomm.codecs.base import Codec

__all__ = [
    "BLOCK",
    "FLOATS",
    "ITEM_BYTES",
    "MIN_PART",
    "PIECE_COORDINATES",
    "SPAN",
    "Geometry",
    "LeafSpec",
    "Range",
    "cut",
    "tapered",
]

BLOCK = 1024  # coordinates that share a scale
SPAN = 64  # blocks of one tensor that are checked together; pieces end between spans where they can hold one
MIN_PART = 64  # smallest part of a block that is rotated by itself
MIN_ROW = 512  # last axes from here on are cut by themselves, so that no block straddles two rows
PIECE_COORDINATES = 1 << 20
# Coordinates from which a sum of an array's own takes less time than copies into a sum with others, and back.
ALONE = 128 << 10
LARGE = 64  # times as many, where the back end goes through a piece chunk by chunk

FLOATS = frozenset(("float16", "bfloat16", "float32", "float64"))
ITEM_BYTES = {"float64": 8, "int64": 8, "uint64": 8, "float32": 4, "int32": 4, "uint32": 4}
ITEM_BYTES |= {"float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2, "int8": 1, "uint8": 1, "bool": 1}


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a tensor of ``size`` coordinates in rows of ``row`` is cut into blocks."""

    size: int
    row: int

    @classmethod
    def of(cls, shape: Sequence[int]) -> Geometry:
        """Return the geometry of a tensor of this shape."""
        size = 1
        for extent in shape:
            size *= extent
        last = shape[-1] if shape else 1
        return cls(size, last if last >= MIN_ROW and size else max(size, 1))

    def padded(self, part: int) -> Geometry:
        """Return the geometry with the last block of each row lengthened to a multiple of ``part``."""
        row = -(-self.row // part) * part
        return Geometry(self.size // self.row * row, row)

    @property
    def blocks_per_row(self) -> int:
        """Blocks in a row, the last one short."""
        return -(-self.row // BLOCK)

    @property
    def blocks(self) -> int:
        """Blocks in the tensor."""
        return self.size // self.row * self.blocks_per_row

    @property
    def spans(self) -> int:
        """Spans in the tensor, the last one short."""
        return -(-self.blocks // SPAN)

    def offset(self, block: int) -> int:
        """Return the first coordinate of ``block`` (the size for the block after the last)."""
        row, within = divmod(block, self.blocks_per_row)
        return row * self.row + within * BLOCK

    def fit(self, block: int, room: int) -> int:
        """Return how many whole blocks from ``block`` on hold at most ``room`` coordinates."""
        end = self.offset(block) + room
        if end >= self.size:
            return self.blocks - block
        row, within = divmod(end, self.row)
        return row * self.blocks_per_row + within // BLOCK - block

    def lengths(self, block: int, count: int) -> npt.NDArray[np.int64]:
        """Return the lengths of ``count`` blocks from ``block`` on, int64."""
        within = np.arange(block, block + count, dtype=np.int64) % self.blocks_per_row
        return np.minimum(BLOCK, self.row - within * BLOCK)


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """One array of the tree, as all ranks must agree on it.

    ``shape`` is the user's, ``row_shape`` the one that is cut (complex numbers as pairs). ``route`` is the
    codec that carries it: its own, or the exact ones for integers and small tensors.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    row_shape: tuple[int, ...]
    route: Codec
    mean: bool
    feedback: bool = False
    device: str = "cpu"

    def text(self, place: int = 0) -> str:
        """Return one line that is equal on all ranks; ``place`` counts the devices of its kind in the tree,
        whose numbers are each rank's own.
        """
        op = "mean" if self.mean else "sum"
        kind = f"complex of {self.dtype}" if self.row_shape != self.shape else self.dtype
        extent = "x".join(map(str, self.shape)) or "scalar"
        feedback = ", error feedback" if self.feedback else ""
        device = "" if self.device == "cpu" else f" on {self.device.partition(':')[0]}"
        device += f" device {place + 1}" if place else ""
        return f"{self.key!r}: {kind}[{extent}]{device}, {op}, {self.route!r}{feedback}"

    def load(self, lane_sums: bool) -> tuple[float, int]:
        """Return the words and the bytes of a piece that a coordinate counts for.

        Where the back end sums lanes chunk by chunk, pieces need not fit into the caches.
        """
        if lane_sums and self.route.sums_lanes and self.device == "cpu":
            return 1 / LARGE, 0
        return self.route.weight(self.item_bytes), self.item_bytes

    @property
    def added(self) -> bool:
        """Whether the back end adds it up where it lies."""
        here = self.device == "cpu" and not self.feedback
        return here and self.route.adds(self.dtype, mean=self.mean)

    def alone(self, coordinates: int) -> bool:
        """Return whether pieces are of this array alone, where the back end works chunk by chunk: one of more
        than so many coordinates that is added up where it lies. Means are divided while pieces are in the
        caches.
        """
        return self.added and not self.mean and math.prod(self.row_shape) > coordinates

    @property
    def staged(self) -> bool:
        """Whether it lies on a device that has no kernels for its codec: the host does the work."""
        return self.device != "cpu" and not self.route.on_devices

    @property
    def worked_on(self) -> str:
        """The device whose kernels do the work."""
        return "cpu" if self.staged else self.device

    @property
    def item_bytes(self) -> int:
        """Bytes of one coordinate."""
        return ITEM_BYTES[self.dtype]


class Range(NamedTuple):
    """Blocks ``start`` to ``start + blocks`` of leaf number ``leaf``."""

    leaf: int
    start: int
    blocks: int


def cut(
    specs: Sequence[LeafSpec],
    piece_coordinates: int = PIECE_COORDINATES,
    bucket_bytes: int = 25 << 20,
    *,
    lane_sums: bool = False,
    leaves: Sequence[int] | None = None,
) -> list[list[Range]]:
    """Cut the leaves, in order, into pieces.

    Parameters
    ----------
    specs : sequence of LeafSpec
        The leaves.
    piece_coordinates : int
        Most coordinates a piece holds, weighted by the words that they may need; a block is never cut, nor is
        a span where the piece can hold one, nor a tensor whose codec works on whole tensors.
    bucket_bytes : int
        Most bytes of input that are fused into one piece.
    lane_sums : bool
        The back end works chunk by chunk: lanes that codecs have it sum so, and arrays that it adds up where
        they lie, may be in pieces of :data:`LARGE` times as many coordinates, however many bytes those are.
    leaves : sequence of int, optional
        Only these.
    """
    pieces: list[list[Range]] = []
    piece: list[Range] = []
    room: float = piece_coordinates
    room_bytes = bucket_bytes
    for leaf in range(len(specs)) if leaves is None else leaves:
        spec = specs[leaf]
        if lane_sums and spec.alone(min(ALONE, piece_coordinates)):
            pieces.extend([piece] if piece else [])
            most = LARGE * piece_coordinates, 0
            ranges = _ranges(spec, (1, 0), [], most, most)
            pieces.extend([Range(leaf, start, count)] for start, count, _ in ranges)
            piece, room, room_bytes = [], piece_coordinates, bucket_bytes
            continue
        load, whole = spec.load(lane_sums), (piece_coordinates, bucket_bytes)
        for start, count, full in _ranges(spec, load, piece, (room, room_bytes), whole):
            if full:
                pieces.append(piece)
                piece = []
                room, room_bytes = piece_coordinates, bucket_bytes
            geometry = Geometry.of(spec.row_shape)
            taken = geometry.offset(start + count) - geometry.offset(start)
            piece.append(Range(leaf, start, count))
            room -= taken * load[0]
            room_bytes -= taken * load[1]
    if piece:
        pieces.append(piece)
    return pieces


def tapered(pieces: Sequence[list[Range]], specs: Sequence[LeafSpec]) -> list[list[Range]]:
    """Return pieces of which the first and the last are cut in two, where there are several: what is done
    before anything is on a link, and when nothing is any more, is then half as much. Not so where codecs have
    operations of the back end's own: folds begin and end by the segment, and results may depend on pieces.
    """
    if len(pieces) < 2:
        return list(pieces)
    return [*_halves(pieces[0], specs), *pieces[1:-1], *_halves(pieces[-1], specs)]


def _halves(piece: Sequence[Range], specs: Sequence[LeafSpec]) -> list[list[Range]]:
    """Cut a piece between two spans, about where half of its blocks are; where there are none, not at all."""
    first: list[Range] = []
    rest = list(piece)
    alone = any(specs[r.leaf].route.operation is not None for r in piece)
    left = 0 if alone else sum(r.blocks for r in piece) // 2
    while left > 0:
        leaf, start, blocks = rest.pop(0)
        count = min(blocks, -(-(start + left) // SPAN) * SPAN - start)
        if specs[leaf].route.unit == "tensor":
            count = blocks
        first.append(Range(leaf, start, count))
        if count < blocks:
            rest.insert(0, Range(leaf, start + count, blocks - count))
        left -= count
    return [half for half in (first, rest) if half]


def _ranges(
    spec: LeafSpec,
    load: tuple[float, int],
    piece: list[Range],
    room: tuple[float, int],
    whole: tuple[float, int],
) -> Iterator[tuple[int, int, bool]]:
    """Yield (first block, blocks, begins a new piece) for one leaf; ``room`` is what is left in ``piece``."""
    geometry, (weight, item_bytes) = Geometry.of(spec.row_shape), load
    if spec.route.unit == "tensor":
        if geometry.blocks:
            fits = geometry.size * weight <= room[0] and geometry.size * item_bytes <= room[1]
            yield 0, geometry.blocks, bool(piece) and not fits
        return

    def fit(start: int, room: tuple[float, int]) -> int:
        most = room[0] // weight if item_bytes == 0 else min(room[0] // weight, room[1] // item_bytes)
        count = geometry.fit(start, max(0, int(most)))
        end = start + count
        aligned = end // SPAN * SPAN
        return aligned - start if end < geometry.blocks and aligned > start else count

    start = 0
    while start < geometry.blocks:
        count, begins = fit(start, whole if start else room), start > 0
        unfinished = start + count < geometry.blocks
        if piece and not begins and unfinished and count < max(1, min(SPAN, fit(start, whole))):
            count, begins = fit(start, whole), True  # too little is left here for a span
        count = max(count, 1)
        yield start, count, begins
        start += count
