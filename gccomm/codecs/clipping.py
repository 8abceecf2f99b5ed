"""Clipped headroom: few bits spent where most coordinates are.

Rotated coordinates are nearly Gaussian, so with few levels the largest of a block is a bad scale: with a step
that is smaller by a third, rounding loses less than clamping the tails at t standard deviations costs. t is
the one of the least mean square error for the lane's width and the number of ranks. Clamping alone would
shorten every vector. Each rank therefore multiplies its blocks by a gain g first, with g P(|z| < t / g) = 1
for a Gaussian z: what it sends then has a projection onto its input as long as the input. Where a few
coordinates make up most of a block its rotation is less Gaussian: a bias of a few percent of theirs is left.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gccomm.lanes import FIXED_POINT
from gccomm.layout import BLOCK

if TYPE_CHECKING:
    from gccomm.operand import Operand
    from gccomm.steps import Words

__all__ = ["block_gains", "clipped_scales", "threshold"]

LEAST = 1.3  # of thresholds: below sqrt(pi / 2) no gain makes up for the clamp
Floats = npt.NDArray[np.float64]


def _inside(a: float) -> float:
    """Return P(|z| < a) of a Gaussian z."""
    return math.erf(a / math.sqrt(2))


def _gain(threshold: float) -> float:
    """Return g with g P(|z| < t / g) = 1, by bisection: the product grows with g."""
    low, high = 1.0, 64.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if middle * _inside(threshold / middle) < 1 else (low, middle)
    return low


def _error(threshold: float, levels: float) -> float:
    """Return the mean square error of a Gaussian coordinate: of the clamp with its gain, and of rounding."""
    gain = _gain(threshold)
    a = threshold / gain
    density = math.exp(-a * a / 2) / math.sqrt(2 * math.pi)
    square = gain**2 * (_inside(a) - 2 * a * density) + threshold**2 * (1 - _inside(a))
    return square - 1 + (threshold / levels) ** 2 / 12


@lru_cache(maxsize=256)
def threshold(limit: int) -> float:
    """Return the threshold of the least error where a rank's fixed-point values are at most ``limit``."""
    levels = limit / FIXED_POINT
    return min((LEAST + i / 32 for i in range(160)), key=lambda t: _error(t, levels))


@lru_cache(maxsize=1)
def _gains() -> tuple[Floats, Floats]:
    """Return thresholds and their gains, to interpolate between."""
    thresholds = LEAST + np.arange(180) / 32
    return thresholds, np.array([_gain(t) for t in thresholds])


def deviations(x: Operand, own: Words, energy: Words) -> Floats:
    """Return the root mean square of each rotated block, 0 where it is zero or not finite."""
    values = x.scale_values(np.where(x.nonfinite_scales(own), np.uint32(0), own))
    root: Floats = values * (np.sqrt(energy / x.codec.carried(x.lengths)) / BLOCK)
    return root


def clipped_scales(x: Operand, own: Words, energy: Words, limit: float) -> Words:
    """Return scale words: the smaller of the block's maximum and ``limit`` times its root mean square."""
    with np.errstate(over="ignore"):  # then the maximum is the smaller one
        clipped = x.scale_words(deviations(x, own, energy) * limit)
    words: Words = np.where(x.nonfinite_scales(own), own, np.minimum(own, np.maximum(clipped, own != 0)))
    return words


def block_gains(x: Operand, own: Words, energy: Words, scales: Words) -> npt.NDArray[np.float32]:
    """Return the gain of each block of this rank: 1 where the agreed scale clamps nothing of it."""
    thresholds, gains = _gains()
    clamped = (own > scales) & ~x.nonfinite_scales(own)
    values = x.scale_values(np.where(clamped, scales, np.uint32(0)))
    spread = np.where(clamped, deviations(x, own, energy), 1)
    found = np.interp(values / spread, thresholds, gains)
    return np.where(clamped, found, 1).astype(np.float32)
