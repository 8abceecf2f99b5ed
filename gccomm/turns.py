"""Whose turn it is: one thread makes calls on a group of ranks at a time."""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import Any

from gccomm.errors import BackendError
from gccomm.thread import Worker

__all__ = ["Exclusive", "Turn"]


class Turn:
    """Context of what one thread does at a time; a call from within a call is refused.

    Parameters
    ----------
    rank : int
        For the error.
    lock : RLock
        Of all communicators on the group.
    shared : dict
        What those have in common: "worker", the thread of asynchronous calls, and "busy", whether a call is
        on its way.
    pid : int
        The process that made the communicator.
    """

    __slots__ = ("_lock", "_pid", "_rank", "_shared")

    def __init__(self, rank: int, lock: threading.RLock, shared: dict[str, Any], pid: int) -> None:
        self._rank, self._lock, self._shared, self._pid = rank, lock, shared, pid

    def __enter__(self) -> None:
        if os.getpid() != self._pid:
            msg = (
                f"process {os.getpid()} was forked from {self._pid} after gccomm.init(): it is no rank; "
                "start workers before gccomm.init(), or with the spawn method"
            )
            raise BackendError(msg)
        self.refuse_worker()
        self._lock.acquire()
        if self._shared.get("busy"):
            self._lock.release()
            raise self._within()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def refuse_worker(self) -> None:
        """Raise BackendError in the thread of asynchronous calls."""
        worker: Worker | None = self._shared.get("worker")
        if worker is not None and worker.is_current():
            raise self._within()

    def drain(self) -> None:
        """Wait until all asynchronous calls are complete on this rank; not collective."""
        worker: Worker | None = self._shared.get("worker")
        if worker is not None and not worker.is_current():
            worker.drain()

    def _within(self) -> BackendError:
        msg = (
            f"rank {self._rank}: a collective was called from within another one, by a signal handler "
            "or a finalizer; note the event there, and make the call in the program's own course"
        )
        return BackendError(msg)


class Exclusive:
    """Context of a blocking call: a turn that begins when asynchronous calls before it are complete."""

    __slots__ = ("_shared", "_turn")

    def __init__(self, turn: Turn, shared: dict[str, Any]) -> None:
        self._turn, self._shared = turn, shared

    def __enter__(self) -> None:
        self._turn.__enter__()
        self._shared["busy"] = True
        try:
            self._turn.drain()
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shared["busy"] = False
        self._turn.__exit__(kind, error, trace)
