"""``topkc``: every rank sends the same chunks, those of most energy, and keeps the rest to the last bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gccomm
from gccomm import testing
from gccomm.codecs import get_codec
from gccomm.codecs.topkc import TopKC
from gccomm.errors import NegotiationError

Array = np.ndarray[Any, Any]
CHUNK = 64


def heavy(n: int, size: int, seed: int = 0, dtype: Any = np.float32) -> list[Array]:
    """Return one array a rank whose chunks differ in magnitude, the same ones on all ranks."""
    rng = np.random.default_rng([seed, size])
    scale = np.repeat(np.exp(1.5 * rng.standard_normal(-(-size // CHUNK))), CHUNK)[:size]
    return [(scale * rng.standard_normal(size)).astype(dtype) for _ in range(n)]


def energies(xs: list[Array], chunk: int = CHUNK) -> Array:
    """Return the sum over ranks of each chunk's squared norm, in float64."""
    size = xs[0].size
    padded = np.zeros((len(xs), -(-size // chunk) * chunk))
    padded[:, :size] = xs
    return np.asarray((padded.reshape(len(xs), -1, chunk) ** 2).sum(axis=(0, 2)))


def chosen(xs: list[Array], fraction: float, chunk: int = CHUNK) -> Array:
    """Return a mask of the coordinates that should be sent."""
    sums = energies(xs, chunk)
    count = int(np.ceil(fraction * len(sums) - 1e-9))
    mask = np.zeros(len(sums), dtype=bool)
    mask[np.argsort(-sums, kind="stable")[:count]] = True
    return np.repeat(mask, chunk)[: xs[0].size]


def run_steps(trees: list[list[dict[str, Any]]], codec: str, **options: Any) -> list[Any]:
    """Reduce step by step; return each rank's (results, residuals)."""

    def program(comm: gccomm.Communicator) -> tuple[list[Any], dict[str, Array]]:
        reducer = gccomm.Reducer(codec, op="sum", exact_below=0, **options)
        results = [reducer(step[comm.rank]) for step in trees]
        return results, reducer.state_dict()["residuals"]

    return testing.run(program, len(trees[0]))


@pytest.mark.parametrize("values", ["bf16", "lanes"])
@pytest.mark.parametrize(("n", "size"), [(1, 6400), (3, 6400), (4, 6431), (5, 40), (2, 1), (16, 9999)])
def test_the_chunks_of_most_energy_are_sent(values: str, n: int, size: int) -> None:
    xs = heavy(n, size)
    ys, stats = testing.simulate(xs, f"topkc:values={values},fraction=0.2", exact_below=0)
    mask = chosen(xs, 0.2)
    assert 0 < mask.sum() <= 0.2 * size + CHUNK
    for y in ys:
        np.testing.assert_array_equal(y, ys[0])
        assert not y[~mask].any()
    exact = np.sum(xs, axis=0, dtype=np.float64)
    magnitude = np.abs(xs).max(axis=0) if values == "bf16" else np.abs(xs).max()
    unit = 2.0**-8 * n if values == "bf16" else n / 127
    assert (np.abs(ys[0] - exact)[mask] <= (n * unit * magnitude * np.ones(size))[mask]).all()
    assert stats[0].codecs == {"topkc": size}


def test_equal_energies_are_decided_by_the_order() -> None:
    ys, _ = testing.simulate([np.ones(10 * CHUNK, np.float32)] * 3, "topkc:fraction=0.3", exact_below=0)
    np.testing.assert_array_equal(ys[0], np.repeat([3.0, 0.0], [3 * CHUNK, 7 * CHUNK]))


def test_energies_of_all_ranks_count() -> None:
    """A chunk that is largest on no rank has the largest sum."""
    x = np.zeros((3, 4 * CHUNK), dtype=np.float32)
    x[0, 0], x[1, CHUNK], x[:, 2 * CHUNK] = 1, 1, 0.75
    ys, _ = testing.simulate(list(x), "topkc:fraction=0.25", exact_below=0)
    np.testing.assert_array_equal(np.flatnonzero(ys[0]), [2 * CHUNK])


def test_chunks_without_energy_are_not_sent() -> None:
    x = np.zeros(100 * CHUNK, dtype=np.float32)
    x[7 * CHUNK + 3] = 2.5
    full, few = (
        testing.simulate([v] * 2, "topkc:fraction=0.5", exact_below=0)[1][0].wire_bytes
        for v in (np.ones_like(x), x)
    )
    assert full - few == 2 * 49 * CHUNK


def test_the_smallest_energy_counts_as_some() -> None:
    """1e-30 of the largest is still more than nothing."""
    x = np.zeros(4 * CHUNK, dtype=np.float32)
    x[0], x[3 * CHUNK + 1] = 1, 1e-30
    (y,), _ = testing.simulate([x], "topkc:fraction=0.5", exact_below=0)
    np.testing.assert_array_equal(np.flatnonzero(y), [0, 3 * CHUNK + 1])


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_residuals_are_what_was_not_sent(dtype: str) -> None:
    """One rank, so that the result is what the rank sent: both add up to the input, to the last bit."""
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    xs = heavy(1, 5000, dtype=kind)
    for fraction in (0.1, 1.0):
        ((results, residuals),) = run_steps([[{"x": xs[0]}]], f"topkc:fraction={fraction}")
        sent = np.asarray(results[0]["x"]).astype(np.float64)
        assert residuals["x"].dtype == (np.float64 if dtype == "float64" else np.float32)
        if dtype != "float16":  # its result is rounded to fewer digits than bfloat16 has range for
            np.testing.assert_array_equal(sent + residuals["x"], xs[0].astype(np.float64))
        mask = chosen([x.astype(np.float64) for x in xs], fraction)
        np.testing.assert_array_equal(residuals["x"][~mask], xs[0].astype(np.float64)[~mask])
        assert (np.abs(residuals["x"]) <= 2.0**-8 * np.abs(xs[0].astype(np.float64)))[mask].all()


@pytest.mark.parametrize("values", ["bf16", "lanes"])
def test_nothing_is_lost_over_steps(values: str) -> None:
    """Inputs of all steps = results of all steps + residuals."""
    n, steps = 3, 12
    trees = [[{"x": x} for x in heavy(n, 3000, step)] for step in range(steps)]
    outcome = run_steps(trees, f"topkc:values={values}")
    given = np.sum([tree["x"] for step in trees for tree in step], axis=0, dtype=np.float64)
    got = np.sum([y["x"] for y in outcome[0][0]], axis=0, dtype=np.float64)
    left = np.sum([residuals["x"] for _, residuals in outcome], axis=0, dtype=np.float64)
    magnitude = np.sum([np.abs(tree["x"]) for step in trees for tree in step], axis=0, dtype=np.float64)
    # Sums of bfloat16 are rounded on the way, where no residual sees it.
    lost = np.abs(given - got - left)
    assert (lost <= magnitude * (2.0**-7 if values == "bf16" else 2.0**-16) + 1e-4).all()
    assert np.abs(left).max() < 10 * np.abs(given).max()


def test_every_coordinate_is_sent_in_time() -> None:
    """The same input in every step: means of results approach it, whatever its small chunks."""
    x = heavy(1, 1280)[0]

    def program(comm: gccomm.Communicator) -> Array:
        reducer = gccomm.Reducer("topkc:fraction=0.2", op="mean", exact_below=0)
        return np.mean([reducer({"x": x})["x"] for _ in range(400)], axis=0)

    mean = testing.run(program, 2)[0]
    np.testing.assert_allclose(mean, x, atol=np.abs(x).max() / 20)


def test_feedback_is_on_by_default() -> None:
    ((_, on),) = run_steps([[{"x": heavy(1, 2000)[0]}]], "topkc")
    ((_, off),) = run_steps([[{"x": heavy(1, 2000)[0]}]], "topkc", error_feedback=False)
    assert set(on) == {"x"}
    assert not off


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("values", ["bf16", "lanes"])
def test_a_tensor_that_is_not_finite_is_nan_everywhere(values: str, value: float) -> None:
    good = [{"a": x, "b": 2 * x, "c": 3 * x} for x in heavy(2, 2000)]
    bad = [{key: x.copy() for key, x in tree.items()} for tree in good]
    bad[1]["b"][77] = value
    codec = f"topkc:values={values}"
    with_bad, without = run_steps([good, bad], codec), run_steps([good, good], codec)
    once = run_steps([good], codec)
    for rank in range(2):
        results, residuals = with_bad[rank]
        assert np.isnan(results[1]["b"]).all()
        np.testing.assert_array_equal(residuals["b"], once[rank][1]["b"])
        for key in "ac":
            np.testing.assert_array_equal(results[1][key], without[rank][0][1][key])
            np.testing.assert_array_equal(residuals[key], without[rank][1][key])
    ((results, residuals), _) = run_steps([bad], codec)
    assert np.isnan(results[0]["b"]).all()
    assert not residuals["b"].any()


@pytest.mark.parametrize("values", ["bf16", "lanes"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_zeros_stay_zero(values: str, dtype: str) -> None:
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    outcome = run_steps(
        [[{"x": np.zeros(2000, kind), "y": np.ones(2000, kind)}] * 2], f"topkc:values={values}"
    )
    for results, residuals in outcome:
        assert not np.asarray(results[0]["x"]).any()
        assert not residuals["x"].any()
        assert np.asarray(results[0]["y"]).any()


EXTREMES = [("float32", 3e38), ("float32", 1e-43), ("float64", 1e308), ("float64", 1e-310), ("float16", 6e4)]


@pytest.mark.parametrize("values", ["bf16", "lanes"])
@pytest.mark.parametrize(("dtype", "scale"), EXTREMES)
def test_huge_and_tiny_numbers(values: str, dtype: str, scale: float) -> None:
    """The mean of 3e38 is 3e38; a sum out of range is inf; residuals stay finite."""
    rng = np.random.default_rng(3)
    shape = rng.choice([-1, 1], 1000) * rng.uniform(0.5, 1, 1000)
    x = (shape * scale).astype(dtype)
    codec = f"topkc:fraction=1,values={values}"
    (mean, *_), _ = testing.simulate([x] * 5, codec, "mean", exact_below=0)
    step = 2.0**-8 if values == "bf16" else 5 / 127
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(mean.astype(np.float64) / scale, shape, atol=5 * step + 1e-2)
        total = testing.simulate([x] * 5, codec, "sum", exact_below=0)[0][0]
        assert (np.sign(total) == np.sign(shape)).mean() > 0.99
    for _, residuals in run_steps([[{"x": x}] * 5], codec):
        assert np.isfinite(residuals["x"]).all()
        assert np.abs(residuals["x"]).max() <= 5 * step * scale * 1.01


@pytest.mark.parametrize("values", ["bf16", "lanes"])
def test_tensors_travel_together_or_alone(values: str) -> None:
    """A result does not depend on what else is reduced, nor on pieces."""
    names = {"a": 3000, "b": 999, "c": 64, "d": 1, "e": 5000, "f": 63}
    trees = [{k: heavy(3, size)[r] for k, size in names.items()} for r in range(3)]
    for tree in trees:
        tree["a"] = tree["a"].reshape(5, 600)
        tree["z"] = tree["e"].astype(np.float64)
        tree["empty"] = np.zeros((0, 3), np.float32)
    codec = f"topkc:values={values}"
    whole = testing.simulate(trees, codec, exact_below=0)[0][0]
    for key in (*names, "z", "empty"):
        alone = testing.simulate([{key: t[key]} for t in trees], codec, exact_below=0)[0][0]
        np.testing.assert_array_equal(alone[key], whole[key], err_msg=key, strict=True)
    for options in ({"one_host": False}, {"piece_coordinates": 1}, {"bucket_bytes": 5000}):
        cut: Any = testing.simulate(trees, codec, exact_below=0, **options)[0][0]
        for key in whole:
            np.testing.assert_array_equal(cut[key], whole[key], err_msg=key)


@pytest.mark.parametrize("values", ["bf16", "lanes"])
def test_more_blocks_than_are_encoded_at_once(values: str) -> None:
    """More than 1024 of one tensor are chosen."""
    size = 1300 * 1024 + 17
    x = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    ys, stats = testing.simulate([x, x], f"topkc:fraction=1,values={values}")
    assert np.abs(ys[1] - 2 * x).max() <= (0.05 if values == "bf16" else 0.2)
    assert stats[0].messages == 3 + (values == "lanes")


def test_the_wire_carries_energies_and_values() -> None:
    size, fraction = 1 << 16, 0.25
    header, tag = 256 * 4, 4
    chunks = size // CHUNK
    x = heavy(2, size)
    _, (bf16, _) = testing.simulate(x, f"topkc:fraction={fraction}")
    assert bf16.wire_bytes == header + 4 * chunks + 2 * int(fraction * size)
    assert bf16.messages == 3
    _, (lanes, _) = testing.simulate(x, f"topkc:fraction={fraction},values=lanes,wire_bits=4")
    blocks = int(fraction * size) // 1024
    assert lanes.wire_bytes == header + 4 * chunks + int(fraction * size) // 2 + 4 * blocks + tag


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"fraction": 0}, "`fraction` must be .*above 0.*got 0"),
        ({"fraction": 1.5}, r"`fraction` must be .*got 1\.5"),
        ({"fraction": float("nan")}, "`fraction` must be .*got nan"),
        ({"fraction": "0.1"}, r"`fraction` must be .*'0\.1' of type str"),
        ({"chunk": 0}, "`chunk` must be a number of coordinates.*got 0"),
        ({"chunk": 2.0}, r"`chunk` must be .*2\.0"),
        ({"values": "fp16"}, "`values` must be 'bf16' or 'lanes', got 'fp16'"),
        ({"wire_bits": 7}, "`wire_bits` must be .*got 7"),
        ({"wire_bits": 4}, "`wire_bits` .*does nothing with values=.bf16., got 4"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        TopKC(**options)


def test_too_many_ranks_for_lanes_are_refused() -> None:
    TopKC().require_size(1 << 20, 4)
    TopKC().require_feedback(4)
    with pytest.raises(NegotiationError, match="65537 ranks do not fit in lanes of 2 bits"):
        TopKC(values="lanes", wire_bits=2).require_size(65537, 4)
    with pytest.raises(NegotiationError, match="would diverge"):
        TopKC(values="lanes", wire_bits=2).require_feedback(4)


def test_what_tables_show() -> None:
    assert (get_codec("topkc").sums_as, get_codec("topkc:values=lanes").sums_as) == (
        "bfloat16",
        "integer lanes",
    )
    assert TopKC().biased
    assert TopKC(0.25, 32).config() == {
        "id": "topkc", "fraction": 0.25, "chunk": 32, "values": "bf16", "wire_bits": 8,
    }  # fmt: skip
