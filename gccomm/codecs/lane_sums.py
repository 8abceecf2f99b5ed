"""Steps that agree on scales and sum lanes in one, for back ends that do both chunk by chunk themselves.

A chunk then stays in the caches from its maxima to its words, no sums are written down between the words of
the ranks and the results, and no Python runs in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gccomm import kernels
from gccomm.kernels import LANES
from gccomm.layout import BLOCK
from gccomm.steps import Context, LaneSum, Words

if TYPE_CHECKING:
    from gccomm.operand import Operand

__all__ = ["lane_sum_of", "takes_lane_sums"]

CHUNK_BLOCKS = 128  # rotated blocks of two chunks are as much as a usual second-level cache


def takes_lane_sums(x: Operand, ctx: Context) -> bool:
    """Return whether the driver takes these steps, of an operand of which nothing is measured."""
    return ctx.sums_lanes and x.on_host and x.sketch is None and not ctx.measure


def lane_sum_of(
    x: Operand,
    scales: Words,
    width: int,
    limit: int,
    ctx: Context,
    *,
    agree: bool = False,
    rotations: int = 0,
    subtract: bool = False,
    maxima: Words | None = None,
) -> LaneSum:
    """Return the step that sums all blocks of an operand; arguments as of :meth:`Operand.encode`.

    Parameters
    ----------
    scales : array of uint32, shape (blocks,)
        Scale words; with ``agree`` the agreed maxima are written there.
    maxima : array of uint32, shape (blocks,), optional
        Where each block's own scale word goes; not with ``agree``.
    """
    address = kernels.address
    twin_at = places_at = kept_at = 0
    alive = [x, scales, maxima]
    if rotations and agree and not x.float64 and not x.feedback:
        twin, places = x.rotated_blocks()
        kept = kernels.pool_empty(4 * BLOCK * min(2 * CHUNK_BLOCKS, x.blocks))
        twin_at, places_at, kept_at = twin.address, address(places), address(kept)
        alive += [twin, places, kept]
    own = 0 if maxima is None else address(maxima)
    addresses = x.address, twin_at, kept_at, places_at, address(x.offsets), address(scales), own
    flags = rotations, agree, subtract, x.mean, ctx.streams(rotations)
    record = *addresses, x.count, x.blocks, CHUNK_BLOCKS, width, limit, ctx.shift, 0, *flags, b""
    job = np.array([record], LANES)  # of one tuple: a field at a time takes longer
    chunks = -(-x.blocks // CHUNK_BLOCKS)
    return LaneSum(job, 4 * (x.words + x.blocks * agree + chunks), alive)
