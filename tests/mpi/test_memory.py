"""Memory of calls over MPI, and that a call makes no MPI object."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import gccomm

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TREE = 128 << 20
# What a call may do with a communicator: start messages and collectives, and look at it.
HARMLESS = {"rank", "size", "Iallreduce", "Ibcast", "Ibarrier", "Isend", "Irecv", "Iprobe"}
MAKERS = {
    "Op",
    "Datatype",
    "Group",
    "Info",
    "Win",
    "Session",
    "Errhandler",
    "File",
    "COMM_WORLD",
    "COMM_SELF",
}


@pytest.fixture(scope="module")
def memory() -> Any:
    sys.path.insert(0, str(BENCHMARKS))  # end_to_end.py is beside it
    spec = importlib.util.spec_from_file_location("memory_benchmark", BENCHMARKS / "memory.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize("codec", ["uniform:wire_bits=4", "rotated:wire_bits=8,headroom=checked"])
def test_peak(codec: str, comm: Any, memory: Any) -> None:
    row = memory.peak(codec, TREE, comm)
    assert 0 < row["extra_bytes"] <= row["bound_bytes"]


def test_no_growth_over_steps(comm: Any, memory: Any) -> None:
    found = memory.growth(300, comm)
    assert found["spread_bytes"] <= 5 << 20


class Watched:
    """Stands in for an object and notes what is asked of it."""

    def __init__(self, target: Any, seen: set[str]) -> None:
        self._target, self._seen = target, seen

    def __getattr__(self, name: str) -> Any:
        self._seen.add(name)
        return getattr(self._target, name)


@pytest.mark.parametrize("window", ["0", "1"])
def test_calls_make_no_mpi_objects(window: str, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No communicator, operation, datatype or window: nothing but messages on what was made at the start."""
    monkeypatch.setenv("GCCOMM_WINDOW", window)
    parent = world.Dup()
    with gccomm.init("mpi", comm=parent) as comm:
        check_calls(comm, monkeypatch)
    parent.Free()


def check_calls(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = comm._backend._channel
    rng = np.random.default_rng(comm.rank)
    tree = {"a": rng.standard_normal(300_000, np.float32), "b": np.ones(10), "c": np.arange(5)}
    reducer = gccomm.Reducer("rotated", op="sum", comm=comm)
    seen: set[str] = set()
    modules: set[str] = set()
    monkeypatch.setattr(channel, "comm", Watched(channel.comm, seen))
    for name, module in list(sys.modules.items()):
        if name.startswith("gccomm_mpi") and isinstance(module, ModuleType) and hasattr(module, "MPI"):
            monkeypatch.setattr(module, "MPI", Watched(module.MPI, modules))
    for _ in range(3):
        reducer(tree)
        gccomm.compressed_allreduce(tree, "sum", "uniform", comm=comm)
        comm.broadcast(tree)
        comm.barrier()
    assert "Ibcast" in seen  # watched indeed
    assert seen <= HARMLESS
    assert not modules & MAKERS
    monkeypatch.undo()
