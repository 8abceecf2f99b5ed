"""``rehop``: lanes that are rounded again on the way, so that a few bits suffice for any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from gccomm import kernels
from gccomm.checks import integer
from gccomm.codecs.base import Codec, State, lane_width
from gccomm.errors import NegotiationError
from gccomm.lanes import FIXED_POINT, lanes, rank_shift, words
from gccomm.layout import BLOCK, MIN_PART
from gccomm.noise import private_keys
from gccomm.operations import FOLD
from gccomm.steps import Context, Fold, Steps, Words

if TYPE_CHECKING:
    from gccomm.operand import Operand

__all__ = ["Rehop"]

_AGAIN = 0x13198A2E  # digits of pi: no rank's number, so that the sum's noise is nobody's own


class Rehop(Codec):
    """Rotate each block of 1024 coordinates, round it against its own largest one, add up the blocks of all
    ranks where they meet, and round the sum against its own largest one.

    Rank r sends q = (rint(y (2^(w-1) - 1) 2^16 / m_r) + D_r) >> 16 in lanes of w bits and m_r, the largest
    |y| of its own, y and D_r as of ``rotated``. The rank that a block belongs to takes the dithers off, adds
    up in float32 in the order of the ranks, and rounds the sum S in the same way, against max |S| and with a
    dither of its own, which every rank takes off; what a single rank has is not rounded again. So lanes hold
    one rank's values or the sum's, never the worst case of n ranks: w does not grow with n. Unbiased; the
    variance is (sum of the m_r^2 + max |S|^2) / (12 (2^(w-1) - 1)^2) a rotated coordinate.

    Parameters
    ----------
    wire_bits : int
        Lane width w: 2, 3, 4, 5, 6, 8, 10 or 16. A coordinate costs 32 / floor(32 / w) bits, plus 0.03 for
        scales.
    rotations : int
        1, or 2 for input made to defeat one.

    Notes
    -----
    Decoding, adding and encoding again on the way: "DynamiQ" (2026), along a ring or a butterfly, with
    levels and widths of its own; see docs/codecs/rehop.md for what differs and why.
    """

    id: ClassVar[str] = "rehop"
    sums_as = "own operation"
    operation = FOLD
    on_devices = False

    def __init__(self, wire_bits: int = 4, rotations: int = 1) -> None:
        self.wire_bits = lane_width(wire_bits)
        self.rotations = integer("rotations", rotations, "a number of rotations", 1, 2)

    def require_feedback(self, size: int) -> None:
        """Refuse steps that are not smaller than the block's maximum: residuals would grow for ever."""
        del size
        if self.wire_bits == 2:
            msg = (
                "error feedback in lanes of 2 bits would diverge: they have one level, and more than one is "
                "needed; use a larger wire_bits or error_feedback=False"
            )
            raise NegotiationError(msg)

    def carried(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the lengths rounded up to multiples of 64, the smallest part that is rotated."""
        return -(-lengths // MIN_PART) * MIN_PART

    def block_words(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return ceil(carried / lanes)."""
        return -(-self.carried(lengths) // lanes(self.wire_bits))

    def weight(self, item_bytes: int) -> float:
        """Return 1/8: encoding, wire and decoding of a piece overlap, so larger pieces are better."""
        del item_bytes
        return 1 / 8

    def steps(self, x: Operand, state: Sequence[State | None], ctx: Context) -> Steps:
        """Fold: nothing is agreed upon before."""
        del state
        run = _Run(self, x, ctx)
        most = words(self.wire_bits, BLOCK) + 1
        yield Fold(x.blocks, most, run.size, run.size, run.encode, run.fold, run.decode)


class _Run:
    """One operand on its way. The words of some blocks are their lanes, then a scale word a block."""

    def __init__(self, codec: Rehop, x: Operand, ctx: Context) -> None:
        self.x, self.ctx = x, ctx
        self.width, self.rotations = codec.wire_bits, codec.rotations
        self.limit = (2 ** (codec.wire_bits - 1) - 1) * FIXED_POINT
        n = ctx.size
        self.alone = n == 1  # what one rank has is rounded once
        self.down = 0 if self.alone else (n - 1).bit_length() + 1  # parts reach half a step beyond scales
        self.shifts = np.array([rank_shift(r, n) for r in range(n)], dtype=np.uint32)
        self.result = _with_keys(x, x.keys if self.alone else private_keys(x.keys, _AGAIN))
        level = 2.0**self.down * FIXED_POINT / self.limit
        self.ratios = np.full(x.blocks, level, dtype=np.float32)
        self.scales = np.empty(x.blocks, dtype=np.uint32)  # of the result

    def size(self, lo: int, hi: int) -> int:
        """Return the words of blocks ``lo`` to ``hi``."""
        return self.x.size(lo, hi) + hi - lo

    def encode(self, lo: int, hi: int, out: Words) -> None:
        """Write lanes and scales."""
        x, end = self.x, self.x.size(lo, hi)
        kernels.hop_encode(
            x.source, x.count, lo, hi, kernels.address(out[end:]), kernels.address(out),
            int(x.offsets[lo]), self.width, self.limit, self.ctx.shift, self.rotations,
        )  # fmt: skip

    def fold(self, lo: int, hi: int, parts: Sequence[Words], out: Words) -> None:
        """Write the lanes and scales of the sum of all ranks' blocks."""
        if self.alone:
            out[:] = parts[0]
            return
        x = self.x
        addresses = np.array([kernels.address(part) for part in parts], dtype=np.uint64)
        kernels.hop_fold(
            x.address, self.result.address, x.count, lo, hi, kernels.address(addresses), len(parts),
            kernels.address(self.shifts), kernels.address(out), int(x.offsets[lo]), x.size(lo, hi),
            self.width, self.limit, self.down,
        )  # fmt: skip

    def decode(self, lo: int, hi: int, folded: Words) -> None:
        """Write the results."""
        x, result, past = self.x, self.result, self.ctx.streams(self.rotations)
        self.scales[lo:hi] = folded[x.size(lo, hi) :]
        kernels.decode(
            result.address, result.count, lo, hi, kernels.address(self.scales), kernels.address(folded),
            int(x.offsets[lo]), self.width, 1, self.ctx.divisor, True, x.mean, past,
            ratios=kernels.address(self.ratios), rotations=self.rotations, dithers=1,
        )  # fmt: skip
        if x.feedback:
            self._restore(lo, hi)

    def _restore(self, lo: int, hi: int) -> None:
        """Keep the residuals of blocks that are not finite on some rank as they were."""
        lost = lo + np.flatnonzero(self.x.nonfinite_scales(self.scales[lo:hi]))
        unused = np.empty(words(self.width, BLOCK), dtype=np.uint32)
        for block in lost.tolist():
            self.x.encode(
                block, block + 1, unused, self.scales, self.width, self.limit, self.ctx,
                rotations=self.rotations,
            )  # fmt: skip


def _with_keys(x: Operand, keys: npt.NDArray[np.uint32]) -> Operand:
    """Return an operand over the same blocks, rotated alike, with other noise."""
    made = copy(x)
    made.table = x.table.copy()
    made.table["key0"], made.table["key1"] = keys[:, 0], keys[:, 1]
    made.address = kernels.address(made.table)
    return made
