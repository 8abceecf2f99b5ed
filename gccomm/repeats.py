"""Calls that were made before: on one NumPy array of a known layout in one piece, with all else ready.

What is sent is what any other call sends, so a rank may go this way while others do not.
"""

from __future__ import annotations

from collections.abc import Generator
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from gccomm import kernels, timeline
from gccomm.agreement import (
    HEADER_WORDS,
    MESSAGE_WORDS,
    MISSING_WORD,
    SLOW_WORD,
    Call,
    verify,
)
from gccomm.engine import Outcome
from gccomm.groups import STORAGE
from gccomm.pieces import Piece, Wire, scratch
from gccomm.plan import Plan
from gccomm.ready import Ready
from gccomm.running import Running
from gccomm.stats import Stats
from gccomm.steps import Agree, Buffer, Context, FloatSum, LaneSum, Sum, Words
from gccomm.transfers import CallAdd, FloatAdd, Maximum, Transfer, WordAdd

if TYPE_CHECKING:
    from gccomm.codecs.base import Codec
    from gccomm.options import Place
    from gccomm.reduction import Attempt, Reduction

__all__ = ["Repeat", "Repeats", "swapped_bytes"]

KEPT = 8  # of the layouts of a reduction

LONGEST_BYTES = 4 << 20  # of an array: in longer calls what is saved here does not count
KEPT_WORDS = 65 << 10  # of memory for sums, from call to call (8 bits of 1 MiB); more comes from the pool
COPIED_BYTES = 16 << 10  # up to which copying floats takes less time than handing arrays on
_FLOATS = {"float16": np.float16, "float32": np.float32, "float64": np.float64}


