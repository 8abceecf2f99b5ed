"""``Reducer.push`` and ``wait``: steps given key by key equal those of a call."""

from __future__ import annotations

import threading
import time
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import gccomm
from gccomm import Reducer
from gccomm.testing import run
from tests.pushing import F4, fails, layers, normal, push_all, same, same_state

pytestmark = pytest.mark.timeout(60)

OPS = {"tokens": "sum", "*": "mean"}
CASES: dict[str, dict[str, Any]] = {
    "rotated": {"codec": "rotated"},
    "4 bits, feedback": {"codec": "uniform:wire_bits=4", "error_feedback": True},
    "checked": {"codec": "rotated:headroom=checked"},
    "predicted": {"codec": "rotated:scales=predicted", "error_feedback": True},
    "predicted uniform": {"codec": "uniform:scales=predicted"},
    "intsgd": {"codec": "intsgd"},
    "thc": {"codec": "thc"},
    "qsgd": {"codec": "qsgd-mn-ts:norm=max"},
    "patterns": {"codec": {"layer/[02]": "uniform", "layer/1": "grandk-mn", "wide": "thc", "*": "rotated"}},
}


def compare(
    comm: gccomm.Communicator, options: dict[str, Any], bucket_bytes: int, steps: int, seed: int
) -> None:
    pushed = Reducer(**options, comm=comm, op=OPS, bucket_bytes=bucket_bytes)
    called = Reducer(**options, comm=comm, op=OPS)
    for step in range(steps):
        tree = layers(comm.rank, step)
        same(push_all(pushed, tree, seed + 10 * step + comm.rank), called(tree))
        same_state(pushed, called)
        assert pushed.stats.float32_bytes == called.stats.float32_bytes
        assert pushed.stats.codecs == called.stats.codecs
        assert pushed.stats.clamps == called.stats.clamps
        assert pushed.stats.spans_redone == called.stats.spans_redone
        if step:
            assert pushed.stats.messages >= called.stats.messages


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n", [1, 3, 4])
def test_a_pushed_step_equals_a_call(case: str, n: int) -> None:
    run(lambda comm: compare(comm, CASES[case], 20_000, 5, 7), n)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(sorted(CASES)),
    st.integers(1, 4),
    st.sampled_from([1, 9000, 40_000, 1 << 30]),
    st.integers(0, 99),
)
def test_whatever_the_order_and_the_buckets(case: str, n: int, bucket_bytes: int, seed: int) -> None:
    run(lambda comm: compare(comm, CASES[case], bucket_bytes, 3, seed), n)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=6), st.integers(1, 3))
def test_pushed_steps_and_calls_may_alternate(pushes: list[bool], n: int) -> None:
    def program(comm: gccomm.Communicator) -> None:
        options: Any = {"codec": "uniform:wire_bits=4", "error_feedback": True, "op": OPS, "comm": comm}
        mixed, called = Reducer(**options, bucket_bytes=20_000), Reducer(**options)
        for step, pushing in enumerate(pushes):
            tree = layers(comm.rank, step)
            same(push_all(mixed, tree) if pushing else mixed(tree), called(tree))
            same_state(mixed, called)

    run(program, n)


def settled(reducer: Reducer, count: int) -> int:
    """Return how many buckets of the open step are through, once they are ``count`` or time is up."""
    step, end = reducer._pushes._step, time.monotonic() + 10
    assert step is not None
    while len(step.attempts) < count and time.monotonic() < end:
        time.sleep(0.005)
    return len(step.attempts)


