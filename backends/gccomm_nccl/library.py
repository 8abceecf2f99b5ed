"""NCCL through nccl4py where it is installed, else through CuPy: the same few calls on addresses.

CuPy is needed either way, for memory, streams and events. ``GCCOMM_NCCL`` names one of the two ("nccl4py",
"cupy"). Nothing is imported before :func:`load` is called.
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from gccomm.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["BYTES", "Comm", "CupyNccl", "Library", "Nccl4py", "import_cupy", "library_of", "load"]

# ncclDataType_t and ncclRedOp_t; NCCL has no 16-bit integers, so 16-bit floats go as what they are.
TYPES = {"uint8": 1, "uint32": 3, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}
BYTES = {"uint8": 1, "uint32": 4, "float16": 2, "float32": 4, "float64": 8, "bfloat16": 2}
OPERATORS = {"sum": 0, "max": 2}
_SUCCESS, _IN_PROGRESS, _NO_COLOR = 0, 7, -1


class Comm(Protocol):
    """A communicator of one device. Buffers are device addresses, streams handles; calls only enqueue."""

    rank: int
    size: int
    device: int

    def all_reduce(self, send: int, recv: int, count: int, dtype: str, operator: str, stream: int) -> None:
        """Reduce `count` items by "sum" or "max"."""
        ...

    def broadcast(self, buffer: int, nbytes: int, root: int, stream: int) -> None:
        """Overwrite bytes with those of rank `root`."""
        ...

    def reduce(
        self, send: int, recv: int, count: int, dtype: str, operator: str, root: int, stream: int
    ) -> None:
        """Reduce `count` items into `recv` of rank `root`; the others' is not used."""
        ...

    def reduce_scatter(
        self, send: int, recv: int, count: int, dtype: str, operator: str, stream: int
    ) -> None:
        """Reduce `count` items for each rank, which lie in `send` in the order of the ranks, into `recv`."""
        ...

    def all_gather(self, send: int, recv: int, count: int, dtype: str, stream: int) -> None:
        """Collect `count` items of each rank in `recv`, in the order of the ranks."""
        ...

    def split(self, color: int | None, key: int) -> Comm | None:
        """Make one communicator per color; collective."""
        ...

    def failure(self) -> str | None:
        """Return what has gone wrong since, in the background; None if nothing has."""
        ...

    def abort(self) -> None:
        """End what is on its way, without the other ranks."""
        ...

    def destroy(self) -> None:
        """Free it; nothing may be on its way."""
        ...


class Library(Protocol):
    """One of the two wrappers of NCCL."""

    name: str

    @property
    def version(self) -> str:
        """NCCL's own."""
        ...

    def unique_id(self) -> bytes:
        """Return what ranks find each other by: rank 0's, on all of them."""
        ...

    def join(self, size: int, rank: int, unique_id: bytes) -> Comm:
        """Make a communicator on the current device; collective, and blocking."""
        ...

    def adopt(self, comm: Any) -> Comm:
        """Wrap a communicator that the program has made."""
        ...

    def group(self) -> AbstractContextManager[None]:
        """Return the context whose calls are launched together, at its end."""
        ...


class _CupyComm:
    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.rank, self.size, self.device = int(comm.rank_id()), int(comm.size()), int(comm.device_id())

    def all_reduce(self, send: int, recv: int, count: int, dtype: str, operator: str, stream: int) -> None:
        self._comm.allReduce(send, recv, count, TYPES[dtype], OPERATORS[operator], stream)

    def broadcast(self, buffer: int, nbytes: int, root: int, stream: int) -> None:
        self._comm.broadcast(buffer, buffer, nbytes, TYPES["uint8"], root, stream)

    def reduce(
        self, send: int, recv: int, count: int, dtype: str, operator: str, root: int, stream: int
    ) -> None:
        self._comm.reduce(send, recv, count, TYPES[dtype], OPERATORS[operator], root, stream)

    def reduce_scatter(
        self, send: int, recv: int, count: int, dtype: str, operator: str, stream: int
    ) -> None:
        self._comm.reduceScatter(send, recv, count, TYPES[dtype], OPERATORS[operator], stream)

    def all_gather(self, send: int, recv: int, count: int, dtype: str, stream: int) -> None:
        self._comm.allGather(send, recv, count, TYPES[dtype], stream)

    def split(self, color: int | None, key: int) -> Comm | None:
        made = self._comm.commSplit(_NO_COLOR if color is None else color, key)
        return None if color is None else _CupyComm(made)

    def failure(self) -> str | None:
        try:
            self._comm.check_async_error()
        except Exception as error:  # its NcclError, or a status that it has no name for
            return str(error) or type(error).__name__
        return None

    def abort(self) -> None:
        self._comm.abort()

    def destroy(self) -> None:
        self._comm.destroy()


