"""The state of a ``Reducer``: a resumed run goes on to the bit."""

from __future__ import annotations

import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gccomm_local import group

import gccomm
from gccomm import Reducer, testing

Array = np.ndarray[Any, Any]


def gaussian(rank: int, step: int, size: int, dtype: Any = np.float32) -> Array:
    return np.asarray(np.random.default_rng([rank, step, size]).standard_normal(size).astype(dtype))


def tree_of(rank: int, step: int) -> dict[str, Any]:
    return {
        "w": gaussian(rank, step, 3000).reshape(3, 1000),
        "d": gaussian(rank, step, 1500, np.float64),
        "h": gaussian(rank, step, 1200, np.float16),
        "b": gaussian(rank, step, 1100, ml_dtypes.bfloat16),
        "c": gaussian(rank, step, 9).astype(np.complex64),
        "s": gaussian(rank, step, 7),
        "i": np.arange(step, step + 5),
    }


def make_reducer(**options: Any) -> Reducer:
    return Reducer(
        "uniform:wire_bits=4", op={"i": "sum", "*": "mean"}, error_feedback=True, seed=5, **options
    )


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for key, x in a.items():
        np.testing.assert_array_equal(x, b[key], err_msg=key, strict=True)


def test_a_resumed_run_goes_on_to_the_bit() -> None:
    def uninterrupted(comm: gccomm.Communicator) -> list[dict[str, Any]]:
        reducer = make_reducer()
        return [reducer(tree_of(comm.rank, step)) for step in range(6)]

    def first_half(comm: gccomm.Communicator) -> bytes:
        reducer = make_reducer()
        for step in range(3):
            reducer(tree_of(comm.rank, step))
        state = reducer.state_dict()
        reducer(tree_of(comm.rank, 3))  # changes nothing in what was taken
        return pickle.dumps(state)

    saved = testing.run(first_half, 2)

    def second_half(comm: gccomm.Communicator) -> list[dict[str, Any]]:
        reducer = make_reducer()
        state = pickle.loads(saved[comm.rank])
        reducer.load_state_dict(state)
        for value in state["residuals"].values():
            value[:] = 1e9  # what was given stays the caller's
        assert reducer.step == 3
        return [reducer(tree_of(comm.rank, step)) for step in range(3, 6)]

    for whole, rest in zip(testing.run(uninterrupted, 2), testing.run(second_half, 2), strict=True):
        for expected, got in zip(whole[3:], rest, strict=True):
            assert_same(got, expected)


def test_a_resumed_run_knows_the_keys_of_the_run_before() -> None:
    """None on a rank counts as zeros for a key that was reduced before, resumed or not; dtypes stay."""

    def body(comm: gccomm.Communicator, resume: bool) -> dict[str, Any]:
        reducer = make_reducer()
        reducer(tree_of(comm.rank, 0))
        if resume:
            state = pickle.loads(pickle.dumps(reducer.state_dict()))
            reducer = make_reducer()
            reducer.load_state_dict(state)
        tree = tree_of(comm.rank, 1)
        return dict(reducer(dict.fromkeys(tree) if comm.rank else tree))

    def uninterrupted(comm: gccomm.Communicator) -> dict[str, Any]:
        make_reducer()  # as many reducers on all ranks and in both runs
        return body(comm, resume=False)

    resumed = testing.run(lambda comm: body(comm, resume=True), 2)
    for got, expected in zip(resumed, testing.run(uninterrupted, 2), strict=True):
        assert_same(got, expected)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"version": 1}, "version 1"),
        ({"seed": 6}, "seed 6"),
        ({"step": None}, "lacks step"),
        ({"residuals": {"w": np.zeros((2, 2), np.float32)}}, r"'w' must be flat.*float32\[2, 2\]"),
        ({"residuals": {"w": np.zeros(2, np.int64)}}, "'w' must be flat float32 or float64, got int64"),
    ],
)
def test_states_that_do_not_fit_are_refused(change: Any, match: str) -> None:
    reducer = make_reducer(comm=gccomm.Communicator(group(1)[0]))
    reducer(tree_of(0, 0))
    state = {k: v for k, v in (reducer.state_dict() | change).items() if v is not None}
    before = pickle.dumps(reducer.state_dict())
    with pytest.raises(ValueError, match=match):
        reducer.load_state_dict(state)
    assert pickle.dumps(reducer.state_dict()) == before


