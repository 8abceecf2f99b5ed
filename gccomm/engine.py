"""The driver of codecs' steps: pieces, fusion on the wire words, tag words, agreement first.

The engine is a generator of transfers, so the same code runs blocking over a back end and in lockstep for
many virtual ranks. It returns an :class:`Outcome`. An error in the outcome is the same on every rank and
leaves the communicator usable; an exception that escapes the generator after the first transfer does not: the
caller must treat the communicator as broken.

The first message of a call is the agreement: a header with the first scales under MAX or, where no codec of
the first piece has anything to agree on, a summed header with the first words of the first SUM. Between few
hosts it may be a header with a whole small array behind it (:mod:`gccomm.ready`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gccomm import memory
from gccomm.agreement import (
    HEADER_WORDS,
    MESSAGE_WORDS,
    SCALE_WORDS,
    SUM_WORDS,
    Call,
    tag_of,
    verify,
    verify_summed,
    write_header,
    write_summed,
)
from gccomm.errors import BackendError
from gccomm.hosts import HostPart, Hosts, HostWire
from gccomm.lanes import rank_shift
from gccomm.operand import Operand
from gccomm.outcome import Outcome, overflow_of, parts_of
from gccomm.pieces import Moves, Piece, Wire, scratch
from gccomm.plan import Plan
from gccomm.ready import Ready, swap, swapped
from gccomm.running import Message, Running, answer, fill, messages, pending, wanted, within
from gccomm.sketch import LARGEST, Sketch, chosen
from gccomm.steps import Agree, Buffer, Context, Energies, Look, Redo, Sum, Words
from gccomm.timeline import CallSpans
from gccomm.transfers import Between, Finish, HostSum, LaneAdd, Maximum, Start, Transfer, Whole, WordAdd

if TYPE_CHECKING:
    from gccomm.flow import Flow

__all__ = ["Job", "Outcome", "reduce", "rendezvous"]

REDO_WORDS = 1 << 18  # most words of a message of redone spans
DEPTH = 2  # pieces on their way, of each rank that speaks for its host
MOST = 8  # of all of them


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
        Agree on pieces, and share energies, while those before them are on their way (links; where words stay
        on a device, on all of them at first) instead of when their turn comes (shared memory).
    states : mapping of int to dict
        By leaf: what its codec has adapted.
    measure : bool
        Estimate the error.
    room : callable
        From a number of bytes to the memory that the back end would have the next sum's data in, or None.
    spans : CallSpans, optional
        Where to note what is done when.
    hosts : Hosts, optional
        Where hosts add up their ranks' floats before they compress.
    first_words : int
        Most words of the first message, where ranks in different calls may send different numbers of them.
    flow : Flow, optional
        Where words stay on a device.
    swap_bytes : int
        Up to how many bytes ranks swap the call's only tensor whole; 0: they do not.
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
        spans: CallSpans | None = None,
        hosts: Hosts | None = None,
        first_words: int = 0,
        flow: Flow | None = None,
        swap_bytes: int = 0,
    ) -> None:
        self.swap_bytes = swap_bytes
        self.ahead = whole and flow is None  # on a device all is done in one order
        self.first_words, self.flow, words_of = first_words, flow, scratch
        if plan.devices:  # a copy into pinned memory is the fastest; back ends go on from there
            room, words_of = (lambda _nbytes: None), partial(memory.pinned_words, plan.devices[0])
        if flow is not None:
            words_of = flow.scratch
        self.place, self.spans, self.hosts = room, spans, hosts
        self.plan, self.context, self.whole = plan, context, whole
        self.have, self.states = have, states or {}
        if measure:
            self._sketch()
        self.parts = [self._parts(number) for number in range(plan.plain, len(plan.pieces))]
        # The pieces, from and to, whose codecs are agreed upon at once.
        self.groups = plan.groups if self.ahead else [(0, plan.plain if whole else min(plan.plain, 1))]
        scales = sum(plan.agree_words[slice(*self.groups[0])])  # that go first
        self.agree = words_of(HEADER_WORDS + max(scales, SCALE_WORDS))
        self.room = max((sum(map(self._room, piece)) for piece in plan.pieces), default=0)
        count = max(SUM_WORDS + self.room + 2, MESSAGE_WORDS)
        self.words = words_of(count)
        self.depth = self._depth()
        self.more = [words_of(count) for _ in range(1, self.depth)]  # of other pieces on their way

    def _depth(self) -> int:
        """Return how many pieces are on their way at a time: one where codecs keep much for their pieces,
        which would leave the caches; two for each rank that speaks for its host.
        """
        pieces, hosted = len(self.plan.pieces), len(self.parts)
        if hosted and self.hosts is not None:
            return min(pieces, DEPTH * self.hosts.speakers, MOST)
        keeps = self.context.piecewise and any(x.codec.keeps for x in self.plan.operands)
        return 1 if keeps else min(max(pieces, 1), DEPTH)

    def _sketch(self) -> None:
        """Choose the operands whose errors are measured."""
        able = [x for x in self.plan.operands if x.codec.sketched and x.coordinates <= LARGEST]
        for i in chosen(len(able), self.context.step):
            able[i].sketch = Sketch(able[i])

    def _room(self, x: Operand) -> int:
        """Return how many words an operand's sum takes, those of its sketch included."""
        if self.plan.lane_sums and x.codec.sums_lanes and x.on_host:
            return 2 * x.blocks + x.count  # counters and the like: the lanes themselves go elsewhere
        if self.plan.lane_sums and x.count == 1 and x.specs[0].added:
            return 0  # equal on all ranks, as messages follow from it, though one may have no array to add
        return x.message_room + (len(x.sketch.words) if x.sketch is not None else 0)

    def speaker(self, number: int) -> int | None:
        """Return the place of the rank that speaks for its host in a piece; None: every rank does."""
        plain = self.plan.plain
        return None if self.hosts is None or number < plain else (number - plain) % self.hosts.speakers

    def _parts(self, number: int) -> list[HostPart]:
        speaker, hosts = self.speaker(number), self.hosts
        assert speaker is not None
        assert hosts is not None
        speaks, board = hosts.place == speaker, self.flow.board if self.flow is not None else None
        return [HostPart(x, speaker, speaks, board) for x in self.plan.pieces[number]]

    def start(self, x: Operand, speaker: int | None = None) -> Running:
        """Start the codec of an operand."""
        context, hosts, silent = self.context, self.hosts, False
        if speaker is not None and hosts is not None:
            shift = rank_shift(hosts.host, hosts.number)
            context = replace(context, rank=hosts.host, size=hosts.number, shift=shift, inputs=context.size)
            context, silent = replace(context, piecewise=True), hosts.place != speaker
        return Running(x, context, [self.states.get(s.leaf) for s in x.segments], speaker, silent)


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
        engine.begin(call)
    except Exception as error:  # a codec's own: nothing is sent yet, so every rank can raise it
        call.error = call.error or error
        return (yield from rendezvous(call, rank, size))
    if call.error is not None and not engine.summed:
        return (yield from rendezvous(call, rank, size))
    return (yield from engine.run(call))