class Repeat:
    """Repeats a call on an array of one layout.

    Parameters
    ----------
    call : Call
        Of a call that was made; of it the step is changed.
    plan : Plan
        Of the array alone, and of no other call.
    context : Context
        Of a call that was made.
    place : Place
        Where the rank stands.
    """

    def __init__(self, call: Call, plan: Plan, context: Context, place: Place) -> None:
        (spec,), (x,) = plan.specs, plan.operands
        self.call, self.spec, self.place = call, spec, place
        self._x, self._context, self._room = x, context, place.room
        self._keys = x.table["key0"], x.table["key1"]
        self._dtype = np.dtype(_FLOATS[spec.dtype])
        self._nbytes = x.coordinates * self._dtype.itemsize
        self._ready = Ready(call, context.rank, x, plan.keys[0])
        self._agree, self._end = self._ready.agreed, HEADER_WORDS
        self._words, self._count = scratch(0), x.message_room + 1
        self._serves = _serves(spec.route)
        self._swap_bytes = swapped_bytes(plan, context, place)
        self._agreed: Agree | None = None  # of a codec that agrees, then sums words; it serves all calls
        self._summed: Sum | None = None  # the same
        self._floats: FloatSum | None = None  # the same
        self._arrays: tuple[Buffer, Buffer] | None = None  # of a call that the back end makes by itself
        self._running: Running | None = None

    def begin(self, array: Buffer, step: int) -> Buffer:
        """Do all of a call that is done before its first message; return where its result comes."""
        result: Buffer = kernels.pool_empty(self._nbytes).view(self._dtype)
        self.call.step = step
        ready, found = self._ready, self.call.links.found()
        ready.begin(kernels.address(array), kernels.address(result), step, found)
        if self._swap_bytes and not ready.whole:
            self._take_swap(array, result)
            ready.begin(kernels.address(array), kernels.address(result), step, found)
        if ready.whole:
            self._arrays = array, result
        else:
            self._begin(array, result)
        return result.reshape(self.spec.shape)

    def _begin(self, array: Buffer, result: Buffer) -> None:
        """Do what else there is where the back end does not make the call by itself."""
        if len(self._words) == 0:
            self._words = scratch(self._count)
        if self._agreed is not None:
            self._share_keys()
            self._agreed.fill(self._agree[HEADER_WORDS : self._end])
        elif self._floats is None:
            self._start(array, result)

    def _take_swap(self, array: Buffer, result: Buffer) -> None:
        """Find out by the codec's first step, in the first call that is repeated, whether ranks swap it."""
        self._start(array, result)
        assert self._running is not None
        if not self._ready.swap(self._running.step, self._swap_bytes, self._context):
            self._swap_bytes = 0
        self._running = self._x.direct = None

    def _share_keys(self) -> None:
        """Let codecs see the keys of the noise that the record has written for kernels."""
        key0, key1 = self._keys
        self._x.keys[0] = key0[0], key1[0]

    def _start(self, array: Buffer, result: Buffer) -> None:
        """Start the codec; write what it wants agreed behind the header."""
        self._share_keys()
        if self._nbytes > COPIED_BYTES:
            self._x.direct = self.spec.dtype, array.reshape(-1), result
        running, end = Running(self._x, self._context, (None,)), HEADER_WORDS
        if isinstance(running.step, Agree):
            end += running.step.count
            running.step.fill(self._agree[HEADER_WORDS:end])
        self._running, self._end = running, end

    def release(self) -> None:
        """Let go of the array; the call is over."""
        self._x.direct = self._running = self._arrays = None
        self._ready.release()
        if len(self._words) > KEPT_WORDS:
            self._words = scratch(0)

    def transfers(self) -> Generator[Transfer, Any, Outcome]:
        """Do what :func:`gccomm.engine.reduce` does."""
        outcome, ready = Outcome(), self._ready
        if ready.whole:
            began, transfer = perf_counter(), CallAdd(ready.job)
            yield transfer
            self._account(outcome.stats, transfer, perf_counter() - began)
            if transfer.same:
                if self._agree[MISSING_WORD]:
                    yield from self._presence(outcome.stats)
                return outcome
        wire = Wire(self._context.rank, self._context.size, stats=outcome.stats)
        wire.tag = ready.tag
        outcome.error = yield from self._agree_on(wire)
        if outcome.error is not None:
            self._agreed = self._summed = None  # which may hold memory until they are summed
            return outcome
        if self._running is not None:
            yield from self._advance(self._running, wire, self._agree[HEADER_WORDS : self._end])
        elif self._summed is not None:
            yield from self._sum(self._summed, wire)
        else:
            yield from self._sum_floats(wire)
        self._count_codec(wire.stats)
        return outcome

    def _count_codec(self, stats: Stats) -> None:
        stats.float32_bytes = 4 * self._x.coordinates
        stats.codecs[self._x.codec.id] = self._x.coordinates

    def _account(self, stats: Stats, transfer: CallAdd, seconds: float) -> None:
        """Note what a call has taken that the back end has made."""
        stats.encode_s, stats.decode_s = transfer.seconds
        stats.wire_s = seconds - stats.encode_s - stats.decode_s
        stats.wire_bytes, stats.messages = 4 * MESSAGE_WORDS, 1
        if transfer.same:
            stats.wire_bytes, stats.messages = self._ready.nbytes, self._ready.messages
            self.call.links.slow = bool(self._agree[SLOW_WORD])
            self._count_codec(stats)

    def _agree_on(self, wire: Wire) -> Generator[Transfer, Any, BaseException | None]:
        """Send the first message, unless the back end has done so; return what is wrong with the call."""
        call, agree, context, end = self.call, self._agree, self._context, self._end
        first = end if MESSAGE_WORDS < end <= self.place.first_words else MESSAGE_WORDS
        if self._arrays is None:
            yield from wire.move(Maximum(agree[:first]), 4 * first)
        # Less time than NumPy takes to compare; what comes from there on may differ.
        if agree[:SLOW_WORD].tobytes() != self._ready.header[:SLOW_WORD].tobytes():
            error = yield from verify(call, context.rank, context.size, agree)
            if error is not None:
                return error
        if end > first:
            yield from wire.move(Maximum(agree[first:end]), 4 * (end - first))
        if agree[MISSING_WORD]:
            yield from self._presence(wire.stats)
        call.links.slow = bool(agree[SLOW_WORD])
        if self._arrays is not None:
            self._start(*self._arrays)
        return None

    def _presence(self, stats: Stats) -> Generator[Transfer, Any, None]:
        """Tell ranks without a value that there is one."""
        yield Maximum(np.ones(1, np.uint32))
        stats.wire_bytes += 4
        stats.messages += 1

    def _advance(self, running: Running, wire: Wire, agreed: Words) -> Generator[Transfer, Any, None]:
        """Drive the codec to its end."""
        first = running.step
        if isinstance(first, Agree):
            running.answer(agreed)
        step = running.step
        if isinstance(step, Sum) and step.size(0, step.blocks) < len(self._words):
            yield from self._sum(step, wire)
            running.answer(None)
            if running.step is None and isinstance(first, Agree) and self._serves:
                self._agreed, self._summed = first, step  # what is agreed upon is in the same memory
                self._count = step.size(0, step.blocks) + 1
                return
        piece = Piece(wire, (running,), self._words, len(self._words), self._room)
        if isinstance(step, FloatSum | LaneSum):
            yield from piece.sum_floats(running) if isinstance(step, FloatSum) else piece.sum_lanes(running)
        alone = first is step and running.step is None and self._serves
        if running.step is not None:
            yield from piece.advance()
        self._words = piece.words  # more, of a codec that needs more words than it said
        self._count = max(self._count, len(self._words))
        if alone and isinstance(step, FloatSum | LaneSum) and not self._ready.whole:
            self._ready.take(step, self.place, self._context)
            if self._ready.whole:
                self._words = scratch(0)
            elif isinstance(step, FloatSum) and step.direct is None:
                self._floats = step  # of no call's arrays: the operand knows those

    def _sum_floats(self, wire: Wire) -> Generator[Transfer, Any, None]:
        """Send one message of floats, as the first calls did."""
        step = self._floats
        assert step is not None
        nbytes = step.count * STORAGE[step.dtype].itemsize
        sums = self._words.view(np.uint8)[:nbytes].view(STORAGE[step.dtype])
        placed = self._room(nbytes)
        sent = sums if placed is None else placed.view(sums.dtype)
        step.encode(0, step.blocks, sent)
        yield from wire.move(FloatAdd(sent, sums, step.dtype), nbytes)
        step.decode(0, step.blocks, sums)
        wire.decoded()

    def _sum(self, step: Sum, wire: Wire) -> Generator[Transfer, Any, None]:
        """Send one message of words."""
        count = step.size(0, step.blocks)
        sums = self._words[: count + 1]
        placed = self._room(4 * count + 4)
        words = sums if placed is None else placed.view(np.uint32)
        step.encode(0, step.blocks, words[:count])
        words[count] = tag = wire.next_tag()
        yield from wire.move(WordAdd(words, (), None if placed is None else sums), words.nbytes)
        wire.check(tag, int(sums[count]))
        step.decode(0, step.blocks, sums[:count])
        wire.decoded()


