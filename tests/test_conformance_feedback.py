"""What every codec must keep of error feedback and of adapted state: nothing is lost, poisoned, forgotten."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import gccomm
from gccomm import testing
from gccomm.errors import NegotiationError
from tests.conformance import (
    FEEDBACK_ROWS,
    ROWS,
    Row,
    assert_same_bits,
    bits_of,
    draw,
    over,
)
from tests.conformance_bounds import FORMATS, Array, block_maxima, block_numbers, reals
from tests.conformance_driver import KEY, Ranks

Steps = Sequence[Sequence[dict[str, Any]]]  # a tree a rank, step after step
Outcome = list[tuple[list[dict[str, Any]], dict[str, Any]]]  # results and last state, by rank


def run(row: Row, steps: Steps, states: Sequence[Any] | None = None, **options: Any) -> Outcome:
    """Reduce step after step with a Reducer a rank; results must be the same on all."""
    options = {"op": "sum", "error_feedback": True, "exact_below": row.exact_below, **options}

    def program(comm: gccomm.Communicator) -> tuple[list[Any], dict[str, Any]]:
        reducer = gccomm.Reducer(row.make(), comm=comm, **options)
        if states is not None:
            reducer.load_state_dict(states[comm.rank])
        return [reducer(step[comm.rank]) for step in steps], reducer.state_dict()

    outcome = testing.run(program, len(steps[0]))
    for results, state in outcome[1:]:
        for mine, first in zip(results, outcome[0][0], strict=True):
            assert_same_bits(mine, first)
        assert state["step"] == outcome[0][1]["step"]
        assert_same_states(state, outcome[0][1])
    return outcome


def assert_same_states(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Compare what codecs have adapted."""
    assert list(a["states"]) == list(b["states"])
    for key, state in a["states"].items():
        for name, value in state["values"].items():
            np.testing.assert_array_equal(value, b["states"][key]["values"][name], err_msg=name)


def inputs(row: Row, n: int, count: int, dtype: str = "float32", shape: Any = None) -> Steps:
    shape = row.shape if shape is None else shape
    draws = [[np.random.default_rng([step, rank]) for rank in range(n)] for step in range(count)]
    return [[{KEY: draw(rng, shape, dtype)} for rng in ranks] for ranks in draws]


def total_of(trees: Steps) -> Array:
    return np.asarray(np.sum([reals(tree[KEY]) for step in trees for tree in step], axis=0))


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
@over(FEEDBACK_ROWS)
def test_what_is_sent_and_what_is_left_is_what_was_given(row: Row, dtype: str) -> None:
    """Over 6 steps, to rounding: the sum of inputs = the sum of results + residuals."""
    n = 3 if row.conserves else 1
    steps = inputs(row, n, 6, dtype)
    outcome = run(row, steps)
    got = np.sum([reals(y[KEY]) for y in outcome[0][0]], axis=0)
    left = np.sum([state["residuals"][KEY] for _, state in outcome], axis=0, dtype=np.float64)
    assert np.abs(left).max() > 0
    values = [tree[KEY] for step in steps for tree in step]
    largest = np.maximum(block_maxima(values), np.abs(left).max())
    allowed = 6 * (n * largest * 2.0**-19 + fixed_point(row, steps[0], dtype))
    assert (np.abs(total_of(steps) - got - left) <= allowed).all()


def fixed_point(row: Row, step: Sequence[dict[str, Any]], dtype: str) -> Array:
    """Return what sums of rotated blocks lose: the dither that is subtracted has units of 2^-15 levels, and
    what all P coordinates have in common is sqrt(P) times as large in one of them, rotated back. With the
    largest step that inputs and residuals of twice that size may have.
    """
    xs = [tree[KEY] for tree in step]
    lost = 3 * 2.0**-15 * 2 / len(xs) * row.bound(xs, dtype) if row.norms else np.zeros(reals(xs[0]).size)
    return np.asarray(lost, dtype=np.float64)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@over(FEEDBACK_ROWS)
def test_residuals_of_the_largest_numbers_are_finite(row: Row, dtype: str) -> None:
    """And no result is NaN: opposite signs, and steps that all point to one side."""
    form, rng = FORMATS[dtype], np.random.default_rng(0)
    signs = [rng.choice([-1.0, 1.0], row.shape) * rng.random(row.shape) for _ in range(4)]
    one_side = [np.ones(row.shape)] * 4
    for parts in (signs, one_side):
        step = [{KEY: (part * form.largest).astype(form.dtype)} for part in parts]
        for results, state in run(row, [step] * 4, op="mean"):
            assert np.isfinite(state["residuals"][KEY]).all()
            if row.codec not in ("bf16", "fp16"):  # these sum in less than the dtype's range
                assert not np.isnan(np.stack([reals(y[KEY]) for y in results])).any()


