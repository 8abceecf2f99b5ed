"""All-reduces over hosts of several ranks: a flat ring, one rank of each host, and sums of hosts' floats.

    gccomm netlab up --hosts 2 --rate 1gbit
    gccomm netlab run -n 4 --per-host 2 benchmarks/hierarchy.py --size 16M --json FILE

Three communicators on the same ranks reduce the same arrays by the same codecs, interleaved:

- flat: all ranks take part in a ring, in which those of a host are neighbours, so that a link carries each
  byte once each way and round (``hierarchical=False``, ``GCCOMM_ALLREDUCE=ring``);
- words: a host's ranks add up their words in memory, and one of them exchanges them with other hosts (the
  default);
- floats: a host's ranks add up their floats in memory, and one of them compresses the sum
  (``hierarchical=True``): n counts hosts in the headroom.

Each with its error, vNMSE = ||result - sum||^2 / ||sum||^2, and how many times as fast as flat it is.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
from gccomm_launch.bench_report import machine, make_row
from gccomm_launch.bench_timing import StoppedError, Stopper, exact_sum, interleaved, settle, vnmse
from gccomm_launch.bench_ways import Way, codec_way
from gccomm_launch.netlab import FasterThanLinkError, Lab
from lab import finish, network, show, size_and_rounds
from mpi4py import MPI

import gccomm

CODECS = ("uniform:wire_bits=8", "rotated:wire_bits=8", "uniform:wire_bits=4", "bf16", "raw")
LEVELS: dict[str, bool | None] = {"flat": False, "words": None, "floats": True}
COLUMNS = f"{'size(B)':>11} {'levels':>7} {'codec':<20} {'wire_bytes':>11} "
DESCRIPTION = "Time all-reduces over hosts of several ranks; start it by `gccomm netlab run`."
HEADER = f"{COLUMNS}{'time(us)':>10} {'x flat':>7} {'vNMSE':>9}"


@contextmanager
def communicators() -> Iterator[dict[str, gccomm.Communicator]]:
    """Give one communicator for each way of using hosts."""
    made, parents = {}, []
    for name, hierarchical in LEVELS.items():
        if name == "flat":
            os.environ["GCCOMM_ALLREDUCE"] = "ring"
        parents.append(MPI.COMM_WORLD.Dup())
        made[name] = gccomm.init(comm=parents[-1], hierarchical=hierarchical)
        os.environ.pop("GCCOMM_ALLREDUCE", None)
    try:
        yield made
    finally:
        for comm, parent in zip(made.values(), parents, strict=True):
            comm.close()
            parent.Free()


def measure(
    options: argparse.Namespace, lab: Lab, hosts: Sequence[int], stopper: Stopper
) -> list[dict[str, Any]]:
    """Time all ways interleaved and return their rows."""
    mpi, count = MPI.COMM_WORLD, options.size // 4
    x = np.random.default_rng((options.seed, mpi.rank)).standard_normal(count, np.float32)
    with communicators() as comms:
        ways: list[tuple[str, Way]] = [
            (name, codec_way(codec, x, comm)) for codec in CODECS for name, comm in comms.items()
        ]
        calls = [way.call for _, way in ways]
        settle(calls, count, stopper, mpi)
        seconds = interleaved(calls, options.warmup, options.iters, stopper, mpi)
        exact, rows, flat = exact_sum(x, mpi), [], 0.0
        for (name, way), times in zip(ways, seconds.T, strict=True):
            row = make_row(way, times, 4 * count, count, mpi.size, vnmse(way.call(), exact, mpi))
            flat = row.time_us if name == "flat" else flat
            # Over a host's link go the words of one rank at least.
            lab.check(row.wire_bytes, row.time_us / 1e6, sorted(set(hosts)))
            rows.append({**asdict(row), "levels": name, "x_flat": flat / row.time_us})
    return rows


def line(row: dict[str, Any]) -> str:
    """Return a row under `HEADER`."""
    return (
        f"{row['size']:>11} {row['levels']:>7} {row['codec']:<20} {row['wire_bytes']:>11} "
        f"{row['time_us']:>10.1f} {row['x_flat']:>7.2f} {row['vnmse']:>9.2e}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    options, mpi = size_and_rounds(DESCRIPTION, 16 << 20, argv), MPI.COMM_WORLD
    stopper, place = Stopper(mpi), network(None, mpi)
    if isinstance(place, str):
        return finish(f"hierarchy.py: {place}", 2)
    lab, hosts = place
    if len(set(hosts)) == mpi.size:
        return finish("hierarchy.py: every host has one rank: run it with --per-host 2 or more", 2)
    try:
        with stopper.signals():
            rows = measure(options, lab, hosts, stopper)
    except StoppedError:
        return finish("# interrupted", 130)
    except FasterThanLinkError as error:
        return finish(f"hierarchy.py: refused: {error}", 1)
    report = {"machine": machine(), "ranks": mpi.size, "lab": asdict(lab), "hosts": hosts, "rows": rows}
    heading = [f"{mpi.size} ranks, {report['machine']['mpi']}", *lab.describe()]
    lines = [*(f"# {text}" for text in heading), HEADER, *map(line, rows)]
    return show(options.json, report, lines)


if __name__ == "__main__":
    sys.exit(main())