class Repeats:
    """What repeats the calls of a reduction, by shape and dtype."""

    def __init__(self) -> None:
        self._kept: dict[object, Repeat] = {}

    def find(self, reduction: Reduction, tree: Any, place: Place) -> Repeat | None:
        """Return what repeats a call on ``tree``, where something does and is to be used now.

        ``place`` is where the rank stands: NCCL may have joined it meanwhile.
        """
        if not self._kept or type(tree) is not np.ndarray:
            return None
        found = self._kept.get((tree.shape, tree.dtype))
        flags = tree.flags
        if found is None or found.place is not place or not (flags.c_contiguous and flags.aligned):
            return None
        if timeline.active() or reduction.measures() or found.call.state != reduction.state():
            return None
        if reduction.remember:
            leaf, spec = reduction.known[""].leaf, found.spec
            if (leaf.shape, leaf.dtype) != (spec.shape, spec.dtype):
                return None  # the key has had another layout meanwhile
        return found

    def keep(self, attempt: Attempt, tree: Any) -> None:
        """Make a call that was made ready to be repeated, where its layout has come before."""
        reduction, plan, context = attempt.reduction, attempt.plan, attempt.context
        if type(tree) is not np.ndarray or plan is None or context is None or plan.uses < 2:
            return
        if not tree.dtype.isnative:
            return  # kernels read native numbers
        if attempt.measures:
            return  # its pieces are others
        at, options, place = (tree.shape, tree.dtype), reduction.options, attempt.place
        known = self._kept.get(at)
        if known is not None and known.place is place:
            return
        if options.nonfinite == "raise" or not _suits(plan, context, place):
            return
        sizes = options.piece_coordinates, options.bucket_bytes
        own = Plan(plan.specs, context.size, options.seed, *sizes, lane_sums=plan.lane_sums)
        while at not in self._kept and len(self._kept) >= KEPT:
            self._kept.pop(next(iter(self._kept)))
        self._kept[at] = Repeat(attempt.call, own, context, place)


def _suits(plan: Plan, context: Context, place: Place) -> bool:
    """Return whether calls of a plan can be repeated."""
    if place.hosts is not None or len(plan.operands) != 1 or plan.operands[0].count != 1:
        return False
    x, spec = plan.operands[0], plan.specs[0]
    if spec.dtype not in _FLOATS or spec.shape != spec.row_shape or spec.device != "cpu" or spec.feedback:
        return False
    small = x.coordinates * spec.item_bytes <= LONGEST_BYTES
    own = _speaks_for_itself(type(spec.route), "repeats") and not spec.route.private
    return small and own and spec.route.repeats(context)


def swapped_bytes(plan: Plan, context: Context, place: Place) -> int:
    """Return up to how many bytes of a call's only tensor its ranks swap, if it sums them at once; 0: they do
    not. Equal on all ranks.
    """
    if not plan.swaps(place.swap_bytes):
        return 0
    route = plan.specs[0].route
    return place.swap_bytes if _serves(route) and route.repeats(context) else 0


def _serves(codec: Codec) -> bool:
    """Return whether the steps of one call, of which nothing follows the sum, serve later ones."""
    return codec.steps_serve and all(_speaks_for_itself(type(codec), n) for n in ("repeats", "steps_serve"))


def _speaks_for_itself(codec: type, name: str) -> bool:
    """Return whether something is said of the steps that the codec takes: not by a base of its class."""
    steps, said = (next(c for c in codec.__mro__ if n in vars(c)) for n in ("steps", name))
    return issubclass(said, steps)
