"""Arrays on a device over MPI: words are staged through the host. The stand-in for CuPy has no device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gccomm_mpi.channel
import numpy as np
import pytest

import gccomm
from gccomm.errors import MismatchError, NonFiniteError
from tests.devices import cupy, from_device, on_device, other_stream, same, trees
from tests.fake_cupy import FakeCupy
from tests.mpi.test_hierarchy import OnHosts

__all__ = ["cupy"]

CODECS = (
    *("rotated", "rotated:wire_bits=4,headroom=checked", "uniform:wire_bits=5", "uniform:scales=predicted"),
    *("uniform:widening=True", "rehop", "intsgd", "thc", "topkc", "powersgd", "raw", "bf16", "fp16"),
)


@pytest.fixture(params=["shared memory", "messages", "hosts", "floats of hosts"])
def ranks(request: pytest.FixtureRequest, world: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A communicator whose ranks share memory, or do not, or are on several hosts."""
    monkeypatch.setenv("GCCOMM_WINDOW", "0" if request.param == "messages" else "1")
    monkeypatch.setenv("GCCOMM_ALLREDUCE", "ring")  # whose order float sums have
    floats = request.param == "floats of hosts"
    if "hosts" in request.param:
        duplicate = gccomm_mpi.channel._duplicate
        hosts = (lambda rank: rank // 2) if floats else (lambda rank: rank)
        monkeypatch.setattr(gccomm_mpi.channel, "_duplicate", lambda comm: OnHosts(duplicate(comm), hosts))
    if floats and world.size < 3:
        pytest.skip("too few ranks for two hosts, one of them of two")
    parent = world.Dup()
    with gccomm.init("mpi", comm=parent, hierarchical=floats or None) as made:
        yield made
    parent.Free()


def steps(comm: Any, codec: str, cupy: FakeCupy | None, **options: Any) -> list[Any]:
    """Return the results of three steps, on the device where there is one."""
    reducer = gccomm.Reducer(codec, comm=comm, op="sum", bucket_bytes=20_000, **options)
    found = []
    for step in range(3):
        tree = trees(step, comm.size)[comm.rank]
        rng = np.random.default_rng([step, comm.rank])
        tree["large"] = rng.standard_normal((3, 40_000)).astype(np.float32)
        result = reducer(tree if cupy is None else on_device(cupy, tree))
        found.append(result if cupy is None else from_device(cupy, result))
    return found


@pytest.mark.parametrize("codec", CODECS)
def test_steps_give_the_bits_of_numpy(codec: str, ranks: Any, cupy: FakeCupy) -> None:
    expected = steps(ranks, codec, None)
    found = steps(ranks, codec, cupy)
    assert all(map(same, found, expected))


def test_residuals_outputs_and_asynchronous_calls(ranks: Any, cupy: FakeCupy) -> None:
    options = {"error_feedback": True}
    expected = steps(ranks, "rotated:wire_bits=5", None, **options)
    found = steps(ranks, "rotated:wire_bits=5", cupy, **options)
    assert all(map(same, found, expected))

    x = trees(0, ranks.size)[ranks.rank]["single"]
    total = ranks.allreduce(x)
    stream = other_stream(cupy)
    with stream:
        there, out = on_device(cupy, x), on_device(cupy, np.zeros_like(x))
        works = [ranks.compressed_allreduce_async(there, codec="raw", out=o) for o in (None, out)]
    results = [work.wait() for work in works]
    assert results[1] is out
    assert all(cupy.asnumpy(result).tobytes() == total.tobytes() for result in results)
    assert cupy.asnumpy(ranks.broadcast(there, root=ranks.size - 1)).tobytes() == (
        trees(0, ranks.size)[-1]["single"].tobytes()
    )


def test_errors_are_those_of_all_ranks(ranks: Any, cupy: FakeCupy) -> None:
    x = np.ones(3000, np.float32)
    x[7] = np.nan
    bad = on_device(cupy, x if ranks.rank == 0 else np.ones_like(x))
    with pytest.raises(NonFiniteError, match=r"rank 0: .*inf or NaN"):
        ranks.compressed_allreduce(bad, nonfinite="raise")
    with pytest.raises(MismatchError, match="on cuda"):
        ranks.allreduce(np.ones(30) if ranks.rank == 0 else on_device(cupy, np.ones(30)))
    with pytest.raises(OverflowError, match="sums do not fit int8"):
        ranks.allreduce(on_device(cupy, np.full(30, 100, np.int8)))
    with pytest.raises(TypeError, match="must be a writeable"):
        ranks.allreduce(bad, out="text" if ranks.rank == 0 else bad)
    found = ranks.compressed_allreduce(on_device(cupy, np.ones(3000, np.float32)), codec="raw")
    assert (cupy.asnumpy(found) == ranks.size).all()
