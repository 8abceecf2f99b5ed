"""Times of all-reduces against the rate of the links: `lab.py` in a network lab of each rate.

    python benchmarks/links.py --rates 100mbit 300mbit 1gbit --json links.json --plot links.svg

Needs root, as the lab does, and that there is no other lab: each rate builds one of its own and removes it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gccomm_launch.arguments import byte_count, figure, output, positive
from gccomm_launch.bench import write_json
from gccomm_launch.bench_plot import plot

LAB = Path(__file__).with_name("lab.py")
NETLAB = [sys.executable, "-m", "gccomm_launch.cli", "netlab"]
BITS = (32, 16, 8)  # whose bounds are drawn


def at_rate(rate: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what `lab.py` finds in a lab of this rate."""
    up = [*NETLAB, "up", "--hosts", str(options.hosts), "--rate", rate]
    subprocess.run(up, check=True, stdin=subprocess.DEVNULL)
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "found.json"
            job = [*NETLAB, "run", "-n", str(options.hosts), str(LAB), "--size", str(options.size)]
            job += ["--iters", str(options.iters), "--json", str(path)]
            subprocess.run(job, check=True, stdin=subprocess.DEVNULL)
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return found
    finally:
        subprocess.run([*NETLAB, "down"], check=True, stdin=subprocess.DEVNULL)


def points(runs: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return all rows with their links' rates as measured, and the bounds of float32, 16 and 8 bits."""
    rows, bounds = [], []
    for run in runs:
        rate, n = 8 * run["lab"]["measured"] / 1e6, run["ranks"]
        # a byte a coordinate in words has no float32 to be compared with
        rows += [{**row, "mbit_per_s": rate} for row in run["rows"] if row["type"] != "uint32"]
        for bits in BITS:
            count = run["rows"][0]["count"]
            seconds = count * bits / 8 * 2 * (n - 1) / n / run["lab"]["measured"]
            busbw = 4 * count / seconds / 1e9 * 2 * (n - 1) / n
            bound = {"name": f"bound of {bits} bits", "time_us": seconds * 1e6, "busbw": busbw}
            bounds.append({**bound, "mbit_per_s": rate})
    return rows, bounds


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time all-reduces over links of several rates.")
    add = parser.add_argument
    add("--rates", nargs="+", default=["100mbit", "300mbit", "1gbit"], metavar="RATE", help="as tc has them")
    add("--hosts", type=positive, default=4, metavar="N", help="of one rank each (default 4)")
    add("--size", type=byte_count, default=4 << 20, help="of the float32 array (default 4M)")
    add("--iters", type=positive, default=5, metavar="N", help="rounds measured (default 5)")
    add("--json", type=output, metavar="FILE", help="write everything to FILE")
    add("--plot", type=figure, metavar="FILE", help="draw time and busbw against the rate")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    runs = [at_rate(rate, options) for rate in options.rates]
    if options.json is not None:
        write_json(options.json, {"runs": runs})
    if options.plot is not None:
        plot(*points(runs), options.plot, "mbit_per_s", "Mbit/s that a link carries")
    return 0


if __name__ == "__main__":
    sys.exit(main())