@pytest.mark.parametrize(("dtype", "scale"), [("float32", 1e-41), ("float64", 1e-306), ("float64", 1e300)])
@over(FEEDBACK_ROWS)
def test_nothing_is_lost_at_the_ends_of_the_formats(row: Row, dtype: str, scale: float) -> None:
    """As above for numbers near the smallest and the largest; but for what the formats cannot hold."""
    if row.codec in ("bf16", "fp16") and scale != 1e-41:
        pytest.skip("a 16-bit float has float32's range at most")
    n, tiny = (3 if row.conserves else 1), FORMATS[dtype].tiny
    steps = inputs(row, n, 4, dtype)
    for step in steps:
        for tree in step:
            tree[KEY] = (tree[KEY].astype(np.float64) * scale).astype(dtype)
    outcome = run(row, steps)
    got = np.sum([y[KEY].reshape(-1).astype(np.longdouble) for y in outcome[0][0]], axis=0)
    left = np.sum([state["residuals"][KEY].astype(np.longdouble) for _, state in outcome], axis=0)
    given = np.sum([tree[KEY].reshape(-1).astype(np.longdouble) for step in steps for tree in step], axis=0)
    largest = max(np.abs(tree[KEY]).max() for step in steps for tree in step) + np.abs(left).max()
    allowed = 4 * (n * (largest * 2.0**-17 + 16 * tiny) + fixed_point(row, steps[0], dtype))
    assert (np.abs(given - got - left) <= allowed).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
@over(FEEDBACK_ROWS)
def test_residuals_are_float32_or_wider(row: Row, dtype: str) -> None:
    """And those of the input's size, whatever padding it has on the wire."""
    for shape in ((1025,), (3, 700), (50, 101)):
        for _, state in run(row, inputs(row, 2, 2, dtype, shape)):
            residual = state["residuals"][KEY]
            size = int(np.prod(shape)) * (2 if dtype == "complex64" else 1)
            assert residual.dtype == (np.float64 if dtype == "float64" else np.float32)
            assert residual.shape == (size,)
            assert np.isfinite(residual).all()


@pytest.mark.parametrize("shape", [(1,), (65,), (1025,), (2, 700), (50, 101)], ids=str)
@over(FEEDBACK_ROWS)
def test_nothing_beside_residuals_is_written(row: Row, shape: tuple[int, ...]) -> None:
    """Driven by hand, with watched memory around residuals; the bits are those of the engine."""
    steps, ranks = inputs(row, 2, 3, shape=shape), Ranks(row.make(), 2, feedback=True)
    by_hand = [ranks.reduce([tree[KEY] for tree in step]).copy() for step in steps]
    outcome = run(row, steps)
    for y, result in zip(by_hand, outcome[0][0], strict=True):
        np.testing.assert_array_equal(y.view(np.uint8), bits_of(result[KEY]))
    for guarded, (_, state) in zip(ranks.residuals, outcome, strict=True):
        np.testing.assert_array_equal(guarded.array, state["residuals"][KEY])


@over([row for row in FEEDBACK_ROWS if row.zeros or row.norms])
def test_gradients_that_are_always_zero_receive_nothing(row: Row) -> None:
    """Coordinates, or blocks of codecs that rotate: neither results nor residuals."""
    steps = inputs(row, 2, 4)
    zero = np.arange(5000) % 3 == 0
    if row.norms:
        zero = np.isin(block_numbers(steps[0][0][KEY]), [1, 5])
    for step in steps:
        for tree in step:
            tree[KEY].reshape(-1)[zero] = 0
            tree["nil"] = np.zeros((40, 50), np.float32)
    for results, state in run(row, steps):
        for y in results:
            assert not y[KEY].reshape(-1)[zero].any()
            assert not y["nil"].any()
        assert not state["residuals"][KEY][zero].any()
        assert not state["residuals"]["nil"].any()


BAD = {"nan": np.nan, "inf": np.inf, "minus inf": -np.inf}


@pytest.mark.parametrize("value", BAD.values(), ids=list(BAD))
@over(FEEDBACK_ROWS)
def test_a_step_that_is_not_finite_poisons_no_residual(row: Row, value: float) -> None:
    """What shared a scale with the bad number keeps the residual it had; the rest goes on as without it."""
    good = inputs(row, 2, 4)
    bad = [[{KEY: tree[KEY].copy()} for tree in step] for step in good]
    bad[2][1][KEY].reshape(-1)[3000] = value
    before, after, clean = run(row, good[:2]), run(row, bad[:3]), run(row, good[:3])
    touched = np.full(5000, row.spoils == "tensor")
    if row.spoils == "block":
        touched = block_numbers(good[0][0][KEY]) == block_numbers(good[0][0][KEY])[3000]
    for (_, old), (results, new), (_, other) in zip(before, after, clean, strict=True):
        assert not np.isfinite(results[2][KEY].reshape(-1)[3000])
        residual = new["residuals"][KEY]
        assert np.isfinite(residual).all()
        np.testing.assert_array_equal(residual[touched], old["residuals"][KEY][touched])
        rest = ~touched & (np.arange(5000) != 3000)
        np.testing.assert_array_equal(residual[rest], other["residuals"][KEY][rest])
    for results, _ in run(row, bad):
        assert np.isfinite(results[3][KEY]).all()


