"""The step protocol: what a codec asks of the driver, as descriptions without buffers or communication.

A codec's ``steps(x, state, ctx)`` is a generator. Each ``yield`` hands the driver one step; the driver gives
memory, calls ``encode``, moves words, calls ``decode``, and sends the answer back into the generator (the
words of an :class:`Agree` or :class:`Energies`). The generator returns what the codec's next state is made
of, one entry a segment. One driver runs it over MPI, one in lockstep for many virtual ranks in one thread; a
codec cannot tell which.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "Agree",
    "Context",
    "Energies",
    "FloatName",
    "FloatSum",
    "Fold",
    "LaneSum",
    "Lanes",
    "Look",
    "OpSum",
    "Redo",
    "Step",
    "Steps",
    "Sum",
    "Words",
    "float_sum",
]

STREAM_BYTES = (2 << 20) + 1
STREAM_ROTATED_BYTES = 1 << 20  # the last butterflies of a block hide behind the way to memory of another's
"""From how many bytes on results are written past the caches."""

Words: TypeAlias = npt.NDArray[np.uint32]
Buffer: TypeAlias = npt.NDArray[Any]
FloatName: TypeAlias = Literal["float32", "float64", "bfloat16", "float16"]
Lanes: TypeAlias = tuple[tuple[int, int, int], ...]  # (first word, end word, lane width)


@dataclass(frozen=True, slots=True)
class Context:
    """What a codec knows about the call.

    Attributes
    ----------
    rank, size : int
        This rank and the number of ranks n.
    shift : int
        This rank's dither offset, floor(place * 65536 / n).
    step : int
        Number of the call, which keys the noise.
    result_bytes : int
        Size of all results of the call.
    measure : bool
        Collect what ``vnmse_estimate`` needs.
    piecewise : bool
        A piece is agreed upon and summed before the next one begins: what it holds meanwhile is little, and
        stays in the caches.
    stateful : bool
        What a codec returns comes back to it in the next step; false for the functions.
    sums_lanes : bool
        The driver takes a :class:`LaneSum`.
    inputs : int
        Number of inputs that are added up in all, where hosts add up their ranks' first; 0: n.
    flowing : bool
        Words stay on a device, and the host does not look at them before :class:`Look`.
    """

    rank: int
    size: int
    shift: int
    step: int = 0
    result_bytes: int = 0
    measure: bool = False
    piecewise: bool = False
    stateful: bool = False
    sums_lanes: bool = False
    inputs: int = 0
    flowing: bool = False

    @property
    def divisor(self) -> int:
        """What a mean divides the sum by."""
        return self.inputs or self.size

    def streams(self, rotations: int = 0) -> bool:
        """Return whether results are written past the caches, for which they are too large."""
        return self.result_bytes >= (STREAM_ROTATED_BYTES if rotations else STREAM_BYTES)


@dataclass(frozen=True, slots=True)
class Agree:
    """Elementwise MAX over ranks of ``count`` uint32 words below 2^31. ``fill(out)`` writes this rank's; the
    answer is the agreed words, valid until the generator's operand has been summed.
    """

    count: int
    fill: Callable[[Words], None]


@dataclass(frozen=True, slots=True)
class Energies:
    """Elementwise SUM mod 2^32 over ranks of ``count`` uint32 words, a few a block at most. ``fill(out)``
    writes this rank's; the answer is the sums.
    """

    count: int
    fill: Callable[[Words], None]


@dataclass(frozen=True, slots=True)
class Sum:
    """SUM mod 2^32 of the uint32 words that carry ``blocks`` blocks.

    ``size(lo, hi)`` is the number of words of blocks lo to hi, ``encode(lo, hi, out)`` writes them into
    ``out``, ``decode(lo, hi, words)`` reads their sums. The driver gives all blocks of a piece at once;
    operands of whole tensors it cuts at multiples of 1024 blocks. ``lanes(lo, hi)`` lists (first word, end
    word, lane width) of that message for drivers that check lane ranges; words that may leave their range are
    not listed.
    """

    blocks: int
    size: Callable[[int, int], int]
    encode: Callable[[int, int, Words], None]
    decode: Callable[[int, int, Words], None]
    lanes: Callable[[int, int], Lanes] = lambda _lo, _hi: ()


@dataclass(frozen=True, slots=True)
class Look:
    """The host has to see what a device has found, after the codec's last sum, before it goes on: only where
    the context is ``flowing``. The answer is None, when all that was enqueued before is done.
    """


@dataclass(frozen=True, slots=True)
class Redo:
    """SUM of the spans whose check words were wrong, in wider lanes, at the end of the call.

    ``spans`` lists (first block, end block); ``size``, ``encode`` and ``lanes`` are those of :class:`Sum`,
    and ``decode(lo, hi, words)`` returns whether the check words are right.
    """

    spans: tuple[tuple[int, int], ...]
    size: Callable[[int, int], int]
    encode: Callable[[int, int, Words], None]
    decode: Callable[[int, int, Words], bool]
    lanes: Callable[[int, int], Lanes]


@dataclass(frozen=True, slots=True)
class FloatSum:
    """SUM of ``count`` floats of ``dtype`` in the back end's own order; promises no bit equality across back
    ends or piece sizes.

    ``direct``, where not None, is a pair of arrays (input, result) that may be reduced from one into the
    other without ``encode``; ``finish`` then completes the result in place. 16-bit floats travel as uint16.
    ``plain`` says that ``encode`` and ``decode`` do no more than convert the operand's coordinates to
    ``dtype`` and sums back, and divide those of a mean: a back end may do that by itself.
    """

    dtype: FloatName
    blocks: int
    count: int
    encode: Callable[[int, int, Buffer], None]
    decode: Callable[[int, int, Buffer], None]
    direct: tuple[Buffer, Buffer] | None = None
    finish: Callable[[], None] | None = None
    plain: bool = False


def float_sum(array: Buffer, dtype: FloatName | None = None) -> FloatSum:
    """Return the step that sums a C-contiguous array in place; 16-bit floats are uint16 with a ``dtype``."""
    flat = array.reshape(-1)
    name: Any = dtype if dtype is not None else str(array.dtype)
    nothing: Callable[[int, int, Buffer], None] = lambda _lo, _hi, _out: None  # noqa: E731
    return FloatSum(name, 0, flat.size, nothing, nothing, (flat, flat))


@dataclass(frozen=True, slots=True)
class OpSum:
    """Reduction of ``count`` uint32 words by one of the back end's own operations ("saturate:4", "exponent").

    ``seed`` (uint32, equal on all ranks) keys the operation's noise. Every rank gets the same bits; they
    depend on the order in which the back end adds, and so on pieces and fusion.
    """

    operation: str
    seed: int
    count: int
    encode: Callable[[Words], None]
    decode: Callable[[Words], None]


@dataclass(frozen=True, slots=True)
class LaneSum:
    """Agreement on the scales of blocks and SUM of their lanes in one, by the back end itself.

    ``job`` is a :data:`gccomm.kernels.LANES` record without a tag, ``alive`` what it has the addresses of,
    ``nbytes`` what travels. The answer is None: results are written, and so are scales and maxima.
    """

    job: Buffer
    nbytes: int
    alive: Any


@dataclass(frozen=True, slots=True)
class Fold:
    """Reduction of ``blocks`` blocks by arithmetic of the codec's own, in two hops: the words of all ranks
    for a block come together on one rank, which makes those of the result of them, and these go to all.

    ``encode(lo, hi, out)`` writes this rank's ``sent(lo, hi)`` words of blocks lo to hi. ``fold(lo, hi,
    parts, out)`` makes ``folded(lo, hi)`` words of the parts of all ranks, in the order of the ranks, and
    ``decode(lo, hi, words)`` reads those. Either number of words is the sum of those of single blocks, at
    most ``most`` for one. Every block is encoded once, before it is decoded; cuts may fall between any two,
    on all ranks alike. ``fold`` gives the same words on every rank, for any cut, and may be called where a
    block is not this rank's own.
    """

    blocks: int
    most: int
    sent: Callable[[int, int], int]
    folded: Callable[[int, int], int]
    encode: Callable[[int, int, Words], None]
    fold: Callable[[int, int, Sequence[Words], Words], None]
    decode: Callable[[int, int, Words], None]


Step: TypeAlias = Agree | Energies | Sum | Look | Redo | FloatSum | OpSum | LaneSum | Fold
Steps: TypeAlias = Generator[Step, Words | None, Any]
