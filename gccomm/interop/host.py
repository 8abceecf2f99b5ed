"""Views that need no library but NumPy: its arrays and scalars, Python's, buffers, and DLPack objects."""

from __future__ import annotations

from operator import index
from typing import Any

import numpy as np

from gccomm.interop.base import (
    FORMATS,
    Array,
    View,
    format_of,
    logical,
    make_view,
    on_gpu,
    refuse,
    refuse_dtype,
)

__all__ = ["HANDLERS", "base_class_array", "handler_for", "view_other"]

# Device types of DLPack whose memory the host reads: its own, and pinned by CUDA or ROCm.
_HOST_DEVICES = {1, 3, 11}
_GPU_DEVICES = {10: "ROCm"}
_CUDA_DEVICES = {2, 13}  # its memory, and that which it manages
_INT64 = np.iinfo(np.int64)
_PYTHON_DTYPES = {bool: np.bool_, int: np.int64, float: np.float64, complex: np.complex128}


def view_ndarray(x: Array) -> View:
    """View a `numpy.ndarray` or `numpy.memmap`."""
    form = FORMATS.get(x.dtype) or format_of(x.dtype)
    if form is None:
        raise refuse_dtype(x, x.dtype)
    kind = type(x)
    array = x if kind is np.ndarray else np.asarray(x)
    return make_view(x, array, form, "numpy", _to_matrix if kind is np.matrix else _to_ndarray, x.dtype)


def _to_ndarray(view: View, result: Array) -> Any:
    return logical(result, view._like).reshape(view.shape)


def _to_matrix(view: View, result: Array) -> Any:
    return _to_ndarray(view, result).view(np.matrix)


def view_numpy_scalar(x: Any) -> View:
    """View a NumPy scalar such as ``np.float32(1)``."""
    form = format_of(x.dtype)
    if form is None:
        raise refuse_dtype(x, x.dtype)
    return make_view(x, np.array(x, dtype=x.dtype), form, "numpy", _to_numpy_scalar, x.dtype)


def _to_numpy_scalar(view: View, result: Array) -> Any:
    return logical(result, view._like)[0]


def view_python_scalar(x: Any) -> View:
    """View a Python bool, int (as int64), float (as float64) or complex (as complex128)."""
    kind = next(kind for kind in _PYTHON_DTYPES if isinstance(x, kind))
    if kind is int and not _INT64.min <= x <= _INT64.max:
        message = (
            f"the integer {x} is outside the range of int64, in which Python integers are reduced: "
            "pass np.uint64(x) if it fits, or float(x)"
        )
        raise OverflowError(message)
    array: Array = np.array(x, dtype=_PYTHON_DTYPES[kind])
    return make_view(x, array, FORMATS[array.dtype], "python", _to_python_scalar)


def _to_python_scalar(view: View, result: Array) -> Any:
    return result.view(np.complex128)[0].item() if view.user_dtype == "complex128" else result[0].item()


def refuse_masked(x: Any) -> View:
    """Refuse a masked array: the sum of what is masked has no one meaning."""
    raise refuse(
        x, "the mask would be ignored; pass x.filled(0), and reduce the mask if it differs between ranks"
    )


def refuse_subclass(x: Any) -> View:
    """Refuse subclasses of `numpy.ndarray` whose extra state a result would lose."""
    raise refuse(x, "this subclass of numpy.ndarray may carry more than its elements; pass np.asarray(x)")


def base_class_array(x: Any) -> Array | None:
    """Return an array as plain `numpy.ndarray` on the same memory; None for objects of another kind."""
    return np.asarray(x) if HANDLERS.get(type(x)) is view_ndarray else None


HANDLERS: dict[type, Any] = {
    np.ndarray: view_ndarray,
    np.memmap: view_ndarray,
    np.matrix: view_ndarray,
    bool: view_python_scalar,
    int: view_python_scalar,
    float: view_python_scalar,
    complex: view_python_scalar,
}


def handler_for(kind: type) -> Any:
    """Return the function that views objects of a type built on NumPy's or Python's; None for others."""
    if issubclass(kind, np.ma.MaskedArray):
        return refuse_masked
    if issubclass(kind, np.ndarray):
        return refuse_subclass
    if issubclass(kind, np.generic):
        return view_numpy_scalar
    if issubclass(kind, int | float | complex):
        return view_python_scalar
    return None


def view_other(x: Any) -> View:
    """View an object of any other type by the protocols it offers: DLPack, CUDA's array interface, then the
    buffer protocol.
    """
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return _view_dlpack(x)
    if hasattr(x, "__cuda_array_interface__"):
        from gccomm.interop.device import view_interface

        return view_interface(x)
    if isinstance(x, (str, bytes)):
        raise refuse(x, "text cannot be summed")
    try:
        memory = memoryview(x)
    except TypeError:
        raise refuse(x, _remedy(x)) from None
    array = np.asarray(memory)
    form = format_of(array.dtype)
    if form is None:
        raise refuse_dtype(x, array.dtype)
    return make_view(x, array, form, "buffer", _to_ndarray, array.dtype)


def _remedy(x: Any) -> str:
    library = type(x).__module__.partition(".")[0]
    if library == "scipy" and hasattr(x, "toarray"):
        return "sparse arrays may differ in structure between ranks; pass x.toarray()"
    if library == "sparse" and hasattr(x, "todense"):
        return "sparse arrays may differ in structure between ranks; pass x.todense()"
    return "it is no array, scalar, buffer or DLPack object; pass np.asarray(x) if it holds numbers"


def _view_dlpack(x: Any) -> View:
    try:
        device, number = map(index, x.__dlpack_device__())
    except (TypeError, ValueError) as error:
        remedy = f"its __dlpack_device__ must give two integers ({error}); pass a NumPy or CuPy array"
        raise refuse(x, remedy) from error
    if device in _CUDA_DEVICES:
        from gccomm.interop.device import view_dlpack

        return view_dlpack(x, number)
    if device in _GPU_DEVICES:
        raise on_gpu(x, _GPU_DEVICES[device], "with its library's own function")
    if device not in _HOST_DEVICES:
        message = f"{x!r:.80} lies on a device of DLPack type {device}; move the array to the host first"
        raise BufferError(message)
    try:
        array = np.from_dlpack(x)
    except Exception as error:  # whatever the object's own code raises
        remedy = f"NumPy cannot read it through DLPack ({type(error).__name__}: {error}); pass a NumPy array"
        raise refuse(x, remedy) from error
    form = format_of(array.dtype)
    if form is None:
        raise refuse_dtype(x, array.dtype)
    # Looked up now: on the way back it would be too late to fail.
    namespace: Any = x.__array_namespace__() if hasattr(x, "__array_namespace__") else None
    if not hasattr(namespace, "from_dlpack"):
        return make_view(x, array, form, "dlpack", _to_ndarray, array.dtype)
    like = (array.dtype, namespace.from_dlpack, getattr(x, "device", None))
    return make_view(x, array, form, "dlpack", _to_dlpack, like)


def _to_dlpack(view: View, result: Array) -> Any:
    dtype, from_dlpack, device = view._like
    made = from_dlpack(logical(result, dtype).reshape(view.shape))
    return made if device is None or made.device == device else made.to_device(device)
