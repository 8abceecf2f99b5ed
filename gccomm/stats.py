"""What a call did: bytes, times, and an estimate of its error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from gccomm.operand import Operand, Sample

__all__ = ["Stats"]


@dataclass
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

    def __post_init__(self) -> None:
        # No fields: they are what the estimate is made of, and no figures.
        self._taken: list[tuple[Operand, list[Sample], float]] = []
        self._measured: tuple[np.longdouble, np.longdouble] | None = None

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
        if self._measured is None:
            self._measured = self._sum_up()
        noise, energy = self._measured
        signal = energy - noise
        return float(noise / signal) if signal > 0 else float("nan")

    def measure(self, operands: Sequence[Operand], size: int) -> None:
        """Take in the energies that decodes left in ``operands``; they are added up when asked for."""
        for x in operands:
            variance = x.codec.noise(size)
            if variance is not None and x.samples:
                self._taken.append((x, list(x.samples), variance))

    def _sum_up(self) -> tuple[np.longdouble, np.longdouble]:
        noise, energy = np.longdouble(0), np.longdouble(0)
        for x, samples, variance in self._taken:
            squares, steps = x.measured(samples)
            noise += variance * (x.codec.carried(x.lengths) * steps * (squares > 0)).sum()
            energy += (squares * steps).sum()
        self._taken.clear()
        return noise, energy
