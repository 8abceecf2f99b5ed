"""One private communicator, the handles on it, and the waits on it."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from gccomm.backends import Patience
from gccomm.errors import BackendError
from gccomm_mpi.choice import Chooser
from gccomm_mpi.exchange import by_mpi, exchange
from gccomm_mpi.failure import abandon, abort_job
from gccomm_mpi.hierarchy import Hierarchy, Leaders
from gccomm_mpi.ring import SEGMENT_BYTES, ring
from gccomm_mpi.window import Window, open_window, slot_bytes

__all__ = ["Channel", "Operation", "cached", "thread_refusal"]

# Tests before the first yield where all ranks share a host and may have a core each: about 50 us.
SPINS = 100

# A wait this long is for a rank that computes, no longer for the wire: leave it the core.
YIELD_S = 0.05
NAP_S = 5e-5


ALGORITHMS = {"ring": ring, "direct": exchange, "mpi": by_mpi}


class Channel:
    """A communicator of gccomm's own, shared by all handles on one parent.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Owned by the channel. Making the channel is collective on it.
    parent : mpi4py.MPI.Intracomm, optional
        The communicator in whose attributes the channel is cached.
    """

    def __init__(self, comm: Any, parent: Any = None) -> None:
        self.comm = comm
        self.parent = parent
        self.users = 0
        self.broken: str | None = None
        self.shared: dict[str, Any] = {}
        self.patience = Patience(comm.rank, comm.size)
        self.interrupt_deadline: float | None = None
        self.background = False  # the program computes meanwhile
        self.thread = threading.get_ident()
        self._scratch = np.empty(0, np.uint8)
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        windows, hierarchical, algorithm = _settings(comm)
        self.chooser = Chooser(ALGORITHMS, algorithm)
        host = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
        self.local_rank: int = host.rank
        self.one_host: bool = host.size == comm.size
        # together, because a launcher may have bound each rank to one core
        cores: set[int] = set().union(*host.allgather(os.sched_getaffinity(0)))
        self._spins = SPINS if self.one_host and host.size <= len(cores) else 1
        # Between hosts segments go without asking the receiver first; in memory there is nothing to ask.
        self.segment_bytes = sys.maxsize if self.one_host else SEGMENT_BYTES
        self.window: Window | None = None  # of ranks that all share a host
        self.hierarchy: Hierarchy | None = None
        self.no_window = ""
        if windows and (self.one_host or hierarchical):
            self._share(host)
        host.Free()

    def _share(self, host: Any) -> None:
        """Make the window of a host's ranks, and the hierarchy over several hosts; all or none of them."""
        most = max(self.comm.allgather(host.size))
        if most == 1:
            return
        window, reason = open_window(host, self.until, most) if host.size > 1 else (None, "")
        reasons = [reason for reason in self.comm.allgather(reason) if reason]
        if reasons:
            self.no_window = reasons[0]
        elif self.one_host:
            self.window = window
        else:
            leaders = self.comm.Split(0 if host.rank == 0 else MPI.UNDEFINED, self.comm.rank)
            found = Leaders(leaders, self) if leaders != MPI.COMM_NULL else None
            self.hierarchy = Hierarchy(window, found, slot_bytes(most))

    def complete(self, request: Any, name: str) -> None:
        """Wait for `request`, giving the core away between tests.

        Raises
        ------
        CollectiveTimeout
            The wait took longer than ``GCCOMM_TIMEOUT_S``; the request is kept for good.
        """
        test = request.Test
        for _ in range(1 if self.background else self._spins):
            if test():
                return
        try:
            self._wait(test, name)
        except BaseException:
            abandon(request)
            raise

    def until(self, test: Callable[[], Any], name: str) -> None:
        """Wait until `test()` is true, without a call of MPI where that is soon.

        Raises
        ------
        CollectiveTimeout
            The wait took longer than ``GCCOMM_TIMEOUT_S``.
        """
        for _ in range(1 if self.background else self._spins):
            if test():
                return

        def look() -> bool:
            if test():
                return True
            self.comm.Iprobe()  # the program's own messages go on meanwhile, as in any call of MPI's
            return False

        self._wait(look, name)

    def _wait(self, test: Any, name: str) -> None:
        wait = self.patience.begin(name)
        while not test():
            waited = wait.check()
            deadline = self.interrupt_deadline
            if deadline is not None and time.monotonic() >= deadline:
                abort_job(f"interrupted while waiting in {self.patience.describe(name)}", status=130)
            if waited < YIELD_S and not self.background:
                os.sched_yield()
            else:
                time.sleep(NAP_S)

    def arrive(self, name: str) -> None:
        """Wait until all ranks are here: MPI calls that only exist in a blocking form then take no time."""
        self.complete(self.comm.Ibarrier(), name)

    def scratch(self, dtype: np.dtype[Any], length: int) -> npt.NDArray[Any]:
        """Return memory that is kept from call to call, so that a steady loop touches no fresh page."""
        if self._scratch.size < length * dtype.itemsize:
            self._scratch = np.empty(length * dtype.itemsize, np.uint8)
        return self._scratch[: length * dtype.itemsize].view(dtype)

    def release(self) -> None:
        """Give up one handle; the last one frees the communicator. Collective then, unless it is broken."""
        self.users -= 1
        if self.users > 0 or MPI.Is_finalized():
            return
        if self.parent is not None:
            self.parent.Delete_attr(_keyval)
        if self.broken is None:
            with Operation(self, "close", None):
                self.arrive("close")
                if self.hierarchy is not None and self.hierarchy.leaders is not None:
                    self.hierarchy.leaders.comm.Free()
                self.comm.Free()
        self.broken = self.broken or "it is closed"
        self.window = self.hierarchy = None  # unmaps it


