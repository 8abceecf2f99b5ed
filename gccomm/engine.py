"""The driver of codecs' steps: pieces, fusion on the wire words, tag words, agreement first.

The engine is a generator of transfers, so the same code runs blocking over a back end and in lockstep for
many virtual ranks. It returns an :class:`Outcome`. An error in the outcome is the same on every rank and
leaves the communicator usable; an exception that escapes the generator after the first transfer does not: the
caller must treat the communicator as broken.

The first message of a call is the agreement: a header with the first scales under MAX or, where no codec of
the first piece has anything to agree on, a summed header with the first words of the first SUM.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gccomm import kernels
from gccomm.agreement import (
    HEADER_WORDS,
    MESSAGE_WORDS,
    MISSING_WORD,
    SCALE_WORDS,
    SUM_WORDS,
    Call,
    verify,
    verify_summed,
    write_header,
    write_summed,
)
from gccomm.errors import BackendError
from gccomm.operand import Operand
from gccomm.plan import Plan
from gccomm.running import Message, Running, answer, fill, messages, pending, wanted
from gccomm.sketch import LARGEST, Sketch, chosen
from gccomm.stats import Stats
from gccomm.steps import Agree, Buffer, Context, Energies, FloatSum, OpSum, Redo, Sum, Words
from gccomm.transfers import Combine, FloatAdd, Maximum, Transfer, WordAdd

__all__ = ["Job", "Outcome", "reduce", "rendezvous"]

_WIRE_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
_NUMPY = {"float32": np.float32, "float64": np.float64, "bfloat16": np.uint16, "float16": np.uint16}
REDO_WORDS = 1 << 18  # most words of a message of redone spans
_MASK = 0xFFFFFFFF

Moves = Generator[Transfer, None, None]


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
    parts : dict of int to list
        By leaf: what codecs returned for its segments, in order, for their next state.
    """

    error: BaseException | None = None
    stats: Stats = field(default_factory=Stats)
    present: Any = None
    parts: dict[int, list[Any]] = field(default_factory=dict)


class Job:
    """A bound plan and the memory that its transfers need, allocated before the agreement.

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
    states : mapping of int to dict
        By leaf: what its codec has adapted.
    measure : bool
        Estimate the error.
    room : callable
        From a number of bytes to the memory that the back end would have the next sum's data in, or None.
    """

    def __init__(
        self,
        plan: Plan,
        context: Context,
        have: Sequence[bool],
        *,
        whole: bool,
        states: Mapping[int, Any] | None = None,
        measure: bool = False,
        room: Callable[[int], Buffer | None] = lambda _nbytes: None,
    ) -> None:
        self.place = room
        self.plan, self.context, self.whole = plan, context, whole
        self.have, self.states = have, states or {}
        if measure:
            self._sketch()
        pieces = plan.agree_words or [0]
        scales = sum(pieces) if whole else max(pieces)
        self.agree = _scratch(HEADER_WORDS + max(scales, SCALE_WORDS))
        self.room = max((sum(_room(x) for x in piece) for piece in plan.pieces), default=0)
        self.words = _scratch(max(SUM_WORDS + self.room + 2, MESSAGE_WORDS))

    def _sketch(self) -> None:
        """Choose the operands whose errors are measured."""
        able = [x for x in self.plan.operands if x.codec.sketched and x.coordinates <= LARGEST]
        for i in chosen(len(able), self.context.step):
            able[i].sketch = Sketch(able[i])

    def start(self, x: Operand) -> Running:
        """Start the codec of an operand."""
        return Running(x, self.context, [self.states.get(s.leaf) for s in x.segments])


def _room(x: Operand) -> int:
    """Return how many words an operand's sum takes, those of its sketch included."""
    return x.message_room + (len(x.sketch.words) if x.sketch is not None else 0)


