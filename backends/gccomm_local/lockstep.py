"""N virtual ranks that one thread drives in step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gccomm_local.reduction import Kind, combine

__all__ = ["LockstepGroup"]


class LockstepGroup:
    """The reductions of a group whose ranks all live in the calling thread; nothing ever waits.

    Parameters
    ----------
    size : int
        Number of virtual ranks, at least 1.
    """

    name = "lockstep"

    def __init__(self, size: int) -> None:
        if size < 1:
            message = f"`size` must be at least 1; got {size}"
            raise ValueError(message)
        self.size = size

    def combine(
        self,
        kind: Kind,
        buffers: Sequence[npt.NDArray[Any]],
        *,
        dtype: str | None = None,
        operation: str = "",
        seed: int = 0,
    ) -> None:
        """Reduce `buffers`, one per virtual rank, in place; see `gccomm_local.reduction.combine`.

        Raises
        ------
        ValueError
            There is not one buffer per rank, they differ in shape or type, or there is no such operation.
        """
        self._require_all(buffers)
        combine(kind, buffers, dtype=dtype, operation=operation, seed=seed)

    def broadcast(self, buffers: Sequence[npt.NDArray[Any]], root: int) -> None:
        """Overwrite every buffer with that of virtual rank `root`.

        Raises
        ------
        ValueError
            There is not one buffer per rank, or no such rank.
        """
        self._require_all(buffers)
        if not 0 <= root < self.size:
            message = f"`root` must be a rank from 0 to {self.size - 1}; got {root}"
            raise ValueError(message)
        for rank, buffer in enumerate(buffers):
            if rank != root:
                np.copyto(buffer, buffers[root])

    def _require_all(self, buffers: Sequence[npt.NDArray[Any]]) -> None:
        if len(buffers) != self.size:
            message = f"a group of {self.size} ranks needs {self.size} buffers; got {len(buffers)}"
            raise ValueError(message)
