"""The step protocol: what a codec asks of the driver, as descriptions without buffers or communication.

A codec's ``steps(x, state, ctx)`` is a generator. Each ``yield`` hands the driver one step; the driver gives
memory, calls ``encode``, moves words, calls ``decode``, and sends the answer (the agreed words of an
:class:`Agree`) back into the generator. The generator returns the codec's next state. One driver runs it over
MPI, one in lockstep for many virtual ranks in one thread; a codec cannot tell which.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Agree", "Context", "FloatName", "FloatSum", "Step", "Steps", "Sum", "Words"]

Words: TypeAlias = npt.NDArray[np.uint32]
Buffer: TypeAlias = npt.NDArray[Any]
FloatName: TypeAlias = Literal["float32", "float64", "bfloat16", "float16"]


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
    stream : bool
        Results are larger than the caches: write past them.
    measure : bool
        Collect what ``vnmse_estimate`` needs.
    """

    rank: int
    size: int
    shift: int
    step: int = 0
    stream: bool = False
    measure: bool = False


@dataclass(frozen=True, slots=True)
class Agree:
    """Elementwise MAX over ranks of ``count`` uint32 words below 2^31. ``fill(out)`` writes this rank's; the
    answer is the agreed words.
    """

    count: int
    fill: Callable[[Words], None]


@dataclass(frozen=True, slots=True)
class Sum:
    """SUM mod 2^32 of ``count`` uint32 words that carry ``blocks`` blocks.

    ``encode(lo, hi, out)`` writes the words of blocks lo to hi (any range) into ``out``, ``decode(lo, hi,
    words)`` reads their sums; both are pure in everything else. ``lanes`` lists (first word, end word, lane
    width) for drivers that check lane ranges.
    """

    blocks: int
    count: int
    encode: Callable[[int, int, Words], None]
    decode: Callable[[int, int, Words], None]
    lanes: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class FloatSum:
    """SUM of ``count`` floats of ``dtype`` in the back end's own order; promises no bit equality across back
    ends or piece sizes.

    ``direct``, where not None, is a pair of arrays (input, result) that may be reduced from one into the
    other without ``encode``; ``finish`` then completes the result in place. 16-bit floats travel as uint16.
    """

    dtype: FloatName
    blocks: int
    count: int
    encode: Callable[[int, int, Buffer], None]
    decode: Callable[[int, int, Buffer], None]
    direct: tuple[Buffer, Buffer] | None = None
    finish: Callable[[], None] | None = None


Step: TypeAlias = Agree | Sum | FloatSum
Steps: TypeAlias = Generator[Step, Words | None, Any]
