"""Errors that the definitions of the codecs allow: largest ones, and expected squares.

Nothing here uses the package's own arithmetic. Rotations are random: the largest rotated coordinate is
bounded as Hoeffding's inequality bounds it, with a probability of 1e-9 of being wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]
Wide = np.longdouble  # sums of float64 up to 1e308 over many ranks are exact enough in it
Bound = Callable[[Sequence[Any], str], Array]  # (one array a rank, dtype) -> largest error of the sum


@dataclass(frozen=True)
class Format:
    """Precision of a float type: unit roundoff, smallest subnormal, largest number."""

    dtype: Any
    unit: float
    tiny: float
    largest: float


FORMATS = {
    "float16": Format(np.float16, 2.0**-11, 2.0**-24, 65504.0),
    "bfloat16": Format(ml_dtypes.bfloat16, 2.0**-8, 2.0**-133, float(ml_dtypes.finfo("bfloat16").max)),
    "float32": Format(np.float32, 2.0**-24, 2.0**-149, float(np.finfo(np.float32).max)),
    "float64": Format(np.float64, 2.0**-53, 5e-324, float(np.finfo(np.float64).max)),
    "complex64": Format(np.complex64, 2.0**-24, 2.0**-149, float(np.finfo(np.float32).max)),
}
DTYPES = list(FORMATS)


# Coordinates and blocks


def reals(x: Any) -> Array:
    """Return the coordinates of an array, flat: a complex number is two."""
    x = np.asarray(x)
    if x.dtype.kind == "c":
        x = np.ascontiguousarray(x).reshape(-1).view(x.real.dtype)
    return np.asarray(x.reshape(-1), dtype=np.float64)


def wide(xs: Sequence[Any]) -> Array:
    """Return the coordinates of all ranks, shape (ranks, coordinates)."""
    return np.stack([reals(x) for x in xs]).astype(Wide)


def block_numbers(x: Any) -> Array:
    """Return the block of every coordinate: rows of 512 and more are cut by themselves, every 1024."""
    x = np.asarray(x)
    pair = 2 if x.dtype.kind == "c" else 1
    size, last = pair * x.size, pair * (x.shape[-1] if x.shape else 1)
    row = last if last >= 512 else max(size, 1)
    place = np.arange(size)
    return np.asarray(place // row * (-(-row // 1024)) + place % row // 1024)


def by_block(values: Array, blocks: Array) -> Array:
    """Return the sums of values by block, shape (..., blocks)."""
    count = int(blocks.max(initial=-1)) + 1
    sums = np.zeros((*values.shape[:-1], count), dtype=values.dtype)
    if count:
        starts = np.searchsorted(blocks, np.arange(count))
        sums[...] = np.add.reduceat(values, starts, axis=-1)
    return sums


def block_norms(values: Array, blocks: Array) -> Array:
    """Return each block's Euclidean norm."""
    top = np.maximum(np.abs(values).max(initial=0), np.finfo(Wide).tiny)
    return np.asarray(np.sqrt(by_block((values / top) ** 2, blocks)) * top)


def block_maxima(xs: Sequence[Any]) -> Array:
    """Return, for every coordinate, the largest magnitude that any rank has in its block."""
    blocks = block_numbers(xs[0])
    largest = np.max([np.abs(reals(x)) for x in xs], axis=0, initial=0)
    maxima = np.zeros(blocks.max(initial=0) + 1)
    np.maximum.at(maxima, blocks, largest)
    return np.asarray(maxima[blocks])


def scale_word(m: Any, dtype: str) -> Any:
    """Return the largest that the scale of a maximum may be: for float64 it has 20 bits, rounded up."""
    return m * (1 + 2.0**-19) + 2.0**-1042 * (m > 0) if dtype == "float64" else m


def dust(m: Any, dtype: str) -> Any:
    """Return the smallest number of what sums are decoded to, where there is any."""
    return (m > 0) * (2.0**-1074 if dtype == "float64" else 2.0**-149)


# Largest errors by coordinate


def uniform_bound(width: int, xs: Sequence[Any], dtype: str) -> Array:
    """n steps, step = m 2^16 / floor((2^(w-1) - 1) 2^16 / n), and float32's rounding of the result."""
    n, m = len(xs), scale_word(block_maxima(xs).astype(Wide), dtype)
    limit = ((1 << (width - 1)) - 1) * 65536 // n
    return np.asarray(n * m * (65536 / limit) * (1 + 2.0**-10) + n * m * 2.0**-21 + dust(m, "float32"))


