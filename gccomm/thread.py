"""The communication thread of a group of ranks: it makes asynchronous calls, one after the other.

It is started by the first of them. Blocking calls are made by the thread that calls, once all asynchronous
ones before them are complete; so there is one order, which is the same on all ranks, and the group's back
end is never used by two threads at a time. A call that has enqueued all it can on a device is parked, so that
nobody waits for that device; the rest of it is made when the device has come so far, when a thread of the
program waits, and in any case before the next call.
"""

from __future__ import annotations

import atexit
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack

from gccomm.backends import Backend
from gccomm.errors import BackendError
from gccomm.interrupts import HoldInterrupts
from gccomm.work import Task

__all__ = ["Worker"]

_workers: weakref.WeakSet[Worker] = weakref.WeakSet()
_registered = False
POLL_S = 0.001  # how often a device is looked at that a parked call waits for


class _Line:
    """Tasks in their order, and who waits for them. All that the thread refers to."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queue: deque[Task] = deque()
        self.current: Task | None = None
        self.parked: Task | None = None  # to be completed before anything else is done
        self.busy = False
        self.stopped = False
        self.waiting = 0  # threads of the program that do nothing meanwhile
        self.failed: weakref.WeakSet[Task] = weakref.WeakSet()

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or on its way."""
        return not self.busy and not self.queue and self.parked is None

    def next(self) -> Task | None:
        """Wait for something to do, and return it; None at the end."""
        while True:
            if self.parked is not None:
                if self.queue or self.stopped or self.waiting or self.parked.ready():
                    return self.parked
            elif self.queue:
                return self.queue.popleft()
            elif self.stopped:
                return None
            self.changed.wait(None if self.parked is None else POLL_S)

    def pace(self) -> None:
        """Tell the back end whether its waits may take a core: not while the program computes."""
        backend = self.current.backend if self.current is not None else None
        if backend is not None and hasattr(backend, "background"):
            backend.background = self.waiting == 0

    def stop(self) -> None:
        """Let the thread end once it has made what is queued."""
        with self.changed:
            self.stopped = True
            self.changed.notify_all()


def _work(line: _Line) -> None:
    """Make the calls of a line until it is stopped and empty; the body of the thread."""
    while True:
        with line.changed:
            task = line.current = line.next()
            if task is None:
                return
            line.parked, line.busy = None, True
            backend = task.backend
            line.pace()
        task.execute()
        if task.error is not None:
            line.failed.add(task)
        if backend is not None and hasattr(backend, "background"):
            backend.background = False
        with line.changed:
            line.current = None
            line.parked = None if task.done.is_set() else task
        del task, backend  # a handle that was dropped reports its error now
        with line.changed:
            line.busy = False
            line.changed.notify_all()


class Worker:
    """A thread that makes asynchronous calls; ends with the last reference to this object."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._line = _Line()
        self._thread = threading.Thread(target=_work, args=(self._line,), name="gccomm", daemon=True)
        self._thread.start()
        _workers.add(self)
        _register()

    def is_current(self) -> bool:
        """Whether the calling thread is this one."""
        return threading.current_thread() is self._thread

    def submit(self, task: Task) -> None:
        """Queue a task."""
        with self._line.changed:
            self._line.queue.append(task)
            self._line.changed.notify_all()

    def wait(self, task: Task, timeout: float | None = None) -> bool:
        """Wait until a task is done, or for so many seconds; return whether it is."""
        if self.is_current():
            msg = f"{task.text} is waited for from within the thread that makes it, by a finalizer"
            raise BackendError(msg)
        self._pause(1)
        try:
            return task.done.wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))
        finally:
            self._pause(-1)

    def drain(self) -> None:
        """Wait until all that was submitted is done."""
        line = self._line
        if line.idle:
            return
        self._pause(1)
        try:
            with line.changed:
                line.changed.wait_for(lambda: line.idle)
        finally:
            self._pause(-1)

    def close(self) -> None:
        """Wait for the thread's end."""
        self._line.stop()
        if not self.is_current():
            self._thread.join()

    def finish(self, unseen: list[Task]) -> None:
        """Complete what is open, end the thread, and add tasks whose errors may be unseen to a list.

        Ctrl-C is held back as in a blocking call.
        """
        if os.getpid() != self._pid:
            return
        try:
            while (backend := self._backend()) is not None:
                with HoldInterrupts(backend):
                    self.drain()
        finally:
            self.close()
            unseen += self._line.failed

    def _backend(self) -> Backend | None:
        with self._line.changed:
            tasks = [*filter(None, [self._line.current, self._line.parked]), *self._line.queue]
        return next((task.backend for task in tasks if task.backend is not None), None)

    def _pause(self, change: int) -> None:
        """Note that one more, or less, thread of the program waits."""
        with self._line.changed:
            self._line.waiting += change
            self._line.pace()
            if self._line.parked is not None:
                self._line.changed.notify_all()

    def __del__(self) -> None:
        if os.getpid() == self._pid:  # a forked child has no such thread, and may have its lock
            self._line.stop()


def _register() -> None:
    """Have all threads end before the interpreter, and before MPI is finalised."""
    global _registered  # noqa: PLW0603 - once per process
    if not _registered:
        _registered = True
        atexit.register(_at_exit)


def _at_exit() -> None:
    unseen: list[Task] = []
    with ExitStack() as stack:  # all of them, whatever one raises
        stack.callback(_report, unseen)
        for worker in list(_workers):
            stack.callback(worker.finish, unseen)


def _report(tasks: Sequence[Task]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always", RuntimeWarning)  # there is nobody left to raise it to
        for text in filter(None, (task.report() for task in tasks)):
            warnings.warn(text, RuntimeWarning, stacklevel=1)