@over([row for row in ROWS if row.carrier(4).stateful])
def test_a_step_that_is_not_finite_changes_no_state(row: Row) -> None:
    """Without residuals: the next steps are as good as ever, and the state stays finite."""
    steps = inputs(row, 4, 6)
    steps[2][1][KEY].reshape(-1)[3000] = np.nan
    steps[4][0][KEY].reshape(-1)[3000] = np.inf
    results, state = run(row, steps, error_feedback=False)[0]
    for number, y in enumerate(results):
        assert np.isnan(y[KEY].reshape(-1)[3000]) == (number in (2, 4))
    exact = np.sum([tree[KEY] for tree in steps[5]], axis=0, dtype=np.float64)
    if row.unbiased:
        error = np.linalg.norm(results[5][KEY] - exact)
        assert error < np.linalg.norm(exact)
    for value in state["states"][KEY]["values"].values():
        assert np.isfinite(value).all()


@over(ROWS)
def test_a_resumed_run_goes_on_to_the_bit(row: Row) -> None:
    """Residuals and what codecs have adapted travel in ``state_dict``, as plain Python and arrays."""
    steps = inputs(row, 4, 6)
    for step in steps:
        for tree in step:
            tree["b"] = tree[KEY].astype(np.float64) * 100
    options: Any = {"error_feedback": row.feedback and row.make().rounds}
    whole, first = run(row, steps, **options), run(row, steps[:3], **options)
    states = [pickle.loads(pickle.dumps(state)) for _, state in first]
    resumed = run(row, steps[3:], states, **options)
    for (expected, last), (got, state) in zip(whole, resumed, strict=True):
        for a, b in zip(expected[3:], got, strict=True):
            assert_same_bits(a, b)
        assert state["step"] == last["step"] == 6
        assert list(state["residuals"]) == list(last["residuals"])
        assert_same_bits(state["residuals"], last["residuals"])
        assert_same_states(state, last)
        assert set(state["states"]) == ({KEY, "b"} if adapts(row) else set())
        for adapted in state["states"].values():
            for value in adapted["values"].values():
                assert isinstance(value, bool | int | float | str | np.ndarray)


def adapts(row: Row) -> bool:
    """Whether something is adapted on 4 ranks."""
    return row.carrier(4).stateful


@over(FEEDBACK_ROWS)
def test_another_shape_or_dtype_starts_again_with_a_warning(row: Row) -> None:
    """One rank: the result and the new residual are the new input, without the old residual."""
    gccomm.init(backend="local")
    reducer = gccomm.Reducer(row.make(), op="sum", error_feedback=True, exact_below=0)
    ((first,), (second,)) = inputs(row, 1, 2)
    reducer(first)
    reducer(second)
    for x in (draw(np.random.default_rng(7), (61, 70), "float32"), first[KEY].astype(np.float64)):
        with pytest.warns(UserWarning, match=rf"the array '{KEY}' changed to .*starts again from zero"):
            y = reducer({KEY: x})[KEY]
        residual = reducer.state_dict()["residuals"][KEY]
        assert residual.size == x.size
        given = reals(x)
        assert (np.abs(reals(y) + residual - given) <= np.abs(given).max() * 2.0**-18).all()


@over(ROWS)
def test_feedback_is_on_by_default_for_biased_codecs_alone(row: Row) -> None:
    steps = inputs(row, 2, 1)
    for _, state in run(row, steps, error_feedback=None):
        expected = {KEY} if row.make().biased and not row.exact_below else set()
        assert set(state["residuals"]) == expected
    for _, state in run(row, steps, error_feedback=False):
        assert not state["residuals"]
    assert row.make().biased <= row.feedback


@over([row for row in ROWS if not row.feedback and row.carrier().rounds])
def test_feedback_that_would_diverge_is_refused_on_all_ranks(row: Row) -> None:
    def program(comm: gccomm.Communicator) -> str:
        reducer = gccomm.Reducer(row.make(), comm=comm, error_feedback=True)
        with pytest.raises(NegotiationError, match="error_feedback=False") as caught:
            reducer({KEY: np.ones(row.shape, np.float32)})
        assert not reducer.state_dict()["residuals"]
        assert (comm.allreduce(np.ones(3)) == 3).all()
        return str(caught.value)

    texts = testing.run(program, 3)
    assert len(set(texts)) == 1


@over(FEEDBACK_ROWS)
def test_residuals_stay_bounded(row: Row) -> None:
    """The same input in every step: residuals settle, so everything arrives in time."""
    xs = [np.asarray(np.random.default_rng(r).standard_normal(row.shape), np.float32) for r in range(2)]
    ranks, norms = Ranks(row.make(), 2, feedback=True), []
    total = np.zeros(5000)
    for _ in range(160):
        total += ranks.reduce(xs)
        norms.append(max(float(np.abs(guarded.array).max()) for guarded in ranks.residuals))
    assert max(norms[80:]) <= 1.5 * max(norms[:80])
    exact = np.sum(xs, axis=0, dtype=np.float64).reshape(-1)
    alone = float(np.linalg.norm(total / 160 - exact) / np.linalg.norm(exact))
    assert alone < 0.5
