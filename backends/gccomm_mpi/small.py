"""Small arrays over links: whole ones are swapped, in log2(n) rounds, among three ranks in one.

Latency is what these cost, so that nothing is chosen, cut or begun early here. Ranks need not even hold
equally much: receives are as large as any array may be. So the first message of a call may carry, behind the
header that proves that all ranks make the same call, what is of one length only if they do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gccomm_mpi.failure import abandon
from gccomm_mpi.halving import Folding
from gccomm_mpi.operators import Operator

if TYPE_CHECKING:
    from gccomm_mpi.channel import Channel
    from gccomm_mpi.link import Link

__all__ = ["SMALL_BYTES", "Small"]

SMALL_BYTES = 8 << 10

Array = npt.NDArray[Any]


class Small:
    """Reductions of arrays of at most `SMALL_BYTES`.

    Parameters
    ----------
    channel : Channel
        Whose waits these are.
    link : Link
        What they go over.
    """

    def __init__(self, channel: Channel, link: Link) -> None:
        self._channel, self._link, self._folding = channel, link, Folding(link)
        place = self._folding.place
        bits = [1 << k for k in range(self._folding.rounds)]
        self._rounds = [(self._folding.rank_of(place ^ bit), place & bit == 0) for bit in bits]
        self._room = np.empty(SMALL_BYTES, np.uint8)
        rank, size = link.comm.rank, link.comm.size
        peers = [(rank + hop) % size for hop in range(1, size)] if size == 3 else []
        self._rooms = {peer: np.empty(SMALL_BYTES, np.uint8) for peer in peers}

    def reduce(self, name: str, data: Array, operator: Operator) -> None:
        """Reduce `data`, shape (n,), over the ranks in place.

        Where ranks hold arrays of different lengths, the elements that all of them hold are reduced.
        """
        try:
            (self._exchange if self._rooms else self._reduce)(name, data, operator)
        except BaseException:
            abandon((self._room, self._rooms, data))
            raise

    def _reduce(self, name: str, data: Array, operator: Operator) -> None:
        folding, tag, datatype = self._folding, self._link.next_tag(), operator.datatype
        other = self._room.view(data.dtype)
        theirs = other[: data.size]
        if folding.gives:
            self._send(name, data, datatype, tag)
            self._receive(name, other, datatype, tag)
            data[...] = theirs
            return
        if folding.takes:
            self._receive(name, other, datatype, tag)
            operator.combine(data, theirs, data)
        comm, complete = self._link.comm, self._channel.complete
        for peer, lower in self._rounds:
            coming = comm.Irecv((other, datatype), peer, tag)
            going = comm.Isend((data, datatype), peer, tag)
            complete(coming, name)
            complete(going, name)
            if lower:  # in one order on both: formats may not commute
                operator.combine(data, theirs, data)
            else:
                operator.combine(theirs, data, theirs)
                data[...] = theirs
        if folding.takes:
            self._send(name, data, datatype, tag)

    def _exchange(self, name: str, data: Array, operator: Operator) -> None:
        """Send all other ranks the whole array, and reduce all in the order of the ranks."""
        comm, tag, datatype = self._link.comm, self._link.next_tag(), operator.datatype
        parts = {peer: room.view(data.dtype) for peer, room in self._rooms.items()}
        requests = [comm.Irecv((part, datatype), peer, tag) for peer, part in parts.items()]
        requests += [comm.Isend((data, datatype), peer, tag) for peer in parts]
        for request in requests:
            self._channel.complete(request, name)
        first, *others = (parts.get(rank, data)[: data.size] for rank in range(comm.size))
        for other in others:
            operator.combine(first, other, first)
        if comm.rank != 0:
            data[...] = first

    def _send(self, name: str, data: Array, datatype: Any, tag: int) -> None:
        request = self._link.comm.Isend((data, datatype), self._folding.mate, tag)
        self._channel.complete(request, name)

    def _receive(self, name: str, room: Array, datatype: Any, tag: int) -> None:
        request = self._link.comm.Irecv((room, datatype), self._folding.mate, tag)
        self._channel.complete(request, name)
