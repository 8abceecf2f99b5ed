"""``uniform``: its error is what the definition says, it is unbiased, and it cannot overflow."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from gccomm import testing
from gccomm.codecs.uniform import Uniform
from gccomm.communicator import Communicator
from gccomm.errors import NegotiationError
from gccomm.lanes import rank_shift
from gccomm.stats import Stats

Array = np.ndarray[Any, Any]
BLOCK = 1024
WIDTHS = (2, 3, 4, 5, 6, 8, 10, 16)
SIZES = {2: 1 << 18, 4: 1 << 17, 8: 1 << 17, 64: 1 << 16}


def limit_of(width: int, n: int) -> int:
    return ((1 << (width - 1)) - 1) * 65536 // n


def steps_of(xs: Array, width: int) -> Array:
    """Return the quantisation step of every block of 1024; `xs` has a row a rank."""
    n, size = xs.shape
    maxima = np.abs(xs).reshape(n, size // BLOCK, BLOCK).max(axis=(0, 2)).astype(np.float64)
    return np.asarray(maxima * 65536 / limit_of(width, n))


def expected_variance(xs: Array, width: int, sample: Array) -> float:
    """Return the mean squared error of a sum over a sample of coordinates, in step^2, by brute force.

    From the definition: y_r = rint(x_r c) clamped to the limit, D_r(h) = (h + shift_r) mod 2^16; the mean
    over all 65,536 dithers h of (sum_r floor((y_r + D_r(h)) / 2^16) - sum_r y_r / 2^16)^2.
    """
    n, limit = len(xs), limit_of(width, len(xs))
    maxima = np.repeat(steps_of(xs, width) * limit / 65536, BLOCK)[sample]
    y = np.clip(np.rint(xs[:, sample].astype(np.float64) * limit / maxima), -limit, limit).astype(np.int32)
    h = np.arange(65536, dtype=np.int32)
    total = 0.0
    for coordinate in y.T:
        levels = np.zeros(65536, dtype=np.int32)
        for rank in range(n):
            levels += (coordinate[rank] + ((h + rank_shift(rank, n)) & 0xFFFF)) >> 16
        total += float(np.mean((levels - coordinate.sum() / 65536) ** 2))
    return total / len(sample)


@cache
def gaussian_run(width: int, n: int) -> tuple[Array, Array, Stats]:
    """Reduce Gaussian input over n virtual ranks; return inputs, the sum and the figures of rank 0."""
    rng = np.random.default_rng([width, n])
    xs = rng.standard_normal((n, SIZES[n])).astype(np.float32)
    ys, stats = testing.simulate(list(xs), Uniform(width))
    return xs, ys[0], stats[0]


def squared_error(xs: Array, y: Array) -> float:
    return float(np.sum((y.astype(np.float64) - xs.astype(np.float64).sum(axis=0)) ** 2))


@pytest.mark.parametrize("n", [2, 4, 8, 64])
@pytest.mark.parametrize("width", [4, 8])
def test_error_is_what_the_definition_says(width: int, n: int) -> None:
    """vNMSE within 10 % of step^2 times the variance of the definition."""
    xs, y, _ = gaussian_run(width, n)
    sample = np.random.default_rng(n).choice(xs.shape[1], 100 if n == 64 else 400, replace=False)
    steps = steps_of(xs, width)
    energy = float(np.sum(xs.astype(np.float64).sum(axis=0) ** 2))
    expected = BLOCK * float(np.sum(steps**2)) * expected_variance(xs, width, sample) / energy
    assert squared_error(xs, y) / energy == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("n", [2, 4, 8, 64])
def test_variance_is_n_plus_1_twelfths_of_the_squared_step(n: int) -> None:
    xs, y, _ = gaussian_run(8, n)
    expected = (n + 1) / 12 * BLOCK * float(np.sum(steps_of(xs, 8) ** 2))
    assert squared_error(xs, y) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("width", "n"), [(4, 2), (4, 4), (8, 2), (8, 4), (8, 8), (8, 64)])
def test_estimate_of_the_error(width: int, n: int) -> None:
    """Within 20 % where a rank's coordinate spans at least a level: 2^(w-1) - 1 >= n."""
    xs, y, stats = gaussian_run(width, n)
    true = squared_error(xs, y) / float(np.sum(xs.astype(np.float64).sum(axis=0) ** 2))
    assert stats.vnmse_estimate == pytest.approx(true, rel=0.2)


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_estimate_of_the_error_of_other_dtypes(dtype: Any) -> None:
    """Scale words of float64 are another format than those of the others."""
    xs = (np.random.default_rng(5).standard_normal((4, 1 << 15)) * 1e-3).astype(dtype)
    ys, stats = testing.simulate(list(xs), Uniform(6))
    exact = xs.astype(np.float64).sum(axis=0)
    true = float(np.sum((ys[0].astype(np.float64) - exact) ** 2) / np.sum(exact**2))
    assert stats[0].vnmse_estimate == pytest.approx(true, rel=0.2)


def assert_unbiased(errors: Array) -> None:
    """Check errors of repetitions (rows) of coordinates (columns)."""
    deviation = errors.std(axis=0, ddof=1)
    assert (deviation > 0).all()
    assert np.abs(errors.mean(axis=0) / deviation * np.sqrt(len(errors))).max() < 6
    assert abs(errors.mean()) < 5 * errors.std() / np.sqrt(errors.size)


