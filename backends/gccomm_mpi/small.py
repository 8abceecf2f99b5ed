"""Small arrays over links: whole ones are swapped, among few ranks in one round, else in log2(n).

Latency is what these cost, so that nothing is chosen, cut or begun early here. Ranks need not even hold
equally much: receives are as large as any array may be. So the first message of a call may carry, behind the
header that proves that all ranks make the same call, what is of one length only if they do.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gccomm import kernels
from gccomm.kernels import JOININGS
from gccomm_mpi.failure import abandon
from gccomm_mpi.halving import Folding
from gccomm_mpi.operators import Operator
from gccomm_mpi.round import FEW, Round
from gccomm_mpi.swaps import Swaps

if TYPE_CHECKING:
    from gccomm_mpi.channel import Channel
    from gccomm_mpi.link import Link

__all__ = ["ROOM_BYTES", "SMALL_BYTES", "Small"]

SMALL_BYTES = 8 << 10
ROOM_BYTES = SMALL_BYTES + (1 << 10)  # for first messages that have a header and whole arrays

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
        self._room = np.empty(ROOM_BYTES, np.uint8)

    @cached_property
    def round(self) -> Round | None:
        """What all messages of few ranks go by."""
        comm = self._link.comm
        return Round(self._channel, comm, ROOM_BYTES) if 1 < comm.size <= FEW else None

    @cached_property
    def swaps(self) -> Swaps | None:
        """Calls on arrays that few ranks swap."""
        comm = self._link.comm
        return None if self.round is None else Swaps(self.round, comm.rank, comm.size)

    def free(self) -> None:
        """Give requests back to MPI."""
        if "round" in vars(self) and self.round is not None:
            self.round.free()

    def reduce(self, name: str, data: Array, operator: Operator) -> None:
        """Reduce `data`, shape (n,), over the ranks in place.

        Where ranks hold arrays of different lengths, the elements that all of them hold are reduced.
        """
        if self.round is not None:
            self._exchange(self.round, name, data, operator)
            return
        try:
            self._reduce(name, data, operator)
        except BaseException:
            abandon((self._room, data))
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

    @staticmethod
    def _exchange(messages: Round, name: str, data: Array, operator: Operator) -> None:
        """Send all other ranks the whole array, and reduce all in the order of the ranks."""
        nbytes = data.nbytes
        messages.mine[:nbytes] = data.view(np.uint8)
        messages.run(name, nbytes)
        table, ranks, kind = messages.table, len(messages.messages), JOININGS[operator.kind]
        kernels.join_parts(table, ranks, kernels.address(data), data.size, kind)

    def _send(self, name: str, data: Array, datatype: Any, tag: int) -> None:
        request = self._link.comm.Isend((data, datatype), self._folding.mate, tag)
        self._channel.complete(request, name)

    def _receive(self, name: str, room: Array, datatype: Any, tag: int) -> None:
        request = self._link.comm.Irecv((room, datatype), self._folding.mate, tag)
        self._channel.complete(request, name)
