"""Flat memory of the host or of a device, by the device's name."""

from __future__ import annotations

from typing import Any

import numpy as np

from gccomm import kernels

__all__ = ["address", "device_of", "empty", "moved"]


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
