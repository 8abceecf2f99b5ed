"""``global-qsgd``: both ditherings are unbiased, of known variance, and stay in range."""

from __future__ import annotations

import numpy as np
import pytest

import gccomm
from gccomm import testing
from gccomm.errors import NegotiationError
from tests.stochastic_cases import (
    SIZES,
    assert_unbiased,
    check_nonfinite,
    check_range,
    check_refusal,
    check_seeds,
    check_worst_case,
    check_zeros,
    exact,
    gaussian,
    repeated,
)

STANDARD, EXPONENTIAL = "global-qsgd", "global-qsgd:dithering=exponential"


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_standard_variance(n: int) -> None:
    """f (1 - f) step^2 a rank, f the fraction that is rounded."""
    xs = gaussian(n, 100_000)
    step = max(float(np.abs(x).max()) for x in xs) / (127 // n)
    fractions = [np.abs(x.astype(np.float64)) / step % 1 for x in xs]
    expected = sum(float((f * (1 - f)).sum()) for f in fractions) * step**2
    ys, _ = testing.simulate(xs, STANDARD, seed=n)
    assert float(((ys[0] - exact(xs)) ** 2).sum()) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("codec", [STANDARD, EXPONENTIAL])
@pytest.mark.parametrize("n", [1, 3, 4])
def test_no_coordinate_is_biased(codec: str, n: int) -> None:
    xs = gaussian(n, 1500)
    assert_unbiased(repeated(xs, codec, 400) - exact(xs))


@pytest.mark.parametrize("n", [2, 3, 5, 9])
def test_exponential_is_unbiased_at_the_largest_magnitude(n: int) -> None:
    """Published room of 2 n holds sums of a tree over 2^k ranks; here any order may round up again."""
    x = np.full(4000, 0.999, np.float32)
    x[0] = 1
    results = repeated([x] * n, EXPONENTIAL, 60)[:, 1:]
    deviation = results.mean(axis=1).std(ddof=1) / np.sqrt(60)
    assert abs(results.mean() - 0.999 * n) < 5 * deviation
    assert results.max() >= n


def test_exponential_variance() -> None:
    """One rank: (x - L) (2 L - x), L the power of two below x in units of the largest."""
    x = gaussian(1, 200_000)[0]
    parts = np.abs(x.astype(np.float64)) / float(np.abs(x).max())
    lower = 2.0 ** np.floor(np.log2(np.where(parts > 0, parts, 1)))
    expected = float(((parts - lower) * (2 * lower - parts)).sum()) * float(np.abs(x).max()) ** 2
    ys, _ = testing.simulate([x], EXPONENTIAL)
    errors = ys[0].astype(np.float64) - x
    assert float((errors**2).sum()) == pytest.approx(expected, rel=0.03)
    assert (errors**2).mean() < (x.astype(np.float64) ** 2).mean() / 8
    powers = np.log2(np.abs(ys[0][ys[0] != 0].astype(np.float64)) / float(np.abs(x).max()))
    assert np.abs(powers - np.rint(powers)).max() < 1e-5


def test_exponential_keeps_small_numbers() -> None:
    """Relative errors do not depend on the size; standard dithering loses what is below a level."""
    rng = np.random.default_rng(3)
    xs = [np.exp(rng.standard_normal(20_000) * 3).astype(np.float32) for _ in range(4)]
    medians = []
    for codec in (EXPONENTIAL, STANDARD):
        ys, _ = testing.simulate(xs, codec)
        medians.append(float(np.median(np.abs(ys[0] / exact(xs) - 1))))
    assert medians[0] < 0.5
    assert medians[1] == 1


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_ranks_get_the_same_bits(n: int) -> None:
    trees = [{"a": x[:777], "b": x.reshape(3, -1), "c": x.astype(np.float64)} for x in gaussian(n, 3000)]
    ys, _ = testing.simulate(trees, EXPONENTIAL, exact_below=0)
    for other in ys[1:]:
        for key, y in ys[0].items():
            np.testing.assert_array_equal(y, other[key])
    assert ys[0]["b"].shape == (3, 1000)
    assert ys[0]["c"].dtype == np.float64
    again, _ = testing.simulate(trees, EXPONENTIAL, exact_below=0)
    np.testing.assert_array_equal(again[0]["b"], ys[0]["b"])
    different, _ = testing.simulate(trees, EXPONENTIAL, seed=1, exact_below=0)
    assert (different[0]["b"] != ys[0]["b"]).any()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_sizes_and_dtypes(size: int, dtype: str) -> None:
    xs = [x.astype(dtype) for x in gaussian(3, size)]
    top = max(float(np.abs(x).max()) for x in xs)
    total = np.abs(np.stack(xs).astype(float)).sum(axis=0)
    for codec, bound in ((STANDARD, np.full(size, 3 * top / 42)), (EXPONENTIAL, 7 * total)):
        ys, _ = testing.simulate(xs, codec, exact_below=0)
        assert (ys[0].shape, ys[0].dtype) == ((size,), xs[0].dtype)
        assert (np.abs(ys[0].astype(float) - exact(xs)) <= bound * 1.01).all()


@pytest.mark.parametrize("codec", [STANDARD, EXPONENTIAL])
def test_special_tensors(codec: str) -> None:
    check_zeros(codec)
    check_nonfinite(codec, False)
    check_nonfinite(codec, True)
    if codec == STANDARD:
        check_range(codec, 42)
        check_seeds(codec)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("float32", 1e38), ("float32", 1e-40), ("float64", 1e308), ("float64", 1e-300), ("float16", 3e4)],
)
def test_exponential_at_the_ends_of_the_formats(dtype: str, value: float) -> None:
    """The mean of equal numbers: exact for one rank, a few roundings to powers of two for more."""
    x = np.full(1500, value, dtype)
    ys, _ = testing.simulate([x], EXPONENTIAL, "mean")
    np.testing.assert_allclose(ys[0].astype(np.longdouble), x.astype(np.longdouble), rtol=1e-3)
    ys, _ = testing.simulate([x] * 3, EXPONENTIAL, "mean")
    assert np.isfinite(ys[0]).all()
    assert float((ys[0].astype(np.longdouble) / x).mean()) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("width", [2, 3, 4, 5, 6, 8, 10, 16])
