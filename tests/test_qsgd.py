"""``qsgd-mn`` and ``qsgd-mn-ts``: unbiased, of the variance of the definition, and without overflow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gccomm
from gccomm import testing
from gccomm.errors import NegotiationError
from tests.stochastic_cases import (
    SIZES,
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
    repeated,
)

CODECS = ["qsgd-mn", "qsgd-mn:norm=max", "qsgd-mn-ts", "qsgd-mn-ts:norm=max,fine=2,levels=16"]
MAX = ["qsgd-mn:norm=max", "qsgd-mn-ts:norm=max"]


def rounding_variance(xs: list[Array], step: Any) -> Any:
    """Return the variance of each coordinate's sum: f (1 - f) step^2 a rank, f the fraction of x / step."""
    total = 0.0
    for x in xs:
        fraction = np.abs(x.astype(np.float64)) / step % 1
        total = total + fraction * (1 - fraction) * step**2
    return total


@pytest.mark.parametrize("codec", CODECS)
def test_no_coordinate_is_biased(codec: str) -> None:
    xs = gaussian(3, 1500)
    name = codec + (",wire_bits=5" if ":" in codec else ":wire_bits=5")
    assert_unbiased(repeated(xs, name, 400) - exact(xs))


@pytest.mark.parametrize("n", [1, 2, 8])
@pytest.mark.parametrize("norm", ["l2", "max"])
def test_variance_is_that_of_independent_rounding(norm: str, n: int) -> None:
    xs = gaussian(n, 200_000)
    lengths = [np.sqrt((x.astype(np.float64) ** 2).sum()) for x in xs]
    largest = max(lengths) if norm == "l2" else max(np.abs(x).max() for x in xs)
    expected = rounding_variance(xs, float(largest) / (127 // n)).sum()
    ys, _ = testing.simulate(xs, "qsgd-mn", seed=n) if norm == "l2" else testing.simulate(xs, MAX[0], seed=n)
    assert float(((ys[0] - exact(xs)) ** 2).sum()) == pytest.approx(float(expected), rel=0.05)


def test_ranks_round_independently() -> None:
    """The error of n equal ranks has n times the variance of one, with the same step."""
    x = gaussian(1, 100_000)[0]
    x[0] = 8
    variances = []
    for n, width in ((1, 5), (8, 8)):  # 15 levels each
        ys, _ = testing.simulate([x] * n, f"qsgd-mn:norm=max,wire_bits={width}")
        variances.append(float(((ys[0] - exact([x] * n)) ** 2).mean()))
    assert variances[1] == pytest.approx(8 * variances[0], rel=0.05)


def test_two_scales_are_chosen_by_block() -> None:
    """Blocks below 1/32 of the norm have steps of 1/32; a block that one rank has more in does not."""
    xs = gaussian(4, 5 * 1024)
    for x in xs:
        x[1024:] /= 1000
    xs[2][3 * 1024 + 7] = 1.0
    largest = max(float(np.abs(x).max()) for x in xs)
    ys, _ = testing.simulate(xs, "qsgd-mn-ts:norm=max")
    squares = np.asarray((ys[0] - exact(xs)) ** 2, np.float64).reshape(5, 1024)
    for block, fine in enumerate([1, 32, 32, 1, 32]):
        expected = rounding_variance([x[1024 * block : 1024 * block + 1024] for x in xs], largest / 31 / fine)
        assert squares[block].sum() == pytest.approx(float(expected.sum()), rel=0.25)


def test_many_scales_come_near_to_block_maxima() -> None:
    xs = gaussian(4, 100_000)
    exact_sum = exact(xs)
    errors = [
        float(((testing.simulate(xs, codec)[0][0] - exact_sum) ** 2).sum() / (exact_sum**2).sum())
        for codec in ("qsgd-mn", "qsgd-mn-ts", "qsgd-mn-ts:fine=2,levels=16", "uniform")
    ]
    assert errors[0] > 100 * errors[1] > 300 * errors[2]
    assert errors[2] < 6 * errors[3]


@pytest.mark.parametrize("codec", MAX)
@pytest.mark.parametrize("width", [2, 3, 4, 5, 6, 8, 10, 16])
def test_lanes_hold_the_worst_case(codec: str, width: int) -> None:
    check_worst_case(codec, width)
    check_refusal(codec, width)


@pytest.mark.parametrize("codec", ["qsgd-mn", "qsgd-mn-ts"])
def test_one_coordinate_is_its_own_norm(codec: str) -> None:
    """Never above the norm, so exact: also where block energies round the others to nothing."""
    x = np.zeros(5000, np.float32)
    x[4321] = -0.1
    ys, _ = testing.simulate([x] * 5, codec)
    np.testing.assert_allclose(ys[0], 5 * x, rtol=1e-6)
    x[::3] = 1e-8
    ys, _ = testing.simulate([x] * 5, codec)
    assert ys[0][4321] == pytest.approx(-0.5, rel=1e-3)


@pytest.mark.parametrize("codec", CODECS)
def test_special_tensors(codec: str) -> None:
    check_zeros(codec)
    check_nonfinite(codec, False)
    check_seeds(codec)


@pytest.mark.parametrize("codec", MAX)
def test_ends_of_the_formats(codec: str) -> None:
    check_range(codec, 127 // 3)
    check_nonfinite(codec, True)


@pytest.mark.parametrize(("dtype", "value"), [("float32", 3e38), ("float64", 1.7e308), ("float32", 1e-45)])
def test_l2_norm_beyond_the_format_saturates(dtype: str, value: float) -> None:
    """A thousand numbers near the largest: their norm is above it, the scale is not, and nothing is NaN."""
    x = np.full(3000, value, dtype)
    ys, _ = testing.simulate([x] * 2, "qsgd-mn", "mean")
    assert np.isfinite(ys[0]).all()
    step = float(np.finfo(dtype).max) / 63 if value > 1 else value * np.sqrt(3000.0)
    assert (np.abs(ys[0].astype(np.longdouble) - value) <= step * 1.01).all()
    assert (ys[0] > 0).any()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_sizes_and_dtypes(codec: str, dtype: str) -> None:
    shapes: list[tuple[int, ...]] = [(size,) for size in SIZES]
    for shape in [*shapes, (3, 768), (2, 5, 1030), (7, 3)]:
        xs = [np.random.default_rng([*shape, r]).standard_normal(shape).astype(dtype) for r in range(3)]
        ys, _ = testing.simulate(xs, codec, exact_below=0)
        norm = max(float(np.sqrt((x.astype(float) ** 2).sum())) for x in xs)
        assert ys[0].shape == shape
        assert np.abs(ys[0].astype(float) - exact(xs)).max() <= 3 * norm / 42 * 1.01 + 0.01


def test_tensors_longer_than_a_message() -> None:
    """1,050 blocks travel in two sums; the scale is one."""
    xs = gaussian(2, 1050 * 1024)
    ys, stats = testing.simulate(xs, MAX[0])
    largest = max(float(np.abs(x).max()) for x in xs)
    expected = rounding_variance(xs, largest / 63).sum()
    assert float(((ys[0] - exact(xs)) ** 2).sum()) == pytest.approx(float(expected), rel=0.02)
    assert stats[0].wire_bytes < 1.01 * 1050 * 1024


def test_feedback_needs_a_step_below_the_largest() -> None:
    for codec in ("qsgd-mn", "qsgd-mn-ts"):
        with pytest.raises(NegotiationError, match=r'norm="l2" can diverge.*norm="max"'):
            testing.simulate(gaussian(2, 2000), codec, error_feedback=True)
    with pytest.raises(NegotiationError, match=r"one whole level.*larger wire_bits"):
        gccomm.get_codec("qsgd-mn:norm=max").require_feedback(64)


@pytest.mark.parametrize("codec", MAX)
def test_feedback_sends_what_was_left(codec: str) -> None:
    xs, total = gaussian(5, 3000), np.zeros(3000)
    for step, _, ys, _ in testing.simulate_steps(xs, codec, steps=30, error_feedback=True):
        total += ys[0]
        assert np.abs(total - (step + 1) * exact(xs)).max() < 5 * 0.3
    assert gccomm.get_codec(codec).biased is False


def test_options() -> None:
    made: Any = gccomm.get_codec("qsgd-mn-ts:fine=4,levels=5,norm=max")
    assert gccomm.get_codec(made.config()) == made
    assert (made.fine, made.levels, made.norm, made.wire_bits) == (4, 5, "max", 8)
    for options, message in (
        ({"fine": 3}, "`fine` must be a power of two, got 3"),
        ({"fine": 1}, r"`fine` must be .*got 1"),
        ({"levels": 1}, r"`levels` must be .*got 1"),
        ({"norm": "l1"}, r"`norm` must be .*got 'l1'"),
        ({"wire_bits": 7}, r"`wire_bits` must be .*got 7"),
    ):
        with pytest.raises(ValueError, match=message):
            gccomm.get_codec("qsgd-mn-ts", **options)
