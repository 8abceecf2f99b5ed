"""Asynchronous calls: their order, results, errors, handles and thread."""

from __future__ import annotations

import gc
import itertools
import signal
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import gccomm
from gccomm.testing import run

pytestmark = pytest.mark.timeout(60)

F4 = np.float32
Array = np.ndarray[Any, Any]


def normal(rank: int, number: int = 0, size: int = 3000) -> Array:
    return np.random.default_rng([rank, number, size]).standard_normal(size).astype(F4)


def threads() -> list[threading.Thread]:
    """Return the communication threads that run, once those that end have ended."""
    gc.collect()
    end = time.monotonic() + 10
    while (found := [t for t in threading.enumerate() if t.name == "gccomm"]) and time.monotonic() < end:
        time.sleep(0.01)
    return found


def equal(a: Any, b: Any) -> None:
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize(
    "codec", ["rotated", "uniform:wire_bits=4", "raw", "bf16", "topkc", "thc", "powersgd"]
)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_results_are_those_of_blocking_calls(codec: str, n: int) -> None:
    def program(comm: gccomm.Communicator, asynchronous: bool) -> list[Array]:
        call = comm.compressed_allreduce_async if asynchronous else comm.compressed_allreduce
        made: Any = [call(normal(comm.rank, i), "mean", codec) for i in range(6)]
        return [w.wait() for w in made] if asynchronous else made

    for a, b in zip(run(lambda c: program(c, True), n), run(lambda c: program(c, False), n), strict=True):
        equal(a, b)


CALLS: dict[str, Callable[[Any, Array], Any]] = {
    "async": lambda comm, x: comm.compressed_allreduce_async(x),
    "async tree": lambda comm, x: comm.compressed_allreduce_async({"a": x, "n": 3}, "sum", "uniform"),
    "blocking": lambda comm, x: comm.compressed_allreduce(x),
    "broadcast": lambda comm, x: comm.broadcast(x, comm.size - 1),
    "barrier": lambda comm, _: comm.barrier(),
    "reducer": lambda comm, x: gccomm.Reducer(comm=comm)({"a": x}),
}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(sorted(CALLS)), max_size=8), st.integers(1, 3), st.randoms())
def test_mixtures_of_calls_are_made_in_one_order(names: list[str], n: int, random: Any) -> None:
    """Whenever a rank waits for which handle."""
    waits = [sorted(range(len(names)), key=lambda _: random.random()) for _ in range(n)]
    early = [[random.random() < 0.3 for _ in names] for _ in range(n)]

    def program(comm: gccomm.Communicator, asynchronous: bool) -> list[Any]:
        found: list[Any] = []
        for i, name in enumerate(names):
            made = "blocking" if name == "async" and not asynchronous else name
            found.append(CALLS[made](comm, normal(comm.rank, i)))
            if isinstance(found[-1], gccomm.Work) and (not asynchronous or early[comm.rank][i]):
                found[-1] = found[-1].wait()
        for i in waits[comm.rank]:
            if isinstance(found[i], gccomm.Work):
                found[i] = found[i].wait()
        return found

    first, second = (run(lambda c, a=a: program(c, a), n) for a in (True, False))  # type: ignore[misc]
    for mine, theirs in zip(first, second, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            if isinstance(a, dict):
                assert a.keys() == b.keys()
                [equal(a[key], b[key]) for key in a]
            else:
                equal(a, b)


def test_a_call_does_not_wait_for_late_ranks_but_a_blocking_one_behind_it_does() -> None:
    here = threading.Event()

    def program(comm: gccomm.Communicator) -> tuple[float, float]:
        if comm.rank == 1:
            here.wait()
        work = comm.compressed_allreduce_async(np.full(3000, 1.0, F4))
        if comm.rank == 0:
            assert not work.test()
            here.set()
        second = comm.allreduce(comm.rank + 1.0)
        assert work.test()
        return float(work.wait()[0]), second

    assert run(program, 2) == [(pytest.approx(2, abs=0.05), 3.0)] * 2


def test_wait_has_a_time_limit_and_can_be_called_again() -> None:
    late = threading.Event()

    def program(comm: gccomm.Communicator) -> Any:
        if comm.rank == 1:
            late.wait()
            return comm.compressed_allreduce_async(normal(1)).wait(60)
        work = comm.compressed_allreduce_async(normal(0))
        for limit in (0, 0.05):
            with pytest.raises(gccomm.CollectiveTimeout, match=rf"rank 0: .* on its way after {limit:g} s"):
                work.wait(limit)
        assert not work.test()
        assert "on its way" in repr(work)
        late.set()
        result = work.wait(float("inf"))
        assert work.wait(0) is result
        assert work.test()
        assert "complete" in repr(work)
        return result

    a, b = run(program, 2)
    equal(a, b)


@pytest.mark.parametrize(
    ("timeout", "kind"), [(-1, ValueError), (float("nan"), ValueError), ("1", TypeError), (True, TypeError)]
)
def test_wrong_time_limits(timeout: Any, kind: type[Exception]) -> None:
    def program(comm: gccomm.Communicator) -> None:
        work = comm.compressed_allreduce_async(1.0)
        with pytest.raises(kind, match="`timeout` must be None or a number of seconds"):
            work.wait(timeout)
        assert work.wait() == 1

    run(program, 1)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"x": np.ones(4, F4)}, gccomm.MismatchError, "array 0 of the tree"),
        ({"op": "max"}, ValueError, "rank 1: `op` must be 'sum' or 'mean', got 'max'"),
        ({"codec": "unifrom"}, gccomm.UnknownCodecError, "rank 1: "),
        ({"x": np.array([None])}, TypeError, "rank 1: "),
        ({"x": {3: 1.0, "3": 2.0}}, ValueError, "rank 1: the keys 3 and '3'"),
        ({"out": np.ones(3, F4)}, ValueError, "rank 1: "),
        ({"x": np.full(3000, np.nan, F4), "nonfinite": "raise"}, gccomm.NonFiniteError, "rank 1: "),
    ],
    ids=["shape", "op", "codec", "object", "tree", "out", "nan"],
)
def test_errors_are_raised_by_wait_on_every_rank(arguments: Any, kind: Any, text: str) -> None:
    good = np.ones(3000, F4)

    def program(comm: gccomm.Communicator) -> str:
        options = {"x": good, "nonfinite": arguments.get("nonfinite", "propagate")}
        options |= arguments if comm.rank == 1 else {}
        first = comm.compressed_allreduce_async(good)
        bad = comm.compressed_allreduce_async(**options)
        last = comm.compressed_allreduce_async(good)
        texts = set()
        for _ in range(2):
            with pytest.raises(kind) as info:
                bad.wait()
            texts.add(str(info.value))
        assert "failed" in repr(bad)
        # the step of a failed call does not count
        equal(last.wait(), run_two(good, 1))
        equal(first.wait(), run_two(good, 0))
        (found,) = texts
        return found

    found = run(program, 2)
    assert found[0] == found[1]
    assert text in found[0]


