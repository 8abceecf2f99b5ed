"""The lane codecs' arithmetic: integer rounding with a shared, subtracted dither.

No step has a multiply followed by an add that a compiler could contract, so NumPy, C++ and XLA give the
same bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from gccomm.kernels.reference.hashing import check_words
from gccomm.kernels.reference.namespace import Array, Namespace, is_wide, quiet, scale_by_power, u32, view
from gccomm.kernels.reference.packing import pack, unpack
from gccomm.kernels.reference.scales import (
    add_residual,
    narrow,
    nonfinite,
    saturate,
    split_scale,
    usable,
)

__all__ = ["Encoded", "block_energy", "centred_sums", "decode", "dequantise", "encode", "quantise"]

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


def _largest_float32(limit: int) -> float:
    """Return the largest float32 that is not above `limit`."""
    rounded = np.float32(limit)
    below = np.nextafter(rounded, np.float32(0))
    return float(rounded if int(rounded) <= limit else below)


def _check_limit(limit: int) -> None:
    if not 1 <= limit <= LARGEST_LIMIT:
        raise ValueError(f"fixed-point limit {limit} is outside 1..{LARGEST_LIMIT}")


@quiet
def quantise(xp: Namespace, v: Array, scales: Array, hashes: Array, shift: Array, limit: int) -> Array:
    """Round coordinates to integers.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``jax.numpy``.
    v : array of float32 or float64, shape (blocks, length)
        Coordinates, at most the scale in magnitude.
    scales : array of uint32, shape (blocks,)
        Agreed scale words.
    hashes : array of uint32, shape (blocks, length)
        Coordinate hashes.
    shift : int or uint32 scalar
        This rank's shift of the dither, 0..65535.
    limit : int
        Fixed-point value, in 2**-16 levels, that the scale itself becomes.

    Returns
    -------
    array of int32, shape (blocks, length)
        The rounded coordinates; 0 in blocks whose scale is zero or not finite.
    """
    _check_limit(limit)
    wide = is_wide(v)
    mantissa, exponent = split_scale(xp, scales, wide)
    v = xp.where(usable(scales, wide)[:, None], v, xp.zeros_like(v))
    normalised = scale_by_power(xp, v, -exponent).astype(xp.float32)
    factor = xp.float32(_largest_float32(limit)) / mantissa
    largest = xp.float32(LARGEST_LIMIT)
    scaled = xp.clip(normalised * factor[:, None], -largest, largest)
    y = xp.clip(xp.rint(scaled).astype(xp.int32), -limit, limit)
    dither = ((hashes >> 16) + u32(xp, shift)) & 0xFFFF
    q = (y + view(dither, xp.int32)) >> 16
    return xp.where(usable(scales, wide)[:, None], q, 0)


def _rounding_error(
    xp: Namespace, v: Array, q: Array, scales: Array, limit: int, residual: Array | None
) -> Array:
    """Return `v` less what `q` stands for; in blocks that are not finite, the old residual."""
    mantissa, exponent = split_scale(xp, scales, is_wide(v))
    level = mantissa * xp.float32(65536 / limit)
    sent = (q.astype(xp.float32) * level[:, None]).astype(v.dtype)
    error = v - saturate(xp, scale_by_power(xp, sent, exponent))
    kept = xp.zeros_like(v) if residual is None else residual
    return xp.where(nonfinite(scales, is_wide(v))[:, None], kept, error)


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
) -> Encoded:
    """Round and pack blocks.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``jax.numpy``.
    x : array of floats, shape (blocks, length)
        Coordinates.
    scales, hashes, shift, limit
        As in :func:`quantise`; only `limit` must be a Python value.
    width : int
        Lane width in bits.
    residual : array of float32 (float64 for float64), same shape, optional
        Error carried over from the last step, added to `x`.

    Returns
    -------
    Encoded
        Words, the new residual and check words.

    Notes
    -----
    One level, ``scale * 65536 / limit``, may lie beyond the largest number of the residual's dtype although
    the scale does not: what was sent then counts as that largest number, and the residual stays finite.
    """
    v = add_residual(xp, x, residual)
    q = quantise(xp, v, scales, hashes, shift, limit)
    error = _rounding_error(xp, v, q, scales, limit, residual)
    return Encoded(pack(xp, q, width), error, check_words(xp, hashes, q))


@quiet
def centred_sums(xp: Namespace, sums: Array, hashes: Array, *, n: int, subtract: bool) -> Array:
    """Return lane sums in units of 2**-15 levels, less the ranks' dither and its mean.

    The dithers of the ranks are h shifted by multiples of 65536/n, so their sum depends on h only through
    ``n h mod 65536``.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``jax.numpy``.
    sums : array of int32, shape (blocks, length)
        Lane sums.
    hashes : array of uint32, same shape
        Coordinate hashes.
    n : int
        Number of ranks.
    subtract : bool
        Whether to subtract the dither.

    Returns
    -------
    array of int32, same shape
    """
    fixed = sums * 32768
    if not subtract:
        return fixed
    total = ((hashes >> 16) * u32(xp, n)) & 0xFFFF
    return fixed - view(total >> 1, xp.int32) + (16384 - (math.gcd(n, 65536) >> 2))


@quiet
def block_energy(xp: Namespace, centred: Array) -> Array:
    """Return the sum of squares, in levels, of each block of centred sums: float32, shape (blocks,)."""
    levels = centred.astype(xp.float32) * xp.float32(2.0**-15)
    return xp.sum(levels * levels, axis=1, dtype=xp.float32)


@quiet
def dequantise(
    xp: Namespace,
    centred: Array,
    scales: Array,
    *,
    limit: int,
    n: int,
    mean: bool,
    dtype: str,
) -> Array:
    """Turn centred sums into numbers.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``jax.numpy``.
    centred : array of int32, shape (blocks, length)
        From :func:`centred_sums`.
    scales : array of uint32, shape (blocks,)
        Agreed scale words.
    limit : int
        As in :func:`quantise`.
    n : int
        Number of ranks.
    mean : bool
        Whether to divide by `n`.
    dtype : str
        "float32", "float64", "float16" or "bfloat16".

    Returns
    -------
    array of `dtype` (bfloat16: uint16 bit patterns), shape (blocks, length)
        The sum or mean; NaN in blocks whose scale is not finite.
    """
    _check_limit(limit)
    wide = dtype == "float64"
    mantissa, exponent = split_scale(xp, scales, wide)
    step = xp.where(scales == 0, xp.float32(0), mantissa * xp.float32(2 / limit))
    result = centred.astype(xp.float32) * step[:, None]
    if wide:
        result = result.astype(xp.float64)
    if mean:
        result = result * result.dtype.type(1 / n)
    # The exponent and 1/n come last: near the end of the range only a result out of range may overflow.
    result = scale_by_power(xp, result, exponent)
    result = xp.where(nonfinite(scales, wide)[:, None], xp.full_like(result, xp.nan), result)
    return narrow(xp, result, dtype)


@quiet
def decode(
    xp: Namespace,
    words: Array,
    scales: Array,
    hashes: Array,
    *,
    length: int,
    width: int,
    limit: int,
    n: int,
    subtract: bool,
    mean: bool,
    dtype: str,
) -> Array:
    """Unpack summed words into the sum or mean; parameters as in the functions it is made of.

    Returns
    -------
    array of `dtype` (bfloat16: uint16 bit patterns), shape (blocks, length)
    """
    sums = unpack(xp, words, width, length)
    centred = centred_sums(xp, sums, hashes, n=n, subtract=subtract)
    return dequantise(xp, centred, scales, limit=limit, n=n, mean=mean, dtype=dtype)
