"""Calls whose layout is known, as records that are written, and that a back end may carry out, without Python
in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gccomm import kernels
from gccomm.agreement import FIELDS, HEADER_WORDS, MESSAGE_WORDS, SLOW_WORD, Call, write_header
from gccomm.groups import STORAGE
from gccomm.kernels import CALL, DTYPE_CODES, JOININGS
from gccomm.pieces import scratch
from gccomm.steps import Buffer, Context, FloatSum, LaneSum

if TYPE_CHECKING:
    from gccomm.operand import Operand
    from gccomm.options import Place

__all__ = ["Ready"]

KEPT_BYTES = 256 << 10  # of memory for floats, from call to call; more comes from the pool


class Ready:
    """A call on one tensor, as a :data:`gccomm.kernels.CALL` record.

    Parameters
    ----------
    call : Call
        A call that was made.
    rank : int
        This one.
    x : Operand
        The tensor, of one segment.
    key : tuple of int
        Of its noise.

    Attributes
    ----------
    job : array
        The record, shape (1,).
    header, agreed : array of uint32
        This rank's header, and memory for it and what is agreed on.
    whole : bool
        The back end makes the whole call.
    nbytes : int
        What travels then.
    """

    def __init__(self, call: Call, rank: int, x: Operand, key: tuple[int, int]) -> None:
        address = kernels.address
        self.header = np.zeros(HEADER_WORDS, np.uint32)
        write_header(call, rank, self.header)
        self.agreed = scratch(max(MESSAGE_WORDS, HEADER_WORDS + x.blocks))
        self.job: Buffer = np.zeros(1, CALL)
        self._write(
            header=address(self.header),
            agreed=address(self.agreed),
            table=x.address,
            header_words=HEADER_WORDS,
            words=MESSAGE_WORDS,
            compared=SLOW_WORD,
            values=len(FIELDS),
            step_at=2 * FIELDS.index("step"),
            blocks=x.blocks,
            key0=key[0],
            key1=key[1],
            item=1,
            chunk=1,
        )
        self._at, self._tag, self._x = address(self.job), self.job["tag"], x
        self.whole, self.nbytes = False, 0
        self._alive: Any = None  # what the record has addresses of
        self._sums, self._sums_bytes = kernels.pool_empty(0), 0

    @property
    def tag(self) -> int:
        """What the tags of the call's messages are made of: see :func:`gccomm.engine.tag_of`."""
        return int(self._tag[0])

    def begin(self, array: Buffer, result: Buffer, step: int, slow: bool) -> None:
        """Write down what is of one call alone: addresses, noise, header, tag."""
        address = kernels.address
        if self._sums.size < self._sums_bytes:
            self._sums = kernels.pool_empty(self._sums_bytes)
            self.job["sums"] = address(self._sums)
        kernels.begin_call(self._at, address(array), address(result), step, slow)

    def release(self) -> None:
        """Give up memory that is too large to be kept."""
        if self._sums_bytes > KEPT_BYTES:
            self._sums = kernels.pool_empty(0)

    def take(self, step: LaneSum | FloatSum, place: Place, context: Context) -> None:
        """Let the back end make the whole call, if it does that: one of which ``step`` is the only step, the
        same in every call.
        """
        if place.call_bytes == 0:
            return
        if isinstance(step, LaneSum):
            if step.job["agree"][0]:  # or else what it starts from differs from call to call
                self._take_lanes(step)
        elif step.plain:
            self._take_floats(step, place.call_bytes, context)

    def _take_lanes(self, step: LaneSum) -> None:
        twin = self._x.rotated
        self._write(twin=0 if twin is None else twin[0].address, lanes=kernels.address(step.job))
        self.whole, self.nbytes, self._alive = True, 4 * MESSAGE_WORDS + step.nbytes, (step, twin)

    def _take_floats(self, step: FloatSum, chunk_bytes: int, context: Context) -> None:
        x, item = self._x, STORAGE[step.dtype].itemsize
        self._write(
            places=kernels.address(x.offsets),
            count=step.count,
            item=item,
            kind=JOININGS[step.dtype],
            wire=DTYPE_CODES[step.dtype],
            chunk=chunk_bytes // item,
            n=context.divisor,
            mean=x.mean,
        )
        nbytes = step.count * item
        if x.mean or x.specs[0].dtype != step.dtype:
            self._sums_bytes = nbytes
        self.whole, self.nbytes = True, 4 * MESSAGE_WORDS + nbytes

    def _write(self, **fields: int) -> None:
        for name, value in fields.items():
            self.job[name] = value
