"""Reductions over several hosts: within each host through shared memory, between hosts by one rank of each.

So every byte crosses a host's link once each way, however many ranks the host has. Words come out the same
as without it (:class:`Hierarchy`). Where hosts add up their ranks' floats before these are compressed
(`gccomm.hosts`), ranks of a host speak for it by turns: each has a link of its own to its fellows at the same
place on the other hosts (:class:`Between`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from gccomm.backends import FloatName, Words
from gccomm.operations import check_operation
from gccomm.steps import Fold
from gccomm_mpi.exchange import PIECE_BYTES
from gccomm_mpi.hops import decode_all, fold
from gccomm_mpi.link import Flight
from gccomm_mpi.operators import MAXIMUM, SUM, Operator, sum_of

if TYPE_CHECKING:
    from gccomm_mpi.channel import Channel
    from gccomm_mpi.messages import Messages
    from gccomm_mpi.window import Window

__all__ = ["Between", "Column", "Hierarchy", "Shared"]

Array = npt.NDArray[Any]


class Hierarchy:
    """One host's part in reductions over all hosts.

    Parameters
    ----------
    window : Window or None
        Of this host's ranks; None where there is only one.
    column : Messages or None
        Between the ranks at this one's place on all hosts, where all hosts have one.
    place : int
        Of this rank on its host; the first ranks lead.
    chunk_bytes : int
        What is reduced at once: equal on all ranks, at most a slot of any window.
    go_on : callable
        Lets reductions on their way go on.
    """

    def __init__(
        self,
        window: Window | None,
        column: Messages | None,
        place: int,
        chunk_bytes: int,
        go_on: Callable[[], None],
    ) -> None:
        self._go_on = go_on
        self.window, self.column, self.place, self._chunk = window, column, place, chunk_bytes

    @property
    def leaders(self) -> Messages | None:
        """Between the hosts' first ranks, on each of these."""
        return self.column if self.place == 0 else None

    def reduce(self, name: str, send: Array, recv: Array, operator: Operator) -> None:
        """Reduce `send` over all ranks into `recv`.

        Ranks may hold different numbers of elements where no array is large (`gccomm_mpi.small`): of those
        that not all have, nothing is known then.
        """
        in_place = send is recv
        send, recv = send.reshape(-1), recv.reshape(-1)
        step = self._chunk // recv.itemsize
        for low in range(0, recv.size, step):
            target = recv[low : low + step]
            source = target if in_place else send[low : low + step]  # MPI must see that they are one
            self._chunk_of(name, source, target, operator)

    def begin(self, name: str, send: Array, recv: Array, operator: Operator) -> Shared:
        """Begin to reduce flat arrays: a host's sum is on its way to others when its ranks have added up.

        Ranks of a host must begin and end the same reductions in the same order.
        """
        part, flight = send, None
        if self.window is not None:
            part, step = recv, self._chunk // recv.itemsize
            for low in range(0, recv.size, step):
                own = send[low : low + step]
                self.window.collect(name, own, recv[low : low + step], operator.kind)
        if self.leaders is not None:
            flight = self.leaders.begin(name, part, recv, operator)
        return Shared(name, flight, recv, 0)

    def _chunk_of(self, name: str, send: Array, recv: Array, operator: Operator) -> None:
        part = send
        if self.window is not None:
            self.window.collect(name, send, recv, operator.kind)
            part = recv
        if self.leaders is not None:
            self.leaders.reduce(name, part, recv, operator)
        if self.window is not None:
            self.window.spread(name, recv)

    def gather(self, name: str, send: Array, recv: Array | None, kind: str, place: int) -> None:
        """Sum floats over the host's ranks, in their order, into `recv` of the one at a place."""
        send = send.reshape(-1)
        if self.window is None:
            assert recv is not None
            recv.reshape(-1)[...] = send
            return
        step = self.window.chunk_bytes // send.itemsize
        for low in range(0, send.size, step):
            part = slice(low, low + step)
            self.window.collect(name, send[part], None if recv is None else recv[part], kind, place)
            self._go_on()

    def share(self, name: str, data: Array, place: int) -> None:
        """Overwrite `data` with that of the rank at a place."""
        if self.window is None:
            return
        step = self._chunk // data.itemsize
        for low in range(0, data.size, step):
            self.window.spread(name, data[low : low + step], place)


