"""Views of NumPy arrays, scalars, buffers and DLPack objects: what is read, comes back, is refused."""

from __future__ import annotations

import array
import ctypes
import decimal
import enum
import gc
import sys
import weakref

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gccomm.arrays import Ranges, View, view

REALS = ["float16", "float32", "float64", "bool"] + [
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def check(x, *, shared: bool, kind: str = "numpy") -> View:
    """Check the flat memory of a view of what NumPy can read, and return the view."""
    v = view(x)
    assert isinstance(v, View)
    assert v.data.ndim == 1
    assert v.data.flags.c_contiguous
    assert v.data.flags.aligned
    assert v.data.dtype.isnative
    assert v.pointer == v.data.ctypes.data
    assert (v.kind, v.device) == (kind, "cpu")
    assert v.owner is x
    seen = np.asarray(x)
    assert v.shape == seen.shape
    assert int(np.prod(v.row_shape)) == v.data.size
    assert np.shares_memory(v.data, seen) is shared
    expected = np.array(
        seen.reshape(-1), dtype=seen.dtype.newbyteorder("=") if seen.dtype != BFLOAT16 else seen.dtype
    )
    assert v.data.tobytes() == expected.tobytes()
    return v


def round_trip(x):
    v = view(x)
    return v.wrap(v.data.copy())


def same_array(y, x) -> None:
    assert type(y) is np.ndarray
    assert y.dtype == x.dtype
    assert y.shape == x.shape
    assert y.tobytes() == np.asarray(x).tobytes()
    assert not np.shares_memory(y, x)


@pytest.mark.parametrize("dtype", [*REALS, "complex64", "complex128", BFLOAT16])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (0,), (0, 4), (4, 0)])
def test_contiguous_arrays_are_read_in_place(dtype, shape):
    x = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    v = check(x, shared=x.size > 0)
    same_array(v.wrap(v.data.copy()), x)
    assert v.user_dtype == np.dtype(dtype).name


@pytest.mark.parametrize("dtype", REALS)
def test_names_and_storage_of_real_dtypes(dtype):
    v = view(np.zeros((2, 3), dtype))
    assert (v.dtype, v.user_dtype, v.data.dtype, v.row_shape) == (dtype, dtype, np.dtype(dtype), (2, 3))


@pytest.mark.parametrize(("dtype", "real"), [("complex64", "float32"), ("complex128", "float64")])
def test_complex_is_two_reals(dtype, real):
    x = np.array([[1 + 2j, 3 - 4j]], dtype)
    v = view(x)
    assert (v.dtype, v.user_dtype, v.shape, v.row_shape) == (real, dtype, (1, 2), (1, 4))
    assert v.data.tolist() == [1, 2, 3, -4]
    assert view(x[0, 0]).row_shape == (2,)
    assert view(np.array(1j, dtype)).row_shape == (2,)
    assert view(np.zeros((3, 0), dtype)).row_shape == (3, 0)
    same_array(round_trip(x[:, ::-1]), x[:, ::-1])


def test_bfloat16_is_stored_as_uint16():
    x = np.array([1.5, -2, 3], ml_dtypes.bfloat16)
    v = view(x)
    assert (v.dtype, v.data.dtype) == ("bfloat16", np.dtype(np.uint16))
    assert v.data.tolist() == [0x3FC0, 0xC000, 0x4040]
    y = v.wrap(np.array([0x3F80, 0, 0], np.uint16))
    assert y.dtype == BFLOAT16
    assert y.astype(np.float32).tolist() == [1, 0, 0]
    check(x[::-1], shared=False)


def test_read_only_arrays_are_read_in_place_and_the_result_is_writeable():
    x = np.arange(4, dtype=np.float32)
    x.flags.writeable = False
    v = check(x, shared=True)
    assert not v.data.flags.writeable
    assert v.wrap(v.data.copy()).flags.writeable


