"""Projections by random signs, which tell how large the error of a sum is; under NumPy only, in float64."""

from __future__ import annotations

import numpy as np

from gccomm.kernels.reference.namespace import Array, quiet
from gccomm.kernels.reference.rotation import BLOCK, sign_words

__all__ = ["PARTS", "project_errors", "sum_inputs"]

ERROR_SIGNS = 0x13198A2E, 0x03707344
INPUT_SIGNS = 0xA4093822, 0x299F31D0
PARTS = 16
"""Partial sums of a projection."""


@quiet
def project_errors(rows: Array, numbers: Array) -> Array:
    """Return the sum of each row's coordinates, some of them negated, in float64.

    Coordinate i is added to partial sum i mod 16, in ascending order; then partial sums are added in pairs 8,
    4, 2 and 1 apart.

    Parameters
    ----------
    rows : array of float32 or float64, shape (n, 1024)
        Blocks of errors, filled up with zeros.
    numbers : array of integers, shape (n,)
        Which signs: equal ones for rows of equal numbers, on all ranks and in all steps.

    Returns
    -------
    array of float64, shape (n,)
    """
    runs = _signed(rows, ERROR_SIGNS, numbers).reshape(len(rows), BLOCK // PARTS, PARTS)
    sums = np.zeros((len(rows), PARTS))
    for k in range(BLOCK // PARTS):
        sums += runs[:, k]
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    return sums[:, 0]


@quiet
def sum_inputs(rows: Array, power: int, first: int = 0) -> Array:
    """Return the sum of all rows, coordinates negated at random, times 2**power, in ascending order.

    Parameters
    ----------
    rows : array of float32 or float64, shape (n, 1024)
        Blocks of inputs, filled up with zeros.
    power : int
        Of two, that coordinates are multiplied by, in two steps (power >> 1 and the rest).
    first : int
        Number of the first block, on which its signs depend.

    Returns
    -------
    array of float64, shape (1024,)
    """
    half = power >> 1
    signed = _signed(rows, INPUT_SIGNS, np.arange(first, first + len(rows)))
    sums = np.zeros(BLOCK)
    for row in signed * 2.0**half * 2.0 ** (power - half):
        sums += row
    return sums


def _signed(rows: Array, keys: tuple[int, int], numbers: Array) -> Array:
    """Return rows in float64, with the signs of these numbers."""
    words = sign_words(np, *keys, numbers)[:, 0]
    negative = (words[:, None, :] >> np.arange(32, dtype=np.uint32)[:, None]) & np.uint32(1)
    values = rows.astype(np.float64)
    return np.where(negative.reshape(-1, BLOCK) != 0, -values, values)
