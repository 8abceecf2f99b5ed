"""Checked headroom over NCCL: the host looks at spans at the end, and failed ones are sent again."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gccomm
from gccomm import testing
from gccomm.communicator import Communicator
from tests.nccl_site import Beside, Marks, Site, all_raise, beside, floats, same, site

__all__ = ["beside", "site"]

CHECKED = "rotated:wire_bits=4,headroom=checked"
RANKS = 4


@pytest.fixture
def overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps so small that many sums leave their lanes."""
    monkeypatch.setattr("gccomm.codecs.headroom.DEVIATIONS", 1.5)


def draws(step: int, rank: int, size: int = 70_000) -> np.ndarray:
    return np.random.default_rng([step, rank]).standard_normal(size).astype(np.float32)


def both(
    site: Site, program: Callable[[Communicator, Callable[[Any], Any], Callable[[Any], Any]], Any]
) -> tuple[list[Any], list[Any]]:
    """Return what a program returns on the stand-ins' devices and on the CPU: it is given the communicator,
    what brings a tree to its device, and what brings it back.
    """
    found = site.run(RANKS, lambda comm: program(comm, lambda x: site.there(x, comm.rank), site.back))
    return found, testing.run(lambda comm: program(comm, lambda x: x, lambda x: x), RANKS)


def equal(found: list[Any], expected: list[Any]) -> bool:
    return all(
        same(a, b)
        for mine, other in zip(found, expected, strict=True)
        for a, b in zip(mine, other, strict=True)
    )


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize(
    ("codec", "times"), [(CHECKED, 3), ("rotated", 0), ("rotated:rotations=2,headroom=checked", 3)]
)
def test_steps_wait_once_and_give_the_bits_of_the_cpus(
    site: Site, codec: str, times: int, feedback: bool
) -> None:
    """Small arrays by the default, whose headroom is then safe, wait for nothing."""
    marks = Marks(site, RANKS)
    waits: list[tuple[int, int]] = []

    def program(comm: Communicator, there: Any, back: Any) -> Any:
        reducer = gccomm.Reducer(codec, comm=comm, op="sum", error_feedback=feedback)
        inputs = [there(floats(step, RANKS)[comm.rank]) for step in range(7)]
        found = [reducer(x) for x in inputs[:4]]
        before = marks(comm)
        found += [reducer(x) for x in inputs[4:]]
        waits.append(tuple(b - a for a, b in zip(before, marks(comm), strict=True)))
        state = reducer.state_dict()
        return [back(x) for x in found], (state["states"], state["residuals"])

    found, expected = both(site, program)
    assert equal([x for x, _ in found], [x for x, _ in expected])
    for (_, mine), (_, other) in zip(found, expected, strict=True):
        np.testing.assert_equal(mine, other)
    assert waits[:RANKS] == [(0, times)] * RANKS  # by CUDA's own function, and by asking for an event


@pytest.mark.parametrize("ranks", [2, 3])
def test_with_few_ranks_the_safe_step_is_taken(site: Site, ranks: int) -> None:
    def steps(comm: Communicator, there: Any) -> list[Any]:
        return [comm.compressed_allreduce(there(draws(s, comm.rank)), codec=CHECKED) for s in range(3)]

    found = site.run(
        ranks, lambda comm: [site.back(x) for x in steps(comm, lambda x: site.there(x, comm.rank))]
    )
    assert equal(found, testing.run(lambda comm: steps(comm, lambda x: x), ranks))


def test_nobody_waits_between_an_asynchronous_call_and_its_wait(site: Site) -> None:
    marks = Marks(site, RANKS)

    def program(comm: Communicator) -> Any:
        x = site.there(draws(0, comm.rank), comm.rank)
        comm.compressed_allreduce(x, codec=CHECKED)
        before = marks(comm)
        work = comm.compressed_allreduce_async(x, codec=CHECKED)
        while not work.test():
            time.sleep(0.001)
        assert marks(comm) == before
        found = work.wait()
        assert marks(comm) == before  # the device was done
        return site.back(found)

    one = testing.run(
        lambda comm: [comm.compressed_allreduce(draws(0, comm.rank), codec=CHECKED) for _ in range(2)][1],
        RANKS,
    )
    assert all(map(same, site.run(RANKS, program), one))


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.usefixtures("overflows")
def test_failed_spans_are_sent_again(site: Site, stateful: bool) -> None:
    """Input, result and output are separate, or the same memory."""

    def program(comm: Communicator, there: Any, back: Any) -> Any:
        reducer = gccomm.Reducer(CHECKED, comm=comm, op="sum", error_feedback=True)
        found, redone = [], []
        for step in range(6):
            x = there({"w": draws(step, comm.rank)})
            if stateful:
                y = reducer(x, out=x if step % 2 else None)
            else:
                y = comm.compressed_allreduce(x, codec=CHECKED, out=x if step % 2 else None)
            found.append(back(y))
            redone.append(comm.stats.spans_redone)
        state = reducer.state_dict()
        return found, (redone, state["states"], state["residuals"])

    found, expected = both(site, program)
    assert equal([x for x, _ in found], [x for x, _ in expected])
    for (_, mine), (_, other) in zip(found, expected, strict=True):
        np.testing.assert_equal(mine, other)
        assert mine[0][-1] > 0


