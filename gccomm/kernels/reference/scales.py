"""Block maxima as integer words, and what they mean as numbers.

A scale is the bit pattern of a non-negative number: integers order those as the numbers themselves, and
infinities and NaN above every finite one, so that an integer MAX loses neither.
"""

from __future__ import annotations

import numpy as np

from gccomm.kernels.reference.namespace import Array, Namespace, floor_log2, is_wide, quiet, u32, view

__all__ = [
    "add_residual",
    "maxima",
    "narrow",
    "nonfinite",
    "pattern_times_power",
    "saturate",
    "split_scale",
    "upper_words",
    "usable",
    "widen",
]

INFINITY_32 = 0x7F800000
LARGEST_32 = 0x7F7FFFFF
INFINITY_64 = 0x7FF00000
NAN_64 = 0x7FF80000
LARGEST_64 = 0x7FEFFFFF


@quiet
def widen(xp: Namespace, x: Array) -> Array:
    """Return `x` in the dtype it is computed in: float64 for float64, else float32.

    bfloat16 comes as its dtype or, where the namespace has none, as uint16 bit patterns.
    """
    name = str(x.dtype)
    if name in {"float32", "float64"}:
        return x
    if name == "float16":
        return x.astype(xp.float32)
    patterns = view(x, xp.uint16)
    return view(patterns.astype(xp.uint32) << 16, xp.float32)


