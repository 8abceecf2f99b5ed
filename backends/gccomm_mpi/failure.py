"""What happens to the job when a rank fails: nobody may wait for ever."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn

from mpi4py import MPI

__all__ = ["abandon", "abort_job", "guard"]

_pending: list[Any] = []
_guarded = False


def abandon(held: Any) -> None:
    """Keep what a pending operation may still touch alive until the process ends."""
    _pending.append(held)


def abort_job(reason: str, status: int = 1) -> NoReturn:
    """Print `reason` with the rank to stderr and end all processes of the job with exit status `status`."""
    world = MPI.COMM_WORLD
    try:
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not stop this
        with suppress(Exception):  # streams may be closed or gone; the job ends all the same
            sys.stdout.flush()
        with suppress(Exception):
            text = f"gccomm: rank {world.rank} of {world.size} aborts the job: {reason}"
            print(text, file=sys.stderr, flush=True)
        time.sleep(0.2)  # launchers drop what they have not read from a rank's pipe when it aborts
    finally:
        world.Abort(status)
    os._exit(status)


def guard() -> None:
    """Make an uncaught exception, and an exit with an operation pending, end the job; once per process."""
    global _guarded  # noqa: PLW0603
    pid = os.getpid()
    if _guarded or MPI.COMM_WORLD.size == 1:
        return
    _guarded = True
    atexit.register(_at_exit, pid)
    if os.environ.get("GCCOMM_ABORT_ON_EXCEPTION", "1").lower() in ("0", "no", "off", "false"):
        return
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        interactive = hasattr(sys, "ps1") or sys.flags.interactive
        if not interactive and os.getpid() == pid and not MPI.Is_finalized():  # a forked child is no rank
            abort_job(f"uncaught {kind.__name__}", 130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = hook


def _at_exit(pid: int) -> None:
    # MPI_Finalize would wait for the ranks that this one has given up.
    if _pending and os.getpid() == pid and not MPI.Is_finalized():
        abort_job("it ends after a collective operation that has failed or timed out")
