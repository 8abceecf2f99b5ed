"""Hosts that add up their ranks' floats before these are compressed, and speak through one rank at a time.

Of every piece one rank of each host gets the sum of its host's inputs and takes part in the codec's steps:
it *speaks* for the host, and n counts hosts. The host's other ranks follow the same steps in silence: they
send nothing, and get what the speakers have reduced. Ranks of a host speak by turns, piece after piece.

What a rank rounds off a host's sum is its residual; those of the silent ranks are zero, so that the residuals
of all ranks add up to what the sum has lost, as they do without hosts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gccomm import kernels, memory
from gccomm.kernels.table import DTYPE_CODES
from gccomm.pieces import Moves, Wire
from gccomm.steps import Buffer, FloatName
from gccomm.transfers import Between, HostSum, Whole

if TYPE_CHECKING:
    from gccomm.flow import Board
    from gccomm.operand import Operand

__all__ = ["HostPart", "HostWire", "Hosts"]


class Hosts(NamedTuple):
    """Where a rank stands: the number of hosts, which ``host`` is its own, its place there, and how many
    ranks speak by turns, as many on every host.
    """

    number: int
    host: int
    place: int
    speakers: int


class HostWire(Wire):
    """The transfers of a piece in which one rank of each host speaks.

    Parameters
    ----------
    wire : Wire
        Of the call.
    hosts : Hosts
        Where this rank stands.
    speaker : int
        Who speaks: a place.
    """

    def __init__(self, wire: Wire, hosts: Hosts, speaker: int) -> None:
        super().__init__(wire.rank, hosts.number, wire.spans, wire.stats)
        self.speaker, self._wire = speaker, wire

    def lap(self) -> float:
        """Return the seconds since the last time."""
        return self._wire.lap()

    def move(self, transfer: Whole, nbytes: int, messages: int = 1) -> Moves:
        """Ask for a transfer between hosts, and count it."""
        yield from self._wire.move(Between(transfer, self.speaker), nbytes, messages)

    def decoded(self) -> None:
        """Count the time since the last transfer as spent on its sums."""
        self._wire.decoded()

    def share(self, encode_s: float, decode_s: float) -> None:
        """Count seconds of the last transfer as spent on encoding and decoding."""
        self._wire.share(encode_s, decode_s)

    def next_tag(self) -> int:
        """Return the tag of the next message: the same on all ranks."""
        return self._wire.next_tag()

    def summed_floats(self, buffer: Buffer) -> None:
        """Take notice of a sum of floats."""
        self._wire.summed_floats(buffer)


class HostPart:
    """One operand whose inputs are added up within each host.

    Parameters
    ----------
    x : Operand
        With this call's addresses bound.
    speaker : int
        The place of the rank that gets the sum.
    speaks : bool
        Whether it is this one, which needs the memory.
    board : Board, optional
        Where words stay on a device, as sums of floats do then.
    """

    def __init__(self, x: Operand, speaker: int, speaks: bool, board: Board | None = None) -> None:
        self.x, self.speaker, self.speaks, self._board = x, speaker, speaks, board
        self.dtype: FloatName = "float64" if x.float64 else "float32"
        self._item = np.dtype(self.dtype)
        self.direct: Buffer | None = None
        if x.direct is not None and x.direct[0] == self.dtype:
            self.direct = x.direct[1]
        x.direct = None  # its result is not the sum of this array with others
        self.total = self._memory(x.coordinates) if speaks else None
        if not speaks:
            x.table["res_out"] = 0  # nothing of it is left over here
        self.send = self._memory(x.coordinates) if self.direct is None else self.direct

    def _memory(self, count: int) -> Any:
        if self._board is not None:
            from gccomm.device_words import DeviceWords

            return DeviceWords.empty(count, self._item, self._board)
        return kernels.pool_empty(count * self._item.itemsize).view(self._item)

    def transfer(self) -> HostSum:
        """Return the sum over the host, of inputs and of residuals but for the speaker's, which it adds."""
        x = self.x
        if self.direct is None:
            old = x.table["res_in"].copy()
            if self.speaks:
                x.table["res_in"] = 0
            x.encode_floats(0, x.blocks, self.send, self.dtype)
            x.table["res_in"] = old
        return HostSum(self.send, self.total, self.dtype, self.speaker)

    def adopt(self) -> None:
        """Make the host's sum the operand's input, or nothing where another rank speaks."""
        x = self.x
        total: Any = self.total
        if total is not None and self._board is None:
            total = memory.moved(total, x.specs[0].worked_on)
        table = x.table.copy()
        table["src"], table["dtype"] = 0, DTYPE_CODES[self.dtype]
        if total is None:
            table["res_in"] = x.table["res_in"] = 0
        else:
            starts = (np.cumsum(x.lengths) - x.lengths)[x.bounds[:-1]]
            before = [g.offset(s.start) for g, s in zip(x.geometries, x.segments, strict=True)]
            inside = (starts - np.array(before)) * self._item.itemsize
            table["src"] = inside.astype(np.uint64) + np.uint64(memory.address(total))
        x.read_from(table)
        self.send = self.send[:0]
        x.alive = total
