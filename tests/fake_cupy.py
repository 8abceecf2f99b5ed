"""As much of CuPy as the launcher uses, without a device: what is asked of a stream happens when it is waited
for, and pinned memory is rubbish as soon as it is given back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.cuda_on_cpu import OnCpu

__all__ = ["FakeCupy"]


class RuntimeFailure(RuntimeError):
    """In the place of CUDARuntimeError."""


class Memory:
    """Device memory: it stays where it is, and its content, until the stream has gone by."""

    def __init__(self, cupy: FakeCupy, nbytes: int) -> None:
        self._cupy = cupy
        self.room = np.full(nbytes + 256, 0x5A, np.uint8)
        start = -self.room.ctypes.data % 256
        self.bytes = self.room[start : start + nbytes]
        self.ptr = self.bytes.ctypes.data
        cupy.allocated.append((self.room, self.ptr, nbytes))

    def memset_async(self, value: int, size: int, stream: Any) -> None:
        room = self.bytes[:size]
        stream.todo.append(lambda: room.fill(value))


class Pinned:
    """Pinned host memory, whose room others get at once."""

    def __init__(self, cupy: FakeCupy, nbytes: int) -> None:
        self._room = np.zeros(nbytes, np.uint8)
        self.ptr = self._room.ctypes.data
        cupy.pinned.append(self._room)
        cupy.held += 1
        self._cupy = cupy

    def __del__(self) -> None:
        self._room[:] = 0xEE
        self._cupy.held -= 1


class Stream:
    """A stream: nothing happens before somebody waits."""

    ptr = 1234

    def __init__(self) -> None:
        self.todo: list[Callable[[], None]] = []
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1
        todo, self.todo = self.todo, []
        for action in todo:
            action()


class Event:
    """Done when the stream has come to it."""

    def __init__(self, disable_timing: bool = False) -> None:
        self.done = False

    def record(self, stream: Stream) -> None:
        stream.todo.append(lambda: setattr(self, "done", True))


class Device:
    """A device, as context: the current one."""

    attributes = {"MultiProcessorCount": 1}  # noqa: RUF012
    compute_capability = "90"

    def __init__(self, number: int) -> None:
        self.id = number
        self.depth = 0

    def __enter__(self) -> Device:
        self.depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


class FakeCupy:
    """In the place of the module.

    Parameters
    ----------
    shim : OnCpu
        What kernels run on.
    devices : int
        How many there are; below 0 there is no driver.
    """

    def __init__(self, shim: OnCpu, devices: int = 1, nvrtc: Any = None) -> None:
        self.shim, self.devices = shim, devices
        self.stream = Stream()
        self.allocated: list[tuple[Any, int, int]] = []
        self.pinned: list[Any] = []
        self.held = 0
        self.loaded: list[str] = []
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(
                CUDARuntimeError=RuntimeFailure,
                getDeviceCount=self._count,
                pointerGetAttributes=self._attributes,
                memoryTypeDevice=2,
                memcpyHostToDevice=1,
                memcpyDeviceToHost=2,
                memcpyAsync=self._copy,
            ),
            nvrtc=nvrtc,
            Device=Device,
            Event=Event,
            alloc=lambda nbytes: Memory(self, nbytes),
            alloc_pinned_memory=lambda nbytes: Pinned(self, nbytes),
            get_current_stream=lambda _device=-1: self.stream,
        )

    def _count(self) -> int:
        if self.devices < 0:
            raise RuntimeFailure("cudaErrorInsufficientDriver: the driver is too old")
        return self.devices

    def _attributes(self, address: int) -> SimpleNamespace:
        inside = any(start <= address < start + nbytes for _, start, nbytes in self.allocated)
        return SimpleNamespace(type=2 if inside else 0)

    def _copy(self, to: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        assert stream == Stream.ptr
        ends = [self._attributes(address).type == 2 for address in (source, to)]
        assert ends == [kind == 2, kind == 1], "a copy in the wrong direction"

        def copy() -> None:
            OnCpu.copy(to, source, nbytes)

        self.stream.todo.append(copy)

    def RawModule(self, path: str) -> SimpleNamespace:  # noqa: N802
        self.loaded.append(path)
        return SimpleNamespace(get_function=self._function)

    def _function(self, name: str) -> Callable[..., None]:
        def launch(grid: tuple[int], block: tuple[int], args: Sequence[np.generic]) -> None:
            assert block == (128,)
            self.stream.todo.append(lambda: self.shim.run(name, grid[0], list(args)))

        return launch
