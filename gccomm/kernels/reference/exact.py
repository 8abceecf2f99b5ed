"""Small tensors: two 32-bit words a coordinate, whose sums are exact to about 60 bits."""

from __future__ import annotations

import numpy as np

from gccomm.kernels.reference.namespace import Array, Namespace, divide, is_wide, quiet, scale_by_power, view
from gccomm.kernels.reference.scales import add_residual, narrow, nonfinite, split_scale, usable

__all__ = ["exact_decode", "exact_encode"]


def _guard_bits(n: int) -> int:
    """Return ceil(log2 n): bits that the sum of n numbers may grow by."""
    return (n - 1).bit_length()


@quiet
def exact_encode(xp: Namespace, x: Array, scales: Array, *, n: int, residual: Array | None = None) -> Array:
    """Encode blocks as fixed-point numbers of two words.

    Every operation is exact in the dtype that `x` is widened to, so float32 arithmetic gives the same words
    as float64 would.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``jax.numpy``.
    x : array of floats, shape (blocks, length)
        Coordinates, at most the scale in magnitude.
    scales : array of uint32, shape (blocks,)
        Agreed scale words.
    n : int
        Number of ranks.
    residual : array of float32 (float64 for float64), same shape, optional
        Error carried over from the last step, added to `x`.  All of it is sent, so the new residual is zero
        (in blocks that are not finite, the old one).

    Returns
    -------
    array of uint32, shape (blocks, 2 * length)
        The upper words of all coordinates, then the lower words; 0 where the scale is zero or not finite.
    """
    v = add_residual(xp, x, residual)
    v = xp.where(usable(scales, is_wide(v))[:, None], v, xp.zeros_like(v))
    _, exponent = split_scale(xp, scales, is_wide(v))
    guard = _guard_bits(n)
    fixed = scale_by_power(xp, v, 30 - guard - (exponent + 1))
    upper = xp.rint(fixed)
    lower = xp.rint((fixed - upper) * v.dtype.type(2.0 ** (31 - guard)))
    return view(xp.concatenate([upper, lower], axis=1).astype(xp.int32), xp.uint32)


@quiet
def exact_decode(xp: Namespace, words: Array, scales: Array, *, n: int, mean: bool, dtype: str) -> Array:
    """Turn summed words into the sum or mean, computed in float64 (under JAX in float32).

    Parameters
    ----------
    xp : module
        ``numpy`` or ``jax.numpy``.
    words : array of uint32, shape (blocks, 2 * length)
        Sum mod 2**32 of the ranks' words.
    scales : array of uint32, shape (blocks,)
        Agreed scale words.
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
    wide = dtype == "float64"
    length = words.shape[1] // 2
    computed = xp.float64 if xp is np else xp.float32
    signed = view(words, xp.int32).astype(computed)
    guard = _guard_bits(n)
    result = signed[:, :length] + signed[:, length:] * signed.dtype.type(2.0 ** (guard - 31))
    _, exponent = split_scale(xp, scales, wide)
    if mean:  # before the scaling: the mean of 1e308 is 1e308
        result = divide(xp, result, n)
    result = scale_by_power(xp, result, (exponent + 1) + guard - 30)
    result = xp.where(usable(scales, wide)[:, None], result, xp.zeros_like(result))
    result = xp.where(nonfinite(scales, wide)[:, None], xp.full_like(result, xp.nan), result)
    return narrow(xp, result, dtype)
