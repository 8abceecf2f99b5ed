"""The parts of the reference, each against an independent description of what it computes."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from gccomm import lanes as ln
from gccomm import noise
from gccomm.kernels import reference

Array = np.ndarray[Any, Any]


def test_hash_follows_its_definition() -> None:
    """One coordinate at a time in Python integers, and golden values that must never change."""
    mask, golden = noise.MASK32, noise.GOLDEN
    t0, t1 = noise.step_key(*noise.tensor_key("layer/0/w", 0), 1)
    blocks, places = [0, 1, 2**32 - 1], [0, 1, 511, 512, 1023]
    k0, k1 = reference.block_keys(np, t0, t1, np.array(blocks, dtype=np.uint32))
    hashes = reference.block_hashes(np, k0, k1, 1024)
    for row, block in enumerate(blocks):
        assert k0[row] == noise.fmix(t0 + block * golden)
        assert k1[row] == noise.fmix(t1 + noise.fmix(block ^ t0))
        for i in places:
            x = (i % 512 * golden + int(k0[row])) & mask
            x = ((x ^ x >> 16) * 0x7FEB352D) & mask
            x = ((x ^ x >> 15 ^ int(k1[row])) * 0x846CA68B) & mask
            if i >= 512:
                x = (x << 16 & mask) + (x * 0x7FEB352D >> 16 & 0xFFFF)
            assert hashes[row, i] == x
    golden_places = [0, 511, 1023]
    assert [f"{h:08x}" for h in hashes[0, golden_places]] == ["736d2317", "c64d39db", "39db9996"]
    assert [f"{h:08x}" for h in hashes[2, golden_places]] == ["70bbad8d", "9a890622", "06220791"]


def test_fmix_of_arrays_is_that_of_integers() -> None:
    words = np.random.default_rng(0).integers(0, 1 << 32, 100).astype(np.uint32)
    assert reference.fmix(np, words).tolist() == [noise.fmix(int(word)) for word in words]


@pytest.mark.parametrize("width", ln.WIDTHS)
@pytest.mark.parametrize("length", [1, 2, 7, 31, 100, 1023, 1024])
def test_sum_of_packed_words_unpacks_to_the_sum(width: int, length: int) -> None:
    rng = np.random.default_rng(length)
    low, high = -(2 ** (width - 1)), 2 ** (width - 1) - 1
    total = rng.integers(low, high + 1, (3, length))
    total[:, ::3], total[:, ::4] = low, high
    # Ranks' values lie anywhere: only their sums have to fit, as partial sums may wrap.
    ranks = [rng.integers(low, high + 1, (3, length)) for _ in range(4)]
    ranks.append(total - sum(ranks))
    packed = [reference.pack(np, q.astype(np.int32), width) for q in ranks]
    words = np.sum(packed, axis=0, dtype=np.uint32)
    assert words.shape == (3, ln.words(width, length))
    np.testing.assert_array_equal(reference.unpack(np, words, width, length), total)


@pytest.mark.parametrize("width", ln.WIDTHS)
def test_lane_k_of_word_j_holds_coordinate_k_words_plus_j(width: int) -> None:
    lanes, words = 32 // width, 3
    for lane in range(lanes):
        q = np.zeros((1, lanes * words), dtype=np.int32)
        q[0, lane * words + 1] = -1
        expected = [0, -(2 ** (width * lane)) % 2**32, 0]
        assert reference.pack(np, q, width)[0].tolist() == expected


def float32_words() -> Array:
    rng = np.random.default_rng(3)
    edges = [0, 1, 2, 3, 0x7FFFFF, 0x800000, 0x800001, 0x3F7FFFFF, 0x3F800000, 0x7F7FFFFF]
    return np.concatenate([edges, rng.integers(0, 0x7F800000, 500), 1 << np.arange(31)]).astype(np.uint32)


def test_split_scale_is_exact() -> None:
    words = float32_words()
    mantissa, exponent = reference.split_scale(np, words, wide=False)
    assert mantissa.dtype == np.float32
    assert exponent.dtype == np.int32
    assert ((mantissa >= 1) & (mantissa < 2)).all()
    for word, m, e in zip(words, mantissa, exponent, strict=True):
        if word and word < 0x7F800000:
            assert Fraction(float(m)) * Fraction(2) ** int(e) == Fraction(float(word.view(np.float32)))
    assert (mantissa[words == 0] == 1).all()
    assert (exponent[words == 0] == 0).all()


def test_split_scale_of_float64_is_exact() -> None:
    rng = np.random.default_rng(4)
    words = np.concatenate([[1, 2, 0xFFFFF, 0x100000, 0x7FEFFFFF], rng.integers(1, 0x7FF00000, 500)])
    mantissa, exponent = reference.split_scale(np, words.astype(np.uint32), wide=True)
    assert ((mantissa >= 1) & (mantissa < 2)).all()
    values = (words.astype(np.uint64) << np.uint64(32)).view(np.float64)
    for value, m, e in zip(values, mantissa, exponent, strict=True):
        assert Fraction(float(m)) * Fraction(2) ** int(e) == Fraction(float(value))


def test_maxima_of_float32() -> None:
    x = np.array([[1, -3, 2], [0, -0.0, 0], [1, np.inf, -2], [-np.inf, np.nan, 1], [1e-45, 0, 0]], np.float32)
    words = reference.maxima(np, x)
    assert words[:3].tolist() == [0x40400000, 0, 0x7F800000]
    assert words[3] > 0x7F800000
    assert words[4] == 1
    assert reference.nonfinite(words, wide=False).tolist() == [False, False, True, True, False]
    assert reference.usable(words, wide=False).tolist() == [True, False, False, False, True]
    assert reference.maxima(np, x, -x)[:2].tolist() == [0, 0]


def test_maxima_of_float64_round_up() -> None:
    largest = np.finfo(np.float64).max
    x = np.array([[1.0], [np.nextafter(1, 2)], [largest], [np.inf], [-np.nan], [5e-324], [0]])
    words = reference.maxima(np, x)
    expected = [0x3FF00000, 0x3FF00001, 0x7FEFFFFF, 0x7FF00000, 0x7FF80000, 1, 0]
    assert words.tolist() == expected
    assert reference.nonfinite(words, wide=True).tolist() == [False] * 3 + [True] * 2 + [False] * 2


def test_16_bit_floats_are_converted_exactly_and_to_nearest_even() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="needs ml_dtypes, for another bfloat16")
    rng = np.random.default_rng(6)
    bits = np.concatenate([rng.integers(0, 1 << 32, 20_000), np.arange(0, 1 << 32, 0x8000)[:100_000]])
    x = bits.astype(np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        expected = x.astype(ml_dtypes.bfloat16)
        halves = x.astype(np.float16)
    number = ~np.isnan(x)
    words = reference.narrow(np, x, "bfloat16")
    np.testing.assert_array_equal(words[number], expected.view(np.uint16)[number])
    assert np.isnan(reference.widen(np, words)[~number]).all()
    np.testing.assert_array_equal(reference.widen(np, words)[number], expected.astype(np.float32)[number])
    np.testing.assert_array_equal(reference.widen(np, expected), reference.widen(np, words))
    np.testing.assert_array_equal(reference.narrow(np, x, "float16"), halves)
    np.testing.assert_array_equal(reference.widen(np, halves), halves.astype(np.float32))


@pytest.mark.parametrize("limit", [0, -1, 32767 * 65536 + 1])
def test_impossible_limits_are_refused(limit: int) -> None:
    x, scales = np.ones((1, 1), np.float32), np.array([0x3F800000], np.uint32)
    with pytest.raises(ValueError, match=f"limit {limit} is outside"):
        reference.quantise(np, x, scales, scales[:, None], 0, limit)


def all_reduce(
    tensors: list[Array], *, width: int, subtract: bool, mean: bool, dtype: str
) -> tuple[Array, Array, list[reference.Encoded]]:
    """Run the lane codec over virtual ranks; returns the result, scales and what each rank encoded."""
    n, (blocks, length) = len(tensors), tensors[0].shape
    limit = ln.safe_limit(width, n)
    scales = np.max([reference.maxima(np, x) for x in tensors], axis=0)
    step_key = noise.step_key(*noise.tensor_key("w", 0), 0)
    hashes = reference.block_hashes(np, *reference.block_keys(np, *step_key, np.arange(blocks)), length)
    sent = [
        reference.encode(np, x, scales, hashes, ln.rank_shift(rank, n), width=width, limit=limit)
        for rank, x in enumerate(tensors)
    ]
    words = np.sum([one.words for one in sent], axis=0, dtype=np.uint32)
    sums = reference.unpack(np, words, width, length)
    check = np.sum([one.check for one in sent], axis=0, dtype=np.uint32)
    np.testing.assert_array_equal(reference.check_words(np, hashes, sums), check)
    result = reference.decode(
        np, words, scales, hashes, length=length, width=width, limit=limit, n=n,
        subtract=subtract, mean=mean, dtype=dtype,
    )  # fmt: skip
    return result, scales, sent


@pytest.mark.parametrize("width", ln.WIDTHS[:-1])
@pytest.mark.parametrize(("n", "dtype"), [(1, "float32"), (3, "float64"), (4, "float16"), (17, "float32")])
def test_result_is_within_the_error_bound(width: int, n: int, dtype: str) -> None:
    rng = np.random.default_rng(width)
    tensors = [(rng.standard_normal((4, 300)) * [[1e-3], [1], [30], [0]]).astype(dtype) for _ in range(n)]
    exact = np.sum(tensors, axis=0, dtype=np.float64)
    largest = np.max(np.abs(tensors), axis=(0, 2))[:, None].astype(np.float64)
    level = largest * 65536 / ln.safe_limit(width, n)
    for subtract in (False, True):
        total, _, sent = all_reduce(tensors, width=width, subtract=subtract, mean=False, dtype=dtype)
        slack = 1e-3 * n * largest if dtype == "float16" else 1e-5 * n * level
        assert (np.abs(total - exact) <= n * level + slack).all()
        assert (total[3] == 0).all()
        for x, one in zip(tensors, sent, strict=True):
            assert one.residual.dtype == (np.float64 if dtype == "float64" else np.float32)
            assert (np.abs(one.residual) <= level * 1.001).all()
            assert (np.abs(x - one.residual)[3] == 0).all()
        average, *_ = all_reduce(tensors, width=width, subtract=subtract, mean=True, dtype=dtype)
        np.testing.assert_allclose(average, total / n, rtol=2e-3 if dtype == "float16" else 1e-6, atol=1e-7)


@pytest.mark.parametrize(("dtype", "large"), [("float32", 1e38), ("float32", 1e-44), ("float64", 1e308)])
def test_ends_of_the_range(dtype: str, large: float) -> None:
    x = np.full((1, 8), large, dtype)
    average, *_ = all_reduce([x] * 4, width=16, subtract=True, mean=True, dtype=dtype)
    np.testing.assert_allclose(average, x, rtol=1e-4 if large > 1 else 0.2)
    total, *_ = all_reduce([x] * 4, width=16, subtract=True, mean=False, dtype=dtype)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(total, x * np.float32(4), rtol=1e-4 if large > 1 else 0.2)


def test_nonfinite_blocks_become_nan_and_leave_the_residual_alone() -> None:
    x = np.ones((3, 5), np.float32)
    x[0, 1], x[1, 2] = np.inf, np.nan
    total, scales, sent = all_reduce([x, x], width=8, subtract=True, mean=False, dtype="float32")
    assert np.isnan(total).all(axis=1).tolist() == [True, True, False]
    assert (sent[0].words[:2] == 0).all()
    assert (sent[0].residual[:2] == 0).all()
    old = np.full_like(x, 0.25)
    hashes = np.zeros(x.shape, np.uint32)
    again = reference.encode(np, x, scales, hashes, 0, width=8, limit=100, residual=old)
    assert (again.residual[:2] == 0.25).all()


def test_energy_is_that_of_the_levels() -> None:
    centred = np.array([[32768, -65536, 16384], [0, 0, 0]], np.int32)  # 1, -2 and 0.5 levels
    assert reference.block_energy(np, centred, 8).tolist() == [8**2 + 16**2 + 4**2, 0]
    assert reference.block_energy(np, centred, 11).tolist() == [1**2 + 2**2 + 1**2, 0]  # halves go up
    assert reference.block_energy(np, centred, 32).tolist() == [0, 0]


@pytest.mark.parametrize("n", [1, 2, 3, 17, 1000])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_exact_sums_are_within_their_bound(n: int, dtype: str) -> None:
    rng = np.random.default_rng(n)
    tensors = [(rng.standard_normal((2, 40)) * [[1e-30], [1]]).astype(dtype) for _ in range(n)]
    tensors[0][1, 0] = 1e-12
    scales = np.max([reference.maxima(np, x) for x in tensors], axis=0)
    words = np.sum([reference.exact_encode(np, x, scales, n=n) for x in tensors], axis=0, dtype=np.uint32)
    total = reference.exact_decode(np, words, scales, n=n, mean=False, dtype=dtype).astype(np.float64)
    exact = np.array([[math.fsum(float(x[b, i]) for x in tensors) for i in range(40)] for b in range(2)])
    largest = np.max(np.abs(tensors), axis=(0, 2))[:, None]
    guard = (n - 1).bit_length()
    bound = n * 2.0 ** -(60 - 2 * guard) * largest + np.abs(exact) * float(np.finfo(dtype).eps)
    assert (np.abs(total - exact) <= bound).all()


@pytest.mark.parametrize("n", [1, 3, 64])
def test_exact_encoding_is_the_same_in_float64(n: int) -> None:
    rng = np.random.default_rng(n)
    x = rng.standard_normal((40, 30)) * np.exp2(rng.integers(-149, 127, (40, 1)).astype(np.float64))
    x = np.where(rng.random((40, 30)) < 0.3, x * 2.0**-40, x).astype(np.float32)
    scales = reference.maxima(np, x)
    words = reference.exact_encode(np, x, scales, n=n).view(np.int32)
    _, exponent = reference.split_scale(np, scales, wide=False)
    guard = (n - 1).bit_length()
    fixed = np.ldexp(x.astype(np.float64), (30 - guard - (exponent + 1))[:, None])
    upper = np.rint(fixed)
    np.testing.assert_array_equal(words[:, :30], upper)
    np.testing.assert_array_equal(words[:, 30:], np.rint((fixed - upper) * 2.0 ** (31 - guard)))


def test_exact_blocks_of_zero_and_nan() -> None:
    x = np.array([[0, 0], [np.nan, 1], [1, 2]], np.float32)
    scales = reference.maxima(np, x)
    words = reference.exact_encode(np, x, scales, n=1)
    assert (words[:2] == 0).all()
    result = reference.exact_decode(np, words, scales, n=1, mean=True, dtype="float32")
    np.testing.assert_array_equal(result, [[0, 0], [np.nan, np.nan], [1, 2]])
