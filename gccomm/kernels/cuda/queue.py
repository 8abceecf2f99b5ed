"""Memory of a CUDA device, and the stream of gccomm's own on which everything there is done.

The stream of gccomm follows the streams on which a call's arrays were made, and the caller's streams follow
it before they use results: by events, so that the host waits for neither.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gccomm.errors import BackendError
from gccomm.kernels.cuda.capture import relaxed

__all__ = ["DeviceArray", "Loan", "Queue", "Strided"]

_ITEMS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}
_READY, _NOT_READY = 0, 600  # cudaSuccess, cudaErrorNotReady
_PER_THREAD = 2  # the handle of the default stream of whichever thread it is used in


class Strided(NamedTuple):
    """Elements in a device's memory in any layout: address of the first, bytes of one, shape, strides in
    bytes, and what keeps the memory.
    """

    address: int
    item_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    owner: Any


class Loan:
    """Memory of a queue's pool that is given back when the last that holds it lets go.

    Attributes
    ----------
    streams : set of int
        Streams of the caller's that use it: the queue follows them before the memory is used again.
    anywhere : bool
        It is used on streams that are not known.
    """

    __slots__ = ("__weakref__", "_memory", "_queue", "anywhere", "streams")

    def __init__(self, queue: Queue, memory: Any) -> None:
        self._queue, self._memory = queue, memory
        self.streams: set[int] = set()
        self.anywhere = False

    def __del__(self) -> None:
        if sys is None or sys.is_finalizing():
            return
        queue = self._queue
        # A thread's own default stream is another one here, and a graph has no place for what is not its own.
        unknown = self.anywhere or _PER_THREAD in self.streams
        try:
            unknown = unknown or any(queue.capturing(stream) for stream in self.streams)
            for stream in () if unknown else self.streams:
                queue.follow(stream)
        except Exception:  # of a stream that is no more, though the device may still do what it was asked for
            unknown = True
        if unknown:
            queue.parked.append(self._memory)


class DeviceArray:
    """Flat memory of a device: what views, results and residuals are there.

    ``array[...] = other`` copies from the host, from the device, or fills with zeros, in the queue's order;
    ``numpy.array(array)`` brings it to the host, and waits.

    Attributes
    ----------
    address : int
        Of the first number; 0 where there is none.
    size : int
        Numbers.
    dtype : numpy.dtype
        Of one number.
    queue : Queue
        Of its device.
    owner : object
        What keeps the memory.
    """

    __slots__ = ("address", "dtype", "owner", "queue", "size")

    def __init__(self, address: int, size: int, dtype: np.dtype[Any], queue: Queue, owner: Any) -> None:
        self.address, self.size, self.dtype = address, size, dtype
        self.queue, self.owner = queue, owner

    @property
    def shape(self) -> tuple[int]:
        """(size,)."""
        return (self.size,)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.size * self.dtype.itemsize

    @property
    def device(self) -> str:
        """Name of the device, as "cuda:0"."""
        return self.queue.device

    def view(self, dtype: Any) -> DeviceArray:
        """Return the same memory as numbers of another dtype."""
        to = np.dtype(dtype)
        return DeviceArray(self.address, self.nbytes // to.itemsize, to, self.queue, self.owner)

    def detached(self) -> DeviceArray:
        """Return an array of the same form that has no memory."""
        return DeviceArray(0, self.size, self.dtype, self.queue, None)

    def __setitem__(self, where: Any, value: Any) -> None:
        """Write all of it."""
        if where is not Ellipsis:
            raise TypeError(f"only [...] can be written, not [{where!r}]")
        if isinstance(value, DeviceArray):
            self.queue.copy(self, value)
        elif isinstance(value, np.ndarray):
            self.queue.upload(self.address, np.ascontiguousarray(value).reshape(-1).view(np.uint8))
        elif value == 0:
            self.queue.clear(self)
        else:
            raise TypeError(f"only arrays and 0 can be written, not {value!r}")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Return it on the host."""
        if copy is False:
            raise ValueError("memory of a device cannot be an array of the host without a copy")
        found = np.empty(self.size, self.dtype)
        self.queue.download(found.view(np.uint8), self.address)
        self.queue.wait()
        return found if dtype is None else found.astype(dtype, copy=False)

    def __repr__(self) -> str:
        return f"<{self.size} {self.dtype} on {self.device}>"


class _Local(threading.local):
    """What a thread has begun and not ended."""

    def __init__(self) -> None:
        self.taken: list[Any] = []
        self.pinned: list[Any] = []
        self.go_on: Callable[[], bool] | None = None
        self.held: list[Any] | None = None  # what a graph needs
        self.counter = 0