def float_bound(wire: str | None, xs: Sequence[Any], dtype: str) -> Array:
    """n conversions and n - 1 additions, each within half a unit of the wire's format; inf on overflow."""
    if wire is None:
        wire = "float64" if dtype == "float64" else "float32"
    form, n = FORMATS[wire], len(xs)
    magnitude = np.abs(wide(xs)).sum(axis=0)
    bound: Array = n * form.unit * magnitude * (1 + 2 * n * form.unit) + n * form.tiny * (wire != dtype)
    bound[magnitude + bound > form.largest] = np.inf
    return bound


def two_words_bound(xs: Sequence[Any], dtype: str) -> Array:
    """n 2^-(61 - 2 ceil(log2 n)) of the largest magnitude, and float64's rounding of the decoded sum."""
    n, m = len(xs), block_maxima(xs).astype(Wide)
    words: Array = n * m * (1 + 2.0**-19) * 2.0 ** (2 * (n - 1).bit_length() - 61) + n * m * 2.0**-53
    return np.asarray(words + dust(m, dtype))


def tensor_norm(xs: Sequence[Any], norm: str) -> Any:
    """Return the largest norm of a rank; "l2" is made of energies in 2^-10 of each block's maximum."""
    values, m = wide(xs), np.abs(wide(xs)).max(initial=0)
    if norm == "max" or m == 0:
        return m
    coarse = block_maxima(xs) / 2048  # what a coordinate may be rounded up by
    lengths = np.sqrt((((np.abs(values) + coarse) / m) ** 2).sum(axis=1)) * m
    return min(lengths.max(), largest_scale(xs))


def largest_scale(xs: Sequence[Any]) -> Any:
    """Return the largest scale: scales are float32, of float64 arrays float64."""
    return Wide(FORMATS["float64" if np.asarray(xs[0]).dtype == np.float64 else "float32"].largest)


