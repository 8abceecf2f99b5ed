"""An all-reduce of large arrays over links: a ring of short segments, several of them in flight.

The array is cut into a share per rank. Each share goes once round the ring and is added up on the way, then
goes round once more, complete: 2 (n - 1) / n of the array per rank, as little as can be, and every link
carries the same both ways. Shares travel in segments below the size from which MPI libraries ask the receiver
first; receives are posted ahead, so that a segment never waits for one, and is sent on as soon as it is
added. All ranks get the same bits, floats included, because each share is added up in one order.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy.typing as npt

from gccomm_mpi.failure import abandon
from gccomm_mpi.operators import Operator

if TYPE_CHECKING:
    from gccomm_mpi.channel import Channel

__all__ = ["SEGMENT_BYTES", "ring"]

SEGMENT_BYTES = 56 << 10  # with its header below Open MPI's 64 KiB
AHEAD = 24  # receives that are posted
_TAG = 3

Array = npt.NDArray[Any]


class _Event(NamedTuple):
    """Segment ``segment`` of share ``share`` comes from the left: to be added, or complete."""

    share: int
    segment: int
    adds: bool
    handed_on: bool
    sent: int  # number of the send that this memory was last used for, -1: it is not in use


def ring(channel: Channel, name: str, send: Array, recv: Array, operator: Operator) -> None:
    """Reduce `send` over the ranks into `recv`; arguments and errors as of `gccomm_mpi.exchange.exchange`."""
    run = _Ring(channel, name, send, recv, operator)
    try:
        run.all()
    except BaseException:
        abandon(run)
        raise


class _Ring:
    """One all-reduce on its way."""

    def __init__(self, channel: Channel, name: str, send: Array, recv: Array, operator: Operator) -> None:
        self.channel, self.name, self.operator = channel, name, operator
        self.send, self.recv = send, recv
        comm = channel.comm
        self.rank, self.size = comm.rank, comm.size
        self.left, self.right = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        self.step = SEGMENT_BYTES // recv.itemsize
        self.cuts = [recv.size * r // self.size // 32 * 32 for r in range(self.size)] + [recv.size]
        self.segments = max(-(-(b - a) // self.step) for a, b in pairwise(self.cuts))
        self.room = channel.scratch(recv.dtype, AHEAD * self.step)
        self.coming: list[Any] = []
        self.going: list[Any] = []  # by event, the ones of this rank's own share first

    def all(self) -> None:
        """Run it."""
        events = list(self._events())
        self._expect(events, AHEAD)
        for segment in range(self.segments):
            self._hand_on(self._part(self.send, self.rank, segment))
        for k, event in enumerate(events):
            self._expect(events, k + AHEAD)
            self._take(k, event)
        for request in self.going:
            self._complete(request)

    def _events(self) -> Iterator[_Event]:
        """Yield what comes from the left, in order; it is the same number of segments in each round."""
        n, segments = self.size, self.segments
        for round_ in range(2 * (n - 1)):
            adds = round_ < n - 1
            share = (self.rank - 1 - round_) % n if adds else (self.rank - (round_ - (n - 1))) % n
            for segment in range(segments):
                # Sends are numbered; this rank's own share went first, then what was added.
                sent = -1 if adds else (round_ - (n - 1)) * segments + segment
                yield _Event(share, segment, adds, round_ < 2 * (n - 1) - 1, sent)

    def _part(self, array: Array, share: int, segment: int) -> Array:
        low = self.cuts[share] + segment * self.step
        return array[low : max(low, min(low + self.step, self.cuts[share + 1]))]

    def _expect(self, events: list[_Event], end: int) -> None:
        """Post the receives of the events before `end`, as far as what their memory held is sent."""
        for k in range(len(self.coming), min(end, len(events))):
            if events[k].sent >= len(self.going):
                return
            self._post(k, events[k])

    def _post(self, k: int, event: _Event) -> None:
        target = self._part(self.recv, event.share, event.segment)
        if event.adds:
            target = self.room[k % AHEAD * self.step :][: target.size]
        else:  # what was sent from there has left, or it could not come back; MPI must know
            self._complete(self.going[event.sent])
        request = (
            self.channel.comm.Irecv((target, self.operator.datatype), self.left, _TAG)
            if target.size
            else None
        )
        self.coming.append(request)

    def _take(self, k: int, event: _Event) -> None:
        self._complete(self.coming[k])
        target = self._part(self.recv, event.share, event.segment)
        if event.adds and target.size:
            own = self._part(self.send, event.share, event.segment)
            self.operator.combine(own, self.room[k % AHEAD * self.step :][: target.size], target)
        if event.handed_on:
            self._hand_on(target)

    def _hand_on(self, part: Array) -> None:
        comm = self.channel.comm
        self.going.append(comm.Isend((part, self.operator.datatype), self.right, _TAG) if part.size else None)

    def _complete(self, request: Any) -> None:
        if request is not None:
            self.channel.complete(request, self.name)