def test_lanes_hold_the_worst_case(width: int) -> None:
    """Where 127 / n is rounded up instead, 2, 3, 4, 8, 9 and 16 ranks leave their lanes."""
    check_worst_case(STANDARD, width)
    check_refusal(STANDARD, width)


def test_exponential_feedback_sends_what_was_left() -> None:
    xs, total = gaussian(4, 3000), np.zeros(3000)
    for _, _, ys, _ in testing.simulate_steps(xs, EXPONENTIAL, steps=60, error_feedback=True):
        total += ys[0]
    alone = np.zeros(3000)
    for _, _, ys, _ in testing.simulate_steps(xs, EXPONENTIAL, steps=60, error_feedback=False):
        alone += ys[0]
    errors = [float(((t / 60 - exact(xs)) ** 2).mean()) for t in (total, alone)]
    assert errors[0] < errors[1] < 0.01 * float((exact(xs) ** 2).mean())


def test_options() -> None:
    made = gccomm.get_codec(EXPONENTIAL)
    assert gccomm.get_codec(made.config()) == made
    assert (made.operation, made.sums_as) == ("exponent", "own operation")
    assert gccomm.get_codec(STANDARD).operation is None
    made.require_size(10_000, 4)
    made.require_feedback(10_000)
    with pytest.raises(NegotiationError, match="one whole level"):
        gccomm.get_codec(STANDARD).require_feedback(64)
    with pytest.raises(ValueError, match=r"`dithering` must be .*got 'none'"):
        gccomm.get_codec(STANDARD, dithering="none")
    with pytest.raises(ValueError, match=r'`wire_bits` must be 8 with dithering="exponential", got 4'):
        gccomm.get_codec(EXPONENTIAL, wire_bits=4)
