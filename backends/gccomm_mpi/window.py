"""Memory that the ranks of one host share, and reductions through it: nothing is copied through MPI.

Every rank owns a region: flags and slots, used in turns. To reduce, it writes its data into a slot, or has
its words encoded right there, and raises its flag to the number of the message: the message is *posted*. When
all flags have come to that number, it joins all ranks' slots into an array of its own (one shot), or, of
large data on many ranks, joins its share in place, raises another flag, and collects the shares (two shots):
the message is *finished*. Work may be done in between, on a second message too. A third flag tells up to
which message a rank has finished: only then are slots written again.

All ranks join in the order of the ranks, so that they get the same bits, floats included.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from gccomm import kernels
from gccomm.errors import BackendError
from gccomm.kernels import EXCHANGE, JOININGS

__all__ = ["FEW_RANKS", "WORDS", "Posted", "Window", "open_window", "slot_bytes"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

HEAD_BYTES = 4096  # the flags, a line of the cache each, and a token that tells that this is the right memory
SLOTS = 4
SLOT_BYTES = (1 << 20) + (1 << 16)  # words of a piece in lanes of 16 bits, with check words
MOST_BYTES = 512 << 20  # of all ranks of a host together
CHUNK_BYTES = 256 << 10  # of data that are copied into a slot
OPEN = 3  # chunks of words that are on their way at once
FEW_RANKS = 3  # up to which each joins all data of the others
COPIED_BYTES = 16 << 10  # up to which few ranks copy data into their slots
SHARED_BYTES = 64 << 10  # from here on more ranks join one share each
STREAM_BYTES = 4 << 20  # results of this size are written past the caches

WORDS = ("words", "maximum")
_POSTED, _SHARED, _FINISHED = 0, 64, 128  # places of the flags
_TOKEN = slice(256, 272)
_MASK = 0xFFFFFFFF
_PROGRESS = sum(EXCHANGE[i].itemsize for i in range(list(EXCHANGE.names or ()).index("posted")))
_DONE = 1  # what `exchange_call` returns where all ranks have made the call
_LOOKS, _LONG = 20, 500  # at a flag in one test; where this rank has a core of its own


@dataclass(frozen=True, eq=False, slots=True)
class Posted:
    """A message that is posted: its number, its slot, and what to do when all ranks have posted it."""

    number: int
    turn: int
    name: str
    recv: Array
    kind: int
    streams: bool


class Window:
    """The regions of all ranks, as this process sees them.

    Attributes
    ----------
    slot_bytes : int
        Size of a slot, equal on all ranks.
    """

    def __init__(
        self,
        rank: int,
        regions: list[Bytes],
        until: Callable[[Callable[[], Any], str], None],
        hurried: Callable[[], bool],
    ) -> None:
        self.slot_bytes = (len(regions[0]) - HEAD_BYTES) // SLOTS
        self._rank, self._size, self._until, self._hurried = rank, len(regions), until, hurried
        starts = [HEAD_BYTES + turn * self.slot_bytes for turn in range(SLOTS)]
        self._slots = [[region[at : at + self.slot_bytes] for region in regions] for at in starts]
        self._table = np.array([[kernels.address(s) for s in slots] for slots in self._slots], np.uint64)
        self._tables = list(self._table)
        heads = np.array([kernels.address(region) for region in regions], np.uint64)
        self._flags = {at: heads + np.uint64(at) for at in (_POSTED, _SHARED, _FINISHED)}
        self._number = self._shares = self._finished = 0  # of messages, mod 2^32
        self._open: list[Posted] = []  # posted and not finished
        spare = OPEN if self._size <= FEW_RANKS else 0
        self._apart = kernels.pool_empty(self.slot_bytes * spare)  # for words that are copied into slots
        self._state = self._shared_state()
        self._state_at = kernels.address(self._state)
        self._progress = self._state.view(np.uint8)[_PROGRESS:]
        # Views of its fields, which take less time than fields that are looked up by their names.
        self._before, self._spins, self._posted, self._ended, *self._seconds = (
            self._state[name] for name in ("number", "spins", "posted", "finished", "encode_s", "decode_s")
        )
        self._early: set[int] = set()  # messages that were finished before older ones

    def _shared_state(self) -> Array:
        """Return the record by which kernels exchange chunks."""
        state = np.zeros(1, EXCHANGE)
        state["slots"] = kernels.address(self._table)
        state["up"], state["down"] = (kernels.address(self._flags[at]) for at in (_POSTED, _FINISHED))
        state["own"], state["slot_bytes"] = kernels.address(self._apart), self.slot_bytes
        state["turns"], state["ranks"], state["rank"] = SLOTS, self._size, self._rank
        return state

    def room(self, nbytes: int) -> Bytes | None:
        """Return this rank's next slot, if so many bytes fit: what is posted from there is not copied.

        It keeps what is written into it until the next message is posted. None for few bytes, where a copy
        takes less time than messages that are posted and finished by Python.
        """
        if nbytes > self.slot_bytes or (nbytes <= COPIED_BYTES and self._size <= FEW_RANKS):
            return None
        return self._own("make room", nbytes)

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
        placed = kernels.address(send) == int(self._tables[self._turn][self._rank])
        # Ranks must make the same messages: all have words in their slots, but floats may lie anywhere.
        whole = placed and (kind in WORDS or recv.nbytes <= self.chunk_bytes)
        if not whole and self._size <= FEW_RANKS:
            self._in_chunks(name, send, recv, JOININGS[kind], streams)
            return
        step = (self.slot_bytes if whole else self.chunk_bytes) // recv.itemsize
        posted: list[Posted] = []
        for low in range(0, recv.size, step):
            part, target = send[low : low + step], recv[low : low + step]
            posted.append(self.post(name, part, target, kind, streams))
            if len(posted) == 2:
                self.finish(posted.pop(0))
        for message in posted:
            self.finish(message)

    def _in_chunks(self, name: str, send: Array, recv: Array, kind: int, streams: bool) -> None:
        """Post and finish chunk after chunk, without Python in between."""
        chunk = self.chunk_bytes // recv.itemsize
        arrays = kernels.address(send), kernels.address(recv), recv.size, recv.itemsize
        self._exchange(name, kernels.exchange_array, *arrays, chunk, kind, streams)

    def sum_lanes(self, name: str, job: Array) -> tuple[float, float]:
        """Agree on the scales of blocks and sum their lanes, as a :data:`gccomm.kernels.LANES` record says.

        Returns
        -------
        encode_s, decode_s : float
            Seconds that were not spent waiting.
        """
        self._exchange(name, kernels.exchange_lanes, kernels.address(job))
        encode_s, decode_s = self._seconds
        return float(encode_s[0]), float(decode_s[0])

    def sum_call(self, name: str, job: Array) -> tuple[bool, float, float]:
        """Make a call, as a :data:`gccomm.kernels.CALL` record says.

        Returns
        -------
        same : bool
            Whether all ranks make this call; if not, nothing was summed.
        encode_s, decode_s : float
            Seconds that were not spent waiting.
        """
        answer = self._exchange(name, kernels.exchange_call, kernels.address(job))
        encode_s, decode_s = self._seconds
        return answer == _DONE, float(encode_s[0]), float(decode_s[0])

    def _exchange(self, name: str, kernel: Callable[..., int], *arguments: Any) -> int:
        """Call a kernel until it returns something else than 0, and return that; each wait has a clock of its
        own.
        """
        for message in list(self._open):
            self.finish(message)
        self._progress.fill(0)
        self._before[0] = self._number
        self._spins[0] = _LOOKS if self._hurried() else _LONG
        answer = self._go_on(kernel, arguments) or self._go_on_until(name, kernel, arguments)
        self._number = self._finished = int(self._before[0]) + int(self._ended[0]) & _MASK
        return answer

    def _go_on(self, kernel: Callable[..., int], arguments: tuple[Any, ...]) -> int:
        try:
            return kernel(self._state_at, *arguments)
        except RuntimeError as error:
            raise BackendError(f"rank {self._rank}: {error}") from error

    def _go_on_until(self, name: str, kernel: Callable[..., int], arguments: tuple[Any, ...]) -> int:
        """Wait until that returns something else than 0."""
        answer = before = 0

        def come() -> int:
            """Return a number that grows with what has come."""
            return 2 * int(self._before[0]) + int(self._posted[0] + self._ended[0])

        def moves() -> bool:
            nonlocal answer
            answer = self._go_on(kernel, arguments)
            return answer != 0 or come() != before

        while not answer:
            before = come()
            self._until(moves, name)
        return answer

    def post(self, name: str, send: Array, recv: Array, kind: str, streams: bool = False) -> Posted:
        """Begin to reduce `send`, of at most a slot, into `recv`; two messages may be on their way."""
        turn = self._offer(name, send)
        message = Posted(self._number, turn, name, recv, JOININGS[kind], streams)
        self._open.append(message)
        return message

    def finish(self, message: Posted) -> None:
        """Wait until all ranks have posted a message, and reduce it, unless its slot was needed before."""
        if message not in self._open:
            return
        self._open.remove(message)
        self._come(_POSTED, message.number, message.name)
        if self._size > FEW_RANKS and message.recv.nbytes >= SHARED_BYTES:
            self._in_shares(message)
        else:
            self._join(message.turn, message.recv, message.kind, message.streams)
        self._done(message.number)

    @property
    def chunk_bytes(self) -> int:
        """What goes through a slot at once where there is more than fits."""
        return min(CHUNK_BYTES, self.slot_bytes)

    def chunks(self, nbytes: int) -> bool:
        """Return whether floats of so many bytes go chunk by chunk, which takes less time than one slot."""
        return self._size <= FEW_RANKS and nbytes > self.chunk_bytes

    def collect(self, name: str, send: Array, recv: Array | None, kind: str, root: int = 0) -> None:
        """Reduce `send`, of at most a slot, over the ranks into `recv` on the rank `root` alone; the others
        do not wait for it.
        """
        turn = self._offer(name, send)
        if self._rank == root and recv is not None:
            self._come(_POSTED, self._number, name)
            self._join(turn, recv, JOININGS[kind])
        self._done(self._number)

    def spread(self, name: str, data: Array, root: int = 0) -> None:
        """Overwrite `data`, of at most a slot, with that of the rank `root`."""
        turn = self._offer(name, data if self._rank == root else data[:0])
        if self._rank != root:
            self._come(_POSTED, self._number, name)
            data[...] = self._slots[turn][root][: data.nbytes].view(data.dtype)
        self._done(self._number)

    @property
    def _turn(self) -> int:
        return (self._number + 1) % SLOTS

    def _own(self, name: str, nbytes: int) -> Bytes:
        """Return this rank's next slot, once all ranks have finished what was in it."""
        while len(self._open) > 0 and (self._number + 1 - self._open[0].number) & _MASK >= SLOTS:
            self.finish(self._open[0])  # many messages have come after it
        self._come(_FINISHED, self._number + 1 - SLOTS, name)
        return self._slots[self._turn][self._rank][:nbytes]

    def _offer(self, name: str, data: Array) -> int:
        """Put data into this rank's next slot and raise the flag; return which slot it is."""
        turn, mine = self._turn, self._own(name, data.nbytes).view(data.dtype)
        if kernels.address(mine) != kernels.address(data):
            mine[...] = data
        self._number = self._number + 1 & _MASK
        self._raise(_POSTED, self._number)
        return turn

    def _join(self, turn: int, recv: Array, kind: int, streams: bool = False) -> None:
        table, out = kernels.address(self._tables[turn]), kernels.address(recv)
        kernels.join_parts(table, self._size, out, recv.size, kind, streams)

    def _in_shares(self, message: Posted) -> None:
        """Join this rank's share in its slot and collect all shares."""
        recv, item = message.recv, message.recv.itemsize
        slots = [slot[: recv.nbytes].view(recv.dtype) for slot in self._slots[message.turn]]
        align = 64 // item
        cuts = [recv.size * r // self._size // align * align for r in range(self._size)] + [recv.size]
        low, high = cuts[self._rank], cuts[self._rank + 1]
        table = self._tables[message.turn] + np.uint64(low * item)
        where = kernels.address(slots[self._rank][low:])
        kernels.join_parts(kernels.address(table), self._size, where, high - low, message.kind)
        self._shares = self._shares + 1 & _MASK
        self._raise(_SHARED, self._shares)
        self._come(_SHARED, self._shares, message.name)
        for slot, (first, end) in zip(slots, pairwise(cuts), strict=True):
            recv[first:end] = slot[first:end]

    def _done(self, number: int) -> None:
        self._early.add(number)
        while self._finished + 1 & _MASK in self._early:
            self._finished = self._finished + 1 & _MASK
            self._early.remove(self._finished)
        self._raise(_FINISHED, self._finished)

    def _raise(self, which: int, number: int) -> None:
        kernels.raise_flag(int(self._flags[which][self._rank]), number)

    def _come(self, which: int, number: int, name: str) -> None:
        """Wait until all ranks' flags have come to a number."""
        table, size, number = kernels.address(self._flags[which]), self._size, number & _MASK
        if not kernels.await_flags(table, size, number, 1):
            self._until(lambda: kernels.await_flags(table, size, number, _LOOKS), name)


def open_window(
    comm: Any,
    until: Callable[[Callable[[], Any], str], None],
    ranks: int,
    hurried: Callable[[], bool] = lambda: False,
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
    hurried : callable
        Whether a core is wanted by others, so that it should be given away after few looks.

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
        mine, own = _make(HEAD_BYTES + SLOTS * slot)
    except (OSError, AttributeError) as error:
        problem = f"no shared memory: {error}"
    peers = comm.allgather((os.getpid(), mine, own))
    regions: list[Bytes] = []
    try:
        if not problem:
            regions = [_see(pid, fd, token, HEAD_BYTES + SLOTS * slot) for pid, fd, token in peers]
    except (OSError, ValueError) as error:
        problem = f"the memory of another rank cannot be seen: {error}"
    problems = [p for p in comm.allgather(problem) if p]  # all have mapped, or given up
    if mine >= 0:
        os.close(mine)
    if problems:
        return None, problems[0]
    return Window(comm.rank, regions, until, hurried), ""


def slot_bytes(ranks: int) -> int:
    """Return the size of a slot where no host has more than so many ranks."""
    return min(SLOT_BYTES, MOST_BYTES // (SLOTS * ranks)) // 64 * 64


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
