"""`gccomm trace`: one timeline out of those that ranks wrote each by itself."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gccomm.traces import Part, read, write
from gccomm_launch.arguments import output

__all__ = ["trace"]


def trace(argv: Sequence[str]) -> int:
    """Merge the files that ``GCCOMM_TRACE`` made; see ``gccomm trace --help``.

    Returns
    -------
    int
        0, or 1 where a file cannot be used.

    Raises
    ------
    SystemExit
        `argv` is wrong (status 2).
    """
    parser = argparse.ArgumentParser(
        prog="gccomm trace",
        description="Put traces of several ranks into one, on one clock.",
        epilog="GCCOMM_TRACE=FILE.json makes each rank write its own trace; open the result at "
        "https://ui.perfetto.dev.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="traces, one of each rank")
    parser.add_argument("-o", dest="out", type=output, required=True, metavar="FILE", help="to write")
    options = parser.parse_args(argv)
    parts: dict[int, Part] = {}
    for path in options.files:
        try:
            for part in read(path):
                if part["rank"] in parts:
                    raise ValueError(f"{path} has rank {part['rank']}, which another file has too")
                parts[part["rank"]] = part
        except (OSError, ValueError) as error:
            print(f"gccomm trace: {error}", file=sys.stderr)
            return 1
    write(options.out, [part for _, part in sorted(parts.items())])
    return 0
