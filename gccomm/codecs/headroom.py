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
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gccomm import kernels
from gccomm.batch import Sample
from gccomm.kernels.reference.hashing import block_hashes, block_keys
from gccomm.lanes import FIXED_POINT, safe_limit
from gccomm.layout import BLOCK
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
]

DEVIATIONS = 5.4  # k
MARGIN, SMALLEST = 1.03, 0.05  # of c
CLAMP = 32767 * FIXED_POINT  # largest integer, in fixed point
_LARGEST = 32767  # of a 16-bit lane's sum
_LIMBS = 4  # 16-bit parts of a 64-bit check sum


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
        self._left = x.blocks  # to be encoded

    def maxima(self, out: Words, energy: Words | None = None) -> None:
        """Write the scale words of the rotated blocks."""
        self._left = self.x.blocks
        if self._keep:
            source = self.x.rotate(out, energy, self.rotations)
            self._kept = None if source is self.x else source
        else:
            self.x.maxima(out, energy, self.rotations)

    def encode(
        self, lo: int, hi: int, out: Words, scales: Words, width: int, limit: int, ctx: Context, **how: Any
    ) -> None:
        """Do what :meth:`Operand.encode` does."""
        if self._kept is not None:
            self._kept.encode(lo, hi, out, scales, width, limit, ctx, **how)
            self._left -= hi - lo
            if self._left <= 0:
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
    energy, noise, parts = learnt[0][:3] if len(learnt) == 1 else _total(learnt)
    if parts <= 0 or not all(x.valid for x in learnt):
        return n if old is None else old
    ratio = max(SMALLEST, MARGIN * ((energy - min(noise, energy / 4)) / parts))
    if redone > 1 and 8 * redone >= spans:
        ratio = 2 * max(ratio, n if old is None else old)
    return min(float(n), ratio)


def _total(learnt: Sequence[Learnt]) -> tuple[float, float, float]:
    """Return energy, noise and parts of all segments, correctly rounded."""
    top = max(x.exponent for x in learnt)
    scaled = [(*x[:3], 2 * (x.exponent - top)) for x in learnt]
    energy, noise, parts = (math.fsum(math.ldexp(x[k], x[3]) for x in scaled) for k in range(3))
    return energy, noise, parts


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
    own, energy, energies = np.empty(x.blocks, np.uint32), np.empty(x.blocks, np.uint32), None
    source = Rotating(x, ctx, rotations)

    def measure(out: Words) -> None:
        source.maxima(own, energy)
        out[:] = own

    agreed = yield Agree(x.blocks, measure)
    scales = np.asarray(agreed)  # of the host, wherever words are
    if ctx.size > 3:  # below, the safe step is the smaller one
        share = partial(_share, x, own, energy, scales, ctx.size)
        energies = np.asarray((yield Energies(x.blocks, share)))
    run = Checked(source, scales, _steps(x, scales, energies, ratios, ctx.size, width), ctx, width)
    yield Sum(x.blocks, run.size, run.encode, run.decode)
    if run.failed:
        run.scales = scales.copy()  # its memory serves the next piece
        energies = None if energies is None else energies.copy()
        x.sketch = None  # its sums may have been corrupted, too
        yield Redo(tuple(run.failed), run.wide_size, run.wide_encode, run.wide_decode, run.wide_lanes)
    return run.learn(energies) if ctx.stateful else None


def _share(x: Operand, own: Words, energy: Words, scales: Words, n: int, out: Words) -> None:
    """Write this rank's energies relative to the agreed maxima."""
    address, shared = kernels.address, np.empty(x.blocks, dtype=np.uint32)
    kernels.share_energies(
        address(own), address(energy), address(scales), x.blocks, x.float64, n, address(shared)
    )
    out[:] = shared


def _steps(
    x: Operand, scales: Words, energies: Words | None, ratios: Sequence[float], n: int, width: int
) -> npt.NDArray[np.float32]:
    """Return each block's step over its maximum."""
    address, sizes, steps = kernels.address, Sizes.of(n, width), np.empty(x.blocks, dtype=np.float32)
    used = 0 if energies is None or sizes.bracket <= 0 else address(energies)
    learnt = np.array(ratios, dtype=np.float64)
    kernels.choose_steps(
        x.address, x.count, x.blocks, address(scales), used, address(learnt), *sizes, address(steps)
    )
    return steps


