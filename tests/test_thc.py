"""``thc``: the best tables, lanes that never overflow, errors from rounding and clamping alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gccomm
from gccomm import testing
from gccomm.codecs import get_codec
from gccomm.codecs.tables import clamp_error, clamp_of, expected_variance, kernel_table, optimal_table
from gccomm.codecs.thc import THC
from gccomm.errors import NegotiationError

Array = np.ndarray[Any, Any]
BLOCK = 1024
T = 2.153874  # of 1/32
PUBLISHED = (0, 3, 5, 7, 9, 11, 13, 14, 16, 17, 19, 21, 23, 25, 27, 30)


def gaussian(n: int, size: int, seed: int = 0) -> list[Array]:
    rng = np.random.default_rng([seed, n, size])
    return [rng.standard_normal(size).astype(np.float32) for _ in range(n)]


def spike(size: int = BLOCK, place: int = 77, value: float = 3.0) -> Array:
    """Return one number among zeros: once rotated, all coordinates have the same magnitude, z = 1."""
    x = np.zeros(size, dtype=np.float32)
    x[place] = value
    return x


def run_steps(
    trees: Sequence[Sequence[Any]], codec: str, **options: Any
) -> list[tuple[list[Any], dict[str, Array]]]:
    """Reduce step by step; return each rank's results and residuals."""

    def program(comm: gccomm.Communicator) -> tuple[list[Any], dict[str, Array]]:
        reducer = gccomm.Reducer(codec, exact_below=0, **{"op": "sum", **options})
        results = [reducer(step[comm.rank]) for step in trees]
        return results, reducer.state_dict()["residuals"]

    return testing.run(program, len(trees[0]))


# Tables


def quadrature(f: Any, a: float, b: float) -> float:
    """Return the integral of f times the normal density, by the midpoint rule."""
    z = a + (b - a) * (np.arange(20000) + 0.5) / 20000
    return float(np.mean(f(z) * np.exp(-z * z / 2)) * (b - a) / np.sqrt(2 * np.pi))


def variance_by_quadrature(table: Sequence[int], clamp: float) -> float:
    points = clamp * (2 * np.array(table) / table[-1] - 1)
    pairs = itertools.pairwise(points.tolist())
    return sum(quadrature(lambda z, a=a, b=b: (b - z) * (z - a), a, b) for a, b in pairs)


@pytest.mark.parametrize("clamp", [0.5, T, 4.0])
def test_tables_are_the_best_of_all(clamp: float) -> None:
    """Against every choice of points, for every small size."""
    for g in range(1, 12):
        for points in range(2, g + 3):
            table = optimal_table(points, g, clamp)
            inner = min(points, g + 1) - 2
            every = [(0, *c, g) for c in itertools.combinations(range(1, g), inner)]
            least = min(expected_variance(t, clamp) for t in every)
            assert table in every
            assert expected_variance(table, clamp) == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize(("points", "g"), [(16, 30), (8, 30), (16, 20), (4, 200), (16, 510)])
