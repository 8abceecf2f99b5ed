"""One private communicator, the handles on it, and the waits on it."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

from mpi4py import MPI

from gccomm.backends import Patience
from gccomm.errors import BackendError
from gccomm.hosts import Hosts
from gccomm_mpi.choice import Chooser
from gccomm_mpi.device import require_cuda
from gccomm_mpi.failure import abandon, abort_job
from gccomm_mpi.hierarchy import Hierarchy
from gccomm_mpi.link import Flight, Link, Moves
from gccomm_mpi.messages import ALGORITHMS, Messages
from gccomm_mpi.ring import SEGMENT_BYTES
from gccomm_mpi.window import Window, open_window, slot_bytes

__all__ = ["Channel", "Operation", "cached", "thread_refusal"]

# Tests before the first yield where all ranks share a host and may have a core each: about 50 us.
SPINS = 100

# Tests with nothing but yields between them before a wait has a clock. Where ranks share cores, what one does
# between two tests is time that the others wait for.
QUICK = 100

# A wait this long is for a rank that computes, no longer for the wire: leave it the core.
YIELD_S = 0.05
NAP_S = 5e-5


class Channel:
    """A communicator of gccomm's own, shared by all handles on one parent.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Owned by the channel. Making the channel is collective on it.
    parent : mpi4py.MPI.Intracomm, optional
        The communicator in whose attributes the channel is cached.
    hierarchical : bool, optional
        See :func:`gccomm.init`.

    Raises
    ------
    ValueError
        Settings that are wrong, or not the same on all ranks; on all ranks.
    BackendError
        Hosts are to add up floats, but their ranks cannot share memory; on all ranks.
    """

    def __init__(self, comm: Any, parent: Any = None, hierarchical: bool | None = None) -> None:
        self.comm = comm
        self.parent = parent
        self.users = 0
        self.broken: str | None = None
        self.shared: dict[str, Any] = {}
        self.patience = Patience(comm.rank, comm.size)
        self.interrupt_deadline: float | None = None
        self.background = False  # the program computes meanwhile
        self.thread = threading.get_ident()
        self.flights: list[Flight] = []  # on their way
        self.overseers: list[tuple[Callable[[], BaseException | None], Callable[[], None]]] = []  # of devices
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        settings = _settings(comm, hierarchical)
        if settings.cuda:
            _agree_on(comm, require_cuda)
        self.hierarchical, self.takes_cuda = hierarchical, settings.cuda
        self.chooser = Chooser(settings.algorithm)
        host = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
        self.local_rank: int = host.rank
        self.one_host: bool = host.size == comm.size
        self._crowded = _crowded(host.allgather(os.sched_getaffinity(0)))
        self._spins = SPINS if self.one_host and not self._crowded else 1
        # Between hosts segments go without asking the receiver first; in memory there is nothing to ask.
        self.segment_bytes = sys.maxsize if self.one_host else SEGMENT_BYTES
        self.messages = Messages(self, Link(comm, self.segment_bytes))  # between all ranks
        self.window: Window | None = None  # of ranks that all share a host
        self.hierarchy: Hierarchy | None = None
        self.hosts: Hosts | None = None  # where hosts add up their ranks' floats before they compress
        self.host_of = _hosts(comm, host)  # every rank's host
        several = 1 < len(set(self.host_of)) < comm.size  # hosts, some of several ranks
        self.layered = settings.layered and several  # on devices, too, hosts reduce first
        self.columns: Messages | None = None  # between the ranks at this one's place, once it is asked for
        self.no_window = "" if settings.windows else "GCCOMM_WINDOW=0"
        sizes = comm.allgather(host.size)
        if settings.windows and max(sizes) > 1 and (self.one_host or settings.levels != "flat"):
            self._share(host, sizes, settings.levels == "floats")
        host.Free()
        if settings.levels == "floats" and not self.one_host and max(sizes) > 1 and self.hosts is None:
            msg = f"hierarchical reductions need memory that ranks of a host share: {self.no_window}"
            raise BackendError(msg)

    def _share(self, host: Any, sizes: Sequence[int], floats: bool) -> None:
        """Make the window of a host's ranks, and the hierarchy over several hosts; all or none of them."""
        most = max(sizes)
        window, reason = None, ""
        if host.size > 1:
            window, reason = open_window(host, self.until, most, lambda: self.background or self._crowded)
        reasons = [reason for reason in self.comm.allgather(reason) if reason]
        if reasons:
            self.no_window = reasons[0]
        elif self.one_host:
            self.window = window
        else:
            speakers = min(sizes) if floats else 1
            index, found = self.host_of[self.comm.rank], self._column(host.rank, speakers)
            self.hierarchy = Hierarchy(window, found, host.rank, slot_bytes(most), self.go_on)
            if floats:
                self.hosts = Hosts(len(set(self.host_of)), index, host.rank, speakers)

    def _column(self, place: int, speakers: int) -> Messages | None:
        """Return what ranks at one place of all hosts exchange, where it is below a number; collective."""
        color = place if place < speakers else MPI.UNDEFINED
        column = self.comm.Split(color, self.host_of[self.comm.rank])
        if column == MPI.COMM_NULL:
            return None
        return Messages(self, Link(column, self.segment_bytes, " between hosts"))

    def column(self) -> Messages:
        """Return what the ranks at this one's place exchange, of hosts that have as many each; collective."""
        if self.hosts is not None and self.hierarchy is not None and self.hierarchy.column is not None:
            return self.hierarchy.column
        if self.columns is None:
            self.columns = self._column(self.local_rank, self.comm.size)
        assert self.columns is not None
        return self.columns

    def operation(self, name: str, buffers: Any) -> Operation:
        """Return the context of one collective call."""
        return Operation(self, name, buffers)

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
            if not self.background and not self.flights:
                for _ in range(QUICK):
                    os.sched_yield()
                    if test():
                        return
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
            if not self.flights:  # their tests do the same
                self.comm.Iprobe()  # the program's own messages go on meanwhile, as in any call of MPI's
            return False

        self._wait(look, name)

    def _wait(self, test: Any, name: str) -> None:
        wait = self.patience.begin(name)
        while not test():
            self.go_on()
            waited = wait.check()
            deadline = self.interrupt_deadline
            if deadline is not None and time.monotonic() >= deadline:
                abort_job(f"interrupted while waiting in {self.patience.describe(name)}", status=130)
            if waited < YIELD_S and not self.background:
                os.sched_yield()
            else:
                time.sleep(NAP_S)

    def launch(self, name: str, moves: Moves, buffers: Any) -> Flight:
        """Begin a reduction; it goes on in every wait, until :meth:`land` completes it."""
        flight = Flight(name, moves, buffers)
        self.flights.append(flight)
        flight.go_on()
        return flight

    def land(self, flight: Flight) -> None:
        """Wait until a reduction is complete; errors as of :meth:`complete`."""
        for _ in range(1 if self.background else self._spins):
            if flight.go_on():
                break
        else:
            self._wait(flight.go_on, flight.name)
        self.flights.remove(flight)

    def still(self, name: str) -> None:
        """Wait until nothing is on its way any more; reductions that have come are landed later."""
        self.until(lambda: all(flight.go_on() for flight in self.flights), name)

    def go_on(self) -> None:
        """Let reductions on their way go on; waits for nothing."""
        for flight in self.flights:
            flight.go_on()

    def arrive(self, name: str) -> None:
        """Wait until all ranks are here: MPI calls that only exist in a blocking form then take no time."""
        self.complete(self.comm.Ibarrier(), name)

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
                column = self.hierarchy.column if self.hierarchy is not None else None
                for messages in filter(None, (self.columns, column, self.messages)):
                    messages.free()
        self.broken = self.broken or "it is closed"
        self.window = self.hierarchy = self.columns = None  # unmaps it


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
        abandon((self._buffers, self._channel.flights))
        if isinstance(error, MPI.Exception):
            text = f"MPI failed in {self._name}: {error.Get_error_string()} (class {error.Get_error_class()})"
            self._channel.broken = text
            raise BackendError(text) from error
        rank = self._channel.patience.rank
        self._channel.broken = f"rank {rank} left {self._name}: {error or type(error).__name__}"