@quiet
def narrow(xp: Namespace, x: Array, dtype: str) -> Array:
    """Round float32 or float64 numbers to `dtype`, to nearest even.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``jax.numpy``.
    x : array of float32 or float64
        Numbers to round, once: from float64 to a 16-bit format too.
    dtype : str
        "float32", "float64", "float16" (overflow gives inf) or "bfloat16".

    Returns
    -------
    array
        The numbers; for "bfloat16" their bit patterns as uint16, as NumPy has no such dtype.
    """
    if dtype == "float64":
        return x.astype(xp.float64)
    if dtype == "float32":
        return x.astype(xp.float32)
    x = _to_odd(xp, x) if is_wide(x) else x
    if dtype == "float16":
        return x.astype(xp.float16)
    bits = view(x, xp.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet_nan = (bits >> 16) | 0x40
    return xp.where(xp.isnan(x), quiet_nan, rounded).astype(xp.uint16)


def _to_odd(xp: Namespace, x: Array) -> Array:
    """Return float64 numbers as float32, rounded to odd: rounding that to 16 bits is rounding `x` at once."""
    near = x.astype(xp.float32)
    back = near.astype(xp.float64)
    odd = (view(near, xp.uint32) - (xp.abs(back) > xp.abs(x)).astype(xp.uint32)) | 1
    return xp.where((back != x) & ~xp.isnan(x), view(odd, xp.float32), near)


@quiet
def add_residual(xp: Namespace, x: Array, residual: Array | None) -> Array:
    """Return `x` widened, plus the residual (of the widened dtype) if there is one.

    The sum saturates: a finite coordinate stays finite; one that is inf or NaN stays so.
    """
    v = widen(xp, x)
    if residual is None:
        return v
    total = v + residual
    return xp.where(xp.isfinite(v), saturate(xp, total), total)


def saturate(xp: Namespace, x: Array) -> Array:
    """Return the nearest finite numbers; NaN stays NaN."""
    top = np.finfo(x.dtype).max
    return xp.where(x > top, top, xp.where(x < -top, -top, x))


def upper_words(xp: Namespace, v: Array) -> Array:
    """Return the scale words of float64 numbers: upper halves of the patterns, rounded up."""
    bits = view(xp.abs(v), xp.uint64)
    low = bits & xp.uint64(0xFFFFFFFF)
    rounded = (bits >> xp.uint64(32)).astype(xp.uint32) + (low != 0).astype(xp.uint32)
    finite = xp.minimum(rounded, xp.uint32(LARGEST_64))
    special = xp.where(xp.isnan(v), xp.uint32(NAN_64), xp.uint32(INFINITY_64))
    return xp.where(xp.isfinite(v), finite, special)


@quiet
def maxima(xp: Namespace, x: Array, residual: Array | None = None) -> Array:
    """Return the scale word of each block.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``jax.numpy``.
    x : array of floats, shape (blocks, length)
        Coordinates; see :func:`widen` for the dtypes.
    residual : array of float32 (float64 for float64), same shape, optional
        Added to `x` first.

    Returns
    -------
    array of uint32, shape (blocks,)
        Bit patterns of the largest magnitudes; float64: the upper halves, rounded up.
    """
    v = add_residual(xp, x, residual)
    patterns = upper_words(xp, v) if is_wide(v) else view(v, xp.uint32) & u32(xp, 0x7FFFFFFF)
    return xp.max(patterns, axis=1)


def nonfinite(scales: Array, wide: bool) -> Array:
    """Tell which scale words stand for inf or NaN; `wide`: words of float64 blocks."""
    return scales >= np.uint32(INFINITY_64 if wide else INFINITY_32)


def usable(scales: Array, wide: bool) -> Array:
    """Tell which scale words stand for finite numbers other than zero."""
    return (scales != 0) & ~nonfinite(scales, wide)


def split_scale(xp: Namespace, scales: Array, wide: bool) -> tuple[Array, Array]:
    """Split scale words into mantissa and exponent.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``jax.numpy``.
    scales : array of uint32, shape (blocks,)
        Scale words.
    wide : bool
        Whether they are upper halves of float64 patterns.

    Returns
    -------
    mantissa : array of float32, shape (blocks,)
        In [1, 2); 1 where the scale is 0.
    exponent : array of int32, shape (blocks,)
        The scale is ``mantissa * 2**exponent``; 0 where the scale is 0.
    """
    fraction_bits, bias = (20, 1023) if wide else (23, 127)
    fraction_mask = np.uint32((1 << fraction_bits) - 1)
    biased = scales >> fraction_bits
    normal = biased != 0
    # A subnormal pattern is an integer: move its leading bit to where a normal number hides it.
    leading = floor_log2(xp, scales)
    shift = xp.where(normal, 0, fraction_bits - leading).astype(xp.uint32)
    fraction = (scales << shift) & fraction_mask
    pattern = (fraction << (23 - fraction_bits)) | u32(xp, 0x3F800000)
    smallest = 1 - bias - fraction_bits
    exponent = xp.where(normal, biased.astype(xp.int32) - bias, leading + smallest)
    zero = scales == 0
    mantissa = view(xp.where(zero, u32(xp, 0x3F800000), pattern), xp.float32)
    return mantissa, xp.where(zero, 0, exponent).astype(xp.int32)


def pattern_times_power(xp: Namespace, patterns: Array, exponent: Array) -> Array:
    """Multiply finite non-negative float32 numbers by 2**exponent, rounded up.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``jax.numpy``.
    patterns : array of uint32
        Their bit patterns.
    exponent : int or array of int32, same shape
        Exponents, between -300 and 300.

    Returns
    -------
    array of uint32, same shape
        Bit patterns of the products, at most that of the largest finite number.
    """
    biased = patterns >> 23
    fraction = patterns & u32(xp, 0x007FFFFF)
    whole = xp.where(biased == 0, fraction, fraction | u32(xp, 0x00800000))
    shift = 23 - floor_log2(xp, whole)
    whole = whole << shift.astype(xp.uint32)  # a number in [2**23, 2**24)
    place = xp.where(biased == 0, 1, biased.astype(xp.int32)) - shift + exponent
    down = xp.clip(1 - place, 0, 24).astype(xp.uint32)
    subnormal = (whole + (u32(xp, 1) << down) - 1) >> down
    normal = (xp.clip(place, 0, 254).astype(xp.uint32) << 23) | (whole & u32(xp, 0x007FFFFF))
    product = xp.where(place >= 1, normal, subnormal)
    product = xp.where(place >= 255, u32(xp, LARGEST_32), product)
    return xp.where(patterns == 0, u32(xp, 0), product)
