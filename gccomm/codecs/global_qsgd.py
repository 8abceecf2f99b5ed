"""``global-qsgd``: one largest magnitude a tensor; levels evenly spaced, or powers of two."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from gccomm import kernels
from gccomm.checks import one_of
from gccomm.codecs.base import State
from gccomm.codecs.qsgd import QSGDMaxNorm
from gccomm.codecs.stochastic import lane_sum, restore, single_scale, store_final
from gccomm.noise import fmix
from gccomm.steps import Context, OpSum, Steps, Words

if TYPE_CHECKING:
    from gccomm.operand import Operand

__all__ = ["GlobalQSGD"]

_HEADROOM = 32  # bits that sums may round up by, beyond n: they do by h bits with probability 2^-h at most
_SALT = 0xA4093822  # digits of pi: the operation shares no noise with the rounding
Array = npt.NDArray[Any]


class GlobalQSGD(QSGDMaxNorm):
    """Quantise each tensor against the largest magnitude M that any rank has in it.

    Standard dithering: with s = floor((2^(w-1) - 1) / n), rank r sends q = floor(x s / M + u), u uniform and
    independent between ranks; the result is M / s times the sum. Exponential dithering: x / (R M) is rounded
    at random, with its own mean, to a power of two with a sign, one byte, and the back end adds such bytes by
    its operation "exponent", which rounds each sum again in the same way; the result is R M times the last.
    Both are unbiased. The variance of the first is at most n / 4 (M / s)^2; that of each rounding of the
    second at most an eighth of the rounded number's square, whatever M is.

    Parameters
    ----------
    wire_bits : int
        Lane width w: 2, 3, 4, 5, 6, 8, 10 or 16; at most 2^(w-1) - 1 ranks. Exponential dithering has 8 and
        any number of ranks.
    dithering : str
        "standard" or "exponential". An exponential result depends on how the back end adds, piece by piece.

    Notes
    -----
    J. Xin et al., "Global-QSGD: practical floatless quantization for distributed learning with theoretical
    guarantees" (2023). Its s = 127 / n is no whole number, and ranks that round up together leave the lane;
    the floor is gccomm's. Its R is 2 n, which holds the sums of a binary tree over 2^k ranks; gccomm's is
    2^32 n rounded up to a power of two, which costs no precision and leaves room for sums that round up
    again and again in any order. Equal on all ranks: options, keys, shapes, dtypes.
    """

    id: ClassVar[str] = "global-qsgd"

    def __init__(self, wire_bits: int = 8, dithering: str = "standard") -> None:
        QSGDMaxNorm.__init__(self, wire_bits, "max")
        one_of("dithering", dithering, ("standard", "exponential"))
        self.dithering = dithering
        if dithering == "exponential":
            if self.wire_bits != 8:
                msg = f'`wire_bits` must be 8 with dithering="exponential", got {wire_bits!r}'
                raise ValueError(msg)
            self.operation, self.sums_as, self.sketched = "exponent", "own operation", False

    def require_size(self, size: int, item_bytes: int) -> None:
        """Refuse more ranks than a lane has whole levels for."""
        if self.operation is None:
            super().require_size(size, item_bytes)

    def require_feedback(self, size: int) -> None:
        """Refuse one level; a rounding to a power of two is always smaller than what it rounds."""
        if self.operation is None:
            super().require_feedback(size)

    def steps(self, x: Operand, state: Sequence[State | None], ctx: Context) -> Steps:
        """Agree on magnitudes, then sum lanes or combine bytes."""
        del state
        scales = yield from single_scale(x, "max")
        if self.operation is None:
            yield lane_sum(x, scales, self.wire_bits, ctx)
            return
        run = _Exponents(x, scales[x.bounds[:-1]], ctx)
        yield OpSum(self.operation, run.seed(), run.words, run.encode, run.decode)


class _Exponents:
    """An operand's tensors as bytes, four a word, each tensor from a word on."""

    def __init__(self, x: Operand, scales: Words, ctx: Context) -> None:
        self.x, self.inputs = x, ctx.divisor
        self.room = 2.0 ** (_HEADROOM + (ctx.size - 1).bit_length())  # R
        self.sizes = np.add.reduceat(x.lengths, x.bounds[:-1])
        self.starts = np.cumsum([0, *-(-self.sizes // 4)])
        self.words = int(self.starts[-1])
        self.lost = x.nonfinite_scales(scales)
        self.largest = x.scale_values(np.where(self.lost, np.uint32(0), scales))

    def seed(self) -> int:
        """Return the key of the operation's noise."""
        key0, key1 = self.x.keys[0].tolist()
        return fmix(key0 ^ fmix(key1 ^ _SALT))

    def _places(self) -> list[tuple[int, slice]]:
        ends = self.starts.tolist()
        return [(i, slice(lo, hi)) for i, (lo, hi) in enumerate(pairwise(ends))]

    def encode(self, out: Words) -> None:
        """Write each tensor's bytes, and what rounding left of it."""
        out[:] = 0  # padding, and tensors that are zero or not finite
        table = self.x.table
        for i, at in self._places():
            if self.lost[i]:
                restore(self.x, i)
                continue
            values, words, count = self.x.load(i), out[at], int(self.sizes[i])
            if self.largest[i] > 0:
                parts = self._parts(values, self.largest[i])
                key0, key1 = int(table["key0"][i]), int(table["key1"][i])
                kernels.exponent_encode(kernels.address(parts), kernels.address(words), count, key0, key1, 0)
            if self.x.feedback:
                sent = self._numbers(words, count) * self.room * self.largest[i]
                self.x.keep(i, (values - sent).astype(values.dtype))

    def _parts(self, values: Array, largest: float) -> npt.NDArray[np.float32]:
        with np.errstate(under="ignore"):
            parts = values.astype(np.float64) / largest / self.room
            return parts.astype(np.float32)

    def _numbers(self, words: Words, count: int) -> npt.NDArray[np.float64]:
        numbers = np.empty(count, dtype=np.float32)
        kernels.exponent_decode(kernels.address(words), kernels.address(numbers), count)
        return numbers.astype(np.float64)

    def decode(self, words: Words) -> None:
        """Write results."""
        times = self.room / self.inputs if self.x.mean else self.room
        for i, at in self._places():
            count = int(self.sizes[i])
            if self.lost[i]:
                store_final(self.x, i, np.full(count, np.nan))
                continue
            with np.errstate(over="ignore"):
                sums = self._numbers(words[at], count) * times * self.largest[i]
            store_final(self.x, i, sums)
