"""As much of CuPy as gccomm uses, without a device: what is asked of a stream happens when somebody waits for
it, memory that is given back is rubbish as soon as its stream comes to that, and pinned memory at once.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from gccomm.kernels.cuda.device import host_bytes
from gccomm.kernels.table import SEGMENT
from gccomm.layout import Geometry
from tests.cuda_on_cpu import OnCpu

__all__ = ["FakeCupy", "ndarray"]

RUBBISH = 0x5A
WITHOUT_TABLE = frozenset(("gccomm_guard",))  # kernels that read no table of segments


class RuntimeFailure(RuntimeError):
    """In the place of CUDARuntimeError."""


class Mark:
    """A place in a stream: reached when all before it is done."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.reached = stream, False
        stream.todo.append(self._reach)

    def _reach(self) -> None:
        self.reached = True

    def wait(self) -> None:
        self.stream.run_until(lambda: self.reached)


class Stream:
    """A stream: nothing happens before somebody waits."""

    def __init__(self, cupy: FakeCupy, device: int, ptr: int) -> None:
        self.cupy, self.device, self.ptr = cupy, device, ptr
        self.todo: deque[Callable[[], None]] = deque()
        self.waits = 0

    def run_until(self, reached: Callable[[], bool]) -> None:
        with self.cupy.lock:
            while self.todo and not reached():
                self.todo.popleft()()

    def step(self) -> None:
        with self.cupy.lock:
            if self.todo:
                self.todo.popleft()()

    def synchronize(self) -> None:
        self.waits += 1
        self.run_until(lambda: False)

    def __enter__(self) -> Stream:
        self.cupy.stack(self.device).append(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self.cupy.stack(self.device).pop() is self


class Event:
    """Done when its stream has come to it."""

    def __init__(self, cupy: FakeCupy) -> None:
        self.mark: Mark | None = None
        self.asked = 0
        self.ptr = next(cupy.numbers)
        cupy.events[self.ptr] = self

    @property
    def done(self) -> bool:
        """Whether it has come; who asks often sees the stream go on."""
        self.asked += 1
        if self.mark is not None and self.asked > 3:
            self.mark.stream.step()
        return self.mark is None or self.mark.reached

    def synchronize(self) -> None:
        if self.mark is not None:
            self.mark.wait()


class Memory:
    """Device memory of a pool: it stays where it is, with its content, until the stream has gone by."""

    def __init__(self, cupy: FakeCupy, nbytes: int) -> None:
        self.cupy, self.device = cupy, cupy.device
        self.stream = cupy.current()
        self.room = np.full(nbytes + 256, RUBBISH, np.uint8)
        start = -self.room.ctypes.data % 256
        self.bytes = self.room[start : start + nbytes]
        self.ptr = self.bytes.ctypes.data
        cupy.allocated[self.ptr] = nbytes, self.device
        cupy.rooms.append(self.room)  # what reads it too late finds rubbish, and no fault

    def __del__(self) -> None:
        room, ptr, cupy = self.room, self.ptr, self.cupy

        def use_again() -> None:
            room.fill(RUBBISH)
            cupy.allocated.pop(ptr, None)

        self.stream.todo.append(use_again)


class MemoryPointer:
    """An address, and what keeps the memory there."""

    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset


class Pinned(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """Pinned host memory, whose room others get at once."""

    cupy: FakeCupy | None = None

    @classmethod
    def of(cls, cupy: FakeCupy, nbytes: int) -> Pinned:
        made = np.zeros(nbytes, np.uint8).view(cls)
        cupy.pinned.append(made.base)
        cupy.held += 1
        made.cupy = cupy
        return made

    @property
    def ptr(self) -> int:
        return int(self.ctypes.data)

    def __del__(self) -> None:
        if self.cupy is not None:
            np.asarray(self)[:] = 0xEE
            self.cupy.held -= 1


class Device:
    """A device, as context: the current one."""

    attributes = {"MultiProcessorCount": 1}  # noqa: RUF012
    compute_capability = "90"

    def __init__(self, cupy: FakeCupy, number: int | None = None) -> None:
        self.cupy = cupy
        self.id = cupy.device if number is None else number

    def __enter__(self) -> Device:
        self.cupy.stack(-1).append(self.id)
        return self

    def __exit__(self, *_: object) -> None:
        assert self.cupy.stack(-1).pop() == self.id

    def synchronize(self) -> None:
        assert not self.cupy.capturing, "cudaErrorStreamCaptureUnsupported"
        for stream in list(self.cupy.streams.values()):
            if stream.device == self.id:
                stream.run_until(lambda: False)


class ndarray:  # noqa: N801
    """An array on a device; what is done with it is done in the order of the current stream."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Any,
        memptr: Any,
        strides: Sequence[int] | None = None,
        cupy: Any = None,
    ) -> None:
        self.cupy: FakeCupy = memptr.mem.cupy if cupy is None else cupy
        self.shape, self.dtype, self.data = tuple(shape), np.dtype(dtype), memptr
        if strides is None:
            strides = np.empty(self.shape, np.void(self.dtype.itemsize).dtype).strides
        self.strides = tuple(strides)
        self.device = Device(self.cupy, memptr.mem.device)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    def host(self) -> np.ndarray[Any, Any]:
        """Return the memory itself as NumPy sees it, whatever is still to be done."""
        item = self.dtype.itemsize
        if self.size and self.dtype.kind != "c":
            assert not any(at % item for at in (self.data.ptr, *self.strides)), "a misaligned address"
        low = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True) if n and s < 0)
        high = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True) if n and s > 0)
        if self.size == 0:
            return np.empty(self.shape, self.dtype)
        room = host_bytes(self.data.ptr + low, high - low + item)
        return np.ndarray(self.shape, self.dtype, room, -low, self.strides)

    def __setitem__(self, where: Any, value: ndarray) -> None:
        assert where is Ellipsis
        assert value.shape == self.shape
        assert value.dtype == self.dtype

        to, source = self.host(), value.host()  # as on a device: nothing keeps the memory

        def copy() -> None:
            to[...] = source

        self.cupy.current().todo.append(copy)

    def view_as(self, shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> ndarray:
        """Return a view, as slices and transposes are."""
        return ndarray(shape, self.dtype, MemoryPointer(_Part(self.data, offset), 0), strides, self.cupy)


ndarray.__module__ = "cupy"


class _Part:
    def __init__(self, data: Any, offset: int) -> None:
        self.data, self.ptr, self.device = data, data.ptr + offset, data.mem.device


class FakeCupy:
    """In the place of the module.

    Parameters
    ----------
    shim : OnCpu
        What kernels run on.
    devices : int
        How many there are; below 0 there is no driver.
    strict : bool
        Kernels may touch only tensors in the memory of their device.
    """

    ndarray = ndarray

    def __init__(self, shim: OnCpu, devices: int = 1, nvrtc: Any = None, strict: bool = False) -> None:
        self.shim, self.devices, self.strict = shim, devices, strict
        self.lock = threading.RLock()
        self.numbers = itertools.count(0x1000, 16)
        self.streams: dict[int, Stream] = {}
        self.defaults = [Stream(self, number, 0) for number in range(max(devices, 1))]
        self.events: WeakValueDictionary[int, Event] = WeakValueDictionary()
        self.allocated: dict[int, tuple[int, int]] = {}
        self.rooms: list[Any] = []
        self.pinned: list[Any] = []
        self.held = 0
        self.capturing: set[int] = set()  # streams
        self.status = 0  # what every query gives instead, once the device has failed
        self.loaded: list[str] = []
        self._local = threading.local()
        for stream in self.defaults:
            self.streams[-1 - stream.device] = stream
        self.cuda = SimpleNamespace(
            runtime=self._runtime(),
            nvrtc=nvrtc,
            Device=lambda number=None: Device(self, number),
            Event=lambda disable_timing=False: Event(self),
            Stream=self.stream,
            MemoryPointer=MemoryPointer,
            UnownedMemory=self._unowned,
            alloc=lambda nbytes: MemoryPointer(Memory(self, nbytes), 0),
            alloc_pinned_memory=lambda nbytes: Pinned.of(self, nbytes),
            get_current_stream=self.current,
        )

    def _runtime(self) -> SimpleNamespace:
        return SimpleNamespace(
            CUDARuntimeError=RuntimeFailure,
            getDeviceCount=self._count,
            pointerGetAttributes=self._attributes,
            memoryTypeDevice=2,
            memoryTypeManaged=3,
            memcpyHostToDevice=1,
            memcpyDeviceToHost=2,
            memcpyDeviceToDevice=3,
            memcpyAsync=self._copy,
            memcpyPeerAsync=self._copy_peer,
            memsetAsync=self._set,
            eventQuery=self._query,
            eventRecord=self._record,
            streamWaitEvent=self._wait_event,
            streamIsCapturing=lambda ptr: ptr in self.capturing,
            streamSynchronize=lambda ptr: self._stream_at(ptr).synchronize(),
        )

    # Streams and devices

    def stack(self, which: int) -> list[Any]:
        """Return what this thread has made current: devices (-1), or streams of a device."""
        if not hasattr(self._local, "stacks"):
            self._local.stacks = {}
        found: list[Any] = self._local.stacks.setdefault(which, [])
        return found

    @property
    def device(self) -> int:
        """The current device."""
        stack = self.stack(-1)
        return int(stack[-1]) if stack else 0

    def current(self, device: int = -1) -> Stream:
        """The current stream."""
        number = self.device if device < 0 else device
        stack = self.stack(number)
        return stack[-1] if stack else self.defaults[number]

    def stream(self, non_blocking: bool = False) -> Stream:
        """Make a stream; the default stream knows nothing of it."""
        assert non_blocking
        made = Stream(self, self.device, next(self.numbers))
        self.streams[made.ptr] = made
        return made

    def _stream_at(self, ptr: int) -> Stream:
        return self.defaults[self.device] if ptr in (0, 1) else self.streams[ptr]

    def _here(self, ptr: int) -> Stream:
        """Return a stream of the current device; a call for another one would make a context on this one."""
        found = self._stream_at(ptr)
        assert found.device == self.device, f"a stream of device {found.device}, and {self.device} is current"
        return found

    def _query(self, event: int) -> int:
        return self.status or (0 if self.events[event].done else 600)

    def _record(self, event: int, stream: int) -> None:
        self.events[event].mark = Mark(self._here(stream))

    def _wait_event(self, stream: int, event: int) -> None:
        mark = self.events[event].mark
        assert mark is not None
        self._here(stream).todo.append(mark.wait)

    def _count(self) -> int:
        if self.devices < 0:
            raise RuntimeFailure("cudaErrorInsufficientDriver: the driver is too old")
        return self.devices

    # Memory

    def _attributes(self, address: int) -> SimpleNamespace:
        for start, (nbytes, device) in list(self.allocated.items()):
            if start <= address < start + max(nbytes, 1):
                return SimpleNamespace(type=2, device=device)
        return SimpleNamespace(type=0, device=-1)

    def _unowned(self, ptr: int, size: int, owner: Any, device_id: int) -> SimpleNamespace:
        return SimpleNamespace(cupy=self, ptr=ptr, size=size, owner=owner, device=device_id)

    def _copy(self, to: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        ends = [self._attributes(address).type == 2 for address in (source, to)]
        assert ends == [kind in (2, 3), kind in (1, 3)], "a copy in the wrong direction"
        self._here(stream).todo.append(lambda: OnCpu.copy(to, source, nbytes))

    def _copy_peer(self, to: int, there: int, source: int, here: int, nbytes: int, stream: int) -> None:
        assert [self._attributes(address).device for address in (to, source)] == [there, here]
        self._here(stream).todo.append(lambda: OnCpu.copy(to, source, nbytes))

    def _set(self, ptr: int, value: int, nbytes: int, stream: int) -> None:
        assert self._attributes(ptr).type == 2
        self._here(stream).todo.append(lambda: host_bytes(ptr, nbytes).fill(value))

    # Arrays

    def asarray(self, values: Any) -> ndarray:
        """Return an array whose content comes when the current stream does."""
        source = np.array(values, order="C")
        made = ndarray(source.shape, source.dtype, self.cuda.alloc(max(source.nbytes, 1)))

        def fill() -> None:
            made.host()[...] = source

        self.current().todo.append(fill)
        return made

    def asnumpy(self, array: ndarray) -> np.ndarray[Any, Any]:
        """Return the content as the current stream has it."""
        self.current(array.device.id).synchronize()
        return array.host().copy()

    @contextmanager
    def on(self, stream: Stream) -> Any:
        """Make a stream current."""
        with stream:
            yield

    # Kernels

    def RawModule(self, path: str) -> SimpleNamespace:  # noqa: N802
        self.loaded.append(path)
        return SimpleNamespace(get_function=self._function)

    def _function(self, name: str) -> Callable[..., None]:
        def launch(grid: tuple[int], block: tuple[int], args: Sequence[np.generic]) -> None:
            assert block == (128,)
            device = self.device

            def run() -> None:
                if self.strict and name not in WITHOUT_TABLE:
                    self._check(int(args[0]), int(args[1]), device)
                self.shim.run(name, grid[0], list(args))

            self.current().todo.append(run)

        return launch

    def _check(self, table: int, count: int, device: int) -> None:
        """Raise AssertionError for a tensor that is not in the memory of the device."""
        for row in host_bytes(table, count * SEGMENT.itemsize).view(SEGMENT):
            before = Geometry(int(row["size"]), int(row["row"])).offset(int(row["block0"]))
            item = (4, 8, 2, 2, 1, 2, 4, 8, 1, 2, 4, 8, 1)[int(row["dtype"])]
            items = {"src": item, "dst": item, "res_in": max(item, 4), "res_out": max(item, 4)}
            for name, size in items.items():
                if row[name] and row["size"]:
                    found = self._attributes((int(row[name]) + before * size) % (1 << 64))
                    assert found.type == 2, f"{name} of a segment is no memory of a device"
                    assert found.device == device, f"{name} of a segment is on device {found.device}"
