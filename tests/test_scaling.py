"""The model of `benchmarks/scaling.py`, its bars and its figure; the points of `benchmarks/links.py`."""

from __future__ import annotations

import importlib.util
import json
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


scaling, links = load("scaling"), load("links")
SIZES = [4096 << (2 * k) for k in range(6)]


def row(codec: str, kind: str, n: int, size: int, time_us: float, hosts: int = 1) -> dict[str, Any]:
    return {"codec": codec, "kind": kind, "n": n, "size": size, "time_us": time_us, "hosts": hosts}


def test_fit_finds_the_model() -> None:
    alpha, beta, ratios = scaling.fit(SIZES, [30 + 2e-4 * size for size in SIZES])
    assert (alpha, beta) == (pytest.approx(30), pytest.approx(2e-4))
    assert ratios == pytest.approx([1] * len(SIZES))


def test_fit_has_no_negative_part() -> None:
    alpha, beta, _ = scaling.fit(SIZES, [2e-4 * (size - 2000) for size in SIZES])
    assert alpha == 0
    assert beta > 0
    alpha, beta, _ = scaling.fit(SIZES, [100.0 - k for k in range(len(SIZES))])
    assert alpha > 0
    assert beta == 0


def test_fit_weighs_relative_errors() -> None:
    """Twice the time at one of the sizes moves the others by little, large or small."""
    times = [30 + 2e-4 * size for size in SIZES]
    times[-1] *= 2
    _, _, ratios = scaling.fit(SIZES, times)
    assert max(abs(ratio - 1) for ratio in ratios[:3]) < 0.1


def test_bars() -> None:
    rows = [row("MPI_Allreduce", "mpi", 2, size, 10.0) for size in (4096, 8192)]
    rows += [
        row("a", "codec", 2, 4096, 39.0),
        row("b", "float", 2, 4096, 41.0),
        row("a", "codec", 2, 8192, 90.0),
    ]
    assert [(bar["codec"], bar["met"]) for bar in scaling.verdicts(rows)] == [("a", True), ("b", False)]
    far = [{**found, "hosts": 2} for found in rows]
    assert [bar["met"] for bar in scaling.verdicts(far)] == [False, False]  # 2.5 x 10 us
    assert scaling.verdicts(far)[0]["over_mpi"] == pytest.approx(3.9)


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_runs_are_put_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for n in (2, 3):
        ways = (("MPI_Allreduce", "mpi", 5.0), ("raw", "float", 20.0))
        rows = [row(name, kind, n, size, t + n * size / 1e4) for name, kind, t in ways for size in SIZES]
        files.append(tmp_path / f"{n}.json")
        files[-1].write_text(json.dumps({"machine": {"cores": 2}, "rows": rows}))
    out, figure = tmp_path / "all.json", tmp_path / "all.svg"
    argv = ["--merge", *map(str, files), "--json", str(out), "--plot", str(figure)]
    assert scaling.main(argv) == 0
    report = json.loads(out.read_text())
    assert [(m["codec"], m["n"]) for m in report["models"]] == [
        (name, n) for n in (2, 3) for name in ("MPI_Allreduce", "raw")
    ]
    assert all(m["measured_over_modelled"] == pytest.approx([1] * len(SIZES)) for m in report["models"])
    assert "raw, n = 3: 4096 bytes, 21.2 us" in capsys.readouterr().out
    assert figure.read_text().count("<!-- raw -->") == 1


def test_points_of_links() -> None:
    """Bounds follow from the measured rate; the row that is no float32 is left out."""
    rows = [{"codec": "a", "type": "float32", "count": 10**6, "time_us": 9.0, "busbw": 1.0}]
    rows += [{"codec": "w", "type": "uint32", "count": 10**6, "time_us": 9.0, "busbw": 1.0}]
    found, bounds = links.points([{"lab": {"measured": 10e6}, "ranks": 4, "rows": rows}])
    assert [(point["codec"], point["mbit_per_s"]) for point in found] == [("a", 80)]
    assert [bound["time_us"] for bound in bounds] == pytest.approx([6e5, 3e5, 1.5e5])
    assert bounds[0]["busbw"] == pytest.approx(10e6 / 1e9)  # float32 at its bound: what the link carries
