"""What every codec must keep of its noise: a function of seed, step and key; no bias; theory's variance."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.conformance import (
    NOISY_ROWS,
    ROWS,
    UNBIASED_ROWS,
    Row,
    all_shapes,
    assert_same_bits,
    over,
    same_bits,
)
from tests.conformance_bounds import Array, reals
from tests.conformance_driver import Ranks


@over(ROWS)
def test_results_are_a_function_of_seed_and_step(row: Row) -> None:
    trees = [{**tree, "x": x} for tree, x in zip(all_shapes(3, "float32"), row.draw(3), strict=True)]
    np.random.seed(3)  # noqa: NPY002  (the user's own state)
    random.seed(3)
    before = str(np.random.get_state()), random.getstate()  # noqa: NPY002
    first = row.simulate(trees, seed=5)[0]
    assert (str(np.random.get_state()), random.getstate()) == before  # noqa: NPY002
    assert_same_bits(row.simulate(trees, seed=5)[0], first)
    other_seed = row.simulate(trees, seed=6)[0]
    next_step = row.simulate(trees, seed=5, steps=2)[0]
    assert_same_bits(row.simulate(lambda _: trees, seed=5, steps=2)[0], next_step)
    keys = ["x"] if row.shape == (50, 100) else ["x", "1023", "1024", "3x700", "5x1100"]
    for other in (other_seed, next_step, row.simulate(trees, seed=5 + (1 << 40))[0]):
        for key in keys:
            if not row.make().stateful or other is not next_step:  # steps adapt, without noise too
                assert same_bits(other[key], first[key]) != row.noisy, key


@over(NOISY_ROWS)
def test_noise_depends_on_the_key(row: Row) -> None:
    named = [{"a": x, "b": x} for x in row.draw(3)]
    result = row.simulate(named)[0]
    assert not same_bits(result["a"], result["b"])


@over([row for row in NOISY_ROWS if row.shape != (50, 100)])  # equal rows have equal projections
def test_no_two_blocks_share_their_noise(row: Row) -> None:
    """Equal halves of a tensor, of two blocks each, get other errors."""
    half = row.draw(2)
    xs = [np.concatenate([x.reshape(-1)[:2048]] * 2).reshape(32, 128) for x in half]
    y = row.simulate(xs)[0].reshape(-1)
    assert not same_bits(y[:2048], y[2048:])


@pytest.mark.parametrize(
    ("row", "n", "steps"),
    [
        *((row, 3, 1) for row in UNBIASED_ROWS),
        *((row, 4, 3) for row in UNBIASED_ROWS if row.make().stateful),
    ],
    ids=str,
)
def test_rounding_has_mean_zero(row: Row, n: int, steps: int) -> None:
    """Of every coordinate over 120 seeds, and of all of them together; in adapted steps too."""
    xs = [x.reshape(-1)[:1500] for x in row.draw(n)]
    exact = np.sum([reals(x) for x in xs], axis=0)
    runs = [reals(row.simulate(xs, seed=seed, steps=steps)[0]) for seed in range(120)]
    errors = np.array(runs) - exact
    totals = errors.mean(axis=1)  # independent between seeds, whatever the coordinates have in common
    assert abs(totals.mean()) <= 5 * totals.std(ddof=1) / np.sqrt(len(totals))
    weighted = errors @ exact  # errors that grow with the number, such as clamps
    assert abs(weighted.mean()) <= 5 * weighted.std(ddof=1) / np.sqrt(len(weighted))
    deviation = errors.std(axis=0, ddof=1)
    moved = deviation > 1e-6 * np.abs(exact)
    assert moved.mean() > 0.85
    # What is drawn one time in 15 may come once in 120 times: as if it had come four times more often.
    cautious = np.sqrt(deviation**2 + 4 / len(errors) * np.ptp(errors, axis=0) ** 2)
    scores, cautious_scores = (
        errors.mean(axis=0)[moved] / d[moved] * np.sqrt(len(errors)) for d in (deviation, cautious)
    )
    rare = 4 if "scaled" in row.codec else 1  # drawn one time in four: far from normal
    assert (np.abs(cautious_scores) > 6 * rare).mean() == 0
    assert np.mean(scores**2) < 1.5 * rare


def mean_square(row: Row, xs: list[Any], count: int = 24) -> tuple[float, float]:
    """Return the mean over seeds of the squared error, and that mean's deviation."""
    exact = np.sum([reals(x) for x in xs], axis=0)
    squares = [((reals(row.simulate(xs, seed=s)[0]) - exact) ** 2).sum() for s in range(count)]
    return float(np.mean(squares)), float(np.std(squares, ddof=1) / np.sqrt(count))


