"""``raw``, ``bf16`` and ``fp16``: sums in floating point, the baselines to beat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from gccomm.codecs.base import Codec, State
from gccomm.steps import Buffer, Context, FloatName, FloatSum, Steps

if TYPE_CHECKING:
    from gccomm.operand import Operand

__all__ = ["BFloat16", "Float16", "Raw"]


_HALVES = frozenset(("float16", "bfloat16"))


class _Floats(Codec):
    """Convert to a float type of the wire and let the back end sum it."""

    lossy: ClassVar[bool] = False
    rounding: str = "to nearest"
    device_words: ClassVar[bool] = True
    steps_serve: ClassVar[bool] = True

    def wire_dtype(self, x: Operand) -> FloatName:
        """Return the float type that ``x`` travels in."""
        raise TypeError(f"{type(self).__name__} names no wire dtype for {x!r}")

    def adds(self, dtype: str, *, mean: bool) -> bool:
        """Return whether it is the wire's own float type; of 16 bits for sums, as means are rounded once."""
        return dtype == self.sums_as and not (mean and dtype in _HALVES)

    def block_words(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the length: one float a coordinate."""
        return lengths

    def repeats(self, ctx: Context) -> bool:
        """Return True."""
        del ctx
        return True

    def flows(self, ctx: Context) -> bool:
        """Return True."""
        del ctx
        return True

    def steps(self, x: Operand, state: Sequence[State | None], ctx: Context) -> Steps:
        """Sum floats."""
        del state
        wire = self.wire_dtype(x)
        direct = None
        if x.direct is not None and self.adds(x.direct[0], mean=x.mean):
            direct = _as_sent(x.direct[1], wire), _as_sent(x.direct[2], wire)
        yield FloatSum(
            wire,
            x.blocks,
            x.words,
            lambda lo, hi, out: x.encode_floats(lo, hi, out, wire),
            lambda lo, hi, buffer: x.decode_floats(lo, hi, buffer, wire, ctx),
            direct,
            (lambda: _divide(direct[1], ctx.divisor)) if direct is not None and x.mean else None,
            plain=True,
        )


def _as_sent(array: Buffer, wire: str) -> Buffer:
    return array.view(np.uint16) if wire in _HALVES else array


def _divide(result: Buffer, size: int) -> None:
    np.divide(result, result.dtype.type(size), out=result)


class Raw(_Floats):
    """No compression: float32 (float64 for float64) summed by the back end, in pieces or chunks that stay in
    the caches.

    16-bit inputs are summed in float32, so that neither the sum overflows nor a mean underflows on the way.
    The order of the additions, and so the last bits, are the back end's.
    """

    id: ClassVar[str] = "raw"
    sums_as = "float32"
    rounds: ClassVar[bool] = False
    rounding: str = "none"

    def adds(self, dtype: str, *, mean: bool) -> bool:
        """Return True for float32 and float64."""
        del mean
        return dtype in ("float32", "float64")

    def weight(self, item_bytes: int) -> int:
        """Return the words of a coordinate: 2 for float64."""
        return max(1, item_bytes // 4)

    def wire_dtype(self, x: Operand) -> FloatName:
        """Return float64 for float64, else float32."""
        return "float64" if x.float64 else "float32"


class BFloat16(_Floats):
    """16 bits a coordinate with float32's range: rounded to nearest, each addition in float32 and rounded
    again.
    """

    id: ClassVar[str] = "bf16"
    sums_as = "bfloat16"

    def wire_dtype(self, x: Operand) -> FloatName:
        """Return bfloat16."""
        del x
        return "bfloat16"


class Float16(_Floats):
    """16 bits a coordinate with 11 bits of precision: magnitudes and sums beyond 65504 become inf, below 3e-8
    zero.
    """

    id: ClassVar[str] = "fp16"
    sums_as = "float16"

    def wire_dtype(self, x: Operand) -> FloatName:
        """Return float16."""
        del x
        return "float16"
