"""The self-test of the CUDA kernels: maxima, words and results of one tensor against the CPU's."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["compare"]

_COORDINATES, _WIDTH, _LIMIT = 100_003, 8, 127 << 16


def compare(device: str = "") -> str:
    """Measure, encode and decode on a device and on the CPU; return what was found equal.

    Parameters
    ----------
    device : str
        As "cuda:0"; by default CUDA's current one. Its kernels are compiled if need be.

    Raises
    ------
    RuntimeError
        Words or results differ.
    BackendError, ImportError
        There are no kernels for the device.
    """
    from gccomm.kernels.cuda.on_cupy import current_device

    where = device or f"cuda:{current_device()}"
    x = np.random.default_rng(1).standard_normal(_COORDINATES).astype(np.float32)
    for turns, name in enumerate(("uniform", "rotated")):
        want, found = _round_trip("cpu", x, turns), _round_trip(where, x, turns)
        for what in want:
            wrong = int((want[what].view(np.uint32) != found[what].view(np.uint32)).sum())
            if wrong:
                raise RuntimeError(f"{name}: {wrong} of {want[what].size} {what} differ from the CPU's")
    return f"uniform and rotated, {_COORDINATES} coordinates in {_WIDTH} bits,"


def _round_trip(device: str, x: Any, turns: int) -> dict[str, Any]:
    """Return scales, words and results of a tensor in the memory of a device."""
    from gccomm import kernels, memory

    used, blocks = kernels.of_device(device), -(-x.size // 1024)
    there, out = memory.moved(x, device), memory.empty(device, x.size, np.float32)
    out[...] = 0
    table = np.zeros(1, kernels.SEGMENT)
    table["src"], table["dst"] = memory.address(there), memory.address(out)
    table["size"] = table["row"] = x.size
    table["nblocks"], table["dtype"] = blocks, kernels.DTYPE_CODES["float32"]
    for name, value in {"key0": 5, "key1": 6, "sign0": 7, "sign1": 8}.items():
        table[name] = value
    scales, words = np.zeros(blocks, np.uint32), np.zeros(x.size // 4 + 64, np.uint32)
    where = kernels.address(table), 1, 0, blocks
    lanes = kernels.address(scales), kernels.address(words), 0, _WIDTH, _LIMIT
    used.maxima(*where, kernels.address(scales), rotations=turns)
    used.encode(*where, *lanes, 0, rotations=turns)
    used.decode(*where, *lanes, 1, True, False, False, rotations=turns)
    return {"scales": scales, "words": words, "results": np.asarray(out)}
