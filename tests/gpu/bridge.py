"""A device's kernels on tensors of the host: they are copied there and back, so that the cases of the CPU's
kernels run on a device as they are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from gccomm import kernels
from gccomm.kernels.cuda.device import DeviceKernels, host_bytes
from gccomm.layout import Geometry

__all__ = ["Bridged"]

_ITEM_BYTES = (4, 8, 2, 2, 1, 2, 4, 8, 1, 2, 4, 8, 1)  # of dtypes
_READ, _WRITTEN = ("src", "res_in"), ("dst", "res_out")
_SEGMENTS = {"chunk_energies": 1, "chunk_take": 1, "chunk_put": 2}
_ADDRESSES = 1 << 64


class Bridged:
    """The functions of `DeviceKernels` for tables of tensors of the host.

    A copy has the alignment of what it is a copy of; only blocks that a segment has are copied.
    """

    def __init__(self, device: DeviceKernels) -> None:
        self._device = device
        self._queue: Any = device.launcher.queue  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "launcher":
            raise AttributeError(name)
        return partial(self._call, name, getattr(self._device, name))

    def _call(self, name: str, method: Any, table: int, *arguments: Any, **options: Any) -> Any:
        count = _SEGMENTS.get(name) or int(arguments[0])
        rows = host_bytes(table, count * kernels.SEGMENT.itemsize).view(kernels.SEGMENT).copy()
        held: list[Any] = []
        back: list[tuple[Any, int]] = []
        for row in rows:
            for field in (*_READ, *_WRITTEN):
                if not row[field] or not row["size"]:
                    continue
                host, before = _memory(row, field)
                shift = int(host.ctypes.data) % 16
                held.append(self._queue.empty(host.size + 16, np.uint8))
                there = held[-1].address + shift
                self._queue.upload(there, host)
                row[field] = (there - before) % _ADDRESSES
                if field in _WRITTEN:
                    back.append((host, there))
        found = method(kernels.address(rows), *arguments, **options)
        for host, there in back:
            self._queue.download(host, there)
        self._queue.finish(wait=True)
        return found


def _memory(row: Any, field: str) -> tuple[Any, int]:
    """Return the bytes of a segment's blocks, and those of the tensor before them."""
    item = _ITEM_BYTES[int(row["dtype"])]
    if field.startswith("res"):
        item = max(item, 4)
    geometry = Geometry(int(row["size"]), int(row["row"]))
    first, count = int(row["block0"]), int(row["nblocks"])
    begin, end = geometry.offset(first), min(geometry.offset(first + count), int(row["size"]))
    start = (int(row[field]) + item * begin) % _ADDRESSES
    return host_bytes(start, item * (end - begin)), item * begin
