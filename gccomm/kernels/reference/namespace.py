"""The few operations in which NumPy and JAX differ, or in which a compiler has to be watched.

Everything in this package is a pure function over an array namespace `xp`, ``numpy`` or ``jax.numpy``.
Constants above 2**31 must be typed before they meet an array, which is what :func:`u32` is for.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

__all__ = [
    "Array",
    "Namespace",
    "divide",
    "floor_log2",
    "is_wide",
    "power_of_two",
    "quiet",
    "scale_by_power",
    "u32",
    "view",
]

Array: TypeAlias = Any
Namespace: TypeAlias = Any

quiet = np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore")
"""Decorator: infinities and NaN are data here, not mistakes, and words wrap."""


def u32(xp: Namespace, value: Array) -> Array:
    """Return `value`, a Python int (taken mod 2**32) or an array, as uint32."""
    if isinstance(value, int):
        return xp.uint32(value & 0xFFFFFFFF)
    return xp.asarray(value).astype(xp.uint32)


def view(x: Array, dtype: Any) -> Array:
    """Reinterpret the bits of `x` as a dtype of the same size."""
    return x.view(dtype)


def is_wide(x: Array) -> bool:
    """Tell whether `x` is float64; such tensors have scales of their own and exist under NumPy only."""
    return bool(x.dtype == np.float64)


def divide(xp: Namespace, x: Array, n: int) -> Array:
    """Return ``x / n`` in the dtype of x, correctly rounded.

    XLA turns a division by a constant into a multiplication by its rounded inverse, behind an optimization
    barrier too; a divisor that depends on the values keeps it from doing so.
    """
    return x / xp.where(xp.isnan(x), x, xp.full_like(x, n))


def floor_log2(xp: Namespace, s: Array) -> Array:
    """Return floor(log2 s) of a uint32 array as int32; 0 where s is 0."""
    power = xp.zeros_like(s)
    for step in (16, 8, 4, 2, 1):
        shifted = s >> step
        power = xp.where(shifted != 0, power + xp.uint32(step), power)
        s = xp.where(shifted != 0, shifted, s)
    return power.astype(xp.int32)


def power_of_two(xp: Namespace, exponent: Array, wide: bool) -> Array:
    """Return 2**exponent for int32 exponents of normal numbers, built from the bits."""
    if wide:
        return view((exponent.astype(xp.int64) + 1023) << 52, xp.float64)
    return view((exponent + 127) << 23, xp.float32)


def scale_by_power(xp: Namespace, x: Array, exponent: Array) -> Array:
    """Return ``x * 2**exponent`` in the dtype of x, float32 or float64.

    Two steps, because 2**exponent itself may be out of range: first a = exponent >> 1, then exponent - a.
    Each step is exact unless the result is subnormal or overflows.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``jax.numpy``.
    x : array of float32 or float64, shape (blocks, length)
        Numbers to scale.
    exponent : array of int32, shape (blocks,)
        One exponent a block; each half must be the exponent of a normal number.
    """
    first = exponent >> 1
    wide = is_wide(x)
    x = x * power_of_two(xp, first, wide)[:, None]
    return x * power_of_two(xp, exponent - first, wide)[:, None]
