"""A progress bar on stderr, where rich is installed and a person looks on; nothing otherwise.

It is drawn between measurements and never by a thread of its own, so that it costs no measured time.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

__all__ = ["VARIABLE", "pass_on", "progress"]

VARIABLE = "GCCOMM_PROGRESS"
PAUSE_S = 0.25


def pass_on(environ: MutableMapping[str, str]) -> None:
    """Tell ranks, whose stderr is the launcher's, that it ends at a terminal, and how wide that is."""
    if sys.stderr.isatty():
        environ.setdefault(VARIABLE, str(shutil.get_terminal_size().columns))


@contextmanager
def progress(total: int, label: str, *, speaks: bool = True) -> Iterator[Callable[[], None]]:
    """Give what is to be called after each of ``total`` parts of a long run.

    Parameters
    ----------
    total : int
        Parts.
    label : str
        Of the bar.
    speaks : bool
        Whether this rank may draw.
    """
    columns = os.environ.get(VARIABLE, "")
    if not speaks or find_spec("rich") is None or not (columns.isdigit() or sys.stderr.isatty()):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    about: dict[str, Any] = {"force_terminal": True, "width": int(columns)} if columns.isdigit() else {}
    with Progress(console=Console(file=sys.stderr, **about), transient=True, auto_refresh=False) as bar:
        task = bar.add_task(label, total=total)
        drawn = 0.0

        def advance() -> None:
            nonlocal drawn
            bar.advance(task)
            if time.monotonic() - drawn >= PAUSE_S:
                bar.refresh()
                drawn = time.monotonic()

        yield advance
