"""A machine with GPUs, without any: what CuPy offers of them, streams that are as late as they may be.

What is asked of a stream happens when somebody waits for it, or has asked three times whether it is done.
Memory is rubbish once it has been given back: pinned memory at once, a device's in the order of the stream
that it was taken on. Ranks are threads; their devices share the machine.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.cuda_on_cpu import OnCpu
from tests.fake_arrays import MemoryPointer, Unowned, ndarray

__all__ = ["Action", "Graph", "Machine", "RuntimeFailure", "Stream", "ndarray"]

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2  # modes of captures, and of threads

POLLS = 3  # how often one has to ask before something moves


class RuntimeFailure(RuntimeError):
    """In the place of CUDARuntimeError."""


class Action:
    """Something that a stream does; `run` returns False where it cannot be done yet."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self.done = False

    def run(self) -> bool:
        self._work()
        return True

    def again(self, stream: Stream) -> Action:
        """Return the same for another launch of a graph."""
        return Action(self._work)

    def join(self, graph: Graph) -> None:
        """Become a part of a graph."""


class Mark(Action):
    """What an event stands for."""

    def __init__(self, stream: Stream, capture: Capture | None) -> None:
        super().__init__(lambda: None)
        self.stream, self.capture, self.polls = stream, capture, 0


class Waiting(Action):
    """A stream that waits for an event."""

    def __init__(self, mark: Mark) -> None:
        super().__init__(lambda: None)
        self.mark = mark

    def run(self) -> bool:
        if not self.mark.done:
            self.mark.stream.advance(self.mark)
        return self.mark.done


class Capture:
    """Work that is noted and not done: in the order in which it was asked for."""

    def __init__(self, origin: Stream, mode: int) -> None:
        self.origin, self.mode, self.thread = origin, mode, threading.get_ident()
        self.actions: list[Action] = []
        self.ahead: set[Stream] = set()  # streams whose work the origin has not waited for


class Graph:
    """A capture that can be launched."""

    def __init__(self, machine: Machine, actions: list[Action]) -> None:
        self._machine, self.actions = machine, actions
        for action in actions:
            action.join(self)

    def launch(self, stream: Stream) -> None:
        with self._machine.changed:
            for action in self.actions:
                stream.put(action.again(stream))


class Stream:
    """Work in order; nothing is done before somebody waits."""

    def __init__(self, machine: Machine, device: int, ptr: int, non_blocking: bool = True) -> None:
        self.machine, self.device_id, self.ptr, self.non_blocking = machine, device, ptr, non_blocking
        self.todo: deque[Action] = deque()
        self.capture: Capture | None = None
        self._advancing = False
        machine.streams[ptr] = self

    def put(self, action: Action) -> None:
        if self.capture is not None:
            self.capture.actions.append(action)
            if self is not self.capture.origin and not isinstance(action, Mark):
                self.capture.ahead.add(self)
        else:
            self.todo.append(action)
            self.machine.changed.notify_all()

    def advance(self, until: Action | None = None) -> None:
        """Work, until something is done, or as far as it goes."""
        if self._advancing:
            return
        self._advancing = True
        try:
            while self.todo and not (until is not None and until.done):
                action = self.todo[0]
                if not action.run():
                    return
                action.done = True
                self.todo.popleft()
        finally:
            self._advancing = False

    # What CuPy has

    def synchronize(self) -> None:
        with self.machine.changed:
            if self.capture is not None:
                raise RuntimeFailure("cudaErrorStreamCaptureUnsupported")
            self.machine.synchronisations += 1
            last, began = self.todo[-1] if self.todo else None, time.monotonic()
            while last is not None and not last.done:
                self.advance(last)
                if not last.done:
                    woken = self.machine.changed.wait(self.machine.nap_s)
                    assert woken or time.monotonic() < began + 10, "a stream never ends"

    def wait_event(self, event: Event) -> None:
        with self.machine.cupy.cuda.Device(self.device_id):  # the program's own affair
            self.machine.wait_event(self.ptr, event.ptr)

    def record(self, event: Event | None = None) -> Event:
        event = event or Event(self.machine)
        with self.machine.cupy.cuda.Device(self.device_id):
            self.machine.record(event.ptr, self.ptr)
        return event

    def begin_capture(self, mode: int | None = None) -> None:
        if self.ptr <= 0:
            raise RuntimeFailure("cudaErrorStreamCaptureUnsupported: the legacy default stream")
        self.capture = Capture(self, RELAXED if mode is None else mode)
        self.machine.captures.append(self.capture)

    def is_capturing(self) -> bool:
        return self.capture is not None

    def end_capture(self) -> Graph:
        capture = self.capture
        assert capture is not None
        self.machine.captures.remove(capture)
        for stream in self.machine.streams.values():
            if stream.capture is capture:
                stream.capture = None
        if capture.ahead:
            raise RuntimeFailure("cudaErrorStreamCaptureUnjoined")
        return Graph(self.machine, capture.actions)

    def __enter__(self) -> Stream:
        self.machine.stack(self.device_id).append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.machine.stack(self.device_id).pop()

    def use(self) -> Stream:
        self.machine.stack(self.device_id)[-1] = self
        return self


