"""The exact carriers behind every codec: small float tensors in two words a coordinate, integers and booleans
in lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from gccomm.codecs.base import Codec, State
from gccomm.errors import NegotiationError
from gccomm.lanes import integer_format
from gccomm.steps import Agree, Context, Steps, Sum

if TYPE_CHECKING:
    from gccomm.operand import Operand

__all__ = ["Integers", "TwoWords"]


class TwoWords(Codec):
    """Floats in two 32-bit words a coordinate: order-free, identical on all ranks, as good as exact.

    With |x| < 2^E agreed per block and L = ceil(log2 n): hi = rint(x 2^(30-L-E)), lo = rint((x 2^(30-L-E) -
    hi) 2^(31-L)). The error of the sum is at most n 2^-(61-2L) of the largest magnitude.
    """

    id: ClassVar[str] = "two-words"
    device_words: ClassVar[bool] = True
    steps_serve: ClassVar[bool] = True
    lossy: ClassVar[bool] = False
    rounds: ClassVar[bool] = False
    rounding: str = "none"

    def weight(self, item_bytes: int) -> int:
        """Return 2: two words a coordinate."""
        del item_bytes
        return 2

    def block_words(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return twice the length."""
        return 2 * lengths

    def repeats(self, ctx: Context) -> bool:
        """Return True."""
        del ctx
        return True

    def flows(self, ctx: Context) -> bool:
        """Return True."""
        del ctx
        return True

    def steps(self, x: Operand, state: Sequence[State | None], ctx: Context) -> Steps:
        """Agree on exponents, then sum pairs of words."""
        del state
        scales = yield Agree(x.blocks, x.maxima)
        assert scales is not None
        yield Sum(
            x.blocks,
            x.size,
            lambda lo, hi, out: x.encode_exact(lo, hi, out, scales, ctx),
            lambda lo, hi, words: x.decode_exact(lo, hi, words, scales, ctx),
            lambda lo, hi: ((0, x.size(lo, hi), 32),),
        )


class Integers(Codec):
    """Integers, summed exactly in lanes as narrow as their agreed range needs; booleans as a logical or.

    Ranges travel as bit lengths B, one word a tensor and piece. Lanes of w bits serve where n 2^B <= 2^(w-1);
    wider values go as 16-bit digits, each in a 32-bit word of its own, for up to 32,768 ranks.
    """

    id: ClassVar[str] = "integers"
    device_words: ClassVar[bool] = True
    lossy: ClassVar[bool] = False
    rounds: ClassVar[bool] = False
    rounding: str = "none"

    def weight(self, item_bytes: int) -> int:
        """Return the most words that a coordinate may need: one per 16 bits and one more for the sign."""
        return item_bytes // 2 + 1

    def require_size(self, size: int, item_bytes: int) -> None:
        """Refuse more ranks than any value of the dtype can be summed over: known before the agreement."""
        try:
            integer_format(8 * item_bytes, size)
        except ValueError as error:
            raise NegotiationError(str(error)) from None

    def block_words(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the length; the true count follows from the agreed ranges."""
        return lengths

    def steps(self, x: Operand, state: Sequence[State | None], ctx: Context) -> Steps:
        """Agree on ranges, choose formats, then sum."""
        del state
        ranges = yield Agree(x.count, x.ranges)
        assert ranges is not None
        lanes = x.set_formats([integer_format(int(bits), ctx.size) for bits in ranges])
        yield Sum(
            x.blocks,
            x.size,
            x.encode_integers,
            lambda lo, hi, words: x.decode_integers(lo, hi, words, ctx),
            lambda _lo, _hi: lanes,  # all blocks travel together
        )