class Settings(NamedTuple):
    """Whether ranks of a host share memory; "flat", "words" or "floats": what hosts of several ranks do
    first; the algorithm that is named; whether the MPI library is given memory of devices; and whether hosts
    were asked to do something first.
    """

    windows: bool
    levels: str
    algorithm: str | None
    cuda: bool
    layered: bool


_LEVELS = {"": "words", "0": "flat", "1": "words", "words": "words", "floats": "floats"}


def _settings(comm: Any, hierarchical: bool | None) -> Settings:
    """Return the settings from variables, which go before arguments; collective.

    Raises
    ------
    ValueError
        On all ranks: a variable has no such value, or not the same on all ranks.
    """
    switch = ("", "0", "1")
    allowed: dict[str, tuple[str, ...]] = {"GCCOMM_WINDOW": switch, "GCCOMM_HIERARCHY": tuple(_LEVELS)}
    allowed |= {"GCCOMM_ALLREDUCE": ("", *ALGORITHMS), "GCCOMM_MPI_CUDA": switch}
    mine = [os.environ.get(variable, "") for variable in allowed]
    found, asked = zip(*comm.allgather((mine, hierarchical)), strict=True)
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
    for rank, value in enumerate(asked):
        if value is not asked[0]:
            differ = f"{asked[0]} on rank 0, {value} on rank {rank}"
            msg = f"`hierarchical` must be equal on all ranks; it is {differ}"
            raise ValueError(msg)
    window, levels, algorithm, cuda = found[0]
    if levels == "" and asked[0] is not None:
        levels = "floats" if asked[0] else "0"
    asks = levels != "" and _LEVELS[levels] != "flat"
    return Settings(window != "0", _LEVELS[levels], algorithm or None, cuda == "1", asks)


