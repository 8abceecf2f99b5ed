"""What reductions go over: a communicator of MPI, with the memory and the waits of those on their way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gccomm_mpi.failure import abandon

__all__ = ["Flight", "Link", "Moves", "Test"]

Array: TypeAlias = npt.NDArray[Any]
Test: TypeAlias = Callable[[], Any]
# What an algorithm is: it yields the test of what it waits for, and is resumed when that has come true.
Moves: TypeAlias = Iterator[Test]

Bytes: TypeAlias = npt.NDArray[np.uint8]

FIRST_TAG, TAGS = 16, 1 << 12  # every reduction has one of its own, in turns
KEPT = 8  # arrays of memory between two reductions


class Link:
    """A communicator that reductions go over, several at a time.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks.
    segment_bytes : int
        Most bytes of a message.
    name : str
        What is added to the kinds of its reductions, whose trials are its own.
    """

    def __init__(self, comm: Any, segment_bytes: int, name: str = "") -> None:
        self.comm, self.segment_bytes, self.name = comm, segment_bytes, name
        self._tags = 0
        self._free: list[Bytes] = []

    def next_tag(self) -> int:
        """Return the tag of a reduction: the same on all ranks, since all begin the same ones in order."""
        self._tags = (self._tags + 1) % TAGS
        return FIRST_TAG + self._tags

    @contextmanager
    def memory(self, dtype: np.dtype[Any], length: int, *held: Any) -> Iterator[Array]:
        """Give memory that is kept from call to call, so that a steady loop touches no fresh page.

        A reduction that ends by an exception leaves it, and what else is ``held``, to MPI for good.
        """
        nbytes = length * dtype.itemsize
        room = self.take(nbytes)
        try:
            yield room[:nbytes].view(dtype)
        except BaseException:
            abandon((room, held))
            raise
        self.give_back(room)

    def take(self, nbytes: int) -> Bytes:
        """Return at least so many bytes of such memory."""
        free = self._free
        if free and free[0].size == nbytes:  # that of the last reduction, as a rule
            return free.pop(0)
        fits = [array for array in free if array.size >= nbytes]
        room = min(fits, key=len) if fits else np.empty(nbytes, np.uint8)
        self._free = [array for array in free if array is not room]
        return room

    def give_back(self, room: Bytes) -> None:
        """Keep memory for the next reduction."""
        self._free = [room, *self._free][:KEPT]


class Flight:
    """A reduction on its way.

    Parameters
    ----------
    name : str
        The operation, for reports.
    moves : iterator of callables
        The algorithm.
    buffers : object
        What MPI may read and write meanwhile.
    """

    def __init__(self, name: str, moves: Moves, buffers: Any) -> None:
        self.name, self.buffers = name, buffers
        self._moves = moves
        self._test: Test | None = None
        self._going = self.landed = False

    def go_on(self) -> bool:
        """Go as far as is possible without waiting; return whether it is complete.

        What it does on its way, such as a codec's encoding, may wait and let reductions go on, this one too:
        then it is left as it is.
        """
        if self._going:
            return False
        self._going = True
        try:
            while not self.landed:
                if self._test is not None and not self._test():
                    return False
                self._test = next(self._moves, None)
                self.landed = self._test is None
        finally:
            self._going = False
        return True
