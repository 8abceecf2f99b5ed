"""Sums of lanes that the back end makes chunk by chunk: the bits of the virtual ranks, in all cases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gccomm
from gccomm.testing import simulate

CODECS = [
    "uniform:wire_bits=4",
    "uniform:wire_bits=5",
    "uniform:wire_bits=16",
    "rotated:wire_bits=8",
    "rotated:wire_bits=5,rotations=2",
    "qsgd-mn:wire_bits=8",
    "qsgd-mn-ts:wire_bits=8",
    "global-qsgd",
]
SHAPES = [(64 * 1024,), (64 * 1024 + 1,), (3 * 64 * 1024 - 5,), (70, 1000), (130, 513)]


@pytest.fixture(params=["timed", "past the caches", "near each other", "some near"])
def comm(world: Any, request: pytest.FixtureRequest) -> Iterator[gccomm.Communicator]:
    if world.size not in (2, 3):
        pytest.skip("only two or three ranks join all data of the others")
    if world.size == 3 and request.param_index in (1, 2):
        pytest.skip("two ranks do these")
    parent = world.Dup()
    with gccomm.init("mpi", comm=parent) as made:
        if not made._place.sums_lanes:
            pytest.skip("ranks share no memory")
        state = made._backend._channel.window._state
        if request.param_index == 1:
            state["forced"] = 2
        if request.param_index == 2 or (request.param_index == 3 and world.rank % 2 == 1):
            state["times"], state["samples"] = 1, 100  # as if either way took as long
        yield made
    parent.Free()


def draw(rank: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng([rank, *shape])
    return (rng.standard_normal(shape) * np.exp(rng.standard_normal(shape))).astype(dtype)


def same(mine: Any, other: Any) -> bool:
    return bool(np.asarray(mine).tobytes() == np.asarray(other).tobytes())


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_bits_are_those_of_virtual_ranks(comm: gccomm.Communicator, codec: str, dtype: Any) -> None:
    trees = [{str(s): draw(r, s, dtype) for s in SHAPES} for r in range(comm.size)]
    expected, _ = simulate(trees, codec)
    found = comm.compressed_allreduce(trees[comm.rank], codec=codec)
    assert all(same(found[key], expected[comm.rank][key]) for key in found)


@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize("codec", ["uniform", "rotated"])
@pytest.mark.parametrize("scales", ["agreed", "predicted"])
def test_encoding_and_decoding_in_turns(
    world: Any, monkeypatch: pytest.MonkeyPatch, near: bool, codec: str, scales: str
) -> None:
    """Lanes of what is not rotated: for ranks near each other, and for all where scales are predicted."""
    with gccomm.init("mpi", comm=world) as comm:
        if not comm._place.sums_lanes:
            pytest.skip("ranks share no memory, or not all join all data")
        window = comm._backend._channel.window
        found = []

        def sum_lanes(*arguments: Any) -> tuple[float, float]:
            window._state["times"], window._state["samples"] = 1 if near else (9, 9, 9, 1, 1, 1), 100
            seconds = sum_them(*arguments)
            found.append(bool(window._state["in_turns"][0]))
            return seconds

        sum_them = window.sum_lanes
        monkeypatch.setattr(window, "sum_lanes", sum_lanes)
        reducer = gccomm.Reducer(f"{codec}:scales={scales}", comm=comm, op="sum", error_feedback=False)
        tree = [draw(comm.rank, (1300, 1024), np.float32), draw(comm.rank, (7,), np.float32)]
        for _ in range(5):  # the first ones are measured, in another way
            reducer(tree)
        expected = codec == "uniform" and (near or scales == "predicted")
        assert found == [expected] * len(found)
        assert found


@pytest.mark.parametrize("codec", ["uniform:wire_bits=8", "rotated:wire_bits=8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e-42, 3e38])
def test_special_numbers_of_one_rank(comm: gccomm.Communicator, codec: str, bad: float) -> None:
    xs = [draw(r, (200, 1000), np.float32) for r in range(comm.size)]
    xs[-1][150, 7] = bad
    xs[0][3] = 0
    expected, _ = simulate(xs, codec, op="mean")
    found = comm.compressed_allreduce(xs[comm.rank], "mean", codec)
    assert same(found, expected[comm.rank])


@pytest.mark.parametrize("codec", ["uniform:wire_bits=4", "rotated:wire_bits=4"])
@pytest.mark.parametrize("scales", ["agreed", "predicted"])
@pytest.mark.parametrize("feedback", [False, True])
def test_steps_of_a_reducer(comm: gccomm.Communicator, codec: str, scales: str, feedback: bool) -> None:
    """Also after a clamp and after a number that is not finite, and in steps that are measured."""
    codec = f"{codec},scales={scales}"
    if feedback and codec.startswith("uniform") and scales == "predicted" and comm.size == 3:
        pytest.skip("refused: too few levels")

    def step(number: int) -> list[dict[str, Any]]:
        xs = [draw(r, (400, 1000), np.float32) * (50 if number == 5 else 1) for r in range(comm.size)]
        if number == 7:
            xs[0][100, 3] = np.nan
        return [{"x": x} for x in xs]

    reducer = gccomm.Reducer(codec, comm=comm, op="sum", error_feedback=feedback)
    try:
        found = [reducer(step(k)[comm.rank])["x"] for k in range(10)]
    except gccomm.NegotiationError:
        pytest.skip("refused: too few levels")
    for steps in (3, 4, 6, 7, 8, 10):
        expected, _ = simulate(step, codec, steps=steps, error_feedback=feedback)
        assert same(found[steps - 1], expected[comm.rank]["x"]), steps


@pytest.mark.parametrize("codec", ["uniform", "rotated"])
def test_clamps_are_counted_in_place(comm: gccomm.Communicator, codec: str) -> None:
    counts: dict[bool, list[int]] = {}
    for in_place in (False, True):
        reducer = gccomm.Reducer(f"{codec}:scales=predicted", comm=comm, op="sum", error_feedback=False)
        counts[in_place] = []
        for step in range(6):
            x = draw(comm.rank, (400, 1000), np.float32) * (50 if step == 4 else 1)
            reducer(x, out=x if in_place else None)
            counts[in_place].append(comm.stats.clamps)
    assert counts[True] == counts[False]
    assert counts[True][4] > 0


def test_many_small_tensors(comm: gccomm.Communicator) -> None:
    """Chunks of many segments."""
    sizes = [*range(1024, 1424), 5000, *range(2000, 2040)]
    trees = [{f"{i}": draw(r, (size,), np.float32) for i, size in enumerate(sizes)} for r in range(comm.size)]
    for codec in ("uniform", "rotated"):
        expected, _ = simulate(trees, codec)
        found = gccomm.compressed_allreduce(trees[comm.rank], codec=codec, comm=comm.split(0))
        assert all(same(found[key], expected[comm.rank][key]) for key in found)


def test_in_place_and_beside_other_codecs(comm: gccomm.Communicator) -> None:
    codecs = {"a": "uniform:wire_bits=8", "b": "raw", "c": "rotated:wire_bits=8", "d": "thc"}
    trees = [{k: draw(r, (100, 1000), np.float32) for k in codecs} for r in range(comm.size)]
    one = gccomm.Reducer(codecs, comm=comm, op="sum")
    apart = {key: gccomm.Reducer({key: codec}, comm=comm, op="sum") for key, codec in codecs.items()}
    for _ in range(5):
        found = one(trees[comm.rank])
        for key, reducer in apart.items():
            assert same(found[key], reducer({key: trees[comm.rank][key]})[key]), key
    x = trees[comm.rank]["a"].copy()
    expected, _ = simulate([t["a"] for t in trees], "rotated")
    comm.compressed_allreduce(x, out=x)
    assert same(x, expected[comm.rank])


def test_seconds_add_up(comm: gccomm.Communicator) -> None:
    comm.compressed_allreduce(draw(comm.rank, (2000, 1024), np.float32))
    stats = comm.stats
    assert stats.encode_s > 0
    assert stats.decode_s > 0
    assert stats.wire_s >= 0
    assert stats.wire_bytes >= 2000 * 1024
