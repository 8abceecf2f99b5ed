"""``powersgd``: the sum projected on a few directions, which follow it from step to step."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import gccomm
from gccomm import testing
from gccomm.codecs import get_codec
from gccomm.codecs.lowrank import gaussian, normalise, orthonormalise, product
from gccomm.codecs.powersgd import PowerSGD
from gccomm.errors import MismatchError

Array = np.ndarray[Any, Any]
Tree = dict[str, Array]
KEY = np.array([0x12345678, 0x9ABCDEF0], dtype=np.uint32)


def matrices(n: int, m: int, k: int, rank: int, noise: float = 0.0, seed: int = 0) -> list[Array]:
    """Return one float32 matrix a rank: all of one column space of this rank, and noise."""
    rng = np.random.default_rng([seed, m, k, rank])
    basis = rng.standard_normal((m, rank))
    return [
        (basis @ rng.standard_normal((rank, k)) + noise * rng.standard_normal((m, k))).astype(np.float32)
        for _ in range(n)
    ]


def run_steps(
    trees: Sequence[Sequence[Tree]], codec: str = "powersgd", state: Any = None, **options: Any
) -> list[tuple[list[Tree], dict[str, Any]]]:
    """Reduce step by step; return each rank's results and the state of its reducer."""

    def program(comm: gccomm.Communicator) -> tuple[list[Tree], dict[str, Any]]:
        reducer = gccomm.Reducer(codec, exact_below=0, **{"op": "sum", **options})
        if state is not None:
            reducer.load_state_dict(pickle.loads(pickle.dumps(state[comm.rank])))
        results = [reducer(step[comm.rank]) for step in trees]
        return results, reducer.state_dict()

    outcome = testing.run(program, len(trees[0]))
    for results, _ in outcome[1:]:
        for mine, first in zip(results, outcome[0][0], strict=True):
            for key, y in mine.items():
                np.testing.assert_array_equal(y, first[key], strict=True)
    return outcome


