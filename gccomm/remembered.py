"""What a reduction remembers of each key between calls, and how it comes out of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from gccomm.codecs.base import State
from gccomm.layout import ITEM_BYTES
from gccomm.steps import Buffer

__all__ = ["STORAGE", "KeyState", "Known", "Leaf", "known_from", "state_from"]

STORAGE = {"bfloat16": np.dtype(np.uint16)}


class Leaf(NamedTuple):
    """What a call's plan depends on, for one leaf."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    row_shape: tuple[int, ...]
    device: str

    @property
    def size(self) -> int:
        """Coordinates."""
        return math.prod(self.row_shape)


class Known(NamedTuple):
    """What is remembered of a key: layout, the way to make a result, and whether a checkpoint says so."""

    leaf: Leaf
    wrap: Callable[[Buffer], Any]
    restored: bool = False


class KeyState(NamedTuple):
    """What a codec has adapted for a key, and for which layout and codec it holds."""

    dtype: str
    row_shape: tuple[int, ...]
    codec: str
    values: State


def known_from(key: str, layout: Sequence[Any]) -> Known:
    """Return the entry of ``Reduction.known`` for a layout out of a checkpoint; results are NumPy arrays.

    Raises
    ------
    ValueError
        The layout is malformed.
    """
    try:
        dtype, shape, row_shape, device = layout
        leaf = Leaf(key, str(dtype), tuple(map(int, shape)), tuple(map(int, row_shape)), str(device))
        if leaf.dtype not in ITEM_BYTES or min((*leaf.shape, *leaf.row_shape), default=0) < 0:
            raise ValueError("unknown dtype or negative extent")
        template = np.zeros(1, STORAGE.get(leaf.dtype) or leaf.dtype)
    except (TypeError, ValueError) as error:
        msg = f"the layout of {key!r} is malformed: {layout!r} ({error})"
        raise ValueError(msg) from error
    wide = leaf.row_shape != leaf.shape
    user = np.result_type(template, np.complex64) if wide else template.dtype
    if leaf.dtype == "bfloat16":
        with suppress(ImportError):
            import ml_dtypes

            user = np.dtype(ml_dtypes.bfloat16)
    return Known(leaf, lambda result: result.view(user).reshape(leaf.shape), restored=True)


def state_from(key: str, saved: Any) -> KeyState:
    """Return the entry of ``Reduction.states`` for what a checkpoint holds.

    Raises
    ------
    ValueError
        The state is malformed.
    """
    try:
        shape = tuple(map(int, saved["row_shape"]))
        values = {str(k): _plain(v) for k, v in saved["values"].items()}
        return KeyState(str(saved["dtype"]), shape, str(saved["codec"]), values)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        msg = f"what a codec adapted for {key!r} is malformed: {saved!r} ({type(error).__name__}: {error})"
        raise ValueError(msg) from error


def _plain(value: Any) -> Any:
    """Return a state's value, arrays copied; numbers that a checkpoint library made arrays become numbers."""
    if isinstance(value, bool | int | float | str):
        return value
    array = np.array(value)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{value!r} is neither a number, a text nor an array")
    return array if array.ndim else array.item()
