"""Flat memory of the host or of a device, by the device's name."""

from __future__ import annotations

from typing import Any

import numpy as np

from gccomm import kernels
from gccomm.steps import Words

__all__ = ["address", "device_of", "empty", "moved", "pinned_words"]


def device_of(array: Any) -> str:
    """Return the device whose memory an array is in."""
    return "cpu" if isinstance(array, np.ndarray) else str(array.device)


def empty(device: str, size: int, dtype: Any) -> Any:
    """Return flat memory of a device, of no known content: an array of NumPy, or a DeviceArray."""
    if device == "cpu":
        of = np.dtype(dtype)
        return kernels.pool_empty(size * of.itemsize).view(of)
    return kernels.of_device(device).launcher.queue.empty(size, dtype)


def address(array: Any) -> int:
    """Return the address of memory of the host or of a device."""
    return kernels.address(array) if isinstance(array, np.ndarray) else int(array.address)


def moved(array: Any, device: str) -> Any:
    """Return an array in the memory of a device: itself where it is there."""
    if device_of(array) == device:
        return array
    made = empty(device, array.size, array.dtype)
    made[...] = array
    return made


def pinned_words(device: str, count: int) -> Words:
    """Return memory of the host for so many words, which a device reads and writes at full speed."""
    words: Words = kernels.of_device(device).launcher.queue.pinned_bytes(4 * count).view(np.uint32)
    return words
