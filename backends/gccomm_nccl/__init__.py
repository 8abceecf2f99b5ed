"""Back end over NCCL: ranks with a CUDA device each. Importing it imports neither CuPy nor NCCL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gccomm import backends
from gccomm.errors import BackendError

if TYPE_CHECKING:
    from gccomm_nccl.backend import NcclBackend
    from gccomm_nccl.channel import Channel
    from gccomm_nccl.pair import PairBackend

__all__ = ["beside", "connect", "over"]

_world: Channel | None = None  # of launchers' variables, as long as a handle on it is open


def connect(comm: Any = None, *, hierarchical: bool | None = None, device: int | None = None) -> NcclBackend:
    """Return a handle on a communicator of NCCL's; collective.

    Without `comm` the ranks are those that an MPI launcher, torchrun or JAX's variables name; else there is
    one. torchrun's and JAX's processes meet at the host of rank 0, at the port after the launcher's own
    (``GCCOMM_PORT`` names another one). Later calls return further handles on the same communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, or a communicator of nccl4py's or CuPy's, optional
        The ranks. One of NCCL's is used as it is, and is not freed: nothing else may use it meanwhile. Where
        a call fails, it is aborted.
    hierarchical : bool, optional
        Not True: no host's ranks share memory here.
    device : int, optional
        The CUDA device of this process; by default ``GCCOMM_CUDA_DEVICE``, or that of its local rank.

    Raises
    ------
    BackendError
        CuPy, NCCL or a device is missing on some rank, or two ranks have the same; on all ranks.
    CollectiveTimeout
        Ranks have not come within ``GCCOMM_TIMEOUT_S``.
    ValueError
        ``hierarchical=True``.
    """
    global _world  # noqa: PLW0603 - like MPI's world, one for the process
    if hierarchical:
        raise ValueError("`hierarchical=True` is for the back end mpi: ranks of nccl do not share memory")
    if comm is not None:
        return _on(comm, device)
    if backends.launcher() is not None:
        return over(backends.load("mpi")(), device=device)
    from gccomm_nccl.backend import NcclBackend

    if _world is None or _world.users == 0:
        _world = _from_variables(device)
    return NcclBackend(_world)


def over(backend: backends.Backend, *, device: int | None = None) -> NcclBackend:
    """Return a handle on the NCCL communicator of the ranks of another back end; collective.

    Parameters
    ----------
    backend : Backend
        A handle of one's own, closed with this one.
    device : int, optional
        As of :func:`connect`.
    """
    from gccomm_nccl.backend import NcclBackend

    channel: Channel | None = backend.shared.get("nccl")
    if channel is not None and channel.users > 0:
        backend.close()  # the channel has one
        return NcclBackend(channel)
    try:
        channel = backend.shared["nccl"] = _join(backend, device, owns=True)
    except BackendError:  # on all ranks
        backend.close()
        raise
    return NcclBackend(channel)


def beside(backend: backends.Backend, device: int) -> PairBackend:
    """Return a back end with NCCL beside it, for what lies on each rank's device; collective.

    Where hosts were asked to reduce first (``layered`` of the back end), there is a communicator for each.

    Parameters
    ----------
    backend : Backend
        Closed with the result; where this fails, it goes on as before.
    device : int
        This process's.

    Raises
    ------
    BackendError
        As of :func:`connect`, on all ranks; or hosts, which are to reduce first, have unequal numbers of
        ranks.
    """
    from gccomm_nccl.backend import NcclBackend
    from gccomm_nccl.pair import PairBackend

    if (hosts := getattr(backend, "layered", None)) is not None:
        return _by_host(backend, device, hosts)

    return PairBackend(backend, NcclBackend(_join(backend, device, owns=False)))


def _join(backend: backends.Backend, device: int | None, *, owns: bool) -> Channel:
    from gccomm_nccl.channel import Channel
    from gccomm_nccl.joining import BackendPeers, join

    peers = BackendPeers(backend, owns=owns)
    comm, library, hosts, local_rank = join(peers, device)
    return Channel(comm, library, hosts, local_rank, peers)


def _by_host(backend: Any, device: int, hosts: Sequence[int]) -> PairBackend:
    """Make a communicator for each host; collective."""
    from gccomm_nccl.backend import NcclBackend
    from gccomm_nccl.by_host import HostBackend
    from gccomm_nccl.channel import Channel
    from gccomm_nccl.joining import BackendPeers, join

    counts = Counter(hosts).values()
    if min(counts) < max(counts):
        raise BackendError(
            f"hosts have {min(counts)} to {max(counts)} ranks, and where each is to reduce first, NCCL needs "
            "as many on every one"
        )
    peers = BackendPeers(backend, owns=False, follows=True)
    comm, library, names, _ = join(peers, device, hosts)
    mine = [name for name, host in zip(names, hosts, strict=True) if host == hosts[backend.rank]]
    called = backend.rank, backend.size
    channel = Channel(comm, library, mine, comm.rank, peers, called=called)
    return HostBackend(backend, NcclBackend(channel), backend.column())


def _on(comm: Any, device: int | None) -> NcclBackend:
    from gccomm_nccl.backend import NcclBackend
    from gccomm_nccl.channel import Channel
    from gccomm_nccl.joining import host_name
    from gccomm_nccl.library import library_of

    library = library_of(comm)
    if library is None:
        return over(backends.load("mpi")(comm), device=device)
    adopted = library.adopt(comm)
    if device is not None and device != adopted.device:
        raise ValueError(f"`device` is {device}, but `comm` is one of device {adopted.device}")
    channel = Channel(adopted, library, [""] * adopted.size, 0, frees=False)
    return NcclBackend(channel).learn_hosts(host_name())


def _from_variables(device: int | None) -> Channel:
    """Join the processes that launchers' variables name."""
    from gccomm_nccl.channel import Channel
    from gccomm_nccl.joining import join
    from gccomm_nccl.store import Store, job_name
    from gccomm_nccl.surroundings import surroundings

    found = surroundings()
    rank, size = (0, 1) if found is None else (found.rank, found.size)
    address = ("", 0) if found is None else (found.host, found.port)
    store = Store(rank, size, address, job_name())
    store.local_rank = None if found is None else found.local_rank
    try:
        comm, library, hosts, local_rank = join(store, device)
    except BaseException as error:
        store.warn(f"rank {rank} has not joined: {error}")
        store.close(whole=False)
        raise
    return Channel(comm, library, hosts, local_rank, store)


connect.beside = beside  # type: ignore[attr-defined]  # how a communicator finds it: see gccomm.backends
