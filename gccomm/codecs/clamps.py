"""How many coordinates a scale clamps: counted only in blocks that are known to have some."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gccomm.kernels.reference.namespace import scale_by_power
from gccomm.kernels.reference.rotation import Rotation, rotate, sign_words
from gccomm.kernels.reference.scales import split_scale

if TYPE_CHECKING:
    from gccomm.operand import Operand
    from gccomm.steps import Words

__all__ = ["count_clamped"]


def count_clamped(
    x: Operand, blocks: npt.NDArray[np.int64], scales: Words, rotations: int
) -> npt.NDArray[np.int64]:
    """Return by segment how many coordinates of these blocks, rotated or not, are larger than the scales."""
    counts = np.zeros(x.count, dtype=np.int64)
    owners = np.searchsorted(x.bounds, blocks, "right") - 1
    for i in np.unique(owners).tolist():
        values = x.load(i)
        mine = blocks[owners == i]
        starts = (
            np.cumsum(x.lengths[x.bounds[i] : x.bounds[i + 1]]) - x.lengths[x.bounds[i] : x.bounds[i + 1]]
        )
        for length in np.unique(x.lengths[mine]).tolist():
            alike = mine[x.lengths[mine] == length]
            rows = values[starts[alike - x.bounds[i]][:, None] + np.arange(length)]
            counts[i] += _above(x, i, alike, rows, scales[alike], rotations)
    return counts


def _above(x: Operand, i: int, blocks: Any, rows: Any, scales: Words, rotations: int) -> int:
    mantissa, exponent = split_scale(np, scales, x.float64)
    with np.errstate(over="ignore", under="ignore"):
        near = scale_by_power(np, rows, -exponent).astype(np.float32)
    if rotations:
        numbers = x.segments[i].start + blocks - x.bounds[i]
        key0, key1 = x.keys[i]
        near = rotate(np, near, Rotation(sign_words(np, key0, key1, numbers), rotations))
    limit = np.where(scales == 0, np.float32(0), mantissa)
    return int(np.count_nonzero(np.abs(near) > limit[:, None]))