def run_two(x: Array, index: int) -> Array:
    results: list[list[Array]] = run(lambda comm: [comm.compressed_allreduce(x) for _ in range(2)], 2)
    return results[0][index]


def test_temporary_inputs_are_kept_and_trees_may_change() -> None:
    def program(comm: gccomm.Communicator) -> list[Array]:
        if comm.rank == 1:
            time.sleep(0.1)
        tree = {"a": [np.full(3000, 2.0, F4)], "b": np.full((200, 10), 3.0).T}
        work = comm.compressed_allreduce_async(tree, codec="uniform")
        tree["a"].clear()
        tree.clear()
        gc.collect()
        noise = [np.full(3000, 77.0, F4) for _ in range(50)]
        result = work.wait()
        del noise
        return [result["a"][0], result["b"]]

    for a, b in run(program, 2):
        np.testing.assert_allclose(a, 4, atol=0.1)
        np.testing.assert_allclose(b, 6, atol=0.1)
        assert b.shape == (10, 200)


def test_results_in_place() -> None:
    def program(comm: gccomm.Communicator) -> Array:
        x = normal(comm.rank)
        assert comm.compressed_allreduce_async(x, out=x).wait() is x
        return x

    expected = run(lambda comm: comm.compressed_allreduce(normal(comm.rank)), 2)
    equal(run(program, 2), expected)


def test_figures_are_those_of_the_call_that_was_waited_for() -> None:
    def program(comm: gccomm.Communicator) -> None:
        large, small = (comm.compressed_allreduce_async(np.ones(size, F4)) for size in (5000, 3000))
        small.wait()
        assert comm.stats.codecs == {"rotated": 3000}
        large.wait()
        assert comm.stats.codecs == {"rotated": 5000}

    run(program, 2)


