"""One piece of a call on its way: the steps of its codecs, fused into messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence

import numpy as np

from gccomm import kernels
from gccomm.agreement import MISSING_WORD, SLOW_WORD, Call, verify, write_header
from gccomm.errors import BackendError
from gccomm.groups import STORAGE, parts_of, send_together
from gccomm.running import Message, Running, answer, fill, messages, pending, wanted
from gccomm.stats import Stats
from gccomm.steps import Agree, Buffer, Energies, FloatSum, Fold, LaneSum, OpSum, Sum, Words
from gccomm.timeline import CallSpans
from gccomm.transfers import Combine, FloatAdd, Folding, LaneAdd, Maximum, Transfer, Whole, WordAdd

__all__ = ["MASK", "Moves", "Piece", "Wire", "scratch"]

MASK = 0xFFFFFFFF
_ALONE = (LaneSum, FloatSum, OpSum, Fold)

Moves = Generator[Whole, None, None]


def scratch(count: int) -> Words:
    """Return memory for so many words, from the pool."""
    words: Words = kernels.pool_empty(count * 4).view(np.uint32)
    return words


class Wire:
    """What the transfers of a call have in common: clock, figures and tags.

    Parameters
    ----------
    rank, size : int
        This rank and the number of ranks.
    spans : CallSpans, optional
        Where to note what is done when.
    stats : Stats, optional
        What to add the figures to.

    Attributes
    ----------
    piece : int or None
        The piece that is worked on.
    groups : bool
        Sums that are ready at once go as one group.
    """

    groups = False

    def __init__(
        self, rank: int, size: int, spans: CallSpans | None = None, stats: Stats | None = None
    ) -> None:
        self.rank, self.size = rank, size
        self.stats = Stats() if stats is None else stats
        self.tag = 0
        self.spans = spans
        self.piece: int | None = None
        self._clock = time.perf_counter()

    def lap(self) -> float:
        """Return the seconds since the last time."""
        now = time.perf_counter()
        elapsed, self._clock = now - self._clock, now
        return elapsed

    def move(self, transfer: Whole, nbytes: int, messages: int = 1) -> Moves:
        """Ask for a transfer, and count it: as no message where it stays within a host."""
        piece, encoding = self.piece, self._clock
        self.stats.encode_s += self.lap()
        sent = self._clock
        yield transfer
        self.piece, waiting = piece, self._clock  # other pieces may have gone on meanwhile
        self.stats.wire_s += self.lap()
        self.stats.wire_bytes += nbytes * messages
        self.stats.messages += messages
        if self.spans is not None:
            self.spans.moved(transfer, piece, nbytes, (encoding, sent, waiting, self._clock))

    def begin_piece(self, number: int) -> None:
        """Count what follows as this piece's."""
        self.piece = number
        if self.spans is not None:
            self.spans.begin_piece(number)

    def decoded(self) -> None:
        """Count the time since the last transfer as spent on its sums."""
        began = self._clock
        self.stats.decode_s += self.lap()
        if self.spans is not None:
            self.spans.decoded(self.piece, began, self._clock)

    def share(self, encode_s: float, decode_s: float) -> None:
        """Count seconds of the last transfer as spent on encoding and decoding."""
        self.stats.encode_s += encode_s
        self.stats.decode_s += decode_s
        self.stats.wire_s -= encode_s + decode_s

    def next_tag(self) -> int:
        """Return the tag of the next message: the same on all ranks."""
        self.tag = (self.tag * 0x9E3779B1 + 0x7F4A7C15) & MASK
        return self.tag

    # What is done otherwise where words stay on a device: see :mod:`gccomm.flow`

    def scratch(self, count: int) -> Words:
        """Return memory for so many words, kept by codecs as long as they like."""
        return np.empty(count, dtype=np.uint32)

    def write_header(self, call: Call, message: Words) -> None:
        """Write the header of a call."""
        write_header(call, self.rank, message)

    def verify(self, call: Call, message: Words) -> Generator[Transfer, None, BaseException | None]:
        """Check the reduced header, and note what it says of links."""
        error = yield from verify(call, self.rank, self.size, message)
        if error is None:
            call.links.slow = bool(message[SLOW_WORD])
        return error

    def missing(self, message: Words) -> bool:
        """Return whether some rank has None for a known key, as a verified header says."""
        return bool(message[MISSING_WORD])

    def agreed(self, words: Words) -> None:
        """Take notice of agreed words."""

    def put_tag(self, words: Words) -> int:
        """Write the next tag behind a message's words, and return it."""
        words[-1] = tag = self.next_tag()
        return tag

    def check_sum(self, tag: int, sums: Words, place: int) -> None:
        """Check the tag at a place of a sum."""
        self.check(tag, int(sums[place]))

    def summed_floats(self, buffer: Buffer) -> None:
        """Take notice of a sum of floats."""

    def check(self, tag: int, summed: int) -> None:
        """Raise BackendError where a summed tag is not what all ranks' tags add up to."""
        expected = tag * self.size & MASK
        if summed != expected:
            msg = (
                f"rank {self.rank}: the tag of a sum is {summed:#010x}, expected {expected:#010x}: messages "
                "of different calls were added"
            )
            raise BackendError(msg)


