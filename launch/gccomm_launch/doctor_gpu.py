"""What driver, CuPy, NVRTC and NCCL say of themselves.

Run as a module, it imports and asks what there is of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import distributions
from typing import Any

from gccomm_launch.doctor_driver import driver

__all__ = ["facts"]


def facts() -> dict[str, Any]:
    """Return what driver, CuPy and NCCL say; a library that cannot be imported is told of, too."""
    return {"driver": driver(), "cupy": cupy_facts(), "nccl4py": nccl4py_facts()}


def _packages(prefix: str) -> list[str]:
    found = {f"{d.metadata['Name']} {d.version}" for d in distributions() if d.metadata["Name"]}
    return sorted(name for name in found if name.startswith(prefix))


def _said(read: Callable[[], Any]) -> tuple[Any, str]:
    """Return what a library says, or what it raises, of whatever kind."""
    try:
        return read(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}".strip().splitlines()[0]


def cupy_facts() -> dict[str, Any]:
    """Return versions of CuPy, of its CUDA runtime, of NVRTC and of the NCCL that it wraps."""
    packages = [name for name in _packages("cupy") if name.startswith(("cupy ", "cupy-cuda"))]
    cupy, error = _said(lambda: __import__("cupy"))
    if error:
        return {"packages": packages, "error": error}
    found: dict[str, Any] = {"packages": packages, "version": cupy.__version__}
    found["runtime"], error = _said(lambda: int(cupy.cuda.runtime.runtimeGetVersion()))
    if error:
        return {"packages": packages, "error": error}
    nvrtc, error = _said(lambda: [int(part) for part in cupy.cuda.nvrtc.getVersion()])
    found |= {"nvrtc_error": error} if error else {"nvrtc": nvrtc}
    code, error = _said(lambda: int(import_module("cupy.cuda.nccl").get_version()))
    found["nccl"] = {"error": error} if error else {"library": code}  # an option of CuPy's: no fault
    return found


def nccl4py_facts() -> dict[str, Any]:
    """Return the version of the library that nccl4py has loaded."""
    if not _packages("nccl4py"):
        return {"installed": False}
    found, error = _said(_nccl4py)
    return {"installed": True, "error": error} if error else {"installed": True, "library": found}


def _nccl4py() -> int:
    from nccl.core import get_version

    library = get_version().libnccl
    if library is None:
        raise ImportError("it finds no libnccl.so.2")
    major, minor, patch = library.version.release[:3]
    return int(major) * 10000 + int(minor) * 100 + int(patch)


if __name__ == "__main__":
    print(json.dumps(facts()))
