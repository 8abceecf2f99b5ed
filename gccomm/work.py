"""Calls that are on their way, and the handles by which a program waits for them."""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from gccomm import trees
from gccomm.errors import CollectiveTimeout
from gccomm.stats import Stats

if TYPE_CHECKING:
    from gccomm.backends import Backend
    from gccomm.thread import Worker

__all__ = ["Done", "Parked", "Task", "Work", "seconds", "snapshot"]


class Done(NamedTuple):
    """What a call gave: its result, its figures, what the caller is to be warned of, and what his thread is
    to do before he uses a result that is on a device.
    """

    result: Any
    stats: Stats
    notes: Sequence[str] = ()
    handover: Callable[[], None] | None = None


class Parked:
    """A call that has enqueued all it can: the host has not yet seen what a device has found.

    Parameters
    ----------
    ready : callable
        Whether going on waits for nothing.
    resume : callable
        Makes the rest of the call, and returns what it gives.
    abandon : callable
        Ends a call whose results nobody wants.
    """

    __slots__ = ("_abandon", "_open", "_resume", "ready")

    def __init__(
        self, ready: Callable[[], bool], resume: Callable[[], Any], abandon: Callable[[], None]
    ) -> None:
        self.ready, self._resume, self._abandon, self._open = ready, resume, abandon, True

    def resume(self) -> Any:
        """Make the rest of the call, and return what it gives."""
        self._open = False
        return self._resume()

    def abandon(self) -> None:
        """End the call without it."""
        if self._open:
            self._open = False
            self._abandon()

    def __del__(self) -> None:
        """End what nobody has ended: a device may still write what the call has."""
        if sys is not None and not sys.is_finalizing():
            self.abandon()


class Task:
    """One call that a thread is to make, and what came of it.

    Parameters
    ----------
    run : callable
        Makes the call; let go of as soon as it has been made. If it returns a :class:`Parked` call, the task
        is not done: it is executed once more for the rest.
    text : str
        What it is, for reports.
    backend : Backend
        The back end that it is made on.
    """

    def __init__(self, run: Callable[[], Any], text: str, backend: Backend) -> None:
        self.text = text
        self.backend: Backend | None = backend
        self.result: Any = None
        self.error: BaseException | None = None
        self.seen = False  # the error has been raised, or reported
        self.done = threading.Event()
        self.ready: Callable[[], bool] = lambda: True  # whether executing it waits for no device
        self._run: Callable[[], Any] | None = run

    def execute(self) -> None:
        """Make the call and keep its result or error; or one of its parts."""
        run, self._run = self._run, None
        assert run is not None
        try:
            result = run()
        except BaseException as error:
            self.error = error
        else:
            if isinstance(result, Parked):
                self.ready, self._run = result.ready, result.resume
                return
            self.result = result
        self.backend = None
        self.done.set()
        del self, run  # the traceback refers to this frame

    def outcome(self) -> Any:
        """Return the result, or raise the error, each time it is asked for."""
        self.seen = True
        try:
            if self.error is not None:
                raise self.error
            return self.result
        finally:
            del self  # the traceback refers to this frame

    def report(self) -> str | None:
        """Return what to say of an error that nobody has seen; once."""
        if self.error is None or self.seen:
            return None
        self.seen = True
        kind = type(self.error).__name__
        return f"{self.text} failed, and nobody has waited for it: {kind}: {self.error}"

    def __del__(self) -> None:
        if sys is None or sys.is_finalizing():
            return
        text = self.report()
        if text is not None:
            warnings.warn(text, RuntimeWarning, stacklevel=1)


class Work:
    """A collective call that is on its way; made by :func:`gccomm.compressed_allreduce_async`.

    Its arrays are kept alive and must not be changed, nor ``out`` be looked at, before :meth:`wait` has
    returned. A handle may be dropped: the call is completed all the same, and if it fails, that is reported
    by a RuntimeWarning.

    A call on arrays of a device whose words stay there is complete when all of it is enqueued; with checked
    headroom, when the host has seen which spans failed, and these were sent again.
    """

    def __init__(self, task: Task, worker: Worker | None, deliver: Callable[[Done], Any], rank: int) -> None:
        self._task, self._worker, self._deliver, self._rank = task, worker, deliver, rank

    def wait(self, timeout: float | None = None) -> Any:
        """Return the result, once the call is complete; a second time the same object.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait at most. Without it as long as a blocking call waits (``GCCOMM_TIMEOUT_S``).

        Raises
        ------
        CollectiveTimeout
            The call is still on its way after ``timeout``: nothing has happened, wait again later. Or a rank
            has not come within ``GCCOMM_TIMEOUT_S``: the communicator is broken.
        Exception
            What the blocking call would have raised, on every rank the same.
        """
        limit = seconds(timeout)
        task = self._task
        if not task.done.is_set() and self._worker is not None:
            self._worker.wait(task, limit)
        if not task.done.is_set():
            msg = (
                f"rank {self._rank}: {task.text} is still on its way after {limit:g} s; wait again, or look "
                "with test()"
            )
            raise CollectiveTimeout(msg)
        try:
            return self._deliver(task.outcome())
        finally:
            del self, task  # the traceback refers to this frame

    def test(self) -> bool:
        """Return whether the call is complete: :meth:`wait` does not block then."""
        if self._task.done.is_set():
            return True
        time.sleep(0)  # a loop of tests must not keep the interpreter from the thread that works
        return self._task.done.is_set()

    def __repr__(self) -> str:
        task = self._task
        state = "on its way" if not task.done.is_set() else "failed" if task.error is not None else "complete"
        return f"<gccomm.Work {task.text}, rank {self._rank}, {state}>"


def seconds(timeout: float | None) -> float | None:
    """Return a time limit as a float, None for none; TypeError or ValueError where it is none."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not hasattr(timeout, "__float__"):
        msg = f"`timeout` must be None or a number of seconds, got {timeout!r} of {type(timeout).__name__}"
        raise TypeError(msg)
    limit = float(timeout)
    if not limit >= 0:
        msg = f"`timeout` must be None or a number of seconds, 0 or more, got {timeout!r}"
        raise ValueError(msg)
    return limit


def snapshot(tree: Any) -> Any:
    """Return the tree with containers of its own and the same leaves: the caller may change his.

    What cannot be taken apart is returned as it is; the call itself then tells every rank.
    """
    try:
        _, leaves, treedef = trees.flatten(tree)
        return trees.unflatten(treedef, leaves)
    except Exception:  # whatever the caller's objects raise
        return tree
