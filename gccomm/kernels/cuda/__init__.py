"""Kernels for CUDA devices: the arithmetic of ``core.h`` in one thread block a block of coordinates.

:func:`source` is plain text, which NVRTC compiles at first use, without a CUDA toolkit; what it makes is kept
on disk.  The kernels take the table of segments, words and scales of :mod:`gccomm.kernels`;
:class:`~gccomm.kernels.cuda.device.DeviceKernels` calls them, through CuPy.  Importing this imports no CuPy.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

__all__ = ["OPTIONS", "THREADS", "names", "source"]

THREADS = 128
"""Threads of a thread block."""

OPTIONS = (
    "--std=c++17",
    "--device-as-default-execution-space",  # generic lambdas
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
)
"""What the kernels must be compiled with: no operation may round in another way than the CPU's."""

_INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)
_KERNEL = re.compile(r"^KERNEL (\w+)\(", re.MULTILINE)


@lru_cache(maxsize=1)
def source() -> str:
    """Return the text of all kernels, their headers included."""
    seen: set[Path] = set()

    def text(path: Path) -> str:
        if path in seen:
            return ""
        seen.add(path)
        whole = path.read_text(encoding="utf-8").replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda found: text((path.parent / found[1]).resolve()), whole)

    return text(Path(__file__).resolve().parent / "kernels.cu")


def names() -> list[str]:
    """Return the names of the kernels."""
    return _KERNEL.findall(source())
