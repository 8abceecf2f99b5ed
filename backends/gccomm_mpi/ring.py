"""An all-reduce of large arrays over links: a ring of segments, several of them in flight.

The array is cut into a share per rank. Each share goes once round the ring and is added up on the way, then
goes round once more, complete: 2 (n - 1) / n of the array per rank, as little as can be, and every link
carries the same both ways. Shares travel in segments, by default below the size from which MPI libraries ask
the receiver first; receives are posted ahead, so that a segment never waits for one, and is sent on as soon
as it is added. All ranks get the same bits, floats included, because each share is added up in one order.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy.typing as npt

from gccomm_mpi.link import Link, Moves
from gccomm_mpi.operators import Operator

__all__ = ["SEGMENT_BYTES", "ring"]

SEGMENT_BYTES = 56 << 10  # with its header below Open MPI's 64 KiB
AHEAD_BYTES = 24 * SEGMENT_BYTES  # of receives that are posted
LEAST_AHEAD = 3  # receives that are posted, however long they are

Array = npt.NDArray[Any]


class _Event(NamedTuple):
    """Segment ``segment`` of share ``share`` comes from the left: to be added, or complete."""

    share: int
    segment: int
    adds: bool
    handed_on: bool
    sent: int  # number of the send that this memory was last used for, -1: it is not in use


def ring(link: Link, send: Array, recv: Array, operator: Operator, segment_bytes: int | None = None) -> Moves:
    """Reduce `send` over the ranks into `recv`; arguments as of `gccomm_mpi.exchange.exchange`."""
    run = _Ring(link, send, recv, operator, segment_bytes or SEGMENT_BYTES)
    with link.memory(recv.dtype, run.ahead * run.step, run) as run.room:
        yield from run.moves()


class _Ring:
    """One all-reduce on its way."""

    def __init__(self, link: Link, send: Array, recv: Array, operator: Operator, limit: int) -> None:
        self.comm, self.tag, self.operator = link.comm, link.next_tag(), operator
        self.send, self.recv = send, recv
        self.rank, self.size = link.comm.rank, link.comm.size
        self.left, self.right = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        self.step, self.ahead = limit // recv.itemsize, max(LEAST_AHEAD, AHEAD_BYTES // limit)
        self.cuts = [recv.size * r // self.size // 32 * 32 for r in range(self.size)] + [recv.size]
        self.segments = max(-(-(b - a) // self.step) for a, b in pairwise(self.cuts))
        self.room = recv[:0]
        self.coming: list[Any] = []
        self.going: list[Any] = []  # by event, the ones of this rank's own share first

    def moves(self) -> Moves:
        """Run it."""
        events = list(self._events())
        yield from self._expect(events, self.ahead)
        for segment in range(self.segments):
            self._hand_on(self._part(self.send, self.rank, segment))
        for k, event in enumerate(events):
            yield from self._expect(events, k + self.ahead)
            if self.coming[k] is not None:
                yield self.coming[k].Test
            self._take(k, event)
        for request in self.going:
            if request is not None:
                yield request.Test

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
        low, end = self.cuts[share] + segment * self.step, self.cuts[share + 1]
        return array[min(low, end) : min(low + self.step, end)]

    def _expect(self, events: list[_Event], end: int) -> Moves:
        """Post the receives of the events before `end`, as far as what their memory held is sent."""
        for k in range(len(self.coming), min(end, len(events))):
            event = events[k]
            if event.sent >= len(self.going):
                return
            # What was sent from there has left, or it could not come back; MPI must know.
            sent = None if event.adds else self.going[event.sent]
            if sent is not None:
                yield sent.Test
            self._post(k, event)

    def _post(self, k: int, event: _Event) -> None:
        target = self._part(self.recv, event.share, event.segment)
        if event.adds:
            target = self.room[k % self.ahead * self.step :][: target.size]
        datatype = self.operator.datatype
        request = self.comm.Irecv((target, datatype), self.left, self.tag) if target.size else None
        self.coming.append(request)

    def _take(self, k: int, event: _Event) -> None:
        target = self._part(self.recv, event.share, event.segment)
        if event.adds and target.size:
            own = self._part(self.send, event.share, event.segment)
            self.operator.combine(own, self.room[k % self.ahead * self.step :][: target.size], target)
        if event.handed_on:
            self._hand_on(target)

    def _hand_on(self, part: Array) -> None:
        datatype = self.operator.datatype
        request = self.comm.Isend((part, datatype), self.right, self.tag) if part.size else None
        self.going.append(request)