class Event:
    """A place in a stream."""

    def __init__(self, machine: Machine, disable_timing: bool = False) -> None:
        self.ptr = machine.handle()
        self._machine = machine
        self.mark: Mark | None = None
        machine.events[self.ptr] = self

    @property
    def done(self) -> bool:
        return self._machine.query(self.ptr) == 0

    def record(self, stream: Stream) -> None:
        self._machine.record(self.ptr, stream.ptr)

    def synchronize(self) -> None:
        with self._machine.changed:
            self._machine.synchronisations += 1
            while self._machine.query(self.ptr) != 0:
                self._machine.changed.wait(0.001)  # other ranks go on


class Memory:
    """Device memory."""

    def __init__(self, machine: Machine, nbytes: int) -> None:
        machine.require_unhindered("cudaMalloc")
        self._machine, self.size = machine, nbytes
        self._stream = machine.current_stream()
        self.device_id = self._stream.device_id
        room = np.full(nbytes + 512, 0x5A, np.uint8)
        start = -room.ctypes.data % 256
        self.bytes = room[start : start + nbytes]
        self.ptr = self.bytes.ctypes.data
        machine.allocated.append((room, self.ptr, nbytes))

    def memset_async(self, value: int, size: int, stream: Any = None) -> None:
        room = self.bytes[:size]
        stream = stream or self._machine.current_stream()
        with self._machine.changed:
            stream.put(Action(lambda: room.fill(value)))

    def __del__(self) -> None:
        room = self.bytes
        with self._machine.changed:
            if self._stream.capture is None:
                self._stream.todo.append(Action(lambda: room.fill(0xEE)))


