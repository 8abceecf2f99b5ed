"""How processes become the ranks of an NCCL communicator: each finds its device, all check, all join."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from gccomm.agreement import exchange_texts
from gccomm.backends import Backend, Patience
from gccomm.errors import BackendError
from gccomm.transfers import execute
from gccomm_nccl.library import Comm, Library, load

__all__ = ["BackendPeers", "Joined", "Peers", "devices", "host_name", "join", "patiently"]

T = TypeVar("T")


class Peers(Protocol):
    """The processes that are to be ranks, over something other than NCCL."""

    rank: int
    size: int
    local_rank: int | None

    def exchange(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Return what all processes bring, by rank; collective."""
        ...

    def lost(self) -> str | None:
        """Return why the group cannot go on, if it cannot; waits for nothing."""
        ...

    def warn(self, reason: str) -> None:
        """Tell all others that this process gives up, where that is possible without ending them."""
        ...

    def abort(self, reason: str) -> None:
        """Make all others fail soon."""
        ...

    def close(self, *, whole: bool = True) -> None:
        """Leave; collective where nothing is broken."""
        ...


class BackendPeers:
    """The ranks of another back end, such as MPI's.

    Parameters
    ----------
    backend : Backend
        Of the ranks.
    owns : bool
        Close it with this object, and abort it.
    follows : bool
        Where it is broken NCCL is, too.
    """

    def __init__(self, backend: Backend, *, owns: bool = True, follows: bool = False) -> None:
        self.backend, self._owns, self._follows = backend, owns, follows
        self.rank, self.size = backend.rank, backend.size
        self.local_rank: int | None = backend.local_rank

    def exchange(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Return what all processes bring, by rank; collective."""
        moves = exchange_texts(mine, self.rank, self.size)
        while True:
            try:
                execute(next(moves), self.backend)
            except StopIteration as stop:
                found: list[dict[str, Any]] = stop.value
                return found

    def lost(self) -> str | None:
        """Return what has broken the other back end, if NCCL follows; else its launcher ends the job."""
        found: str | None = getattr(self.backend, "broken", None) if self._follows else None
        return found

    def warn(self, reason: str) -> None:
        """Do nothing: the others find out by themselves."""

    def abort(self, reason: str) -> None:
        """Abort by the other back end."""
        if self._owns:
            self.backend.abort(reason)

    def close(self, *, whole: bool = True) -> None:
        """Close the other back end, if its ranks can come to it."""
        if whole and self._owns:
            self.backend.close()


class Joined(NamedTuple):
    """What joining gives: the communicator, whose it is, and the host of every rank."""

    comm: Comm
    library: Library
    hosts: list[str]
    local_rank: int


def host_name() -> str:
    """Return what names this host among those of a job, containers included."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()}/{boot}"


def join(peers: Peers, device: int | None = None, groups: Sequence[int] | None = None) -> Joined:
    """Make the communicator; collective, with the same error on all ranks.

    Parameters
    ----------
    peers : Peers
        All of them.
    device : int, optional
        This process's CUDA device; by default that of its local rank.
    groups : sequence of int, optional
        The group of every rank, where each group is to have a communicator of its own.

    Raises
    ------
    BackendError
        CuPy, NCCL or a device is missing on some rank, or two ranks have the same device.
    CollectiveTimeout
        NCCL has not connected the ranks within ``GCCOMM_TIMEOUT_S``.
    """
    library, error = _attempt(load)
    first = _agree(peers, {"host": host_name(), "library": library.name if library else ""}, error)
    hosts = [report["host"] for report in first]
    place = hosts[: peers.rank].count(hosts[peers.rank])
    local_rank = place if peers.local_rank is None else peers.local_rank
    assert library is not None
    found, error = _attempt(lambda: devices(local_rank, device))
    number, name = found or (0, "")
    report: dict[str, Any] = {"device": name}
    group = [0] * peers.size if groups is None else groups
    members = [rank for rank in range(peers.size) if group[rank] == group[peers.rank]]
    if peers.rank == members[0] and error is None:
        unique, error = _attempt(library.unique_id)
        report["id"] = (unique or b"").hex()
    second = _agree(peers, report, error)
    _check_apart(hosts, [r["device"] for r in second])
    unique_id = bytes.fromhex(second[members[0]]["id"])

    def connect() -> Comm:
        import cupy

        with cupy.cuda.Device(number):  # of this thread
            return library.join(len(members), members.index(peers.rank), unique_id)

    comm, error = _attempt(lambda: patiently(connect, Patience(peers.rank, peers.size), "joining NCCL"))
    _agree(peers, {}, error)
    assert comm is not None
    return Joined(comm, library, hosts, local_rank)


def _attempt(make: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return what is made, or why it cannot be."""
    try:
        return make(), None
    except Exception as error:  # of CuPy's or NCCL's own kinds, too: all ranks are told
        return None, str(error) or type(error).__name__


def _agree(peers: Peers, mine: dict[str, Any], error: str | None) -> list[dict[str, Any]]:
    """Exchange reports; where one holds an error every rank raises it."""
    reports = peers.exchange({**mine, "error": error and error[:400]})
    for rank, report in enumerate(reports):
        if report["error"]:
            raise BackendError(f"rank {rank}: {report['error']}")
    return reports


def devices(local_rank: int, wanted: int | None = None) -> tuple[int, str]:
    """Return the CUDA device of a process, and its identity.

    ``GCCOMM_CUDA_DEVICE`` goes before the local rank. A launcher that shows each process one device has
    chosen already.

    Raises
    ------
    BackendError
        There is no such device, or fewer than ranks on this host.
    """
    import cupy

    runtime = cupy.cuda.runtime
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        raise BackendError(f"no CUDA device can be used: {error}. Is there one, and its driver?") from error
    if wanted is None and (text := os.environ.get("GCCOMM_CUDA_DEVICE")):
        if not text.isdecimal():
            raise BackendError(f"GCCOMM_CUDA_DEVICE must be the number of a CUDA device, got {text!r}")
        wanted = int(text)
    number = (0 if count == 1 else local_rank) if wanted is None else wanted
    if number >= count:
        msg = f"local rank {local_rank} has no CUDA device {number}: this process sees {count}"
        raise BackendError(
            f"{msg}. Start as many ranks on a host as it has devices, or set GCCOMM_CUDA_DEVICE"
        )
    uuid = runtime.getDeviceProperties(number).get("uuid")
    return number, uuid.hex() if isinstance(uuid, bytes) else str(cupy.cuda.Device(number).pci_bus_id)


def _check_apart(hosts: list[str], names: list[str]) -> None:
    """Raise BackendError, on all ranks, where two have one device: NCCL allows it only when told to."""
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return
    seen: dict[tuple[str, str], int] = {}
    for rank, where in enumerate(zip(hosts, names, strict=True)):
        first = seen.setdefault(where, rank)
        if first != rank:
            msg = (
                f"ranks {first} and {rank} have the same GPU, {where[1]}: start as many ranks on a host as "
                "it has GPUs, or have NCCL 2.30 or later share it: NCCL_MULTI_RANK_GPU_ENABLE=1 on all ranks"
            )
            raise BackendError(msg)


def patiently(make: Callable[[], T], patience: Patience, name: str) -> T:
    """Return what a call that may block for ever gives, from a thread of its own.

    Raises
    ------
    CollectiveTimeout
        It takes longer than ``GCCOMM_TIMEOUT_S``; its thread is left behind.
    """
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((make(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=run, name=f"gccomm {name}", daemon=True)
    thread.start()
    wait = patience.begin(name)
    while not found:
        wait.check()
        thread.join(0.01)
        time.sleep(0)
    made, error = found[0]
    if error is not None:
        raise error
    result: T = made
    return result
