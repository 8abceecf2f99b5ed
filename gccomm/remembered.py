"""What a reduction remembers of each key between calls, and how it comes out of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from gccomm.codecs.base import State
from gccomm.layout import ITEM_BYTES, LeafSpec
from gccomm.steps import Buffer

__all__ = [
    "STORAGE",
    "KeyState",
    "Known",
    "Leaf",
    "known_from",
    "layout_of",
    "next_states",
    "state_from",
    "states_of",
]

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
    """What is remembered of a key: layout, the way to make a result, whether a checkpoint says so, and on a
    device the library whose stream is to come after results.
    """

    leaf: Leaf
    wrap: Callable[[Buffer], Any]
    restored: bool = False
    library: str = ""

    def placed(self) -> Leaf:
        """Return the leaf with a device of this process: a checkpoint names its kind alone."""
        if self.leaf.device != "cuda":
            return self.leaf
        from gccomm.kernels.cuda.on_cupy import current_device

        return self.leaf._replace(device=f"cuda:{current_device()}")


class KeyState(NamedTuple):
    """What a codec has adapted for a key, and for which layout and codec it holds."""

    dtype: str
    row_shape: tuple[int, ...]
    codec: str
    values: State


def states_of(specs: Sequence[LeafSpec], states: Mapping[str, KeyState]) -> dict[int, State]:
    """Return the states of a call's leaves, as far as they fit their layouts."""
    found = {}
    for i, spec in enumerate(specs):
        state = states.get(spec.key) if spec.route.stateful else None
        if state is not None and state[:3] == (spec.dtype, spec.row_shape, spec.route.fingerprint):
            found[i] = state.values
    return found


def next_states(
    specs: Sequence[LeafSpec], parts: Mapping[int, list[Any]], states: Mapping[int, State]
) -> dict[str, KeyState]:
    """Let codecs make their next states of what they returned, by leaf."""
    found: dict[str, KeyState] = {}
    for leaf, returned in parts.items():
        spec = specs[leaf]
        values = spec.route.next_state(states.get(leaf), returned)
        if values is not None:
            found[spec.key] = KeyState(spec.dtype, spec.row_shape, spec.route.fingerprint, values)
    return found


def known_from(key: str, layout: Sequence[Any]) -> Known:
    """Return the entry of ``Reduction.known`` for a layout out of a checkpoint; results are NumPy arrays, on
    a device CuPy's.

    Raises
    ------
    ValueError
        The layout is malformed.
    """
    try:
        dtype, shape, row_shape, device = layout
        leaf = Leaf(key, str(dtype), tuple(map(int, shape)), tuple(map(int, row_shape)), str(device))
        if leaf.device not in ("cpu", "cuda"):
            raise ValueError(f"there is no kind of device {leaf.device!r}")
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
    if leaf.device == "cpu":
        return Known(leaf, lambda result: result.view(user).reshape(leaf.shape), restored=True)

    def on_device(result: Any) -> Any:
        return result.queue.ndarray(result.address, result.nbytes, leaf.shape, user, result.owner)

    return Known(leaf, on_device, restored=True, library="cupy")


def layout_of(known: Known) -> list[Any]:
    """Return the layout of a key for a checkpoint: the same on all ranks."""
    leaf = known.leaf
    return [leaf.dtype, leaf.shape, leaf.row_shape, leaf.device.partition(":")[0]]


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
