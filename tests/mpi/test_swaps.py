"""Calls on small arrays that ranks swap whole, in one message, as between hosts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gccomm_mpi.swaps import swap_bytes

import gccomm
from gccomm.codecs.uniform import Uniform
from gccomm.testing import simulate

LANES = [
    "uniform:wire_bits=4",
    "uniform",
    "uniform:widening=true",
    "rotated:headroom=safe",
    "rotated:wire_bits=5,rotations=2,headroom=safe",
]
FLOATS = ["raw", "bf16", "fp16"]
DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
CALLS = 5


@pytest.fixture
def comm(world: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[gccomm.Communicator]:
    """A communicator over MPI's messages, as between hosts."""
    if swap_bytes(world.size) == 0:
        pytest.skip("only 2 to 4 ranks swap arrays")
    monkeypatch.setenv("GCCOMM_WINDOW", "0")
    parent = world.Dup()
    with gccomm.init("mpi", comm=parent) as made:
        yield made
    parent.Free()


def draw(rank: int, shape: tuple[int, ...], dtype: Any = np.float32, step: int = 0) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng([rank, step, *shape])
    return rng.standard_normal(shape).astype(dtype)


def same_everywhere(world: Any, found: Any) -> bool:
    return len(set(world.allgather(np.asarray(found).tobytes()))) == 1


@pytest.mark.parametrize("codec", LANES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1024,), (1031,), (32, 33), (2, 750), (1500, 1)])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_bits_are_those_of_virtual_ranks(
    comm: gccomm.Communicator, world: Any, codec: str, dtype: Any, shape: tuple[int, ...], op: str
) -> None:
    xs = [draw(r, shape, dtype) for r in range(comm.size)]
    swapped = xs[0].nbytes <= swap_bytes(comm.size)
    found = comm.compressed_allreduce(xs[comm.rank], op, codec)
    assert comm.stats.messages == (1 if swapped else 2)
    expected = simulate(xs, codec, op)[0][comm.rank]
    assert found.tobytes() == expected.tobytes()
    assert same_everywhere(world, found)


@pytest.mark.parametrize("codec", LANES)
@pytest.mark.parametrize("size", [1024])
def test_repeated_calls_have_the_bits_of_virtual_ranks(
    comm: gccomm.Communicator, codec: str, size: int
) -> None:
    def inputs(step: int) -> list[Any]:
        return [draw(r, (size,), step=step) for r in range(comm.size)]

    for step in range(CALLS):
        found = comm.compressed_allreduce(inputs(step)[comm.rank], "sum", codec)
        expected = simulate(inputs, codec, "sum", steps=step + 1)[0][comm.rank]
        assert found.tobytes() == expected.tobytes()
        assert comm.stats.messages == 1


@pytest.mark.parametrize("codec", [*FLOATS, *LANES])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3, 500, 1024])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_bits_are_those_of_messages(
    comm: gccomm.Communicator, codec: str, dtype: Any, size: int, op: str
) -> None:
    """Also of floats: few ranks add up in their order either way."""
    twin = comm.split(0)
    assert twin is not None
    twin._place = replace(twin._place, swap_bytes=0)
    with twin:
        for step in range(CALLS):
            x = draw(comm.rank, (size,), dtype, step)
            found = comm.compressed_allreduce(x, op, codec)
            assert found.tobytes() == twin.compressed_allreduce(x, op, codec).tobytes()
            assert twin.stats.messages == 2
            exact = codec not in FLOATS and size < 1024
            assert comm.stats.messages == (2 if exact or x.nbytes > swap_bytes(comm.size) else 1)


def test_what_is_too_large_takes_two_messages(comm: gccomm.Communicator) -> None:
    count = swap_bytes(comm.size) // 4
    for size, messages in ((count, 1), (count + 1, 2)):
        for _ in range(CALLS):
            x = draw(comm.rank, (size,))
            for codec in ("raw", "uniform"):
                comm.compressed_allreduce(x, "sum", codec)
                assert comm.stats.messages == messages


def test_floats_that_travel_in_a_wider_format(comm: gccomm.Communicator) -> None:
    """What travels has to fit, not only what there is."""
    count = swap_bytes(comm.size) // 2
    for _ in range(CALLS):
        x = np.full(count, 3, np.float16)
        found = comm.compressed_allreduce(x, "sum", "raw")
        assert (found == 3 * comm.size).all()
        assert comm.stats.messages == 2


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("codec", ["raw", "bf16", "uniform", "rotated"])
def test_values_that_are_not_finite(comm: gccomm.Communicator, world: Any, value: float, codec: str) -> None:
    for _ in range(CALLS):
        x = draw(comm.rank, (1024,))
        if comm.rank == comm.size - 1:
            x[5] = value
        found = comm.compressed_allreduce(x, "sum", codec)
        assert not np.isfinite(found[5])
        assert same_everywhere(world, found)


@pytest.mark.parametrize("codec", ["raw", "uniform"])
def test_what_the_figures_say(comm: gccomm.Communicator, codec: str) -> None:
    for _ in range(CALLS):
        comm.compressed_allreduce(draw(comm.rank, (1024,)), "sum", codec)
        stats = comm.stats
        assert (stats.messages, stats.wire_bytes, stats.float32_bytes) == (1, 256 + 4096, 4096)
        assert sum(stats.codecs.values()) == 1024


