"""Whole calls on whole machines: codecs against uncompressed MPI, and many tensors against one.

    gccomm run -n 2 benchmarks/end_to_end.py --json FILE

(a) An all-reduce of 64 MiB of float32: MPI's ways, raw and bf16, rotated and uniform: `gccomm bench`.
(b) The 161 tensors of ResNet-50 through a Reducer with 8 bits, against one tensor of their total size.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gccomm_launch.bench import byte_count, measure_size, parse, write_json
from gccomm_launch.bench_report import HEADER, compare, machine
from gccomm_launch.bench_timing import StoppedError, Stopper, interleaved
from mpi4py import MPI

import gccomm

RESNET50_TENSORS, RESNET50_PARAMETERS = 161, 25_557_032
CODEC = "uniform:wire_bits=8"
Gradients = dict[str, npt.NDArray[np.float32]]


def resnet50_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of each parameter of ResNet-50: bottleneck blocks of 3, 4, 6 and 3."""
    yield "conv1", (64, 3, 7, 7)
    yield from _norm("bn1", 64)
    channels = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            name = f"layer{stage + 1}.{block}"
            kernels = ((width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1))
            for number, shape in enumerate(kernels, 1):
                yield f"{name}.conv{number}", shape
                yield from _norm(f"{name}.bn{number}", shape[0])
            if block == 0:
                yield f"{name}.downsample", (4 * width, channels, 1, 1)
                yield from _norm(f"{name}.downsample.bn", 4 * width)
            channels = 4 * width
    yield "fc.weight", (1000, channels)
    yield "fc.bias", (1000,)


def _norm(name: str, channels: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (channels,)
    yield f"{name}.bias", (channels,)


def whole_call(options: argparse.Namespace, comm: gccomm.Communicator, stopper: Stopper) -> dict[str, Any]:
    """Measure one large array; print rows and ratios on rank 0."""
    settings = parse(["-b", str(options.size), "-e", str(options.size)])
    settings.iters, settings.warmup = options.iters, options.warmup
    rows, _ = measure_size(options.size, settings, comm, MPI.COMM_WORLD, stopper)
    comparison = compare(rows)
    if comm.rank == 0:
        print("\n".join([HEADER, *(row.line() for row in rows), *comparison.lines()]), flush=True)
    return {"rows": [asdict(row) for row in rows], "comparison": asdict(comparison)}


def many_tensors(options: argparse.Namespace, comm: gccomm.Communicator, stopper: Stopper) -> dict[str, Any]:
    """Measure ResNet-50's tensors against one of their total size, each through a Reducer of its own."""
    rng = np.random.default_rng((1, comm.rank))
    shapes = dict(resnet50_shapes())
    if options.divide > 1:
        shapes = {name: (-(-shape[0] // options.divide), *shape[1:]) for name, shape in shapes.items()}
    tree: Gradients = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    total = sum(array.size for array in tree.values())
    one: Gradients = {"all": rng.standard_normal(total, np.float32)}
    reducers = [gccomm.Reducer(CODEC, comm=comm) for _ in range(2)]  # so that each keeps its plan
    last: dict[int, Gradients] = {}  # a training loop holds a step's gradients until it has the next ones

    def step(which: int, gradients: Gradients) -> None:
        last[which] = reducers[which](gradients)

    calls = [lambda: step(0, tree), lambda: step(1, one)]
    seconds = interleaved(calls, options.warmup, options.iters, stopper, MPI.COMM_WORLD)
    many_s, one_s = (float(s) for s in np.median(seconds, axis=0))
    found = {
        "codec": CODEC,
        "tensors": len(tree),
        "parameters": total,
        "tensors_us": many_s * 1e6,
        "one_tensor_us": one_s * 1e6,
        "ratio": many_s / one_s,
        "tensors_wire_bytes": reducers[0].stats.wire_bytes,
        "one_tensor_wire_bytes": reducers[1].stats.wire_bytes,
    }
    if comm.rank == 0:
        print(f"# {CODEC}: {len(tree)} tensors, {total} parameters: {many_s * 1e6:.1f} us", flush=True)
        print(f"# one tensor of as many: {one_s * 1e6:.1f} us; ratio {many_s / one_s:.3f}", flush=True)
    return found


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time whole calls; start it with `gccomm run -n 2`.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to FILE")
    parser.add_argument("--size", type=byte_count, default=64 << 20, help="of the one array (default 64M)")
    parser.add_argument("--iters", type=int, default=31, metavar="N", help="rounds measured (default 31)")
    parser.add_argument("--warmup", type=int, default=5, metavar="N", help="rounds before (default 5)")
    parser.add_argument(
        "--divide", type=int, default=1, metavar="N", help="shorten ResNet-50's first axes N times"
    )
    options = parser.parse_args(argv)
    if options.iters < 1 or options.warmup < 0 or options.divide < 1:
        parser.error("--iters and --divide must be at least 1, --warmup at least 0")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    comm, stopper = gccomm.init("mpi"), Stopper(MPI.COMM_WORLD)
    try:
        with stopper.signals():
            report = {
                "machine": machine(),
                "ranks": comm.size,
                "whole_call": whole_call(options, comm, stopper),
                "many_tensors": many_tensors(options, comm, stopper),
            }
    except StoppedError:
        MPI.Finalize()  # here, so that a status other than 0 makes mpi4py's runner abort nothing
        return 130
    if options.json is not None and comm.rank == 0:
        write_json(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
