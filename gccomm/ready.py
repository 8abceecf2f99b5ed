"""Calls whose layout is known, as records that are written, and that a back end may carry out, without Python
in between.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np

from gccomm import kernels
from gccomm.agreement import FIELDS, HEADER_WORDS, MESSAGE_WORDS, SLOW_WORD, Call, write_header
from gccomm.groups import STORAGE
from gccomm.kernels import CALL, DTYPE_CODES, JOININGS
from gccomm.pieces import Wire, scratch
from gccomm.steps import Buffer, Context, FloatSum, LaneSum, Step
from gccomm.transfers import CallAdd, Transfer

if TYPE_CHECKING:
    from gccomm.operand import Operand
    from gccomm.options import Place
    from gccomm.running import Running

__all__ = ["Ready", "swap", "swapped"]

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
    nbytes, messages : int
        What travels then, and in how many messages.
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
        self.whole, self.nbytes, self.messages = False, 0, 2
        self._alive: Any = None  # what the record has addresses of
        self._sums, self._sums_bytes = kernels.pool_empty(0), 0

    @property
    def tag(self) -> int:
        """What the tags of the call's messages are made of: see :func:`gccomm.agreement.tag_of`."""
        return int(self._tag[0])

    def begin(self, array: int, result: int, step: int, slow: bool) -> None:
        """Write down what is of one call alone: addresses of tensor and result, noise, header, tag."""
        if self._sums.size < self._sums_bytes:
            self._sums = kernels.pool_empty(self._sums_bytes)
            self.job["sums"] = kernels.address(self._sums)
        kernels.begin_call(self._at, array, result, step, slow)

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

    def swap(self, step: Step | None, most: int, context: Context) -> bool:
        """Let ranks swap the tensor, where ``step`` is the first one and sums it, and floats that travel have
        at most so many bytes; return whether they do.
        """
        if isinstance(step, LaneSum):
            self._take_lanes(step)
            nbytes = self._x.coordinates * self._x.specs[0].item_bytes
        elif isinstance(step, FloatSum) and step.plain and 0 < self._bytes(step) <= most:
            self._take_floats(step, most, context)
            nbytes = self._bytes(step)
        else:
            return False
        self.nbytes, self.messages = 4 * HEADER_WORDS + nbytes, 1
        return True

    @staticmethod
    def _bytes(step: FloatSum) -> int:
        return step.count * STORAGE[step.dtype].itemsize

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
        nbytes = self._bytes(step)
        if x.mean or x.specs[0].dtype != step.dtype:
            self._sums_bytes = nbytes
        self.whole, self.nbytes = True, 4 * MESSAGE_WORDS + nbytes

    def _write(self, **fields: int) -> None:
        for name, value in fields.items():
            self.job[name] = value


def swapped(call: Call, running: Running, key: tuple[int, int], context: Context, most: int) -> Ready | None:
    """Return the record of a call in which ranks swap a tensor, whose addresses are known, before its codec
    goes on; None where they do not: that follows from what all ranks agree on.
    """
    x, step = running.operand, running.step
    if not isinstance(step, LaneSum | FloatSum):
        return None
    ready = Ready(call, context.rank, x, key)
    if not ready.swap(step, most, context):
        return None
    source, result = int(x.table["src"][0]), int(x.table["dst"][0])
    ready.begin(source, result, context.step, call.links.found())
    return ready


def swap(ready: Ready, wire: Wire, call: Call) -> Generator[Transfer, Any, BaseException | None]:
    """Let ranks swap a tensor; return what is wrong with the call."""
    transfer = CallAdd(ready.job)
    yield from wire.move(transfer, ready.nbytes, ready.messages)
    wire.share(*transfer.seconds)
    wire.decoded()
    if not transfer.same:
        return (yield from wire.verify(call, ready.agreed))
    call.links.slow = bool(ready.agreed[SLOW_WORD])
    return None
