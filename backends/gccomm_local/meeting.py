"""Where the threads of a group meet: the last to come does the work for all."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gccomm.backends import Wait
from gccomm.errors import BackendError

__all__ = ["Family", "Meeting"]


@dataclass(eq=False)
class Family:
    """What a group shares with all groups split from it: one condition, and the reason it broke if it did."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    broken: str | None = None

    def break_up(self, reason: str) -> None:
        """Make every present and later wait in the family end with `BackendError`; the first reason stays."""
        with self.changed:
            self.broken = self.broken or reason
            self.changed.notify_all()


class Meeting:
    """A reusable meeting point of `size` threads.

    Parameters
    ----------
    size : int
        Number of threads.
    family : Family
        Shared with the groups that come from the same one.
    """

    def __init__(self, size: int, family: Family) -> None:
        self.size = size
        self.family = family
        self._round = 0
        self._brought: dict[int, tuple[str, str, Any]] = {}
        self._result: Any = None

    def meet(
        self,
        rank: int,
        topic: str,
        brings: Any,
        work: Callable[[list[Any]], Any],
        wait: Wait,
        deadline: Callable[[], float | None],
        match: str | None = None,
    ) -> Any:
        """Wait for all ranks; the last to come calls `work` with what they bring, in rank order.

        Parameters
        ----------
        rank : int
            Who comes.
        topic : str
            What this rank is in, for reports.
        brings : object
            Left alone by its owner until all have come.
        work : callable
            Makes the result that every rank gets.
        wait : Wait
            The clock of this rank.
        deadline : callable
            Gives the time at which an interrupted rank gives up, or None.
        match : str, optional
            Must be the same on all ranks; without it `topic` must be.

        Raises
        ------
        BackendError
            The family is or becomes broken, the ranks do not match, or `work` failed.
        CollectiveTimeout
            `wait` ran out.
        """
        with self.family.changed:
            self._require_whole()
            try:
                self._brought[rank] = (topic, match or topic, brings)
                if len(self._brought) == self.size:
                    self._finish(work)
                else:
                    self._await(wait, deadline)
            except BaseException as error:
                # The others count on this rank's array: nobody may go on after it has left.
                self.family.break_up(f"rank {rank} left {topic}: {error or type(error).__name__}")
                raise
            return self._result

    def _require_whole(self) -> None:
        if self.family.broken is not None:
            message = f"this group of threads is broken: {self.family.broken}"
            raise BackendError(message)

    def _finish(self, work: Callable[[list[Any]], Any]) -> None:
        ordered = [self._brought[rank] for rank in range(self.size)]
        if len({match for _, match, _ in ordered}) > 1:
            topics = {rank: topic for rank, (topic, _, _) in enumerate(ordered)}
            message = f"ranks are in different operations: {topics}"
            raise BackendError(message)
        self._brought = {}
        self._result = work([brings for _, _, brings in ordered])
        self._round += 1
        self.family.changed.notify_all()

    def _await(self, wait: Wait, deadline: Callable[[], float | None]) -> None:
        round_ = self._round
        while self._round == round_:
            self._require_whole()
            wait.check()
            now, until = time.monotonic(), deadline()
            if until is not None and now >= until:
                message = "interrupted while the other ranks had not come"
                raise BackendError(message)
            # A deadline may be set by a signal handler at any time, so look at it now and then.
            self.family.changed.wait(max(0.0, min(wait.next_event - now, 0.1)))
