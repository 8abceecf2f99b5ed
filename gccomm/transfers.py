"""What the engine asks of a transport: one in-place collective at a time, as data.

The engine is a generator of transfers. A blocking driver hands each to a back end; the lockstep driver
combines the transfers of many engines in one thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from gccomm.backends import Backend
from gccomm.steps import Buffer, FloatName, Words

__all__ = ["Broadcast", "Combine", "FloatAdd", "Maximum", "Transfer", "WordAdd", "execute"]


@dataclass(frozen=True, slots=True)
class Maximum:
    """Elementwise unsigned MAX over ranks, in place."""

    words: Words


@dataclass(frozen=True, slots=True)
class WordAdd:
    """Elementwise SUM mod 2^32 over ranks, in place or into ``out``; ``lanes`` lists (first word, end word,
    lane width).
    """

    words: Words
    lanes: tuple[tuple[int, int, int], ...] = ()
    out: Words | None = None


@dataclass(frozen=True, slots=True)
class FloatAdd:
    """Elementwise float SUM from ``send`` into ``recv`` (which may be the same array)."""

    send: Buffer
    recv: Buffer
    dtype: FloatName


@dataclass(frozen=True, slots=True)
class Combine:
    """Elementwise reduction of uint32 words, in place, by one of gccomm's own operations.

    ``operation`` is one of :data:`gccomm.operations.OPERATIONS`; ``seed`` a 32-bit word, equal on all ranks.
    """

    words: Words
    operation: str
    seed: int


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Bytes of rank ``root`` to every rank, in place."""

    buffer: Buffer
    root: int


Transfer: TypeAlias = Maximum | WordAdd | FloatAdd | Combine | Broadcast


def execute(transfer: Transfer, backend: Backend) -> None:
    """Run one transfer over a back end; returns when it is complete on this rank."""
    match transfer:
        case WordAdd(out=None):
            backend.sum_words(transfer.words)
        case WordAdd():
            backend.sum_into(transfer.words, transfer.out)  # type: ignore[attr-defined]  # has it, as it has room
        case Maximum():
            backend.maximum(transfer.words)
        case FloatAdd():
            backend.sum_floats(transfer.send, transfer.recv, transfer.dtype)
        case Combine():
            backend.combine_words(transfer.words, transfer.operation, transfer.seed)
        case Broadcast():
            backend.broadcast(transfer.buffer, transfer.root)
