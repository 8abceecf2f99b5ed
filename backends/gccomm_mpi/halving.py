"""An all-reduce by recursive halving and doubling: log2(n) messages each way instead of n - 1.

In round k a rank and the one whose place differs in bit k swap halves of what they hold, and each adds up one
of them; after log2(n) rounds every rank holds the sum of its n-th of the array, and the rounds are run back
to collect all of it: 2 (n - 1) / n of the array per rank. Where n is no power of two, ranks are first folded:
each of the first few gives its array to its neighbour, and takes the result from it in the end. The largest
messages go between neighbours, which launchers put close to each other.

Ranks that add are neighbours first, then neighbouring pairs, and so on, which is the order of gccomm's own
operations (`gccomm.operations`): these go the same way, where n is a power of two. All ranks get the same
bits, because each word is reduced in one place.

Arrays that are too small for that are swapped whole in each round (:func:`doubling`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy.typing as npt
from mpi4py import MPI

from gccomm_mpi.exchange import post
from gccomm_mpi.link import Link, Moves
from gccomm_mpi.operators import Operator

__all__ = ["Add", "Folding", "Where", "doubling", "halving", "halving_in_order"]

ALIGN = 32  # elements

Array = npt.NDArray[Any]


class Where(NamedTuple):
    """Which addition it is: of the elements from ``start`` on, the pair's number in the round, both counted
    from 0, and whether this rank is the pair's ``lower`` one.
    """

    start: int
    round: int
    pair: int
    lower: bool


Add = Callable[[Array, Array, Array, Where], None]  # of what this rank has, what has come, and the result


def halving(link: Link, send: Array, recv: Array, operator: Operator) -> Moves:
    """Reduce `send` over the ranks into `recv`; arguments as of `gccomm_mpi.exchange.exchange`."""

    def add(own: Array, other: Array, out: Array, _where: Where) -> None:
        operator.combine(own, other, out)

    yield from _run(link, send, recv, operator.datatype, add)


def halving_in_order(link: Link, words: Array, add: Add) -> Moves:
    """Reduce words over a power of two of ranks, in place, in the order of gccomm's own operations.

    ``add(own, other, out, where)`` adds the words of two ranks, or of two sums; ``out`` is ``own``.
    """
    yield from _run(link, words, words, MPI.UINT32_T, add)


def _run(link: Link, send: Array, recv: Array, datatype: Any, add: Add) -> Moves:
    run = _Halving(link, recv.size, datatype, add)
    with link.memory(recv.dtype, run.most, run, send, recv) as run.room:
        yield from run.moves(send, recv)


def doubling(link: Link, send: Array, recv: Array, operator: Operator) -> Moves:
    """Reduce small arrays: whole ones are swapped in each round. Arguments as of :func:`halving`."""
    folding = Folding(link)
    comm, tag, datatype = link.comm, link.next_tag(), operator.datatype
    held: list[Any] = []
    with link.memory(recv.dtype, 3 * recv.size, held, send, recv) as memory:
        now, other, free = (memory[k * recv.size : (k + 1) * recv.size] for k in range(3))
        now[...] = send
        if folding.gives:
            held += [comm.Irecv((recv, datatype), folding.mate, tag)]
            held += [comm.Isend((now, datatype), folding.mate, tag)]
            for request in held:
                yield request.Test
            return
        if folding.takes:
            held += [comm.Irecv((other, datatype), folding.mate, tag)]
            yield held[-1].Test
            operator.combine(now, other, free)
            now, free = free, now
        for k in range(folding.rounds):
            peer = folding.rank_of(folding.place ^ 1 << k)
            held[:] = comm.Irecv((other, datatype), peer, tag), comm.Isend((now, datatype), peer, tag)
            for request in held:
                yield request.Test
            lower = folding.place & 1 << k == 0  # in one order on both: formats may not commute
            operator.combine(*((now, other) if lower else (other, now)), free)
            now, free = free, now
        recv[...] = now
        if folding.takes:
            held[:] = [comm.Isend((now, datatype), folding.mate, tag)]
            yield held[0].Test


class Folding:
    """Which ranks take part: a power of two of places, and the neighbours of the first few."""

    def __init__(self, link: Link) -> None:
        rank, size = link.comm.rank, link.comm.size
        self.rounds = size.bit_length() - 1
        self._extra = size - (1 << self.rounds)
        folded = rank < 2 * self._extra
        self.gives, self.takes = folded and rank % 2 == 1, folded and rank % 2 == 0
        self.mate = rank ^ 1
        self.place = rank // 2 if folded else rank - self._extra

    def rank_of(self, place: int) -> int:
        """Return the rank at a place."""
        return 2 * place if place < self._extra else place + self._extra


class _Halving:
    """One all-reduce on its way."""

    def __init__(self, link: Link, size: int, datatype: Any, add: Add) -> None:
        self.comm, self.tag, self.limit = link.comm, link.next_tag(), link.segment_bytes
        self.datatype, self.add, self.folding = datatype, add, Folding(link)
        self.room: Any = None
        self.requests: list[Any] = []
        self.halves: list[tuple[int, tuple[int, int], tuple[int, int]]] = []  # peer, kept, given, by round
        low, high, place = 0, size, self.folding.place
        for k in range(self.folding.rounds):
            middle = low + (high - low) // 2 // ALIGN * ALIGN
            parts = (low, middle), (middle, high)
            kept, given = parts if place >> k & 1 == 0 else parts[::-1]
            self.halves.append((self.folding.rank_of(place ^ 1 << k), kept, given))
            low, high = kept
        held = sum(high - low for _, (low, high), _ in self.halves)
        self.most = max(size if self.folding.takes else 0, held)  # elements that come before they are added

    def moves(self, send: Array, recv: Array) -> Moves:
        """Run it."""
        folding = self.folding
        if folding.gives:
            self._receive(recv, folding.mate)
            self._send(send, folding.mate)
            yield from self._all()
            return
        source = send
        if folding.takes:
            coming = self._receive(self.room[: recv.size], folding.mate)
            yield from self._add(coming, send, self.room, recv, Where(0, 0, folding.place, True))
            source = recv
        yield from self._halve(source, recv)
        yield from self._double(recv)
        if folding.takes:
            self._send(recv, folding.mate)
        yield from self._all()

    def _halve(self, source: Array, recv: Array) -> Moves:
        """Run the rounds that add. All receives are posted first, so that no segment waits for one."""
        coming, rooms, used = [], [], 0
        for peer, (low, high), _ in self.halves:
            rooms.append(self.room[used : used + high - low])
            coming.append(self._receive(rooms[-1], peer))
            used += high - low
        place = self.folding.place
        for k, (peer, (low, high), given) in enumerate(self.halves):
            self._send(source[slice(*given)], peer)
            own, total = source[low:high], recv[low:high]
            where = Where(low, k, place >> k + 1, place >> k & 1 == 0)
            yield from self._add(coming[k], own, rooms[k], total, where)
            source = recv

    def _double(self, recv: Array) -> Moves:
        """Run the rounds back: swap what is complete."""
        yield from self._all()  # what comes goes where the given halves lay
        back = self.halves[::-1]
        coming = [self._receive(recv[slice(*given)], peer) for peer, _, given in back]
        for (peer, kept, _), arriving in zip(back, coming, strict=True):
            self._send(recv[slice(*kept)], peer)
            for request in arriving:
                yield request.Test

    def _add(self, coming: list[Any], own: Array, room: Array, total: Array, where: Where) -> Moves:
        """Add each segment when it has come."""
        step = max(1, self.limit // own.itemsize)
        for at, request in zip(range(0, own.size, step), coming, strict=True):
            yield request.Test
            end = min(at + step, own.size)
            at_ = where._replace(start=where.start + at)
            self.add(own[at:end], room[at:end], total[at:end], at_)

    def _receive(self, part: Array, peer: int) -> list[Any]:
        made = post(self.comm.Irecv, part, self.datatype, peer, self.tag, self.limit)
        self.requests += made
        return made

    def _send(self, part: Array, peer: int) -> None:
        self.requests += post(self.comm.Isend, part, self.datatype, peer, self.tag, self.limit)

    def _all(self) -> Moves:
        for request in self.requests:
            yield request.Test
        self.requests.clear()
