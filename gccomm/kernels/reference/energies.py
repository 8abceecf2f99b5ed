"""Maxima and energies of blocks as integers, of the coordinates themselves or of rotated ones."""

from __future__ import annotations

import numpy as np

from gccomm.kernels.reference.namespace import Array, Namespace, is_wide, quiet, scale_by_power, u32, view
from gccomm.kernels.reference.quantise import normalise
from gccomm.kernels.reference.rotation import Rotation, rotate
from gccomm.kernels.reference.scales import (
    INFINITY_32,
    LARGEST_64,
    NAN_64,
    add_residual,
    maxima,
    pattern_times_power,
    split_scale,
    upper_words,
    usable,
)

__all__ = ["encoded_maxima", "maxima_and_energies", "wide_word"]

NAN_32 = 0x7FC00000
SMALL = 27 << 23
"""Pattern of 2**-100: below, 24 bits of a rotated coordinate might not be normal numbers."""


def _rotated(xp: Namespace, v: Array, rotation: Rotation | None) -> Array:
    return v if rotation is None else rotate(xp, v, rotation)


def _largest(xp: Namespace, y: Array) -> Array:
    """Return the pattern of the largest magnitude of float32 blocks, shape (blocks,)."""
    return xp.max(view(y, xp.uint32) & u32(xp, 0x7FFFFFFF), axis=1)


def wide_word(largest: Array, exponent: Array) -> Array:
    """Return the float64 scale word of ``largest * 2**exponent``, finite, rounded up."""
    value = largest.view(np.float32).astype(np.float64)[:, None]
    return np.minimum(upper_words(np, scale_by_power(np, value, exponent))[:, 0], np.uint32(LARGEST_64))


def _scaled_energies(xp: Namespace, y: Array, largest: Array) -> Array:
    """Return the sums of squares of y in units of a 1024th of the largest magnitude."""
    finite = (largest != 0) & (largest < u32(xp, INFINITY_32))
    factor = xp.float32(1024) / xp.where(finite, view(largest, xp.float32), xp.float32(1))
    z = xp.rint(xp.abs(xp.where(finite[:, None], y, xp.float32(0))) * factor[:, None]).astype(xp.uint32)
    return xp.sum(z * z, axis=1, dtype=xp.uint32)


@quiet
def maxima_and_energies(
    xp: Namespace, x: Array, residual: Array | None = None, rotation: Rotation | None = None
) -> tuple[Array, Array]:
    """Return the scale word and the energy of each block.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``jax.numpy``.
    x : array of floats, shape (blocks, length)
        Coordinates.
    residual : array of float32 (float64 for float64), same shape, optional
        Added to `x` first.
    rotation : Rotation, optional
        Rotation of the blocks: both are then those of the rotated coordinates.

    Returns
    -------
    scales : array of uint32, shape (blocks,)
        Scale words, as of :func:`~gccomm.kernels.reference.maxima`.  Of rotated blocks that are not finite
        0x7FC00000, float64 0x7FF80000.
    energies : array of uint32, shape (blocks,)
        Sum of ``rint(|y| * 1024 / M)**2``, at most 2**30, over the coordinates y, M the largest of them; 0
        for blocks that are zero or not finite.

    Notes
    -----
    float64 blocks are scaled by a power of two, then rounded to float32.  Blocks whose maximum is below
    2**-100 are computed from their coordinates times 2**64 (not under JAX, where subnormal numbers are
    zero anyhow).
    """
    v = add_residual(xp, x, residual)
    plain = maxima(xp, x, residual)
    if is_wide(v):
        return _wide_blocks(v, plain, rotation)
    y = _rotated(xp, v, rotation)
    largest = _largest(xp, y)
    words = largest
    if xp is np:
        small = (largest < u32(xp, SMALL)) & (plain != 0)
        raised = _rotated(xp, v * xp.float32(2.0**64), rotation)
        y = xp.where(small[:, None], raised, y)
        largest = _largest(xp, y)
        lowered = xp.maximum(pattern_times_power(xp, largest, -64), u32(xp, 1))
        words = xp.where(small, lowered, largest)
    energies = _scaled_energies(xp, y, largest)
    if rotation is None:
        return plain, energies
    return xp.where(words >= u32(xp, INFINITY_32), u32(xp, NAN_32), words), energies


def _wide_blocks(v: Array, plain: Array, rotation: Rotation | None) -> tuple[Array, Array]:
    _, exponent = split_scale(np, plain, True)
    y = _rotated(np, scale_by_power(np, v, -exponent).astype(np.float32), rotation)
    finite = usable(plain, True)
    largest = np.where(finite, _largest(np, y), np.uint32(0))
    energies = _scaled_energies(np, y, largest)
    if rotation is None:
        return plain, energies
    words = wide_word(largest, exponent)
    return np.where(finite | (plain == 0), words, np.uint32(NAN_64)), energies


@quiet
def encoded_maxima(
    xp: Namespace,
    x: Array,
    scales: Array,
    residual: Array | None = None,
    ratios: Array | None = None,
    rotation: Rotation | None = None,
) -> Array:
    """Return the scale word that each block has of its own, found while it is encoded with another.

    Parameters
    ----------
    xp, x, residual, rotation
        As in :func:`maxima_and_energies`.
    scales : array of uint32, shape (blocks,)
        The scale words in use.
    ratios : array of float32, shape (blocks,), optional
        The steps in use.

    Returns
    -------
    array of uint32, shape (blocks,)
        Without a rotation the plain maxima.  With one, the largest rotated coordinate, as it was when
        normalised by the scale in use, rounded up; where there is no such number, as
        :func:`maxima_and_energies` gives.
    """
    if rotation is None:
        return maxima(xp, x, residual)
    v = add_residual(xp, x, residual)
    wide = is_wide(v)
    largest = _largest(xp, normalise(xp, v, scales, rotation))
    good = usable(scales, wide) & (largest < u32(xp, INFINITY_32))
    if ratios is not None:
        good = good & (ratios != 0)
    _, exponent = split_scale(xp, scales, wide)
    finite = xp.where(good, largest, u32(xp, 0))
    found = wide_word(finite, exponent) if wide else pattern_times_power(xp, finite, exponent)
    return xp.where(good, found, maxima_and_energies(xp, x, residual, rotation)[0])