@pytest.mark.parametrize("calls", [0, CALLS])
@pytest.mark.parametrize("usual", ["raw", "uniform"])
@pytest.mark.parametrize(
    "other", ["size", "large", "codec", "dtype", "op", "object", "barrier", "tree", "integers"]
)
@pytest.mark.parametrize("odd", ["first", "last"])
def test_ranks_that_differ_all_get_the_error(
    comm: gccomm.Communicator, world: Any, calls: int, usual: str, other: str, odd: str
) -> None:
    """Whatever their first messages hold; and the next call gives the same bits on all."""
    x = draw(comm.rank, (1024,))
    for _ in range(calls):
        comm.compressed_allreduce(x, "sum", usual)
    different = comm.rank == (0 if odd == "first" else comm.size - 1)
    trees = {"size": x[:-1], "large": np.ones(3 << 20, np.float32), "dtype": x.astype(np.float64)}
    trees |= {"object": object(), "tree": {"a": x, "b": x}, "integers": np.arange(1024)}
    mine, op, codec = trees.get(other, x), "product" if other == "op" else "sum", usual
    codec = "fp16" if other == "codec" else usual
    call: Any = comm.barrier if other == "barrier" else partial(comm.compressed_allreduce, mine, op, codec)
    call = call if different else partial(comm.compressed_allreduce, x, "sum", usual)
    with pytest.raises((gccomm.MismatchError, TypeError, ValueError)) as caught:
        call()
    assert len(set(world.allgather(str(caught.value)))) == 1
    for _ in range(2):
        found = comm.compressed_allreduce(x, "sum", usual)
        assert same_everywhere(world, found)
        assert np.linalg.norm(found - comm.allreduce(x)) <= 0.1 * np.linalg.norm(found)


@pytest.mark.parametrize("codec", ["raw", "uniform", "rotated"])
@pytest.mark.parametrize("calls", [2, CALLS])
def test_a_rank_without_a_value(comm: gccomm.Communicator, world: Any, codec: str, calls: int) -> None:
    reducer = gccomm.Reducer(codec, op="sum", comm=comm, error_feedback=False)
    for step in range(calls):
        reducer(draw(comm.rank, (1024,), step=step))
    for step in range(3):
        x = draw(comm.rank, (1024,), step=step)
        found = reducer(None if comm.rank == 0 else x)
        exact = comm.allreduce(np.zeros_like(x) if comm.rank == 0 else x)
        assert same_everywhere(world, found)
        assert np.linalg.norm(found - exact) <= 0.1 * np.linalg.norm(exact) + 1e-6
    assert reducer(None) is None  # on all
    found = reducer(x)
    assert same_everywhere(world, found)


class Late(Uniform):
    """Agrees by itself, before the back end sums its lanes."""

    id = "test-late"
    steps_serve = True

    def steps(self, x: Any, state: Any, ctx: Any) -> Any:
        from gccomm.steps import Agree

        yield Agree(1, lambda out: out.fill(7))
        return (yield from super().steps(x, state, ctx))

    def repeats(self, ctx: Any) -> bool:
        return True


def test_lanes_after_another_step(comm: gccomm.Communicator, world: Any) -> None:
    x = draw(comm.rank, (1024,))
    for _ in range(CALLS):
        found = comm.compressed_allreduce(x, "sum", Late(wire_bits=16))
        assert comm.stats.messages == 2
        assert np.allclose(found, comm.allreduce(x), atol=0.05)
        assert same_everywhere(world, found)


@pytest.mark.parametrize("codec", ["raw", "bf16", "uniform", "rotated:headroom=safe"])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_other_arrays_and_repeats_meet(comm: gccomm.Communicator, codec: str, op: str) -> None:
    """Ranks with strided arrays, other byte orders, an `out`, or a trace send what others do."""
    twin = comm.split(0)
    assert twin is not None
    twin._place = replace(twin._place, swap_bytes=0)
    with twin:
        for step in range(2 * CALLS):
            x = draw(comm.rank, (1024,), step=step)
            expected = twin.compressed_allreduce(x, op, codec)
            odd = (comm.rank + step) % 4
            mine = {1: np.repeat(x, 2)[::2], 3: x.astype(">f4")}.get(odd, x)
            out = np.empty_like(x) if odd == 2 else None
            found = comm.compressed_allreduce(mine, op, codec, out=out)
            assert np.asarray(found).astype(np.float32).tobytes() == expected.tobytes()


@pytest.mark.parametrize("codec", ["thc", "topkc", "rehop", "intsgd", "qsgd-mn", "powersgd", "global-qsgd"])
def test_codecs_that_do_not_swap(comm: gccomm.Communicator, world: Any, codec: str) -> None:
    """Their messages are those of calls that may not."""
    twin = comm.split(0)
    assert twin is not None
    twin._place = replace(twin._place, swap_bytes=0)
    with twin:
        for step in range(CALLS):
            x = draw(comm.rank, (1024,), step=step)
            found = comm.compressed_allreduce(x, "sum", codec)
            expected = twin.compressed_allreduce(x, "sum", codec)
            assert found.tobytes() == expected.tobytes()
            assert comm.stats.messages == twin.stats.messages
            assert comm.stats.wire_bytes == twin.stats.wire_bytes


def test_lengths_in_turn(comm: gccomm.Communicator, world: Any) -> None:
    """More of them than requests are kept for."""
    for step in range(3):
        for size in range(1, 80):
            x = np.full(size, comm.rank + step, np.float32)
            found = comm.compressed_allreduce(x, "sum", "raw")
            assert (found == sum(range(comm.size)) + step * comm.size).all()


def test_threads_and_asynchronous_calls_between(comm: gccomm.Communicator) -> None:
    if comm._backend.no_threads:  # type: ignore[attr-defined]
        pytest.skip("MPI allows no second thread")
    x, works = np.ones(1000, np.float32), []
    for _ in range(6):
        works.append(comm.compressed_allreduce_async(x, "sum", "raw"))
        assert (comm.compressed_allreduce(x, "sum", "raw") == comm.size).all()
    assert all((work.wait(20) == comm.size).all() for work in works)
