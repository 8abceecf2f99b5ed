"""NVRTC, NVIDIA's compiler of CUDA C++, called through ctypes from its wheel: no device, no driver.

The functions are those of ``cupy.cuda.nvrtc``, so that this module can stand in for it.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

__all__ = ["NVRTCError", "library"]


class NVRTCError(RuntimeError):
    """A call failed."""


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """Load the library of the wheel nvidia-cuda-nvrtc-cu12, or return None where it is not installed."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in sorted(Path(folder).glob("*/lib/libnvrtc.so*")):
            return ctypes.CDLL(str(path))
    return None


def _call(name: str, *args: object) -> None:
    found = library()
    assert found is not None
    code = getattr(found, name)(*args)
    if code != 0:
        raise NVRTCError(f"{name} returned {code}")


def getVersion() -> tuple[int, int]:  # noqa: N802
    major, minor = ctypes.c_int(), ctypes.c_int()
    _call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def getSupportedArchs() -> list[int]:  # noqa: N802
    count = ctypes.c_int()
    _call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
    found = (ctypes.c_int * count.value)()
    _call("nvrtcGetSupportedArchs", found)
    return list(found)


def createProgram(text: str, name: str, headers: Sequence[str], names: Sequence[str]) -> int:  # noqa: N802
    assert not headers
    assert not names
    program = ctypes.c_void_p()
    _call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
    return program.value or 0


def compileProgram(program: int, options: Sequence[str]) -> None:  # noqa: N802
    encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    _call("nvrtcCompileProgram", ctypes.c_void_p(program), len(options), encoded)


def _result(program: int, what: str) -> bytes:
    size = ctypes.c_size_t()
    _call(f"nvrtcGet{what}Size", ctypes.c_void_p(program), ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    _call(f"nvrtcGet{what}", ctypes.c_void_p(program), text)
    return text.raw


def getCUBIN(program: int) -> bytes:  # noqa: N802
    return _result(program, "CUBIN")


def getPTX(program: int) -> bytes:  # noqa: N802
    return _result(program, "PTX").rstrip(b"\0")


def getProgramLog(program: int) -> str:  # noqa: N802
    return _result(program, "ProgramLog").rstrip(b"\0").decode()


def destroyProgram(program: int) -> None:  # noqa: N802
    _call("nvrtcDestroyProgram", ctypes.byref(ctypes.c_void_p(program)))
