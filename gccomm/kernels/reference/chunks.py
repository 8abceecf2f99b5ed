"""Energies of chunks of consecutive coordinates of a whole tensor; under NumPy only, in float64."""

from __future__ import annotations

import numpy as np

from gccomm.kernels.reference.namespace import Array, quiet

__all__ = ["PARTS", "chunk_energies"]

PARTS = 32
"""Partial sums of a chunk."""


@quiet
def chunk_energies(x: Array, size: int, power: int = 0) -> Array:
    """Return the sum of the squares of each chunk's coordinates, times 4**power, in float64.

    Coordinate i of a chunk is added to partial sum i mod 32, in ascending order; then partial sums are added
    in pairs 16, 8, 4, 2 and 1 apart.

    Parameters
    ----------
    x : array of float32 or float64, shape (coordinates,)
        The tensor, residual included.
    size : int
        Coordinates of a chunk; the last one may be short.
    power : int
        Of two, that coordinates are multiplied by, in two steps (power >> 1 and the rest).

    Returns
    -------
    array of float64, shape (ceil(coordinates / size),)
    """
    count = -(-len(x) // size)
    whole = np.zeros(count * size)
    first = power >> 1
    whole[: len(x)] = x.astype(np.float64) * 2.0**first * 2.0 ** (power - first)
    rows = -(-size // PARTS)
    padded = np.zeros((count, rows * PARTS))
    padded[:, :size] = whole.reshape(count, size)
    squares = (padded * padded).reshape(count, rows, PARTS)
    sums = np.zeros((count, PARTS))
    for row in range(rows):
        sums += squares[:, row]
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]
