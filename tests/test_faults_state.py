"""What a reducer carries from step to step: residuals by key, poisoned steps, changed scales."""

from __future__ import annotations

import numpy as np
import pytest

import gccomm
from gccomm.testing import run, simulate

pytestmark = pytest.mark.timeout(60)

F4 = np.float32


def gradients(rank, step, count=1500, dtype=F4):
    rng = np.random.default_rng([rank, step])
    return {"a": rng.normal(size=count).astype(dtype), "b": (100 * rng.normal(size=count)).astype(dtype)}


def bits(tree):
    return {key: np.asarray(y).tobytes() for key, y in tree.items()}


def step_of(peak, n, width):
    return peak * 65536 / (((1 << (width - 1)) - 1) * 65536 // n)


@pytest.mark.parametrize("width", [4, 5, 8])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_residual_is_exactly_what_the_step_lost_in_units_of_the_input(width, dtype):
    def work(comm):
        reducer = gccomm.Reducer(f"uniform:wire_bits={width}", comm=comm, op="sum", error_feedback=True)
        x = gradients(comm.rank, 0, dtype=dtype)
        y = reducer(x)
        return x, y, reducer.state_dict()["residuals"]

    results = run(work, 3)
    y = results[0][1]
    for key in "ab":
        residuals = [r[2][key] for r in results]
        wide = np.float64 if dtype == "float64" else np.float32
        assert {r.dtype for r in residuals} == {np.dtype(wide)}
        sent = sum(r[0][key].astype(float) - r[2][key] for r in results)
        top = max(np.abs(r[0][key]).max() for r in results).astype(float)
        rounding = 24 * top * float(max(np.finfo(dtype).eps, np.finfo(F4).eps))
        assert np.abs(sent - y[key]).max() <= rounding
        step = step_of(top, 3, width)
        assert 0 < np.abs(residuals[0]).max() <= step * 1.0001


@pytest.mark.parametrize("missing", [False, True])
def test_feedback_bounds_the_error_of_the_running_total(missing):
    steps, n, width = 60, 3, 4

    def work(comm):
        reducer = gccomm.Reducer(f"uniform:wire_bits={width}", comm=comm, op="sum", error_feedback=True)
        reducer({"w": np.zeros(1200, F4)})  # from here on the key is known
        total, true = np.zeros((2, 1200))
        for step in range(steps):
            x = {"w": np.random.default_rng([comm.rank, step]).uniform(-1, 1, 1200).astype(F4)}
            if missing and (step + comm.rank) % 3 == 0:
                x = {"w": None}
            true += 0 if x["w"] is None else x["w"]
            total += reducer(x)["w"]
        return total, true

    results = run(work, n)
    error = np.abs(results[0][0] - sum(true for _, true in results)).max()
    top = 1 / (1 - step_of(1, n, width))  # a residual is at most a step, a step at most that part of top
    assert error <= n * step_of(top, n, width) * 1.01


def test_feedback_in_too_few_bits_for_the_number_of_ranks_is_refused():
    """Where a step is larger than the maximum, a residual can exceed what it came from and grow for ever."""
    xs = [{"w": np.full(1500, r, F4)} for r in range(8)]
    with pytest.raises(gccomm.NegotiationError, match="feedback"):
        simulate(xs, "uniform:wire_bits=4", "mean", error_feedback=True)
    ys, _ = simulate(xs, "uniform:wire_bits=8", "mean", steps=50, error_feedback=True)
    assert np.abs(ys[0]["w"] - 3.5).max() <= 2 * step_of(7, 8, 8)


def test_residual_of_a_key_that_nobody_had_is_kept():
    def work(comm):
        reducer = gccomm.Reducer(comm=comm, error_feedback=True)
        reducer(gradients(comm.rank, 0))
        before = reducer.state_dict()["residuals"]["b"]
        reducer({**gradients(comm.rank, 1), "b": None})
        reducer({"a": gradients(comm.rank, 2)["a"]})
        return (reducer.state_dict()["residuals"]["b"] == before).all()

    assert all(run(work, 3))


def test_residuals_follow_the_key_and_not_the_object_or_the_order():
    def work(comm):
        fresh, steady = (gccomm.Reducer("uniform:wire_bits=4", comm=comm, error_feedback=True) for _ in "12")
        held = gradients(comm.rank, 0)
        for step in range(10):
            x = gradients(comm.rank, step)
            for key in x:
                held[key][...] = x[key]
            turned = {key: x[key].copy() for key in ("ba" if step % 2 else "ab")}
            y = fresh(turned)
            assert bits(y) == bits(steady(held))
            assert np.abs(y["a"]).max() < 20
            del x, turned
        return True

    assert all(run(work, 3))


@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_changed_array_starts_again_from_no_residual_and_says_so(change):
    def work(comm):
        reducer = gccomm.Reducer("uniform:wire_bits=4", comm=comm, error_feedback=True)
        for step in range(5):
            reducer(gradients(comm.rank, step))
        x = gradients(comm.rank, 5)
        x["a"] = x["a"][:1400] if change == "shape" else x["a"].astype(np.float64)
        state = reducer.state_dict()
        y = reducer(x)
        other = gccomm.Reducer("uniform:wire_bits=4", comm=comm, error_feedback=True)
        del state["residuals"]["a"]
        other.load_state_dict(state)
        return bits(y) == bits(other(x))

    with pytest.warns(UserWarning, match=r"array 'a' changed.*starts\s+again from zero") as caught:
        assert all(run(work, 3))
    assert len(caught) == 3
    assert all(w.filename == __file__ for w in caught)


def test_feedback_without_keys_is_refused_on_every_rank():
    def work(comm):
        reducer = gccomm.Reducer(comm=comm, error_feedback=True)
        with pytest.raises((TypeError, ValueError), match="key") as caught:
            reducer(np.ones(3000, F4))
        assert reducer.step == 0
        return str(caught.value)

    assert len(set(run(work, 3))) == 1


@pytest.mark.parametrize("feedback", [False, True])
def test_two_reducers_on_one_communicator_are_independent(feedback):
    options = {"codec": "uniform:wire_bits=4", "error_feedback": feedback}

    def stream(rank, which, step):
        return {"w": gradients(rank + 10 * which, step)["a"] * (1, 50)[which]}

    def alone(which):
        def work(comm):
            reducer = gccomm.Reducer(comm=comm, **options)
            return [bits(reducer(stream(comm.rank, which, step))) for step in range(6)]

        return run(work, 3)[0]

    def together(comm):
        reducers = [gccomm.Reducer(comm=comm, **options) for _ in range(2)]
        results = [[], []]
        for step in range(6):
            for which in (0, 1) if step % 2 else (1, 0):
                results[which].append(bits(reducers[which](stream(comm.rank, which, step))))
        return results

    assert run(together, 3)[0] == [alone(0), alone(1)]


@pytest.mark.parametrize("kind", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_clean_step_after_a_poisoned_one_is_finite(kind, dtype):
    def work(comm):
        reducer = gccomm.Reducer("uniform:wire_bits=4", comm=comm, error_feedback=True)
        for step in range(2):
            reducer(gradients(comm.rank, step, 3000, dtype))
        bad = gradients(comm.rank, 2, 3000, dtype)
        if comm.rank == 1:
            bad["a"][1500] = kind
        poisoned = reducer(bad)["a"]
        residuals = reducer.state_dict()["residuals"]
        assert np.isnan(poisoned[1024:2048]).all()
        assert np.isfinite(poisoned[:1024]).all()
        assert all(np.isfinite(r).all() for r in residuals.values())
        x = gradients(comm.rank, 3, 3000, dtype)
        return x, reducer(x)

    results = run(work, 3)
    for key, scale in (("a", 1), ("b", 100)):
        y = results[0][1][key].astype(float)
        true = sum(x[key].astype(float) for x, _ in results) / 3
        assert np.abs(y - true).max() <= 2 * step_of(6 * scale, 3, 4)


def test_sums_out_of_range_do_not_poison_the_residual():
    def work(comm):
        reducer = gccomm.Reducer("uniform:wire_bits=4", comm=comm, op="sum", error_feedback=True)
        y = reducer({"w": np.full(1500, 2e38, F4)})["w"]
        assert np.isposinf(y).all()
        return np.isfinite(reducer({"w": np.ones(1500, F4)})["w"]).all()

    assert all(run(work, 3))


@pytest.mark.parametrize("nonfinite", ["propagate", "raise"])
def test_largest_finite_input_with_a_residual_is_still_finite(nonfinite):
    top = np.finfo(F4).max

    def work(comm):
        reducer = gccomm.Reducer("uniform:wire_bits=4", comm=comm, error_feedback=True, nonfinite=nonfinite)
        x = np.full(1500, top, F4)
        x[::2] = top / 3
        return [float(np.isnan(reducer({"w": x})["w"]).sum()) for _ in range(4)]

    assert run(work, 3) == [[0.0] * 4] * 3


def test_half_precision_input_keeps_its_residual_in_single_precision():
    """1,000 equal steps: what is lost in one must come later, also below the resolution of float16."""
    x = np.linspace(-1, 1, 1100).astype(np.float16)

    def work(comm):
        reducer = gccomm.Reducer("uniform:wire_bits=3", comm=comm, error_feedback=True)
        total = np.zeros(len(x))
        for _ in range(1000):
            total += reducer({"w": x})["w"]
        assert reducer.state_dict()["residuals"]["w"].dtype == F4
        return np.abs(total / 1000 - x).max()

    assert max(run(work, 2)) <= 3 * step_of(1, 2, 3) / 1000 + 2**-11


@pytest.mark.parametrize(
    ("feedback", "width"), [(False, 2), (False, 8), (True, 3), (True, 5), (True, 8), (True, 16)]
)
def test_coordinate_that_is_always_zero_stays_exactly_zero(feedback, width):
    def xs(step):
        made = [gradients(rank, step, 2100)["a"] for rank in range(2)]
        for x in made:
            x[::3] = 0
            x[1::6] = -0.0
        return made

    for steps in (1, 2, 60):
        ys, _ = simulate(xs, f"uniform:wire_bits={width}", steps=steps, error_feedback=feedback)
        assert (ys[0][::3] == 0).all()
        assert np.count_nonzero(ys[0]) > 0


@pytest.mark.parametrize(
    "codec", ["uniform:wire_bits=2", "uniform:wire_bits=5", "uniform", "uniform:wire_bits=16"]
)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("below", [0, 4096])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_scaling_the_input_by_a_power_of_two_scales_the_result_exactly(codec, dtype, below, op):
    xs = [np.random.default_rng(r).integers(-60, 60, 1500).astype(dtype) / 4 for r in range(3)]
    plain, scaled = (
        simulate([x * np.dtype(dtype).type(f) for x in xs], codec, op, exact_below=below)[0][0]
        for f in (1, 1024)
    )
    assert (scaled == plain * np.dtype(dtype).type(1024)).all()
    assert np.isfinite(scaled).all()
