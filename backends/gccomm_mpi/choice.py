"""Which algorithm reduces arrays of a size: measured in the first calls, and agreed upon by all ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

__all__ = ["LONG", "Chooser"]

# Laps of the algorithms, and calls of each in a row, of which the first does not count: connections that were
# idle, or carried another pattern, take a while to come up to speed. In laps, since machines and networks
# have better moments and worse ones, of which no algorithm shall have the better ones alone.
LAPS, ROW = 3, 2
ROUNDS = LAPS * ROW  # of each
ALIKE = 16  # messages that are timed differ by less than one part in so many
MISSES = 64  # of other sizes, one after the other: then these are tried

# What part of the first one's time in a trial another one may take, to be chosen: of messages that go one at
# a time, as they do in trials; and of those in a stream, where what a ring waits for at its start and end
# hides behind others, and it keeps all links in step: it is the fastest there, if not by itself. The first
# one itself in longer segments costs less arithmetic and more waiting, in either.
CLEARLY, STREAM_CLEARLY, LONG_CLEARLY = 0.85, 0.7, 0.97
LONG = "long-"  # how the name of an algorithm in longer segments begins
STREAM = "large sums in a stream"  # the kind of those

SLOW_LINK = 400e6  # bytes a second: below, what a piece costs besides is little
LEAST_TIMED = 256 << 10  # bytes of messages that tell of the link; of less, latency is a large part


@dataclass
class _Trial:
    """The measurements of one class of sizes, on messages of about one size."""

    names: Sequence[str]
    nbytes: int
    calls: int = 0
    misses: int = 0
    seconds: dict[str, float] = field(default_factory=dict)  # the least of each
    chosen: str | None = None


class Chooser:
    """Tries the algorithms on the calls as they come, by turns, then keeps to the fastest.

    A size class is a power of two of bytes of one kind of reduction; it is tried on messages of about as many
    bytes as its first one has, while others go by the first algorithm; where such do not come any more, on
    others. Trials go in step on all ranks, since all make the same calls; an algorithm counts by its slowest
    rank's best time. The first one is kept to unless another is clearly faster; of several such, the fastest.
    Sums of words do not depend on what is chosen. ``GCCOMM_VERBOSE=1`` tells each choice.

    Parameters
    ----------
    fixed : str, optional
        The one to use wherever it can be.
    """

    def __init__(self, fixed: str | None = None) -> None:
        self.trials: dict[tuple[str, int], _Trial] = {}
        self.fixed = fixed
        self.pace = 0.0  # bytes a second, each way, of the best of the largest sums that were timed
        self._paced = 0  # bits of their size
        self._tells = os.environ.get("GCCOMM_VERBOSE", "0") not in ("", "0")

    def settled(self, kind: str, nbytes: int, names: Sequence[str]) -> str | None:
        """Return which of the named algorithms reduces so many bytes; None: :meth:`try_next` one."""
        if len(names) == 1:
            return names[0]
        if self.fixed in names:
            return self.fixed
        trial = self._trial(kind, nbytes, names)
        if trial.chosen is not None or abs(nbytes - trial.nbytes) * ALIKE <= trial.nbytes:
            trial.misses = 0
            return trial.chosen
        trial.misses += 1
        if trial.misses >= MISSES:
            self.trials[kind, nbytes.bit_length()] = _Trial(trial.names, nbytes)
        return names[0]

    def _trial(self, kind: str, nbytes: int, names: Sequence[str]) -> _Trial:
        key = kind, nbytes.bit_length()
        if key not in self.trials:
            self.trials[key] = _Trial(tuple(names), nbytes)
        return self.trials[key]

    def try_next(
        self, kind: str, nbytes: int, link: Any, land: Any, names: Sequence[str], moves: Callable[[str], Any]
    ) -> None:
        """Reduce by the algorithm that is on trial, and settle on one after the last trial.

        ``moves(name)`` begins an algorithm, ``land(moves)`` completes it.
        """
        trial = self._trial(kind, nbytes, names)
        name, warm = trial.names[trial.calls // ROW % len(trial.names)], trial.calls % ROW == ROW - 1
        trial.calls += 1
        start = perf_counter()
        land(moves(name))
        if warm:
            trial.seconds[name] = min(perf_counter() - start, trial.seconds.get(name, float("inf")))
        if trial.calls == ROUNDS * len(trial.names):
            slowest = np.array([trial.seconds[x] for x in trial.names])
            land(_maximum(link, slowest))
            if kind.startswith("large") and nbytes >= LEAST_TIMED:
                travels = 2 * (link.comm.size - 1) / link.comm.size * nbytes
                self._time(nbytes.bit_length(), travels / float(slowest.min()))
            slow = np.array([float(self.slow)])  # ranks may have timed sums on other links, too
            land(_maximum(link, slow))
            trial.chosen = self._fastest(trial.names, slowest, kind, slow=bool(slow[0]))
            trial.seconds = dict(zip(trial.names, slowest.tolist(), strict=True))
            if self._tells and link.comm.rank == 0:
                with suppress(OSError, ValueError, AttributeError):  # a closed stderr must not break the call
                    print(f"gccomm: {_line((kind, nbytes.bit_length()), trial)}", file=sys.stderr, flush=True)

    def _time(self, bits: int, pace: float) -> None:
        """Note how fast sums of a class of sizes were. Of smaller ones links may let more pass in a burst."""
        if bits >= self._paced:
            self.pace = pace if bits > self._paced else max(pace, self.pace)
            self._paced = bits

    @staticmethod
    def _fastest(names: Sequence[str], seconds: npt.NDArray[np.float64], kind: str, *, slow: bool) -> str:
        """Return the first algorithm, or the fastest of those that are clearly faster."""
        parts = np.array([_part(x, names[0], kind, slow=slow) for x in names])
        enough = seconds <= parts * seconds[0]
        own = np.array([x in (names[0], LONG + names[0]) for x in names])
        if kind.startswith(STREAM):  # in longer segments it is as much better off there
            enough &= own | (seconds <= parts * seconds[own & enough].min())
        return names[int(np.where(enough, seconds, np.inf).argmin())]

    @property
    def slow(self) -> bool:
        """Whether large sums were timed, and the largest say that links are slow."""
        return 0 < self.pace < SLOW_LINK

    def table(self) -> list[str]:
        """Return one line for each choice that was made."""
        return [_line(key, trial) for key, trial in self.trials.items() if trial.chosen is not None]


def _part(name: str, first: str, kind: str, *, slow: bool) -> float:
    """Return what part of the first algorithm's time another one may take, to be chosen."""
    if name == first:
        return 1.0
    if slow and name.startswith(LONG):
        return 0.0  # there is no arithmetic to save, and in a stream they wait for more than alone
    if name == LONG + first:
        return LONG_CLEARLY
    return STREAM_CLEARLY if kind.startswith(STREAM) else CLEARLY


def _line(key: tuple[str, int], trial: _Trial) -> str:
    kind, bits = key
    times = ", ".join(f"{name} {1e3 * seconds:.3f}" for name, seconds in trial.seconds.items())
    return f"{kind} of {1 << bits - 1} to {(1 << bits) - 1} bytes: {trial.chosen} (ms: {times})"


def _maximum(link: Any, values: Any) -> Any:
    request = link.comm.Iallreduce(MPI.IN_PLACE, values, MPI.MAX)
    yield request.Test
