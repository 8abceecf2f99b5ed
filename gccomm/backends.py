"""Transports: what the driver asks of one, how a process finds one, and how every one of them waits.

A back end is an ordinary import package that registers a function ``connect(comm=None) -> Backend`` under the
entry-point group ``gccomm.backends``. This module imports none of them before it is asked to.
"""

from __future__ import annotations

import difflib
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, Protocol, cast

import numpy as np
import numpy.typing as npt

from gccomm.errors import BackendError, CollectiveTimeout

__all__ = [
    "Activity",
    "Backend",
    "Bytes",
    "Connect",
    "DeviceBuffer",
    "FloatName",
    "OnChannel",
    "Patience",
    "Wait",
    "Words",
    "available",
    "detect",
    "half_named",
    "launcher",
    "load",
    "operations_of",
    "room_of",
]

ENTRY_POINT_GROUP = "gccomm.backends"

Words = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]
FloatName = Literal["float32", "float64", "bfloat16", "float16"]
Activity = str | Callable[[], str]


class DeviceBuffer(Protocol):
    """Words or floats in a device's memory, as the next work on a stream finds them.

    Attributes
    ----------
    address, size : int
        Where they begin, and how many there are.
    stream : int
        Handle of the stream: an operation comes after what it holds, and before what it gets later.
    """

    @property
    def address(self) -> int: ...  # noqa: D102

    @property
    def size(self) -> int: ...  # noqa: D102

    @property
    def stream(self) -> int: ...  # noqa: D102