class Queue:
    """The stream of gccomm's own on one device, and memory from CuPy's pools in its order.

    Parameters
    ----------
    cupy : module
        CuPy.
    number : int
        Number of the device.

    Attributes
    ----------
    device : str
        "cuda:<number>".
    stream : int
        Address of the stream, which does not wait for the default stream.
    parked : deque
        Memory whose last users are not known; used again when the device has done all it had to.
    """

    def __init__(self, cupy: Any, number: int) -> None:
        self._cupy, self._runtime = cupy, cupy.cuda.runtime
        self.number, self.device = number, f"cuda:{number}"
        self._device = cupy.cuda.Device(number)
        with self._device:
            self._stream = cupy.cuda.Stream(non_blocking=True)
        self.stream = int(self._stream.ptr)
        self.parked: deque[Any] = deque()
        self._local = _Local()
        self._flying: deque[tuple[Any, Any]] = deque()  # memory that the device may still read

    def current(self) -> ExitStack:
        """Return the context in which CuPy uses this device and stream."""
        stack = ExitStack()
        stack.enter_context(self._device)
        stack.enter_context(self._stream)
        return stack

    # Order

    def record(self, stream: int | None = None) -> Any:
        """Return the event of what a stream, by default the queue's own, has to do by now."""
        with self._device:
            event = self._cupy.cuda.Event(disable_timing=True)
            self._runtime.eventRecord(event.ptr, self.stream if stream is None else stream)
        return event

    def after(self, event: Any) -> None:
        """Let all that is asked for later come after an event."""
        with self._device:
            self._runtime.streamWaitEvent(self.stream, event.ptr)

    def follow(self, stream: int) -> None:
        """Let all that is asked for later come after what a stream has to do by now."""
        if stream != self.stream:
            self.after(self.record(stream))

    def lead(self, stream: int, event: Any = None) -> None:
        """Let all that a stream is asked for later come after what the queue has to do by now, or at the time
        of an event.
        """
        if stream != self.stream:
            at = event or self.record()
            with self._device:  # whose default stream 0 means
                self._runtime.streamWaitEvent(stream, at.ptr)

    def wait(self) -> None:
        """Let the host wait until all is done; what is on its way between ranks goes on meanwhile."""
        go_on = self._local.go_on
        if go_on is not None and go_on():
            event = self.record()
            while not self.came(event):
                go_on()
        else:
            with self._device, relaxed():
                self._stream.synchronize()
        self._land()

    def complete(self, event: Any) -> None:
        """Let the host wait for an event."""
        with self._device, relaxed():
            event.synchronize()

    def wait_for_device(self) -> None:
        """Let the host wait until the device has done all that it has been asked for, on whatever stream."""
        self._device.synchronize()

    def came(self, event: Any) -> bool:
        """Return whether the device has come to an event; BackendError where it has failed."""
        with self._device, relaxed():
            status = int(self._runtime.eventQuery(event.ptr))
        if status not in (_READY, _NOT_READY):
            raise BackendError(f"the CUDA device {self.number} failed: error {status}")
        return status == _READY

    def meanwhile(self, go_on: Callable[[], bool] | None) -> None:
        """Have waits of this thread call a function, as long as it returns that something is on its way."""
        self._local.go_on = go_on

    # Memory

    def allocate(self, nbytes: int) -> Any:
        """Return memory from the pool: an object with ``ptr``, given back when it is let go of."""
        waiting = len(self.parked)
        if waiting and not self.capturing():
            self._device.synchronize()
            for _ in range(waiting):  # of those that were there before
                self.parked.popleft()
        with self.current(), relaxed():
            return self._cupy.cuda.alloc(max(nbytes, 1))

    def empty(self, size: int, dtype: Any) -> DeviceArray:
        """Return an array of no known content."""
        of = np.dtype(dtype)
        memory = self.allocate(size * of.itemsize)
        if self._local.held is not None:
            self._local.held.append(memory)
        return DeviceArray(int(memory.ptr), size, of, self, Loan(self, memory))

    def take(self, nbytes: int, *, zero: bool = False) -> int:
        """Return memory that this thread has until :meth:`finish`."""
        memory = self.allocate(nbytes)
        if zero:
            self.fill(int(memory.ptr), nbytes)
        self._local.taken.append(memory)
        return int(memory.ptr)

    # Graphs

    def capturing(self, stream: int | None = None) -> bool:
        """Return whether what a stream, by default the queue's own, is asked for now goes into a graph, and
        is not done. Never what the default stream is.
        """
        asked = self.stream if stream is None else stream
        if asked in (0, 1):
            return False
        with self._device:
            return bool(self._runtime.streamIsCapturing(asked))

    @property
    def counter(self) -> int:
        """Address of what counts the launches of the graph that this thread captures; 0: it does not."""
        return self._local.counter

    def hold(self, counter: int) -> None:
        """Keep all that this thread takes from here on, for the launches of a graph."""
        self._local.held, self._local.counter = [], counter

    def release(self) -> list[Any]:
        """End that; return what must be kept as long as the graph."""
        held, self._local.held, self._local.counter = self._local.held, None, 0
        return held or []

    def finish(self, *, wait: bool) -> None:
        """Give back what this thread has taken; with ``wait``, when all is done."""
        local = self._local
        if local.held is not None:
            local.held += local.pinned + local.taken
            local.pinned = []
        if local.pinned:
            self.keep(self.record(), local.pinned)
            local.pinned = []
        local.taken.clear()
        if wait:
            self.wait()
        else:
            self._land()

    def keep(self, event: Any, used: Any) -> None:
        """Keep what the device may use until it has come to an event of this queue's."""
        self._flying.append((event, used))

    def _land(self) -> None:
        while self._flying:
            try:
                event, used = self._flying.popleft()
            except IndexError:  # another thread's
                return
            if not self.came(event):
                self._flying.appendleft((event, used))
                return

    def pinned_bytes(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return pinned memory of the host, of no known content."""
        return np.frombuffer(self.pinned(max(nbytes, 1)), np.uint8, nbytes)

    # Copies

    def upload(self, to: int, source: npt.NDArray[np.uint8]) -> None:
        """Copy from the host, by way of pinned memory, so that ``source`` may change afterwards."""
        if source.nbytes == 0:
            return
        pinned = self.pinned(source.nbytes)
        ctypes.memmove(pinned.ptr, source.ctypes.data, source.nbytes)
        self._local.pinned.append(pinned)
        self._copy(to, pinned.ptr, source.nbytes, self._runtime.memcpyHostToDevice)

    def download(self, to: npt.NDArray[np.uint8], source: int) -> None:
        """Copy to the host, whose memory holds it after :meth:`wait`."""
        if to.nbytes:
            self._copy(to.ctypes.data, source, to.nbytes, self._runtime.memcpyDeviceToHost)

    def copy(self, to: DeviceArray, source: DeviceArray) -> None:
        """Copy within the device, or from another one, which is waited for first."""
        if to.nbytes == 0:
            return
        if source.queue is not self:
            self.after(source.queue.record())
            source.queue.after(self._copied(to, source))
        else:
            self.move(to.address, source.address, to.nbytes)

    def _copied(self, to: DeviceArray, source: DeviceArray) -> Any:
        places = to.address, self.number, source.address, source.queue.number
        with self._device:
            self._runtime.memcpyPeerAsync(*places, to.nbytes, self.stream)
        return self.record()

    def move(self, to: int, source: int, nbytes: int) -> None:
        """Copy bytes within the device."""
        if nbytes:
            self._copy(to, source, nbytes, self._runtime.memcpyDeviceToDevice)

    def _copy(self, to: int, source: int, nbytes: int, kind: int) -> None:
        # With the device current, as in all of this class: a thread's first call of CUDA's makes a context on
        # the current device, which takes half a gigabyte of device 0 where that is another one.
        with self._device:
            self._runtime.memcpyAsync(to, source, nbytes, kind, self.stream)

    def pinned(self, nbytes: int) -> Any:
        """Return memory of the host that the device can use by the same address: an object with ``ptr``."""
        with self._device, relaxed():
            return self._cupy.cuda.alloc_pinned_memory(nbytes)

    def clear(self, array: DeviceArray) -> None:
        """Fill with zeros."""
        if array.nbytes:
            self.fill(array.address, array.nbytes)

    def fill(self, address: int, nbytes: int) -> None:
        """Fill bytes with zeros."""
        with self._device:
            self._runtime.memsetAsync(address, 0, nbytes, self.stream)

    def gather(self, to: DeviceArray, source: Strided) -> None:
        """Copy elements into flat memory, in C order."""
        with self.current():
            self._flat(to, source)[...] = self._elements(source)

    def scatter(self, to: Strided, source: DeviceArray) -> None:
        """Copy flat memory into elements, in C order."""
        with self.current():
            self._elements(to)[...] = self._flat(source, to)

    def _flat(self, array: DeviceArray, like: Strided) -> Any:
        item = _ITEMS[like.item_bytes]
        return self.ndarray(array.address, array.nbytes, like.shape, item, array.owner)

    def _elements(self, of: Strided) -> Any:
        extents = zip(of.shape, of.strides, strict=True)
        nbytes = sum((n - 1) * abs(stride) for n, stride in extents if n > 1) + of.item_bytes
        return self.ndarray(of.address, nbytes, of.shape, _ITEMS[of.item_bytes], of.owner, of.strides)

    def ndarray(
        self,
        address: int,
        nbytes: int,
        shape: tuple[int, ...],
        dtype: Any,
        owner: Any,
        strides: tuple[int, ...] | None = None,
    ) -> Any:
        """Return memory as CuPy's array, which keeps ``owner``."""
        cuda = self._cupy.cuda
        memory = cuda.MemoryPointer(cuda.UnownedMemory(address, nbytes, owner, self.number), 0)
        return self._cupy.ndarray(shape, dtype, memory, strides)