def test_a_resumed_run_learns_again_what_kind_of_arrays_its_results_are() -> None:
    """A checkpoint knows no array library: from the first array on, None gives results of its kind again."""
    torch = pytest.importorskip("torch")

    def body(comm: gccomm.Communicator) -> dict[str, Any]:
        tree = {"w": torch.ones(2000), "b": torch.ones(5, dtype=torch.bfloat16)}
        first = Reducer("raw", op="sum")
        first(tree)
        reducer = Reducer("raw", op="sum")
        reducer.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
        reducer(tree)
        return dict(reducer(dict.fromkeys(tree) if comm.rank else tree))

    for result in testing.run(body, 2):
        assert [type(x) for x in result.values()] == [torch.Tensor, torch.Tensor]
        assert [x.dtype for x in result.values()] == [torch.float32, torch.bfloat16]
        assert all((x == 1).all() for x in result.values())


STATEFUL = {
    "rotated:headroom=checked": ("ratio", [float("nan"), -1.0, "abc", None]),
    "uniform:scales=predicted": ("scales", [np.zeros(3, np.uint32), np.full(4, 0xFFFFFFFF, np.uint32), 1.0]),
    "intsgd": ("r", [float("nan"), -1.0, "abc"]),
    "powersgd": ("q", [np.zeros((2, 2), np.float32), 3.0]),
}


@pytest.mark.parametrize("codec", STATEFUL)
def test_malformed_states_of_codecs_are_refused(codec: str) -> None:
    """Before any call: with the codec and the key, and what is wrong."""
    x = {"w": np.random.default_rng(0).standard_normal((40, 100)).astype(np.float32)}
    first = Reducer(codec)
    first(x)
    name, values = STATEFUL[codec]
    for value in values:
        state = first.state_dict()
        state["states"]["w"]["values"][name] = value
        with pytest.raises(ValueError, match="adapted for 'w'"):
            Reducer(codec).load_state_dict(state)
    state = first.state_dict()
    del state["states"]["w"]["values"][name]
    with pytest.raises(ValueError, match=f"KeyError: '{name}'"):
        Reducer(codec).load_state_dict(state)
    Reducer(codec).load_state_dict(first.state_dict())


@pytest.mark.parametrize("codec", STATEFUL)
@pytest.mark.parametrize("other", STATEFUL)
@pytest.mark.filterwarnings("ignore:what .* adapted for 'w'")
def test_states_of_other_codecs_are_left_aside(codec: str, other: str) -> None:
    """On one rank only they are a mismatch for all; on all ranks the key starts anew."""
    x = {"w": np.random.default_rng(0).standard_normal((40, 100)).astype(np.float32)}

    def program(comm: gccomm.Communicator) -> np.ndarray[Any, Any]:
        old, new = Reducer(other, comm=comm), Reducer(codec, comm=comm)
        old(x)
        state = {**old.state_dict(), "step": 0}
        if comm.rank == 0:
            new.load_state_dict(state)
        with pytest.raises(gccomm.MismatchError, match="state"):
            new(x)
        if comm.rank:
            new.load_state_dict(state)
        result: np.ndarray[Any, Any] = new(x)["w"]
        return result

    if codec != other:
        for y in gccomm.testing.run(program, ranks=2):
            assert np.isfinite(y).all()


def test_the_state_of_another_codec_is_named() -> None:
    """Both codecs and the key: the checkpoint is likely of another run."""
    x = {"w": np.ones((40, 100), np.float32)}
    old = Reducer("intsgd")
    old(x)
    with pytest.warns(UserWarning, match=r"intsgd.* adapted for 'w' is of no use to .*powersgd"):
        Reducer("powersgd").load_state_dict(old.state_dict())
