"""Calls whose words stay on a device: what they check there, and what the host hears of it.

The first call of a layout waits: the host reads the header. Later ones do not: kernels compare the reduced
header with this rank's own, and the tag of every sum, and write NaNs over scales or floats where something is
wrong, so that the results are NaN, never wrong numbers; a word in the host's memory then says so. The host
looks at it in the next call, in :meth:`gccomm.Communicator.synchronize`, and in the back end's watchdog.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import numpy as np

from gccomm.agreement import (
    FLOWING,
    FLOWING_WORD,
    HEADER_WORDS,
    MISSING_WORD,
    Call,
    verify,
    write_header,
)
from gccomm.device_words import DeviceWords
from gccomm.errors import BackendError, MismatchError
from gccomm.kernels.cuda.device import host_bytes
from gccomm.pieces import MASK, Wire
from gccomm.steps import Words
from gccomm.timeline import CallSpans
from gccomm.transfers import Pause, Transfer

if TYPE_CHECKING:
    from gccomm.kernels.cuda.device import DeviceKernels
    from gccomm.kernels.cuda.queue import Queue

__all__ = ["Board", "Flow", "FlowWire"]

HEADER, TAG, DOOM = 1, 2, 4  # what may be wrong
COMPARED = MISSING_WORD + 1  # words of the header that must be this rank's own
TAGS = 64  # whose words are sent to the device at a time
_BOARD_BYTES = 64


class Board:
    """What the host and one device tell each other about the calls of a group of ranks.

    Parameters
    ----------
    kernels : DeviceKernels
        Of the device.
    rank : int
        For reports.
    require_whole : callable
        Raises what has broken the back end, if anything has.
    groups : bool
        The back end makes several reductions as one group.
    await_event : callable, optional
        Waits for an event of the queue, and raises what ends that; by default the queue waits.

    Attributes
    ----------
    waits : int
        How often the host has waited for the device.
    known : set
        Layouts that all ranks have agreed on.
    flows : bool
        The host need not wait in reductions.
    """

    def __init__(
        self,
        kernels: DeviceKernels,
        rank: int,
        require_whole: Callable[[], None],
        *,
        groups: bool = False,
        await_event: Callable[[Any], None] | None = None,
    ) -> None:
        self.kernels, self.rank, self.groups = kernels, rank, groups
        self._await_event = await_event
        self.queue: Queue = kernels.launcher.queue  # type: ignore[attr-defined]  # CuPy's has one
        self.known: set[object] = set()
        self.waits, self.flows = 0, True
        self._require_whole = require_whole
        self._pinned = self.queue.pinned(_BOARD_BYTES)
        self.flags = int(self._pinned.ptr)  # the device's address of it is the same
        self._words = host_bytes(self.flags, _BOARD_BYTES).view(np.uint32)
        self._words[:] = 0
        self._doing = ""
        self._counter = self.queue.empty(1, np.uint32)  # of the launches of graphs
        self._counter[...] = 0
        self.counter = self._counter.address
        kernels.renew(0, 0, self.counter, 0)  # changes nothing: to be loaded before a graph is captured
        self.kept: list[Any] = []  # what graphs need

    def doom(self) -> None:
        """Let all that the device has still to check be wrong: the back end is about to abort."""
        self._words[1] = 1

    def look(self) -> BaseException | None:
        """Return what the device has found wrong; waits for nothing."""
        found = int(self._words[0])
        if found & HEADER:
            return MismatchError(
                f"rank {self.rank}: another rank made another call, or a bad one, than this rank's "
                f"{self._doing}, in a layout that had been agreed on. Its results are NaN; the communicator "
                "is broken. Every rank must make the same calls in the same order, with the same keys, "
                "shapes, dtypes and options"
            )
        if found & TAG:
            text = "the tag of a sum is wrong: messages of different calls were added. Results are NaN"
            return BackendError(f"rank {self.rank}: {text}")
        if found & DOOM:
            return BackendError(f"rank {self.rank}: a sum was aborted. Its results are NaN")
        return None

    def check(self) -> None:
        """Raise what is known to be wrong; waits for nothing."""
        self._require_whole()
        error = self.look()
        if error is not None:
            raise error

    def wait(self) -> None:
        """Let the host wait until all is done, and raise what is wrong."""
        self.waits += 1
        self.queue.finish(wait=self._await_event is None)
        if self._await_event is not None:
            self._await_event(self.queue.record())
        self.check()

    def begin(self, call: Call) -> None:
        """Note what is begun, for reports."""
        self._doing = call.describe()

    def copy(self, to: DeviceWords, source: DeviceWords) -> None:
        """Copy words within the device."""
        if to.size != source.size:
            raise ValueError(f"{source.size} words do not fit into {to.size}")
        self.queue.move(to.address, source.address, to.nbytes)


class Flow:
    """The words of one call.

    Parameters
    ----------
    board : Board
        Of the device.
    layout : object
        Names the layout.
    able : bool
        Nothing in the call but the header has to be looked at by the host.
    counted : bool
        The call goes into a graph: each launch has noise of its own.

    Attributes
    ----------
    flowing : bool
        The host does not look at the header either; until :meth:`look`.
    """

    def __init__(self, board: Board, layout: object, able: bool, *, counted: bool = False) -> None:
        self.board, self.layout, self.counted = board, layout, counted
        self.flowing = able and layout in board.known
        self._waits = not self.flowing
        self._event: Any = None

    def scratch(self, count: int) -> Any:
        """Return memory for so many words."""
        return DeviceWords.empty(count, np.uint32, self.board)

    def wire(self, rank: int, size: int, spans: CallSpans | None) -> FlowWire:
        """Return the transfers of the call."""
        return FlowWire(self, rank, size, spans)

    def pause(self) -> Pause:
        """Return the pause before :meth:`look`, when all has been enqueued."""
        event = self._event = self.board.queue.record()

        def ready() -> bool:
            try:
                return self.board.queue.came(event)
            except Exception:  # of a device that has failed: looking raises it
                return True

        return Pause(ready)

    def look(self) -> None:
        """Let the host wait for what was enqueued before the pause, and raise what is wrong; what follows is
        looked at as it comes.
        """
        if self.board.queue.came(self._event):
            self.board.check()
        else:
            self.board.wait()
        self.flowing = False

    def end(self) -> None:
        """End the call: where it may wait, everything is right then, and the next one need not."""
        if self._waits:
            self.board.wait()
            self.board.known.add(self.layout)


class FlowWire(Wire):
    """Transfers of words that stay on a device."""

    def __init__(self, flow: Flow, rank: int, size: int, spans: CallSpans | None) -> None:
        super().__init__(rank, size, spans)
        self._flow, self._board = flow, flow.board
        self.groups = flow.board.groups
        self._agreed: list[DeviceWords] = []  # scales of the call
        self._own: Any = None  # the header's words, on the device
        self._tags: Any = None  # the next tags and what they add up to, on the device
        self._left: list[int] = []  # those that have not been taken
        self._expected: dict[int, DeviceWords] = {}  # by tag: what it adds up to

    def scratch(self, count: int) -> Any:
        """Return memory for so many words, on the device."""
        return self._flow.scratch(count)

    # The header

    def write_header(self, call: Call, message: Words) -> None:
        """Write the header, and keep a copy on the device."""
        self._board.check()
        self._board.begin(call)
        if self._flow.counted:
            self._board.kernels.renew(0, 0, self._board.counter, 1)
        header = np.zeros(HEADER_WORDS, np.uint32)
        write_header(call, self.rank, header)
        header[FLOWING_WORD] = FLOWING if self._flow.flowing else 0
        self._own = self._flow.scratch(HEADER_WORDS)
        self._own[:] = header
        message[:HEADER_WORDS] = self._own

    def verify(self, call: Call, message: Any) -> Generator[Transfer, None, BaseException | None]:
        """Check the reduced header: on the device, where the layout is known."""
        self._agreed.append(message[HEADER_WORDS:])
        if self._flow.flowing:
            self._guard(message.address, self._own.address, COMPARED, HEADER)
            return None
        self._header = header = message[:HEADER_WORDS].host()
        error = yield from verify(call, self.rank, self.size, header)
        if error is None and header[MISSING_WORD] and header[FLOWING_WORD] == FLOWING:
            msg = (
                f"rank {self.rank}: a rank has None for an array in {call.describe()}, and others do not "
                "look for that any more: on GPUs over NCCL every rank has to have every array once a layout "
                "is known"
            )
            raise MismatchError(msg)
        return error

    def missing(self, message: Any) -> bool:
        """Return whether some rank has None for a known key; there is none where the layout is known."""
        del message
        return not self._flow.flowing and bool(self._header[MISSING_WORD])

    def agreed(self, words: Any) -> None:
        """Note scales, which are spoilt where something is wrong."""
        self._agreed.append(words)

    # Sums

    def put_tag(self, words: Any) -> int:
        """Write the next tag behind a message's words."""
        if not self._flow.flowing:
            return super().put_tag(words)
        if not self._left:
            self._send_tags()
        place, tag = TAGS - len(self._left), self._left.pop()
        words[len(words) - 1 :] = self._tags[place : place + 1]
        self._expected[tag] = self._tags[TAGS + place : TAGS + place + 1]
        return tag

    def _send_tags(self) -> None:
        """Send the next tags, and what they add up to, to the device."""
        tags = [self.next_tag() for _ in range(TAGS)]
        self._left = tags[::-1]
        self._tags = self._flow.scratch(2 * TAGS)
        self._tags[:] = np.array([*tags, *(tag * self.size & MASK for tag in tags)], dtype=np.uint32)

    def check_sum(self, tag: int, sums: Any, place: int) -> None:
        """Check the tag of a sum: on the device, where the layout is known."""
        if not self._flow.flowing:
            return super().check_sum(tag, sums, place)
        expected = self._expected.pop(tag)
        self._guard(sums.address + 4 * place, expected.address, 1, TAG)
        return None

    def summed_floats(self, buffer: Any) -> None:
        """Spoil a sum of floats that was aborted."""
        self._board.kernels.guard(0, 0, 0, self._board.flags, DOOM, buffer.address, buffer.nbytes // 2)

    def _guard(self, got: int, expected: int, count: int, bit: int) -> None:
        flags, guard = self._board.flags, self._board.kernels.guard
        for words in self._agreed:
            guard(got, expected, count, flags, bit, words.address, 2 * words.size)
