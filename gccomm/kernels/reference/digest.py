"""A check sum of 64 bits, not cryptographic; under NumPy only."""

from __future__ import annotations

import numpy as np

from gccomm.kernels.reference.namespace import Array

__all__ = ["digest"]

PARTS = 8
_STEP, _FACTOR, _MASK = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, (1 << 64) - 1


def digest(data: Array, seed: int) -> int:
    """Return the check sum of bytes.

    Eight sums each begin with the seed and take in every eighth word of 64 bits, low byte first; then the
    number of bytes takes in the sums.

    Parameters
    ----------
    data : array of uint8, shape (bytes,)
        Zeros make its last group of 64 bytes whole.
    seed : int
        Of 64 bits.
    """
    padded = np.zeros(-(-len(data) // 64) * 64, dtype=np.uint8)
    padded[: len(data)] = data
    sums = [(seed + _STEP * (k + 1)) & _MASK for k in range(PARTS)]
    for group in padded.view("<u8").reshape(-1, PARTS).tolist():
        sums = [_mix(part, word) for part, word in zip(sums, group, strict=True)]
    total = len(data)
    for part in sums:
        total = _mix(total, part)
    return total


def _mix(total: int, word: int) -> int:
    product = ((total ^ word) * _FACTOR) & _MASK
    return product ^ product >> 32
