"""Reductions of words that are no sums: their names, and the order in which every back end applies them.

``saturate:W`` adds signed lanes of W bits and stops at the ends of their range; ``exponent`` adds numbers of
the exponent format, rounded at random (:mod:`gccomm.kernels.reference.operations` is the specification).
Neither is associative, so the order counts: the ranks' words are added in pairs of neighbours, (0, 1),
(2, 3), ..., then the sums in pairs, and so on; one without a neighbour waits for the next round. The
randomness depends on the seed, the number of the addition and the place in the whole array. So results depend
neither on how a back end cuts the array nor on which rank adds.

A tree, because fewer roundings follow each other than along a chain. Each takes an exponent down by one at
most: magnitudes up to 2**-(1 + ceil(log2 n)) cannot saturate, however they are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from gccomm.noise import GOLDEN, MASK32, fmix
from gccomm.steps import Fold

__all__ = [
    "FOLD",
    "OPERATIONS",
    "PROVIDED",
    "SATURATING_WIDTHS",
    "add_pair",
    "addition_seed",
    "check_operation",
    "fold_all",
    "reduce_parts",
]

Words: TypeAlias = npt.NDArray[np.uint32]
_Add: TypeAlias = Callable[[Words, Words, Words, int], None]

SATURATING_WIDTHS = (2, 3, 4, 5, 6, 8, 10, 16)
OPERATIONS = frozenset({"exponent", *(f"saturate:{width}" for width in SATURATING_WIDTHS)})

FOLD = "fold"
"""The reduction in two hops by a codec's own arithmetic, :class:`gccomm.steps.Fold`."""

PROVIDED = OPERATIONS | {FOLD}
"""What gccomm's own back ends have."""


def check_operation(operation: str, seed: int) -> None:
    """Refuse an unknown operation or seed.

    Raises
    ------
    ValueError
        `operation` is none of :data:`OPERATIONS`, or `seed` is no 32-bit word.
    """
    if operation not in OPERATIONS:
        message = f"`operation` must be one of {', '.join(sorted(OPERATIONS))}; got {operation!r}"
        raise ValueError(message)
    if not 0 <= seed <= MASK32:
        message = f"`seed` must be from 0 to 2^32 - 1; got {seed!r}"
        raise ValueError(message)


def addition_seed(seed: int, addition: int) -> int:
    """Return the seed of one addition of a reduction, counted from 0 in the order in which they are made."""
    return fmix(seed + addition * GOLDEN)


def reduce_parts(operation: str, seed: int, parts: Sequence[Words], start: int, out: Words) -> None:
    """Reduce the words of all ranks in the documented order.

    Parameters
    ----------
    operation : str
        One of :data:`OPERATIONS`.
    seed : int
        Of the whole reduction, 0 to 2**32 - 1.
    parts : sequence of array of uint32, shape (words,)
        One per rank, in rank order, contiguous and apart; overwritten.
    start : int
        Number of their first word in the whole array.
    out : array of uint32, shape (words,)
        Result; may be one of the parts.
    """
    if len(parts) == 1:
        np.copyto(out, parts[0])
        return
    add, done, left = _adder(operation, start), 0, list(parts)
    while len(left) > 1:
        for a, b in zip(left[0::2], left[1::2], strict=False):
            add(a, b, out if len(left) == 2 else a, addition_seed(seed, done))
            done += 1
        left = left[0::2]


def add_pair(
    operation: str,
    seed: int,
    parts: tuple[Words, Words],
    start: int,
    out: Words,
    number: tuple[int, int, int],
) -> None:
    """Make one of the additions of :func:`reduce_parts`, for back ends that reduce a power of two of ranks
    pair by pair.

    Parameters
    ----------
    operation, seed
        As of :func:`reduce_parts`.
    parts : two arrays of uint32
        What the lower and the upper ranks hold.
    start : int
        Number of their first word in the whole array.
    out : array of uint32
        Result; may be one of the parts.
    number : three ints
        Number of ranks, a power of two; round; pair in the round.
    """
    ranks, round_, pair = number
    addition = ranks - (ranks >> round_) + pair  # those of the rounds before come first
    _adder(operation, start)(*parts, out, addition_seed(seed, addition))


def _adder(operation: str, start: int) -> _Add:
    if operation == "exponent":
        return partial(_add_exponents, start)
    return partial(_add_lanes, int(operation.partition(":")[2]))


def _add_lanes(width: int, a: Words, b: Words, out: Words, _seed: int) -> None:
    from gccomm.kernels import address, saturating_add

    saturating_add(address(a), address(b), address(out), out.size, width)


def _add_exponents(start: int, a: Words, b: Words, out: Words, seed: int) -> None:
    from gccomm.kernels import address, exponent_add

    exponent_add(address(a), address(b), address(out), out.size, seed, start)


def fold_all(steps: Sequence[Fold], sent: Sequence[Words], folded: Sequence[Words]) -> None:
    """Fold the encoded words of all ranks, which lie in one process, and give every rank the result.

    Parameters
    ----------
    steps : sequence of Fold
        One per rank.
    sent, folded : sequence of array of uint32
        Each rank's own words, and where the result's go.

    Raises
    ------
    ValueError
        The ranks' words differ in number.
    """
    sizes = {(step.blocks, one.size, out.size) for step, one, out in zip(steps, sent, folded, strict=True)}
    if len(sizes) > 1:
        message = f"ranks fold words of different sizes: {[one.size for one in sent]}"
        raise ValueError(message)
    steps[0].fold(0, steps[0].blocks, sent, folded[0])
    for out in folded[1:]:
        np.copyto(out, folded[0])
