"""``intsgd``: steps follow the aggregated gradient, without a round; clamps and NaN are seen by all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gccomm
from gccomm import testing
from gccomm.agreement import SUM_WORDS
from gccomm.codecs.intsgd import IntSGD, Observed
from gccomm.errors import MismatchError, NegotiationError
from tests.stochastic_cases import (
    Array,
    assert_unbiased,
    check_nonfinite,
    check_range,
    check_refusal,
    check_seeds,
    check_worst_case,
    check_zeros,
    exact,
    gaussian,
)

Draw = Callable[[int], list[Array]]


def run(draw: Draw, n: int, steps: int, codec: str = "intsgd", **options: Any) -> list[list[Any]]:
    """Return each rank's (result, stats, state) by step; results and states must be equal on all ranks."""

    def program(comm: gccomm.Communicator) -> list[Any]:
        reducer = gccomm.Reducer(codec, comm=comm, exact_below=0, op="sum", **options)
        found = []
        for step in range(steps):
            y = reducer({"x": draw(step)[comm.rank]})["x"].copy()
            state = reducer._reduction.states.get("x")
            found.append((y, reducer.stats, None if state is None else dict(state.values)))
        return found

    results = testing.run(program, n)
    for other_rank in results[1:]:
        for mine, theirs in zip(results[0], other_rank, strict=True):
            np.testing.assert_array_equal(mine[0], theirs[0])
            assert mine[2] == theirs[2]
    return results


def growing(step: int) -> list[Array]:
    """Inputs that are a hundred times as large from step 3 on."""
    return [x * np.float32(1 if step < 3 else 100) for x in gaussian(3, 2500, step)]


def scale_of(word: int) -> float:
    return float(np.array([word], np.uint32).view(np.float32)[0])


def test_alpha_is_the_published_one() -> None:
    """alpha = 1 / sqrt(2 n (r + eps M^2)), r from the decoded sums; results are multiples of 1 / alpha."""
    n, size = 3, 2500
    found = run(lambda step: gaussian(n, size, step), n, 5, "intsgd:beta=0.5,eps=1e-4")[0]
    largest = max(float(np.abs(x).max()) for x in gaussian(n, size, 0))
    mean_squares = [float((y.astype(np.float64) ** 2).mean()) / n**2 for y, _, _ in found]
    expected = mean_squares[0]
    assert found[0][0] == pytest.approx(np.rint(found[0][0] / (largest / 42)) * largest / 42, rel=1e-5)
    for (_, _, before), (y, _, state), square in zip(found, found[1:], mean_squares[1:], strict=False):
        m = scale_of(before["scale"])
        assert m == pytest.approx(largest)
        assert before["r"] * m**2 == pytest.approx(expected, rel=1e-4)
        step = np.sqrt(2 * n * (expected + 1e-4 * m**2))
        assert np.abs(y / step - np.rint(y / step)).max() < 1e-3
        assert np.abs(np.rint(y / step)).max() > 1
        assert state["agree"] is False
        expected = 0.5 * expected + 0.5 * square


@pytest.mark.parametrize("n", [1, 2, 8])
def test_the_noise_is_a_part_of_the_gradient(n: int) -> None:
    """At most r / 2 per coordinate of the mean, near r / 3 for Gaussian input."""
    found = run(lambda step: gaussian(n, 50_000, step), n, 5)[0]
    error = (found[4][0] - exact(gaussian(n, 50_000, 4))) / n
    r = found[3][2]["r"] * scale_of(found[3][2]["scale"]) ** 2
    assert 0.2 * r < float((error**2).mean()) < 0.5 * r


def test_steady_steps_are_one_sum() -> None:
    """No agreement: the header is summed, and travels with the first words; the counts are two words."""
    found = run(lambda step: gaussian(2, 40_000, step), 2, 4)[0]
    assert [stats.messages for _, stats, _ in found] == [2, 2, 2, 2]
    assert found[0][1].wire_bytes >= 1024 + 4 * (10_000 + 2 + 1)
    assert found[3][1].wire_bytes == 4 * (SUM_WORDS + 10_000 + 2 + 1)  # its error is not measured
    small = run(lambda step: gaussian(2, 500, step), 2, 3)[0]
    assert [stats.messages for _, stats, _ in small] == [2, 1, 1]


def test_predicted_steps_are_unbiased() -> None:
    """Constant input, agreed in step 0; no coordinate is clamped from then on."""
    xs, errors = gaussian(3, 1500), []
    for step, _, ys, stats in testing.simulate_steps(lambda _: xs, "intsgd:beta=0", steps=500):
        assert stats[0].clamps == 0
        if step:
            errors.append(ys[0] - exact(xs))
    assert_unbiased(np.array(errors, np.float64))


