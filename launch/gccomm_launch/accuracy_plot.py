"""The figure of `gccomm bench --accuracy`: vNMSE against wire bits a coordinate, a curve a codec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["curve_name", "curves", "panels", "plot"]

PREFERRED_N = 16  # of a figure with a panel a family: enough ranks for codecs to differ
COLUMNS = 3
# gccomm's own codecs stand out, by colours that differ for colour-blind eyes too; the floats are references.
STRONG = {
    "rotated, headroom=checked": "#d55e00",
    "rotated, headroom=clipped": "#cc79a7",
    "rotated, headroom=safe": "#e69f00",
    "uniform": "#0072b2",
}
REFERENCES = ("bf16", "fp16", "raw")
WEAK = ("#009e73", "#cc79a7", "#56b4e9", "#8c6d31", "#7f7f7f", "#9467bd", "#17becf", "#bcbd22", "#5254a3")
MARKERS = "sD^v<>PXph*"

Row = Mapping[str, Any]


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw the rows of a report into a file of the type that its suffix tells.

    Several families make a panel each, at one number of ranks; one family makes a panel for each number.

    Parameters
    ----------
    rows : sequence of mapping
        Rows of the report; those that refused, or found nothing finite, are left out.
    path : Path
        To write.

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

    parts = panels(rows)
    styles = _styles(list(dict.fromkeys(curve_name(row["codec"]) for row in rows)))
    columns = min(COLUMNS, max(1, len(parts)))
    lines = -(-max(1, len(parts)) // columns)
    with rc_context({"font.size": 9, "svg.hashsalt": "gccomm"}):
        figure = Figure(figsize=(3.4 * columns + 0.6, 2.9 * lines + 1.4), layout="constrained")
        axes = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
        handles: dict[str, Any] = {}
        for place, axis in enumerate(axes.flat):
            if place >= len(parts):
                axis.set_axis_off()
                continue
            title, chosen = parts[place]
            _panel(axis, title, curves(chosen), styles, handles)
        for place in range(len(parts)):
            if place + columns >= len(parts):  # the lowest of its column
                axes.flat[place].tick_params(labelbottom=True)
                axes.flat[place].set_xlabel("bits on the wire a coordinate")
        for axis in axes[:, 0]:
            axis.set_ylabel("vNMSE of the sum")
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, columns + 1))
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)


def panels(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Return titles and rows of the panels."""
    families = list(dict.fromkeys(row["family"] for row in rows))
    if len(families) == 1:
        ns = dict.fromkeys(row["n"] for row in rows)
        return [(f"{families[0]}, {n} ranks", [row for row in rows if row["n"] == n]) for n in ns]
    found = []
    for family in families:
        mine = [row for row in rows if row["family"] == family]
        ns_here = {row["n"] for row in mine}
        n = PREFERRED_N if PREFERRED_N in ns_here else max(ns_here)
        found.append((f"{family}, {n} ranks", [row for row in mine if row["n"] == n]))
    return found


def curves(rows: Sequence[Row]) -> dict[str, list[tuple[float, float]]]:
    """Return (wire bits, vNMSE) of each curve, by bits."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["vnmse"] is not None and row["vnmse"] > 0:
            found.setdefault(curve_name(row["codec"]), []).append((row["wire_bits"], row["vnmse"]))
    return {name: sorted(points) for name, points in found.items()}


def curve_name(codec: str) -> str:
    """Return a codec's id and its options other than `wire_bits`."""
    name, _, options = codec.partition(":")
    rest = [option for option in options.split(",") if option and not option.startswith("wire_bits=")]
    return ", ".join([name, *rest])


def _styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        if name in STRONG:
            found[name] = {
                "color": STRONG[name],
                "marker": "o",
                "linewidth": 2.2,
                "markersize": 6,
                "zorder": 4,
            }
        elif name in REFERENCES:
            marker = "+x|"[REFERENCES.index(name)]
            found[name] = {"color": "black", "marker": marker, "linestyle": "none", "markersize": 8}
            found[name] |= {"markeredgewidth": 1.6}
        else:
            k = len(found)
            found[name] = {"color": WEAK[k % len(WEAK)], "marker": MARKERS[k % len(MARKERS)]}
            found[name] |= {"linewidth": 1.0, "markersize": 4.5, "alpha": 0.9}
    return found


def _panel(
    axis: Any,
    title: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    styles: Mapping[str, Mapping[str, Any]],
    handles: dict[str, Any],
) -> None:
    """Draw one panel, and add the curves that the legend lacks to ``handles``."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axis.set_title(title, fontsize=9)
    axis.axhline(1, color="0.6", linewidth=0.8, linestyle=":")  # as far off as a sum of zeros
    for name, points in lines.items():
        bits, errors = zip(*points, strict=True)
        (line,) = axis.plot(bits, errors, **styles[name])
        handles.setdefault(name, line)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.xaxis.set_major_locator(FixedLocator([0.25, 0.5, 1, 2, 4, 8, 16, 32]))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter("{x:g}")
    axis.grid(True, color="0.9", linewidth=0.6)
