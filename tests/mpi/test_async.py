"""Asynchronous calls and pushed steps of processes."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any

import numpy as np
import pytest

import gccomm
from gccomm.testing import simulate

F4 = np.float32


@pytest.fixture(autouse=True)
def _threads() -> None:
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("this MPI provides no MPI_THREAD_MULTIPLE")


def normal(*seed: int, size: int = 3000) -> Any:
    return np.random.default_rng([*seed, size]).standard_normal(size).astype(F4)


def calls(comm: Any, asynchronous: bool) -> list[Any]:
    """Reduce arrays of many sizes by a communicator of its own, so that steps are counted from 0."""
    with comm.split(0) as part:
        call = part.compressed_allreduce_async if asynchronous else part.compressed_allreduce
        made = [
            call(normal(comm.rank, i, size=size), codec=codec)
            for i, size in enumerate((10, 3000, 200_000, 2_500_000))
            for codec in ("rotated", "uniform:wire_bits=4", "raw")
        ]
        return [w.wait() for w in made] if asynchronous else made


def test_results_are_those_of_blocking_calls(comm: Any) -> None:
    for a, b in zip(calls(comm, True), calls(comm, False), strict=True):
        np.testing.assert_array_equal(a, b)


def test_results_are_those_of_the_simulation(comm: Any) -> None:
    xs = [normal(r, size=100_000) for r in range(comm.size)]
    expected, _ = simulate(xs, "rotated:headroom=safe")
    with comm.split(0) as part:
        work = part.compressed_allreduce_async(xs[comm.rank], codec="rotated:headroom=safe")
    np.testing.assert_array_equal(work.wait(), expected[comm.rank])


def test_any_order_of_waits_and_blocking_calls_between(comm: Any, world: Any) -> None:
    works = []
    for i in range(12):
        works.append(comm.compressed_allreduce_async(np.full(3000, i, F4), codec="uniform"))
        if i % 4 == 1:
            assert comm.allreduce(i) == i * comm.size
        if i % 4 == 2:
            assert comm.broadcast(comm.rank + i, 0) == i
        if i % 4 == 3:
            world.allgather(i)  # the program's own calls of MPI
    for i in np.random.default_rng(comm.rank).permutation(12):
        np.testing.assert_allclose(works[i].wait(), i * comm.size, atol=0.1 * i * comm.size)


def test_program_and_thread_call_mpi_at_the_same_time(comm: Any, world: Any) -> None:
    from mpi4py import MPI

    x, total = np.ones(300_000, F4), np.empty(1000)
    works = [comm.compressed_allreduce_async(x, codec="uniform") for _ in range(10)]
    for i in range(200):
        part = np.full(1000, float(i))  # which mpi4py does not keep
        request = world.Iallreduce(part, total, MPI.SUM)
        while not request.Test():
            os.sched_yield()
        assert (total == i * comm.size).all()
    for work in works:
        np.testing.assert_allclose(work.wait(), comm.size, atol=0.3)


def test_time_limit_of_a_wait(comm: Any, world: Any) -> None:
    if comm.rank == 1:
        world.recv(source=0)
    work = comm.compressed_allreduce_async(np.ones(3000, F4), codec="uniform")
    if comm.rank == 0:
        with pytest.raises(gccomm.CollectiveTimeout, match=r"rank 0: .* still on its way after 0\.05 s"):
            work.wait(0.05)
        assert not work.test()
        world.send(None, 1)
    np.testing.assert_allclose(work.wait(60), comm.size, atol=0.3)


def fails(call: Any, kind: type[Exception], world: Any) -> str:
    with pytest.raises(kind) as info:
        call()
    texts = world.allgather(str(info.value))
    assert len(set(texts)) == 1
    return texts[0]


def test_errors_are_raised_by_wait_on_every_rank(comm: Any, world: Any) -> None:
    good = np.ones(3000, F4)
    odd = comm.rank == comm.size - 1
    works = [
        comm.compressed_allreduce_async(good),
        comm.compressed_allreduce_async(good[1:] if odd else good),
        comm.compressed_allreduce_async(good, "max" if odd else "sum"),
        comm.compressed_allreduce_async(np.array([None]) if odd else good),
        comm.compressed_allreduce_async(good),
    ]
    kinds = [gccomm.MismatchError, ValueError, TypeError]
    texts = [fails(work.wait, kind, world) for work, kind in zip(works[1:4], kinds, strict=True)]
    assert f"on rank {comm.size - 1}" in texts[0]
    assert all(text.startswith(f"rank {comm.size - 1}: ") for text in texts[1:])
    for work in (works[0], works[4]):
        assert np.abs(work.wait() - comm.size).max() < 0.3 * comm.size
    assert comm.allreduce(1) == comm.size


def test_dropped_handles(comm: Any, world: Any) -> None:
    for i in range(30):
        comm.compressed_allreduce_async(normal(comm.rank, i))
    assert comm.allreduce(1) == comm.size
    with pytest.warns(RuntimeWarning, match="nobody has waited for it: MismatchError"):
        lost(comm)
    assert comm.allreduce(1) == comm.size


def lost(comm: Any) -> None:
    comm.compressed_allreduce_async(np.ones(3000 + comm.rank, F4))
    comm.barrier()
    gc.collect()


def test_threads_end_with_their_communicators(comm: Any) -> None:
    comm.barrier()
    before = threading.active_count()
    for _ in range(20):
        part = comm.split(0)
        works = [part.compressed_allreduce_async(normal(comm.rank)) for _ in range(3)]
        assert threading.active_count() == before + 1
        part.close()
        assert threading.active_count() == before
        assert all(work.test() for work in works)
        with pytest.raises(gccomm.BackendError, match="closed"):
            part.compressed_allreduce_async(1.0).wait()


def test_two_communicators_at_the_same_time(comm: Any) -> None:
    """Each has a thread; ranks use them in different orders."""
    with comm.split(0) as one, comm.split(0) as two:
        order = (one, two) if comm.rank % 2 else (two, one)
        for _ in range(10):
            works = {
                part: part.compressed_allreduce_async(np.ones(100_000, F4), codec="raw") for part in order
            }
            for part in reversed(order):
                assert (works[part].wait() == comm.size).all()


def test_handles_on_one_set_of_ranks_share_a_thread(comm: Any, world: Any) -> None:
    before = threading.active_count()
    parent = world.Dup()
    a, b = (gccomm.init(comm=parent) for _ in range(2))
    works = [c.compressed_allreduce_async(1.0) for c in (a, b, a, b)]
    assert threading.active_count() == before + 1
    assert [w.wait() for w in works] == [comm.size] * 4
    a.close()
    assert b.compressed_allreduce_async(2.0).wait() == 2 * comm.size
    b.close()
    assert threading.active_count() == before
    parent.Free()


def test_a_thread_that_mpi_does_not_allow_is_refused_on_every_rank(
    comm: Any, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mpi4py import MPI

    for level in (MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED):
        with monkeypatch.context() as patch, comm.split(0) as part:
            part.compressed_allreduce(1.0)  # so that this thread is known
            if comm.rank == 1:
                patch.setattr(MPI, "Query_thread", lambda level=level: level)
            work = part.compressed_allreduce_async(normal(comm.rank))
            text = fails(work.wait, gccomm.NegotiationError, world)
            assert text.startswith(
                "rank 1: asynchronous calls are not possible: they need MPI_THREAD_MULTIPLE"
            )
            assert part.allreduce(1) == comm.size


def gradients(rank: int, step: int) -> dict[str, Any]:
    found = {f"layer{i}": normal(rank, step, i, size=20_000 + 3000 * i) for i in range(9)}
    return {**found, "bias": normal(rank, step, 77, size=50)}


@pytest.mark.parametrize(
    "codec", ["rotated", "uniform:wire_bits=4", "rotated:headroom=checked", "uniform:scales=predicted", "thc"]
)
def test_pushed_steps_equal_calls(comm: Any, codec: str) -> None:
    pushed, called = (
        gccomm.Reducer(codec, comm=comm, bucket_bytes=size, error_feedback=True)
        for size in (200_000, 25 << 20)
    )
    for step in range(5):
        tree = gradients(comm.rank, step)
        for key in np.random.default_rng([comm.rank, step]).permutation(list(tree)):
            pushed.push(str(key), tree[key])
            if comm.rank == 1:
                time.sleep(0.002)
        result, expected = pushed.wait(), called(tree)
        assert result.keys() == expected.keys()
        for key in tree:
            np.testing.assert_array_equal(result[key], expected[key])
        assert pushed.stats.codecs == called.stats.codecs
    assert pushed.stats.messages > called.stats.messages


def test_pushed_steps_that_fail(comm: Any, world: Any) -> None:
    reducer = gccomm.Reducer("uniform", comm=comm, bucket_bytes=100_000)
    tree = gradients(0, 0)
    odd = comm.rank == comm.size - 1

    def step(wrong: str = "") -> Any:
        for i, (key, value) in enumerate(tree.items()):
            if i == 5 and odd and wrong == "discard":
                reducer.discard()
                raise gccomm.GccommError(f"rank {comm.rank}: step {reducer.step} was discarded")
            if i == 5 and odd and wrong == "twice":
                reducer.push("layer0", value)
            if not (i == 5 and odd and wrong == "missing"):
                reducer.push(key, value)
        return reducer.wait()

    for _ in range(2):
        step()
    text = fails(lambda: step("twice"), ValueError, world)
    assert (
        text
        == f"rank {comm.size - 1}: the key 'layer0' was pushed twice in step 2: call wait() between steps"
    )
    text = fails(lambda: step("discard"), gccomm.GccommError, world)
    assert text == f"rank {comm.size - 1}: step 2 was discarded"
    share = step("missing")["layer5"] / tree["layer5"].max()
    expected = tree["layer5"] / tree["layer5"].max() * (comm.size - 1) / comm.size
    np.testing.assert_allclose(share, expected, atol=0.1)
    assert reducer.step == 3
    assert np.abs(step()["layer0"] - tree["layer0"]).max() < 0.2
