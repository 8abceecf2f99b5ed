"""Keys of the noise, in plain integers.

Every rank draws the same 16 bits per (tensor key, seed, step, block, coordinate), two of which share a hash.
The first two stages, tensor key and step key, are computed once per tensor and step and live here; the block
and coordinate stages belong to the kernels (:mod:`gccomm.kernels.reference` is their specification).  Nothing
here depends on Python's own salted ``hash`` or on any random state of the user's.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

__all__ = ["GOLDEN", "MASK32", "fmix", "private_keys", "step_key", "step_keys", "tensor_key"]

MASK32 = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
"""2**32 divided by the golden ratio, odd: multiples of it are spread evenly over the 32-bit words."""

_MULTIPLIER_1 = 0x7FEB352D
_MULTIPLIER_2 = 0x846CA68B
# First digits of pi: they keep step 0 away from the fixed point fmix(0) = 0.
_STEP_SALT_0 = 0x243F6A88
_STEP_SALT_1 = 0x85A308D3
_FEW = 8  # keys, which plain integers mix in less time than arrays


def fmix(x: int) -> int:
    """Mix the bits of a word: a bijection of the 32-bit words.

    Parameters
    ----------
    x : int
        Any integer; only ``x mod 2**32`` counts.

    Returns
    -------
    int
        The mixed word, ``0 <= word < 2**32``.
    """
    x &= MASK32
    x ^= x >> 16
    x = x * _MULTIPLIER_1 & MASK32
    x ^= x >> 15
    x = x * _MULTIPLIER_2 & MASK32
    return x ^ (x >> 16)


def tensor_key(key: str, seed: int) -> tuple[int, int]:
    """Hash the name of a tensor and a seed to two words.

    Parameters
    ----------
    key : str
        Name of the tensor (its path in the tree), hashed as UTF-8.
    seed : int
        Seed of the reducer; taken mod 2**64.

    Returns
    -------
    tuple of int
        ``(a, b)``, each ``0 <= word < 2**32``; the same in every process and on every platform.
    """
    data = (seed % (1 << 64)).to_bytes(8, "little") + key.encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def step_key(a: int, b: int, step: int) -> tuple[int, int]:
    """Derive the two noise words of one step from a tensor key.

    Parameters
    ----------
    a, b : int
        The words of :func:`tensor_key`.
    step : int
        Number of the step; taken mod 2**64.

    Returns
    -------
    tuple of int
        ``(t0, t1)``, each ``0 <= word < 2**32``: what the kernels call the step key.
    """
    low, high = step & MASK32, step >> 32 & MASK32
    t0 = fmix(a + fmix(low ^ _STEP_SALT_0))
    t1 = fmix(b ^ fmix(low + high * GOLDEN + _STEP_SALT_1))
    return t0, t1


def step_keys(keys: npt.NDArray[np.uint32], step: int) -> npt.NDArray[np.uint32]:
    """Do what :func:`step_key` does for many tensor keys.

    Parameters
    ----------
    keys : array of uint32, shape (count, 2)
        Words of :func:`tensor_key`.
    step : int
        Number of the step; taken mod 2**64.

    Returns
    -------
    array of uint32, shape (count, 2)
        The step keys.
    """
    if len(keys) < _FEW:
        return np.array([step_key(a, b, step) for a, b in keys.tolist()], np.uint32).reshape(-1, 2)
    low, high = step & MASK32, step >> 32 & MASK32
    first, second = fmix(low ^ _STEP_SALT_0), fmix(low + high * GOLDEN + _STEP_SALT_1)
    salted = np.empty_like(keys)
    with np.errstate(over="ignore"):
        salted[:, 0] = keys[:, 0] + np.uint32(first)
        salted[:, 1] = keys[:, 1] ^ np.uint32(second)
    return _fmix_words(salted)


def private_keys(keys: npt.NDArray[np.uint32], rank: int) -> npt.NDArray[np.uint32]:
    """Derive a rank's own keys from shared ones, for noise that is independent between ranks.

    Parameters
    ----------
    keys : array of uint32, shape (count, 2)
        Step keys.
    rank : int
        Number of the rank.
    """
    salt = np.array([fmix((rank + 1) * GOLDEN), fmix(rank ^ _STEP_SALT_1)], dtype=np.uint32)
    return _fmix_words(np.bitwise_xor(keys, salt))


def _fmix_words(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return :func:`fmix` of every word."""
    with np.errstate(over="ignore"):
        mixed: npt.NDArray[np.uint32] = words ^ (words >> np.uint32(16))
        mixed = mixed * np.uint32(_MULTIPLIER_1)
        mixed = mixed ^ (mixed >> np.uint32(15))
        mixed = mixed * np.uint32(_MULTIPLIER_2)
    return mixed ^ (mixed >> np.uint32(16))
