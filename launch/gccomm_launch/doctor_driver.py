"""What the CUDA driver says, asked by ctypes: it is there before any package is."""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["driver"]

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # attributes of a device


def driver(library: str = "libcuda.so.1") -> dict[str, Any]:
    """Return version and devices, or why there are none.

    Parameters
    ----------
    library : str
        Name or path of the driver's library.

    Returns
    -------
    dict
        "missing": why the library cannot be loaded; or "error" and "name": the code with which it refused to
        start; or "version" (13010 for 13.1) and "devices", of each its name, capability, bytes and place on
        the bus.
    """
    try:
        cuda = ctypes.CDLL(library)
    except OSError as error:
        return {"missing": str(error)}
    number = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(number))
    found: dict[str, Any] = {"version": number.value}
    code = int(cuda.cuInit(0)) or int(cuda.cuDeviceGetCount(ctypes.byref(number)))
    if code:
        return {**found, "error": code, "name": _error_name(cuda, code)}
    return {**found, "devices": [_device(cuda, place) for place in range(number.value)]}


def _error_name(cuda: Any, code: int) -> str:
    text = ctypes.c_char_p()
    cuda.cuGetErrorName(code, ctypes.byref(text))
    return text.value.decode() if text.value else f"error {code}"


def _device(cuda: Any, place: int) -> dict[str, Any]:
    handle, number, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    cuda.cuDeviceGet(ctypes.byref(handle), place)
    name, bus = ctypes.create_string_buffer(256), ctypes.create_string_buffer(64)
    cuda.cuDeviceGetName(name, len(name), handle)
    cuda.cuDeviceGetPCIBusId(bus, len(bus), handle)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(size), handle)
    capability = []
    for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
        cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, handle)
        capability.append(str(number.value))
    return {
        "name": name.value.decode(errors="replace"),
        "capability": ".".join(capability),
        "bytes": size.value,
        "bus": bus.value.decode(),
    }
