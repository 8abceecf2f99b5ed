"""The functions that most programs need: start here.

``init`` finds the ranks, ``compressed_allreduce`` reduces arrays over them in a few bits a coordinate. The
way of a call: arrays -> layout -> codec -> engine -> back end, and back.
"""

from __future__ import annotations

import threading
import warnings
from contextvars import ContextVar
from typing import Any

from gccomm import backends
from gccomm.codecs import Codec
from gccomm.communicator import Communicator
from gccomm.errors import BackendError
from gccomm.work import Work

__all__ = [
    "allreduce",
    "broadcast",
    "compressed_allreduce",
    "compressed_allreduce_async",
    "current",
    "init",
    "resolve",
    "using",
]

using: ContextVar[Communicator | None] = ContextVar("gccomm_communicator", default=None)
_default: Communicator | None = None
_default_how: bool | None = None  # its `hierarchical`


class _Alone:
    """A lock which the thread that holds it is told of, in place of waiting for itself."""

    def __init__(self) -> None:
        self._lock, self._holder = threading.Lock(), 0

    def __enter__(self) -> None:
        if self._holder == threading.get_ident():
            msg = (
                "gccomm.init() was called again by something that it imports: is a file of yours called like "
                "a package that a back end needs (mpi4py, nccl, cupy)?"
            )
            raise BackendError(msg)
        self._lock.acquire()
        self._holder = threading.get_ident()

    def __exit__(self, *error: object) -> None:
        self._holder = 0
        self._lock.release()


_lock = _Alone()


def init(backend: str = "auto", *, comm: Any = None, hierarchical: bool | None = None) -> Communicator:
    """Join the group of ranks; collective.

    Parameters
    ----------
    backend : str
        "mpi" (mpi4py), "nccl" (a CUDA device for each rank), "local" (this process alone), or "auto": "mpi"
        where an MPI launcher started the process or ``comm`` is given, "nccl" where torchrun's or JAX's
        variables name several processes, else "local". More by entry point ("gccomm.backends"). With "auto"
        over MPI, NCCL joins after the first call on arrays of a CUDA device.
    comm : mpi4py.MPI.Intracomm, optional
        The ranks, instead of all. gccomm works on a duplicate of its own. With "nccl" also a communicator of
        nccl4py or CuPy.
    hierarchical : bool, optional
        What hosts of several ranks do first, where there are several hosts. True: a host's ranks add up their
        floats, in float32 or float64, and one of them compresses the sum, so that only hosts count in the
        headroom of lanes: the error is smaller, and depends on which ranks share a host. None: one rank of a
        host exchanges the host's words, with the results of a group without hosts. False: all ranks exchange
        words. Equal on all ranks; the variable ``GCCOMM_HIERARCHY`` goes before it. Of arrays on devices NCCL
        adds up the floats of a host with True, and its words with ``GCCOMM_HIERARCHY=words``, and MPI is what
        goes between hosts; otherwise NCCL takes all ranks.

    Returns
    -------
    Communicator
        The one made without ``comm`` is also the default of all functions. A second call returns the same one
        while it is open, unless it names another back end. Functions call ``init()`` themselves where there
        is no default.

    Raises
    ------
    BackendError
        MPI is not installed, or its launcher and its library disagree about the number of ranks; or
        ``hierarchical=True``, and ranks of a host cannot share memory.
    ValueError, TypeError
        Unknown back end; ``comm`` is no communicator; ``hierarchical`` is no bool, differs between ranks, or
        is not that of the communicator that is open.
    """
    global _default, _default_how  # noqa: PLW0603 - the one process-wide default
    if not isinstance(backend, str):
        msg = f'`backend` must be "auto" or the name of a back end, got {backend!r}'
        raise TypeError(msg)
    if not (hierarchical is None or isinstance(hierarchical, bool)):
        msg = f"`hierarchical` must be True, False or None, got {hierarchical!r}"
        raise TypeError(msg)
    how = {} if hierarchical is None else {"hierarchical": hierarchical}
    name = backend if backend != "auto" else "mpi" if comm is not None else backends.detect()
    with _lock:
        if comm is not None:
            return Communicator(backends.load(name)(comm, **how), joins=backend == "auto")
        if _default is None and backend == "auto" and name == "local" and (text := backends.half_named()):
            warnings.warn(text, stacklevel=2)
        if _default is None or (backend != "auto" and _default.backend.partition("+")[0] != name):
            made = Communicator(backends.load(name)(**how), joins=backend == "auto" and name == "mpi")
            _default_how = hierarchical
            made._on_close = lambda: _forget(made)
            _default = made
        _require_same(hierarchical)
        return _default


def _require_same(hierarchical: bool | None) -> None:
    """Raise ValueError where the communicator that is open was asked to do otherwise."""
    if hierarchical is not None and hierarchical is not _default_how:
        msg = (
            f"gccomm.init() was called with hierarchical={_default_how} before, now {hierarchical}: "
            "close that communicator first"
        )
        raise ValueError(msg)


def _forget(comm: Communicator) -> None:
    global _default  # noqa: PLW0603
    if _default is comm:
        _default = None


