"""The flat view of one array, and the element formats that can be reduced.

Every array library's bridge ends in `make_view`. Codecs and back ends see nothing of an array but its `View`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BFLOAT16",
    "FORMATS",
    "Array",
    "Format",
    "View",
    "describe",
    "format_of",
    "in_order",
    "logical",
    "make_view",
    "native",
    "on_gpu",
    "refuse",
    "refuse_dtype",
    "rows_of",
]

Array = NDArray[Any]


class Format(NamedTuple):
    """How the elements of a dtype are stored and named."""

    dtype: str  # name of one stored number
    user_dtype: str  # name of the caller's dtype: differs for complex
    storage: np.dtype[Any]  # of the flat view: uint16 for bfloat16, the real type for complex
    reals: int  # stored numbers in an element: 2 for complex


def _formats() -> dict[Any, Format]:
    plain = ["float16", "float32", "float64", "bool"]
    plain += [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    formats = {np.dtype(name): Format(name, name, np.dtype(name), 1) for name in plain}
    for name, real in (("complex64", "float32"), ("complex128", "float64")):
        formats[np.dtype(name)] = Format(real, name, np.dtype(real), 2)
    return formats


BFLOAT16 = Format("bfloat16", "bfloat16", np.dtype(np.uint16), 1)
# By native dtype; ml_dtypes' bfloat16 joins when it is first met.
FORMATS: dict[Any, Format] = _formats()
_DTYPES = "float16, bfloat16, float32, float64, complex64, complex128, bool and integers of 8 to 64 bits"


def format_of(dtype: np.dtype[Any]) -> Format | None:
    """Return the format of a NumPy dtype of any byte order, or None where it cannot be reduced."""
    known = FORMATS.get(dtype)
    if known is not None:
        return known
    if dtype.name == "bfloat16" and dtype.itemsize == 2:  # ml_dtypes registers it with NumPy
        FORMATS[dtype] = BFLOAT16
        return BFLOAT16
    return None if dtype.isnative else FORMATS.get(dtype.newbyteorder("="))


@dataclass(slots=True, eq=False)
class View:
    """One array as flat memory, and the way back to the caller's kind of object.

    Attributes
    ----------
    data : numpy.ndarray or DeviceArray, shape (n,)
        The elements in logical C order: C-contiguous, aligned, native byte order; perhaps read-only. bfloat16
        is stored as uint16, a complex number as two reals. The caller's own memory where its layout allows,
        else a copy. On a device it can be used after `gccomm.interop.order.begin`.
    dtype : str
        Name of the stored number's type: ``"float32"``, ``"bfloat16"``, ``"int8"``, ``"bool"``...
    shape : tuple of int
        The caller's shape.
    row_shape : tuple of int
        `shape` in stored numbers: the last axis twice as long for complex, ``(2,)`` for a complex scalar.
    kind : str
        Library of the object: ``"numpy"``, ``"cupy"``, ``"jax"``, ``"torch"``, ``"python"``, ``"buffer"``,
        ``"dlpack"``, ``"cuda"``.
    device : str
        ``"cpu"``, or ``"cuda:0"`` and so on.
    pointer : int
        Address of `data`.
    owner : object
        The caller's object; the view keeps it alive.
    user_dtype : str
        Name of the caller's dtype: ``"complex64"`` where `dtype` is ``"float32"``; otherwise the same.
    """

    data: Any = field(repr=False)
    dtype: str
    shape: tuple[int, ...]
    row_shape: tuple[int, ...]
    kind: str
    device: str
    pointer: int
    owner: Any = field(repr=False)
    user_dtype: str
    # The way back: a function of the library's bridge, and the facts about `owner` that it goes by.
    _rebuild: Callable[[View, Any], Any] = field(repr=False)
    _like: Any = field(default=None, repr=False)
    # Of an `out`: the memory that `data` stands in for, and how to tell its library of the change.
    _target: Any = field(default=None, repr=False)
    _written: Callable[[Any], None] | None = field(default=None, repr=False)
    # On a device: what must be done before `data` can be used, a `gccomm.interop.device.Source`.
    _source: Any = field(default=None, repr=False)

    @property
    def library(self) -> str:
        """The library whose current stream is to come after results; "" where there is none."""
        return "" if self._source is None else self._source.results

    def wrap(self, result: Any, /) -> Any:
        """Turn a result into the caller's kind of object.

        Parameters
        ----------
        result : numpy.ndarray or DeviceArray, shape (n,)
            Stored numbers, with the dtype and size of `data`. Its memory is handed over: the object returned
            may share it (a JAX array too), so it must not be written again.

        Returns
        -------
        object
            Same library, dtype, byte order, shape and device as `owner`. For the view of an `out`: `owner`
            itself, filled.

        Raises
        ------
        ValueError
            `result` is not flat, or its dtype or size differs.
        """
        if result.dtype != self.data.dtype or result.shape != self.data.shape:
            message = (
                f"a result of dtype {result.dtype}, shape {result.shape} does not fit "
                f"a view of dtype {self.data.dtype}, shape {self.data.shape}"
            )
            raise ValueError(message)
        return self._rebuild(self, result)

    def detached(self) -> View:
        """Return a view of the same form for `wrap` alone, which keeps none of the caller's memory alive."""
        if self.device == "cpu":
            form = np.broadcast_to(np.zeros(1, self.data.dtype), self.data.shape)
            return replace(self, data=form, pointer=0, owner=None, _target=None, _written=None)
        made = replace(self, data=self.data.detached(), pointer=0, owner=None, _target=None, _written=None)
        made._source = self._source._replace(strided=None)
        return made

    def commit(self) -> None:
        """Copy `data` to the caller's `out` where it is a temporary, and tell torch of the change."""
        if self._target is not None and self.device != "cpu":
            self.data.queue.scatter(self._target, self.data)
        elif self._target is not None:
            np.copyto(self._target, logical(self.data, native(self._target.dtype)).reshape(self.shape))
        if self._written is not None:
            self._written(self.owner)


