"""Write the tables of the README and of docs/codecs/rehop.md from the committed results.

    python benchmarks/tables.py            # rewrites them
    python benchmarks/tables.py --check    # status 1 where it would change something

A table is known by its first line. The sentences around the tables are written by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS, ROOT = HERE / "results", HERE.parent
LIBRARIES = ("mpich", "openmpi")
FLOATS = ("raw", "bf16")
PIECES = re.compile(r"MPI_Allreduce in \d+ [KM]iB")
CODECS = {
    "raw": "`raw`",
    "bf16": "`bf16`",
    "rotated:wire_bits=8": "`rotated`, 8 bits",
    "uniform:wire_bits=8": "`uniform`, 8 bits",
    "uniform:wire_bits=8,widening=true": "`uniform`, 8 bits, [widening](docs/codecs/uniform.md#widening)",
    "uniform:wire_bits=5": "`uniform`, 5 bits",
    "uniform:wire_bits=4": "`uniform`, 4 bits",
    "uniform:wire_bits=4,scales=predicted": "`uniform`, 4 bits, predicted scales",
}


def load(name: str) -> Any:
    """Return a committed result."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def by_codec(rows: Sequence[dict[str, Any]], **where: Any) -> dict[str, dict[str, Any]]:
    """Return the rows with these fields by their ways."""
    return {row["codec"]: row for row in rows if all(row[k] == v for k, v in where.items())}


