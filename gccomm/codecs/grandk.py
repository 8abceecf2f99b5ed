"""``grandk-mn`` and ``grandk-mn-ts``: coordinates drawn at random, the same on all ranks, then quantised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from gccomm import kernels
from gccomm.checks import integer
from gccomm.codecs.base import State
from gccomm.codecs.qsgd import QSGDMaxNorm, QSGDMultiScale
from gccomm.codecs.stochastic import lane_sum, restore, store_final
from gccomm.errors import NegotiationError
from gccomm.kernels.reference.hashing import coordinate_hash
from gccomm.noise import fmix
from gccomm.operand import Operand
from gccomm.steps import Context, Steps, Words

__all__ = ["GlobalRandK", "GlobalRandKMultiScale", "drawn"]

_SALT_0, _SALT_1 = 0x13198A2E, 0x03707344  # digits of pi: the draw shares no noise with the rounding
Array = npt.NDArray[Any]


def drawn(size: int, keep: int, key0: int, key1: int) -> npt.NDArray[np.int64]:
    """Return one coordinate out of each ``keep`` consecutive ones of ``size``, uniform, by a step key.

    The last stratum may be short: its coordinate is uniform in what there is.
    """
    count = -(-size // keep)
    k0, k1 = fmix(key0 ^ _SALT_0), fmix(key1 ^ _SALT_1)
    hashes = coordinate_hash(np, np.array([k0], np.uint32), np.array([k1], np.uint32), count)[0]
    lengths = np.full(count, keep, dtype=np.uint64)
    lengths[-1] = size - (count - 1) * keep
    offsets = (hashes.astype(np.uint64) * lengths >> np.uint64(32)).astype(np.int64)
    places: npt.NDArray[np.int64] = np.arange(count, dtype=np.int64) * keep + offsets
    return places


class GlobalRandK(QSGDMaxNorm):
    """Send one of ``keep`` coordinates, drawn anew in each step, as ``qsgd-mn`` sends them all.

    Ranks draw the same coordinates from the shared key, one out of each stratum of ``keep`` consecutive
    ones, so no indices travel. They are gathered, quantised against their own largest norm, summed in lanes
    and written back; the other coordinates of the result are zero.

    Parameters
    ----------
    keep : int
        Coordinates of which one is sent, 1 to 2^20. One costs 32 / floor(32 / w) / keep bits.
    scaled : bool
        False: the result is the projection on the drawn coordinates, biased, with error feedback by default,
        which sends what was left out later. True: times ``keep`` (times the length of a short last stratum),
        unbiased, with variance (keep - 1) |x|^2 besides that of the rounding; without error feedback.
    wire_bits : int
        As of ``qsgd-mn``.
    norm : str
        As of ``qsgd-mn``, but "max" unless asked for, as error feedback needs it.

    Notes
    -----
    S. Vineeth, "Unbiased single-scale and multi-scale quantizers for distributed optimization" (2021),
    GlobalRandK-MaxNorm: it draws K coordinates without strata and uses the L2 norm. Equal on all ranks:
    options, seed, keys, shapes, dtypes.
    """

    id: ClassVar[str] = "grandk-mn"

    def __init__(self, keep: int = 10, scaled: bool = False, wire_bits: int = 8, norm: str = "max") -> None:
        QSGDMaxNorm.__init__(self, wire_bits, norm)
        self._set_draw(keep, scaled)

    def _set_draw(self, keep: int, scaled: bool) -> None:
        self.keep = integer("keep", keep, "the number of coordinates of which one is sent", 1, 1 << 20)
        if not isinstance(scaled, bool):
            msg = f"`scaled` must be True or False, got {scaled!r}"
            raise TypeError(msg)
        self.scaled = scaled
        self.sketched = False  # what is summed is no part of the operand
        self.biased = not scaled and self.keep > 1
        self.rounding = "biased" if self.biased else "unbiased"

    def require_feedback(self, size: int) -> None:
        """Refuse residuals that would grow: of a scaled result, or as of ``qsgd-mn``."""
        if self.scaled and self.keep > 1:
            msg = (
                f"error feedback with {self.id} and scaled=True would diverge: a coordinate that is sent "
                f"leaves {self.keep - 1} times itself behind; use scaled=False or error_feedback=False"
            )
            raise NegotiationError(msg)
        super().require_feedback(size)

    def steps(self, x: Operand, state: Sequence[State | None], ctx: Context) -> Steps:
        """Gather, agree on norms, sum lanes, write back."""
        del state
        draw = _Draw(self, x, ctx)
        scales = yield from self.agreed_scales(draw.part, draw.lost)
        yield lane_sum(draw.part, scales, self.wire_bits, ctx)
        draw.write(scales)


class GlobalRandKMultiScale(GlobalRandK, QSGDMultiScale):
    """``grandk-mn`` with the scales of ``qsgd-mn-ts``, by block of 1024 drawn coordinates.

    Parameters
    ----------
    keep, scaled, wire_bits, norm
        As of ``grandk-mn``.
    fine, levels
        As of ``qsgd-mn-ts``.

    Notes
    -----
    S. Vineeth (2021), GlobalRandK with multiple scales.
    """

    id: ClassVar[str] = "grandk-mn-ts"

    def __init__(
        self,
        keep: int = 10,
        scaled: bool = False,
        wire_bits: int = 8,
        norm: str = "max",
        fine: int = 32,
        levels: int = 2,
    ) -> None:
        GlobalRandK.__init__(self, keep, scaled, wire_bits, norm)
        self._set_scales(fine, levels)


class _Draw:
    """The drawn coordinates of an operand's tensors, as an operand of their own (``part``)."""

    def __init__(self, codec: GlobalRandK, x: Operand, ctx: Context) -> None:
        self.codec, self.x = codec, x
        self.places, self.sizes = [], []
        gathered: list[Array] = []
        self.rest: list[Array] = []  # tensors with their residuals: the next residuals but for the drawn
        words = np.empty(x.blocks, dtype=np.uint32)
        x.maxima(words)
        self.lost = x.nonfinite_scales(np.maximum.reduceat(words, x.bounds[:-1]))
        for i, (key0, key1) in enumerate(x.keys.tolist()):
            values = x.load(i)
            place = drawn(len(values), codec.keep, key0, key1)
            self.places.append(place)
            self.sizes.append(len(values))
            gathered.append(values[place])
            if x.feedback:
                self.rest.append(values)
        self.results = [np.empty_like(one) for one in gathered]
        self.left = [np.empty_like(one) for one in gathered] if x.feedback else []
        self.part = Operand.of_arrays(codec, gathered, self.results, x.keys, mean=x.mean, rank=ctx.rank)
        if x.feedback:
            self.part.table["res_out"] = [kernels.address(one) for one in self.left]

    def write(self, scales: Words) -> None:
        """Write results and residuals; ``scales`` are those of the part's blocks."""
        lost = self.x.nonfinite_scales(scales[self.part.bounds[:-1]])
        for i, place in enumerate(self.places):
            full = np.zeros(self.sizes[i], dtype=self.results[i].dtype)
            if lost[i]:
                full[:] = np.nan
                restore(self.x, i)
            else:
                full[place] = self._scaled(i)
                if self.rest:
                    self.rest[i][place] = self.left[i]
                    self.x.keep(i, self.rest[i])
            store_final(self.x, i, full)

    def _scaled(self, i: int) -> Array:
        values = self.results[i]
        if self.codec.scaled:
            with np.errstate(over="ignore"):
                values[:-1] *= self.codec.keep
                values[-1] *= self.sizes[i] - (len(values) - 1) * self.codec.keep
        return values
