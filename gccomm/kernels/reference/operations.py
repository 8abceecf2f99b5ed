"""The operations on words that are no sums: what two ranks' words become, and the exponent format.

They exist under NumPy only: no compiled graph can reduce with them.  A word of saturating lanes is packed as
in :mod:`gccomm.kernels.reference.packing`; a word of the exponent format holds four bytes, byte k in bits
8 k to 8 k + 7.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gccomm.kernels.reference.hashing import GOLDEN, coordinate_hash, fmix
from gccomm.kernels.reference.namespace import quiet
from gccomm.kernels.reference.packing import pack, unpack
from gccomm.lanes import lanes

__all__ = [
    "exponent_add",
    "exponent_add_bytes",
    "exponent_decode",
    "exponent_encode",
    "indexed_hash",
    "leading_zeros",
    "saturating_add",
]

Array = npt.NDArray[Any]
Words = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]

# Digits of pi, as in gccomm.noise: they keep seed 0 away from the fixed point fmix(0) = 0.
_SALT_0 = np.uint32(0x243F6A88)
_SALT_1 = np.uint32(0x85A308D3)


def saturating_add(a: Words, b: Words, width: int) -> Words:
    """Add lanes; a sum that leaves the range stays at its end.

    Parameters
    ----------
    a, b : array of uint32, shape (words,)
        Packed lanes.
    width : int
        Lane width W in bits, 2 to 16.

    Returns
    -------
    array of uint32, shape (words,)
        ``clip(a_k + b_k, -(2**(W-1) - 1), 2**(W-1) - 1)`` in each lane, packed.
    """
    length, top = a.size * lanes(width), 2 ** (width - 1) - 1
    total = unpack(np, a[None], width, length) + unpack(np, b[None], width, length)
    packed: Words = pack(np, np.clip(total, -top, top), width)[0]
    return packed


@quiet
def indexed_hash(k0: int | np.uint32, k1: int | np.uint32, start: int, count: int) -> Words:
    """Hash the numbers ``start`` to ``start + count - 1``, mod 2**32, as positions of one block are."""
    first = np.uint32(k0) + np.uint32(start & 0xFFFFFFFF) * np.uint32(GOLDEN)
    hashes: Words = coordinate_hash(np, np.array([first]), np.array([k1], dtype=np.uint32), count)[0]
    return hashes


def leading_zeros(hashes: Words) -> Bytes:
    """Count leading zero bits, at most 31: g or more of them with probability 2**-g, for g up to 31."""
    _, bits = np.frexp(hashes.astype(np.float64))  # exact: 2**bits > x >= 2**(bits - 1)
    zeros: Bytes = np.minimum(32 - bits, 31).astype(np.uint8)
    return zeros


def exponent_add_bytes(a: Bytes, b: Bytes, zeros: Bytes) -> Bytes:
    """Add numbers of the exponent format, rounded at random to one of the two nearest.

    With e1 <= e2 the exponents of the operands and d = e2 - e1:  operands of one sign give 2**-(e1-1) with
    probability 2**-d (2**-1 if e1 is 1), else 2**-e1;  of opposite signs 0 if d = 0, else 2**-(e1+1) with
    probability 2**(1-d), else 2**-e1, with the sign of the larger.  Zero leaves the other as it is.  The mean
    is the sum, to within 2**-31 of the larger operand (a probability below 2**-31 counts as 0), unless 2**-1
    would have to grow.

    Parameters
    ----------
    a, b : array of uint8
        Each 0 for zero (128 is read as zero), else ``sign << 7 | e`` for +-2**-e, e in 1 ... 127.
    zeros : array of uint8
        The randomness, from :func:`leading_zeros`: an event of probability 2**-k is ``zeros >= k``.

    Returns
    -------
    array of uint8
        The rounded sums; never 128.
    """
    e_a, e_b = (a & 127).astype(np.int16), (b & 127).astype(np.int16)
    # Zero is smaller than every other number, by more than any event reaches.
    e_a, e_b = np.where(e_a == 0, 256, e_a), np.where(e_b == 0, 256, e_b)
    larger = np.where(e_a <= e_b, a, b)
    e1, d = np.minimum(e_a, e_b), np.abs(e_a - e_b)
    opposite = (a ^ b) >= 128
    moved = zeros >= d - opposite
    exponent = np.maximum(e1 + np.where(opposite, 1, -1) * moved, 1)
    vanished = (e1 == 256) | (opposite & (d == 0))
    return np.where(vanished, 0, (larger & 128) | exponent).astype(np.uint8)


@quiet
def exponent_add(a: Words, b: Words, seed: int, start: int) -> Words:
    """Add words of the exponent format, byte by byte.

    Parameters
    ----------
    a, b : array of uint32, shape (words,)
        Four numbers each.
    seed : int
        Randomness of this addition, 0 to 2**32 - 1.
    start : int
        Number of the first word in the whole array: byte k of word j is hashed as number 4 (start + j) + k.

    Returns
    -------
    array of uint32, shape (words,)
        See :func:`exponent_add_bytes`.
    """
    key = np.uint32(seed)
    k0, k1 = fmix(np, key ^ _SALT_0), fmix(np, key + _SALT_1)
    zeros = leading_zeros(indexed_hash(k0, k1, 4 * start, 4 * a.size)).reshape(-1, 4)
    shifts = np.arange(4, dtype=np.uint32) * 8
    bytes_a, bytes_b = ((x[:, None] >> shifts).astype(np.uint8) for x in (a, b))
    total = exponent_add_bytes(bytes_a, bytes_b, zeros).astype(np.uint32)
    words: Words = np.bitwise_or.reduce(total << shifts, axis=1)
    return words


@quiet
def exponent_encode(x: npt.NDArray[np.float32], hashes: Words) -> Bytes:
    """Round numbers at random to powers of two: without bias where ``|x| <= 1/2``.

    Parameters
    ----------
    x : array of float32
        Larger magnitudes, infinities and NaN become 1/2.
    hashes : array of uint32, same shape
        The randomness, of which the upper 23 bits count.

    Returns
    -------
    array of uint8
        Of the two powers of two around ``|x|`` the upper one with probability ``|x| / lower - 1``; below
        2**-127, that with probability ``|x| * 2**127``, else 0.
    """
    bits = x.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    # Exponent field k stands for 2**(k - 128), and 0 for zero; subnormals get one more bit of exponent.
    widened = np.where(magnitude < 0x00800000, magnitude << 1, magnitude + np.uint32(0x00800000))
    # The fraction carries into the exponent with the probability that keeps the mean.
    k = np.minimum((widened + (hashes >> 9)) >> 23, 127)
    sign = bits >> 24 & np.uint32(128)
    return np.where(k == 0, 0, sign | (128 - k)).astype(np.uint8)


@quiet
def exponent_decode(codes: Bytes) -> npt.NDArray[np.float32]:
    """Return the numbers that bytes of the exponent format stand for, exactly; 2**-127 is subnormal."""
    exponent = codes.astype(np.uint32) & 127
    sign = codes.astype(np.uint32) >> 7 << 31
    power = np.where(exponent == 127, np.uint32(0x00400000), (np.uint32(127) - exponent) << 23)
    return np.where(exponent == 0, np.uint32(0), sign | power).astype(np.uint32).view(np.float32)
