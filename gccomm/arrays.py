"""Any array as flat memory, and results in the caller's kind of object.

`view` takes the caller's array, of whatever library, to a `View`: a pointer, a dtype, a shape. `View.wrap`
takes a result back. Libraries are told apart by exact type; one that the caller has not imported is never
imported here. Nothing in this module communicates. Its errors are the caller's own argument's; sharing them
with the other ranks is the caller's part.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
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

__all__ = ["View", "out_view", "overlaps", "view"]

# How to view objects of each exact type that has been met.
_HANDLERS: dict[type, Callable[[Any], View]] = dict(host.HANDLERS)


def view(x: Any, /) -> View:
    """Return the flat view of an array or scalar.

    Parameters
    ----------
    x : array or scalar
        A NumPy array (read-only, strided, byte-swapped, 0-d and empty ones too) or scalar; a Python bool, int
        (reduced as int64), float or complex; a JAX array or torch tensor on the CPU; an object with the
        buffer protocol (`array.array`, `memoryview`, `bytearray`); or anything on the CPU that speaks DLPack.
        float16, bfloat16, float32, float64, complex64, complex128, bool and integers of 8 to 64 bits.

    Returns
    -------
    View
        On the caller's own memory where that is contiguous, aligned and native, else on one copy in C order.

    Raises
    ------
    TypeError
        An object, dtype or kind of array that cannot be reduced; the text says what to pass instead.
    BufferError
        The array lies in GPU memory.
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
    if handler is None:
        return host.view_other  # not kept: its answer hangs on the object, not on the type alone
    _HANDLERS[kind] = handler
    return handler


def out_view(out: Any, like: View, /) -> View:
    """Return the view of an output array, into which a result like `like` is to be written.

    Parameters
    ----------
    out : numpy.ndarray or torch.Tensor
        Writeable, on the CPU, with the shape and dtype of `like` (byte order and layout may differ).
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
        Not a NumPy array or torch tensor: JAX arrays, for instance, cannot be written.
    ValueError
        Shape or dtype is not that of `like`, or a tensor requires a gradient.
    BufferError
        Read-only memory, or elements that share memory with each other, or GPU memory.
    """
    memory, form, written = _host_out(out)
    if memory.shape != like.shape or form.user_dtype != like.user_dtype:
        message = (
            f"`out` of dtype {form.user_dtype}, shape {memory.shape} cannot take a result of "
            f"dtype {like.user_dtype}, shape {like.shape}"
        )
        raise ValueError(message)
    if not memory.flags.writeable:
        message = f"`out` is read-only: {describe(out)}"
        raise BufferError(message)
    if _self_overlaps(memory):
        message = (
            f"elements of `out` share memory with each other (strides {memory.strides}): {describe(out)}"
        )
        raise BufferError(message)
    kind = "numpy" if isinstance(out, np.ndarray) else "torch"
    if in_order(memory):
        result = make_view(out, memory, form, kind, _fill)
    else:
        result = make_view(out, np.empty(memory.shape, native(memory.dtype)), form, kind, _fill)
        result._target = memory
    result._written = written
    return result


def _fill(view: View, result: Array) -> Any:
    if result is not view.data:
        view.data[...] = result
    view.commit()
    return view.owner


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
    why = "`out` must be a writeable numpy.ndarray or a torch tensor on the CPU"
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(out, jax.Array):
        why = f"JAX arrays are immutable; {why}, or leave `out` away"
    raise refuse(out, why)


def _self_overlaps(array: Array) -> bool:
    """Tell whether two elements of an array share memory, as in a broadcast array."""
    axes = sorted((abs(stride), n) for stride, n in zip(array.strides, array.shape, strict=True) if n > 1)
    if array.size == 0:
        return False
    reach = array.itemsize  # bytes that the axes so far span
    for stride, n in axes:
        if stride < reach:
            return stride == 0 or _offsets_collide(axes, array.itemsize)
        reach += stride * (n - 1)
    return False


def _offsets_collide(axes: list[tuple[int, int]], itemsize: int) -> bool:
    """Tell the same by every element's offset: for interleaved axes, which only hand-made strides have."""
    offsets = np.zeros(1, np.int64)
    for stride, n in axes:
        offsets = np.add.outer(offsets, stride * np.arange(n, dtype=np.int64)).reshape(-1)
    offsets.sort()
    return bool(np.diff(offsets).min() < itemsize)


def overlaps(a: View, b: View, /) -> bool:
    """Tell whether the data of two views share memory, judged by their ranges of addresses.

    Of an array that had to be copied it is the copy that counts: that is what is read and written.
    """
    if not (a.data.nbytes and b.data.nbytes):
        return False
    return a.pointer < b.pointer + b.data.nbytes and b.pointer < a.pointer + a.data.nbytes
