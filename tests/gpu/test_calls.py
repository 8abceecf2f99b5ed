"""Steps on arrays of a device in a world of one, over NCCL and alone: the CPU's bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gccomm
from gccomm.errors import GccommError, NonFiniteError
from tests.gpu.programs import ALL_CODECS, compare, own_operation


@pytest.fixture(params=["local", "nccl"], scope="module")
def comm(request: pytest.FixtureRequest) -> Iterator[gccomm.Communicator]:
    if request.param not in gccomm.backends.available():
        pytest.skip(f"no back end `{request.param}` is installed")
    with gccomm.init(backend=request.param) as made:
        yield made


@pytest.mark.parametrize("codec", ALL_CODECS)
def test_steps_give_the_cpus_bits(codec: str, comm: gccomm.Communicator, cupy: Any) -> None:
    if comm.backend == "nccl" and own_operation(codec):
        with pytest.raises(GccommError, match=codec.partition(":")[0]):
            compare(comm, codec, cupy)
        return
    compare(comm, codec, cupy)


def test_checked_steps_that_do_not_wait(comm: gccomm.Communicator, cupy: Any) -> None:
    """The first three are measured, and wait; later ones look at spans at their ends."""
    reducers = [gccomm.Reducer("rotated:wire_bits=4,headroom=checked", comm=comm) for _ in range(2)]
    rng = np.random.default_rng(0)
    for _ in range(6):
        x = rng.standard_normal(100_000).astype(np.float32)
        found, expected = reducers[0]({"w": cupy.asarray(x)}), reducers[1]({"w": x})
        assert cupy.asnumpy(found["w"]).tobytes() == expected["w"].tobytes()
    assert reducers[0].state_dict()["states"] == reducers[1].state_dict()["states"]
    works = [comm.compressed_allreduce_async(found, codec="rotated:headroom=checked") for _ in range(3)]
    assert all(np.isfinite(cupy.asnumpy(work.wait()["w"])).all() for work in works)


def test_results_come_in_the_order_of_the_callers_stream(comm: gccomm.Communicator, cupy: Any) -> None:
    """What a slow stream is still to write is what is reduced; results are there for what it does next."""
    x = cupy.zeros(1 << 20, cupy.float32)
    busy = cupy.ones((3000, 3000), cupy.float32)
    for _ in range(20):
        busy = busy @ busy * cupy.float32(1 / 3000)
    x += busy[0, 0]
    y = comm.compressed_allreduce(x, codec="uniform:wire_bits=16")
    doubled = y * 2
    np.testing.assert_allclose(cupy.asnumpy(doubled), 2.0, rtol=1e-3)


def test_asynchronous_calls_and_pushes(comm: gccomm.Communicator, cupy: Any) -> None:
    x = np.random.default_rng(0).standard_normal(30_000).astype(np.float32)
    work = gccomm.compressed_allreduce_async(cupy.asarray(x), codec="raw", comm=comm)
    assert cupy.asnumpy(work.wait()).tobytes() == x.tobytes()
    reducer = gccomm.Reducer("raw", comm=comm)
    for key in "ab":
        reducer.push(key, cupy.asarray(x))
    assert all(cupy.asnumpy(value).tobytes() == x.tobytes() for value in reducer.wait().values())


def test_infinities_are_told_of(comm: gccomm.Communicator, cupy: Any) -> None:
    x = cupy.ones(3000, cupy.float32)
    x[1500] = cupy.inf
    with pytest.raises(NonFiniteError):
        comm.compressed_allreduce(x, nonfinite="raise")
    found = cupy.asnumpy(comm.compressed_allreduce(x))
    assert np.isnan(found[1024:2048]).all()
    assert np.isfinite(found[:1024]).all()
