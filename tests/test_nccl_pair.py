"""NCCL beside another back end, which it joins after the first call on devices."""

from __future__ import annotations

import threading
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gccomm_nccl.pair import PairBackend

import gccomm
from gccomm import testing
from gccomm.communicator import Communicator
from tests.nccl_site import Beside, Marks, all_raise, beside, floats, same, site, warm

__all__ = ["beside", "site"]


def test_nccl_joins_after_the_first_call_on_devices(beside: Beside) -> None:
    tree = floats(0, 3)
    codecs = ("rehop", "uniform", "uniform", "uniform", "rehop", "raw")
    wanted = testing.run(
        lambda comm: [comm.compressed_allreduce(tree[comm.rank], codec=c) for c in codecs], 3
    )
    marks = Marks(beside, 3)

    def program(comm: Communicator) -> Any:
        found = [comm.compressed_allreduce(tree[comm.rank], codec="rehop")]  # the host's
        assert comm.backend == "local"
        there = beside.there(tree[comm.rank], comm.rank)
        found += [beside.back(comm.compressed_allreduce(there, codec="uniform")) for _ in range(2)]
        assert comm.backend == "local+nccl"
        before = marks(comm)
        last = comm.compressed_allreduce(there, codec="uniform")
        assert marks(comm) == before
        found.append(beside.back(last))
        found.append(comm.compressed_allreduce(tree[comm.rank], codec="rehop"))  # which NCCL has not
        found.append(beside.back(comm.compressed_allreduce(there, codec="raw")))
        part = comm.split(comm.rank % 2)
        assert part is not None
        assert part.backend == "local"
        part.close()
        assert comm.broadcast(np.full(3, comm.rank), root=2).tolist() == [2, 2, 2]
        return found

    for found, others in zip(beside.run(3, program), wanted, strict=True):
        assert all(map(same, found[:-1], others))
        for key, value in found[-1].items():
            assert np.allclose(
                value.astype(np.complex128), others[-1][key].astype(np.complex128), rtol=1e-2, atol=1e-2
            )


@pytest.mark.parametrize("other", ["host", "barrier", "large"])
def test_calls_on_host_and_devices_meet(beside: Beside, other: str) -> None:
    def program(comm: Communicator) -> Any:
        x = warm(comm, beside, 4)
        if comm.rank == 1:
            if other == "barrier":
                return comm.barrier()
            return comm.compressed_allreduce(np.ones(900_000 if other == "large" else 3000, np.float32))
        y = comm.compressed_allreduce(x, codec="uniform")
        try:
            comm.synchronize()
        finally:
            assert np.isnan(beside.back(y)).all()
        return None

    results = all_raise(beside, 2, program)
    assert all(isinstance(result, gccomm.MismatchError) for result in results), results


class Other:
    """A back end that makes whole calls by itself, and folds."""

    name, call_bytes, first_words = "other", 1 << 18, 2048

    def __init__(self) -> None:
        self.ended: list[Any] = []

    def begin_fold(self, step: Any, sent: Any, folded: Any) -> Any:
        return None if folded is None else (step, sent, folded)

    def end(self, handle: Any) -> None:
        self.ended.append(handle)


def test_whole_calls_are_not_left_to_the_other_back_end_but_folds_are() -> None:
    names = "name", "device", "takes_device", "require_whole", "oversee", "watched", "await_event"
    other = Other()
    pair = PairBackend(other, SimpleNamespace(**dict.fromkeys(names, "nccl")))  # type: ignore[arg-type]
    assert pair.call_bytes == 0
    assert pair.first_words == 0
    pair.end(pair.begin_fold(1, 2, 3))  # type: ignore[arg-type]
    assert other.ended == [(1, 2, 3)]
    assert pair.begin_fold(1, 2, None) is None  # type: ignore[arg-type]


def test_where_nccl_cannot_join_calls_are_staged(beside: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCCOMM_NCCL", "cupy")
    monkeypatch.setattr(beside.machine.cupy.cuda.nccl, "available", False)

    def program(comm: Communicator) -> Any:
        x = beside.there(np.full(3000, comm.rank + 1, np.float32), comm.rank)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            barrier.wait(30)
            found = [beside.back(comm.compressed_allreduce(x, codec="uniform")) for _ in range(3)]
            barrier.wait(30)
        return found, [str(note.message) for note in caught], comm.backend

    barrier = threading.Barrier(1)
    ((found, notes, name),) = beside.run(1, program)
    assert name == "local"
    assert [note.partition(": rank 0: ")[0] for note in notes] == [
        "arrays on devices are staged through the host, as NCCL does not join"
    ]
    assert "this CuPy has no NCCL" in notes[0]
    assert all(np.allclose(y, 1, rtol=0.02) for y in found)