@cache
def _address() -> Callable[[Array], int]:
    from gccomm.kernels import address  # late: loads the extension

    return address


def make_view(
    owner: Any,
    array: Array,
    form: Format,
    kind: str,
    rebuild: Callable[[View, Array], Any],
    like: Any = None,
) -> View:
    """Return the view of `owner`, whose elements NumPy sees as `array` (any layout and byte order).

    `rebuild` turns a result into the kind of `owner`, going by `like` alone: `owner` may be gone by then.
    """
    shape = array.shape
    data = flat(array, form.storage)
    rows = shape if form.reals == 1 else rows_of(shape, form)
    pointer = _address()(data)
    return View(data, form.dtype, shape, rows, kind, "cpu", pointer, owner, form.user_dtype, rebuild, like)


def rows_of(shape: tuple[int, ...], form: Format) -> tuple[int, ...]:
    """Return a shape in stored numbers."""
    return shape if form.reals == 1 else (*shape[:-1], 2 * shape[-1]) if shape else (2,)


def flat(array: Array, storage: np.dtype[Any]) -> Array:
    """Return the elements in C order as flat native memory: the same memory where possible, else a copy."""
    if not in_order(array):
        array = array.astype(native(array.dtype), order="C")
    line = array.reshape(-1)
    return line if line.dtype == storage else line.view(storage)


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in this machine's byte order."""
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def in_order(array: Array) -> bool:
    """Tell whether the memory can be used as it lies: C-contiguous, aligned, native byte order."""
    flags = array.flags
    return flags.c_contiguous and flags.aligned and array.dtype.isnative


def logical(data: Array, dtype: np.dtype[Any]) -> Array:
    """Return stored numbers as elements of the caller's dtype: the same memory for a native byte order."""
    if data.dtype == dtype:
        return data
    return data.view(native(dtype)).astype(dtype, copy=False)


def describe(x: Any) -> str:
    """Return type, dtype and shape of an object in words, for error messages."""
    kind = type(x)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    dtype = getattr(x, "dtype", None)
    shape = getattr(x, "shape", None)
    facts = [] if dtype is None else [f"of dtype {dtype}"]
    if isinstance(shape, tuple) and not (shape == () and isinstance(x, np.generic)):
        facts.append(f"of shape {tuple(shape)}")
    return " ".join([name, *facts])


def refuse(x: Any, remedy: str) -> TypeError:
    """Return the error for an object that cannot be reduced; `remedy` says why and what to do."""
    return TypeError(f"cannot reduce {describe(x)}: {remedy}")


def refuse_dtype(x: Any, dtype: Any) -> TypeError:
    """Return the error for an object whose elements cannot be reduced."""
    kind = getattr(dtype, "kind", "")
    if kind == "O":
        remedy = "Python objects have no fixed size; convert to numbers, say x.astype(np.float64)"
    elif kind in ("S", "U", "T"):
        remedy = "text cannot be summed"
    elif kind in ("m", "M"):
        remedy = "dates and times cannot be summed; pass x.view(np.int64) if their ticks are meant"
    elif kind == "V" and getattr(dtype, "names", None):
        remedy = f"pass the fields of a structured dtype one by one, say x[{dtype.names[0]!r}]"
    elif kind in ("f", "c") and dtype.itemsize > (8 if kind == "f" else 16):
        remedy = "its format differs between machines; convert to float64 or complex128"
    else:
        remedy = f"the dtypes are {_DTYPES}; convert to one of these"
    if dtype is not None and getattr(x, "dtype", None) is None:
        remedy = f"its elements have the dtype {dtype}; {remedy}"
    return refuse(x, remedy)


def on_gpu(x: Any, device: object, remedy: str) -> BufferError:
    """Return the error for an array in the memory of a GPU that has no kernels here."""
    message = (
        f"{describe(x)} lies in GPU memory ({device}), and only that of CUDA devices can be used; "
        f"move the array to the host first, {remedy}"
    )
    return BufferError(message)
