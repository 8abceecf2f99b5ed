"""What must hold for every codec that rounds at random with noise of each rank's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gccomm
from gccomm import testing
from gccomm.errors import NegotiationError

Array = np.ndarray[Any, Any]
SIZES = (1, 2, 63, 1023, 1024, 1025, 3000)


def gaussian(n: int, size: int, seed: int = 0) -> list[Array]:
    rng = np.random.default_rng([n, size, seed])
    return [rng.standard_normal(size).astype(np.float32) for _ in range(n)]


def exact(xs: list[Array]) -> Array:
    return np.sum([x.astype(np.longdouble) for x in xs], axis=0)


def repeated(xs: list[Array], codec: str, count: int) -> Array:
    """Return the results of ``count`` seeds, one a row."""
    seeds = range(count)
    return np.array([testing.simulate(xs, codec, seed=s, exact_below=0)[0][0] for s in seeds], np.float64)


def assert_unbiased(errors: Array) -> None:
    """Check the errors of repetitions (rows) of coordinates (columns)."""
    deviation = errors.std(axis=0, ddof=1)
    moved = deviation > 0
    assert moved.mean() > 0.9
    scores = errors.mean(axis=0)[moved] / deviation[moved] * np.sqrt(len(errors))
    assert np.abs(scores).max() < 6
    assert abs(scores.mean()) < 5 / np.sqrt(scores.size)


def check_worst_case(codec: str, width: int) -> None:
    """All ranks at the maximum, of one sign: the simulation raises where a lane's sum leaves its range."""
    half = (1 << (width - 1)) - 1
    x = np.full(1100, 3.0, dtype=np.float32)
    for n in sorted({n for n in range(1, 18) if n <= half} | {min(half, 127)}):
        name = f"{codec},wire_bits={width}" if ":" in codec else f"{codec}:wire_bits={width}"
        tree = {"plus": x, "minus": -x, "both": np.where(np.arange(1100) % 3 == 0, x, -x)}
        ys, _ = testing.simulate([tree] * n, name, exact_below=0)
        for key, value in tree.items():
            np.testing.assert_allclose(ys[0][key], n * value, rtol=1e-5)


def check_refusal(codec: str, width: int) -> None:
    """One more rank than whole levels is refused on every rank, with the remedy."""
    made = gccomm.get_codec(codec, wire_bits=width)
    half = (1 << (width - 1)) - 1
    made.require_size(half, 4)
    with pytest.raises(
        NegotiationError,
        match=rf"{half + 1} ranks do not fit in lanes of {width} bits.*at most {half}.*larger wire_bits",
    ):
        made.require_size(half + 1, 4)


def check_zeros(codec: str) -> None:
    """Zero on all ranks stays zero, a coordinate or a whole tensor, with and without residuals."""
    zero = np.random.default_rng(1).random(2500) < 0.4
    xs = [{"x": np.where(zero, 0, x).astype(np.float32), "nil": x * 0} for x in gaussian(3, 2500)]
    for _, _, ys, _ in testing.simulate_steps(xs, codec, steps=3, exact_below=0):
        assert not ys[0]["nil"].any()
        assert not ys[0]["x"][zero].any()


def check_nonfinite(codec: str, error_feedback: bool) -> None:
    """The tensor that one rank has inf or NaN in is NaN on all, in that step alone; residuals stay."""

    def program(comm: gccomm.Communicator) -> list[Any]:
        reducer = gccomm.Reducer(codec, comm=comm, error_feedback=error_feedback, exact_below=0)
        found: list[Any] = []
        for step, bad in enumerate([0.0, 0.0, np.nan, np.inf, -np.inf, 0.0]):
            x, other = gaussian(4, 2500, step)[2 * comm.rank : 2 * comm.rank + 2]
            if comm.rank == 1 and bad:
                x[2498 - step] = bad
            y = reducer({"x": x, "other": other})
            residuals = {k: r.copy() for k, r in reducer._reduction.residuals.items()}
            found.append((y["x"].copy(), y["other"].copy(), residuals))
        return found

    for found in testing.run(program, 2):
        for step in (2, 3, 4):
            assert np.isnan(found[step][0]).all()
            if error_feedback:
                np.testing.assert_array_equal(found[step][2]["x"], found[1][2]["x"])
        for step in (0, 1, 5):
            assert np.isfinite(found[step][0]).all()
        assert all(np.isfinite(other).all() for _, other, _ in found)


def check_range(codec: str, levels: int) -> None:
    """Numbers near the ends of their formats: within n steps of the largest; a mean never overflows."""
    n = 3
    cases = [("float32", 1e38), ("float32", 1e-40), ("float32", 2e-45), ("float16", 4e4), ("float64", 1e308)]
    for dtype, value in [*cases, ("float64", 1e-310), ("float64", 1.0), ("float16", 1e-7)]:
        x = np.full(1500, value, dtype=dtype)
        x[::2] = -x[::2]
        ys, _ = testing.simulate([x] * n, codec, "mean", exact_below=0)
        assert ys[0].dtype == x.dtype
        smallest = float(np.finfo(dtype).smallest_subnormal)
        least = 2.0**-1042 if dtype == "float64" else 0.0  # of a float64 scale word
        error = np.abs(ys[0].astype(np.longdouble) - x)
        assert error.max() <= max(np.longdouble(value), least) / levels * 1.001 + 2 * smallest
        assert not np.isnan(ys[0]).any()
    ys, _ = testing.simulate([np.full(1500, 3e38, np.float32)] * n, codec, exact_below=0)
    assert np.isposinf(ys[0]).all()


def check_seeds(codec: str) -> None:
    """The same seed gives the same bits, whatever else travels along; another seed or step others."""
    xs = gaussian(3, 70_000)
    one, _ = testing.simulate(xs, codec, seed=5, exact_below=0)
    again, _ = testing.simulate(xs, codec, seed=5, exact_below=0, piece_coordinates=4096)
    for y in (*one[1:], *again):
        np.testing.assert_array_equal(one[0], y)
    alone, _ = testing.simulate([{"x": x} for x in xs], codec, seed=5, exact_below=0)
    trees = [{"a": x[:1000], "x": x, "z": x[:3000]} for x in xs]
    fused, _ = testing.simulate(trees, codec, seed=5, exact_below=0)
    np.testing.assert_array_equal(fused[0]["x"], alone[0]["x"])
    other, _ = testing.simulate(xs, codec, seed=6, exact_below=0)
    assert (one[0] != other[0]).any()
