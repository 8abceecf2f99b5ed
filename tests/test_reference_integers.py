"""Integers, bool and plain float sums of the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gccomm import lanes as ln
from gccomm.kernels import reference

Array = np.ndarray[Any, Any]
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
SETTINGS = settings(derandomize=True, deadline=None, max_examples=60)


def sum_integers(tensors: list[Array], extra_bits: int = 0) -> tuple[Array, int]:
    """Add integer tensors as the ranks would; `extra_bits` widens the agreed range."""
    n, dtype = len(tensors), str(tensors[0].dtype)
    bits = max(int(reference.integer_range(np, x)) for x in tensors)
    width, digits = ln.integer_format(min(64, bits + extra_bits), n)
    words = np.sum(
        [reference.integer_encode(np, x, width=width, digits=digits) for x in tensors],
        axis=0,
        dtype=np.uint32,
    )
    values, misfits = reference.integer_decode(
        np, words, length=tensors[0].shape[1], width=width, digits=digits, dtype=dtype
    )
    return values, int(misfits)


@st.composite
def integer_tensors(draw: st.DrawFn) -> tuple[list[Array], int]:
    dtype = draw(st.sampled_from(INTEGERS))
    info = np.iinfo(dtype)
    bits = draw(st.integers(0, info.bits))
    low, high = max(int(info.min), -(2**bits)), min(int(info.max), 2**bits - 1)
    value = st.one_of(st.sampled_from([low, high, 0, high // 2]), st.integers(low, high))
    n, length = draw(st.sampled_from([1, 2, 3, 17])), draw(st.integers(1, 5))
    rows = st.lists(value, min_size=length, max_size=length)
    tensors = [np.array([draw(rows)], dtype=dtype) for _ in range(n)]
    return tensors, draw(st.sampled_from([0, 0, 20, 40]))


@SETTINGS
@given(integer_tensors())
def test_integers_are_summed_exactly(case: tuple[list[Array], int]) -> None:
    tensors, extra_bits = case
    info = np.iinfo(tensors[0].dtype)
    exact = [sum(int(x[0, i]) for x in tensors) for i in range(tensors[0].shape[1])]
    values, misfits = sum_integers(tensors, extra_bits)
    assert values.dtype == tensors[0].dtype
    assert misfits == sum(not info.min <= total <= info.max for total in exact)
    assert [int(v) % 2**info.bits for v in values[0]] == [total % 2**info.bits for total in exact]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_ends_of_every_dtype(dtype: str) -> None:
    info = np.iinfo(dtype)
    ends = np.array([[info.min, info.max, 0]], dtype=dtype)
    zeros = np.zeros_like(ends)
    values, misfits = sum_integers([ends, zeros, zeros])
    np.testing.assert_array_equal(values, ends)
    assert misfits == 0
    _, misfits = sum_integers([ends, ends])
    assert misfits == (1 if info.min == 0 else 2)


@pytest.mark.parametrize("n", [2, 32_768])
@pytest.mark.parametrize("dtype", ["int64", "uint64", "uint32"])
def test_digits_have_room_for_the_carries(n: int, dtype: str) -> None:
    x = np.array([[np.iinfo(dtype).max, np.iinfo(dtype).min, 12345]], dtype=dtype)
    width, digits = ln.integer_format(int(reference.integer_range(np, x)), n)
    words = reference.integer_encode(np, x, width=width, digits=digits) * np.uint32(n)
    limits = np.iinfo(dtype)
    expected = [int(v) * n for v in x[0]]
    values, misfits = reference.integer_decode(np, words, length=3, width=width, digits=digits, dtype=dtype)
    assert [int(v) % 2**limits.bits for v in values[0]] == [v % 2**limits.bits for v in expected]
    assert misfits == sum(not limits.min <= v <= limits.max for v in expected)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_range_is_the_smallest(dtype: str) -> None:
    info = np.iinfo(dtype)
    values = {0, 1, 2, 3, info.max, info.max - 1, info.min, info.min // 2, info.max // 2}
    values |= {1 << k for k in range(info.bits - 1)} | {-(1 << k) for k in range(info.bits - 1)}
    for value in values:
        if not info.min <= value <= info.max:
            continue
        bits = int(reference.integer_range(np, np.array([0, value], dtype)))
        assert -(2**bits) <= value < 2**bits
        assert bits == 0 or not -(2 ** (bits - 1)) <= value < 2 ** (bits - 1)


def test_range_of_nothing_and_of_bool() -> None:
    assert reference.integer_range(np, np.zeros((0, 4), np.int64)) == 0
    assert reference.integer_range(np, np.array([False])) == 0
    assert reference.integer_range(np, np.array([True])) == 1


def test_bool_is_a_logical_or() -> None:
    a, b = np.array([[True, True, False]]), np.array([[True, False, False]])
    values, misfits = sum_integers([a, b, b])
    assert values.dtype == np.bool_
    assert values.tolist() == [[True, True, False]]
    assert misfits == 0


@pytest.mark.parametrize("wire", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_float_wire_values_and_what_they_leave(wire: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 100)).astype(dtype)
    wide = np.float64 if dtype == "float64" else np.float32
    residual = (rng.standard_normal((3, 100)) * 1e-3).astype(wide)
    values, left = reference.float_encode(np, x, wire=wire, residual=residual)
    assert left.dtype == wide
    v: Array = np.add(x.astype(wide), residual)
    np.testing.assert_array_equal(reference.widen(np, values) + left, v)
    precision = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 0}[wire]
    assert (np.abs(left) <= precision * np.abs(v) + 2.0**-25).all()
    total = reference.float_decode(np, values, n=3, mean=False, dtype=dtype)
    mean = reference.float_decode(np, values, n=3, mean=True, dtype=dtype)
    assert mean.dtype == total.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(total, reference.widen(np, values).astype(dtype))
    np.testing.assert_allclose(mean, total.astype(np.float64) / 3, rtol=2e-3, atol=1e-6)


def test_float_wire_keeps_the_old_residual_where_it_overflows() -> None:
    x = np.array([[1e6, np.nan, -np.inf, 1.0]], np.float32)
    old = np.array([[0.5, 0.25, 0.125, 0.0]], np.float32)
    values, left = reference.float_encode(np, x, wire="float16", residual=old)
    assert np.isfinite(values).tolist() == [[False, False, False, True]]
    np.testing.assert_array_equal(left, old)
    _, left = reference.float_encode(np, x, wire="float16")
    np.testing.assert_array_equal(left, np.zeros_like(x))
