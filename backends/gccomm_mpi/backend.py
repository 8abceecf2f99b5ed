"""The operations of a group of MPI processes."""

from __future__ import annotations

import os
from typing import Any

import numpy.typing as npt
from mpi4py import MPI

from gccomm import kernels
from gccomm.backends import Activity, Backend, Bytes, FloatName, OnChannel, Words
from gccomm.errors import BackendError
from gccomm.hosts import Hosts
from gccomm.operations import PROVIDED, check_operation
from gccomm.steps import Fold
from gccomm_mpi.channel import Channel, Operation, cached, thread_refusal
from gccomm_mpi.exchange import PIECE_BYTES
from gccomm_mpi.failure import abort_job, guard
from gccomm_mpi.hierarchy import Between, Column, Shared
from gccomm_mpi.link import Flight
from gccomm_mpi.messages import pieces
from gccomm_mpi.operators import MAXIMUM, SUM, Operator, sum_of
from gccomm_mpi.small import SMALL_BYTES
from gccomm_mpi.swaps import swap_bytes
from gccomm_mpi.window import FEW_RANKS, WORDS, Posted

__all__ = ["MpiBackend", "open_backend"]

Array = npt.NDArray[Any]


class MpiBackend(OnChannel):
    """A handle on a communicator of gccomm's own; see `gccomm.backends.Backend` for the operations.

    Every wait, whatever the size, tests a request or a flag and gives the core away between tests, reports a
    stall and obeys ``GCCOMM_TIMEOUT_S``. Ranks of one host reduce through `gccomm_mpi.window`, ranks of
    several hosts through `gccomm_mpi.messages`, where reductions that were begun go on in every wait.
    """

    name = "mpi"
    operations = PROVIDED
    _channel: Channel

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._closed = False
        channel.users += 1
        self.rank: int = channel.comm.rank
        self.size: int = channel.comm.size
        self.local_rank: int = channel.local_rank
        self.one_host: bool = channel.one_host
        self.hosts: Hosts | None = channel.hosts

    @property
    def no_window(self) -> str:
        """Why ranks of a host do not reduce through common memory; empty where they do, or need not."""
        return self._channel.no_window

    @property
    def no_threads(self) -> str:
        """Why no second thread may call MPI; empty where one may, at any time."""
        return thread_refusal()

    @property
    def first_words(self) -> int:
        """Most words that :meth:`maximum` and :meth:`sum_words` take where ranks hold different numbers of
        them, and reduce as far as all have some; 0: they do not. Equal on all ranks.
        """
        return 0 if self._channel.window is not None or self.size == 1 else SMALL_BYTES // 4

    def maximum(self, words: Words, /) -> None:
        """Replace each word by its maximum over the ranks, as unsigned numbers."""
        self._reduce("maximum", words, words, MAXIMUM)

    def sum_words(self, words: Words, /) -> None:
        """Replace each word by its sum over the ranks, mod 2^32."""
        self._reduce("sum", words, words, SUM)

    def room(self, nbytes: int, /) -> Bytes | None:
        """Return memory for the words or floats of the next sum, if it saves a copy that they are there."""
        hierarchy = self._channel.hierarchy
        window = self._channel.window if hierarchy is None else hierarchy.window
        return None if window is None else window.room(nbytes)

    def sum_into(self, words: Words, out: Words, /) -> None:
        """Write the sum of `words` over the ranks, mod 2^32, to `out`."""
        self._reduce("sum", words, out, SUM)

    @property
    def slow_links(self) -> bool:
        """Whether this rank has timed sums over links between hosts, and these are slow."""
        return not self.one_host and self._channel.chooser.slow

    @property
    def sums_lanes(self) -> bool:
        """Whether :meth:`sum_lanes` is the best way: equal on all ranks."""
        return self._channel.window is not None and self.size <= FEW_RANKS

    def sum_lanes(self, job: Array, /) -> tuple[float, float]:
        """Agree on the scales of blocks and sum their lanes.

        `job` is a :data:`gccomm.kernels.LANES` record; returns the seconds of encoding and of decoding.
        """
        with self._operation("sum of lanes", job) as channel:
            if channel.window is not None:
                return channel.window.sum_lanes("sum of lanes", job)
            assert channel.messages.small.swaps is not None
            return channel.messages.small.swaps.lanes("sum of lanes", job)

    @property
    def call_bytes(self) -> int:
        """Bytes of floats that :meth:`sum_call` reduces at once; 0: there is none. Equal on all ranks."""
        window = self._channel.window
        return window.chunk_bytes if window is not None and self.size <= FEW_RANKS else 0

    def sum_call(self, job: Array, /) -> tuple[bool, float, float]:
        """Agree on the header of a call, and sum its lanes or floats, without Python in between.

        `job` is a :data:`gccomm.kernels.CALL` record; returns whether all ranks make this call (if not,
        nothing was summed), and the seconds of encoding and of decoding.
        """
        with self._operation("call", job) as channel:
            if channel.window is not None:
                return channel.window.sum_call("call", job)
            assert channel.messages.small.swaps is not None
            return channel.messages.small.swaps.call("call", job)

    @property
    def swap_bytes(self) -> int:
        """Up to how many bytes of an array :meth:`sum_call` takes over links, where ranks swap it whole, and
        :meth:`sum_lanes`, too; 0: none. Equal on all ranks.
        """
        return swap_bytes(self.size) if self.first_words and self._channel.hierarchy is None else 0

    def begin(self, kind: str, send: Array, recv: Array, /) -> Posted | Flight | Shared | None:
        """Begin a reduction, "maximum", "words" or a float format; None if it is complete already.

        Several may be on their way. Their arrays are left alone until :meth:`end`. All ranks must begin and
        end them in the same order, with no other call between :meth:`room` and the sum that goes from there.
        """
        operator = {"maximum": MAXIMUM, "words": SUM}.get(kind) or sum_of(kind)  # type: ignore[arg-type]
        name = kind if kind == "maximum" else "sum" if kind == "words" else f"{kind} sum"
        window, hierarchy, messages = self._channel.window, self._channel.hierarchy, self._channel.messages
        flat = recv.reshape(-1)
        source = flat if send is recv else send.reshape(-1)
        chunked = window is not None and operator.kind not in WORDS and window.chunks(recv.nbytes)
        if window is not None and recv.nbytes <= window.slot_bytes and not chunked:
            with self._operation(name, (send, recv)):
                return window.post(name, source, flat, operator.kind)
        short = 0 < recv.nbytes <= PIECE_BYTES and recv.size <= messages.max_count
        if hierarchy is not None and short:
            with self._operation(name, (send, recv)):
                return hierarchy.begin(name, source, flat, operator)
        if window is None and hierarchy is None and self.size > 1 and short:
            with self._operation(name, (send, recv)):
                return messages.begin(name, source, flat, operator)
        self._reduce(name, send, recv, operator)
        return None

    def end(self, handle: Posted | Flight | Shared, /) -> None:
        """Complete a reduction that was begun."""
        if isinstance(handle, Shared):
            with self._operation(handle.name, handle.recv) as channel:
                if handle.flight is not None:
                    channel.land(handle.flight)
                assert channel.hierarchy is not None
                channel.hierarchy.share(handle.name, handle.recv, handle.place)
            return
        if isinstance(handle, Flight):
            with self._operation(handle.name, handle.buffers) as channel:
                channel.land(handle)
            return
        with self._operation(handle.name, handle.recv) as channel:
            assert channel.window is not None
            channel.window.finish(handle)

    def go_on(self) -> bool:
        """Let reductions on their way go on, without waiting, here and on ranks that share this one's core;
        return whether there are any.
        """
        with self._operation("reductions on their way", None) as channel:
            channel.go_on()
            os.sched_yield()
            return bool(channel.flights)

    def sum_floats(self, send: Array, recv: Array, dtype: FloatName, /) -> None:
        """Write the sum of `send` over the ranks to `recv`; its order depends on size and library.

        Raises
        ------
        ValueError
            `dtype` is no float format.
        """
        operator = sum_of(dtype)
        if send is not recv and kernels.address(send) == kernels.address(recv):
            send = recv  # two views of one array: MPI wants to be told
        self._reduce(f"{dtype} sum", send, recv, operator)

    def _reduce(self, name: str, send: Array, recv: Array, operator: Operator) -> None:
        with self._operation(name, (send, recv)) as channel:
            if channel.window is not None:
                channel.window.join(name, send, recv, operator.kind)
            elif channel.hierarchy is not None:
                channel.hierarchy.reduce(name, send, recv, operator)
            else:
                channel.messages.reduce(name, send, recv, operator)

    def combine_words(self, words: Words, operation: str, seed: int, /) -> None:
        """Reduce the words over the ranks by an operation of gccomm's own, through gccomm's exchange.

        Raises
        ------
        ValueError
            There is no such operation, or `seed` is no 32-bit word.
        """
        check_operation(operation, seed)
        name = f"reduction `{operation}`"
        with self._operation(name, words) as channel:
            channel.messages.combine(name, operation, seed, words)

    def host_sum(self, send: Array, recv: Array | None, dtype: FloatName, place: int, /) -> None:
        """Write the sum of `send` over the ranks of each host, in their order, to `recv` of the one at a
        place.
        """
        name = f"{dtype} sum of a host"
        with self._operation(name, (send, recv)) as channel:
            assert channel.hierarchy is not None
            channel.hierarchy.gather(name, send, recv, sum_of(dtype).kind, place)

    def between(self, place: int, /) -> Between:
        """Return the reductions over the hosts in which the ranks at a place speak."""
        if self._closed:
            raise BackendError("a reduction between hosts: this communicator is closed")
        return Between(self._channel, place)

    @property
    def layered(self) -> list[int] | None:
        """The host of every rank, where hosts were asked to reduce first; None elsewhere, and on one host."""
        return self._channel.host_of if self._channel.layered else None

    def column(self) -> Column:
        """Return the reductions over the ranks at this one's place of all hosts; collective.

        Every host must have as many ranks.
        """
        with self._operation("making communicators", None) as channel:
            channel.arrive("making communicators")
            return Column(channel, channel.column())

    @property
    def broken(self) -> str | None:
        """Why the communicator cannot be used any more; None where it can."""
        return self._channel.broken

    def forsake(self, reason: str) -> None:
        """Take the communicator for broken, for a reason outside of MPI: closing it then waits for nobody."""
        self._channel.broken = self._channel.broken or reason

    @property
    def algorithms(self) -> list[str]:
        """One line for each choice of an algorithm that was made."""
        return self._channel.chooser.table()

    def fold_words(self, step: Fold, sent: Words, folded: Words, /) -> None:
        """Encode, fold over the ranks, and decode; `sent` and `folded` are memory for the words."""
        flight = self.begin_fold(step, sent, folded)
        if flight is not None:
            self.end(flight)

    def begin_fold(self, step: Fold, sent: Words, folded: Words, /) -> Flight | None:
        """Begin that; None if it is complete already. As of :meth:`begin`."""
        with self._operation("fold", (sent, folded)) as channel:
            return channel.messages.fold("fold", step, sent, folded)

    def broadcast(self, buffer: Bytes, root: int, /) -> None:
        """Overwrite `buffer` with that of rank `root`."""
        if not 0 <= root < self.size:
            message = f"`root` must be a rank from 0 to {self.size - 1}; got {root}"
            raise ValueError(message)
        with self._operation("broadcast", buffer) as channel:
            for _, piece in pieces(buffer, buffer, self._channel.messages.max_count):
                channel.complete(channel.comm.Ibcast((piece, MPI.BYTE), root), "broadcast")

    def split(self, color: int | None, key: int, /) -> Backend | None:
        """Make one group per color, ranks ordered by (key, rank); None gives None."""
        if color is not None and color < 0:
            message = f"`color` must be None or at least 0; got {color}"
            raise ValueError(message)
        with self._operation("split", None) as channel:
            channel.arrive("split")
            comm = channel.comm.Split(MPI.UNDEFINED if color is None else color, key)
            if comm == MPI.COMM_NULL:
                return None
            return type(self)(Channel(comm, hierarchical=self._channel.hierarchical))

    def close(self) -> None:
        """Release this handle; the last one on a communicator frees it, collectively, unless it is broken."""
        if self._closed:
            return
        self._closed = True
        self._channel.release()

    def abort(self, reason: str, /) -> None:
        """Print `reason` and end all processes of the job with exit status 1; not collective.

        Does nothing once MPI is finalised: there is no job left to end.
        """
        if not MPI.Is_finalized():
            abort_job(reason)

    def set_activity(self, activity: Activity, /) -> None:
        """Say what a stall report calls the present work: a text, or a function that makes one."""
        self._channel.patience.activity = activity

    def _operation(self, name: str, buffers: Any) -> Operation:
        if self._closed:
            message = f"{name}: this communicator is closed"
            raise BackendError(message)
        return Operation(self._channel, name, buffers)


def open_backend(comm: Any = None, hierarchical: bool | None = None) -> MpiBackend:
    """Return a handle on the channel of `comm`, by default of the world; see `gccomm_mpi.connect`."""
    parent = MPI.COMM_WORLD if comm is None else comm
    if not isinstance(parent, MPI.Intracomm):
        message = f"`comm` must be an mpi4py intracommunicator; got {type(parent).__name__}"
        raise TypeError(message)
    if parent == MPI.COMM_NULL:
        message = "`comm` was freed"
        raise ValueError(message)
    guard()
    channel = cached(parent, hierarchical)
    if channel.broken is not None:
        message = f"the communicator that gccomm keeps for this one is broken: {channel.broken}"
        raise BackendError(message)
    if channel.takes_cuda:
        from gccomm_mpi.cuda import CudaBackend

        return CudaBackend(channel)
    return MpiBackend(channel)