class Operation:
    """Context of one collective call on `channel`: refused on a broken one, and a failure breaks it.

    Whatever MPI may still read or write is then kept for good: mpi4py itself does not hold on to the buffers
    of a pending reduction.
    """

    __slots__ = ("_buffers", "_channel", "_name")

    def __init__(self, channel: Channel, name: str, buffers: Any) -> None:
        self._channel = channel
        self._name = name
        self._buffers = buffers

    def __enter__(self) -> Channel:
        channel = self._channel
        if channel.broken is not None or MPI.Is_finalized():
            message = f"{self._name}: this communicator is broken: {channel.broken or 'MPI is finalised'}"
            raise BackendError(message)
        if threading.get_ident() != channel.thread:
            _check_thread_level(channel)
        return channel

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        abandon(self._buffers)
        if isinstance(error, MPI.Exception):
            text = f"MPI failed in {self._name}: {error.Get_error_string()} (class {error.Get_error_class()})"
            self._channel.broken = text
            raise BackendError(text) from error
        rank = self._channel.patience.rank
        self._channel.broken = f"rank {rank} left {self._name}: {error or type(error).__name__}"


def _settings(comm: Any) -> tuple[bool, bool, str | None]:
    """Return whether windows and a hierarchy are used, and the algorithm that is named, from variables;
    collective.

    Raises
    ------
    ValueError
        On all ranks: a variable has no such value, or not the same on all ranks.
    """
    switch = ("", "0", "1")
    allowed: dict[str, tuple[str, ...]] = {"GCCOMM_WINDOW": switch, "GCCOMM_HIERARCHY": switch}
    allowed["GCCOMM_ALLREDUCE"] = ("", *ALGORITHMS)
    found = comm.allgather([os.environ.get(variable, "") for variable in allowed])
    for (variable, values), texts in zip(allowed.items(), zip(*found, strict=True), strict=True):
        for rank, text in enumerate(texts):
            if text not in values:
                names = ", ".join(filter(None, values))
                msg = f"rank {rank}: the environment variable {variable} must be one of {names}; got {text!r}"
                raise ValueError(msg)
            if text != texts[0]:
                differ = f"{texts[0]!r} on rank 0 and {text!r} on rank {rank}"
                msg = f"{variable} must be equal on all ranks; it is {differ}"
                raise ValueError(msg)
    return found[0][0] != "0", found[0][1] != "0", found[0][2] or None


def thread_refusal() -> str:
    """Return why gccomm's thread may not call MPI beside the program's own, or nothing.

    Less than MPI_THREAD_MULTIPLE does not do: the program cannot know when the thread is in MPI.
    """
    level = MPI.Query_thread()
    if level >= MPI.THREAD_MULTIPLE:
        return ""
    names = {
        MPI.THREAD_SINGLE: "SINGLE",
        MPI.THREAD_FUNNELED: "FUNNELED",
        MPI.THREAD_SERIALIZED: "SERIALIZED",
    }
    return (
        "they need MPI_THREAD_MULTIPLE, and MPI was initialised with "
        f"MPI_THREAD_{names.get(level, level)}; set "
        'mpi4py.rc.thread_level = "multiple" before mpi4py.MPI is imported, or use the blocking calls'
    )


def _check_thread_level(channel: Channel) -> None:
    channel.thread = threading.get_ident()
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        message = (
            "gccomm is called from a second thread, but MPI was initialised for one thread only (below "
            'THREAD_SERIALIZED); set mpi4py.rc.thread_level = "multiple" before mpi4py.MPI is imported'
        )
        warnings.warn(message, RuntimeWarning, stacklevel=5)


def cached(parent: Any) -> Channel:
    """Return the channel of `parent`; the first call makes it, collectively."""
    channel: Channel | None = parent.Get_attr(_keyval)
    if channel is None:
        comm = _duplicate(parent)
        try:
            channel = Channel(comm, parent)
        except ValueError:  # on all ranks
            comm.Free()
            raise
        parent.Set_attr(_keyval, channel)
    return channel


def _duplicate(parent: Any) -> Any:
    """Duplicate a communicator, waiting by the same rules as everything else."""
    wait = Patience(parent.rank, parent.size).begin("making a communicator")
    comm, request = parent.Idup()
    try:
        while not request.Test():
            wait.check()
            os.sched_yield()
    except BaseException:
        abandon((comm, request))
        raise
    return comm


def _forget(parent: Any, keyval: int, channel: Channel) -> None:
    # The parent is being freed: nothing is left to take the channel from.
    del parent, keyval
    channel.parent = None


_keyval = MPI.Comm.Create_keyval(delete_fn=_forget)
