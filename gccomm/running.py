"""Codec generators between two of their steps, and the messages that fuse the steps of a piece."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from gccomm.errors import BackendError
from gccomm.operand import CUT_BLOCKS, Operand
from gccomm.steps import Agree, Context, Energies, Lanes, Redo, Step, Steps, Sum, Words

__all__ = ["Message", "Part", "Running", "answer", "fill", "messages", "pending", "wanted", "within"]

T = TypeVar("T", Agree, Energies)


class Running:
    """One codec generator between two of its steps.

    Parameters
    ----------
    x : Operand
        What it works on.
    context : Context
        Of the call.
    states : sequence
        What each segment's key has adapted.
    speaker : int, optional
        The place of the rank that speaks for its host; without it every rank does for itself.
    silent : bool
        Another rank speaks: what this one would send is not wanted.
    """

    def __init__(
        self,
        x: Operand,
        context: Context,
        states: Sequence[Any],
        speaker: int | None = None,
        silent: bool = False,
    ) -> None:
        self.operand = x
        self.speaker, self.silent = speaker, silent
        self.parts: Any = None
        self._steps: Steps = x.codec.steps(x, states, context)
        if not isinstance(self._steps, Generator):
            raise TypeError(self._wrong(f"it returned {self._steps!r}"))
        self.step: Step | None = None
        self._move(None)

    def answer(self, words: Words | None) -> None:
        """Hand the answer to the last step to the codec, and take its next one."""
        self._move(words)

    def _move(self, words: Words | None) -> None:
        try:
            self.step = self._steps.send(words)
        except StopIteration as stop:
            self.step, self.parts = None, stop.value
            return
        if not isinstance(self.step, Step):
            raise TypeError(self._wrong(f"it yielded {self.step!r}"))

    def _wrong(self, what: str) -> str:
        name = f"{type(self.operand.codec).__qualname__}.steps"
        return f"{name} must be a generator function that yields steps of gccomm.steps; {what}"


def pending(running: Iterable[Running], kind: type[Any]) -> list[Running]:
    """Return those whose step is of this kind."""
    return [r for r in running if isinstance(r.step, kind)]


def wanted(running: Iterable[Running], kind: type[T]) -> int:
    """Return how many words the pending steps of this kind take together."""
    return sum(r.step.count for r in running if isinstance(r.step, kind))


def fill(running: Iterable[Running], kind: type[T], words: Words) -> None:
    """Write the words of all pending steps of this kind."""
    position = 0
    for r in running:
        if isinstance(r.step, kind):
            if not r.silent:
                r.step.fill(words[position : position + r.step.count])
            position += r.step.count


def answer(running: Iterable[Running], kind: type[T], words: Words) -> None:
    """Hand the reduced words to the codecs that asked for them."""
    position = 0
    for r in running:
        if isinstance(r.step, kind):
            count = r.step.count
            r.answer(words[position : position + count])
            position += count


class Part(NamedTuple):
    """Blocks lo to hi of a sum, or a span of a redo, as part of a message; ``last``: of its operand."""

    running: Running
    lo: int
    hi: int
    last: bool

    @property
    def step(self) -> Sum | Redo:
        """The step that it is a part of."""
        if not isinstance(self.running.step, Sum | Redo):
            raise BackendError(f"expected a sum of {self.running.operand.codec!r}, got {self.running.step!r}")
        return self.running.step

    @property
    def words(self) -> int:
        """Its words, those of a sketch behind them included."""
        return self.step.size(self.lo, self.hi) + self._sketched

    @property
    def _sketched(self) -> int:
        sketch = self.running.operand.sketch
        return len(sketch.words) if sketch is not None and self.last and isinstance(self.step, Sum) else 0

    def encode(self, out: Words) -> None:
        """Write its words."""
        sketch = self.running.operand.sketch
        if self.running.silent and sketch is None:
            return
        end = len(out) - self._sketched
        self.step.encode(self.lo, self.hi, out[:end])  # also in silence: a sketch learns the scales there
        if sketch is not None and end < len(out):
            out[end:] = sketch.words
            sketch.give_back()

    def decode(self, words: Words) -> bool:
        """Hand its sums out; return whether a redone span is right."""
        end = len(words) - self._sketched
        sketch = self.running.operand.sketch
        if sketch is not None and end < len(words):
            sketch.words[:] = words[end:]
        return self.step.decode(self.lo, self.hi, words[:end]) is not False


class Message(NamedTuple):
    """What travels in one SUM: parts, their places, and the number of words."""

    parts: tuple[Part, ...]
    words: int

    def encode(self, out: Words) -> None:
        """Write all words."""
        for part, at, end in self._places():
            part.encode(out[at:end])

    def lanes(self, base: int) -> Lanes:
        """Return the lanes of the message, ``base`` words into its buffer."""
        found: list[tuple[int, int, int]] = []
        for part, at, _ in self._places():
            shift = base + at
            found += [(lo + shift, hi + shift, w) for lo, hi, w in part.step.lanes(part.lo, part.hi)]
        return tuple(found)

    def decode(self, words: Words) -> bool:
        """Hand the sums out, and the generators on; return whether every redone span is right."""
        right = True
        for part, at, end in self._places():
            right &= part.decode(words[at:end])
        for part in self.parts:
            if part.last:
                part.running.answer(None)
        return right

    def _places(self) -> Iterator[tuple[Part, int, int]]:
        at = 0
        for part in self.parts:
            end = at + part.words
            yield part, at, end
            at = end


def messages(running: Iterable[Running], room: int) -> Iterator[Message]:
    """Fuse the pending sums or redone spans into messages of at most ``room`` words."""
    parts: list[Part] = []
    total = 0
    for part in (p for r in running for p in _parts(r)):
        words = part.words
        if parts and total + words > room:
            yield Message(tuple(parts), total)
            parts, total = [], 0
        parts.append(part)
        total += words
    if parts:
        yield Message(tuple(parts), total)


def _parts(r: Running) -> Iterator[Part]:
    if isinstance(r.step, Redo):
        spans = r.step.spans
        for i, (lo, hi) in enumerate(spans):
            yield Part(r, lo, hi, i == len(spans) - 1)
    elif isinstance(r.step, Sum):
        blocks = r.step.blocks
        step = CUT_BLOCKS if r.operand.codec.unit == "tensor" else max(blocks, 1)
        for lo in range(0, max(blocks, 1), step):
            yield Part(r, lo, min(lo + step, blocks), lo + step >= blocks)


def within(lanes: Sequence[tuple[int, int, int]], lo: int, hi: int) -> tuple[tuple[int, int, int], ...]:
    """Return the lanes of words lo to hi, counted from lo."""
    clipped = ((max(first, lo) - lo, min(end, hi) - lo, width) for first, end, width in lanes)
    return tuple(lane for lane in clipped if lane[0] < lane[1])
