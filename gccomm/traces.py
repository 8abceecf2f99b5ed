"""Traces: what :mod:`gccomm.timeline` recorded, as files that Perfetto and Chrome show.

A file has one process a rank and one row for what that rank did itself, besides rows for the pieces on their
way. Ranks of one machine share a clock. Clocks of other machines are set by the calls themselves: the first
message of a call is complete on all ranks at about the same time.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from gccomm import backends, timeline
from gccomm.api import resolve
from gccomm.communicator import Communicator
from gccomm.timeline import ROWS, Span

__all__ = ["Part", "from_environment", "merge", "part_of", "read", "tracing", "write"]

# Where launchers say which of their processes this is.
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")

Part = Mapping[str, Any]
"""A rank's share of a trace: its number, its clock, events, and how many there was no room for."""


@contextmanager
def tracing(path: str | os.PathLike[str], *, comm: Communicator | None = None) -> Iterator[None]:
    """Write a timeline of the reductions in the block, of all ranks, to one file; collective.

    Parameters
    ----------
    path : path-like
        A JSON file of trace events, which rank 0 writes; open it at https://ui.perfetto.dev or with Chrome's
        ``about:tracing``.
    comm : Communicator, optional
        Whose ranks are in it. Default: that of :func:`gccomm.init`. Calls on other communicators are
        recorded too, as their processes'.

    Raises
    ------
    ValueError
        On all ranks: the folder of ``path`` does not exist on rank 0.

    Notes
    -----
    Where the block ends in an exception there is no exchange: each rank that fails so writes its own file,
    ``FILE.0.json`` and so on for ``FILE.json``, which ``gccomm trace`` puts together.
    """
    group, target = resolve(comm), Path(path)
    there = group.broadcast(np.array(target.absolute().parent.is_dir()))
    if not there:
        msg = f"rank 0: there is no folder {target.absolute().parent} to write the trace {target.name} to"
        raise ValueError(msg)
    with timeline.recording() as recorder:
        since = len(recorder.spans)
        try:
            yield
        except BaseException:
            part = part_of(recorder, group.rank, since)
            write(own_path(target, group.rank), [part])
            raise
        parts = _gather(part_of(recorder, group.rank, since), group)
    if group.rank == 0:
        write(target, parts)


def part_of(recorder: timeline.Recorder, rank: int, since: int = 0) -> Part:
    """Return a rank's share of a trace, as it has been recorded."""
    spans = timeline.recorded(recorder, rank, since)
    return {
        "rank": rank,
        "clock": _clock(),
        "dropped": recorder.dropped,
        "events": [_event(rank, span) for span in spans],
    }


def _event(rank: int, span: Span) -> dict[str, Any]:
    """Return a complete event; times are microseconds."""
    about = dict(span.about)
    if span.kind == "call":
        about["met"] = about["met"] * 1e6
    return {
        "name": span.name,
        "cat": span.kind,
        "ph": "X",
        "ts": span.start * 1e6,
        "dur": (span.end - span.start) * 1e6,
        "pid": rank,
        "tid": span.row,
        "args": about,
    }


