"""An all-reduce of large arrays: each rank reduces one share of the array and hands the result to the others.

Every message goes straight to the rank that needs it, 2 (n - 1) / n of the array per rank, and every wait
tests and yields. It is faster than the libraries' own non-blocking all-reduce from about 32 KiB a share. All
ranks get the same bits, floats included, because each share is reduced in one place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy.typing as npt
from mpi4py import MPI

from gccomm_mpi.failure import abandon
from gccomm_mpi.link import Link, Moves
from gccomm_mpi.operators import Operator

__all__ = ["PIECE_BYTES", "SHARE_BYTES", "by_mpi", "exchange", "exchange_in_order", "post", "swap_whole"]

# Smaller shares go faster by MPI's own all-reduce, larger arrays in pieces.
SHARE_BYTES = 1 << 15
PIECE_BYTES = 1 << 22

Array = npt.NDArray[Any]
Fold = Callable[[Sequence[Array], int, Array], None]


def by_mpi(link: Link, send: Array, recv: Array, operator: Operator) -> Moves:
    """Reduce `send` over the ranks into `recv` by MPI's own all-reduce; arguments as of :func:`exchange`."""
    datatype = operator.datatype
    first: Any = MPI.IN_PLACE if send is recv else (send, datatype)
    request = link.comm.Iallreduce(first, (recv, datatype), operator.op)
    try:
        yield request.Test
    except BaseException:
        abandon((request, send, recv))
        raise


def exchange(
    link: Link, send: Array, recv: Array, operator: Operator, segment_bytes: int | None = None
) -> Moves:
    """Reduce `send` over the ranks into `recv`.

    Parameters
    ----------
    link : Link
        Of at least two ranks.
    send, recv : array, shape (n,)
        The same array or apart.
    operator : Operator
        Fits the arrays.
    segment_bytes : int, optional
        Most of a message (default: the link's).

    Yields
    ------
    callable
        A test that is to come true before the generator is resumed. All requests and arrays of one that is
        closed before its end are kept for good.
    """
    limit = segment_bytes or link.segment_bytes
    if link.comm.size == 2:
        yield from _swap(link, send, recv, operator, limit)
        return
    shares, rank = _shares(recv.size, link.comm.size), link.comm.rank
    mine, tag = shares[rank], link.next_tag()
    requests: list[Any] = []
    width = (len(shares) - 1) * (mine.stop - mine.start)
    with link.memory(recv.dtype, width, requests, send, recv) as scratch:
        parts = [send[s] for s in shares]
        yield from _reduce(link, tag, parts, recv[mine], operator, scratch, requests, limit)
        yield from _gather(link, tag, [recv[s] for s in shares], operator.datatype, requests, limit)


