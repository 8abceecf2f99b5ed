"""Objects that say wrong or odd things of memory on a device: refused on every rank, and the next call works.

What cannot be refused is read as it was named; nothing counts as zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gccomm import testing
from gccomm.interop import dlpack
from tests.devices import cupy, on_device, two_devices
from tests.fake_cupy import FakeCupy

__all__ = ["cupy", "two_devices"]

X = np.arange(3000, dtype=np.float32)


def made(cupy: FakeCupy) -> Any:
    """Return the array on the device, complete: objects that name no stream need no order."""
    there = on_device(cupy, X)
    cupy.asnumpy(there)
    return there


class Interface:
    """An object with CUDA's array interface."""

    def __init__(self, memory: Any, **facts: Any) -> None:
        self.memory = memory
        plain = {"shape": (3000,), "typestr": "<f4", "data": (memory.data.ptr, False), "version": 3}
        self.__cuda_array_interface__ = {**plain, **facts}


class Producer:
    """An object with DLPack, of whose capsule some fields are changed."""

    def __init__(self, memory: Any, error: Exception | None = None, **fields: Any) -> None:
        self.memory, self.error, self.fields = memory, error, fields
        self.device = fields.pop("device", (2, 0))
        self.where = fields.pop("address", memory.data.ptr), fields.pop("shape", (3000,))
        self.inside = fields.pop("inside", (2, 0))

    def __dlpack_device__(self) -> Any:
        return self.device

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        if self.error is not None:
            raise self.error
        capsule = dlpack.Export(self.where[0], "float32", self.where[1], self.inside, self.memory).capsule()
        tensor = dlpack._Managed.from_address(dlpack._get_pointer(capsule, b"dltensor")).tensor
        for name, value in self.fields.items():
            if name == "strides":
                for axis, stride in enumerate(value):
                    tensor.strides[axis] = stride
            else:
                setattr(tensor, name, value)
        return capsule


def refused(cupy: FakeCupy, make: Any, text: str, error: type[Exception] = TypeError) -> None:
    """Have rank 1 of 2 pass what `make` gives of an array on the device, beside a good one of rank 0."""

    def program(comm: Any) -> Any:
        there = on_device(cupy, X)
        with pytest.raises(error, match=rf"rank 1: (cannot reduce .*)?{text}"):
            comm.compressed_allreduce(make(there) if comm.rank else there)
        return cupy.asnumpy(comm.compressed_allreduce(there, codec="raw"))

    assert all((found == 2 * X).all() for found in testing.run(program, 2))


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"typestr": "zz"}, "cannot be read .*data type 'zz' not understood.*'typestr': 'zz'"),
        ({"typestr": None}, "typestr must be a text, not None"),
        ({"typestr": ">f4"}, "its elements have the dtype >f4"),
        ({"shape": None}, "cannot be read .*'NoneType' object is not iterable"),
        ({"shape": (3000.5,)}, "cannot be read .*'float' object"),
        ({"shape": (-1,)}, r"shape \(-1,\).* and no array has these"),
        ({"shape": (2**62, 8)}, r"shape \(4611686018427387904, 8\).* and no memory is there"),
        ({"shape": (3000, 2**40)}, "not all of that is memory of cuda:0"),
        ({"strides": ()}, r"strides \(\) in bytes, and no array has these"),
        ({"strides": (4, 4)}, r"strides \(4, 4\) in bytes, and no array has these"),
        ({"strides": (-4,)}, "not all of that is memory of cuda:0"),
        ({"data": None}, "cannot be read .*not subscriptable"),
        ({"data": (0, False)}, "address 0x0, .* and no memory is there"),
        ({"data": (X.ctypes.data, False)}, "is no memory of a CUDA device"),
        ({"version": "x"}, "cannot be read"),
        ({"stream": -1}, "there is no stream -1"),
        ({"stream": "a"}, "cannot be read"),
    ],
)
def test_interfaces_that_name_no_array(facts: dict[str, Any], text: str, cupy: FakeCupy) -> None:
    refused(cupy, lambda there: Interface(there, **facts), text)


def test_an_interface_that_is_no_mapping(cupy: FakeCupy) -> None:
    class Number:
        __cuda_array_interface__ = 5

    refused(cupy, lambda _: Number(), "its __cuda_array_interface__ cannot be read .*: 5; pass a CuPy array")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"device": None}, "its __dlpack_device__ must give two integers"),
        ({"device": "cuda"}, "its __dlpack_device__ must give two integers"),
        ({"device": (2, None)}, "its __dlpack_device__ must give two integers"),
        ({"inside": (2, 1)}, r"capsule says device \(2, 1\), and the object itself cuda:0"),
        ({"inside": (1, 0)}, r"capsule says device \(1, 0\), and the object itself cuda:0"),
        ({"ndim": -1}, "-1 axes and no extents"),
        ({"shape": (-3,)}, r"shape \(-3,\).* and no array has these"),
        ({"shape": (2**59,)}, "not all of that is memory of cuda:0"),
        ({"address": 0}, "address 0x0, .* and no memory is there"),
        ({"address": X.ctypes.data}, "not all of that is memory of cuda:0"),
        ({"byte_offset": 4}, "not all of that is memory of cuda:0"),
        ({"strides": (2,)}, "not all of that is memory of cuda:0"),
        ({"lanes": 4}, "the dtypes are float16"),
        ({"error": AttributeError("no such stream")}, r"DLPack \(AttributeError: no such stream\)"),
        ({"error": AssertionError("busy")}, r"DLPack \(AssertionError: busy\)"),
    ],
)
def test_capsules_that_name_no_array(fields: dict[str, Any], text: str, cupy: FakeCupy) -> None:
    refused(cupy, lambda there: Producer(there, **fields), text)


def test_memory_of_another_device(two_devices: FakeCupy) -> None:
    elsewhere = on_device(two_devices, X, 1)
    text = "not all of that is memory of cuda:0"
    refused(two_devices, lambda _: Producer(elsewhere), text)


def test_cupy_arrays_of_the_other_byte_order(cupy: FakeCupy) -> None:
    refused(cupy, lambda there: cupy.ndarray((3000,), ">f4", there.data), "of dtype >f4 .*convert")


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, X),
        ({"stream": 1}, X),
        ({"version": 2}, X),
        ({"strides": (8,), "shape": (1500,)}, X[::2]),
        ({"strides": (0,)}, np.broadcast_to(X[0], (3000,))),
        ({"shape": (0,), "data": (0, False)}, X[:0]),
    ],
)
def test_odd_interfaces_are_read(facts: dict[str, Any], expected: Any, cupy: FakeCupy) -> None:
    def program(comm: Any) -> Any:
        return cupy.asnumpy(comm.allreduce(Interface(made(cupy), **facts)))

    assert all((found == 2 * expected).all() for found in testing.run(program, 2))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"byte_offset": 4, "shape": (2999,)}, X[1:]),
        ({"strides": (2,), "shape": (1500,)}, X[::2]),
        ({"strides": (-1,), "byte_offset": 4 * 2999}, X[::-1]),
        ({"strides": (0,)}, np.broadcast_to(X[0], (3000,))),
        ({"device": (13, 0), "inside": (13, 0)}, X),
        ({"shape": (0,), "address": 0}, X[:0]),
    ],
)
def test_odd_capsules_are_read(fields: dict[str, Any], expected: Any, cupy: FakeCupy) -> None:
    def program(comm: Any) -> Any:
        return cupy.asnumpy(comm.allreduce(Producer(made(cupy), **fields)))

    assert all((found == 2 * expected).all() for found in testing.run(program, 2))