def test_buckets_are_sent_in_the_order_of_rank_0_as_soon_as_they_are_complete() -> None:
    there = threading.Barrier(2)

    def program(comm: gccomm.Communicator) -> list[list[str]]:
        reducer = Reducer("uniform", comm=comm, bucket_bytes=16_000)
        keys = ["d", "a", "c", "b", "e"] if comm.rank == 0 else ["a", "b", "c", "d", "e"]
        for step in range(3):
            for i, key in enumerate(keys):
                reducer.push(key, normal(comm.rank, step, size=1900))
                if step:  # 7600 bytes each: two a bucket
                    there.wait()
                    # d, a | c, b | e: rank 1 has the first two complete with its fourth key
                    assert settled(reducer, complete := 2 * int(i >= 3)) == complete
                    there.wait()
            assert list(reducer.wait()) == keys
        return reducer._pushes._buckets

    for buckets in run(program, 2):
        assert buckets == [["d", "a"], ["c", "b"], ["e"]]


def test_a_large_array_is_a_bucket_of_its_own() -> None:
    def program(comm: gccomm.Communicator) -> list[list[str]]:
        reducer = Reducer("uniform", comm=comm, bucket_bytes=9000)
        for key, size in (("a", 500), ("b", 5000), ("c", 1000), ("d", 1000), ("e", 250)):
            reducer.push(key, np.ones(size, F4))
        reducer.wait()
        return reducer._pushes._buckets

    assert run(program, 1) == [[["a"], ["b"], ["c", "d", "e"]]]


def test_missing_keys_count_as_none() -> None:
    """Zeros where another rank has the key, None where none has."""

    def program(comm: gccomm.Communicator) -> None:
        options: Any = {"codec": "uniform:wire_bits=4", "error_feedback": True, "op": "sum", "comm": comm}
        pushed, called = Reducer(**options, bucket_bytes=9000), Reducer(**options)
        for step in range(5):
            tree: dict[str, Any] = {k: normal(comm.rank, step, i) for i, k in enumerate("abcdef")}
            gone = {"abcde"[(step + i) % 5] for i in range(comm.rank)} if step else set()
            if step > 1:
                gone.add("f")
            result = push_all(pushed, {k: v for k, v in tree.items() if k not in gone}, step)
            same(result, called({k: None if k in gone else v for k, v in tree.items()}))
            same_state(pushed, called)
            assert (result["f"] is None) == (step > 1)
            assert all(result[key] is not None for key in "abcde")

    run(program, 3)


def test_values_may_be_trees_and_missing_ones_keep_their_structure() -> None:
    def program(comm: gccomm.Communicator) -> None:
        pushed, called = (Reducer("uniform", comm=comm, bucket_bytes=9000) for _ in range(2))
        for step in range(4):
            tree = {
                "a/b~c": {"w": normal(comm.rank, step).reshape(40, 50), "b": [normal(step, size=3), None]},
                "head": normal(comm.rank, step, 1),
                "none": None,
                "empty": {},
            }
            if step == 2 and comm.rank == 1:
                result = push_all(pushed, {k: v for k, v in tree.items() if k == "head"})
                tree["a/b~c"] = {"w": None, "b": [None, None]}
                del tree["empty"]
            else:
                result = push_all(pushed, tree)
            same(result, called(tree))

    run(program, 2)


def test_new_keys_join_the_order() -> None:
    def program(comm: gccomm.Communicator) -> list[list[str]]:
        pushed, called = (Reducer("uniform:wire_bits=4", comm=comm, bucket_bytes=9000) for _ in range(2))
        keys = ["b", "a"]
        for step in range(4):
            tree = {k: normal(comm.rank, step, ord(k)) for k in keys}
            same(push_all(pushed, tree, comm.rank), called(tree))
            if step == 1:
                keys = ["z", "b", "c", "a"]
        return pushed._pushes._buckets

    first, *others = run(program, 3)
    assert others == [first] * 2
    assert sorted(first[:2]) == [["a"], ["b"]]
    assert first[2:] == [["c"], ["z"]]


