"""What the rounding promises: no overflow, no bias, known variance, and a hash that looks random."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gccomm import lanes as ln
from gccomm import noise
from gccomm.kernels import reference

Array = np.ndarray[Any, Any]
QUANTISED = ln.WIDTHS[:-1]
ALL_DITHERS = np.arange(65536, dtype=np.int64)
UNIT = np.uint32(0x3F800000)  # scale word of 1.0


def rounded_sum(y: Array, n: int, dithers: Array) -> Array:
    """Sum over the ranks of floor((y_r + D_r) / 2**16), for each shared dither."""
    total = np.zeros(dithers.shape, dtype=np.int64)
    for rank in range(n):
        total += (y[rank] + ((dithers + ln.rank_shift(rank, n)) & 0xFFFF)) >> 16
    return total


def assert_fits(width: int, n: int, dithers: Array) -> None:
    half = 2 ** (width - 1) - 1
    limit = ln.safe_limit(width, n)
    for sign in (1, -1):
        total = rounded_sum(np.full(n, sign * limit), n, dithers)
        assert -half <= total.min()
        assert total.max() <= half
        assert abs(total).max() >= n * limit >> 16  # the bound is used, not just respected


@pytest.mark.parametrize("n", [*range(1, 18), 64, 1000])
def test_narrow_lanes_never_overflow_at_any_dither(n: int) -> None:
    for width in (2, 3) if n == 1000 else (2, 3, 4, 5):
        assert_fits(width, n, ALL_DITHERS)


@pytest.mark.parametrize("width", QUANTISED)
def test_no_width_overflows(width: int) -> None:
    rng = np.random.default_rng(width)
    sample = np.concatenate([[0, 1, 32767, 32768, 65534, 65535], rng.integers(0, 65536, 250)])
    for n in (*range(1, 40), 255, 256, 257, 4096):
        assert_fits(width, n, sample)


def quantised(y_over_limit: Array, dithers: Array, shift: int, limit: int) -> Array:
    """Run the reference on one block per value, with every dither as a coordinate."""
    v = np.repeat(y_over_limit.astype(np.float32)[:, None], dithers.size, axis=1)
    hashes = np.broadcast_to(dithers.astype(np.uint32) << 16, v.shape)
    return np.asarray(reference.quantise(np, v, np.full(len(v), UNIT), hashes, shift, limit), dtype=np.int64)


def test_quantise_rounds_as_the_formula_says() -> None:
    rng = np.random.default_rng(1)
    values = np.concatenate([[0, 1, -1], rng.uniform(-1, 1, 13)])
    for width, n, rank in ((2, 3, 1), (4, 17, 5), (8, 4, 3), (16, 1, 0)):
        limit, shift = ln.safe_limit(width, n), ln.rank_shift(rank, n)
        y = np.rint(values.astype(np.float32) * np.float32(limit)).astype(np.int64)
        expected = (y[:, None] + ((ALL_DITHERS + shift) & 0xFFFF)) >> 16
        np.testing.assert_array_equal(quantised(values, ALL_DITHERS, shift, limit), expected)


@pytest.mark.parametrize(("width", "n"), [(10, 1), (16, 1), (16, 2), (16, 3), (16, 7)])
def test_float_rounding_cannot_exceed_the_limit(width: int, n: int) -> None:
    """The scale itself times limit / mantissa, in float32, may come out above the limit."""
    limit, half = ln.safe_limit(width, n), 2 ** (width - 1) - 1
    scales = (np.random.default_rng(n).integers(0, 2**23, 5000) + 0x3F800000).astype(np.uint32)
    largest = np.stack([scales.view(np.float32), -scales.view(np.float32)], axis=1)
    for dither in (0, 1, 40_000, 65_535):
        hashes = np.full(largest.shape, dither << 16, np.uint32)
        total = np.zeros(largest.shape, np.int64)
        for rank in range(n):
            total += reference.quantise(np, largest, scales, hashes, ln.rank_shift(rank, n), limit)
        assert -half <= total.min()
        assert total.max() <= half


@pytest.mark.parametrize(("width", "n"), [(2, 1), (2, 7), (4, 3), (8, 4), (8, 64), (16, 2)])
def test_every_rank_rounds_without_bias(width: int, n: int) -> None:
    values = np.random.default_rng(n).uniform(-1, 1, 16)
    limit = ln.safe_limit(width, n)
    y = np.rint(values.astype(np.float32) * np.float32(limit)).astype(np.int64)
    for rank in {0, n // 2, n - 1}:
        q = quantised(values, ALL_DITHERS, ln.rank_shift(rank, n), limit)
        np.testing.assert_array_equal(q.sum(axis=1), y)  # the mean of q over the dithers is y / 2**16


def squared_errors(n: int, subtract: bool, *, draws: int, agree: bool) -> Array:
    """Mean over all dithers of the squared error of the sum, in levels, for random inputs."""
    rng = np.random.default_rng(n)
    hashes = (ALL_DITHERS.astype(np.uint32) << 16)[None]
    found = []
    for _ in range(draws):
        y = np.full(n, rng.integers(-(2**20), 2**20)) if agree else rng.integers(-(2**20), 2**20, n)
        total = rounded_sum(y, n, ALL_DITHERS)
        centred = reference.centred_sums(np, total.astype(np.int32)[None], hashes, n=n, subtract=subtract)
        error = centred[0] / 32768 - y.sum() / 65536
        assert abs(error.mean()) <= 0.5 / 32768 + 1e-12  # half a unit unless 4 divides n
        found.append(np.mean(error**2))
    return np.array(found)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 16, 17])
@pytest.mark.parametrize("subtract", [False, True])
def test_variance_of_the_sum(n: int, subtract: bool) -> None:
    found = squared_errors(n, subtract, draws=150, agree=False)
    expected = n / 12 if subtract else (n + 1) / 12
    tolerance = 5 * found.std() / np.sqrt(found.size) + 1e-4
    assert found.mean() == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize("n", [2, 4, 16])
def test_errors_cancel_where_ranks_agree(n: int) -> None:
    found = squared_errors(n, True, draws=20, agree=True)
    assert found.mean() == pytest.approx(1 / 12, abs=1e-3)


def hashes_of(blocks: Array, length: int = 1024, step: int = 0, key: str = "w") -> Array:
    step_key = noise.step_key(*noise.tensor_key(key, 0), step)
    return np.asarray(reference.block_hashes(np, *reference.block_keys(np, *step_key, blocks), length))


def test_bits_of_the_hash_are_balanced() -> None:
    hashes = hashes_of(np.arange(1024)).ravel()
    for bit in range(32):
        ones = int((hashes >> np.uint32(bit) & 1).sum())
        assert abs(ones - hashes.size / 2) < 5 * np.sqrt(hashes.size) / 2


def test_dithers_are_uniform() -> None:
    dithers = hashes_of(np.arange(4096)) >> 16
    counts = np.bincount((dithers >> 4).ravel(), minlength=4096)
    expected = dithers.size / 4096
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - 4095) < 5 * np.sqrt(2 * 4095)


def test_dithers_half_a_block_apart_are_independent() -> None:
    """They come from one hash: each pair of values as often as any other."""
    dithers = (hashes_of(np.arange(4096)) >> 16).astype(np.int64)
    for bits in (6, 1):
        for shift in (16 - bits, 8):
            part = dithers >> shift & (1 << bits) - 1
            pairs = (part[:, :512] << bits) + part[:, 512:]
            counts = np.bincount(pairs.ravel(), minlength=4**bits)
            expected = pairs.size / 4**bits
            chi_square = float(((counts - expected) ** 2 / expected).sum())
            assert abs(chi_square - (4**bits - 1)) < 6 * np.sqrt(2 * 4**bits)


def correlation(a: Array, b: Array) -> float:
    return float(np.corrcoef((a >> 16).ravel(), (b >> 16).ravel())[0, 1])


def test_neighbours_are_uncorrelated() -> None:
    blocks = np.arange(512)
    hashes = hashes_of(blocks)
    others = {
        "next coordinate": (hashes[:, :-1], hashes[:, 1:]),
        "next block": (hashes, hashes_of(blocks + 1)),
        "next step": (hashes, hashes_of(blocks, step=1)),
        "far step": (hashes, hashes_of(blocks, step=1 << 32)),
        "other tensor": (hashes, hashes_of(blocks, key="x")),
        "rotated": (hashes, hashes << 16),
        "half a block behind": (hashes[:, :512], hashes[:, 512:]),
    }
    for what, (a, b) in others.items():
        assert abs(correlation(a, b)) < 5 / np.sqrt(a.size), what


def test_check_words_see_overflow_of_a_lane() -> None:
    rng = np.random.default_rng(5)
    hashes = hashes_of(np.arange(2000), 64)
    true_sums = np.asarray(rng.integers(-7, 8, hashes.shape), dtype=np.int32)
    wrapped = true_sums.copy()
    for block in range(2000):
        places = rng.choice(64, 1 + block % 8, replace=False)
        wrapped[block, places] += rng.choice([-16, 16], places.size).astype(np.int32)
    expected = reference.check_words(np, hashes, true_sums)
    assert (reference.check_words(np, hashes, wrapped) != expected).any(axis=1).all()