@pytest.mark.usefixtures("overflows")
def test_beside_another_back_end_they_go_by_nccl(beside: Beside) -> None:
    def program(comm: Communicator, there: Any, back: Any) -> Any:
        reducer, xs = gccomm.Reducer(CHECKED, comm=comm), [draws(step, comm.rank) for step in range(5)]
        found = [back(reducer({"w": there(x)})) for x in xs]
        work = comm.compressed_allreduce_async(there(xs[0]), codec=CHECKED)
        return [*found, back(work.wait())], reducer.state_dict()["states"]

    found, expected = both(beside, program)
    assert equal([x for x, _ in found], [x for x, _ in expected])
    assert [x for _, x in found] == [x for _, x in expected]


@pytest.mark.usefixtures("overflows")
def test_handles_are_waited_for_in_any_order(site: Site) -> None:
    """Each rank in its own, with other calls in between, or never."""

    def program(comm: Communicator, there: Any, back: Any) -> Any:
        xs = [there(draws(step, comm.rank)) for step in range(6)]
        comm.compressed_allreduce(xs[0], codec=CHECKED)
        works = [comm.compressed_allreduce_async(x, codec=CHECKED) for x in xs]
        if comm.rank == 1:
            works[0].wait()
        comm.barrier()
        late = comm.compressed_allreduce_async(xs[0], "mean", CHECKED)
        places = list(range(6))
        if comm.rank == 2:
            places.reverse()
        found = {place: back(works[place].wait()) for place in places}
        if comm.rank == 3:
            del late
            gc.collect()
            return [found[place] for place in range(6)]
        return [*(found[place] for place in range(6)), back(late.wait())]

    found, expected = both(site, program)
    assert equal(found, expected)
    assert len(found[0]) == 7


@pytest.mark.parametrize("failing", [False, True])
def test_pushed_steps_wait_in_wait(site: Site, failing: bool, request: pytest.FixtureRequest) -> None:
    if failing:
        request.getfixturevalue("overflows")
    marks = Marks(site, RANKS)
    counts: list[Any] = []

    def program(comm: Communicator, there: Any, back: Any) -> Any:
        reducer = gccomm.Reducer(CHECKED, comm=comm, op="sum", bucket_bytes=170_000)
        found = []
        for step in range(7):
            tree = there({key: draws(10 * step + i, comm.rank, 40_000) for i, key in enumerate("abcd")})
            before = marks(comm)
            for key in sorted(tree, reverse=comm.rank == 1):
                reducer.push(key, tree[key])
            for task in reducer._pushes._step.tasks:  # type: ignore[union-attr]
                task.done.wait(30)
            pushed = marks(comm)
            found.append(reducer.wait())
            counts.append((step, before, pushed, marks(comm), reducer.stats.spans_redone))
        assert found[-1].keys() == set("abcd")
        state = reducer.state_dict()
        return [back({k: y[k] for k in "abcd"}) for y in found], state["states"]

    found, expected = both(site, program)
    assert equal([x for x, _ in found], [x for x, _ in expected])
    assert [x for _, x in found] == [x for _, x in expected]
    for step, before, pushed, after, redone in counts[: 7 * RANKS]:
        if step > 3:
            assert pushed == before
            assert (redone > 0) == failing
            if not failing:  # one wait is enough for all four buckets
                assert after[1] - before[1] <= 1


