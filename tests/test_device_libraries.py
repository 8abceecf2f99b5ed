"""Arrays on a device of PyTorch, JAX and whoever speaks DLPack or CUDA's array interface.

These libraries have no device here: a tensor in host memory says that it is on one, and what crosses the
border are DLPack's capsules themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gccomm import arrays, testing
from gccomm.arrays import out_view, view
from gccomm.interop import dlpack
from gccomm.kernels.cuda.device import host_bytes
from tests.devices import cupy, other_stream
from tests.fake_cupy import FakeCupy, Stream

__all__ = ["cupy"]

INPUTS = [np.random.default_rng(rank).standard_normal((40, 75)).astype(np.float32) for rank in range(2)]


def late(cupy: FakeCupy, stream: Stream, array: np.ndarray) -> Any:
    """Return device memory whose content comes when a stream does."""
    with stream:
        return cupy.asarray(array)


# Capsules


@pytest.mark.parametrize("name", sorted(dlpack.DTYPES.values()))
def test_capsules_are_what_other_libraries_read(name: str) -> None:
    torch = pytest.importorskip("torch")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    of = ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)
    x = np.arange(6).reshape(2, 3).astype(of)
    export = dlpack.Export(x.ctypes.data, name, x.shape, (1, 0), x)
    assert dlpack.read(export.capsule()) == (x.ctypes.data, name, (2, 3), (3, 1), (1, 0))
    tensor = torch.utils.dlpack.from_dlpack(export.capsule())
    assert str(tensor.dtype) == f"torch.{name}"
    assert tensor.data_ptr() == x.ctypes.data
    assert tensor.tolist() == x.astype(tensor.tolist()[0][0].__class__).tolist()
    there = torch.arange(6).reshape(2, 3).to(tensor.dtype).T
    assert dlpack.read(there.__dlpack__()) == (there.data_ptr(), name, (3, 2), (1, 3), (1, 0))


def test_capsules_keep_memory_until_the_last_user_is_gone() -> None:
    class Owner:
        alive = 0

        def __init__(self) -> None:
            Owner.alive += 1

        def __del__(self) -> None:
            Owner.alive -= 1

    x = np.ones(3)
    export = dlpack.Export(x.ctypes.data, "float64", (3,), (1, 0), Owner())
    used = np.from_dlpack(export)
    unused = export.capsule()
    del export
    assert Owner.alive == 1
    del unused
    assert Owner.alive == 1
    assert used.tolist() == [1, 1, 1]
    del used
    assert Owner.alive == 0


def test_capsules_of_other_things() -> None:
    export = dlpack.Export(0, "float32", (0, 3), (2, 1), None)
    assert dlpack.read(export.capsule()) == (0, "float32", (0, 3), (3, 1), (2, 1))
    assert export.__dlpack_device__() == (2, 1)
    for wanted in ({"copy": True}, {"dl_device": (1, 0)}):
        with pytest.raises(BufferError, match="without a copy, on its own device"):
            export.__dlpack__(**wanted)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="PyCapsule"):
        dlpack.read(None)
    capsule = dlpack.Export(np.ones(1).ctypes.data, "float64", (1,), (1, 0), None).capsule()
    np.from_dlpack(SimpleNamespace(__dlpack__=lambda **_: capsule, __dlpack_device__=lambda: (1, 0)))
    with pytest.raises(ValueError, match="PyCapsule"):
        dlpack.read(capsule)


# PyTorch


@pytest.fixture
def torch(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """PyTorch with tensors that say they are on a device, and a current stream."""
    library = pytest.importorskip("torch")
    from gccomm.interop import torch as bridge

    class Tensor(library.Tensor):  # type: ignore[misc,name-defined]
        device = property(lambda _: library.device("cuda:0"))
        is_cuda = property(lambda _: True)

    Tensor.__module__ = "torch"
    streams = [other_stream(cupy)]

    def make(array: np.ndarray | Any, dtype: Any = None) -> Any:
        memory = late(cupy, streams[-1], array if isinstance(array, np.ndarray) else np.asarray(array))
        plain = library.from_numpy(memory.host())
        made = library.Tensor._make_subclass(Tensor, plain if dtype is None else plain.view(dtype))
        made.memory = memory
        return made

    def from_dlpack(capsule: Any) -> Any:
        found = dlpack.read(capsule)
        dtype = getattr(library, str(found.dtype))
        nbytes = int(np.prod(found.shape)) * dtype.itemsize
        octets = library.from_numpy(host_bytes(found.address, nbytes) if nbytes else np.zeros(0, np.uint8))
        made = library.Tensor._make_subclass(Tensor, octets.view(dtype).reshape(found.shape))
        made.memory = capsule
        return made

    def read(tensor: Any) -> Any:
        streams[-1].synchronize()
        return tensor.as_subclass(library.Tensor).clone()

    def current_stream(number: int) -> SimpleNamespace:
        assert number == 0
        return SimpleNamespace(cuda_stream=streams[-1].ptr)

    monkeypatch.setattr(bridge, "handler_for", lambda kind: bridge._view)
    monkeypatch.setattr(library.utils.dlpack, "from_dlpack", from_dlpack)
    monkeypatch.setattr(library.cuda, "current_stream", current_stream)
    yield SimpleNamespace(library=library, make=make, read=read, streams=streams, Tensor=Tensor)
    arrays._HANDLERS.pop(Tensor, None)


def test_torch_tensors_in_every_layout(torch: Any, cupy: FakeCupy) -> None:
    expected = testing.simulate(INPUTS)[0][0]
    found = testing.simulate([torch.make(x) for x in INPUTS])[0][0]
    assert type(found) is torch.Tensor
    assert torch.read(found).numpy().tobytes() == expected.tobytes()
    turned = testing.simulate([np.ascontiguousarray(x.T[1:]) for x in INPUTS])[0][1]
    found = testing.simulate([torch.make(x).T[1:] for x in INPUTS])[0][1]
    assert torch.read(found).numpy().tobytes() == turned.tobytes()
    assert not cupy.defaults[0].todo, "nothing is for the default stream"


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float64", "complex64", "int64", "uint8", "bool"])
def test_torch_dtypes(name: str, torch: Any) -> None:
    dtype = getattr(torch.library, name)
    plain = torch.library.arange(6).reshape(2, 3).to(dtype)
    octets = np.asarray(plain.view(torch.library.uint8))
    x = torch.make(octets, dtype)
    found = view(x)
    assert (found.kind, found.device, found.shape) == ("torch", "cuda:0", (2, 3))
    total = torch.read(testing.simulate([x, x])[0][0])
    assert total.dtype == dtype
    expected = plain if name == "bool" else plain + plain
    assert torch.library.equal(total, expected)


def test_torch_results_follow_the_stream_of_the_caller(torch: Any, cupy: FakeCupy) -> None:
    expected = testing.run(lambda comm: comm.compressed_allreduce(INPUTS[comm.rank]), 2)[0]
    made = [torch.make(x) for x in INPUTS]
    works: list[Any] = [None, None]
    later = other_stream(cupy)

    def begin(comm: Any) -> Any:
        works[comm.rank] = comm.compressed_allreduce_async(made[comm.rank])
        return works[comm.rank].wait()

    found = testing.run(begin, 2)
    torch.streams.append(later)  # another thread, another stream: it waits for itself
    again = [work.wait() for work in works]
    assert again[0] is found[0]
    assert torch.read(again[0]).numpy().tobytes() == expected.tobytes()


def test_torch_outputs(torch: Any) -> None:
    expected = testing.run(lambda comm: comm.compressed_allreduce(INPUTS[comm.rank]), 2)[0]

    def program(comm: Any) -> Any:
        out = torch.make(np.zeros((40, 75), np.float32))
        wide = torch.make(np.zeros((75, 40), np.float32)).T
        x = torch.make(INPUTS[comm.rank])
        version = out._version
        assert comm.compressed_allreduce(x, out=out) is out
        assert out._version > version
        comm.broadcast(x)
        assert comm.compressed_allreduce(x, codec="raw", out=wide) is wide
        return torch.read(out).numpy(), torch.read(wide).numpy()

    total = INPUTS[0] + INPUTS[1]
    for out, wide in testing.run(program, 2):
        assert out.tobytes() == expected.tobytes()
        assert wide.tobytes() == total.tobytes()
    like = view(torch.make(INPUTS[0]))
    grown = torch.make(INPUTS[0]).requires_grad_()
    with pytest.raises(ValueError, match="requires a gradient"):
        out_view(grown, like)
    with pytest.raises(ValueError, match=r"on cpu cannot take .* on cuda:0"):
        out_view(torch.library.zeros(40, 75), like)


# JAX


class JaxStream:
    """The stream on which JAX computes, and arrays on it."""

    def __init__(self, cupy: FakeCupy) -> None:
        self.cupy, self.stream = cupy, other_stream(cupy)

    def array(self, values: np.ndarray) -> JaxArray:
        return JaxArray(self, late(self.cupy, self.stream, values), str(values.dtype))

    def follow(self, stream: int) -> None:
        event = self.cupy.cuda.Event()
        self.cupy.cuda.runtime.eventRecord(event.ptr, self.stream.ptr)
        self.cupy.cuda.runtime.streamWaitEvent(stream, event.ptr)

    def from_dlpack(self, external: Any) -> JaxArray:
        assert external.__dlpack_device__() == (2, 0)
        capsule = external.__dlpack__(stream=self.stream.ptr)
        found = dlpack.read(capsule)
        memory = self.cupy.ndarray(
            found.shape,
            found.dtype,
            self.cupy.cuda.MemoryPointer(SimpleNamespace(ptr=found.address, cupy=self.cupy, device=0), 0),
        )
        memory.data.capsule = capsule
        return JaxArray(self, memory, str(found.dtype))


class JaxDevice:
    platform = "gpu"


class JaxArray:
    """What a JAX array on a GPU shows of itself."""

    is_fully_addressable = True

    def __init__(self, jax: JaxStream, memory: Any, name: str) -> None:
        self.jax, self.memory, self.name = jax, memory, name
        self.dtype, self.shape = memory.dtype, memory.shape
        self.sharding = SimpleNamespace(device_set={JaxDevice})

    def is_deleted(self) -> bool:
        return False

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        assert stream
        self.jax.follow(stream)
        where = self.memory.data.ptr, self.name, self.shape
        return dlpack.Export(*where, (2, 0), self.memory).capsule()

    def read(self) -> np.ndarray:
        self.jax.stream.synchronize()
        return np.asarray(self.memory.host().copy())


@pytest.fixture
def jax(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> JaxStream:
    library = pytest.importorskip("jax")
    from gccomm.interop import jax as bridge

    made = JaxStream(cupy)
    monkeypatch.setitem(arrays._HANDLERS, JaxArray, bridge._view)
    monkeypatch.setattr(library.dlpack, "from_dlpack", made.from_dlpack)
    return made


def test_jax_arrays_by_dlpack(jax: JaxStream, cupy: FakeCupy) -> None:
    expected = testing.simulate(INPUTS)[0][0]
    found = testing.simulate([jax.array(x) for x in INPUTS])[0]
    assert all(isinstance(y, JaxArray) for y in found)
    assert found[0].read().tobytes() == expected.tobytes()
    with pytest.raises(TypeError, match="immutable"):
        arrays.out_view(pytest.importorskip("jax").numpy.ones(3), view(found[0]))


def test_memory_that_jax_has_had_is_used_again_when_the_device_is_done(
    jax: JaxStream, cupy: FakeCupy
) -> None:
    expected = testing.simulate(INPUTS)[0][0]
    copies = []
    for _ in range(3):
        found = testing.simulate([jax.array(x) for x in INPUTS])[0]
        copy = late(cupy, jax.stream, np.zeros_like(INPUTS[0]))
        with jax.stream:
            copy[...] = found[0].memory
        copies.append(copy)
        del found  # JAX has not even begun to read it
        testing.simulate([late(cupy, cupy.current(), x) for x in INPUTS])
    jax.stream.synchronize()
    assert all(copy.host().tobytes() == expected.tobytes() for copy in copies)


def test_64_bit_numbers_stay_so(jax: JaxStream) -> None:
    xs = [np.arange(5.0), np.arange(5.0)]
    found = testing.simulate([jax.array(x) for x in xs])[0][0]
    assert found.read().tolist() == [0, 2, 4, 6, 8]
    assert found.name == "float64"


# Others


class Interface:
    """An object with CUDA's array interface alone."""

    def __init__(self, memory: Any, **more: Any) -> None:
        self.memory, self.more = memory, more

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        facts = {"shape": self.memory.shape, "typestr": self.memory.dtype.str, "version": 3}
        return {**facts, "data": (self.memory.data.ptr, False), "strides": None, **self.more}


