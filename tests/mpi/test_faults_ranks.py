"""Processes that disagree or fail alone, their communicators, threads, and what MPI calls of others meet."""

from __future__ import annotations

import gc
import itertools
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gccomm
from gccomm.testing import simulate

F4 = np.float32
GOOD = np.ones(3000, F4)


def fails_alike(comm: Any, world: Any, kind: type[BaseException], call: Callable[[], object]) -> str:
    """Return the text of the error that ``call`` raises, the same on all ranks; the next calls must work."""
    with pytest.raises(kind) as caught:
        call()
    seen = world.allgather((caught.type.__name__, str(caught.value)))
    assert len(set(seen)) == 1
    assert np.abs(comm.compressed_allreduce(GOOD, codec="uniform") - comm.size).max() < 0.3
    assert comm.broadcast(comm.rank, comm.size - 1) == comm.size - 1
    return str(caught.value)


@pytest.mark.parametrize(
    ("usual", "other"),
    [
        (np.ones(4, F4), np.ones(5, F4)),
        (np.ones(400_000, F4), np.ones(400_001, F4)),
        (np.ones((3, 4), F4), np.ones((4, 3), F4)),
        (np.ones(4, F4), np.ones(4)),
        (np.ones(4, F4), np.empty(0, F4)),
        ({"a": GOOD}, {"b": GOOD}),
        ({"a": GOOD}, {"a": GOOD, "b": GOOD}),
        ({"a": GOOD}, {"a": None}),
        ({}, {"a": GOOD}),
    ],
)
def test_different_arrays_on_one_rank(comm: Any, world: Any, usual: Any, other: Any) -> None:
    mine = other if comm.rank == 1 else usual
    text = fails_alike(comm, world, gccomm.MismatchError, lambda: comm.compressed_allreduce(mine))
    assert "on rank 1" in text


@pytest.mark.parametrize(
    ("option", "usual", "other"),
    [
        ("op", "sum", "mean"),
        ("codec", "uniform", "uniform:wire_bits=4"),
        ("codec", "uniform", "raw"),
        ("exact_below", 0, 1),
        ("nonfinite", "propagate", "raise"),
    ],
)
def test_different_options_on_one_rank(comm: Any, world: Any, option: str, usual: Any, other: Any) -> None:
    options = {option: other if comm.rank == 1 else usual}
    text = fails_alike(comm, world, gccomm.MismatchError, lambda: comm.compressed_allreduce(GOOD, **options))
    assert "rank 1" in text


CALLS: dict[str, Callable[[Any], object]] = {
    "allreduce": lambda comm: comm.allreduce(GOOD),
    "compressed": lambda comm: comm.compressed_allreduce(GOOD),
    "broadcast": lambda comm: comm.broadcast(GOOD),
    "barrier": lambda comm: comm.barrier(),
    "split": lambda comm: comm.split(0),
    "close": lambda comm: comm.close(),
}


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(CALLS, 2)))
def test_different_calls(comm: Any, world: Any, first: str, second: str) -> None:
    call = CALLS[first if comm.rank == 1 else second]
    fails_alike(comm, world, gccomm.MismatchError, lambda: call(comm))


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"x": np.array([None])}, TypeError),
        ({"op": "max"}, ValueError),
        ({"codec": "unifrom"}, gccomm.UnknownCodecError),
        ({"codec": "uniform:wire_bits=7"}, ValueError),
        ({"out": np.ones(3, F4)}, ValueError),
        ({"out": 3}, TypeError),
        ({"x": np.full(3000, np.inf, F4), "nonfinite": "raise"}, gccomm.NonFiniteError),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_bad_argument_on_one_rank(comm: Any, world: Any, options: dict[str, Any], kind: Any) -> None:
    mine = {"x": GOOD, **(options if comm.rank == 1 else {})}
    text = fails_alike(comm, world, kind, lambda: comm.compressed_allreduce(mine.pop("x"), **mine))
    assert text.startswith("rank 1: ")


@pytest.mark.parametrize("root", [-1, 1 << 40, "0"])
def test_bad_root_on_one_rank(comm: Any, world: Any, root: Any) -> None:
    kind = ValueError if isinstance(root, int) else TypeError
    fails_alike(comm, world, kind, lambda: comm.broadcast(1.0, root if comm.rank == 1 else 0))