def test_a_clamp_is_counted_by_all_and_agreed_upon() -> None:
    found = run(growing, 3, 6)[0]
    xs = growing(3)
    limit = 42 * np.sqrt(6 * (found[2][2]["r"] + 1e-8)) * scale_of(found[2][2]["scale"])
    expected = sum(int((np.abs(x) > limit).sum()) for x in xs)
    assert [stats.clamps for _, stats, _ in found] == [0, 0, 0, expected, 0, 0]
    assert expected > 100
    assert [state["agree"] for *_, state in found] == [False, False, False, True, False, False]
    assert np.abs(found[4][0] - exact(growing(4))).max() < 3 * 500 / 42
    assert np.abs(found[3][0]).max() <= 3 * limit * 1.001


def test_what_was_clamped_is_in_the_residual() -> None:
    total, true = np.zeros(2500), np.zeros(2500)
    for _, xs, ys, _ in testing.simulate_steps(growing, "intsgd", steps=12, error_feedback=True):
        total += ys[0]
        true += np.asarray(exact(list(xs)), np.float64)
    assert np.sqrt(((total - true) ** 2).mean()) < 3 * np.sqrt((true**2).mean() / 12)


@pytest.mark.parametrize("wire_bits", [8, 16])
@pytest.mark.parametrize("equal", [True, False])
def test_residuals_stay_bounded(wire_bits: int, equal: bool) -> None:
    n = 6
    xs = gaussian(1, 2000) * n if equal else gaussian(n, 2000)
    total, size = np.zeros(2000), np.sqrt((np.asarray(exact(xs), np.float64) ** 2).mean())
    codec = f"intsgd:wire_bits={wire_bits}"
    for step, _, ys, _ in testing.simulate_steps(lambda _: xs, codec, steps=150, error_feedback=True):
        total += ys[0]
        error = np.sqrt(((total - (step + 1) * exact(xs)) ** 2).mean())
        assert error < 1.5 * size


@pytest.mark.parametrize("feedback", [False, True])
def test_a_number_that_is_not_finite_changes_no_state(feedback: bool) -> None:
    def draw(step: int) -> list[Array]:
        xs = gaussian(2, 2500, step)
        if step in {0, 3}:
            xs[1][77] = np.nan
        return xs

    found = run(draw, 2, 5, error_feedback=feedback)[0]
    assert [bool(np.isnan(y).all()) for y, *_ in found] == [True, False, False, True, False]
    assert [bool(np.isnan(y).any()) for y, *_ in found] == [True, False, False, True, False]
    assert found[0][2] is None
    assert found[3][2] == found[2][2]
    assert found[3][1].clamps == 0
    assert found[4][1].messages == 2
    check_nonfinite("intsgd", feedback)


def test_long_tensors_count_in_the_last_message() -> None:
    """1,030 blocks are two sums: clamps and NaN of the first are known at the end, and reach all of it."""
    size = 1030 * 1024

    def draw(step: int) -> list[Array]:
        xs = [x[:size] for x in gaussian(2, size + 1, step % 2)]
        if step == 2:
            xs[0][5] = 1e6
        if step == 3:
            xs[1][5] = np.inf
        return xs

    found = run(draw, 2, 4)[0]
    assert found[2][1].clamps == 1
    assert found[2][2]["agree"]
    found = run(lambda step: draw(step if step != 2 else 3), 2, 3, error_feedback=True)[0]
    assert np.isnan(found[2][0]).all()
    assert found[2][2] == found[1][2]


def test_a_sum_of_zeros_keeps_r() -> None:
    scales = [1.0, 1.0, 0.0, 1.0, 0.0]
    found = run(lambda step: [x * np.float32(scales[step]) for x in gaussian(2, 2000, step)], 2, 5)[0]
    assert found[2][2] == found[1][2]
    assert found[4][2] == found[3][2]
    assert not found[2][0].any()
    assert 0 < np.abs(found[3][0]).max() < 100
    never = run(lambda _: [np.zeros(2000, np.float32)] * 2, 2, 3)[0]
    assert all(state["agree"] and not y.any() for y, _, state in never)


@pytest.mark.parametrize("wire_bits", [4, 8, 10, 16])
def test_r_is_exact_in_every_width(wire_bits: int) -> None:
    """From integers: also in lanes whose decoded energies are coarse."""
    found = run(lambda step: gaussian(2, 3001, step), 2, 3, f"intsgd:beta=0,wire_bits={wire_bits}")[0]
    for y, _, state in found:
        expected = float((y.astype(np.float64) ** 2).mean()) / 4
        assert state["r"] * scale_of(state["scale"]) ** 2 == pytest.approx(expected, rel=1e-5)