def _swap(link: Link, send: Array, recv: Array, operator: Operator, limit: int) -> Moves:
    """Two ranks: each takes the other's array and adds it: as many bytes, half the waits.

    Both operators and IEEE addition commute, so the two get the same bits (of NaN the payload may differ).
    What has come is added while the rest is on its way, in place once it has left.
    """
    peer, datatype, tag = 1 - link.comm.rank, operator.datatype, link.next_tag()
    step = max(1, limit // recv.itemsize)
    requests: list[Any] = []
    with link.memory(recv.dtype, recv.size, requests, send, recv) as other:
        coming = post(link.comm.Irecv, other, datatype, peer, tag, limit)
        going = post(link.comm.Isend, send, datatype, peer, tag, limit)
        requests += coming + going
        for low, come, left in zip(range(0, recv.size, step), coming, going, strict=True):
            yield come.Test
            if send is recv:
                yield left.Test
            part = slice(low, low + step)
            operator.combine(send[part], other[part], recv[part])
        if send is not recv:
            for request in going:
                yield request.Test


def swap_whole(
    link: Link, send: Array, recv: Array, operator: Operator, wait: Callable[[Any, str], None], name: str
) -> None:
    """Reduce `send` over two ranks into `recv` as :func:`exchange` does, by one message each way, and wait.

    What takes time here besides the messages is Python: nothing is resumed and nothing is cut.
    """
    comm, datatype, tag = link.comm, operator.datatype, link.next_tag()
    peer, nbytes = 1 - comm.rank, recv.nbytes
    room = link.take(nbytes)
    coming = going = None
    try:
        other = room[:nbytes].view(recv.dtype)
        coming = comm.Irecv((other, datatype), peer, tag)
        going = comm.Isend((send, datatype), peer, tag)
        wait(coming, name)
        if send is recv:
            wait(going, name)
        operator.combine(send, other, recv)
        if send is not recv:
            wait(going, name)
    except BaseException:
        abandon((room, coming, going, send, recv))
        raise
    link.give_back(room)


def exchange_in_order(link: Link, words: Array, first: int, fold: Fold) -> Moves:
    """Reduce `words` over the ranks, in place, by a function that gets the parts of all ranks at once.

    Parameters
    ----------
    link : Link
        Of at least two ranks.
    words : array of uint32, shape (n,)
        Any size, as small as may be.
    first : int
        Number of its first word in the whole array.
    fold : callable
        ``fold(parts, start, out)``: reduces the parts of all ranks, in rank order, which begin at word
        `start` of the whole array, to `out`, which may be one of them; may overwrite the parts. Each share is
        folded on one rank, or, the same way, on both of two.
    """
    comm, tag = link.comm, link.next_tag()
    # Of two ranks each takes the other's whole array: as many bytes, half the waits.
    shares = [slice(0, words.size)] * 2 if comm.size == 2 else _shares(words.size, comm.size)
    mine = shares[comm.rank]
    requests: list[Any] = []
    with link.memory(words.dtype, (comm.size - 1) * (mine.stop - mine.start), requests, words) as scratch:
        parts = _collect(link, tag, [words[share] for share in shares], scratch, requests)
        for request in requests:
            yield request.Test
        requests.clear()
        fold(parts, first + mine.start, words[mine])
        if comm.size > 2:
            parts = [words[share] for share in shares]
            yield from _gather(link, tag, parts, MPI.UINT32_T, requests, link.segment_bytes)


def _collect(link: Link, tag: int, shares: list[Array], scratch: Array, requests: list[Any]) -> list[Array]:
    """Begin to send every other rank its share; return where all ranks' parts of this rank's will be, in rank
    order.
    """
    comm, rank, size, limit = link.comm, link.comm.rank, link.comm.size, link.segment_bytes
    width = shares[rank].size
    parts = [scratch[place * width : (place + 1) * width] for place in range(size - 1)]
    parts.insert(rank, shares[rank])
    for hop in range(1, size):
        peer = (rank - hop) % size
        requests += post(comm.Irecv, parts[peer], MPI.UINT32_T, peer, tag, limit)
    for hop in range(1, size):
        peer = (rank + hop) % size
        requests += post(comm.Isend, shares[peer], MPI.UINT32_T, peer, tag, limit)
    return parts


def post(start: Callable[..., Any], part: Array, datatype: Any, peer: int, tag: int, limit: int) -> list[Any]:
    """Start sends or receives of a part in segments of at most `limit` bytes; return the requests."""
    step = max(1, limit // part.itemsize)
    pieces = [part[low : low + step] for low in range(0, part.size, step)]
    return [start((piece, datatype), peer, tag) for piece in pieces]


def _shares(length: int, size: int) -> list[slice]:
    """Cut `length` into one share per rank, on multiples of 32 elements where it can."""
    cuts = [length * place // size // 32 * 32 for place in range(size)] + [length]
    return [slice(low, high) for low, high in pairwise(cuts)]


def _reduce(
    link: Link,
    tag: int,
    parts: list[Array],
    total: Array,
    operator: Operator,
    scratch: Array,
    requests: list[Any],
    limit: int,
) -> Moves:
    """Send every other rank its part, and add up the parts of this rank's share in `total`."""
    comm, rank, size, width = link.comm, link.comm.rank, link.comm.size, total.size
    datatype = operator.datatype
    arrived = [scratch[hop * width : (hop + 1) * width] for hop in range(size - 1)]
    ends = []  # of each hop's requests
    for hop, room in enumerate(arrived, 1):
        requests += post(comm.Irecv, room, datatype, (rank - hop) % size, tag, limit)
        ends.append(len(requests))
    for hop in range(1, size):
        peer = (rank + hop) % size
        requests += post(comm.Isend, parts[peer], datatype, peer, tag, limit)
    done = 0
    for hop, room in enumerate(arrived):
        for request in requests[done : ends[hop]]:
            yield request.Test
        done = ends[hop]
        operator.combine(total if hop else parts[rank], room, total)
    for request in requests[done:]:
        yield request.Test
    requests.clear()


def _gather(
    link: Link, tag: int, shares: list[Array], datatype: Any, requests: list[Any], limit: int
) -> Moves:
    """Send this rank's share to every other rank, and take theirs."""
    comm, rank, size = link.comm, link.comm.rank, link.comm.size
    for hop in range(1, size):
        peer = (rank - hop) % size
        requests += post(comm.Irecv, shares[peer], datatype, peer, tag, limit)
    for hop in range(1, size):
        peer = (rank + hop) % size
        requests += post(comm.Isend, shares[rank], datatype, peer, tag, limit)
    for request in requests:
        yield request.Test