@pytest.mark.parametrize(("color", "key"), [(-1, 0), ("red", 0), (0, 0.5)])
def test_bad_split_on_one_rank(comm: Any, world: Any, color: Any, key: Any) -> None:
    arguments = (color, key) if comm.rank == 1 else (0, 0)
    kind = ValueError if color == -1 else TypeError
    fails_alike(comm, world, kind, lambda: comm.split(*arguments))


def test_reducers_swapped_on_one_rank(comm: Any, world: Any) -> None:
    pair = [gccomm.Reducer(comm=comm) for _ in range(2)]
    for reducer in reversed(pair) if comm.rank == 1 else pair:
        text = fails_alike(comm, world, gccomm.MismatchError, lambda: reducer({"w": GOOD}))  # noqa: B023
        assert "reducer" in text
    for reducer in pair:
        assert np.abs(reducer({"w": GOOD})["w"] - 1).max() < 0.1


def test_missing_gradient_counts_as_zeros(comm: Any) -> None:
    reducer = gccomm.Reducer(comm=comm)
    tree = {"a": GOOD, "b": np.full(3, -2, F4)}
    reducer(tree)
    y = reducer({**tree, "b": None if comm.rank == 1 else tree["b"]})
    assert np.abs(y["b"] + 2 * (comm.size - 1) / comm.size).max() < 1e-6
    assert reducer({**tree, "b": None})["b"] is None


def test_messages_of_the_program_on_the_same_processes_do_not_mix(comm: Any, world: Any) -> None:
    """gccomm works on a communicator of its own: any tag, any collective of the program may be pending."""
    from mpi4py import MPI

    mine, theirs = np.full(4, comm.rank, np.int64), np.empty(4, np.int64)
    receive = world.Irecv(theirs, MPI.ANY_SOURCE, MPI.ANY_TAG)
    total = np.zeros(1000)
    part = np.ones(1000)
    pending = world.Iallreduce(part, total)
    for _ in range(3):
        assert np.abs(comm.compressed_allreduce(GOOD, codec="uniform") - comm.size).max() < 0.3
    send = world.Isend(mine, (comm.rank + 1) % comm.size, 7)
    assert (comm.broadcast(np.arange(3), 0) == np.arange(3)).all()
    for request in (receive, send, pending):
        while not request.Test():
            os.sched_yield()
    assert (theirs == (comm.rank - 1) % comm.size).all()
    assert (total == comm.size).all()


def test_thousands_of_reducers_and_handles_leak_no_communicator(comm: Any, world: Any) -> None:
    kept = []
    for i in range(2200):
        reducer = gccomm.Reducer(comm=gccomm.init("mpi", comm=world))
        if i % 200 == 0:
            assert np.abs(reducer({"w": GOOD})["w"] - 1).max() < 0.1
            kept.append(reducer)
    random.Random(comm.rank).shuffle(kept)  # dropped in another order on each rank
    for _ in range(len(kept)):
        kept.pop()
        gc.collect()
    assert comm.allreduce(1) == comm.size


def test_communicators_split_and_closed_thousands_of_times(comm: Any) -> None:
    from mpi4py import MPI

    count = 2100 if "MPICH" in MPI.get_vendor()[0] else 40  # MPICH has 2,048, Open MPI 65,536
    for i in range(count):
        part = comm.split(0)
        if i % 100 == 0:
            assert part.allreduce(1) == comm.size
        part.close()
    with pytest.raises(gccomm.BackendError, match="closed"):
        part.barrier()


def test_freed_parent_communicator(comm: Any, world: Any) -> None:
    parent = world.Dup()
    inner = gccomm.init("mpi", comm=parent)
    parent.Free()
    assert inner.allreduce(1) == comm.size
    inner.close()


