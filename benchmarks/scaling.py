"""Whether the cost of a call grows with ranks and sizes as the alpha-beta model says.

    gccomm run -n 2 benchmarks/scaling.py --json 2.json
    python benchmarks/scaling.py --merge 2.json 3.json 4.json --json scaling.json --plot scaling.svg

On n ranks a call on S bytes should take T = alpha + beta S, with alpha what the messages cost and beta what a
byte costs in encoding, on the wire and in decoding. Both are fitted to the medians of each way and number of
ranks, by least squares of the relative errors; what is left says how far the model holds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gccomm_launch.arguments import byte_count, factor, figure, natural, output, positive
from gccomm_launch.bench import write_json

SHARED_LIMIT_US = 40.0  # of the least size, between ranks of one host
LINK_RATIO = 2.5  # of the least size, over MPI's own time, between hosts
CODECS = ("raw", "bf16", "uniform:wire_bits=8", "rotated:wire_bits=8")
LEAST_S = 0.5  # of measured rounds of one size, within the limits on their number
WARM_S = 0.2  # of rounds before
Row = dict[str, Any]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Time MPI's own all-reduce and the codecs at all sizes; collective."""
    from gccomm_launch.bench_report import machine, make_row
    from gccomm_launch.bench_timing import Stopper, interleaved, settle
    from gccomm_launch.bench_ways import codec_way, mpi_ways
    from gccomm_launch.netlab import Lab
    from gccomm_launch.progress import progress
    from mpi4py import MPI

    import gccomm

    comm, mpi = gccomm.init("mpi"), MPI.COMM_WORLD
    stopper = Stopper(mpi)
    hosts, lab = len(set(mpi.allgather(MPI.Get_processor_name()))), Lab.from_environ(os.environ)
    rows: list[Row] = []
    sizes = sizes_of(options.minbytes, options.maxbytes, options.stepfactor)
    with stopper.signals(), progress(len(sizes), "sizes", speaks=comm.rank == 0) as tick:
        for size in sizes:
            x = np.random.default_rng(comm.rank).standard_normal(size // 4, np.float32)
            ways = [mpi_ways(x, mpi)[0], *(codec_way(name, x, comm) for name in CODECS)]
            calls = [way.call for way in ways]
            settle(calls[1:], x.size, stopper, mpi)
            trial = interleaved(calls, 1, 1, stopper, mpi)
            iters = int(np.clip(LEAST_S / trial.sum(), options.least, options.most))
            warmup = max(options.warmup, min(iters, int(WARM_S / trial.sum())))
            seconds = interleaved(calls, warmup, iters, stopper, mpi)
            for way, times in zip(ways, seconds.T, strict=True):
                way.call()  # whose figures are those of the last call
                row = asdict(make_row(way, times, size, x.size, comm.size, 0.0))
                row |= {"n": comm.size, "hosts": hosts, "iters": iters}
                if lab is not None and hosts > 1:
                    lab.check(row["wire_bytes"], row["time_us"] / 1e6, range(1, hosts + 1))
                rows.append({key: value for key, value in row.items() if key != "vnmse"})
            tick()
    found = {"machine": machine(), "ranks": comm.size, "hosts": hosts, "rows": rows}
    return found if lab is None else {**found, "lab": asdict(lab)}


def sizes_of(least: int, most: int, step: int) -> list[int]:
    """Return the sizes to measure."""
    found = [least]
    while found[-1] * step <= most:
        found.append(found[-1] * step)
    return found


def fit(sizes: Sequence[int], times_us: Sequence[float]) -> tuple[float, float, list[float]]:
    """Return alpha (us) and beta (us a byte), neither below 0, and measured over modelled times."""
    x, t = np.asarray(sizes, np.float64), np.asarray(times_us, np.float64)
    parts = np.stack([np.ones_like(x), x], axis=1) / t[:, None]
    admissible: list[tuple[float, npt.NDArray[np.float64]]] = []
    for kept in ([0, 1], [0], [1]):  # a negative part is no cost: then one of them alone
        found = np.zeros(2)
        found[kept] = np.linalg.lstsq(parts[:, kept], np.ones_like(t), rcond=None)[0]
        if (found >= 0).all():
            admissible.append((float(((parts @ found - 1) ** 2).sum()), found))
    best = min(admissible, key=lambda one: one[0])[1]
    modelled = best[0] + best[1] * x
    return float(best[0]), float(best[1]), (t / modelled).tolist()


def models(rows: Sequence[Row]) -> list[Row]:
    """Return the model of each way and number of ranks."""
    found = []
    for codec, n in dict.fromkeys((row["codec"], row["n"]) for row in rows):
        mine = sorted((r for r in rows if (r["codec"], r["n"]) == (codec, n)), key=lambda row: row["size"])
        sizes = [row["size"] for row in mine]
        alpha, beta, ratios = fit(sizes, [row["time_us"] for row in mine])
        model: Row = {"codec": codec, "n": n, "kind": mine[0]["kind"], "alpha_us": alpha, "sizes": sizes}
        model |= {"beta_us_per_mib": beta * (1 << 20), "measured_over_modelled": ratios}
        found.append(model)
    return found


def verdicts(rows: Sequence[Row]) -> list[Row]:
    """Compare the least size with its bar: a time on one host, a ratio to MPI's own time between hosts."""
    found = []
    least = min(row["size"] for row in rows)
    for row in (row for row in rows if row["size"] == least and row["kind"] != "mpi"):
        one = next(r for r in rows if (r["size"], r["n"], r["kind"]) == (least, row["n"], "mpi"))
        verdict: Row = {"codec": row["codec"], "n": row["n"], "size": least, "time_us": row["time_us"]}
        verdict["over_mpi"] = row["time_us"] / one["time_us"]
        on_links = row["hosts"] > 1
        verdict["bar"] = f"{LINK_RATIO} x MPI" if on_links else f"{SHARED_LIMIT_US:.0f} us"
        value, limit = (verdict["over_mpi"], LINK_RATIO) if on_links else (row["time_us"], SHARED_LIMIT_US)
        found.append({**verdict, "met": value <= limit})
    return found


def show(report: Row) -> str:
    """Return models and bars as text."""
    lines = [f"{'way':<24} {'n':>2} {'alpha(us)':>10} {'us/MiB':>9}  measured / modelled, by size"]
    for model in report["models"]:
        ratios = " ".join(f"{ratio:.2f}" for ratio in model["measured_over_modelled"])
        numbers = f"{model['n']:>2} {model['alpha_us']:>10.1f} {model['beta_us_per_mib']:>9.1f}"
        lines.append(f"{model['codec']:<24} {numbers}  {ratios}")
    for bar in report["bars"]:
        met = "met" if bar["met"] else "not met"
        what = f"{bar['size']} bytes, {bar['time_us']:.1f} us, {bar['over_mpi']:.2f} x MPI's"
        lines.append(f"# {bar['codec']}, n = {bar['n']}: {what}; bar {bar['bar']}: {met}")
    return "\n".join(lines)


def draw(report: Row, path: Path) -> None:
    """Draw times (points) and models (lines), a panel for each way."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(model["codec"] for model in report["models"]))
    colours = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
    with rc_context({"font.size": 9, "svg.hashsalt": "gccomm"}):
        figure_ = Figure(figsize=(2.6 * len(names), 3.2), layout="constrained")
        panels = figure_.subplots(1, len(names), sharey=True, squeeze=False)[0]
        handles: dict[str, Any] = {}
        for axis, name in zip(panels, names, strict=True):
            mine = [model for model in report["models"] if model["codec"] == name]
            for colour, model in zip(colours, mine, strict=False):
                xs = np.geomspace(model["sizes"][0], model["sizes"][-1], 64)
                modelled = model["alpha_us"] + model["beta_us_per_mib"] * xs / (1 << 20)
                axis.plot(xs, modelled, color=colour, linewidth=1.0)
                points = [r for r in report["rows"] if (r["codec"], r["n"]) == (name, model["n"])]
                at = [r["size"] for r in points], [r["time_us"] for r in points]
                (dots,) = axis.plot(*at, "o", color=colour, markersize=3.5)
                handles.setdefault(f"n = {model['n']}", dots)
            axis.set_title(name, fontsize=8)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xlabel("bytes of float32")
            axis.grid(True, color="0.9", linewidth=0.6)
        panels[0].set_ylabel("time (us); line: alpha + beta S")
        figure_.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)
        figure_.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fit the alpha-beta model to times over sizes and ranks.")
    add = parser.add_argument
    add("-b", "--minbytes", type=byte_count, default=4 << 10, metavar="SIZE", help="default 4K")
    add("-e", "--maxbytes", type=byte_count, default=256 << 20, metavar="SIZE", help="default 256M")
    add("-f", "--stepfactor", type=factor, default=4, metavar="F", help="from size to size (default 4)")
    add("--warmup", type=natural, default=3, metavar="N", help="rounds before (default 3)")
    add("--least", type=positive, default=5, metavar="N", help="fewest rounds of a size (default 5)")
    add("--most", type=positive, default=400, metavar="N", help="most rounds of a size (default 400)")
    add("--merge", type=Path, nargs="+", metavar="FILE", help="put results of several runs together")
    add("--json", type=output, metavar="FILE", help="write everything to FILE")
    add("--plot", type=figure, metavar="FILE", help="with --merge: draw times and models")
    options = parser.parse_args(argv)
    if options.maxbytes < options.minbytes:
        parser.error(f"--maxbytes {options.maxbytes} is less than --minbytes {options.minbytes}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    if options.merge is None:
        report = measure(options)
        from mpi4py import MPI

        if MPI.COMM_WORLD.rank:
            return 0
    else:
        parts = [json.loads(path.read_text(encoding="utf-8")) for path in options.merge]
        report = {"machine": parts[0]["machine"], "rows": [row for part in parts for row in part["rows"]]}
        report |= {"lab": parts[0]["lab"]} if "lab" in parts[0] else {}
    report |= {"models": models(report["rows"]), "bars": verdicts(report["rows"])}
    print(show(report), flush=True)
    if options.json is not None:
        write_json(options.json, report)
    if options.plot is not None:
        draw(report, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
