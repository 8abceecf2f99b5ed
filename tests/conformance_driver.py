"""Codecs' steps driven by hand: no engine and no back end, every rank's words recorded and added up in plain
integers, lane by lane; memory around all buffers is watched.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gccomm import arrays, kernels
from gccomm.codecs import Codec
from gccomm.lanes import rank_shift
from gccomm.layout import LeafSpec
from gccomm.operand import CUT_BLOCKS, Operand
from gccomm.plan import Plan
from gccomm.steps import Agree, Context, Energies, FloatSum, Fold, OpSum, Redo, Sum
from tests.conformance_bounds import Array

GUARD = 64  # bytes before and behind every buffer
FLOATS = {"float32": np.float32, "float64": np.float64, "bfloat16": np.uint16, "float16": np.uint16}
KEY = "x"


class Guarded:
    """Memory with a pattern around it that must stay as it is."""

    def __init__(self, count: int, dtype: Any) -> None:
        size = count * np.dtype(dtype).itemsize
        self._memory = np.full(GUARD + size + GUARD, 0xA5, dtype=np.uint8)
        self.array: Array = self._memory[GUARD : GUARD + size].view(dtype)

    def check(self, what: str) -> None:
        ends = np.concatenate([self._memory[:GUARD], self._memory[-GUARD:]])
        assert (ends == 0xA5).all(), f"{what}: memory outside was written"


def split(words: Array, width: int) -> Array:
    """Return the signed lanes of words, shape (lanes, words): the lowest first, what is left divided."""
    rest, found = words.astype(np.int64), []
    for _ in range(32 // width):
        low = rest % (1 << width)
        signed = np.where(low >= 1 << (width - 1), low - (1 << width), low)
        rest = (rest - signed) >> width
        found.append(signed)
    return np.stack(found)


def join(lanes: Array, width: int) -> Array:
    """Return the words of signed lanes."""
    total = np.zeros(lanes.shape[1], dtype=np.int64)
    for k, lane in enumerate(lanes):
        total += lane << (width * k)
    return (total % (1 << 32)).astype(np.uint32)


def add_words(words: Sequence[Array], lanes: Sequence[tuple[int, int, int]]) -> Array:
    """Add the ranks' words mod 2^32, the last rank first; lanes one by one, each within its range."""
    total = np.zeros(len(words[0]), dtype=np.uint64)
    for one in reversed(words):
        total = (total + one.astype(np.uint64)) % np.uint64(1 << 32)
    result = total.astype(np.uint32)
    for lo, hi, width in lanes:
        sums = np.sum([split(one[lo:hi], width) for one in words], axis=0)
        half = 1 << (width - 1)
        assert sums.max(initial=0) < half, f"a lane of {width} bits sums to {sums.max()}"
        assert sums.min(initial=0) >= -half, f"a lane of {width} bits sums to {sums.min()}"
        np.testing.assert_array_equal(join(sums, width), result[lo:hi])
    return result


@dataclass
class Sent:
    """What the ranks sent in one message, and its sum."""

    kind: str
    words: list[Array]
    result: Array