def line(*cells: object) -> str:
    """Return a line of a table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def ms(microseconds: float) -> str:
    """Return a time in milliseconds."""
    return f"{microseconds / 1e3:.1f}"


def one_host() -> Iterator[str]:
    """Milliseconds of whole calls in shared memory."""
    runs = [by_codec(load(f"end_to_end_{name}")["whole_call"]["rows"]) for name in LIBRARIES]
    versions = [load(f"end_to_end_{name}")["machine"]["mpi"] for name in LIBRARIES]
    yield line("", *versions).replace("|  |", "| |")
    yield "|---" * (1 + len(runs)) + "|"
    yield line("one `MPI_Allreduce` call", *(ms(run["MPI_Allreduce"]["time_us"]) for run in runs))
    pieces = [f"{ms(_pieces(run, False))}; {ms(_pieces(run, True))}" for run in runs]
    yield line("best of `MPI_Allreduce` in pieces of 256 KiB to 4 MiB, new result; kept result", *pieces)
    for codec, name in CODECS.items():
        if codec in runs[0]:
            yield line(f"gccomm {name}", *(ms(run[codec]["time_us"]) for run in runs))


def _pieces(rows: dict[str, dict[str, Any]], kept: bool) -> float:
    ending = " (kept out)" if kept else ""
    times = [row["time_us"] for way, row in rows.items() if PIECES.fullmatch(way.removesuffix(ending))]
    return float(min(times))


def over_uncompressed() -> Iterator[str]:
    """Whole calls as multiples of the fastest uncompressed way with a new result."""
    runs = [load(f"end_to_end_{name}")["whole_call"] for name in LIBRARIES]
    yield line("times the fastest uncompressed way", "MPICH", "Open MPI")
    yield "|---|---|---|"
    for codec, name in CODECS.items():
        if codec in FLOATS or codec not in by_codec(runs[0]["rows"]):
            continue
        rows = [by_codec(run["rows"]) for run in runs]
        best = [r[run["comparison"]["best_uncompressed"]] for r, run in zip(rows, runs, strict=True)]
        ratios = (r[codec]["time_us"] / b["time_us"] for r, b in zip(rows, best, strict=True))
        yield line(name, *(f"{ratio:.2f}" for ratio in ratios))


def over_links(names: dict[str, str]) -> Iterator[str]:
    """Milliseconds over links of 1 Gbit/s, and multiples of the bound; ways that share a row have a ;."""
    runs = [by_codec(load(f"lab_{name}")["rows"]) for name in LIBRARIES]
    yield "| | MPICH | x bound | Open MPI | x bound |"
    yield "|---" * 5 + "|"
    for ways, name in names.items():
        cells: list[str] = []
        for run in runs:
            pieces = (row for way, row in run.items() if PIECES.fullmatch(way))
            best = {"pieces": min(pieces, key=lambda row: row["time_us"])}
            rows = [{**run, **best}[way] for way in ways.split("; ")]
            cells.append("; ".join(ms(row["time_us"]) for row in rows))
            cells.append("; ".join(f"{row['time_us'] / row['bound_us']:.2f}" for row in rows))
        yield line(name, *cells)


def links() -> Iterator[str]:
    """What the README shows of them."""
    lanes = ("uniform:wire_bits=8", "uniform:wire_bits=8,widening=true", "uniform:wire_bits=5")
    ours = (*FLOATS, *lanes, "rotated:wire_bits=8")
    names = {
        "MPI_Allreduce": "one `MPI_Allreduce` call, float32",
        "pieces": "best of `MPI_Allreduce` in pieces of 256 KiB to 4 MiB",
        "gloo; gloo bfloat16": "gloo float32; bfloat16 (PyTorch 2.13)",
        **{codec: f"gccomm {CODECS[codec]}" for codec in ours},
        "rehop:wire_bits=5": "gccomm [`rehop`](docs/codecs/rehop.md), 5 bits",
        "rehop:wire_bits=4": "gccomm `rehop`, 4 bits",
    }
    yield from over_links(names)


def rehop() -> Iterator[str]:
    """What the page of `rehop` shows of them."""
    ours = ("uniform:wire_bits=5", "rotated:wire_bits=8", "bf16")
    names = {f"rehop:wire_bits={bits}": f"`rehop`, {bits} bits" for bits in (5, 4)}
    names |= {codec: CODECS[codec] for codec in ours}
    yield from over_links({**names, "gloo bfloat16": "gloo bfloat16 (PyTorch 2.13)"})


def hierarchy() -> Iterator[str]:
    """What hosts of several ranks gain by adding up first."""
    runs = [load(f"hierarchy_{name}")["rows"] for name in LIBRARIES]
    yield "| times as fast as a ring of all ranks | MPICH | Open MPI | vNMSE, ring | vNMSE |"
    yield "|---" * 5 + "|"
    names = {
        ("uniform", "words"): "`uniform`, hosts add up words (default)",
        ("uniform", "floats"): "`uniform`, hosts add up floats (`hierarchical=True`)",
        ("rotated", "words"): "`rotated`, words",
        ("rotated", "floats"): "`rotated`, floats",
    }
    for (codec, levels), name in names.items():
        found = [by_codec(rows, levels=levels)[f"{codec}:wire_bits=8"] for rows in runs]
        flat = by_codec(runs[0], levels="flat")[f"{codec}:wire_bits=8"]
        errors = (f"{row['vnmse']:.1e}" for row in (flat, found[0]))
        yield line(name, *(f"{row['x_flat']:.2f}" for row in found), *errors)


def overlap() -> Iterator[str]:
    """Milliseconds of steps whose communication overlaps a backward pass."""
    runs = [load(f"overlap_{name}")["rows"] for name in LIBRARIES]
    yield "| | MPICH | Open MPI |"
    yield "|---|---|---|"
    yield line("communication alone", *(ms(rows[0]["time_us"]) for rows in runs))
    for number, name in ((1, "sleep"), (4, "multiply matrices")):
        cells = ("; ".join(ms(row["time_us"]) for row in rows[number : number + 3]) for rows in runs)
        yield line(f"layers that {name}: alone; then one call; pushed", *cells)


def cost() -> Iterator[str]:
    """The alpha-beta model, and the least size."""
    here, lab = load("scaling_mpich"), load("scaling_lab_mpich")
    yield ("| MPICH, 2 ranks | alpha (us) | beta (us a MiB) | 4 KiB (us) | 4 KiB, 2 hosts, 1 Gbit/s (us) |")
    yield "|---" * 5 + "|"
    models, local = by_codec(here["models"], n=2), by_codec(here["rows"], n=2, size=4096)
    far = by_codec(lab["rows"], n=2, size=4096)
    for codec in ("MPI_Allreduce", "raw", "bf16", "uniform:wire_bits=8", "rotated:wire_bits=8"):
        model, times = models[codec], (local[codec]["time_us"], far[codec]["time_us"])
        cells = model["alpha_us"], model["beta_us_per_mib"], *times
        yield line(CODECS.get(codec, f"`{codec}`"), *(f"{value:.0f}" for value in cells))


def digits() -> Iterator[str]:
    """Accuracies of the digits example."""
    yield "| codec | accuracy | points to `raw` | bytes against float32 |"
    yield "|---" * 4 + "|"
    for row in load("digits")["rows"]:
        points = round(row["mean_points"], 2) + 0.0  # never -0
        yield line(
            f"`{row['codec']}`", f"{row['mean_accuracy']:.2%}", f"{points:+.2f}", f"1/{row['ratio']:.2f}"
        )


def kernels() -> Iterator[str]:
    """Kernels as multiples of a copy."""
    columns = {
        "maxima": "maxima",
        "encode 4 bits": "encode 4 bits",
        "encode 8 bits": "encode 8",
        "encode 16 bits": "16",
        "decode 8 bits": "decode 8 bits",
        "rotate: maxima": "rotate, maxima",
        "rotate: encode 8 bits + check": "rotated encode with check words",
        "rotate: decode 8 bits": "rotated decode",
        "to bfloat16": "to bf16",
        "from bfloat16": "from",
    }
    yield line("", *columns.values()).replace("|  |", "| |")
    yield "|---" * (1 + len(columns)) + "|"
    found = load("kernels")["multiples"]
    for name, level in (("AVX-512", "x86-64-v4"), ("AVX2", "x86-64-v3")):
        yield line(name, *(f"{found[kernel][level]:.2f}" for kernel in columns))


Table = Callable[[], Iterator[str]]
TABLES: dict[str, tuple[Table, ...]] = {
    "README.md": (one_host, over_uncompressed, links, hierarchy, overlap, cost, digits, kernels),
    "docs/codecs/rehop.md": (rehop,),
}


def rewritten(text: str, tables: Sequence[Table]) -> str:
    """Return a text with its tables as the results say."""
    for table in tables:
        lines = list(table())
        pattern = re.compile(f"^{re.escape(lines[0])}\n(?:\\|.*\n)+", re.MULTILINE)
        text, found = pattern.subn(lambda _, new=lines: "\n".join(new) + "\n", text)
        if found != 1:
            raise SystemExit(f"there are {found} tables that begin with {lines[0]!r}, not one")
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; status 1 where tables differ")
    options, status = parser.parse_args(argv), 0
    for name, tables in TABLES.items():
        text = (ROOT / name).read_text()
        new = rewritten(text, tables)
        if options.check:
            status |= new != text
        else:
            (ROOT / name).write_text(new)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
