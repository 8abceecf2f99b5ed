"""`gccomm bench --accuracy`: errors of codecs, by wire bits, ranks and kind of input, in one process."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gccomm import UnknownCodecError, backends, get_codec
from gccomm_launch.accuracy_families import FAMILIES, MULTIPLE, Family, Recording
from gccomm_launch.accuracy_measure import Row, Settings, measure
from gccomm_launch.arguments import FIGURES, codec, coordinate_count, figure, natural, output, positive
from gccomm_launch.bench import write_json
from gccomm_launch.machine import machine

__all__ = ["CODECS", "accuracy", "default_codecs", "parse", "table"]

# What is measured unless told otherwise; {w} becomes each of the wire bits.
CODECS = (
    "bf16",
    "fp16",
    "uniform:wire_bits={w}",
    "rotated:wire_bits={w},headroom=safe",
    "rotated:wire_bits={w},headroom=checked",
    "rotated:wire_bits={w},headroom=clipped",
    "rehop:wire_bits={w}",
    "qsgd-mn:wire_bits={w}",
    "qsgd-mn-ts:wire_bits={w}",
    "grandk-mn:wire_bits={w}",
    "grandk-mn-ts:wire_bits={w}",
    "global-qsgd:wire_bits={w}",
    "global-qsgd:dithering=exponential",
    "intsgd:wire_bits={w}",
    "thc:wire_bits={w}",
    "topkc",
    "topkc:values=lanes,wire_bits={w}",
    "powersgd",
)
WIRE_BITS = (2, 3, 4, 5, 6, 8, 10, 16)
_PAUSE_S = 5.0  # between lines about progress


def accuracy(argv: Sequence[str]) -> int:
    """Measure and print a table.

    Parameters
    ----------
    argv : sequence of str
        See ``gccomm bench --accuracy --help``.

    Returns
    -------
    int
        0, or 2 where a launcher has started several processes.

    Raises
    ------
    SystemExit
        `argv` is wrong (status 2).
    """
    options = parse(argv)
    started = backends.launcher()
    if started is not None and started[1] != 1:
        print(
            f"gccomm bench --accuracy: ranks are virtual here, in one process, but {started[0]} has started "
            f"{started[1] or 'this one among others'}; run it without a launcher",
            file=sys.stderr,
        )
        return 2
    notes: list[str] = []
    codecs = options.codecs or default_codecs(options.wire_bits, notes)
    settings = Settings(options.steps, options.warmup, options.seed, options.coordinates)
    report: dict[str, Any] = {
        "command": " ".join(["gccomm bench --accuracy", *argv]),
        "machine": machine(),
        "options": {**asdict(settings), "n": options.n, "wire_bits": options.wire_bits, "codecs": codecs},
        "notes": notes,
        "rows": [],
    }
    print(_heading(report, settings), flush=True)
    _measure_all(_families(options), codecs, settings, report)
    print("".join(f"# {note}\n" for note in notes), end="")
    if options.json is not None:
        write_json(options.json, report)
    if options.plot is not None:
        from gccomm_launch.accuracy_plot import plot

        plot(report["rows"], options.plot)
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the checked options; SystemExit (status 2) where they are wrong."""
    parser = argparse.ArgumentParser(
        prog="gccomm bench --accuracy",
        description="Measure vNMSE = ||result - sum||^2 / ||sum||^2 of codecs, and the bits that they put on "
        "the wire, over virtual ranks in one process.",
        epilog="The sum is a float64 one. Codecs keep their state from step to step, inputs are drawn anew, "
        "and error feedback is off for all: for biased codecs the figure is the error of one step.",
    )
    add = parser.add_argument
    add("-n", type=positive, nargs="+", default=[2, 4, 16, 64], metavar="N", help="ranks (default 2 4 16 64)")
    codecs_help = "ids with options (default: all lossy ones, with several options)"
    add("--codecs", nargs="+", type=codec, metavar="CODEC", help=codecs_help)
    bits_help = "of the default codecs (default 4 8)"
    add("--wire-bits", type=int, nargs="+", choices=WIRE_BITS, default=[4, 8], metavar="W", help=bits_help)
    family_help = f"inputs: {', '.join(FAMILIES)} (default: all)"
    add("--families", nargs="*", choices=list(FAMILIES), metavar="FAMILY", help=family_help)
    gradients_help = "gradients of your own besides: a .npz file of float32 arrays (steps, ranks, *shape)"
    add("--gradients", type=_recording, metavar="FILE", help=gradients_help)
    size_help = f"of a rank's input, a multiple of {MULTIPLE} (default 256K)"
    add("--coordinates", type=coordinate_count, default=1 << 18, metavar="COUNT", help=size_help)
    add("--steps", type=positive, default=6, metavar="N", help="steps (default 6)")
    add("-w", "--warmup", type=natural, default=2, metavar="N", help="steps not measured (default 2)")
    add("--seed", type=natural, default=0, metavar="N", help="of inputs and rounding (default 0)")
    add("--json", type=output, metavar="FILE", help="also write everything to FILE")
    plot_help = f"also draw vNMSE against wire bits ({', '.join(FIGURES)}); needs matplotlib"
    add("--plot", type=figure, metavar="FILE", help=plot_help)
    options = parser.parse_args(argv)
    if options.warmup >= options.steps:
        parser.error(f"--steps {options.steps} leaves nothing to measure after --warmup {options.warmup}")
    if options.coordinates % MULTIPLE:
        parser.error(f"--coordinates {options.coordinates} is not a multiple of {MULTIPLE}")
    if options.gradients is not None and options.gradients.steps < options.steps:
        parser.error(f"--gradients holds {options.gradients.steps} steps, fewer than --steps {options.steps}")
    if options.gradients is not None and options.gradients.name in FAMILIES:
        parser.error(f"--gradients: {options.gradients.name!r} is a family's name; rename the file")
    if not _families(options):
        parser.error("no inputs: name --families, or --gradients")
    return options


