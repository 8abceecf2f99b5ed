"""What calls did when, recorded for a trace: off, and free, unless someone asks for it.

:func:`gccomm.tracing` asks for a block, ``GCCOMM_TRACE`` for a whole program; :mod:`gccomm.traces` makes
files of what is recorded here. Times are those of the monotonic clock, which a machine's processes share.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from gccomm.agreement import Call
from gccomm.transfers import Between, CallAdd, HostSum, LaneAdd, Maximum, Whole

__all__ = [
    "LIMIT",
    "ROWS",
    "CallSpans",
    "Recorder",
    "Span",
    "active",
    "begin",
    "recorded",
    "recording",
    "start",
    "stop",
]

LIMIT = 2_000_000  # spans kept, about 200 bytes each
ROWS = 8  # of a call: its phases, then the pieces on their way


class Span(NamedTuple):
    """What a rank did from ``start`` to ``end`` (seconds), in a row of its own; spans of a row nest."""

    rank: int
    row: int
    name: str
    kind: str
    start: float
    end: float
    about: dict[str, Any]


class Recorder:
    """The spans of this process's ranks.

    Attributes
    ----------
    spans : list of Span
        In the order in which they ended.
    dropped : int
        Spans beyond :data:`LIMIT`.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.dropped = 0
        self.users = self.most = 0  # who records now, and the most at once
        self._rows: dict[int, set[int]] = {}  # of calls in progress, by rank
        self._lock = threading.Lock()

    def add(self, span: Span) -> None:
        """Keep a span."""
        if len(self.spans) < LIMIT:
            self.spans.append(span)
        else:
            self.dropped += 1

    def take_row(self, rank: int) -> int:
        """Return the first row of a rank in which no call is in progress."""
        with self._lock:
            taken = self._rows.setdefault(rank, set())
            row = next(row for row in range(len(taken) + 1) if row not in taken)
            taken.add(row)
            return row

    def free_row(self, rank: int, row: int) -> None:
        """Give a row back."""
        with self._lock:
            self._rows[rank].discard(row)


