"""Kernels on a GPU as shares of what a copy within the device reaches, calls in a world of one, graphs.

Bytes read and written over time, as a share of those of a copy of the same array: every round runs the copy
and then each kernel, several launches of each between two events; the median over the rounds of the ratio
counts. Needs CuPy, and for calls over NCCL the back end. Words are compared with the CPU's first.

    python benchmarks/gpu.py [--mib 512] [--rounds 11] [--json FILE]

The exit status is 0 if all bars are met, 1 if not, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gccomm_launch.bench import write_json
from gccomm_launch.doctor_cuda import nccl_text
from gccomm_launch.doctor_findings import version_text
from gccomm_launch.doctor_kernels import compare
from gccomm_launch.machine import machine

import gccomm
from gccomm import kernels, memory
from gccomm.kernels import DTYPE_CODES, SEGMENT

RESULTS = Path(__file__).resolve().parent / "results"
RANKS = 4  # that limits of lanes leave room for
WARM_UP = 4  # steps before one is captured: the first three are measured
LAUNCHES = 10  # between two events: enqueued faster than a device does them
BARS = {"uniform": 0.8, "rotated": 0.6}
CODECS = ("raw", "bf16", "uniform:wire_bits=8", "uniform:wire_bits=4", "rotated", "rotated:wire_bits=4")
Work = Callable[[], None]
Clock = Callable[[Work], float]


@dataclass
class Row:
    """One kernel: bytes that it reads and writes, its time, and its bandwidth over the copy's."""

    kernel: str
    codec: str
    width: int
    bytes: int
    microseconds: float
    share: float
    bar: float | None

    @property
    def met(self) -> bool:
        return self.bar is None or self.share >= self.bar

    def line(self) -> str:
        bar = "" if self.bar is None else f"  {'at least' if self.met else 'BELOW'} {self.bar:.0%}"
        rate = self.bytes / self.microseconds / 1e3
        width = f"{self.width:2} bits" if self.width else ""
        name = f"{self.codec:8} {self.kernel:7} {width:8}"
        return f"{name} {self.microseconds:10.1f} us {rate:8.1f} GB/s {self.share:7.1%}{bar}"


class Case:
    """One tensor of float32 on a device, and all that its kernels need there."""

    def __init__(self, device: str, mib: int) -> None:
        self.used = kernels.of_device(device)
        self.size = mib << 18
        self.blocks = self.size // 1024
        values = np.random.default_rng(0).standard_normal(self.size, dtype=np.float32)
        self.x = memory.moved(values, device)
        self.out = memory.empty(device, self.size, np.float32)
        self.words = memory.empty(device, self.size // 2, np.uint32)
        self.scales = memory.empty(device, self.blocks, np.uint32)
        self.table = np.zeros(1, SEGMENT)
        fields = {
            "src": self.x.address, "dst": self.out.address, "size": self.size, "row": self.size,
            "nblocks": self.blocks, "key0": 1, "key1": 2, "sign0": 3, "sign1": 4,
            "dtype": DTYPE_CODES["float32"],
        }  # fmt: skip
        for name, value in fields.items():
            self.table[name] = value

    @property
    def queue(self) -> Any:
        return self.used.launcher.queue

    def copy(self) -> None:
        self.queue.copy(self.out, self.x)

    def maxima(self, turns: int) -> None:
        where = kernels.address(self.table), 1, 0, self.blocks
        self.used.maxima(*where, self.scales.address, rotations=turns)

    def _lanes(self, width: int) -> tuple[int, ...]:
        limit = ((1 << (width - 1)) - 1) * 65536 // RANKS
        where = kernels.address(self.table), 1, 0, self.blocks
        return (*where, self.scales.address, self.words.address, 0, width, limit)

    def encode(self, width: int, turns: int) -> None:
        self.used.encode(*self._lanes(width), 0, rotations=turns)

    def decode(self, width: int, turns: int) -> None:
        self.used.decode(*self._lanes(width), RANKS, turns > 0, False, False, rotations=turns)

    def works(self) -> dict[tuple[str, str, int], tuple[int, Work]]:
        """Return (bytes, work) by (codec, kernel, width), in an order in which they can run."""
        found: dict[tuple[str, str, int], tuple[int, Work]] = {}
        for codec, turns in (("uniform", 0), ("rotated", 1)):
            found[codec, "maxima", 0] = 4 * self.size, lambda turns=turns: self.maxima(turns)
            for width in (8, 4):
                moved = 4 * self.size + self.size * width // 8 + 4 * self.blocks
                found[codec, "encode", width] = moved, lambda w=width, turns=turns: self.encode(w, turns)
                found[codec, "decode", width] = moved, lambda w=width, turns=turns: self.decode(w, turns)
        return found


def event_clock(cupy: Any, queue: Any) -> Clock:
    """Return a clock that times launches on the device, by events of its own."""

    def timed(work: Work) -> float:
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        stream = cupy.cuda.ExternalStream(queue.stream)
        start.record(stream)
        for _ in range(LAUNCHES):
            work()
        end.record(stream)
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(start, end)) / 1e3 / LAUNCHES

    return timed


