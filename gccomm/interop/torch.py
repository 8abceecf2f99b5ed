"""Views of PyTorch tensors. Results are new tensors, detached from the autograd graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gccomm.interop.base import (
    BFLOAT16,
    Array,
    Format,
    View,
    format_of,
    logical,
    make_view,
    on_gpu,
    refuse,
    refuse_dtype,
)
from gccomm.interop.device import Lies, exported, make_device_out, make_device_view, placed, queue_for

__all__ = ["cuda_out", "handler_for", "host_out", "mark_written"]

_NAMES = {
    getattr(torch, name): name
    for name in (
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "bool"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    )
}
_FORMATS = {
    dtype: BFLOAT16 if name == "bfloat16" else format_of(np.dtype(name)) for dtype, name in _NAMES.items()
}


def handler_for(kind: type) -> Any:
    """Return the function that views objects of a torch type; None for other types."""
    if kind is torch.Tensor or issubclass(kind, torch.nn.Parameter):
        return _view
    return _refuse_subclass if issubclass(kind, torch.Tensor) else None


def _refuse_subclass(x: Any) -> View:
    raise refuse(x, "a subclass of torch.Tensor may be no plain memory; pass the local, plain tensor")


def _view(x: Any) -> View:
    form = _require_plain(x)
    if x.device.type == "cuda":
        return _view_cuda(x, form)
    plain = x.detach()
    if plain.is_conj() or plain.is_neg():  # conjugation that torch has put off
        plain = plain.resolve_conj().resolve_neg()
    return make_view(x, _as_numpy(plain, x), form, "torch", _to_torch)


def _require_plain(x: Any) -> Format:
    """Return the format of a tensor that is ordinary memory, of the host or CUDA's; raise for any other."""
    device = x.device.type
    if device == "meta":
        raise refuse(x, "a tensor on the meta device has no elements; give it memory first")
    if device not in ("cpu", "cuda") or (device == "cuda" and torch.version.hip is not None):
        raise on_gpu(x, x.device, "with x.cpu()")
    if x.is_quantized:
        raise refuse(x, "a quantised tensor's integers have scales of their own; pass x.dequantize()")
    if x.layout is not torch.strided:
        raise refuse(x, "sparse tensors may differ in structure between ranks; pass x.to_dense()")
    form = _FORMATS.get(x.dtype)
    if form is None:
        raise refuse_dtype(x, x.dtype)
    return form


def _as_numpy(plain: Any, x: Any) -> Array:
    """Return a detached tensor's memory as NumPy array of the same layout; bfloat16 as uint16."""
    try:
        if plain.dtype is torch.bfloat16:
            return plain.view(torch.int16).numpy().view(np.uint16)  # type: ignore[no-any-return]
        return plain.numpy()  # type: ignore[no-any-return]
    except RuntimeError as error:  # inside torch.func transforms and the like
        raise refuse(
            x, f"its memory cannot be read ({error}); call gccomm outside function transforms"
        ) from error


def _to_torch(view: View, result: Array) -> Any:
    if view.dtype == "bfloat16":
        return torch.from_numpy(result.view(np.int16)).view(torch.bfloat16).reshape(view.shape)
    return torch.from_numpy(logical(result, np.dtype(view.user_dtype)).reshape(view.shape))


def _view_cuda(x: Any, form: Format) -> View:
    queue = queue_for(x, x.device.index, "with x.cpu()")
    plain = x.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()  # on the current stream
    return make_device_view(x, _lies(plain), form, "torch", _to_cuda, None, queue, "torch", keep=plain)


def _lies(plain: Any) -> Lies:
    item = plain.element_size()
    strides = tuple(item * stride for stride in plain.stride())
    return Lies(plain.device.index, plain.data_ptr(), tuple(plain.shape), strides)


def _to_cuda(view: View, result: Any) -> Any:
    return torch.utils.dlpack.from_dlpack(exported(view, placed(view, result), anywhere=False).capsule())


def cuda_out(out: Any) -> View | None:
    """Return the view of an output tensor on a CUDA device, or None; errors as of :func:`host_out`."""
    if not isinstance(out, torch.Tensor) or out.device.type != "cuda":
        return None
    form = _require_writeable(out)
    queue = queue_for(out, out.device.index, "with out.cpu()")
    made = make_device_out(out, _lies(out), form, "torch", None, queue, "torch")
    made._written = mark_written
    return made


def host_out(out: Any) -> tuple[Array, Format] | None:
    """Return the memory of an output tensor, in its own layout, and its format; None if `out` is no tensor.

    Raises
    ------
    TypeError, BufferError
        Not ordinary host memory.
    ValueError
        The tensor requires a gradient, or torch has put off its conjugation.
    """
    if not isinstance(out, torch.Tensor):
        return None
    form = _require_writeable(out)
    return _as_numpy(out, out), form


def _require_writeable(out: Any) -> Format:
    if handler_for(type(out)) is not _view:
        _refuse_subclass(out)
    form = _require_plain(out)
    if out.requires_grad:
        message = "`out` requires a gradient, which writing into it would make wrong: pass out.detach()"
        raise ValueError(message)
    if out.is_conj() or out.is_neg():
        message = "`out` is a conjugated or negated view: pass the tensor that it is a view of"
        raise ValueError(message)
    return form


def mark_written(out: Any) -> None:
    """Tell autograd that a tensor has changed: a backward pass that needs the old values then raises."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
