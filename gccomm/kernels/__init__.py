"""Native kernels on blocks of tensors.

The functions take plain addresses: of a table of :data:`~gccomm.kernels.table.SEGMENT` records, which says
where the tensors of a batch lie and how they are cut into blocks, and of words, scales and results.  They
work on the blocks ``lo`` to ``hi`` of the batch, check no address, and release the GIL.  What they compute is
specified by :mod:`gccomm.kernels.reference`.
"""

from __future__ import annotations

import sys
from typing import Any

try:
    from gccomm.kernels._native import (
        address,
        await_flags,
        begin_call,
        choose_steps,
        chunk_energies,
        count_intervals,
        decode,
        digest,
        encode,
        exact_decode,
        exact_encode,
        exchange_array,
        exchange_call,
        exchange_lanes,
        exponent_add,
        exponent_decode,
        exponent_encode,
        float_decode,
        float_encode,
        highest_intervals,
        hop_encode,
        hop_fold,
        int_decode,
        int_encode,
        int_range,
        isa,
        isas,
        join_parts,
        learn_energies,
        maxima,
        nonfinite,
        pool_empty,
        pool_stats,
        pool_trim,
        predict_scales,
        project_errors,
        raise_flag,
        reduce_op,
        saturating_add,
        set_isa,
        share_energies,
        sum_inputs,
        sum_spans,
        swap_bytes,
        swap_finish,
        swap_pack,
        threads,
        widen_lanes,
    )
except ImportError as error:
    _message = (
        f"the compiled kernels of gccomm cannot be imported ({error}). Where this is the source folder of "
        "gccomm and not an installed package, keep scripts in another folder and start `python` there, or "
        "set PYTHONSAFEPATH=1 (for `python -m pytest`, say), or `pip install -e .`"
    )
    raise ImportError(_message) from error
from gccomm.kernels.table import CALL, DTYPE_CODES, DTYPES, EXCHANGE, JOININGS, LANES, LEARNT, SEGMENT

__all__ = [
    "CALL",
    "DTYPES",
    "DTYPE_CODES",
    "EXCHANGE",
    "JOININGS",
    "LANES",
    "LEARNT",
    "SEGMENT",
    "address",
    "await_flags",
    "begin_call",
    "choose_steps",
    "chunk_energies",
    "count_intervals",
    "decode",
    "digest",
    "encode",
    "exact_decode",
    "exact_encode",
    "exchange_array",
    "exchange_call",
    "exchange_lanes",
    "exponent_add",
    "exponent_decode",
    "exponent_encode",
    "float_decode",
    "float_encode",
    "highest_intervals",
    "hop_encode",
    "hop_fold",
    "int_decode",
    "int_encode",
    "int_range",
    "isa",
    "isas",
    "join_parts",
    "learn_energies",
    "maxima",
    "nonfinite",
    "of_device",
    "pool_empty",
    "pool_stats",
    "pool_trim",
    "predict_scales",
    "project_errors",
    "raise_flag",
    "reduce_op",
    "saturating_add",
    "set_isa",
    "share_energies",
    "sum_inputs",
    "sum_spans",
    "swap_bytes",
    "swap_finish",
    "swap_pack",
    "threads",
    "widen_lanes",
]


def of_device(device: str) -> Any:
    """Return what has the functions on blocks (``maxima`` to ``nonfinite``) for tensors of a device.

    Parameters
    ----------
    device : str
        "cpu": this module; or "cuda", "cuda:1" ...: see :mod:`gccomm.kernels.cuda`.

    Raises
    ------
    ValueError
        There are no kernels for such a device.
    ImportError
        CuPy is not installed.
    BackendError
        This process has no such device.
    """
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return sys.modules[__name__]
    if kind != "cuda" or not (number or "0").isdecimal():
        raise ValueError(f"there are no kernels for the device {device!r}, only for cpu and cuda:<number>")
    from gccomm.kernels.cuda.on_cupy import device_kernels

    return device_kernels(int(number or 0))