@pytest.mark.parametrize("dtype", ["float32", "complex64", "uint16", BFLOAT16])
@pytest.mark.parametrize(
    "layout",
    [
        np.asfortranarray,
        lambda a: a[:, ::2],
        lambda a: a[::-1, ::-1],
        lambda a: a.T,
        lambda a: np.broadcast_to(a[0], (3, 6)),
    ],
    ids=["fortran", "strided", "negative", "transposed", "broadcast"],
)
def test_other_layouts_are_copied_in_logical_order(layout, dtype):
    x = layout(np.arange(24).reshape(4, 6).astype(dtype))
    v = check(x, shared=False)
    same_array(v.wrap(v.data.copy()), x)


def test_memory_order_has_no_meaning():
    c = np.arange(12, dtype=np.float64).reshape(3, 4)
    assert view(c).data.tobytes() == view(np.asfortranarray(c)).data.tobytes()


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">f2", ">c8", ">c16", ">i4", ">u8", "<f4"])
def test_byte_order_is_kept(dtype):
    x = np.array([[1, 2], [3, 70]], dtype)
    v = check(x, shared=np.dtype(dtype).isnative)
    y = v.wrap(v.data.copy())
    same_array(y, x)
    assert y.dtype.byteorder == x.dtype.byteorder


def test_unaligned_memory_is_copied():
    x = np.frombuffer(b"\0" + np.arange(3, dtype=np.float32).tobytes(), np.uint8)[1:].view(np.float32)
    assert not x.flags.aligned
    check(x, shared=False)
    same_array(round_trip(x), x)


def test_memmap(tmp_path):
    x = np.memmap(tmp_path / "x", np.float32, "w+", shape=(3, 2))
    x[:] = 5
    v = check(x, shared=True)
    same_array(v.wrap(v.data.copy()), x)


def test_matrix_stays_matrix():
    x = np.arange(6.0).reshape(2, 3).view(np.matrix)
    v = check(x, shared=True)
    y = v.wrap(2 * v.data)
    assert type(y) is np.matrix
    assert (y == 2 * x).all()
    assert type(round_trip(x.T)) is np.matrix


@given(
    hnp.arrays(
        st.sampled_from([np.dtype(d) for d in ("<f4", ">f4", "<f2", ">i8", "|u1", "<c8", ">c16", "|b1")]),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
    ),
    st.data(),
)
def test_any_layout_round_trips(x, data):
    axes = data.draw(st.permutations(range(x.ndim)))
    steps = data.draw(st.lists(st.sampled_from([1, 2, -1, -2]), min_size=x.ndim, max_size=x.ndim))
    x = x.transpose(axes)[(*(slice(None, None, step) for step in steps), ...)]
    same_array(round_trip(x), x)


@pytest.mark.parametrize("dtype", [*REALS, "complex64", "complex128", BFLOAT16])
def test_numpy_scalars(dtype):
    x = np.dtype(dtype).type(1)
    v = view(x)
    assert (v.shape, v.kind, v.user_dtype) == ((), "numpy", np.dtype(dtype).name)
    y = v.wrap(v.data.copy())
    assert type(y) is type(x)
    assert y == x


@pytest.mark.parametrize(
    ("x", "dtype"),
    [
        (True, "bool"),
        (-3, "int64"),
        (2**63 - 1, "int64"),
        (-(2**63), "int64"),
        (1.5, "float64"),
        (1 - 2j, "complex128"),
    ],
)
def test_python_scalars(x, dtype):
    v = view(x)
    assert (v.shape, v.kind, v.user_dtype) == ((), "python", dtype)
    y = v.wrap(v.data.copy())
    assert type(y) is type(x)
    assert y == x


@pytest.mark.parametrize("x", [2**63, -(2**63) - 1, 10**30])
def test_python_integers_beyond_int64(x):
    with pytest.raises(OverflowError, match=r"int64.*np\.uint64\(x\)"):
        view(x)


def test_subclasses_of_python_scalars_come_back_plain():
    color = enum.IntEnum("color", "RED BLUE")
    assert type(round_trip(color.BLUE)) is int
    assert round_trip(color.BLUE) == 2


def test_zero_dimensional_arrays_stay_arrays():
    y = round_trip(np.array(1.5, np.float32))
    assert type(y) is np.ndarray
    assert y.shape == ()


