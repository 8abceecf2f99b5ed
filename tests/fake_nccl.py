"""NCCL without GPUs: communicators of a stand-in machine, which really reduce, and note what they are asked.

Ranks are threads. A reduction is done when every rank has asked for it and every rank's stream has come to
it; one whose sizes differ between ranks is never done, as NCCL would hang. Both wrappers are here: CuPy's as
`cupy.cuda.nccl`, and nccl4py as `nccl.core`.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakSet

import ml_dtypes
import numpy as np

from gccomm.kernels.cuda import capture
from tests.fake_gpu import Action, Graph, Machine, Stream, ndarray

__all__ = ["FakeNccl", "install"]

DTYPES: dict[int, Any] = {
    1: np.uint8,
    3: np.uint32,
    6: np.float16,
    7: np.float32,
    8: np.float64,
    9: ml_dtypes.bfloat16,
}
SUM, MAX, COPY = 0, 2, -1


class NcclError(RuntimeError):
    """In the place of either wrapper's."""


class Asked(NamedTuple):
    """What one operation is."""

    send: int
    recv: int
    count: int
    dtype: int
    operator: int
    root: int = 0
    what: str = "all"  # "one": for the root; "scatter": to each a part; "gather"


class Operation(Action):
    """One rank's part of an operation."""

    def __init__(self, comm: Comm, stream: Stream, asked: Asked) -> None:
        super().__init__(lambda: None)
        self.comm, self.stream, self.asked, self.ready = comm, stream, asked, False
        self.place = len(comm.group.parts[comm.rank])
        comm.group.parts[comm.rank].append(self)

    def again(self, stream: Stream) -> Action:
        return type(self)(self.comm, stream, self.asked)

    def run(self) -> bool:
        if self.done:
            return True
        if self.comm.aborted:
            self._array(self.asked.recv).view(np.uint8)[...] = 0x5A
            return True
        self.ready = True
        parts = self.comm.group.parts
        if any(len(of_rank) <= self.place for of_rank in parts):
            return False
        group = [of_rank[self.place] for of_rank in parts]
        for other in group:
            if not other.ready:
                other.stream.advance(other)
        if any(other.comm.aborted for other in group):
            return False
        if not self.done and all(other.ready for other in group):
            if (
                len({(o.asked.count, o.asked.dtype, o.asked.operator == COPY, o.asked.what) for o in group})
                > 1
            ):
                return False
            self._reduce(group)
        return self.done

    def _array(self, address: int, count: int = -1) -> Any:
        dtype = np.dtype(DTYPES[self.asked.dtype])
        raw = (ctypes.c_uint8 * ((self.asked.count if count < 0 else count) * dtype.itemsize)).from_address(
            address
        )
        return np.frombuffer(raw, dtype)

    def sent(self) -> Any:
        """Return a copy of what this rank brings."""
        count = self.asked.count * (self.comm.group.size if self.asked.what == "scatter" else 1)
        return self._array(self.asked.send, count).copy()

    def take(self, inputs: list[Any]) -> None:
        """Write this rank's result of what all have brought."""
        found = outcome(self.asked, self.comm.rank, inputs)
        if found is not None:
            self._array(self.asked.recv, found.size)[...] = found
        self.done = True

    def _reduce(self, group: list[Operation]) -> None:
        inputs = [other.sent() for other in group]
        for other in group:
            other.take(inputs)
        self.comm.group.machine.changed.notify_all()


def outcome(asked: Asked, rank: int, inputs: list[Any]) -> Any:
    """Return a rank's result, or None where it has none."""
    if asked.operator == COPY:
        return np.concatenate(inputs) if asked.what == "gather" else inputs[asked.root]
    total = inputs[0].copy()
    for one in inputs[1:]:
        total = np.maximum(total, one) if asked.operator == MAX else total + one
    if asked.what == "scatter":
        return total[rank * asked.count : (rank + 1) * asked.count]
    return total if asked.what != "one" or rank == asked.root else None


