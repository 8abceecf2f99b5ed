"""``grandk-mn`` and ``grandk-mn-ts``: the draw is shared and even, and what is not sent comes later."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gccomm
from gccomm import testing
from gccomm.codecs.grandk import drawn
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
)

CODECS = ["grandk-mn", "grandk-mn-ts"]
ALL = [f"{codec}:keep=1" for codec in CODECS]  # every coordinate is sent


@pytest.mark.parametrize("size", [1, 9, 10, 11, 25, 1000])
def test_one_coordinate_of_each_stratum(size: int) -> None:
    places = drawn(size, 10, 123, 456)
    assert len(places) == -(-size // 10)
    np.testing.assert_array_equal(places // 10, np.arange(len(places)))
    assert places[-1] < size


def test_draws_are_even_in_short_strata_too() -> None:
    """Chi-square over 6,000 keys: each place of a stratum equally often; 10 degrees of freedom and 2."""
    counts = np.zeros(25)
    keys = np.random.default_rng(0).integers(0, 1 << 32, (6000, 2)).tolist()
    for key0, key1 in keys:
        counts[drawn(25, 11, key0, key1)] += 1
    for lo, hi in ((0, 11), (11, 22), (22, 25)):
        expected = 6000 / (hi - lo)
        assert ((counts[lo:hi] - expected) ** 2 / expected).sum() < 35


def test_draws_of_neighbouring_strata_are_independent() -> None:
    """Of 40,000 strata of 4, pairs take each of 16 combinations equally often."""
    places = drawn(160_000, 4, 7, 8) % 4
    counts = np.bincount(places[:-1] * 4 + places[1:], minlength=16)
    assert ((counts - 2500) ** 2 / 2500).sum() < 50


def test_ranks_draw_alike_and_anew_in_each_step() -> None:
    xs = gaussian(3, 5000)
    seen: list[Array] = []
    for _, _, ys, _ in testing.simulate_steps(xs, "grandk-mn:wire_bits=16", steps=2, error_feedback=False):
        sent = np.flatnonzero(ys[0])
        np.testing.assert_array_equal(sent // 10, np.arange(500))
        assert np.abs(ys[0][sent] - exact(xs)[sent]).max() < 3 * 4 / 10_922
        seen.append(sent)
    assert 0 < (seen[0] == seen[1]).mean() < 0.2


@pytest.mark.parametrize("codec", CODECS)
def test_scaled_draws_are_unbiased(codec: str) -> None:
    """2,003 coordinates: the last stratum is short, and counts as often as the others."""
    xs = gaussian(2, 2003)
    xs[0][-3:] += 2
    name = f"{codec}:keep=5,scaled=true,wire_bits=16"
    results = [testing.simulate(xs, name, seed=s, exact_below=0)[0][0] for s in range(1500)]
    errors = np.array(results, np.float64) - exact(xs)
    assert_unbiased(errors)
    # |x| is sent 5-fold one time in 5: a variance of 4 x^2; 2 x^2 where the stratum has 3.
    variance = errors.var(axis=0) / np.asarray(exact(xs), np.float64) ** 2
    assert np.median(variance[:2000]) == pytest.approx(4, rel=0.05)
    assert np.median(variance[2000:]) == pytest.approx(2, rel=0.2)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_residuals_are_exactly_what_was_not_sent(codec: str, dtype: str) -> None:
    """One rank: input less result, to rounding; untouched coordinates bit by bit."""
    x = gaussian(1, 4001)[0].astype(dtype)
    reducer = gccomm.Reducer(codec, exact_below=0)
    y = reducer({"x": x})["x"]
    residual = reducer._reduction.residuals["x"]
    assert residual.dtype == x.dtype
    np.testing.assert_array_equal(residual[y == 0], x[y == 0])
    np.testing.assert_allclose(residual + y, x, atol=1e-6)
    assert np.count_nonzero(residual != x) > 390


@pytest.mark.parametrize("codec", CODECS)
def test_everything_arrives_in_time(codec: str) -> None:
    """Constant input: the mean of the results tends to it; what is under way stays bounded."""
    assert gccomm.get_codec(codec).biased
    xs, total = gaussian(4, 3000), np.zeros(3000)
    errors = []
    for step, _, ys, _ in testing.simulate_steps(xs, codec, "mean", steps=300):
        total += ys[0]
        errors.append(float(np.abs(total / (step + 1) - exact(xs) / 4).mean()))
    assert errors[299] < 0.1 * errors[9] < 0.1
    alone, _ = testing.simulate(xs, codec, "mean", error_feedback=False)
    assert np.abs(alone[0] - exact(xs) / 4).mean() > 5 * errors[299]


@pytest.mark.parametrize("codec", ALL)
@pytest.mark.parametrize("width", [2, 4, 8, 16])
def test_lanes_hold_the_worst_case(codec: str, width: int) -> None:
    check_worst_case(codec, width)
    check_refusal(codec, width)


@pytest.mark.parametrize("codec", [*ALL, "grandk-mn", "grandk-mn-ts:norm=l2"])
def test_special_tensors(codec: str) -> None:
    """A number that is not finite spoils the tensor also where it is not drawn."""
    check_zeros(codec if "l2" not in codec else codec + ",keep=1")
    check_nonfinite(codec, False)
    check_seeds(codec if "l2" not in codec else codec + ",scaled=true")
    if "l2" not in codec:
        check_nonfinite(codec, True)


@pytest.mark.parametrize("codec", ALL)
def test_ends_of_the_formats(codec: str) -> None:
    check_range(codec, 42)


@pytest.mark.parametrize("codec", CODECS)
def test_a_scaled_result_beyond_the_format_is_inf(codec: str) -> None:
    x = np.full(2000, -1e38, np.float32)
    for op in ("sum", "mean"):  # 20 and 10 times 1e38
        ys, _ = testing.simulate([x] * 2, f"{codec}:scaled=true", op)
        assert np.isneginf(ys[0]).sum() == 200
        assert np.isfinite(ys[0]).sum() == 1800
    ys, _ = testing.simulate([x] * 2, f"{codec}:scaled=true,keep=3", "mean")
    assert ys[0].min() == pytest.approx(-3e38, rel=1e-6)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_sizes_and_dtypes(codec: str, dtype: str) -> None:
    shapes: list[tuple[int, ...]] = [(size,) for size in SIZES]
    for shape in [*shapes, (3, 768), (2, 5, 1030), (7, 3)]:
        xs = [np.random.default_rng([*shape, r]).standard_normal(shape).astype(dtype) for r in range(3)]
        ys, _ = testing.simulate(xs, f"{codec}:keep=7", exact_below=0)
        assert ys[0].shape == shape
        sent = np.flatnonzero(ys[0])
        assert len(sent) >= 0.8 * (-(-xs[0].size // 7)) - 1
        error = ys[0].astype(float).reshape(-1)[sent] - exact(xs).reshape(-1)[sent]
        assert np.abs(error).max(initial=0) <= 3 * 5 / 42


def test_wire_bytes_are_those_of_the_drawn() -> None:
    size = 1 << 18
    _, (stats,) = testing.simulate([np.ones(size, np.float32)], "grandk-mn:keep=32", one_host=False)
    assert stats.wire_bytes == 1024 + size // 32 + 4  # header, lanes of 8 bits, tag
    assert stats.ratio > 110


def test_feedback_of_scaled_draws_is_refused() -> None:
    for codec in CODECS:
        assert gccomm.get_codec(codec).rounding == "biased"
        scaled = gccomm.get_codec(codec, scaled=True)
        assert (scaled.biased, scaled.rounding) == (False, "unbiased")
        with pytest.raises(NegotiationError, match=r"scaled=True would diverge.*leaves 9 times"):
            testing.simulate(gaussian(2, 2000), scaled, error_feedback=True)
        with pytest.raises(NegotiationError, match=r'norm="l2" can diverge'):
            testing.simulate(gaussian(2, 2000), f"{codec}:norm=l2")


def test_options() -> None:
    made: Any = gccomm.get_codec("grandk-mn-ts:keep=50,scaled=true,fine=8,levels=3,wire_bits=6")
    assert gccomm.get_codec(made.config()) == made
    assert (made.keep, made.scaled, made.fine, made.levels, made.norm) == (50, True, 8, 3, "max")
    with pytest.raises(ValueError, match=r"`keep` must be .*got 0"):
        gccomm.get_codec("grandk-mn", keep=0)
    with pytest.raises(TypeError, match=r"`scaled` must be True or False, got 1"):
        gccomm.get_codec("grandk-mn", scaled=1)
