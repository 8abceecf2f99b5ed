"""The lane codecs' arithmetic, forward: integer rounding with a shared, subtracted dither.

No step has a multiply followed by an add that a compiler could contract, so NumPy, C++ and XLA give the
same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gccomm.kernels.reference.hashing import check_words
from gccomm.kernels.reference.namespace import Array, Namespace, is_wide, quiet, scale_by_power, u32, view
from gccomm.kernels.reference.packing import pack
from gccomm.kernels.reference.rotation import Rotation, rotate, unrotate
from gccomm.kernels.reference.scales import add_residual, nonfinite, saturate, split_scale, usable

__all__ = ["Encoded", "Grid", "check_limit", "encode", "normalise", "quantise"]

LARGEST_LIMIT = 32767 * 65536
"""Largest fixed-point coordinate: adding a dither below 65536 still stays below 2**31."""


class Encoded(NamedTuple):
    """What :func:`encode` makes of some blocks."""

    words: Array
    """uint32, shape (blocks, words): the packed lanes."""
    residual: Array
    """float32 (float64 for float64 tensors), shape (blocks, length): what rounding left behind."""
    check: Array
    """uint32, shape (blocks, 2): the check words."""


class Grid(NamedTuple):
    """The grid points of a table quantiser, among the whole numbers 0..g.

    A number between two neighbouring points becomes one of them at random; what is sent is the point less
    ``(g + 1) // 2``.  The native kernels take ``[g, *low, *gap]``, int32.
    """

    low: Array
    """int32, shape (g,): the largest grid point that is at most k, for each k in 0..g - 1."""
    gap: Array
    """int32, shape (g,): from there to the next grid point."""


MOST_GRID_STEPS = 1023


def _largest_float32(limit: int) -> float:
    """Return the largest float32 that is not above `limit`."""
    rounded = np.float32(limit)
    below = np.nextafter(rounded, np.float32(0))
    return float(rounded if int(rounded) <= limit else below)


def check_limit(limit: int) -> None:
    """Raise ValueError unless `limit` is a fixed-point value that a dither may be added to."""
    if not 1 <= limit <= LARGEST_LIMIT:
        raise ValueError(f"fixed-point limit {limit} is outside 1..{LARGEST_LIMIT}")


def _steps(grid: Grid) -> int:
    g = int(grid.low.shape[0])
    if not 1 <= g <= MOST_GRID_STEPS:
        raise ValueError(f"a grid of {g} steps; there may be 1 to {MOST_GRID_STEPS}")
    return g


def _to_grid(xp: Namespace, y: Array, dither: Array, grid: Grid) -> Array:
    """Round fixed-point numbers between -g/2 and g/2 to grid points."""
    g = _steps(grid)
    u = y + (g << 15)
    index = xp.minimum(u >> 16, g - 1)
    low, gap = xp.asarray(grid.low)[index], xp.asarray(grid.gap)[index]
    up = u - (low << 16) + dither * gap >= gap << 16
    return low + xp.where(up, gap, 0) - (g + 1) // 2


def _sends(scales: Array, ratios: Array | None, wide: bool) -> Array:
    """Tell which blocks have a step, so that they send anything but zeros."""
    sends = usable(scales, wide)
    return sends if ratios is None else sends & (ratios != 0)


@quiet
def normalise(xp: Namespace, v: Array, scales: Array, rotation: Rotation | None) -> Array:
    """Return what is rounded: ``v * 2**-e``, e the scale's exponent, rotated where there is a rotation.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``jax.numpy``.
    v : array of float32 or float64, shape (blocks, length)
        Coordinates.
    scales : array of uint32, shape (blocks,)
        Agreed scale words.
    rotation : Rotation or None
        Rotation of the blocks.

    Returns
    -------
    array of float32, shape (blocks, length), or the padded length with a rotation
        The numbers; 0 where the scale is zero or not finite.
    """
    _, exponent = split_scale(xp, scales, is_wide(v))
    v = xp.where(usable(scales, is_wide(v))[:, None], v, xp.zeros_like(v))
    if rotation is None:
        return scale_by_power(xp, v, -exponent).astype(xp.float32)
    if is_wide(v):
        return rotate(xp, scale_by_power(xp, v, -exponent).astype(xp.float32), rotation)
    return rotate(xp, v, rotation, -exponent)


@quiet
def _factor(
    xp: Namespace, scales: Array, limit: int, ratios: Array | None, gains: Array | None, wide: bool
) -> Array:
    """Return what each block's normalised coordinates are multiplied by to become fixed-point values."""
    mantissa, _ = split_scale(xp, scales, wide)
    if ratios is None:
        check_limit(limit)
        factor = xp.float32(_largest_float32(limit)) / mantissa
    else:
        factor = xp.float32(65536) / (mantissa * ratios)
    return factor if gains is None else factor * gains


