"""A plan: everything about a call that follows from its layout, made once and reused while the layout stays.

Per call only pointers and noise keys are filled in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from gccomm.agreement import digest
from gccomm.errors import NegotiationError
from gccomm.layout import FLOATS, PIECE_COORDINATES, Geometry, LeafSpec, Range, cut, tapered
from gccomm.noise import private_keys, step_keys, tensor_key
from gccomm.operand import Operand, segment_table

__all__ = ["Plan"]

AHEAD = 2  # times a usual piece that is agreed upon at once, most

# What a call fills in.
COLUMNS = ("src", "dst", "res_in", "res_out", "sign0", "sign1", "key0", "key1")


class Plan:
    """Pieces, operands and the table of segments of one layout.

    Parameters
    ----------
    specs : sequence of LeafSpec
        The leaves, in tree order.
    size : int
        Number of ranks n.
    seed : int
        Seed of the noise.
    piece_coordinates, bucket_bytes : int
        See :func:`gccomm.layout.cut`.
    nones : sequence of str
        Keys that are None on all ranks: part of the layout, nothing to send.
    lane_sums : bool
        The back end works chunk by chunk: pieces may be larger than the caches.
    hosts : int
        Number of hosts that add up what codecs round before it is compressed; 0: they do not.
    taper : bool
        Halve the first and the last of those pieces in which every rank sends its own.

    Attributes
    ----------
    plain : int
        Number of pieces, the first ones, in which every rank sends its own.
    devices : list of str
        Devices of leaves but for the CPU, in the order of the tree: their numbers are this rank's own.

    Raises
    ------
    NegotiationError
        A codec cannot serve n ranks.
    """

    def __init__(
        self,
        specs: Sequence[LeafSpec],
        size: int,
        seed: int = 0,
        piece_coordinates: int = PIECE_COORDINATES,
        bucket_bytes: int = 25 << 20,
        nones: Sequence[str] = (),
        hosts: int = 0,
        *,
        lane_sums: bool = False,
        taper: bool = False,
    ) -> None:
        self.specs, self.nones, self.lane_sums = tuple(specs), tuple(nones), lane_sums
        self.devices = [name for name in dict.fromkeys(s.device for s in specs) if name != "cpu"]
        self.geometries = [Geometry.of(spec.row_shape) for spec in specs]
        for codec, item_bytes in {(spec.route, spec.item_bytes) for spec in specs}:
            codec.require_size(hosts if hosts and codec.rounds else size, item_bytes)
        for codec in {spec.route for spec in specs if spec.feedback}:
            codec.require_feedback(hosts or size)
        self.layout = digest("\n".join(self.lines()))
        self.keys = [tensor_key(s.key, seed) for s in specs]
        self._keys = np.array(self.keys, dtype=np.uint32).reshape(-1, 2)
        self._step = -1
        self.uses = 0
        private = np.array([s.route.private for s in specs], dtype=bool)
        hosted = [bool(hosts) and spec.route.rounds for spec in specs]
        kinds = [[i for i, own in enumerate(hosted) if own is kind] for kind in (False, True)]
        sizes = piece_coordinates, bucket_bytes
        plain, summed = (cut(specs, *sizes, lane_sums=lane_sums, leaves=leaves) for leaves in kinds)
        plain = tapered(plain, specs) if taper else plain
        self.plain = len(plain)
        pieces = [_group(piece, self.specs) for piece in (*plain, *summed)]
        segments = [segment for batches in pieces for batch in batches for segment in batch]
        self.leaf_of = np.array([s.leaf for s in segments], dtype=np.int64)
        each = len(segments) == len(specs) and bool((self.leaf_of == np.arange(len(specs))).all())
        self._leaf_of: Any = slice(None) if each else self.leaf_of  # a slice takes less time
        self.table = segment_table(segments, self.specs)
        self._columns = {name: self.table[name] for name in COLUMNS}
        self._private = private[self.leaf_of][:, None] if private.any() else None
        self.pieces = self._operands(pieces)
        self.operands = [operand for piece in self.pieces for operand in piece]
        for x in self.operands:
            x.ranks = size
        self.agree_words = [sum(x.blocks for x in piece) for piece in self.pieces]
        self.result_bytes = sum(g.size * s.item_bytes for g, s in zip(self.geometries, specs, strict=True))

    def lines(self) -> list[str]:
        """Return one line a leaf: what the layout digest covers."""
        places = {device: place for place, device in enumerate(self.devices)}
        return [spec.text(places.get(spec.device, 0)) for spec in self.specs] + [
            f"{key!r}: None" for key in self.nones
        ]

    @cached_property
    def groups(self) -> list[tuple[int, int]]:
        """The pieces, from and to, that are agreed upon at once while those before them are on a link: at
        first as many as make one of the usual size, once more, and then `AHEAD` times as many.
        """
        words = self.agree_words[: self.plain]
        found: list[tuple[int, int]] = []
        low, whole = 0, max(words, default=0)
        while low < len(words):
            end, room = low + 1, whole * min(len(found) or 1, AHEAD) - words[low]
            while end < len(words) and words[end] <= room:
                room -= words[end]
                end += 1
            found.append((low, end))
            low = end
        return found or [(0, 0)]

    def require_operations(self, operations: frozenset[str]) -> None:
        """Raise NegotiationError where a codec reduces by an operation that the back end lacks."""
        for codec in {spec.route for spec in self.specs}:
            if codec.operation is not None and codec.operation not in operations:
                have = ", ".join(sorted(operations)) or "none"
                msg = (
                    f"{codec!r} reduces by the operation {codec.operation!r}, which this back end lacks "
                    f"(it has {have}); use a codec that sums, or the back end mpi"
                )
                raise NegotiationError(msg)

    def swaps(self, nbytes: int) -> bool:
        """Return whether it is of one tensor of floats on the host, of at most so many bytes, to which no
        residual is added and whose noise all ranks share: ranks may then swap it whole.
        """
        if len(self.specs) != 1 or self.nones or len(self.operands) != 1 or self.operands[0].count != 1:
            return False
        spec, size = self.specs[0], self.geometries[0].size
        if spec.dtype not in FLOATS or spec.device != "cpu" or spec.feedback or spec.route.private:
            return False
        return 0 < size * spec.item_bytes <= nbytes

    def nonfinite(self) -> set[str]:
        """Return the keys of which this rank holds inf or NaN."""
        bad: set[str] = set()
        for x in self.operands:
            if self.specs[x.segments[0].leaf].dtype in FLOATS:
                bad.update(self.specs[leaf].key for leaf in x.nonfinite())
        return bad

    def _operands(self, pieces: list[list[list[Range]]]) -> list[list[Operand]]:
        made, position = [], 0
        for batches in pieces:
            operands = []
            for batch in batches:
                table = self.table[position : position + len(batch)]
                operands.append(Operand(self.specs[batch[0].leaf].route, self.specs, batch, table))
                position += len(batch)
            made.append(operands)
        return made

    def bind(
        self,
        step: int,
        rank: int,
        src: npt.NDArray[np.uint64],
        dst: npt.NDArray[np.uint64],
        residuals: tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]] | None = None,
    ) -> None:
        """Fill in this call's addresses (one a leaf, 0: absent) and noise keys."""
        columns, leaf_of = self._columns, self._leaf_of
        columns["src"][:], columns["dst"][:] = src[leaf_of], dst[leaf_of]
        if residuals is not None:
            columns["res_in"][:], columns["res_out"][:] = (r[leaf_of] for r in residuals)
        if step != self._step:
            both = step_keys(self._keys, step)[leaf_of]
            self._share(both)
            own = both
            if self._private is not None:
                own = np.where(self._private, private_keys(both, rank), both)
            columns["sign0"][:], columns["sign1"][:] = both[:, 0], both[:, 1]
            columns["key0"][:], columns["key1"][:] = own[:, 0], own[:, 1]
            self._step = step

    def let_go_on(self, meanwhile: Callable[[], object] | None) -> None:
        """Have kernels of lanes call a function now and then, for the rest of the call."""
        for x in self.operands:
            x.meanwhile = meanwhile

    def _share(self, keys: npt.NDArray[np.uint32]) -> None:
        """Give every operand its segments' shared keys."""
        position = 0
        for x in self.operands:
            x.keys = keys[position : position + x.count]
            position += x.count


def _group(ranges: Sequence[Range], specs: Sequence[LeafSpec]) -> list[list[Range]]:
    """Collect the ranges of a piece that one operand can carry: same codec, op, scale format and device."""
    batches: dict[object, list[Range]] = {}
    for r in ranges:
        spec = specs[r.leaf]
        batches.setdefault((spec.route, spec.mean, spec.dtype == "float64", spec.device), []).append(r)
    return list(batches.values())
