"""Lanes: several signed integers in one 32-bit word, added without unpacking."""

from __future__ import annotations

from gccomm import lanes as lane_sizes
from gccomm.kernels.reference.namespace import Array, Namespace, quiet, u32, view

__all__ = ["pack", "unpack"]


def _offsets(xp: Namespace, width: int) -> Array:
    """Return the position of each lane in a word, shape (lanes, 1)."""
    return (xp.arange(lane_sizes.lanes(width), dtype=xp.uint32) * xp.uint32(width))[:, None]


@quiet
def pack(xp: Namespace, q: Array, width: int) -> Array:
    """Pack signed integers into lanes.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``jax.numpy``.
    q : array of int32, shape (blocks, length)
        Integers, coordinate ``k * words + j`` for lane k of word j.
    width : int
        Lane width in bits.

    Returns
    -------
    array of uint32, shape (blocks, words)
        ``sum_k q_k 2**(width k) mod 2**32``; lanes past the end hold zero.
    """
    blocks, length = q.shape
    count, size = lane_sizes.lanes(width), lane_sizes.words(width, length)
    padding = xp.zeros((blocks, count * size - length), dtype=xp.uint32)
    padded = xp.concatenate([view(q, xp.uint32), padding], axis=1)
    shifted = padded.reshape((blocks, count, size)) << _offsets(xp, width)
    return xp.sum(shifted, axis=1, dtype=xp.uint32)


@quiet
def unpack(xp: Namespace, words: Array, width: int, length: int) -> Array:
    """Unpack lanes, or the lane sums of several ranks, into signed integers.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``jax.numpy``.
    words : array of uint32, shape (blocks, words)
        One rank's words, or the sum mod 2**32 of the words of many.
    width : int
        Lane width in bits.
    length : int
        Coordinates a block.

    Returns
    -------
    array of int32, shape (blocks, length)
        Each sum, if it lies in ``-2**(width-1) .. 2**(width-1) - 1``.
    """
    if width == 32:
        return view(words, xp.int32)[:, :length]
    # Half a lane's range on every lane makes all of them non-negative, so that none borrows from the next.
    half = 1 << (width - 1)
    bias = sum(half << (width * k) for k in range(lane_sizes.lanes(width)))
    biased = words + u32(xp, bias)
    lanes = (biased[:, None, :] >> _offsets(xp, width)) & u32(xp, 2 * half - 1)
    signed = view(lanes, xp.int32) - half
    return signed.reshape((words.shape[0], -1))[:, :length]
