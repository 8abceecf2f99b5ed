"""A group of threads in one process, or a world of one."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gccomm.backends import Activity, Backend, Bytes, FloatName, Patience, Words
from gccomm.errors import BackendError
from gccomm.operations import PROVIDED, check_operation, fold_all
from gccomm.steps import Fold
from gccomm_local.meeting import Family, Meeting
from gccomm_local.reduction import combine, combine_each

__all__ = ["LocalBackend", "connect", "group"]


class LocalBackend:
    """One thread of a group; see `gccomm.backends.Backend` for the operations.

    Sums are exact on words, and in rank order on floats. `abort` breaks this group and all groups that come
    from the same `group` call. Use each object from one thread at a time.
    """

    name = "local"
    one_host = True
    operations = PROVIDED

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank = rank
        self.local_rank = rank
        self.size = meeting.size
        self.interrupt_deadline: float | None = None
        self.shared: dict[str, Any] = {}
        self._meeting = meeting
        self._patience = Patience(rank, meeting.size)
        self._closed = False

    @property
    def broken(self) -> str | None:
        """Why the group cannot be used any more; None where it can."""
        return self._meeting.family.broken

    def maximum(self, words: Words, /) -> None:
        """Replace each word by its maximum over the ranks, as unsigned numbers."""
        self._reduce_words("max", f"maximum of {words.size} words", words)

    def sum_words(self, words: Words, /) -> None:
        """Replace each word by its sum over the ranks, mod 2^32."""
        self._reduce_words("sum", f"sum of {words.size} words", words)

    def _reduce_words(self, kind: Literal["max", "sum"], topic: str, words: Words) -> None:
        # Calls that differ must meet, as they do over MPI: what they bring then tells each that they differ.
        self._meet(topic, (kind, words), _reduce_each, match=f"reduction of {words.size} words")

    def sum_floats(self, send: npt.NDArray[Any], recv: npt.NDArray[Any], dtype: FloatName, /) -> None:
        """Write the sum of `send` over the ranks, in rank order, to `recv`."""
        if recv is not send:
            np.copyto(recv, send)
        self._meet(f"sum of {recv.size} {dtype}", recv, lambda arrays: combine("float", arrays, dtype=dtype))

    def combine_words(self, words: Words, operation: str, seed: int, /) -> None:
        """Reduce the words over the ranks by an operation of gccomm's own, in the order it documents."""
        check_operation(operation, seed)

        def work(arrays: list[Words]) -> None:
            combine("own", arrays, operation=operation, seed=seed)

        self._meet(f"reduction `{operation}` of {words.size} words, seed {seed}", words, work)

    def fold_words(self, step: Fold, sent: Words, folded: Words, /) -> None:
        """Encode, fold over the ranks, and decode; `sent` and `folded` are memory for the words."""
        step.encode(0, step.blocks, sent)
        self._meet(f"fold of {sent.size} words", (step, sent, folded), _fold_all)
        step.decode(0, step.blocks, folded)

    def broadcast(self, buffer: Bytes, root: int, /) -> None:
        """Overwrite `buffer` with that of rank `root`."""
        if not 0 <= root < self.size:
            message = f"`root` must be a rank from 0 to {self.size - 1}; got {root}"
            raise ValueError(message)

        def work(buffers: list[Bytes]) -> None:
            for rank, other in enumerate(buffers):
                if rank != root:
                    np.copyto(other, buffers[root])

        self._meet(f"broadcast of {buffer.size} bytes from rank {root}", buffer, work)

    def split(self, color: int | None, key: int, /) -> Backend | None:
        """Make one group of threads per color, ranks ordered by (key, rank); None gives None."""
        if color is not None and color < 0:
            message = f"`color` must be None or at least 0; got {color}"
            raise ValueError(message)
        groups: list[LocalBackend | None] = self._meet("split", (color, key), self._make_groups)
        return groups[self.rank]

    def _make_groups(self, choices: list[tuple[int | None, int]]) -> list[LocalBackend | None]:
        members: dict[int, list[int]] = {}
        for rank in sorted(range(self.size), key=lambda rank: (choices[rank][1], rank)):
            color = choices[rank][0]
            if color is not None:
                members.setdefault(color, []).append(rank)
        made: list[LocalBackend | None] = [None] * self.size
        for ranks in members.values():
            for rank, backend in zip(ranks, _group(len(ranks), self._meeting.family), strict=True):
                made[rank] = backend
        return made

    def close(self) -> None:
        """Release this handle once all ranks have come; a broken group is left without waiting."""
        if self._closed:
            return
        if self._meeting.family.broken is None:
            self._meet("close", None, lambda _: None)
        self._closed = True

    def abort(self, reason: str, /) -> None:
        """Break the group: every rank that waits, or calls later, raises `BackendError`. Not collective."""
        self._meeting.family.break_up(f"rank {self.rank} aborted: {reason}")

    def set_activity(self, activity: Activity, /) -> None:
        """Say what a stall report calls the present work."""
        self._patience.activity = activity

    def _meet(self, topic: str, brings: Any, work: Any, match: str | None = None) -> Any:
        if self._closed:
            message = f"{topic}: this communicator is closed"
            raise BackendError(message)
        wait = self._patience.begin(topic)
        return self._meeting.meet(self.rank, topic, brings, work, wait, self._deadline, match)

    def _deadline(self) -> float | None:
        return self.interrupt_deadline


def _reduce_each(brought: list[tuple[Literal["max", "sum"], Words]]) -> None:
    kinds, arrays = [kind for kind, _ in brought], [words for _, words in brought]
    if len(set(kinds)) == 1:
        combine(kinds[0], arrays)
    else:
        combine_each(kinds, arrays)


def _fold_all(brought: list[tuple[Fold, Words, Words]]) -> None:
    steps, sent, folded = zip(*brought, strict=True)
    fold_all(steps, sent, folded)


def _group(size: int, family: Family) -> list[LocalBackend]:
    meeting = Meeting(size, family)
    return [LocalBackend(meeting, rank) for rank in range(size)]


def group(size: int) -> list[LocalBackend]:
    """Return the back ends of `size` threads, one for each.

    Raises
    ------
    ValueError
        `size` is below 1.
    """
    if size < 1:
        message = f"`size` must be at least 1; got {size}"
        raise ValueError(message)
    return _group(size, Family())


def connect(comm: object = None, *, hierarchical: bool | None = None) -> LocalBackend:
    """Return a world of one, in which there is no hierarchy of hosts.

    Raises
    ------
    TypeError
        `comm` is given: this back end stands on no communicator.
    """
    del hierarchical
    if comm is not None:
        message = f"the back end `local` takes no `comm`; got {type(comm).__name__}"
        raise TypeError(message)
    return group(1)[0]
