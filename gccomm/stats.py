"""What a call did: bytes, times, and an estimate of its error."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import numpy as np

from gccomm.sketch import Estimate

if TYPE_CHECKING:
    from gccomm.operand import Operand, Sample
    from gccomm.sketch import Sketch

__all__ = ["Stats"]


class Measured:
    """What was measured in one step; added up when asked for."""

    def __init__(self) -> None:
        self._taken: list[tuple[Operand, list[Sample], Sketch]] = []
        self._vnmse: float | None = None

    def __bool__(self) -> bool:
        return bool(self._taken) or self._vnmse is not None

    def take(self, x: Operand) -> None:
        """Take in what an operand's encoding and decoding left behind."""
        blind = x.clamps > 0 or x.lost  # to which the sketch is
        if x.sketch is not None and x.samples and not blind:
            self._taken.append((x, list(x.samples), x.sketch))

    def add(self, other: Measured) -> None:
        """Take in what was measured in another part of the step."""
        self._taken += other._taken

    def vnmse(self) -> float:
        """Return ||error||^2 / ||sum||^2, NaN where nothing is known."""
        if self._vnmse is None:
            zero = Estimate(np.longdouble(0), np.longdouble(0))
            noise, signal, energy = zero, zero, zero
            for x, samples, sketch in self._taken:
                noise, signal = noise.plus(sketch.noise()), signal.plus(sketch.signal())
                energy = energy.plus(x.measured_energy(samples))
            self._taken.clear()
            rest = Estimate(energy.value - noise.value, energy.variance + noise.variance)
            self._vnmse = _over(noise.value, signal, rest)
        return self._vnmse


def _over(noise: np.longdouble, one: Estimate, other: Estimate) -> float:
    """Return noise over what two estimates say of the sum's energy, each by how certain it is."""
    both = one.variance + other.variance
    signal = one.value if both == 0 else (one.value * other.variance + other.value * one.variance) / both
    return float(noise / signal) if signal > 0 else float("nan")


@dataclass
class Stats:
    """Figures of one call on one rank.

    Attributes
    ----------
    wire_bytes : int
        Payload that this rank handed to the back end, agreement included.
    measure_bytes : int
        Of these, what measures the error.
    float32_bytes : int
        What the same coordinates take as float32.
    messages : int
        Collectives that the call made.
    encode_s, wire_s, decode_s : float
        Seconds in each; of blocks that are encoded and decoded in turns, half of them in either.
    host_bytes : int
        Floats that this rank gave to the sums of its host, where hosts add up before they compress.
    codecs : dict of str to int
        Coordinates that each codec carried, by its id; "two-words" and "integers" are the exact carriers.
    spans_redone, clamps : int
        Spans sent again and coordinates clamped by a predicted scale; 0 for codecs that do neither.
    """

    wire_bytes: int = 0
    measure_bytes: int = 0
    float32_bytes: int = 0
    messages: int = 0
    encode_s: float = 0.0
    wire_s: float = 0.0
    decode_s: float = 0.0
    host_bytes: int = 0
    codecs: dict[str, int] = field(default_factory=dict)
    spans_redone: int = 0
    clamps: int = 0

    def __post_init__(self) -> None:
        self.error = Measured()  # no field: no figure, but what an estimate is made of

    def add(self, other: Stats) -> None:
        """Add the figures of another part of the step."""
        for figure in fields(self):
            if figure.name != "codecs":
                setattr(self, figure.name, getattr(self, figure.name) + getattr(other, figure.name))
        for codec, coordinates in other.codecs.items():
            self.codecs[codec] = self.codecs.get(codec, 0) + coordinates
        self.error.add(other.error)

    @property
    def ratio(self) -> float:
        """float32 bytes over wire bytes."""
        return self.float32_bytes / self.wire_bytes if self.wire_bytes else 1.0

    @property
    def vnmse_estimate(self) -> float:
        """Estimated ||error||^2 / ||sum||^2 of what lane codecs carried; NaN where nothing was measured.

        Measured in a part of the data: the error by random projections of all ranks' rounding errors, see
        :mod:`gccomm.sketch`; the sum by the energy of what was decoded, less the error's. A Reducer measures
        in its first three steps and every sixteenth one; in others this is the last estimate.
        """
        return self.error.vnmse()