class Group:
    """The ranks of a communicator."""

    def __init__(self, machine: Machine, size: int) -> None:
        self.machine, self.size = machine, size
        self.parts: list[list[Operation]] = [[] for _ in range(size)]
        self.here: dict[int, Any] = {}
        self.splits: dict[int, Any] = {}


class Comm:
    """One rank of a communicator."""

    operation = Operation

    def __init__(self, nccl: FakeNccl, group: Group, rank: int, device: int) -> None:
        self.nccl, self.group, self.rank, self.device = nccl, group, rank, device
        self.aborted = self.destroyed = False
        self.asynchronous: int = 0
        self.log: list[tuple[Any, ...]] = []
        self.graphs: WeakSet[Graph] = WeakSet()
        self.splits = 0

    def enqueue(self, asked: Asked, stream: int) -> None:
        machine = self.group.machine
        if self.nccl.refuse is not None:
            raise NcclError(self.nccl.refuse)
        if self.aborted or self.destroyed:
            raise NcclError("invalid usage: the communicator is gone")
        assert stream != 0, "the legacy default stream"
        assert machine.device() == self.device, "another device is current"
        assert machine.owns(asked.send), "not device memory"
        assert machine.owns(asked.recv), "not device memory"
        self.log.append((*asked, stream, self.nccl.grouped()))
        self.nccl.later(lambda: self._put(asked, machine.streams[stream]))

    def _put(self, asked: Asked, stream: Stream) -> None:
        with self.group.machine.changed:
            if stream.capture is not None:
                stream.put(Captured(self, asked))
            else:
                stream.put(self.operation(self, stream, asked))

    def split(self, color: int, key: int) -> Comm | None:
        machine = self.group.machine
        with machine.changed:
            choices = self.group.splits.setdefault(self.splits, {})
            self.splits += 1
            choices[self.rank] = (color, key)
            machine.changed.notify_all()
            assert machine.changed.wait_for(lambda: len(choices) == self.group.size, 10)
            members = sorted((k, r) for r, (c, k) in choices.items() if isinstance(r, int) and c == color)
            if color < 0:
                return None
            ranks = [r for _, r in members]
            group = self.group.here.setdefault((id(choices), color), Group(machine, len(ranks)))
            return Comm(self.nccl, group, ranks.index(self.rank), self.device)

    def abort(self) -> None:
        with self.group.machine.changed:
            self.aborted = True
            self.group.machine.changed.notify_all()
            self._outlive_graphs()

    def destroy(self) -> None:
        with self.group.machine.changed:
            self._outlive_graphs()
            self.destroyed = True

    def _outlive_graphs(self) -> None:
        """Wait, as NCCL does, until no graph has operations of this communicator: one rank has none."""
        if self.group.size > 1:
            while self.graphs:
                self.group.machine.changed.wait(0.01)


class Captured(Action):
    """An operation within a graph."""

    def __init__(self, comm: Comm, asked: Asked) -> None:
        super().__init__(lambda: None)
        self._comm, self._asked = comm, asked

    def again(self, stream: Stream) -> Action:
        return self._comm.operation(self._comm, stream, self._asked)

    def join(self, graph: Graph) -> None:
        self._comm.graphs.add(graph)


