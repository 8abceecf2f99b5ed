"""``intsgd``: a scale predicted from the sums of earlier steps, so that a step needs no agreement round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from gccomm.codecs.base import Codec, State, lane_width
from gccomm.codecs.clamps import count_clamped
from gccomm.codecs.stochastic import LEVEL_LOST, restore, spread, whole_levels
from gccomm.errors import NegotiationError
from gccomm.lanes import FIXED_POINT, lanes
from gccomm.operand import INFINITY_32, INFINITY_64
from gccomm.steps import Agree, Context, Lanes, Steps, Sum, Words

if TYPE_CHECKING:
    from gccomm.operand import Operand

__all__ = ["IntSGD", "Observed"]

TAIL = 2  # words a tensor besides its lanes: clamped coordinates, ranks that hold inf or NaN
TRUSTED = 1e-100, 1e100  # mean squares, in squares of the agreed maximum, that a step may be predicted from


class Observed(NamedTuple):
    """What one tensor's sum says: the mean square of the mean of the ranks, in units of the agreed maximum's
    square, the word of that maximum, whether this step agreed on it, and whether coordinates were clamped.
    """

    square: float
    scale: int
    agreed: bool
    clamped: bool


class IntSGD(Codec):
    """Round to integers in steps that follow from the last sums: no agreement round, no scale on the wire.

    In a Reducer, from a key's second step on, rank r sends q = floor(alpha x + u), u uniform in [0, 1) and
    independent between ranks, clamped to s = floor((2^(w-1) - 1) / n) levels; the sum of the q over alpha is
    the result. With g_k the mean over the ranks that step k returned (the sum over n) and d coordinates,

        r_k = beta r_(k-1) + (1 - beta) ||g_(k-1)||^2 / d,    alpha_k = 1 / sqrt(2 n (r_k + eps M^2)),

    so rounding adds at most r_k / 2, and about r_k / 3, to the mean square of g_k, whatever w is: a wide lane
    is room for ranks that differ, not precision. ||g||^2 comes from the decoded integers, exactly. The first
    step of a key, every step of the functions, and the step after a clamp agree on the largest magnitude M of
    the tensor and use steps of M / s. A sum that is zero everywhere leaves r as it was. A tensor's words end
    with the number of clamped coordinates (``stats.clamps``) and of ranks that hold inf or NaN: the tensor is
    then NaN on every rank, and its r and residual stay. With error feedback the residuals settle near the
    size of the mean gradient of all ranks.

    Parameters
    ----------
    wire_bits : int
        Lane width w: 2, 3, 4, 5, 6, 8, 10 or 16; at most 2^(w-1) - 1 ranks. Unbiased where nothing is
        clamped.
    beta : float
        Memory of r, 0 to below 1.
    eps : float
        Floor of r, in units of M^2 as agreed last: published as an absolute number, which would drown small
        gradients.

    Notes
    -----
    K. Mishchenko et al., "IntSGD: adaptive floatless compression of stochastic gradients" (2022). There the
    first alpha is a constant and clamps pass unseen; the agreement, the counts and the clamp in integers (its
    bound in float32 rounds up to 2^31 / n) are gccomm's. Equal on all ranks: options, keys, shapes, dtypes,
    and r.
    """

    id: ClassVar[str] = "intsgd"
    unit: ClassVar[str] = "tensor"
    private: ClassVar[bool] = True
    sketched = True
    stateful: bool = True

    def __init__(self, wire_bits: int = 8, beta: float = 0.9, eps: float = 1e-8) -> None:
        self.wire_bits = lane_width(wire_bits)
        self.beta = _fraction("beta", beta)
        self.eps = _fraction("eps", eps)

    def require_size(self, size: int, item_bytes: int) -> None:
        """Refuse more ranks than a lane has whole levels for."""
        del item_bytes
        whole_levels(self.wire_bits, size)

    def require_feedback(self, size: int) -> None:
        """Refuse one level: residuals could grow by a step in each step."""
        if whole_levels(self.wire_bits, size) < 2:
            msg = (
                f"error feedback in lanes of {self.wire_bits} bits on {size} ranks would diverge: a rank has "
                "one whole level and needs two; use a larger wire_bits or error_feedback=False"
            )
            raise NegotiationError(msg)

    def block_words(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return ceil(length / lanes)."""
        return -(-lengths // lanes(self.wire_bits))

    def steps(self, x: Operand, state: Sequence[State | None], ctx: Context) -> Steps:
        """Agree on the maxima of tensors without a prediction, if any, then sum lanes and counts."""
        unknown = [i for i, old in enumerate(state) if old is None or old["agree"]]
        maxima = np.array([0 if old is None else old["scale"] for old in state], dtype=np.uint32)
        if unknown:
            agreed = yield Agree(len(unknown), lambda out: _largest(x, unknown, out))
            assert agreed is not None
            maxima[unknown] = agreed
        squares = np.array([0.0 if old is None or old["agree"] else old["r"] for old in state])
        run = _Sums(x, ctx, self.wire_bits, maxima, set(unknown))
        run.predict(squares + self.eps)
        yield Sum(x.blocks, run.size, run.encode, run.decode, run.lanes)
        return run.observed()

    def check_state(self, state: State, dtype: str, row_shape: Sequence[int]) -> None:
        """Raise ValueError unless it holds a mean square, a scale word and whether to agree again."""
        del row_shape
        r, scale = state["r"], state["scale"]
        if not isinstance(r, int | float) or not 0 <= r < math.inf:
            raise ValueError(f"`r` is {r!r}, not a number from 0 on")
        if not isinstance(scale, int) or not 0 <= scale < (
            INFINITY_64 if dtype == "float64" else INFINITY_32
        ):
            raise ValueError(f"`scale` is {scale!r}, not the scale word of a finite {dtype} number")
        if state["agree"] not in (True, False):
            raise ValueError(f"`agree` is {state['agree']!r}, not a bool")

    def next_state(self, old: State | None, parts: Sequence[Observed | None]) -> State | None:
        """Return r, the word of M, and whether to agree on it again; the old state after inf or NaN."""
        (seen,) = parts
        if seen is None:
            return old
        r = seen.square
        if not seen.agreed:
            assert old is not None
            r = self.beta * old["r"] + (1 - self.beta) * r if r > 0 else old["r"]
        agree = seen.clamped or not TRUSTED[0] < r < TRUSTED[1]
        return {"r": r, "scale": seen.scale, "agree": agree}


def _fraction(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        msg = f"`{name}` must be a number, got {value!r} of type {type(value).__name__}"
        raise TypeError(msg)
    if not (math.isfinite(value) and 0 <= value < 1):
        msg = f"`{name}` must be a number from 0 to below 1, got {value!r}"
        raise ValueError(msg)
    return float(value)


def _largest(x: Operand, segments: Sequence[int], out: Words) -> None:
    """Write the largest magnitude of these segments as scale words."""
    own = np.empty(int(np.diff(x.bounds).max()), dtype=np.uint32)
    for k, i in enumerate(segments):
        lo, hi = int(x.bounds[i]), int(x.bounds[i + 1])
        x.maxima(own, None, 0, lo, hi)
        out[k] = own[: hi - lo].max()


class _Sums:
    """An operand's lanes, each tensor followed by its counts where its last block is."""

    def __init__(self, x: Operand, ctx: Context, width: int, maxima: Words, agreed: set[int]) -> None:
        self.x, self.ctx, self.width, self.agreed = x, replace(ctx, measure=True), width, agreed
        self.maxima, self.words = maxima, maxima.copy()
        self.levels = whole_levels(width, ctx.size)
        self.limit = self.levels * FIXED_POINT
        self.counts = np.zeros((x.count, TAIL), dtype=np.int64)  # this rank's, then those of all
        self.energy = np.zeros(x.count)  # of the summed integers

    def predict(self, squares: npt.NDArray[np.float64]) -> None:
        """Set the scales of tensors that did not agree on them: s / alpha, finite and not zero."""
        x = self.x
        known = np.array([i not in self.agreed for i in range(x.count)])
        top = float(np.finfo(np.float64 if x.float64 else np.float32).max)
        with np.errstate(over="ignore", under="ignore"):
            values = x.scale_values(self.maxima[known])
            steps = values * np.sqrt(2 * self.ctx.size * squares[known])
            self.words[known] = np.maximum(x.scale_words(np.minimum(steps * self.levels, top)), 1)
        self.scales = spread(x, self.words)

    def _ends(self, lo: int, hi: int) -> slice:
        """Return the segments whose last block is one of lo to hi."""
        first, last = np.searchsorted(self.x.bounds[1:], (lo, hi), "right").tolist()
        return slice(first, last)

    def size(self, lo: int, hi: int) -> int:
        """Return the words of the lanes and counts."""
        ends = self._ends(lo, hi)
        return self.x.size(lo, hi) + TAIL * int(ends.stop - ends.start)

    def lanes(self, lo: int, hi: int) -> Lanes:
        """Return the lanes; the counts are unsigned and have none."""
        return ((0, self.x.size(lo, hi), self.width),)

    def encode(self, lo: int, hi: int, out: Words) -> None:
        """Write lanes and, of the tensors that end here, counts."""
        x, end, ends = self.x, self.x.size(lo, hi), self._ends(lo, hi)
        all_agreed = len(self.agreed) == x.count
        own = None if all_agreed else np.empty(hi - lo, dtype=np.uint32)
        x.encode(lo, hi, out, self.scales, self.width, self.limit, self.ctx, maxima=own)
        if own is not None:
            self._count(lo, own)
        share = 0xFFFFFFFF // self.ctx.size
        out[end:] = np.minimum(self.counts[ends], share).astype(np.uint32).reshape(-1)

    def _count(self, lo: int, own: Words) -> None:
        """Count what this rank clamps, and the tensors in which it holds inf or NaN."""
        x = self.x
        bad = x.nonfinite_scales(own)
        self.counts[np.searchsorted(x.bounds, lo + np.flatnonzero(bad), "right") - 1, 1] = 1
        over = lo + np.flatnonzero((own > self.scales[lo : lo + len(own)]) & ~bad)
        if len(over):
            self.counts[:, 0] += count_clamped(x, over, self.scales, 0)

    def decode(self, lo: int, hi: int, words: Words) -> None:
        """Write results, add up energies, read counts."""
        x, end, ends = self.x, self.x.size(lo, hi), self._ends(lo, hi)
        x.decode(lo, hi, words, self.scales, self.width, self.limit, self.ctx)
        self._add_energies(lo, hi, words[:end])
        self.counts[ends] = words[end:].reshape(-1, TAIL)
        bad = (ends.start + np.flatnonzero(self.counts[ends, 1])).tolist()
        lost = [i for i in bad if i not in self.agreed]
        x.report(clamps=int(self.counts[ends, 0].sum()), lost=bool(lost))
        for i in bad:
            if i in lost:  # the scale is finite, and so is what was written
                size = int(x.lengths[x.bounds[i] : x.bounds[i + 1]].sum())
                x.store(i, np.full(size, np.nan, dtype=np.float64 if x.float64 else np.float32))
                restore(x, i)
            self.words[i] = LEVEL_LOST

    def _add_energies(self, lo: int, hi: int, words: Words) -> None:
        """Add the squares of the summed integers: whole numbers below 2^53, whatever their order."""
        x = self.x
        if self.width == 16:  # decode measures in units of 32 levels there
            halves = (words + np.uint32(0x80008000)).view(np.uint16).astype(np.int64) - 0x8000
            ends = 2 * (x.offsets[lo:hi] - x.offsets[lo])
            energy = np.add.reduceat(halves * halves, ends).astype(np.float64)
        else:
            energy = x.measured(x.samples[-1:])[0][lo:hi]
        owners = np.searchsorted(x.bounds, np.arange(lo, hi), "right") - 1
        self.energy += np.bincount(owners, energy, x.count)

    def observed(self) -> list[Observed | None]:
        """Return what each tensor's sum says; None where it is not finite."""
        x = self.x
        lost = x.nonfinite_scales(self.words)
        usable = ~lost & (self.maxima > 0)
        largest, scales = (
            x.scale_values(np.where(usable, w, np.uint32(0))) for w in (self.maxima, self.words)
        )
        steps = np.divide(scales, largest, out=np.zeros(x.count), where=usable) / self.levels
        sizes = np.add.reduceat(x.lengths, x.bounds[:-1]).astype(np.float64)
        squares = steps * steps * self.energy / (sizes * float(self.ctx.size) ** 2)
        clamped = self.counts[:, 0] > 0
        return [
            None
            if lost[i]
            else Observed(float(squares[i]), int(self.maxima[i]), i in self.agreed, bool(clamped[i]))
            for i in range(x.count)
        ]
