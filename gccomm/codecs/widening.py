"""Lanes that widen on their way: a rank's own integers in lanes just wide enough for them, the sums in wide
ones.

Where each of n ranks uses the n-th part of a lane's range, its own integers need about log2 n bits less than
their sum. Words that are added up as they are must have the sum's room from the start. A fold
(:class:`gccomm.steps.Fold`) gets each rank's words by themselves: they travel narrow to where they are added
up, and wide from there. The sums are the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING

import numpy as np

from gccomm import kernels
from gccomm.lanes import FIXED_POINT, WIDTHS, lanes, words
from gccomm.layout import BLOCK
from gccomm.steps import Fold, Words

if TYPE_CHECKING:
    from gccomm.operand import Operand

__all__ = ["Widening", "narrow_width", "widening_limit"]

LEAST_KEPT = 15 / 16  # of a rank's levels, where giving up the others makes its lanes narrower


def narrow_width(limit: int) -> int:
    """Return the narrowest lane for one rank's integers, whose fixed-point values are at most ``limit``."""
    most = -(-limit // FIXED_POINT)  # the dither may round up
    return next(width for width in WIDTHS if most < 1 << (width - 1))


def widening_limit(limit: int) -> int:
    """Return the largest fixed-point value of a rank where lanes of the sums have room for ``limit``: that,
    or a little less where a rank's own integers then fit into narrower lanes.

    The 2^m-th part of a lane of w bits is a fraction of a level more than a lane of w - m bits holds.
    """
    fits = [((1 << (width - 1)) - 1) * FIXED_POINT for width in WIDTHS if width < narrow_width(limit)]
    return next((most for most in reversed(fits) if most >= LEAST_KEPT * limit), limit)


class Widening:
    """The lanes of an operand on their way from narrow to wide.

    Parameters
    ----------
    x : Operand
        Blocks, as lanes of ``width`` bits hold their sums.
    width, limit : int
        Lane width of the sums, and largest fixed-point value of a rank.

    Attributes
    ----------
    narrow : int
        Lane width of a rank's own integers.
    source : Operand
        The same blocks, placed for narrow lanes: what encodes.
    """

    def __init__(self, x: Operand, width: int, limit: int) -> None:
        self.x, self.width, self.narrow = x, width, narrow_width(limit)
        self.source = copy(x)
        self.source.table, self.source.rotated = x.table.copy(), None
        self.source.address = kernels.address(self.source.table)
        self.source.read_from(self.source.table if x.inputs is x.table else x.inputs.copy())
        self.source._place(-(-x.codec.carried(x.lengths) // lanes(self.narrow)))
        # Lanes of blocks that are rotated hold them padded.
        self.padded = bool((x.codec.carried(x.lengths) != x.lengths).any())

    def step(
        self, encode: Callable[[int, int, Words], None], decode: Callable[[int, int, Words], None]
    ) -> Fold:
        """Return the step; ``encode`` writes narrow lanes, ``decode`` reads wide ones."""
        x, most = self.x, words(self.width, BLOCK)
        return Fold(x.blocks, most, self.source.size, x.size, encode, self._fold, decode)

    def _fold(self, lo: int, hi: int, parts: Sequence[Words], out: Words) -> None:
        addresses = np.array([kernels.address(part) for part in parts], dtype=np.uint64)
        x = self.source
        kernels.widen_lanes(
            x.address, x.count, lo, hi, kernels.address(addresses), len(parts), kernels.address(out),
            int(x.offsets[lo]), self.narrow, self.width, self.padded,
        )  # fmt: skip
