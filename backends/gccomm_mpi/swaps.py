"""Calls on one small array over links in a single round: ranks swap headers and whole arrays.

Latency is what these cost. What would take a message to agree and another one to sum takes one: every rank
gets all arrays, encodes them as each of the others would have done, and adds up. The bits are those of the
two messages. The headers come first, as in every first message (`gccomm_mpi.small`), so that ranks in other
calls all see that calls differ, and none sums what it got.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from gccomm import kernels
from gccomm.errors import BackendError
from gccomm.kernels import CALL
from gccomm.lanes import rank_shift
from gccomm_mpi.round import FEW, Round

__all__ = ["Swaps", "swap_bytes"]

MOST_BYTES = 16 << 10  # of all ranks' arrays
LONGEST_BYTES = 8 << 10  # of one
_DONE = 1  # what `swap_finish` returns where all ranks have made the call

Array = npt.NDArray[Any]


def swap_bytes(size: int) -> int:
    """Return how large an array may be that so many ranks swap; 0: they do not."""
    return min(LONGEST_BYTES, MOST_BYTES // size // 8 * 8) if 1 < size <= FEW else 0


class Swaps:
    """Whole calls on arrays of at most :func:`swap_bytes`.

    Parameters
    ----------
    messages : Round
        By which they go.
    rank, size : int
        This rank and the number of ranks.
    """

    def __init__(self, messages: Round, rank: int, size: int) -> None:
        self._round, self._most = messages, swap_bytes(size)
        self._shifts = np.array([rank_shift(r, size) for r in range(size)], np.uint32)
        self._mine = kernels.address(messages.mine)
        self._rest = messages.table, kernels.address(self._shifts), size, rank

    def call(self, name: str, job: Array) -> tuple[bool, float, float]:
        """Make a call, as a :data:`gccomm.kernels.CALL` record says.

        Returns
        -------
        same : bool
            Whether all ranks make this call; if not, nothing was summed.
        encode_s, decode_s : float
            Seconds until this rank's message was written, and from when all had come.
        """
        start, at = perf_counter(), kernels.address(job)
        part, nbytes = kernels.swap_bytes(at)
        if part > self._most:
            raise BackendError(
                f"an array of {part} bytes is too large to be swapped, at most {self._most} are"
            )
        kernels.swap_pack(at, self._mine)
        encode_s = perf_counter() - start
        self._round.run(name, nbytes)
        start = perf_counter()
        answer = kernels.swap_finish(at, *self._rest)
        return answer == _DONE, encode_s, perf_counter() - start

    def lanes(self, name: str, job: Array) -> tuple[float, float]:
        """Agree on the scales of one tensor and sum its lanes, as a :data:`gccomm.kernels.LANES` record says:
        a call without a header, on which ranks have agreed before. Returns the same seconds.
        """
        call = np.zeros(1, CALL)
        call["lanes"], call["table"], call["blocks"] = kernels.address(job), job["table"], job["blocks"]
        call["item"] = 1
        _, encode_s, decode_s = self.call(name, call)
        return encode_s, decode_s
