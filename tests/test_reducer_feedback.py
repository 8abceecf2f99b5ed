"""Error feedback: what a residual is, what it gains, and what becomes of it when a step goes wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
from gccomm_local import group

import gccomm
from gccomm import Reducer, testing
from gccomm.codecs.uniform import Uniform
from gccomm.errors import MismatchError, NegotiationError, NonFiniteError

Array = np.ndarray[Any, Any]
HALF = {4: 7, 8: 127}  # largest level of a lane


@pytest.fixture
def alone() -> Iterator[gccomm.Communicator]:
    with gccomm.Communicator(group(1)[0]) as comm:
        yield comm


def gaussian(rank: int, step: int = 0, size: int = 2048, dtype: Any = np.float32) -> Array:
    return np.asarray(np.random.default_rng([rank, step, size]).standard_normal(size).astype(dtype))


def reduced(reducer: Reducer, x: Array) -> Array:
    return np.asarray(reducer({"w": x})["w"])


def residual(reducer: Reducer, key: str = "w") -> Array:
    return np.asarray(reducer.state_dict()["residuals"][key])


def on_ranks(n: int) -> Callable[[Callable[[gccomm.Communicator], Any]], list[Any]]:
    """Decorate a function of a communicator: it becomes the results of n ranks."""
    return lambda body: testing.run(body, n)


class Biased(Uniform):
    """Says that its error has a mean."""

    id: ClassVar[str] = "test-biased"
    biased: ClassVar[bool] = True


def test_feedback_is_on_for_biased_codecs_and_where_asked(alone: gccomm.Communicator) -> None:
    tree = {"big": gaussian(0), "small": gaussian(0, size=100), "int": np.arange(2000)}
    options: Any = {"op": "sum", "comm": alone}
    for codec, asked, keys in (
        (Uniform(4), None, set()),
        (Uniform(4), True, {"big"}),
        (Uniform(4), False, set()),
        (Biased(4), None, {"big"}),
        (Biased(4), False, set()),
        ("bf16", True, {"big", "small"}),
    ):
        reducer = Reducer(codec, error_feedback=asked, **options)
        reducer(tree)
        assert set(reducer.state_dict()["residuals"]) == keys
    mixed = Reducer({"big": Biased(4), "*": "uniform"}, exact_below=0, **options)
    mixed(tree)
    assert set(mixed.state_dict()["residuals"]) == {"big"}


def test_feedback_needs_a_key(alone: gccomm.Communicator) -> None:
    reducer = Reducer("uniform", comm=alone, error_feedback=True)
    with pytest.raises(ValueError, match="error feedback needs a key"):
        reducer(gaussian(0))
    assert reducer.state_dict()["residuals"] == {}


@pytest.mark.parametrize(("width", "most"), [(2, 0), (3, 2), (4, 6), (8, 126)])
def test_feedback_is_refused_where_residuals_would_grow_for_ever(width: int, most: int) -> None:
    """A step must be smaller than the largest magnitude: more than one level a rank."""
    options: Any = {"error_feedback": True, "exact_below": 0}
    xs = [{"w": gaussian(rank, size=1024)} for rank in range(most + 1)]
    with pytest.raises(NegotiationError, match=r"error feedback.*wire_bits"):
        testing.simulate(xs, Uniform(width), **options)
    testing.simulate(xs, Uniform(width), exact_below=0)
    if most:
        testing.simulate(xs[:most], Uniform(width), **options)


@pytest.mark.parametrize("codec", ["uniform:wire_bits=4", "uniform:wire_bits=8", "bf16"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_residual_is_the_input_less_what_was_sent(alone: gccomm.Communicator, codec: str, dtype: Any) -> None:
    """On one rank the sum is what the rank sent; from the second step on the input is x + residual."""
    reducer = Reducer(codec, comm=alone, op="sum", error_feedback=True)
    carried = np.zeros(2048)
    unit = {np.float32: 2.0**-22, np.float64: 2.0**-22, np.float16: 2.0**-11}[dtype]
    for step in range(4):
        x = gaussian(0, step, dtype=dtype)
        v = x.astype(np.float64) + carried
        y = reduced(reducer, x).astype(np.float64)
        carried = residual(reducer).astype(np.float64)
        assert residual(reducer).dtype == (np.float64 if dtype is np.float64 else np.float32)
        np.testing.assert_allclose(carried, v - y, rtol=0, atol=unit * np.abs(v).max())
        assert np.abs(carried).max() > 1e-4


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("n", [2, 3])
def test_contributions_of_the_ranks_add_up_to_the_result(n: int, op: str) -> None:
    width = 8

    def body(comm: gccomm.Communicator) -> list[tuple[Array, Array, Array]]:
        reducer = Reducer(Uniform(width), op=op, error_feedback=True)
        carried, steps = np.zeros(2048, np.float32), []
        for step in range(3):
            v = gaussian(comm.rank, step) + carried
            y = reduced(reducer, gaussian(comm.rank, step))
            carried = residual(reducer)
            steps.append((v, y, carried))
        return steps

    for ranks in zip(*testing.run(body, n), strict=True):
        largest = np.max([np.abs(v).reshape(2, 1024).max(axis=1) for v, _, _ in ranks], axis=0)
        step_size = np.repeat(largest, 1024) * n / HALF[width] * (1 + 1e-3)
        sent = np.sum([v.astype(np.float64) - r for v, _, r in ranks], axis=0)
        np.testing.assert_allclose(sent / (n if op == "mean" else 1), ranks[0][1], atol=1e-5)
        for _, y, r in ranks:
            np.testing.assert_array_equal(y, ranks[0][1])
            assert (np.abs(r) <= step_size).all()  # not even one level is lost


def test_the_mean_of_results_converges_faster_than_without() -> None:
    n, steps = 3, 60
    xs = [gaussian(rank) for rank in range(n)]
    exact = np.sum([x.astype(np.float64) for x in xs], axis=0)

    def mean_error(comm: gccomm.Communicator, feedback: bool) -> Array:
        reducer = Reducer(Uniform(4), op="sum", error_feedback=feedback)
        total = sum(reduced(reducer, xs[comm.rank]).astype(np.float64) for _ in range(steps))
        return np.asarray(total / steps - exact)

    with_it = testing.run(lambda comm: mean_error(comm, True), n)[0]
    without = testing.run(lambda comm: mean_error(comm, False), n)[0]
    # The sum of all results is the sum of all inputs less the last residuals: the error falls as 1/steps.
    largest_step = 2 * max(float(np.abs(x).max()) for x in xs) * n / HALF[4]
    assert np.abs(with_it).max() <= n * largest_step / steps
    assert np.linalg.norm(with_it) < 0.5 * np.linalg.norm(without)


def test_another_shape_starts_again_from_zero_with_a_warning(alone: gccomm.Communicator) -> None:
    reducer = Reducer("uniform:wire_bits=4", comm=alone, op="sum", error_feedback=True)
    fresh = Reducer("uniform:wire_bits=4", comm=alone, op="sum", error_feedback=True)
    for step, x in enumerate((gaussian(0), gaussian(0, size=4000), gaussian(0, size=4000, dtype=np.float64))):
        if step:
            with pytest.warns(
                UserWarning, match=r"the array 'w' changed to float.*\[4000\].*from zero"
            ) as record:
                y = reducer({"w": x})["w"]
            assert [w.filename for w in record] == [__file__]
        else:
            y = reducer({"w": x})["w"]
        fresh.load_state_dict({**fresh.state_dict(), "step": step, "residuals": {}})
        np.testing.assert_array_equal(y, fresh({"w": x})["w"])
    before = reducer.state_dict()["residuals"]["w"]
    with pytest.warns(UserWarning, match=r"'w' changed to float64\[40, 100\]"):  # as many, but others
        reducer({"w": x.reshape(40, 100)})
    assert not np.array_equal(before, reducer.state_dict()["residuals"]["w"])


def test_a_step_that_is_not_finite_does_not_poison_the_residual() -> None:
    @on_ranks(2)
    def results(comm: gccomm.Communicator) -> tuple[Array, Array, Array]:
        reducer = Reducer("uniform:wire_bits=4", op="sum", error_feedback=True)
        reduced(reducer, gaussian(comm.rank, 0))
        before = residual(reducer)
        bad = gaussian(comm.rank, 1)
        bad[1500] = (np.nan, -np.inf)[comm.rank]
        assert np.isnan(reduced(reducer, bad)[1024:]).all()
        return before, residual(reducer), reduced(reducer, gaussian(comm.rank, 2))

    for before, after, y in results:
        np.testing.assert_array_equal(after[1024:], before[1024:])  # the block that was lost keeps it
        assert (after[:1024] != before[:1024]).any()
        assert np.isfinite(after).all()
        assert np.isfinite(y).all()


def test_a_step_that_fails_changes_neither_residual_nor_step() -> None:
    @on_ranks(2)
    def results(comm: gccomm.Communicator) -> Any:
        reducer = Reducer("uniform:wire_bits=4", op="sum", error_feedback=True, nonfinite="raise")
        tree = {"w": gaussian(comm.rank), "i": np.array([100], np.int8)}
        reducer({**tree, "i": np.array([1], np.int8)})
        before = residual(reducer)
        with pytest.raises(OverflowError):
            reducer(tree)
        with pytest.raises(NonFiniteError):
            reducer({**tree, "w": tree["w"] / np.float32(comm.rank or math.nan)})
        with pytest.raises(MismatchError):
            reducer({"vw"[comm.rank]: tree["w"]})
        return before, residual(reducer), reducer.step

    for before, after, step in results:
        np.testing.assert_array_equal(after, before)
        assert step == 1


def test_none_sends_what_is_left_and_keeps_it_where_nobody_has_the_key() -> None:
    @on_ranks(2)
    def results(comm: gccomm.Communicator) -> Any:
        reducer = Reducer("uniform:wire_bits=4", op="sum", error_feedback=True)
        reducer({"w": gaussian(comm.rank)})
        first = residual(reducer)
        assert reducer({"w": None}) == {"w": None}
        assert reducer.step == 2
        kept = residual(reducer)
        y = reducer({"w": None if comm.rank else gaussian(0, 2)})["w"]
        return first, kept, y, residual(reducer)

    for first, kept, _, _ in results:
        np.testing.assert_array_equal(first, kept)
    inputs = [gaussian(0, 2) + results[0][0], results[1][0]]
    sent = np.sum([v.astype(np.float64) - r[3] for v, r in zip(inputs, results, strict=True)], axis=0)
    np.testing.assert_allclose(results[0][2], sent, atol=1e-5)
    np.testing.assert_array_equal(results[0][2], results[1][2])


def test_residuals_do_not_depend_on_how_tensors_are_cut() -> None:
    def inputs(step: int) -> list[dict[str, Array]]:
        return [
            {"w": gaussian(r, step, 5500).reshape(5, 1100), "v": gaussian(r, step, 1500)} for r in range(3)
        ]

    options: Any = {"codec": Uniform(4), "steps": 3, "error_feedback": True}
    expected, _ = testing.simulate(inputs, **options)
    cuts: list[dict[str, Any]] = [
        {"piece_coordinates": 1},
        {"piece_coordinates": 2500},
        {"bucket_bytes": 9000, "one_host": False},
    ]
    for cut in cuts:
        ys, _ = testing.simulate(inputs, **options, **cut)
        for key, y in ys[0].items():
            np.testing.assert_array_equal(y, expected[0][key])