class Backend(Protocol):
    """One process of a group, and the collective operations of that group.

    A back end may also have ``room(nbytes)`` and ``sum_into(words, out)``: memory from which the next sum, of
    words or of floats, goes without a copy (uint8, or None where there is no such memory; no other call may
    come before that sum, but ``go_on``), and the sum from there to elsewhere; and ``begin(kind, send, recv)``
    and ``end(handle)``: a reduction ("words", "maximum" or a `FloatName`), begun and completed in the same
    order on all ranks, of which two are on their way at a time (handle None: it is complete); ``go_on()``
    lets these go on where the host waits for a device or codecs compute, and returns whether there are any.
    Where its ``sums_lanes`` is true, ``sum_lanes(job)`` encodes, sums and decodes blocks itself, as a
    `gccomm.kernels.LANES` record says, and returns the seconds of encoding and of decoding, and float sums
    may be of 64 times as many numbers as elsewhere. With ``call_bytes`` above 0 ``sum_call(job)`` makes a
    whole call by itself, as a `gccomm.kernels.CALL` record says, with the messages of `maximum` and of
    ``sum_lanes`` or `sum_floats`, which are of so many bytes of floats, and returns whether all ranks have
    made that call, and the same seconds; with ``swap_bytes`` above 0 it does so of one tensor of at most so
    many bytes, in the first message of the call, and takes ``sum_lanes`` of such. With ``first_words`` above
    0 it takes the maximum or sum of up to so many words where ranks hold different numbers of them, and
    reduces those that all hold: first messages of calls may then be that long.
    ``slow_links`` tells whether this rank has found that links between hosts are slow beside what a piece
    costs otherwise; others need not have found the same.

    Two attributes serve asynchronous calls, which are made by a second thread, never two at a time:
    ``background``, set to True while the program computes meanwhile, so that waits should leave it the core;
    and ``no_threads``, a text that says why no second thread may call, if none may.

    Where `operations` holds "fold" it has ``fold_words(step, sent, folded)``: it encodes, folds
    over the ranks and decodes as a :class:`gccomm.steps.Fold` says, in memory for the words before and after;
    and perhaps ``begin_fold``, which begins that as ``begin`` does a reduction.

    One that reduces in the memory of devices has ``takes_device(device)``: whether `maximum`, `sum_words` and
    `sum_floats` also take `DeviceBuffer` objects of a device ("cuda:0"). These calls return when the work is
    enqueued; where it fails, a later call raises. ``begin_many(parts)``, if it has that, begins several,
    (kind, send, recv) each, in one launch. ``device`` is this rank's; ``require_whole()`` raises what has
    broken the back end, if anything has; and ``oversee(look, doom)`` has it call ``look()`` now and then,
    which returns an error that ends everything, or None, and ``doom()`` before what is on its way is aborted.
    Where that waits for other ranks, ``await_event(event)`` lets the host wait for an event of the device,
    until `interrupt_deadline`. With ``flows`` False the host waits in each of them all the same, and so may
    look at every header; then ranks that differ break nothing.

    And one whose hosts add up floats before they are compressed has ``hosts`` (`gccomm.hosts.Hosts`, or
    None), ``host_sum(send, recv, dtype, place)``, the sum over a host's ranks into ``recv`` of the one at a
    place, and ``between(place)``, which has the reductions over the ranks at that place of all hosts, with
    results on all ranks. Its ``connect`` takes ``hierarchical``, as :func:`gccomm.init` does. With
    ``hosts_on_device`` True, these take `DeviceBuffer` objects, too.

    Where NCCL is to join within hosts only it has ``layered``, the host of every rank (None: NCCL is to take
    all ranks), and ``column()``, the reductions over the ranks at this one's place of all hosts. One that
    NCCL joins may have ``broken``, what has broken it, or None, and ``forsake(reason)``, which breaks it.

    All methods but `abort` and `set_activity` are collective and blocking. Arrays are C-contiguous NumPy
    arrays of the same size on every rank. After `BackendError` or `CollectiveTimeout` the back end is broken:
    every later call raises `BackendError`.

    Attributes
    ----------
    interrupt_deadline : float or None
        A value of `time.monotonic`; a rank that still waits after it calls `abort`. Set on SIGINT.
    """

    interrupt_deadline: float | None

    @property
    def shared(self) -> dict[str, Any]:
        """What all handles on this group share in this process: the lock and counters of communicators."""
        ...

    @property
    def name(self) -> str:
        """Name of the entry point."""
        ...

    @property
    def rank(self) -> int:
        """Place of this process in the group."""
        ...

    @property
    def size(self) -> int:
        """Number of processes in the group."""
        ...

    @property
    def local_rank(self) -> int:
        """Place of this process among those of the group that share its host."""
        ...

    @property
    def one_host(self) -> bool:
        """Whether all ranks share the memory of one host."""
        ...

    @property
    def operations(self) -> frozenset[str]:
        """Names of the operations that `combine_words` knows; see `operations_of`."""
        ...

    def maximum(self, words: Words, /) -> None:
        """Replace each word by its maximum over the ranks, as unsigned numbers."""
        ...

    def sum_words(self, words: Words, /) -> None:
        """Replace each word by its sum over the ranks, mod 2^32."""
        ...

    def sum_floats(
        self, send: npt.NDArray[np.generic], recv: npt.NDArray[np.generic], dtype: FloatName, /
    ) -> None:
        """Write the sum of `send` over the ranks to `recv`; the order of the additions is the back end's own.

        `send` and `recv` are the same array or do not overlap. The 16-bit formats come as uint16 arrays.
        """
        ...

    def combine_words(self, words: Words, operation: str, seed: int, /) -> None:
        """Reduce the words over the ranks by an operation of gccomm's own, in place.

        Every rank ends with the bits that `gccomm.operations.reduce_parts` gives for the whole array, however
        a back end cuts it. `seed`, a 32-bit word, is equal on all ranks.

        Raises
        ------
        ValueError
            `operation` is none of `operations`, or `seed` is out of range.
        """
        ...

    def broadcast(self, buffer: Bytes, root: int, /) -> None:
        """Overwrite `buffer` with that of rank `root`."""
        ...

    def split(self, color: int | None, key: int, /) -> Backend | None:
        """Make one group per color, ranks ordered by (key, rank); None gives None. Colors are 0 or more."""
        ...

    def close(self) -> None:
        """Release this handle; a second call does nothing, and a broken group is left without waiting."""
        ...

    def abort(self, reason: str, /) -> None:
        """Make the other ranks fail soon; not collective. Under MPI it ends the job and does not return."""
        ...

    def set_activity(self, activity: Activity, /) -> None:
        """Say what a stall report calls the present work: a text, or a function that makes one."""
        ...


