"""Linear algebra that gives the same bits on every rank, whatever its BLAS: thin matrices and their products.

Matrices are stored with their few columns as rows. Everything here is elementwise arithmetic and NumPy's own
sums, which no instruction set changes; what ranks compute from different numbers may use BLAS.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gccomm.kernels.reference.hashing import block_keys, coordinate_hash, fmix

__all__ = ["gaussian", "normalise", "orthonormalise", "product"]

DEPENDENT = 1e-6  # of a row's length: what remains of it is float32's rounding
TILE = 1 << 15  # coordinates of a product that are computed at a time, in the caches
SUBSTITUTES = 1 << 20  # first number of the random rows that take the place of dependent ones

Array = npt.NDArray[Any]


def gaussian(key: npt.NDArray[np.uint32], rows: int, columns: int, first: int = 0) -> npt.NDArray[np.float64]:
    """Return random numbers, the same for the same key: the sum of 64 fair coins, which is nearly normal,
    with variance 1 and never 0.
    """
    numbers = np.arange(2 * rows, dtype=np.uint32) + np.uint32(2 * first)
    hashes = fmix(np, coordinate_hash(np, *block_keys(np, key[0], key[1], numbers), columns))
    ones = np.bitwise_count(hashes).reshape(rows, 2, columns).sum(axis=1, dtype=np.float64)
    normal: npt.NDArray[np.float64] = (ones - 31.5) / 4
    return normal


def orthonormalise(rows: Array, key: npt.NDArray[np.uint32]) -> Array:
    """Return orthonormal rows with the span of the given ones, by modified Gram-Schmidt in float64.

    Parameters
    ----------
    rows : array of floats, shape (r, m), r < m
        Finite. Zero rows, and rows that depend on those before, are replaced by random ones.
    key : array of uint32, shape (2,)
        Key of these.

    Returns
    -------
    array of floats, shape (r, m), same dtype
    """
    w = rows.astype(np.float64)
    lengths = np.sqrt((w * w).sum(axis=1))
    for j in range(len(w)):
        length = _length(w[j])
        if not length > DEPENDENT * lengths[j]:
            w[j] = gaussian(key, 1, w.shape[1], SUBSTITUTES + j)[0]
            for _ in range(2):
                w[j] -= ((w[:j] * w[j]).sum(axis=1)[:, None] * w[:j]).sum(axis=0)
            length = _length(w[j])
        if length > 0:
            w[j] /= length
        w[j + 1 :] -= (w[j + 1 :] * w[j]).sum(axis=1)[:, None] * w[j]
    return w.astype(rows.dtype)


def _length(row: npt.NDArray[np.float64]) -> float:
    return float(np.sqrt((row * row).sum()))


def product(p: Array, q: Array) -> Array:
    """Return p^T q for p of shape (r, m) and q of shape (r, k)."""
    out = np.empty((p.shape[1], q.shape[1]), dtype=p.dtype)
    step = max(1, TILE // q.shape[1])
    for lo in range(0, len(out), step):
        tile = out[lo : lo + step]
        np.multiply(p[0, lo : lo + step, None], q[0], out=tile)
        for one, other in zip(p[1:], q[1:], strict=True):
            tile += one[lo : lo + step, None] * other
    return out


def normalise(q: Array) -> Array:
    """Return q with each row divided by the power of two that brings its largest number to 0.5 ... 1."""
    scaled: Array = np.ldexp(q, -np.frexp(np.abs(q).max(axis=1))[1][:, None])
    return scaled