def quantise(
    xp: Namespace,
    v: Array,
    scales: Array,
    hashes: Array,
    shift: Array,
    limit: int,
    *,
    clamp: int = 0,
    ratios: Array | None = None,
    rotation: Rotation | None = None,
    grid: Grid | None = None,
    gains: Array | None = None,
) -> Array:
    """Round coordinates to integers, in the array namespace ``xp``.

    Parameters
    ----------
    v : array of float32 or float64, shape (blocks, length)
        Coordinates.
    scales : array of uint32, shape (blocks,)
        Agreed scale words.
    hashes : array of uint32, shape (blocks, length)
        Coordinate hashes; of the padded length with a rotation.
    shift : int or uint32 scalar
        This rank's shift of the dither, 0..65535.
    limit : int
        Fixed-point value, in 2**-16 levels, that the scale itself becomes; not used with `ratios`.
    clamp : int
        Largest fixed-point value, 0 for `limit`.
    ratios : array of float32, shape (blocks,), optional
        One level of each block over its scale, from 2**-40 to 2**40; 0: the block counts as zero.
    rotation : Rotation, optional
        Rotation of the blocks.
    grid : Grid, optional
        Grid points to round to, in levels; with `ratios`, and in place of `clamp`.
    gains : array of float32, shape (blocks,), optional
        What coordinates are multiplied by before they are clamped.

    Returns
    -------
    array of int32, shape of `hashes`
        The rounded coordinates; 0 in blocks whose scale is zero or not finite.
    """
    most = clamp or limit if grid is None else _steps(grid) << 15
    check_limit(most)
    wide = is_wide(v)
    factor = _factor(xp, scales, limit, ratios, gains, wide)
    largest = xp.float32(LARGEST_LIMIT)
    scaled = normalise(xp, v, scales, rotation) * factor[:, None]
    scaled = xp.clip(xp.where(xp.isnan(scaled), largest, scaled), -largest, largest)
    y = xp.clip(xp.rint(scaled).astype(xp.int32), -most, most)
    dither = view(((hashes >> 16) + u32(xp, shift)) & 0xFFFF, xp.int32)
    q = (y + dither) >> 16 if grid is None else _to_grid(xp, y, dither, grid)
    return xp.where(_sends(scales, ratios, wide)[:, None], q, 0)


def _rounding_error(
    xp: Namespace,
    v: Array,
    sent: Array,
    scales: Array,
    sends: Array,
    residual: Array | None,
    rotation: Rotation | None,
) -> Array:
    """Return `v` less what the integers stand for; in blocks that are not finite, the old residual."""
    wide = is_wide(v)
    _, exponent = split_scale(xp, scales, wide)
    if rotation is not None:
        sent = unrotate(xp, sent, rotation, v.shape[1], scales)
    error = saturate(xp, v - saturate(xp, scale_by_power(xp, sent.astype(v.dtype), exponent)))
    error = xp.where(sends[:, None], error, v)
    kept = xp.zeros_like(v) if residual is None else residual
    return xp.where(nonfinite(scales, wide)[:, None], kept, error)


@quiet
def encode(
    xp: Namespace,
    x: Array,
    scales: Array,
    hashes: Array,
    shift: Array,
    *,
    width: int,
    limit: int,
    residual: Array | None = None,
    clamp: int = 0,
    ratios: Array | None = None,
    rotation: Rotation | None = None,
    subtract: bool = False,
    grid: Grid | None = None,
    gains: Array | None = None,
) -> Encoded:
    """Round and pack blocks, in the array namespace ``xp``.

    Parameters
    ----------
    x : array of floats, shape (blocks, length)
        Coordinates.
    scales, hashes, shift, limit, clamp, ratios, rotation, grid, gains
        As in :func:`quantise`; `limit` and `clamp` must be Python values.
    width : int
        Lane width in bits.
    residual : array of float32 (float64 for float64), same shape, optional
        Error carried over from the last step, added to `x`.
    subtract : bool
        Whether decoding takes the dither off: the residual then leaves out this rank's share of it.

    Returns
    -------
    Encoded
        Words, the new residual and check words.

    Notes
    -----
    Where one level lies beyond the largest number of the residual's dtype, what was sent counts as that
    number, and the residual stays finite.
    """
    v = add_residual(xp, x, residual)
    q = quantise(
        xp, v, scales, hashes, shift, limit,
        clamp=clamp, ratios=ratios, rotation=rotation, grid=grid, gains=gains,
    )  # fmt: skip
    mantissa, _ = split_scale(xp, scales, is_wide(v))
    level = mantissa * (xp.float32(65536 / limit) if ratios is None else ratios)
    sends = _sends(scales, ratios, is_wide(v))
    if grid is not None:  # with an odd one, the integers stand for numbers half a level above them
        levels = q.astype(xp.float32) + xp.float32(0.5 * (_steps(grid) % 2))
    elif subtract:
        dither = view(((hashes >> 16) + u32(xp, shift)) & 0xFFFF, xp.int32)
        levels = (q * 32768 - (dither >> 1) + 16384).astype(xp.float32)
        level = level * xp.float32(2.0**-15)
    else:
        levels = q.astype(xp.float32)
    error = _rounding_error(xp, v, levels * level[:, None], scales, sends, residual, rotation)
    return Encoded(pack(xp, q, width), error, check_words(xp, hashes, q))