class Connect(Protocol):
    """What an entry point of the group ``gccomm.backends`` names.

    Where it has ``beside(backend, device)``, that makes one of another back end's ranks which also reduces in
    the memory of devices, with the same errors on all of them: so NCCL joins ranks of MPI.
    """

    def __call__(self, comm: object = None) -> Backend:
        """Make a back end on `comm`, or on all processes of the job; collective."""
        ...


def operations_of(backend: Backend) -> frozenset[str]:
    """Return the operations that a back end can reduce words with; none where it does not say."""
    return getattr(backend, "operations", frozenset())


def room_of(backend: Backend) -> Callable[[int], Bytes | None]:
    """Return the function that gives memory from which the next sum goes without a copy, or None."""
    return getattr(backend, "room", lambda _nbytes: None)


def _registered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def available() -> list[str]:
    """Return the names of the back ends that are installed, sorted; one may still be unusable here."""
    return sorted(_registered())


def load(name: str) -> Connect:
    """Import a back end and return its `connect` function.

    Parameters
    ----------
    name : str
        Name of an entry point, such as ``"mpi"`` or ``"local"``.

    Raises
    ------
    ValueError
        No back end of that name is installed.
    BackendError
        It is installed but cannot be imported.
    """
    points = _registered()
    if name not in points:
        close = difflib.get_close_matches(name, points, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        message = (
            f"no back end `{name}` is installed; entry points {ENTRY_POINT_GROUP}: {sorted(points)}{hint}"
        )
        raise ValueError(message)
    try:
        return cast("Connect", points[name].load())
    except (ImportError, AttributeError) as error:
        message = f"the back end `{name}` ({points[name].value}) cannot be imported: {error}"
        raise BackendError(message) from error


# Variables that a launcher sets for each process: (variable, the number of processes is its value, launcher).
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", True, "Open MPI's mpiexec"),
    ("PMI_SIZE", True, "a Hydra or PMI mpiexec (MPICH, Intel MPI, Slurm PMI2)"),
    ("PMIX_RANK", False, "a PMIx launcher (Open MPI, Slurm)"),
    ("PMI_RANK", False, "a PMI launcher"),
    ("MPI_LOCALNRANKS", False, "a Hydra mpiexec (MPICH, Intel MPI)"),
    ("MV2_COMM_WORLD_SIZE", True, "MVAPICH2's mpirun_rsh"),
)


def launcher(environ: Mapping[str, str] | None = None) -> tuple[str, int | None] | None:
    """Return the MPI launcher that started this process and its number of processes, where variables tell.

    Parameters
    ----------
    environ : mapping, optional
        Variables to read instead of `os.environ`.

    Returns
    -------
    tuple of (str, int or None), or None
        Description and world size (None: not told); None when no launcher has left its variables.
    """
    env = os.environ if environ is None else environ
    for variable, is_size, description in _LAUNCHERS:
        if variable in env:
            value = env[variable]
            return description, int(value) if is_size and value.isdigit() else None
    if env.get("SLURM_MPI_TYPE", "none") not in ("", "none"):
        return f"srun --mpi={env['SLURM_MPI_TYPE']}", None
    return None


def detect(environ: Mapping[str, str] | None = None) -> str:
    """Return ``"mpi"`` for a process that an MPI launcher started, ``"nccl"`` where torchrun's or JAX's
    variables name several processes, else ``"local"``.
    """
    if launcher(environ) is not None:
        return "mpi"
    env = os.environ if environ is None else environ
    if any(place in env and env.get(number, "1") != "1" for number, place in _PLACES):
        return "nccl"
    return "local"


_PLACES = (("WORLD_SIZE", "RANK"), ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))


