"""The self-test of the CUDA kernels: maxima, words and results of one tensor against the CPU's."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["compare"]

_COORDINATES, _WIDTH, _LIMIT = 100_003, 8, 127 << 16


def compare(device: Any = None) -> str:
    """Measure, encode and decode on a device and on the CPU; return what was found equal.

    Parameters
    ----------
    device : gccomm.kernels.cuda.device.DeviceKernels, optional
        By default those of the current CUDA device, for which they are compiled if need be.

    Raises
    ------
    RuntimeError
        Words or results differ.
    BackendError, ImportError
        There are no kernels for the device.
    """
    from gccomm import kernels

    x = np.random.default_rng(1).standard_normal(_COORDINATES).astype(np.float32)
    on_cpu = [_round_trip(kernels, x, turns) for turns in (0, 1)]
    on_device = [_on_device(device, x, turns) for turns in (0, 1)]
    for name, want, found in zip(("uniform", "rotated"), on_cpu, on_device, strict=True):
        for what in want:
            if want[what].tobytes() != found[what].tobytes():
                wrong = int((want[what].view(np.uint32) != found[what].view(np.uint32)).sum())
                raise RuntimeError(f"{name}: {wrong} of {want[what].size} {what} differ from the CPU's")
    return f"uniform and rotated, {_COORDINATES} coordinates in {_WIDTH} bits,"


def _on_device(device: Any, x: Any, turns: int) -> dict[str, Any]:
    if device is not None:
        return _round_trip(device, x, turns)
    import cupy

    from gccomm import kernels

    found = kernels.of_device(f"cuda:{cupy.cuda.Device().id}")
    there, out = cupy.asarray(x), cupy.zeros_like(x)
    result = _round_trip(found, x, turns, there.data.ptr, out.data.ptr)
    return {**result, "results": cupy.asnumpy(out)}


def _round_trip(used: Any, x: Any, turns: int, source: int = 0, target: int = 0) -> dict[str, Any]:
    """Return scales, words and results of a tensor; its memory is that of `x`, or at the addresses given."""
    from gccomm import kernels
    from gccomm.kernels import SEGMENT, address

    blocks, out = -(-x.size // 1024), np.zeros_like(x)
    table = np.zeros(1, SEGMENT)
    table["src"], table["dst"] = source or address(x), target or address(out)
    table["size"] = table["row"] = x.size
    table["nblocks"], table["dtype"] = blocks, kernels.DTYPE_CODES["float32"]
    for name, value in {"key0": 5, "key1": 6, "sign0": 7, "sign1": 8}.items():
        table[name] = value
    scales, words = np.zeros(blocks, np.uint32), np.zeros(x.size // 4 + 64, np.uint32)
    where = address(table), 1, 0, blocks
    used.maxima(*where, address(scales), rotations=turns)
    used.encode(*where, address(scales), address(words), 0, _WIDTH, _LIMIT, 0, rotations=turns)
    head = address(scales), address(words), 0, _WIDTH, _LIMIT, 1
    used.decode(*where, *head, True, False, False, rotations=turns)
    return {"scales": scales, "words": words, "results": out}