def _clock() -> str:
    """Return what is equal exactly where processes share the monotonic clock: a start of a machine."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return f"{os.uname().nodename}"


def merge(parts: Sequence[Part]) -> dict[str, Any]:
    """Return one trace of the shares of all ranks, on the clock of the first."""
    first, shifts = parts[0], {}
    events: list[dict[str, Any]] = []
    for part in parts:
        rank = part["rank"]
        shift = 0.0 if part["clock"] == first["clock"] else _shift(part["events"], first["events"])
        shifts[str(rank)] = shift
        events += [{"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}]
        events += [{"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}}]
        for row in sorted({event["tid"] for event in part["events"]}):
            about = {"name": _row_name(row)}
            events.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": row, "args": about})
        events += [{**event, "ts": event["ts"] + shift} for event in part["events"]]
    clocks = {str(part["rank"]): part["clock"] for part in parts}
    dropped = {str(part["rank"]): part["dropped"] for part in parts}
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"clocks": clocks, "shifts_us": shifts, "dropped": dropped},
    }


def _row_name(row: int) -> str:
    call, way = divmod(row, ROWS)
    name = f"piece on way {way}" if way else "rank"
    return f"{name}, call {call + 1}" if call else name


def _shift(mine: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> float:
    """Return what takes this clock to the other: the median over the calls that both know."""
    met, theirs = _meetings(mine), _meetings(other)
    found = [theirs[call] - met[call] for call in met.keys() & theirs.keys()]
    return float(np.median(found)) if found else 0.0


def _meetings(events: Sequence[Mapping[str, Any]]) -> dict[tuple[int, ...], float]:
    """Return by call when its first message was complete."""
    found: dict[tuple[int, ...], float] = {}
    for event in events:
        about = event["args"]
        if event["cat"] == "call" and about["met"]:
            found[about["communicator"], about["reducer"], about["step"]] = about["met"]
    return found


def write(path: Path, parts: Sequence[Part]) -> None:
    """Write a trace in one go, so that no half of it is left."""
    unfinished = path.with_name(f"{path.name}.part")
    unfinished.write_text(json.dumps(merge(parts)) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def own_path(path: Path, rank: int) -> Path:
    """Return where a rank alone writes."""
    return path.with_name(f"{path.stem}.{rank}{path.suffix or '.json'}")


def read(path: Path) -> list[Part]:
    """Return the shares that a file holds; ValueError where it is no trace of gccomm's."""
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
        clocks, dropped = trace["otherData"]["clocks"], trace["otherData"]["dropped"]
        shares: dict[int, list[Any]] = {int(rank): [] for rank in clocks}
        for event in trace["traceEvents"]:
            if event["ph"] == "X":
                shares[event["pid"]].append(event)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no trace that gccomm wrote ({type(error).__name__}: {error})") from error
    return [
        {"rank": rank, "clock": clocks[str(rank)], "dropped": dropped[str(rank)], "events": events}
        for rank, events in shares.items()
    ]


def _gather(part: Part, comm: Communicator) -> list[Part]:
    """Give every rank the shares of all; collective.

    By broadcasts, which count no step: the noise of the program's reductions is what it is without a trace.
    """
    packed = np.frombuffer(zlib.compress(json.dumps(part).encode(), 1), np.uint8)
    found = []
    for rank in range(comm.size):
        length = int(comm.broadcast(np.array(packed.size), rank))
        mine = packed if rank == comm.rank else np.zeros(length, np.uint8)
        found.append(json.loads(zlib.decompress(comm.broadcast(mine, rank).tobytes())))
    return found


def from_environment() -> None:
    """Record the whole program where ``GCCOMM_TRACE`` names a file; each rank writes its own at its end."""
    name = os.environ.get("GCCOMM_TRACE", "")
    if not name:
        return
    path = Path(name).absolute()
    if not path.parent.is_dir():
        msg = f"GCCOMM_TRACE={name}: there is no folder {path.parent}, so no trace is written"
        warnings.warn(msg, RuntimeWarning, stacklevel=2)
        return
    recorder, process = timeline.start(), os.getpid()

    def finish() -> None:
        if not recorder.spans or os.getpid() != process:  # a fork is no rank
            return
        rank = _process_rank(recorder)
        try:
            write(own_path(path, rank), [part_of(recorder, rank)])
        except OSError as error:
            print(f"gccomm: rank {rank} could not write its trace: {error}", file=sys.stderr)

    atexit.register(finish)


def _process_rank(recorder: timeline.Recorder) -> int:
    """Return the number that the launcher gave this process, or its rank in the first call."""
    if backends.launcher() is not None:
        for variable in _RANKS:
            if os.environ.get(variable, "").isdigit():
                return int(os.environ[variable])
    return recorder.spans[0].rank
