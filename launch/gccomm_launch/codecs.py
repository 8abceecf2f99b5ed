"""`gccomm codecs`: what the registered codecs put on the wire."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from gccomm.agreement import HEADER_WORDS
from gccomm.codecs import Codec, get_codec, list_codecs
from gccomm.testing import simulate

__all__ = ["CodecInfo", "codecs", "describe"]

# A tensor of whole blocks: large enough for what a codec sends per tensor not to show.
_COORDINATES = 256 * 1024


@dataclass
class CodecInfo:
    """What one codec is, with its default options.

    Attributes
    ----------
    id, description : str
        Name of the wire format and the summary of the class's docstring.
    wire_bits : float or None
        Bits a coordinate of a large float32 tensor takes, scales included; None where it is not known.
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
    """Reduce an array over two virtual ranks and return the bits a coordinate, in the third step."""
    x = np.ones(_COORDINATES, dtype=np.float32)
    _, stats = simulate([{"x": x}, {"x": x}], codec, steps=3, exact_below=0)
    return 8 * (stats[0].wire_bytes - 4 * HEADER_WORDS) / _COORDINATES


def _table(infos: Sequence[CodecInfo]) -> list[str]:
    """Return the lines of the table; the description, last, is not cut."""
    rows = [("id", "wire bits", "rounding", "sums as", "options", "description")]
    for info in infos:
        known = info.wire_bits is not None
        rows.append(
            (
                info.id,
                f"{info.wire_bits:.2f}" if known else "-",
                info.rounding,
                info.sums_as or "-",
                ", ".join(f"{k}={v}" for k, v in info.options.items()) or "-",
                info.problem or info.description,
            )
        )
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]) - 1)]
    cells = [[*map(str.ljust, row, widths), row[-1]] for row in rows]
    return ["  ".join(row) for row in cells]