def _crowded(affinities: Sequence[set[int]]) -> bool:
    """Return whether ranks of this host share cores, given those that each of a communicator's may use.

    Others than the communicator's may do so, too: launchers say how many ranks they have put here.
    """
    cores: set[int] = set().union(*affinities)  # together, because each may be bound to one
    apart = sum(map(len, affinities)) == len(cores)
    counts = [os.environ.get(name, "") for name in ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")]
    started = max([int(count) for count in counts if count.isdecimal()], default=0)
    return len(affinities) > len(cores) or (started > len(cores) and not apart)


def _hosts(comm: Any, host: Any) -> list[int]:
    """Return the host of every rank, hosts in the order of their first ranks; collective."""
    firsts = comm.allgather(host.bcast(comm.rank))
    return [sorted(set(firsts)).index(first) for first in firsts]


def _agree_on(comm: Any, check: Callable[[], None]) -> None:
    """Raise the error of a check on all ranks, where it fails on one; collective."""
    text = ""
    try:
        check()
    except BackendError as error:
        text = f"rank {comm.rank}: {error}"
    texts = [found for found in comm.allgather(text) if found]
    if texts:
        raise BackendError(texts[0])


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


def cached(parent: Any, hierarchical: bool | None = None) -> Channel:
    """Return the channel of `parent`; the first call makes it, collectively."""
    channel: Channel | None = parent.Get_attr(_keyval)
    if channel is None:
        comm = _duplicate(parent)
        try:
            channel = Channel(comm, parent, hierarchical)
        except (ValueError, BackendError):  # on all ranks
            comm.Free()
            raise
        parent.Set_attr(_keyval, channel)
    elif hierarchical is not None and hierarchical is not channel.hierarchical:
        msg = (
            f"this communicator is in use with hierarchical={channel.hierarchical}, not {hierarchical}: "
            "close what gccomm.init() has returned for it first, or duplicate it"
        )
        raise ValueError(msg)
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
