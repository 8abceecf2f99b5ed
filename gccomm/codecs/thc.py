"""``thc``: rotation, shared norm, and rounding to a table whose entries are integers that add up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from gccomm.checks import integer
from gccomm.codecs.base import Codec, State, lane_width
from gccomm.codecs.tables import clamp_error, clamp_of, expected_variance, kernel_table, optimal_table
from gccomm.errors import NegotiationError
from gccomm.lanes import lanes
from gccomm.layout import MIN_PART
from gccomm.steps import Agree, Context, OpSum, Steps, Sum, Words

if TYPE_CHECKING:
    from gccomm.operand import Operand

__all__ = ["THC"]

LARGEST_GRID = 1023  # that the kernel's table holds
PUBLISHED_GRID = 30
MOST_BITS = 10


class THC(Codec):
    """Tensor homomorphic compression: rotate each block, scale it to variance 1 by the largest norm that any
    rank has, clamp, and round at random to a table of integers.

    With N the agreed Euclidean norm of a block of P coordinates (residuals included), z = sqrt(P) / N R x,
    R orthonormal and random, clamped to -t ... t. A rank rounds u = (z + t) g / (2 t) to a neighbour in the
    table, unbiased and independently of the other ranks; the integers add up to Q, and the result is
    R^T (Q - n g / 2) (2 t / g) N / sqrt(P). The table holds the 2^bits of the integers 0 ... g that round
    standard normal numbers with the least variance.

    Parameters
    ----------
    wire_bits : int
        Lane width w: 2, 3, 4, 5, 6, 8, 10 or 16. A coordinate costs 32 / floor(32 / w) bits, plus 0.03 for
        norms.
    bits : int
        1 to 10: size of the table, 2^bits entries. With g + 1 or more of them it is the whole grid. Published
        to save bits on the way to a server that adds; in an all-reduce lanes carry the integers themselves,
        and a larger table rounds better at the same cost.
    granularity : int, optional
        g, 1 to 1023, at most (2^w - 1) / n. None: as large as fits, at most 30, as published.
    overflow : float
        Part of standard normal coordinates that the clamp takes something off, which decides t: 2.154 for
        1/32. What it takes off is biased, and goes into the residual.
    rotations : int
        1, or 2 for input made to defeat one.
    saturate : bool
        Add with saturation, by an operation of the back end's own, in lanes for t standard deviations of the
        sum of independent ranks: g (even) at most (2^w - 2) / sqrt(n), instead of / n. Sums beyond are
        clipped, partial sums too, where no residual sees it; ranks that agree need a smaller granularity.

    Notes
    -----
    M. Li et al., "THC: Accelerating Distributed Deep Learning Using Tensor Homomorphic Compression" (NSDI
    2024); saturation: W. Han et al., "Beyond Throughput and Compression Ratios" (HotNets 2024). The norm is
    known to 1e-4, from energies in 2^-10 of the block's maximum.
    """

    id: ClassVar[str] = "thc"
    private: ClassVar[bool] = True
    sketched = True
    rounding = "biased"
    biased = True

    def __init__(
        self,
        wire_bits: int = 8,
        bits: int = 4,
        granularity: int | None = None,
        overflow: float = 1 / 32,
        rotations: int = 1,
        saturate: bool = False,
    ) -> None:
        self.wire_bits = lane_width(wire_bits)
        self.bits = integer("bits", bits, "the logarithm of a table's size", 1, MOST_BITS)
        if granularity is not None:
            granularity = integer("granularity", granularity, "the table's largest integer", 1, LARGEST_GRID)
        self.granularity = granularity
        self.overflow = _probability(overflow)
        self.rotations = integer("rotations", rotations, "a number of rotations", 1, 2)
        if not isinstance(saturate, bool):
            raise TypeError(f"`saturate` must be a bool, got {saturate!r} of type {type(saturate).__name__}")
        self.saturate = saturate
        if saturate:
            self.operation = f"saturate:{self.wire_bits}"
            self.sums_as = "own operation"
            self.sketched = False  # sketches travel behind sums alone
            largest = 2**self.wire_bits - 2
            if granularity is not None and (granularity % 2 or granularity > largest):
                msg = (
                    f"`granularity` must be even and at most {largest}, so that a rank's integers fit lanes "
                    f"of {self.wire_bits} bits around 0, got {granularity}"
                )
                raise ValueError(msg)

    def grid(self, size: int) -> int:
        """Return g for ``size`` ranks; NegotiationError where none fits."""
        width = self.wire_bits
        if self.saturate:
            most = math.isqrt((2**width - 2) ** 2 // size) // 2 * 2
        else:
            most = (2**width - 1) // size
        if self.granularity is not None and not self.saturate and self.granularity > most:
            msg = (
                f"granularity={self.granularity} on {size} ranks sums up to {self.granularity * size}, more "
                f"than the {2**width - 1} of a lane of {width} bits; use a larger wire_bits or a granularity "
                f"of at most {most}"
            )
            raise NegotiationError(msg)
        if most < 1:
            msg = (
                f"{size} ranks do not fit in lanes of {width} bits, not even with a granularity of "
                f"{2 if self.saturate else 1}; use a larger wire_bits or split the communicator"
            )
            raise NegotiationError(msg)
        return min(most, PUBLISHED_GRID) if self.granularity is None else self.granularity

    def require_size(self, size: int, item_bytes: int) -> None:
        """Refuse more ranks than the lane has room for."""
        del item_bytes
        self.grid(size)

    def require_feedback(self, size: int) -> None:
        """Refuse tables so coarse that the error is as large as the input: residuals would grow for ever."""
        error = self._error(size)
        if error >= 1:
            msg = (
                f"error feedback with a granularity of {self.grid(size)} would diverge: the mean square of "
                f"the error is {error:.2f} times that of the input and must be less than 1; use a larger "
                "wire_bits or error_feedback=False"
            )
            raise NegotiationError(msg)

    def _error(self, size: int) -> float:
        """Return the mean square of one rank's error in units of that of its input."""
        clamp = clamp_of(self.overflow)
        table = optimal_table(2**self.bits, self.grid(size), clamp)
        return expected_variance(table, clamp) + clamp_error(clamp)

    def carried(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the lengths rounded up to multiples of 64, the smallest part that is rotated."""
        return -(-lengths // MIN_PART) * MIN_PART

    def block_words(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return ceil(carried / lanes)."""
        return -(-self.carried(lengths) // lanes(self.wire_bits))

    def steps(self, x: Operand, state: Sequence[State | None], ctx: Context) -> Steps:
        """Agree on norms, then sum the integers."""
        del state
        scales = yield Agree(x.blocks, lambda out: _norms(x, out))
        assert scales is not None
        run = _Run(self, x, scales, ctx)
        if self.operation is not None:
            everything = x.size(0, x.blocks)
            yield OpSum(
                self.operation,
                0,  # saturation draws no noise
                everything,
                lambda out: run.encode(0, x.blocks, out),
                lambda words: run.decode(0, x.blocks, words),
            )
        else:
            yield Sum(
                x.blocks,
                x.size,
                run.encode,
                run.decode,
                lambda lo, hi: ((0, x.size(lo, hi), self.wire_bits),),
            )


def _probability(overflow: object) -> float:
    if isinstance(overflow, bool) or not isinstance(overflow, int | float | np.floating):
        msg = f"`overflow` must be a probability, got {overflow!r} of type {type(overflow).__name__}"
        raise TypeError(msg)
    if not 1e-12 <= overflow <= 0.5:
        raise ValueError(f"`overflow` must be a probability of 1e-12 to 0.5, got {overflow!r}")
    return float(overflow)


def _norms(x: Operand, out: Words) -> None:
    """Write each block's norm / 32 as a scale word: never larger than the block's maximum."""
    energy = np.empty(x.blocks, dtype=np.uint32)
    x.maxima(out, energy)
    bad = x.nonfinite_scales(out)
    maxima = x.scale_values(np.where(bad, np.uint32(0), out))
    words = x.scale_words(maxima * (np.sqrt(energy.astype(np.float64)) / 2**15))
    out[:] = np.where(bad, out, words)


class _Run:
    """Encodes and decodes one operand.

    The kernel sends q - ceil(g / 2). For an odd g that leans to one side of a signed lane by n / 2 in all,
    which a full lane has no room for: rank 0 then adds ``centre`` to its lanes.
    """

    def __init__(self, codec: THC, x: Operand, scales: Words, ctx: Context) -> None:
        self.x, self.scales, self.ctx = x, scales, ctx
        self.width, self.rotations = codec.wire_bits, codec.rotations
        g, clamp, n = codec.grid(ctx.size), clamp_of(codec.overflow), ctx.size
        self.table = kernel_table(optimal_table(2**codec.bits, g, clamp))
        self.ratios = (2 * clamp / g / np.sqrt(codec.carried(x.lengths))).astype(np.float32)
        below = n * ((g + 1) // 2)
        self.centre = 0 if codec.saturate else max(0, below - 2 ** (self.width - 1))
        self.offset = (2 * (below - self.centre) - n * g) << 14  # half levels, in 2^-15 levels
        self.clamp = g << 15

    def encode(self, lo: int, hi: int, out: Words) -> None:
        """Write lanes."""
        self.x.encode(
            lo, hi, out, self.scales, self.width, 1, self.ctx,
            clamp=self.clamp, ratios=self.ratios, rotations=self.rotations, grid=self.table,
        )  # fmt: skip
        if self.centre and self.ctx.rank == 0:
            shifts = range(0, 32 // self.width * self.width, self.width)
            out += np.uint32(sum(self.centre << shift for shift in shifts) & 0xFFFFFFFF)

    def decode(self, lo: int, hi: int, words: Words) -> None:
        """Write the results."""
        self.x.decode(
            lo, hi, words, self.scales, self.width, 1, self.ctx,
            ratios=self.ratios, rotations=self.rotations, offset=self.offset,
        )  # fmt: skip