def test_calls_between_pushes() -> None:
    """Other calls on the same ranks are made in the order of the program; the reducer's own is refused."""

    def program(comm: gccomm.Communicator) -> list[Any]:
        reducer, other, third = (Reducer("uniform", comm=comm, bucket_bytes=9000) for _ in range(3))
        tree = {k: normal(comm.rank, i) for i, k in enumerate("abcdef")}
        found: list[Any] = []
        for _ in range(3):
            for i, (name, array) in enumerate(tree.items()):
                reducer.push(name, array)
                if i == 3:
                    found += [comm.allreduce(1.0), third(tree)["a"][0], comm.compressed_allreduce(array)[0]]
                    with pytest.raises(ValueError, match=r"was begun by push\(\): end it by wait\(\)"):
                        reducer(tree)
                    with pytest.raises(gccomm.GccommError, match=r"end their step by wait\(\)"):
                        reducer.load_state_dict(reducer.state_dict())
                other.push(name, array)
            found.append(reducer.wait()["f"][0])
            found.append(other.wait()["f"][0])
        return found

    a, b = run(lambda comm: program(comm), 2)
    assert a == b


def test_a_call_on_one_rank_while_others_push_is_told_by_all() -> None:
    def program(comm: gccomm.Communicator) -> list[str]:
        reducer = Reducer("uniform", comm=comm, bucket_bytes=9000)
        tree = {k: normal(comm.rank, i) for i, k in enumerate("abc")}
        push_all(reducer, tree)
        if comm.rank == 1:
            texts = [fails(reducer, gccomm.MismatchError, lambda: reducer(tree))]
        else:
            for key, array in tree.items():
                reducer.push(key, array)
            texts = [fails(reducer, gccomm.MismatchError)]
        push_all(reducer, tree)
        return texts

    a, b = run(program, 2)
    assert a == b
    assert "pushed: bucket 1 of 3" in a[0]


def test_state_while_arrays_are_pushed_is_that_before_the_step() -> None:
    def program(comm: gccomm.Communicator) -> None:
        reducer = Reducer("uniform:wire_bits=4", comm=comm, bucket_bytes=9000, error_feedback=True)
        tree = {k: normal(comm.rank, i) for i, k in enumerate("abcdef")}
        push_all(reducer, tree)
        before = reducer.state_dict()
        for key, array in tree.items():
            reducer.push(key, array)
        middle = reducer.state_dict()
        comm.barrier()
        assert middle["step"] == before["step"] == 1
        same(before["residuals"], middle["residuals"])
        first = reducer.wait()
        reducer.load_state_dict(middle)
        same(push_all(reducer, tree), first)

    run(program, 2)


def test_a_wait_that_was_interrupted_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = gccomm.init("local")
    reducer, other = Reducer("uniform", comm=comm), Reducer("uniform", comm=comm)
    join = comm.join

    def interrupted(_: Any) -> Any:
        raise KeyboardInterrupt

    for end in ("wait", "discard"):
        reducer.push("a", normal(0))
        monkeypatch.setattr(comm, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            reducer.wait()
        monkeypatch.setattr(comm, "join", join)
        with pytest.raises(gccomm.GccommError, match=r"call wait\(\) again"):
            reducer.push("b", normal(0))
        result = getattr(reducer, end)()
        expected = other({"a": normal(0)})
        if end == "wait":
            same(result, expected)
        same_state(reducer, other)
    comm.close()


def test_more_buckets_than_plans_that_are_kept() -> None:
    def program(comm: gccomm.Communicator) -> None:
        reducer = Reducer("uniform", comm=comm, bucket_bytes=1)
        for step in range(4):
            push_all(reducer, {str(i): normal(comm.rank, step, i) for i in range(40)})
        assert len(reducer._reduction._plans) == 41

    run(program, 2)


def test_a_changed_shape_is_noted_where_wait_is_called() -> None:
    comm = gccomm.init("local")
    reducer = Reducer("uniform:wire_bits=4", comm=comm, error_feedback=True)
    push_all(reducer, {"a": normal(0), "b": normal(1)})
    reducer.push("a", normal(0, size=3000))
    reducer.push("b", normal(1))
    with pytest.warns(UserWarning, match="'a' changed to float32.*starts again from zero") as seen:
        reducer.wait()
    assert [w.filename for w in seen] == [__file__]
    comm.close()
