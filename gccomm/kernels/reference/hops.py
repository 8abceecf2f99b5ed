"""Sums that are rounded again on their way: each rank's lanes have a scale of their own, and so has the sum.

Under NumPy only: no compiled graph can reduce with it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gccomm.kernels.reference.energies import wide_word
from gccomm.kernels.reference.namespace import Array, power_of_two, quiet, view
from gccomm.kernels.reference.packing import pack, unpack
from gccomm.kernels.reference.quantise import check_limit
from gccomm.kernels.reference.scales import nonfinite, pattern_times_power, split_scale

__all__ = ["hop_fold", "widen_lanes"]

Words = npt.NDArray[np.uint32]

FAR = 60
"""A part whose scale is more powers of two below the largest one does not count."""


@quiet
def hop_fold(
    words: Words,
    scales: Words,
    hashes: Words,
    again: Words,
    shifts: Words,
    *,
    width: int,
    limit: int,
    down: int,
    wide: bool,
) -> tuple[Words, Words]:
    """Add up the blocks of all ranks in float32, in the order of the ranks, and round the sums.

    Parameters
    ----------
    words : array of uint32, shape (ranks, blocks, words)
        Packed lanes, rounded to multiples of ``scale / limit`` in fixed point.
    scales : array of uint32, shape (ranks, blocks)
        Their scale words.
    hashes, again : array of uint32, shape (blocks, length)
        Coordinate hashes of the parts' dither and of the sum's; length a multiple of 64.
    shifts : array of uint32, shape (ranks,)
        The ranks' shifts of the parts' dither.
    width, limit : int
        Lane width, at most 16, and fixed-point value of a scale.
    down : int
        The sum's scale is that of ``2**-down`` of it.
    wide : bool
        Whether the scales are those of float64 blocks.

    Returns
    -------
    words : array of uint32, shape (blocks, words)
        The rounded sums, packed; zeros where the scale is zero or not finite.
    scales : array of uint32, shape (blocks,)
        NaN where a part's scale is not finite.
    """
    check_limit(limit)
    lost, some = nonfinite(scales, wide), scales != 0
    mantissa, exponent = split_scale(np, scales, wide)
    top = np.where(some & ~lost, exponent, -(1 << 20)).max(axis=0)
    total = np.zeros(hashes.shape, dtype=np.float32)
    for rank in range(len(words)):
        q = unpack(np, words[rank], width, hashes.shape[1])
        dither = view(((hashes >> 16) + shifts[rank]) & np.uint32(0xFFFF), np.int32)
        below = exponent[rank] - top
        counts = some[rank] & ~lost[rank] & (below >= -FAR)
        level = mantissa[rank] * np.float32(2 / limit) * power_of_two(np, np.where(counts, below, 0), False)
        values = (q * 32768 - (dither >> 1) + 16384).astype(np.float32) * level[:, None]
        total = np.where(counts[:, None], total + values, total)
    largest = np.max(view(total, np.uint32) & np.uint32(0x7FFFFFFF), axis=1)
    bad = lost.any(axis=0)
    largest = np.where(bad | ~some.any(axis=0), np.uint32(0), largest)
    power = np.where(largest != 0, top - down, 0)
    sums = wide_word(largest, power) if wide else pattern_times_power(np, largest, power)
    sums = np.where(largest == 0, np.uint32(0), sums).astype(np.uint32)
    rounded = _round(total, sums, again, power, limit, wide)
    special = np.uint32(0x7FF80000 if wide else 0x7FC00000)
    return pack(np, np.where((sums != 0)[:, None], rounded, 0), width), np.where(bad, special, sums)


def _round(
    total: Array, scales: Words, hashes: Words, power: Array, limit: int, wide: bool
) -> npt.NDArray[np.int32]:
    """Return the sums, times 2^power, as integers in steps of their scales."""
    mantissa, exponent = split_scale(np, scales, wide)
    shift = np.where(scales != 0, power - exponent, 0).astype(np.int32)
    scaled = total * power_of_two(np, shift, False)[:, None]
    scaled = scaled * (np.float32(limit) / mantissa)[:, None]
    y = np.rint(np.clip(scaled, -limit, limit)).astype(np.int32)
    rounded: npt.NDArray[np.int32] = (y + view(hashes >> 16, np.int32)) >> 16
    return rounded


def widen_lanes(words: Words, narrow: int, width: int, length: int) -> Words:
    """Add up the lanes of all ranks, and pack the sums in wider ones.

    Parameters
    ----------
    words : array of uint32, shape (ranks, blocks, words)
        Packed lanes of `narrow` bits.
    narrow, width : int
        Lane widths before and after.
    length : int
        Coordinates a block.

    Returns
    -------
    array of uint32, shape (blocks, words)
        The sum mod 2^32 of what the ranks' words in wide lanes would be.
    """
    total = sum(unpack(np, part, narrow, length) for part in words)
    wide: Words = pack(np, np.asarray(total), width)
    return wide