def test_one_rank_groups_behave_like_larger_ones(comm: Any) -> None:
    with comm.split(comm.rank) as alone:
        assert (alone.size, alone.rank) == (1, 0)
        for dtype in ("float16", "float32", "float64", "complex64", "int8", "bool"):
            x = np.linspace(0, 1, 3000).reshape(30, 100).astype(dtype)
            for op in ("sum", "mean") if x.dtype.kind in "fc" else ("sum",):
                y = alone.compressed_allreduce(x, op, "uniform")
                assert (y.dtype, y.shape) == (x.dtype, x.shape)
                assert not np.shares_memory(y, x)
                assert np.abs(y.astype(complex) - x.astype(complex)).max() <= 1 / 127
        with pytest.raises(TypeError):
            alone.allreduce(object())
        assert alone.allreduce(2.5) == 2.5


def test_groups_of_even_and_odd_ranks_work_at_the_same_time(comm: Any) -> None:
    with comm.split(comm.rank % 2, key=-comm.rank) as part:
        for _ in range(20):
            y = part.compressed_allreduce(np.full(2000, comm.rank, F4), "mean", "uniform")
            members = [r for r in range(comm.size) if r % 2 == comm.rank % 2]
            assert np.abs(y - np.mean(members)).max() <= 0.1
        assert part.broadcast(comm.rank, 0) == max(members)


def test_worker_thread_beside_a_barrier_of_the_main_thread(comm: Any, world: Any) -> None:
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("this MPI provides no MPI_THREAD_MULTIPLE")
    other, results = world.Dup(), []
    worker = threading.Thread(
        target=lambda: results.extend(comm.compressed_allreduce(GOOD) for _ in range(20))
    )
    worker.start()
    other.Barrier()
    if comm.rank == 0:
        time.sleep(0.1)
    other.Barrier()
    worker.join()
    other.Free()
    assert len(results) == 20
    assert all(np.abs(y - comm.size).max() < 0.3 for y in results)
    assert comm.allreduce(1) == comm.size  # from the main thread again


def test_two_communicators_on_the_same_ranks_are_told_apart(comm: Any, world: Any) -> None:
    """Each may be used alone; swapped on one rank, the calls do not meet."""
    if comm.size == 1:
        pytest.skip("needs two ranks")
    a, b = (gccomm.init(comm=world) for _ in range(2))
    for first, second in ((a, b), (b, a)):
        assert (first.allreduce(1.0), second.allreduce(100.0)) == (comm.size, 100.0 * comm.size)
    with pytest.raises(gccomm.MismatchError, match="communicator"):
        (b if comm.rank == 1 else a).allreduce(1.0)
    assert (a.allreduce(1.0), b.allreduce(2.0)) == (comm.size, 2.0 * comm.size)
    b.close()
    a.close()


def test_predicted_steps_meet_another_call(comm: Any) -> None:
    """The first words of a step with predicted scales are summed, those of other calls maximised."""
    if comm.size == 1:
        pytest.skip("needs a rank that does something else")
    reducer = gccomm.Reducer("uniform:scales=predicted", comm=comm, op="sum")
    x = {"w": np.linspace(-1, 1, 50_000, dtype=F4)}
    for _ in range(3):
        reducer(x)
    assert reducer.stats.messages == 2
    for odd in {0, comm.size - 1}:
        call = comm.barrier if comm.rank == odd else lambda: reducer(x)
        with pytest.raises(gccomm.MismatchError, match="barrier"):
            call()
        assert np.abs(reducer(x)["w"] / comm.size - x["w"]).max() < 0.1 * comm.size


def test_rotated_checked_over_processes(comm: Any) -> None:
    """Words, spans that are redone and results as in lockstep."""
    rng = np.random.default_rng(5)
    xs = [rng.standard_normal(150_000, dtype=F4) for _ in range(comm.size)]
    expected, _ = simulate([{"x": x} for x in xs], "rotated:headroom=checked", steps=3)
    reducer = gccomm.Reducer("rotated:headroom=checked", comm=comm, op="sum")
    for _ in range(3):
        y = reducer({"x": xs[comm.rank]})["x"]
    np.testing.assert_array_equal(y, expected[0]["x"])


def test_each_rank_has_a_temporary_folder_of_its_own(world: Any, tmp_path_factory: Any) -> None:
    """In pytest's own, ranks that end at the same time delete it from under each other, which is an error."""
    folders = world.allgather(str(tmp_path_factory.getbasetemp().parent))
    assert len(set(folders)) == world.size