def relative_error(y: Array, exact: Array) -> float:
    return float(np.linalg.norm(y - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize(("n", "m", "k"), [(1, 40, 70), (3, 200, 31), (4, 33, 1000), (16, 64, 64)])
def test_sums_of_low_rank_are_exact(n: int, m: int, k: int) -> None:
    xs = matrices(n, m, k, 3)
    ys, _ = testing.simulate(xs, "powersgd:rank=4", exact_below=0)
    assert relative_error(ys[0], np.sum(xs, axis=0, dtype=np.float64)) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_result_is_a_projection_of_the_sum(dtype: str) -> None:
    """Of rank r, and what is missing is orthogonal to its columns."""
    xs = [x.astype(dtype) for x in matrices(3, 90, 120, 90)]
    ys, _ = testing.simulate(xs, "powersgd:rank=5")
    exact = np.sum(xs, axis=0, dtype=np.float64)
    y = ys[0].astype(np.float64)
    values = np.linalg.svd(y, compute_uv=False)
    tolerance = 1e-5 if dtype == "float32" else 1e-13
    assert values[5] < tolerance * values[0] < values[4]
    assert np.abs(y.T @ (exact - y)).max() < tolerance * values[0] ** 2
    assert 0.1 < relative_error(y, exact) < 1


def test_warm_starts_approach_the_best_approximation() -> None:
    """The same matrices in every step, without feedback: a power iteration."""
    xs = matrices(2, 80, 100, 4, noise=0.5)
    exact = np.sum(xs, axis=0, dtype=np.float64)
    values = np.linalg.svd(exact, compute_uv=False)
    best = float(np.sqrt((values[4:] ** 2).sum() / (values**2).sum()))
    errors = {}
    for codec in ("powersgd", "powersgd:warm_start=false"):
        ((results, _), _) = run_steps([[{"x": x} for x in xs]] * 12, codec, error_feedback=False)
        errors[codec] = [relative_error(y["x"], exact) for y in results]
    warm, cold = errors["powersgd"], errors["powersgd:warm_start=false"]
    assert warm[0] == cold[0] > 1.05 * best
    assert best <= warm[-1] < 1.02 * best
    assert min(cold) > 1.03 * best
    assert len(set(cold)) == len(cold)  # other random numbers in each step


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_residuals_are_what_the_projection_leaves(op: str) -> None:
    """Each rank keeps what of its own matrix is outside of the common columns; together, all that is left."""
    xs = matrices(3, 50, 60, 50)
    found = run_steps([[{"x": x} for x in xs]], op=op)
    total = found[0][0][0]["x"].astype(np.float64) * (1 if op == "sum" else 3)
    columns = np.linalg.svd(total)[0][:, :4]
    rests = [state["residuals"]["x"].reshape(50, 60) for _, state in found]
    np.testing.assert_allclose(np.sum(rests, axis=0), np.sum(xs, axis=0) - total, atol=1e-4)
    for x, rest in zip(xs, rests, strict=True):
        np.testing.assert_allclose(rest, x - columns @ (columns.T @ x), atol=1e-4)


def test_feedback_delivers_everything_in_time() -> None:
    """The same input of full rank in every step: the mean of the results approaches it."""
    xs = matrices(2, 30, 40, 30)
    ((results, _), _) = run_steps([[{"x": x} for x in xs]] * 150, op="mean")
    mean = np.mean([y["x"] for y in results], axis=0)
    assert relative_error(mean, np.mean(xs, axis=0)) < 0.06
    assert relative_error(results[0]["x"], np.mean(xs, axis=0)) > 0.5


SUMMED = {
    "vector": (3000,),
    "scalar": (),
    "row": (1, 900),
    "thin": (500, 4),
    "small": (8, 8),
    "nothing": (0, 5),
}
COMPRESSED = {"matrix": (60, 40), "kernel": (16, 8, 5, 5), "ones": (1, 1, 60, 40)}


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_which_tensors_are_summed_as_they_are(dtype: str) -> None:
    rng = np.random.default_rng(1)
    shapes = SUMMED | COMPRESSED
    trees = [
        {k: np.asarray(rng.standard_normal(s)).astype(dtype) for k, s in shapes.items()} for _ in range(3)
    ]
    results, state = run_steps([trees])[0]
    for key in shapes:
        exact = np.sum([t[key] for t in trees], axis=0, dtype=np.float64)
        assert (results[0][key].dtype, results[0][key].shape) == (np.dtype(dtype), shapes[key])
        if key in SUMMED:
            tolerance = {"float16": 2e-3, "float32": 1e-6, "float64": 1e-15}[dtype]
            np.testing.assert_allclose(
                results[0][key], exact, rtol=tolerance, atol=4 * tolerance, err_msg=key
            )
            assert not np.any(state["residuals"].get(key, 0))
        else:
            assert relative_error(results[0][key].astype(np.float64), exact) > 0.1
            assert state["residuals"][key].any()
    assert set(state["states"]) == set(COMPRESSED)


def test_complex_matrices() -> None:
    rng = np.random.default_rng(2)
    left, right = rng.standard_normal((2, 40, 2)), rng.standard_normal((2, 2, 50))
    x = (left @ (right + 0j)).astype(np.complex64)[0] * np.complex64(1 + 2j)
    ys, _ = testing.simulate([x, x], "powersgd")
    assert ys[0].dtype == np.complex64
    assert np.abs(ys[0] - 2 * x).max() < 1e-4


def test_tensors_share_messages_and_the_wire_is_what_it_should_be() -> None:
    shapes = {"a": (60, 40), "b": (30, 90), "c": (777,)}
    tree = {key: np.ones(shape, np.float32) for key, shape in shapes.items()}
    _, (stats, _) = testing.simulate([tree] * 2, "powersgd:rank=2", exact_below=0)
    assert stats.messages == 3
    assert stats.wire_bytes == 4 * (256 + 2 * (60 + 40) + 2 * (30 + 90) + 777)
    _, (plain, _) = testing.simulate([{"c": tree["c"]}] * 2, "powersgd", exact_below=0)
    assert plain.messages == 2


@pytest.mark.parametrize("options", [{"one_host": False}, {"piece_coordinates": 1}, {"bucket_bytes": 1}])
def test_pieces_change_no_result_by_more_than_rounding(options: dict[str, Any]) -> None:
    trees = [{str(i): x for i, x in enumerate(matrices(5, 40, 50, 40, seed=r))} for r in range(2)]
    whole, cut = testing.simulate(trees, "powersgd"), testing.simulate(trees, "powersgd", **options)
    for key, y in whole[0][0].items():
        np.testing.assert_allclose(cut[0][0][key], y, atol=1e-4)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_tensor_that_is_not_finite_is_nan_and_nothing_remembers_it(value: float) -> None:
    good = [{"a": x, "b": 2 * x, "v": x[0].copy()} for x in matrices(2, 40, 50, 40)]
    bad = [{key: x.copy() for key, x in tree.items()} for tree in good]
    bad[1]["b"][3, 4] = bad[1]["v"][2] = value
    with_bad, without, once = run_steps([good, bad]), run_steps([good, good]), run_steps([good])
    for (results, state), (others, other), (_, before) in zip(with_bad, without, once, strict=True):
        assert np.isnan(results[1]["b"]).all()
        assert not np.isfinite(results[1]["v"][2])
        assert np.isfinite(np.delete(results[1]["v"], 2)).all()
        np.testing.assert_array_equal(results[1]["a"], others[1]["a"])
        for kind in ("residuals", "states"):
            assert pickle.dumps(state[kind]["b"]) == pickle.dumps(before[kind]["b"])
            assert pickle.dumps(state[kind]["a"]) == pickle.dumps(other[kind]["a"])
        assert not state["residuals"]["v"].any()
    (_, state), _ = run_steps([bad])
    assert not state["residuals"]["b"].any()
    assert set(state["states"]) == {"a"}


def test_zeros_are_zeros_and_change_no_state() -> None:
    xs = [{"x": x} for x in matrices(2, 40, 50, 2)]
    zeros = [{"x": np.zeros((40, 50), np.float32)}] * 2
    ((results, state), _), ((_, before), _) = (
        run_steps([xs, zeros], error_feedback=False),
        run_steps([xs], error_feedback=False),
    )
    assert not results[1]["x"].any()
    assert pickle.dumps(state["states"]) == pickle.dumps(before["states"])
    ((results, state), _) = run_steps([zeros, xs])
    assert not results[0]["x"].any()
    assert relative_error(results[1]["x"], xs[0]["x"] + xs[1]["x"].astype(np.float64)) < 1e-5


def test_lost_directions_are_found_again() -> None:
    """After steps of rank 1 the other columns are nothing but noise; then all four are needed."""
    one, four = matrices(1, 60, 80, 1)[0], matrices(1, 60, 80, 4)[0]
    ((results, _),) = run_steps([[{"x": one}]] * 3 + [[{"x": four}]] * 4, error_feedback=False)
    assert relative_error(results[2]["x"], one) < 1e-5
    assert all(np.isfinite(y["x"]).all() for y in results)
    assert relative_error(results[-1]["x"], four) < 1e-4


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [("float32", s) for s in (1e38, 1e18, 1e-18, 1e-20, 1e-38)] + [("float64", 1e300), ("float64", 1e-300)],
)
def test_huge_and_tiny_numbers(dtype: str, scale: float) -> None:
    """Steps of huge and tiny numbers, warm starts included: the mean of 1e38 is 1e38."""
    shape = np.outer(np.linspace(-1, 1, 40), np.linspace(0.5, 1, 50))
    tree = {"x": (shape * scale).astype(dtype)}
    for results, state in run_steps([[tree] * 5] * 3, op="mean"):
        for y in results:
            np.testing.assert_allclose(y["x"].astype(np.float64) / scale, shape, atol=1e-4)
        assert np.abs(state["residuals"]["x"]).max() < 1e-3 * scale
    opposite = [{"x": sign * tree["x"] * dtype_max(dtype, scale)} for sign in (1, -1, -1, -1)]
    for _, state in run_steps([opposite]):
        assert np.isfinite(state["residuals"]["x"]).all()


def dtype_max(dtype: str, scale: float) -> Any:
    """Return the factor that makes ``scale`` nearly the largest number of the dtype, where it is huge."""
    return np.dtype(dtype).type(np.finfo(dtype).max / scale / 1.01 if scale > 1 else 1)


def test_a_resumed_run_goes_on_to_the_bit() -> None:
    trees = [
        [{"x": x, "d": x.astype(np.float64)} for x in matrices(2, 40, 50, 40, seed=step)] for step in range(6)
    ]
    whole = run_steps(trees)
    saved = [state for _, state in run_steps(trees[:3])]
    for (expected, last), (got, state) in zip(whole, run_steps(trees[3:], state=saved), strict=True):
        for a, b in zip(expected[3:], got, strict=True):
            for key in a:
                np.testing.assert_array_equal(a[key], b[key])
        assert state["states"]["x"]["values"]["steps"] == last["states"]["x"]["values"]["steps"] == 6
        assert state["states"]["x"]["values"]["q"].dtype == np.float32
        assert state["states"]["d"]["values"]["q"].dtype == np.float64


@pytest.mark.filterwarnings("ignore:the array 'x' changed")
def test_another_shape_starts_again() -> None:
    small, large = matrices(2, 40, 50, 40), matrices(2, 60, 50, 60)
    trees = [[{"x": x} for x in xs] for xs in (small, small, large)]
    for results, state in run_steps(trees):
        assert results[2]["x"].shape == (60, 50)
        assert state["states"]["x"]["values"]["q"].shape == (4, 50)
        assert state["states"]["x"]["values"]["steps"] == 1


def test_ranks_with_different_states_are_told() -> None:
    xs = [{"x": x} for x in matrices(2, 40, 50, 40)]
    saved = [state for _, state in run_steps([xs])]
    longer = [state for _, state in run_steps([xs, xs])]
    mixed = [saved[0], {**longer[1], "step": saved[1]["step"]}]
    with pytest.raises(MismatchError, match="adapted"):
        run_steps([xs], state=mixed)


def test_functions_remember_nothing() -> None:
    xs = matrices(2, 40, 50, 40)

    def program(comm: gccomm.Communicator) -> list[Array]:
        return [comm.compressed_allreduce(xs[comm.rank], "sum", "powersgd") for _ in range(3)]

    exact = np.sum(xs, axis=0, dtype=np.float64)
    errors = [relative_error(y, exact) for y in testing.run(program, 2)[0]]
    assert len(set(errors)) == 3
    assert max(errors) < 1.1 * min(errors)


# Linear algebra


@pytest.mark.parametrize(("r", "m"), [(1, 2), (4, 100), (16, 17), (8, 5000)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_orthonormal_rows_span_the_same(r: int, m: int, dtype: str) -> None:
    rows = np.random.default_rng([r, m]).standard_normal((r, m)).astype(dtype)
    got = orthonormalise(rows, KEY)
    assert got.dtype == rows.dtype
    tolerance = 1e-6 if dtype == "float32" else 1e-13
    np.testing.assert_allclose(got @ got.T, np.eye(r), atol=10 * tolerance)
    np.testing.assert_allclose(rows @ got.T @ got, rows, atol=100 * tolerance)


def test_dependent_and_zero_rows_are_replaced() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((6, 40)).astype(np.float32)
    rows[1], rows[3], rows[4] = 2 * rows[0], 0, rows[0] - rows[2]
    for scale in (1, 1e-20, 1e20):
        got = orthonormalise(rows * np.float32(scale), KEY)
        np.testing.assert_allclose(got @ got.T, np.eye(6), atol=1e-5)
        np.testing.assert_allclose(rows @ got.T @ got, rows, atol=1e-4)
    zeros = orthonormalise(np.zeros((3, 8), np.float32), KEY)
    np.testing.assert_allclose(zeros @ zeros.T, np.eye(3), atol=1e-6)


def test_random_numbers_are_nearly_normal_and_fixed() -> None:
    x = gaussian(KEY, 50, 4000)
    assert x.mean() == pytest.approx(0.125, abs=0.01)  # half a step: there is no zero
    assert x.std() == pytest.approx(1, abs=0.01)
    assert (x**4).mean() == pytest.approx(3, abs=0.15)
    assert np.abs(np.corrcoef(x) - np.eye(50)).max() < 0.1
    assert x.all()
    np.testing.assert_array_equal(gaussian(KEY, 3, 10, 2), gaussian(KEY, 5, 10)[2:])
    assert (gaussian(KEY + np.uint32(1), 50, 4000) != x).mean() > 0.8


@pytest.mark.parametrize(("r", "m", "k"), [(1, 3, 5), (4, 1000, 333), (3, 2, 100_000), (2, 100_000, 2)])
def test_products(r: int, m: int, k: int) -> None:
    rng = np.random.default_rng([r, m, k])
    p, q = (rng.standard_normal((r, size)).astype(np.float32) for size in (m, k))
    np.testing.assert_allclose(product(p, q), p.T @ q, atol=1e-5)


def test_rows_are_normalised_exactly() -> None:
    q = np.array([[3.0, -0.1], [0, 0], [1e-30, 2e-30], [-1e30, 5]], dtype=np.float32)
    got = normalise(q)
    assert got.dtype == np.float32
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = np.log2(q[[0, 2, 3], 0] / got[[0, 2, 3], 0])
    np.testing.assert_array_equal(factors, np.rint(factors))
    np.testing.assert_array_equal(got[1], 0)
    largest = np.abs(got).max(axis=1)[[0, 2, 3]]
    assert ((largest >= 0.5) & (largest < 1)).all()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"rank": 0}, "`rank` must be a number of columns.*got 0"),
        ({"rank": 2.0}, r"`rank` must be .*2\.0"),
        ({"warm_start": 1}, "`warm_start` must be a bool, got 1 of type int"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        PowerSGD(**options)


def test_what_tables_show() -> None:
    codec = get_codec("powersgd:rank=2")
    assert codec.biased
    assert codec.stateful
    assert not get_codec("powersgd:warm_start=false").stateful
    assert codec.config() == {"id": "powersgd", "rank": 2, "warm_start": True}
    q = np.zeros((2, 7), np.float32)
    assert codec.state_text({"q": q, "steps": 3}) == codec.state_text({"q": q + 1, "steps": 3}) == "(2, 7) 3"
