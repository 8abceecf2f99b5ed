"""What a call did: bytes, times, and an estimate of its error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from gccomm.operand import Operand

__all__ = ["Stats"]


@dataclass(slots=True)
class Stats:
    """Figures of one call on one rank.

    Attributes
    ----------
    wire_bytes : int
        Payload that this rank handed to the back end, agreement included.
    float32_bytes : int
        What the same coordinates take as float32.
    messages : int
        Collectives that the call made.
    encode_s, wire_s, decode_s : float
        Seconds in each.
    codecs : dict of str to int
        Coordinates that each codec carried, by its id; "two-words" and "integers" are the exact carriers.
    spans_redone, clamps : int
        Spans sent again and coordinates clamped by a predicted scale; 0 for codecs that do neither.
    """

    wire_bytes: int = 0
    float32_bytes: int = 0
    messages: int = 0
    encode_s: float = 0.0
    wire_s: float = 0.0
    decode_s: float = 0.0
    codecs: dict[str, int] = field(default_factory=dict)
    spans_redone: int = 0
    clamps: int = 0
    _noise: np.longdouble = field(default=np.longdouble(0), repr=False)
    _energy: np.longdouble = field(default=np.longdouble(0), repr=False)

    @property
    def ratio(self) -> float:
        """float32 bytes over wire bytes."""
        return self.float32_bytes / self.wire_bytes if self.wire_bytes else 1.0

    @property
    def vnmse_estimate(self) -> float:
        """Estimated ||error||^2 / ||sum||^2 over the coordinates that a quantised codec carried; NaN where
        nothing was measured.

        The numerator is known noise (a codec's variance in step^2), the denominator the energy of the decoded
        sum less that noise.
        """
        signal = self._energy - self._noise
        return float(self._noise / signal) if signal > 0 else float("nan")

    def measure(self, operands: Sequence[Operand], size: int) -> None:
        """Take in the energies that decode left in ``operands``."""
        for x in operands:
            variance = x.codec.noise(size)
            if variance is None or x.energy is None or x.steps is None:
                continue
            self._noise += variance * (x.codec.carried(x.lengths) * x.steps).sum()
            self._energy += (x.energy * x.steps).sum()