class CupyNccl:
    """CuPy's wrapper.

    Raises
    ------
    ImportError
        CuPy, or NCCL, is not installed.
    """

    name = "cupy"

    def __init__(self) -> None:
        self._cupy = import_cupy()
        try:
            from cupy.cuda import nccl
        except ImportError as error:
            raise ImportError(f"CuPy cannot load NCCL ({error}): {_REMEDY}") from error
        if not nccl.available:
            raise ImportError(f"this CuPy has no NCCL: {_REMEDY}")
        self._nccl = nccl

    @property
    def version(self) -> str:
        """NCCL's own."""
        return _version(int(self._nccl.get_version()))

    def unique_id(self) -> bytes:
        """Return 128 bytes; before CuPy 14 these were signed integers."""
        found = self._nccl.get_unique_id()
        return found if isinstance(found, bytes) else bytes(value & 0xFF for value in found)

    def join(self, size: int, rank: int, unique_id: bytes) -> Comm:
        """Make a communicator on the current device."""
        given: Any = unique_id
        if int(self._cupy.__version__.partition(".")[0]) < 14:
            given = tuple(value - 256 if value > 127 else value for value in unique_id)
        return _CupyComm(self._nccl.NcclCommunicator(size, given, rank))

    def adopt(self, comm: Any) -> Comm:
        """Wrap a ``cupy.cuda.nccl.NcclCommunicator``."""
        return _CupyComm(comm)

    @contextmanager
    def group(self) -> Iterator[None]:
        """Return the context whose calls are launched together, at its end."""
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()


class _Nccl4pyComm:
    def __init__(self, comm: Any, core: Any, cupy: Any) -> None:
        self._comm, self._core, self._cupy = comm, core, cupy
        self.rank, self.size, self.device = int(comm.rank), int(comm.nranks), int(comm.device.device_id)
        self._operators = {"sum": core.SUM, "max": core.MAX}

    def _array(self, address: int, count: int, dtype: str) -> Any:
        """Return a CuPy array over memory that somebody else owns."""
        memory = self._cupy.cuda.UnownedMemory(address, count * BYTES[dtype], self, self.device)
        pointer = self._cupy.cuda.MemoryPointer(memory, 0)
        return self._cupy.ndarray((count,), _numpy(dtype), pointer)

    def all_reduce(self, send: int, recv: int, count: int, dtype: str, operator: str, stream: int) -> None:
        target = self._array(recv, count, dtype)
        source = target if send == recv else self._array(send, count, dtype)
        self._comm.allreduce(source, target, self._operators[operator], stream=stream)

    def broadcast(self, buffer: int, nbytes: int, root: int, stream: int) -> None:
        array = self._array(buffer, nbytes, "uint8")
        self._comm.broadcast(array, array, root, stream=stream)

    def reduce(
        self, send: int, recv: int, count: int, dtype: str, operator: str, root: int, stream: int
    ) -> None:
        source, target = self._array(send, count, dtype), self._array(recv, count, dtype)
        self._comm.reduce(source, target, self._operators[operator], root, stream=stream)

    def reduce_scatter(
        self, send: int, recv: int, count: int, dtype: str, operator: str, stream: int
    ) -> None:
        source = self._array(send, count * self.size, dtype)
        target = self._array(recv, count, dtype)
        self._comm.reduce_scatter(source, target, self._operators[operator], stream=stream)

    def all_gather(self, send: int, recv: int, count: int, dtype: str, stream: int) -> None:
        source = self._array(send, count, dtype)
        target = self._array(recv, count * self.size, dtype)
        self._comm.allgather(source, target, stream=stream)

    def split(self, color: int | None, key: int) -> Comm | None:
        made = self._comm.split(color, key)
        return None if color is None else _Nccl4pyComm(made, self._core, self._cupy)

    def failure(self) -> str | None:
        state = self._comm.get_async_error()
        if int(state) in (_SUCCESS, _IN_PROGRESS):
            return None
        return f"{getattr(state, 'name', state)}: {self._comm.get_last_error()}"

    def abort(self) -> None:
        self._comm.abort()

    def destroy(self) -> None:
        self._comm.destroy()


