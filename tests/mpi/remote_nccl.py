"""The stand-in for NCCL whose ranks are processes: what they bring travels by MPI."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.fake_gpu import Action, Machine, Stream
from tests.fake_nccl import Asked, Comm, FakeNccl, Group, Operation

__all__ = ["RemoteNccl"]

WHAT = ("all", "one", "scatter", "gather")


class RemoteOperation(Operation):
    """One rank's part of an operation; its stream goes on when all have brought theirs."""

    def __init__(self, comm: RemoteComm, stream: Stream, asked: Asked) -> None:
        Action.__init__(self, lambda: None)
        self.comm, self.stream, self.asked = comm, stream, asked
        self._moves = self._exchange(comm.link)
        self._request: Any = SimpleNamespace(Test=lambda: True)

    def run(self) -> bool:
        if self.comm.aborted and not self.done:
            self._array(self.asked.recv).view(np.uint8)[...] = 0x5A
            self.done = True
        while not self.done:
            if not self._request.Test():
                return False
            self._request = next(self._moves, None)
        return True

    def _exchange(self, link: Any) -> Iterator[Any]:
        asked = self.asked
        mine = np.array([asked.count, asked.dtype, asked.operator, asked.root, WHAT.index(asked.what)])
        facts = np.empty((link.size, mine.size), mine.dtype)
        yield link.Iallgather(mine, facts)
        if (facts != facts[0]).any():  # never done, as NCCL would hang
            yield SimpleNamespace(Test=lambda: False)
        brought = self.sent()
        parts = np.empty((link.size, brought.nbytes), np.uint8)
        yield link.Iallgather(brought.view(np.uint8), parts)
        self.take([part.view(brought.dtype) for part in parts])
        yield SimpleNamespace(Test=lambda: True)


class RemoteComm(Comm):
    """One rank of a communicator; ``link`` is MPI's of the same ranks."""

    operation = RemoteOperation

    def __init__(self, nccl: FakeNccl, link: Any, device: int) -> None:
        super().__init__(nccl, Group(nccl.machine, link.size), link.rank, device)
        self.link = link


class RemoteNccl(FakeNccl):
    """The library in one process of ``world``, all of which join at a time, in one group or several."""

    def __init__(self, machine: Machine, world: Any) -> None:
        super().__init__(machine)
        machine.nap_s = 0.0005
        self._world = world.Dup()

    def unique_id(self) -> bytes:
        return os.urandom(128)

    def join(self, size: int, rank: int, unique_id: bytes) -> Comm:
        ids = self._world.allgather(unique_id)
        link = self._world.Split(sorted(set(ids)).index(unique_id), rank)
        assert (link.size, link.rank) == (size, rank)
        made = RemoteComm(self, link, self.machine.device())
        self.comms.append(made)
        return made

    def close(self) -> None:
        """Free MPI's communicators; collective."""
        for comm in self.comms:
            assert isinstance(comm, RemoteComm)
            comm.link.Free()
        self._world.Free()
