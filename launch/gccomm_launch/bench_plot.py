"""The figures of `gccomm bench`: times and bus bandwidths against size or link rate, and what bounds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["curves", "plot"]

Row = Mapping[str, Any]

# MPI's ways are references, other libraries' are dashed, gccomm's own codecs stand out.
LOOKS: dict[str, dict[str, Any]] = {
    "mpi": {"color": "black", "linewidth": 1.0, "linestyle": ":"},
    "gloo": {"linewidth": 1.2, "linestyle": "--"},
    "peer": {"linewidth": 1.2, "linestyle": "--"},
    "float": {"linewidth": 1.4},
    "codec": {"linewidth": 2.0},
}
COLOURS = (
    "#d55e00",
    "#0072b2",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#8c6d31",
    "#7f7f7f",
    "#9467bd",
    "#17becf",
    "#5254a3",
)
MARKERS = "osD^v<>PXph*"
BOUND = {"color": "0.6", "linewidth": 0.9, "linestyle": "-.", "zorder": 1}


def plot(
    rows: Sequence[Row], bounds: Sequence[Row], path: Path, x: str = "size", xlabel: str = "bytes"
) -> None:
    """Draw time and busbw of each way into a file of the type that its suffix tells.

    Parameters
    ----------
    rows : sequence of mapping
        Rows of a report.
    bounds : sequence of mapping
        ``name``, ``time_us``, ``busbw`` and the value of ``x`` of what no way can be faster than, or is
        compared with; points of one name make a line.
    path : Path
        To write.
    x, xlabel : str
        The field that the horizontal axis shows, and what it is called.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        message = "the figure needs matplotlib: pip install 'gccomm[cli]'"
        raise ImportError(message) from error

    looks = _looks(rows)
    with rc_context({"font.size": 9, "svg.hashsalt": "gccomm"}):
        figure = Figure(figsize=(9.0, 4.6), layout="constrained")
        panels = figure.subplots(1, 2)
        handles: dict[str, Any] = {}
        for axis, field, label in zip(
            panels, ("time_us", "busbw"), ("time (us)", "busbw (GB/s of float32)"), strict=True
        ):
            for name, points in curves(bounds, x, field, "name").items():
                (line,) = axis.plot(*zip(*points, strict=True), **BOUND)
                handles.setdefault(name, line)
            for name, points in curves(rows, x, field, "codec").items():
                (line,) = axis.plot(*zip(*points, strict=True), **looks[name])
                handles.setdefault(name, line)
            axis.set_xscale("log", base=2 if x == "size" else 10)
            axis.set_yscale("log")
            axis.set_xlabel(xlabel)
            axis.set_ylabel(label)
            axis.grid(True, color="0.9", linewidth=0.6)
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize=8)
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)


def curves(rows: Sequence[Row], x: str, y: str, name: str) -> dict[str, list[tuple[float, float]]]:
    """Return the points of each curve, by x; MPI's ways in pieces as one, the fastest of each x."""
    found: dict[str, dict[float, float]] = {}
    for row in rows:
        curve = found.setdefault(_curve(row, name), {})
        better = max if y == "busbw" else min
        curve[row[x]] = better(curve.get(row[x], row[y]), row[y])
    return {label: sorted(points.items()) for label, points in found.items()}


def _curve(row: Row, name: str) -> str:
    text: str = row[name]
    if name != "codec" or not text.startswith("MPI_Allreduce in "):
        return text
    return "MPI_Allreduce in pieces" + (" (kept out)" if text.endswith("(kept out)") else "")


def _looks(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    coloured = 0
    for row in rows:
        name = _curve(row, "codec")
        if name in found:
            continue
        look = {"marker": MARKERS[len(found) % len(MARKERS)], "markersize": 4.0, **LOOKS[row["kind"]]}
        if "color" not in look:
            look["color"] = COLOURS[coloured % len(COLOURS)]
            coloured += 1
        found[name] = look
    return found
