"""Float sums on the wire: conversion to the wire's dtype and back, for the uncompressed baselines."""

from __future__ import annotations

from gccomm.kernels.reference.namespace import Array, Namespace, divide, quiet
from gccomm.kernels.reference.scales import add_residual, narrow, widen

__all__ = ["float_decode", "float_encode"]


@quiet
def float_encode(xp: Namespace, x: Array, *, wire: str, residual: Array | None = None) -> tuple[Array, Array]:
    """Round coordinates to the wire's dtype.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``jax.numpy``.
    x : array of floats
        Coordinates.
    wire : str
        "float32", "float64", "float16" or "bfloat16".
    residual : array of float32 (float64 for float64), same shape, optional
        Error carried over from the last step, added to `x`.

    Returns
    -------
    values : array of `wire` (bfloat16: uint16 bit patterns), same shape
        What goes on the wire.
    residual : array of float32 (float64 for float64), same shape
        What rounding left behind; the old residual where the wire value is not finite.
    """
    v = add_residual(xp, x, residual)
    values = narrow(xp, v, wire)
    sent = widen(xp, values).astype(v.dtype)
    kept = xp.zeros_like(v) if residual is None else residual
    return values, xp.where(xp.isfinite(sent), v - sent, kept)


@quiet
def float_decode(xp: Namespace, values: Array, *, n: int, mean: bool, dtype: str) -> Array:
    """Turn sums of wire values into the sum or mean.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``jax.numpy``.
    values : array of floats
        Summed wire values; bfloat16 as in :func:`~gccomm.kernels.reference.scales.widen`.
    n : int
        Number of ranks.
    mean : bool
        Whether to divide by `n`.
    dtype : str
        "float32", "float64", "float16" or "bfloat16".

    Returns
    -------
    array of `dtype` (bfloat16: uint16 bit patterns), same shape
    """
    result = widen(xp, values)
    if mean:
        result = divide(xp, result, n)
    return narrow(xp, result, dtype)
