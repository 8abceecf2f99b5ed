"""Calls whose steps are known, as records that a back end carries out without Python in between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gccomm import kernels
from gccomm.agreement import FIELDS, HEADER_WORDS, MESSAGE_WORDS, SLOW_WORD
from gccomm.groups import STORAGE
from gccomm.kernels import CALL, DTYPE_CODES, JOININGS
from gccomm.steps import Buffer, Context, FloatSum, LaneSum, Words

if TYPE_CHECKING:
    from gccomm.operand import Operand
    from gccomm.options import Place

__all__ = ["STEP_WORD", "Ready", "ready_of"]

KEPT_BYTES = 256 << 10  # of memory for floats, from call to call; more comes from the pool
STEP_WORD = 2 * FIELDS.index("step")


class Ready:
    """A call on one tensor, as a :data:`gccomm.kernels.CALL` record.

    Parameters
    ----------
    x : Operand
        The tensor, of one segment.
    alive : object
        What else the record has addresses of.
    key : tuple of int
        Of the tensor's noise.
    messages : tuple of array of uint32
        This rank's header, and memory for the first message.
    nbytes : int
        What travels after the first message.
    record : dict
        Fields of the record that depend on the step.
    converts : bool
        These are floats that are converted.

    Attributes
    ----------
    job : array
        The record, shape (1,).
    nbytes : int
        What travels, the first message included.
    """

    def __init__(
        self,
        x: Operand,
        alive: Any,
        key: tuple[int, int],
        messages: tuple[Words, Words],
        nbytes: int,
        record: dict[str, int],
        *,
        converts: bool = False,
    ) -> None:
        address, (header, agreed) = kernels.address, messages
        self.job: Buffer = np.zeros(1, CALL)
        fields = {
            "header": address(header),
            "agreed": address(agreed),
            "table": x.address,
            "header_words": HEADER_WORDS,
            "words": MESSAGE_WORDS,
            "compared": SLOW_WORD,
            "values": len(FIELDS),
            "step_at": STEP_WORD,
            "blocks": x.blocks,
            "key0": key[0],
            "key1": key[1],
            "item": 1,
            "chunk": 1,
            **record,
        }
        for name, value in fields.items():
            self.job[name] = value
        self.nbytes = 4 * MESSAGE_WORDS + nbytes
        self._at = address(self.job)
        self._alive = x, alive, messages
        self._sums_bytes, self._sums = nbytes * converts, kernels.pool_empty(0)

    def begin(self, array: Buffer, result: Buffer, step: int, slow: bool) -> None:
        """Write down what is of one call alone."""
        address = kernels.address
        if self._sums.size < self._sums_bytes:
            self._sums = kernels.pool_empty(self._sums_bytes)
            self.job["sums"] = address(self._sums)
        kernels.begin_call(self._at, address(array), address(result), step, slow)

    def release(self) -> None:
        """Give up memory that is too large to be kept."""
        if self._sums_bytes > KEPT_BYTES:
            self._sums = kernels.pool_empty(0)


def ready_of(
    x: Operand,
    step: LaneSum | FloatSum,
    key: tuple[int, int],
    messages: tuple[Words, Words],
    place: Place,
    context: Context,
) -> Ready | None:
    """Return the call that consists of a header and one step, the same in every call, where the back end
    makes it by itself.

    Parameters
    ----------
    messages : tuple of array
        This rank's header, and memory for the first message.
    """
    if place.call_bytes == 0:
        return None
    if isinstance(step, LaneSum):
        if not step.job["agree"][0]:
            return None  # what it starts from differs from call to call
        twin = 0 if x.rotated is None else x.rotated[0].address
        return Ready(x, step, key, messages, step.nbytes, {"twin": twin, "lanes": kernels.address(step.job)})
    if not step.plain:
        return None
    item = STORAGE[step.dtype].itemsize
    converts = bool(x.mean) or x.specs[0].dtype != step.dtype
    record = {
        "places": kernels.address(x.offsets),
        "count": step.count,
        "item": item,
        "kind": JOININGS[step.dtype],
        "wire": DTYPE_CODES[step.dtype],
        "chunk": place.call_bytes // item,
        "n": context.divisor,
        "mean": int(x.mean),
    }
    return Ready(x, step, key, messages, step.count * item, record, converts=converts)
