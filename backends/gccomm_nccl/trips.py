"""Words of a device on their way between hosts: through pinned memory, in chunks, while others go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from gccomm_nccl.channel import Channel

__all__ = ["CHUNK_BYTES", "Column", "Trip", "Trips"]

CHUNK_BYTES = 1 << 20  # copied at a time, while the one before is between hosts; equal on all ranks

Array = npt.NDArray[Any]
Call = Callable[[int], None]  # enqueues something on a stream


class Column(Protocol):
    """Reductions of host memory over the ranks at one place of all hosts."""

    def begin(self, kind: str, words: Array, /) -> Any:
        """Begin to reduce an array in place; None: it is complete."""
        ...

    def end(self, handle: Any, /) -> None:
        """Complete one that was begun."""
        ...


class Trip(NamedTuple):
    """Memory of a device that is reduced between hosts.

    Attributes
    ----------
    name : str
        For reports.
    stream : int
        Where it comes from; what follows there comes after the trip.
    address : int
        Of what this rank reduces between hosts.
    words : array
        That, on the host.
    flights : list of (array, handle)
        The parts of it, and their reductions on their way.
    after : callable
        Enqueues what the host's ranks do with the results.
    keep : object
        What must stay alive.
    """

    name: str
    stream: int
    address: int
    words: Array
    flights: list[tuple[Array, Any]]
    after: Call
    keep: Any


class Trips:
    """What is copied and reduced between hosts, on the stream of a channel.

    Parameters
    ----------
    channel : Channel
        Of a host's ranks.
    column : Column
        Between hosts.
    """

    def __init__(self, channel: Channel, column: Column) -> None:
        self._channel, self._column = channel, column

    def pinned(self, count: int, dtype: Any) -> Array:
        """Return memory of the host that the device copies from and to at full speed."""
        nbytes = count * np.dtype(dtype).itemsize
        with self._channel.device:
            memory = self._channel.cupy.cuda.alloc_pinned_memory(max(nbytes, 1))
        return np.frombuffer(memory, np.uint8, nbytes).view(dtype)

    def download(self, words: Array, address: int, stream: int) -> None:
        """Enqueue a copy to the host."""
        runtime = self._channel.runtime
        runtime.memcpyAsync(words.ctypes.data, address, words.nbytes, runtime.memcpyDeviceToHost, stream)

    def upload(self, address: int, words: Array, stream: int) -> None:
        """Enqueue a copy to the device."""
        runtime = self._channel.runtime
        runtime.memcpyAsync(address, words.ctypes.data, words.nbytes, runtime.memcpyHostToDevice, stream)

    def begin(
        self, name: str, kind: str, stream: int, part: tuple[int, Array], calls: tuple[Call, Call], keep: Any
    ) -> Trip:
        """Begin a reduction between hosts, in which some of a device's memory is this rank's.

        Parameters
        ----------
        name, kind : str
            For reports; "maximum", "words" or a float format.
        stream : int
            Whose memory it is.
        part : tuple of (int, array)
            Address of this rank's words, and pinned memory for them.
        calls : tuple of callables
            What the host's ranks do before and after, enqueued on the stream that they get.
        keep : object
            What must stay alive meanwhile.
        """
        channel, (address, words) = self._channel, part
        before, after = calls
        item, step = words.itemsize, CHUNK_BYTES // words.itemsize
        chunks = [words[lo : lo + step] for lo in range(0, words.size, step)]
        events: list[Any] = []

        def call(own: int) -> None:
            before(own)
            for place, chunk in enumerate(chunks):
                self.download(chunk, address + place * step * item, own)
                events.append(channel.event(own))

        flights: list[tuple[Array, Any]] = []
        channel.launch(name, stream, (keep, words), call)
        for chunk, event in zip(chunks, events, strict=True):
            channel.wait(event, name)
            flights.append((chunk, self._column.begin(kind, chunk)))
        return Trip(name, stream, address, words, flights, after, keep)

    def end(self, trip: Trip) -> None:
        """Complete it: what follows on its stream comes after the results."""
        channel, at = self._channel, trip.address
        for chunk, flight in trip.flights:
            if flight is not None:
                self._column.end(flight)
            with channel.calling(trip.name):
                self.upload(at, chunk, channel.stream.ptr)
            at += chunk.nbytes
        channel.enqueue(trip.name, trip.stream, (trip.keep, trip.words), trip.after)
