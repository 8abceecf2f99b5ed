"""Steps of a backward pass whose gradients travel meanwhile, over links of limited rate.

    gccomm netlab up --hosts 2 --rate 1gbit
    gccomm netlab run -n 2 benchmarks/overlap.py --json FILE

The backward pass has 20 layers, which sleep (a device computes) or multiply matrices (this processor does),
and gives a gradient each. Three ways of the same step, interleaved: the pass alone, then everything in one
call of a Reducer (blocking); each gradient pushed as it is there, and waited for after the pass (pushed). The
communication alone is the blocking call without a pass. `x longer` is a step over the longer of the pass and
the communication alone: 1 would be perfect overlap.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
from gccomm_launch.arguments import byte_count
from gccomm_launch.bench import write_json
from gccomm_launch.bench_report import machine
from gccomm_launch.bench_timing import StoppedError, Stopper, interleaved
from gccomm_launch.netlab import FasterThanLinkError, Lab
from lab import add_rounds, finish
from mpi4py import MPI

import gccomm

LAYERS = 20
HEADER = f"{'pass':>8} {'way':<22} {'time(ms)':>9} {'quartiles':>17} {'x longer':>8}"
Gradients = dict[str, npt.NDArray[np.float32]]


def sleeping(seconds: float) -> Callable[[], None]:
    """Return a layer's computation that takes no core."""
    return lambda: time.sleep(seconds / LAYERS)


def multiplying(seconds: float) -> Callable[[], None]:
    """Return a layer's computation by NumPy, of about so long for all layers where a core is free."""
    a = np.random.default_rng(0).standard_normal((256, 256), np.float32)
    out = np.empty_like(a)
    np.matmul(a, a, out=out)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < 0.2:
        np.matmul(a, a, out=out)
        count += 1
    times = max(1, round(count * seconds / LAYERS / 0.2))

    def work() -> None:
        for _ in range(times):
            np.matmul(a, a, out=out)

    return work


class Program:
    """A backward pass and the ways to reduce its gradients, which exist already."""

    def __init__(self, options: argparse.Namespace, comm: gccomm.Communicator) -> None:
        rng = np.random.default_rng((options.seed, comm.rank))
        count = options.size // 4 // LAYERS
        self.gradients: Gradients = {
            f"layer{i:02}": rng.standard_normal(count, np.float32) for i in reversed(range(LAYERS))
        }
        make = {"comm": comm, "bucket_bytes": options.bucket}
        self.blocking = gccomm.Reducer(options.codec, **make)
        self.pushed = gccomm.Reducer(options.codec, **make)

    def passes(self, layer: Callable[[], None]) -> None:
        """Run the pass alone."""
        for _ in self.gradients:
            layer()

    def communicate(self) -> Gradients:
        """Reduce everything in one call."""
        found: Gradients = self.blocking(self.gradients)
        return found

    def block(self, layer: Callable[[], None]) -> Gradients:
        """Run the pass, then reduce."""
        self.passes(layer)
        return self.communicate()

    def push(self, layer: Callable[[], None]) -> Gradients:
        """Reduce while the pass runs."""
        for key, gradient in self.gradients.items():
            layer()
            self.pushed.push(key, gradient)
        return self.pushed.wait()

    def agree(self) -> bool:
        """Whether both ways give the same bits, at the same step."""
        while self.blocking.step < self.pushed.step:
            self.communicate()
        while self.pushed.step < self.blocking.step:
            self.push(lambda: None)
        one, two = self.communicate(), self.push(lambda: None)
        return all((one[key] == two[key]).all() for key in one)


def measure(options: argparse.Namespace, program: Program, stopper: Stopper) -> list[dict[str, Any]]:
    """Time all ways interleaved and return their rows."""
    layers = {"sleep": sleeping(options.compute / 1e3), "matmul": multiplying(options.compute / 1e3)}
    ways: list[tuple[str, str, Callable[[], object]]] = [("", "communication alone", program.communicate)]
    for name, layer in layers.items():
        ways.append((name, "pass alone", lambda layer=layer: program.passes(layer)))  # type: ignore[misc]
        ways.append((name, "blocking", lambda layer=layer: program.block(layer)))  # type: ignore[misc]
        ways.append((name, "pushed", lambda layer=layer: program.push(layer)))  # type: ignore[misc]
    seconds = interleaved([way[2] for way in ways], options.warmup, options.iters, stopper, MPI.COMM_WORLD)
    middle = np.median(seconds, axis=0)
    alone = {name: value for (name, way, _), value in zip(ways, middle, strict=True) if way == "pass alone"}
    rows = []
    for (name, way, _), times in zip(ways, seconds.T, strict=True):
        longer = max(middle[0], alone.get(name, 0.0))
        row = {"pass": name, "way": way, "time_us": float(np.median(times)) * 1e6}
        row["quartiles_us"] = [float(q) * 1e6 for q in np.quantile(times, (0.25, 0.75))]
        row["over_longer"] = float(np.median(times) / longer) if name else None
        rows.append(row)
    return rows


def line(row: dict[str, Any]) -> str:
    """Return a row under `HEADER`."""
    low, high = (q / 1e3 for q in row["quartiles_us"])
    over = "" if row["over_longer"] is None else f"{row['over_longer']:.2f}"
    return (
        f"{row['pass']:>8} {row['way']:<22} {row['time_us'] / 1e3:>9.1f} {low:>8.1f} {high:>8.1f} {over:>8}"
    )


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time steps whose communication overlaps a backward pass.")
    add = parser.add_argument
    add("--size", type=byte_count, default=48 << 20, help="of all gradients in float32 (default 48M)")
    add("--codec", default="uniform:wire_bits=8", help="default uniform:wire_bits=8")
    add("--bucket", type=byte_count, default=4 << 20, help="bucket_bytes of the reducer (default 4M)")
    add("--compute", type=float, default=100.0, metavar="MS", help="of a backward pass (default 100)")
    add_rounds(parser, iters=15, warmup=4)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    comm, stopper = gccomm.init("mpi"), Stopper(MPI.COMM_WORLD)
    lab = Lab.from_environ(os.environ)
    program = Program(options, comm)
    try:
        with stopper.signals():
            rows = measure(options, program, stopper)
    except StoppedError:
        return finish("# interrupted", 130)
    equal = bool(MPI.COMM_WORLD.allreduce(program.agree(), MPI.LAND))
    wire_bytes = program.blocking.stats.wire_bytes
    if not equal:
        return finish("overlap.py: pushed and blocking steps differ", 1)
    if lab is not None:
        try:
            lab.check(wire_bytes, rows[0]["time_us"] / 1e6, range(1, comm.size + 1))
        except FasterThanLinkError as error:
            return finish(f"overlap.py: refused: {error}", 1)
    report: dict[str, Any] = {"machine": machine(), "ranks": comm.size, "lab": asdict(lab) if lab else None}
    report |= {"layers": LAYERS, "size": options.size, "codec": options.codec, "bucket_bytes": options.bucket}
    report |= {"wire_bytes": wire_bytes, "buckets": len(program.pushed._pushes._buckets), "rows": rows}
    if comm.rank == 0:
        heading = [f"{comm.size} ranks, {report['machine']['mpi']}", *(lab.describe() if lab else [])]
        print("\n".join([*(f"# {text}" for text in heading), HEADER, *map(line, rows)]), flush=True)
        if options.json is not None:
            write_json(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