@dataclass(frozen=True, eq=False, slots=True)
class Shared:
    """A reduction between hosts on its way: its flight on a rank that speaks, and where its result goes."""

    name: str
    flight: Flight | None
    recv: Array
    place: int


class Between:
    """Reductions over the hosts of what their ranks at one place hold; every rank gets the results.

    Parameters
    ----------
    channel : Channel
        Of a hierarchy.
    place : int
        Who speaks.
    """

    def __init__(self, channel: Channel, place: int) -> None:
        assert channel.hierarchy is not None
        self._channel, self._place = channel, place
        self._hierarchy = channel.hierarchy
        self._column = channel.hierarchy.column if channel.hierarchy.place == place else None

    def maximum(self, words: Words, /) -> None:
        """Replace each word by its maximum over the speakers."""
        self._reduce("maximum", words, words, MAXIMUM)

    def sum_words(self, words: Words, /) -> None:
        """Replace each word by its sum over the speakers, mod 2^32."""
        self._reduce("sum", words, words, SUM)

    def sum_into(self, words: Words, out: Words, /) -> None:
        """Write the sum of `words` over the speakers to `out`."""
        self._reduce("sum", words, out, SUM)

    def sum_floats(self, send: Array, recv: Array, dtype: FloatName, /) -> None:
        """Write the sum of `send` over the speakers to `recv`."""
        self._reduce(f"{dtype} sum", send, recv, sum_of(dtype))

    def combine_words(self, words: Words, operation: str, seed: int, /) -> None:
        """Reduce the speakers' words by an operation of gccomm's own, hosts in their order."""
        check_operation(operation, seed)
        name = f"reduction `{operation}`"
        with self._channel.operation(name, words):
            if self._column is not None:
                self._column.combine(name, operation, seed, words)
            self._hierarchy.share(name, words.reshape(-1), self._place)

    def fold_words(self, step: Fold, sent: Words, folded: Words, /) -> None:
        """Encode and fold over the speakers; decode on all ranks."""
        with self._channel.operation("fold", (sent, folded)):
            if self._column is not None:
                moves = fold(self._column.link, step, sent, folded)  # in segments that the others know
                self._channel.land(self._channel.launch("fold", moves, (sent, folded)))
            self._hierarchy.share("fold", folded, self._place)
            if self._column is None:
                assert self._channel.hosts is not None
                decode_all(step, self._channel.hosts.number, folded)

    def begin(self, kind: str, send: Array, recv: Array, /) -> Shared:
        """Begin a reduction; see `gccomm.backends.Backend`."""
        name, flight, flat = f"{kind} between hosts", None, recv.reshape(-1)
        with self._channel.operation(name, (send, recv)):
            if self._column is not None:
                flight = _begin(self._column, name, kind, flat if send is recv else send.reshape(-1), flat)
        return Shared(name, flight, flat, self._place)

    def _reduce(self, name: str, send: Array, recv: Array, operator: Operator) -> None:
        with self._channel.operation(name, (send, recv)):
            if self._column is not None:
                self._column.reduce(name, send, recv, operator)
            self._hierarchy.share(name, recv.reshape(-1), self._place)


def _begin(column: Messages, name: str, kind: str, send: Array, recv: Array) -> Flight | None:
    """Begin a reduction over a column; None: it is complete."""
    operator = {"maximum": MAXIMUM, "words": SUM}.get(kind) or sum_of(kind)  # type: ignore[arg-type]
    if recv.size == 0:
        return None
    if recv.nbytes <= PIECE_BYTES and recv.size <= column.max_count:
        return column.begin(name, send, recv, operator)
    column.reduce(name, send, recv, operator)
    return None


class Column:
    """Reductions over the ranks at one place of all hosts, each of which has something of its own.

    Parameters
    ----------
    channel : Channel
        Of all ranks.
    messages : Messages
        Between those.
    """

    def __init__(self, channel: Channel, messages: Messages) -> None:
        self._channel, self._messages = channel, messages

    def begin(self, kind: str, words: Array, /) -> Flight | None:
        """Begin to reduce an array in place: "maximum", "words" or a float format; None: it is complete."""
        name = f"{kind} between hosts"
        with self._channel.operation(name, words):
            return _begin(self._messages, name, kind, words, words)

    def end(self, flight: Flight, /) -> None:
        """Complete a reduction that was begun."""
        with self._channel.operation(flight.name, flight.buffers):
            self._channel.land(flight)