def half_named(environ: Mapping[str, str] | None = None) -> str | None:
    """Return a text on a variable that says that there are several processes, without the one that says which
    of them this is: :func:`detect` takes it for a process alone. None where there is no such variable.
    """
    env = os.environ if environ is None else environ
    for number, place in _PLACES:
        if place not in env and env.get(number, "1") != "1":
            return (
                f"{number}={env[number]} says that there are several processes, but {place}, which of them "
                f'this is, is not set: it works alone; set {place}, or call gccomm.init("local") if that is '
                "meant"
            )
    return None


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        message = f"the environment variable {variable} must be a number of seconds, 0 or more; got {text!r}"
        raise ValueError(message)
    return value


class OnChannel:
    """What handles of a back end have in common that share a channel, ``_channel``."""

    _channel: Any

    @property
    def shared(self) -> dict[str, Any]:
        """What all handles on this communicator share."""
        found: dict[str, Any] = self._channel.shared
        return found

    @property
    def interrupt_deadline(self) -> float | None:
        """A value of `time.monotonic`: a rank that still waits after it gives everything up."""
        found: float | None = self._channel.interrupt_deadline
        return found

    @interrupt_deadline.setter
    def interrupt_deadline(self, value: float | None) -> None:
        self._channel.interrupt_deadline = value

    @property
    def background(self) -> bool:
        """Whether the program computes while this rank waits: waits then leave it the core."""
        found: bool = self._channel.background
        return found

    @background.setter
    def background(self, value: bool) -> None:
        self._channel.background = value


class Patience:
    """When a waiting rank reports a stall, gives up, or aborts: the same rules for every back end.

    Parameters
    ----------
    rank, size : int
        Named in the reports.
    stall_s, timeout_s : float, optional
        Seconds until one line goes to stderr and until `CollectiveTimeout`; 0 means never. Without them the
        variables ``GCCOMM_STALL_S`` (60) and ``GCCOMM_TIMEOUT_S`` (0) are read, once.

    Raises
    ------
    ValueError
        A variable is not a number of seconds.
    """

    def __init__(
        self, rank: int, size: int, stall_s: float | None = None, timeout_s: float | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self.stall_s = _seconds("GCCOMM_STALL_S", 60.0) if stall_s is None else stall_s
        self.timeout_s = _seconds("GCCOMM_TIMEOUT_S", 0.0) if timeout_s is None else timeout_s
        self.activity: Activity = ""

    def begin(self, operation: str) -> Wait:
        """Start the clock of one wait; `operation` names the call of the back end."""
        return Wait(self, operation)

    def describe(self, operation: str) -> str:
        """Return what this rank waits in: the operation of the back end and the caller's activity."""
        text = self.activity() if callable(self.activity) else self.activity
        return f"{operation} ({text})" if text else operation


class Wait:
    """The clock of one wait: `check` it between two looks at whether the others have come."""

    def __init__(self, patience: Patience, operation: str) -> None:
        self._patience = patience
        self._operation = operation
        self._start = time.monotonic()
        self._stall = self._start + patience.stall_s if patience.stall_s else float("inf")
        self._end = self._start + patience.timeout_s if patience.timeout_s else float("inf")
        self._next = min(self._stall, self._end)

    @property
    def next_event(self) -> float:
        """The time (`time.monotonic`) before which `check` has nothing to do; inf if never."""
        return self._next

    def check(self) -> float:
        """Report a stall once it is due, and return the seconds waited so far.

        Raises
        ------
        CollectiveTimeout
            The wait has lasted longer than allowed.
        """
        now = time.monotonic()
        patience, waited = self._patience, now - self._start
        if now < self._next:
            return waited
        where = f"rank {patience.rank} of {patience.size} has waited {waited:.1f} s in "
        where += patience.describe(self._operation)
        if now >= self._end:
            message = f"{where}; another rank has not come within GCCOMM_TIMEOUT_S = {patience.timeout_s:g} s"
            raise CollectiveTimeout(message)
        self._stall = float("inf")
        self._next = self._end
        hint = "; another rank is late, has made fewer calls or is gone (GCCOMM_TIMEOUT_S sets a limit)"
        with suppress(OSError, ValueError, AttributeError):  # a closed stderr must not break the call
            print(f"gccomm: {where}{hint}", file=sys.stderr, flush=True)
        return waited