class Nccl4py:
    """NVIDIA's own wrapper, of which only the names with a promise are used.

    Raises
    ------
    ImportError
        It, CuPy, NCCL or ml_dtypes is not installed.
    """

    name = "nccl4py"

    def __init__(self) -> None:
        self._cupy = import_cupy()
        _bfloat16()  # now, when all ranks are told of it, and not in the middle of a call
        from nccl import core

        self._core = core

    @property
    def version(self) -> str:
        """NCCL's own."""
        found = self._core.get_version()
        library = getattr(found, "libnccl", found)
        return str(getattr(library, "version", library)) if library is not None else "unknown"

    def unique_id(self) -> bytes:
        """Return 128 bytes."""
        return bytes(self._core.get_unique_id())

    def join(self, size: int, rank: int, unique_id: bytes) -> Comm:
        """Make a communicator on the current device."""
        found = self._core.UniqueId.from_bytes(unique_id)
        return self.adopt(self._core.Communicator.init(size, rank, found))

    def adopt(self, comm: Any) -> Comm:
        """Wrap a ``nccl.core.Communicator``."""
        return _Nccl4pyComm(comm, self._core, self._cupy)

    def group(self) -> AbstractContextManager[None]:
        """Return the context whose calls are launched together, at its end."""
        found: AbstractContextManager[None] = self._core.group()
        return found


_REMEDY = 'install both by `pip install "gccomm[nccl12]"` (or "gccomm[nccl13]" for CUDA 13)'


def import_cupy() -> Any:
    """Return the module; ImportError with the remedy where it is missing."""
    try:
        import cupy
    except ImportError as error:
        raise ImportError(f"it needs CuPy, which cannot be imported ({error}): {_REMEDY}") from error
    return cupy


def load() -> Library:
    """Return the wrapper of NCCL that is to be used.

    Raises
    ------
    BackendError
        None can be imported.
    ValueError
        ``GCCOMM_NCCL`` names none.
    """
    kinds: dict[str, type[Nccl4py] | type[CupyNccl]] = {"nccl4py": Nccl4py, "cupy": CupyNccl}
    wanted = os.environ.get("GCCOMM_NCCL", "")
    if wanted not in ("", *kinds):
        msg = f"the environment variable GCCOMM_NCCL must be one of {', '.join(kinds)}; got {wanted!r}"
        raise ValueError(msg)
    name = wanted or ("nccl4py" if _installed("nccl.core") else "cupy")
    try:
        return kinds[name]()
    except ImportError as error:
        other = ", or set GCCOMM_NCCL=cupy" if name == "nccl4py" else ""
        raise BackendError(f"the back end `nccl` cannot use {name}: {error}{other}") from error


def library_of(comm: Any) -> Library | None:
    """Return the wrapper that a program's communicator belongs to; None where it is none of NCCL's."""
    module = type(comm).__module__
    if module.startswith("nccl.") and hasattr(comm, "allreduce"):
        return Nccl4py()
    if module.startswith(("cupy.", "cupy_backends.")) and hasattr(comm, "allReduce"):
        return CupyNccl()
    return None


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # its parent is missing, or is no package
        return False


def _numpy(dtype: str) -> Any:
    """Return a dtype that nccl4py knows."""
    return _bfloat16() if dtype == "bfloat16" else dtype


def _bfloat16() -> Any:
    try:
        import ml_dtypes
    except ImportError as error:
        raise ImportError(f"its bfloat16 needs ml_dtypes ({error}): pip install ml_dtypes") from error
    return ml_dtypes.bfloat16


def _version(number: int) -> str:
    """Return "2.27.3" for 22703."""
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"