def _scratch(count: int) -> Words:
    words: Words = kernels.pool_empty(count * 4).view(np.uint32)
    return words


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
    if job is None:
        return (yield from rendezvous(call, rank, size))
    engine = _Engine(job, rank, size)
    try:
        engine.begin()
    except Exception as error:  # a codec's own: nothing is sent yet, so every rank can raise it
        call.error = call.error or error
        return (yield from rendezvous(call, rank, size))
    if call.error is not None and not engine.summed:
        return (yield from rendezvous(call, rank, size))
    return (yield from engine.run(call))


class _Engine:
    def __init__(self, job: Job, rank: int, size: int) -> None:
        self.job, self.rank, self.size = job, rank, size
        self.context = job.context
        self.stats = Stats()
        self.tag = 0
        self.first: list[list[Running]] = []
        self.running: list[Running] = []  # those of self.first
        self.late: list[Running] = []  # those with spans to redo
        self.ended: list[Running] = []
        self.end = HEADER_WORDS
        self.head = Message((), 0)
        self.queue: Iterator[Message] | None = None  # of the first piece, where its header is summed
        self.clock = time.perf_counter()

    @property
    def summed(self) -> bool:
        """Whether the first message is a SUM."""
        return self.queue is not None

    def begin(self) -> None:
        """Start the first codecs and write what they want agreed behind the header, or their first words."""
        job = self.job
        pieces = job.plan.pieces if job.whole else job.plan.pieces[:1]
        self.first = [[job.start(x) for x in piece] for piece in pieces]
        self.running = [r for piece in self.first for r in piece]
        if not pending(self.running, Agree) and self.first and pending(self.first[0], Sum):
            self.queue = messages(self.first[0], job.room)
            self.head = next(self.queue)
            self._encode(self.head, SUM_WORDS)
            return
        self.end = HEADER_WORDS + wanted(self.running, Agree)
        if self.end > len(job.agree):  # a codec that agrees on more than a word a block
            job.agree = _scratch(self.end)
        fill(self.running, Agree, job.agree[HEADER_WORDS : self.end])
        job.agree[self.end : MESSAGE_WORDS] = 0

    def run(self, call: Call) -> Generator[Transfer, None, Outcome]:
        """Agree, reduce all buckets and report; yields what is to be transferred."""
        outcome = Outcome(stats=self.stats)
        self.tag = _tag(call)
        outcome.error = yield from self._summed_round(call) if self.summed else self._first_round(call)
        if outcome.error is not None:
            return outcome
        missing = self.job.words[3] if self.summed else self.job.agree[MISSING_WORD]
        if missing:
            outcome.present = yield from self._presence()
        if self.queue is not None:
            self._decode(self.head, SUM_WORDS)
            yield from self._sums(self.queue)
        yield from self._agree(self.running)
        for number, piece in enumerate(self.job.plan.pieces):
            if number < len(self.first):
                mine = self.first[number]
            else:
                mine = [self.job.start(x) for x in piece]
                yield from self._agree(mine, self.job.agree[HEADER_WORDS:])
            yield from self._advance(mine)
            self._finish(mine)
        yield from self._redo(call)
        outcome.parts = _parts(self.ended)
        outcome.error = _overflow(self.job.plan)
        return outcome

    def _lap(self) -> float:
        now = time.perf_counter()
        elapsed, self.clock = now - self.clock, now
        return elapsed

    def _move(self, transfer: Transfer, nbytes: int) -> Moves:
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
            answer(self.running, Agree, agree[HEADER_WORDS:end])
        return error

    def _summed_round(self, call: Call) -> Generator[Transfer, None, BaseException | None]:
        """Send the summed header with the first words of the first sum, then its other words."""
        words, end = self.job.words, SUM_WORDS + self.head.words + 1
        write_summed(call, words)
        words[end - 1] = self._next_tag()
        words[end:MESSAGE_WORDS] = 0
        first = WordAdd(words[:MESSAGE_WORDS], _within(self.head.lanes(SUM_WORDS), 0, MESSAGE_WORDS))
        yield from self._move(first, 4 * MESSAGE_WORDS)
        error = yield from verify_summed(call, self.rank, self.size, words)
        if error is None and end > MESSAGE_WORDS:
            lanes = _within(self.head.lanes(SUM_WORDS), MESSAGE_WORDS, end)
            rest = words[MESSAGE_WORDS:end]
            yield from self._move(WordAdd(rest, lanes), rest.nbytes)
        return error

    def _agree(self, running: Sequence[Running], room: Words | None = None) -> Moves:
        """Run agreement rounds until no codec wants one.

        The first may use ``room``; the others get memory of their own, since codecs keep their answers.
        """
        while count := wanted(running, Agree):
            fits = room is not None and count <= len(room)
            words = room[:count] if room is not None and fits else np.empty(count, dtype=np.uint32)
            room = None
            fill(running, Agree, words)
            yield from self._move(Maximum(words), words.nbytes)
            answer(running, Agree, words)

    def _advance(self, mine: Sequence[Running]) -> Moves:
        """Drive the codecs of a piece to their ends, or to spans that must be redone."""
        while True:
            if pending(mine, Agree):
                yield from self._agree(mine)
            elif count := wanted(mine, Energies):
                words = np.empty(count, dtype=np.uint32)
                fill(mine, Energies, words)
                yield from self._move(WordAdd(words), words.nbytes)
                answer(mine, Energies, words)
            elif sums := pending(mine, Sum):
                yield from self._sums(messages(sums, self.job.room))
            elif floats := pending(mine, FloatSum):
                for r in floats:
                    yield from self._sum_floats(r)
            elif own := pending(mine, OpSum):
                for r in own:
                    yield from self._combine(r)
            else:
                return

    def _presence(self) -> Generator[Transfer, None, Any]:
        """Find the leaves that at least one rank has."""
        mine = np.array(self.job.have, dtype=np.uint32)
        yield from self._move(Maximum(mine), mine.nbytes)
        return mine.astype(bool)

    def _encode(self, message: Message, base: int) -> None:
        """Write a message's words ``base`` words into the buffer."""
        self._fit(base + message.words + 1)
        message.encode(self.job.words[base : base + message.words])

    def _fit(self, count: int) -> None:
        if count > len(self.job.words):  # a codec that needs more words than it said
            self.job.words = _scratch(count)

    def _decode(self, message: Message, base: int) -> bool:
        """Check the tag of a summed message and hand its sums out."""
        words, end = self.job.words, base + message.words
        if int(words[end]) != self.tag * self.size & _MASK:
            msg = (
                f"rank {self.rank}: the tag of a sum is {int(words[end]):#010x}, expected "
                f"{self.tag * self.size & _MASK:#010x}: messages of different calls were added"
            )
            raise BackendError(msg)
        right = message.decode(words[base:end])
        self.stats.decode_s += self._lap()
        return right

    def _sums(self, queue: Iterator[Message]) -> Moves:
        """Send messages, one after the other."""
        for message in queue:
            yield from self._sum(message)

    def _sum(self, message: Message) -> Generator[Transfer, None, bool]:
        count = message.words + 1
        self._fit(count)
        sums = self.job.words[:count]
        placed = self.job.place(4 * count)
        words = sums if placed is None else placed.view(np.uint32)
        message.encode(words[:-1])
        words[-1] = self._next_tag()
        out = None if placed is None else sums
        yield from self._move(WordAdd(words, message.lanes(0), out), words.nbytes)
        return self._decode(message, 0)

    def _next_tag(self) -> int:
        self.tag = (self.tag * 0x9E3779B1 + 0x7F4A7C15) & _MASK
        return self.tag

    def _sum_floats(self, r: Running) -> Moves:
        step = r.step
        assert isinstance(step, FloatSum)
        nbytes = step.count * _WIRE_BYTES[step.dtype]
        if step.direct is not None:
            yield from self._move(FloatAdd(*step.direct, step.dtype), nbytes)
            if step.finish is not None:
                step.finish()
        else:
            dtype = np.dtype(_NUMPY[step.dtype])
            buffer: Buffer = self.job.words[: len(self.job.words) // 2 * 2].view(dtype)[: step.count]
            placed = self.job.place(nbytes)
            sent: Buffer = buffer if placed is None else placed.view(dtype)
            step.encode(0, step.blocks, sent)
            yield from self._move(FloatAdd(sent, buffer, step.dtype), nbytes)
            step.decode(0, step.blocks, buffer)
        self.stats.decode_s += self._lap()
        r.answer(None)

    def _combine(self, r: Running) -> Moves:
        step = r.step
        assert isinstance(step, OpSum)
        fits = step.count <= len(self.job.words)
        words = self.job.words[: step.count] if fits else np.empty(step.count, dtype=np.uint32)
        step.encode(words)
        yield from self._move(Combine(words, step.operation, step.seed), words.nbytes)
        step.decode(words)
        self.stats.decode_s += self._lap()
        r.answer(None)

    def _finish(self, mine: Sequence[Running]) -> None:
        stats = self.stats
        self.late += pending(mine, Redo)
        self.ended += mine
        for r in mine:
            x = r.operand
            stats.float32_bytes += 4 * x.coordinates
            stats.codecs[x.codec.id] = stats.codecs.get(x.codec.id, 0) + x.coordinates
            stats.clamps += x.clamps
            stats.measure_bytes += x.sketch.words.nbytes if x.sketch is not None else 0
            if r.step is None:
                stats.error.take(x)

    def _redo(self, call: Call) -> Moves:
        """Send the spans whose check words were wrong again, all of the call together.

        Ranks that do not agree on which those are, or find a span wrong twice, hold corrupted sums: nothing
        that a caller could use is left then.
        """
        if not self.late:
            return
        steps = [(i, r.step) for i, r in enumerate(self.ended)]
        spans = [(i, *span) for i, step in steps if isinstance(step, Redo) for span in step.spans]
        self.stats.spans_redone += len(spans)
        again = replace(call, opcode="redo", policy=f"spans {spans}", missing=False)
        message = np.zeros(MESSAGE_WORDS, dtype=np.uint32)
        write_header(again, self.rank, message)
        yield from self._move(Maximum(message), message.nbytes)
        error = yield from verify(again, self.rank, self.size, message)
        if error is not None:
            raise BackendError(f"rank {self.rank}: sums were corrupted on the way: {error}")
        for message_ in messages(self.late, min(self.job.room, REDO_WORDS)):
            right = yield from self._sum(message_)
            if not right:
                msg = (
                    f"rank {self.rank}: the check words of a span were wrong twice, in wide lanes too: "
                    "sums were corrupted on the way"
                )
                raise BackendError(msg)
        for r in self.late:
            if r.step is not None:
                raise BackendError(f"codec {r.operand.codec!r} yields a step after its redo: {r.step!r}")
            self.stats.error.take(r.operand)


def _within(lanes: Sequence[tuple[int, int, int]], lo: int, hi: int) -> tuple[tuple[int, int, int], ...]:
    """Return the lanes of words lo to hi, counted from lo."""
    clipped = ((max(first, lo) - lo, min(end, hi) - lo, width) for first, end, width in lanes)
    return tuple(lane for lane in clipped if lane[0] < lane[1])


def _tag(call: Call) -> int:
    tag = 0
    for value in call.values():
        tag = (tag * 0x01000193 ^ value) & _MASK
    return tag


def _parts(ended: Sequence[Running]) -> dict[int, list[Any]]:
    """Collect by leaf what the codecs returned."""
    found: dict[int, list[Any]] = {}
    for r in ended:
        if r.parts is not None and r.operand.codec.stateful:
            for segment, part in zip(r.operand.segments, r.parts, strict=True):
                found.setdefault(segment.leaf, []).append(part)
    return found


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