@pytest.mark.parametrize(
    "x",
    [
        array.array("f", [1, 2, 3]),
        array.array("q", [-1, 5]),
        bytearray(b"\x01\x02"),
        memoryview(b"\x01\x02\x03"),
        memoryview(np.arange(6.0).reshape(2, 3)),
        (ctypes.c_float * 3)(1, 2, 3),
    ],
    ids=["array-f", "array-q", "bytearray", "memoryview", "memoryview-2d", "ctypes"],
)
def test_buffers_come_back_as_numpy(x):
    seen = np.asarray(memoryview(x))
    v = view(x)
    assert (v.kind, v.shape) == ("buffer", seen.shape)
    assert np.shares_memory(v.data, seen)
    same_array(v.wrap(v.data.copy()), seen)


def test_strided_buffer_is_copied():
    v = view(memoryview(np.arange(6.0))[::2])
    assert v.data.tolist() == [0, 2, 4]


class Exporter:
    """An array of a small library that speaks DLPack."""

    def __init__(self, values, device=(1, 0)):
        self.values = values
        self.dlpack_device = device

    def __dlpack__(self, **options):
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.dlpack_device


class Standard(Exporter):
    """The same with a namespace of the array API standard, and with devices."""

    device = "slow"
    moved = False

    def __array_namespace__(self):
        return StandardNamespace

    def to_device(self, device):
        copy = Standard(self.values)
        copy.device, copy.moved = device, True
        return copy


class StandardNamespace:
    @staticmethod
    def from_dlpack(x):
        return Standard(np.from_dlpack(x))


def test_dlpack_object_without_a_namespace_comes_back_as_numpy():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    v = view(Exporter(x))
    assert v.kind == "dlpack"
    assert np.shares_memory(v.data, x)
    same_array(v.wrap(v.data.copy()), x)


def test_dlpack_object_with_a_namespace_comes_back_in_its_library_and_on_its_device():
    x = Standard(np.array([1 + 1j, 2], np.complex64))
    v = view(x)
    y = v.wrap(2 * v.data)
    assert type(y) is Standard
    assert y.values.tolist() == [2 + 2j, 4]
    assert not y.moved
    x.device = "fast"
    moved = view(x).wrap(v.data.copy())
    assert (moved.device, moved.moved) == ("fast", True)


class NoSuchType:
    def __dlpack__(self, **options):
        raise BufferError("unknown dtype")

    def __dlpack_device__(self):
        return (1, 0)


class OnCuda:
    """An array that offers an address in the memory of a GPU, as CuPy's do."""

    shape = (3,)
    dtype = np.dtype("float32")
    device = "cuda:1"

    @property
    def __cuda_array_interface__(self):
        return {"shape": (3,), "typestr": "<f4", "data": (1, False), "version": 3}