class CallSpans:
    """The spans of one call on one rank.

    One row has what the rank itself did: "prepare", "scales", "encode", "agree" and "wire" (waits for the
    other ranks), "decode", "deliver"; "encode, wire and decode" in turns where the back end does all three.
    More rows have the pieces, two of which may be on their way at a time:
    there "wire" lasts from the sending of a message until all ranks' are there.
    """

    def __init__(self, recorder: Recorder, rank: int, call: Call) -> None:
        self._recorder, self._rank, self._call = recorder, rank, call
        self._row = recorder.take_row(rank)
        self._start = self._mark = time.perf_counter()
        self._met = 0.0
        self._pieces: dict[int, list[Span]] = {}  # of pieces that have not ended
        self._ways: dict[int, int] = {}  # their rows
        self._open = True

    def phase(self, name: str) -> None:
        """Note that the rank did this since the last phase that was noted so, or the beginning."""
        now = time.perf_counter()
        self._own(name, name, self._mark, now, {})
        self._mark = now

    def mark(self) -> None:
        """Let the next phase begin here."""
        self._mark = time.perf_counter()

    def moved(self, transfer: Whole, piece: int | None, nbytes: int, times: tuple[float, ...]) -> None:
        """Note a transfer: when the rank began to encode it, sent it, began to wait, and had the sums."""
        encoding, sent, waiting, there = times
        transfer = transfer.transfer if isinstance(transfer, Between) else transfer
        agrees, kind = isinstance(transfer, Maximum), "wire"
        names = ("scales", "agree") if agrees else ("encode", "wire")
        if isinstance(transfer, HostSum):
            names = "inputs", "host sum"
        self._met = self._met or there
        about: dict[str, Any] = {} if piece is None else {"piece": piece}
        sums: dict[str, Any] = {"bytes": nbytes}
        if isinstance(transfer, LaneAdd | CallAdd):  # chunks, all three in turns; or all of a small call
            names, kind = ("encode", "encode, wire and decode"), "lanes"
            sums["encode_s"], sums["decode_s"] = transfer.seconds
        self._own(names[0], "encode", encoding, sent, about)
        self._own(names[1], kind, waiting, there, {**about, **sums})
        self._of_piece(piece, names[0], "encode", encoding, sent, {})
        self._of_piece(piece, names[1], kind, sent, there, sums)

    def decoded(self, piece: int | None, start: float, end: float) -> None:
        """Note that the rank decoded sums."""
        self._own("decode", "decode", start, end, {} if piece is None else {"piece": piece})
        self._of_piece(piece, "decode", "decode", start, end, {})

    def begin_piece(self, piece: int) -> None:
        """Note that a piece sets out."""
        if piece not in self._ways:
            taken = set(self._ways.values())
            self._ways[piece] = next(way for way in range(1, len(taken) + 2) if way not in taken)

    def end_piece(self, piece: int) -> None:
        """Note that nothing more comes of a piece."""
        spans = self._pieces.pop(piece, [])
        way = self._ways.pop(piece, 0)
        if spans:
            row, ends = self._row_of(way), (spans[0].start, spans[-1].end)
            self._recorder.add(Span(self._rank, row, f"piece {piece}", "piece", *ends, {"piece": piece}))
        for span in spans:
            self._recorder.add(span)

    def close(self) -> None:
        """Note that the call has ended; a second time does nothing."""
        if not self._open:
            return
        self._open = False
        for piece in list(self._pieces):
            self.end_piece(piece)
        call = self._call
        about: dict[str, Any] = {"communicator": call.communicator, "reducer": call.reducer}
        about |= {"step": call.step, "options": call.state, "met": self._met}
        if call.error is not None:
            about["error"] = type(call.error).__name__
        self._own(call.opcode, "call", self._start, time.perf_counter(), about)
        self._recorder.free_row(self._rank, self._row)

    def _own(self, name: str, kind: str, start: float, end: float, about: dict[str, Any]) -> None:
        self._recorder.add(Span(self._rank, self._row_of(0), name, kind, start, end, about))

    def _of_piece(
        self, piece: int | None, name: str, kind: str, start: float, end: float, about: dict[str, Any]
    ) -> None:
        if piece is None:
            return
        span = Span(self._rank, self._row_of(self._ways[piece]), name, kind, start, end, about)
        self._pieces.setdefault(piece, []).append(span)

    def _row_of(self, way: int) -> int:
        return self._row * ROWS + min(way, ROWS - 1)


_recorder: Recorder | None = None
_lock = threading.Lock()


def active() -> bool:
    """Return whether somebody wants to know what calls do."""
    return _recorder is not None


def begin(rank: int, call: Call) -> CallSpans | None:
    """Return where a call notes what it does, None where nobody wants to know."""
    return None if _recorder is None else CallSpans(_recorder, rank, call)


def start() -> Recorder:
    """Record from now on; several may ask for it, as ranks that are threads do."""
    global _recorder  # noqa: PLW0603 - one a process
    with _lock:
        if _recorder is None:
            _recorder = Recorder()
        _recorder.users += 1
        _recorder.most = max(_recorder.most, _recorder.users)
        return _recorder


def stop(recorder: Recorder) -> None:
    """Take :func:`start` back."""
    global _recorder  # noqa: PLW0603
    with _lock:
        recorder.users -= 1
        if recorder.users == 0:
            _recorder = None


def recorded(recorder: Recorder, rank: int, since: int = 0) -> list[Span]:
    """Return a rank's spans from number ``since`` on: the process's, unless its ranks are threads."""
    alone = recorder.most <= 1
    return [span for span in recorder.spans[since:] if alone or span.rank == rank]


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record while the block runs."""
    recorder = start()
    try:
        yield recorder
    finally:
        stop(recorder)
