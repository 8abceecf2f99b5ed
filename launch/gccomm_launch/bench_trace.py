"""Timelines of `gccomm bench`: one more call of each of gccomm's ways, apart from those that are timed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gccomm import timeline, traces
from gccomm.timeline import Span

if TYPE_CHECKING:
    import gccomm
    from gccomm_launch.bench_timing import Stopper
    from gccomm_launch.bench_ways import Way

__all__ = ["Traces"]


class Traces:
    """Calls that were recorded, on this rank; nothing where there is no ``path``."""

    def __init__(self, path: Path | None, comm: gccomm.Communicator) -> None:
        self._path, self._comm = path, comm
        self._recorder = timeline.Recorder()

    def record(self, way: Way, size: int, stopper: Stopper) -> None:
        """Make one more call of a way and keep its spans; collective."""
        if self._path is None:
            return
        stopper.barrier()
        with timeline.recording() as recorder:
            since = len(recorder.spans)
            way.call()
            spans = timeline.recorded(recorder, self._comm.rank, since)
        for span in spans:
            self._recorder.add(_named(span, f"{way.name}, {size} bytes") if span.kind == "call" else span)

    def write(self, mpi: Any) -> None:
        """Put the spans of all ranks into one file, which rank 0 writes; collective."""
        if self._path is None:
            return
        parts = mpi.gather(traces.part_of(self._recorder, self._comm.rank))
        if parts is not None:
            traces.write(self._path, parts)


def _named(span: Span, name: str) -> Span:
    return span._replace(name=name)
