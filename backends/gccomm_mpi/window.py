"""Memory that the ranks of one host share, and reductions through it: nothing is copied through MPI.

Every rank owns a region: a flag and two slots, used in turns. To reduce, it writes its data into a slot, or
has its words encoded right there, and raises its flag to the number of the message. When all flags are up, it
joins all ranks' slots into an array of its own (one shot), or, of large data on many ranks, joins its share
in place, raises its flag again, and collects the shares (two shots). A slot may be written again as soon as
all flags have come to the message in between: whoever has raised it has done with the one before.

All ranks join in the order of the ranks, so that they get the same bits, floats included.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from gccomm import kernels
from gccomm.kernels import JOININGS

__all__ = ["Window", "open_window", "slot_bytes"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

HEAD_BYTES = 4096  # the flag, and a token that tells that this is the right memory
SLOT_BYTES = (2 << 20) + (1 << 17)  # words of a piece in lanes of 16 bits, with check words
MOST_BYTES = 512 << 20  # of all ranks together
CHUNK_BYTES = 512 << 10  # of data that are copied into a slot
SHARED_BYTES = 64 << 10  # from here on more than three ranks join one share each
STREAM_BYTES = 8 << 20  # results of this size are written past the caches

_TOKEN = slice(64, 80)
_FLAG_MASK = 0xFFFFFFFF


class Window:
    """The regions of all ranks, as this process sees them.

    Attributes
    ----------
    slot_bytes : int
        Size of a slot, equal on all ranks.
    """

    def __init__(
        self, rank: int, regions: list[Bytes], until: Callable[[Callable[[], Any], str], None]
    ) -> None:
        self.slot_bytes = (len(regions[0]) - HEAD_BYTES) // 2
        self._rank, self._size, self._until = rank, len(regions), until
        starts = [HEAD_BYTES, HEAD_BYTES + self.slot_bytes]
        self._slots = [[region[at : at + self.slot_bytes] for region in regions] for at in starts]
        self._tables = [np.array([kernels.address(s) for s in slots], np.uint64) for slots in self._slots]
        self._flags = np.array([kernels.address(region) for region in regions], np.uint64)
        self._flag, self._watched = int(self._flags[rank]), kernels.address(self._flags)
        self._turn = self._number = 0

    def room(self, nbytes: int) -> Bytes | None:
        """Return this rank's next slot, if so many bytes fit: what is joined from there is not copied.

        It keeps what is written into it until the next reduction.
        """
        return self._slots[self._turn][self._rank][:nbytes] if nbytes <= self.slot_bytes else None

    def join(self, name: str, send: Array, recv: Array, kind: str) -> None:
        """Reduce `send` over the ranks into `recv`, which may be the same array.

        Parameters
        ----------
        name : str
            The operation, for reports.
        send, recv : array, shape (n,)
            `send` may be of the memory that :meth:`room` gave.
        kind : str
            One of :data:`gccomm.kernels.JOININGS`.
        """
        send, recv = send.reshape(-1), recv.reshape(-1)
        streams = kernels.address(send) != kernels.address(recv) and recv.nbytes >= STREAM_BYTES
        in_place = kernels.address(send) == int(self._tables[self._turn][self._rank])
        step = (self.slot_bytes if in_place else min(CHUNK_BYTES, self.slot_bytes)) // recv.itemsize
        for low in range(0, recv.size, step):
            self._message(name, send[low : low + step], recv[low : low + step], JOININGS[kind], streams)

    def collect(self, name: str, send: Array, recv: Array, kind: str) -> None:
        """Reduce `send`, of at most a slot, over the ranks into `recv` on the first rank alone."""
        turn = self._offer(name, send)
        if self._rank == 0:
            table, out = self._tables[turn], kernels.address(recv)
            kernels.join_parts(kernels.address(table), self._size, out, recv.size, JOININGS[kind])

    def spread(self, name: str, data: Array) -> None:
        """Overwrite `data`, of at most a slot, with that of the first rank."""
        turn = self._offer(name, data if self._rank == 0 else data[:0])
        if self._rank != 0:
            data[...] = self._slots[turn][0][: data.nbytes].view(data.dtype)

    def _offer(self, name: str, data: Array) -> int:
        """Put data into this rank's slot and meet the others; return which of the two slots it is."""
        turn = self._turn
        mine = self._slots[turn][self._rank][: data.nbytes].view(data.dtype)
        if kernels.address(mine) != kernels.address(data):
            mine[...] = data
        self._turn = 1 - turn
        self._meet(name)
        return turn

    def _message(self, name: str, send: Array, recv: Array, kind: int, streams: bool) -> None:
        turn, size = self._offer(name, send), self._size
        if size > 3 and recv.nbytes >= SHARED_BYTES:
            self._in_shares(name, turn, recv, kind)
            return
        table = self._tables[turn]
        kernels.join_parts(kernels.address(table), size, kernels.address(recv), recv.size, kind, streams)

    def _in_shares(self, name: str, turn: int, recv: Array, kind: int) -> None:
        """Join this rank's share in its slot and collect all shares."""
        slots = [slot[: recv.nbytes].view(recv.dtype) for slot in self._slots[turn]]
        align = 64 // recv.itemsize
        cuts = [recv.size * r // self._size // align * align for r in range(self._size)] + [recv.size]
        low, high = cuts[self._rank], cuts[self._rank + 1]
        table = self._tables[turn] + np.uint64(low * recv.itemsize)
        where = kernels.address(slots[self._rank][low:])
        kernels.join_parts(kernels.address(table), self._size, where, high - low, kind)
        self._meet(name)
        for slot, (first, end) in zip(slots, pairwise(cuts), strict=True):
            recv[first:end] = slot[first:end]

    def _meet(self, name: str) -> None:
        """Raise this rank's flag and wait for the others'."""
        self._number = number = self._number + 1 & _FLAG_MASK
        kernels.raise_flag(self._flag, number)
        watched, size = self._watched, self._size
        self._until(lambda: kernels.await_flags(watched, size, number, 20), name)


def open_window(
    comm: Any, until: Callable[[Callable[[], Any], str], None], ranks: int
) -> tuple[Window | None, str]:
    """Make the window of ranks on one host; collective.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks.
    until : callable
        ``until(test, name)`` waits until ``test()`` is true.
    ranks : int
        The most that any host has: it limits the size of slots.

    Returns
    -------
    window : Window or None
        None on all ranks where any of them cannot see the memory of another.
    reason : str
        Why, then.
    """
    slot = slot_bytes(ranks)
    mine, own, problem = -1, b"", ""
    try:
        mine, own = _make(HEAD_BYTES + 2 * slot)
    except (OSError, AttributeError) as error:
        problem = f"no shared memory: {error}"
    peers = comm.allgather((os.getpid(), mine, own))
    regions: list[Bytes] = []
    try:
        if not problem:
            regions = [_see(pid, fd, token, HEAD_BYTES + 2 * slot) for pid, fd, token in peers]
    except (OSError, ValueError) as error:
        problem = f"the memory of another rank cannot be seen: {error}"
    problems = [p for p in comm.allgather(problem) if p]  # all have mapped, or given up
    if mine >= 0:
        os.close(mine)
    if problems:
        return None, problems[0]
    return Window(comm.rank, regions, until), ""


def slot_bytes(ranks: int) -> int:
    """Return the size of a slot where no host has more than so many ranks."""
    return min(SLOT_BYTES, MOST_BYTES // (2 * ranks)) // 64 * 64


def _make(nbytes: int) -> tuple[int, bytes]:
    """Return a new region's file, whose memory is reserved, and its token."""
    fd = os.memfd_create("gccomm", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, nbytes)  # or else too little memory would be a signal later
        token = secrets.token_bytes(_TOKEN.stop - _TOKEN.start)
        os.pwrite(fd, token, _TOKEN.start)
    except BaseException:
        with suppress(OSError):
            os.close(fd)
        raise
    return fd, token


def _see(pid: int, fd: int, token: bytes, nbytes: int) -> Bytes:
    """Map another process's region; OSError or ValueError where that is not possible, or not the same."""
    if fd < 0:
        raise ValueError("another rank has none")
    seen = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        region = np.frombuffer(mmap.mmap(seen, nbytes), np.uint8)
    finally:
        os.close(seen)
    if region[_TOKEN].tobytes() != token:
        raise ValueError(f"/proc/{pid} is not the process of that rank")
    return region
