"""Checked headroom: lanes sized for the sum that is expected, spans with check words, and spans sent again.

With n ranks a sum grows like sqrt(n) where ranks are independent, so a step that can never overflow wastes
most of a lane. ``checked`` takes the step that holds k = 5.4 standard deviations of the sum:

    step = min(safe step, k sqrt(c E / (half^2 - k^2 n / 12))), at least m / 32767

with E the sum of the ranks' mean energies in a block, half = 2^(w-1) - 1, m the block's maximum, and c one
number per key, learnt from the last decoded sum: its energy, less the known noise n step^2 / 12, over the
sum of the ranks' energies (n where there is none yet: it cannot be too small). No more than a quarter of the
energy counts as noise: with steps as large as the values, errors of ranks cancel, and there is less of it.
Two check words a span, linear in the integers, tell whether a lane has overflowed; such spans travel again,
with the same integers in wider lanes, so that the result is what wide lanes would have given.

Everything that ranks must agree on follows from integers and single float64 operations: the same on all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gccomm.kernels.reference.hashing import block_keys, coordinate_hash
from gccomm.lanes import FIXED_POINT, safe_limit
from gccomm.layout import BLOCK, SPAN
from gccomm.steps import Agree, Context, Energies, Redo, Steps, Sum, Words

if TYPE_CHECKING:
    from gccomm.operand import Operand

__all__ = [
    "CLAMP",
    "Checked",
    "Learnt",
    "Rotating",
    "Sizes",
    "checked_steps",
    "next_ratio",
    "span_starts",
]

DEVIATIONS = 5.4  # k
MARGIN, SMALLEST = 1.03, 0.05  # of c
CLAMP = 32767 * FIXED_POINT  # largest integer, in fixed point
_LARGEST = 32767  # of a 16-bit lane's sum
_LIMBS = 4  # 16-bit parts of a 64-bit check sum

Floats = npt.NDArray[np.float64]


class Learnt(NamedTuple):
    """What one segment's sum says about c.

    ``energy``, ``noise``, ``parts``: of the decoded sum, of its rounding, and of the ranks' blocks, all times
    2^(2 exponent), spans that were redone left out. ``spans``, ``redone``: how many there are. ``valid``: no
    block was non-finite.
    """

    energy: float
    noise: float
    parts: float
    exponent: int
    ranks: int
    spans: int
    redone: int
    valid: bool


class Sizes(NamedTuple):
    """What steps are computed from, besides each block's: the unit of energies, k, half^2 - k^2 n / 12, and
    the largest and the smallest step.
    """

    unit: float
    deviations: float
    bracket: float
    safe: float
    least: float

    @classmethod
    def of(cls, n: int, width: int) -> Sizes:
        """Return those of n ranks in lanes of so many bits."""
        bracket = (2 ** (width - 1) - 1) ** 2 - DEVIATIONS**2 * n / 12
        safe = FIXED_POINT / safe_limit(width, n)
        return cls(n / 2 * 2.0**-20, DEVIATIONS, bracket, safe, 1 / _LARGEST)


class Rotating:
    """Rotated blocks between their maxima and their words: kept, where that is allowed, or rotated again."""

    def __init__(self, x: Operand, ctx: Context, rotations: int) -> None:
        self.x, self.rotations = x, rotations
        self._keep = ctx.piecewise
        self._kept: Operand | None = None

    def maxima(self, out: Words, energy: Words | None = None) -> None:
        """Write the scale words of the rotated blocks."""
        if self._keep:
            source = self.x.rotate(out, energy, self.rotations)
            self._kept = None if source is self.x else source
        else:
            self.x.maxima(out, energy, self.rotations)

    def encode(
        self, lo: int, hi: int, out: Words, scales: Words, width: int, limit: int, ctx: Context, **how: Any
    ) -> None:
        """Do what :meth:`Operand.encode` does, once."""
        if self._kept is not None:
            self._kept.encode(lo, hi, out, scales, width, limit, ctx, **how)
            self._kept.alive = None  # its memory serves the next piece
            self._kept = None
        else:
            how = {**how, "rotations": self.rotations, "subtract": True}
            self.x.encode(lo, hi, out, scales, width, limit, ctx, **how)


def next_ratio(old: float | None, learnt: Sequence[Learnt]) -> float:
    """Return the next c of a key from what its segments say.

    Spans that are redone are left out, but by how many there are: a single one may be chance, more than that
    and from an eighth of all on c doubles, from a half on it starts again at n.
    """
    n = learnt[0].ranks
    redone, spans = sum(x.redone for x in learnt), sum(x.spans for x in learnt)
    if redone > 1 and 2 * redone >= spans:
        return float(n)
    if redone == spans:
        return min(float(n), 2 * (n if old is None else old))
    top = max(x.exponent for x in learnt)
    scaled = [(x.energy, x.noise, x.parts, 2 * (x.exponent - top)) for x in learnt]
    energy, noise, parts = (math.fsum(math.ldexp(x[k], x[3]) for x in scaled) for k in range(3))
    if parts <= 0 or not all(x.valid for x in learnt):
        return n if old is None else old
    ratio = max(SMALLEST, MARGIN * ((energy - min(noise, energy / 4)) / parts))
    if redone > 1 and 8 * redone >= spans:
        ratio = 2 * max(ratio, n if old is None else old)
    return min(float(n), ratio)


def checked_steps(x: Operand, ratios: Sequence[float], ctx: Context, width: int, rotations: int) -> Steps:
    """Reduce with checked headroom; returns one :class:`Learnt` a segment.

    Parameters
    ----------
    x : Operand
        Rotated blocks.
    ratios : sequence of float
        c of each segment's key.
    ctx : Context
        Of the call.
    width, rotations : int
        Lane width and rotations of the blocks.
    """
    own = np.empty((2, x.blocks), dtype=np.uint32)  # maxima and energies
    source = Rotating(x, ctx, rotations)

    def measure(out: Words) -> None:
        source.maxima(own[0], own[1])
        out[:] = own[0]

    scales = yield Agree(x.blocks, measure)
    assert scales is not None
    energies = np.zeros(x.blocks, dtype=np.uint32)
    if ctx.size > 3:  # below, the safe step is the smaller one
        shared = yield Energies(x.blocks, lambda out: _share(x, own, scales, ctx.size, out))
        assert shared is not None
        energies = shared.copy()
    run = Checked(source, scales, _steps(x, scales, energies, ratios, ctx.size, width), ctx, width)
    yield Sum(x.blocks, run.size, run.encode, run.decode)
    if run.failed:
        run.scales = scales.copy()  # its memory serves the next piece
        x.sketch = None  # its sums may have been corrupted, too
        yield Redo(tuple(run.failed), run.wide_size, run.wide_encode, run.wide_decode, run.wide_lanes)
    return run.learn(energies)


def _share(x: Operand, own: Words, scales: Words, n: int, out: Words) -> None:
    """Write this rank's energies relative to the agreed maxima: ceil(2 sum z^2 / n), at least 1 if not 0."""
    finite = (own[0] != 0) & ~x.nonfinite_scales(scales)
    agreed = np.where(finite, x.scale_values(np.where(finite, scales, 1)), 1)
    part = np.where(finite, x.scale_values(np.where(finite, own[0], 0)), 0) / agreed
    words = np.ceil(own[1] * (part * part) * (2 / n))
    out[:] = np.where(finite, np.clip(words, 1, 2**31 // n), 0)


def _steps(
    x: Operand, scales: Words, energies: Words, ratios: Sequence[float], n: int, width: int
) -> npt.NDArray[np.float32]:
    """Return each block's step over its maximum."""
    unit, deviations, bracket, safe, least = Sizes.of(n, width)
    steps = np.full(x.blocks, safe)
    if n > 3 and bracket > 0:
        mean = energies * unit / x.codec.carried(x.lengths)  # squares of the ranks, over the maximum's square
        learnt = np.repeat(np.asarray(ratios, dtype=np.float64), np.diff(x.bounds))
        steps = np.minimum(safe, deviations * np.sqrt(learnt * mean / bracket))
    steps = np.where(x.nonfinite_scales(scales), safe, steps)
    # A step that is no float32 is rounded up, so that the clamp at 32767 levels does not bind.
    steps = np.maximum(steps, least)
    near = steps.astype(np.float32)
    near = np.where(near < steps, np.nextafter(near, np.float32(np.inf)), near)
    return np.where(scales == 0, np.float32(0), near)


class Checked:
    """Encodes and decodes one operand, and its failed spans again.

    ``scales`` and ``ratios`` are arrays, shape (blocks,): the agreed maxima, and the steps over these.
    """

    def __init__(
        self,
        source: Rotating,
        scales: Words,
        ratios: npt.NDArray[np.float32],
        ctx: Context,
        width: int,
    ) -> None:
        self.source, self.x, self.scales, self.ratios = source, source.x, scales, ratios
        self.ctx, self.width, self.rotations = replace(ctx, measure=True), width, source.rotations
        self.starts = span_starts(self.x)
        self.failed: list[tuple[int, int]] = []

    def size(self, lo: int, hi: int) -> int:
        """Return the words of all blocks and of the check words behind them."""
        return self.x.size(lo, hi) + 2 * len(self.starts)

    def encode(self, lo: int, hi: int, out: Words) -> None:
        """Write lanes, then two check words a span."""
        check = np.empty((hi - lo, 2), dtype=np.uint32)
        how = {"clamp": CLAMP, "ratios": self.ratios, "check": check}
        self.source.encode(lo, hi, out, self.scales, self.width, 1, self.ctx, **how)
        out[self.x.size(lo, hi) :] = self._by_span(check)

    def decode(self, lo: int, hi: int, words: Words) -> None:
        """Write the results; remember the spans whose check words are wrong."""
        x, check = self.x, np.empty((hi - lo, 2), dtype=np.uint32)
        x.decode(
            lo, hi, words, self.scales, self.width, 1, self.ctx, subtract=True,
            ratios=self.ratios, rotations=self.rotations, check=check,
        )  # fmt: skip
        wrong = self._by_span(check) != words[x.size(lo, hi) :]
        self.note(wrong.reshape(-1, 2).any(axis=1))

    def note(self, wrong: npt.NDArray[np.bool_]) -> None:
        """Remember the spans that are wrong, of all of them."""
        ends = [*self.starts[1:].tolist(), self.x.blocks]
        for i in np.flatnonzero(wrong):
            self.failed.append((int(self.starts[i]), ends[i]))

    def _by_span(self, check: Words) -> Words:
        sums: Words = np.add.reduceat(check, self.starts, axis=0, dtype=np.uint32)
        return sums.reshape(-1)

    # Spans again, each by itself

    def _wide(self, lo: int, hi: int) -> int:
        """Return the lane width that holds any sum of the span."""
        steps = self.ratios[lo:hi]
        levels = np.ceil(1 / steps[steps > 0].astype(np.float64)).max(initial=0)
        return 16 if self.ctx.size * (levels + 1) <= _LARGEST else 32

    def _wide_words(self, lo: int, hi: int) -> int:
        carried = self.x.codec.carried(self.x.lengths[lo:hi])
        return int((-(-carried // (32 // self._wide(lo, hi)))).sum())

    def wide_size(self, lo: int, hi: int) -> int:
        """Return the words of a redone span, check words included."""
        return self._wide_words(lo, hi) + (2 if self._wide(lo, hi) == 16 else _LIMBS)

    def wide_lanes(self, lo: int, hi: int) -> tuple[tuple[int, int, int], ...]:
        """Return the lanes of a redone span."""
        return ((0, self._wide_words(lo, hi), self._wide(lo, hi)),)

    def wide_encode(self, lo: int, hi: int, out: Words) -> None:
        """Write the same integers in wider lanes."""
        x, width, check = self.x, self._wide(lo, hi), np.empty((hi - lo, 2), dtype=np.uint32)
        end = self._wide_words(lo, hi)
        x.encode(
            lo, hi, out, self.scales, width, 1, self.ctx, clamp=CLAMP, ratios=self.ratios,
            rotations=self.rotations, check=check, subtract=True, base=x.base(lo, width),
        )  # fmt: skip
        out[end:] = self._wide_check(lo, hi, out[:end], check, width)

    def wide_decode(self, lo: int, hi: int, words: Words) -> bool:
        """Write the results; return whether the check words are right."""
        x, width, check = self.x, self._wide(lo, hi), np.empty((hi - lo, 2), dtype=np.uint32)
        end = self._wide_words(lo, hi)
        x.decode(
            lo, hi, words, self.scales, width, 1, self.ctx, subtract=True, ratios=self.ratios,
            rotations=self.rotations, check=check, base=x.base(lo, width),
        )  # fmt: skip
        if width == 32:
            expected = _join(words[end:])
            return _join(self._wide_check(lo, hi, words[:end], check, width)) == expected
        return bool((self._wide_check(lo, hi, words[:end], check, width) == words[end:]).all())

    def _wide_check(self, lo: int, hi: int, words: Words, check: Words, width: int) -> Words:
        """Return the check words of a span: in 32-bit lanes, of which a sum mod 2^32 would not see the upper
        bits, a 64-bit sum in 16-bit parts.
        """
        if width == 16:
            sums: Words = check.sum(axis=0, dtype=np.uint32)
            return sums
        x = self.x
        segment = int(np.searchsorted(x.bounds, lo, "right")) - 1
        numbers = x.segments[segment].start + np.arange(lo, hi) - int(x.bounds[segment])
        key0, key1 = x.keys[segment]
        hashes = coordinate_hash(np, *block_keys(np, key0, key1, numbers), BLOCK)
        carried = x.codec.carried(x.lengths[lo:hi])
        used = hashes[np.arange(BLOCK) < carried[:, None]].astype(np.uint64)
        total = int((used * words.view(np.int32).astype(np.int64).view(np.uint64)).sum(dtype=np.uint64))
        return np.array([total >> (16 * i) & 0xFFFF for i in range(_LIMBS)], dtype=np.uint32)

    def learn(self, energies: Words) -> list[Learnt]:
        """Return what each segment's sum says about its key's c."""
        x, n = self.x, self.ctx.size
        redone = np.zeros(x.blocks, dtype=bool)
        for lo, hi in self.failed:
            redone[lo:hi] = True
        energy = np.where(redone, 0, x.measured(x.samples)[0])
        bad = x.nonfinite_scales(self.scales)
        values = x.scale_values(np.where(bad, np.uint32(0), self.scales))
        exponents = np.frexp(values)[1]
        noise = np.where(energy > 0, n / 12 * x.codec.carried(x.lengths), 0)
        parts = np.where(redone, 0, energies * (n / 2 * 2.0**-20))
        owners = np.searchsorted(x.bounds, self.starts, "right") - 1
        found = []
        for i in range(x.count):
            at = slice(int(x.bounds[i]), int(x.bounds[i + 1]))
            top = int(exponents[at].max(initial=-1100))
            squares = np.ldexp(values[at], -top) ** 2
            steps = self.ratios[at].astype(np.float64) ** 2 * squares
            spans, again = self.starts[owners == i], redone[self.starts[owners == i]]
            found.append(
                Learnt(
                    energy=_in_order(energy[at] * steps),
                    noise=_in_order(noise[at] * steps),
                    parts=_in_order(parts[at] * squares),
                    exponent=top,
                    ranks=n,
                    spans=len(spans),
                    redone=int(again.sum()),
                    valid=not bad[at].any(),
                )
            )
        return found


def _in_order(values: Floats) -> float:
    """Return the sum, added one after the other: the same bits everywhere."""
    return float(np.cumsum(values)[-1]) if values.size else 0.0


def span_starts(x: Operand) -> npt.NDArray[np.int64]:
    """Return the first block of every span: 64 blocks of one tensor, counted from its beginning."""
    starts: list[Any] = []
    for i, segment in enumerate(x.segments):
        first = int(x.bounds[i])
        inner = np.arange(segment.start // SPAN * SPAN + SPAN, segment.start + segment.blocks, SPAN)
        starts += [[first], inner - segment.start + first]
    return np.concatenate(starts).astype(np.int64)


def _join(limbs: Words) -> int:
    return sum(int(limb) << (16 * i) for i, limb in enumerate(limbs)) & 0xFFFFFFFFFFFFFFFF
