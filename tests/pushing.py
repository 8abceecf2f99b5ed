"""What tests of pushed steps share: gradients, and comparisons of steps and reducers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gccomm
from gccomm import Reducer
from gccomm.testing import run

F4 = np.float32
Array = np.ndarray[Any, Any]


def normal(*seed: int, size: int = 2000) -> Array:
    return np.random.default_rng([*seed, size]).standard_normal(size).astype(F4)


def layers(rank: int, step: int, count: int = 7) -> dict[str, Any]:
    """Return gradients of several sizes, dtypes and shapes; some are small, one is an integer."""
    tree: dict[str, Any] = {f"layer/{i}": normal(rank, step, i, size=1500 + 700 * i) for i in range(count)}
    tree["bias"] = normal(rank, step, 99, size=10)
    tree["wide"] = normal(rank, step, 98, size=6000).reshape(6, 1000).astype(np.float64)
    tree["tokens"] = rank + step
    return tree


def push_all(reducer: Reducer, tree: dict[str, Any], shuffle: int | None = None) -> dict[str, Any]:
    keys = list(tree)
    if shuffle is not None:
        np.random.default_rng(shuffle).shuffle(keys)
    for key in keys:
        reducer.push(key, tree[key])
    return reducer.wait()


def same(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif a is None or b is None:
        assert a is b
    else:
        assert np.asarray(a).dtype == np.asarray(b).dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def same_state(one: Reducer, two: Reducer) -> None:
    a, b = one.state_dict(), two.state_dict()
    assert a.keys() == b.keys()
    for key in ("step", "seed", "layouts"):
        assert a[key] == b[key]
    same(a["residuals"], b["residuals"])
    assert a["states"].keys() == b["states"].keys()
    for key, state in a["states"].items():
        other = dict(b["states"][key])
        values, others = state.pop("values"), other.pop("values")
        assert state == other
        # a float64 sum, in an order that hangs on where pieces end
        assert values.pop("ratio", 1.0) == pytest.approx(others.pop("ratio", 1.0), rel=1e-13)
        same(values, others)


def fails(reducer: Reducer, kind: type[Exception], end: Callable[[], Any] | None = None) -> str:
    """Return the text of the error with which a step ends; it counts for nothing."""
    step = reducer.step
    before = reducer.state_dict()
    with pytest.raises(kind) as info:
        (end or reducer.wait)()
    assert reducer.step == step
    assert not reducer._pushes.open
    same(before["residuals"], reducer.state_dict()["residuals"])
    return str(info.value)


def after_two_steps(wrong: Callable[[Reducer, gccomm.Communicator, dict[str, Any]], str], n: int = 3) -> str:
    """Run ``wrong`` in the third step; return its text, the same on all ranks. The next steps are right."""

    def program(comm: gccomm.Communicator) -> str:
        options: Any = {"codec": "uniform:wire_bits=4", "error_feedback": True, "comm": comm}
        pushed, called = Reducer(**options, bucket_bytes=9000), Reducer(**options)
        for step in range(2):
            tree = {k: normal(comm.rank, step, i) for i, k in enumerate("abcdef")}
            same(push_all(pushed, tree), called(tree))
        text = wrong(pushed, comm, tree)
        for step in range(2):
            tree = {k: normal(comm.rank, step, i) for i, k in enumerate("abcdef")}
            same(push_all(pushed, tree), called(tree))
            same_state(pushed, called)
        return text

    texts = set(run(program, n))
    assert len(texts) == 1
    return texts.pop()