def test_properties_of_tables(points: int, g: int) -> None:
    table = optimal_table(points, g, T)
    assert (table[0], table[-1], len(table)) == (0, g, points)
    assert all(a < b for a, b in itertools.pairwise(table))
    mirrored = tuple(g - p for p in reversed(table))
    assert expected_variance(mirrored, T) == pytest.approx(expected_variance(table, T), rel=1e-9)
    gaps = np.diff(table)
    assert gaps.max() in (gaps[0], gaps[-1])  # they are wide where few coordinates are
    assert gaps.min() in gaps[len(gaps) // 2 - 1 : len(gaps) // 2 + 2]


def test_the_default_table_is_no_worse_than_the_published_one() -> None:
    table = optimal_table(16, 30, clamp_of(1 / 32))
    assert sum(a != b for a, b in zip(table, PUBLISHED, strict=True)) <= 1
    assert expected_variance(table, T) <= expected_variance(PUBLISHED, T)
    assert expected_variance(PUBLISHED, T) < 1.002 * expected_variance(table, T)


@pytest.mark.parametrize("g", [1, 2, 15, 30, 1023])
def test_tables_with_room_are_the_whole_grid(g: int) -> None:
    assert optimal_table(g + 1, g, T) == optimal_table(1024, g, T) == tuple(range(g + 1))


@pytest.mark.parametrize("table", [PUBLISHED, (0, 1), tuple(range(16)), (0, 1, 30)])
@pytest.mark.parametrize("clamp", [1.0, T, 5.0])
def test_expected_variance(table: tuple[int, ...], clamp: float) -> None:
    assert expected_variance(table, clamp) == pytest.approx(variance_by_quadrature(table, clamp), rel=1e-5)


@pytest.mark.parametrize("overflow", [0.5, 1 / 32, 1e-3, 1e-12])
def test_clamps(overflow: float) -> None:
    clamp = clamp_of(overflow)
    assert clamp * 2**20 == round(clamp * 2**20)
    outside = 2 * quadrature(np.ones_like, clamp, clamp + 12)
    assert outside == pytest.approx(overflow, rel=2e-3)
    expected = 2 * quadrature(lambda z: (z - clamp) ** 2, clamp, clamp + 12)
    assert clamp_error(clamp) == pytest.approx(expected, rel=2e-3, abs=1e-16)


def test_kernel_tables() -> None:
    got = kernel_table((0, 3, 4, 6))
    np.testing.assert_array_equal(got, [6, 0, 0, 0, 3, 4, 4, 3, 3, 3, 1, 2, 2])
    assert got.dtype == np.int32


@pytest.mark.parametrize(("points", "g"), [(1, 5), (2, 0)])
def test_tables_that_are_none_are_refused(points: int, g: int) -> None:
    with pytest.raises(ValueError, match=f"got {points} of {g}"):
        optimal_table(points, g, T)


# Granularity


@pytest.mark.parametrize(
    ("width", "grids"),
    [
        (8, {1: 30, 8: 30, 9: 28, 10: 25, 16: 15, 17: 15, 18: 14, 127: 2, 128: 1, 255: 1}),
        (4, {1: 15, 2: 7, 3: 5, 7: 2, 8: 1, 15: 1}),
        (16, {2: 30, 2184: 30, 2185: 29, 65535: 1}),
    ],
)
def test_the_granularity_is_the_largest_that_fits(width: int, grids: dict[int, int]) -> None:
    codec = THC(width)
    assert {n: codec.grid(n) for n in grids} == grids
    most = max(grids)
    with pytest.raises(NegotiationError, match=f"{most + 1} ranks do not fit in lanes of {width} bits"):
        codec.require_size(most + 1, 4)


def test_granularities_that_do_not_fit_are_refused_with_the_figures() -> None:
    codec = THC(granularity=30)
    codec.require_size(8, 4)
    with pytest.raises(NegotiationError, match="granularity=30 on 9 ranks sums up to 270, more than the 255"):
        codec.require_size(9, 4)
    THC(granularity=51).require_size(5, 4)
    with pytest.raises(NegotiationError, match="at most 15"):
        testing.simulate(gaussian(17, 2000), THC(granularity=16))


def test_feedback_is_refused_where_it_would_diverge() -> None:
    THC().require_feedback(127)
    with pytest.raises(NegotiationError, match=r"granularity of 1 would diverge.*3\.\d\d times"):
        THC().require_feedback(128)
    testing.simulate(gaussian(128, 1024), THC(), error_feedback=False)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"wire_bits": 7}, "`wire_bits` must be"),
        ({"bits": 0}, "`bits` must be .* 1 to 10, got 0"),
        ({"bits": 11}, "`bits` must be"),
        ({"granularity": 0}, "`granularity` must be .* 1 to 1023, got 0"),
        ({"granularity": 1024}, "`granularity` must be"),
        ({"overflow": 0.0}, "`overflow` must be a probability of 1e-12 to 0.5"),
        ({"overflow": 0.6}, "`overflow` must be"),
        ({"overflow": "1/32"}, "`overflow` must be .* of type str"),
        ({"rotations": 0}, "`rotations` must be"),
        ({"saturate": 1}, "`saturate` must be a bool"),
        ({"saturate": True, "granularity": 15}, "`granularity` must be even and at most 254"),
        ({"saturate": True, "wire_bits": 4, "granularity": 16}, "at most 14"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        THC(**options)


# Errors


@pytest.mark.parametrize("rotations", [1, 2])
@pytest.mark.parametrize(
    ("n", "codec"),
    [(1, "thc"), (4, "thc"), (8, "thc"), (16, "thc"), (4, "thc:bits=5"), (3, "thc:wire_bits=4"),
     (2, "thc:bits=2,overflow=0.1"), (2, "thc:wire_bits=16,granularity=1000,bits=10,overflow=1e-5")],
)  # fmt: skip
def test_error_is_what_the_table_says(n: int, codec: str, rotations: int) -> None:
    """vNMSE within 10 % of the expected variance and what the clamp takes off; its estimate follows."""
    separator = "," if ":" in codec else ":"
    made: Any = get_codec(f"{codec}{separator}rotations={rotations}")
    xs = gaussian(n, 1 << 17)
    ys, stats = testing.simulate(xs, made, error_feedback=False)
    exact = np.sum(xs, axis=0, dtype=np.float64)
    vnmse = ((ys[0] - exact) ** 2).sum() / (exact**2).sum()
    clamp = clamp_of(made.overflow)
    table = optimal_table(2**made.bits, made.grid(n), clamp)
    expected = variance_by_quadrature(table, clamp) + clamp_error(clamp)
    assert vnmse == pytest.approx(expected, rel=0.1)
    assert stats[0].vnmse_estimate == pytest.approx(vnmse, rel=0.25)


@pytest.mark.parametrize(
    "codec", ["thc", "thc:bits=2", "thc:granularity=25", "thc:rotations=2,overflow=1e-6"]
)
def test_inside_the_clamp_no_coordinate_is_biased(codec: str) -> None:
    """A spike has z = 1 everywhere (after one rotation); over seeds, 3 ranks."""
    xs = [spike(), spike(place=5, value=-3.0), spike(place=900)]
    exact = np.sum(xs, axis=0)
    runs = [testing.simulate(xs, codec, error_feedback=False, seed=seed)[0][0] for seed in range(400)]
    errors = np.array(runs) - exact
    deviation = errors.std(axis=0, ddof=1)
    assert (deviation > 0).all()
    allowed = 6 * deviation / 20 + 3e-4 * np.abs(exact)  # the norm is known to 1e-4
    assert (np.abs(errors.mean(axis=0)) < allowed).all()


@pytest.mark.parametrize("overflow", [0.5, 0.2, 1 / 32])
def test_the_clamp_takes_off_what_it_should(overflow: float) -> None:
    """E[z clamp(z)] of a standard normal z is the probability that it is not clamped."""
    xs = gaussian(2, 1 << 18)
    ys, _ = testing.simulate(xs, f"thc:overflow={overflow},bits=5", error_feedback=False)
    exact = np.sum(xs, axis=0, dtype=np.float64)
    assert (ys[0] * exact).sum() / (exact**2).sum() == pytest.approx(1 - overflow, abs=0.01)


def test_noise_of_ranks_is_independent() -> None:
    """With equal inputs errors would add up to n^2 times one's variance, were the noise shared."""
    x = gaussian(1, 1 << 16)[0]
    one, eight = (
        testing.simulate([x] * n, "thc:overflow=1e-6", error_feedback=False)[0][0] - n * x for n in (1, 8)
    )
    assert (eight**2).mean() == pytest.approx(8 * (one**2).mean(), rel=0.05)


@pytest.mark.parametrize("width", [2, 3, 4, 5, 6, 8])
def test_full_lanes_never_overflow(width: int) -> None:
    """Every rank at the clamp, of one sign: the simulation raises where a lane's sum leaves its range."""
    x = spike()
    most = 2**width - 1
    cases = [(n, None) for n in (*range(1, min(most, 18) + 1), most)]
    cases += [(n, most // n) for n in (1, 3, 5, 15, 51, 85) if n <= most]
    for n, g in cases:
        codec = THC(width, granularity=g, overflow=0.5)
        for op in ("sum", "mean"):
            ys, _ = testing.simulate([{"plus": x, "minus": -x}] * n, codec, op, error_feedback=False)
            for key, sign in (("plus", 1), ("minus", -1)):
                expected = sign * clamp_of(0.5) * x * (n if op == "sum" else 1)
                np.testing.assert_allclose(ys[0][key], expected, rtol=3e-4, atol=1e-5 * n)


@pytest.mark.parametrize("width", [2, 3, 4, 5, 6, 8])
def test_random_sums_never_overflow(width: int) -> None:
    for n in (1, 2, 3, 7, 15, 255):
        if n < 2**width:
            common = gaussian(1, 3000)[0]
            xs = [np.where(x > 0, common, -common) for x in gaussian(n, 3000)]
            testing.simulate(xs, THC(width), error_feedback=False, exact_below=0)


# Error feedback


def test_feedback_is_on_by_default_and_loses_nothing() -> None:
    """Inputs of all steps = results of all steps + residuals, whatever was clamped."""
    steps = [[{"x": x} for x in gaussian(3, 5000, step)] for step in range(10)]
    outcome = run_steps(steps, "thc:overflow=0.3")
    given = np.sum([tree["x"] for step in steps for tree in step], axis=0, dtype=np.float64)
    got = np.sum([y["x"] for y in outcome[0][0]], axis=0, dtype=np.float64)
    left = np.sum([residuals["x"] for _, residuals in outcome], axis=0, dtype=np.float64)
    assert np.abs(given - got - left).max() < 1e-4
    assert np.abs(left).max() > 0.1
    assert not run_steps(steps, "thc", error_feedback=False)[0][1]


def test_feedback_makes_up_for_the_clamp() -> None:
    """The same input in every step; without feedback half of it would be lost."""
    xs = gaussian(2, 4096)
    results, _ = run_steps([[{"x": x} for x in xs]] * 60, "thc:overflow=0.2", op="mean")[0]
    mean, exact = np.mean([y["x"] for y in results], axis=0), np.mean(xs, axis=0)
    assert (mean * exact).sum() / (exact**2).sum() == pytest.approx(1, abs=0.01)


def test_the_norm_is_that_of_what_is_sent() -> None:
    """A residual ten times the input: a norm of the input alone would clamp nearly everything."""
    x = gaussian(1, 4096)[0]

    def program(comm: gccomm.Communicator) -> Array:
        reducer = gccomm.Reducer("thc", op="sum")
        reducer({"x": x})
        state = reducer.state_dict()
        state["residuals"]["x"][:] = 10 * x
        reducer.load_state_dict(state)
        return np.asarray(reducer({"x": x})["x"])

    y = testing.run(program, 1)[0]
    assert (y * x).sum() / (x**2).sum() == pytest.approx(11, rel=0.05)


# Special inputs


@pytest.mark.parametrize("codec", ["thc", "thc:rotations=2,granularity=25"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_blocks_that_are_zero_or_not_finite(codec: str, value: float) -> None:
    good = gaussian(2, 5 * BLOCK)
    for x in good:
        x[BLOCK : 2 * BLOCK] = 0
    bad = [x.copy() for x in good]
    bad[1][3 * BLOCK + 5] = value
    with_bad, without = (
        run_steps([[{"x": x} for x in bad]], codec),
        run_steps([[{"x": x} for x in good]], codec),
    )
    lost = np.arange(5 * BLOCK) // BLOCK == 3
    for (results, residuals), (others, _) in zip(with_bad, without, strict=True):
        assert np.isnan(results[0]["x"][lost]).all()
        np.testing.assert_array_equal(results[0]["x"][~lost], others[0]["x"][~lost])
        assert not results[0]["x"][BLOCK : 2 * BLOCK].any()
        assert not residuals["x"][lost].any()
        assert residuals["x"][~lost].any()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("size", [1, 63, 64, 700, 1000, 1025])
def test_dtypes_and_lengths(dtype: str, size: int) -> None:
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    xs = [x.astype(kind) for x in gaussian(3, size)]
    exact = np.sum([x.astype(np.float64) for x in xs], axis=0)
    ys, _ = testing.simulate(xs, "thc:overflow=1e-9,bits=5,wire_bits=16", exact_below=0)
    assert ys[0].dtype == kind
    norm = max(float(np.linalg.norm(x.astype(np.float64))) for x in xs)
    error = float(np.linalg.norm(ys[0].astype(np.float64) - exact))
    assert error < 3 * norm * (2 * 6.2 / 30)  # a step's width of every coordinate of every rank


@pytest.mark.parametrize(
    ("dtype", "scale"), [("float32", 2e38), ("float32", 1e-42), ("float64", 1e308), ("float64", 1e-310)]
)
def test_huge_and_tiny_numbers(dtype: str, scale: float) -> None:
    rng = np.random.default_rng(3)
    shape = rng.choice([-1, 1], 4096) * rng.uniform(0.5, 1, 4096)
    x = (shape * scale).astype(dtype)
    (mean, *_), _ = testing.simulate([x] * 5, "thc", "mean", error_feedback=False)
    error = mean.astype(np.float64) / scale - shape
    assert np.sqrt((error**2).mean()) < 0.2
    for _, residuals in run_steps([[{"x": x}] * 5] * 3, "thc"):
        assert np.isfinite(residuals["x"]).all()


def test_tensors_travel_together_or_alone() -> None:
    """The bits of a result do not depend on what else is reduced, nor on pieces."""
    shapes = {"a": (5, 600), "b": (999,), "c": (64,), "d": (2, 1500), "e": (1,)}
    rng = np.random.default_rng(0)
    trees = [{k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()} for _ in range(3)]
    whole = testing.simulate(trees, "thc", exact_below=0)[0][0]
    for key in shapes:
        alone = testing.simulate([{key: t[key]} for t in trees], "thc", exact_below=0)[0][0]
        np.testing.assert_array_equal(alone[key], whole[key], err_msg=key, strict=True)
    for options in ({"one_host": False}, {"piece_coordinates": 1}, {"bucket_bytes": 5000}):
        cut: Any = testing.simulate(trees, "thc", exact_below=0, **options)[0][0]
        for key in shapes:
            np.testing.assert_array_equal(cut[key], whole[key], err_msg=key)


def test_the_wire_carries_lanes() -> None:
    size = 1 << 17
    xs = gaussian(2, size)
    stats = {w: testing.simulate(xs, THC(w))[1][0] for w in (4, 5, 8, 16)}
    wire = {w: s.wire_bytes - s.measure_bytes for w, s in stats.items()}
    words = {w: size // BLOCK * -(-BLOCK // (32 // w)) for w in wire}
    assert {w: wire[16] - wire[w] for w in wire} == {w: 4 * (words[16] - words[w]) for w in wire}
    assert 4 * words[8] < wire[8] < 1.05 * 4 * words[8]


# Saturating sums


def test_saturating_granularities() -> None:
    assert {n: THC(5, saturate=True).grid(n) for n in (1, 2, 4, 16, 225)} == {
        1: 30,
        2: 20,
        4: 14,
        16: 6,
        225: 2,
    }
    assert THC(8, saturate=True).grid(64) == 30
    assert THC(8).grid(64) == 3
    with pytest.raises(NegotiationError, match="226 ranks do not fit in lanes of 5 bits"):
        THC(5, saturate=True).require_size(226, 4)
    assert THC(5, saturate=True).operation == "saturate:5"
    assert THC(5).operation is None
    assert THC(5, saturate=True).sums_as == "own operation"


@pytest.mark.parametrize(("n", "width"), [(1, 4), (4, 5), (16, 6), (7, 8)])
def test_saturating_sums_of_independent_ranks(n: int, width: int) -> None:
    """Close to what wide lanes give for the same granularity; the sum is clipped like a rank is."""
    xs = gaussian(n, 1 << 16)
    exact = np.sum(xs, axis=0, dtype=np.float64)
    codec = THC(width, saturate=True)
    ys, _ = testing.simulate(xs, codec, error_feedback=False)
    for y in ys[1:]:
        np.testing.assert_array_equal(y, ys[0])
    wide, _ = testing.simulate(xs, THC(16, granularity=codec.grid(n)), error_feedback=False)
    errors = [float(((y - exact) ** 2).sum() / (exact**2).sum()) for y in (ys[0], wide[0])]
    assert errors[0] < errors[1] + 1.5 * clamp_error(T)


def test_saturating_sums_of_equal_ranks_are_clipped() -> None:
    x = spike()
    codec = THC(4, granularity=14, saturate=True)
    ys, _ = testing.simulate([x] * 9, codec, error_feedback=False)
    np.testing.assert_allclose(ys[0][77], T * 3.0, rtol=1e-3)
    small, _ = testing.simulate([x] * 9, THC(8, granularity=14, saturate=True), error_feedback=False)
    assert small[0][77] == pytest.approx(27, rel=0.1)


def test_saturating_blocks_that_are_zero_or_not_finite() -> None:
    x = gaussian(1, 4 * BLOCK)[0]
    x[:BLOCK], x[2 * BLOCK] = 0, np.nan
    for results, residuals in run_steps([[{"x": x}] * 2], "thc:saturate=true,wire_bits=5"):
        y = results[0]["x"].reshape(4, BLOCK)
        assert not y[0].any()
        assert np.isnan(y[2]).all()
        assert np.isfinite(y[[1, 3]]).all()
        assert np.isfinite(residuals["x"]).all()


def test_what_tables_show() -> None:
    codec = get_codec("thc")
    assert codec.biased
    assert codec.private
    assert codec.config() == {
        "id": "thc", "wire_bits": 8, "bits": 4, "granularity": None, "overflow": 1 / 32, "rotations": 1,
        "saturate": False,
    }  # fmt: skip
