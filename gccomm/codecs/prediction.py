"""Predicted scales: a step that needs no round of its own before its sum.

In place of agreeing on each block's maximum, every rank scales by what all ranks predicted in the last step.
What the prediction was worth travels in the sum itself: beside its lanes a block has eight counters, and each
rank adds one to the counter of the interval that its own maximum over the predicted one falls into. The
highest counter that is not zero is the maximum over the ranks, to a few percent: a MAX inside a SUM. It
corrects the prediction of the next step. The last two counters stand for "beyond the prediction: clamped" and
"not finite"; after either, the key agrees on its scales again.

The idea of steps without a round trip is that of IntSGD (Mishchenko et al., 2022) and SwitchML (Sapio et al.,
2021); the counters are gccomm's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gccomm.codecs.base import State
from gccomm.codecs.clamps import count_clamped
from gccomm.errors import BackendError
from gccomm.lanes import safe_limit
from gccomm.steps import Agree, Context, Steps, Sum, Words

if TYPE_CHECKING:
    from gccomm.operand import Operand

__all__ = ["Observed", "next_scales", "predicted_steps"]

# The maximum of a block varies by a tenth from step to step, and among 10^4 blocks by a half: predictions
# settle at twice the usual maximum, so that clamps are rare in large arrays too.
EDGES = np.array([0.2, 0.35, 0.46, 0.54, 0.64, 1.0])  # of a maximum over its prediction
FACTORS = np.array([0.5, 0.75, 0.9, 0.98, 1.04, 1.3, 1.0, 1.0])  # of the next prediction, by interval
FIRST = 2.25  # of the first prediction over the agreed maximum
CLAMPED, NONFINITE = 6, 7
COUNTERS = 8


class Observed(NamedTuple):
    """What one segment's sum says: the next scales of its blocks, and whether to agree on them."""

    scales: Words
    agree: bool


def next_scales(observed: Sequence[Observed]) -> State:
    """Return the next state of a key from what its segments say."""
    scales = np.concatenate([x.scales for x in observed])
    return {"scales": scales, "agree": any(x.agree for x in observed)}


def predicted_steps(
    x: Operand,
    states: Sequence[State | None],
    ctx: Context,
    width: int,
    *,
    rotations: int = 0,
    subtract: bool = False,
) -> Steps:
    """Reduce with the scales that the last step predicted; returns one :class:`Observed` a segment.

    Keys without a prediction, or whose last one was wrong, agree on their maxima first.
    """
    unknown = [i for i, state in enumerate(states) if state is None or state["agree"]]
    scales = np.zeros(x.blocks, dtype=np.uint32)
    for i, state in enumerate(states):
        if state is not None:
            first = x.segments[i].start
            scales[_blocks(x, i)] = state["scales"][first : first + x.segments[i].blocks]
    if unknown:
        places = np.concatenate([np.arange(x.bounds[i], x.bounds[i + 1]) for i in unknown])

        def fill(out: Words) -> None:
            at = 0
            for i in unknown:
                lo, hi = int(x.bounds[i]), int(x.bounds[i + 1])
                x.maxima(out[at : at + hi - lo], None, rotations, lo, hi)
                at += hi - lo

        agreed = yield Agree(len(places), fill)
        assert agreed is not None
        scales[places] = agreed
    run = _Predicted(x, scales, ctx, width, rotations, subtract, set(unknown))
    yield Sum(x.blocks, run.size, run.encode, run.decode, run.lanes)
    return run.observed()


def _blocks(x: Operand, i: int) -> slice:
    return slice(int(x.bounds[i]), int(x.bounds[i + 1]))


