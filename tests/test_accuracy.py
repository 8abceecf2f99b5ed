"""`gccomm bench --accuracy`: its inputs, its figures and its files."""

from __future__ import annotations

import importlib.util
import json
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
from gccomm_launch import accuracy as accuracy_module
from gccomm_launch.accuracy import CODECS, default_codecs, table
from gccomm_launch.accuracy_families import FAMILIES, LAYERS, MULTIPLE, ROW, Recording
from gccomm_launch.accuracy_measure import Row, Settings, measure, vnmse
from gccomm_launch.accuracy_plot import PREFERRED_N, curve_name, curves, panels, plot
from gccomm_launch.cli import main

import gccomm
from gccomm.codecs import registry
from gccomm.codecs.uniform import Uniform
from gccomm.testing import simulate, simulate_steps

LAUNCHER_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "PMI_RANK", "MPI_LOCALNRANKS")
SMALL = ["bench", "--accuracy", "--coordinates", str(MULTIPLE), "--steps", "3"]
COUNT = 1 << 17


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (*LAUNCHER_VARIABLES, "MV2_COMM_WORLD_SIZE", "SLURM_MPI_TYPE"):
        monkeypatch.delenv(variable, raising=False)


class AtMostTwo(Uniform):
    """Refuse more than two ranks."""

    id: ClassVar[str] = "at-most-two"

    def require_size(self, size: int, item_bytes: int) -> None:
        if size > 2:
            raise gccomm.NegotiationError(f"at most 2 ranks, got {size}")
        super().require_size(size, item_bytes)


@pytest.fixture
def _at_most_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(registry._loaded, "at-most-two", AtMostTwo)
    registry._made.clear()
    yield
    registry._made.clear()


@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_deterministic_and_fresh(name: str) -> None:
    family = FAMILIES[name]
    first = family(3, 1, 5, MULTIPLE)
    assert [(x.dtype, x.size) for x in first] == [(np.float32, MULTIPLE)] * 3
    for x, again, fewer in zip(
        first, family(3, 1, 5, MULTIPLE), [*family(2, 1, 5, MULTIPLE), None], strict=True
    ):
        np.testing.assert_array_equal(x, again)
        if fewer is not None:
            np.testing.assert_array_equal(x, fewer)
    others = [*first, *family(3, 2, 5, MULTIPLE), *family(3, 1, 6, MULTIPLE)]
    assert len({x.tobytes() for x in others}) == len(others)


def test_gaussian() -> None:
    a, b = FAMILIES["gaussian"](2, 0, 0, COUNT)
    assert abs(a.mean()) < 0.02
    assert a.std() == pytest.approx(1, abs=0.02)
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.02


def test_heavy() -> None:
    (x,) = FAMILIES["heavy"](1, 0, 0, COUNT)
    logarithms = np.log(np.abs(x.astype(np.float64)))
    assert abs(logarithms.mean()) < 0.02
    assert logarithms.std() == pytest.approx(1.5, abs=0.02)
    assert (x > 0).mean() == pytest.approx(0.5, abs=0.01)


