"""One rank's side of a reduction: from the user's tree to a bound plan, and from sums back to the user's
tree.

A :class:`Reduction` holds options and per-key state; :meth:`Reduction.start` prepares a call without
communicating. Whatever fails there is not raised but carried into the agreement, so that every rank raises
it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gccomm import arrays, kernels, memory, timeline, trees
from gccomm.agreement import Call, digest
from gccomm.codecs.base import state_digest
from gccomm.codecs.exact import Integers, TwoWords
from gccomm.engine import Job, Outcome, reduce
from gccomm.errors import NonFiniteError
from gccomm.flowing import Flowing, least_piece
from gccomm.interop import order
from gccomm.lanes import rank_shift
from gccomm.layout import FLOATS, LeafSpec
from gccomm.on_device import DeviceCall
from gccomm.options import Options, Place
from gccomm.plan import Plan
from gccomm.remembered import STORAGE, KeyState, Known, Leaf, next_states, states_of
from gccomm.repeats import Repeats, swapped_bytes
from gccomm.stats import Measured, Stats
from gccomm.steps import Buffer, Context
from gccomm.transfers import Transfer

__all__ = [
    "Attempt",
    "KeyState",
    "Options",
    "Place",
    "Reduction",
]

PLAN_CACHE = 32  # several a layout: pieces differ where steps are measured, or links slow
FIRST_MEASURED = 3  # steps in which errors are measured, before every few
_TWO_WORDS, _INTEGERS = TwoWords(), Integers()


class Reduction:
    """Options, plans and per-key state of a stream of reductions.

    Attributes
    ----------
    step : int
        Number of the next call; advances only when a call succeeded, on all ranks alike.
    residuals : dict of str to array
        What error feedback carries over, by key.
    states : dict of str to KeyState
        What codecs have adapted, by key.
    known : dict of str to Known
        Layout of every key seen, and how to make a result for it, where ``remember`` is set.
    """

    def __init__(self, options: Options, *, reducer: int = 0, remember: bool = False) -> None:
        self.options, self.reducer, self.remember = options, reducer, remember
        self.policy = options.text()
        self.step = 0
        self.residuals: dict[str, npt.NDArray[np.floating[Any]]] = {}
        self.states: dict[str, KeyState] = {}
        self.known: dict[str, Known] = {}
        self.error = Measured()  # of the last step that was measured
        self.plans_kept = PLAN_CACHE
        self._adapted: str | None = ""
        self._plans: dict[object, Plan] = {}
        self.repeats = Repeats()

    def set_states(self, states: Mapping[str, KeyState]) -> None:
        """Take over states by key; those of other keys stay."""
        if states:
            self.states.update(states)
            self._adapted = None

    def advance(self, stats: Stats) -> None:
        """Go on to the next step; a call's figures without a measured error get the last one."""
        self.step += 1
        if stats.error:
            self.error = stats.error
        stats.error = self.error

    def replace_states(self, states: Mapping[str, KeyState]) -> None:
        """Take over these states in place of all."""
        self.states, self._adapted = dict(states), None

    def check_states(self, states: Mapping[str, KeyState]) -> None:
        """Raise ValueError for a state that a key's own codec could not go on with; warn of one of another
        codec, which is left aside.
        """
        for key, state in states.items():
            codec = self.options.codec(key)
            if codec.fingerprint != state.codec:
                warnings.warn(
                    f"what {state.codec} adapted for {key!r} is of no use to {codec.fingerprint}, "
                    "which starts anew",
                    stacklevel=3,
                )
                continue
            try:
                codec.check_state(state.values, state.dtype, state.row_shape)
            except (TypeError, ValueError, KeyError) as error:
                msg = f"what {codec!r} adapted for {key!r} is malformed ({type(error).__name__}: {error})"
                raise ValueError(msg) from error

    def state(self) -> str:
        """Return choices of codec and op with what codecs have adapted, for the agreement."""
        return self.options.choices + self.adapted()

    def adapted(self) -> str:
        """Return a hash of what codecs have adapted and must be equal on all ranks, or nothing."""
        if self._adapted is None:
            texts = [self._state_text(key, s) for key, s in sorted(self.states.items())]
            self._adapted = "".join(f", adapted={word:08x}" for word in digest("\n".join(texts))[:1])
        return self._adapted

    def _state_text(self, key: str, state: KeyState) -> str:
        """Return what of a key's state must be equal on all ranks; all of one that is another codec's."""
        codec = self.options.codec(key)
        own = codec.fingerprint == state.codec
        return f"{key!r}: {state.codec} {(codec.state_text if own else state_digest)(state.values)}"

    def start(self, tree: Any, place: Place, *, out: Any = None, when: order.Moment | None = None) -> Attempt:
        """Prepare a call on ``tree``; communicates nothing and raises nothing but interrupts."""
        attempt = Attempt(self, place)
        try:
            attempt.prepare(tree, out, when)
        except Exception as error:
            attempt.call.error = error
        return attempt

    def measures(self) -> bool:
        """Return whether the next call measures its error."""
        period = self.options.measure
        return period > 0 and (self.step < FIRST_MEASURED or self.step % period == 0)

    def plan(self, leaves: Sequence[Leaf], nones: tuple[str, ...], place: Place, *, lane_sums: bool) -> Plan:
        """Return the plan for these leaves, from the cache where the layout was seen before."""
        options, size = self.options, place.size
        hosts = place.hosts.number if place.hosts is not None else 0
        most = max(options.piece_coordinates, least_piece(place, leaves))
        taper = place.links.slow and all(leaf.device == "cpu" for leaf in leaves)
        signature = (tuple(leaves), nones, size, hosts, lane_sums, most, taper)
        plan = self._plans.pop(signature, None)
        if plan is None:
            specs = [self._spec(x, hosts or size) for x in leaves]
            sizes = most, options.bucket_bytes
            plan = Plan(specs, size, options.seed, *sizes, nones, hosts, lane_sums=lane_sums, taper=taper)
            while len(self._plans) >= self.plans_kept:
                self._plans.pop(next(iter(self._plans)))
        self._plans[signature] = plan  # most recently used last
        plan.uses += 1
        return plan

    def _spec(self, leaf: Leaf, ranks: int) -> LeafSpec:
        codec, op = self.options.codec(leaf.key), self.options.op(leaf.key)
        if leaf.dtype not in FLOATS:
            if op == "mean":
                found = f"{_names([leaf.key])} is {leaf.dtype}{list(leaf.shape)}"
                msg = f'the mean of integers is not an integer: {found}; use op="sum" or a float dtype'
                raise TypeError(msg)
            codec = _INTEGERS
        elif codec.lossy and leaf.size < self.options.exact_below:
            codec = _TWO_WORDS
        elif self.remember:
            codec = codec.for_array(leaf.size, ranks)
        feedback = codec.rounds and self.options.feedback(leaf.key, codec)
        return LeafSpec(
            leaf.key, leaf.dtype, leaf.shape, leaf.row_shape, codec, op == "mean", feedback, leaf.device
        )