def test_dropped_handles_do_no_harm() -> None:
    def program(comm: gccomm.Communicator) -> float:
        for _ in range(20):
            comm.compressed_allreduce_async(normal(comm.rank))
        return float(comm.allreduce(1.0))

    assert run(program, 3) == [3.0] * 3


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_error_that_nobody_waits_for_is_a_warning(when: str) -> None:
    """Of a handle that is dropped before, or after, the call is made."""

    def program(comm: gccomm.Communicator) -> None:
        work = comm.compressed_allreduce_async(np.ones(3000 + comm.rank, F4))
        if when == "after":
            comm.barrier()
            assert work.test()
        del work
        comm.barrier()

    with pytest.warns(
        RuntimeWarning, match="failed, and nobody has waited for it: MismatchError: ranks"
    ) as seen:
        run(program, 2)
    assert len(seen) == 2
    assert all("compressed_allreduce_async on <gccomm.Communicator rank" in str(w.message) for w in seen)


def test_an_error_that_was_raised_is_no_warning() -> None:
    def program(comm: gccomm.Communicator) -> None:
        work = comm.compressed_allreduce_async(np.ones(3000 + comm.rank, F4))
        with pytest.raises(gccomm.MismatchError):
            work.wait()
        del work

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(program, 2)
        gc.collect()
    assert not caught


def test_the_thread_starts_with_the_first_call_and_ends_with_the_last_communicator() -> None:
    assert not threads()
    comm = gccomm.init("local")
    comm.compressed_allreduce(normal(0))
    gccomm.Reducer(comm=comm)({"w": normal(0)})
    assert "gccomm" not in [t.name for t in threading.enumerate()]
    work = comm.compressed_allreduce_async(normal(0))
    assert [t.name for t in threading.enumerate()].count("gccomm") == 1
    comm.compressed_allreduce_async(normal(0))
    assert [t.name for t in threading.enumerate()].count("gccomm") == 1
    comm.close()
    assert "gccomm" not in [t.name for t in threading.enumerate()]
    assert work.test()
    equal(work.wait(), work.wait())
    late = comm.compressed_allreduce_async(normal(0))
    with pytest.raises(gccomm.BackendError, match="this communicator is closed"):
        late.wait()
    assert "gccomm" not in [t.name for t in threading.enumerate()]


def test_threads_end_with_communicators_that_were_never_closed() -> None:
    for _ in range(5):
        run(lambda comm: comm.compressed_allreduce_async(1.0).wait(), 3)
    assert not threads()


def test_open_calls_are_completed_by_close() -> None:
    def program(comm: gccomm.Communicator) -> Array:
        with comm.split(0) as part:
            assert part is not None
            works = [part.compressed_allreduce_async(normal(part.rank, i)) for i in range(5)]
        assert all(work.test() for work in works)
        return np.stack([work.wait() for work in works])

    a, b = run(program, 2)
    equal(a, b)


def test_communicators_have_threads_of_their_own() -> None:
    """Two groups on the same ranks, waited for in different orders."""

    def program(comm: gccomm.Communicator) -> list[float]:
        parts = [comm.split(0) for _ in range(2)]
        order = parts if comm.rank == 0 else parts[::-1]
        works = {id(part): part.compressed_allreduce_async(1.0 + i) for i, part in enumerate(order)}  # type: ignore[union-attr]
        return [works[id(part)].wait() for part in parts]

    assert run(program, 2) == [[3.0, 3.0]] * 2


def test_threads_of_the_program_may_share_a_communicator() -> None:
    comm = gccomm.init("local")
    wrong: list[object] = []

    def work(value: float) -> None:
        x = np.full(3000, value, F4)
        for i in range(60):
            call = comm.compressed_allreduce_async if i % 3 else comm.compressed_allreduce
            made: Any = call(x, codec="uniform")
            y = made.wait() if i % 3 else made
            if np.abs(y - value).max() > value / 50:
                wrong.append((value, y[:3]))

    members = [threading.Thread(target=work, args=(v,)) for v in (1.0, 1000.0, 1e6)]
    for t in members:
        t.start()
    for t in members:
        t.join()
    assert not wrong
    comm.close()


def test_a_call_from_within_the_thread_is_refused() -> None:
    """As a finalizer would make it: it would wait for itself."""
    comm = gccomm.init("local")
    original, seen = comm._backend.maximum, []

    def maximum(words: Any) -> None:
        for call in (
            comm.barrier,
            comm.close,
            lambda: comm.compressed_allreduce_async(1.0),
            lambda: gccomm.Reducer(comm=comm)({"w": 1.0}),
            lambda: gccomm.Reducer(comm=comm).push("w", 1.0),
            lambda: work[0].wait(),
        ):
            with pytest.raises(gccomm.BackendError, match="from within") as info:
                call()
            seen.append(info.value)
        original(words)

    work: list[gccomm.Work] = []
    comm._backend.maximum = maximum  # type: ignore[method-assign]
    entered = threading.Event()
    comm._backend.set_activity = lambda _: entered.wait()  # type: ignore[method-assign]
    work.append(comm.compressed_allreduce_async(normal(0)))
    entered.set()
    work[0].wait()
    assert len(seen) == 6
    del comm._backend.maximum, comm._backend.set_activity
    comm.close()


