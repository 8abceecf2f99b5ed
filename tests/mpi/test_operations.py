"""Reductions by gccomm's own operations, on the ranks of this run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import gccomm_mpi
import numpy as np
import pytest

from gccomm.backends import operations_of
from gccomm.kernels import reference
from gccomm.operations import OPERATIONS, PROVIDED, addition_seed
from gccomm.transfers import Combine, execute

SEED = 20240229
LENGTHS = (0, 1, 2, 31, 33, 100, 1000, 100_003)


@pytest.fixture(scope="module", params=["", "direct", "halving"])
def backend(request: pytest.FixtureRequest, world: Any) -> Iterator[Any]:
    """By the algorithm that is measured to be the fastest, and by each; halving serves powers of two."""
    parent = world.Dup()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GCCOMM_ALLREDUCE", request.param)
        handle = gccomm_mpi.connect(parent)
    yield handle
    handle.close()
    parent.Free()


def every(world: Any, length: int) -> list[np.ndarray]:
    return [np.random.default_rng(rank).integers(0, 2**32, length, np.uint32) for rank in range(world.size)]


def reduced(operation: str, parts: list[np.ndarray]) -> np.ndarray:
    """Reduce by the specification: in pairs of neighbours, round by round."""
    number = 0
    while len(parts) > 1:
        sums = []
        for a, b in zip(parts[0::2], parts[1::2], strict=False):
            if operation == "exponent":
                sums.append(reference.exponent_add(a, b, addition_seed(SEED, number), 0))
            else:
                sums.append(reference.saturating_add(a, b, int(operation.removeprefix("saturate:"))))
            number += 1
        parts = sums + parts[2 * len(sums) :]
    return parts[0]


def assert_reduced(backend: Any, world: Any, operation: str, length: int) -> None:
    inputs = every(world, length)
    words = inputs[world.rank].copy()
    backend.combine_words(words, operation, SEED)
    np.testing.assert_array_equal(words, reduced(operation, inputs), strict=True)
    assert len(set(world.allgather(words.tobytes()))) == 1


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("operation", sorted(OPERATIONS))
def test_every_rank_gets_the_words_of_the_specification(
    backend: Any, world: Any, operation: str, length: int
) -> None:
    assert_reduced(backend, world, operation, length)


@pytest.mark.parametrize("operation", ["exponent", "saturate:6"])
def test_pieces_do_not_show(
    backend: Any, world: Any, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count in (1, 37, 1000):
        monkeypatch.setattr(backend._channel.messages, "max_count", count)
        assert_reduced(backend, world, operation, 37 if count == 1 else 2501)


def test_arrays_of_several_pieces(backend: Any, world: Any) -> None:
    assert_reduced(backend, world, "exponent", (1 << 20) + 12345)


def test_other_shapes_and_the_transfer(backend: Any, world: Any) -> None:
    inputs = every(world, 24)
    words = inputs[world.rank].reshape(4, 6).copy()
    execute(Combine(words, "exponent", SEED), backend)
    np.testing.assert_array_equal(words.ravel(), reduced("exponent", inputs))


def test_the_order_does_not_hang_on_who_is_late(backend: Any, world: Any) -> None:
    results = []
    for late in range(world.size):
        if world.rank == late:
            time.sleep(0.02)
        words = every(world, 5000)[world.rank]
        backend.combine_words(words, "exponent", SEED)
        results.append(words.tobytes())
    assert len(set(results)) == 1


def test_mixed_with_sums_of_every_size(backend: Any, world: Any) -> None:
    """Own reductions and exchanged sums use the same messages: in turn they do not get confused."""
    for length in (10, 100_000, 11, 200_000):
        ones = np.ones(length, np.uint32)
        backend.sum_words(ones)
        assert set(ones.tolist()) == {world.size}
        assert_reduced(backend, world, "saturate:4", length)


def test_arguments_are_checked_before_anything_travels(backend: Any, world: Any) -> None:
    assert operations_of(backend) == PROVIDED
    words = np.ones(3, np.uint32)
    with pytest.raises(ValueError, match=r"`operation` must be one of .*got 'saturate:9'"):
        backend.combine_words(words, "saturate:9", 0)
    with pytest.raises(ValueError, match="`seed` must be"):
        backend.combine_words(words, "exponent", 2**32)
    backend.sum_words(words)
    assert words.tolist() == [world.size] * 3


def test_a_world_of_one_keeps_its_words() -> None:
    from mpi4py import MPI

    handle = gccomm_mpi.connect(MPI.COMM_SELF)
    words = np.arange(5, dtype=np.uint32)
    handle.combine_words(words, "exponent", 0)
    assert words.tolist() == [0, 1, 2, 3, 4]
    handle.close()
