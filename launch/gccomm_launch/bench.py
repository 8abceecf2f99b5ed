"""`gccomm bench`: time all-reduces, codecs against uncompressed MPI, with nccl-tests' options and columns.

With ``--accuracy`` it measures errors instead: :mod:`gccomm_launch.accuracy`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gccomm_launch.arguments import byte_count, codec, factor, figure, natural, output, positive

if TYPE_CHECKING:
    import gccomm
    from gccomm_launch.bench_peers import Peers
    from gccomm_launch.bench_report import Row
    from gccomm_launch.bench_timing import Stopper
    from gccomm_launch.bench_trace import Traces

__all__ = ["DEFAULT_CODECS", "bench", "byte_count", "measure_size", "parse", "sizes", "write_json"]

DEFAULT_CODECS = (
    "rotated:wire_bits=8",
    "uniform:wire_bits=8",
    "uniform:wire_bits=4",
    "uniform:wire_bits=4,scales=predicted",
)


def bench(argv: Sequence[str]) -> int:
    """Measure; where no MPI launcher has started this process, start ranks that do.

    Parameters
    ----------
    argv : sequence of str
        See ``gccomm bench --help``.

    Returns
    -------
    int
        0, 130 after an interrupt, or the status of the ranks.

    Raises
    ------
    SystemExit
        `argv` is wrong (status 2).
    """
    from gccomm import backends

    if "--accuracy" in argv:
        from gccomm_launch.accuracy import accuracy

        return accuracy([text for text in argv if text != "--accuracy"])
    options = parse(argv)
    if backends.launcher() is None:
        from gccomm_launch.progress import pass_on
        from gccomm_launch.run import run

        pass_on(os.environ)
        return run(["-n", str(options.n or 2), "-m", "gccomm_launch.bench", *argv])
    return _on_ranks(options)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the checked options; SystemExit (status 2) where they are wrong."""
    parser = argparse.ArgumentParser(
        prog="gccomm bench",
        description="Time all-reduces: codecs against uncompressed MPI, in the same run.",
        epilog="Sizes are those of the uncompressed array, in bytes, or with K, M or G. Ratios are the "
        "uncompressed way's time over the codec's. Codecs that adapt run in a Reducer, biased ones with "
        "error feedback: their vNMSE is of steps that also send what earlier ones left. Between hosts, "
        "gccomm's ways are called before until its algorithms have been tried.",
    )
    add = parser.add_argument
    add("-n", type=positive, metavar="N", help="ranks to start (default 2); not under an MPI launcher")
    add("-b", "--minbytes", type=byte_count, default=1 << 20, metavar="SIZE", help="least size (default 1M)")
    add("-e", "--maxbytes", type=byte_count, metavar="SIZE", help="no size above (default 64M, at least -b)")
    add("-f", "--stepfactor", type=factor, default=8, metavar="F", help="from size to size (default 8)")
    add("-w", "--warmup", type=natural, default=3, metavar="N", help="rounds before (default 3)")
    add("-i", "--iters", type=positive, default=20, metavar="N", help="rounds measured (default 20)")
    codecs_help = f"ids with options (default {' '.join(DEFAULT_CODECS)}); raw and bf16 are measured besides"
    add("--codecs", nargs="+", type=codec, default=list(DEFAULT_CODECS), metavar="CODEC", help=codecs_help)
    add("--op", choices=("sum", "mean"), default="sum", help="reduction (default sum)")
    dtype_help = "of the arrays (default float32); MPI sums float16 as float32"
    add("--dtype", choices=("float32", "float64", "float16"), default="float32", help=dtype_help)
    add("--seed", type=natural, default=0, metavar="N", help="of the Gaussian inputs (default 0)")
    add("--json", type=output, metavar="FILE", help="also write everything to FILE")
    add("--no-peers", dest="peers", action="store_false", help="leave out other libraries' all-reduces")
    add("--plot", type=figure, metavar="FILE", help="draw time and busbw against size (needs matplotlib)")
    trace_help = (
        "also write a timeline of one more call of each codec and size to FILE (https://ui.perfetto.dev)"
    )
    add("--trace", type=output, metavar="FILE", help=trace_help)
    accuracy_help = "measure errors in place of times; `gccomm bench --accuracy --help` shows its options"
    add("--accuracy", action="store_true", help=accuracy_help)
    options = parser.parse_args(argv)
    if options.accuracy:
        parser.error("write --accuracy in full")
    del options.accuracy
    if options.maxbytes is None:
        options.maxbytes = max(64 << 20, options.minbytes)
    if options.maxbytes < options.minbytes:
        parser.error(f"--maxbytes {options.maxbytes} is less than --minbytes {options.minbytes}")
    return options


def sizes(options: argparse.Namespace) -> list[int]:
    """Return the sizes to measure: the least, times the factor again and again, up to the greatest."""
    found = []
    size = options.minbytes
    while size <= options.maxbytes:
        found.append(size)
        size *= options.stepfactor
    return found