@dataclass
class _Predicted:
    x: Operand
    scales: Words
    ctx: Context
    width: int
    rotations: int
    subtract: bool
    agreed: set[int]  # segments whose scales are this step's maxima

    def __post_init__(self) -> None:
        self.limit = safe_limit(self.width, self.ctx.size)
        self.counter_bits = next(b for b in (4, 8, 16, 32) if self.ctx.size < 1 << b)
        self.counter_words = COUNTERS * self.counter_bits // 32
        self.intervals = np.zeros(self.x.blocks, dtype=np.int64)  # the highest that any rank is in
        self.clamps = np.zeros(self.x.count, dtype=np.int64)

    def size(self, lo: int, hi: int) -> int:
        """Return the words of all blocks, of their counters, and of one count of clamps a segment."""
        return self.x.size(lo, hi) + self.counter_words * self.x.blocks + self.x.count

    def lanes(self, lo: int, hi: int) -> tuple[tuple[int, int, int], ...]:
        """Return the lanes; the counters are unsigned and have none."""
        return ((0, self.x.size(lo, hi), self.width),)

    def encode(self, lo: int, hi: int, out: Words) -> None:
        """Write lanes, counters and clamps."""
        x, own, end = self.x, np.empty(self.x.blocks, dtype=np.uint32), self.x.size(lo, hi)
        x.encode(
            lo, hi, out, self.scales, self.width, self.limit, self.ctx,
            rotations=self.rotations, maxima=own, subtract=self.subtract,
        )  # fmt: skip
        out[end : end + self.counter_words * x.blocks] = self._count(self._intervals(own)).reshape(-1)
        over = np.flatnonzero((own > self.scales) & ~x.nonfinite_scales(own))
        clamped = count_clamped(x, over, self.scales, self.rotations)
        out[end + self.counter_words * x.blocks :] = np.minimum(clamped, 0xFFFFFFFF // self.ctx.size)

    def _intervals(self, own: Words) -> npt.NDArray[np.int64]:
        """Return the interval of each block's own maximum over its prediction."""
        x = self.x
        mine, shared = x.scale_values(own), x.scale_values(np.maximum(self.scales, 1))
        with np.errstate(over="ignore", invalid="ignore"):
            found = np.searchsorted(EDGES, mine / shared)
        if (found >= CLAMPED).any():  # so are quotients that are NaN
            found = np.where(x.nonfinite_scales(own), NONFINITE, np.minimum(found, CLAMPED))
        # What is above only by the rounding of the quotient, or not at all, is decided by the words.
        found = np.where(own > self.scales, np.maximum(found, CLAMPED), np.minimum(found, CLAMPED - 1))
        intervals: npt.NDArray[np.int64] = found
        return intervals

    def _count(self, intervals: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
        """Return each block's counters, shape (blocks, words), with a one where it belongs."""
        per_word = 32 // self.counter_bits
        words = np.zeros((len(intervals), self.counter_words), dtype=np.uint32)
        shifts = (intervals % per_word * self.counter_bits).astype(np.uint32)
        words[np.arange(len(intervals)), intervals // per_word] = np.uint32(1) << shifts
        return words

    def decode(self, lo: int, hi: int, words: Words) -> None:
        """Read the counters, then write the results: NaN where a rank's block was not finite."""
        x, end = self.x, self.x.size(lo, hi)
        counters = words[end : end + self.counter_words * x.blocks].reshape(x.blocks, -1)
        self.intervals = self._highest(counters)
        self.clamps = words[end + self.counter_words * x.blocks :].astype(np.int64)
        x.report(clamps=int(self.clamps.sum()))
        scales = np.where(self.intervals == NONFINITE, np.uint32(0x7FF80000), self.scales)
        x.decode(
            lo, hi, words, scales, self.width, self.limit, self.ctx,
            subtract=self.subtract, rotations=self.rotations,
        )  # fmt: skip
        if x.feedback and (self.intervals == NONFINITE).any():
            self._restore(scales)

    def _highest(self, counters: Words) -> npt.NDArray[np.int64]:
        """Return the highest counter of each block that is not zero; together they must count all ranks."""
        if self.counter_bits == 4:  # one word: by its highest bit, and the sum of its digits mod 15
            if (counters % np.uint32(15) != self.ctx.size % 15).any() or not counters.all():
                self._corrupted()
            return (np.frexp(counters[:, 0].astype(np.float64))[1].astype(np.int64) - 1) >> 2
        shifts = np.arange(0, 32, self.counter_bits, dtype=np.uint32)
        mask = np.uint32((1 << self.counter_bits) - 1)
        counts = (counters[:, :, None] >> shifts & mask).reshape(len(counters), COUNTERS)
        if (counts.sum(axis=1, dtype=np.uint64) != self.ctx.size).any():
            self._corrupted()
        highest: npt.NDArray[np.int64] = COUNTERS - 1 - np.argmax(counts[:, ::-1] != 0, axis=1)
        return highest

    def _corrupted(self) -> None:
        msg = (
            f"rank {self.ctx.rank}: the counters of a sum do not count {self.ctx.size} ranks: it was "
            "corrupted on the way"
        )
        raise BackendError(msg)

    def _restore(self, scales: Words) -> None:
        """Put back the residuals of blocks that some rank had inf or NaN in: their step is lost."""
        unused = np.empty(int(np.diff(self.x.offsets).max()), dtype=np.uint32)
        for b in np.flatnonzero(self.intervals == NONFINITE).tolist():
            self.x.encode(
                b, b + 1, unused, scales, self.width, self.limit, self.ctx, rotations=self.rotations
            )

    def observed(self) -> list[Observed]:
        """Return what each segment's sum says."""
        x = self.x
        bad = x.nonfinite_scales(self.scales)
        values = x.scale_values(np.where(bad, np.uint32(0), self.scales))
        found = []
        for i in range(x.count):
            at = _blocks(x, i)
            if i in self.agreed:
                following, again = FIRST * values[at], bool(bad[at].any())
            else:
                following = FACTORS[self.intervals[at]] * values[at]
                again = bool((self.intervals[at] >= CLAMPED).any())
            found.append(Observed(self._words(following), again))
        return found

    def _words(self, values: Any) -> Words:
        """Return scale words of predictions, none of them infinite."""
        largest = np.finfo(np.float64).max if self.x.float64 else np.finfo(np.float32).max
        return self.x.scale_words(np.minimum(values, float(largest)))
