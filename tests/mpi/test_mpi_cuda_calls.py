"""Whole calls whose words MPI is given in a device's memory, with GCCOMM_MPI_CUDA=1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gccomm_mpi.channel
import gccomm_mpi.device
import numpy as np
import pytest

import gccomm
from gccomm import kernels
from tests.devices import cupy, on_device
from tests.fake_cupy import FakeCupy
from tests.mpi.test_device_arrays import CODECS, same, steps
from tests.mpi.test_hierarchy import OnHosts

__all__ = ["cupy"]


@pytest.fixture
def ranks(
    request: pytest.FixtureRequest, world: Any, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    monkeypatch.setenv("GCCOMM_MPI_CUDA", "1")
    monkeypatch.setattr(gccomm_mpi.device, "cuda_support", lambda: True)
    floats = getattr(request, "param", False)
    if floats:
        monkeypatch.setenv("GCCOMM_ALLREDUCE", "ring")  # whose order float sums have
        duplicate = gccomm_mpi.channel._duplicate
        pairs = lambda rank: rank // 2  # noqa: E731
        monkeypatch.setattr(gccomm_mpi.channel, "_duplicate", lambda comm: OnHosts(duplicate(comm), pairs))
    parent = world.Dup()
    with gccomm.init("mpi", comm=parent, hierarchical=floats) as made:
        yield made
    parent.Free()


@pytest.mark.parametrize("codec", CODECS)
def test_steps_give_the_bits_of_numpy(codec: str, ranks: Any, world: Any, cupy: FakeCupy) -> None:
    found = steps(ranks, codec, cupy)
    expected = steps(ranks, codec, None)
    floats = codec in ("raw", "bf16", "fp16", "powersgd", "topkc") and world.size > 2
    assert floats or all(map(same, found, expected))


@pytest.mark.parametrize("ranks", [True], indirect=True)
@pytest.mark.parametrize("codec", ["uniform:wire_bits=5", "rotated:wire_bits=4,headroom=checked", "fp16"])
def test_hosts_that_add_up_floats_do_so_on_the_host(codec: str, ranks: Any, cupy: FakeCupy) -> None:
    if ranks.size < 3:
        pytest.skip("too few ranks for two hosts, one of them of two")
    assert all(map(same, steps(ranks, codec, cupy), steps(ranks, codec, None)))


@pytest.mark.parametrize("ranks", [False, True], indirect=True)
@pytest.mark.parametrize(("usual", "other"), [(1500, 1), (1, 1500), (193, 194)])
def test_ranks_that_differ_all_get_the_error(ranks: Any, cupy: FakeCupy, usual: int, other: int) -> None:
    """Whatever their first messages hold, which MPI's own reductions take of one length alone."""
    if ranks.size == 1:
        pytest.skip("needs two ranks")
    blocks = other if ranks.rank == ranks.size - 1 else usual
    with pytest.raises(gccomm.MismatchError, match=f"rank {ranks.size - 1}"):
        ranks.compressed_allreduce(on_device(cupy, np.ones(1024 * blocks, np.float32)), codec="uniform")
    x = on_device(cupy, np.ones(1024 * usual, np.float32))
    found = ranks.compressed_allreduce(x, "sum", codec="raw")
    assert (cupy.asnumpy(found) == ranks.size).all()


def test_a_device_for_a_whole_tree(ranks: Any, cupy: FakeCupy) -> None:
    x = on_device(cupy, np.full(5000, 1.0, np.float32))
    for _ in range(3):
        found = ranks.compressed_allreduce({"a": x, "b": x}, codec="raw")
        assert (cupy.asnumpy(found["b"]) == ranks.size).all()


def test_graphs_are_refused(ranks: Any, cupy: FakeCupy) -> None:
    """MPI is called by the host, after it has waited for the device."""
    x = on_device(cupy, np.full(5000, 1.0, np.float32))
    for _ in range(2):
        ranks.compressed_allreduce(x, codec="uniform")
    cupy.capturing.add(kernels.of_device("cuda:0").launcher.queue.stream)
    with pytest.raises(gccomm.NegotiationError, match="over `mpi`, which waits for the device"):
        ranks.compressed_allreduce(x, codec="uniform")
    cupy.capturing.clear()
    assert np.allclose(cupy.asnumpy(ranks.compressed_allreduce(x, codec="raw")), ranks.size)