def _on_ranks(options: argparse.Namespace) -> int:
    from mpi4py import MPI

    import gccomm
    from gccomm_launch.bench_peers import open_peers
    from gccomm_launch.bench_report import machine
    from gccomm_launch.bench_timing import StoppedError, Stopper

    comm = gccomm.init("mpi")
    speaks = comm.rank == 0
    if options.n not in (None, comm.size):
        _say(speaks, f"gccomm bench: -n {options.n}, but the launcher has started {comm.size} ranks")
        return 2
    mpi = MPI.COMM_WORLD.Dup()
    stopper = Stopper(mpi)
    files = {name: getattr(options, name) for name in ("json", "plot", "trace")}
    report: dict[str, Any] = {
        "machine": machine(),
        "ranks": comm.size,
        "options": {**vars(options), "n": comm.size, **{k: v and str(v) for k, v in files.items()}},
        "rows": [],
        "refused": [],
        "unavailable": {},
        "bounds": [],
        "comparisons": [],
    }
    try:
        with stopper.signals(), open_peers(mpi, options.peers) as peers:
            if peers is not None:
                report["unavailable"] = peers.unavailable
            _measure_all(options, report, comm, mpi, stopper, peers)
    except StoppedError:
        _say(speaks, "# interrupted")
        # Finalised here, a status other than 0 makes mpi4py's runner abort nothing.
        MPI.Finalize()
        return 130
    if speaks:
        _write(options, report)
    mpi.Free()
    return 0


def _measure_all(
    options: argparse.Namespace,
    report: dict[str, Any],
    comm: gccomm.Communicator,
    mpi: Any,
    stopper: Stopper,
    peers: Peers | None,
) -> None:
    """Measure all sizes, print them and fill the report; collective."""
    from gccomm_launch.bench_bounds import bound_rows
    from gccomm_launch.bench_report import HEADER, compare
    from gccomm_launch.bench_trace import Traces
    from gccomm_launch.progress import progress

    speaks = comm.rank == 0
    absent = [f"# {name}: not available: {reason}" for name, reason in report["unavailable"].items()]
    _say(speaks, _heading(report), *absent, HEADER)
    traces = Traces(options.trace, comm)
    rounds = len(sizes(options)) * (options.warmup + options.iters)
    with progress(rounds, "gccomm bench", speaks=speaks) as tick:
        for size in sizes(options):
            rows, refused = measure_size(size, options, comm, mpi, stopper, peers, tick, traces)
            comparison = compare(rows)
            notes = [f"# {name}: left out, refused: {reason}" for name, reason in refused.items()]
            _say(speaks, *(row.line() for row in rows), *comparison.lines(), *notes)
            report["rows"] += [asdict(row) for row in rows]
            report["refused"] += [{"size": size, "codec": name, "reason": refused[name]} for name in refused]
            report["comparisons"].append(asdict(comparison))
            report["bounds"] += bound_rows(rows, comm.size, options.iters, stopper, mpi)
    traces.write(mpi)


def _write(options: argparse.Namespace, report: dict[str, Any]) -> None:
    if options.json is not None:
        write_json(options.json, report)
    if options.plot is not None:
        from gccomm_launch.bench_plot import plot

        plot(report["rows"], report["bounds"], options.plot)


def measure_size(
    size: int,
    options: argparse.Namespace,
    comm: gccomm.Communicator,
    mpi: Any,
    stopper: Stopper,
    peers: Peers | None = None,
    tick: Callable[[], object] = lambda: None,
    traces: Traces | None = None,
) -> tuple[list[Row], dict[str, str]]:
    """Measure all ways on arrays of `size` bytes uncompressed; collective.

    Parameters
    ----------
    size : int
        Bytes as float32, or as float64 for float64.
    options : argparse.Namespace
        Of :func:`parse`.
    comm, mpi
        The same ranks as gccomm's and as mpi4py's communicator.
    stopper : Stopper
        Its barrier comes before each call.
    peers : Peers, optional
        Other libraries.
    tick : callable
        Called after each round.
    traces : Traces, optional
        What records one more call of each of gccomm's ways.

    Returns
    -------
    rows : list of Row
        MPI_Allreduce in one call first; the codecs in the order of the options last.
    refused : dict
        Why, of codecs that cannot serve so many ranks and peers that do not know the dtype.
    """
    from gccomm_launch.bench_report import make_row
    from gccomm_launch.bench_timing import exact_sum, interleaved, settle, vnmse
    from gccomm_launch.bench_ways import all_ways, usable_ways

    item = 8 if options.dtype == "float64" else 4
    count = size // item
    draws = np.random.default_rng((options.seed, comm.rank)).standard_normal(count, np.float32)
    x = draws.astype(options.dtype, copy=False)
    others, left_out = peers.ways(x, options.op) if peers is not None else ([], {})
    ways, refused = usable_ways(all_ways(x, comm, mpi, options.codecs, options.op, others))
    refused |= (
        {name: reason for name, reason in left_out.items() if name not in peers.unavailable} if peers else {}
    )
    settle([way.call for way in ways if way.kind in ("float", "codec")], count, stopper, mpi)
    seconds = interleaved([way.call for way in ways], options.warmup, options.iters, stopper, mpi, tick)
    exact = exact_sum(x, mpi, options.op)
    rows = []
    for way, times in zip(ways, seconds.T, strict=True):
        stopper.barrier()
        error = vnmse(way.call(), exact, mpi)
        rows.append(make_row(way, times, count * item, count, comm.size, error))
        if traces is not None and way.kind in ("float", "codec"):
            traces.record(way, size, stopper)
    return rows, refused


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Write a report in one go, so that an interrupt leaves no half of it."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    os.replace(part, path)


def _heading(report: dict[str, Any]) -> str:
    m, o = report["machine"], report["options"]
    where = f"{report['ranks']} ranks, {m['cores']} cores, {m['cpu']} ({m['isa']}), {m['mpi']}"
    what = f"{o['op']} of {o['dtype']}, medians of {o['iters']} interleaved rounds after {o['warmup']}"
    return f"# gccomm {m['versions']['gccomm']}, {where}\n# {what}"


def _say(speaks: bool, *lines: str) -> None:
    if speaks:
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    sys.exit(bench(sys.argv[1:]))