def test_interrupt_of_a_wait_leaves_the_handle_usable() -> None:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    comm = gccomm.init("local")
    original, go = comm._backend.maximum, threading.Event()

    def maximum(words: Any) -> None:
        signal.raise_signal(signal.SIGINT)  # Python hands it to the main thread
        go.wait(10)
        original(words)

    comm._backend.maximum = maximum  # type: ignore[method-assign]
    try:
        work = comm.compressed_allreduce_async(normal(0))
        with pytest.raises(KeyboardInterrupt):  # in wait, or just before
            [work.wait(), time.sleep(10)]
        go.set()
        del comm._backend.maximum
        assert work.wait(10).shape == (3000,)
        assert comm.allreduce(1.0) == 1
    finally:
        signal.signal(signal.SIGINT, handler)
        comm.close()


def test_waits_give_the_core_away_while_the_program_computes() -> None:
    comm = gccomm.init("local")
    seen: list[bool] = []
    entered, waited = threading.Event(), threading.Event()
    original = comm._backend.maximum

    def maximum(words: Any) -> None:
        seen.append(comm._backend.background)  # type: ignore[attr-defined]
        entered.set()
        waited.wait(10)
        end = time.monotonic() + 10
        while comm._backend.background and time.monotonic() < end:  # type: ignore[attr-defined]
            time.sleep(0.001)
        seen.append(comm._backend.background)  # type: ignore[attr-defined]
        original(words)

    comm._backend.background = False  # type: ignore[attr-defined]
    comm._backend.maximum = maximum  # type: ignore[method-assign]
    work = comm.compressed_allreduce_async(normal(0))
    entered.wait()
    waited.set()
    work.wait()
    del comm._backend.maximum
    assert seen == [True, False]
    comm.barrier()
    assert comm._backend.background is False  # type: ignore[attr-defined]
    comm.close()


@pytest.mark.parametrize("without", [(0, 1, 2), (1,)])
def test_back_ends_that_allow_no_thread_refuse_on_every_rank(without: tuple[int, ...]) -> None:
    def program(comm: gccomm.Communicator) -> tuple[str, str]:
        if comm.rank in without:
            comm._backend.no_threads = "one thread only"  # type: ignore[attr-defined]
        work = comm.compressed_allreduce_async(normal(comm.rank))
        with pytest.raises(gccomm.NegotiationError) as first:
            work.wait()
        reducer = gccomm.Reducer(comm=comm)
        for key in "ab":
            reducer.push(key, normal(comm.rank))
        with pytest.raises(gccomm.NegotiationError) as second:
            reducer.wait()
        assert reducer({"a": normal(comm.rank)})["a"].shape == (3000,)
        assert comm.allreduce(1.0) == 3
        return str(first.value), str(second.value)

    text = f"rank {without[0]}: asynchronous calls are not possible: one thread only"
    assert run(program, 3) == [(text, text)] * 3


def test_a_broken_group_is_told_by_every_handle() -> None:
    def program(comm: gccomm.Communicator) -> None:
        if comm.rank == 1:
            comm._backend.abort("lost")
            return
        works = [comm.compressed_allreduce_async(normal(0)) for _ in range(3)]
        for work in works:
            with pytest.raises(gccomm.BackendError, match=r"lost|broken"):
                work.wait()
        later = comm.compressed_allreduce_async(normal(0))
        with pytest.raises(gccomm.BackendError, match="broken"):
            later.wait()
        comm.close()

    run(program, 2)


@pytest.mark.parametrize(
    "pair", list(itertools.permutations(["async", "blocking", "barrier", "broadcast"], 2))
)
def test_different_calls_are_told_apart(pair: tuple[str, str]) -> None:
    if set(pair) == {"async", "blocking"}:
        pytest.skip("the same call")

    def program(comm: gccomm.Communicator) -> str:
        def call() -> None:
            made = CALLS[pair[comm.rank]](comm, normal(0))
            if isinstance(made, gccomm.Work):
                made.wait()

        with pytest.raises(gccomm.MismatchError) as info:
            call()
        assert comm.allreduce(1) == 2
        return str(info.value)

    a, b = run(program, 2)
    assert a == b
