"""Memory of devices that MPI is given itself, with GCCOMM_MPI_CUDA=1: here it is the host's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import gccomm_mpi
import gccomm_mpi.channel
import gccomm_mpi.device
import numpy as np
import pytest

from gccomm.errors import BackendError
from tests.devices import cupy, on_device
from tests.fake_cupy import FakeCupy

__all__ = ["cupy"]


class Buffer(NamedTuple):
    address: int
    size: int
    stream: int


@pytest.fixture
def backend(world: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("GCCOMM_MPI_CUDA", "1")
    monkeypatch.setattr(gccomm_mpi.device, "cuda_support", lambda: None)
    parent = world.Dup()
    handle = gccomm_mpi.connect(parent)
    yield handle
    handle.close()
    parent.Free()


def test_buffers_are_reduced_after_what_their_stream_has_to_do(
    backend: Any, world: Any, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gccomm_mpi.device, "_MOST_BYTES", 4000)  # several calls of MPI's
    assert backend.takes_device("cuda:0")
    assert not backend.takes_device("cpu")
    stream = cupy.current()
    parts = [np.random.default_rng(r).integers(0, 2**32, 5001, np.uint32) for r in range(world.size)]
    for operation, expected in (
        (backend.sum_words, np.sum(parts, axis=0, dtype=np.uint32)),
        (backend.maximum, np.max(parts, axis=0)),
    ):
        array = on_device(cupy, parts[world.rank])
        operation(Buffer(array.data.ptr, array.size, stream.ptr))
        assert cupy.asnumpy(array).tobytes() == expected.tobytes()


class Noted:
    """A communicator whose methods are noted by name."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.names = comm, []

    def __getattr__(self, name: str) -> Any:
        self.names.append(name)
        return getattr(self.comm, name)


def test_no_reduction_that_does_not_block_gets_memory_of_a_device(
    backend: Any, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open MPI's would read it as the host's, and fault."""
    noted = Noted(backend._channel.comm)
    monkeypatch.setattr(backend._channel, "comm", noted)
    array = on_device(cupy, np.ones(70, np.uint32))
    backend.sum_words(Buffer(array.data.ptr, 70, cupy.current().ptr))
    assert noted.names == ["Ibarrier", "Allreduce"]  # of which the first one may be waited for with a limit


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_floats(dtype: str, backend: Any, world: Any, cupy: FakeCupy) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    of = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    stream = cupy.current().ptr
    x = on_device(cupy, np.arange(50).astype(of))
    y = on_device(cupy, np.zeros(50).astype(of))
    for out in (y, x):
        backend.sum_floats(Buffer(x.data.ptr, 50, stream), Buffer(out.data.ptr, 50, stream), dtype)
        assert (
            cupy.asnumpy(out).astype(float) == world.size * np.arange(50.0).astype(of).astype(float)
        ).all()


def test_begun_reductions_and_what_oversees_them(backend: Any, world: Any, cupy: FakeCupy) -> None:
    stream = cupy.current()
    array = on_device(cupy, np.full(70, world.rank, np.uint32))
    buffer = Buffer(array.data.ptr, 70, stream.ptr)
    for kind in ("maximum", "words"):
        assert backend.begin(kind, buffer, buffer) is None
    assert (cupy.asnumpy(array) == world.size * (world.size - 1)).all()
    other = backend.split(0, world.rank)
    assert other.takes_device("cuda:1")
    other.close()
    with pytest.raises(BackendError, match="closed"):
        other.sum_words(buffer)
    asked: list[str] = []

    def look() -> BaseException | None:
        asked.append("look")
        return BackendError("it is wrong there") if len(asked) > 1 else None

    backend.oversee(look, lambda: asked.append("doom"))
    backend.sum_words(buffer)
    with pytest.raises(BackendError, match="it is wrong there"):
        backend.sum_words(buffer)
    assert asked == ["look", "look", "doom"]
    backend._channel.overseers.clear()
    backend.require_whole()


def test_host_memory_goes_as_ever(backend: Any, world: Any) -> None:
    words = np.arange(70_000, dtype=np.uint32)
    backend.sum_words(words)
    assert (words == world.size * np.arange(70_000)).all()


def test_a_library_that_takes_no_device_memory_is_named(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = world.Dup()
    monkeypatch.setenv("GCCOMM_MPI_CUDA", "1")
    monkeypatch.setattr(gccomm_mpi.device, "cuda_support", lambda: world.rank > 0)
    with pytest.raises(BackendError, match=r"rank 0: GCCOMM_MPI_CUDA=1, but .* not CUDA-aware"):
        gccomm_mpi.connect(parent)
    monkeypatch.setenv("GCCOMM_MPI_CUDA", "yes")
    with pytest.raises(ValueError, match="GCCOMM_MPI_CUDA must be one of 0, 1; got 'yes'"):
        gccomm_mpi.connect(parent)
    if world.size > 1:
        monkeypatch.setenv("GCCOMM_MPI_CUDA", str(min(world.rank, 1)))
        with pytest.raises(ValueError, match="must be equal on all ranks"):
            gccomm_mpi.connect(parent)
    monkeypatch.delenv("GCCOMM_MPI_CUDA")
    handle = gccomm_mpi.connect(parent)
    assert not hasattr(handle, "takes_device")
    handle.close()
    parent.Free()


def test_what_the_library_says() -> None:
    assert gccomm_mpi.device.cuda_support() in (None, False, True)
