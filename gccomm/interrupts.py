"""Hold Ctrl-C back while a collective is in flight.

A rank that left between agreement and sum would hand its peers wrong sums or leave them waiting. A signal
mask does not do: MPI libraries and launchers keep their own. So a Python handler notes the signal, the step
runs to its end, and only then the previous handler sees it. If the step does not end within ``HOLD_S``
seconds (a peer is gone), the back end aborts the job.
"""

from __future__ import annotations

# What signal itself calls; signal's own functions look each handler up among enum members, which takes longer
# than the rest of this.
import _signal  # type: ignore[import-not-found]
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from gccomm.backends import Backend

__all__ = ["HOLD_S", "HoldInterrupts"]

HOLD_S = 5.0


class HoldInterrupts:
    """Context manager; does nothing outside the main thread, where Python delivers no signals."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._previous: Any = None
        self._active = False
        self._caught = False

    def __enter__(self) -> HoldInterrupts:
        if threading.current_thread() is threading.main_thread():
            self._previous = _signal.getsignal(_signal.SIGINT)
            if callable(self._previous):  # not SIG_IGN, SIG_DFL or a handler that is not Python's
                _signal.signal(_signal.SIGINT, self._note)
                self._active = True
        return self

    def _note(self, signum: int, frame: FrameType | None) -> None:
        del signum, frame
        self._caught = True
        if self._active and self._backend.interrupt_deadline is None:
            self._backend.interrupt_deadline = time.monotonic() + HOLD_S

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._active:
            return
        self._active = False  # from here on a signal sets no deadline
        self._backend.interrupt_deadline = None
        _signal.signal(_signal.SIGINT, self._previous)
        if self._caught:
            signal.raise_signal(signal.SIGINT)