def measure_kernels(case: Case, clock: Clock, rounds: int) -> tuple[float, list[Row]]:
    """Return the copy's bytes a second, and a row a kernel."""
    works = case.works()
    copied = 8 * case.size
    ratios: dict[tuple[str, str, int], list[tuple[float, float]]] = {key: [] for key in works}
    rates = []
    for number in range(rounds + 1):
        for key, (nbytes, work) in works.items():
            rate = copied / clock(case.copy)
            seconds = clock(work)
            if number:  # the first round warms up
                rates.append(rate)
                ratios[key].append((seconds, nbytes / seconds / rate))
    rows = []
    for (codec, kernel, width), pairs in ratios.items():
        seconds, share = (statistics.median(column) for column in zip(*pairs, strict=True))
        nbytes = works[codec, kernel, width][0]
        bar = BARS[codec] if kernel != "maxima" else None
        rows.append(Row(kernel, codec, width, nbytes, 1e6 * seconds, share, bar))
    return statistics.median(rates), rows


def measure_calls(
    comm: gccomm.Communicator, x: Any, wait: Work, rounds: int, codecs: Sequence[str] = CODECS
) -> list[dict[str, Any]]:
    """Return the milliseconds of a call on an array by codec."""
    found = []
    for codec in codecs:
        reducer = gccomm.Reducer(codec, comm=comm, op="mean", error_feedback=False)
        samples = []
        for _ in range(rounds + 2):
            wait()
            start = time.perf_counter()
            reducer({"x": x})
            wait()
            samples.append(time.perf_counter() - start)
        found.append({"back_end": comm.backend, "codec": codec, "ms": 1e3 * statistics.median(samples[2:])})
    return found


def measure_graph(comm: gccomm.Communicator, cupy: Any, x: Any, rounds: int) -> dict[str, Any]:
    """Return the milliseconds of a step's replay as a CUDA graph, or why there is no graph."""
    reducer = gccomm.Reducer("uniform", comm=comm, op="mean", error_feedback=False)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        try:
            for _ in range(WARM_UP):
                reducer({"x": x})
            comm.synchronize()
            stream.begin_capture()
            kept = reducer({"x": x})
            graph = stream.end_capture()
        except Exception as error:  # CUDA's own, CuPy's, gccomm's: the report tells of it
            with suppress(Exception):
                stream.end_capture()
            return {"back_end": comm.backend, "error": f"{type(error).__name__}: {error}"}
        samples = []
        for _ in range(rounds):
            start = time.perf_counter()
            graph.launch(stream)
            stream.synchronize()
            samples.append(time.perf_counter() - start)
        del kept
    return {"back_end": comm.backend, "codec": "uniform", "replay_ms": 1e3 * statistics.median(samples)}


def describe_gpu(cupy: Any) -> dict[str, Any]:
    """Return the name of the card and the versions of what drives it."""
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(cupy.cuda.Device().id)
    try:
        from cupy.cuda import nccl

        version = nccl_text(int(nccl.get_version()))
    except (ImportError, AttributeError):
        version = "none"
    return {
        "name": properties["name"].decode(),
        "capability": f"{properties['major']}.{properties['minor']}",
        "driver": version_text(runtime.driverGetVersion()),
        "runtime": version_text(runtime.runtimeGetVersion()),
        "cupy": cupy.__version__,
        "nccl": version,
    }


def file_for(name: str) -> Path:
    """Return where results of a card are kept."""
    return RESULTS / f"gpu_{re.sub('[^a-z0-9]+', '_', name.lower()).strip('_')}.json"


def summary(gpu: dict[str, Any], copy_rate: float, rows: Sequence[Row], calls: Sequence[Any]) -> list[str]:
    """Return the lines of the report."""
    lines = [
        f"{gpu['name']}: a copy reads and writes {copy_rate / 1e9:.1f} GB/s",
        *(row.line() for row in rows),
    ]
    lines += [f"{call['back_end']:8} {call['codec']:22} {call['ms']:8.3f} ms" for call in calls]
    below = [row for row in rows if not row.met]
    return [*lines, "all bars are met" if not below else f"{len(below)} below their bars"]


def back_ends() -> list[str]:
    return [name for name in ("local", "nccl") if name in gccomm.backends.available()]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure kernels and calls on a GPU.")
    parser.add_argument("--mib", type=int, default=512, help="size of the array (default 512)")
    parser.add_argument("--rounds", type=int, default=11, help="of the measurement (default 11)")
    parser.add_argument("--json", metavar="FILE", help="default: benchmarks/results/gpu_<card>.json")
    options = parser.parse_args(argv)
    try:
        import cupy

        device = f"cuda:{cupy.cuda.Device().id}"
        case = Case(device, options.mib)
    except Exception as error:  # CuPy's or CUDA's own, whatever is missing
        print(f"benchmarks/gpu.py: no GPU can be used: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    gpu, checked = describe_gpu(cupy), compare()
    copy_rate, rows = measure_kernels(case, event_clock(cupy, case.queue), options.rounds)
    x = cupy.random.default_rng(0).standard_normal(16 << 20, dtype=cupy.float32)
    calls, graphs = [], []
    for name in back_ends():
        with gccomm.init(backend=name) as comm:
            calls += measure_calls(comm, x, cupy.cuda.Device().synchronize, options.rounds)
            if name == "nccl":
                graphs.append(measure_graph(comm, cupy, x, options.rounds))
    print("\n".join([*summary(gpu, copy_rate, rows, calls), *map(str, graphs)]))
    report = {"machine": machine(), "gpu": gpu, "equal_to_the_cpu": checked, "mib": options.mib}
    report |= {"copy_bytes_per_s": copy_rate, "kernels": [asdict(row) for row in rows]}
    path = Path(options.json) if options.json else file_for(gpu["name"])
    write_json(path, {**report, "calls": calls, "graphs": graphs})
    print(f"written to {path}")
    return int(not all(row.met for row in rows))


if __name__ == "__main__":
    sys.exit(main())
