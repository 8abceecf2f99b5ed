"""Memory that calls take besides results and residuals, and whether it grows.

    python benchmarks/memory.py --json FILE

(a) The peak of resident memory in a call on a tree of S bytes, above what is there before it, the results and
the residuals, against the bound S w / 32 x 2 + 64 MiB with w wire bits a coordinate: each codec in processes
of its own, alone and on 2 ranks. (b) Resident memory over 10,000 steps of ResNet-50's 161 tensors, shortened.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gccomm_launch.arguments import byte_count, output, positive
from gccomm_launch.bench import write_json
from gccomm_launch.machine import machine

import gccomm
from gccomm import kernels

CODECS = tuple(
    f"{name}:wire_bits={bits}{more}"
    for bits in (4, 8)
    for name, more in (
        ("uniform", ""),
        ("uniform", ",scales=predicted"),
        ("rotated", ",headroom=safe"),
        ("rotated", ",headroom=checked"),
        ("rotated", ",headroom=clipped"),
        ("qsgd-mn", ""),
        ("qsgd-mn-ts", ""),
        ("global-qsgd", ""),
        ("intsgd", ""),
        ("thc", ""),
    )
)
STEPS_CODEC = "rotated:wire_bits=4,headroom=clipped"  # has error feedback
MIB = 1 << 20
ALLOWANCE = 64 * MIB
GROWTH = 5 * MIB
SHORTEN = 128  # ResNet-50's first axes
Tree = dict[str, npt.NDArray[np.float32]]


def status(field: str) -> int:
    """Return a figure of this process's memory in bytes: "VmRSS" or its peak, "VmHWM"."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def forget_peak() -> None:
    """Let the peak of resident memory begin anew."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def bound(total_bytes: int, wire_bits: int) -> int:
    """Return how much a call may take besides results and residuals."""
    return total_bytes * wire_bits // 32 * 2 + ALLOWANCE


def tree_of(total_bytes: int, rank: int) -> Tree:
    """Return matrices of so many bytes together, the first of which has half of them."""
    rng, rows = np.random.default_rng(rank), total_bytes // 4096
    parts = [rows // 2, rows // 4, rows // 8, rows - rows // 2 - rows // 4 - rows // 8]
    return {f"w{i}": rng.standard_normal((part, 1024), np.float32) for i, part in enumerate(parts)}


def peak(codec: str, total_bytes: int, comm: gccomm.Communicator) -> dict[str, Any]:
    """Measure two calls of a Reducer on a tree; collective. The larger figure of all ranks counts.

    In the second call the residuals of two steps are there at once: those of the last one are still read.
    """
    tree = tree_of(total_bytes, comm.rank)
    gccomm.Reducer(codec, comm=comm)({"w": np.ones((16, 1024), np.float32)})  # imports and windows
    reducer = gccomm.Reducer(codec, comm=comm)
    extra = []
    for _ in range(2):
        kernels.pool_trim()
        before = status("VmRSS")
        forget_peak()
        results = reducer(tree)
        taken = status("VmHWM") - before
        residuals = sum(array.nbytes for array in reducer.state_dict()["residuals"].values())
        extra.append(taken - sum(array.nbytes for array in results.values()) - residuals)
        del results
    ranks = np.zeros(comm.size, np.int64)
    ranks[comm.rank] = max(extra)
    wire_bits = gccomm.get_codec(codec).config()["wire_bits"]
    return {
        "codec": codec,
        "ranks": comm.size,
        "tree_bytes": total_bytes,
        "extra_bytes": int(comm.allreduce(ranks).max()),
        "bound_bytes": bound(total_bytes, wire_bits),
        "pool_high_water_bytes": kernels.pool_stats()["high_water"],
    }


def growth(steps: int, comm: gccomm.Communicator) -> dict[str, Any]:
    """Run many steps of many tensors with error feedback; return resident memory along the way."""
    from end_to_end import resnet50_shapes

    shapes = {name: (-(-shape[0] // SHORTEN), *shape[1:]) for name, shape in resnet50_shapes()}
    rng = np.random.default_rng(comm.rank)
    tree: Tree = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    reducer = gccomm.Reducer(STEPS_CODEC, comm=comm)
    samples = []
    for step in range(steps):
        tree = reducer(tree)  # so that memory of results goes round
        if step % max(1, steps // 100) == 0:
            samples.append(status("VmRSS"))
    samples.append(status("VmRSS"))
    settled = samples[len(samples) // 10 :]
    return {
        "codec": STEPS_CODEC,
        "ranks": comm.size,
        "tensors": len(tree),
        "coordinates": sum(math.prod(shape) for shape in shapes.values()),
        "steps": steps,
        "resident_bytes": samples,
        "grown_bytes": settled[-1] - settled[0],
        "spread_bytes": max(settled) - min(settled),
        "bound_bytes": GROWTH,
    }


def in_processes(ranks: int, arguments: Sequence[str]) -> dict[str, Any]:
    """Run this script on ranks of its own, and return what it found."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        argv = [sys.executable, "-m", "gccomm_launch.cli", "run", "-n", str(ranks), __file__]
        subprocess.run([*argv, *arguments, "--json", str(path)], check=True, stdin=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found


def line(row: dict[str, Any]) -> str:
    """Return a measured peak as text."""
    extra, most = row["extra_bytes"] / MIB, row["bound_bytes"] / MIB
    return f"{row['codec']:<38} {row['ranks']:>5} {row['tree_bytes'] // MIB:>9} {extra:>10.1f} {most:>11.1f}"


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the memory that calls take.")
    add = parser.add_argument
    add("--json", type=output, metavar="FILE", help="also write everything to FILE")
    add("--size", type=byte_count, default=256 << 20, help="of the tree of float32 (default 256M)")
    add("--steps", type=positive, default=10_000, metavar="N", help="steps of many tensors (default 10000)")
    add("--ranks", type=positive, nargs="+", default=[1, 2], metavar="N", help="processes (default 1 and 2)")
    add("--codecs", nargs="+", default=list(CODECS), metavar="CODEC", help="default: all lane codecs")
    add("--alone", choices=("peak", "growth"), help=argparse.SUPPRESS)  # in a process of its own
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    if options.alone is not None:
        comm = gccomm.init("mpi")
        if options.alone == "peak":
            found = peak(options.codecs[0], options.size, comm)
        else:
            found = growth(options.steps, comm)
        if comm.rank == 0:
            write_json(options.json, found)
        return 0
    print(f"{'codec':<38} {'ranks':>5} {'tree(MiB)':>9} {'extra(MiB)':>10} {'bound(MiB)':>11}")
    rows = []
    for codec in options.codecs:
        for ranks in options.ranks:
            given = ["--alone", "peak", "--codecs", codec, "--size", str(options.size)]
            rows.append(in_processes(ranks, given))
            print(line(rows[-1]), flush=True)
    steps = in_processes(max(options.ranks), ["--alone", "growth", "--steps", str(options.steps)])
    print(
        f"# {steps['steps']} steps of {steps['tensors']} tensors on {steps['ranks']} ranks: resident memory"
    )
    grown, spread = steps["grown_bytes"] / MIB, steps["spread_bytes"] / MIB
    print(f"# grew by {grown:.2f} MiB, and moved within {spread:.2f} MiB")
    if options.json is not None:
        machine_ = machine(("gccomm", "numpy", "mpi4py"))
        write_json(options.json, {"machine": machine_, "peaks": rows, "growth": steps})
    failed = [row["codec"] for row in rows if row["extra_bytes"] > row["bound_bytes"]]
    failed += ["growth"] if steps["spread_bytes"] > steps["bound_bytes"] else []
    print(f"# above the bound: {', '.join(failed) or 'nothing'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
