"""The operations on words that are no sums: what they promise, their kernels, their order in a reduction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gccomm_local import connect

from gccomm import kernels
from gccomm.errors import BackendError
from gccomm.kernels import reference
from gccomm.lanes import lanes
from gccomm.noise import fmix
from gccomm.operations import OPERATIONS, SATURATING_WIDTHS, addition_seed, check_operation, reduce_parts
from gccomm.testing import _combine
from gccomm.transfers import Combine, Maximum, Transfer, WordAdd, execute
from tests.kernel_batches import level

__all__ = ["level"]

Array = np.ndarray[Any, Any]
BYTES = np.arange(256, dtype=np.uint8)
VALUES = np.where(BYTES & 127, np.where(BYTES > 127, -1.0, 1.0) * 2.0 ** -(BYTES & 127).astype(float), 0.0)
SIZES = (0, 1, 3, 4, 5, 15, 16, 17, 63, 1000)


def words_of(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).integers(0, 2**32, shape, np.uint32)


def pack(q: Array, width: int) -> Array:
    """Return one word per row of signed lanes, by the definition."""
    total = sum(q[:, k].astype(np.int64) << (width * k) for k in range(q.shape[1]))
    return (total % 2**32).astype(np.uint32)


def unpack(words: Array, width: int) -> Array:
    shape = (lanes(width), words.size)
    return np.asarray(reference.unpack(np, words[None], width, words.size * lanes(width))).reshape(shape).T


def mean_over(zeros: Array, results: Array) -> Array:
    """Return the mean value of results, of which row g has the probability of `zeros[g]` leading zeros."""
    probabilities = np.where(zeros < 31, 2.0 ** -(zeros + 1.0), 2.0**-31)
    assert probabilities.sum() == 1
    return np.tensordot(probabilities, VALUES[results], 1)


def all_sums() -> tuple[Array, Array]:
    """Return the sums of all pairs of bytes, shape (numbers of zeros, 256, 256), and those numbers."""
    zeros = np.arange(32, dtype=np.uint8)
    return reference.exponent_add_bytes(BYTES[:, None], BYTES, zeros[:, None, None]), zeros


def fits(exact: Array) -> Array:
    """Tell for each pair of bytes whether its sum cannot leave the range, whichever way it is rounded."""
    return np.asarray(np.abs(exact) <= 0.5)


def call(function: Callable[..., None], a: Array, b: Array, *options: int, out: Array | None = None) -> Array:
    """Run a kernel on two arrays and return the result; memory around it must stay as it was."""
    guarded = np.full(a.size + 16, 0xABABABAB, np.uint32)
    result = guarded[7 : 7 + a.size] if out is None else out
    function(*map(kernels.address, (a, b, result)), a.size, *options)
    if out is None:
        assert (np.r_[guarded[:7], guarded[7 + a.size :]] == 0xABABABAB).all()
    return result


@pytest.mark.parametrize("width", [2, 3, 4, 5, 6])
def test_saturating_add_of_all_pairs(width: int) -> None:
    half, count = 1 << (width - 1), lanes(width)
    a, b = (x.ravel() for x in np.meshgrid(np.arange(-half, half), np.arange(-half, half)))
    # in every lane all pairs, between neighbours of all kinds
    order = [np.random.default_rng(k).permutation(a.size) for k in range(count)]
    qa, qb = np.stack([a[o] for o in order], 1), np.stack([b[o] for o in order], 1)
    total = reference.saturating_add(pack(qa, width), pack(qb, width), width)
    expected = np.clip(qa + qb, 1 - half, half - 1)
    np.testing.assert_array_equal(unpack(total, width), expected)
    np.testing.assert_array_equal(total, pack(expected, width), strict=True)


@pytest.mark.parametrize("width", SATURATING_WIDTHS)
def test_saturating_add_of_wide_lanes(width: int) -> None:
    half = 1 << (width - 1)
    rng = np.random.default_rng(width)
    qa, qb = (rng.choice([-half, 1 - half, -1, 0, 1, half - 1], (3000, lanes(width))) for _ in range(2))
    qb[::2] = rng.integers(-half, half, qb[::2].shape)
    total = reference.saturating_add(pack(qa, width), pack(qb, width), width)
    np.testing.assert_array_equal(unpack(total, width), np.clip(qa + qb, 1 - half, half - 1))


def test_exponent_sums_are_unbiased() -> None:
    results, zeros = all_sums()
    exact = VALUES[:, None] + VALUES
    larger = np.maximum(np.abs(VALUES)[:, None], np.abs(VALUES))
    inside = fits(exact)
    error = np.abs(mean_over(zeros, results) - exact)
    assert (error <= larger * 2.0**-30)[inside].all()
    near = np.abs(np.subtract.outer(BYTES & 127, (BYTES & 127).astype(np.int64))) <= 31
    assert (error == 0)[inside & near & (exact != 0)].all()


def test_exponent_sums_are_neighbours_of_the_exact_sum() -> None:
    results, _ = all_sums()
    exact = VALUES[:, None] + VALUES
    assert not (results == 128).any()
    assert (results == results.transpose(0, 2, 1)).all()
    lower = np.where(exact == 0, 0, 2.0 ** np.floor(np.log2(np.abs(exact), where=exact != 0, out=0 * exact)))
    found = VALUES[results]
    inside = fits(exact)
    assert ((np.sign(found) == np.sign(exact)) & (np.abs(found) >= lower))[:, inside].all()
    assert (np.abs(found) <= np.where(lower == np.abs(exact), 1, 2) * lower)[:, inside].all()
    # 1/2 + 1/2 does not fit, and stays the largest number
    assert (results[:, 1, 1] == 1).all()
    assert (results[:, 129, 129] == 129).all()


def test_leading_zeros() -> None:
    hashes = np.array([2**32 - 1, 2**31, 2**31 - 1, 2**30, 2**9 + 5, 3, 2, 1, 0], np.uint32)
    assert reference.leading_zeros(hashes).tolist() == [0, 0, 1, 1, 22, 30, 30, 31, 31]
    # numbers just below a power of two are where a conversion to float32 would round up
    powers = 2 ** np.arange(1, 32)
    assert reference.leading_zeros((powers - 1).astype(np.uint32)).tolist() == [31, *range(30, 0, -1)]


def test_exponent_add_is_unbiased_over_seeds() -> None:
    """Over seeds, over places, and jointly: the mean is within 5 standard errors for every pair."""
    rng, draws = np.random.default_rng(2), 4000
    a, b = rng.integers(2, 8, 512, np.uint8), rng.integers(2, 8, 512, np.uint8)
    a[::2] |= 128
    sums = np.stack(
        [
            VALUES[reference.exponent_add(a.view(np.uint32), b.view(np.uint32), s, 0).view(np.uint8)]
            for s in range(draws)
        ]
    )
    exact = VALUES[a] + VALUES[b]
    error = sums.mean(axis=0) - exact
    spread = sums.std(axis=0)
    assert (np.abs(error)[spread == 0] == 0).all()
    scores = error[spread > 0] / spread[spread > 0] * draws**0.5
    assert np.abs(scores).max() < 5
    assert 0.8 < (scores**2).mean() < 1.2
    # places are independent of each other: the variance of a sum over places is the sum of variances
    assert 0.8 < sums.sum(axis=1).var() / (spread**2).sum() < 1.2


def test_exponent_add_hangs_on_the_place_in_the_whole_array() -> None:
    a, b = words_of(1, 500), words_of(2, 500)
    whole = reference.exponent_add(a, b, 7, 40)
    np.testing.assert_array_equal(reference.exponent_add(a[123:], b[123:], 7, 163), whole[123:])
    assert (reference.exponent_add(a, b, 8, 40) != whole).any()
    assert (reference.exponent_add(a, b, 7, 41) != whole).any()
    np.testing.assert_array_equal(reference.exponent_add(a, b, 7, 40 + 2**30), whole)


def test_exponent_encode_is_unbiased() -> None:
    # Fractions of 12 bits and all 4096 values of the upper hash bits: the mean is exact.
    rng = np.random.default_rng(3)
    fractions = (1 + rng.integers(0, 4096, 400) / 4096) * rng.choice([-1.0, 1.0], 400)
    x = np.ldexp(fractions, -rng.integers(2, 128, 400)).astype(np.float32)
    x[:3] = [0.0, 2.0**-140, -(2.0**-128)]
    hashes = np.arange(4096, dtype=np.uint32)[:, None] << 20
    codes = reference.exponent_encode(np.broadcast_to(x, (4096, 400)), hashes)
    found = VALUES[codes]
    tiny = np.abs(x) < 2.0**-138  # below what 12 bits of the hash resolve
    np.testing.assert_array_equal(found.mean(axis=0)[~tiny], x.astype(np.float64)[~tiny])
    assert (found[:, 0] == 0).all()
    ratio = np.abs(found) / np.abs(np.where(x == 0, 1, x))
    assert ((ratio > 0.5) & (ratio < 2) | (found == 0) & (np.abs(x) < 2.0**-127))[:, 3:].all()


def test_exponent_encode_at_the_ends() -> None:
    x = np.array(
        [0.0, -0.0, 0.5, -0.5, 0.6, -7.0, np.inf, -np.inf, np.nan, 2.0**-127, -(2.0**-126)], np.float32
    )
    for bits in (0, 2**32 - 1):
        hashes = np.full(x.size, bits, np.uint32)
        codes = reference.exponent_encode(x, hashes).tolist()
        assert codes == [0, 0, 1, 129, 1, 129, 1, 129, 1, 127, 254]
    # a number below 2^-127 vanishes or becomes it
    smallest = np.full(2, 2.0**-149, np.float32)
    assert reference.exponent_encode(smallest, np.array([0, 2**32 - 1], np.uint32)).tolist() == [0, 127]


def test_exponent_decode_gives_all_numbers_and_encode_keeps_them() -> None:
    decoded = reference.exponent_decode(BYTES)
    np.testing.assert_array_equal(decoded, VALUES.astype(np.float32), strict=True)
    for hashes in (np.zeros(256, np.uint32), np.full(256, 2**32 - 1, np.uint32)):
        np.testing.assert_array_equal(
            reference.exponent_encode(decoded, hashes), np.where(BYTES == 128, 0, BYTES)
        )


@pytest.mark.parametrize("width", SATURATING_WIDTHS)
def test_saturating_kernel_is_the_reference(level: str, width: int) -> None:
    for size in SIZES:
        a, b = words_of(size, size), words_of(size + 1, size)
        expected = reference.saturating_add(a, b, width)
        np.testing.assert_array_equal(call(kernels.saturating_add, a, b, width), expected)
        np.testing.assert_array_equal(call(kernels.saturating_add, a, b.copy(), width, out=a), expected)


def pairs_of_bytes() -> tuple[Array, Array]:
    a, b = np.meshgrid(BYTES, BYTES)
    return np.ascontiguousarray(a).view(np.uint32).ravel(), np.ascontiguousarray(b).view(np.uint32).ravel()


def test_exponent_kernel_is_the_reference(level: str) -> None:
    # all pairs of bytes, with many hashes each
    a, b = pairs_of_bytes()
    for seed in range(40):
        start = (0, 2**30 - 5, 2**31, 123456789)[seed % 4]
        expected = reference.exponent_add(a, b, fmix(seed), start)
        np.testing.assert_array_equal(call(kernels.exponent_add, a, b, fmix(seed), start), expected)
    for size in SIZES:
        a, b = words_of(size, size), words_of(size + 1, size)
        b[::2] = a[::2] ^ 0x80008081
        expected = reference.exponent_add(a, b, size, size)
        np.testing.assert_array_equal(call(kernels.exponent_add, a, b, size, size), expected)
        np.testing.assert_array_equal(call(kernels.exponent_add, a, b, size, size, out=b), expected)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 15, 16, 17, 18, 31, 33, 1001, 40_000])
def test_exponent_format_kernels_are_the_reference(level: str, size: int) -> None:
    rng = np.random.default_rng(size)
    x = rng.integers(0, 2**32, size, np.uint32).view(np.float32)  # all exponents, infinities and NaN
    x[::2] = rng.standard_normal(x[::2].size) / 4
    hashes = reference.indexed_hash(11, 2**32 - 1, 2**32 - 3, size)
    expected = np.zeros((size + 3) // 4 * 4, np.uint8)
    expected[:size] = reference.exponent_encode(x, hashes)
    guarded = np.full(expected.size // 4 + 8, 0xABABABAB, np.uint32)
    kernels.exponent_encode(kernels.address(x), kernels.address(guarded), size, 11, 2**32 - 1, 2**32 - 3)
    np.testing.assert_array_equal(guarded[:-8].view(np.uint8), expected)
    assert (guarded[-8:] == 0xABABABAB).all()

    codes = rng.integers(0, 256, expected.size, np.uint8)
    numbers = np.full(size + 8, 77, np.float32)
    kernels.exponent_decode(kernels.address(codes), kernels.address(numbers), size)
    np.testing.assert_array_equal(numbers[:size], VALUES[codes[:size]])
    assert (numbers[size:] == 77).all()


def test_kernels_refuse_wrong_arguments() -> None:
    words = np.zeros(4, np.uint32)
    addresses = (kernels.address(words),) * 3
    for width in (0, 1, 7, 32):
        with pytest.raises(ValueError, match="lane"):
            kernels.saturating_add(*addresses, 4, width)
    with pytest.raises(ValueError, match="count must not be negative"):
        kernels.saturating_add(*addresses, -1, 8)
    with pytest.raises(ValueError, match="count must not be negative"):
        kernels.exponent_add(*addresses, -1, 0, 0)
    with pytest.raises(ValueError, match="count must not be negative"):
        kernels.exponent_encode(*addresses[:2], -1, 0, 0, 0)
    with pytest.raises(ValueError, match="count must not be negative"):
        kernels.exponent_decode(*addresses[:2], -1)


def tree(operation: str, seed: int, parts: list[Array]) -> Array:
    """Reduce by the reference, in the documented order."""
    number = 0
    while len(parts) > 1:
        sums = []
        for k in range(0, len(parts) - 1, 2):
            if operation == "exponent":
                sums.append(reference.exponent_add(parts[k], parts[k + 1], addition_seed(seed, number), 0))
            else:
                sums.append(reference.saturating_add(parts[k], parts[k + 1], int(operation[9:])))
            number += 1
        parts = sums + parts[len(parts) // 2 * 2 :]
    return parts[0]


@pytest.mark.parametrize("ranks", range(1, 10))
@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_a_reduction_has_one_order_however_it_is_cut(operation: str, ranks: int) -> None:
    parts = words_of(ranks, ranks, 130)
    expected = tree(operation, 99, list(parts))
    for cut in (0, 1, 61, 130):
        found, copy = np.empty(130, np.uint32), parts.copy()
        for lo, hi in ((0, cut), (cut, 130)):
            reduce_parts(operation, 99, [row[lo:hi] for row in copy], lo, found[lo:hi])
        np.testing.assert_array_equal(found, expected, strict=True)
    for place in range(ranks):  # the result may take the place of any part
        copy = parts.copy()
        reduce_parts(operation, 99, list(copy), 0, copy[place])
        np.testing.assert_array_equal(copy[place], expected)


def test_additions_of_a_reduction_have_noise_of_their_own() -> None:
    """Equal operands at two places of the tree, or in two rounds, are rounded independently."""
    seeds = {addition_seed(seed, number) for seed in range(50) for number in range(50)}
    assert len(seeds) == 2500
    quarter, eighth = np.full(2000, 0x06060606, np.uint32), np.full(2000, 0x07070707, np.uint32)
    sums = [
        reference.exponent_add(quarter, eighth, addition_seed(5, k), 0).view(np.uint8) == 5 for k in range(2)
    ]
    assert abs(np.corrcoef(*sums)[0, 1]) < 0.05
    assert abs(np.mean(sums) - 0.5) < 0.02


@pytest.mark.parametrize("ranks", [3, 8])
def test_reduction_by_exponents_is_unbiased(ranks: int) -> None:
    rng, draws = np.random.default_rng(4), 3000
    codes = rng.integers(5, 12, (ranks, 256), np.uint8) | rng.choice([0, 128], (ranks, 256)).astype(np.uint8)
    exact = VALUES[codes].sum(axis=0)
    sums = np.empty((draws, 256))
    for seed in range(draws):
        out = np.empty(64, np.uint32)
        reduce_parts("exponent", seed, list(codes.copy().view(np.uint32)), 0, out)
        sums[seed] = VALUES[out.view(np.uint8)]
    scores = (sums.mean(axis=0) - exact) / np.maximum(sums.std(axis=0), 1e-12) * draws**0.5
    assert np.abs(scores).max() < 5
    assert 0.7 < (scores**2).mean() < 1.3


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 9, 16])
def test_sums_of_small_enough_numbers_cannot_saturate(ranks: int) -> None:
    """A sum of two is at most twice the larger, so that exponents from 1 + ceil(log2 n) on are safe."""
    codes = np.full(ranks, 1 + (ranks - 1).bit_length(), np.uint8)
    while codes.size > 1:
        left, right = codes[0:-1:2], codes[1::2]
        upwards = np.full(right.size, 31, np.uint8)  # the unluckiest rounding
        sums = reference.exponent_add_bytes(left, right, upwards)
        np.testing.assert_array_equal(sums, np.minimum(left, right) - 1)  # 1 would stay 1
        codes = np.concatenate([sums, codes[codes.size // 2 * 2 :]])
    assert codes.tolist() == [1]


def test_operations_and_seeds_are_checked() -> None:
    for operation in OPERATIONS:
        check_operation(operation, 2**32 - 1)
    for wrong in ("sum", "saturate:7", "saturate:32", "saturate", ""):
        with pytest.raises(ValueError, match=f"`operation` must be one of exponent, .*got '{wrong}'"):
            check_operation(wrong, 0)
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match=rf"`seed` must be from 0 to 2\^32 - 1; got {seed}"):
            check_operation("exponent", seed)


@pytest.mark.parametrize("operation", ["saturate:3", "exponent"])
def test_transfers_in_lockstep(operation: str) -> None:
    parts = words_of(5, 3, 40)
    transfers: list[Transfer] = [Combine(words, operation, 99) for words in parts.copy()]
    _combine(transfers)
    for transfer in transfers:
        assert isinstance(transfer, Combine)
        np.testing.assert_array_equal(transfer.words, tree(operation, 99, list(parts)))


def test_transfer_over_a_back_end() -> None:
    words = words_of(6, 9)
    transfer = Combine(words.copy(), "saturate:8", 0)
    execute(transfer, connect())
    np.testing.assert_array_equal(transfer.words, words)  # a world of one


def test_a_maximum_and_a_sum_meet_in_lockstep() -> None:
    parts = words_of(7, 3, 256)
    a, b, c = parts.copy()
    _combine([WordAdd(a, ((0, 256, 2),)), Maximum(b), WordAdd(c)])
    total = parts.sum(axis=0, dtype=np.uint32)
    for found, expected in ((a, total), (b, parts.max(axis=0)), (c, total)):
        np.testing.assert_array_equal(found, expected)


def test_other_transfers_do_not_meet() -> None:
    words = words_of(8, 2, 4)
    mixtures: tuple[list[Transfer], ...] = (
        [Maximum(words[0]), WordAdd(words[1, :3])],
        [Maximum(words[0]), Combine(words[1], "exponent", 0)],
        [WordAdd(words[0]), Combine(words[1], "exponent", 0)],
    )
    for mixture in mixtures:
        with pytest.raises(BackendError, match="virtual ranks make different transfers"):
            _combine(mixture)
    for other in (Combine(words[1], "exponent", 1), Combine(words[1], "saturate:2", 0)):
        with pytest.raises(BackendError, match=r"different reductions: .*exponent, seed 0"):
            _combine([Combine(words[0], "exponent", 0), other])