class _Way(NamedTuple):
    """A piece on its way: its moves, whether one has begun, its handle, and whether the next one is to follow
    at once.
    """

    number: int
    moves: Moves
    begun: bool = False
    handle: Any = None
    hastens: bool = False


def _hastens(transfer: Whole) -> bool:
    """Whether a transfer is one of those before the first large one of a piece for which a rank speaks."""
    return isinstance(transfer, HostSum) or (
        isinstance(transfer, Between) and isinstance(transfer.transfer, Maximum)
    )


class _Engine:
    def __init__(self, job: Job, rank: int, size: int) -> None:
        self.job, self.rank, self.size = job, rank, size
        self.wire = Wire(rank, size, job.spans) if job.flow is None else job.flow.wire(rank, size, job.spans)
        self.stats = self.wire.stats
        self.first: list[list[Running]] = []  # of the pieces whose codecs are started at once
        self.ahead = iter(job.groups)
        self.agreed = 0, 0  # of these, the one that was agreed upon last
        self.running: list[Running] = []  # of those whose agreement begins with the header
        self.ended: dict[int, list[Running]] = {}  # by piece
        self.free = [*job.more, job.words]  # memory for the sums of pieces on their way
        self.end = HEADER_WORDS
        self.head, self.head_tag = Message((), 0), 0
        self.queue: Iterator[Message] | None = None  # of the first piece, where its header is summed
        self.swapped: Ready | None = None  # what ranks swap with the header

    @property
    def summed(self) -> bool:
        """Whether the first message is a SUM."""
        return self.queue is not None

    def begin(self, call: Call) -> None:
        """Start the first codecs and write what they want agreed behind the header, their first words, or an
        array that is swapped.
        """
        job = self.job
        pieces = job.plan.pieces[: job.plan.plain]
        pieces = pieces if job.whole else pieces[:1]
        self.first = [[job.start(x) for x in piece] for piece in pieces]
        self.agreed = next(self.ahead)
        self.running = [r for piece in self.first[slice(*self.agreed)] for r in piece]
        if job.swap_bytes:
            self.swapped = swapped(call, self.running[0], job.plan.keys[0], job.context, job.swap_bytes)
        if self.swapped is not None:
            job.agree = self.swapped.agreed
            return
        if not pending(self.running, Agree) and self.first and pending(self.first[0], Sum):
            self.queue = messages(self.first[0], job.room)
            self.head = next(self.queue)
            end = SUM_WORDS + self.head.words
            if end >= len(job.words):  # a codec that needs more words than it said
                job.words = self.free[-1] = self.wire.scratch(end + 1)
            self.head.encode(job.words[SUM_WORDS:end])
            return
        self.end = HEADER_WORDS + wanted(self.running, Agree)
        if self.end > len(job.agree):  # a codec that agrees on more than a word a block
            job.agree = self.wire.scratch(self.end)
        fill(self.running, Agree, job.agree[HEADER_WORDS : self.end])
        job.agree[self.end : MESSAGE_WORDS] = 0

    def run(self, call: Call) -> Generator[Transfer, Any, Outcome]:
        """Agree, reduce all buckets and report; yields what is to be transferred."""
        outcome = Outcome(stats=self.stats)
        self.wire.tag = tag_of(call)
        outcome.error = yield from self._agree(call)
        if outcome.error is not None:
            return outcome
        missing = self.job.words[3] if self.summed else self.wire.missing(self.job.agree)
        if missing:
            outcome.present = yield from self._presence()
        if self.queue is not None:
            self.wire.begin_piece(0)
            piece = self._piece(self.first[0], self.job.words)
            piece.take(self.head, self.job.words[SUM_WORDS:], self.head_tag)
            yield from piece.send(self.queue)
        if pending(self.running, Agree):
            yield from self._piece(self.running, self.job.words).agree()
        if self.job.whole and pending(self.running, Energies):
            yield from self._piece(self.running, self.job.words).share()
        if len(self.job.plan.pieces) == 1:
            yield from self._drive(0)  # nothing to overlap with
        else:
            yield from self._pieces()
        ended = [r for _, mine in sorted(self.ended.items()) for r in mine]
        yield from self._look(ended)
        yield from self._redo(call, ended)
        outcome.parts = parts_of(ended)
        outcome.error = overflow_of(self.job.plan)
        if self.job.flow is not None:
            self.job.flow.end()
        return outcome

    def _piece(self, running: Sequence[Running], words: Words, speaker: int | None = None) -> Piece:
        if speaker is None or self.job.hosts is None:
            return Piece(self.wire, running, words, self.job.room, self.job.place)
        wire = HostWire(self.wire, self.job.hosts, speaker)
        return Piece(wire, running, words, self.job.room, lambda _nbytes: None)

    def _pieces(self) -> Generator[Transfer, Any, None]:
        """Drive all pieces, several at a time: while one waits for the others, another one's codecs work.

        Where hosts add up first, a piece begins when the one before has come to its sum, which is then on the
        link meanwhile. What is done in which order follows from the pieces alone, so that it is the same on
        all ranks.
        """
        left = iter(range(len(self.job.plan.pieces)))
        ways: deque[_Way] = deque()  # the pieces on their way, and what each of them waits for, in order
        while True:
            if ways and ways[-1].hastens:
                way = ways.pop()
            elif len(ways) < self.job.depth and (number := next(left, None)) is not None:
                way = _Way(number, self._drive(number))
            elif ways:
                way = ways.popleft()
            else:
                return
            if way.begun:
                yield Finish(way.handle)
            transfer = next(way.moves, None)
            while isinstance(transfer, LaneAdd):  # overlaps by itself
                yield transfer
                transfer = next(way.moves, None)
            if transfer is not None:
                handle = yield Start(transfer)
                ways.append(way._replace(begun=True, handle=handle, hastens=_hastens(transfer)))
            if not way.begun:
                yield from self._agree_ahead(way.number)

    def _agree_ahead(self, number: int) -> Moves:
        """Agree on the next pieces where a piece is the first one of the last ones agreed on: while these are
        on the link.
        """
        if number != self.agreed[0] or (following := next(self.ahead, None)) is None:
            return
        self.agreed = following
        running = [r for piece in self.first[slice(*self.agreed)] for r in piece]
        self.wire.piece = None
        piece = self._piece(running, self.job.words)
        yield from piece.agree()
        if pending(running, Energies):
            yield from piece.share()

    def _drive(self, number: int) -> Moves:
        """Reduce a piece, in memory that no other one on its way has."""
        self.wire.begin_piece(number)
        speaker = self.job.speaker(number)
        if number < len(self.first):
            mine = self.first[number]
        else:
            yield from self._add_up(number)
            mine = [self.job.start(x, speaker) for x in self.job.plan.pieces[number]]
        piece = self._piece(mine, self.free.pop(), speaker)
        yield from piece.advance()
        self.free.append(piece.words)
        self._finish(number, mine)

    def _add_up(self, number: int) -> Moves:
        """Let each host add up what its ranks have for a piece, where that is to be."""
        if self.job.speaker(number) is None:
            return
        for part in self.job.parts[number - self.job.plan.plain]:
            transfer = part.transfer()
            self.stats.host_bytes += transfer.send.nbytes
            yield from self.wire.move(transfer, transfer.send.nbytes, messages=0)
            part.adopt()

    def _agree(self, call: Call) -> Generator[Transfer, None, BaseException | None]:
        """Send the header, with what goes with it."""
        if self.swapped is None:
            return (yield from self._summed_round(call) if self.summed else self._first_round(call))
        error = yield from swap(self.swapped, self.wire, call)
        if error is None:
            self.running[0].answer(None)
        return error

    def _first_round(self, call: Call) -> Generator[Transfer, None, BaseException | None]:
        """Send the header with the first scales, then the other scales."""
        agree, end = self.job.agree, self.end
        self.wire.write_header(call, agree)
        first = self._first(end)
        yield from self.wire.move(Maximum(agree[:first]), 4 * first)
        error = yield from self.wire.verify(call, agree)
        if error is None and end > first:
            yield from self.wire.move(Maximum(agree[first:end]), 4 * (end - first))
        if error is None:
            answer(self.running, Agree, agree[HEADER_WORDS:end])
        return error

    def _summed_round(self, call: Call) -> Generator[Transfer, None, BaseException | None]:
        """Send the summed header with the first words of the first sum, then its other words."""
        words, end = self.job.words, SUM_WORDS + self.head.words + 1
        write_summed(call, words)
        self.head_tag = words[end - 1] = self.wire.next_tag()
        words[end:MESSAGE_WORDS] = 0
        first, lanes = self._first(end), self.head.lanes(SUM_WORDS)
        yield from self.wire.move(WordAdd(words[:first], within(lanes, 0, first)), 4 * first)
        error = yield from verify_summed(call, self.rank, self.size, words)
        if error is None and end > first:
            lanes = within(lanes, first, end)
            rest = words[first:end]
            yield from self.wire.move(WordAdd(rest, lanes), rest.nbytes)
        return error

    def _first(self, end: int) -> int:
        """Return how many of the words up to ``end`` the first message carries: a number that ranks in other
        calls have, too, or all of them, where these may have another one.
        """
        return end if MESSAGE_WORDS < end <= self.job.first_words else MESSAGE_WORDS

    def _presence(self) -> Generator[Transfer, None, Any]:
        """Find the leaves that at least one rank has."""
        mine = np.array(self.job.have, dtype=np.uint32)
        yield from self.wire.move(Maximum(mine), mine.nbytes)
        return mine.astype(bool)

    def _finish(self, number: int, mine: list[Running]) -> None:
        stats = self.stats
        self.ended[number] = mine
        if self.wire.spans is not None:
            self.wire.spans.end_piece(number)
        for r in mine:
            x = r.operand
            stats.float32_bytes += 4 * x.coordinates
            stats.codecs[x.codec.id] = stats.codecs.get(x.codec.id, 0) + x.coordinates
            stats.clamps += x.clamps
            stats.measure_bytes += x.sketch.words.nbytes if x.sketch is not None else 0
            if r.step is None:
                stats.error.take(x)

    def _look(self, ended: Sequence[Running]) -> Generator[Transfer, None, None]:
        """Let the host see what a device has found, where codecs ask for that."""
        late, flow = pending(ended, Look), self.job.flow
        if not late:
            return
        if flow is None:
            raise BackendError(f"codec {late[0].operand.codec!r} has a look where no words are on a device")
        yield flow.pause()
        flow.look()
        for r in late:
            r.answer(None)
            if r.step is None:
                self.stats.error.take(r.operand)

    def _redo(self, call: Call, ended: Sequence[Running]) -> Generator[Transfer, None, None]:
        """Send the spans whose check words were wrong again, all of the call together.

        Ranks that do not agree on which those are, or find a span wrong twice, hold corrupted sums: nothing
        that a caller could use is left then.
        """
        late = pending(ended, Redo)
        if not late:
            return
        steps = [(i, r.step) for i, r in enumerate(ended)]
        spans = [(i, *span) for i, step in steps if isinstance(step, Redo) for span in step.spans]
        self.stats.spans_redone += len(spans)
        again = replace(call, opcode="redo", policy=f"spans {spans}", missing=False)
        message = np.zeros(MESSAGE_WORDS, dtype=np.uint32)
        write_header(again, self.rank, message)
        self.wire.piece = None
        yield from self.wire.move(Maximum(message), message.nbytes)
        error = yield from verify(again, self.rank, self.size, message)
        if error is not None:
            raise BackendError(f"rank {self.rank}: sums were corrupted on the way: {error}")
        for speaker in sorted({-1 if r.speaker is None else r.speaker for r in late}):
            some = [r for r in late if r.speaker == (None if speaker < 0 else speaker)]
            yield from self._redo_those(some)
        for r in late:
            if r.step is not None:
                raise BackendError(f"codec {r.operand.codec!r} yields a step after its redo: {r.step!r}")
            self.stats.error.take(r.operand)

    def _redo_those(self, late: Sequence[Running]) -> Generator[Transfer, None, None]:
        """Send spans for which the same ranks speak."""
        piece = self._piece(late, self.job.words, late[0].speaker)
        for message in messages(late, min(self.job.room, REDO_WORDS)):
            right = yield from piece.send_one(message)
            if not right:
                msg = (
                    f"rank {self.rank}: the check words of a span were wrong twice, in wide lanes too: "
                    "sums were corrupted on the way"
                )
                raise BackendError(msg)