def _layer_scales(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    found: npt.NDArray[np.float64] = x.reshape(LAYERS, -1).std(axis=1, dtype=np.float64)
    return found


@pytest.mark.parametrize("name", ["layers", "correlated"])
def test_layers_keep_their_scales(name: str) -> None:
    found = [_layer_scales(x) for step in (0, 1) for x in FAMILIES[name](2, step, 0, COUNT)]
    for scales in found[1:]:
        np.testing.assert_allclose(scales, found[0], rtol=0.15)
    assert 1.1 < np.log(found[0]).std() < 1.9  # 1.5, of 64 draws
    other = _layer_scales(FAMILIES[name](1, 0, 1, COUNT)[0])
    assert abs(np.log(other / found[0])).max() > 1


def test_correlation_is_one_half() -> None:
    xs = [x / np.repeat(_layer_scales(x), COUNT // LAYERS) for x in FAMILIES["correlated"](3, 0, 0, COUNT)]
    matrix = np.corrcoef(xs)
    assert matrix[np.triu_indices(3, 1)] == pytest.approx(0.5, abs=0.02)


def test_embedding_rows() -> None:
    xs = FAMILIES["embedding"](2, 0, 0, COUNT)
    touched = [np.abs(x).max(axis=1) > 0 for x in xs]
    assert all(x.shape == (COUNT // ROW, ROW) for x in xs)
    assert [int(rows.sum()) for rows in touched] == [round(0.05 * COUNT / ROW)] * 2
    assert (touched[0] != touched[1]).any()
    assert xs[0][touched[0]].std() == pytest.approx(1, abs=0.05)


def _write_recording(path: Path, steps: int = 3, ranks: int = 2) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "w": rng.standard_normal((steps, ranks, 32, 64), np.float32),
        "b": rng.standard_normal((steps, ranks, 7), np.float32),
    }
    np.savez(path, **arrays)
    return arrays


def test_recording(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    arrays = _write_recording(path)
    recording = Recording(path)
    assert (recording.name, recording.steps, recording.ranks, recording.coordinates) == ("mine", 3, 2, 2055)
    for rank, tree in enumerate(recording(2, 1)):
        assert tree.keys() == arrays.keys()
        assert all((tree[key] == arrays[key][1, rank]).all() for key in arrays)


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({}, "must hold float32 arrays"),
        ({"w": np.zeros((2, 2, 3))}, r"float64\[2, 2, 3\]"),
        ({"w": np.zeros(5, np.float32)}, "must hold float32 arrays"),
        ({"w": np.zeros((2, 0, 3), np.float32)}, "must hold float32 arrays"),
        ({"w": np.zeros((2, 2), np.float32), "b": np.zeros((2, 3), np.float32)}, "equal in steps and ranks"),
        ({"w": np.array([None, 1])}, "not a .npz file of arrays"),
    ],
)
def test_recordings_that_are_none(arrays: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.npz"
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=reason):
        Recording(path)


def test_files_that_are_no_recordings(tmp_path: Path) -> None:
    path = tmp_path / "bad.npy"
    np.save(path, np.zeros(3))
    with pytest.raises(ValueError, match="one array without a name"):
        Recording(path)
    path.write_text("text")
    with pytest.raises(ValueError, match=r"not a \.npz file"):
        Recording(path)
    path.write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(ValueError, match=r"not a \.npz file"):
        Recording(path)


def test_simulate_steps_hands_out_every_step() -> None:
    asked = []

    def xs(step: int) -> list[npt.NDArray[np.float32]]:
        asked.append(step)
        return FAMILIES["gaussian"](3, step, 0, 4096)

    found = simulate_steps(xs, "uniform:wire_bits=4", steps=3, seed=7)
    assert asked == [0]  # arguments are looked at, nothing is computed
    steps = list(found)
    assert asked == [0, 1, 2]
    assert [step for step, _, _, _ in steps] == [0, 1, 2]
    for step, inputs, ys, stats in steps:
        np.testing.assert_array_equal(inputs, FAMILIES["gaussian"](3, step, 0, 4096))
        expected, figures = simulate(xs, "uniform:wire_bits=4", steps=step + 1, seed=7)
        np.testing.assert_array_equal(ys, expected)
        assert [s.wire_bytes for s in stats] == [s.wire_bytes for s in figures]


def test_simulate_steps_checks_in_the_call() -> None:
    with pytest.raises(ValueError, match="one array or tree for each virtual rank"):
        simulate_steps([])
    with pytest.raises(ValueError, match="steps"):
        simulate_steps([np.ones(3)], steps=0)


def test_simulate_steps_keeps_no_results() -> None:
    steps = simulate_steps([np.ones(4096, np.float32)] * 2, steps=2)
    _, _, ys, _ = next(steps)
    result = weakref.ref(ys[0])
    del ys
    assert result() is None


def test_vnmse() -> None:
    truth = [np.array([3.0, 0.0]), np.array([[4.0]])]
    assert vnmse([np.array([3, 1], np.float32), np.array([[4]], np.float32)], truth) == pytest.approx(1 / 25)
    assert np.isnan(vnmse([np.zeros(2), np.zeros((1, 1))], [np.zeros(2), np.zeros((1, 1))]))
    assert np.isnan(vnmse([np.array([np.nan, 0]), np.zeros((1, 1))], truth))


def test_figures_are_those_of_the_codec() -> None:
    settings = Settings(steps=4, warmup=1, coordinates=COUNT)
    calls: list[str] = []
    codecs = ["uniform:wire_bits=8", "bf16", "raw"]
    eight, half, raw = measure("gaussian", FAMILIES["gaussian"], 4, codecs, settings, calls.append)
    assert len(calls) == 3 * 4
    assert len(eight.vnmse_steps) == 3
    assert eight.vnmse == pytest.approx(sum(error or 0 for error in eight.vnmse_steps) / 3)
    assert len(set(eight.vnmse_steps)) == 3
    assert eight.vnmse_estimate == pytest.approx(eight.vnmse, rel=0.2)
    assert (eight.lane_bits, half.lane_bits) == (8, None)
    assert eight.wire_bits == pytest.approx(8 + 32 / 1024, abs=0.1)
    assert (eight.spans, eight.spans_redone, eight.clamps, eight.ranks_equal) == (2, 0, 0, True)
    assert raw.vnmse is not None
    assert half.vnmse is not None
    assert raw.vnmse < 1e-12 < half.vnmse < 1e-4
    assert eight.seconds > 0


def test_figures_of_trees(tmp_path: Path) -> None:
    _write_recording(tmp_path / "mine.npz")
    recording = Recording(tmp_path / "mine.npz")
    (row,) = measure("mine", recording, 2, ["uniform:wire_bits=16"], Settings(steps=3, warmup=2))
    inputs = recording(2, 2)
    ys, _ = simulate(lambda step: recording(2, step), "uniform:wire_bits=16", steps=3)
    truth = {key: inputs[0][key].astype(np.float64) + inputs[1][key] for key in ("w", "b")}
    error = sum(((ys[0][key] - truth[key]) ** 2).sum() for key in truth)
    assert row.vnmse == pytest.approx(error / sum((x**2).sum() for x in truth.values()))
    assert row.spans == 1  # the seven coordinates travel exactly


def test_errors_that_are_not_finite_are_none() -> None:
    def overflowing(n: int, step: int, seed: int, coordinates: int) -> list[npt.NDArray[np.float32]]:
        return [np.full(coordinates, 3e38, np.float32)] * n

    (row,) = measure("large", overflowing, 2, ["raw"], Settings(3, 2, 0, MULTIPLE))
    assert (row.vnmse, row.vnmse_steps, row.refused) == (None, [None], "")


def _report(argv: list[str], path: Path) -> dict[str, Any]:
    assert main([*SMALL, *argv, "--json", str(path)]) == 0
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def test_table_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    codecs = ["bf16", "uniform:wire_bits=4"]
    argv = ["-n", "2", "3", "--families", "gaussian", "embedding", "--codecs", *codecs]
    report = _report(argv, tmp_path / "found.json")
    out = capsys.readouterr().out
    found = [(row["family"], row["n"], row["codec"]) for row in report["rows"]]
    assert found == [(f, n, c) for f in ("gaussian", "embedding") for n in (2, 3) for c in codecs]
    assert report["options"]["codecs"] == codecs
    assert report["machine"]["versions"].keys() == {"gccomm", "numpy"}
    assert report["command"].startswith(f"gccomm bench --accuracy --coordinates {MULTIPLE} --steps 3 -n 2 3")
    for row in report["rows"]:
        assert f"{row['vnmse']:.2e}" in out
        assert row["coordinates"] == MULTIPLE
        assert row["config"]["id"] == row["codec"].partition(":")[0]
    assert f"\ngaussian, {MULTIPLE} coordinates\n" in out


@pytest.mark.usefixtures("_at_most_two")
def test_a_refusal_is_a_dash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["-n", "2", "4", "--families", "gaussian", "--codecs", "at-most-two"]
    accepted, refused = _report(argv, tmp_path / "found.json")["rows"]
    assert accepted["refused"] == ""
    assert "at most 2 ranks, got 4" in refused["refused"]
    assert refused["vnmse"] is refused["wire_bits"] is refused["ranks_equal"] is None
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("at-most-two"))
    assert line.split()[-2:] == [f"{accepted['vnmse']:.2e}", "-"]


def test_larger_n_than_recorded_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.npz"
    _write_recording(path)
    argv = ["-n", "2", "4", "--families", "--gradients", str(path), "--codecs", "bf16"]
    report = _report(argv, tmp_path / "found.json")
    assert [(row["family"], row["n"]) for row in report["rows"]] == [("mine", 2)]
    assert report["notes"] == ["mine: the recording has 2 ranks; larger n are left out"]
    assert "\n# mine: the recording has 2 ranks" in capsys.readouterr().out


def test_progress_goes_to_stderr(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*SMALL, "-n", "2", "--families", "heavy", "--codecs", "bf16"]
    assert main(argv) == 0
    assert capsys.readouterr().err == ""  # a short run
    monkeypatch.setattr(accuracy_module, "_PAUSE_S", 0.0)
    assert main(argv) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[-1].endswith("100%: heavy, 2 ranks, step 3 of 3, bf16")


def test_default_codecs() -> None:
    notes: list[str] = []
    found = default_codecs([4, 8], notes)
    assert {"bf16", "fp16", "uniform:wire_bits=4", "uniform:wire_bits=8"} <= set(found)
    assert len(set(found)) == len(found)
    known = {text.partition(":")[0] for text in CODECS}
    lossy = registry._BUILT_IN.keys() - {"raw"}
    assert lossy <= known  # a codec that is added is measured, too
    named = {note.removeprefix("left out: ").partition(":")[0].partition(",")[0] for note in notes}
    assert named == known - lossy


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["-n", "0"], "at least 1"),
        (["--steps", "2"], "--steps 2 leaves nothing to measure after --warmup 2"),
        (["--coordinates", "1000"], "--coordinates 1000 is not a multiple of 8192"),
        (["--coordinates", "0"], "must be a number of coordinates"),
        (["--codecs", "uniforms"], "did you mean 'uniform'"),
        (["--wire-bits", "7"], "invalid choice"),
        (["--families", "normal"], "invalid choice"),
        (["--families"], "no inputs"),
        (["--gradients", "no/such/file.npz"], "No such file"),
        (["--json", "no/such/folder/file.json"], "there is no folder"),
        (["--plot", "no/such/folder/file.png"], "there is no folder"),
        (["--plot", "file.jpeg2000"], "must end with one of .pdf, .png, .svg"),
        (["--accurate"], "unrecognized arguments"),
    ],
)
def test_wrong_arguments(argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "--accuracy", *argv])
    assert exit_.value.code == 2
    assert reason in " ".join(capsys.readouterr().err.split())


