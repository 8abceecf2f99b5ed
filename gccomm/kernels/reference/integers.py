"""Integers and bool: exact sums in lanes, or in 16-bit digits where no lane is wide enough.

Only 32-bit arithmetic is used, so that 64-bit sums need no wider type: a sum is a list of *limbs*, its 16-bit
digits from the lowest up, each sign-extended to int32, the last holding the sign.
"""

from __future__ import annotations

import numpy as np

from gccomm.kernels.reference.namespace import Array, Namespace, floor_log2, quiet, view
from gccomm.kernels.reference.packing import pack, unpack

__all__ = ["integer_decode", "integer_encode", "integer_range"]

BITS = {
    "bool": 1,
    "int8": 8,
    "int16": 16,
    "int32": 32,
    "int64": 64,
    "uint8": 8,
    "uint16": 16,
    "uint32": 32,
    "uint64": 64,
}


def _plain(xp: Namespace, x: Array) -> Array:
    return x.astype(xp.uint8) if str(x.dtype) == "bool" else x


def _bit_length(xp: Namespace, x: Array) -> Array:
    """Return the bit length of a uint32 array."""
    return xp.where(x == 0, 0, floor_log2(xp, x) + 1)


@quiet
def integer_range(xp: Namespace, x: Array) -> Array:
    """Return the range of a tensor's segment.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``jax.numpy``.
    x : array of integers or bool, any shape
        Coordinates.

    Returns
    -------
    uint32 scalar
        The smallest B >= 0 with ``-2**B <= x < 2**B`` for all of them.
    """
    x = _plain(xp, x)
    # -2**B <= x holds exactly when ~x = -x - 1 has at most B bits.
    largest = xp.max(xp.where(x < 0, ~x, x), initial=0)
    long = BITS[str(x.dtype)] == 64
    upper = (largest >> x.dtype.type(32) if long else xp.zeros_like(largest)).astype(xp.uint32)
    lower = largest.astype(xp.uint32)
    return xp.where(upper != 0, _bit_length(xp, upper) + 32, _bit_length(xp, lower)).astype(xp.uint32)


def _digit(xp: Namespace, x: Array, number: int, top: bool) -> Array:
    """Return 16-bit digit `number` of `x` as int32, sign-extended if it is the top one."""
    if 16 * number >= BITS[str(x.dtype)]:
        digit = -(x < 0).astype(xp.int32)
    else:
        digit = (x >> x.dtype.type(16 * number)).astype(xp.int32)
    return digit if top else digit & 0xFFFF


@quiet
def integer_encode(xp: Namespace, x: Array, *, width: int, digits: int) -> Array:
    """Encode blocks of integers.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``jax.numpy``.
    x : array of integers or bool, shape (blocks, length)
        Coordinates.
    width, digits : int
        From :func:`gccomm.lanes.integer_format`.

    Returns
    -------
    array of uint32, shape (blocks, words)
        Lanes; or, with digits, word ``d * length + i`` is digit d of coordinate i.
    """
    x = _plain(xp, x)
    if digits == 0:
        return pack(xp, x.astype(xp.int32), width)
    parts = [_digit(xp, x, d, d == digits - 1) for d in range(digits)]
    return view(xp.concatenate(parts, axis=1), xp.uint32)


def _sign_extend(x: Array) -> Array:
    """Sign-extend the lower 16 bits of an int32 array."""
    return (x << 16) >> 16


def _limbs_of_digits(xp: Namespace, words: Array, digits: int) -> list[Array]:
    """Carry the sums of unsigned digits upwards; the top digit is signed."""
    parts = [words[:, d * (words.shape[1] // digits) :][:, : words.shape[1] // digits] for d in range(digits)]
    limbs = []
    carry = xp.zeros_like(parts[0])
    for part in parts[:-1]:
        total = part + carry
        limbs.append(_sign_extend(view(total, xp.int32)))
        carry = total >> 16
    top = view(parts[-1] + carry, xp.int32)
    return [*limbs, _sign_extend(top), top >> 16]


def _fits(limbs: list[Array], sign: Array, dtype: str) -> Array:
    """Tell which sums `dtype` can hold: all bits above its own must equal the sign."""
    signed = dtype.startswith("int")
    position = BITS[dtype] - 1 if signed else BITS[dtype]
    fits = (sign == 0) | signed
    for number, limb in enumerate(limbs):
        if position < 16 * (number + 1):
            fits = fits & ((limb >> max(0, position - 16 * number)) == sign)
    return fits


def _assemble(xp: Namespace, limbs: list[Array], sign: Array, dtype: str) -> Array:
    """Return the sums mod 2**bits as `dtype`."""
    extended = [*limbs, sign, sign, sign]
    halves = [
        view((extended[i] & 0xFFFF) | (extended[i + 1] << 16), xp.uint32)
        for i in range(0, BITS[dtype] // 16 or 1, 2)
    ]
    if BITS[dtype] == 64:
        wide = halves[0].astype(np.uint64) | (halves[1].astype(np.uint64) << np.uint64(32))
        return view(wide, dtype)
    return view(halves[0], xp.int32).astype(dtype)


@quiet
def integer_decode(
    xp: Namespace, words: Array, *, length: int, width: int, digits: int, dtype: str
) -> tuple[Array, Array]:
    """Turn summed words into integers.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``jax.numpy``.
    words : array of uint32, shape (blocks, words)
        Sum mod 2**32 of the ranks' words.
    length : int
        Coordinates a block.
    width, digits : int
        From :func:`gccomm.lanes.integer_format`.
    dtype : str
        Name of an integer dtype, or "bool" (which becomes: not zero).

    Returns
    -------
    values : array of `dtype`, shape (blocks, length)
        The sums; what `dtype` cannot hold is taken mod 2**bits.
    misfits : int32 scalar
        How many it could not hold.
    """
    if digits:
        limbs = _limbs_of_digits(xp, words, digits)
    else:
        sums = unpack(xp, words, width, length)
        limbs = [_sign_extend(sums), sums >> 16]
    if dtype == "bool":
        present = limbs[0] != 0
        for limb in limbs[1:]:
            present = present | (limb != 0)
        return present, xp.sum(xp.zeros_like(present), dtype=xp.int32)
    sign = limbs[-1] >> 15
    misfits = xp.sum(~_fits(limbs, sign, dtype), dtype=xp.int32)
    return _assemble(xp, limbs, sign, dtype), misfits
