"""What every codec must keep, over every configuration in the table of ``conformance.py``."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gccomm import testing
from gccomm.codecs import get_codec, list_codecs
from tests.conformance import (
    BIT_ROWS,
    DTYPES,
    FORMATS,
    NOISY_ROWS,
    ROWS,
    Row,
    all_shapes,
    assert_same_bits,
    assert_within,
    block_numbers,
    draw,
    reals,
    same_bits,
)

Array = np.ndarray[Any, Any]
REAL_DTYPES = [dtype for dtype in DTYPES if dtype != "complex64"]
rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
bit_rows = pytest.mark.parametrize("row", BIT_ROWS, ids=lambda row: row.name)
noisy_rows = pytest.mark.parametrize("row", NOISY_ROWS, ids=lambda row: row.name)
dtypes = pytest.mark.parametrize("dtype", DTYPES)
real_dtypes = pytest.mark.parametrize("dtype", REAL_DTYPES)


def test_every_codec_has_a_row() -> None:
    assert {row.make().id for row in ROWS} == set(list_codecs())


@rows
def test_configuration_round_trips(row: Row) -> None:
    codec = row.make()
    config = json.loads(json.dumps(codec.config()))
    again = get_codec(config)
    assert again == codec
    assert hash(again) == hash(codec)
    assert again.config() == codec.config() == config
    assert again.fingerprint == codec.fingerprint
    assert eval(repr(codec), {type(codec).__name__: type(codec)}) == codec
    assert codec.lossy != row.lossless or row.name == "two words"


def test_configurations_differ_from_each_other() -> None:
    distinct = {row.codec for row in ROWS}
    assert (
        len({row.make() for row in ROWS})
        == len({row.make().fingerprint for row in ROWS})
        == len(distinct) - 1
    )


@dtypes
@rows
def test_sums_and_means_are_within_the_bound(row: Row, dtype: str) -> None:
    """Sizes around block, row and word edges; results keep dtype and shape, and inputs their bits."""
    for n in (1, 3, 4):
        trees = all_shapes(n, dtype)
        before = [{key: x.copy() for key, x in tree.items()} for tree in trees]
        results = {op: row.simulate(trees, op)[0] for op in ("sum", "mean")}
        for tree, copy in zip(trees, before, strict=True):
            assert_same_bits(tree, copy)
        for op, result in results.items():
            for key, x in trees[0].items():
                assert (result[key].dtype, result[key].shape) == (x.dtype, x.shape)
                assert_within(
                    row, [tree[key] for tree in trees], result[key], dtype, op, f"{key}, {op}, n={n}"
                )
        assert_mean_is_the_nth_part(row, results, dtype, n)


def assert_mean_is_the_nth_part(row: Row, results: dict[str, Any], dtype: str, n: int) -> None:
    form = FORMATS[dtype]
    for key, mean in results["mean"].items():
        part = reals(results["sum"][key]) / n
        slack = np.abs(part) * (2 * form.unit + row.mean_unit(dtype)) + form.tiny
        assert (np.abs(reals(mean) - part) <= slack).all(), key
        if row.bits and n in (1, 4) and dtype in ("float32", "float64"):
            np.testing.assert_array_equal(reals(mean), part, err_msg=key)


@rows
def test_small_tensors_bypass_lossy_codecs(row: Row) -> None:
    trees = [{"a": np.ones(1023, np.float32), "b": np.ones((2, 512), np.float32)} for _ in range(2)]
    codec = row.make()
    _, stats = testing.simulate(trees, codec)
    exact = 1023 if codec.lossy else 0
    expected = {codec.id: 2047 - exact} | ({"two-words": exact} if exact else {})
    assert stats[0].codecs == expected


@dtypes
@rows
def test_zeros_stay_exactly_zero(row: Row, dtype: str) -> None:
    trees = [{k: np.zeros_like(x) for k, x in tree.items()} for tree in all_shapes(3, dtype)]
    for op in ("sum", "mean"):
        for key, y in row.simulate(trees, op)[0].items():
            assert not reals(y).any(), key


SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 5e-324}


@real_dtypes
@rows
def test_subnormals(row: Row, dtype: str) -> None:
    rng = np.random.default_rng(1)
    kind = FORMATS[dtype].dtype
    units = [rng.integers(-60, 61, 2049) for _ in range(3)]
    xs = [(u * SMALLEST[dtype]).astype(kind) for u in units]
    assert max(np.abs(reals(x)).max() for x in xs) == 60 * SMALLEST[dtype]  # none was flushed to zero
    single = [np.full(1025, SMALLEST[dtype]).astype(kind)] * 3
    for values in (xs, single):
        for op in ("sum", "mean"):
            assert_within(row, values, row.simulate(values, op)[0], dtype, op)


HUGE = {"float16": 65504.0, "bfloat16": 1e38, "float32": 1e38, "float64": 1e300}


@real_dtypes
@rows
def test_huge_values(row: Row, dtype: str) -> None:
    """The mean of 1e38 is 1e38; a sum out of range is inf, never NaN."""
    kind = FORMATS[dtype].dtype
    largest = FORMATS[dtype].largest
    rng = np.random.default_rng(2)
    flat = [np.full(2049, HUGE[dtype]).astype(kind) for _ in range(5)]
    mixed = [(rng.choice([-1, 1], 2049) * rng.random(2049) * largest).astype(kind) for _ in range(5)]
    ends = [np.full(1100, -largest).astype(kind) for _ in range(5)]
    for xs in (flat, mixed, ends):
        for op in ("sum", "mean"):
            y = row.simulate(xs, op)[0]
            assert_within(row, xs, y, dtype, op)
            if row.bits:
                assert not np.isnan(reals(y)).any()
    if row.bits:
        total = reals(row.simulate(ends, "sum")[0])
        np.testing.assert_array_equal(total, -np.inf)


def tainted(rng: np.random.Generator, dtype: str) -> tuple[list[Array], list[Array], dict[int, list[int]]]:
    """Return clean arrays, tainted ones of 6 blocks, and the tainted coordinates by block."""
    clean = [draw(rng, (2, 2500), dtype) for _ in range(3)]
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
@rows
def test_nonfinite_values_taint_their_block_alone(row: Row, dtype: str) -> None:
    clean, bad, places = tainted(np.random.default_rng(3), dtype)
    blocks = block_numbers(clean[0])
    for op in ("sum", "mean"):
        expected, got = reals(row.simulate(clean, op)[0]), reals(row.simulate(bad, op)[0])
        coordinates = [i for members in places.values() for i in members]
        touched = np.isin(blocks, list(places)) if row.bits else np.isin(np.arange(5000), coordinates)
        assert np.isin(blocks[coordinates], list(places)).all()
        assert not np.isfinite(got[touched]).any()
        assert np.isnan(got[touched if row.bits else [2048, 2499, 3524, 4999]]).all()
        np.testing.assert_array_equal(got[~touched], expected[~touched])


@rows
def test_results_are_a_function_of_seed_and_step(row: Row) -> None:
    trees = all_shapes(3, "float32")
    first = row.simulate(trees, seed=5)[0]
    assert_same_bits(row.simulate(trees, seed=5)[0], first)
    other_seed = row.simulate(trees, seed=6)[0]
    next_step = row.simulate(trees, seed=5, steps=2)[0]
    assert_same_bits(row.simulate(lambda _: trees, seed=5, steps=2)[0], next_step)
    for other in (other_seed, next_step):
        for key in ("1023", "1024", "3x700", "5x1100"):
            assert same_bits(other[key], first[key]) != row.unbiased, key


@noisy_rows
def test_noise_depends_on_the_key(row: Row) -> None:
    x = all_shapes(3, "float32")
    named = [{"a": tree["2049"], "b": tree["2049"]} for tree in x]
    result = row.simulate(named)[0]
    assert not same_bits(result["a"], result["b"])


@noisy_rows
def test_rounding_has_mean_zero(row: Row) -> None:
    xs = [draw(np.random.default_rng([4, rank]), (1500,), "float32") for rank in range(3)]
    exact = np.sum([reals(x) for x in xs], axis=0)
    errors = np.array([reals(row.simulate(xs, seed=seed)[0]) - exact for seed in range(120)])
    totals = errors.mean(axis=1)  # independent between seeds, whatever the coordinates have in common
    assert abs(totals.mean()) <= 5 * totals.std(ddof=1) / np.sqrt(len(totals))
    assert np.abs(errors).max() > 0


@dtypes
@bit_rows
def test_fusion_is_invisible(row: Row, dtype: str) -> None:
    """The same bits alone or with others, for any bucket or piece, one host or many."""
    trees = all_shapes(3, dtype)
    fused = row.simulate(trees)[0]
    for key in ("1025", "3x700", "2x3x512"):
        alone = row.simulate([{key: tree[key]} for tree in trees])[0]
        assert_same_bits(alone[key], fused[key])
        wrapped = [{"first": tree["2049"], key: tree[key], "zzz": tree["31"]} for tree in trees]
        assert_same_bits(row.simulate(wrapped)[0][key], fused[key])
    for bucket_bytes, piece in ((1, 512 * 1024), (5000, 512 * 1024), (25 << 20, 1), (25 << 20, 3000)):
        for one_host in (True, False):
            options: dict[str, Any] = {"bucket_bytes": bucket_bytes, "piece_coordinates": piece}
            assert_same_bits(row.simulate(trees, one_host=one_host, **options)[0], fused)


@pytest.mark.parametrize("op", ["sum", "mean"])
@bit_rows
def test_threads_give_the_bits_of_lockstep(row: Row, op: str) -> None:
    n = 3
    trees = {dtype: all_shapes(n, dtype) for dtype in DTYPES}
    whole = [{dtype: trees[dtype][rank] for dtype in DTYPES} for rank in range(n)]
    options: Any = {"op": op, "codec": row.codec, "exact_below": row.exact_below}
    results = testing.run(lambda comm: comm.compressed_allreduce(whole[comm.rank], **options), n)
    codec = row.make()
    expected, _ = testing.simulate(whole, codec, op, exact_below=row.exact_below)
    for result in results:
        for dtype in DTYPES:
            assert_same_bits(result[dtype], expected[0][dtype])


@pytest.mark.parametrize("op", ["sum", "mean"])
@rows
def test_threads_are_within_the_bound(row: Row, op: str) -> None:
    n = 2
    trees = all_shapes(n, "float32", seed=9)
    options: Any = {"op": op, "codec": row.make(), "exact_below": row.exact_below}
    results = testing.run(lambda comm: comm.compressed_allreduce(trees[comm.rank], **options), n)
    for key in trees[0]:
        assert_within(row, [tree[key] for tree in trees], results[0][key], "float32", op, key)
        assert_same_bits(results[1][key], results[0][key])


@rows
def test_worst_cases_leave_no_lane(row: Row) -> None:
    """All ranks at the maximum: the simulation compares every lane's sum with its range."""
    signs = np.where(np.random.default_rng(6).random(1024) < 0.5, -1, 1)
    ends = {"plus": np.ones(1024), "minus": -np.ones(1024), "mixed": signs}
    tree = {name: (x * 1.9999999).astype(np.float32) for name, x in ends.items()}
    for n in (*range(1, 18), 64):
        y = row.simulate([tree] * n, "mean")[0]
        for name, x in tree.items():
            assert_within(row, [x] * n, y[name], "float32", "mean", f"{name}, n={n}")


def test_bfloat16_results_are_bfloat16() -> None:
    (y,), _ = testing.simulate([np.ones(2000, ml_dtypes.bfloat16)], "uniform")
    assert y.dtype == ml_dtypes.bfloat16
    assert (y == 1).all()