class Attempt:
    """One call of a :class:`Reduction` on one rank."""

    def __init__(self, reduction: Reduction, place: Place) -> None:
        self.reduction, self.place = reduction, place
        by_host = "" if place.hosts is None else f", hosts={place.hosts.number}"
        self.call = Call(
            "compressed_allreduce",
            reducer=reduction.reducer,
            step=reduction.step,
            policy=reduction.policy + by_host,
            state=reduction.state(),
            links=place.links,
        )
        self.spans = timeline.begin(place.rank, self.call)
        self.job: Job | None = None
        self.plan: Plan | None = None
        self.context: Context | None = None
        self._leaves: list[Leaf] = []
        self._views: list[arrays.View | None] = []  # None where this rank has no value for a known key
        self._slots: list[int] = []  # position of each leaf among the tree's leaves
        self._values: list[Any] = []
        self._results: list[Buffer] = []
        self._outs: list[arrays.View | None] = []
        self._residuals: dict[str, Buffer] = {}
        self._old_residuals: list[Buffer] = []  # kernels have only their addresses
        self._changed: list[str] = []  # leaves whose residual starts again
        self._found: dict[str, KeyState] = {}  # the next states
        self._treedef: Any = None
        self.measures = self._lane_sums = False
        self._absent: set[int] = set()  # leaves that no rank has a value for
        self._devices: DeviceCall | None = None
        self._flowing: Flowing | None = None  # where there are devices
        self.handover: Callable[[], None] | None = None  # what the thread of the caller is to do

    def prepare(self, tree: Any, out: Any, when: order.Moment | None = None) -> None:
        """Look at the arrays, plan, allocate and bind."""
        keys, values, self._treedef = trees.flatten(tree)
        self._values = list(values)
        nones = self._look(keys, values)
        self.measures = self.reduction.measures()
        self._lane_sums = self.place.sums_lanes and not self.measures
        plan = self.plan = self.reduction.plan(self._leaves, nones, self.place, lane_sums=self._lane_sums)
        self.call.layout, self.call.leaves = plan.layout, plan.lines
        self.call.missing = None in self._views
        plan.require_operations(self.place.operations)
        self._outs = self._look_at_out(out, keys)
        if out is not None:
            self._ranges = arrays.Ranges(self._views), arrays.Ranges(self._outs)
        if plan.devices:
            self._devices = DeviceCall(plan, self._views, self._outs, when, self.place.go_on)
            self._flowing = Flowing(self.place, plan, self._devices)
        self._bind(plan)
        bad = plan.nonfinite() if self.reduction.options.nonfinite == "raise" else None
        if bad:
            raise NonFiniteError(f"input holds inf or NaN in {_names(bad)}. Nothing was changed")
        if self.spans is not None:
            self.spans.phase("prepare")

    def transfers(self) -> Generator[Transfer, None, Outcome]:
        """Return the engine's generator for this call."""
        return reduce(self.call, self.job, self.place.rank, self.place.size)

    def _look(self, keys: Sequence[str], values: Sequence[Any]) -> tuple[str, ...]:
        """Make views of the leaves; return the keys that are None and unknown."""
        nones = []
        for slot, (key, value) in enumerate(zip(keys, values, strict=True)):
            if value is not None:
                try:
                    view = arrays.view(value)
                except (TypeError, ValueError, BufferError, OverflowError) as error:
                    if not key or type(error) not in (TypeError, ValueError, BufferError, OverflowError):
                        raise
                    raise type(error)(f"array {key!r}: {error}") from error
                self._leaves.append(Leaf(key, view.dtype, view.shape, view.row_shape, view.device))
                self._views.append(view)
            elif key in self.reduction.known:
                self._leaves.append(self.reduction.known[key].placed())
                self._views.append(None)
            else:
                nones.append(key)
                continue
            self._slots.append(slot)
        return tuple(nones)

    def _look_at_out(self, out: Any, keys: Sequence[str]) -> list[arrays.View | None]:
        if out is None:
            return [None] * len(self._leaves)
        out_keys, out_values, _ = trees.flatten(out)
        if list(out_keys) != list(keys):
            msg = f"`out` must have the keys of the input, {list(keys)!r}, got {list(out_keys)!r}"
            raise ValueError(msg)
        views: list[arrays.View | None] = []
        for leaf, view, slot in zip(self._leaves, self._views, self._slots, strict=True):
            if view is None or out_values[slot] is None:
                msg = f"`out` and the input must both have arrays: {leaf.key!r} is None in one of them"
                raise ValueError(msg)
            views.append(arrays.out_view(out_values[slot], view))
        return views

    def _bind(self, plan: Plan) -> None:
        """Allocate results, residuals and scratch, and fill their addresses in."""
        count = len(self._leaves)
        src, dst, res_in, res_out = np.zeros((4, count), dtype=np.uint64)
        integers = any(spec.dtype not in FLOATS for spec in plan.specs)
        address = kernels.address if self._devices is None else memory.address
        for i, (leaf, view) in enumerate(zip(self._leaves, self._views, strict=True)):
            src[i] = view.pointer if view is not None else 0
            result = self._result(i, leaf, plan.specs[i], integers)
            self._results.append(result)
            dst[i] = address(result)
            if plan.specs[i].feedback:
                res_in[i], res_out[i] = self._residual(leaf, plan.specs[i].worked_on)
        if self._devices is not None:
            src[:] = [self._devices.source(i) for i in range(count)]
        hosts = self.place.hosts
        own = self.place.rank if hosts is None else hosts.host  # whose noise, where ranks have their own
        plan.bind(self.reduction.step, own, src, dst, (res_in, res_out))
        self._direct(plan)
        if self.place.links.slow and self._devices is None and len(plan.pieces) > 1:
            plan.let_go_on(self.place.go_on)
        context = self.context = Context(
            self.place.rank,
            self.place.size,
            rank_shift(self.place.rank, self.place.size),
            self.reduction.step,
            result_bytes=plan.result_bytes,
            piecewise=self.place.one_host,
            stateful=self.reduction.remember,
            sums_lanes=self._lane_sums,
        )
        swap_bytes = 0 if self.measures else swapped_bytes(plan, context, self.place)
        if swap_bytes and plan.specs[0].route.sums_lanes:
            context = self.context = replace(context, sums_lanes=True)
        have = [view is not None for view in self._views]
        states = states_of(plan.specs, self.reduction.states)
        whole, measure = not self.place.one_host, self.measures
        looked_at, flowing = self.measures or self.call.missing, self._flowing
        flow = flowing.flow(self.reduction, context, looked_at=looked_at) if flowing is not None else None
        if flow is not None and flow.flowing:
            context = self.context = replace(context, flowing=True)
        self.job = Job(
            plan,
            context,
            have,
            whole=whole,
            states=states,
            measure=measure,
            room=self.place.room,
            spans=self.spans,
            hosts=hosts,
            first_words=self.place.first_words,
            flow=flow,
            swap_bytes=swap_bytes,
        )

    def _result(self, i: int, leaf: Leaf, spec: LeafSpec, integers: bool) -> Buffer:
        """Return where a leaf's result goes: into ``out`` unless it could be needed untouched later."""
        out = self._outs[i]
        if out is not None and not integers and not spec.staged and not self._collides(i, out, spec):
            data: Buffer = out.data
            return data
        dtype = STORAGE.get(leaf.dtype) or np.dtype(leaf.dtype)
        if self._devices is None:
            return kernels.pool_empty(leaf.size * dtype.itemsize).view(dtype)
        made: Buffer = memory.empty(spec.worked_on, leaf.size, dtype)
        return made

    def _collides(self, i: int, out: arrays.View, spec: LeafSpec) -> bool:
        """Whether writing ``out`` early could change an input still to be read, or another ``out``."""
        view, (read, written) = self._views[i], self._ranges
        own = view is not None and view.pointer == out.pointer and not spec.route.reencodes
        return any(j != i or not own for j in read.hits(out)) or any(j != i for j in written.hits(out))

    def _residual(self, leaf: Leaf, device: str) -> tuple[int, int]:
        """Return the addresses of a key's residual and of the memory for the next one."""
        dtype = np.dtype(np.float64 if leaf.dtype == "float64" else np.float32)
        size = leaf.size
        old, known = self.reduction.residuals.get(leaf.key), self.reduction.known.get(leaf.key)
        same = known is None or known.leaf.row_shape == leaf.row_shape
        if old is not None and not (same and old.size == size and old.dtype == dtype):
            self._changed.append(f"{leaf.key!r} changed to {leaf.dtype}{list(leaf.shape)}")
            old = None
        if self._flowing is not None:
            self._flowing.require_residual(leaf.key, old)
        if old is not None:
            old = memory.moved(old, device)
            self._old_residuals.append(old)
        new = memory.empty(device, size, dtype)
        if self.place.hosts is not None:
            new[...] = 0  # of what other ranks of the host speak for
        self._residuals[leaf.key] = new
        return (memory.address(old) if old is not None and size else 0), memory.address(new)

    def _direct(self, plan: Plan) -> None:
        """Let float sums read and write arrays, or zeros where there is none, instead of copies of them."""
        for x in plan.operands:
            x.forget()
            leaf, start, blocks = x.segments[0]
            view, spec = self._views[leaf], plan.specs[leaf]
            if x.count == 1 and spec.device == "cpu" and (spec.added if view is None else not spec.feedback):
                part = slice(*map(plan.geometries[leaf].offset, (start, start + blocks)))
                result = self._results[leaf][part]
                if view is None:
                    result[...] = 0
                x.direct = spec.dtype, result if view is None else view.data[part], result

    def release(self) -> None:
        """Let go of the arrays that the cached plan refers to; the call is over."""
        self._let_go()
        if self._flowing is not None:
            self._flowing.release((self._views, self._outs))
        if self._devices is not None:
            self._devices.end()
        if self.spans is not None:
            self.spans.close()

    def _let_go(self) -> None:
        self.job = None
        if self.plan is not None:
            for x in self.plan.operands:
                x.forget()

    def commit(self, outcome: Outcome) -> None:
        """Take over step and state, as every rank does now; raises the outcome's error instead."""
        self.settle(outcome)
        self.reduction.advance(outcome.stats)
        self.take_over()

    def settle(self, outcome: Outcome, *, later: bool = False) -> None:
        """Take in what the call came to and leave the reduction as it is; raises the outcome's error. Results
        are delivered before the call is released, or ``later``.
        """
        states = self.job.states if self.job is not None else {}
        self._let_go()
        if outcome.error is not None:
            raise outcome.error
        assert self.plan is not None
        if self._devices is not None:
            self._devices.later = later
        if self.reduction.remember:  # before anything is taken over
            self._found = next_states(self.plan.specs, outcome.parts, states)
        if outcome.present is not None:  # None everywhere stays None, and keeps its residual
            self._absent = {
                i for i, here in enumerate(outcome.present) if not here and self._views[i] is None
            }

    def take_over(self) -> None:
        """Hand residuals and states of a settled call to the reduction."""
        lost = {self._leaves[i].key for i in self._absent}
        if self._flowing is not None and self._flowing.captured:
            self._flowing.carry(self.reduction.residuals, self._residuals)
        self.reduction.residuals.update((k, v) for k, v in self._residuals.items() if k not in lost)
        self.reduction.set_states({k: v for k, v in self._found.items() if k not in lost})

    @property
    def notes(self) -> list[str]:
        """What the caller should be warned of."""
        if not self._changed:
            return []
        changes = ", ".join(self._changed)
        return [f"the array {changes}: its error-feedback residual starts again from zero"]

    @property
    def leaves(self) -> list[Leaf]:
        """The leaves that are not None on all ranks, in the order of the tree."""
        return self._leaves

    def deliver(self) -> Any:
        """Return the result tree. What fails here (a full memory, say) fails on this rank alone."""
        reduction, values = self.reduction, self._values
        if self.spans is not None:
            self.spans.mark()
        if self._devices is not None:
            self._devices.bring(self._results)
        for i, slot in enumerate(self._slots):
            if i in self._absent:
                continue
            values[slot] = self._deliver(i)
            view = self._views[i]
            if reduction.remember and view is not None and self._is_new(i):
                reduction.known[self._leaves[i].key] = Known(
                    self._leaves[i], view.detached().wrap, library=view.library
                )
        if self._devices is not None:
            self.handover = self._devices.hand_over(self._results, self._libraries())
        result = trees.unflatten(self._treedef, values)
        if self.spans is not None:
            self.spans.phase("deliver")
        return result

    def _libraries(self) -> list[str]:
        """Return the library whose stream is to come after each leaf's result."""
        known, pairs = self.reduction.known, zip(self._leaves, self._views, strict=True)
        return [known[leaf.key].library if view is None else view.library for leaf, view in pairs]

    def _is_new(self, i: int) -> bool:
        known = self.reduction.known.get(self._leaves[i].key)
        return known is None or known.restored or known.leaf != self._leaves[i]

    def _deliver(self, i: int) -> Any:
        """Return leaf ``i``'s result as the user's kind of object."""
        result, out, view = self._results[i], self._outs[i], self._views[i]
        if out is not None:
            if out.data is not result:
                out.data[...] = result
            out.commit()
            return out.owner
        if view is None:
            return self.reduction.known[self._leaves[i].key].wrap(result)
        return view.wrap(result)


def _names(keys: Iterable[str]) -> str:
    """Return keys for an error's text; a bare array has the empty key."""
    return ", ".join(repr(key) if key else "the array" for key in sorted(set(keys)))
