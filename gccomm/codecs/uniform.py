"""``uniform``: shared block scale, shared dither, integer lanes; the fastest codec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gccomm.codecs.base import State
from gccomm.codecs.lane_sums import lane_sum_of, takes_lane_sums
from gccomm.codecs.prediction import check_prediction, next_scales, predicted_steps
from gccomm.codecs.shared import SharedDither
from gccomm.codecs.widening import Widening
from gccomm.steps import Agree, Context, Steps, Sum

if TYPE_CHECKING:
    from gccomm.operand import Operand

__all__ = ["Uniform"]


class Uniform(SharedDither):
    """Quantise each block of at most 1024 coordinates against the largest magnitude that any rank has in it.

    With m the agreed maximum of a block, L = floor((2^(w-1) - 1) 2^16 / n) and D_r = (h + floor(p_r 2^16 /
    n)) mod 2^16, rank r sends q = (rint(x L / m) + D_r) >> 16 in a lane of w bits; the sum of q times step =
    m 2^16 / L is the result. h is one 16-bit hash per (key, step, coordinate), equal on all ranks, so the n
    dithers are the shifts of one number: the sum cannot leave its lane at any n, each rank is unbiased, and
    the error's variance is (n + 1) / 12 step^2. A coordinate that is zero on all ranks stays exactly zero.

    Parameters
    ----------
    wire_bits : int
        Lane width w: 2, 3, 4, 5, 6, 8, 10 or 16. A coordinate costs 32 / floor(32 / w) bits, plus 0.03 for
        scales.
    scales : str
        "agreed", or "predicted" in a Reducer: steps without a round of their own before the sum, at 3 to 4
        times the vNMSE, and with clamps where a maximum grows by half from one step to the next.
    widening : bool
        Send a rank's own integers in lanes just wide enough for them and the sums in lanes of w bits, by an
        operation of the back end's own: fewer bytes from 4 ranks or so on, at steps at most 1/15 wider.

    Notes
    -----
    Shared maximum: S. Vineeth, "Unbiased single-scale and multi-scale quantizers for distributed
    optimization" (2021). Dither from shifts of one number: Hermite's identity; the fractional headroom is
    gccomm's own.
    """

    id: ClassVar[str] = "uniform"
    device_words: ClassVar[bool] = True
    steps_serve: ClassVar[bool] = True
    sums_lanes = True

    def __init__(self, wire_bits: int = 8, scales: str = "agreed", widening: bool = False) -> None:
        super().__init__(wire_bits, scales, widening)
        self.stateful = self.reencodes = scales == "predicted"  # clamps are counted after results are written

    def repeats(self, ctx: Context) -> bool:
        """Return whether scales are agreed."""
        return not (self.scales == "predicted" and ctx.stateful)

    def flows(self, ctx: Context) -> bool:
        """Return whether scales are agreed."""
        return self.repeats(ctx)

    def steps(self, x: Operand, state: Sequence[State | None], ctx: Context) -> Steps:
        """Agree on block maxima, then sum lanes."""
        if self.scales == "predicted" and ctx.stateful:
            return predicted_steps(x, state, ctx, self.wire_bits)
        return self._agreed(x, ctx)

    def _agreed(self, x: Operand, ctx: Context) -> Steps:
        width, limit = self.wire_bits, self.limit(ctx.size)
        if takes_lane_sums(x, ctx):
            yield lane_sum_of(x, np.empty(x.blocks, np.uint32), width, limit, ctx, agree=True)
            return
        scales = yield Agree(x.blocks, x.maxima)
        assert scales is not None
        if self.widening:
            lanes = Widening(x, width, limit)
            yield lanes.step(
                lambda lo, hi, out: lanes.source.encode(lo, hi, out, scales, lanes.narrow, limit, ctx),
                lambda lo, hi, words: x.decode(lo, hi, words, scales, width, limit, ctx),
            )
            return
        yield Sum(
            x.blocks,
            x.size,
            lambda lo, hi, out: x.encode(lo, hi, out, scales, width, limit, ctx),
            lambda lo, hi, words: x.decode(lo, hi, words, scales, width, limit, ctx),
            lambda lo, hi: ((0, x.size(lo, hi), width),),
        )

    def check_state(self, state: State, dtype: str, row_shape: Sequence[int]) -> None:
        """Raise ValueError unless it holds predicted scales."""
        check_prediction(state, dtype, row_shape)

    def next_state(self, old: State | None, parts: Sequence[Any]) -> State | None:
        """Return the next prediction of scales."""
        del old
        return next_scales(parts)
