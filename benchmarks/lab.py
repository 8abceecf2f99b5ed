"""All-reduces over links of limited rate, against each other and against what the link can carry.

    gccomm netlab up --hosts 4 --rate 1gbit
    gccomm netlab run -n 4 benchmarks/lab.py --size 1M 16M --json FILE

MPI's own all-reduce of float32, whole and in pieces, and of as many bytes as there are coordinates, in 32-bit
words; gccomm's codecs; gloo, DDP's hooks and mpi4jax where they are installed. The bound of each is what its
bytes take at the measured rate of the link. A run that is faster than its link is refused. Of each size the
time of the codecs is given in multiples of that of the best uncompressed way.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
from gccomm_launch.arguments import byte_count, natural, output, positive
from gccomm_launch.bench import write_json
from gccomm_launch.bench_peers import GLOO, HOOKS, MPI4JAX, Peers, open_peers
from gccomm_launch.bench_report import machine, make_row
from gccomm_launch.bench_timing import StoppedError, Stopper, exact_sum, interleaved, settle, vnmse
from gccomm_launch.bench_ways import KEPT, Way, codec_way, mpi_ways, usable_ways
from gccomm_launch.netlab import FasterThanLinkError, Lab
from gccomm_launch.progress import progress
from mpi4py import MPI

import gccomm

CODECS = (
    "raw",
    "bf16",
    "uniform:wire_bits=8",
    "uniform:wire_bits=8,widening=true",
    "uniform:wire_bits=5",
    "rotated:wire_bits=8",
    "rehop:wire_bits=5",
    "rehop:wire_bits=4",
)
WORDS = "MPI_Allreduce, a byte a coordinate"
HEADER = (
    f"{'size(B)':>11} {'count':>10} {'type':>9}  {'way':<36} {'wire_bytes':>11} {'time(us)':>10} "
    f"{'algbw(GB/s)':>11} {'busbw(GB/s)':>11} {'x bound':>8}"
)
# Of an Ethernet frame's bytes, TCP's payload: what a link that carries so much is called.
PAYLOAD = 1448 / 1514


def words_way(count: int, mpi: MPI.Intracomm) -> Way:
    """Return MPI's sum of 32-bit words, a byte a coordinate: what an 8-bit codec without overhead sends."""
    words = np.full(-(-count // 4), mpi.rank, np.uint32)

    def call() -> npt.NDArray[np.uint32]:
        total = np.empty_like(words)
        mpi.Allreduce((words, MPI.UINT32_T), (total, MPI.UINT32_T), MPI.SUM)
        return total

    return Way(WORDS, "mpi", call, lambda: words.nbytes)


def type_of(name: str) -> str:
    """Return the type of the array that a way is given."""
    return {WORDS: "uint32", "gloo bfloat16": "bfloat16", HOOKS[0]: "float16"}.get(name, "float32")


def measure(
    size: int,
    options: argparse.Namespace,
    comm: gccomm.Communicator,
    lab: Lab,
    hosts: Sequence[int],
    stopper: Stopper,
    peers: Peers,
) -> list[dict[str, Any]]:
    """Time all ways interleaved and return their rows; FasterThanLinkError on all ranks alike."""
    mpi = MPI.COMM_WORLD
    count = size // 4
    x = np.random.default_rng((options.seed, comm.rank)).standard_normal(count, np.float32)
    codecs = [codec_way(name, x, comm) for name in CODECS]
    others, _ = peers.ways(x)
    whole, *cut = [way for way in mpi_ways(x, mpi) if KEPT not in way.name]
    ways, _ = usable_ways([whole, words_way(count, mpi), *cut, *codecs])
    settle([way.call for way in codecs], count, stopper, mpi)
    others, _ = usable_ways(others)  # by themselves: their threads and memory disturb what comes after them
    groups = [[way.call for way in group] for group in (ways, others) if group]
    rounds = options.warmup + options.iters
    with progress(len(groups) * rounds, "lab", speaks=comm.rank == 0) as tick:
        plan = options.warmup, options.iters, stopper, mpi, tick
        times_of = [interleaved(calls, *plan) for calls in groups]
    seconds, ways = np.concatenate(times_of, axis=1), [*ways, *others]
    exact = exact_sum(x, mpi)
    rows = []
    for way, times in zip(ways, seconds.T, strict=True):
        result = way.call()
        error = 0.0 if way.name == WORDS else vnmse(result, exact, mpi)
        row = make_row(way, times, 4 * count, count, comm.size, error)
        bound = lab.bound(row.wire_bytes, hosts)
        rows.append({**asdict(row), "type": type_of(way.name), "bound_us": bound * 1e6})
        lab.check(row.wire_bytes, row.time_us / 1e6, hosts)
    return rows


def compare(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return lines that say how long codecs take in multiples of the best uncompressed way's time."""
    best = min(filter(is_plain, rows), key=lambda row: row["time_us"])
    lines = [f"# best uncompressed way of {rows[0]['size']} bytes: {best['codec']}, {best['time_us']:.1f} us"]
    for row in rows:
        row["x_best"] = row["time_us"] / best["time_us"]
        if ":" in row["codec"]:
            lines.append(f"#   {row['codec']}: {row['x_best']:.2f} times that")
    return lines


def is_plain(row: dict[str, Any]) -> bool:
    """Whether a row is of an uncompressed way: the array's floats, or 16-bit ones, on the wire."""
    name = row["codec"]
    known = ("raw", "bf16", *GLOO, MPI4JAX)
    return name in known or (name.startswith("MPI_Allreduce") and name != WORDS)


def line(row: dict[str, Any]) -> str:
    """Return a row under `HEADER`."""
    return (
        f"{row['size']:>11} {row['count']:>10} {row['type']:>9}  {row['codec']:<36} {row['wire_bytes']:>11} "
        f"{row['time_us']:>10.1f} {row['algbw']:>11.4f} {row['busbw']:>11.4f} "
        f"{row['time_us'] / row['bound_us']:>8.2f}"
    )


def network(bandwidth: float | None, mpi: MPI.Intracomm) -> tuple[Lab, list[int]] | str:
    """Return the lab and the numbers of the ranks' hosts, or what is wrong; the same on all ranks."""
    names = mpi.allgather(socket.gethostname())
    lab = Lab.from_environ(os.environ)
    if lab is None and bandwidth is None:
        return "start it by `gccomm netlab run`, or say by --bandwidth what the links between the hosts carry"
    if lab is not None and not (lab.measured or bandwidth):
        return "what the links carry is not known; measure it by `gccomm netlab probe`"
    if len(set(names)) == 1:
        return "all ranks are on one host, so there is no link to measure"
    if lab is None:
        hosts = sorted(set(names))
        lab = Lab(len(hosts), round(8e6 * bandwidth / PAYLOAD), measured=1e6 * bandwidth)
        return lab, [hosts.index(name) + 1 for name in names]
    if bandwidth is not None:
        lab = Lab(**{**asdict(lab), "measured": 1e6 * bandwidth})
    return lab, [int(re.sub(r"\D", "", name)) for name in names]


def add_rounds(parser: argparse.ArgumentParser, iters: int, warmup: int = 2) -> None:
    """Add the options that benchmarks over links share, with the default numbers of rounds."""
    add = parser.add_argument
    add("--iters", type=positive, default=iters, metavar="N", help="rounds measured (default %(default)s)")
    add("--warmup", type=natural, default=warmup, metavar="N", help="rounds before (default %(default)s)")
    add("--seed", type=natural, default=0, metavar="N", help="of the inputs (default 0)")
    add("--json", type=output, metavar="FILE", help="also write everything to FILE")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time all-reduces over links; start it by `gccomm netlab run`."
    )
    add = parser.add_argument
    add("--size", type=byte_count, nargs="+", default=[16 << 20], help="of the float32 array (default 16M)")
    add("--bandwidth", type=float, metavar="MB/s", help="of a link (default: as `netlab probe` measured)")
    add_rounds(parser, iters=11)
    options = parser.parse_args(argv)
    if options.bandwidth is not None and not options.bandwidth > 0:
        parser.error(f"--bandwidth must be positive; got {options.bandwidth}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    comm, stopper = gccomm.init("mpi"), Stopper(MPI.COMM_WORLD)
    place = network(options.bandwidth, MPI.COMM_WORLD)
    if isinstance(place, str):
        return finish(f"lab.py: {place}", 2)
    lab, hosts = place
    try:
        with stopper.signals(), open_peers(MPI.COMM_WORLD) as peers:
            assert peers is not None
            absent = peers.unavailable
            found = [measure(size, options, comm, lab, hosts, stopper, peers) for size in options.size]
    except StoppedError:
        return finish("# interrupted", 130)
    except FasterThanLinkError as error:
        return finish(f"lab.py: refused: {error}", 1)
    said = [(rows, compare(rows)) for rows in found]
    rows = [row for rows in found for row in rows]
    report = {"machine": machine(), "ranks": comm.size, "lab": asdict(lab), "hosts": hosts, "rows": rows}
    report["unavailable"] = absent
    heading = [f"{comm.size} ranks, {report['machine']['mpi']}", *lab.describe()]
    heading += [f"{name}: not available: {reason}" for name, reason in absent.items()]
    if comm.rank == 0:
        body = [text for rows, lines in said for text in (*map(line, rows), *lines)]
        print("\n".join([*(f"# {text}" for text in heading), HEADER, *body]), flush=True)
        if options.json is not None:
            write_json(options.json, report)
    return 0


def size_and_rounds(description: str, size: int, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of a benchmark of one size."""
    parser = argparse.ArgumentParser(description=description)
    text = f"of the float32 array (default {size >> 20}M)"
    parser.add_argument("--size", type=byte_count, default=size, help=text)
    add_rounds(parser, iters=15)
    return parser.parse_args(argv)


def show(path: Any, report: dict[str, Any], lines: Sequence[str]) -> int:
    """Let rank 0 print lines and, if there is a path, write the report; return the exit status."""
    if MPI.COMM_WORLD.rank == 0:
        print("\n".join(lines), flush=True)
        if path is not None:
            write_json(path, report)
    return 0


def show_rows(
    path: Any, rows: Sequence[dict[str, Any]], header: str, line: Callable[[dict[str, Any]], str]
) -> int:
    """Show the rows of a benchmark whose report is these and the machine; return the exit status."""
    report = {"machine": machine(), "ranks": MPI.COMM_WORLD.size, "rows": rows}
    heading = f"# {report['ranks']} ranks, {report['machine']['mpi']}"
    return show(path, report, [heading, header, *map(line, rows)])


def finish(text: str, status: int) -> int:
    """Say why on rank 0, and end in a way that makes mpi4py's runner abort nothing."""
    if MPI.COMM_WORLD.rank == 0:
        print(text, file=sys.stderr, flush=True)
    MPI.Finalize()
    return status


if __name__ == "__main__":
    sys.exit(main())
