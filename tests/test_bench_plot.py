"""The figure and the progress bar of `gccomm bench`."""

from __future__ import annotations

import io
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from gccomm_launch import progress as progress_module
from gccomm_launch.bench_plot import curves, plot
from gccomm_launch.progress import VARIABLE, pass_on, progress


def row(codec: str, kind: str, size: int, time_us: float) -> dict[str, Any]:
    return {"codec": codec, "kind": kind, "size": size, "time_us": time_us, "busbw": size / time_us}


ROWS = [
    row("MPI_Allreduce", "mpi", 8, 5.0),
    row("MPI_Allreduce in 256 KiB", "mpi", 8, 4.0),
    row("MPI_Allreduce in 1 MiB", "mpi", 8, 3.0),
    row("MPI_Allreduce in 1 MiB (kept out)", "mpi", 8, 2.0),
    row("gloo", "gloo", 8, 6.0),
    row("uniform", "codec", 8, 1.0),
    row("uniform", "codec", 64, 2.0),
]


def test_curves() -> None:
    """Pieces are one curve, of the fastest at each size; points are in the order of x."""
    found = curves(ROWS[::-1], "size", "time_us", "codec")
    assert found["uniform"] == [(8, 1.0), (64, 2.0)]
    assert found["MPI_Allreduce in pieces"] == [(8, 3.0)]
    assert found["MPI_Allreduce in pieces (kept out)"] == [(8, 2.0)]
    assert curves(ROWS, "size", "busbw", "codec")["MPI_Allreduce in pieces"] == [(8, 8 / 3)]


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_figure_has_every_curve_and_bound(tmp_path: Path) -> None:
    bounds = [{"name": "the bound", "size": size, "time_us": 0.5, "busbw": size / 0.5} for size in (8, 64)]
    plot(ROWS, bounds, tmp_path / "a.svg")
    plot(ROWS, bounds, tmp_path / "b.svg")
    text = (tmp_path / "a.svg").read_text()
    assert all(f"<!-- {name} -->" in text for name in ("uniform", "gloo", "the bound", "MPI_Allreduce"))
    assert text == (tmp_path / "b.svg").read_text()


def test_figure_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'gccomm\[cli\]'"):
        plot(ROWS, [], tmp_path / "figure.png")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.skipif(find_spec("rich") is None, reason="rich is not installed")
def test_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress_module, "PAUSE_S", 0.0)
    with progress(4, "measuring") as tick:
        tick()
        tick()
    assert "measuring" in terminal.getvalue()
    assert "50%" in terminal.getvalue()


def test_no_bar_where_nobody_looks_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    for stream, speaks, rich in (
        (io.StringIO(), True, True),
        (Terminal(), False, True),
        (Terminal(), True, False),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        with monkeypatch.context() as patch:
            if not rich:
                patch.setattr(progress_module, "find_spec", lambda _name: None)
            with progress(2, "measuring", speaks=speaks) as tick:
                tick()
        assert stream.getvalue() == ""


def test_ranks_learn_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    environ: dict[str, str] = {}
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    pass_on(environ)
    assert environ == {}
    monkeypatch.setattr(sys, "stderr", Terminal())
    pass_on(environ)
    assert int(environ[VARIABLE]) > 0
