"""Integers and booleans are summed exactly, small float tensors as good as exactly."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gccomm import testing
from gccomm.errors import GccommError

Array = np.ndarray[Any, Any]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
RANKS = [1, 2, 3, 4, 17]
integers = pytest.mark.parametrize("dtype", INTEGERS)
ranks = pytest.mark.parametrize("n", RANKS)


def reduce(xs: list[Any], **options: Any) -> Any:
    """Sum in lockstep; all ranks must get the same."""
    ys, _ = testing.simulate(xs, **options)
    for y in ys[1:]:
        assert_same(y, ys[0])
    return ys[0]


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, dict):
        for key in a.keys() | b.keys():
            assert_same(a[key], b[key])
    else:
        np.testing.assert_array_equal(a, b)


def true_sum(xs: list[Array]) -> list[int]:
    """Sum in Python's integers."""
    return [sum(column) for column in zip(*(x.reshape(-1).tolist() for x in xs), strict=True)]


@ranks
@integers
def test_every_range_is_exact(dtype: str, n: int) -> None:
    """One tensor for each bit length that leaves room for the sum: every lane width and digit count."""
    info = np.iinfo(dtype)
    rng = np.random.default_rng(n)
    trees: list[dict[str, Array]] = [{} for _ in range(n)]
    for bits in range(info.max.bit_length() + 1):
        low, high = max(-(-info.min // n), -(2**bits)), min(info.max // n, 2**bits - 1)
        for tree in trees:
            x = rng.integers(low, high, 1030, endpoint=True, dtype=dtype)
            x[:2] = low, high
            tree[f"{bits:02}"] = x
    result = reduce(trees)
    for key, y in result.items():
        assert y.dtype == dtype
        assert y.tolist() == true_sum([tree[key] for tree in trees]), key


@ranks
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_extremes_that_cancel(dtype: str, n: int) -> None:
    """Ranks hold the ends of the range; only the sum has to fit."""
    info = np.iinfo(dtype)
    rows = [[info.min, info.max] * (n // 2) + [0] * (n % 2) for _ in range(6)]
    rows += [[info.max] + [0] * (n - 1), [0] * (n - 1) + [info.min]]
    matrix = np.array(
        [np.random.default_rng(i).permutation(row) for i, row in enumerate(rows)], dtype=dtype
    ).T
    xs = [np.tile(matrix[r], 400) for r in range(n)]
    assert reduce(xs).tolist() == true_sum(xs)


@ranks
def test_the_largest_unsigned_numbers(n: int) -> None:
    top = 2**64 - 1
    xs = [np.array([top if r == n - 1 else 0, top // n, r], dtype=np.uint64) for r in range(n)]
    assert reduce(xs).tolist() == true_sum(xs) == [top, top // n * n, n * (n - 1) // 2]


@pytest.mark.parametrize("n", [2, 3, 17])
@integers
def test_sums_that_do_not_fit_raise_and_name_the_key(dtype: str, n: int) -> None:
    info = np.iinfo(dtype)
    ends = [info.max] if info.min == 0 else [info.max, info.min]
    for end in ends:
        good, bad = np.zeros(2000, dtype), np.zeros(2000, dtype)
        bad[[3, 1999]] = end
        one = bad.copy()
        one[1999] = 0
        tree = {"fine": good, "layer/w": bad}
        others = [{"fine": good, "layer/w": one // info.dtype.type(2 if r else 1)} for r in range(n - 1)]
        with pytest.raises(
            OverflowError, match=rf"1 integer sums do not fit {dtype}\b.*'layer~1w'"
        ) as caught:
            testing.simulate([tree, *others])
        assert "reduce in a wider dtype. Nothing was changed" in str(caught.value)


def test_overflow_raises_on_every_rank_and_the_next_call_works() -> None:
    def attempt(comm: Any) -> tuple[str, Array, Array]:
        x, out = np.array([127, 1], np.int8), np.array([5, 6], np.int8)
        try:
            comm.compressed_allreduce({"k": x}, out={"k": out})
        except OverflowError as error:
            return str(error), out, comm.compressed_allreduce(x // 3)
        raise AssertionError("no rank may succeed")

    results = testing.run(attempt, 3)
    assert len({text for text, _, _ in results}) == 1
    for text, out, following in results:
        assert "do not fit int8" in text
        assert "'k'" in text
        assert out.tolist() == [5, 6]
        assert following.tolist() == [126, 0]


@integers
def test_the_mean_of_integers_is_refused(dtype: str) -> None:
    with pytest.raises(
        TypeError, match=rf"rank 0: the mean of integers is not an integer: 'k' is {dtype}\[3\]"
    ):
        testing.simulate([{"k": np.ones(3, dtype)}] * 2, op="mean")


@ranks
def test_booleans_are_a_logical_or(n: int) -> None:
    rng = np.random.default_rng(n)
    xs = [rng.random((3, 700)) < 1 / (2 * n) for _ in range(n)]
    y = reduce(xs)
    assert y.dtype == np.bool_
    np.testing.assert_array_equal(y, np.logical_or.reduce(xs))
    assert reduce([True, False, False]) is True
    assert reduce([False, False]) is False


@pytest.mark.parametrize("n", [1, 2, 5])
def test_scalars_and_empty_arrays(n: int) -> None:
    tree = {
        "int": -3,
        "bool": False,
        "zero-d": np.array(2**40),
        "scalar": np.uint8(7),
        "empty": np.zeros((0, 4), int),
    }
    y = reduce([tree] * n)
    assert (type(y["int"]), y["int"]) == (int, -3 * n)
    assert y["bool"] is False
    assert (y["zero-d"].shape, int(y["zero-d"])) == ((), n * 2**40)
    assert (type(y["scalar"]), int(y["scalar"])) == (np.uint8, 7 * n)
    assert (y["empty"].shape, y["empty"].dtype) == ((0, 4), np.dtype(int))
    assert reduce([-(2**63)]) == -(2**63)


def test_python_integers_beyond_int64_are_refused() -> None:
    with pytest.raises(OverflowError, match="outside the range of int64"):
        testing.simulate([2**63])


@pytest.mark.parametrize("piece", [1, 1500, 512 * 1024])
def test_integers_do_not_depend_on_how_they_are_cut(piece: int) -> None:
    """Ranges are agreed by tensor and piece; the sums are the same."""
    rng = np.random.default_rng(8)
    trees: list[dict[str, Any]] = [
        {
            "i": rng.integers(-(2**40), 2**40, (5, 1100)) * (np.arange(1100) > 600),
            "u": rng.integers(0, 50, 3000).astype(np.uint8),
            "b": rng.random(2049) < 0.1,
            "f": rng.standard_normal(1500).astype(np.float32),
        }
        for _ in range(3)
    ]
    y = reduce(trees, piece_coordinates=piece, one_host=piece == 1)
    assert y["i"].reshape(-1).tolist() == true_sum([t["i"] for t in trees])
    assert y["u"].tolist() == true_sum([t["u"] for t in trees])
    np.testing.assert_array_equal(y["b"], trees[0]["b"] | trees[1]["b"] | trees[2]["b"])


@st.composite
def cases(draw: st.DrawFn) -> list[Array]:
    """One integer array a rank, of values near powers of two, zero and the ends of the dtype."""
    dtype, n, size = draw(st.sampled_from(INTEGERS)), draw(st.integers(1, 5)), draw(st.integers(0, 40))
    info = np.iinfo(dtype)
    bits = draw(st.integers(0, info.bits))
    low, high = max(info.min, -(2**bits)), min(info.max, 2**bits)
    value = st.one_of(st.integers(low, high), st.sampled_from([low, high, 0, min(1, high)]))
    rows = draw(st.lists(st.lists(value, min_size=size, max_size=size), min_size=n, max_size=n))
    return [np.array(row, dtype=dtype) for row in rows]


@settings(deadline=None, derandomize=True, max_examples=300)
@given(cases())
def test_sums_are_those_of_pythons_integers(xs: list[Array]) -> None:
    info, expected = np.iinfo(xs[0].dtype), true_sum(xs)
    outside = sum(not info.min <= value <= info.max for value in expected)
    if outside:
        with pytest.raises(OverflowError, match=f"{outside} integer sums do not fit"):
            testing.simulate(xs)
    else:
        assert reduce(xs).tolist() == expected


@ranks
def test_small_float64_tensors_are_within_the_bound(n: int) -> None:
    """The error is at most n 2^-(61 - 2L) of the largest magnitude, L = ceil(log2 n)."""
    rng = np.random.default_rng(n)
    xs = [rng.standard_normal(1023) * np.exp(4 * rng.standard_normal(1023)) for _ in range(n)]
    y = reduce(xs)
    largest = max(Fraction(float(np.abs(x).max())) for x in xs)
    bound = largest * n / 2 ** (61 - 2 * (n - 1).bit_length())
    for i in range(1023):
        exact = sum((Fraction(float(x[i])) for x in xs), Fraction(0))
        rounding = abs(exact) / 2**52 + largest * n / 2**1000
        assert abs(Fraction(float(y[i])) - exact) <= bound * (1 + Fraction(1, 2**19)) + rounding


@ranks
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.complex64])
def test_floats_of_few_bits_are_exact(dtype: Any, n: int) -> None:
    bits = 3 if dtype is ml_dtypes.bfloat16 else 6 if dtype is np.float16 else 18
    rng = np.random.default_rng(bits)
    for power in (-8, 0, 4):
        units = [rng.integers(-(2**bits), 2**bits, 500, endpoint=True) for _ in range(n)]
        y = reduce([(u * 2.0**power).astype(dtype) for u in units])
        assert y.dtype == dtype
        np.testing.assert_array_equal(y.astype(np.complex128), np.sum(units, axis=0) * 2.0**power)


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_float_scalars_and_empty_arrays(n: int, op: str) -> None:
    tree = {
        "float": 0.1, "complex": 1 - 2j, "zero-d": np.array(0.25), "scalar": np.float32(1.5),
        "empty": np.zeros((4, 0), np.float32), "half": np.array([], np.float16),
    }  # fmt: skip
    times = n if op == "sum" else 1
    y = reduce([tree] * n, op=op)
    assert isinstance(y["float"], float)
    assert y["float"] == pytest.approx(0.1 * times, rel=1e-15)
    assert (type(y["complex"]), y["complex"]) == (complex, (1 - 2j) * times)
    assert (type(y["zero-d"]), y["zero-d"].shape, float(y["zero-d"])) == (np.ndarray, (), 0.25 * times)
    assert (type(y["scalar"]), float(y["scalar"])) == (np.float32, 1.5 * times)
    assert [(y[k].shape, y[k].dtype) for k in ("empty", "half")] == [((4, 0), np.float32), ((0,), np.float16)]


def test_a_tree_of_nothing_is_a_call_too() -> None:
    assert reduce([[], []]) == []
    assert reduce([{"a": None}] * 3) == {"a": None}
    assert testing.run(lambda comm: comm.compressed_allreduce(None), 2) == [None, None]


def test_too_many_ranks_for_the_digits_are_refused() -> None:
    from gccomm.lanes import integer_format

    assert integer_format(63, 32_768) == (32, 4)
    with pytest.raises((ValueError, GccommError), match="only over 32768"):
        integer_format(63, 32_769)
