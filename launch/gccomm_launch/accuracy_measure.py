"""Errors of codecs on families of inputs, over virtual ranks in lockstep."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gccomm import NegotiationError, get_codec, trees
from gccomm.lanes import lanes
from gccomm.layout import BLOCK, Geometry
from gccomm.stats import Stats
from gccomm.testing import simulate_steps
from gccomm_launch.accuracy_families import Family

__all__ = ["EXACT_BELOW", "Row", "Settings", "measure", "vnmse"]

EXACT_BELOW = 1024  # coordinates; smaller arrays travel exactly, as in every call


@dataclass(frozen=True)
class Settings:
    """How long to measure, and on what.

    Attributes
    ----------
    steps, warmup : int
        Steps to run, and how many of them come before the measured ones.
    seed : int
        Of inputs and rounding.
    coordinates : int
        Of a rank's input; recordings have their own.
    """

    steps: int = 6
    warmup: int = 2
    seed: int = 0
    coordinates: int = 1 << 18


@dataclass(frozen=True)
class Row:
    """One codec on one family and number of ranks; figures are means over the measured steps.

    Attributes
    ----------
    family, n, codec : str, int, str
        Inputs, ranks, and the codec's id with options.
    config : dict
        All options of the codec.
    refused : str
        Why the codec cannot serve so many ranks, else empty; figures are None then.
    vnmse : float or None
        ||result - sum||^2 / ||sum||^2, of the worst rank; None where it is not finite.
    vnmse_steps : list of float or None
        The same for each measured step.
    vnmse_estimate : float or None
        What the codec itself knows of it (`Stats.vnmse_estimate`), in the steps where it does.
    vnmse_estimate_steps : list of float or None
        The same for each measured step; None where nothing was measured, as in steps that clamped.
    ranks_equal : bool or None
        All ranks have had the same bits.
    wire_bits : float or None
        Payload that a rank hands to the back end, agreement included, a coordinate.
    lane_bits : float or None
        What a coordinate's lane costs: 32 / lanes in a word; None for codecs without `wire_bits`.
    spans : int
        Of one step's input, of 64 blocks at most.
    spans_redone, clamps : float or None
        Of one step.
    seconds : float
        Time of all steps, for all ranks together.
    """

    family: str
    n: int
    codec: str
    config: dict[str, Any]
    refused: str
    vnmse: float | None
    vnmse_steps: list[float | None]
    vnmse_estimate: float | None
    vnmse_estimate_steps: list[float | None]
    ranks_equal: bool | None
    wire_bits: float | None
    lane_bits: float | None
    spans: int
    spans_redone: float | None
    clamps: float | None
    seconds: float


def measure(
    name: str,
    family: Family,
    n: int,
    codecs: Sequence[str],
    settings: Settings,
    progress: Callable[[str], None] = lambda _text: None,
) -> list[Row]:
    """Measure all codecs on the same inputs.

    State is kept from step to step, error feedback is off, and the rounding noise differs from step to step.

    Parameters
    ----------
    name, family : str, Family
        Inputs.
    n : int
        Virtual ranks.
    codecs : sequence of str
        Ids with options.
    settings : Settings
        Steps, seed, coordinates.
    progress : callable
        Called with a text after each step of each codec.

    Returns
    -------
    list of Row
        In the order of ``codecs``.
    """
    cases = [_Case(codec, settings) for codec in codecs]
    for step in range(settings.steps):
        inputs = [_matrix(x) for x in family(n, step, settings.seed, settings.coordinates)]
        truth = _exact_sum(inputs)
        for case in cases:
            case.advance(inputs, truth, step >= settings.warmup)
            progress(f"{name}, {n} ranks, step {step + 1} of {settings.steps}, {case.codec}")
    return [case.row(name, n, inputs[0]) for case in cases]


def vnmse(result: Any, truth: Sequence[npt.NDArray[np.float64]]) -> float:
    """Return ||result - truth||^2 / ||truth||^2 over all arrays of a tree; NaN where the truth is zero."""
    error = energy = 0.0
    for array, exact in zip(_leaves(result), truth, strict=True):
        difference = (array - exact).ravel()  # float64
        error += float(difference @ difference)
        energy += float(exact.ravel() @ exact.ravel())
    return error / energy if energy > 0 else float("nan")


class _Case:
    """One codec from step to step."""

    def __init__(self, codec: str, settings: Settings) -> None:
        self.codec, self._settings = codec, settings
        self._inputs: Sequence[Any] = ()
        self._steps: Iterator[tuple[int, Sequence[Any], list[Any], list[Stats]]] | None = None
        self._refused = ""
        self._errors: list[float] = []
        self._stats: list[Stats] = []
        self._equal = True
        self._seconds = 0.0

    def advance(self, inputs: Sequence[Any], truth: Sequence[npt.NDArray[np.float64]], counts: bool) -> None:
        """Run one step, unless the codec has refused."""
        if self._refused:
            return
        self._inputs = inputs
        start = time.perf_counter()
        try:
            ys, stats = self._next()
        except NegotiationError as error:
            self._refused = str(error)
            return
        finally:
            self._seconds += time.perf_counter() - start
            self._inputs = ()
        if counts:
            distinct = _distinct(ys)
            self._equal &= len(distinct) == 1
            self._errors.append(float(np.max([vnmse(y, truth) for y in distinct])))  # NaN if any is
            self._stats.append(stats[0])

    def _next(self) -> tuple[list[Any], list[Stats]]:
        if self._steps is None:
            self._steps = simulate_steps(
                lambda _step: self._inputs,
                self.codec,
                seed=self._settings.seed,
                steps=self._settings.steps,
                exact_below=EXACT_BELOW,
                error_feedback=False,
            )
        _, _, ys, stats = next(self._steps)
        return ys, stats

    def row(self, family: str, n: int, one: Any) -> Row:
        """Return what was found; ``one`` is an input of one rank."""
        codec = get_codec(self.codec)
        width = getattr(codec, "wire_bits", None)
        shapes = [leaf.shape for leaf in _leaves(one)]
        known = not self._refused
        coordinates = sum(leaf.size for leaf in _leaves(one))
        # A step that clamps shows the estimate of the one before.
        estimates = [None if s.clamps else _finite(s.vnmse_estimate) for s in self._stats]
        bits = _mean((s.wire_bytes - s.measure_bytes) * 8 / coordinates for s in self._stats)
        return Row(
            family,
            n,
            self.codec,
            codec.config(),
            self._refused,
            _mean(self._errors),
            [_finite(error) for error in self._errors],
            _mean(x for x in estimates if x is not None),
            estimates,
            self._equal if known else None,
            bits,
            32 / lanes(width) if isinstance(width, int) else None,
            sum(Geometry.of(shape).spans for shape in shapes if np.prod(shape) >= EXACT_BELOW),
            _mean(s.spans_redone for s in self._stats),
            _mean(s.clamps for s in self._stats),
            self._seconds,
        )


def _matrix(x: Any) -> Any:
    """Return a flat array as rows of a block each, whose bits are the same for all but low-rank codecs."""
    flat = isinstance(x, np.ndarray) and x.ndim == 1 and x.size % BLOCK == 0
    return x.reshape(-1, BLOCK) if flat else x


def _leaves(tree: Any) -> list[npt.NDArray[Any]]:
    return list(trees.flatten(tree)[1])


def _exact_sum(inputs: Sequence[Any]) -> list[npt.NDArray[np.float64]]:
    """Return the sum over ranks of each leaf, in float64."""
    sums = [leaf.astype(np.float64) for leaf in _leaves(inputs[0])]
    for one in inputs[1:]:
        for total, leaf in zip(sums, _leaves(one), strict=True):
            np.add(total, leaf, out=total)
    return sums


def _distinct(ys: Sequence[Any]) -> list[Any]:
    """Return the first result and those whose bits differ from it."""
    first = [leaf.tobytes() for leaf in _leaves(ys[0])]
    return [ys[0], *(y for y in ys[1:] if [leaf.tobytes() for leaf in _leaves(y)] != first)]


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _mean(values: Any) -> float | None:
    """Return the mean, None where there are no values or it is not finite."""
    found = list(values)
    return _finite(float(np.mean(found))) if found else None
