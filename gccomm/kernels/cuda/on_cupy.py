"""The kernels on a CUDA device, through CuPy."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from gccomm.errors import BackendError
from gccomm.kernels import cuda
from gccomm.kernels.cuda.compiled import compiled
from gccomm.kernels.cuda.device import DeviceKernels, Launcher
from gccomm.kernels.cuda.queue import Queue

__all__ = [
    "CupyLauncher",
    "copy_from",
    "copy_to",
    "current_device",
    "device_at",
    "device_kernels",
    "device_of",
    "forget_devices",
    "queue_of",
    "synchronize",
]

BLOCKS_AT_ONCE = 16  # thread blocks for each multiprocessor: 2048 threads, as many as it holds


class CupyLauncher(Launcher):
    """Launches kernels on gccomm's own stream of one device; several threads may.

    Memory comes from CuPy's pools, whose order is that of the stream, so that nothing waits for it.

    Parameters
    ----------
    device : int
        Number of the device.

    Attributes
    ----------
    queue : Queue
        The stream, and memory in its order.

    Raises
    ------
    ImportError
        CuPy is not installed.
    BackendError
        There is no such device, or no driver that CuPy can use.
    """

    def __init__(self, device: int = 0) -> None:
        self._cupy = _cupy()
        self._runtime = self._cupy.cuda.runtime
        self._device = self._cupy.cuda.Device(_existing(self._runtime, device))
        self.queue = Queue(self._cupy, device)
        self._lock = threading.Lock()
        self._module: Any = None
        self._kernels: dict[str, Any] = {}
        with self._device:
            self._most = BLOCKS_AT_ONCE * int(self._device.attributes["MultiProcessorCount"])

    def owns(self, address: int) -> bool:
        """Return whether this is memory of a device."""
        with self._device:
            kind = self._runtime.pointerGetAttributes(address).type
        return kind in (self._runtime.memoryTypeDevice, self._runtime.memoryTypeManaged)

    def take(self, nbytes: int, *, zero: bool = False) -> int:
        """Return memory of the device from CuPy's pool."""
        return self.queue.take(nbytes, zero=zero)

    def upload(self, to: int, source: npt.NDArray[np.uint8]) -> None:
        """Copy by way of pinned memory, from which the device reads in its own time."""
        self.queue.upload(to, source)

    def download(self, to: npt.NDArray[np.uint8], source: int) -> None:
        """Copy in the order of the stream."""
        self.queue.download(to, source)

    @property
    def counter(self) -> int:  # type: ignore[override]
        """Address of what counts the launches of the graph that this thread captures; 0: none."""
        return self.queue.counter

    def clear(self, address: int, nbytes: int) -> None:
        """Fill with zeros in the order of the stream."""
        self.queue.fill(address, nbytes)

    def launch(self, name: str, blocks: int, args: list[np.generic]) -> None:
        """Start a kernel; the first one compiles all of them, unless they are on disk."""
        with self.queue.current():
            self._kernel(name)((min(blocks, self._most),), (cuda.THREADS,), tuple(args))

    def _kernel(self, name: str) -> Any:
        if name not in self._kernels:
            with self._lock:
                if self._module is None:
                    path = compiled(self._cupy.cuda.nvrtc, self._device.compute_capability)
                    self._module = self._cupy.RawModule(path=str(path))
                self._kernels[name] = self._module.get_function(name)
        return self._kernels[name]

    def finish(self, *, wait: bool) -> None:
        """Give memory back to the pools, in the order of the stream."""
        self.queue.finish(wait=wait)


_devices: dict[int, DeviceKernels] = {}
_lock = threading.Lock()


def device_kernels(device: int = 0) -> DeviceKernels:
    """Return the kernels of a device, one for all threads; errors are those of :class:`CupyLauncher`."""
    found = _devices.get(device)
    if found is None:
        with _lock:
            if device not in _devices:
                _devices[device] = DeviceKernels(CupyLauncher(device))
            found = _devices[device]
    return found


def queue_of(device: int) -> Queue:
    """Return the queue of a device; errors are those of :class:`CupyLauncher`."""
    launcher = device_kernels(device).launcher
    assert isinstance(launcher, CupyLauncher)
    return launcher.queue


def current_device() -> int:
    """Return the number of the device that is CUDA's current one in this thread; ImportError without CuPy."""
    return int(_cupy().cuda.Device().id)


def device_of(address: int) -> int:
    """Return the number of the device whose memory is at an address; -1 where CUDA knows of none.

    Raises
    ------
    ImportError
        CuPy is not installed.
    """
    found = _cupy().cuda.runtime.pointerGetAttributes(address)
    return int(found.device) if found.type else -1  # type 0: memory that CUDA knows nothing of


def device_at(address: int) -> Any:
    """Return the device whose memory is at an address, as a context in which it is the current one."""
    return _cupy().cuda.Device(device_of(address))


def synchronize(stream: int) -> None:
    """Let the host wait until a stream of the current device has done all it has to do by now."""
    _cupy().cuda.runtime.streamSynchronize(stream)


def copy_from(to: npt.NDArray[Any], source: int, stream: int) -> None:
    """Copy memory of the current device to an array of the host, after what a stream has to do; waits."""
    runtime = _cupy().cuda.runtime
    if to.nbytes:
        runtime.memcpyAsync(to.ctypes.data, source, to.nbytes, runtime.memcpyDeviceToHost, stream)
        runtime.streamSynchronize(stream)


def copy_to(to: int, source: npt.NDArray[Any], stream: int) -> None:
    """Copy an array of the host to memory of the current device, before what a stream does later; waits."""
    runtime = _cupy().cuda.runtime
    if source.nbytes:
        runtime.memcpyAsync(to, source.ctypes.data, source.nbytes, runtime.memcpyHostToDevice, stream)
        runtime.streamSynchronize(stream)


def forget_devices() -> None:
    """Let go of all devices: for tests."""
    with _lock:
        _devices.clear()


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        msg = (
            f"the CUDA kernels need CuPy, which cannot be imported ({error}): "
            'pip install "gccomm[cuda12]", or the CuPy package of your CUDA version'
        )
        raise ImportError(msg) from error
    return cupy


def _existing(runtime: Any, device: int) -> int:
    """Return the number of a device that exists."""
    try:
        count = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        raise BackendError(f"no CUDA device can be used: {error}. Is there one, and its driver?") from error
    if not 0 <= device < count:
        raise BackendError(f"there is no CUDA device {device}: this process sees {count}")
    return device
