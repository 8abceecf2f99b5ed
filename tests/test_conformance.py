"""What every codec must keep, over the table of ``conformance.py``: errors, dtypes, sizes, special values."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gccomm import testing
from gccomm.codecs import get_codec, list_codecs
from tests.conformance import (
    BIT_ROWS,
    ROWS,
    Row,
    all_shapes,
    assert_same_bits,
    assert_within,
    draw,
    over,
)
from tests.conformance_bounds import DTYPES, FORMATS, Array, block_numbers, reals

REAL_DTYPES = [dtype for dtype in DTYPES if dtype != "complex64"]
dtypes = pytest.mark.parametrize("dtype", DTYPES)
real_dtypes = pytest.mark.parametrize("dtype", REAL_DTYPES)


def test_every_codec_has_a_row() -> None:
    """Only what is registered after this file was loaded, by other tests, may lack one."""
    registered = {name for name in list_codecs() if get_codec(name).__module__.startswith("gccomm.")}
    assert {row.make().id for row in ROWS} == registered


@dtypes
@over(ROWS)
def test_sums_and_means_are_within_the_bound(row: Row, dtype: str) -> None:
    """Sizes around block, row and word edges; results keep dtype and shape, and inputs their bits."""
    for n, ops in ((1, ["sum"]), (3, ["sum", "mean"]), (4, ["mean"])):
        trees = all_shapes(n, dtype)
        before = [{key: x.copy() for key, x in tree.items()} for tree in trees]
        results = {op: row.simulate(trees, op)[0] for op in ops}
        for tree, copy in zip(trees, before, strict=True):
            assert_same_bits(tree, copy)
        for op, result in results.items():
            for key, x in trees[0].items():
                assert (result[key].dtype, result[key].shape) == (x.dtype, x.shape)
                assert_within(
                    row, [tree[key] for tree in trees], result[key], dtype, op, f"{key}, {op}, n={n}"
                )
        if len(ops) == 2:
            assert_mean_is_the_nth_part(row, results, dtype, n)


@pytest.mark.parametrize("size", [64 * 1024 - 1, 64 * 1024, 64 * 1024 + 1])
@over(ROWS)
def test_sizes_around_a_span_are_within_the_bound(row: Row, size: int) -> None:
    xs = [np.random.default_rng([size, r]).standard_normal(size).astype(np.float32) for r in range(4)]
    assert_within(row, xs, row.simulate(xs)[0], "float32")


def assert_mean_is_the_nth_part(row: Row, results: dict[str, Any], dtype: str, n: int) -> None:
    form = FORMATS[dtype]
    for key, mean in results["mean"].items():
        part = reals(results["sum"][key]) / n
        slack = np.abs(part) * (2 * form.unit + row.mean_unit(dtype)) + form.tiny
        assert (np.abs(reals(mean) - part) <= slack).all(), key


@over([row for row in BIT_ROWS if row.codec != "uniform"])
def test_a_mean_over_a_power_of_two_is_exact(row: Row) -> None:
    trees = [{"x": x} for x in row.draw(4)]
    total, mean = (row.simulate(trees, op)[0]["x"] for op in ("sum", "mean"))
    np.testing.assert_array_equal(mean, total / 4)


@over(ROWS)
def test_small_tensors_bypass_lossy_codecs(row: Row) -> None:
    trees = [{"a": np.ones(1023, np.float32), "b": np.ones((2, 512), np.float32)} for _ in range(2)]
    codec = row.make()
    _, stats = testing.simulate(trees, codec, error_feedback=False)
    exact = 1023 if codec.lossy else 0
    expected = {codec.id: 2047 - exact} | ({"two-words": exact} if exact else {})
    assert stats[0].codecs == expected
    assert codec.lossy != row.lossless


@over(ROWS)
def test_zeros_stay_exactly_zero(row: Row) -> None:
    """Tensors of every dtype; and, where promised, single coordinates."""
    for dtype in DTYPES:
        trees = [{k: np.zeros_like(x) for k, x in tree.items()} for tree in all_shapes(3, dtype)]
        for key, y in row.simulate(trees, "mean")[0].items():
            assert not reals(y).any(), (dtype, key)
    if row.zeros:
        xs = row.draw(3)
        for x in xs:
            x.reshape(-1)[::3] = 0
        assert not reals(row.simulate(xs)[0])[::3].any()


SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 5e-324}


@over(ROWS)
def test_subnormals(row: Row) -> None:
    rng = np.random.default_rng(1)
    for dtype, least in SMALLEST.items():
        kind = FORMATS[dtype].dtype
        units = [rng.integers(-60, 61, 2049) for _ in range(3)]
        xs = [(u * least).astype(kind) for u in units]
        assert max(np.abs(reals(x)).max() for x in xs) == 60 * least  # none was flushed to zero
        single = [np.full(1025, least).astype(kind)] * 3
        matrix = [np.resize(x, (30, 40)) for x in xs]
        for values in (xs, single, matrix):
            for op in ("sum", "mean"):
                assert_within(row, values, row.simulate(values, op)[0], dtype, op, dtype)


HUGE = {"float16": 65504.0, "bfloat16": 1e38, "float32": 1e38, "float64": 1e300}


@real_dtypes
@over(ROWS)
def test_huge_values(row: Row, dtype: str) -> None:
    """The mean of 1e38 is 1e38; a sum out of range is inf, never NaN."""
    kind, largest = FORMATS[dtype].dtype, FORMATS[dtype].largest
    rng = np.random.default_rng(2)
    flat = [np.full(2049, HUGE[dtype]).astype(kind) for _ in range(5)]
    many = [(rng.choice([-1, 1], 2049) * rng.random(2049) * largest).astype(kind) for _ in range(5)]
    ends = [np.full(1100, -largest).astype(kind) for _ in range(5)]
    matrix = [np.full((30, 40), largest).astype(kind) for _ in range(5)]
    for xs in (flat, many, ends, matrix):
        for op in ("sum", "mean"):
            y = row.simulate(xs, op)[0]
            assert_within(row, xs, y, dtype, op, op)
            if row.bits:
                assert not np.isnan(reals(y)).any()
    if row.bits:
        total = reals(row.simulate(ends, "sum")[0])
        sent = total != 0 if row.spoils == "tensor" else np.full(1100, True)
        assert sent.any()
        np.testing.assert_array_equal(total[sent], -np.inf)


def tainted(
    row: Row, rng: np.random.Generator, dtype: str
) -> tuple[list[Array], list[Array], dict[int, list[int]]]:
    """Return clean arrays, tainted ones of 6 blocks, and the tainted coordinates by block."""
    clean = [draw(rng, (2, 2500), dtype).reshape(row.shape) for _ in range(3)]
    places = {0: [5], 2: [2048, 2499], 4: [2500 + 1024], 5: [4548, 4999]}
    bad = [x.copy() for x in clean]
    lines = [x.reshape(-1) for x in bad]
    lines[1][5] = np.inf
    lines[0][2048], lines[2][2499] = np.nan, -np.nan
    lines[0][3524], lines[1][3524] = np.inf, -np.inf
    lines[2][4548], lines[0][4999] = -np.inf, np.nan
    for coordinates in places.values():
        for x in clean:
            x.reshape(-1)[coordinates] = 0
    return clean, bad, places


@real_dtypes
@over(ROWS)
def test_nonfinite_values_taint_what_shares_their_scale_alone(row: Row, dtype: str) -> None:
    clean, bad, places = tainted(row, np.random.default_rng(3), dtype)
    other = [{"a": x, "z": x[0]} for x in clean]
    mixed = [{"a": x, "z": y[0]} for x, y in zip(bad, clean, strict=True)]
    coordinates = [i for members in places.values() for i in members]
    touched = np.isin(np.arange(5000), coordinates)
    if row.spoils == "block":
        touched = np.isin(block_numbers(clean[0]), list(places))
    elif row.spoils == "tensor":
        touched[:] = True
    for op in ("sum", "mean"):
        expected, got = row.simulate(other, op)[0], row.simulate(mixed, op)[0]
        np.testing.assert_array_equal(got["z"], expected["z"])
        y = reals(got["a"])
        assert not np.isfinite(y[touched]).any()
        assert np.isnan(y[[2048, 2499, 3524, 4999] if row.spoils == "coordinate" else touched]).all()
        np.testing.assert_array_equal(y[~touched], reals(expected["a"])[~touched])


@over(ROWS)
def test_only_a_few_blocks_are_not_finite(row: Row) -> None:
    """A tensor all of NaN, and one of inf on one rank: NaN everywhere, and nothing else is."""
    xs = row.draw(2)
    tree = {"nan": xs[0] * np.nan, "x": xs[0], "inf": np.full_like(xs[0], np.inf)}
    other = {"nan": xs[1], "x": xs[1], "inf": xs[1]}
    y = row.simulate([tree, other], "mean")[0]
    assert np.isnan(y["nan"]).all()
    assert not np.isfinite(y["inf"]).any()
    assert_within(row, xs, y["x"], "float32", "mean")


def test_bfloat16_results_are_bfloat16() -> None:
    (y,), _ = testing.simulate([np.ones(2000, ml_dtypes.bfloat16)], "uniform")
    assert y.dtype == ml_dtypes.bfloat16
    assert (y == 1).all()
