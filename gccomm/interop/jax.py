"""Views of JAX arrays. They are read in place and never written; a result becomes a new array."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import jax
import numpy as np

from gccomm.interop.base import Array, View, format_of, logical, make_view, on_gpu, refuse, refuse_dtype
from gccomm.interop.device import exported, make_device_view, placed, queue_for, read_dlpack
from gccomm.interop.dlpack import CUDA

__all__ = ["handler_for"]

_TO_HOST = "say with jax.device_get(x) or jax.device_put(x, jax.devices('cpu')[0])"


def handler_for(kind: type) -> Any:
    """Return the function that views objects of a JAX type; None for other types."""
    if issubclass(kind, jax.core.Tracer):
        return _refuse_tracer
    return _view if issubclass(kind, jax.Array) else None


def _refuse_tracer(x: Any) -> View:
    raise refuse(
        x, "it stands for a value inside jit, grad or vmap that is not computed yet; call gccomm outside jit"
    )


def _view(x: Any) -> View:
    form = format_of(x.dtype) if isinstance(x.dtype, np.dtype) else None
    if form is None:
        raise refuse_dtype(x, x.dtype)
    if x.is_deleted():
        message = f"{type(x).__qualname__} of dtype {x.dtype}, shape {x.shape} has been deleted or donated"
        raise ValueError(message)
    devices = x.sharding.device_set
    if len(devices) != 1:
        remedy = (
            f"it is laid over {len(devices)} devices, and each process reduces what it holds; "
            "pass the shards, x.addressable_shards[i].data, or one copy on one device"
        )
        raise refuse(x, remedy)
    if not x.is_fully_addressable:
        raise refuse(x, "it lies on a device of another process; pass an array of this process")
    (device,) = devices
    if device.platform in ("gpu", "cuda"):
        return _view_cuda(x)
    if device.platform != "cpu":
        raise on_gpu(x, device, _TO_HOST)
    return make_view(x, np.asarray(x), form, "jax", _to_jax, (x.dtype, x.sharding, x.committed, x.weak_type))


def _view_cuda(x: Any) -> View:
    kind, number = x.__dlpack_device__()
    if kind != CUDA:
        raise on_gpu(x, f"DLPack type {kind}", _TO_HOST)
    queue = queue_for(x, number, _TO_HOST)
    form, lies, capsule = read_dlpack(x, queue)
    return make_device_view(x, lies, form, "jax", _to_cuda, None, queue, keep=(x, capsule))


def _to_cuda(view: View, result: Any) -> Any:
    """Hand the memory over: JAX's stream follows gccomm's, by DLPack."""
    array = placed(view, result)
    with jax.enable_x64(True) if array.dtype.itemsize == 8 else nullcontext():
        return jax.dlpack.from_dlpack(exported(view, array))


def _to_jax(view: View, result: Array) -> Any:
    """Hand the memory over: XLA keeps it where it is aligned to 64 bytes, and copies it elsewhere."""
    dtype, sharding, committed, weak = view._like
    array = logical(result, dtype).reshape(view.shape)
    # Without x64 mode JAX would narrow 64-bit numbers, though the source is an array of them.
    with jax.enable_x64(True) if view.data.itemsize == 8 else nullcontext():
        if committed:
            return jax.device_put(array, sharding)
        # A scalar of weak type, such as the gradient by a Python number, stays one: it promotes differently.
        weak_scalar = weak and array.ndim == 0
        made = jax.numpy.asarray(array.item()) if weak_scalar else jax.device_put(array)
        same = made.dtype == dtype and made.sharding == sharding
        return made if same else jax.device_put(array, sharding)
