"""The reductions themselves: the arrays of all ranks lie in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from gccomm.operations import check_operation, reduce_parts

__all__ = ["ITEM_TYPES", "Kind", "combine", "combine_each"]

Kind: TypeAlias = Literal["max", "sum", "float", "own"]
Array: TypeAlias = npt.NDArray[Any]

# How each float format of a float sum is held in an array.
ITEM_TYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.uint16),
}


def combine(
    kind: Kind, buffers: Sequence[Array], *, dtype: str | None = None, operation: str = "", seed: int = 0
) -> None:
    """Reduce the ranks' arrays and write the result to each of them, in place.

    Parameters
    ----------
    kind : {"max", "sum", "float", "own"}
        Unsigned maximum or sum mod 2^32 of uint32 words, a float sum in rank order, or a reduction of words
        by one of gccomm's own operations, in the order of `gccomm.operations`.
    buffers : sequence of arrays
        One per rank, all of one shape; uint32, or for ``"float"`` the type that holds `dtype`.
    dtype : {"float32", "float64", "bfloat16", "float16"}, optional
        Format of a float sum; the 16-bit ones as uint16, rounded to nearest even after each addition, as a
        ring that sends them would. May be left out for float32 and float64 arrays.
    operation, seed : str, int
        For ``"own"``; see `gccomm.backends.Backend.combine_words`.

    Raises
    ------
    ValueError
        Shapes or types differ or do not fit `kind`, or there is no such operation or seed.
    """
    first = buffers[0]
    name = None
    if kind == "float":
        name = first.dtype.name if dtype is None else dtype
    expected = np.dtype(np.uint32) if name is None else ITEM_TYPES.get(name)
    if any(b.shape != first.shape or b.dtype != expected for b in buffers):
        held = [f"{b.dtype} {b.shape}" for b in buffers]
        message = f"a {kind} of {name or 'uint32'} needs equal arrays of {expected}; the ranks hold {held}"
        raise ValueError(message)
    if kind == "own":
        check_operation(operation, seed)
        reduce_parts(operation, seed, buffers, 0, first)
    else:
        for other in buffers[1:]:
            _accumulate(kind, name, first, other)
    for other in buffers[1:]:
        np.copyto(other, first)


def combine_each(kinds: Sequence[Literal["max", "sum"]], buffers: Sequence[Array]) -> None:
    """Give every rank the result of its own operation over the words of all ranks, in place.

    A rank in the maximum of one call and a rank in the sum of another meet like this: each then finds in the
    header that the calls differ.

    Parameters
    ----------
    kinds : sequence of {"max", "sum"}
        One per rank.
    buffers : sequence of array of uint32
        One per rank, all of one shape.

    Raises
    ------
    ValueError
        Shapes or types differ.
    """
    results: dict[str, Array] = {}
    for kind in dict.fromkeys(kinds):
        copies = [buffer.copy() for buffer in buffers]
        combine(kind, copies)
        results[kind] = copies[0]
    for kind, buffer in zip(kinds, buffers, strict=True):
        np.copyto(buffer, results[kind])


def _accumulate(kind: Kind, name: str | None, total: Array, other: Array) -> None:
    if kind == "max":
        np.maximum(total, other, out=total)
    elif kind == "sum":
        np.add(total, other, out=total)
    else:
        with np.errstate(over="ignore", invalid="ignore"):
            if name == "bfloat16":
                np.copyto(total, _to_bfloat16(_from_bfloat16(total) + _from_bfloat16(other)))
            elif name == "float16":
                np.add(total.view(np.float16), other.view(np.float16), out=total.view(np.float16))
            else:
                np.add(total, other, out=total)


def _from_bfloat16(words: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = values.view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + even) >> np.uint32(16)).astype(np.uint16)
    # Rounding could carry a NaN into the sign bit: it stays a quiet NaN of its own sign.
    quiet = ((bits >> np.uint32(16)) | np.uint32(0x40)).astype(np.uint16)
    return np.where(np.isnan(values), quiet, rounded)