@dataclass
class Ranks:
    """The ranks of one array, from step to step.

    Parameters
    ----------
    codec : Codec
        Drives ``steps``.
    size : int
        Number of ranks.
    mean, feedback : bool
        As of a call.
    seed, step : int
        Of the noise.
    """

    codec: Codec
    size: int
    mean: bool = False
    feedback: bool = False
    seed: int = 0
    step: int = 0
    sent: list[Sent] = field(default_factory=list)
    state: Any = None
    residuals: list[Guarded] = field(default_factory=list)

    def reduce(self, xs: Sequence[Any]) -> Array:
        """Run one step; return the result, equal on all ranks, flat."""
        self.sent = []
        views = [arrays.view(x) for x in xs]
        results = [Guarded(v.data.size, v.data.dtype) for v in views]
        kind = np.float64 if views[0].dtype == "float64" else np.float32
        after = [Guarded(v.data.size, kind) for v in views] if self.feedback else []
        plans = [self._bind(r, v, results[r], after) for r, v in enumerate(views)]
        operands = [plan.operands[0] for plan in plans]
        assert all(len(plan.operands) == 1 for plan in plans)
        running = [self.codec.steps(x, [self.state], self._context(r)) for r, x in enumerate(operands)]
        parts = self._drive(running, operands)
        for guarded in (*results, *after):
            guarded.check("results and residuals")
        for one in results[1:]:
            np.testing.assert_array_equal(one.array.view(np.uint8), results[0].array.view(np.uint8))
        if self.codec.stateful and parts[0] is not None:
            states = [self.codec.next_state(self.state, part) for part in parts]
            assert len({None if s is None else self.codec.state_text(s) for s in states}) == 1
            self.state = states[0]
        self.residuals, self.step = after, self.step + 1
        return results[0].array

    def _context(self, rank: int) -> Context:
        return Context(rank, self.size, rank_shift(rank, self.size), self.step, stateful=True)

    def _bind(self, rank: int, view: arrays.View, result: Guarded, after: Sequence[Guarded]) -> Plan:
        spec = LeafSpec(KEY, view.dtype, view.shape, view.row_shape, self.codec, self.mean, self.feedback)
        plan = Plan([spec], self.size, self.seed)
        src, dst, before, behind = np.zeros((4, 1), dtype=np.uint64)
        src[0], dst[0] = view.pointer, kernels.address(result.array)
        if self.residuals:
            before[0] = kernels.address(self.residuals[rank].array)
        if after:
            behind[0] = kernels.address(after[rank].array)
        plan.bind(self.step, rank, src, dst, (before, behind))
        return plan

    def _drive(self, running: Sequence[Generator[Any, Any, Any]], operands: Sequence[Operand]) -> list[Any]:
        answers: list[Any] = [None] * self.size
        while True:
            steps, ended = [], []
            for one, answer in zip(running, answers, strict=True):
                try:
                    steps.append(one.send(answer))
                except StopIteration as stop:
                    ended.append(stop.value)
            if ended:
                assert not steps, "some ranks end before the others"
                return ended
            assert len({type(step) for step in steps}) == 1, "ranks are in different steps"
            answers = self._answer(steps, operands[0])

    def _answer(self, steps: Sequence[Any], x: Operand) -> list[Any]:
        head = steps[0]
        if isinstance(head, Agree | Energies):
            return self._small(steps)
        if isinstance(head, FloatSum):
            self._floats(steps)
        elif isinstance(head, OpSum):
            self._own(steps)
        elif isinstance(head, Fold):
            self._fold(steps)
        else:
            spans = head.spans if isinstance(head, Redo) else self._cuts(head, x)
            assert isinstance(head, Sum | Redo)
            for lo, hi in spans:
                self._sum(steps, lo, hi)
        return [None] * self.size

    def _cuts(self, step: Sum, x: Operand) -> list[tuple[int, int]]:
        """Return the messages of a sum: of whole tensors 1024 blocks a message."""
        each = CUT_BLOCKS if x.codec.unit == "tensor" else max(step.blocks, 1)
        return [(lo, min(lo + each, step.blocks)) for lo in range(0, max(step.blocks, 1), each)]

    def _small(self, steps: Sequence[Any]) -> list[Any]:
        words = [Guarded(step.count, np.uint32) for step in steps]
        for step, out in zip(steps, words, strict=True):
            step.fill(out.array)
            out.check("agreed words")
        sent = [w.array.copy() for w in words]
        if isinstance(steps[0], Agree):
            assert all((one < 1 << 31).all() for one in sent), "words of a MAX must be below 2^31"
            result = np.max(sent, axis=0)
        else:
            result = add_words(sent, ())
        self.sent.append(Sent(type(steps[0]).__name__, sent, result))
        return [result.copy() for _ in steps]

    def _sum(self, steps: Sequence[Any], lo: int, hi: int) -> None:
        words = [Guarded(step.size(lo, hi), np.uint32) for step in steps]
        for step, out in zip(steps, words, strict=True):
            step.encode(lo, hi, out.array)
            out.check("words of a sum")
        sent = [w.array.copy() for w in words]
        result = add_words(sent, steps[0].lanes(lo, hi))
        self.sent.append(Sent(type(steps[0]).__name__, sent, result))
        for step in steps:
            right = step.decode(lo, hi, result.copy())
            assert right is not False, "a redone span is wrong"

    def _floats(self, steps: Sequence[Any]) -> None:
        from gccomm_local import combine

        dtype, direct = FLOATS[steps[0].dtype], [step.direct for step in steps]
        words = [Guarded(step.count, dtype) for step in steps]
        for step, out, pair in zip(steps, words, direct, strict=True):
            if pair is None:
                step.encode(0, step.blocks, out.array)
            else:
                out.array[:] = pair[0]
            out.check("floats of a sum")
        sent = [w.array.copy() for w in words]
        combine("float", [w.array for w in words], dtype=steps[0].dtype)
        self.sent.append(Sent("FloatSum", sent, words[0].array.copy()))
        for step, out, pair in zip(steps, words, direct, strict=True):
            if pair is None:
                step.decode(0, step.blocks, out.array)
            else:
                pair[1][...] = out.array
            if pair is not None and step.finish is not None:
                step.finish()

    def _own(self, steps: Sequence[Any]) -> None:
        from gccomm_local import combine

        words = [Guarded(step.count, np.uint32) for step in steps]
        for step, out in zip(steps, words, strict=True):
            step.encode(out.array)
            out.check("words of an operation")
        assert len({(step.operation, step.seed) for step in steps}) == 1
        sent = [w.array.copy() for w in words]
        combine("own", [w.array for w in words], operation=steps[0].operation, seed=steps[0].seed)
        self.sent.append(Sent("OpSum", sent, words[0].array.copy()))
        for step, out in zip(steps, words, strict=True):
            step.decode(out.array)

    def _fold(self, steps: Sequence[Any]) -> None:
        """Fold each block by itself, where every rank in turn does it."""
        blocks, sent, folded = steps[0].blocks, [], []
        for b in range(blocks):
            parts = [Guarded(step.sent(b, b + 1), np.uint32) for step in steps]
            for step, part in zip(steps, parts, strict=True):
                step.encode(b, b + 1, part.array)
                part.check("words of a fold")
            copies = [part.array.copy() for part in parts]
            outs = [Guarded(step.folded(b, b + 1), np.uint32) for step in steps]
            for step, out in zip(steps, outs, strict=True):
                step.fold(b, b + 1, [part.array for part in parts], out.array)
                out.check("folded words")
                np.testing.assert_array_equal(out.array, outs[0].array)
            assert max(copies[0].size, outs[0].array.size) <= steps[0].most
            sent.append(copies)
            folded.append(outs[0].array)
        for b, out in enumerate(folded):
            for step in steps:
                step.decode(b, b + 1, out.copy())
        words = [np.concatenate([copies[r] for copies in sent]) for r in range(self.size)]
        self.sent.append(Sent("Fold", words, np.concatenate(folded)))
