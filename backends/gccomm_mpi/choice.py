"""Which algorithm reduces arrays of a size: measured in the first calls, and agreed upon by all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
from mpi4py import MPI

__all__ = ["Chooser"]

# Calls of each algorithm in a row, of which the first ones do not count: connections that were idle, or
# carried another pattern, take a while to come up to speed.
ROUNDS, WARM_UP = 5, 2


@dataclass
class _Trial:
    """The measurements of one class of sizes."""

    calls: int = 0
    seconds: dict[str, float] = field(default_factory=dict)  # the least of each
    chosen: str | None = None


class Chooser:
    """Tries the algorithms on the calls as they come, one after the other, then keeps to the fastest.

    A size class is a power of two of bytes. Trials go in step on all ranks, since all make the same calls; an
    algorithm counts by its slowest rank's best time. Sums of words do not depend on what is chosen.

    Parameters
    ----------
    algorithms : mapping of str to callable
        ``run(channel, name, send, recv, operator)`` by name.
    fixed : str, optional
        The one to use.
    """

    def __init__(self, algorithms: Mapping[str, Callable[..., None]], fixed: str | None = None) -> None:
        self.algorithms = algorithms
        self.trials: dict[int, _Trial] = {}
        self.fixed = fixed

    def run(self, channel: Any, name: str, send: Any, recv: Any, operator: Any) -> None:
        """Reduce by the algorithm that is best, or on trial."""
        trial = self.trials.setdefault(int(recv.nbytes).bit_length(), _Trial())
        chosen = self.fixed or trial.chosen
        if chosen is not None:
            self.algorithms[chosen](channel, name, send, recv, operator)
            return
        names = list(self.algorithms)
        tried, warm = names[trial.calls // ROUNDS], trial.calls % ROUNDS >= WARM_UP
        trial.calls += 1
        start = perf_counter()
        self.algorithms[tried](channel, name, send, recv, operator)
        if warm:
            trial.seconds[tried] = min(perf_counter() - start, trial.seconds.get(tried, float("inf")))
        if trial.calls == ROUNDS * len(names):
            slowest = np.array([trial.seconds[x] for x in names])
            channel.complete(channel.comm.Iallreduce(MPI.IN_PLACE, slowest, MPI.MAX), name)
            trial.chosen = names[int(slowest.argmin())]
            trial.seconds = dict(zip(names, slowest.tolist(), strict=True))
