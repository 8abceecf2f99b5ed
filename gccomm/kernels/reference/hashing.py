"""The shared noise: a counter-based 32-bit hash per coordinate, and the check words weighted with it."""

from __future__ import annotations

from gccomm.kernels.reference.namespace import Array, Namespace, quiet, u32, view

__all__ = ["block_keys", "check_words", "coordinate_hash", "fmix"]

GOLDEN = 0x9E3779B9
MULTIPLIER_1 = 0x7FEB352D
MULTIPLIER_2 = 0x846CA68B


@quiet
def fmix(xp: Namespace, x: Array) -> Array:
    """Mix the bits of uint32 words: a bijection; :func:`gccomm.noise.fmix` for arrays."""
    x = x ^ (x >> 16)
    x = x * u32(xp, MULTIPLIER_1)
    x = x ^ (x >> 15)
    x = x * u32(xp, MULTIPLIER_2)
    return x ^ (x >> 16)


@quiet
def block_keys(xp: Namespace, t0: Array, t1: Array, blocks: Array) -> tuple[Array, Array]:
    """Derive the two keys of each block.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``jax.numpy``.
    t0, t1 : int or uint32 scalar
        Step key, from :func:`gccomm.noise.step_key`.
    blocks : array of integers, shape (blocks,)
        Numbers of the blocks, counted through their tensor.

    Returns
    -------
    tuple of array of uint32, shape (blocks,)
        ``(k0, k1)``.
    """
    t0, t1, blocks = u32(xp, t0), u32(xp, t1), u32(xp, blocks)
    k0 = fmix(xp, t0 + blocks * u32(xp, GOLDEN))
    k1 = fmix(xp, t1 + fmix(xp, blocks ^ t0))
    return k0, k1


@quiet
def coordinate_hash(xp: Namespace, k0: Array, k1: Array, length: int, *, first: int = 0) -> Array:
    """Hash every coordinate of every block.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``jax.numpy``.
    k0, k1 : array of uint32, shape (blocks,)
        Block keys.
    length : int
        Coordinates a block.
    first : int
        Position of the first coordinate.

    Returns
    -------
    array of uint32, shape (blocks, length)
        The hash H; its upper half is the dither h.
    """
    positions = xp.arange(first, first + length, dtype=xp.uint32)
    x = positions * u32(xp, GOLDEN) + k0[:, None]
    x = x ^ (x >> 16)
    x = x * u32(xp, MULTIPLIER_1)
    x = x ^ (x >> 15)
    x = x ^ k1[:, None]
    return x * u32(xp, MULTIPLIER_2)


@quiet
def check_words(xp: Namespace, hashes: Array, q: Array) -> Array:
    """Return two linear check sums of each block.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``jax.numpy``.
    hashes : array of uint32, shape (blocks, length)
        Coordinate hashes H.
    q : array of int32, shape (blocks, length)
        Rounded coordinates of one rank, or the lane sums of all.

    Returns
    -------
    array of uint32, shape (blocks, 2)
        ``sum H q`` and ``sum rotl(H, 16) q``, mod 2**32.  The check words of the ranks add up to those of the
        true sum.
    """
    unsigned = view(q, xp.uint32)
    rotated = (hashes << 16) | (hashes >> 16)
    sums = [xp.sum(weight * unsigned, axis=1, dtype=xp.uint32) for weight in (hashes, rotated)]
    return xp.stack(sums, axis=1)
