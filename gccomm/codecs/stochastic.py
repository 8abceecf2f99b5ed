"""What the codecs with one scale a tensor share: norms, whole levels, independent stochastic rounding.

A rank rounds y = x s / M, s whole levels to the scale M, to one of the two integers beside it, at random and
with mean y, by noise of its own. |q| <= s on every rank: with s = floor((2^(w-1) - 1) / n) no lane overflows.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gccomm.codecs.lane_sums import lane_sum_of, takes_lane_sums
from gccomm.errors import NegotiationError
from gccomm.lanes import FIXED_POINT
from gccomm.steps import Agree, Context, LaneSum, Step, Sum, Words

if TYPE_CHECKING:
    from gccomm.operand import Operand

__all__ = [
    "LEVEL_LOST",
    "lane_sum",
    "restore",
    "single_scale",
    "spread",
    "store_final",
    "tensor_norms",
    "whole_levels",
]

LEVEL_LOST = 0x7FF80000  # a scale word that is NaN in float32 and in float64


def whole_levels(width: int, size: int) -> int:
    """Return how many whole levels each of ``size`` ranks may use in lanes of ``width`` bits.

    Raises
    ------
    NegotiationError
        Not even one.
    """
    most = (1 << (width - 1)) - 1
    if size > most:
        msg = (
            f"{size} ranks do not fit in lanes of {width} bits with a whole level each: at most {most} do; "
            "use a larger wire_bits, a codec with shared dither (uniform, rotated), or split the communicator"
        )
        raise NegotiationError(msg)
    return most // size


def tensor_norms(x: Operand, norm: str, lost: npt.NDArray[np.bool_] | None = None) -> Words:
    """Return one scale word a segment: this rank's L2 norm ("l2") or largest magnitude ("max").

    What is not finite stays so, also segments that ``lost`` marks. An L2 norm is made of integers (block
    energies), in float64 operations in a fixed order, and is never below the largest magnitude.
    """
    own = np.empty(x.blocks, dtype=np.uint32)
    energy = np.empty(x.blocks, dtype=np.uint32) if norm == "l2" else None
    x.maxima(own, energy)
    words: Words = np.maximum.reduceat(own, x.bounds[:-1])
    if lost is not None:
        words[lost] = LEVEL_LOST
    if energy is not None:
        finite = ~x.nonfinite_scales(words)
        words[finite] = x.scale_words(_lengths(x, own, energy, np.flatnonzero(finite)))
    return words


def _lengths(x: Operand, own: Words, energy: Words, segments: npt.NDArray[np.int64]) -> Any:
    """Return the L2 norms of segments: sqrt of the sum over blocks of M_b^2 energy_b / 2^20."""
    largest = float(np.finfo(np.float64 if x.float64 else np.float32).max)
    found = np.zeros(len(segments))
    for k, i in enumerate(segments.tolist()):
        at = slice(int(x.bounds[i]), int(x.bounds[i + 1]))
        values = x.scale_values(own[at])
        top = float(values.max())
        if top > 0:  # sums of parts of the largest: squares neither overflow nor vanish
            length = float(np.sqrt(np.cumsum((values / top) ** 2 * energy[at])[-1])) / 1024
            found[k] = min(top * max(length, 1.0), largest)
    return found


def single_scale(
    x: Operand, norm: str, lost: npt.NDArray[np.bool_] | None = None
) -> Generator[Step, Words | None, Words]:
    """Agree on the largest norm of each tensor over the ranks; return scale words of the blocks."""
    own = tensor_norms(x, norm, lost)
    agreed = yield Agree(x.count, lambda out: np.copyto(out, own))
    assert agreed is not None
    return spread(x, agreed)


def spread(x: Operand, words: Words) -> Words:
    """Return words of tensors as words of their blocks."""
    return np.repeat(words, np.diff(x.bounds))


def lane_sum(x: Operand, scales: Words, width: int, ctx: Context) -> Sum | LaneSum:
    """Return the step that sums as many whole levels as lanes of ``width`` bits hold."""
    limit = whole_levels(width, ctx.size) * FIXED_POINT
    if takes_lane_sums(x, ctx):
        return lane_sum_of(x, scales, width, limit, ctx)
    return Sum(
        x.blocks,
        x.size,
        lambda lo, hi, out: x.encode(lo, hi, out, scales, width, limit, ctx),
        lambda lo, hi, words: x.decode(lo, hi, words, scales, width, limit, ctx),
        lambda lo, hi: ((0, x.size(lo, hi), width),),
    )


def store_final(x: Operand, i: int, values: npt.NDArray[Any]) -> None:
    """Write segment ``i``'s result, which is the mean already where ``x`` has a mean.

    The mean of numbers near the largest is a number; their sum, which ``x.store`` divides, is not.
    """
    mean, x.mean = x.mean, False
    try:
        x.store(i, values)
    finally:
        x.mean = mean


def restore(x: Operand, i: int) -> None:
    """Keep segment ``i``'s residual as it was: the step is lost."""
    if x.feedback:
        old = x.kept(i)
        size = int(x.lengths[x.bounds[i] : x.bounds[i + 1]].sum())
        x.keep(i, np.zeros(size, dtype=np.float64 if x.float64 else np.float32) if old is None else old)
