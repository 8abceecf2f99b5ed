"""The driver of codecs' steps: pieces, fusion on the wire words, tag words, agreement first.

The engine is a generator of transfers, so the same code runs blocking over a back end and in lockstep for
many virtual ranks. It returns an :class:`Outcome`. An error in the outcome is the same on every rank and
leaves the communicator usable; an exception that escapes the generator after the first transfer does not: the
caller must treat the communicator as broken.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gccomm import kernels
from gccomm.agreement import (
    HEADER_WORDS,
    MESSAGE_WORDS,
    MISSING_WORD,
    SCALE_WORDS,
    Call,
    verify,
    write_header,
)
from gccomm.errors import BackendError
from gccomm.operand import Operand
from gccomm.plan import Plan
from gccomm.stats import Stats
from gccomm.steps import Agree, Buffer, Context, FloatSum, Step, Steps, Sum, Words
from gccomm.transfers import FloatAdd, Maximum, Transfer, WordAdd

__all__ = ["Job", "Outcome", "reduce", "rendezvous"]

_WIRE_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
_NUMPY = {"float32": np.float32, "float64": np.float64, "bfloat16": np.uint16, "float16": np.uint16}


@dataclass(slots=True)
class Outcome:
    """What a collective call came to.

    Attributes
    ----------
    error : BaseException or None
        Raised by the caller, on every rank alike.
    stats : Stats
        What was done.
    present : array of bool or None
        Which leaves some rank had a value for; None where nobody was missing one.
    """

    error: BaseException | None = None
    stats: Stats = field(default_factory=Stats)
    present: Any = None


class Job:
    """A bound plan and all the memory that its transfers need, allocated before the agreement.

    Parameters
    ----------
    plan : Plan
        The layout, with this call's pointers bound.
    context : Context
        Rank, size and options.
    have : sequence of bool
        Leaves that this rank has a value for.
    whole : bool
        Agree on all pieces in one message (links with latency) instead of piece by piece (shared memory).
    """

    def __init__(self, plan: Plan, context: Context, have: Sequence[bool], *, whole: bool) -> None:
        self.plan, self.context, self.whole = plan, context, whole
        self.have = have
        pieces = plan.agree_words or [0]
        scales = sum(pieces) if whole else max(pieces)
        self.agree = _scratch(HEADER_WORDS + max(scales, SCALE_WORDS), np.uint32)
        rooms = [sum(x.room for x in piece) for piece in plan.pieces] or [0]
        self.words = _scratch(max(rooms) + 2, np.uint32)


def _scratch(count: int, dtype: type[np.generic]) -> Any:
    size = np.dtype(dtype).itemsize
    return kernels.pool_empty(count * size).view(dtype)


class _Running:
    """One codec generator between two of its steps."""

    def __init__(self, x: Operand, context: Context) -> None:
        self.operand = x
        self._steps: Steps = x.codec.steps(x, None, context)
        self.step: Step | None = next(self._steps)

    def answer(self, words: Words | None) -> None:
        try:
            self.step = self._steps.send(words)
        except StopIteration:
            self.step = None


def rendezvous(call: Call, rank: int, size: int) -> Generator[Transfer, None, Outcome]:
    """Run the agreement message alone: a collective call that carries no arrays."""
    message = np.zeros(MESSAGE_WORDS, dtype=np.uint32)
    write_header(call, rank, message)
    yield Maximum(message)
    return Outcome(error=(yield from verify(call, rank, size, message)))


def reduce(call: Call, job: Job | None, rank: int, size: int) -> Generator[Transfer, None, Outcome]:
    """Agree with the other ranks, then reduce the job's pieces.

    Parameters
    ----------
    call : Call
        What this rank believes the call to be; with ``call.error`` set, ``job`` may be None.
    job : Job or None
        The work.
    rank, size : int
        This rank and the number of ranks.
    """
    if job is None or call.error is not None:
        return (yield from rendezvous(call, rank, size))
    engine = _Engine(job, rank, size)
    try:
        engine.begin()
    except Exception as error:  # a codec's own: nothing is sent yet, so every rank can raise it
        call.error = error
        return (yield from rendezvous(call, rank, size))
    return (yield from engine.run(call))


class _Engine:
    def __init__(self, job: Job, rank: int, size: int) -> None:
        self.job, self.rank, self.size = job, rank, size
        self.context = job.context
        self.stats = Stats()
        self.tag = 0
        self.first: list[list[_Running]] = []
        self.running: list[_Running] = []
        self.end = HEADER_WORDS
        self.clock = time.perf_counter()

    def begin(self) -> None:
        """Start the first codecs and write what they want agreed behind the header."""
        job = self.job
        pieces = job.plan.pieces if job.whole else job.plan.pieces[:1]
        self.first = [self._start(piece) for piece in pieces]
        self.running = [r for piece in self.first for r in piece]
        self.end = HEADER_WORDS + _wanted(self.running)
        if self.end > len(job.agree):  # a codec that agrees on more than a word a block
            job.agree = _scratch(self.end, np.uint32)
        _fill(self.running, job.agree[HEADER_WORDS : self.end])
        job.agree[self.end : MESSAGE_WORDS] = 0

    def run(self, call: Call) -> Generator[Transfer, None, Outcome]:
        outcome = Outcome(stats=self.stats)
        plan = self.job.plan
        self.tag = _tag(call)
        outcome.error = yield from self._first_round(call)
        if outcome.error is not None:
            return outcome
        if self.job.agree[MISSING_WORD]:
            outcome.present = yield from self._presence()
        yield from self._agree(self.running)
        for number, piece in enumerate(plan.pieces):
            if number < len(self.first):
                mine = self.first[number]
            else:
                mine = self._start(piece)
                yield from self._agree(mine, self.job.agree[HEADER_WORDS:])
            yield from self._sum([r for r in mine if isinstance(r.step, Sum)])
            for r in mine:
                if isinstance(r.step, FloatSum):
                    yield from self._sum_floats(r, r.step)
            self._finish(mine)
        outcome.error = _overflow(plan)
        return outcome

    def _start(self, piece: Sequence[Operand]) -> list[_Running]:
        return [_Running(x, self.context) for x in piece]

    def _lap(self) -> float:
        now = time.perf_counter()
        elapsed, self.clock = now - self.clock, now
        return elapsed

    def _move(self, transfer: Transfer, nbytes: int) -> Generator[Transfer, None, None]:
        self.stats.encode_s += self._lap()
        yield transfer
        self.stats.wire_s += self._lap()
        self.stats.wire_bytes += nbytes
        self.stats.messages += 1

    def _first_round(self, call: Call) -> Generator[Transfer, None, BaseException | None]:
        """Send the header with the first scales, then the other scales."""
        agree, end = self.job.agree, self.end
        write_header(call, self.rank, agree)
        yield from self._move(Maximum(agree[:MESSAGE_WORDS]), 4 * MESSAGE_WORDS)
        error = yield from verify(call, self.rank, self.size, agree)
        if error is None and end > MESSAGE_WORDS:
            yield from self._move(Maximum(agree[MESSAGE_WORDS:end]), 4 * (end - MESSAGE_WORDS))
        if error is None:
            _answer(self.running, agree[HEADER_WORDS:end])
        return error

    def _agree(
        self, running: Sequence[_Running], room: Words | None = None
    ) -> Generator[Transfer, None, None]:
        """Run further agreement rounds until every codec is ready to sum.

        The first may use ``room``; the others get memory of their own, since codecs keep their answers.
        """
        while any(isinstance(r.step, Agree) for r in running):
            count = _wanted(running)
            fits = room is not None and count <= len(room)
            words = room[:count] if room is not None and fits else np.empty(count, dtype=np.uint32)
            room = None
            _fill(running, words)
            yield from self._move(Maximum(words), words.nbytes)
            _answer(running, words)

    def _presence(self) -> Generator[Transfer, None, Any]:
        """Find the leaves that at least one rank has."""
        mine = np.array(self.job.have, dtype=np.uint32)
        yield from self._move(Maximum(mine), mine.nbytes)
        return mine.astype(bool)

    def _sum(self, running: Sequence[_Running]) -> Generator[Transfer, None, None]:
        """Send the words of all operands of a piece as one message, with a tag word behind them."""
        if not running:
            return
        position, lanes = 0, []
        for r in running:
            step = _expect(r.step, Sum)
            step.encode(0, step.blocks, self.job.words[position : position + step.count])
            lanes += [(lo + position, hi + position, width) for lo, hi, width in step.lanes]
            position += step.count
        words = self.job.words[: position + 1]
        self.tag = (self.tag * 0x9E3779B1 + 0x7F4A7C15) & 0xFFFFFFFF
        words[position] = self.tag
        yield from self._move(WordAdd(words, tuple(lanes)), words.nbytes)
        if int(words[position]) != self.tag * self.size & 0xFFFFFFFF:
            msg = (
                f"rank {self.rank}: the tag of a sum is {int(words[position]):#010x}, expected "
                f"{self.tag * self.size & 0xFFFFFFFF:#010x}: messages of different calls were added"
            )
            raise BackendError(msg)
        position = 0
        for r in running:
            step = _expect(r.step, Sum)
            step.decode(0, step.blocks, words[position : position + step.count])
            position += step.count
            r.answer(None)
        self.stats.decode_s += self._lap()

    def _sum_floats(self, r: _Running, step: FloatSum) -> Generator[Transfer, None, None]:
        nbytes = step.count * _WIRE_BYTES[step.dtype]
        if step.direct is not None:
            yield from self._move(FloatAdd(*step.direct, step.dtype), nbytes)
            if step.finish is not None:
                step.finish()
        else:
            dtype = np.dtype(_NUMPY[step.dtype])
            buffer: Buffer = self.job.words[: len(self.job.words) // 2 * 2].view(dtype)[: step.count]
            step.encode(0, step.blocks, buffer)
            yield from self._move(FloatAdd(buffer, buffer, step.dtype), nbytes)
            step.decode(0, step.blocks, buffer)
        self.stats.decode_s += self._lap()
        r.answer(None)

    def _finish(self, running: Sequence[_Running]) -> None:
        stats = self.stats
        for r in running:
            if r.step is not None:
                msg = f"codec {r.operand.codec!r} yields a step after its sum: {r.step!r}"
                raise BackendError(msg)
            x = r.operand
            stats.float32_bytes += 4 * x.coordinates
            stats.codecs[x.codec.id] = stats.codecs.get(x.codec.id, 0) + x.coordinates
        if self.context.measure:
            stats.measure([r.operand for r in running], self.size)


def _wanted(running: Sequence[_Running]) -> int:
    """Return how many words the pending agreements take."""
    return sum(r.step.count for r in running if isinstance(r.step, Agree))


def _fill(running: Sequence[_Running], words: Words) -> None:
    """Write the words of all pending agreements."""
    position = 0
    for r in running:
        if isinstance(r.step, Agree):
            r.step.fill(words[position : position + r.step.count])
            position += r.step.count


def _answer(running: Sequence[_Running], words: Words) -> None:
    """Hand the agreed words to the codecs that asked for them."""
    position = 0
    for r in running:
        if isinstance(r.step, Agree):
            count = r.step.count
            r.answer(words[position : position + count])
            position += count


def _expect(step: Step | None, kind: type[Sum]) -> Sum:
    if not isinstance(step, kind):
        raise BackendError(f"expected a {kind.__name__} step, got {step!r}")
    return step


def _tag(call: Call) -> int:
    tag = 0
    for value in call.values():
        tag = (tag * 0x01000193 ^ value) & 0xFFFFFFFF
    return tag


def _overflow(plan: Plan) -> OverflowError | None:
    """Return the error of integer sums that do not fit their dtype: equal on all ranks, as the sums are."""
    counts: dict[int, int] = {}
    for x in plan.operands:
        for leaf, count in x.overflows.items():
            counts[leaf] = counts.get(leaf, 0) + count
    parts = []
    for leaf, count in sorted(counts.items()):
        spec = plan.specs[leaf]
        where = f" in {spec.key!r}" if spec.key else ""
        parts.append(f"{count} integer sums do not fit {spec.dtype}{where}")
    if not parts:
        return None
    return OverflowError(f"{'; '.join(parts)}; reduce in a wider dtype. Nothing was changed")
