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
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gccomm import kernels
from gccomm.codecs.base import State
from gccomm.codecs.clamps import count_clamped
from gccomm.codecs.lane_sums import lane_sum_of, takes_lane_sums
from gccomm.errors import BackendError
from gccomm.kernels.reference.counters import AGREED, CLAMPED, COUNTERS, NONFINITE
from gccomm.lanes import safe_limit
from gccomm.layout import Geometry
from gccomm.operand import INFINITY_32, INFINITY_64
from gccomm.steps import Agree, Context, Steps, Sum, Words

if TYPE_CHECKING:
    from gccomm.operand import Operand

__all__ = ["Observed", "check_prediction", "next_scales", "predicted_steps"]


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
        x, width = self.x, self.width
        self.limit = safe_limit(width, self.ctx.size)
        self.counter_bits = next(b for b in (4, 8, 16, 32) if self.ctx.size < 1 << b)
        self.counter_words = COUNTERS * self.counter_bits // 32
        self.intervals = np.zeros(x.blocks, dtype=np.uint32)  # the highest that any rank is in
        self.own = np.empty(x.blocks, dtype=np.uint32)  # this rank's maxima, as scale words
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
        tail[-x.count :] = 0
        beyond = kernels.count_intervals(
            kernels.address(own), kernels.address(self.scales), x.blocks, x.float64, self.counter_bits,
            kernels.address(tail),
        )  # fmt: skip
        if beyond:
            blocks = np.flatnonzero((own > self.scales) & ~x.nonfinite_scales(own))
            clamped = count_clamped(x, blocks, self.scales, self.rotations)
            tail[-x.count :] = np.minimum(clamped, 0xFFFFFFFF // self.ctx.size)

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
        x, size = self.x, self.ctx.size
        self.worst = kernels.highest_intervals(
            kernels.address(tail), x.blocks, self.counter_bits, size, kernels.address(self.intervals)
        )
        if self.worst < 0:
            msg = f"rank {self.ctx.rank}: the counters of a sum do not count {size} ranks: it was corrupted "
            raise BackendError(msg + "on the way")
        if self.worst < CLAMPED:
            return self.scales
        clamps = int(tail[-x.count :].sum(dtype=np.int64))
        x.report(clamps=clamps, lost=self.worst == NONFINITE)
        return np.where(self.intervals == NONFINITE, np.uint32(0x7FF80000), self.scales).astype(np.uint32)

    def _restore(self, scales: Words) -> None:
        """Put back the residuals of blocks that some rank had inf or NaN in: their step is lost."""
        unused = np.empty(int(np.diff(self.x.offsets).max()), dtype=np.uint32)
        for b in np.flatnonzero(self.intervals == NONFINITE).tolist():
            self.x.encode(
                b, b + 1, unused, scales, self.width, self.limit, self.ctx, rotations=self.rotations
            )

    def observed(self) -> list[Observed]:
        """Return what each segment's sum says."""
        x, following = self.x, np.empty(self.x.blocks, dtype=np.uint32)
        worst = np.maximum.reduceat(self.intervals, x.bounds[:-1]) if self.worst >= CLAMPED else None
        for i in self.agreed:
            self.intervals[_blocks(x, i)] = AGREED
        kernels.predict_scales(
            kernels.address(self.scales), kernels.address(self.intervals), x.blocks, x.float64,
            kernels.address(following),
        )  # fmt: skip
        found = []
        for i in range(x.count):
            at = _blocks(x, i)
            if i in self.agreed:
                again = bool(x.nonfinite_scales(self.scales[at]).any())
            else:
                again = worst is not None and bool(worst[i] >= CLAMPED)
            found.append(Observed(following[at], again))
        return found
