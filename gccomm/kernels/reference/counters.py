"""Counters of intervals, by which a SUM tells how the ranks' maxima lie to the predicted ones; NumPy only."""

from __future__ import annotations

import numpy as np

from gccomm.kernels.reference.namespace import Array, quiet

__all__ = [
    "AGREED",
    "CLAMPED",
    "COUNTERS",
    "NONFINITE",
    "count_intervals",
    "highest_intervals",
    "predict_scales",
]

# The maximum of a block varies by a tenth from step to step, and among 10^4 blocks by a half: predictions
# settle at twice the usual maximum, so that clamps are rare in large arrays too.
EDGES = np.array([0.2, 0.35, 0.46, 0.54, 0.64])  # of a maximum over its prediction, at most 1
FACTORS = np.array([0.5, 0.75, 0.9, 0.98, 1.04, 1.3, 1.0, 1.0, 2.25])  # of the next prediction, by interval
COUNTERS = 8
CLAMPED, NONFINITE = 6, 7  # the last two
AGREED = 8  # in place of an interval: the scale was agreed


def _values(words: Array, wide: bool) -> Array:
    return (words.astype(np.uint64) << np.uint64(32)).view(np.float64) if wide else words.view(np.float32)


@quiet
def count_intervals(own: Array, scales: Array, wide: bool, bits: int) -> Array:
    """Return the counters of each block, with a one where its own maximum belongs.

    Parameters
    ----------
    own, scales : array of uint32, shape (blocks,)
        Scale words of this rank's maxima, and the predicted ones.
    wide : bool
        They are those of float64.
    bits : int
        Of a counter: 4, 8, 16 or 32.

    Returns
    -------
    array of uint32, shape (blocks, bits / 4)
    """
    values, predicted = _values(own, wide), _values(np.maximum(scales, np.uint32(1)), wide)
    edges = EDGES.astype(values.dtype)
    inner = len(edges) - ((values / predicted)[:, None] <= edges).sum(axis=1)
    infinity = np.uint32(0x7FF00000 if wide else 0x7F800000)
    intervals = np.where(own <= scales, inner, np.where(own >= infinity, NONFINITE, CLAMPED))
    places = intervals * bits
    counters = np.zeros((len(own), COUNTERS * bits // 32), dtype=np.uint32)
    counters[np.arange(len(own)), places // 32] = np.uint32(1) << (places % 32).astype(np.uint32)
    return counters


def highest_intervals(counters: Array, bits: int, ranks: int) -> tuple[Array, int]:
    """Return the highest counter of each block that is not zero, and the highest of all; -1 in its place
    where the counters of some block do not add up to the number of ranks.

    Parameters
    ----------
    counters : array of uint32, shape (blocks, bits / 4)
        Sums over the ranks.
    """
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    mask = np.uint32((1 << bits) - 1)
    counts = (counters[:, :, None] >> shifts & mask).reshape(len(counters), COUNTERS)
    last = COUNTERS - 1 - np.argmax(counts[:, ::-1] != 0, axis=1)
    intervals = np.where(counts.any(axis=1), last, 0).astype(np.uint32)
    right = bool((counts.sum(axis=1, dtype=np.uint64) == ranks).all())
    return intervals, int(intervals.max(initial=0)) if right else -1


@quiet
def predict_scales(scales: Array, intervals: Array, wide: bool) -> Array:
    """Return the scale words times the factors of their intervals: finite, rounded up where they are those
    of float64.
    """
    values = _values(scales, wide)
    following = np.fmin(values * FACTORS.astype(values.dtype)[intervals], np.finfo(values.dtype).max)
    if not wide:
        return following.view(np.uint32)
    bits = following.view(np.uint64)
    up = (bits >> np.uint64(32)) + ((bits & np.uint64(0xFFFFFFFF)) != 0)
    return np.minimum(up, np.uint64(0x7FEFFFFF)).astype(np.uint32)