class Pinned(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """Pinned host memory, whose room others get at once."""

    machine: Machine | None = None

    @classmethod
    def of(cls, machine: Machine, nbytes: int) -> Pinned:
        machine.require_unhindered("cudaHostAlloc")
        made = np.zeros(nbytes, np.uint8).view(cls)
        machine.pinned.append(made.base)
        machine.held += 1
        made.machine = machine
        return made

    @property
    def ptr(self) -> int:
        return int(self.ctypes.data)

    def __del__(self) -> None:
        if self.machine is not None:
            np.asarray(self)[:] = 0xEE
            self.machine.held -= 1


class Machine:
    """GPUs, and in `cupy` the module that gives them.

    Parameters
    ----------
    devices : int
        How many there are; below 0 there is no driver.
    shim : OnCpu, optional
        What kernels run on.
    """

    def __init__(self, devices: int = 1, shim: OnCpu | None = None, nvrtc: Any = None) -> None:
        self.devices, self.shim = devices, shim
        self.changed = threading.Condition()
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, Event] = {}
        self.allocated: list[tuple[Any, int, int]] = []
        self.pinned: list[Any] = []
        self.captures: list[Capture] = []
        self.held = self.synchronisations = 0
        self.nap_s = 10.0  # before one looks again, where no other thread says that something has changed
        self.status = 0  # what every query gives instead, once the device has failed
        self._next = 1000
        self._local = threading.local()
        self.null = {
            d: Stream(self, d, -d, False) for d in range(max(devices, 1))
        }  # handle 0, of each device
        self.cupy = self._module(nvrtc)

    def handle(self) -> int:
        with self.changed:
            self._next += 8
            return self._next

    # What is current in a thread

    def device(self) -> int:
        stack: list[int] = self._local.__dict__.setdefault("devices", [0])
        return stack[-1]

    def stack(self, device: int) -> list[Stream]:
        stacks: dict[int, list[Stream]] = self._local.__dict__.setdefault("streams", {})
        return stacks.setdefault(device, [self.null[device]])

    def current_stream(self, device: int = -1) -> Stream:
        return self.stack(self.device() if device < 0 else device)[-1]

    def stream_of(self, ptr: int) -> Stream:
        return self.null[self.device()] if ptr == 0 else self.streams[ptr]

    # Captures

    def exchange(self, mode: Any) -> int:
        """Give this thread another mode, and return the old one, as the driver does."""
        old = getattr(self._local, "mode", GLOBAL)
        self._local.mode, mode._obj.value = mode._obj.value, old
        return 0

    def require_unhindered(self, what: str) -> None:
        """Raise RuntimeFailure where a capture forbids a call to this thread."""
        mode = getattr(self._local, "mode", GLOBAL)
        for one in self.captures if mode != RELAXED else ():
            own = one.thread == threading.get_ident()
            if (own and one.mode != RELAXED) or (mode == GLOBAL and one.mode == GLOBAL):
                raise RuntimeFailure(f"cudaErrorStreamCaptureUnsupported: {what}")

    def require_current(self, stream: Stream) -> None:
        """Raise AssertionError where a call makes a context on a device that it is not for."""
        assert stream.device_id == self.device(), f"device {self.device()} is current"

    # The runtime

    def record(self, event: int, stream: int) -> None:
        with self.changed:
            found = self.stream_of(stream)
            self.require_current(found)
            mark = self.events[event].mark = Mark(found, found.capture)
            found.put(mark)

    def wait_event(self, stream: int, event: int, flags: int = 0) -> None:
        with self.changed:
            mark, found = self.events[event].mark, self.stream_of(stream)
            self.require_current(found)
            if mark is None:
                return
            if mark.capture is not None:
                assert found.capture in (None, mark.capture)
                found.capture = mark.capture
                if mark.stream is not found:
                    mark.capture.ahead.discard(mark.stream)
            elif found.capture is not None:
                raise RuntimeFailure("cudaErrorStreamCaptureIsolation")
            found.put(Waiting(mark))

    def query(self, event: int) -> int:
        with self.changed:
            self.require_unhindered("cudaEventQuery")
            if self.status:
                return self.status
            mark = self.events[event].mark
            if mark is None:
                return 0
            self.require_current(mark.stream)
            if mark.capture is not None:
                return 907
            mark.polls += 1
            if not mark.done and mark.polls >= POLLS:
                mark.stream.advance(mark)
            return 0 if mark.done else 600

    def owns(self, address: int) -> bool:
        return any(start <= address < start + max(size, 1) for _, start, size in self.allocated)

    def copy(self, to: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        ends = (self.owns(source), self.owns(to))
        assert ends == {1: (False, True), 2: (True, False), 3: (True, True)}[kind], (
            "a copy in the wrong direction"
        )
        with self.changed:
            self.require_current(self.stream_of(stream))
            self.stream_of(stream).put(Action(lambda: OnCpu.copy(to, source, nbytes)))

    def count(self) -> int:
        if self.devices < 0:
            raise RuntimeFailure("cudaErrorInsufficientDriver: the driver is too old")
        return self.devices

    def launch(self, name: str, grid: int, args: Sequence[Any]) -> None:
        shim, held = self.shim, list(args)
        assert shim is not None
        with self.changed:
            self.current_stream().put(Action(lambda: shim.run(name, grid, held)))

    def _module(self, nvrtc: Any) -> Any:
        runtime = SimpleNamespace(
            CUDARuntimeError=RuntimeFailure,
            getDeviceCount=self.count,
            getDeviceProperties=lambda n: {"uuid": bytes([n] * 16), "name": b"fake"},
            pointerGetAttributes=lambda at: SimpleNamespace(type=2 if self.owns(at) else 0, device=0),
            memoryTypeDevice=2,
            memoryTypeManaged=3,
            memcpyHostToDevice=1,
            memcpyDeviceToHost=2,
            memcpyDeviceToDevice=3,
            memcpyAsync=self.copy,
            memsetAsync=self.set,
            eventQuery=self.query,
            eventRecord=self.record,
            streamWaitEvent=self.wait_event,
            streamIsCapturing=lambda ptr: self.stream_of(ptr).capture is not None,
        )
        cuda = SimpleNamespace(
            runtime=runtime,
            nvrtc=nvrtc,
            Device=self._device_class(),
            Event=lambda disable_timing=False: Event(self, disable_timing),
            Stream=self._stream_class(),
            alloc=lambda nbytes: Memory(self, nbytes),
            alloc_pinned_memory=lambda nbytes: Pinned.of(self, nbytes),
            get_current_stream=self.current_stream,
            UnownedMemory=lambda ptr, size, owner, device_id=-1: Unowned(self, ptr, owner, device_id),
            MemoryPointer=MemoryPointer,
        )
        module = SimpleNamespace(cuda=cuda, RawModule=self._raw_module, ndarray=ndarray, __version__="14.2.0")
        module.asarray, module.asnumpy = self.asarray, self.asnumpy
        return module

    def set(self, at: int, value: int, nbytes: int, stream: int) -> None:
        with self.changed:
            self.require_current(self.stream_of(stream))
            self.stream_of(stream).put(Action(lambda: ctypes.memset(at, value, nbytes) and None))

    # Arrays

    def asarray(self, values: Any) -> ndarray:
        """Return an array on the current device, whose content comes when the current stream does."""
        source = np.array(values, order="C")
        made = ndarray(source.shape, source.dtype, MemoryPointer(Memory(self, max(source.nbytes, 1)), 0))
        with self.changed:
            self.current_stream().put(Action(lambda: np.copyto(made.host(), source)))
        return made

    def asnumpy(self, array: ndarray) -> Any:
        """Return the content as the current stream has it."""
        self.current_stream(array.device.id).synchronize()
        return array.host().copy()

    def _raw_module(self, path: str) -> Any:
        def function(name: str) -> Callable[..., None]:
            return lambda grid, block, args: self.launch(name, grid[0], args)

        return SimpleNamespace(get_function=function)

    def _stream_class(self) -> Any:
        machine = self

        def make(non_blocking: bool = False) -> Stream:
            return Stream(machine, machine.device(), machine.handle(), non_blocking)

        make.null = property(lambda _self: machine.null[machine.device()])  # type: ignore[attr-defined]
        return make

    def _device_class(self) -> Any:
        machine = self

        class Device:
            attributes = {"MultiProcessorCount": 1}  # noqa: RUF012
            compute_capability = "90"

            def __init__(self, number: int | None = None) -> None:
                self.id = machine.device() if number is None else number

            def __enter__(self) -> Device:
                machine.device()
                machine._local.devices.append(self.id)
                return self

            def __exit__(self, *_: object) -> None:
                machine._local.devices.pop()

            @property
            def pci_bus_id(self) -> str:
                return f"0000:{self.id:02x}:00.0"

            def synchronize(self) -> None:
                for stream in list(machine.streams.values()):
                    if stream.device_id == self.id:
                        stream.synchronize()

        return Device
