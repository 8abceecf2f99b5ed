"""Another back end, with NCCL within each host: what lies on devices is reduced there first, then between
hosts by the other back end.

Words are reduced over a host's ranks so that each rank has a slice of the sums. Slices go through pinned
memory and, between the ranks at one place of all hosts, by the other back end; the host's ranks collect them.
Where hosts add up floats (`gccomm.hosts`), the rank that speaks gets the sum, and what its words come to is
copied to the others. Unlike with NCCL alone the host waits in every reduction, as it has to send.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gccomm.backends import DeviceBuffer, FloatName
from gccomm_nccl.backend import KINDS, NcclBackend, check_float
from gccomm_nccl.library import BYTES
from gccomm_nccl.pair import PairBackend, complete
from gccomm_nccl.trips import Column, Trip, Trips

__all__ = ["Between", "HostBackend", "slices"]

SLICED_BYTES = 1 << 16  # from here on ranks of a host reduce a slice each; less goes whole, by the host
ALIGN_BYTES = 128  # of the bounds of slices

_NUMPY = {"bfloat16": np.uint16, "float16": np.uint16}


def slices(count: int, item_bytes: int, ranks: int) -> int:
    """Return how many of `count` items each of a host's ranks has; the last one has those that are left."""
    align = ALIGN_BYTES // item_bytes
    return count // ranks // align * align


class HostBackend(PairBackend):
    """The ranks of a back end, each with a device, and NCCL between those of each host.

    Parameters
    ----------
    base : Backend
        Of the same ranks; reduces what lies on the host.
    nccl : NcclBackend
        Of the ranks of this one's host, in the same order. Closed with this object, before `base` is.
    column : Column
        Between the ranks at this one's place of all hosts, which all have as many.
    """

    flows = False
    hosts_on_device = True
    begin_many = None  # type: ignore[assignment]  # NCCL's groups end at the host

    def __init__(self, base: Any, nccl: NcclBackend, column: Column) -> None:
        super().__init__(base, nccl)
        self.name += "-by-host"
        self._channel = nccl.channel
        self._channel.meanwhile = getattr(base, "go_on", self._channel.meanwhile)
        self._trips = Trips(self._channel, column)

    def _of(self, words: Any) -> Any:
        """Return the back end that reduces words of the host."""
        del words
        return self._base

    def maximum(self, words: Any, /) -> None:
        """Replace each word by its maximum over the ranks, as unsigned numbers."""
        self._reduce("maximum", words, words)

    def sum_words(self, words: Any, /) -> None:
        """Replace each word by its sum over the ranks, mod 2^32."""
        self._reduce("words", words, words)

    def sum_floats(self, send: Any, recv: Any, dtype: FloatName, /) -> None:
        """Write the sum of `send` over the ranks to `recv`: within hosts in NCCL's order.

        Raises
        ------
        ValueError
            `dtype` is no float format.
        """
        check_float(dtype)
        self._reduce(dtype, send, recv)

    def _reduce(self, kind: str, send: Any, recv: Any) -> None:
        """Reduce and complete, wherever the memory is."""
        if isinstance(recv, np.ndarray):
            complete(self._base, kind, send, recv)
        elif (handle := self.begin(kind, send, recv)) is not None:
            self.end(handle)

    def begin(self, kind: str, send: Any, recv: Any, /) -> Any:
        """Begin a reduction; None if it is complete already."""
        if isinstance(recv, np.ndarray):
            return super().begin(kind, send, recv)
        self.require_whole()
        if recv.size == 0:
            return None
        dtype, operator = KINDS.get(kind, (kind, "sum"))
        if recv.size * BYTES[dtype] < SLICED_BYTES:
            self._by_host(kind, dtype, send, recv)
            return None
        return self._begin_sliced(kind, dtype, operator, send, recv)

    def end(self, handle: Any, /) -> None:
        """Complete a reduction that was begun."""
        if isinstance(handle, Trip):
            self._trips.end(handle)
        else:
            super().end(handle)

    def _by_host(self, kind: str, dtype: str, send: DeviceBuffer, recv: DeviceBuffer) -> None:
        """Reduce a few words by the other back end."""
        name, channel = f"{kind} of {recv.size}", self._channel
        words = self._trips.pinned(recv.size, _NUMPY.get(dtype, dtype))
        copied = channel.launch(
            name, send.stream, (send, words), lambda own: self._trips.download(words, send.address, own)
        )
        channel.wait(copied[1], name)
        complete(self._base, kind, words, words)
        channel.enqueue(
            name, recv.stream, (recv, words), lambda own: self._trips.upload(recv.address, words, own)
        )

    def _begin_sliced(
        self, kind: str, dtype: str, operator: str, send: DeviceBuffer, recv: DeviceBuffer
    ) -> Trip:
        """Begin to reduce words of which every rank of the host has a slice."""
        comm, library, item = self._channel.comm, self._channel.library, BYTES[dtype]
        ranks, place = comm.size, comm.rank
        each = slices(recv.size, item, ranks)
        left = recv.size - each * ranks  # the last rank's, too
        mine, rest = recv.address + place * each * item, each * ranks * item
        words = self._trips.pinned(each + (left if place == ranks - 1 else 0), _NUMPY.get(dtype, dtype))

        def scatter(own: int) -> None:
            with library.group():
                if each:
                    comm.reduce_scatter(send.address, mine, each, dtype, operator, own)
                if left:
                    ends = send.address + rest, recv.address + rest
                    comm.reduce(*ends, left, dtype, operator, ranks - 1, own)

        def gather(own: int) -> None:
            with library.group():
                if each:
                    comm.all_gather(mine, recv.address, each, dtype, own)
                if left:
                    comm.broadcast(recv.address + rest, left * item, ranks - 1, own)

        name = f"{kind} of {recv.size}"
        return self._trips.begin(name, kind, recv.stream, (mine, words), (scatter, gather), (send, recv))

    # Where hosts add up floats

    def host_sum(self, send: Any, recv: Any, dtype: FloatName, place: int, /) -> None:
        """Write the sum of `send` over the ranks of each host to `recv` of the one at a place: of a device in
        NCCL's order.
        """
        if isinstance(send, np.ndarray):
            self._base.host_sum(send, recv, dtype, place)
            return
        check_float(dtype)
        comm, to = self._channel.comm, send.address if recv is None else recv.address
        self.require_whole()
        if send.size:
            self._channel.enqueue(
                f"sum of {send.size} {dtype} of a host",
                send.stream,
                (send, recv),
                lambda own: comm.reduce(send.address, to, send.size, dtype, "sum", place, own),
            )

    def between(self, place: int, /) -> Between:
        """Return the reductions over the hosts in which the ranks at a place speak."""
        return Between(self, self._trips, place)


