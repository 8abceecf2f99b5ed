"""`gccomm codecs`: what the registered codecs put on the wire."""

from __future__ import annotations

import argparse
import inspect
import json
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from gccomm.codecs import Codec, get_codec, list_codecs
from gccomm.testing import simulate

__all__ = ["CodecInfo", "codecs", "describe"]

_SHAPE = (256, 1024)  # of the measured matrix: whole blocks, and many
_LEAST_COLUMNS, _MOST_COLUMNS = 60, 110  # of the table


@dataclass
class CodecInfo:
    """What one codec is, with its default options.

    Attributes
    ----------
    id, description : str
        Name of the wire format and the summary of the class's docstring.
    wire_bits : float or None
        Bits a coordinate of a float32 matrix of 256 by 1024 takes, scales included; None where it is not
        known.
    rounding : str
        "unbiased", "to nearest", "biased" or "none".
    sums_as : str
        What the back end adds up: "integer lanes", or the name of a float type.
    options : dict
        Default of each option.
    problem : str
        Why the codec cannot be described, or empty.
    """

    id: str
    description: str = ""
    wire_bits: float | None = None
    rounding: str = "-"
    sums_as: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


def codecs(argv: Sequence[str]) -> int:
    """Print the table of codecs.

    Parameters
    ----------
    argv : sequence of str
        ``[--json]``.

    Returns
    -------
    int
        1 if an installed codec could not be described, else 0.
    """
    parser = argparse.ArgumentParser(prog="gccomm codecs", description="List the codecs that are installed.")
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    options = parser.parse_args(argv)
    infos = [describe(name) for name in list_codecs()]
    if options.json:
        print(json.dumps([asdict(info) for info in infos], indent=2))
    else:
        print("\n".join(_table(infos)))
    return int(any(info.problem for info in infos))


def describe(name: str) -> CodecInfo:
    """Return what the codec with the id `name` is; one that cannot be loaded or made gets a `problem`."""
    info = CodecInfo(name)
    try:
        codec = get_codec(name)
        paragraph = (inspect.getdoc(type(codec)) or "").partition("\n\n")[0]
        info.description = " ".join(paragraph.split())
        info.rounding = codec.rounding
        info.options = {key: value for key, value in codec.config().items() if key != "id"}
        info.sums_as = codec.sums_as
        info.wire_bits = _wire(codec)
    except Exception as error:  # a codec of another package must not hide the rest
        info.problem = f"{type(error).__name__}: {error}"
    return info


def _wire(codec: Codec) -> float:
    """Return the bits a coordinate over two virtual ranks: what a second matrix adds, in the third step."""
    x = np.ones(_SHAPE, dtype=np.float32)
    one, two = (
        simulate([dict.fromkeys(keys, x)] * 2, codec, steps=3, exact_below=0)[1][0] for keys in ("a", "ab")
    )
    added = (two.wire_bytes - two.measure_bytes) - (one.wire_bytes - one.measure_bytes)
    return 8 * added / x.size


def _table(infos: Sequence[CodecInfo]) -> list[str]:
    """Return the lines of the table: what is short in columns, options and description below."""
    rows = [("id", "wire bits", "rounding", "sums as")]
    for info in infos:
        bits = "-" if info.wire_bits is None else f"{info.wire_bits:.2f}"
        rows.append((info.id, bits, info.rounding, info.sums_as or "-"))
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    columns = max(_LEAST_COLUMNS, min(shutil.get_terminal_size().columns, _MOST_COLUMNS))
    wrap = textwrap.TextWrapper(columns, initial_indent="    ", subsequent_indent="    ")
    found = lines[:1]
    for line, info in zip(lines[1:], infos, strict=True):
        found += [line, *wrap.wrap(info.problem or info.description)]
        if info.options:
            found += wrap.wrap("options: " + ", ".join(f"{k}={v}" for k, v in info.options.items()))
    return found
