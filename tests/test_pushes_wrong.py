"""Pushed steps that go wrong on some ranks: one error on all, nothing changed, and the next step works."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gccomm
from gccomm import Reducer
from gccomm.testing import run
from tests.pushing import F4, after_two_steps, fails, normal, push_all, same, same_state

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("odd", [{1}, {0, 1, 2}])
@pytest.mark.parametrize("at", [0, 3, 6])
def test_a_key_pushed_twice(odd: set[int], at: int) -> None:
    def wrong(reducer: Reducer, comm: gccomm.Communicator, tree: dict[str, Any]) -> str:
        keys = list(tree)
        for i, key in enumerate([*keys, "end"]):
            if i == max(at, 1) and comm.rank in odd:
                reducer.push("a", tree["a"])
            if key != "end":
                reducer.push(key, tree[key])
        return fails(reducer, ValueError)

    text = after_two_steps(wrong)
    assert text == f"rank {min(odd)}: the key 'a' was pushed twice in step 2: call wait() between steps"


@pytest.mark.parametrize(
    ("key", "value", "kind", "part"),
    [
        (3, np.ones(3, F4), TypeError, "`key` must be a str, got 3 of type int"),
        ("c", object(), TypeError, "array 'c': "),
        ("c", "text", TypeError, "array 'c': "),
        ("c", {1: 1.0, "1": 2.0}, ValueError, "have the same text '1'"),
        ("f", object(), TypeError, "array 'f': "),
    ],
)
def test_a_wrong_argument_on_one_rank(key: Any, value: Any, kind: type[Exception], part: str) -> None:
    def wrong(reducer: Reducer, comm: gccomm.Communicator, tree: dict[str, Any]) -> str:
        for name, array in tree.items():
            reducer.push(
                *((key, value) if comm.rank == 2 and name == (key if key != 3 else "d") else (name, array))
            )
        return fails(reducer, kind)

    text = after_two_steps(wrong)
    assert text.startswith("rank 2: ")
    assert part in text


def test_arrays_that_differ_are_named() -> None:
    def wrong(reducer: Reducer, comm: gccomm.Communicator, tree: dict[str, Any]) -> str:
        for name, array in tree.items():
            reducer.push(name, array[:-1] if comm.rank == 0 and name == "d" else array)
        return fails(reducer, gccomm.MismatchError)

    assert "'d': float32[1999]" in after_two_steps(wrong)


def test_a_new_key_on_one_rank_is_told_by_all() -> None:
    def wrong(reducer: Reducer, comm: gccomm.Communicator, tree: dict[str, Any]) -> str:
        if comm.rank == 1:
            reducer.push("new", normal(0))
        for name, array in tree.items():
            reducer.push(name, array)
        return fails(reducer, gccomm.MismatchError)

    assert "'new': float32[2000]" in after_two_steps(wrong)


@pytest.mark.parametrize("odd", [{0}, {0, 1, 2}])
def test_wait_without_a_push(odd: set[int]) -> None:
    def wrong(reducer: Reducer, comm: gccomm.Communicator, tree: dict[str, Any]) -> str:
        for name, array in tree.items():
            if comm.rank not in odd:
                reducer.push(name, array)
        return fails(reducer, ValueError)

    text = after_two_steps(wrong)
    assert text.startswith("rank 0: wait() without a push in step 2: push None for a key if this rank has no")


def test_none_pushed_by_a_rank_without_gradients() -> None:
    def program(comm: gccomm.Communicator) -> dict[str, Any]:
        reducer = Reducer("raw", comm=comm, op="sum")
        push_all(reducer, {"a": np.ones(3000, F4), "b": np.ones(3, F4)})
        return push_all(reducer, {"a": None} if comm.rank else {"a": np.ones(3000, F4), "b": np.ones(3, F4)})

    for result in run(program, 2):
        assert {key: set(value.tolist()) for key, value in result.items()} == {"a": {1.0}, "b": {1.0}}


@pytest.mark.parametrize("kept", [0, 1, 4, 6])
@pytest.mark.parametrize("odd", [{1}, {0, 1, 2}])
def test_a_step_that_is_discarded(odd: set[int], kept: int) -> None:
    """By one rank, which tells the others, or by all; each after another number of pushes."""

    def wrong(reducer: Reducer, comm: gccomm.Communicator, tree: dict[str, Any]) -> str:
        for i, (name, array) in enumerate(tree.items()):
            if comm.rank not in odd or i < (kept + comm.rank) % 7:
                reducer.push(name, array)
        if comm.rank not in odd:
            return fails(reducer, gccomm.GccommError)
        step = reducer.step
        reducer.discard()
        assert (reducer.step, reducer._pushes.open) == (step, False)
        return "rank 1: step 2 was discarded"

    assert after_two_steps(wrong) == "rank 1: step 2 was discarded"


def test_a_first_step_that_fails_agrees_on_nothing() -> None:
    def program(comm: gccomm.Communicator) -> str:
        pushed, called = (Reducer("uniform", comm=comm, bucket_bytes=9000) for _ in range(2))
        tree = {k: normal(comm.rank, i) for i, k in enumerate("abc")}
        for name in "ab" if comm.rank else "abc":
            pushed.push(name, tree[name])
        text = fails(pushed, gccomm.MismatchError)
        pushed.push("a", 1.0)
        pushed.discard()
        assert pushed._pushes._buckets == []
        for _ in range(3):
            same(push_all(pushed, tree, comm.rank), called(tree))
        return text

    texts = run(program, 2)
    assert texts[0] == texts[1]
    assert "array 2 of the tree" in texts[0]


@pytest.mark.parametrize("name", ["a", "d", "f"])
def test_not_a_number_in_one_bucket_fails_the_step(name: str) -> None:
    def program(comm: gccomm.Communicator) -> str:
        options: Any = {
            "codec": "uniform:wire_bits=4",
            "error_feedback": True,
            "nonfinite": "raise",
            "comm": comm,
        }
        pushed, called = Reducer(**options, bucket_bytes=9000), Reducer(**options)
        tree = {k: normal(comm.rank, i) for i, k in enumerate("abcdef")}
        for _ in range(2):
            same(push_all(pushed, tree), called(tree))
        bad = {**tree, name: np.full(2000, np.nan if comm.rank == 1 else 1, F4)}
        for key, array in bad.items():
            pushed.push(key, array)
        text = fails(pushed, gccomm.NonFiniteError)
        same(push_all(pushed, tree), called(tree))
        same_state(pushed, called)
        return text

    assert set(run(program, 2)) == {f"rank 1: input holds inf or NaN in {name!r}. Nothing was changed"}


def test_integers_that_overflow_fail_the_step() -> None:
    def program(comm: gccomm.Communicator) -> str:
        reducer = Reducer("uniform", comm=comm, op="sum", bucket_bytes=9000)
        tree = {k: normal(comm.rank, i) for i, k in enumerate("abc")}
        push_all(reducer, {**tree, "n": np.int8(1)})
        for key, value in {**tree, "n": np.int8(100)}.items():
            reducer.push(key, value)
        text = fails(reducer, OverflowError)
        assert push_all(reducer, {**tree, "n": np.int8(50)})["n"] == 100
        return text

    assert "1 integer sums do not fit int8 in 'n'" in run(program, 2)[0]
