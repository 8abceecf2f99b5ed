"""Reductions over several hosts: within each host through shared memory, between hosts by one rank of each.

So every byte crosses a host's link once each way, however many ranks the host has. Words come out the same
as without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from gccomm_mpi.operators import Operator

if TYPE_CHECKING:
    from gccomm_mpi.window import Window

__all__ = ["Hierarchy", "Leaders"]

Array = npt.NDArray[Any]
Reduce = Callable[[Any, str, Array, Array, Operator], None]


class Leaders:
    """The first ranks of all hosts, with the waits and the memory of the channel that they belong to."""

    def __init__(self, comm: Any, channel: Any) -> None:
        self.comm = comm
        self.complete = channel.complete
        self.scratch = channel.scratch
        self.segment_bytes = channel.segment_bytes


class Hierarchy:
    """One host's part in reductions over all hosts.

    Parameters
    ----------
    window : Window or None
        Of this host's ranks; None where there is only one.
    leaders : Leaders or None
        On a host's first rank.
    chunk_bytes : int
        What is reduced at once: equal on all ranks, at most a slot of any window.
    """

    def __init__(self, window: Window | None, leaders: Leaders | None, chunk_bytes: int) -> None:
        self.window, self.leaders, self._chunk = window, leaders, chunk_bytes

    def reduce(self, name: str, send: Array, recv: Array, operator: Operator, between: Reduce) -> None:
        """Reduce `send` over all ranks into `recv`; `between` does so over the leaders."""
        in_place = send is recv
        send, recv = send.reshape(-1), recv.reshape(-1)
        step = self._chunk // recv.itemsize
        for low in range(0, recv.size, step):
            target = recv[low : low + step]
            source = target if in_place else send[low : low + step]  # MPI must see that they are one
            self._chunk_of(name, source, target, operator, between)

    def _chunk_of(self, name: str, send: Array, recv: Array, operator: Operator, between: Reduce) -> None:
        part = send
        if self.window is not None:
            self.window.collect(name, send, recv, operator.kind)
            part = recv
        if self.leaders is not None:
            between(self.leaders, name, part, recv, operator)
        if self.window is not None:
            self.window.spread(name, recv)
