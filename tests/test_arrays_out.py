"""Output arrays: what is accepted, where the elements are written, what is refused."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from gccomm.arrays import Ranges, out_view, view


def ones_like(x):
    return view(np.ones(x.shape, x.dtype.newbyteorder("=")))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "bool", "complex64", "complex128"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 2)])
def test_contiguous_out_is_written_in_place(dtype, shape):
    out = np.zeros(shape, dtype)
    v = out_view(out, ones_like(out))
    assert v.owner is out
    assert v.kind == "numpy"
    assert np.shares_memory(v.data, out) or out.size == 0
    v.data[...] = 1
    before = out.copy()
    v.commit()
    assert out.tobytes() == before.tobytes()
    assert v.data.all()


def test_bfloat16_out():
    out = np.zeros((2, 2), ml_dtypes.bfloat16)
    for target in (out, out.T):
        v = out_view(target, view(np.ones((2, 2), ml_dtypes.bfloat16)))
        v.data[:] = [0x3F80, 0x4000, 0x4040, 0x4080]
        v.commit()
        assert target.astype(np.float32).tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.zeros((6, 8), np.float32)[::2, ::2],
        lambda: np.zeros((3, 4), np.float32)[::-1, ::-1],
        lambda: np.zeros((4, 3), np.float32).T,
        lambda: np.zeros((3, 4), ">f4"),
        lambda: np.zeros((4, 3), ">f4").T,
        lambda: np.zeros(49, np.uint8)[1:].view(np.float32).reshape(3, 4),
    ],
    ids=["strided", "negative", "transposed", "swapped", "swapped-transposed", "unaligned"],
)
def test_other_layouts_are_written_by_commit(make):
    out = make()
    v = out_view(out, view(np.ones((3, 4), np.float32)))
    assert not np.shares_memory(v.data, out)
    v.data[:] = np.arange(12)
    assert not out.any()  # nothing is seen before it is committed
    v.commit()
    assert out.tolist() == np.arange(12).reshape(3, 4).tolist()


def test_commit_leaves_the_gaps_alone():
    base = np.full(10, 7, np.complex64)
    v = out_view(base[::2], view(np.ones(5, np.complex64)))
    v.data[:] = 1
    v.commit()
    assert base.tolist() == [1 + 1j, 7] * 5


def test_wrap_fills_and_returns_out():
    out = np.zeros(6, np.float32)[::2]
    v = out_view(out, view(np.ones(3, np.float32)))
    assert v.wrap(np.array([1, 2, 3], np.float32)) is out
    assert out.tolist() == [1, 2, 3]
    v.data[:] = 4
    assert v.wrap(v.data) is out
    assert out.tolist() == [4, 4, 4]


def test_out_may_be_a_matrix_or_a_memmap(tmp_path):
    like = view(np.ones((2, 2), np.float32))
    matrix = np.zeros((2, 2), np.float32).view(np.matrix)
    mapped = np.memmap(tmp_path / "out", np.float32, "w+", shape=(2, 2))
    for out in (matrix, mapped):
        assert out_view(out, like).wrap(np.arange(4, dtype=np.float32)) is out
        assert np.asarray(out).tolist() == [[0, 1], [2, 3]]


def test_out_for_scalars_is_zero_dimensional():
    out = np.zeros((), np.float64)
    assert out_view(out, view(2.5)).wrap(np.array([2.5])) is out
    assert out == 2.5
    with pytest.raises(ValueError, match=r"shape \(1,\)"):
        out_view(np.zeros(1), view(2.5))


@pytest.mark.parametrize(
    ("out", "like"),
    [
        (np.zeros(3, np.float32), np.zeros(4, np.float32)),
        (np.zeros((1, 3), np.float32), np.zeros(3, np.float32)),
        (np.zeros(3, np.float64), np.zeros(3, np.float32)),
        (np.zeros(3, np.uint16), np.zeros(3, ml_dtypes.bfloat16)),
        (np.zeros(3, np.float32), np.zeros(3, np.complex64)),
        (np.zeros(0, np.float32), np.zeros(0, np.complex64)),
    ],
)
def test_shape_and_dtype_must_be_the_results(out, like):
    with pytest.raises(ValueError, match="`out` of dtype") as caught:
        out_view(out, view(like))
    for part in (str(out.dtype), str(out.shape), str(like.dtype), str(like.shape)):
        assert part in str(caught.value)


def test_read_only_out():
    out = np.zeros(3, np.float32)
    out.flags.writeable = False
    with pytest.raises(BufferError, match=r"read-only.*float32.*\(3,\)"):
        out_view(out, view(np.ones(3, np.float32)))


def strided(shape, strides, dtype=np.float32):
    return as_strided(np.zeros(256, dtype)[128:], shape, strides)


@pytest.mark.parametrize(
    "out",
    [
        strided((3, 4), (0, 4)),
        strided((3, 4), (4, 4)),
        strided((5,), (2,)),
        strided((3, 4), (-4, 4)),
        strided((2, 3), (8, 4)),
        strided((4, 4), (8, 12)),
    ],
    ids=["broadcast", "window", "half-items", "mirrored", "touching", "interleaved"],
)
def test_out_that_overlaps_itself(out):
    with pytest.raises(BufferError, match="share memory with each other"):
        out_view(out, view(np.ones(out.shape, np.float32)))


@pytest.mark.parametrize(
    "out",
    [strided((2, 3), (4, 8)), strided((3, 2), (8, 12)), strided((1, 4), (0, 4)), strided((0, 4), (0, 0))],
    ids=["interleaved-fits", "interleaved-gaps", "one-row", "empty"],
)
def test_unusual_strides_that_do_not_overlap(out):
    values = np.arange(out.size, dtype=np.float32)
    assert out_view(out, view(np.ones(out.shape, np.float32))).wrap(values) is out
    assert out.tolist() == values.reshape(out.shape).tolist()


@pytest.mark.parametrize("out", [[0.0], 1.0, np.float32(1), bytearray(12), np.ma.zeros(3, np.float32), None])
def test_out_of_other_kinds(out):
    with pytest.raises(TypeError, match=r"must be a writeable numpy\.ndarray"):
        out_view(out, view(np.ones(3, np.float32)))


def test_out_of_unknown_dtype():
    with pytest.raises(TypeError, match="object"):
        out_view(np.zeros(3, object), view(np.ones(3, np.float32)))


def test_out_may_be_or_overlap_the_input():
    x = np.arange(10, dtype=np.float32)
    assert Ranges([view(x)]).hits(out_view(x, view(x)))
    assert Ranges([view(x[:6])]).hits(out_view(x[2:8], view(x[:6])))
    assert not Ranges([view(x[:5])]).hits(out_view(x[5:], view(x[:5])))
    # Through temporaries nothing is overwritten before the commit.
    assert not Ranges([view(x[::2])]).hits(out_view(x[::2], view(x[::2])))
