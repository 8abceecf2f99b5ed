"""DLPack capsules of memory on a device: read, and made, without a library.

The structures are those of dlpack.h, version 0.x, which every library reads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["CUDA", "CUDA_MANAGED", "DTYPES", "Export", "Tensor", "read"]

CUDA, CUDA_MANAGED = 2, 13
_NAME = b"dltensor"


def _dtypes() -> dict[tuple[int, int], str]:
    found = {(6, 8): "bool", (4, 16): "bfloat16", (5, 64): "complex64", (5, 128): "complex128"}
    found |= {(2, bits): f"float{bits}" for bits in (16, 32, 64)}
    found |= {(0, bits): f"int{bits}" for bits in (8, 16, 32, 64)}
    return found | {(1, bits): f"uint{bits}" for bits in (8, 16, 32, 64)}


DTYPES = _dtypes()
"""Names of dtypes by DLPack's code and number of bits."""

_CODES = {name: code for code, name in DTYPES.items()}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_DESTRUCTOR = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_api = ctypes.pythonapi
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _DESTRUCTOR)(
    ("PyCapsule_New", _api)
)


class Tensor(NamedTuple):
    """What a capsule says: address of the first element, name of the dtype (None: none of ``DTYPES``), shape,
    strides in elements (None: C order), type and number of the device.
    """

    address: int
    dtype: str | None
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    device: tuple[int, int]


def read(capsule: Any) -> Tensor:
    """Return what a capsule says. It stays unused: the memory is there as long as the capsule is.

    Raises
    ------
    ValueError
        No capsule, one that was used, or one without extents.
    """
    tensor = _Managed.from_address(_get_pointer(capsule, _NAME)).tensor
    if tensor.ndim < 0 or (tensor.ndim and not tensor.shape):
        raise ValueError(f"its capsule has {tensor.ndim} axes and no extents")
    rank = range(tensor.ndim)
    dtype = DTYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    strides = tuple(int(tensor.strides[i]) for i in rank) if tensor.strides else None
    shape = tuple(int(tensor.shape[i]) for i in rank)
    address = int(tensor.data or 0) + int(tensor.byte_offset)
    return Tensor(address, dtype, shape, strides, (int(tensor.device_type), int(tensor.device_id)))


_exported: dict[int, Any] = {}  # by address: structures whose memory others use


def _delete(managed: int) -> None:
    _exported.pop(managed, None)


def _destroy(capsule: int) -> None:
    """End a capsule that nobody has used; what was used is renamed, and its user deletes it."""
    if _is_valid(capsule, _NAME):
        _exported.pop(_pointer_of(capsule, _NAME), None)


_deleter, _destructor = _DELETER(_delete), _DESTRUCTOR(_destroy)  # others have their addresses


class Export:
    """Memory that another library takes over by DLPack.

    Parameters
    ----------
    address : int
        Of the first element, in C order.
    dtype : str
        One of ``DTYPES``.
    shape : tuple of int
        Extents.
    device : (int, int)
        Type and number of the device.
    owner : object
        What keeps the memory; let go of when the last that uses it is gone.
    lead : callable, optional
        Called with the stream on which the memory will be used, where the library names one.
    """

    def __init__(
        self,
        address: int,
        dtype: str,
        shape: tuple[int, ...],
        device: tuple[int, int],
        owner: Any,
        lead: Callable[[int], None] | None = None,
    ) -> None:
        self._what = address, dtype, shape
        self._device, self._owner, self._lead = device, owner, lead

    def capsule(self) -> Any:
        """Return a capsule; no stream is told of it."""
        (address, dtype, shape), rank = self._what, len(self._what[2])
        managed, step = _Managed(), 1
        strides: list[int] = []
        for extent in reversed(shape):
            strides.insert(0, step)
            step *= extent
        tensor = managed.tensor
        tensor.data, tensor.byte_offset, tensor.ndim, tensor.lanes = address or None, 0, rank, 1
        tensor.device_type, tensor.device_id = self._device
        tensor.code, tensor.bits = _CODES[dtype]
        extents = (ctypes.c_int64 * max(rank, 1))(*shape), (ctypes.c_int64 * max(rank, 1))(*strides)
        tensor.shape, tensor.strides = (ctypes.cast(x, ctypes.POINTER(ctypes.c_int64)) for x in extents)
        managed.deleter = ctypes.cast(_deleter, ctypes.c_void_p)
        where = ctypes.addressof(managed)
        _exported[where] = managed, extents, self._owner
        return _new(where, _NAME, _destructor)

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: Any = None,
        dl_device: Any = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a capsule, for use on a stream."""
        del max_version
        if copy or (dl_device is not None and tuple(dl_device) != self._device):
            raise BufferError("this memory is handed over as it is: without a copy, on its own device")
        if self._lead is not None and stream is not None and stream != -1:
            self._lead(stream)
        return self.capsule()

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return type and number of the device."""
        return self._device
