"""``rotated``, the default: randomised Hadamard rotation, shared scale, subtracted shared dither."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from gccomm.checks import integer, one_of
from gccomm.codecs.base import State
from gccomm.codecs.clipping import block_gains, clipped_scales, threshold
from gccomm.codecs.headroom import Rotating, checked_steps, next_ratio
from gccomm.codecs.lane_sums import lane_sum_of, takes_lane_sums
from gccomm.codecs.late_checks import late_steps
from gccomm.codecs.prediction import check_prediction, next_scales, predicted_steps
from gccomm.codecs.shared import SharedDither
from gccomm.codecs.widening import Widening
from gccomm.lanes import WIDTHS
from gccomm.layout import BLOCK, MIN_PART
from gccomm.steps import Agree, Context, Fold, Steps, Sum, Words

if TYPE_CHECKING:
    from gccomm.operand import Operand

__all__ = ["Rotated"]

UNCHECKED = 3  # ranks up to which headroom "auto" is safe: the step for the expected sum is no smaller
SMALL = 16 * BLOCK  # coordinates from which bytes count for more than rounds


class Rotated(SharedDither):
    """Rotate each block of 1024 coordinates at random, so that all of them are about as large, then quantise
    against the largest that any rank has, with shared dither that is subtracted again.

    y = H (s x) / n' with H a Hadamard matrix, s signs that are the same on all ranks and new in each step.
    Rank r sends q = (rint(y 2^16 / step) + D_r) >> 16 in a lane of w bits, with D_r = (h + floor(p_r 2^16 /
    n)) mod 2^16 and h one 16-bit hash per (key, step, coordinate); the sum of the q, less the sum of the
    dithers, times the step, rotated back, is the result. Unbiased; the error's variance is n / 12 step^2 per
    coordinate, spread evenly over the block: a coordinate that is zero on all ranks gets its share.

    Parameters
    ----------
    wire_bits : int
        Lane width w: 2, 3, 4, 5, 6, 8, 10 or 16. A coordinate costs 32 / floor(32 / w) bits, plus 0.03 for
        scales, and 0.03 for energies and check words with checked headroom.
    headroom : str
        "safe": step = m 2^16 / floor((2^(w-1) - 1) 2^16 / n), m the block's largest |y| on any rank; a lane
        cannot overflow. "checked": the step that holds 5.4 standard deviations of the expected sum, with
        check words per 64 blocks that tell when it did not, and those blocks sent again in wider lanes.
        "clipped": m is the root mean square times the threshold of the least error; tails are clamped, and a
        gain makes up for most of that. Half the error or less at 4 bits, but slightly biased: error feedback
        is on by default. "auto": checked from 4 ranks on in a Reducer, else safe. There, arrays of fewer than
        16384 coordinates are sent with safe headroom in lanes wide enough to be as exact, at least w +
        log2(n) / 2 bits: they take one round in place of three.
    rotations : int
        1, or 2 for input made to defeat one.
    scales : str
        "agreed", or "predicted" in a Reducer: steps without a round of their own before the sum, at 3 to 4
        times the vNMSE; with safe headroom only.
    widening : bool
        With safe or clipped headroom: send a rank's own integers in lanes just wide enough for them and the
        sums in lanes of w bits, by an operation of the back end's own: fewer bytes from 4 ranks or so
        on, at steps at most 1/15 wider.

    Notes
    -----
    Rotation before quantising: A. T. Suresh et al., "Distributed mean estimation with limited communication"
    (2017); S. Vargaftik et al., "DRIVE" (2021). Shared headroom, checks and subtracted shared dither: see
    docs/codecs/rotated.md.
    """

    id: ClassVar[str] = "rotated"
    device_words: ClassVar[bool] = True
    steps_serve: ClassVar[bool] = True

    def __init__(
        self,
        wire_bits: int = 8,
        headroom: str = "auto",
        rotations: int = 1,
        scales: str = "agreed",
        widening: bool = False,
    ) -> None:
        super().__init__(wire_bits, scales, widening)
        one_of("headroom", headroom, ("auto", "safe", "checked", "clipped"))
        self.headroom = headroom
        self.keeps = scales == "agreed"
        self.sums_lanes = headroom in ("auto", "safe")
        self.rotations = integer("rotations", rotations, "a number of rotations", 1, 2)
        if scales == "predicted" and headroom == "checked":
            msg = (
                'headroom="checked" needs a round before the sum, which scales="predicted" saves: choose one '
                "of them"
            )
            raise ValueError(msg)
        if scales == "predicted" and headroom == "clipped":
            msg = 'headroom="clipped" is not predicted: choose scales="agreed" or headroom="safe"'
            raise ValueError(msg)
        if widening and headroom not in ("safe", "clipped"):
            msg = (
                f"`widening=True` needs a bound of the integers, which headroom={headroom!r} does not have: "
                'choose headroom="safe" or "clipped"'
            )
            raise ValueError(msg)
        if headroom == "clipped":
            self.biased, self.rounding = True, "biased"
        self.stateful = scales == "predicted" or headroom in ("auto", "checked")
        self.reencodes = scales == "predicted" or headroom in ("auto", "checked")

    def carried(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the lengths rounded up to multiples of 64, the smallest part that is rotated."""
        return -(-lengths // MIN_PART) * MIN_PART

    def for_array(self, coordinates: int, ranks: int) -> Rotated:
        """Return itself; of headroom "auto", where it would be checked and the array is small, one of safe
        headroom that is as exact, where there are lanes as wide.
        """
        own = type(self) is not Rotated  # of somebody who inherits, whose steps are others
        if own or not self._checks(ranks) or self.headroom != "auto" or coordinates >= SMALL:
            return self
        # A safe step is sqrt(n) times as large as one for the sum that is expected of independent ranks.
        more = (width - self.wire_bits for width in WIDTHS[:-1] if width > self.wire_bits)
        enough = next((bits for bits in more if 4**bits >= ranks), None)
        return self if enough is None else Rotated(self.wire_bits + enough, "safe", self.rotations)

    def _checks(self, ranks: int) -> bool:
        """Return whether a Reducer's lanes are checked."""
        if self.scales == "predicted":
            return False
        return self.headroom == "checked" or (self.headroom == "auto" and ranks > UNCHECKED)

    def repeats(self, ctx: Context) -> bool:
        """Return whether scales are agreed and lanes cannot overflow."""
        if ctx.stateful and (self.scales == "predicted" or self._checks(ctx.size)):
            return False
        return self.headroom in ("auto", "safe")

    def flows(self, ctx: Context) -> bool:
        """Return whether scales are agreed and lanes cannot overflow, or are checked."""
        return self.repeats(ctx) or self.looks(ctx)

    def looks(self, ctx: Context) -> bool:
        """Return whether lanes are checked."""
        return self._checks(ctx.size) and (ctx.stateful or self.headroom == "checked")

    def steps(self, x: Operand, state: Sequence[State | None], ctx: Context) -> Steps:
        """Agree on the maxima of rotated blocks, then sum lanes."""
        width, rotations = self.wire_bits, self.rotations
        if self.scales == "predicted" and ctx.stateful:
            return predicted_steps(x, state, ctx, width, rotations=rotations, subtract=True)
        if self.headroom == "clipped":
            return self._clipped(x, ctx)
        if self.looks(ctx):
            ratios = [float(ctx.size) if s is None else s["ratio"] for s in state]
            return (late_steps if ctx.flowing else checked_steps)(x, ratios, ctx, width, rotations)
        return self._safe(x, ctx)

    def _safe(self, x: Operand, ctx: Context) -> Steps:
        if takes_lane_sums(x, ctx):
            scales, limit = np.empty(x.blocks, np.uint32), self.limit(ctx.size)
            yield lane_sum_of(
                x, scales, self.wire_bits, limit, ctx, agree=True, rotations=self.rotations, subtract=True
            )
            return
        lanes = self._widening(x, ctx)
        source = Rotating(x if lanes is None else lanes.source, ctx, self.rotations)
        agreed = yield Agree(x.blocks, source.maxima)
        assert agreed is not None
        yield self._sum(x, source, agreed, ctx, lambda: None, lanes)

    def _clipped(self, x: Operand, ctx: Context) -> Steps:
        lanes, most = self._widening(x, ctx), threshold(self.limit(ctx.size))
        source = Rotating(x if lanes is None else lanes.source, ctx, self.rotations)
        own, energy = np.empty((2, x.blocks), dtype=np.uint32)

        def fill(out: Words) -> None:
            source.maxima(own, energy)
            out[:] = clipped_scales(x, own, energy, most)

        scales = yield Agree(x.blocks, fill)
        assert scales is not None
        gains = cache(lambda: block_gains(x, own, energy, scales))
        yield self._sum(x, source, scales, ctx, gains, lanes)

    def _widening(self, x: Operand, ctx: Context) -> Widening | None:
        return Widening(x, self.wire_bits, self.limit(ctx.size)) if self.widening else None

    def _sum(
        self,
        x: Operand,
        source: Rotating,
        scales: Words,
        ctx: Context,
        gains: Callable[[], npt.NDArray[np.float32] | None],
        lanes: Widening | None,
    ) -> Sum | Fold:
        width, limit = self.wire_bits, self.limit(ctx.size)
        sent = width if lanes is None else lanes.narrow

        def encode(lo: int, hi: int, out: Words) -> None:
            source.encode(lo, hi, out, scales, sent, limit, ctx, gains=gains())

        def decode(lo: int, hi: int, words: Words) -> None:
            x.decode(lo, hi, words, scales, width, limit, ctx, subtract=True, rotations=self.rotations)

        if lanes is not None:
            return lanes.step(encode, decode)
        return Sum(x.blocks, x.size, encode, decode, lambda lo, hi: ((0, x.size(lo, hi), width),))

    def check_state(self, state: State, dtype: str, row_shape: Sequence[int]) -> None:
        """Raise ValueError unless it holds predicted scales, or a ratio of energies."""
        if self.scales == "predicted":
            return check_prediction(state, dtype, row_shape)
        ratio = state["ratio"]
        if not isinstance(ratio, int | float) or not 0 < ratio < math.inf:
            raise ValueError(f"`ratio` is {ratio!r}, not a positive number")
        return None

    def next_state(self, old: State | None, parts: Sequence[Any]) -> State | None:
        """Return the next prediction of scales, or of the energy of the sum over that of its parts."""
        if self.scales == "predicted":
            return next_scales(parts)
        return {"ratio": next_ratio(None if old is None else old["ratio"], parts)}
