"""A thread that looks after what is on its way on a device, where nobody waits for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from gccomm.backends import Patience, Wait
from gccomm.errors import BackendError

__all__ = ["Flight", "Watchdog"]

PERIOD_S, IDLE_S = 0.02, 0.5


class Flight:
    """An operation on its way, and what must stay alive meanwhile.

    Parameters
    ----------
    name : str
        For reports.
    before, after : Event
        The one it waits for, and the one behind it.
    keep : object
        Arrays, and whatever else they need.
    """

    __slots__ = ("after", "before", "keep", "name", "wait")

    def __init__(self, name: str, before: Any, after: Any, keep: Any) -> None:
        self.name, self.before, self.after, self.keep = name, before, after, keep
        self.wait: Wait | None = None  # begins when nothing but the other ranks is waited for


class Watchdog:
    """Lets go of what is complete; reports stalls; ends what takes too long, or has failed, by `fail`.

    Parameters
    ----------
    patience : Patience
        The rules.
    done : callable
        From an event to whether it has come; raises BackendError where the device has failed.
    failure : callable
        What has failed meanwhile, as text, or None; called in the watchdog's thread.
    fail : callable
        Takes the error that ends everything.
    within : callable
        Returns the context that its thread is in.
    """

    def __init__(
        self,
        patience: Patience,
        done: Callable[[Any], bool],
        failure: Callable[[], str | None],
        fail: Callable[[BaseException], None],
        within: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._patience, self._done, self._failure, self._fail = patience, done, failure, fail
        self._within = within
        self._flights: deque[Flight] = deque()
        self._call: Wait | None = None  # of the thread that is within NCCL
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._over = False

    def watch(self, flight: Flight) -> None:
        """Take an operation that has been enqueued, behind all before it."""
        self._flights.append(flight)
        self._wake()

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Watch a call that only enqueues, and should not block."""
        self._call = self._patience.begin(name)
        self._wake()
        try:
            yield
        finally:
            self._call = None

    def _wake(self) -> None:
        if self._thread is None:
            self.start()
        elif len(self._flights) <= 1:
            with self._changed:
                self._changed.notify()

    def start(self) -> None:
        """Start the thread."""
        with self._changed:
            if self._thread is None and not self._over:
                self._thread = threading.Thread(target=self._run, name="gccomm NCCL watchdog", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it, unless it is this one; forget what was watched."""
        with self._changed:
            self._over = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._flights.clear()

    def clear_done(self) -> None:
        """Let go of what is complete."""
        flights = self._flights
        while flights and self._done(flights[0].after):
            flights.popleft()

    @property
    def on_their_way(self) -> int:
        """How many operations are not known to be complete."""
        return len(self._flights)

    def _run(self) -> None:
        with self._within():
            self._loop()

    def _loop(self) -> None:
        while True:
            with self._changed:
                if not self._over:
                    busy = self._flights or self._call is not None
                    self._changed.wait(PERIOD_S if busy else IDLE_S)
                if self._over:
                    return
            try:
                self.look()
            except BaseException as error:
                self._fail(error)
                return

    def look(self) -> None:
        """Look once; raises what ends everything."""
        failure = self._failure()
        if failure is not None:
            raise BackendError(failure)
        self.clear_done()
        call, flight = self._call, self._flights[0] if self._flights else None
        if call is not None:
            call.check()
        if flight is None:
            return
        if flight.wait is None and self._done(flight.before):
            flight.wait = self._patience.begin(flight.name)
        if flight.wait is not None:
            flight.wait.check()
