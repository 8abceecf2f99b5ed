"""Which way data go into the memory that ranks of one host share: through the caches, past them, or as timed.

    gccomm run -n 2 benchmarks/slots.py --size 64M --json FILE

Three communicators on the same ranks reduce the same arrays by the same codecs, interleaved. Two of them keep
to one way for all chunks, copies both; the third one chooses by what it has measured, as gccomm does by
default. Where the cores of the ranks share a cache the ways are alike, elsewhere they are not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
from gccomm_launch.bench_report import make_row
from gccomm_launch.bench_timing import StoppedError, Stopper, exact_sum, interleaved, vnmse
from gccomm_launch.bench_ways import Way, codec_way, mpi_ways
from lab import finish, show_rows, size_and_rounds
from mpi4py import MPI

import gccomm

CODECS = (
    "raw",
    "bf16",
    "uniform:wire_bits=8",
    "uniform:wire_bits=4",
    "uniform:wire_bits=4,scales=predicted",
    "rotated:wire_bits=8",
)
WAYS = {"timed": 0, "through": 1, "past": 2}  # of the field `forced` of gccomm.kernels.EXCHANGE
DESCRIPTION = "Time ways into the memory that ranks of one host share; start it by `gccomm run -n 2`."
HEADER = f"{'size(B)':>11} {'way':>8} {'codec':<40} {'time(us)':>10} {'busbw(GB/s)':>11} {'x MPI':>6}"


@contextmanager
def communicators() -> Iterator[dict[str, gccomm.Communicator]]:
    """Give a communicator for each way, with shared memory of its own."""
    made, parents = {}, []
    for name, forced in WAYS.items():
        parents.append(MPI.COMM_WORLD.Dup())
        comm = made[name] = gccomm.init(comm=parents[-1])
        window = comm._backend._channel.window  # type: ignore[attr-defined]  # no user's business
        if window is None:
            raise SystemExit("slots.py: the ranks share no memory")
        window._state["forced"] = forced
    try:
        yield made
    finally:
        for comm, parent in zip(made.values(), parents, strict=True):
            comm.close()
            parent.Free()


def measure(options: argparse.Namespace, stopper: Stopper) -> list[dict[str, Any]]:
    """Time all ways interleaved and return their rows."""
    mpi, count = MPI.COMM_WORLD, options.size // 4
    x = np.random.default_rng((options.seed, mpi.rank)).standard_normal(count, np.float32)
    with communicators() as comms:
        ways: list[tuple[str, Way]] = [("", mpi_ways(x, mpi)[0])]
        ways += [(name, codec_way(codec, x, comm)) for codec in CODECS for name, comm in comms.items()]
        calls = [way.call for _, way in ways]
        seconds = interleaved(calls, options.warmup, options.iters, stopper, mpi)
        exact, rows = exact_sum(x, mpi), []
        for (name, way), times in zip(ways, seconds.T, strict=True):
            row = make_row(way, times, 4 * count, count, mpi.size, vnmse(way.call(), exact, mpi))
            one = rows[0]["time_us"] if rows else row.time_us
            rows.append({**asdict(row), "way": name, "x_mpi": one / row.time_us})
    return rows


def line(row: dict[str, Any]) -> str:
    """Return a row under `HEADER`."""
    return (
        f"{row['size']:>11} {row['way']:>8} {row['codec']:<40} {row['time_us']:>10.1f} "
        f"{row['busbw']:>11.3f} {row['x_mpi']:>6.2f}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    options, mpi = size_and_rounds(DESCRIPTION, 64 << 20, argv), MPI.COMM_WORLD
    stopper = Stopper(mpi)
    if mpi.size not in (2, 3):
        return finish("slots.py: more than three ranks share the work another way: run it on 2 or 3", 2)
    try:
        with stopper.signals():
            rows = measure(options, stopper)
    except StoppedError:
        return finish("# interrupted", 130)
    return show_rows(options.json, rows, HEADER, line)


if __name__ == "__main__":
    sys.exit(main())
