"""The shared random rotation of a block: random signs and a Hadamard matrix.

A block of at most 1024 coordinates is filled up with zeros to a multiple of 64 and cut into *parts* whose
lengths L are the powers of two that make up its length, largest first; each part is rotated by itself.  One
rotation gives coordinates of 1/32 of the orthonormal ones, whatever L is, so one scale suits the whole block,
and no intermediate value is larger than the largest coordinate: 1e38 everywhere stays finite.

The matrix, of 1 and -1, is a sequence of butterflies (a + b, a - b).  Parts of 64 and 128 have the strides
1, 2, 4 ... L/2, in that order: a fast Walsh-Hadamard transform.  Longer parts are cut into runs of 16 rows of
16 coordinates.  Each run has the strides 16, 32, 64 and 128, that is between rows; then row v is turned by v
places, so that no two rows meet in the same place as before; then the same strides once more.  Now each
coordinate is made of all 256, at the price of one turn in place of four butterflies within vectors.  The
strides from 256 on come last.  The order decides how sums round, and every target keeps to it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from gccomm.kernels.reference.hashing import block_keys, coordinate_hash
from gccomm.kernels.reference.namespace import Array, Namespace, power_of_two, quiet, u32, view

__all__ = ["Rotation", "padded", "parts", "rotate", "sign_words", "unrotate"]

BLOCK = 1024
SMALLEST_PART = 64
ROW, RUN = 16, 256  # coordinates


class Rotation(NamedTuple):
    """How blocks are rotated."""

    signs: Array
    """uint32, shape (blocks, 2, 32): from :func:`sign_words`."""
    rotations: int
    """1, or 2 for two rotations one after the other, with signs of their own."""


def padded(length: int) -> int:
    """Return how many coordinates a block of `length` has once it is rotated."""
    return -(-length // SMALLEST_PART) * SMALLEST_PART


def parts(length: int) -> list[tuple[int, int]]:
    """Return (first coordinate, length) of each part of a block of `length` coordinates, at most 1024."""
    if not 0 <= length <= BLOCK:
        raise ValueError(f"a block of {length} coordinates; only blocks of at most {BLOCK} can be rotated")
    found, start, size = [], 0, BLOCK
    while size >= SMALLEST_PART:
        if padded(length) & size:
            found.append((start, size))
            start += size
        size //= 2
    return found


@quiet
def sign_words(xp: Namespace, s0: Array, s1: Array, blocks: Array) -> Array:
    """Derive the random signs of blocks; must be equal on all ranks.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``jax.numpy``.
    s0, s1 : int or uint32 scalar
        Step key that all ranks share.
    blocks : array of integers, shape (blocks,)
        Numbers of the blocks, counted through their tensor.

    Returns
    -------
    array of uint32, shape (blocks, 2, 32)
        Rotation t negates coordinate i where bit ``i // 32`` of word ``[t, i % 32]`` is set.  The words are
        hashes of the positions behind the block's own.
    """
    h = coordinate_hash(xp, *block_keys(xp, s0, s1, blocks), 2 * 32, first=BLOCK)
    return (h ^ (h >> 16)).reshape((-1, 2, 32)) if h.size else h.reshape((0, 2, 32))


def _flip(xp: Namespace, x: Array, words: Array) -> Array:
    """Negate coordinates of x, shape (blocks, padded length), by one rotation's sign words."""
    blocks, length = x.shape
    columns = xp.arange(length // 32, dtype=xp.uint32)[None, :, None]
    bits = (words[:, None, :] >> columns) << 31
    return view(view(x, xp.uint32) ^ bits.reshape((blocks, length)), xp.float32)


def _butterflies(xp: Namespace, x: Array, first: int, end: int) -> Array:
    """Do the strides from ``first``, each twice the last, below ``end`` along the last axis."""
    blocks, length = x.shape
    stride = first
    while stride < end:
        pairs = x.reshape((blocks, length // (2 * stride), 2, stride))
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        x = xp.stack([low + high, low - high], axis=2).reshape((blocks, length))
        stride *= 2
    return x


def _turned(xp: Namespace, x: Array, direction: int) -> Array:
    """Take place l of row v of each run from place l + v, or l - v, mod 16."""
    row, place = xp.arange(ROW)[:, None], xp.arange(ROW)[None, :]
    source = (row * ROW + (place + direction * row) % ROW).reshape(RUN)
    return xp.take(x.reshape((-1, RUN)), source, axis=1).reshape(x.shape)


def _matrix(xp: Namespace, x: Array, direction: int) -> Array:
    """Multiply parts, shape (blocks, L), by the matrix (direction 1) or its transpose (-1)."""
    length = x.shape[1]
    if length < RUN:
        return _butterflies(xp, x, 1, length)
    x = _butterflies(xp, x, ROW, RUN)
    x = _butterflies(xp, _turned(xp, x, direction), ROW, RUN)
    return _butterflies(xp, x, RUN, length)


def _by_part(xp: Namespace, x: Array, function: Array) -> Array:
    """Apply ``function(part, L)`` to each part of the blocks."""
    done = [function(x[:, start : start + size], size) for start, size in parts(x.shape[1])]
    return xp.concatenate(done, axis=1)


def _transform(xp: Namespace, x: Array, direction: int = 1) -> Array:
    return _by_part(xp, x, lambda part, _: _matrix(xp, part, direction))


def _scaled(xp: Namespace, part: Array, exponent: Array | None, size: int) -> Array:
    """Return a part times 2**exponent / size: in two steps where that is no normal number."""
    if exponent is None:
        return part * xp.float32(1 / size)
    total = exponent - (size.bit_length() - 1)
    first = xp.clip(total, -126, 127)
    part = part * power_of_two(xp, first, False)[:, None]
    return part * power_of_two(xp, total - first, False)[:, None]


@quiet
def rotate(xp: Namespace, x: Array, rotation: Rotation, exponent: Array | None = None) -> Array:
    """Rotate blocks.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``jax.numpy``.
    x : array of float32, shape (blocks, length)
        Coordinates.
    rotation : Rotation
        Signs and number of rotations.
    exponent : array of int32, shape (blocks,), optional
        Multiply by ``2**exponent`` first, in one step together with the transform's own scale.

    Returns
    -------
    array of float32, shape (blocks, padded(length))
        Rotated coordinates, 1/32 of an orthonormal rotation of ``x * 2**exponent``.
    """
    blocks, length = x.shape
    x = xp.concatenate([x, xp.zeros((blocks, padded(length) - length), dtype=xp.float32)], axis=1)
    x = _by_part(xp, x, lambda part, size: _scaled(xp, part, exponent, size))
    y = _transform(xp, _flip(xp, x, rotation.signs[:, 0]))
    if rotation.rotations == 2:
        return _transform(xp, _flip(xp, y * xp.float32(1 / 32), rotation.signs[:, 1]))
    return _by_part(
        xp, y, lambda part, size: part if size == BLOCK else part * xp.float32(math.sqrt(size / BLOCK))
    )


def _pinned(xp: Namespace, x: Array, scales: Array) -> Array:
    """Return x, float32, in a way that keeps XLA from contracting a product with the sum that follows it.

    The top bit of a scale word is always clear, which no compiler knows.  (Doing this twice would undo it.)
    """
    return view(view(x, xp.uint32) ^ (scales & u32(xp, 0x80000000))[:, None], xp.float32)


@quiet
def unrotate(xp: Namespace, y: Array, rotation: Rotation, length: int, scales: Array) -> Array:
    """Undo :func:`rotate`.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``jax.numpy``.
    y : array of float32, shape (blocks, padded(length))
        Rotated coordinates; may be products, which XLA will not contract.
    rotation : Rotation
        As given to :func:`rotate`.
    length : int
        Coordinates a block.
    scales : array of uint32, shape (blocks,)
        Any words with a clear top bit.

    Returns
    -------
    array of float32, shape (blocks, length)
    """

    def scaled(part: Array, size: int) -> Array:
        if rotation.rotations == 2:
            return part * xp.float32(32 / size)
        return part if size == BLOCK else part * xp.float32(32 / math.sqrt(size))

    x = _transform(xp, _pinned(xp, _by_part(xp, y, scaled), scales), -1)
    if rotation.rotations == 2:
        x = _transform(xp, _flip(xp, x, rotation.signs[:, 1]), -1)
    return _flip(xp, x, rotation.signs[:, 0])[:, :length]
