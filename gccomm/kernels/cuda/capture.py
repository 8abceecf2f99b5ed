"""How a thread stands to graphs that are being captured, by itself or by another thread."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from gccomm.errors import BackendError

__all__ = ["relaxed"]

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@contextmanager
def relaxed() -> Iterator[None]:
    """Let this thread allocate, and ask whether events have come, while a graph is captured.

    A capture in CUDA's own default mode (PyTorch's too) forbids both to all threads of the process that do
    not say otherwise: they fail, and the capture with them.

    Raises
    ------
    BackendError
        The driver refuses.
    """
    exchange = _exchange()
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    _check(exchange(ctypes.byref(mode)))
    try:
        yield
    finally:
        _check(exchange(ctypes.byref(mode)))


@cache
def _exchange() -> Callable[[Any], int] | None:
    """Return the driver's function; None without a driver, where nothing is captured."""
    try:
        found = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None
    return found


def _check(code: int) -> None:
    if code != 0:
        raise BackendError(f"the CUDA driver does not change a thread's capture mode: error {code}")
