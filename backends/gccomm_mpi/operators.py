"""The reductions: for MPI's own algorithms an operator, for gccomm's exchange a function on arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from gccomm.backends import FloatName
from gccomm.errors import BackendError

__all__ = ["MAXIMUM", "SUM", "Operator", "make_operator", "sum_of"]

Array = npt.NDArray[Any]

# An operator as MPI_Op_create takes it: void f(void *in, void *inout, int *len, MPI_Datatype *type)
_FUNCTION = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int), ctypes.c_void_p
)


@dataclass(frozen=True)
class Operator:
    """One reduction.

    Attributes
    ----------
    kind : str
        Its name in :data:`gccomm.kernels.JOININGS`.
    datatype, op : mpi4py.MPI.Datatype, mpi4py.MPI.Op
        What MPI is given.
    combine : callable
        ``combine(a, b, out)`` on arrays of one shape; `out` may be `a`.
    """

    kind: str
    datatype: Any
    op: Any
    combine: Callable[[Array, Array, Array], None]


def _larger(a: Array, b: Array, out: Array) -> None:
    np.maximum(a, b, out=out)


def _add_words(a: Array, b: Array, out: Array) -> None:
    np.add(a, b, out=out)


def _add_floats(a: Array, b: Array, out: Array) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(a, b, out=out)


MAXIMUM = Operator("maximum", MPI.UINT32_T, MPI.MAX, _larger)
SUM = Operator("words", MPI.UINT32_T, MPI.SUM, _add_words)
_float_sums = {
    "float32": Operator("float32", MPI.FLOAT, MPI.SUM, _add_floats),
    "float64": Operator("float64", MPI.DOUBLE, MPI.SUM, _add_floats),
}


def sum_of(dtype: FloatName) -> Operator:
    """Return the sum of arrays of `dtype`.

    MPI has no bfloat16, and its libraries' float16 is either missing or slow: both travel as uint16 under
    operators of gccomm's own, made once per process.

    Raises
    ------
    ValueError
        No such format.
    BackendError
        The MPI library lacks the datatype.
    """
    if dtype not in _float_sums:
        if dtype not in ("bfloat16", "float16"):
            message = f"`dtype` must be float32, float64, bfloat16 or float16; got {dtype!r}"
            raise ValueError(message)
        from gccomm.kernels import reduce_op

        address = reduce_op(dtype)
        _float_sums[dtype] = Operator(dtype, MPI.UINT16_T, make_operator(address), _on_arrays(address))
    operator = _float_sums[dtype]
    if operator.datatype == MPI.DATATYPE_NULL:
        message = f"{MPI.get_vendor()[0]} has no datatype for {dtype}"
        raise BackendError(message)
    return operator


def make_operator(address: int) -> Any:
    """Make a commutative MPI operator of the C function at `address`.

    ``MPI_Op_create`` is looked up in the library that mpi4py has loaded, so that ``mpi.h`` is not needed.

    Raises
    ------
    BackendError
        MPI refuses.
    """
    create = ctypes.CDLL(MPI.__file__).MPI_Op_create
    create.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    create.restype = ctypes.c_int
    # A handle is a pointer (Open MPI, the standard ABI) or an int (MPICH and its relatives).
    handle = (
        ctypes.c_uint64(0) if MPI._sizeof(MPI.Op) == ctypes.sizeof(ctypes.c_uint64) else ctypes.c_uint32(0)
    )
    code = create(address, 1, ctypes.addressof(handle))
    if code != MPI.SUCCESS:
        message = f"MPI_Op_create failed: {MPI.Get_error_string(code)}"
        raise BackendError(message)
    return MPI.Op.fromhandle(handle.value)


def _on_arrays(address: int) -> Callable[[Array, Array, Array], None]:
    function = _FUNCTION(address)

    def combine(a: Array, b: Array, out: Array) -> None:
        if out is not a:
            np.copyto(out, a)
        function(b.ctypes.data, out.ctypes.data, ctypes.c_int(out.size), None)

    return combine
