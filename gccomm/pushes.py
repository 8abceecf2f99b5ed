"""Steps that are given key by key: buckets are sent while the program goes on computing.

In its first step a :class:`Pushes` reduces everything at the end, and rank 0 tells all ranks in which order
it had the keys. From then on that order is cut into buckets. A rank hands a bucket to the communication
thread once it has all of its keys and has handed over all buckets before; so the ranks send the same
buckets in the same order, in whatever order each of them gets its keys. The last bucket waits for
:meth:`Pushes.wait`, and with it go keys that are new: no bucket can follow of which another rank knows
nothing.

All buckets of a step have the step's number, and what they change in the reducer is taken over after the last
of them, on all ranks. Where one fails it fails on all ranks alike, and the ones behind it are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from gccomm import trees
from gccomm.communicator import Communicator
from gccomm.engine import Outcome
from gccomm.errors import BackendError, CollectiveTimeout, GccommError, MismatchError
from gccomm.interop import order
from gccomm.layout import ITEM_BYTES
from gccomm.reduction import PLAN_CACHE, Attempt, Reduction
from gccomm.stats import Stats
from gccomm.work import Done, Parked, Task, snapshot

__all__ = ["Pushes"]


class _Step:
    """One step on its way.

    Attributes
    ----------
    pushed : dict of str to None
        Keys of this rank, in its order.
    ready : dict of str to Any
        Values that are not handed over yet.
    sent : int
        Buckets that are.
    error : BaseException or None
        This rank's own, to be shared with the others in the next bucket.
    failed : bool
        A bucket has failed, on all ranks.
    when : Moment or None
        What arrays of devices come after.
    attempts : dict of int to Attempt
        By the numbers of buckets, what they have come to.
    stats : Stats
        Of them together.
    parked : list of Parked
        Buckets whose ends wait for a device: they are ended with the step, in their order.
    tasks : list of Task
        Of the buckets.
    closing : Task or None
        What ends the step, once it is asked for.
    """

    def __init__(self) -> None:
        self.pushed: dict[str, None] = {}
        self.ready: dict[str, Any] = {}
        self.sent = 0
        self.error: BaseException | None = None
        self.failed = False
        self.when: order.Moment | None = None
        self.attempts: dict[int, Attempt] = {}
        self.parked: list[Parked] = []
        self.stats = Stats()
        self.tasks: list[Task] = []
        self.closing: Task | None = None


class Pushes:
    """The steps of one reducer that are pushed.

    Parameters
    ----------
    comm : Communicator
        The ranks.
    reduction : Reduction
        The reducer's own.
    """

    def __init__(self, comm: Communicator, reduction: Reduction) -> None:
        self._comm, self._reduction = comm, reduction
        self._bytes: dict[str, int] = {}  # of each key, in the agreed order; empty: not agreed yet
        self._buckets: list[list[str]] = []
        self._structures: dict[str, trees.TreeDef] = {}  # of what was last pushed for a key
        self._step: _Step | None = None

    @property
    def open(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._step is not None

    def push(self, key: str, value: Any) -> None:
        """Add a key to the step; never blocks, and keeps its errors for :meth:`wait`."""
        with self._comm.turn:
            step = self._begin()
            if step.closing is not None:
                msg = "the last step was interrupted in wait(): call wait() again, or discard()"
                raise GccommError(msg)
            if step.error is not None:
                return
            step.error = self._comm.refusal() or self._wrong(step, key)
            if step.error is None:
                step.pushed[key] = None
                step.ready[key] = snapshot(value)
                step.when = order.moment(step.ready[key], step.when)
                self._send_complete(step)

    def wait(self) -> Done:
        """End the step: return the results by key, or raise its error as all ranks do."""
        with self._comm.turn:
            step = self._begin()
            if step.closing is None:
                if not step.pushed and step.error is None:
                    msg = (
                        f"wait() without a push in step {self._reduction.step}: push None for a key if this "
                        "rank has no gradients"
                    )
                    step.error = ValueError(msg)
                self._close(step)
        return self._join(step)

    def discard(self) -> None:
        """End the step on all ranks, without a result."""
        with self._comm.turn:
            step = self._begin()
            if step.closing is None:
                step.error = step.error or GccommError(f"step {self._reduction.step} was discarded")
                self._close(step)
        try:
            self._join(step)
        except (MismatchError, BackendError, CollectiveTimeout):
            raise
        except Exception:  # the discarded step's own, here or on another rank
            pass

    def _begin(self) -> _Step:
        if self._step is None:
            self._step = _Step()
        return self._step

    def _wrong(self, step: _Step, key: object) -> Exception | None:
        """Return what is wrong with a key."""
        if not isinstance(key, str):
            return TypeError(f"`key` must be a str, got {key!r} of type {type(key).__name__}")
        if key in step.pushed:
            msg = (
                f"the key {key!r} was pushed twice in step {self._reduction.step}: call wait() between steps"
            )
            return ValueError(msg)
        return None

    def _send_complete(self, step: _Step) -> None:
        """Hand over the buckets whose turn it is, but the last one."""
        while step.sent < len(self._buckets) - 1:
            bucket = self._buckets[step.sent]
            if not all(key in step.ready for key in bucket):
                return
            self._send(step, {key: step.ready.pop(key) for key in bucket})

    def _close(self, step: _Step) -> None:
        """Hand over the other buckets, without the keys that are missing here, and what ends the step."""
        try:
            while step.error is None and step.sent < len(self._buckets) - 1:
                self._send(step, self._take(step, self._buckets[step.sent]))
            last = {} if step.error else self._take(step, self._buckets[-1] if self._buckets else ())
            self._send(step, {**last, **step.ready})
            step.ready.clear()
        finally:
            number = self._reduction.step
            step.closing = self._comm.submit(lambda: self._end(step), f"step {number} of {self._comm!r}")

    def _take(self, step: _Step, bucket: Iterable[str]) -> dict[str, Any]:
        """Return a bucket's values; None in the places of a key that was not pushed."""
        return {key: step.ready.pop(key) if key in step.ready else self._nothing(key) for key in bucket}

    def _nothing(self, key: str) -> Any:
        structure = self._structures.get(key)
        return None if structure is None else trees.unflatten(structure, [None] * structure.leaves)

    def _send(self, step: _Step, tree: dict[str, Any]) -> None:
        step.sent += 1
        error = step.error
        number, count = step.sent, max(len(self._buckets), 1)
        part = f", pushed: bucket {number} of {count}" if self._buckets else ", pushed: all at once"
        text = f"bucket {number} of {count} of step {self._reduction.step} of {self._comm!r}"
        when = None if step.when is None else step.when.copy()
        step.tasks.append(
            self._comm.submit(lambda: self._reduce(step, number, tree, error, part, when), text)
        )

    # In the communication thread

    def _reduce(
        self,
        step: _Step,
        number: int,
        tree: dict[str, Any],
        error: BaseException | None,
        part: str,
        when: order.Moment | None,
    ) -> None:
        if step.failed:
            return
        step.failed = True  # until it is known better

        def finish(attempt: Attempt, outcome: Outcome) -> None:
            attempt.settle(outcome, later=True)
            step.attempts[number] = attempt
            step.stats.add(outcome.stats)

        done = self._comm.attempt(
            self._reduction, tree, finish, error=error, part=part, when=when, parks=True
        )
        if isinstance(done, Parked):
            step.parked.append(done)
        step.failed = False

    def _complete(self, step: _Step) -> None:
        """End all buckets, or raise the error of one."""
        try:
            for task in step.tasks:
                if task.error is not None:
                    task.outcome()
            while step.parked:
                step.parked.pop(0).resume()
        finally:
            while step.parked:
                step.parked.pop(0).abandon()

    def _end(self, step: _Step) -> Done:
        """Take over what the buckets have changed, and return all results; or raise the error of one."""
        self._complete(step)
        self._reduction.advance(step.stats)
        results: dict[str, Any] = {}
        notes: list[str] = []
        attempts = [attempt for _, attempt in sorted(step.attempts.items())]
        for attempt in attempts:
            attempt.take_over()
        for attempt in attempts:
            results.update(attempt.deliver())
            notes += attempt.notes
        self._learn(step, results)
        pushed = [*step.pushed, *(key for key in results if key not in step.pushed)]
        handovers = [attempt.handover for attempt in attempts if attempt.handover is not None]
        handover = order.Handovers(handovers) if handovers else None
        return Done({key: results[key] for key in pushed}, step.stats, notes, handover)

    def _learn(self, step: _Step, results: Mapping[str, Any]) -> None:
        """Take the keys of the first step into the order, and those that are new later."""
        for key, value in results.items():
            self._structures[key] = trees.flatten(value)[2]
        # What has no leaves is in no layout, so that the other ranks may not have it.
        new = sorted(k for k in results if k not in self._bytes and self._structures[k].leaves)
        sizes = dict.fromkeys(new, 0)
        for leaf in (leaf for attempt in step.attempts.values() for leaf in attempt.leaves):
            if (key := _key_of(leaf.key)) in sizes:
                sizes[key] += leaf.size * ITEM_BYTES[leaf.dtype]
        if not self._bytes and new:
            places = {key: place for place, key in enumerate(new)}
            mine = [places[key] for key in step.pushed if key in places]
            order = self._comm.share_order(np.array(mine, dtype=np.uint32), new)
            new = [new[place] for place in order.tolist()]
        if new:
            self._bytes.update((key, sizes[key]) for key in new)
            self._buckets = _cut(self._bytes, self._reduction.options.bucket_bytes)
            self._reduction.plans_kept = PLAN_CACHE + 2 * len(self._buckets)

    # In the thread of the program

    def _join(self, step: _Step) -> Done:
        assert step.closing is not None
        try:
            done: Done = self._comm.join(step.closing)
            return done
        finally:
            if step.closing.done.is_set():
                for task in step.tasks:
                    task.seen = True
                if self._step is step:
                    self._step = None


def _key_of(path: str) -> str:
    """Return the key that the path of a leaf begins with."""
    return path.partition("/")[0].replace("~1", "/").replace("~0", "~")


def _cut(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Cut keys, in order, into buckets of at most so many bytes, or of one key."""
    buckets: list[list[str]] = []
    room = 0
    for key, size in sizes.items():
        if not buckets or size > room:
            buckets.append([])
            room = most
        buckets[-1].append(key)
        room -= size
    return buckets
