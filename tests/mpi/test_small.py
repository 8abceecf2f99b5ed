"""Small arrays between hosts, and what goes with the header of a call, on the ranks of this run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gccomm_mpi.small
import gccomm_mpi.swaps
import ml_dtypes
import numpy as np
import pytest
from gccomm_mpi.operators import MAXIMUM, SUM, sum_of
from gccomm_mpi.small import SMALL_BYTES, Small
from gccomm_mpi.swaps import swap_bytes

import gccomm
from gccomm.agreement import MESSAGE_WORDS
from gccomm.testing import simulate

BLOCKS = SMALL_BYTES // 4 - MESSAGE_WORDS  # about the most whose scales go with the header


@pytest.fixture(params=["one round", "several"])
def between(
    world: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[gccomm.Communicator]:
    """A communicator over MPI's messages, as between hosts: few of them, or as among many."""
    if world.size == 1:
        pytest.skip("one rank has nobody to send to")
    monkeypatch.setenv("GCCOMM_WINDOW", "0")
    if request.param_index:
        for module in (gccomm_mpi.small, gccomm_mpi.swaps):
            monkeypatch.setattr(module, "FEW", 1)
    parent = world.Dup()
    with gccomm.init(comm=parent) as comm:
        yield comm
    parent.Free()


def small(comm: gccomm.Communicator) -> Small:
    channel = comm._backend._channel  # type: ignore[attr-defined]
    return Small(channel, channel.messages.link)


@pytest.mark.parametrize("count", [1, 3, 256, SMALL_BYTES // 4])
def test_words(between: gccomm.Communicator, world: Any, count: int) -> None:
    parts = [
        np.random.default_rng([r, count]).integers(0, 2**32, count, np.uint32) for r in range(world.size)
    ]
    for operator, expected in ((SUM, sum(parts)), (MAXIMUM, np.max(parts, axis=0))):
        mine = parts[world.rank].copy()
        small(between).reduce("test", mine, operator)
        np.testing.assert_array_equal(mine, expected)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_floats_have_the_same_bits_everywhere(between: gccomm.Communicator, world: Any, dtype: Any) -> None:
    real = np.dtype({"bfloat16": ml_dtypes.bfloat16}.get(dtype, dtype))
    mine = np.random.default_rng(world.rank).standard_normal(SMALL_BYTES // real.itemsize).astype(real)
    exact = sum(np.array(y, np.float64) for y in world.allgather(mine.astype(np.float64)))
    small(between).reduce("test", mine.view(np.uint16) if real.itemsize == 2 else mine, sum_of(dtype))
    assert len(set(world.allgather(mine.tobytes()))) == 1
    eps = float(ml_dtypes.finfo(real).eps)
    np.testing.assert_allclose(mine.astype(np.float64), exact, rtol=0, atol=40 * eps)


@pytest.mark.parametrize("longest", ["first", "last"])
def test_arrays_of_different_lengths(between: gccomm.Communicator, world: Any, longest: str) -> None:
    """What all ranks hold is reduced, and nothing is written behind what a rank holds."""
    place = world.rank if longest == "last" else world.size - 1 - world.rank
    lengths = [256 + 512 * p // max(1, world.size - 1) * 2 for p in range(world.size)]
    own = lengths[place]
    for operator, expected in ((SUM, world.size * (world.size + 1) // 2), (MAXIMUM, world.size)):
        memory = np.full(SMALL_BYTES // 4 + 1, 77, np.uint32)
        memory[:own] = world.rank + 1
        small(between).reduce("test", memory[:own], operator)
        assert (memory[:256] == expected).all()
        assert (memory[own:] == 77).all()


def test_a_back_end_says_what_its_first_message_may_hold(between: gccomm.Communicator, comm: Any) -> None:
    assert between._backend.first_words == SMALL_BYTES // 4  # type: ignore[attr-defined]
    if comm._backend._channel.window is not None:
        assert comm._backend.first_words == 0


@pytest.mark.parametrize("blocks", [1, 192, 193, 1024])
@pytest.mark.parametrize("codec", ["uniform", "rotated:headroom=safe"])
def test_scales_go_with_the_header(between: gccomm.Communicator, world: Any, blocks: int, codec: str) -> None:
    """So a call takes two messages, where ranks do not even swap its array."""
    count = 1024 * blocks
    xs = [np.random.default_rng(r).standard_normal(count, np.float32) for r in range(world.size)]
    found = between.compressed_allreduce(xs[world.rank], codec=codec)
    assert between.stats.messages == (1 if 4 * count <= swap_bytes(world.size) else 2)
    np.testing.assert_array_equal(found, simulate(xs, codec)[0][world.rank])


@pytest.mark.parametrize(("blocks", "messages"), [(1, 1), (7, 1), (8, 2)])
def test_sums_go_with_the_header(
    between: gccomm.Communicator, world: Any, blocks: int, messages: int
) -> None:
    """With predicted scales a small array takes one message."""
    x = np.random.default_rng(world.rank).standard_normal(1024 * blocks, np.float32)
    reducer = gccomm.Reducer("uniform:scales=predicted", op="sum", comm=between)
    for _ in range(4):  # the first one agrees, and in three errors are measured
        found = reducer(x)
    assert reducer.stats.messages == messages
    exact = between.allreduce(x)
    assert np.linalg.norm(found - exact) < 0.15 * np.linalg.norm(exact)


@pytest.mark.parametrize(
    ("usual", "other"), [(193, 194), (1, 1500), (1500, 1), (BLOCKS, 3 * BLOCKS), (3 * BLOCKS, 1)]
)
def test_ranks_that_differ_all_get_the_error(
    between: gccomm.Communicator, world: Any, usual: int, other: int
) -> None:
    """Whatever their first messages hold: a header alone, or more or less behind it."""
    mine = np.ones(1024 * (other if world.rank == 1 else usual), np.float32)
    with pytest.raises(gccomm.MismatchError, match="on rank 1") as caught:
        between.compressed_allreduce(mine, codec="uniform")
    assert len(set(world.allgather(str(caught.value)))) == 1
    with pytest.raises(gccomm.MismatchError, match="disagree about call") as caught:
        between.barrier() if world.rank == 1 else between.compressed_allreduce(mine, codec="uniform")
    assert len(set(world.allgather(str(caught.value)))) == 1
    bad = {"codec": "uniform", "op": "product" if world.rank == 1 else "sum"}
    with pytest.raises(ValueError, match=r"rank 1: .*product"):
        between.compressed_allreduce(mine, **bad)
    good = between.compressed_allreduce(np.ones(200 * 1024, np.float32), codec="uniform")
    assert np.abs(good - world.size).max() < 0.3
