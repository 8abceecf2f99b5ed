"""Sums of one piece that a device has ready at once: they go as one group, which is launched once."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gccomm.running import Message, Running, messages, pending
from gccomm.steps import Buffer, FloatSum, Sum, Words
from gccomm.transfers import FloatAdd, Together, Whole, WordAdd

if TYPE_CHECKING:
    from gccomm.pieces import Wire

__all__ = ["STORAGE", "parts_of", "send_together"]

STORAGE: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.uint16),
}
"""What floats of the wire are stored as."""

_ALIGNMENT = 16  # bytes


class _OfWords:
    """A message of words."""

    dtype = np.dtype(np.uint32)

    def __init__(self, message: Message) -> None:
        self._message, self.count, self._tag = message, message.words + 1, 0

    def encode(self, buffer: Buffer, wire: Wire) -> WordAdd:
        self._message.encode(buffer[:-1])
        self._tag = wire.put_tag(buffer)
        return WordAdd(buffer, self._message.lanes(0))

    def decode(self, buffer: Buffer, wire: Wire) -> None:
        wire.check_sum(self._tag, buffer, self._message.words)
        self._message.decode(buffer[:-1])


class _OfFloats:
    """A sum of floats."""

    def __init__(self, running: Running, step: FloatSum) -> None:
        self._running, self._step = running, step
        self.count, self.dtype = step.count, STORAGE[step.dtype]

    def encode(self, buffer: Buffer, wire: Wire) -> FloatAdd:
        del wire
        self._step.encode(0, self._step.blocks, buffer)
        return FloatAdd(buffer, buffer, self._step.dtype)

    def decode(self, buffer: Buffer, wire: Wire) -> None:
        wire.summed_floats(buffer)
        self._step.decode(0, self._step.blocks, buffer)
        self._running.answer(None)


Part = _OfWords | _OfFloats


def parts_of(running: Sequence[Running], room: int) -> list[Part]:
    """Return what pending sums of words, in messages of at most ``room``, and of floats come to."""
    floats = [(r, r.step) for r in running if isinstance(r.step, FloatSum) and r.step.direct is None]
    return [
        *(_OfWords(message) for message in messages(pending(running, Sum), room)),
        *(_OfFloats(r, step) for r, step in floats),
    ]


def send_together(wire: Wire, parts: Sequence[Part], words: Words) -> Generator[Whole, None, None]:
    """Sum all parts in one group, in ``words`` where they fit."""
    sizes = [part.count * part.dtype.itemsize for part in parts]
    ends = np.cumsum([-(-size // _ALIGNMENT) * (_ALIGNMENT // 4) for size in sizes]).tolist()
    if ends[-1] > len(words):
        words = wire.scratch(ends[-1])
    begins = [0, *ends[:-1]]
    buffers: list[Buffer] = [
        words[begin:end].view(part.dtype)[: part.count]
        for part, begin, end in zip(parts, begins, ends, strict=True)
    ]
    moves = tuple(part.encode(buffer, wire) for part, buffer in zip(parts, buffers, strict=True))
    yield from wire.move(Together(moves), sum(sizes))
    wire.stats.messages += len(parts) - 1
    for part, buffer in zip(parts, buffers, strict=True):
        part.decode(buffer, wire)
    wire.decoded()