def test_a_checkpoint_continues_bit_by_bit() -> None:
    def program(comm: gccomm.Communicator) -> None:
        through, before = (gccomm.Reducer("intsgd", comm=comm, error_feedback=True) for _ in range(2))
        after = gccomm.Reducer("intsgd", comm=comm, error_feedback=True)
        for step in range(8):
            if step == 4:
                after.load_state_dict(before.state_dict())
            x = growing(step)[comm.rank]
            y = through({"x": x})["x"]
            z = (before if step < 4 else after)({"x": x})["x"]
            np.testing.assert_array_equal(y, z)

    testing.run(program, 3)


def test_ranks_with_different_states_are_told() -> None:
    def program(comm: gccomm.Communicator) -> None:
        reducer = gccomm.Reducer("intsgd", comm=comm)
        reducer({"x": gaussian(2, 2000)[comm.rank]})
        state = reducer.state_dict()
        if comm.rank == 1:
            values = reducer._reduction.states["x"].values
            changed = reducer._reduction.states["x"]._replace(values={**values, "r": values["r"] * 2})
            reducer._reduction.set_states({"x": changed})
        assert state
        with pytest.raises(MismatchError, match=r"rank 1|state"):
            reducer({"x": gaussian(2, 2000)[comm.rank]})

    testing.run(program, 2)


@pytest.mark.parametrize(("dtype", "scale"), [("float64", 1e-300), ("float64", 1e300), ("float32", 1e-43)])
def test_predictions_at_the_ends_of_the_formats(dtype: str, scale: float) -> None:
    """r is relative to the agreed maximum, so its squares neither overflow nor vanish."""

    def draw(step: int) -> list[Array]:
        return [(x.astype(np.float64) * scale).astype(dtype) for x in gaussian(2, 20_000, step)]

    ys, stats = testing.simulate(draw, "intsgd", "mean", steps=4)
    true = np.asarray(exact(draw(3)) / 2 / scale, np.float64)
    error = np.asarray(ys[0].astype(np.longdouble) / scale - true, np.float64)
    assert float((error**2).mean()) < 0.6 * float((true**2).mean())
    assert stats[0].clamps == 0


@pytest.mark.parametrize("width", [2, 3, 4, 5, 6, 8, 10, 16])
def test_lanes_hold_the_worst_case(width: int) -> None:
    check_worst_case("intsgd", width)
    check_refusal("intsgd", width)
    n, half = min(17, (1 << (width - 1)) - 1), (1 << (width - 1)) - 1

    def draw(step: int) -> list[Array]:
        return [np.full(1100, 1.0 if step < 2 else 1e30, np.float32)] * n

    for step, _, ys, stats in testing.simulate_steps(draw, f"intsgd:wire_bits={width}", steps=4):
        if step == 2:  # far beyond the prediction: all clamped to the last whole level
            assert stats[0].clamps == 1100 * n
            assert np.unique(ys[0]).size == 1
        if step == 3:
            np.testing.assert_allclose(ys[0], n * 1e30, rtol=1e-5)
    assert half >= n


def test_special_tensors() -> None:
    check_zeros("intsgd")
    check_range("intsgd", 42)
    check_seeds("intsgd")


def test_next_state() -> None:
    codec = IntSGD(beta=0.75)
    old = {"r": 4.0, "scale": 7, "agree": False}
    assert codec.next_state(old, [None]) == old
    assert codec.next_state(None, [None]) is None
    assert codec.next_state(old, [Observed(8.0, 7, False, False)]) == {"r": 5.0, "scale": 7, "agree": False}
    assert codec.next_state(old, [Observed(0.0, 7, False, False)]) == old
    assert codec.next_state(old, [Observed(0.0, 9, True, False)]) == {"r": 0.0, "scale": 9, "agree": True}
    assert codec.next_state(old, [Observed(1e200, 7, True, False)]) == {"r": 1e200, "scale": 7, "agree": True}
    json.dumps(codec.config())


def test_options_and_refusals() -> None:
    made = gccomm.get_codec("intsgd:beta=0.5,eps=0,wire_bits=10")
    assert gccomm.get_codec(made.config()) == made
    for name, value in (("beta", 1.0), ("beta", -0.1), ("eps", float("nan"))):
        with pytest.raises(ValueError, match=rf"`{name}` must be a number from 0 to below 1, got {value}"):
            gccomm.get_codec("intsgd", **{name: value})
    with pytest.raises(TypeError, match=r"`beta` must be a number, got '0.9' of type str"):
        IntSGD(beta="0.9")  # type: ignore[arg-type]
    with pytest.raises(NegotiationError, match="one whole level"):
        IntSGD().require_feedback(64)