class Piece:
    """The codecs of one piece, and the memory of its messages.

    Parameters
    ----------
    wire : Wire
        Of the call.
    running : sequence of Running
        Codecs, all of which go forward together.
    words : array of uint32
        Memory for sums; as large as a message, unless a codec needs more than it said.
    room : int
        Most words of a message.
    place : callable
        From a number of bytes to the memory that the back end would have the next sum's data in, or None.
    """

    def __init__(
        self,
        wire: Wire,
        running: Sequence[Running],
        words: Words,
        room: int,
        place: Callable[[int], Buffer | None],
    ) -> None:
        self.wire, self.running, self.words = wire, running, words
        self._room, self._place = room, place

    def agree(self, room: Words | None = None) -> Moves:
        """Run agreement rounds until no codec wants one.

        The first may use ``room``; the others get memory of their own, since codecs keep their answers.
        """
        while count := wanted(self.running, Agree):
            fits = room is not None and count <= len(room)
            words = room[:count] if room is not None and fits else self.wire.scratch(count)
            room = None
            fill(self.running, Agree, words)
            yield from self.wire.move(Maximum(words), words.nbytes)
            self.wire.agreed(words)
            answer(self.running, Agree, words)

    def share(self) -> Moves:
        """Sum the energies that codecs want."""
        words = self.wire.scratch(wanted(self.running, Energies))
        fill(self.running, Energies, words)
        yield from self.wire.move(WordAdd(words), words.nbytes)
        answer(self.running, Energies, words)

    def advance(self) -> Moves:
        """Drive the codecs to their ends, or to spans that must be redone."""
        mine = self.running
        while True:
            if pending(mine, Agree):
                yield from self.agree()
            elif pending(mine, Energies):
                yield from self.share()
            elif self.wire.groups and len(parts := parts_of(mine, self._room)) > 1:
                yield from send_together(self.wire, parts, self.words)
            elif sums := pending(mine, Sum):
                yield from self.send(messages(sums, self._room))
            elif one := next((r for r in mine if type(r.step) in _ALONE), None):
                yield from self._alone(one)
            else:
                return

    def _alone(self, r: Running) -> Moves:
        """Reduce what is not fused with others' steps."""
        if isinstance(r.step, LaneSum):
            return self.sum_lanes(r)
        if isinstance(r.step, FloatSum):
            return self.sum_floats(r)
        return self._combine(r) if isinstance(r.step, OpSum) else self._fold(r)

    def send(self, queue: Iterator[Message]) -> Moves:
        """Send messages, one after the other."""
        for message in queue:
            yield from self.send_one(message)

    def send_one(self, message: Message) -> Generator[Whole, None, bool]:
        """Send a message, and return whether every redone span in it is right."""
        count = message.words + 1
        if count > len(self.words):  # a codec that needs more words than it said
            self.words = self.wire.scratch(count)
        sums = self.words[:count]
        placed = self._place(4 * count)
        words = sums if placed is None else placed.view(np.uint32)
        message.encode(words[:-1])
        tag = self.wire.put_tag(words)
        out = None if placed is None else sums
        yield from self.wire.move(WordAdd(words, message.lanes(0), out), words.nbytes)
        return self.take(message, sums, tag)

    def take(self, message: Message, sums: Words, tag: int) -> bool:
        """Check the tag behind a summed message and hand its sums out."""
        self.wire.check_sum(tag, sums, message.words)
        right = message.decode(sums[: message.words])
        self.wire.decoded()
        return right

    def sum_floats(self, r: Running) -> Moves:
        """Reduce floats."""
        step = r.step
        assert isinstance(step, FloatSum)
        nbytes = step.count * STORAGE[step.dtype].itemsize
        if step.direct is not None:
            yield from self.wire.move(FloatAdd(*step.direct, step.dtype), nbytes)
            if step.finish is not None:
                step.finish()
        else:
            dtype = STORAGE[step.dtype]
            if nbytes > 4 * (len(self.words) // 2 * 2):
                self.words = self.wire.scratch(-(-nbytes // 8) * 2)
            buffer: Buffer = self.words[: len(self.words) // 2 * 2].view(dtype)[: step.count]
            placed = self._place(nbytes)
            sent: Buffer = buffer if placed is None else placed.view(dtype)
            step.encode(0, step.blocks, sent)
            yield from self.wire.move(FloatAdd(sent, buffer, step.dtype), nbytes)
            self.wire.summed_floats(buffer)
            step.decode(0, step.blocks, buffer)
        self.wire.decoded()
        r.answer(None)

    def sum_lanes(self, r: Running) -> Moves:
        """Agree on scales and sum lanes."""
        step, wire = r.step, self.wire
        assert isinstance(step, LaneSum)
        step.job["tag"] = wire.next_tag()
        transfer = LaneAdd(step.job)
        yield from wire.move(transfer, step.nbytes)
        wire.share(*transfer.seconds)
        r.answer(None)

    def _combine(self, r: Running) -> Moves:
        step = r.step
        assert isinstance(step, OpSum)
        fits = step.count <= len(self.words)
        words = self.words[: step.count] if fits else np.empty(step.count, dtype=np.uint32)
        step.encode(words)
        yield from self.wire.move(Combine(words, step.operation, step.seed), words.nbytes)
        step.decode(words)
        self.wire.decoded()
        r.answer(None)

    def _fold(self, r: Running) -> Moves:
        step = r.step
        assert isinstance(step, Fold)
        sent, folded = step.sent(0, step.blocks), step.folded(0, step.blocks)
        words = self.words if sent + folded <= len(self.words) else scratch(sent + folded)
        move = Folding(step, words[:sent], words[sent : sent + folded])
        yield from self.wire.move(move, 2 * (sent + folded))  # either half goes over the wire once
        r.answer(None)
