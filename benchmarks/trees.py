"""What a tree costs beside an array: the same numbers as one array, as a tree of it, and as trees of parts.

    gccomm run -n 2 benchmarks/trees.py --json FILE

Calls on one NumPy array whose layout has come before go a short way. Trees are flattened and fused by Python
in every call; what that takes does not grow with their bytes, but with the number of their arrays.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from gccomm_launch.bench_report import make_row
from gccomm_launch.bench_timing import StoppedError, Stopper, interleaved
from gccomm_launch.bench_ways import Way
from lab import add_rounds, finish, show_rows
from mpi4py import MPI

import gccomm

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
CODECS = ("raw", "uniform:wire_bits=8", "rotated:wire_bits=8")
PARTS = (1, 16, 161)
DESCRIPTION = "Time trees beside arrays of as many bytes; start it by `gccomm run -n 2`."
HEADER = f"{'size(B)':>11} {'codec':<22} {'arrays':>8} {'time(us)':>10} {'more(us)':>10}"


def forms(x: Any) -> dict[str, Any]:
    """Return the array, and trees of it in so many parts of at least one block."""
    found: dict[str, Any] = {"array": x}
    for parts in PARTS:
        if x.size >= 1024 * parts:
            found[str(parts)] = {f"w{i}": part.copy() for i, part in enumerate(np.array_split(x, parts))}
    return found


def way(form: str, codec: str, tree: Any, comm: gccomm.Communicator) -> Way:
    """Return the reduction of a tree."""
    call: Callable[[], Any] = lambda: comm.compressed_allreduce(tree, "sum", codec)  # noqa: E731
    return Way(f"{codec}, {form}", "codec", call, lambda: comm.stats.wire_bytes)


def measure(options: argparse.Namespace, comm: gccomm.Communicator, stopper: Stopper) -> list[dict[str, Any]]:
    """Time all forms of a size interleaved and return their rows."""
    mpi, rows = MPI.COMM_WORLD, []
    for size in SIZES:
        x = np.random.default_rng((options.seed, mpi.rank)).standard_normal(size // 4, np.float32)
        trees = forms(x)
        ways = [
            (codec, form, way(form, codec, tree, comm)) for codec in CODECS for form, tree in trees.items()
        ]
        calls = [made.call for _, _, made in ways]
        seconds = interleaved(calls, options.warmup, options.iters, stopper, mpi)
        alone: dict[str, float] = {}
        for (codec, form, made), times in zip(ways, seconds.T, strict=True):
            made.call()  # whose bytes are counted
            row = asdict(make_row(made, times, size, x.size, mpi.size, 0.0))
            more = row["time_us"] - alone.setdefault(codec, row["time_us"])
            rows.append({**row, "codec": codec, "arrays": form, "more_us": more})
    return rows


def line(row: dict[str, Any]) -> str:
    """Return a row under `HEADER`."""
    times = f"{row['time_us']:>10.1f} {row['more_us']:>10.1f}"
    return f"{row['size']:>11} {row['codec']:<22} {row['arrays']:>8} {times}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    add_rounds(parser, iters=200)
    options = parser.parse_args(argv)
    stopper = Stopper(MPI.COMM_WORLD)
    try:
        with stopper.signals(), gccomm.init() as comm:
            rows = measure(options, comm, stopper)
    except StoppedError:
        return finish("# interrupted", 130)
    return show_rows(options.json, rows, HEADER, line)


if __name__ == "__main__":
    sys.exit(main())
