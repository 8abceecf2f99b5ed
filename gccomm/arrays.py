"""Any array as flat memory, and results in the caller's kind of object.

`view` takes the caller's array, of whatever library, to a `View`: a pointer, a dtype, a shape. `View.wrap`
takes a result back. Libraries are told apart by exact type; one that the caller has not imported is never
imported here. Nothing in this module communicates. Its errors are the caller's own argument's; sharing them
with the other ranks is the caller's part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gccomm.interop import host
from gccomm.interop.base import (
    Array,
    Format,
    View,
    describe,
    format_of,
    in_order,
    make_view,
    native,
    refuse,
    refuse_dtype,
)

__all__ = ["Ranges", "View", "out_view", "view"]

# How to view objects of each exact type that has been met.
_HANDLERS: dict[type, Callable[[Any], View]] = dict(host.HANDLERS)


def view(x: Any, /) -> View:
    """Return the flat view of an array or scalar.

    Parameters
    ----------
    x : array or scalar
        A NumPy array (read-only, strided, byte-swapped, 0-d and empty ones too) or scalar; a Python bool, int
        (reduced as int64), float or complex; a JAX array or torch tensor; a CuPy array; an object with the
        buffer protocol (`array.array`, `memoryview`, `bytearray`); or anything on the CPU or a CUDA device
        that speaks DLPack, or has CUDA's array interface. float16, bfloat16, float32, float64, complex64,
        complex128, bool and integers of 8 to 64 bits.

    Returns
    -------
    View
        On the caller's own memory where that is contiguous, aligned and native, else on one copy in C order.

    Raises
    ------
    TypeError
        An object, dtype or kind of array that cannot be reduced; the text says what to pass instead.
    BufferError
        The array lies in GPU memory, and CuPy is not installed, or the GPU is no CUDA device.
    BackendError
        There is no such CUDA device.
    ValueError
        A JAX array that has been deleted or donated.
    OverflowError
        A Python integer outside the range of int64.

    Examples
    --------
    >>> x = np.array([[1 + 2j, 3 - 1j]], dtype=np.complex64)
    >>> v = view(x)
    >>> v.data
    array([ 1.,  2.,  3., -1.], dtype=float32)
    >>> v.wrap(2 * v.data)
    array([[2.+4.j, 6.-2.j]], dtype=complex64)
    """
    handler = _HANDLERS.get(type(x))
    if handler is None:
        handler = _find_handler(type(x))
    return handler(x)


def _find_handler(kind: type) -> Callable[[Any], View]:
    handler: Callable[[Any], View] | None = host.handler_for(kind)
    if handler is None and "jax" in sys.modules:
        from gccomm.interop import jax

        handler = jax.handler_for(kind)
    if handler is None and "torch" in sys.modules:
        from gccomm.interop import torch

        handler = torch.handler_for(kind)
    if handler is None and "cupy" in sys.modules:
        from gccomm.interop import device

        handler = device.cupy_handler(kind)
    if handler is None:
        return host.view_other  # not kept: its answer depends on the object, not on the type alone
    _HANDLERS[kind] = handler
    return handler


def out_view(out: Any, like: View, /) -> View:
    """Return the view of an output array, into which a result like `like` is to be written.

    Parameters
    ----------
    out : numpy.ndarray, cupy.ndarray or torch.Tensor
        Writeable, on the device of `like`, with its shape and dtype (byte order and layout may differ).
    like : View
        View of the input.

    Returns
    -------
    View
        Its `data` is the memory of `out`, or a temporary where that is strided or byte-swapped; after writing
        `data`, call `View.commit`. `View.wrap` writes a result, commits it and returns `out`.

    Raises
    ------
    TypeError
        Not a NumPy or CuPy array or torch tensor: JAX arrays, for instance, cannot be written.
    ValueError
        Shape, dtype or device is not that of `like`, or a tensor requires a gradient.
    BufferError
        Read-only memory, or elements that share memory with each other.
    """
    there = None if type(out) is np.ndarray else _device_out(out)
    if there is not None:
        _require_like(there.shape, there.user_dtype, there.device, like)
        if there._target is not None and _strides_overlap(*there._target[1:4]):
            raise _overlapping(out, there._target.strides[:-1])
        return there
    memory, form, written = _host_out(out)
    _require_like(memory.shape, form.user_dtype, "cpu", like)
    if not memory.flags.writeable:
        message = f"`out` is read-only: {describe(out)}"
        raise BufferError(message)
    if _strides_overlap(memory.itemsize, memory.shape, memory.strides):
        raise _overlapping(out, memory.strides)
    kind = "numpy" if isinstance(out, np.ndarray) else "torch"
    if in_order(memory):
        result = make_view(out, memory, form, kind, _fill)
    else:
        result = make_view(out, np.empty(memory.shape, native(memory.dtype)), form, kind, _fill)
        result._target = memory
    result._written = written
    return result


def _require_like(shape: tuple[int, ...], dtype: str, device: str, like: View) -> None:
    if shape != like.shape or dtype != like.user_dtype or device != like.device:
        where = "" if device == like.device else f" on {device}"
        there = "" if device == like.device else f" on {like.device}"
        message = (
            f"`out` of dtype {dtype}, shape {shape}{where} cannot take a result of "
            f"dtype {like.user_dtype}, shape {like.shape}{there}"
        )
        raise ValueError(message)


def _overlapping(out: Any, strides: tuple[int, ...]) -> BufferError:
    return BufferError(f"elements of `out` share memory with each other (strides {strides}): {describe(out)}")


def _fill(view: View, result: Array) -> Any:
    if result is not view.data:
        view.data[...] = result
    view.commit()
    return view.owner


def _device_out(out: Any) -> View | None:
    """Return the view of an output on a device; None for one on the host."""
    if "torch" in sys.modules:
        from gccomm.interop import torch

        tensor: View | None = torch.cuda_out(out)
        if tensor is not None:
            return tensor
    if "cupy" in sys.modules:
        from gccomm.interop import device

        return device.cupy_out(out)
    return None


def _host_out(out: Any) -> tuple[Array, Format, Callable[[Any], None] | None]:
    """Return the memory of an output, its format, and what to call after writing."""
    array = host.base_class_array(out)
    if array is not None:
        form = format_of(array.dtype)
        if form is None:
            raise refuse_dtype(out, array.dtype)
        return array, form, None
    if "torch" in sys.modules:
        from gccomm.interop import torch

        tensor = torch.host_out(out)
        if tensor is not None:
            return *tensor, torch.mark_written
    why = "`out` must be a writeable numpy.ndarray, a torch tensor or a cupy.ndarray"
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(out, jax.Array):
        why = f"JAX arrays are immutable; {why}, or leave `out` away"
    raise refuse(out, why)


def _strides_overlap(item_bytes: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Tell whether two elements of an array share memory, as in a broadcast array."""
    axes = sorted((abs(stride), n) for stride, n in zip(strides, shape, strict=True) if n > 1)
    if 0 in shape:
        return False
    reach = item_bytes  # bytes that the axes so far span
    for stride, n in axes:
        if stride < reach:
            return stride == 0 or _offsets_collide(axes, item_bytes)
        reach += stride * (n - 1)
    return False