def level_bound(width: int, norm: str, xs: Sequence[Any], dtype: str) -> Array:
    """n steps of M / floor((2^(w-1) - 1) / n), M the tensor's norm."""
    n, m = len(xs), scale_word(tensor_norm(xs, norm), dtype)
    step = m / (((1 << (width - 1)) - 1) // n)
    bound = n * step * (1 + 2.0**-10) + n * m * 2.0**-21 + dust(m, "float32")
    return np.full(reals(xs[0]).size, bound, dtype=Wide)


def fine_bound(width: int, fine: int, levels: int, norm: str, xs: Sequence[Any], dtype: str) -> Array:
    """n steps of the finest scale M / fine^k, k < levels, that is not below the block's maximum."""
    coarse, m = level_bound(width, norm, xs, dtype), block_maxima(xs).astype(Wide)
    # The L2 norm is known to 2^-11 of maxima only: near the limit the coarser scale may be the one.
    least = np.abs(wide(xs)).max(initial=0)
    if norm == "l2":
        least = min(largest_scale(xs), 0.95 * np.sqrt((wide(xs) ** 2).sum(axis=1)).max())
    bound = coarse.copy()
    for k in range(1, levels):
        fits = least * Wide(fine) ** -k >= m * (1 + 2.0**-18)
        bound = np.where(fits, coarse * Wide(fine) ** -k, bound)
    return np.asarray(bound + dust(m, "float32"))


def drawn_bound(keep: int, scaled: bool, inner: Bound, xs: Sequence[Any], dtype: str) -> Array:
    """Nothing of a coordinate, or what was sent of it, once or ``keep`` times."""
    exact, times = np.abs(wide(xs).sum(axis=0)), keep if scaled else 1
    sent = times * inner(xs, dtype) * (1 + 2.0**-20) + (times - 1) * exact
    return np.asarray(np.maximum(exact, sent + exact * 2.0**-22))


def exponent_bound(xs: Sequence[Any], dtype: str) -> Array:
    """n roundings, each to at most twice the number: 2^n times the sum of magnitudes; and 2^-94 of M."""
    n, total = len(xs), np.abs(wide(xs)).sum(axis=0)
    least = Wide(2.0) ** (-127 + 32 + 2 * (n - 1).bit_length()) * tensor_norm(xs, "max")
    return np.asarray((2.0**n + 1) * total * (1 + 2.0**-19) + 2 * least)


def chunk_bound(fraction: float, chunk: int, inner: Bound, xs: Sequence[Any], dtype: str) -> Array:
    """Chunks of most energy over all ranks as ``inner`` allows; the others are zero: their error is exact."""
    exact, values = wide(xs).sum(axis=0), wide(xs)
    count = -(-values.shape[1] // chunk)
    if not count or not values.any():
        return np.asarray(np.abs(exact))
    places = np.arange(values.shape[1]) // chunk
    energies = by_block(((values / np.abs(values).max()) ** 2).sum(axis=0), places)
    chosen = np.sort(energies)[::-1][max(1, math.ceil(fraction * count - 1e-9)) - 1]
    slack = 1e-6 * energies.max()  # energies are integers of at most 2^32 / n
    sent, left = inner(xs, dtype), np.abs(exact)
    bound = np.where(energies[places] > chosen + slack, sent, np.maximum(sent, left))
    return np.asarray(np.where(energies[places] < chosen - slack, left, bound))


def low_rank_bound(rank: int, xs: Sequence[Any], dtype: str) -> Array:
    """A projection of the sum is no farther from it than zero is; small tensors are summed as floats."""
    shape = list(np.asarray(xs[0]).shape)
    while shape and shape[0] == 1:
        del shape[0]
    columns = int(np.prod(shape[1:])) * (1 + (np.asarray(xs[0]).dtype.kind == "c"))
    if not shape or (shape[0] + columns) * rank >= shape[0] * columns:
        return float_bound(None, xs, dtype)
    total = np.sqrt((wide(xs).sum(axis=0) ** 2).sum())
    rounding = np.sqrt((wide(xs) ** 2).sum()) * len(xs) * 2.0**-18
    return np.full(reals(xs[0]).size, total + rounding, dtype=Wide)


# Largest errors by the norm of a block (the same number for each of its coordinates)

UNLIKELY = 6.6  # of a sum of random signs, in units of its norm: 2 exp(-UNLIKELY^2 / 2) < 1e-9


def carried(blocks: Array) -> Array:
    """Return the coordinates of each block, rounded up to a multiple of 64: what is rotated."""
    return np.asarray(-(-np.bincount(blocks) // 64) * 64)


def largest_rotated(xs: Sequence[Any]) -> Array:
    """Return the most that a coordinate of each block, rotated, is on any rank.

    A block is cut into powers of two, the largest first; each is rotated by itself.
    """
    blocks, values = block_numbers(xs[0]), wide(xs)
    found = np.zeros(int(blocks.max(initial=-1)) + 1, dtype=Wide)
    lengths, padded = np.bincount(blocks), carried(blocks)
    starts = np.cumsum(lengths) - lengths
    for b in range(len(found)):
        at, end = int(starts[b]), int(starts[b] + lengths[b])
        for bit in range(10, 5, -1):
            size = 1 << bit
            if padded[b] & size and at < end:
                norm = np.sqrt((values[:, at : min(at + size, end)] ** 2).sum(axis=1)).max()
                found[b] = max(found[b], norm * min(1.0, UNLIKELY / math.sqrt(size)))
                at += size
    return found


def rotated_bound(width: int, xs: Sequence[Any], dtype: str) -> Array:
    """Half a step a rank in each of P rotated coordinates; and float32's rounding of the rotations."""
    n, blocks = len(xs), block_numbers(xs[0])
    limit = ((1 << (width - 1)) - 1) * 65536 // n
    m = scale_word(largest_rotated(xs), dtype)
    steps = n / 2 * m * (65536 / limit) * (1 + 2.0**-10) * np.sqrt(carried(blocks))
    norms = block_norms(wide(xs), blocks).sum(axis=0)
    return np.asarray((steps + norms * 2.0**-19 + 64 * dust(m, "float32"))[blocks])


def rehop_bound(width: int, xs: Sequence[Any], dtype: str) -> Array:
    """Half a step of every rank's own scale, and half one of the sum's, in each rotated coordinate; and
    float32's rounding of the rotations.
    """
    n, blocks, levels = len(xs), block_numbers(xs[0]), (1 << (width - 1)) - 1
    m = scale_word(largest_rotated(xs), dtype)
    hop = n / 2 * m / levels
    last = scale_word(n * m + hop, dtype) / 2 / levels
    down = Wide(2.0) ** ((n - 1).bit_length() + 1)  # scales are those of so small a part of the sum
    rounding = 32 * down * (dust(m, dtype) if dtype != "float64" else 2.0**-1042 * (m > 0))
    steps = (hop + last + rounding) * (1 + 2.0**-10) * np.sqrt(carried(blocks))
    norms = block_norms(wide(xs), blocks).sum(axis=0)
    return np.asarray((steps + norms * 2.0**-19 + 64 * dust(m, "float32"))[blocks])


def clipped_bound(width: int, xs: Sequence[Any], dtype: str) -> Array:
    """Half a step a rank, and at most twice what a rank has: what clamps take off, and what gains add."""
    blocks = block_numbers(xs[0])
    norms = block_norms(wide(xs), blocks).sum(axis=0)
    return np.asarray(rotated_bound(width, xs, dtype) + (2 * norms)[blocks])


def clamp_of(overflow: float) -> float:
    """Return t such that a standard normal number exceeds it in magnitude with this probability."""
    return -NormalDist().inv_cdf(overflow / 2)


def clamp_square(t: float) -> float:
    """Return the mean of (|z| - t)^2 where |z| > t, z standard normal, by the midpoint rule."""
    z = t + (np.arange(20000) + 0.5) * (12 / 20000)
    return float(2 * ((z - t) ** 2 * np.exp(-z * z / 2)).sum() * (12 / 20000) / math.sqrt(2 * math.pi))


def grid(width: int, n: int, saturate: bool) -> int:
    """Return THC's g: at most 30, as large as the lanes of the sum hold; even where these saturate."""
    if saturate:
        return min(30, math.floor(((1 << width) - 2) / math.sqrt(n) / 2) * 2)
    return min(30, ((1 << width) - 1) // n)


def table_bound(bits: int, overflow: float, saturate: bool, xs: Sequence[Any], dtype: str) -> Array:
    """A rank's norm times the widest gap (twice the mean one), and what the clamp takes off.

    Where sums saturate they can lose all of it.
    """
    n, blocks, t = len(xs), block_numbers(xs[0]), clamp_of(overflow)
    values = np.abs(wide(xs)) + block_maxima(xs) / 2048
    norms = block_norms(values, blocks)
    g, norm = grid(8, n, saturate), scale_word(norms.max(axis=0, initial=0), dtype)
    gap = 2 * -(-g // (2**bits - 1)) * 2 * t / g
    outliers = 2 * UNLIKELY**2  # two coordinates, as far out as they get
    lost = np.sqrt(4 * clamp_square(t) + outliers / carried(blocks))
    if saturate and n * g > 2**8 - 2:
        lost = lost + 1
    return np.asarray((n * norm * (gap + lost) * (1 + 2.0**-10) + 64 * dust(norm, "float32"))[blocks])


# Expected squared errors, summed over all coordinates


def uniform_square(width: int, xs: Sequence[Any]) -> float:
    """The mean over h of (sum_r floor(y_r + (h + p_r / n) mod 1) - y_r)^2, p_r rank r's place in bit-reversed
    order; (n + 1) / 12 where ranks differ by many levels.
    """
    n = len(xs)
    bits = (n - 1).bit_length()
    order = sorted(range(n), key=lambda r: int(f"{r:0{bits}b}"[::-1], 2) if bits else 0)
    places = np.argsort(order)[:, None] / n
    steps = block_maxima(xs) * (65536 / (((1 << (width - 1)) - 1) * 65536 // n))
    y = np.stack([reals(x) for x in xs]) / steps
    total = np.zeros(y.shape[1])
    for h in (np.arange(256) + 0.5) / 256:
        errors = (np.floor(y + (h + places) % 1) - y).sum(axis=0)
        total += (errors * steps) ** 2
    return float(total.sum() / 256)


def level_square(width: int, norm: str, xs: Sequence[Any]) -> float:
    """f (1 - f) steps^2 a rank and coordinate, f the fraction of x over the step."""
    values = np.stack([reals(x) for x in xs])
    m = np.abs(values).max() if norm == "max" else np.sqrt((values**2).sum(axis=1)).max()
    step = m / (((1 << (width - 1)) - 1) // len(xs))
    fraction = np.abs(values) / step % 1
    return float((fraction * (1 - fraction)).sum() * step**2)


def drawn_square(keep: int, xs: Sequence[Any]) -> float:
    """(keep - 1) |x|^2: the rounding of wide lanes is next to nothing."""
    return float((keep - 1) * (np.sum([reals(x) for x in xs], axis=0) ** 2).sum())
