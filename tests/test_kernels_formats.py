"""The native kernels' number formats: 16-bit floats, and integers in lanes and digits."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gccomm import kernels
from gccomm.lanes import integer_format, lanes
from tests.kernel_batches import WIRES, Array, Batch, Part, convert, level, normal

__all__ = ["level"]

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


@pytest.mark.parametrize(("dtype", "numpy"), [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)])
def test_all_halves_to_float32_and_back(level: str, dtype: str, numpy: Any) -> None:
    patterns = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    halves = patterns.view(numpy)
    wide = convert(patterns.view(WIRES[dtype]), dtype, "float32")
    expected = halves.astype(np.float32)
    real = ~np.isnan(expected)
    assert np.array_equal(wide[real].view(np.uint32), expected[real].view(np.uint32))
    assert np.isnan(wide[~real]).all()
    back = convert(wide, "float32", dtype).view(np.uint16)
    assert np.array_equal(back[real], patterns[real])
    assert np.isnan(back[~real].view(numpy).astype(np.float32)).all()


@pytest.mark.parametrize(("dtype", "numpy"), [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)])
def test_float32_to_halves_rounds_to_nearest_even(level: str, dtype: str, numpy: Any) -> None:
    patterns = np.arange(65536, dtype=np.uint32)
    finite = np.isfinite(patterns.astype(np.uint16).view(numpy).astype(np.float32))
    exact = patterns.astype(np.uint16)[finite].view(numpy).astype(np.float32).view(np.uint32)
    halfway = 1 << (12 if dtype == "float16" else 15)  # between neighbours, for normal numbers
    near = np.concatenate([exact + np.uint32(halfway + d) for d in (-1, 0, 1)] + [exact - 1, exact + 1])
    random = np.random.default_rng(1).integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    x = np.concatenate([near, random, np.float32([np.inf, -np.inf, 65519, 65520, 2**-25]).view(np.uint32)])
    x = x.view(np.float32)[~np.isnan(x.view(np.float32))]
    with np.errstate(over="ignore", under="ignore"):
        expected = x.astype(numpy).view(np.uint16)
    assert np.array_equal(convert(x, "float32", dtype).view(np.uint16), expected)


def test_nans_survive_every_conversion(level: str) -> None:
    x = np.array([0x7F800001, 0x7FC00000, 0xFF80FFFF, 0x7FFFFFFF], dtype=np.uint32).view(np.float32)
    for wire, numpy in [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16), ("float64", np.float64)]:
        assert np.isnan(convert(x, "float32", wire).view(numpy).astype(np.float64)).all()


@pytest.mark.parametrize("wire", ["float16", "bfloat16", "float32", "float64"])
def test_float_round_trip_leaves_the_residual(level: str, wire: str) -> None:
    x, residual = normal(2600), normal(2600, 1) * np.float32(1e-3)
    part = Part(x, residual=residual)
    batch, out = Batch(part), np.zeros(x.size, dtype=WIRES[wire])
    kernels.float_encode(*batch.head, 0, batch.blocks, kernels.address(out), kernels.DTYPE_CODES[wire])
    where = (kernels.address(out), kernels.DTYPE_CODES[wire])
    kernels.float_decode(*batch.head, 0, batch.blocks, *where, 3, False, True)
    assert np.array_equal(part.rest, (x + residual) - part.out)
    kernels.float_decode(*batch.head, 0, batch.blocks, *where, 3, True, False)
    sent = np.float32(x + residual) - part.rest
    assert np.array_equal(part.out, sent / np.float32(3))


def test_float_residual_is_kept_where_the_wire_overflows(level: str) -> None:
    x = np.array([1e6, 1.0, np.nan, -np.inf], dtype=np.float32)
    part = Part(x, residual=np.array([1, 2, 3, 4], dtype=np.float32))
    batch, out = Batch(part), np.zeros(x.size, dtype=np.float16)
    kernels.float_encode(*batch.head, 0, 1, kernels.address(out), kernels.DTYPE_CODES["float16"])
    assert part.rest.tolist() == [1, 0, 3, 4]


@pytest.mark.parametrize(("name", "numpy"), [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)])
@pytest.mark.parametrize("size", [0, 1, 31, 32, 1000])
def test_reduce_op_adds_in_float32(level: str, name: str, numpy: Any, size: int) -> None:
    signature = ctypes.CFUNCTYPE(
        None, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int), ctypes.c_void_p
    )
    a, b = normal(size, 2).astype(numpy), np.concatenate([normal(size, 3), normal(4)]).astype(numpy)
    expected = b.copy()
    expected[:size] = (a.astype(np.float32) + b[:size].astype(np.float32)).astype(numpy)
    add = signature(kernels.reduce_op(name))
    add(kernels.address(a), kernels.address(b), ctypes.byref(ctypes.c_int(size)), None)
    assert np.array_equal(b.view(np.uint16), expected.view(np.uint16))
    with pytest.raises(ValueError, match="no reduction"):
        kernels.reduce_op("float8")


def integer_batch(x: Array, n: int) -> Batch:
    """Return a batch of one tensor with the format that its range needs."""
    part = Part(x, x.dtype.name)
    bits = np.zeros(1, dtype=np.uint32)
    kernels.int_range(*Batch(part).head, kernels.address(bits))
    part.width, part.digits = integer_format(int(bits[0]), n)
    count = part.digits or 0
    return Batch(part, words=lambda p, length: count * length or -(-length // lanes(p.width)))


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("n", [1, 3, 1000])
def test_integer_sums_are_exact(level: str, dtype: str, n: int) -> None:
    info = np.iinfo(dtype)
    for bits in range(info.bits + 1):
        low, high = max(-(1 << bits), info.min), min((1 << bits) - 1, info.max)
        rng = np.random.default_rng(bits)
        x = np.concatenate(
            [rng.integers(low, high, 1030, dtype=dtype, endpoint=True), np.array([low, high], dtype)]
        )
        batch = integer_batch(x, n)
        words = np.zeros(batch.offsets[-1], dtype=np.uint32)
        kernels.int_encode(*batch.head, 0, batch.blocks, kernels.address(words), 0)
        total = words * np.uint32(n)
        lost = kernels.int_decode(*batch.head, 0, batch.blocks, kernels.address(total), 0, n)
        sums = [int(v) * n for v in x]
        fits = np.array([info.min <= s <= info.max for s in sums])
        assert lost == (~fits).sum()
        assert [int(v) for v, good in zip(batch.parts[0].out, fits, strict=True) if good] == [
            s for s, good in zip(sums, fits, strict=True) if good
        ]


@pytest.mark.parametrize(("dtype", "bits"), [("int8", 7), ("uint8", 8), ("int64", 63), ("uint64", 64)])
def test_integer_range_of_extremes(level: str, dtype: str, bits: int) -> None:
    info, found = np.iinfo(dtype), np.zeros(2, dtype=np.uint32)
    extremes = Part(np.array([info.min, info.max], dtype=dtype), dtype)
    kernels.int_range(*Batch(extremes, Part(np.zeros(3, dtype=dtype), dtype)).head, kernels.address(found))
    assert found.tolist() == [bits, 0]


def test_integers_without_destination_are_counted_only(level: str) -> None:
    batch = integer_batch(np.array([100, -100, 3], dtype=np.int8), 2)
    words = np.zeros(batch.offsets[-1], dtype=np.uint32)
    kernels.int_encode(*batch.head, 0, 1, kernels.address(words), 0)
    words *= np.uint32(2)
    batch.table["dst"] = 0
    assert kernels.int_decode(*batch.head, 0, 1, kernels.address(words), 0, 2) == 2
    assert batch.parts[0].out.tolist() == [77, 77, 77]


def test_booleans_are_a_logical_or(level: str) -> None:
    x = np.array([0, 1, 255, 0], dtype=np.uint8).view(np.bool_)
    batch = integer_batch(x, 5)
    words = np.zeros(batch.offsets[-1], dtype=np.uint32)
    kernels.int_encode(*batch.head, 0, 1, kernels.address(words), 0)
    words *= np.uint32(5)
    assert kernels.int_decode(*batch.head, 0, 1, kernels.address(words), 0, 5) == 0
    assert batch.parts[0].out.view(np.uint8).tolist() == [0, 1, 1, 0]
