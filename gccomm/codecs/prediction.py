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
from gccomm.codecs.lane_sums import lane_sum_of, takes_lane_sums
from gccomm.errors import BackendError
from gccomm.lanes import safe_limit
from gccomm.layout import Geometry
from gccomm.operand import INFINITY_32, INFINITY_64
from gccomm.steps import Agree, Context, Steps, Sum, Words

if TYPE_CHECKING:
    from gccomm.operand import Operand

__all__ = ["Observed", "check_prediction", "next_scales", "predicted_steps"]

# The maximum of a block varies by a tenth from step to step, and among 10^4 blocks by a half: predictions
# settle at twice the usual maximum, so that clamps are rare in large arrays too.
EDGES = np.array([0.2, 0.35, 0.46, 0.54, 0.64])  # of a maximum over its prediction, at most 1
EDGES_32 = EDGES.astype(np.float32)
FACTORS = np.array([0.5, 0.75, 0.9, 0.98, 1.04, 1.3, 1.0, 1.0])  # of the next prediction, by interval
FACTORS_32 = FACTORS.astype(np.float32)
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


def check_prediction(state: State, dtype: str, row_shape: Sequence[int]) -> None:
    """Raise ValueError unless ``state`` holds the predicted scales of an array of this dtype and shape."""
    infinity = INFINITY_64 if dtype == "float64" else INFINITY_32
    scales, blocks = np.asarray(state["scales"]), Geometry.of(row_shape).blocks
    if scales.dtype != np.uint32 or scales.shape != (blocks,) or (scales >= infinity).any():
        raise ValueError(f"scales are {scales.dtype}{list(scales.shape)}, not finite uint32[{blocks}]")
    if state["agree"] not in (True, False):
        raise ValueError(f"`agree` is {state['agree']!r}, not a bool")


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
    if takes_lane_sums(x, ctx):
        yield lane_sum_of(
            x, scales, width, run.limit, ctx, rotations=rotations, subtract=subtract, maxima=run.own
        )
        yield Sum(x.blocks, run.counter_size, run.write_counters, run.correct)
    else:
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
        self.intervals = np.zeros(self.x.blocks, dtype=np.uint32)  # the highest that any rank is in
        self.own = np.empty(self.x.blocks, dtype=np.uint32)  # this rank's maxima, as scale words
        self.worst = 0

    def size(self, lo: int, hi: int) -> int:
        """Return the words of all blocks, of their counters, and of one count of clamps a segment."""
        return self.x.size(lo, hi) + self.counter_size(lo, hi)

    def counter_size(self, lo: int, hi: int) -> int:
        """Return the words of the counters, and of one count of clamps a segment."""
        return self.counter_words * (hi - lo) + self.x.count

    def lanes(self, lo: int, hi: int) -> tuple[tuple[int, int, int], ...]:
        """Return the lanes; the counters are unsigned and have none."""
        return ((0, self.x.size(lo, hi), self.width),)

    def encode(self, lo: int, hi: int, out: Words) -> None:
        """Write lanes, counters and clamps."""
        self.x.encode(
            lo, hi, out, self.scales, self.width, self.limit, self.ctx,
            rotations=self.rotations, maxima=self.own, subtract=self.subtract,
        )  # fmt: skip
        self.write_counters(lo, hi, out[self.x.size(lo, hi) :])

    def write_counters(self, lo: int, hi: int, tail: Words) -> None:
        """Write what follows from the blocks' own maxima: a one in a counter each, and clamps."""
        del lo, hi
        x, own = self.x, self.own
        over = own > self.scales
        intervals = self._intervals(own, over)
        if self.counter_bits == 4:
            np.left_shift(np.uint32(1), intervals << np.uint32(2), out=tail[: x.blocks])
        else:
            tail[: -x.count] = self._count(intervals).reshape(-1)
        tail[-x.count :] = 0
        if over.any():
            blocks = np.flatnonzero(over & ~x.nonfinite_scales(own))
            clamped = count_clamped(x, blocks, self.scales, self.rotations)
            tail[-x.count :] = np.minimum(clamped, 0xFFFFFFFF // self.ctx.size)

    def _intervals(self, own: Words, over: npt.NDArray[np.bool_]) -> Words:
        """Return the interval of each block's own maximum over its prediction; ``over``: it is beyond it."""
        x, shared = self.x, np.maximum(self.scales, 1)
        mine, edges = (x.scale_values(own), EDGES) if x.float64 else (own.view(np.float32), EDGES_32)
        shared = x.scale_values(shared) if x.float64 else shared.view(np.float32)
        with np.errstate(all="ignore"):
            parts = mine / shared
            below = [(parts <= edge).view(np.uint8) for edge in edges]
        found: Words = (len(edges) - sum(below)).astype(np.uint32)
        if over.any():
            found[over] = np.where(x.nonfinite_scales(own[over]), NONFINITE, CLAMPED)
        return found

    def _count(self, intervals: Words) -> npt.NDArray[np.uint32]:
        """Return each block's counters, shape (blocks, words), with a one where it belongs."""
        per_word = 32 // self.counter_bits
        words = np.zeros((len(intervals), self.counter_words), dtype=np.uint32)
        shifts = intervals % np.uint32(per_word) * np.uint32(self.counter_bits)
        words[np.arange(len(intervals)), intervals // per_word] = np.uint32(1) << shifts
        return words

    def decode(self, lo: int, hi: int, words: Words) -> None:
        """Read the counters, then write the results: NaN where a rank's block was not finite."""
        scales = self._read_counters(words[self.x.size(lo, hi) :])
        self._decode(lo, hi, words, scales)
        if self.x.feedback and self.worst == NONFINITE:
            self._restore(scales)

    def correct(self, lo: int, hi: int, tail: Words) -> None:
        """Read the counters of blocks whose results are written: NaN where a rank's block was not finite."""
        del lo, hi
        scales = self._read_counters(tail)
        if self.worst != NONFINITE:
            return
        unused = np.zeros(int(np.diff(self.x.offsets).max()), dtype=np.uint32)
        for b in np.flatnonzero(self.intervals == NONFINITE).tolist():
            self._decode(b, b + 1, unused, scales)
        if self.x.feedback:
            self._restore(scales)

    def _decode(self, lo: int, hi: int, words: Words, scales: Words) -> None:
        self.x.decode(
            lo, hi, words, scales, self.width, self.limit, self.ctx,
            subtract=self.subtract, rotations=self.rotations,
        )  # fmt: skip

    def _read_counters(self, tail: Words) -> Words:
        """Take over what the summed counters say; return scale words, NaN where a block was not finite."""
        x = self.x
        self.intervals = self._highest(tail[: -x.count].reshape(x.blocks, -1))
        self.worst = int(self.intervals.max(initial=0))
        if self.worst < CLAMPED:
            return self.scales
        x.report(clamps=int(tail[-x.count :].sum(dtype=np.int64)))
        return np.where(self.intervals == NONFINITE, np.uint32(0x7FF80000), self.scales).astype(np.uint32)

    def _highest(self, counters: Words) -> Words:
        """Return the highest counter of each block that is not zero; together they must count all ranks."""
        if self.counter_bits == 4:  # one word: by its highest bit, and the sum of its digits, at most 15
            if (counters * np.uint32(0x11111111) >> np.uint32(28) != self.ctx.size).any():
                self._corrupted()
            # The digits add up to at most 15, so float32 does not round one up to the next power of 2.
            exponents = (counters[:, 0].astype(np.float32).view(np.uint32) >> np.uint32(23)) - np.uint32(127)
            return exponents >> np.uint32(2)
        shifts = np.arange(0, 32, self.counter_bits, dtype=np.uint32)
        mask = np.uint32((1 << self.counter_bits) - 1)
        counts = (counters[:, :, None] >> shifts & mask).reshape(len(counters), COUNTERS)
        if (counts.sum(axis=1, dtype=np.uint64) != self.ctx.size).any():
            self._corrupted()
        highest: Words = (COUNTERS - 1 - np.argmax(counts[:, ::-1] != 0, axis=1)).astype(np.uint32)
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
        factors: Any = np.take(FACTORS if x.float64 else FACTORS_32, self.intervals)
        for i in self.agreed:
            factors[_blocks(x, i)] = FIRST
        following = self._words(factors)
        worst = np.maximum.reduceat(self.intervals, x.bounds[:-1]) if self.worst >= CLAMPED else None
        found = []
        for i in range(x.count):
            at = _blocks(x, i)
            if i in self.agreed:
                again = bool(x.nonfinite_scales(self.scales[at]).any())
            else:
                again = worst is not None and bool(worst[i] >= CLAMPED)
            found.append(Observed(following[at], again))
        return found

    def _words(self, factors: Any) -> Words:
        """Return scales times factors, as words of finite numbers; the same on all machines."""
        x = self.x
        with np.errstate(all="ignore"):
            if not x.float64:
                values = self.scales.view(np.float32) * factors
                top = np.finfo(np.float32).max
                words: Words = np.fmin(values, top).view(np.uint32)  # fmin: of NaN and the top, the top
                return words
            values = np.fmin(x.scale_values(self.scales) * factors, np.finfo(np.float64).max)
            return x.scale_words(values)