def test_the_array_interface_of_cuda(cupy: FakeCupy) -> None:
    stream = other_stream(cupy)
    expected = testing.simulate(INPUTS)[0][0]
    xs = [Interface(late(cupy, stream, x), stream=stream.ptr) for x in INPUTS]
    found = testing.simulate(xs)[0][0]
    assert isinstance(found, cupy.ndarray)
    assert cupy.asnumpy(found).tobytes() == expected.tobytes()
    strided = [
        Interface(late(cupy, stream, x), stream=stream.ptr, shape=(75, 40), strides=(4, 300)) for x in INPUTS
    ]
    turned = testing.simulate([np.ascontiguousarray(x.T) for x in INPUTS])[0][0]
    assert cupy.asnumpy(testing.simulate(strided)[0][0]).tobytes() == turned.tobytes()
    old = [Interface(late(cupy, cupy.defaults[0], x), version=2) for x in INPUTS]
    assert cupy.asnumpy(testing.simulate(old)[0][0]).tobytes() == expected.tobytes()
    stream.synchronize()
    done = [Interface(x.memory, stream=None) for x in xs]
    assert cupy.asnumpy(testing.simulate(done)[0][0]).tobytes() == expected.tobytes()
    empty = Interface(late(cupy, stream, np.zeros(0)), data=(0, False))
    assert testing.simulate([empty])[0][0].shape == (0,)
    with pytest.raises(TypeError, match="mask"):
        view(Interface(xs[0].memory, mask=object()))
    with pytest.raises(TypeError, match="dtypes are float16"):
        view(Interface(xs[0].memory, typestr=">f4"))


def test_what_speaks_dlpack(cupy: FakeCupy) -> None:
    stream = other_stream(cupy)
    jax = JaxStream(cupy)

    class Known(JaxArray):
        def __array_namespace__(self) -> Any:
            return SimpleNamespace(from_dlpack=jax.from_dlpack)

    class Unknown(JaxArray):
        pass

    expected = testing.simulate(INPUTS)[0][0]
    known = [Known(jax, late(cupy, jax.stream, x), "float32") for x in INPUTS]
    assert testing.simulate(known)[0][0].read().tobytes() == expected.tobytes()
    unknown = [Unknown(jax, late(cupy, jax.stream, x), "float32") for x in INPUTS]
    found = testing.simulate(unknown)[0][0]
    assert isinstance(found, cupy.ndarray)
    assert cupy.asnumpy(found).tobytes() == expected.tobytes()
    assert not stream.todo

    class Broken(JaxArray):
        def __dlpack__(self, **_: Any) -> Any:
            raise BufferError("not now")

    with pytest.raises(TypeError, match=r"through DLPack \(BufferError: not now\)"):
        view(Broken(jax, known[0].memory, "float32"))
