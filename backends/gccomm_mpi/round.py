"""Short messages of every rank to all others, in one round: among few ranks nothing takes less time.

The requests are made once and started again, since making them costs as much as the message itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from gccomm import kernels
from gccomm_mpi.failure import abandon

if TYPE_CHECKING:
    from gccomm_mpi.channel import Channel

__all__ = ["FEW", "Round"]

FEW = 4  # ranks, at most
TAG = 15  # of all rounds: none begins before the last one is complete, so that they meet in order
KEPT = 32  # lengths whose requests are kept

Bytes = npt.NDArray[np.uint8]


class Round:
    """Messages of at most so many bytes between all ranks.

    Parameters
    ----------
    channel : Channel
        Whose waits these are.
    comm : mpi4py.MPI.Intracomm
        The ranks.
    nbytes : int
        Size of a message, at most. Those of one round may differ in length.

    Attributes
    ----------
    messages : list of array
        Every rank's message, uint8: this rank's before a round, and the others' after it.
    mine : array
        This rank's.
    table : int
        Address of the addresses of all, uint64.
    """

    def __init__(self, channel: Channel, comm: Any, nbytes: int) -> None:
        self._complete, self._comm = channel.complete, comm
        rank, size = comm.rank, comm.size
        self.messages: list[Bytes] = [kernels.pool_empty(nbytes) for _ in range(size)]
        self._addresses = np.array([kernels.address(m) for m in self.messages], np.uint64)
        self.mine, self.table = self.messages[rank], kernels.address(self._addresses)
        # What the next rank sends to this one first is sent first, and comes first.
        self._to = [(rank + hop) % size for hop in range(1, size)]
        sources = [(rank - hop) % size for hop in range(1, size)]
        self._receives = [comm.Recv_init((self.messages[r], MPI.BYTE), r, TAG) for r in sources]
        self._sends: dict[int, list[Any]] = {}  # by length, the last used one last

    def run(self, name: str, nbytes: int) -> None:
        """Send the first bytes of this rank's message to all, and wait for theirs."""
        requests = self._of(nbytes)
        try:
            MPI.Prequest.Startall(requests)
            for request in requests:
                self._complete(request, name)
        except BaseException:
            abandon((self.messages, requests))
            raise

    def free(self) -> None:
        """Give the requests back to MPI."""
        for request in (*self._receives, *(q for sends in self._sends.values() for q in sends)):
            request.Free()
        self._receives, self._sends = [], {}

    def _of(self, nbytes: int) -> list[Any]:
        """Return the requests, receives first."""
        sends = self._sends.pop(nbytes, None)
        if sends is None:
            while len(self._sends) >= KEPT:
                for request in self._sends.pop(next(iter(self._sends))):
                    request.Free()
            sends = [self._comm.Send_init((self.mine[:nbytes], MPI.BYTE), r, TAG) for r in self._to]
        self._sends[nbytes] = sends
        return [*self._receives, *sends]
