"""Checked headroom between its sums: energies as ranks share them, steps, check words by span, and what a sum
says about the next steps; NumPy only.

All of it is float64, one operation after the other, so that it is the same everywhere.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gccomm.kernels.reference.namespace import Array, quiet

__all__ = ["Sums", "choose_steps", "learn_energies", "share_energies", "sum_spans"]


class Sums(NamedTuple):
    """What the sum of one segment says: energies of it, of its rounding and of the ranks' blocks, times
    2^(2 exponent), and whether all blocks were finite.
    """

    energy: float
    noise: float
    parts: float
    exponent: int
    valid: bool


def _values(words: Array, wide: bool) -> Array:
    wider = words.astype(np.uint64) << np.uint64(32)
    return wider.view(np.float64) if wide else words.view(np.float32).astype(np.float64)


def _nonfinite(words: Array, wide: bool) -> Array:
    return words >= np.uint32(0x7FF00000 if wide else 0x7F800000)


@quiet
def share_energies(own: Array, energy: Array, scales: Array, wide: bool, ranks: int) -> Array:
    """Return this rank's energies relative to the agreed maxima: ceil(2 sum z^2 / n), at least 1 if not 0.

    Parameters
    ----------
    own, energy : array of uint32, shape (blocks,)
        Scale words of this rank's maxima, and energies relative to these.
    scales : array of uint32, shape (blocks,)
        The agreed maxima.
    wide : bool
        Scale words are those of float64.
    ranks : int
        n.
    """
    finite = (own != 0) & ~_nonfinite(scales, wide)
    agreed = _values(np.where(finite, scales, np.uint32(1)), wide)
    part = _values(np.where(finite, own, np.uint32(0)), wide) / agreed
    words = np.ceil(energy * (part * part) * (2 / ranks))
    shared: Array = np.where(finite, np.clip(words, 1, 2**31 // ranks), 0).astype(np.uint32)
    return shared


@quiet
def choose_steps(
    scales: Array,
    energies: Array | None,
    ratios: Array,
    carried: Array,
    wide: bool,
    unit: float,
    deviations: float,
    bracket: float,
    safe: float,
    least: float,
) -> Array:
    """Return each block's step over its maximum, float32: deviations * sqrt(c E / bracket), within bounds.

    Parameters
    ----------
    scales : array of uint32, shape (blocks,)
        The agreed maxima; the step of a zero is zero, of inf and NaN ``safe``.
    energies : array of uint32, shape (blocks,), or None
        Of all ranks, in units of ``unit``; without them all steps are ``safe``.
    ratios : array of float64, shape (blocks,)
        c of each block's key.
    carried : array of int64, shape (blocks,)
        Coordinates of each block that travel.
    """
    steps = np.full(len(scales), safe)
    if energies is not None:
        mean = energies * unit / carried  # squares of the ranks, over the maximum's square
        steps = np.minimum(safe, deviations * np.sqrt(ratios * mean / bracket))
    steps = np.maximum(np.where(_nonfinite(scales, wide), safe, steps), least)
    # A step that is no float32 is rounded up, so that the clamp at 32767 levels does not bind.
    near = steps.astype(np.float32)
    near = np.where(near < steps, np.nextafter(near, np.float32(np.inf)), near)
    return np.where(scales == 0, np.float32(0), near)


def sum_spans(check: Array, starts: Array) -> Array:
    """Return the sums mod 2^32 of check words, shape (blocks, 2), by span: shape (spans, 2).

    Parameters
    ----------
    check : array of uint32, shape (blocks, 2)
        Two words a block.
    starts : array of int64, shape (spans,)
        First block of every span.
    """
    sums: Array = np.add.reduceat(check, starts, axis=0, dtype=np.uint32)
    return sums


@quiet
def learn_energies(
    scales: Array,
    steps: Array,
    energies: Array,
    energy: Array,
    redone: Array,
    carried: Array,
    wide: bool,
    unit: float,
    noise: float,
    part: float,
) -> Sums:
    """Return what the sum of the blocks of one segment says.

    Parameters
    ----------
    scales, energies : array of uint32, shape (blocks,)
        The agreed maxima, and the sums of the ranks' energies, in units of ``part``.
    steps : array of float32, shape (blocks,)
        Steps over the maxima.
    energy : array of uint32, shape (blocks,)
        Of the decoded sum, in units of ``unit`` and steps squared.
    redone : array of bool, shape (blocks,)
        Blocks that are left out.
    carried : array of int64, shape (blocks,)
        Coordinates of each block that travel, of which each has a noise of ``noise`` steps squared.
    """
    measured = np.where(redone, 0, energy * unit)
    bad = _nonfinite(scales, wide)
    values = _values(np.where(bad, np.uint32(0), scales), wide)
    top = int(np.frexp(values)[1].max(initial=-1100))
    squares = np.ldexp(values, -top) ** 2
    squared = steps.astype(np.float64) ** 2 * squares
    rounding = np.where(measured > 0, noise * carried, 0)
    parts = np.where(redone, 0, energies * part)
    energy, noise, part = map(_in_order, (measured * squared, rounding * squared, parts * squares))
    return Sums(energy, noise, part, top, not bad.any())


def _in_order(values: Array) -> float:
    """Return the sum, added one after the other: the same bits everywhere."""
    return float(np.cumsum(values)[-1]) if values.size else 0.0
