"""What biased codecs promise in place of a bound by coordinate: which part of the sum they send, and how much
of it they leave.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from gccomm import testing
from gccomm.codecs import list_codecs
from tests.conformance import ROWS, Row, over
from tests.conformance_bounds import Array, clamp_of, clamp_square, grid, reals


def of(codec_id: str) -> list[Row]:
    return [row for row in ROWS if row.make().id == codec_id]


def relative_square(y: Any, exact: Array) -> float:
    return float(((reals(y) - exact) ** 2).sum() / (exact**2).sum())


def test_every_biased_codec_is_here() -> None:
    biased = {row.make().id for row in ROWS if row.make().rounding == "biased"}
    assert biased == {"grandk-mn", "grandk-mn-ts", "thc", "topkc", "powersgd", "rotated"}
    assert biased <= set(list_codecs())


# One coordinate of each stratum


@over([*of("grandk-mn"), *of("grandk-mn-ts")])
def test_one_coordinate_of_each_stratum_is_sent(row: Row) -> None:
    """Of equal numbers none is rounded away. The other coordinates are zero."""
    keep: int = row.make().config()["keep"]
    x = np.where(np.arange(5003) % 2, 1, -1).astype(np.float32)
    y = reals(row.simulate([x] * 3)[0])
    whole = len(x) // keep * keep
    sent = y != 0
    assert (sent[:whole].reshape(-1, keep).sum(axis=1) == 1).all()
    assert sent[whole:].sum() == 1
    times = keep if row.unbiased else 1
    np.testing.assert_allclose(y[:whole][sent[:whole]], 3 * times * x[:whole][sent[:whole]], rtol=1e-6)
    np.testing.assert_allclose(
        y[whole:].sum(), 3 * (len(x) - whole if row.unbiased else 1) * (x[whole:] @ sent[whole:]), rtol=1e-6
    )


@over([*of("grandk-mn"), *of("grandk-mn-ts")])
def test_every_coordinate_is_drawn_as_often(row: Row) -> None:
    """Chi-square over 60 seeds and all strata."""
    keep: int = row.make().config()["keep"]
    x = np.ones(200 * keep, np.float32)
    counts = np.zeros(keep)
    for seed in range(60):
        counts += (row.simulate([x], seed=seed)[0].reshape(200, keep) != 0).sum(axis=0)
    expected = 60 * 200 / keep
    assert ((counts - expected) ** 2 / expected).sum() < keep + 7 * math.sqrt(2 * keep)


@over([row for row in of("grandk-mn") + of("grandk-mn-ts") if not row.unbiased])
def test_a_draw_leaves_what_was_not_drawn(row: Row) -> None:
    """Error over sum, squared: 1 - 1 / keep, and rounding (127 / 3 levels), on the mean over seeds."""
    xs = row.draw(3)
    exact = np.sum([reals(x) for x in xs], axis=0)
    errors = [relative_square(row.simulate(xs, seed=s)[0], exact) for s in range(60)]
    rounding = 3 / 4 * (max(float(np.abs(x).max()) for x in xs) / 42) ** 2 * len(exact) / 10
    deviation = np.std(errors, ddof=1) / np.sqrt(60)
    assert 0.9 - 5 * deviation <= np.mean(errors) <= 0.9 + 5 * deviation + rounding / (exact**2).sum()


# Chunks with the most energy


@pytest.mark.parametrize("n", [1, 3])
@over(of("topkc"))
def test_the_chunks_with_most_energy_are_sent(row: Row, n: int) -> None:
    """As many as promised, in the order of the ranks' summed energies; nothing of the others."""
    config = row.make().config()
    chunk: int = config["chunk"]
    xs = [x.reshape(-1) for x in row.draw(n)]
    count = -(-len(xs[0]) // chunk)
    room = np.zeros(count * chunk)
    energies, sent = np.zeros(count), room.copy()
    for x in xs:
        room[: len(x)] = reals(x)
        energies += (room.reshape(count, chunk) ** 2).sum(axis=1)
    sent[: len(xs[0])] = reals(row.simulate(xs)[0])
    chosen = np.flatnonzero(sent.reshape(count, chunk).any(axis=1))
    most = np.sort(np.argsort(energies)[count - math.ceil(config["fraction"] * count - 1e-9) :])
    np.testing.assert_array_equal(chosen, most)


@over(of("topkc"))
def test_chunks_leave_no_more_than_their_part(row: Row) -> None:
    """One rank: at most 1 - fraction of the energy, and rounding of lanes or bfloat16."""
    (x,) = row.draw(1)
    left = relative_square(row.simulate([x])[0], reals(x))
    assert 0 < left <= 1 - row.make().config()["fraction"] + 1e-3


# Projections on few columns


@over(of("powersgd"))
def test_low_rank_results_are_projections_of_the_sum(row: Row) -> None:
    """Rank 4, and ||y||^2 + ||sum - y||^2 = ||sum||^2: nothing can be nearer in those columns."""
    xs = [np.asarray(x, np.float64) for x in row.draw(3)]
    exact = np.sum(xs, axis=0)
    for y in (row.simulate(xs)[0], row.simulate(xs, steps=3)[0]):
        values = np.linalg.svd(y, compute_uv=False)
        assert values[4] < 1e-12 * values[0] < values[3]
        energies = [float((part**2).sum()) for part in (y, exact - y, exact)]
        assert energies[0] + energies[1] == pytest.approx(energies[2], rel=1e-10)
        assert energies[0] > 0
        best = (np.linalg.svd(exact, compute_uv=False)[4:] ** 2).sum()
        assert best * (1 - 1e-12) <= energies[1]


@over(of("powersgd"))
def test_sums_of_low_rank_come_back(row: Row) -> None:
    rng = np.random.default_rng(0)
    xs = [rng.standard_normal((50, 4)) @ rng.standard_normal((4, 100)) / 4 for _ in range(1)] * 3
    assert relative_square(row.simulate(xs)[0], reals(np.sum(xs, axis=0))) < 1e-20


# Tables


def variance(points: tuple[int, ...], t: float) -> float:
    """Return the variance of rounding a standard normal number to points of a grid, by the midpoint rule."""
    total = 0.0
    for a, b in itertools.pairwise(t * (2 * np.array(points) / points[-1] - 1)):
        z = a + (b - a) * (np.arange(2000) + 0.5) / 2000
        total += float(np.mean((b - z) * (z - a) * np.exp(-z * z / 2)) * (b - a)) / math.sqrt(2 * math.pi)
    return total


PUBLISHED = (0, 3, 5, 7, 9, 11, 13, 14, 16, 17, 19, 21, 23, 25, 27, 30)


@pytest.mark.parametrize("n", [1, 4, 8])
@over(of("thc"))
def test_a_table_rounds_no_worse_than_the_published_one(row: Row, n: int) -> None:
    """Gaussian numbers: error over sum, squared, between the whole grid's and the published table's."""
    config = row.make().config()
    t, g = clamp_of(config["overflow"]), grid(8, n, config["saturate"])
    assert g == 30
    rng = np.random.default_rng(n)
    xs = [rng.standard_normal(1 << 16).astype(np.float32) for _ in range(n)]
    exact = np.sum([reals(x) for x in xs], axis=0)
    (y, *_), _ = testing.simulate(xs, row.make(), error_feedback=False)
    clamped = clamp_square(t)
    least, most = variance(tuple(range(31)), t) + clamped, variance(PUBLISHED, t) + clamped
    assert 0.97 * least <= relative_square(y, exact) <= 1.05 * most


@over([row for row in ROWS if "clipped" in row.codec])
def test_clipping_loses_less_than_it_saves(row: Row) -> None:
    """Half the error of safe headroom with few levels; on Gaussian blocks the gain leaves no bias."""
    rng = np.random.default_rng(3)
    xs = [rng.standard_normal(4096).astype(np.float32) for _ in range(4)]
    exact = np.sum([reals(x) for x in xs], axis=0)
    plain = row.codec.replace("clipped", "safe")
    errors = {}
    for codec in (row.codec, plain):
        ys = [reals(testing.simulate(xs, codec, seed=s, error_feedback=False)[0][0]) for s in range(200)]
        errors[codec] = np.mean([((y - exact) ** 2).sum() for y in ys]) / (exact**2).sum()
        slope = np.mean(ys, axis=0) @ exact / (exact @ exact)
        assert slope == pytest.approx(1, abs=0.01)
    assert errors[row.codec] < 0.5 * errors[plain]