def _offsets_collide(axes: list[tuple[int, int]], itemsize: int) -> bool:
    """Tell the same by every element's offset: for interleaved axes, which only hand-made strides have."""
    offsets = np.zeros(1, np.int64)
    for stride, n in axes:
        offsets = np.add.outer(offsets, stride * np.arange(n, dtype=np.int64)).reshape(-1)
    offsets.sort()
    return bool(np.diff(offsets).min() < itemsize)


class Ranges:
    """Where the data of views lie; of an array that had to be copied it is the copy that counts: that is what
    is read and written.

    Parameters
    ----------
    views : sequence of View or None
        None has no data.
    """

    def __init__(self, views: Sequence[View | None]) -> None:
        empty = (np.iinfo(np.uint64).max, 0)
        found = [
            (v.pointer, v.pointer + v.data.nbytes) if v is not None and v.data.nbytes else empty
            for v in views
        ]
        self._starts, self._ends = np.array(found, dtype=np.uint64).reshape(-1, 2).T

    def hits(self, view: View) -> list[int]:
        """Return the places of the views that share memory with this one, judged by their addresses."""
        if not view.data.nbytes:
            return []
        start, end = np.uint64(view.pointer), np.uint64(view.pointer + view.data.nbytes)
        hits: list[int] = np.flatnonzero((self._starts < end) & (self._ends > start)).tolist()
        return hits