class Checked:
    """Encodes and decodes one operand, and its failed spans again.

    ``scales`` and ``ratios`` are arrays, shape (blocks,): the agreed maxima, and the steps over these;
    ``energy`` one of uint32: that of the decoded sum, as :meth:`Operand.decode` measures it.
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
        self.ctx, self.width, self.rotations = ctx, width, source.rotations
        self.starts = self.x.span_starts
        self.energy: Words = np.empty(0, dtype=np.uint32)
        self.failed: list[tuple[int, int]] = []

    def size(self, lo: int, hi: int) -> int:
        """Return the words of all blocks and of the check words behind them."""
        return self.x.size(lo, hi) + 2 * len(self.starts)

    def encode(self, lo: int, hi: int, out: Words) -> None:
        """Write lanes, then two check words a span."""
        check = np.empty(2 * (hi - lo), dtype=np.uint32)
        self.source.encode(
            lo, hi, out, self.scales, self.width, 1, self.ctx, clamp=CLAMP, ratios=self.ratios, check=check
        )
        sums = np.empty(2 * len(self.starts), dtype=np.uint32)
        self._by_span(check, sums)
        out[self.x.size(lo, hi) :] = sums

    def decode(self, lo: int, hi: int, words: Words) -> None:
        """Write the results; remember the spans whose check words are wrong."""
        x, check = self.x, np.empty(2 * (hi - lo), dtype=np.uint32)
        energy = self.energy = np.empty(hi - lo, dtype=np.uint32)
        x.decode(
            lo, hi, words, self.scales, self.width, 1, self.ctx, subtract=True,
            ratios=self.ratios, rotations=self.rotations, check=check, energy=energy,
        )  # fmt: skip
        if x.sketch is not None:
            x.samples.append(Sample(lo, hi, energy, self.width, self.scales.copy(), self.ratios, BLOCK))
        wrong = np.empty(len(self.starts), dtype=np.uint32)
        if self._by_span(check, wrong, np.asarray(words[x.size(lo, hi) :])):
            self.note(wrong)

    def note(self, wrong: npt.NDArray[Any]) -> None:
        """Remember the spans that are wrong: not zero."""
        ends = [*self.starts[1:].tolist(), self.x.blocks]
        for i in np.flatnonzero(wrong):
            self.failed.append((int(self.starts[i]), ends[i]))

    def _by_span(self, check: Words, out: Words, expected: Words | None = None) -> int:
        """Add up check words by span, or tell which sums are not those expected; returns how many."""
        address, starts = kernels.address, self.starts
        sums = 0 if expected is None else address(expected)
        where = len(starts), self.x.blocks, address(out), sums
        return kernels.sum_spans(address(check), address(starts), *where)

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
        hashes = block_hashes(np, *block_keys(np, key0, key1, numbers), BLOCK)
        carried = x.codec.carried(x.lengths[lo:hi])
        used = hashes[np.arange(BLOCK) < carried[:, None]].astype(np.uint64)
        total = int((used * words.view(np.int32).astype(np.int64).view(np.uint64)).sum(dtype=np.uint64))
        return np.array([total >> (16 * i) & 0xFFFF for i in range(_LIMBS)], dtype=np.uint32)

    def learn(self, energies: Words | None) -> list[Learnt]:
        """Return what each segment's sum says about its key's c."""
        x, n, address = self.x, self.ctx.size, kernels.address
        redone = np.zeros(x.blocks if self.failed else 0, dtype=np.uint8)
        for lo, hi in self.failed:
            redone[lo:hi] = 1
        ranks, again = (0 if array is None else address(array) for array in (energies, redone))
        found = np.empty(x.count, dtype=kernels.LEARNT)
        # The kernel counts squares of 2^(width + 4 - 15) levels.
        units = 4.0 ** (self.width - 11), n / 12, n / 2 * 2.0**-20
        kernels.learn_energies(
            x.address, x.count, x.blocks, address(self.scales), address(self.ratios), ranks,
            address(self.energy), again if self.failed else 0, *units, address(found),
        )  # fmt: skip
        spans = x.span_counts
        failed = self._failed_spans() if self.failed else [0] * x.count
        return [
            Learnt(energy, noise, parts, exponent, n, spans[i], failed[i], bool(valid))
            for i, (energy, noise, parts, exponent, valid) in enumerate(found.tolist())
        ]

    def _failed_spans(self) -> list[int]:
        """Return how many spans of each segment have failed."""
        first = [lo for lo, _ in self.failed]
        owners = np.searchsorted(self.x.bounds, first, "right") - 1
        counts: list[int] = np.bincount(owners, minlength=self.x.count).tolist()
        return counts


def _join(limbs: Words) -> int:
    return sum(int(limb) << (16 * i) for i, limb in enumerate(limbs)) & 0xFFFFFFFFFFFFFFFF