@pytest.mark.parametrize("n", [1, 3, 5])
@over([row for row in ROWS if row.square is not None])
def test_the_error_has_the_variance_of_theory(row: Row, n: int) -> None:
    """Several different ranks; within 5 deviations of the mean over seeds, and 2 %."""
    rng = np.random.default_rng(n)
    xs = [rng.standard_normal(4000).astype(np.float32) for _ in range(n)]
    assert row.square is not None
    expected, (found, deviation) = row.square(xs), mean_square(row, xs)
    assert abs(found - expected) <= 5 * deviation + 0.02 * expected


ROTATED_ROWS = [row for row in ROWS if row.make().id == "rotated" and "clipped" not in row.codec]


@pytest.mark.parametrize("n", [1, 3])
@over(ROTATED_ROWS)
def test_rotated_errors_have_n_twelfths_of_a_step_squared(row: Row, n: int) -> None:
    """With the scale that the ranks agreed on: the largest rotated coordinate, over 32. In each block."""
    rng, made = np.random.default_rng(n), row.make()
    width: int = made.config()["wire_bits"]
    xs = [rng.standard_normal(3072).astype(np.float32) for _ in range(n)]
    exact, ratios = np.sum(xs, axis=0, dtype=np.float64), []
    for seed in range(24):
        ranks = Ranks(made, n, seed=seed)
        y = ranks.reduce(xs)
        scales = ranks.sent[0].result.view(np.float32).astype(np.float64) * 32
        steps = scales * 65536 / (((1 << (width - 1)) - 1) * 65536 // n)
        squares = ((y - exact) ** 2).reshape(3, 1024).sum(axis=1)
        ratios.append(squares / (1024 * n / 12 * steps**2))
        norms = np.max(
            [np.sqrt((x.astype(np.float64) ** 2).reshape(3, 1024).sum(axis=1)) for x in xs], axis=0
        )
        assert (scales >= norms / 32).all()  # no coordinate of a rotated block is less than the mean one
        assert (scales <= norms * 6.6 / 32).all()
    found = np.array(ratios)
    assert abs(found.mean() - 1) <= 5 * found.std(ddof=1) / np.sqrt(found.size)


def test_exponential_errors_have_the_variance_of_powers_of_two() -> None:
    """One rank: (x - L) (2 L - x), L the power of two at or below x over the largest."""
    (row,) = (row for row in ROWS if "exponential" in row.codec)
    x = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)
    top = float(np.abs(x).max())
    parts: Array = np.abs(x.astype(np.float64)) / top
    lower = 2.0 ** np.floor(np.log2(parts))
    expected = float(((parts - lower) * (2 * lower - parts)).sum()) * top**2
    found, deviation = mean_square(row, [x], 10)
    assert abs(found - expected) <= 5 * deviation + 0.02 * expected


def test_exponential_sums_have_the_variance_of_every_rounding() -> None:
    """Four ranks, added in pairs: each of 7 roundings has at most an eighth of the rounded number's square,
    and, of numbers of all magnitudes, not less than a third of that.
    """
    (row,) = (row for row in ROWS if "exponential" in row.codec)
    xs = [np.random.default_rng(r).standard_normal(20_000).astype(np.float32) for r in range(4)]
    parts = [(x.astype(np.float64), x.astype(np.float64) ** 2 / 8) for x in xs]
    while len(parts) > 1:  # mean and variance of the ranks' sums
        pairs = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        parts = [(mean, square + (mean**2 + square) / 8) for mean, square in pairs]
    most = float(parts[0][1].sum())
    found, deviation = mean_square(row, xs, 10)
    assert most / 3 <= found <= most + 5 * deviation
