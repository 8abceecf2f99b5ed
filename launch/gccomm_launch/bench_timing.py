"""Timing of collective calls, and their error."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from gccomm.layout import PIECE_COORDINATES

__all__ = ["StoppedError", "Stopper", "exact_sum", "interleaved", "settle", "vnmse"]

TRIALS = 36  # messages of a size until gccomm has settled on an algorithm; halves of pieces come after them
_CHUNK = 1 << 20  # coordinates at a time where float64 copies are made


class StoppedError(Exception):
    """A rank was interrupted; raised on all ranks at the same place."""


class Stopper:
    """A barrier that also asks whether any rank has been interrupted.

    Parameters
    ----------
    mpi : mpi4py.MPI.Intracomm
        The ranks.
    """

    def __init__(self, mpi: MPI.Intracomm) -> None:
        self._mpi = mpi
        self._mine = np.zeros(1, np.int32)
        self._any = np.zeros(1, np.int32)

    def barrier(self) -> None:
        """Wait for all ranks.

        Raises
        ------
        StoppedError
            Any of them has been interrupted.
        """
        self._mpi.Allreduce((self._mine, MPI.INT32_T), (self._any, MPI.INT32_T), MPI.MAX)
        if self._any[0]:
            raise StoppedError

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Turn SIGINT and SIGTERM of this process into a stop at the next barrier."""

        def note(number: int, frame: FrameType | None) -> None:
            del number, frame
            self._mine[0] = 1

        previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def settle(
    calls: Sequence[Callable[[], object]], coordinates: int, stopper: Stopper, mpi: MPI.Intracomm
) -> None:
    """Make gccomm's calls until its trials of algorithms are over, as in the first steps of a program.

    Does nothing on one host, whose ranks share memory and try nothing (where they do not, rounds before the
    measurement have to do).

    Parameters
    ----------
    calls : sequence of callables
        Each collective.
    coordinates : int
        Of the array that they reduce.
    stopper, mpi
        The ranks.
    """
    if len(set(mpi.allgather(MPI.Get_processor_name()))) == 1:
        return
    pieces = -(-coordinates // PIECE_COORDINATES)
    for _ in range(TRIALS // 2 + -(-TRIALS // pieces)):
        for call in calls:
            stopper.barrier()
            call()


def interleaved(
    calls: Sequence[Callable[[], object]],
    warmup: int,
    iters: int,
    stopper: Stopper,
    mpi: MPI.Intracomm,
    tick: Callable[[], object] = lambda: None,
) -> npt.NDArray[np.float64]:
    """Time collective calls, each once a round; a round has an order of its own, the same on all ranks.

    So noise of the machine hits all alike, and no call always follows the same one.

    Parameters
    ----------
    calls : sequence of callables
        Each collective. Results are dropped outside of the time.
    warmup, iters : int
        Rounds before and in the measurement.
    stopper, mpi
        The ranks.
    tick : callable
        Called after each round, outside of the time.

    Returns
    -------
    array, shape (iters, calls)
        Seconds of the slowest rank, from a barrier on.
    """
    seconds = np.zeros((warmup + iters, len(calls)))
    order = random.Random(0)
    for row in seconds:
        for k in order.sample(range(len(calls)), len(calls)):
            stopper.barrier()
            start = time.perf_counter()
            result = calls[k]()
            row[k] = time.perf_counter() - start
            del result
        tick()
    mpi.Allreduce(MPI.IN_PLACE, (seconds, MPI.DOUBLE), MPI.MAX)
    return seconds[warmup:]


def exact_sum(x: npt.NDArray[Any], mpi: MPI.Intracomm, op: str = "sum") -> npt.NDArray[np.float64]:
    """Return the sum or mean of the ranks' arrays, in float64."""
    total = x.astype(np.float64)
    for low in range(0, total.size, _CHUNK):
        mpi.Allreduce(MPI.IN_PLACE, (total[low : low + _CHUNK], MPI.DOUBLE), MPI.SUM)
    if op == "mean":
        total /= mpi.size
    return total


def vnmse(result: npt.NDArray[Any], exact: npt.NDArray[np.float64], mpi: MPI.Intracomm) -> float:
    """Return ||result - exact||^2 / ||exact||^2, the largest of the ranks'; NaN where `exact` is zero."""
    error = energy = 0.0
    for low in range(0, exact.size, _CHUNK):
        truth = exact[low : low + _CHUNK]
        difference = result[low : low + _CHUNK] - truth
        error += float(difference @ difference)
        energy += float(truth @ truth)
    mine = error / energy if energy > 0 else float("nan")
    worst: float = max(mpi.allgather(mine))
    return worst
