"""The queue of a device where something is unusual: failures, captures, streams and devices of others."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from gccomm import kernels, testing
from gccomm.arrays import view
from gccomm.errors import BackendError
from gccomm.interop import dlpack, order
from gccomm.kernels.cuda.queue import Loan, Queue
from tests.devices import cupy, from_device, on_device, two_devices
from tests.fake_cupy import FakeCupy
from tests.test_device_libraries import JaxStream, jax

__all__ = ["cupy", "jax", "two_devices"]

X = np.random.default_rng(3).standard_normal(5000).astype(np.float32)


def queue_of(device: int = 0) -> Queue:
    found: Queue = kernels.of_device(f"cuda:{device}").launcher.queue
    return found


def test_a_failed_device_ends_a_wait(cupy: FakeCupy) -> None:
    queue = queue_of()
    queue.meanwhile(lambda: True)
    cupy.status = 700  # an illegal address
    with pytest.raises(BackendError, match="device 0 failed: error 700"):
        queue.wait()
    queue.meanwhile(None)
    cupy.status = 0


def test_arrays_of_a_library_of_another_stream_are_kept_until_they_are_read(
    jax: JaxStream, cupy: FakeCupy
) -> None:
    """JAX uses the memory of an array at once, when the last that holds it lets go."""
    gc.collect()  # of what other tests have left
    x = jax.array(X)
    lent = len(dlpack._exported)
    found = view(x)
    queue = found.data.queue
    order.begin([found])
    order.Handover([("", found.data)], [queue], ([found, None], [None, None]))()
    del x, found
    gc.collect()
    assert len(dlpack._exported) == lent + 1
    queue.wait()
    gc.collect()
    assert len(dlpack._exported) == lent


def test_memory_given_back_while_a_graph_is_captured(cupy: FakeCupy) -> None:
    """The graph is not begun, nor the device waited for, on behalf of something else."""
    queue, stream = queue_of(), cupy.current()
    array = queue.empty(100, np.float32)
    assert isinstance(array.owner, Loan)
    array.owner.streams.add(stream.ptr)
    cupy.capturing |= {queue.stream, stream.ptr}
    recorded = len(cupy.streams[queue.stream].todo)
    del array
    gc.collect()
    assert len(queue.parked) == 1
    other = queue.empty(100, np.float32)
    assert len(queue.parked) == 1
    assert len(cupy.streams[queue.stream].todo) == recorded
    cupy.capturing.clear()
    other[...] = 0
    queue.empty(1, np.float32)
    assert not queue.parked


def test_a_default_stream_of_a_thread_is_not_followed_from_another(cupy: FakeCupy) -> None:
    array = queue_of().empty(100, np.float32)
    array.owner.streams.add(2)  # cudaStreamPerThread
    del array
    gc.collect()
    assert len(queue_of().parked) == 1


def test_threads_of_gccomms_own_use_the_device_of_the_arrays_only(two_devices: FakeCupy) -> None:
    """Their current device is 0, on which a call would make a context of half a gigabyte."""

    def program(comm: Any) -> Any:
        with two_devices.cuda.Device(1):
            work = comm.compressed_allreduce_async(on_device(two_devices, X, 1))
            return from_device(two_devices, work.wait())

    expected = testing.simulate([X, X])[0][0]
    assert all(found.tobytes() == expected.tobytes() for found in testing.run(program, 2))


def test_managed_memory_is_the_devices(cupy: FakeCupy) -> None:
    """A pool of managed memory gives addresses that the host could read, too early."""
    launcher: Any = kernels.of_device("cuda:0").launcher
    cupy.cuda.runtime.pointerGetAttributes = lambda _: type("Attributes", (), {"type": 3, "device": 0})
    assert launcher.owns(1)


def test_memory_that_a_destroyed_stream_has_used_is_used_again_when_the_device_is_done(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may let go of its stream before its results."""
    queue, array = queue_of(), queue_of().empty(100, np.float32)
    array.owner.streams.add(0xDEAD)
    capturing = cupy.cuda.runtime.streamIsCapturing

    def fail(stream: int) -> bool:
        if stream == 0xDEAD:
            raise cupy.cuda.runtime.CUDARuntimeError("cudaErrorInvalidResourceHandle")
        return bool(capturing(stream))

    monkeypatch.setattr(cupy.cuda.runtime, "streamIsCapturing", fail)
    del array
    gc.collect()
    assert len(queue.parked) == 1