def test_recordings_must_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, reason in (("mine", "holds 3 steps, fewer than --steps 6"), ("layers", "rename the file")):
        path = tmp_path / f"{name}.npz"
        _write_recording(path, steps=3 if name == "mine" else 6)
        with pytest.raises(SystemExit):
            main(["bench", "--accuracy", "--gradients", str(path)])
        assert reason in " ".join(capsys.readouterr().err.split())


def test_accuracy_must_be_written_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "--acc"])
    assert exit_.value.code == 2
    assert "write --accuracy in full" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "--accuracy", "--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: gccomm bench --accuracy ")
    assert all(name in out for name in FAMILIES)


@pytest.mark.parametrize(
    ("variables", "status"), [({"PMI_SIZE": "2"}, 2), ({"PMIX_RANK": "0"}, 2), ({"PMI_SIZE": "1"}, 0)]
)
def test_launchers_of_several_ranks_are_refused(
    variables: dict[str, str],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert main([*SMALL, "-n", "2", "--families", "gaussian", "--codecs", "bf16"]) == status
    captured = capsys.readouterr()
    assert ("run it without a launcher" in captured.err) == (status == 2)
    assert ("vNMSE" in captured.out) == (status == 0)


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_plot_is_written(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"figure.{suffix}"
    codecs = ["bf16", "uniform:wire_bits=4", "uniform:wire_bits=8"]
    argv = ["-n", "2", "--families", "gaussian", "layers", "--codecs", *codecs, "--plot", str(path)]
    assert main([*SMALL, *argv]) == 0
    start = {"png": b"\x89PNG\r\n", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    assert path.read_bytes().startswith(start)


def _row(family: str, n: int, codec: str, bits: float | None, error: float | None) -> dict[str, Any]:
    return {"family": family, "n": n, "codec": codec, "wire_bits": bits, "vnmse": error}


def test_same_rows_make_the_same_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [_row(f, 4, c, 8.0, 0.1) for f in "abcd" for c in ("uniform:wire_bits=8", "thc", "fp16")]
    for name in ("one.svg", "two.svg"):
        plot(rows, tmp_path / name)
    text = (tmp_path / "one.svg").read_text()
    assert text == (tmp_path / "two.svg").read_text()
    assert all(f"<!-- {word} -->" in text for word in ("d, 4 ranks", "uniform", "thc", "fp16"))


def test_panels_and_curves() -> None:
    rows = [
        _row("layers", n, f"q:a=1,wire_bits={w},b=2", w, 1 / w / n)
        for n in (4, PREFERRED_N, 64)
        for w in (8, 4)
    ]
    rows += [_row("layers", 64, "r", None, None), _row("layers", 64, "raw", 32.0, 0.0)]
    assert [title for title, _ in panels(rows)] == ["layers, 4 ranks", "layers, 16 ranks", "layers, 64 ranks"]
    assert curves(panels(rows)[2][1]) == {"q, a=1, b=2": [(4, 1 / 256), (8, 1 / 512)]}
    rows += [_row("heavy", 2, "r", 8.0, 1.0)]
    assert [title for title, _ in panels(rows)] == ["layers, 16 ranks", "heavy, 2 ranks"]
    assert curve_name("bf16") == "bf16"


def test_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'gccomm\[cli\]'"):
        plot([_row("layers", 4, "r", 8.0, 1.0)], tmp_path / "figure.png")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(SystemExit):
        main(["bench", "--accuracy", "--plot", str(tmp_path / "figure.png")])
    assert "pip install 'gccomm[cli]'" in " ".join(capsys.readouterr().err.split())


def test_table_shows_the_largest_bits_and_redone_spans() -> None:
    def row(n: int, bits: float, redone: float) -> Row:
        return Row("f", n, "c", {}, "", 0.5, [0.5], None, [None], True, bits, 8, 4, redone, 0, 1.0)

    line = table("f", 100, [row(2, 8.0, 0), row(4, 8.25, 1)]).splitlines()[-1]
    assert line.split() == ["c", "8.25", "25.0%", "5.00e-01", "5.00e-01"]
