"""Views of torch tensors: any layout, bfloat16, autograd; and tensors as `out`."""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from gccomm.arrays import Ranges, out_view, view

torch = pytest.importorskip("torch")

DTYPES = [
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
]


def check(x, y) -> None:
    assert type(y) is torch.Tensor
    assert (y.dtype, y.shape, y.device) == (x.dtype, x.shape, x.device)
    assert not y.requires_grad
    assert y.tolist() == x.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0, 4)])
def test_round_trip(dtype, shape):
    x = torch.ones(shape, dtype=getattr(torch, dtype))
    v = view(x)
    assert (v.kind, v.device, v.shape, v.user_dtype) == ("torch", "cpu", shape, dtype)
    assert v.pointer == x.data_ptr() or x.numel() == 0
    check(x, v.wrap(v.data.copy()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x.t(),
        lambda x: x[:, ::2],
        lambda x: x[0].expand(3, 6),
        lambda x: x.reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    ],
    ids=["transposed", "strided", "expanded", "channels-last"],
)
def test_other_layouts(layout, dtype):
    x = layout(torch.arange(24).reshape(4, 6).to(getattr(torch, dtype)))
    v = view(x)
    y = v.wrap(v.data.copy())
    check(x, y)
    assert y.is_contiguous()


def test_bfloat16_bits():
    v = view(torch.tensor([1.5, -2, 3], dtype=torch.bfloat16))
    assert (v.dtype, v.data.dtype, v.data.tolist()) == ("bfloat16", np.uint16, [0x3FC0, 0xC000, 0x4040])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_that_require_a_gradient(dtype):
    x = torch.ones(3, dtype=dtype, requires_grad=True)
    for source in (x, x * 2, torch.nn.Parameter(torch.ones(3, dtype=dtype))):
        v = view(source)
        y = v.wrap(v.data.copy())
        check(source.detach(), y)
        assert source.requires_grad


def test_conjugation_that_was_put_off():
    x = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert x.is_conj()
    assert x.imag.is_neg()
    assert view(x).data.tolist() == [1, -2, 3, 4]
    assert view(x.imag).data.tolist() == [-2, 4]


def quantised():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)


class Tagged(torch.Tensor):
    """A subclass with a meaning of its own."""


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.eye(3).to_sparse(), r"torch\.float32.*to_dense\(\)"),
        (quantised, r"dequantize\(\)"),
        (lambda: torch.ones(3, device="meta"), "meta device"),
        (lambda: torch.ones(3).to(torch.float8_e4m3fn), r"float8_e4m3fn.*dtypes are"),
        (lambda: torch.ones(3, dtype=torch.complex32), r"complex32.*dtypes are"),
        (lambda: torch.ones(3).as_subclass(Tagged), r"Tagged.*plain tensor"),
    ],
    ids=["sparse", "quantised", "meta", "float8", "complex32", "subclass"],
)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_refused(make, text):
    x = make()
    with pytest.raises(TypeError, match=text):
        view(x)
    with pytest.raises(TypeError, match=text):
        out_view(x, view(np.ones(3, np.float32)))


def test_function_transforms_are_refused():
    with pytest.raises(TypeError, match="outside function transforms"):
        torch.func.grad(lambda x: view(x) and x.sum())(torch.ones(2))


def test_gpu_tensors_need_cupy_and_cuda(monkeypatch):
    from gccomm.interop import torch as bridge

    monkeypatch.setitem(sys.modules, "cupy", None)
    tensor = {"dtype": torch.float32, "shape": (3,), "is_quantized": False, "layout": torch.strided}
    x = SimpleNamespace(device=torch.device("cuda:1"), **tensor)
    with pytest.raises(BufferError, match=r"cuda:1.*CuPy.*x\.cpu\(\)"):
        bridge._view(x)
    for device, hip in (("xpu:0", None), ("cuda:0", "6.0")):
        monkeypatch.setattr(torch.version, "hip", hip)
        x = SimpleNamespace(device=torch.device(device), **tensor)
        with pytest.raises(BufferError, match=r"only that of CUDA devices.*x\.cpu\(\)"):
            bridge._view(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_is_written_in_place(dtype):
    out = torch.zeros((2, 3), dtype=getattr(torch, dtype))
    like = view(torch.ones((2, 3), dtype=out.dtype))
    v = out_view(out, like)
    assert (v.kind, v.pointer) == ("torch", out.data_ptr())
    assert Ranges([view(out)]).hits(v)
    v.data[:] = like.data
    v.commit()
    assert out.tolist() == torch.ones((2, 3), dtype=out.dtype).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_strided_out_is_written_by_commit(dtype):
    base = torch.zeros((3, 8), dtype=dtype)
    like = view(torch.arange(12).reshape(4, 3).to(dtype))
    out = base[:, ::2].t()
    v = out_view(out, like)
    assert v.wrap(like.data) is out
    assert out.tolist() == like.owner.tolist()
    assert not base[:, 1::2].any()


def test_out_from_another_library():
    out = torch.zeros(3)
    assert out_view(out, view(np.ones(3, np.float32))).wrap(np.ones(3, np.float32)) is out
    assert out.tolist() == [1, 1, 1]


def test_out_refused():
    like = view(torch.ones(3))
    with pytest.raises(ValueError, match=r"gradient.*detach"):
        out_view(torch.ones(3, requires_grad=True), like)
    with pytest.raises(ValueError, match=r"float64, shape \(3,\).*float32, shape \(3,\)"):
        out_view(torch.ones(3, dtype=torch.float64), like)
    with pytest.raises(ValueError, match=r"shape \(4,\)"):
        out_view(torch.ones(4), like)
    with pytest.raises(BufferError, match="share memory with each other"):
        out_view(torch.ones(1).expand(3), like)
    conjugated = torch.ones(3, dtype=torch.complex64).conj()
    with pytest.raises(ValueError, match="conjugated"):
        out_view(conjugated, view(conjugated))


def test_autograd_sees_that_out_has_changed():
    weight = torch.ones(3, requires_grad=True)
    saved = torch.ones(3)
    loss = (weight * saved).sum()
    out_view(saved, view(torch.ones(3))).wrap(np.zeros(3, np.float32))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_out_made_in_inference_mode():
    with torch.inference_mode():
        out = torch.zeros(3)
    assert out_view(out, view(torch.ones(3))).wrap(np.ones(3, np.float32)) is out
    assert out.sum() == 3
