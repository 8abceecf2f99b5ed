"""The kernels on a CUDA device, through CuPy."""

from __future__ import annotations

import ctypes
from collections import deque
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from gccomm.errors import BackendError
from gccomm.kernels import cuda
from gccomm.kernels.cuda.compiled import compiled
from gccomm.kernels.cuda.device import DeviceKernels, Launcher

__all__ = ["CupyLauncher", "device_kernels"]

BLOCKS_AT_ONCE = 16  # thread blocks for each multiprocessor: 2048 threads, as many as it holds


class CupyLauncher(Launcher):
    """Launches kernels on the current stream of one device.

    Memory comes from CuPy's pools, whose order is that of the stream, so that nothing waits for it.

    Parameters
    ----------
    device : int
        Number of the device.

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
        self._module: Any = None
        self._kernels: dict[str, Any] = {}
        self._taken: list[Any] = []  # memory of the call that is made
        self._pinned: list[Any] = []
        self._flying: deque[tuple[Any, list[Any]]] = deque()  # host memory that copies may still read
        with self._device:
            self._most = BLOCKS_AT_ONCE * int(self._device.attributes["MultiProcessorCount"])

    def _stream(self) -> Any:
        return self._cupy.cuda.get_current_stream(self._device.id)

    def owns(self, address: int) -> bool:
        """Return whether this is memory of a device."""
        attributes = self._runtime.pointerGetAttributes(address)
        return bool(attributes.type == self._runtime.memoryTypeDevice)

    def take(self, nbytes: int, *, zero: bool = False) -> int:
        """Return memory of the device from CuPy's pool."""
        with self._device:
            memory = self._cupy.cuda.alloc(nbytes)
            if zero:
                memory.memset_async(0, nbytes, self._stream())
        self._taken.append(memory)
        return int(memory.ptr)

    def upload(self, to: int, source: npt.NDArray[np.uint8]) -> None:
        """Copy by way of pinned memory, from which the device reads in its own time."""
        pinned = self._cupy.cuda.alloc_pinned_memory(source.nbytes)
        ctypes.memmove(pinned.ptr, source.ctypes.data, source.nbytes)
        self._pinned.append(pinned)
        kind, stream = self._runtime.memcpyHostToDevice, self._stream()
        self._runtime.memcpyAsync(to, pinned.ptr, source.nbytes, kind, stream.ptr)

    def download(self, to: npt.NDArray[np.uint8], source: int) -> None:
        """Copy in the order of the stream."""
        kind, stream = self._runtime.memcpyDeviceToHost, self._stream()
        self._runtime.memcpyAsync(to.ctypes.data, source, to.nbytes, kind, stream.ptr)

    def launch(self, name: str, blocks: int, args: list[np.generic]) -> None:
        """Start a kernel; the first one compiles all of them, unless they are on disk."""
        with self._device:
            if self._module is None:
                path = compiled(self._cupy.cuda.nvrtc, self._device.compute_capability)
                self._module = self._cupy.RawModule(path=str(path))
            if name not in self._kernels:
                self._kernels[name] = self._module.get_function(name)
            self._kernels[name]((min(blocks, self._most),), (cuda.THREADS,), tuple(args))

    def finish(self, *, wait: bool) -> None:
        """Give memory back to the pools, in the order of the stream."""
        with self._device:
            stream = self._stream()
            if self._pinned:
                event = self._cupy.cuda.Event(disable_timing=True)
                event.record(stream)
                self._flying.append((event, self._pinned))
                self._pinned = []
            self._taken.clear()
            if wait:
                stream.synchronize()
            while self._flying and self._flying[0][0].done:
                self._flying.popleft()


@lru_cache(maxsize=64)
def device_kernels(device: int = 0) -> DeviceKernels:
    """Return the kernels of a device; errors are those of :class:`CupyLauncher`."""
    return DeviceKernels(CupyLauncher(device))


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
