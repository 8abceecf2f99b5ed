"""Reductions by messages over a link: by which algorithm, in which pieces, begun or completed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy.typing as npt

from gccomm.operations import add_pair, reduce_parts
from gccomm.steps import Fold, Words
from gccomm_mpi.choice import LONG, STREAM
from gccomm_mpi.exchange import PIECE_BYTES, SHARE_BYTES, by_mpi, exchange, exchange_in_order, swap_whole
from gccomm_mpi.halving import Add, Where, doubling, halving, halving_in_order
from gccomm_mpi.hops import fold
from gccomm_mpi.link import Flight, Link, Moves
from gccomm_mpi.operators import Operator
from gccomm_mpi.ring import SEGMENT_BYTES, ring
from gccomm_mpi.small import SMALL_BYTES, Small

if TYPE_CHECKING:
    from gccomm_mpi.channel import Channel

__all__ = ["ALGORITHMS", "MAX_COUNT", "Messages", "pieces"]

Array = npt.NDArray[Any]
# An algorithm, as steps or as a function that waits for its end.
Begun: TypeAlias = Moves | Callable[[], None]

# Elements per MPI call: counts and byte counts stay far from 2^31 in every library.
MAX_COUNT = 1 << 28

# Segments so long cost less arithmetic, which matters where links are fast. But MPI libraries ask the
# receiver first, which takes time where the question waits behind other words.
LONG_BYTES = 512 << 10
MOST_SWAPPED = 64  # sizes that are remembered

ALGORITHMS: dict[str, Callable[..., Moves]] = {
    "ring": ring,
    "long-ring": partial(ring, segment_bytes=LONG_BYTES),
    "direct": exchange,
    "long-direct": partial(exchange, segment_bytes=LONG_BYTES),
    "halving": halving,
    "mpi": by_mpi,
}
# The first one is kept to unless another is clearly faster. Where two ranks make one sum at a time, that is
# the direct one, in which they swap whole arrays: as many bytes as round a ring, but nothing waits for a sum
# to come back. Several at a time are better off in rings, which keep them in order.
_LARGE = tuple(ALGORITHMS)
_SWAPS = ("direct", "long-direct", "ring", "long-ring", "mpi")
_STREAMS = ("ring", "long-ring", "direct", "halving", "mpi")
_SMALL = {"halving": doubling, "mpi": by_mpi}


class Messages:
    """Reductions over the ranks of a link.

    Parameters
    ----------
    channel : Channel
        Whose waits and choices these are.
    link : Link
        What they go over.
    """

    def __init__(self, channel: Channel, link: Link) -> None:
        self.channel, self.link = channel, link
        self.size: int = link.comm.size
        self.max_count = MAX_COUNT  # elements per call of MPI's; equal on all ranks
        self.small = Small(channel, link)
        self._swapped: set[int] = set()  # bytes of what two ranks were found to swap best by one message

    def free(self) -> None:
        """Give the communicator back to MPI; collective."""
        self.small.free()
        self.link.comm.Free()

    def reduce(self, name: str, send: Array, recv: Array, operator: Operator) -> None:
        """Reduce `send` over the ranks into `recv`, of any size."""
        if self.size == 1:
            if send is not recv:
                recv[...] = send
            return
        if 0 < recv.nbytes <= SMALL_BYTES:
            if send is not recv:
                recv[...] = send
            self.small.reduce(name, recv.reshape(-1), operator)
            return
        if recv.nbytes in self._swapped and recv.ndim == 1 and recv.size <= self.max_count:
            swap_whole(self.link, send, recv, operator, self.channel.complete, name)
            return
        count = PIECE_BYTES // recv.itemsize if self._large(recv) else self.max_count
        for source, target in pieces(send, recv, min(self.max_count, count)):
            flight = self._reduce(name, source, target, operator, alone=True)
            if flight is not None:
                self.channel.land(flight)

    def begin(self, name: str, send: Array, recv: Array, operator: Operator) -> Flight | None:
        """Begin to reduce at most `PIECE_BYTES`; None: it is complete, while algorithms are on trial."""
        return self._reduce(name, send, recv, operator, alone=False)

    def _reduce(
        self, name: str, send: Array, recv: Array, operator: Operator, *, alone: bool
    ) -> Flight | None:
        table, kind, names = ALGORITHMS, "large sums", _SWAPS if self.size == 2 else _LARGE
        if not self._large(recv):
            table, kind = self._small(), "small sums"
            names = tuple(table)
        elif not alone:
            kind, names = STREAM, _STREAMS
        # Where segments would not be longer, it is the same algorithm.
        if self.link.segment_bytes >= LONG_BYTES or recv.nbytes <= self.size * SEGMENT_BYTES:
            names = tuple(name for name in names if not name.startswith(LONG))
        if self.channel.chooser.fixed in table:
            names = (self.channel.chooser.fixed,)

        def moves(known: str) -> Begun:
            if alone and self.size == 2 and known == "long-direct" and recv.nbytes <= LONG_BYTES:
                return partial(swap_whole, self.link, send, recv, operator, self.channel.complete, name)
            return table[known](self.link, send, recv, operator)

        return self._begin(name, kind, recv, names, moves)

    def combine(self, name: str, operation: str, seed: int, words: Array) -> None:
        """Reduce words over the ranks by an operation of gccomm's own, in place."""
        if self.size == 1:
            return
        count = min(self.max_count, PIECE_BYTES // words.itemsize)
        for place, (piece, _) in enumerate(pieces(words, words, count)):
            first, size = place * count, self.size

            def add(own: Array, other: Array, out: Array, at: Where, first: int = first) -> None:
                parts = (own, other) if at.lower else (other, own)
                number = self.size, at.round, at.pair
                add_pair(operation, seed, parts, first + at.start, out, number)

            def moves(known: str, piece: Array = piece, first: int = first, add: Add = add) -> Moves:
                if known == "halving":
                    return halving_in_order(self.link, piece, add)
                return exchange_in_order(self.link, piece, first, partial(reduce_parts, operation, seed))

            names = ("direct", "halving") if size > 2 and size & size - 1 == 0 else ("direct",)
            flight = self._begin(name, f"reductions `{operation}`", piece, names, moves)
            if flight is not None:
                self.channel.land(flight)

    def fold(self, name: str, step: Fold, sent: Words, folded: Words) -> Flight | None:
        """Begin a reduction by a codec's own arithmetic; None: it is complete, segments are on trial."""
        names: Sequence[str] = ("fold", "long-fold")
        if self.channel.one_host or sent.nbytes <= self.size * SEGMENT_BYTES:
            names = names[:1]

        def moves(known: str) -> Moves:
            return fold(self.link, step, sent, folded, LONG_BYTES if known.startswith(LONG) else None)

        return self._begin(name, "folds", sent, names, moves)

    def _begin(
        self, name: str, kind: str, recv: Array, names: Sequence[str], moves: Callable[[str], Begun]
    ) -> Flight | None:
        chooser, channel = self.channel.chooser, self.channel
        kind += self.link.name
        chosen = chooser.settled(kind, recv.nbytes, names)

        def start(begun: Begun) -> Flight | None:
            return begun() if callable(begun) else channel.launch(name, begun, (moves, recv))

        def land(begun: Begun) -> None:
            flight = start(begun)
            if flight is not None:
                channel.land(flight)

        if chosen is not None:
            begun = moves(chosen)
            if callable(begun):
                self._remember(recv.nbytes)
            return start(begun)
        channel.still(name)  # or the clock would count others
        chooser.try_next(kind, recv.nbytes, self.link, land, names, moves)
        return None

    def _remember(self, nbytes: int) -> None:
        """Note that sums of so many bytes are swapped, which stays so."""
        if len(self._swapped) >= MOST_SWAPPED:
            self._swapped.clear()
        self._swapped.add(nbytes)

    def _large(self, recv: Array) -> bool:
        return bool(recv.nbytes >= self.size * SHARE_BYTES)

    def _small(self) -> dict[str, Callable[..., Moves]]:
        return {"mpi": by_mpi} if self.channel.one_host else _SMALL


def pieces(send: Array, recv: Array, count: int) -> Iterator[tuple[Array, Array]]:
    """Cut two arrays of one size into flat pieces of at most `count` elements; one array is cut once."""
    if 0 < recv.size <= count and recv.ndim == 1:
        yield send, recv
        return
    flat_recv = recv.reshape(-1)
    flat_send = flat_recv if send is recv else send.reshape(-1)
    for low in range(0, recv.size, count):
        target = flat_recv[low : low + count]
        yield (target if send is recv else flat_send[low : low + count]), target