def test_a_pushed_step_that_is_discarded(site: Site) -> None:
    """Buckets that are on the device are given up with it, and the next step is as if there were none."""

    def program(comm: Communicator, there: Any, back: Any) -> Any:
        reducer = gccomm.Reducer(CHECKED, comm=comm, op="sum", bucket_bytes=170_000)
        found = []
        for step in range(8):
            tree = there({key: draws(10 * step + i, comm.rank, 40_000) for i, key in enumerate("abc")})
            for key, x in tree.items():
                reducer.push(key, x)
            if step == 5:
                reducer.discard()
            else:
                found.append(reducer.wait())
        return [back(dict(sorted(y.items()))) for y in found], reducer.step

    found, expected = both(site, program)
    assert equal([x for x, _ in found], [x for x, _ in expected])
    assert [step for _, step in found] == [7] * RANKS


def test_what_is_wrong_is_raised_by_wait(site: Site) -> None:
    """A rank that makes another call: the others' results are not handed out."""
    marks = threading.Barrier(RANKS)

    def program(comm: Communicator) -> Any:
        x = site.there(draws(0, comm.rank), comm.rank)
        comm.compressed_allreduce(x, codec=CHECKED)
        marks.wait(30)
        if comm.rank == 1:
            return comm.compressed_allreduce(site.there(np.ones(3000, np.float32), 1), codec=CHECKED)
        work = comm.compressed_allreduce_async(x, codec=CHECKED)
        return work.wait()

    results = all_raise(site, RANKS, program)
    assert all(isinstance(result, gccomm.MismatchError) for result in results), results


def test_a_rank_that_does_not_come(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCCOMM_TIMEOUT_S", "0.5")
    done = threading.Event()

    def program(comm: Communicator) -> Any:
        x = site.there(draws(0, comm.rank), comm.rank)
        comm.compressed_allreduce(x, codec=CHECKED)
        if comm.rank == 1:
            done.wait(30)
            return None
        work = comm.compressed_allreduce_async(x, codec=CHECKED)
        try:
            with pytest.raises(
                (gccomm.CollectiveTimeout, gccomm.BackendError), match=r"waited|broken|aborted"
            ):
                work.wait()
        finally:
            done.set()
        with pytest.raises(gccomm.BackendError, match="broken"):
            comm.barrier()
        return None

    site.run(RANKS, program, closes=False)


def test_closing_and_blocking_calls_complete_what_is_parked(site: Site) -> None:
    def program(comm: Communicator) -> Any:
        x = site.there(draws(0, comm.rank), comm.rank)
        comm.compressed_allreduce(x, codec=CHECKED)
        works = [comm.compressed_allreduce_async(x, codec=CHECKED)]
        comm.barrier()
        assert works[0].test()
        works.append(comm.compressed_allreduce_async(x, codec=CHECKED))
        comm.close()
        assert works[1].test()
        return [site.back(work.wait()) for work in works]

    for first, second in site.run(RANKS, program, closes=False):
        assert not np.array_equal(first, second)  # other noise
        assert np.isfinite(second).all()


def test_a_reducer_that_goes_in_the_middle_of_a_step_is_waited_for(site: Site) -> None:
    """What the device still writes for its buckets is not given back before."""

    def program(comm: Communicator) -> Any:
        tree = site.there({key: draws(0, comm.rank) for key in "ab"}, comm.rank)
        reducer = gccomm.Reducer(CHECKED, comm=comm, bucket_bytes=1)
        for _ in range(4):
            for key, x in tree.items():
                reducer.push(key, x)
            reducer.wait()
        reducer.push("a", tree["a"])
        (task,) = reducer._pushes._step.tasks  # type: ignore[union-attr]
        task.done.wait(30)
        (board,) = comm._boards.found.values()
        event = board.queue.record()
        assert not event.mark.done
        del reducer, task
        gc.collect()
        assert event.mark.done

    site.run(1, program)


def test_an_interrupt_ends_the_wait_for_the_device(site: Site) -> None:
    """CUDA's own wait would come back when the other rank comes, or never."""
    done = threading.Event()

    def program(comm: Communicator) -> Any:
        x = site.there(draws(0, comm.rank), comm.rank)
        comm.compressed_allreduce(x, codec=CHECKED)
        if comm.rank == 1:
            done.wait(30)
            return None
        comm._backend.interrupt_deadline = time.monotonic() + 0.2
        try:
            with pytest.raises(gccomm.BackendError, match=r"rank 0: interrupted while waiting in a wait for"):
                comm.compressed_allreduce(x, codec=CHECKED)
        finally:
            done.set()
        with pytest.raises(gccomm.BackendError, match="broken"):
            comm.barrier()
        return None

    site.run(2, program, closes=False)
