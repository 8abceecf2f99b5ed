"""What the codecs with shared block scales and shared dither have in common."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gccomm.checks import one_of
from gccomm.codecs.base import Codec, lane_width
from gccomm.codecs.widening import widening_limit
from gccomm.errors import NegotiationError
from gccomm.lanes import FIXED_POINT, lanes, safe_limit
from gccomm.operations import FOLD

__all__ = ["SharedDither"]

AGREED_LEVELS, PREDICTED_LEVELS = 1, 2.25  # for error feedback: predicted steps are about twice as wide


class SharedDither(Codec):
    """Base of the codecs that round to fractions of a lane's n-th part with shifts of one dither.

    Parameters
    ----------
    wire_bits : int
        Lane width.
    scales : str
        "agreed" or "predicted".
    widening : bool
        Send a rank's own integers in lanes just wide enough for them.
    """

    sketched = True

    def __init__(self, wire_bits: int, scales: str, widening: bool) -> None:
        self.wire_bits = lane_width(wire_bits)
        one_of("scales", scales, ("agreed", "predicted"))
        self.scales = scales
        if not isinstance(widening, bool):
            msg = f"`widening` must be a bool, got {widening!r} of type {type(widening).__name__}"
            raise TypeError(msg)
        self.widening = widening
        if widening:
            if scales == "predicted":
                msg = '`widening=True` is not predicted: choose scales="agreed"'
                raise ValueError(msg)
            self.operation, self.sums_as = FOLD, "own operation"
            self.sketched = False  # sketches travel behind sums alone

    def require_size(self, size: int, item_bytes: int) -> None:
        """Refuse more ranks than the lane has fixed-point room for."""
        del item_bytes
        try:
            self.limit(size)
        except ValueError as error:
            raise NegotiationError(str(error)) from None

    def require_feedback(self, size: int) -> None:
        """Refuse steps that are not smaller than the block's maximum: residuals would grow for ever."""
        levels = self.limit(size) / FIXED_POINT
        least = PREDICTED_LEVELS if self.scales == "predicted" else AGREED_LEVELS
        if levels <= least:
            msg = (
                f"error feedback in lanes of {self.wire_bits} bits on {size} ranks would diverge: a rank has "
                f"{levels:.2f} levels and needs more than {least:g}; use a larger wire_bits or "
                "error_feedback=False"
            )
            raise NegotiationError(msg)

    def limit(self, size: int) -> int:
        """Return the largest fixed-point value of a rank."""
        limit = safe_limit(self.wire_bits, size)
        return widening_limit(limit) if self.widening else limit

    def weight(self, item_bytes: int) -> float:
        """Return 1; with predicted scales 1/2: nothing is read twice, so larger pieces are better."""
        del item_bytes
        return 0.5 if self.scales == "predicted" else 1

    def block_words(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return ceil(carried / lanes)."""
        return -(-self.carried(lengths) // lanes(self.wire_bits))
