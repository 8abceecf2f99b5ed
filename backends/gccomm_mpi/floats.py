"""MPI datatypes and operators of float sums."""

from __future__ import annotations

import ctypes
from typing import Any

from mpi4py import MPI

from gccomm.backends import FloatName
from gccomm.errors import BackendError

__all__ = ["make_operator", "sum_of"]

_operators: dict[str, Any] = {}


def sum_of(dtype: FloatName) -> tuple[Any, Any]:
    """Return the MPI datatype and operator that add arrays of `dtype`.

    MPI has no bfloat16, and its libraries' float16 is either missing or slow: both travel as uint16 under
    operators of gccomm's own, made once per process.

    Raises
    ------
    ValueError
        No such format.
    BackendError
        The MPI library lacks the datatype.
    """
    if dtype == "float32":
        return _present(MPI.FLOAT, dtype), MPI.SUM
    if dtype == "float64":
        return _present(MPI.DOUBLE, dtype), MPI.SUM
    if dtype not in ("bfloat16", "float16"):
        message = f"`dtype` must be float32, float64, bfloat16 or float16; got {dtype!r}"
        raise ValueError(message)
    if dtype not in _operators:
        from gccomm.kernels import reduce_op

        _operators[dtype] = make_operator(reduce_op(dtype))
    return _present(MPI.UINT16_T, dtype), _operators[dtype]


def make_operator(address: int) -> Any:
    """Make a commutative MPI operator of a C function ``void f(void *in, void *inout, int *n, void *type)``.

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


def _present(datatype: Any, dtype: str) -> Any:
    if datatype == MPI.DATATYPE_NULL:
        message = f"{MPI.get_vendor()[0]} has no datatype for {dtype}"
        raise BackendError(message)
    return datatype
