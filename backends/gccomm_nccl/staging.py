"""Host memory through NCCL: in pieces, by way of pinned memory and the device's, two of them on their way."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from gccomm_nccl.channel import Channel

__all__ = ["PIECE_BYTES", "Staging"]

Bytes = npt.NDArray[np.uint8]
Call = Callable[[int, int, int], None]  # device address, bytes, stream

PIECE_BYTES = 4 << 20
_LEAST_BYTES = 1 << 14


class _Slot:
    """Memory for a piece, pinned and of the device, and where its result goes."""

    def __init__(self, channel: Channel, nbytes: int) -> None:
        with channel.device:
            self.pinned = channel.cupy.cuda.alloc_pinned_memory(nbytes)
            with channel.stream:  # whose order the pool keeps
                self.device = channel.cupy.cuda.alloc(nbytes)
        self.nbytes = nbytes
        self.event: Any = None
        self.result: Bytes | None = None


class Staging:
    """Reductions of NumPy arrays over a channel; returns when they are complete.

    Parameters
    ----------
    channel : Channel
        Of the device.
    piece_bytes : int
        Most bytes at a time; equal on all ranks.
    """

    def __init__(self, channel: Channel, piece_bytes: int = PIECE_BYTES) -> None:
        self._channel, self._piece_bytes = channel, piece_bytes
        self._slots: list[_Slot | None] = [None, None]

    def run(self, name: str, send: Bytes, recv: Bytes, call: Call) -> None:
        """Copy `send` to the device piece by piece, have `call` enqueue the operation, and fill `recv`.

        Pieces are cut at multiples of `piece_bytes`; `send` and `recv` are the same memory or do not overlap.
        """
        for number, (lo, hi) in enumerate(self._pieces(recv.nbytes)):
            slot = self._free(number % 2, hi - lo, name)
            with self._channel.calling(name):
                ctypes.memmove(slot.pinned.ptr, send[lo:].ctypes.data, hi - lo)
                self._copy(slot, hi - lo, there=True)
                call(int(slot.device.ptr), hi - lo, self._channel.stream.ptr)
                self._copy(slot, hi - lo, there=False)
                slot.event, slot.result = self._channel.event(self._channel.stream.ptr), recv[lo:hi]
        for used in self._slots:
            if used is not None:
                self._finish(used, name)

    def _pieces(self, nbytes: int) -> Iterator[tuple[int, int]]:
        for lo in range(0, nbytes, self._piece_bytes):
            yield lo, min(lo + self._piece_bytes, nbytes)

    def _free(self, which: int, nbytes: int, name: str) -> _Slot:
        """Return memory that is free, and as large as that."""
        slot = self._slots[which]
        if slot is not None:
            self._finish(slot, name)
        if slot is None or slot.nbytes < nbytes:
            slot = self._slots[which] = _Slot(self._channel, _room(nbytes))
        return slot

    def _finish(self, slot: _Slot, name: str) -> None:
        """Wait for what a slot holds, and hand it out."""
        if slot.result is None:
            return
        self._channel.wait(slot.event, name)
        ctypes.memmove(slot.result.ctypes.data, slot.pinned.ptr, slot.result.nbytes)
        slot.event = slot.result = None

    def _copy(self, slot: _Slot, nbytes: int, *, there: bool) -> None:
        runtime, stream = self._channel.runtime, self._channel.stream.ptr
        pinned, device = slot.pinned.ptr, slot.device.ptr
        if there:
            runtime.memcpyAsync(device, pinned, nbytes, runtime.memcpyHostToDevice, stream)
        else:
            runtime.memcpyAsync(pinned, device, nbytes, runtime.memcpyDeviceToHost, stream)


def _room(nbytes: int) -> int:
    """Return a size of memory that serves many: a power of two."""
    return max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length())
