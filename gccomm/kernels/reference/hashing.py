"""The shared noise: 16 bits of a counter-based hash per coordinate, and the check words weighted with it."""

from __future__ import annotations

from gccomm.kernels.reference.namespace import Array, Namespace, quiet, u32, view

__all__ = ["block_hashes", "block_keys", "check_words", "coordinate_hash", "fmix"]

HALF = 512  # coordinates of a block, which share their hashes with those as far behind them
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
    """Hash positions of every block.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``jax.numpy``.
    k0, k1 : array of uint32, shape (blocks,)
        Block keys.
    length : int
        Positions a block.
    first : int
        The first position.

    Returns
    -------
    array of uint32, shape (blocks, length)
    """
    positions = xp.arange(first, first + length, dtype=xp.uint32)
    x = positions * u32(xp, GOLDEN) + k0[:, None]
    x = x ^ (x >> 16)
    x = x * u32(xp, MULTIPLIER_1)
    x = x ^ (x >> 15)
    x = x ^ k1[:, None]
    return x * u32(xp, MULTIPLIER_2)


@quiet
def block_hashes(xp: Namespace, k0: Array, k1: Array, length: int) -> Array:
    """Hash every coordinate of every block.

    Two coordinates half a block apart share a hash, of which each has 16 bits for its dither: the noise takes
    half the time.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``jax.numpy``.
    k0, k1 : array of uint32, shape (blocks,)
        Block keys.
    length : int
        Coordinates a block.

    Returns
    -------
    array of uint32, shape (blocks, length)
        H; its upper half is the dither h. Up to coordinate 512 :func:`coordinate_hash`; from there on the
        lower half of H 512 coordinates before, and below it the upper half of that H times an odd number.
    """
    first = coordinate_hash(xp, k0, k1, min(length, HALF))
    if length <= HALF:
        return first
    before = first[:, : length - HALF]
    later = (before << 16) | ((before * u32(xp, MULTIPLIER_1)) >> 16)
    return xp.concatenate([first, later], axis=1)


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
