"""The lane codecs' arithmetic, back: from summed lanes to numbers."""

from __future__ import annotations

import math

from gccomm.kernels.reference.namespace import Array, Namespace, quiet, scale_by_power, u32, view
from gccomm.kernels.reference.packing import unpack
from gccomm.kernels.reference.quantise import check_limit
from gccomm.kernels.reference.rotation import Rotation, padded, unrotate
from gccomm.kernels.reference.scales import narrow, nonfinite, split_scale

__all__ = ["block_energy", "centred_sums", "decode", "dequantise", "wide_sums"]


def _corrections(xp: Namespace, hashes: Array, n: int, subtract: bool, offset: int) -> Array:
    """Return what is added to the sums, in units of 2**-15 levels: the dithers' mean less the dithers."""
    if not subtract:
        return xp.full(hashes.shape, offset, dtype=xp.int32)
    total = ((hashes >> 16) * u32(xp, n)) & 0xFFFF
    return xp.int32(16384 - (math.gcd(n, 65536) >> 2) + offset) - view(total >> 1, xp.int32)


@quiet
def centred_sums(
    xp: Namespace, sums: Array, hashes: Array, *, n: int, subtract: bool, offset: int = 0
) -> Array:
    """Return lane sums in units of 2**-15 levels, less the ranks' dither and its mean.

    The dithers of the ranks are h shifted by multiples of 65536/n, so their sum depends on h only through
    ``n h mod 65536``.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``jax.numpy``.
    sums : array of int32, shape (blocks, length)
        Lane sums of at most 16 bits.
    hashes : array of uint32, same shape
        Coordinate hashes.
    n : int
        Number of ranks.
    subtract : bool
        Whether to subtract the dither.
    offset : int
        Added to every sum, in the same units.

    Returns
    -------
    array of int32, same shape
    """
    return sums * 32768 + _corrections(xp, hashes, n, subtract, offset)


@quiet
def wide_sums(xp: Namespace, sums: Array, hashes: Array, *, n: int, subtract: bool, offset: int = 0) -> Array:
    """Return what :func:`centred_sums` does, of 32-bit lanes: as float32, array of the same shape.

    For sums below 2**16 these are the very numbers that the integers are converted to.
    """
    corrections = _corrections(xp, hashes, n, subtract, offset).astype(xp.float32)
    return sums.astype(xp.float32) * xp.float32(32768) + corrections  # the product is exact


@quiet
def block_energy(xp: Namespace, centred: Array, width: int) -> Array:
    """Return the sum of squares of each block of centred sums, as an integer.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``jax.numpy``.
    centred : array of int32, shape (blocks, length)
        From :func:`centred_sums`; with a rotation, of all rotated coordinates.
    width : int
        Lane width in bits.

    Returns
    -------
    array of uint32, shape (blocks,)
        Sum mod 2**32 of the squares of the centred sums in units of ``2**(width - 11)`` levels, rounded
        half up; 0 for lanes of 32 bits.
    """
    if width == 32:
        return xp.zeros(centred.shape[0], dtype=xp.uint32)
    shift = width + 4
    coarse = view((centred + (1 << (shift - 1))) >> shift, xp.uint32)
    return xp.sum(coarse * coarse, axis=1, dtype=xp.uint32)


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
    ratios: Array | None = None,
    rotation: Rotation | None = None,
    length: int = 0,
) -> Array:
    """Turn centred sums into numbers.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``jax.numpy``.
    centred : array of int32 or float32, shape (blocks, length)
        From :func:`centred_sums` or :func:`wide_sums`.
    scales : array of uint32, shape (blocks,)
        Agreed scale words.
    limit, ratios, rotation
        As in :func:`gccomm.kernels.reference.quantise`.
    n : int
        Number of ranks.
    mean : bool
        Whether to divide by `n`.
    dtype : str
        "float32", "float64", "float16" or "bfloat16".
    length : int
        With a rotation, coordinates a block.

    Returns
    -------
    array of `dtype` (bfloat16: uint16 bit patterns), shape (blocks, length)
        The sum or mean; NaN in blocks whose scale is not finite.
    """
    wide = dtype == "float64"
    mantissa, exponent = split_scale(xp, scales, wide)
    if ratios is None:
        check_limit(limit)
        step = mantissa * xp.float32(2 / limit)
    else:
        step = mantissa * ratios * xp.float32(2.0**-15)
    step = xp.where(scales == 0, xp.float32(0), step)
    result = centred.astype(xp.float32) * step[:, None]
    if rotation is not None:
        result = unrotate(xp, result, rotation, length, scales)
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
    ratios: Array | None = None,
    rotation: Rotation | None = None,
    offset: int = 0,
) -> Array:
    """Unpack summed words into the sum or mean; parameters as in the functions it is made of.

    Returns
    -------
    array of `dtype` (bfloat16: uint16 bit patterns), shape (blocks, length)
    """
    sums = unpack(xp, words, width, length if rotation is None else padded(length))
    convert = wide_sums if width == 32 else centred_sums
    centred = convert(xp, sums, hashes, n=n, subtract=subtract, offset=offset)
    return dequantise(
        xp, centred, scales,
        limit=limit, n=n, mean=mean, dtype=dtype, ratios=ratios, rotation=rotation, length=length,
    )  # fmt: skip
