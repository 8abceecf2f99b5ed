"""The CUDA kernels on the CPU: their text compiled by a host compiler, in fibres instead of threads."""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from gccomm import kernels
from gccomm.kernels import cuda
from gccomm.kernels.cuda.device import DeviceKernels, Launcher

__all__ = ["SCHEDULES", "InPlace", "OnCpu", "Text", "build", "kernels_on_cpu"]

SHIM = Path(__file__).resolve().parent / "cuda_shim"
FLAGS = ("-std=c++17", "-Wall", "-Wextra", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE")
SCHEDULES = {"ascending": 0, "descending": 1, "random": 2}
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class InPlace:
    """The module of kernels, the device's functions in place of the CPU's."""

    def __init__(self, device: DeviceKernels) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device if hasattr(self._device, name) else kernels, name)

    def isas(self) -> list[str]:
        return ["device"]


class Text(NamedTuple):
    """CUDA C++, and the names of its kernels."""

    source: str
    names: Sequence[str]


def build(folder: Path, *flags: str, text: Text | None = None) -> Path:
    """Compile the kernels, or others, and return the library.

    Raises
    ------
    RuntimeError
        The compiler failed; with what it said.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler (set CXX): the CUDA kernels cannot run on the CPU")
    text = text or Text(cuda.source(), cuda.names())
    names = " ".join(f"f({name})" for name in text.names)
    whole = f'#include "shim.h"\n{text.source}\n#define GCCOMM_KERNELS(f) {names}\n'
    (folder / "kernels.inc").write_text(whole, encoding="utf-8")
    made = folder / "kernels.so"
    command = [compiler, *FLAGS, *flags, "-shared", "-fPIC", f"-I{folder}", f"-I{SHIM}"]
    done = subprocess.run(
        [*command, str(SHIM / "fibres.cpp"), "-o", str(made)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0 or "warning" in done.stderr:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[:5000]}")
    return made


class OnCpu(Launcher):
    """Runs the kernels of a library that :func:`build` made.

    What :meth:`take` gives is the device's memory, and so are tensors; everything else is the host's, so that
    what is copied there and back is tested.

    Parameters
    ----------
    library : path
        The library.
    schedule : str
        One of ``SCHEDULES``: which thread runs first between two barriers.
    most : int
        Most thread blocks of a launch; each does several blocks where there are more.
    """

    def __init__(self, library: Path, schedule: str = "ascending", most: int = 3) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.shim_launch.restype = ctypes.c_char_p
        self._schedule, self._most = SCHEDULES[schedule], most
        self._taken: list[Bytes] = []
        self.launches: dict[str, int] = {}

    def owns(self, address: int) -> bool:
        return False

    def take(self, nbytes: int, *, zero: bool = False) -> int:
        room = np.full(nbytes + 16, 0 if zero else 0xA5, np.uint8)
        start = -room.ctypes.data % 16
        self._taken.append(room)
        return int(room.ctypes.data) + start

    @staticmethod
    def copy(to: int, source: int, nbytes: int) -> None:
        ctypes.memmove(to, source, nbytes)

    def upload(self, to: int, source: Bytes) -> None:
        self.copy(to, source.ctypes.data, source.nbytes)

    def download(self, to: Bytes, source: int) -> None:
        self.copy(to.ctypes.data, source, to.nbytes)

    def clear(self, address: int, nbytes: int) -> None:
        ctypes.memset(address, 0, nbytes)

    def launch(self, name: str, blocks: int, args: Sequence[np.generic]) -> None:
        self.launches[name] = self.launches.get(name, 0) + 1
        self.run(name, min(blocks, self._most), args)

    def run(self, name: str, grid: int, args: Sequence[np.generic]) -> None:
        """Run a kernel with so many thread blocks.

        Raises
        ------
        RuntimeError
            Its threads do not meet at a barrier.
        """
        wanted = _parameters().get(name)
        found = [np.asarray(arg).dtype.name for arg in args]
        assert wanted in (None, found), f"{name} takes {wanted}, got {found}"  # a launch copies their bytes
        held = [np.array(arg) for arg in args]
        pointers = (ctypes.c_void_p * len(held))(*(arg.ctypes.data for arg in held))
        seed = sum(self.launches.values())
        failure = self._library.shim_launch(
            name.encode(), grid, cuda.THREADS, pointers, self._schedule, ctypes.c_uint(seed)
        )
        if failure is not None:
            raise RuntimeError(f"{name}: {failure.decode()}")

    def finish(self, *, wait: bool) -> None:
        self._taken.clear()


@lru_cache(maxsize=1)
def _parameters() -> dict[str, list[str]]:
    """Return the dtypes of the parameters of each kernel, as its text declares them; uint64 for pointers."""
    names = {"double": "float64", "i64": "int64", "i32": "int32", "u32": "uint32"}
    found = {}
    for name, text in re.findall(r"^KERNEL (\w+)\(([^)]*)\)", cuda.source(), re.MULTILINE):
        parts = [part.split() for part in text.split(",")]
        found[name] = ["uint64" if "*" in " ".join(part) else names[part[0]] for part in parts]
    return found


@lru_cache(maxsize=1)
def _library() -> Path:
    """Compile the kernels once for this process."""
    folder = tempfile.TemporaryDirectory(prefix="gccomm-cuda-")
    atexit.register(folder.cleanup)
    return build(Path(folder.name), "-O2")


def kernels_on_cpu(schedule: str = "ascending") -> DeviceKernels:
    """Return the device's kernels, compiled for the CPU."""
    return DeviceKernels(OnCpu(_library(), schedule))
