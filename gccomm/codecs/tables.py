"""Tables for rounding standard normal coordinates at random: which points of a grid they may go to.

The grid has the points -t + 2 t i / g for i = 0 ... g, t the clamp. A table is a choice of these, both ends
included. A coordinate between two neighbours a < b of the table goes to one of them, unbiased, with variance
(b - z)(z - a). The best table of a size is the one with the least expected variance, found exactly by dynamic
programming over its points from left to right.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["clamp_error", "clamp_of", "expected_variance", "kernel_table", "optimal_table"]

Floats = npt.NDArray[np.float64]
TIE = 1e-9  # costs so much alike, relatively, count as equal: libraries differ in the last bits of erf


def clamp_of(overflow: float) -> float:
    """Return the t that a standard normal coordinate exceeds in magnitude with probability ``overflow``.

    Rounded to 2^-20, so that it is the same number on all machines.
    """
    return round(-NormalDist().inv_cdf(overflow / 2) * 2**20) / 2**20


def clamp_error(clamp: float) -> float:
    """Return the mean square of what the clamp takes off a standard normal coordinate."""
    tail, density = math.erfc(clamp / math.sqrt(2)) / 2, _density(clamp)
    return 2 * ((1 + clamp**2) * tail - clamp * density)


def _density(z: float) -> float:
    return math.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def _costs(granularity: int, clamp: float) -> Floats:
    """Return the variance expected between every two points a < b of the grid, shape (g + 1, g + 1).

    It is the integral of (b - z)(z - a) phi(z) over a ... b; infinite where b <= a.
    """
    z = clamp * (2 * np.arange(granularity + 1) / granularity - 1)
    density = np.array([_density(v) for v in z])
    below = np.array([math.erf(v / math.sqrt(2)) / 2 for v in z])
    mass = below[None, :] - below[:, None]
    first = density[:, None] - density[None, :]  # integral of z phi
    moment = z * density
    second = mass - (moment[None, :] - moment[:, None])  # integral of z^2 phi
    a, b = z[:, None], z[None, :]
    costs: Floats = (a + b) * first - second - a * b * mass
    neighbours = np.arange(granularity)
    costs[neighbours, neighbours + 1] = np.maximum(costs[neighbours, neighbours + 1], 0)  # of rounding errors
    return np.where(np.arange(granularity + 1)[:, None] < np.arange(granularity + 1), costs, np.inf)


@lru_cache(maxsize=64)
def optimal_table(points: int, granularity: int, clamp: float) -> tuple[int, ...]:
    """Return the best table.

    Parameters
    ----------
    points : int
        Its size, at least 2; all g + 1 points of the grid where that is less.
    granularity : int
        g, at least 1.
    clamp : float
        t.

    Returns
    -------
    tuple of int
        Grid points in ascending order, from 0 to g.
    """
    if points < 2 or granularity < 1:
        msg = f"a table has at least 2 points of a grid of at least 1 step, got {points} of {granularity}"
        raise ValueError(msg)
    if points > granularity:
        return tuple(range(granularity + 1))
    costs = _costs(granularity, clamp)
    best, before = costs[0].copy(), []  # of tables that end in each grid point
    for _ in range(points - 2):
        totals = best[:, None] + costs
        least = totals.min(axis=0)
        before.append(np.argmax(totals <= least * (1 + TIE), axis=0))
        best = least
    table = [granularity]
    for choice in reversed(before):
        table.append(int(choice[table[-1]]))
    return (0, *reversed(table))


def expected_variance(table: tuple[int, ...], clamp: float) -> float:
    """Return the variance that rounding a standard normal coordinate to a table is expected to have."""
    costs = _costs(table[-1], clamp)
    return math.fsum(float(costs[a, b]) for a, b in pairwise(table))


def kernel_table(table: tuple[int, ...]) -> npt.NDArray[np.int32]:
    """Return a table as kernels read it: g, then of every step of the grid the table's point at or below
    it, then the distance from that to the table's next point.
    """
    low: list[Any] = []
    gap: list[Any] = []
    for a, b in pairwise(table):
        low += [a] * (b - a)
        gap += [b - a] * (b - a)
    return np.array([table[-1], *low, *gap], dtype=np.int32)
