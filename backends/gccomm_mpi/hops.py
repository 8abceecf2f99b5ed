"""Reductions by a codec's own arithmetic, in two hops, with encoding, links and decoding at work together.

Blocks are cut into a share per rank. Each rank encodes every share, a segment at a time, and sends it to the
rank that the share belongs to; that one folds the parts of all ranks into one and sends this to all. Either
hop takes (n - 1) / n of the words per rank, as little as can be, and every link carries the same both ways.
Segments stay below the size from which MPI libraries ask the receiver first, unless longer ones were measured
to be faster, and all receives are posted before anything is sent. So while a segment is encoded, those before
it are on their way to be folded, and the folded ones before these to be decoded. A rank sends but a few
segments more than it has folded of its own share: all links keep in step, and none is idle at the end because
another one got ahead. Nothing is added up in any other order than that of the ranks: all ranks get the same
bits, whatever the number of segments.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from gccomm.steps import Fold
from gccomm_mpi.link import Link, Moves
from gccomm_mpi.ring import SEGMENT_BYTES

__all__ = ["decode_all", "fold"]

AHEAD = 4  # segments of each share that are sent before the first one is folded

Words = npt.NDArray[np.uint32]


class _Segment(NamedTuple):
    """Blocks lo to hi of a share, and the memory of their words."""

    lo: int
    hi: int
    sent: Words
    folded: Words


def fold(link: Link, step: Fold, sent: Words, folded: Words, segment_bytes: int | None = None) -> Moves:
    """Encode, fold over the ranks, and decode.

    Parameters
    ----------
    link : Link
        Of any number of ranks.
    step : Fold
        What to do, equal on all ranks.
    sent, folded : array of uint32
        Memory for the words of all blocks, before and after.
    segment_bytes : int, optional
        Most of a message (default: below the size from which libraries ask first).

    Yields
    ------
    callable
        A test that is to come true before the generator is resumed, as of :func:`gccomm_mpi.ring.ring`.
    """
    run = _Fold(link, step, sent, folded, segment_bytes or SEGMENT_BYTES)
    with link.memory(np.dtype(np.uint32), run.room_words, run) as room:
        yield from run.moves(room)


def decode_all(step: Fold, size: int, folded: Words) -> None:
    """Decode what ``size`` ranks have folded among them: by their segments, which words are laid out by."""
    for share in _shares(step, size, SEGMENT_BYTES):
        for lo, hi in share:
            at = step.folded(0, lo)
            step.decode(lo, hi, folded[at : at + step.folded(lo, hi)])


def _shares(step: Fold, size: int, segment_bytes: int) -> list[list[tuple[int, int]]]:
    """Return the segments of each rank's share: first block, end."""
    blocks = max(1, segment_bytes // (4 * step.most))
    cuts = [step.blocks * r // size for r in range(size + 1)]
    return [[(x, min(x + blocks, hi)) for x in range(lo, hi, blocks)] for lo, hi in pairwise(cuts)]


class _Fold:
    """One reduction on its way."""

    def __init__(self, link: Link, step: Fold, sent: Words, folded: Words, segment_bytes: int) -> None:
        self.step = step
        comm = self.comm = link.comm
        self.part_tag, self.result_tag = link.next_tag(), link.next_tag()  # others may be on their way
        self.rank, self.size = comm.rank, comm.size
        # Each rank begins with another one, so that no link has all at once.
        self.peers = [(self.rank + hop) % self.size for hop in range(1, self.size)]
        shares = _shares(step, self.size, segment_bytes)
        self.shares = [list(self._segments(share, sent, folded)) for share in shares]
        self.mine = self.shares[self.rank]
        self.room_words = (self.size - 1) * sum(s.sent.size for s in self.mine)
        self.buffers = sent, folded
        self.parts: list[list[Words]] = []  # of each segment of this rank's share, by rank
        self.coming: list[list[Any]] = []  # the receives of those
        self.results: dict[int, list[Any]] = {}  # receives of the others' shares, folded
        self.decoded = dict.fromkeys(self.peers, 0)
        self.encoded = self.folded = 0  # segments of each share, and of this rank's own
        self.going: list[Any] = []

    def _segments(self, share: list[tuple[int, int]], sent: Words, folded: Words) -> Iterator[_Segment]:
        step = self.step
        for first, end in share:
            a, b = step.sent(0, first), step.folded(0, first)
            mine = sent[a : a + step.sent(first, end)], folded[b : b + step.folded(first, end)]
            yield _Segment(first, end, *mine)

    def moves(self, room: Words) -> Moves:
        """Run it; ``room`` is for the other ranks' words."""
        self._expect(room)
        rows = max(map(len, self.shares))
        while self.encoded < rows or not self._complete():
            if self.encoded < rows and (self.encoded < self.folded + AHEAD or self.folded == len(self.mine)):
                self._encode(self.encoded)
                self.encoded += 1
            else:
                yield self._something
            self._go_on()
        for request in self.going:
            yield request.Test

    def _expect(self, room: Words) -> None:
        """Post all receives."""
        comm = self.comm
        for segment in self.mine:
            count = segment.sent.size
            parts, room = room[: (self.size - 1) * count], room[(self.size - 1) * count :]
            rows = list(parts.reshape(self.size - 1, count))
            rows.insert(self.rank, segment.sent)
            self.parts.append(rows)
            others = [(rows[peer], peer) for peer in self.peers]
            self.coming.append([comm.Irecv((x, MPI.UINT32_T), peer, self.part_tag) for x, peer in others])
        for peer in self.peers:
            words = [segment.folded for segment in self.shares[peer]]
            self.results[peer] = [comm.Irecv((x, MPI.UINT32_T), peer, self.result_tag) for x in words]

    def _encode(self, number: int) -> None:
        """Encode a segment of every share, and send the others'."""
        for rank in (*self.peers, self.rank):
            if number >= len(self.shares[rank]):
                continue
            segment = self.shares[rank][number]
            self.step.encode(segment.lo, segment.hi, segment.sent)
            if rank != self.rank:
                self._send(segment.sent, rank, self.part_tag)

    def _send(self, words: Words, rank: int, tag: int) -> None:
        self.going.append(self.comm.Isend((words, MPI.UINT32_T), rank, tag))

    def _something(self) -> bool:
        """Tell whether something has come of what is needed next; one call of MPI for all of it."""
        next_ = list(self.coming[self.folded]) if self.folded < len(self.mine) else []
        for peer, at in self.decoded.items():
            next_ += self.results[peer][at : at + 1]
        return bool(MPI.Request.Testsome(next_))

    def _foldable(self) -> bool:
        at = self.folded
        return at < min(self.encoded, len(self.mine)) and MPI.Request.Testall(self.coming[at])

    def _decodable(self, peer: int) -> bool:
        at, requests = self.decoded[peer], self.results[peer]
        return at < len(requests) and bool(requests[at].Test())

    def _go_on(self) -> None:
        """Fold and decode what has come."""
        while self._foldable():
            segment = self.mine[self.folded]
            self.step.fold(segment.lo, segment.hi, self.parts[self.folded], segment.folded)
            for peer in self.peers:
                self._send(segment.folded, peer, self.result_tag)
            self.folded += 1
            self.step.decode(segment.lo, segment.hi, segment.folded)
        for peer in self.peers:
            while self._decodable(peer):
                segment = self.shares[peer][self.decoded[peer]]
                self.decoded[peer] += 1
                self.step.decode(segment.lo, segment.hi, segment.folded)

    def _complete(self) -> bool:
        """Tell whether everything is folded and decoded."""
        rest = any(self.decoded[peer] < len(self.shares[peer]) for peer in self.peers)
        return self.folded == len(self.mine) and not rest