def test_no_coordinate_is_biased_over_seeds() -> None:
    """4,096 coordinates, 400 seeds, 4 ranks, 4 bits."""
    xs = np.random.default_rng(11).standard_normal((4, 4096)).astype(np.float32)
    exact = xs.astype(np.float64).sum(axis=0)
    runs = [testing.simulate(list(xs), Uniform(4), seed=seed)[0] for seed in range(400)]
    assert_unbiased(np.array([ys[0] - exact for ys in runs]))


def test_no_coordinate_is_biased_over_keys() -> None:
    xs = np.random.default_rng(12).standard_normal((3, 2048)).astype(np.float32)
    ys, _ = testing.simulate([{str(key): x for key in range(300)} for x in xs], Uniform(4))
    assert_unbiased(np.array(list(ys[0].values())) - xs.astype(np.float64).sum(axis=0))


def test_no_coordinate_is_biased_over_steps() -> None:
    xs = np.random.default_rng(13).standard_normal((2, 2048)).astype(np.float32)

    def steps(comm: Communicator) -> list[Array]:
        return [comm.compressed_allreduce(xs[comm.rank], "sum", Uniform(3)) for _ in range(300)]

    results = testing.run(steps, 2)[0]
    assert_unbiased(np.array(results) - xs.astype(np.float64).sum(axis=0))


@pytest.mark.parametrize("width", WIDTHS)
def test_zero_on_all_ranks_stays_exactly_zero(width: int) -> None:
    rng = np.random.default_rng(width)
    for n in (1, 2, 3, 5, 8):
        zero = rng.random(4096) < 0.3
        xs = [np.where(zero, 0, rng.standard_normal(4096)).astype(np.float32) for _ in range(n)]
        xs[-1][zero] = -0.0
        for op in ("sum", "mean"):
            ys, _ = testing.simulate(xs, Uniform(width), op)
            assert not ys[0][zero].any()


@pytest.mark.parametrize("n", [*range(1, 18), 64])
def test_headroom_is_safe_and_used_to_the_last_level(n: int) -> None:
    """All ranks at the maximum, of one sign: the simulation raises where a lane's sum leaves its range."""
    x = np.full(BLOCK, 3.0, dtype=np.float32)
    for width in WIDTHS:
        half = (1 << (width - 1)) - 1
        step = 3.0 * 65536 / limit_of(width, n)
        ys, _ = testing.simulate([{"plus": x, "minus": -x}] * n, Uniform(width))
        levels = {key: y / step for key, y in ys[0].items()}
        assert np.rint(levels["plus"]).max() <= half
        assert np.rint(levels["minus"]).min() >= -half
        assert levels["plus"].mean() > half - 1 - n / 65536


def test_headroom_is_safe_on_a_thousand_ranks() -> None:
    n = 1000
    x = np.full(BLOCK, 3.0, dtype=np.float32)
    mixed = np.where(np.random.default_rng(0).random(BLOCK) < 0.5, x, -x).astype(np.float32)
    for width in WIDTHS:
        ys, _ = testing.simulate([{"plus": x, "minus": -x, "mixed": mixed}] * n, Uniform(width), "mean")
        half = (1 << (width - 1)) - 1
        for key, true in (("plus", x), ("minus", -x), ("mixed", mixed)):
            assert np.abs(ys[0][key] - true).max() <= 3.0 / (half - 1) if half > 1 else True
            assert ys[0][key].mean() == pytest.approx(true.mean(), abs=0.3 / half)


@pytest.mark.parametrize("width", WIDTHS)
def test_random_signs_and_sizes_never_overflow(width: int) -> None:
    rng = np.random.default_rng(width)
    for n in (2, 3, 7, 16, 33):
        shared = rng.choice([-1.0, 1.0], 8192)
        xs = [(shared * rng.choice([1.0, 0.999, 0.5], 8192)).astype(np.float32) for _ in range(n)]
        ys, _ = testing.simulate(xs, Uniform(width))
        step = 65536 / limit_of(width, n)
        assert np.abs(ys[0] / step).max() <= ((1 << (width - 1)) - 1) * (1 + 1e-6)


def test_too_many_ranks_are_refused_with_the_remedy() -> None:
    with pytest.raises(
        NegotiationError, match=r"65537 ranks do not fit in lanes of 2 bits.*larger wire_bits"
    ):
        Uniform(2).require_size(65537, 4)
    Uniform(2).require_size(65536, 4)
    Uniform(3).require_size(65537, 4)


@pytest.mark.parametrize("bits", [-8, 0, 1, 7, 9, 32, 8.0, "8", True, None])
def test_impossible_widths_are_refused(bits: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"`wire_bits` must be .*got {bits!r}"):
        Uniform(bits)


def test_any_kind_of_integer_is_a_width() -> None:
    four: Any = np.int64(4)
    codec = Uniform(four)
    assert codec == Uniform(4)
    assert codec.config() == {"id": "uniform", "wire_bits": 4, "scales": "agreed", "widening": False}
    assert codec.fingerprint == Uniform(4).fingerprint


def test_wire_bytes_are_those_of_the_lanes() -> None:
    size = 1 << 18
    x = np.ones(size, np.float32)
    for width, lanes in ((2, 16), (3, 10), (4, 8), (5, 6), (6, 5), (8, 4), (10, 3), (16, 2)):
        _, (stats,) = testing.simulate([x], Uniform(width), one_host=False)
        words = size // BLOCK * -(-BLOCK // lanes)
        scales = 64 + size // BLOCK
        assert stats.wire_bytes == 4 * (words + scales + 1536 + 1)  # and what measures, and a tag
        assert stats.messages == 3
        assert stats.ratio == pytest.approx(4 * size / stats.wire_bytes)
        assert stats.codecs == {"uniform": size}
