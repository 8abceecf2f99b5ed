"""Dtypes, shapes and memory layouts: what is reduced keeps its kind; what cannot be is refused everywhere."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse

import gccomm
from gccomm.testing import run, simulate

pytestmark = pytest.mark.timeout(60)

CODECS = ["raw", "bf16", "fp16", "uniform"]
INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
FLOATS = ["float16", "float32", "float64", "complex64", "complex128"]


def on_every_rank(call, ranks=3):
    """Return (error type, text) of a call that fails alike on all ranks; the next call must work."""

    def work(comm):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - compared below
            call(comm)
        assert comm.allreduce(1) == comm.size
        return caught.type, str(caught.value)

    seen = run(work, ranks)
    assert len(set(seen)) == 1
    return seen[0]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("count", [3, 1200])
def test_float_dtypes_come_back_with_the_right_values(codec, dtype, count):
    x = np.resize(np.array([1.5, -2, 3]), count).astype(dtype)
    ys, _ = simulate([x, x], codec)
    assert ys[0].dtype == dtype
    assert ys[0].shape == x.shape
    bound = 2 * 3 * 2 / 127 if codec == "uniform" and count > 1023 else 0
    assert np.abs(ys[0].astype(float) - 2 * x.astype(float)).max() <= bound


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("count", [1, 1200])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_complex_numbers_keep_their_imaginary_parts(codec, dtype, count, op):
    x = np.full(count, 1 + 2j, dtype)
    ys, _ = simulate([x, -3 * x, 4 * x], codec, op)
    expected = 2 * (1 + 2j) / (3 if op == "mean" else 1)
    assert ys[0].dtype == dtype
    lossy = codec == "uniform" and 2 * count > 1023
    assert np.abs(ys[0] - expected).max() <= (8 * 3 * 3 / 127 * 1.5 if lossy else 2e-2)


@pytest.mark.parametrize("count", [1, 1200])
def test_booleans_are_a_logical_or(count):
    x = np.arange(count) % 3 == 0
    ys, _ = simulate([x, np.zeros(count, bool), np.arange(count) % 5 == 0])
    assert ys[0].dtype == np.bool_
    assert (ys[0] == (x | (np.arange(count) % 5 == 0))).all()
    assert not simulate([np.zeros(count, bool)] * 3)[0][0].any()
    assert simulate([np.ones(count, bool)] * 3)[0][0].all()


@pytest.mark.parametrize("dtype", [*INTEGERS, "bool"])
def test_mean_of_integers_is_refused_with_the_way_out(dtype):
    kind, text = on_every_rank(lambda comm: comm.allreduce(np.ones(4, dtype), op="mean"))
    assert kind is TypeError
    assert dtype in text
    assert 'op="sum"' in text


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        (np.array([None, 1], object), "object"),
        (np.array(["a", "b"]), "<U1"),
        (np.array([b"a"]), "S1"),
        (np.array([0], "datetime64[s]"), "datetime64"),
        (np.array([0], "timedelta64[s]"), "timedelta64"),
        (np.zeros(2, [("a", "f4"), ("b", "i4")]), "('a', '<f4')"),
        (np.zeros(2, np.longdouble), "float128"),
        (np.zeros(2, ml_dtypes.float8_e4m3fn), "float8_e4m3fn"),
        (np.zeros(2, ml_dtypes.int4), "int4"),
        ("text", "str"),
        (b"bytes", "bytes"),
        (object(), "object"),
        (print, "builtin_function_or_method"),
        (np.ma.array([1.0, 2.0], mask=[False, True]), "MaskedArray"),
        (np.rec.array([(1.0,)], dtype=[("a", "f4")]), "recarray"),
        (scipy.sparse.eye(3, format="csr"), "toarray"),
        ({1, 2}, "set"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_be_reduced_on_one_rank_is_refused_on_every_rank(bad, name):
    kind, text = on_every_rank(lambda comm: comm.allreduce(bad if comm.rank == 1 else np.ones(2, np.float32)))
    assert kind is TypeError
    assert text.startswith("rank 1: ")
    assert name in text


class OnGpu:
    """What an array on a GPU shows of itself."""

    device = "cuda:0"
    __cuda_array_interface__ = {"shape": (2,), "typestr": "<f4", "data": (0, False), "version": 3}  # noqa: RUF012


class OnGpuByDlpack:
    def __dlpack__(self, **_):
        raise AssertionError("device memory must not be asked for")

    def __dlpack_device__(self):
        return 2, 0


@pytest.mark.parametrize("kind", [OnGpu, OnGpuByDlpack])
def test_device_memory_is_refused_with_the_way_to_the_host(kind):
    error, text = on_every_rank(lambda comm: comm.allreduce(kind()))
    assert error is BufferError
    assert "CUDA" in text or "cuda" in text


def test_matrix_and_memmap_come_back_as_their_users_expect(tmp_path):
    matrix = np.arange(6.0).reshape(2, 3).view(np.matrix)
    (y, *_), _ = simulate([matrix] * 3)
    assert type(y) is np.matrix
    assert (y == 3 * matrix).all()
    memory = np.memmap(tmp_path / "x", np.float32, "w+", shape=(4, 3))
    memory[...] = 2
    (y, *_), _ = simulate([memory] * 3, op="mean")
    assert (y == 2).all()
    assert not np.shares_memory(y, memory)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize(
    "x",
    [np.array(1.5, np.float32), np.float32(1.5), np.float16(1.5), 1.5, 1.5 + 0.5j, np.complex64(1j)],
    ids=repr,
)
def test_scalars_keep_their_type_and_shape(codec, op, x):
    for y in run(lambda comm: comm.compressed_allreduce(x, op, codec), 3):
        assert type(y) is type(x)
        assert np.shape(y) == ()
        assert y == (x if op == "mean" else 3 * x)
        if isinstance(x, np.ndarray):
            assert y.dtype == x.dtype


def test_python_integers_and_booleans_keep_their_type():
    for y in run(lambda comm: comm.allreduce([2**40, True, False, np.int8(3)]), 3):
        assert y == [3 * 2**40, True, False, 9]
        assert [type(v) for v in y] == [int, bool, bool, np.int8]
    kind, text = on_every_rank(lambda comm: comm.allreduce(2**70))
    assert kind is OverflowError
    assert "int64" in text


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (3, 0, 5)])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32", "bool", "complex64"])
def test_empty_arrays_come_back_empty(codec, shape, dtype):
    for y in run(lambda comm: comm.compressed_allreduce(np.empty(shape, dtype), codec=codec), 3):
        assert y.shape == shape
        assert y.dtype == dtype


@pytest.mark.parametrize("codec", CODECS)
def test_empty_trees_and_empty_leaves_beside_full_ones(codec):
    tree = {
        "none": [],
        "empty": np.empty((0, 4), np.float32),
        "full": np.ones(1500, np.float32),
        "deep": ({}, ()),
    }

    def work(comm):
        reducer = gccomm.Reducer(codec, comm=comm)
        return reducer([]), reducer({}), reducer(tree), reducer(None)

    for nothing, also, y, none in run(work, 3):
        assert (nothing, also, none) == ([], {}, None)
        assert y["none"] == []
        assert y["deep"] == ({}, ())
        assert y["empty"].shape == (0, 4)
        assert np.abs(y["full"] - 1).max() < 0.03


def layouts(x, rank):
    """Return the same array in a memory layout that depends on the rank."""
    if rank % 4 == 0:
        return np.ascontiguousarray(x)
    if rank % 4 == 1:
        return np.asfortranarray(x)
    if rank % 4 == 2:
        wide = np.full([2 * n for n in x.shape], 99, x.dtype)
        view = wide[tuple(slice(None, None, -2) for _ in x.shape)]
        view[...] = x
        return view
    return x.astype(x.dtype.newbyteorder(">"))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
@pytest.mark.parametrize("shape", [(5, 7), (40, 60)])
def test_ranks_may_hold_different_memory_orders(codec, dtype, shape):
    rng = np.random.default_rng(3)
    xs = [rng.integers(0, 30, shape).astype(dtype) for _ in range(4)]
    mixed = [layouts(x, r) for r, x in enumerate(xs)]
    ys, _ = simulate(mixed, codec, exact_below=1000)
    plain, _ = simulate(xs, codec, exact_below=1000)
    for y in ys:
        assert (y == plain[0]).all()
    assert np.abs(ys[0].astype(complex) - np.sum(xs, axis=0)).max() <= 4 * 30 * 4 / 127 * 1.5


@pytest.mark.parametrize("value", [2**53 + 1, 2**62 + 3, -(2**62) - 5])
def test_integer_counters_never_pass_through_a_float(value):
    for y in run(lambda comm: comm.compressed_allreduce({"count": np.int64(value if comm.rank else 1)}), 2):
        assert y["count"] == value + 1
    assert run(lambda comm: comm.broadcast(np.array([value])), 2)[1][0] == value


def test_inputs_are_never_changed():
    def work(comm):
        inputs = [np.linspace(0, 50, 3000).astype(d) for d in (*FLOATS, *INTEGERS)]
        copies = [x.copy() for x in inputs]
        for codec in CODECS:
            comm.compressed_allreduce(inputs, codec=codec)
        for x in inputs:
            x.flags.writeable = False
        comm.compressed_allreduce(inputs)
        return all(a.tobytes() == b.tobytes() for a, b in zip(inputs, copies, strict=True))

    assert all(run(work, 2))
