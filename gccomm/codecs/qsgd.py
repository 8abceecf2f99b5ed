"""``qsgd-mn`` and ``qsgd-mn-ts``: scales by tensor, one or several; stochastic rounding."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from gccomm.checks import integer, one_of
from gccomm.codecs.base import Codec, State, lane_width
from gccomm.codecs.stochastic import lane_sum, single_scale, spread, tensor_norms, whole_levels
from gccomm.errors import NegotiationError
from gccomm.lanes import lanes
from gccomm.steps import Agree, Context, Step, Steps, Words

if TYPE_CHECKING:
    from gccomm.operand import Operand

__all__ = ["QSGDMaxNorm", "QSGDMultiScale"]

Lost = npt.NDArray[np.bool_] | None
Scales = Generator[Step, Words | None, Words]


class QSGDMaxNorm(Codec):
    """Quantise each tensor against the largest norm that any rank has of it.

    With M = max_r ||x_r|| and s = floor((2^(w-1) - 1) / n), rank r sends q = floor(x s / M + u), u uniform in
    [0, 1) and independent between ranks; M / s times the sum of the q is the result. Unbiased; the variance
    of a coordinate is sum_r f_r (1 - f_r) (M / s)^2, f_r the fraction of x_r s / M: at most n / 4 (M / s)^2.
    A coordinate that is zero on all ranks stays exactly zero, and so does a tensor that is (the published
    code divides 0 by 0).

    Parameters
    ----------
    wire_bits : int
        Lane width w: 2, 3, 4, 5, 6, 8, 10 or 16; at most 2^(w-1) - 1 ranks.
    norm : str
        "l2", as published: of d coordinates that are alike, each spans about s / sqrt(d) levels, so most are
        sent as zero; no error feedback, as its residuals can grow for ever. "max": the largest magnitude.

    Notes
    -----
    S. Vineeth, "Unbiased single-scale and multi-scale quantizers for distributed optimization" (2021),
    QSGD-MaxNorm. Its s = 2^(w-1) - 1 has no room for the sum; the division by n is gccomm's. Equal on all
    ranks: options, keys, shapes, dtypes.
    """

    id: ClassVar[str] = "qsgd-mn"
    unit: ClassVar[str] = "tensor"
    private: ClassVar[bool] = True
    sketched = True

    def __init__(self, wire_bits: int = 8, norm: str = "l2") -> None:
        self.wire_bits = lane_width(wire_bits)
        one_of("norm", norm, ("l2", "max"))
        self.norm = norm

    def require_size(self, size: int, item_bytes: int) -> None:
        """Refuse more ranks than a lane has whole levels for."""
        del item_bytes
        whole_levels(self.wire_bits, size)

    def require_feedback(self, size: int) -> None:
        """Refuse steps that are not always smaller than the tensor's largest magnitude."""
        if self.norm == "l2":
            msg = (
                f'error feedback with {self.id} and norm="l2" can diverge: a step is a fraction of the '
                'tensor\'s L2 norm, which may be far above its largest magnitude; use norm="max" or '
                "error_feedback=False"
            )
            raise NegotiationError(msg)
        if whole_levels(self.wire_bits, size) < 2:
            msg = (
                f"error feedback in lanes of {self.wire_bits} bits on {size} ranks would diverge: a rank has "
                "one whole level and needs two; use a larger wire_bits or error_feedback=False"
            )
            raise NegotiationError(msg)

    def block_words(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return ceil(length / lanes)."""
        return -(-lengths // lanes(self.wire_bits))

    def agreed_scales(self, x: Operand, lost: Lost = None) -> Scales:
        """Agree on the norms; return the scale words of blocks. Segments that ``lost`` marks become NaN."""
        return (yield from single_scale(x, self.norm, lost))

    def steps(self, x: Operand, state: Sequence[State | None], ctx: Context) -> Steps:
        """Agree on norms, then sum lanes."""
        del state
        scales = yield from self.agreed_scales(x)
        yield lane_sum(x, scales, self.wire_bits, ctx)


class QSGDMultiScale(QSGDMaxNorm):
    """``qsgd-mn`` with finer steps in blocks that can have them.

    Ranks agree on M as ``qsgd-mn`` does and, in the same message, on the largest magnitude m of each block of
    1024. A block's scale is the smallest of M, M / fine, M / fine^2, ... (``levels`` of them) that is not
    below m: the finest step with which no coordinate of any rank leaves the lane. Unbiased; the variance is
    that of ``qsgd-mn`` with the block's scale for M.

    Parameters
    ----------
    wire_bits, norm
        As of ``qsgd-mn``.
    fine : int
        Ratio of one scale to the next finer one, a power of two up to 2^16. 32 suits L2 norms of 10^4 and
        more coordinates, which are at least 30 times the largest of a block of Gaussian ones.
    levels : int
        Number of scales, 2 to 64: 2 is the published two-scale codec; ``fine=2`` with 16 levels brings each
        step to within twice the best one.

    Notes
    -----
    S. Vineeth (2021), QSGD-MaxNorm with two and multiple scales: there the scale is chosen by coordinate, and
    its index, a byte, has to be agreed on by coordinate too; by block that costs 0.03 bits a coordinate.
    """

    id: ClassVar[str] = "qsgd-mn-ts"

    def __init__(self, wire_bits: int = 8, norm: str = "l2", fine: int = 32, levels: int = 2) -> None:
        QSGDMaxNorm.__init__(self, wire_bits, norm)
        self._set_scales(fine, levels)

    def _set_scales(self, fine: int, levels: int) -> None:
        self.fine = integer("fine", fine, "a ratio of scales", 2, 1 << 16)
        if self.fine & (self.fine - 1):
            msg = f"`fine` must be a power of two, got {fine}"
            raise ValueError(msg)
        self.levels = integer("levels", levels, "a number of scales", 2, 64)

    def agreed_scales(self, x: Operand, lost: Lost = None) -> Scales:
        """Agree on norms and block maxima; return the finest scale words that hold the blocks."""

        def fill(out: Words) -> None:
            out[: x.count] = tensor_norms(x, self.norm, lost)
            x.maxima(out[x.count :])

        agreed = yield Agree(x.count + x.blocks, fill)
        assert agreed is not None
        return self._finest(x, agreed[: x.count], agreed[x.count :])

    def _finest(self, x: Operand, norms: Words, maxima: Words) -> Words:
        """Return each block's scale word; that of its tensor where it is zero or not finite."""
        scales = spread(x, norms)
        usable = (norms != 0) & ~x.nonfinite_scales(norms)
        values = x.scale_values(np.where(usable, norms, np.uint32(0)))
        for level in range(1, self.levels):
            finer = spread(x, x.scale_words(values * float(self.fine) ** -level))
            fits = spread(x, usable) & (finer > 0) & (maxima <= finer)
            scales = np.where(fits, finer, scales)
        return scales