@pytest.mark.parametrize("x", [OnCuda(), Exporter(np.ones(3), (2, 1)), Exporter(np.ones(3), (13, 0))])
def test_gpu_arrays_need_cupy(x, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(BufferError, match=r"GPU.*CuPy.*pip install \"gccomm\[cuda12\]\".*host"):
        view(x)


def test_gpus_without_cuda_are_refused():
    with pytest.raises(BufferError, match=r"GPU memory \(ROCm\).*only that of CUDA.*host"):
        view(Exporter(np.ones(3), (10, 0)))


def test_gpu_error_names_the_array(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(BufferError, match=r"OnCuda of dtype float32 of shape \(3,\).*cuda:0.*asnumpy"):
        view(OnCuda())


def test_unknown_dlpack_devices_and_dtypes():
    with pytest.raises(BufferError, match="DLPack type 8"):
        view(Exporter(np.ones(3), (8, 0)))
    with pytest.raises(TypeError, match="unknown dtype"):
        view(NoSuchType())


class Tagged(np.ndarray):
    """A subclass with a meaning of its own."""


REFUSED = {
    "object": (np.array([1, None]), r"numpy\.ndarray of dtype object of shape \(2,\).*astype\(np\.float64\)"),
    "text": (np.array(["a"]), "text"),
    "bytes-array": (np.array([b"a"]), "text"),
    "datetime": (np.array(["2020-01-01"], "M8[D]"), r"datetime64.*view\(np\.int64\)"),
    "timedelta": (np.timedelta64(3, "s"), r"timedelta64.*view\(np\.int64\)"),
    "structured": (np.zeros(2, [("x", "f4"), ("y", "f4")]), r"x\['x'\]"),
    "void": (np.zeros(2, "V3"), "dtypes are float16, bfloat16"),
    "masked": (np.ma.array([1, 2], mask=[0, 1]), r"MaskedArray.*filled\(0\)"),
    "subclass": (np.ones(2).view(Tagged), r"Tagged of dtype float64 of shape \(2,\).*np\.asarray\(x\)"),
    "longdouble": (np.ones(2, np.longdouble), "longdouble|float128|convert to float64"),
    "longdouble-scalar": (np.longdouble(1), "convert to float64"),
    "clongdouble": (np.ones(2, np.clongdouble), "complex128"),
    "float8": (np.ones(2, ml_dtypes.float8_e4m3fn), "float8_e4m3fn.*dtypes are"),
    "int4": (np.ones(2, ml_dtypes.int4), "int4.*dtypes are"),
    "str": ("abc", "str: text"),
    "bytes": (b"abc", "bytes: text"),
    "list": ([1.0, 2.0], r"list.*np\.asarray\(x\)"),
    "decimal": (decimal.Decimal(1), r"decimal\.Decimal.*np\.asarray\(x\)"),
    "none": (None, "NoneType"),
    "characters": (memoryview(b"ab").cast("c"), "text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_type_dtype_shape_and_remedy(name):
    x, text = REFUSED[name]
    with pytest.raises(TypeError, match=text):
        view(x)


def test_sparse_arrays_are_refused():
    sparse = pytest.importorskip("scipy.sparse")
    with pytest.raises(TypeError, match=r"toarray\(\)"):
        view(sparse.csr_array(np.eye(3)))


@pytest.mark.parametrize(
    "result", [np.zeros(3, np.float64), np.zeros(2, np.float32), np.zeros((3, 1), np.float32)]
)
def test_wrap_checks_the_result(result):
    with pytest.raises(ValueError, match="does not fit"):
        view(np.zeros(3, np.float32)).wrap(result)


def test_wrap_hands_memory_over_without_a_copy():
    v = view(np.zeros((2, 3), np.float32))
    result = np.arange(6, dtype=np.float32)
    y = v.wrap(result)
    assert np.shares_memory(y, result)
    alive = weakref.ref(result)
    del result
    gc.collect()
    assert alive() is not None  # pooled memory goes back when the caller drops the array, not before
    del y
    gc.collect()
    assert alive() is None


def test_view_keeps_its_owner_alive():
    x = np.ones(5, np.float32)
    alive = weakref.ref(x)
    v = view(x)
    del x
    gc.collect()
    assert alive() is not None
    assert v.data.tolist() == [1] * 5


def test_repr_does_not_print_the_elements():
    assert "data" not in repr(view(np.ones(5, np.float32)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.ones((2, 3), np.float32),
        lambda: np.ones((2, 3)).view(np.matrix),
        lambda: Standard(np.ones((2, 3), np.complex64)),
        lambda: Exporter(np.ones((2, 3), np.float16)),
    ],
)
def test_detached_view_wraps_without_its_owner(make):
    x = make()
    v = view(x)
    alive, memory = weakref.ref(x), weakref.ref(v.data)
    result = v.data.copy()
    expected = v.wrap(result.copy())
    d = v.detached()
    del x, v
    gc.collect()
    assert alive() is None
    assert memory() is None
    y = d.wrap(result)
    assert type(y) is type(expected)
    assert np.array_equal(getattr(y, "values", y), getattr(expected, "values", expected))


def test_ranges_of_views_that_share_memory():
    x = np.arange(10, dtype=np.float32)
    views = [view(x), None, view(x[:5]), view(x[5:]), view(x[5:][:0]), view(x[4:5]), view(np.ones(3))]
    ranges = Ranges(views)
    assert ranges.hits(view(x)) == [0, 2, 3, 5]
    assert ranges.hits(view(x[:6])) == [0, 2, 3, 5]
    assert ranges.hits(view(x[5:])) == [0, 3]
    assert ranges.hits(view(x[4:5])) == [0, 2, 5]
    assert ranges.hits(view(x[5:][:0])) == []
    assert ranges.hits(views[6]) == [6]
    assert Ranges([]).hits(view(x)) == []
