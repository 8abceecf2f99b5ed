"""What CuPy offers of memory that somebody else has, and arrays in it; see fake_gpu.py."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

__all__ = ["MemoryPointer", "Unowned", "ndarray"]


class Unowned:
    """Memory that somebody else keeps."""

    def __init__(self, machine: Any, ptr: int, owner: Any, device_id: int) -> None:
        self._machine, self.ptr, self.owner, self.device_id = machine, ptr, owner, device_id


class MemoryPointer:
    """An address, and what keeps the memory there."""

    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset


class ndarray:  # noqa: N801
    """An array on a device, in C order."""

    def __init__(self, shape: Sequence[int], dtype: Any, memptr: Any, strides: Any = None) -> None:
        self.shape, self.dtype, self.data = tuple(shape), np.dtype(dtype), memptr
        self.size = int(np.prod(self.shape, dtype=np.int64))
        plain = np.empty(self.shape, np.void(self.dtype.itemsize).dtype).strides
        assert strides is None or tuple(strides) == plain
        self.strides = plain
        self.device = SimpleNamespace(id=memptr.mem.device_id)

    def host(self) -> Any:
        """Return the memory itself, whatever is still to be done."""
        room = (ctypes.c_uint8 * (self.size * self.dtype.itemsize)).from_address(self.data.ptr)
        return np.frombuffer(room, self.dtype).reshape(self.shape)


ndarray.__module__ = "cupy"
