"""Communicators: a group of ranks, and the collective calls that they make together."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from gccomm import arrays, on_device, trees
from gccomm.agreement import Call, Links, digest
from gccomm.backends import Backend, room_of
from gccomm.boards import Boards
from gccomm.checks import integer
from gccomm.codecs import Codec
from gccomm.engine import Outcome, rendezvous
from gccomm.errors import BackendError, CollectiveTimeout, NegotiationError
from gccomm.hosts import Hosts
from gccomm.interop import order
from gccomm.interrupts import HoldInterrupts
from gccomm.reduction import Attempt, Place, Reduction
from gccomm.reductions import Reductions
from gccomm.repeats import Repeat
from gccomm.stats import Stats
from gccomm.thread import Worker
from gccomm.transfers import Broadcast, Pause, Transfer, execute
from gccomm.turns import Exclusive, Turn
from gccomm.work import Done, Parked, Task, Work, snapshot

__all__ = ["Communicator"]

T = TypeVar("T")
_Moves: TypeAlias = Generator[Transfer, None, Outcome]

_DEFAULT = "rotated"
INT32_MAX = (1 << 31) - 1  # colors and keys are C ints in MPI


class Communicator:
    """A group of ranks. Made by :func:`gccomm.init` and :meth:`split`; all methods but the properties are
    collective.

    Every collective call first agrees on what it is. Where a rank's own argument is bad, or ranks differ in
    what they call, every rank raises the same error, nothing is changed and the next call works. Calls from
    several threads are made one after the other. Asynchronous calls are made by a thread of gccomm's own, in
    the order in which they were asked for; a blocking call comes after all asynchronous ones before it.
    """

    def __init__(self, backend: Backend, *, joins: bool = False) -> None:
        self._backend = backend
        self._boards, self._joins = Boards(backend, joins), joins
        self._shared = backend.shared
        self.lock: threading.RLock = self._shared.setdefault("lock", threading.RLock())
        self._number: int = self._shared.get("communicators", 0)
        self._shared["communicators"] = self._number + 1
        self._shared["open"] = self._shared.get("open", 0) + 1
        self._broken: str | None = None
        operations: frozenset[str] = getattr(backend, "operations", frozenset())
        lanes = getattr(backend, "sums_lanes", False)
        hosts: Hosts | None = getattr(backend, "hosts", None)
        where = backend.rank, backend.size, backend.one_host
        first, go_on = getattr(backend, "first_words", 0), getattr(backend, "go_on", None)
        board = self._boards.of if self._boards.able else None
        links = Links() if backend.one_host else Links(lambda: getattr(backend, "slow_links", False))
        room, whole = room_of(backend), [getattr(backend, name, 0) for name in ("call_bytes", "swap_bytes")]
        self._place = Place(*where, operations, room, lanes, hosts, first, go_on, board, links, *whole)
        self._step = 0  # reductions by the functions: keys their noise
        self._calls = 0  # barriers, broadcasts, splits
        self._reducers = 0
        self._reductions = Reductions()
        self.turn = Turn(backend.rank, self.lock, self._shared, os.getpid())
        self._exclusive = Exclusive(self.turn, self._shared)
        self._on_close: Callable[[], None] | None = None
        self.stats = Stats()

    @property
    def rank(self) -> int:
        """This process's number, 0 to size - 1."""
        return self._backend.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._backend.size

    @property
    def local_rank(self) -> int:
        """This process's number among those on its host."""
        return self._backend.local_rank

    @property
    def backend(self) -> str:
        """Name of the back end: "mpi", "nccl" or "local"; "mpi+nccl" once NCCL has joined,
        "mpi+nccl-by-host" where it has within hosts.
        """
        return self._backend.name

    def __repr__(self) -> str:
        state = f", {self._broken}" if self._broken else ""
        return f"<gccomm.Communicator rank {self.rank} of {self.size}, {self.backend}{state}>"

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()  # collective: a rank that leaves by an exception must not wait for its peers

    def compressed_allreduce(
        self,
        x: Any,
        op: str = "sum",
        codec: str | Codec = _DEFAULT,
        *,
        out: Any = None,
        exact_below: int = 1024,
        nonfinite: str = "propagate",
    ) -> Any:
        """Reduce over this communicator; see :func:`gccomm.compressed_allreduce`."""
        with self._exclusive:
            reduction, error = self._reductions.of(op, codec, exact_below, nonfinite)
            done = self._reduce(reduction, x, out, error)
        return self._deliver(done, 3)

    def compressed_allreduce_async(
        self,
        x: Any,
        op: str = "sum",
        codec: str | Codec = _DEFAULT,
        *,
        out: Any = None,
        exact_below: int = 1024,
        nonfinite: str = "propagate",
    ) -> Work:
        """Begin to reduce over this communicator; see :func:`gccomm.compressed_allreduce_async`."""
        with self.turn:
            reduction, error = self._reductions.of(op, codec, exact_below, nonfinite)
            error = error or self.refusal()
            tree, into = snapshot(x), snapshot(out)
            when = order.moment((tree, into))
            task = self.submit(
                lambda: self._reduce(reduction, tree, into, error, when, parks=True),
                f"compressed_allreduce_async on {self!r}",
            )
        return Work(task, self._shared.get("worker"), self._deliver, self.rank)

    def allreduce(self, x: Any, op: str = "sum", *, out: Any = None, nonfinite: str = "propagate") -> Any:
        """Reduce without compression; see :func:`gccomm.allreduce`."""
        return self.compressed_allreduce(x, op, "raw", out=out, nonfinite=nonfinite)

    def broadcast(self, x: Any, root: int = 0) -> Any:
        """Give every rank the arrays of rank ``root``; see :func:`gccomm.broadcast`."""
        call = Call("broadcast")
        keys: list[str] = []
        views: list[arrays.View | None] = []
        buffers: list[Any] = []
        treedef: Any = None
        try:
            root = integer("root", root, "a rank", 0, self.size - 1)
            call.policy = f"root={root}"
            keys, values, treedef = trees.flatten(x)
            views = [None if v is None else arrays.view(v) for v in values]
            order.begin(views)
            lines = [on_device.line(k, v) for k, v in zip(keys, views, strict=True)]
            call.layout, call.leaves = digest("\n".join(lines)), lambda: lines
            buffers = [None if v is None else on_device.host_copy(v) for v in views]
        except Exception as error:
            call.error = error
        self._plain(call, self._broadcast(call, [b for b in buffers if b is not None], root))
        return on_device.broadcast_results(treedef, views, buffers)

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self._plain(Call("barrier"))

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Make one communicator per color.

        Parameters
        ----------
        color : int or None
            Ranks of one color, 0 or more, form a group; None joins none and gets None.
        key : int
            Order within the group; ties by rank.

        Returns
        -------
        Communicator or None
            Close it when it is no longer needed: freeing is collective, so dropping it frees nothing.
        """
        call = Call("split")
        try:
            color = None if color is None else integer("color", color, "None or an integer", 0, INT32_MAX)
            key = integer("key", key, "an integer", -INT32_MAX, INT32_MAX)
        except Exception as error:  # shared with the other ranks, which raise it too
            call.error = error
        with self.turn:
            backend = self._plain(call, then=lambda: self._backend.split(color, key))
        return None if backend is None else Communicator(backend, joins=self._joins)

    def close(self) -> None:
        """Free the communicator; collective. A second close does nothing."""
        self.turn.refuse_worker()
        with self.lock:
            if self._broken == "closed":
                return
            if self._broken is None:
                self._plain(Call("close"), then=self._release)
            else:
                self.turn.drain()
                self._release()
            self._broken = "closed"
            self._reductions = Reductions()
            self._shared["open"] -= 1
            if self._shared["open"] == 0 and (worker := self._shared.pop("worker", None)) is not None:
                worker.close()
            if self._on_close is not None:
                self._on_close()

    def synchronize(self) -> None:
        """Wait for what calls on devices have enqueued, and raise what went wrong; not collective."""
        with self._exclusive:
            self._drive(Call("barrier"), self._boards.wait(), lambda _: None)

    def _release(self) -> None:
        self._boards.close()
        self._backend.close()

    def next_reducer(self) -> int:
        """Return the number of a new reducer: its place in the order of construction, equal on all ranks."""
        with self.lock:
            self._reducers += 1
            return self._reducers

    def reduce(
        self, reduction: Reduction, tree: Any, *, out: Any = None, error: BaseException | None = None
    ) -> Any:
        """Run one call of a reduction and return its result; with ``error``, let every rank raise it."""
        with self._exclusive:
            done = self._reduce(reduction, tree, out, error)
        return self._deliver(done)

    def _reduce(
        self,
        reduction: Reduction,
        tree: Any,
        out: Any,
        error: BaseException | None,
        when: order.Moment | None = None,
        *,
        parks: bool = False,
    ) -> Any:
        """Make a call of a reduction in the thread whose turn it is: return what it has done, or a Parked
        one where it ``parks``.
        """
        if reduction.reducer == 0:
            reduction.step = self._step
        if out is None and error is None and self._broken is None:
            repeat = reduction.repeats.find(reduction, tree, self._place)
            if repeat is not None:
                done = self._repeat(reduction, repeat, tree)
                if done is not None:
                    return done

        def finish(attempt: Attempt, outcome: Outcome) -> Done:
            attempt.commit(outcome)
            if reduction.reducer == 0:
                self._step += 1
            done = Done(attempt.deliver(), outcome.stats, attempt.notes, attempt.handover)
            if out is None:
                reduction.repeats.keep(attempt, tree)
            return done

        return self.attempt(reduction, tree, finish, out=out, error=error, when=when, parks=parks)

    def _repeat(self, reduction: Reduction, repeat: Repeat, array: Any) -> Done | None:
        """Repeat a call that was made before; None where it cannot begin: the usual way then reports why."""
        try:
            result = repeat.begin(array, reduction.step)
        except Exception:
            repeat.release()
            return None

        def finish(outcome: Outcome) -> Done:
            if outcome.error is not None:
                raise outcome.error
            reduction.advance(outcome.stats)
            if reduction.reducer == 0:
                self._step += 1
            return Done(result, outcome.stats, [])

        try:
            done: Done = self._drive(repeat.call, repeat.transfers(), finish)
            return done
        finally:
            repeat.release()

    def _deliver(self, done: Done, level: int = 4) -> Any:
        """Return a call's result in the thread of the caller, who is warned so many levels up."""
        self.stats = done.stats
        if done.handover is not None:
            done.handover()
        notes = done.notes
        if self._boards.note is not None:
            notes, self._boards.note = [*notes, self._boards.note], None
        for note in notes:
            warnings.warn(note, stacklevel=level)
        return done.result

    def attempt(
        self,
        reduction: Reduction,
        tree: Any,
        finish: Callable[[Attempt, Outcome], T],
        *,
        out: Any = None,
        error: BaseException | None = None,
        part: str = "",
        when: order.Moment | None = None,
        parks: bool = False,
    ) -> T | Parked:
        """Make a call of a reduction, or ``part`` of one, in the thread whose turn it is; return what
        ``finish`` does. ``when`` it was asked for says what arrays of devices come after. If it ``parks``, it
        may return a call that is to be resumed, where it would wait for a device at its end.
        """
        # The caller's error state is his own: numbers out of range are data here, on every rank.
        with np.errstate(all="ignore"):
            attempt = reduction.start(None if error else tree, self._place, out=out, when=when)
            attempt.call.communicator = self._number
            attempt.call.policy += part
            attempt.call.error = error or attempt.call.error
            transfers, end = attempt.transfers(), lambda o: finish(attempt, o)
            result: T | Parked = self._complete(
                attempt, lambda: self._drive(attempt.call, transfers, end, parks=parks)
            )
            return result

    def _complete(self, attempt: Attempt, drive: Callable[[], Any]) -> Any:
        """Drive a call to its end, or until it is parked."""
        result = None
        try:
            result = drive()
        finally:
            if not isinstance(result, Parked):
                attempt.release()
        if isinstance(result, Parked):
            return Parked(result.ready, partial(self._go_on, attempt, result.resume), attempt.release)
        if self._boards.joins and attempt.plan is not None and len(attempt.plan.devices) == 1:
            self._join(attempt.plan.devices[0])
        return result

    def _go_on(self, attempt: Attempt, resume: Callable[[], Any]) -> Any:
        with np.errstate(all="ignore"):
            return self._complete(attempt, resume)

    def _join(self, device: str) -> None:
        """Let NCCL join, now that all ranks have made a call on arrays of their devices."""
        try:
            self._backend = self._boards.join(device)
        except BaseException as error:
            self._broken = f"broken: {type(error).__name__}: {error}"
            raise
        if self._boards.able:
            board = self._boards.of
            self._place = replace(self._place, board=board, first_words=0, call_bytes=0, swap_bytes=0)

    def submit(self, run: Callable[[], Any], text: str) -> Task:
        """Queue a call, in its :meth:`turn`; the first one starts the communication thread.

        Where no thread is allowed, or the communicator is broken, the call is made at once: it only fails.
        """
        task = Task(run, text, self._backend)
        if self._broken is not None or self.refusal() is not None:
            with self._exclusive:
                task.execute()
        else:
            if self._shared.get("worker") is None:
                self._shared["worker"] = Worker()
            self._shared["worker"].submit(task)
        return task

    def refusal(self) -> BaseException | None:
        """Return the error of asynchronous calls where the back end allows no thread."""
        reason: str = getattr(self._backend, "no_threads", "")
        return NegotiationError(f"asynchronous calls are not possible: {reason}") if reason else None

    def join(self, task: Task) -> Any:
        """Wait for a task that was submitted, and return its result."""
        worker: Worker | None = self._shared.get("worker")
        if worker is not None and not task.done.is_set():
            worker.wait(task)
        return task.outcome()

    def _plain(
        self, call: Call, transfers: _Moves | None = None, then: Callable[[], Any] | None = None
    ) -> Any:
        """Run a call that is not a reduction; ``then`` is its back end's part, after the agreement."""
        with self._exclusive:
            return self._plainly(call, transfers, then)

    def _plainly(
        self, call: Call, transfers: _Moves | None = None, then: Callable[[], Any] | None = None
    ) -> Any:
        """Do that in the thread whose turn it is."""
        call.communicator, call.step = self._number, self._calls

        def finish(outcome: Outcome) -> Any:
            if outcome.error is not None:
                raise outcome.error
            self._calls += 1
            return then() if then is not None else None

        return self._drive(call, transfers or rendezvous(call, self.rank, self.size), finish)

    def share_order(self, mine: npt.NDArray[np.uint32], keys: Sequence[str]) -> npt.NDArray[np.uint32]:
        """Return rank 0's order of keys, as places in ``keys``, in the thread whose turn it is."""
        lines = [repr(key) for key in keys]
        call = Call(
            "broadcast", layout=digest("\n".join(lines)), leaves=lambda: lines, policy="order of keys"
        )
        order = mine.copy()
        self._plainly(call, self._broadcast(call, [order], 0))
        return order

    @contextmanager
    def still(self) -> Iterator[None]:
        """Hold other threads back, with no asynchronous call on its way; not collective."""
        with self.lock:
            if not self._shared.get("busy"):
                self.turn.drain()
            yield

    def _broadcast(self, call: Call, buffers: list[Any], root: int) -> _Moves:
        outcome = yield from rendezvous(call, self.rank, self.size)
        if outcome.error is None:
            for buffer in buffers:
                if buffer.size:
                    yield Broadcast(buffer.view(np.uint8), root)
        return outcome

    def _drive(
        self,
        call: Call,
        transfers: _Moves,
        finish: Callable[[Outcome], Any],
        *,
        parks: bool = False,
    ) -> Any:
        """Run transfers, then ``finish``, with Ctrl-C held back over both; or return a Parked call.

        An exception on the way breaks the communicator; an outcome's error, which ``finish`` raises, does
        not.
        """
        if self._broken is not None:
            remedy = "make a new one by gccomm.init() or split()"
            if self._broken != "closed":
                remedy = "end the job and start it again, from a checkpoint"
            msg = f"rank {self.rank}: this communicator is {self._broken}; {remedy}"
            raise BackendError(msg)
        self._backend.set_activity(call.describe)
        with HoldInterrupts(self._backend):
            try:
                for board in self._boards.found.values():
                    board.check()
                outcome = self._run(transfers, parks=parks)
            except CollectiveTimeout:
                self._broken = "broken: a collective timed out"
                raise
            except BaseException as error:
                self._broken = f"broken: {type(error).__name__}: {error}"
                self._backend.abort(f"{call.describe()} failed while its ranks were in it: {error!r}")
                raise
            if isinstance(outcome, Pause):
                return Parked(outcome.ready, lambda: self._drive(call, transfers, finish), transfers.close)
            return finish(outcome)

    def _run(self, transfers: _Moves, *, parks: bool) -> Outcome | Pause:
        handle: Any = None
        while True:
            try:
                transfer = transfers.send(handle)
            except StopIteration as stop:
                outcome: Outcome = stop.value
                return outcome
            if parks and isinstance(transfer, Pause):
                return transfer
            handle = execute(transfer, self._backend)
