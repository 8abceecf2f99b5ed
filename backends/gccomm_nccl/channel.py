"""One communicator of NCCL's, its stream, and what is on its way there."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from gccomm.backends import Patience
from gccomm.errors import BackendError
from gccomm.kernels.cuda.capture import relaxed
from gccomm_nccl.joining import Peers
from gccomm_nccl.library import Comm, Library, import_cupy
from gccomm_nccl.watchdog import Flight, Watchdog

__all__ = ["Channel"]

_READY, _NOT_READY = 0, 600  # cudaSuccess, cudaErrorNotReady
SPINS, NAP_S = 200, 5e-5
SHORT_S = 0.002  # a longer wait is for a rank that computes: leave it the core
UNTIMED = Patience(0, 0, 0, 0)  # has no rank to name, as it reports nothing


class Channel:
    """A communicator shared by all handles on it.

    All operations go to a stream of the channel's own, which does not wait for the legacy default stream.
    What comes from a caller's stream waits for that, and is waited for by it, through events: the host does
    not wait. Operations of host memory end with a wait.

    Parameters
    ----------
    comm : Comm
        The communicator.
    library : Library
        Whose it is.
    hosts : list of str
        The host of every rank.
    local_rank : int
        Of this one.
    peers : Peers, optional
        What the processes have met by.
    owns : bool
        Close that with the channel.
    frees : bool
        Free `comm` with the channel; in any case it is aborted where something fails.
    called : tuple of (int, int), optional
        Rank and number of ranks in reports, where they are not those of `comm`.
    """

    def __init__(
        self,
        comm: Comm,
        library: Library,
        hosts: list[str],
        local_rank: int,
        peers: Peers | None = None,
        *,
        owns: bool = True,
        frees: bool = True,
        called: tuple[int, int] | None = None,
    ) -> None:
        self.comm, self.library, self.hosts, self.local_rank = comm, library, hosts, local_rank
        self.peers, self._owns, self._frees = peers, owns, frees
        self.cupy = import_cupy()
        self.runtime = self.cupy.cuda.runtime
        self.device = self.cupy.cuda.Device(comm.device)
        with self.device:
            self.stream = self.cupy.cuda.Stream(non_blocking=True)
        self.patience = Patience(*(called or (comm.rank, comm.size)))
        self.meanwhile: Callable[[], object] = lambda: None  # called while the host waits
        self.interrupt_deadline: float | None = None
        self.background = False  # the program computes meanwhile
        self.users = 0
        self.shared: dict[str, Any] = {}
        self.broken: str | None = None
        self.looks: list[Callable[[], BaseException | None]] = []  # for errors that others know of
        self.dooms: list[Callable[[], None]] = []  # called before an abort
        self.captured: list[Any] = []  # what graphs need, which may be launched at any time
        self._error: BaseException | None = None  # until somebody has seen it
        self._failing = threading.Lock()
        self._freeing = threading.Lock()  # nobody asks a communicator that is being freed
        self.watchdog = Watchdog(self.patience, self.done, self._failure, self.fail, self._within)
        if peers is not None:
            self.watchdog.start()  # the others count on being told when a process has gone

    @contextmanager
    def _within(self) -> Iterator[None]:
        """Have a thread work on this device only, and disturb no capture of a graph."""
        with self.device, relaxed():
            yield

    def done(self, event: Any) -> bool:
        """Return whether the device has come to an event; BackendError where it has failed.

        Within :meth:`_within`.
        """
        status = int(self.runtime.eventQuery(event.ptr))
        if status not in (_READY, _NOT_READY):
            raise BackendError(
                f"rank {self.patience.rank}: the CUDA device {self.comm.device} failed: error {status}"
            )
        return status == _READY

    def event(self, stream: int) -> Any:
        """Return an event behind what has been enqueued on a stream."""
        event = self.cupy.cuda.Event(disable_timing=True)
        self.runtime.eventRecord(event.ptr, stream)
        return event

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Call NCCL: refused on a broken channel, and a failure breaks it."""
        self.require_whole(name)
        try:
            with self.device, self.watchdog.calling(name):
                yield
        except Exception as error:
            if self.broken is not None:  # the watchdog has ended the call
                self.require_whole(name)
            text = f"rank {self.patience.rank}: NCCL failed in {self.patience.describe(name)}: {error}"
            self.fail(BackendError(text))
            self._error = None  # raised here
            raise BackendError(text) from error

    def enqueue(self, name: str, stream: int, keep: Any, call: Callable[[int], None]) -> None:
        """Do something on the channel's stream, after what `stream` holds; what follows there comes after it.

        `keep` stays alive until it is done. Within the capture of a graph it stays alive as long as the
        channel.
        """
        self.join(self.launch(name, stream, keep, call))

    def join(self, launched: tuple[int, Any]) -> None:
        """Let what follows on a stream come after what was launched from there."""
        with self.device:  # whose default stream it may be
            self.runtime.streamWaitEvent(launched[0], launched[1].ptr)

    def launch(self, name: str, stream: int, keep: Any, call: Callable[[int], None]) -> tuple[int, Any]:
        """Do that but for the end: return what :meth:`join` takes."""
        with self.calling(name):
            before = self.event(stream)
            self.runtime.streamWaitEvent(self.stream.ptr, before.ptr)
            call(self.stream.ptr)
            after = self.event(self.stream.ptr)
            if self.runtime.streamIsCapturing(stream):
                self.captured.append(keep)
            else:
                self.watchdog.watch(Flight(name, before, after, keep))
        return stream, after

    def wait(self, event: Any, name: str, *, overseen: bool = False) -> None:
        """Let the host wait for an event of the channel's stream, or of what comes after it.

        With ``overseen`` the watchdog keeps the time, and reports a stall, of what is waited for.

        Raises
        ------
        CollectiveTimeout
            It takes longer than ``GCCOMM_TIMEOUT_S``: the channel is broken then.
        BackendError
            The channel is, or becomes, broken.
        """
        try:
            with self._within():
                self._wait(event, name, UNTIMED if overseen else self.patience)
            self.require_whole(name)  # an abort lets events come, too
        except BaseException as error:
            self.fail(error)
            self._error = None  # raised here
            raise

    def _wait(self, event: Any, name: str, patience: Patience) -> None:
        for _ in range(SPINS):
            if self.done(event):
                return
        wait = patience.begin(name)
        while True:
            self.require_whole(name)
            if self.done(event):
                return
            self.meanwhile()
            waited = wait.check()
            if self.interrupt_deadline is not None and time.monotonic() >= self.interrupt_deadline:
                text = f"interrupted while waiting in {self.patience.describe(name)}"
                raise BackendError(f"rank {self.patience.rank}: {text}")
            if waited < SHORT_S and not self.background:
                os.sched_yield()
            else:
                time.sleep(NAP_S)

    def require_whole(self, name: str) -> None:
        """Raise what has broken the channel: the first time as it came, then as BackendError."""
        if self.broken is None:
            return
        error, self._error = self._error, None
        if error is not None:
            raise error
        raise BackendError(f"{name}: this communicator is broken: {self.broken}")

    def fail(self, error: BaseException) -> None:
        """Break the channel: what is on its way is aborted, its results are marked, the others are told."""
        with self._failing:
            if self.broken is not None:
                return
            self.broken, self._error = str(error) or type(error).__name__, error
        for doom in self.dooms:
            doom()
        if self.peers is not None:
            self.peers.warn(self.broken)
        self._free(self._abort)

    def _abort(self) -> None:
        with suppress(Exception):  # it is given up, whatever NCCL says of that
            self.comm.abort()

    def _free(self, end: Callable[[], None]) -> None:
        """Abort or destroy the communicator. NCCL comes back from that only when no graph has parts of it any
        more: then a thread waits, and keeps the graphs' memory as long.
        """
        graphs, self.captured = self.captured, []

        def run() -> None:
            with self._freeing:
                end()
            graphs.clear()

        if graphs:
            threading.Thread(target=run, name="gccomm NCCL end", daemon=True).start()
        else:
            run()

    def _failure(self) -> str | None:
        for look in self.looks:
            if (found := look()) is not None:
                raise found
        if self.peers is not None and (lost := self.peers.lost()) is not None:
            return f"rank {self.patience.rank}: {lost}"
        if not self._freeing.acquire(blocking=False):
            return None
        try:
            failed = None if self.broken is not None else self.comm.failure()
        finally:
            self._freeing.release()
        return None if failed is None else f"rank {self.patience.rank}: NCCL has failed: {failed}"

    def release(self, finish: Callable[[], None]) -> None:
        """Give up one handle; the last one frees the communicator, after `finish`, if it is not broken."""
        self.users -= 1
        if self.users > 0:
            return
        if self.broken is None:
            finish()
        self.watchdog.stop()
        whole = self.broken is None
        if whole:
            self.broken = "it is closed"
            if self._frees:
                self._free(self.comm.destroy)
        if self.peers is not None and self._owns:
            self.peers.close(whole=whole)