def current() -> Communicator:
    """Return the communicator that functions use when none is given, calling :func:`init` where there is none
    yet.
    """
    return using.get() or _default or init()


def resolve(comm: Communicator | None) -> Communicator:
    """Return ``comm``, or the default where it is None."""
    if comm is None:
        return current()
    if not isinstance(comm, Communicator):
        msg = f"`comm` must be a gccomm.Communicator (gccomm.init(comm=...) makes one), got {comm!r}"
        raise TypeError(msg)
    return comm


def compressed_allreduce(
    x: Any,
    op: str = "sum",
    codec: str | Codec = "rotated",
    *,
    comm: Communicator | None = None,
    out: Any = None,
    exact_below: int = 1024,
    nonfinite: str = "propagate",
) -> Any:
    """Reduce arrays over all ranks, in a few bits a coordinate; collective and blocking.

    With lane codecs (all but raw, bf16 and fp16) the result has the same bits on every rank. Integers and
    booleans (logical or) are exact; float arrays below ``exact_below`` coordinates are exact to 2^-50 or so
    of the largest magnitude in them.

    Parameters
    ----------
    x : array, scalar or tree
        NumPy, JAX or PyTorch arrays, anything with DLPack or the buffer protocol, Python scalars, or dicts,
        lists, tuples, named tuples and JAX pytrees of these. float16, bfloat16, float32, float64, complex64,
        complex128, integers, bool. Keys, shapes and dtypes must be equal on all ranks. Never changed.
    op : str
        "sum" or "mean" (floats only).
    codec : str or Codec
        An id, "id:option=value", or an object of :func:`gccomm.get_codec`. Equal on all ranks.
    comm : Communicator, optional
        Default: that of :func:`init`.
    out : array or tree, optional
        Where to write the results; may be ``x`` itself.
    exact_below : int
        Coordinates from which on the codec is used.
    nonfinite : str
        "propagate": a block of up to 1024 coordinates with inf or NaN on any rank becomes NaN on all;
        "raise": NonFiniteError on all ranks.

    Returns
    -------
    array, scalar or tree
        In the library and dtype of ``x``; shares no memory with it unless ``out`` asks for that.

    Raises
    ------
    MismatchError
        Ranks call different things.
    NonFiniteError, NegotiationError, BackendError, CollectiveTimeout
        See :mod:`gccomm.errors`.
    TypeError, ValueError, BufferError, OverflowError
        A rank's own argument; raised on every rank.

    Examples
    --------
    >>> import numpy as np, gccomm
    >>> gccomm.compressed_allreduce(np.full(4, 0.5, np.float32))
    array([0.5, 0.5, 0.5, 0.5], dtype=float32)
    """
    return resolve(comm).compressed_allreduce(
        x, op, codec, out=out, exact_below=exact_below, nonfinite=nonfinite
    )


def compressed_allreduce_async(
    x: Any,
    op: str = "sum",
    codec: str | Codec = "rotated",
    *,
    comm: Communicator | None = None,
    out: Any = None,
    exact_below: int = 1024,
    nonfinite: str = "propagate",
) -> Work:
    """Begin to reduce arrays over all ranks, and return a handle; collective, does not block.

    The call is made by a thread of gccomm's own, after all asynchronous calls before it; blocking calls on
    the same ranks come after it. Its result has the same bits as that of :func:`compressed_allreduce` in its
    place, whose arguments it has.

    Parameters
    ----------
    x : array, scalar or tree
        Kept alive. Its arrays must not be changed before :meth:`Work.wait` has returned.
    op, codec, comm, exact_below, nonfinite
        As of :func:`compressed_allreduce`.
    out : array or tree, optional
        Where to write the results; of no known content before :meth:`Work.wait` has returned.

    Returns
    -------
    Work
        ``wait(timeout=None)`` returns the result, or raises what the blocking call would have raised, errors
        of arguments included; ``test()`` tells whether it is complete.

    Examples
    --------
    >>> import numpy as np, gccomm
    >>> work = gccomm.compressed_allreduce_async(np.full(4, 0.5, np.float32))
    >>> work.wait()
    array([0.5, 0.5, 0.5, 0.5], dtype=float32)
    """
    return resolve(comm).compressed_allreduce_async(
        x, op, codec, out=out, exact_below=exact_below, nonfinite=nonfinite
    )


def allreduce(
    x: Any,
    op: str = "sum",
    *,
    comm: Communicator | None = None,
    out: Any = None,
    nonfinite: str = "propagate",
) -> Any:
    """Reduce arrays over all ranks without compression (codec "raw"); otherwise as
    :func:`compressed_allreduce`.
    """
    return resolve(comm).allreduce(x, op, out=out, nonfinite=nonfinite)


def broadcast(x: Any, root: int = 0, *, comm: Communicator | None = None) -> Any:
    """Return the arrays of rank ``root`` on every rank; collective.

    Parameters
    ----------
    x : array, scalar or tree
        On every rank, with the same keys, shapes and dtypes.
    root : int
        Whose values; equal on all ranks.
    comm : Communicator, optional
        Default: that of :func:`init`.
    """
    return resolve(comm).broadcast(x, root)