class Between:
    """Reductions over the hosts of what their ranks at one place hold; every rank gets the results.

    Parameters
    ----------
    backend : HostBackend
        Of all ranks.
    trips : Trips
        Its way between hosts.
    place : int
        Who speaks.
    """

    def __init__(self, backend: HostBackend, trips: Trips, place: int) -> None:
        self._backend, self._trips, self._place = backend, trips, place
        self._base = backend._base.between(place)

    def __getattr__(self, name: str) -> Any:
        """Return what is for memory of the host only."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._base, name)

    def maximum(self, words: Any, /) -> None:
        """Replace each word by its maximum over the speakers."""
        self._reduce("maximum", words, words)

    def sum_words(self, words: Any, /) -> None:
        """Replace each word by its sum over the speakers, mod 2^32."""
        self._reduce("words", words, words)

    def sum_floats(self, send: Any, recv: Any, dtype: FloatName, /) -> None:
        """Write the sum of `send` over the speakers to `recv`."""
        self._reduce(dtype, send, recv)

    def _reduce(self, kind: str, send: Any, recv: Any) -> None:
        if isinstance(recv, np.ndarray):
            complete(self._base, kind, send, recv)
        elif (handle := self.begin(kind, send, recv)) is not None:
            self._backend.end(handle)

    def begin(self, kind: str, send: Any, recv: Any, /) -> Any:
        """Begin a reduction; see `gccomm.backends.Backend`."""
        if isinstance(recv, np.ndarray):
            handle = self._base.begin(kind, send, recv)
            return None if handle is None else (self._backend._base, handle)
        self._backend.require_whole()
        if recv.size == 0:
            return None
        comm, (dtype, _) = self._backend._channel.comm, KINDS.get(kind, (kind, "sum"))
        nbytes, place, name = recv.size * BYTES[dtype], self._place, f"{kind} of {recv.size} between hosts"
        numbers = _NUMPY.get(dtype, dtype)

        def share(own: int) -> None:
            comm.broadcast(recv.address, nbytes, place, own)

        if comm.rank != place:
            return Trip(name, recv.stream, recv.address, np.empty(0, numbers), [], share, recv)
        part = send.address, self._trips.pinned(recv.size, numbers)
        calls = (lambda _own: None), share
        begun = self._trips.begin(name, kind, recv.stream, part, calls, (send, recv))
        return begun._replace(address=recv.address)
