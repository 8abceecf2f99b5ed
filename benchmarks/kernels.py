"""Kernels on 64 MiB of float32, each as a multiple of a plain copy of that array in the same run.

Every round runs a copy before each kernel, on each instruction-set level in turn; the median over the rounds
of kernel over copy counts, so that a busy machine slows both alike. "In pieces" means pieces of 2 MiB: maxima
and encode of a piece follow each other, so that encode finds it in the cache.

    python benchmarks/kernels.py [--mib 64] [--rounds 9] [--isa x86-64-v4] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gccomm import kernels
from gccomm.kernels import DTYPE_CODES, SEGMENT, address

RANKS = 4
PIECE = 512  # blocks
BARS = {"x86-64-v4": 0, "x86-64-v3": 1}
"""Column of the bars below."""


class Case:
    """A batch of one tensor with every buffer that a kernel may need."""

    def __init__(self, mib: int, dtype: str = "float32", pooled: bool = True) -> None:
        self.size = mib << 18
        self.blocks = self.size // 1024
        values = np.random.default_rng(0).standard_normal(self.size, dtype=np.float32)
        self.x = values
        if dtype == "bfloat16":
            self.x = (values.view(np.uint32) >> 16).astype(np.uint16)
        elif dtype != "float32":
            self.x = values.astype(dtype)
        self.result = (
            kernels.pool_empty(self.x.nbytes).view(self.x.dtype) if pooled else np.zeros_like(self.x)
        )
        self.result[:] = 0
        self.words = kernels.pool_empty(4 * self.size).view(np.uint32)
        self.words[:] = 0
        self.scales = np.zeros(self.blocks, dtype=np.uint32)
        self.check = np.zeros((self.blocks, 2), dtype=np.uint32)
        self.energy = np.zeros(self.blocks, dtype=np.uint32)
        self.table = np.zeros(1, dtype=SEGMENT)
        fields = {
            "src": address(self.x),
            "dst": address(self.result),
            "size": self.size,
            "row": self.size,
            "nblocks": self.blocks,
            "key0": 0x12345678,
            "key1": 0x9ABCDEF0,
            "sign0": 0x13579BDF,
            "sign1": 0x2468ACE0,
            "dtype": DTYPE_CODES[dtype],
        }
        for name, value in fields.items():
            self.table[name] = value
        self.maxima()

    @property
    def batch(self) -> tuple[int, int]:
        return address(self.table), 1

    def maxima(self, lo: int = 0, hi: int | None = None, rotations: int = 0, energy: bool = False) -> None:
        hi = self.blocks if hi is None else hi
        energies = address(self.energy) + 4 * lo if energy else 0
        kernels.maxima(*self.batch, lo, hi, address(self.scales) + 4 * lo, energies, rotations)

    def encode(
        self, width: int, check: bool = False, lo: int = 0, hi: int | None = None, rotations: int = 0
    ) -> None:
        hi = self.blocks if hi is None else hi
        base = lo * 1024 * width // 32
        limit = ((1 << (width - 1)) - 1) * 65536 // RANKS
        kernels.encode(
            *self.batch,
            lo,
            hi,
            address(self.scales),
            address(self.words) + 4 * base,
            base,
            width,
            limit,
            16384,
            address(self.check) if check else 0,
            rotations=rotations,
        )

    def decode(
        self,
        width: int,
        subtract: bool = True,
        check: bool = False,
        stream: bool = True,
        rotations: int = 0,
        energy: bool = False,
    ) -> None:
        limit = ((1 << (width - 1)) - 1) * 65536 // RANKS
        kernels.decode(
            *self.batch,
            0,
            self.blocks,
            address(self.scales),
            address(self.words),
            0,
            width,
            limit,
            RANKS,
            subtract,
            True,
            stream,
            address(self.check) if check else 0,
            address(self.energy) if energy else 0,
            rotations=rotations,
        )

    def float_encode(self, wire: str) -> None:
        kernels.float_encode(*self.batch, 0, self.blocks, address(self.words), DTYPE_CODES[wire])

    def float_decode(self, wire: str) -> None:
        code = DTYPE_CODES[wire]
        kernels.float_decode(*self.batch, 0, self.blocks, address(self.words), code, RANKS, True, True)

    def in_pieces(self, width: int) -> None:
        for lo in range(0, self.blocks, PIECE):
            self.maxima(lo, lo + PIECE)
            self.encode(width, lo=lo, hi=lo + PIECE)

    def float_in_pieces(self, wire: str) -> None:
        """Convert through a wire buffer that is used again for every piece, there and back."""
        code, buffer = DTYPE_CODES[wire], address(self.words)
        for lo in range(0, self.blocks, PIECE):
            kernels.float_encode(*self.batch, lo, lo + PIECE, buffer, code)
            kernels.float_decode(*self.batch, lo, lo + PIECE, buffer, code, RANKS, True, True)


Measurement = tuple[str, tuple[float, float] | None, Callable[[], None]]


def measurements(mib: int) -> list[Measurement]:
    """Return (name, bars with AVX-512 and AVX2, function) of everything that is measured."""
    single, plain = Case(mib), Case(mib, pooled=False)
    brain, half, double = (Case(mib, dtype) for dtype in ("bfloat16", "float16", "float64"))
    return [
        ("maxima", (0.6, 0.6), single.maxima),
        ("encode 4 bits", (0.75, 1.0), lambda: single.encode(4)),
        ("encode 5 bits", None, lambda: single.encode(5)),
        ("encode 8 bits", (0.85, 1.0), lambda: single.encode(8)),
        ("encode 8 bits + check", None, lambda: single.encode(8, check=True)),
        ("decode 8 bits", (0.6, 0.9), lambda: single.decode(8)),
        ("decode 8 bits, not subtracted", (0.6, 0.9), lambda: single.decode(8, subtract=False)),
        ("decode 8 bits + check", None, lambda: single.decode(8, check=True)),
        ("decode 8 bits, through the cache", None, lambda: single.decode(8, stream=False)),
        ("decode 8 bits, into a NumPy array", None, lambda: plain.decode(8)),
        ("decode 4 bits", (0.6, 0.9), lambda: single.decode(4)),
        ("decode 5 bits", None, lambda: single.decode(5)),
        ("encode 16 bits", (0.95, 1.0), lambda: single.encode(16)),
        ("decode 16 bits", None, lambda: single.decode(16)),
        ("maxima + encode 8 bits in pieces", None, lambda: single.in_pieces(8)),
        ("maxima + energy", None, lambda: single.maxima(energy=True)),
        ("rotate: maxima", (0.9, 1.3), lambda: single.maxima(rotations=1)),
        ("rotate: maxima + energy", None, lambda: single.maxima(rotations=1, energy=True)),
        ("rotate: encode 8 bits", None, lambda: single.encode(8, rotations=1)),
        ("rotate: encode 8 bits + check", (1.35, 2.4), lambda: single.encode(8, check=True, rotations=1)),
        ("rotate: decode 8 bits", (1.3, 2.3), lambda: single.decode(8, rotations=1)),
        (
            "rotate: decode 8 bits, cached",
            None,
            lambda: single.decode(8, rotations=1, stream=False),
        ),
        ("rotate: decode 8 bits + check", None, lambda: single.decode(8, check=True, rotations=1)),
        (
            "rotate: decode 8 bits + check, energy",
            None,
            lambda: single.decode(8, check=True, energy=True, rotations=1),
        ),
        ("rotate twice: maxima", None, lambda: single.maxima(rotations=2)),
        ("rotate twice: encode 8 bits + check", None, lambda: single.encode(8, check=True, rotations=2)),
        ("rotate twice: decode 8 bits", None, lambda: single.decode(8, rotations=2)),
        ("to bfloat16", (0.55, 0.9), lambda: single.float_encode("bfloat16")),
        ("from bfloat16", (0.6, 0.9), lambda: single.float_decode("bfloat16")),
        ("to and from bfloat16 in pieces", None, lambda: single.float_in_pieces("bfloat16")),
        ("to float16", None, lambda: single.float_encode("float16")),
        ("from float16", None, lambda: single.float_decode("float16")),
        ("bfloat16: maxima", None, brain.maxima),
        ("bfloat16: encode 8 bits", None, lambda: brain.encode(8)),
        ("bfloat16: decode 8 bits", None, lambda: brain.decode(8)),
        ("float16: maxima", None, half.maxima),
        ("float16: encode 8 bits", None, lambda: half.encode(8)),
        ("float16: decode 8 bits", None, lambda: half.decode(8)),
        ("float64: maxima", None, double.maxima),
        ("float64: encode 8 bits", None, lambda: double.encode(8)),
        ("float64: decode 8 bits", None, lambda: double.decode(8)),
    ]


def clock(function: Callable[[], None]) -> float:
    """Return the seconds of CPU time that a call takes (other processes' turns do not count)."""
    start = time.thread_time()
    function()
    return time.thread_time() - start


def measure(mib: int, rounds: int, levels: list[str], only: str) -> tuple[float, dict[str, dict[str, float]]]:
    """Return the median copy in seconds and, by name and level, multiples of it."""
    items = [m for m in measurements(mib) if only in m[0]]
    source, target = np.ones(mib << 18, dtype=np.float32), np.zeros(mib << 18, dtype=np.float32)
    copies: list[float] = []
    ratios: dict[tuple[str, str], list[float]] = {(m[0], level): [] for m in items for level in levels}
    for repeat in range(rounds + 1):
        for level in levels:
            kernels.set_isa(level)
            for name, _, function in items:
                copy, taken = clock(lambda: np.copyto(target, source)), clock(function)
                if repeat:  # the first round only warms up
                    copies.append(copy)
                    ratios[name, level].append(taken / copy)
    table: dict[str, dict[str, float]] = {m[0]: {} for m in items}
    for (name, level), values in ratios.items():
        table[name][level] = statistics.median(values)
    return statistics.median(copies), table


def report(copy: float, table: dict[str, dict[str, float]], levels: list[str]) -> None:
    bars = {name: bar for name, bar, _ in measurements(1)}
    print(f"plain copy {copy * 1e3:.2f} ms; multiples of it (median), bars in brackets")
    print(f"{'':36}" + "".join(f"{level:>18}" for level in levels))
    for name, row in table.items():
        cells = []
        for level in levels:
            bar, column = bars[name], BARS.get(level)
            limit = f"[{bar[column]:.2f}]" if bar is not None and column is not None else ""
            cells.append(f"{row[level]:>11.2f} {limit:6}")
        print(f"{name:36}" + "".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=64, help="MiB of float32")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--isa", action="append", help="instruction-set level (repeatable); default: all usable"
    )
    parser.add_argument("--only", default="", help="measure only what has this in its name")
    parser.add_argument("--json", type=Path, help="write the multiples to this file")
    options = parser.parse_args()
    levels = options.isa or list(reversed(kernels.isas()))
    copy, table = measure(options.mib, options.rounds, levels, options.only)
    report(copy, table, levels)
    if options.json is not None:
        machine = {"machine": platform.machine(), "numpy": np.__version__, "mib": options.mib}
        document = {"copy_seconds": copy, "rounds": options.rounds, **machine, "multiples": table}
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