def default_codecs(wire_bits: Sequence[int], notes: list[str]) -> list[str]:
    """Return the codecs of :data:`CODECS` that are installed, and note those that are not, or refuse."""
    found = []
    for text in (text for t in CODECS for text in dict.fromkeys(t.format(w=w) for w in wire_bits)):
        try:
            get_codec(text)
        except UnknownCodecError as error:
            notes.append(f"left out: {error.codec_id}, which is not installed")
        except (TypeError, ValueError) as error:
            notes.append(f"left out: {text}: {error}")
        else:
            found.append(text)
    notes[:] = dict.fromkeys(notes)
    return found


def table(family: str, coordinates: int, rows: Sequence[Row]) -> str:
    """Return one family's figures: a line a codec, a column a number of ranks."""
    ns = list(dict.fromkeys(row.n for row in rows))
    width = max(len(row.codec) for row in rows)
    lines = [f"\n{family}, {coordinates} coordinates"]
    lines.append(
        f"{'codec':<{width}}  {'wire bits':>9}  {'redone':>6}" + "".join(f"{f'n={n}':>10}" for n in ns)
    )
    for name in dict.fromkeys(row.codec for row in rows):
        mine = {row.n: row for row in rows if row.codec == name}
        bits = max((row.wire_bits for row in mine.values() if row.wire_bits is not None), default=None)
        redone = max(
            (row.spans_redone / row.spans for row in mine.values() if row.spans_redone), default=None
        )
        cells = [_cell(bits, ".2f", 9), _cell(redone, ".1%", 6)]
        errors = "".join(_cell(mine[n].vnmse if n in mine else None, ".2e", 10) for n in ns)
        lines.append(f"{name:<{width}}  {'  '.join(cells)}{errors}")
    return "\n".join(lines)


def _cell(value: float | None, form: str, width: int) -> str:
    return f"{'-' if value is None else format(value, form):>{width}}"


def _heading(report: dict[str, Any], settings: Settings) -> str:
    m = report["machine"]
    lines = (
        f"gccomm {m['versions']['gccomm']}, virtual ranks in one process, {m['cpu']} ({m['isa']})",
        f"vNMSE = ||result - sum||^2 / ||sum||^2, mean of steps {settings.warmup + 1} to {settings.steps}, "
        "no error feedback; -: refused",
        "wire bits: a rank's payload, a coordinate; they and the spans redone: the largest of all n",
    )
    return "\n".join(f"# {line}" for line in lines)


def _measure_all(
    families: dict[str, Family], codecs: Sequence[str], settings: Settings, report: dict[str, Any]
) -> None:
    """Fill ``report`` and print each family's table when it is done."""
    ns = report["options"]["n"]
    progress = _progress(len(families) * len(ns) * len(codecs) * settings.steps)
    for name, family in families.items():
        coordinates = settings.coordinates
        measured = ns
        if isinstance(family, Recording):
            coordinates = family.coordinates
            measured = [n for n in ns if n <= family.ranks]
            if measured != ns:
                report["notes"].append(
                    f"{name}: the recording has {family.ranks} ranks; larger n are left out"
                )
        rows = [row for n in measured for row in measure(name, family, n, codecs, settings, progress)]
        report["rows"] += [{**asdict(row), "coordinates": coordinates} for row in rows]
        if rows:
            print(table(name, coordinates, rows), flush=True)


def _progress(total: int) -> Callable[[str], None]:
    """Return what says on stderr, now and then, how far a long run is."""
    start = said = time.monotonic()
    done = 0

    def tell(text: str) -> None:
        nonlocal said, done
        done += 1
        now = time.monotonic()
        if now - said >= _PAUSE_S:
            said = now
            print(f"{now - start:.0f} s, {done / total:.0%}: {text}", file=sys.stderr, flush=True)

    return tell


def _families(options: argparse.Namespace) -> dict[str, Family]:
    names = FAMILIES if options.families is None else options.families
    found: dict[str, Family] = {name: FAMILIES[name] for name in names}
    if options.gradients is not None:
        found[options.gradients.name] = options.gradients
    return found


def _recording(text: str) -> Recording:
    try:
        return Recording(Path(text))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