class FakeNccl:
    """The library, for all ranks of a machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.comms: list[Comm] = []
        self.groups: dict[bytes, Group] = {}
        self.refuse: str | None = None
        self._local = threading.local()
        self._ids = 0

    def grouped(self) -> bool:
        return getattr(self._local, "depth", 0) > 0

    def later(self, call: Any) -> None:
        if self.grouped():
            self._local.calls.append(call)
        else:
            call()

    def group_start(self) -> None:
        self._local.depth = getattr(self._local, "depth", 0) + 1
        if self._local.depth == 1:
            self._local.calls = []

    def group_end(self) -> None:
        self._local.depth -= 1
        if self._local.depth == 0:
            for call in self._local.calls:
                call()

    def unique_id(self) -> bytes:
        self._ids += 1
        return bytes([self._ids, 200]) * 64

    def join(self, size: int, rank: int, unique_id: bytes) -> Comm:
        with self.machine.changed:
            group = self.groups.setdefault(bytes(unique_id), Group(self.machine, size))
            made = Comm(self, group, rank, self.machine.device())
            group.here[rank] = made
            self.comms.append(made)
            self.machine.changed.notify_all()
            assert self.machine.changed.wait_for(lambda: len(group.here) >= size, 10)
        return made


def _cupy_communicator(nccl: FakeNccl, signed: bool) -> Any:
    """Return the stand-in for cupy.cuda.nccl.NcclCommunicator."""

    class NcclCommunicator:
        def __init__(self, size: int, unique_id: Any, rank: int, made: Comm | None = None) -> None:
            if signed and made is None:
                assert isinstance(unique_id, tuple)
                unique_id = bytes(value & 0xFF for value in unique_id)
            self.comm = made or nccl.join(size, rank, unique_id)

        def rank_id(self) -> int:
            return self.comm.rank

        def size(self) -> int:
            return self.comm.group.size

        def device_id(self) -> int:
            return self.comm.device

        def allReduce(self, *args: int) -> None:  # noqa: N802
            *asked, stream = args
            self.comm.enqueue(Asked(*asked), stream)

        def broadcast(self, send: int, recv: int, count: int, dtype: int, root: int, stream: int) -> None:
            self.comm.enqueue(Asked(send, recv, count, dtype, COPY, root), stream)

        def reduce(self, *args: int) -> None:
            *asked, stream = args
            self.comm.enqueue(Asked(*asked, what="one"), stream)

        def reduceScatter(self, *args: int) -> None:  # noqa: N802
            *asked, stream = args
            self.comm.enqueue(Asked(*asked, what="scatter"), stream)

        def allGather(self, send: int, recv: int, count: int, dtype: int, stream: int) -> None:  # noqa: N802
            self.comm.enqueue(Asked(send, recv, count, dtype, COPY, what="gather"), stream)

        def commSplit(self, color: int, key: int) -> Any:  # noqa: N802
            made = self.comm.split(color, key)
            return None if made is None else NcclCommunicator(0, None, 0, made)

        def check_async_error(self) -> None:
            if self.comm.asynchronous:
                raise NcclError("NCCL_ERROR_SYSTEM_ERROR: remote process exited")

        def abort(self) -> None:
            self.comm.abort()

        def destroy(self) -> None:
            self.comm.destroy()

    NcclCommunicator.__module__ = "cupy_backends.cuda.libs.nccl"
    return NcclCommunicator


def _cupy_nccl(nccl: FakeNccl, *, signed: bool = False) -> Any:
    """Return the stand-in for cupy.cuda.nccl."""

    def get_unique_id() -> Any:
        found = nccl.unique_id()
        return tuple(v - 256 if v > 127 else v for v in found) if signed else found

    return SimpleNamespace(
        available=True,
        get_version=lambda: 23203,
        get_unique_id=get_unique_id,
        NcclCommunicator=_cupy_communicator(nccl, signed),
        groupStart=nccl.group_start,
        groupEnd=nccl.group_end,
    )


class UniqueId:
    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def __bytes__(self) -> bytes:
        return self.raw

    @staticmethod
    def from_bytes(raw: bytes) -> UniqueId:
        return UniqueId(raw)


def _core_communicator(nccl: FakeNccl) -> Any:
    """Return the stand-in for nccl.core.Communicator."""
    numbers = {np.dtype(dtype): number for number, dtype in DTYPES.items()}

    class Communicator:
        def __init__(self, made: Comm) -> None:
            self.comm = made
            self.rank, self.nranks = made.rank, made.group.size
            self.device = SimpleNamespace(device_id=made.device)

        @classmethod
        def init(cls, nranks: int, rank: int, unique_id: UniqueId) -> Communicator:
            return cls(nccl.join(nranks, rank, unique_id.raw))

        def _asked(self, send: ndarray, recv: ndarray, operator: int, root: int = 0) -> Asked:
            assert send.dtype == recv.dtype
            return Asked(
                send.data.ptr, recv.data.ptr, recv.shape[0], numbers[np.dtype(recv.dtype)], operator, root
            )

        def allreduce(self, send: ndarray, recv: ndarray, op: int, *, stream: int | None = None) -> None:
            self.comm.enqueue(self._asked(send, recv, op), stream or 0)

        def broadcast(self, send: ndarray, recv: ndarray, root: int, *, stream: int | None = None) -> None:
            self.comm.enqueue(self._asked(send, recv, COPY, root), stream or 0)

        def reduce(
            self, send: ndarray, recv: ndarray, op: int, root: int, *, stream: int | None = None
        ) -> None:
            asked = self._asked(send, recv, op, root)
            self.comm.enqueue(asked._replace(count=send.shape[0], what="one"), stream or 0)

        def reduce_scatter(self, send: ndarray, recv: ndarray, op: int, *, stream: int | None = None) -> None:
            assert send.shape[0] // self.nranks == recv.shape[0]
            self.comm.enqueue(self._asked(send, recv, op)._replace(what="scatter"), stream or 0)

        def allgather(self, send: ndarray, recv: ndarray, *, stream: int | None = None) -> None:
            asked = self._asked(send, recv, COPY)._replace(count=send.shape[0], what="gather")
            self.comm.enqueue(asked, stream or 0)

        def split(self, color: int | None, key: int) -> Any:
            made = self.comm.split(-1 if color is None else color, key)
            return SimpleNamespace(ptr=0) if made is None else Communicator(made)

        def get_async_error(self) -> int:
            return self.comm.asynchronous

        def get_last_error(self) -> str:
            return "remote process exited"

        def abort(self) -> None:
            self.comm.abort()

        def destroy(self) -> None:
            self.comm.destroy()

    Communicator.__module__ = "nccl.core.communicator"
    return Communicator


def _core(nccl: FakeNccl) -> Any:
    """Return the stand-in for nccl.core."""

    @contextmanager
    def group() -> Any:
        nccl.group_start()
        try:
            yield
        finally:
            nccl.group_end()

    versions = SimpleNamespace(libnccl=SimpleNamespace(version="2.32.3"))
    return SimpleNamespace(
        SUM=SUM,
        MAX=MAX,
        UniqueId=UniqueId,
        Communicator=_core_communicator(nccl),
        group=group,
        get_unique_id=lambda: UniqueId(nccl.unique_id()),
        get_version=lambda: versions,
    )


def install(patch: Any, machine: Machine, wrapper: str = "cupy", nccl: FakeNccl | None = None) -> FakeNccl:
    """Put the machine and NCCL in the place of modules: "cupy", "cupy13" (unique ids as integers) or
    "nccl4py".
    """
    found = FakeNccl(machine) if nccl is None else nccl
    cupy = machine.cupy
    cupy.cuda.nccl = _cupy_nccl(found, signed=wrapper == "cupy13")
    cupy.__version__ = "13.6.0" if wrapper == "cupy13" else "14.2.0"
    core = _core(found) if wrapper == "nccl4py" else None
    modules = {
        "cupy": cupy,
        "cupy.cuda": cupy.cuda,
        "nccl": core and SimpleNamespace(core=core),
        "nccl.core": core,
    }
    for name, module in modules.items():
        patch.setitem(__import__("sys").modules, name, module)
    patch.setattr(capture, "_exchange", lambda: machine.exchange)
    patch.setenv("GCCOMM_NCCL", "nccl4py" if wrapper == "nccl4py" else "cupy")
    return found
