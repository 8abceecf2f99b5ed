"""The operations of a group of processes with a CUDA device each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gccomm.agreement import digest
from gccomm.backends import Activity, Backend, Bytes, DeviceBuffer, FloatName, OnChannel, Words
from gccomm.errors import BackendError
from gccomm.operations import check_operation
from gccomm.steps import Fold
from gccomm_nccl.channel import Channel
from gccomm_nccl.library import BYTES
from gccomm_nccl.staging import Staging

__all__ = ["KINDS", "NcclBackend", "check_float"]

Array = npt.NDArray[Any]
KINDS = {"maximum": ("uint32", "max"), "words": ("uint32", "sum")}


class NcclBackend(OnChannel):
    """A handle on a channel; see `gccomm.backends.Backend` for the operations.

    Of host memory they return when they are complete, of device memory when they are enqueued: what follows
    on the buffer's stream comes after them, and `GCCOMM_TIMEOUT_S` is kept by a thread. NCCL has no
    operations of one's own, so there is none.
    """

    name = "nccl"
    one_host = False  # no rank reads another's memory
    operations: frozenset[str] = frozenset()
    _channel: Channel

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._closed = False
        channel.users += 1
        self.rank, self.size, self.local_rank = channel.comm.rank, channel.comm.size, channel.local_rank
        self._staging = Staging(channel)

    @property
    def channel(self) -> Channel:
        """The communicator, its stream and what is on its way."""
        return self._channel

    @property
    def device(self) -> str:
        """The device of this rank, such as "cuda:0"."""
        return f"cuda:{self._channel.comm.device}"

    def takes_device(self, device: str) -> bool:
        """Return whether `maximum`, `sum_words` and `sum_floats` take `DeviceBuffer` objects of a device."""
        return device == self.device

    def require_whole(self) -> None:
        """Raise what has broken the communicator, if anything has."""
        self._channel.require_whole("a call on a device")

    def oversee(self, look: Callable[[], BaseException | None], doom: Callable[[], None]) -> None:
        """Have the watchdog look for an error that others know of, and call `doom` before it aborts."""
        self._channel.looks.append(look)
        self._channel.dooms.append(doom)

    def watched(self, name: str, wait: Callable[[], None]) -> None:
        """Wait for the device by a function, within `GCCOMM_TIMEOUT_S`, which the watchdog keeps."""
        with self._open(name).calling(name):
            wait()

    def await_event(self, event: Any) -> None:
        """Let the host wait for an event of this device, which may come after reductions that were begun.

        Unlike CUDA's own waits, this one ends after Ctrl-C.
        """
        self._channel.wait(event, "a wait for the device", overseen=True)

    def begin(self, kind: str, send: Any, recv: Any, /) -> tuple[int, Any] | None:
        """Begin a reduction, "maximum", "words" or a float format; None: of host memory, it is complete."""
        dtype, operator = KINDS.get(kind, (kind, "sum"))
        name = f"{kind} of {recv.size}"
        if isinstance(recv, np.ndarray) or recv.size == 0:
            self._reduce(name, send, recv, dtype, operator)
            return None
        return self._open(name).launch(
            name, recv.stream, (send, recv), self._call(send, recv, dtype, operator)
        )

    def end(self, handle: tuple[int, Any], /) -> None:
        """Let what follows on the stream come after what was begun."""
        self._channel.join(handle)

    def maximum(self, words: Words | DeviceBuffer, /) -> None:
        """Replace each word by its maximum over the ranks, as unsigned numbers."""
        self._reduce(f"maximum of {words.size} words", words, words, "uint32", "max")

    def sum_words(self, words: Words | DeviceBuffer, /) -> None:
        """Replace each word by its sum over the ranks, mod 2^32."""
        self._reduce(f"sum of {words.size} words", words, words, "uint32", "sum")

    def sum_floats(self, send: Array | DeviceBuffer, recv: Array | DeviceBuffer, dtype: FloatName, /) -> None:
        """Write the sum of `send` over the ranks to `recv`; its order is NCCL's own.

        Raises
        ------
        ValueError
            `dtype` is no float format.
        """
        check_float(dtype)
        self._reduce(f"sum of {recv.size} {dtype}", send, recv, dtype, "sum")

    def begin_many(self, parts: Sequence[tuple[str, Any, Any]], /) -> tuple[int, Any] | None:
        """Begin several reductions in the memory of the device, (kind, send, recv) each, as one group, which
        is launched once; arguments and result as of `begin`.

        Raises
        ------
        ValueError
            The buffers are not of one stream.
        """
        found = [(*KINDS.get(kind, (kind, "sum")), send, recv) for kind, send, recv in parts if recv.size]
        if not found:
            return None
        stream = found[0][-1].stream
        if any(buffer.stream != stream for *_, send, recv in found for buffer in (send, recv)):
            raise ValueError("`parts` must be buffers of one stream")
        calls = [self._call(send, recv, dtype, operator) for dtype, operator, send, recv in found]

        def call(own: int) -> None:
            with self._channel.library.group():
                for one in calls:
                    one(own)

        name = f"group of {len(found)} reductions"
        return self._open(name).launch(name, stream, [part[2:] for part in found], call)

    def _reduce(
        self, name: str, send: Array | DeviceBuffer, recv: Array | DeviceBuffer, dtype: str, operator: str
    ) -> None:
        channel = self._open(name)
        if isinstance(recv, np.ndarray):
            assert isinstance(send, np.ndarray)
            self._staging.run(
                name,
                _octets(send),
                _octets(recv),
                lambda at, nbytes, own: self._all_reduce(
                    at, at, nbytes // BYTES[dtype], dtype, operator, own
                ),
            )
            return
        assert not isinstance(send, np.ndarray)
        if recv.size == 0:
            return
        channel.enqueue(name, recv.stream, (send, recv), self._call(send, recv, dtype, operator))

    def _call(
        self, send: DeviceBuffer, recv: DeviceBuffer, dtype: str, operator: str
    ) -> Callable[[int], None]:
        """Return what reduces on a stream."""
        source, target, count = send.address, recv.address, recv.size
        return lambda own: self._all_reduce(source, target, count, dtype, operator, own)

    def _all_reduce(self, send: int, recv: int, count: int, dtype: str, operator: str, stream: int) -> None:
        assert stream != 0, "NCCL would take the legacy default stream"
        self._channel.comm.all_reduce(send, recv, count, dtype, operator, stream)

    def combine_words(self, words: Words, operation: str, seed: int, /) -> None:
        """Refuse: NCCL has no operations of one's own.

        Raises
        ------
        ValueError
            Always.
        """
        del words
        check_operation(operation, seed)
        raise ValueError(f"the back end nccl has no `operation` of its own; got {operation!r}")

    def fold_words(self, step: Fold, sent: Words, folded: Words, /) -> None:
        """Refuse, as `combine_words` does."""
        del step, sent, folded
        raise ValueError("the back end nccl cannot fold words: use a codec that sums, or the back end mpi")

    def broadcast(self, buffer: Bytes, root: int, /) -> None:
        """Overwrite `buffer` with that of rank `root`."""
        if not 0 <= root < self.size:
            message = f"`root` must be a rank from 0 to {self.size - 1}; got {root}"
            raise ValueError(message)
        name = f"broadcast of {buffer.size} bytes from rank {root}"
        channel, octets = self._open(name), _octets(buffer)
        self._staging.run(
            name, octets, octets, lambda at, nbytes, own: channel.comm.broadcast(at, nbytes, root, own)
        )

    def split(self, color: int | None, key: int, /) -> Backend | None:
        """Make one group per color, ranks ordered by (key, rank); None gives None."""
        if color is not None and color < 0:
            message = f"`color` must be None or at least 0; got {color}"
            raise ValueError(message)
        channel = self._open("split")
        choices = np.zeros((self.size, 2), np.uint32)  # rows of the others are theirs to fill
        choices[self.rank] = 0 if color is None else color + 1, key + (1 << 31)
        self.sum_words(choices)
        with channel.calling("split"):
            comm = channel.comm.split(color, key)
        if comm is None:
            return None
        mine = choices[self.rank, 0]
        members = [rank for rank in range(self.size) if choices[rank, 0] == mine]
        members.sort(key=lambda rank: (choices[rank, 1], rank))
        hosts = [channel.hosts[rank] for rank in members]
        place = hosts[: comm.rank].count(hosts[comm.rank])
        return NcclBackend(Channel(comm, channel.library, hosts, place, channel.peers, owns=False))

    def learn_hosts(self, name: str) -> NcclBackend:
        """Tell the others the name of this host, and count the ranks of each; collective. Returns itself."""
        rows = np.zeros((self.size, 2), np.uint32)
        rows[self.rank] = digest(name)
        self.sum_words(rows)
        hosts = [f"{first:08x}{second:08x}" for first, second in rows.tolist()]
        self._channel.hosts = hosts
        self.local_rank = self._channel.local_rank = hosts[: self.rank].count(hosts[self.rank])
        return self

    def close(self) -> None:
        """Release this handle; the last one frees the communicator, collectively, unless it is broken."""
        if self._closed:
            return
        self._closed = True
        self._channel.release(self._meet)

    def _meet(self) -> None:
        """Return when all ranks are here, and all that was enqueued is done."""
        word = np.zeros(4, np.uint8)

        def call(at: int, _nbytes: int, own: int) -> None:
            self._all_reduce(at, at, 1, "uint32", "max", own)

        self._staging.run("close", word, word, call)

    def abort(self, reason: str, /) -> None:
        """Break the communicator, and make the other ranks fail soon; over MPI that ends the job. Not
        collective.
        """
        self._channel.fail(BackendError(f"rank {self._channel.patience.rank} aborted: {reason}"))
        if self._channel.peers is not None:
            self._channel.peers.abort(reason)

    def set_activity(self, activity: Activity, /) -> None:
        """Say what a stall report calls the present work: a text, or a function that makes one."""
        self._channel.patience.activity = activity

    def _open(self, name: str) -> Channel:
        if self._closed:
            raise BackendError(f"{name}: this communicator is closed")
        self._channel.require_whole(name)
        return self._channel


def _octets(array: Array) -> npt.NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


def check_float(dtype: str) -> None:
    """Raise ValueError for what is no float format."""
    if dtype not in BYTES or dtype in ("uint8", "uint32"):
        names = [name for name in BYTES if not name.startswith("uint")]
        raise ValueError(f"`dtype` must be one of {', '.join(names)}; got {dtype!r}")
