"""Another back end, with NCCL beside it for what lies in the memory of devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gccomm.agreement import MESSAGE_WORDS
from gccomm.backends import Activity
from gccomm.errors import BackendError
from gccomm.steps import Fold
from gccomm_nccl.backend import NcclBackend

__all__ = ["PairBackend", "complete"]


class PairBackend:
    """The ranks of a back end, each with a device.

    Words and floats on devices go by NCCL, those of the host by the other one. But every reduction of host
    words that is as long as the agreement message goes by NCCL, too: so that the first message of every call
    does, wherever its arrays lie, and ranks that call different things meet.

    Parameters
    ----------
    base : Backend
        Of the same ranks.
    nccl : NcclBackend
        Closed with this object, before `base` is.
    """

    first_words = call_bytes = swap_bytes = 0  # of the other one alone, ranks would not meet

    def __init__(self, base: Any, nccl: NcclBackend) -> None:
        self._base, self._nccl = base, nccl
        self.name = f"{base.name}+{nccl.name}"
        self.device, self.takes_device = nccl.device, nccl.takes_device
        self.require_whole, self.oversee = nccl.require_whole, nccl.oversee
        self.watched, self.await_event = nccl.watched, nccl.await_event

    def __getattr__(self, name: str) -> Any:
        """Return what the other back end has."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._base, name)

    @property
    def interrupt_deadline(self) -> float | None:
        """A value of `time.monotonic`: a rank that still waits after it aborts."""
        found: float | None = self._base.interrupt_deadline
        return found

    @interrupt_deadline.setter
    def interrupt_deadline(self, value: float | None) -> None:
        self._base.interrupt_deadline = self._nccl.interrupt_deadline = value

    @property
    def background(self) -> bool:
        """Whether the program computes while this rank waits."""
        return bool(getattr(self._base, "background", False))

    @background.setter
    def background(self, value: bool) -> None:
        self._base.background = self._nccl.background = value

    def _of(self, words: Any) -> Any:
        """Return the back end that reduces words."""
        return self._base if isinstance(words, np.ndarray) and words.size != MESSAGE_WORDS else self._nccl

    def maximum(self, words: Any, /) -> None:
        """Replace each word by its maximum over the ranks, as unsigned numbers."""
        self._of(words).maximum(words)

    def sum_words(self, words: Any, /) -> None:
        """Replace each word by its sum over the ranks, mod 2^32."""
        self._of(words).sum_words(words)

    def sum_into(self, words: Any, out: Any, /) -> None:
        """Write the sum of `words` over the ranks, mod 2^32, to `out`."""
        if self._of(words) is self._base:
            self._base.sum_into(words, out)
        else:
            out[...] = words
            self._nccl.sum_words(out)

    def sum_floats(self, send: Any, recv: Any, dtype: Any, /) -> None:
        """Write the sum of `send` over the ranks to `recv`, in the order of either back end."""
        (self._base if isinstance(recv, np.ndarray) else self._nccl).sum_floats(send, recv, dtype)

    def begin(self, kind: str, send: Any, recv: Any, /) -> tuple[Any, Any] | None:
        """Begin a reduction; None if it is complete already."""
        words = kind in ("maximum", "words")
        found = self._of(recv) if words or not isinstance(recv, np.ndarray) else self._base
        if not hasattr(found, "begin"):
            complete(found, kind, send, recv)
            return None
        handle = found.begin(kind, send, recv)
        return None if handle is None else (found, handle)

    def begin_many(self, parts: Sequence[tuple[str, Any, Any]], /) -> tuple[Any, Any] | None:
        """Begin several reductions in the memory of the device as one group."""
        handle = self._nccl.begin_many(parts)
        return None if handle is None else (self._nccl, handle)

    def begin_fold(self, step: Fold, sent: Any, folded: Any, /) -> tuple[Any, Any] | None:
        """Begin a reduction by a codec's own arithmetic, on the host; None if it is complete already."""
        begin = "begin_fold" if hasattr(self._base, "begin_fold") else "fold_words"
        handle = getattr(self._base, begin)(step, sent, folded)
        return None if handle is None else (self._base, handle)

    def end(self, handle: tuple[Any, Any], /) -> None:
        """Complete a reduction that was begun."""
        handle[0].end(handle[1])

    def close(self) -> None:
        """Release both; where one is broken, so is the other."""
        channel, reason = self._nccl.channel, getattr(self._base, "broken", None)
        if reason is not None:
            channel.fail(BackendError(reason))
        elif channel.broken is not None and hasattr(self._base, "forsake"):
            self._base.forsake(channel.broken)
        self._nccl.close()
        self._base.close()

    def abort(self, reason: str, /) -> None:
        """Make the other ranks fail soon."""
        self._nccl.abort(reason)
        self._base.abort(reason)

    def set_activity(self, activity: Activity, /) -> None:
        """Say what a stall report calls the present work."""
        self._base.set_activity(activity)
        self._nccl.set_activity(activity)


def complete(backend: Any, kind: str, send: Any, recv: Any) -> None:
    """Do a reduction, where there is no beginning and ending it."""
    if kind == "maximum":
        backend.maximum(recv)
    elif kind != "words":
        backend.sum_floats(send, recv, kind)
    elif send is recv:
        backend.sum_words(recv)
    else:
        backend.sum_into(send, recv)
