"""The digits benchmark, and the gradients that it records for `gccomm bench --accuracy`."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from gccomm_launch.accuracy_families import Recording

import gccomm
from gccomm.codecs import registry

DIGITS = Path(__file__).parents[1] / "benchmarks" / "digits.py"


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    pytest.importorskip("sklearn")
    spec = importlib.util.spec_from_file_location("digits_benchmark", DIGITS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_recorded_gradients(digits: ModuleType, tmp_path: Path) -> None:
    steps = list(digits.recorded(4, 2, before=3))
    again = list(digits.recorded(4, 2, before=3))
    assert [len(trees) for trees in steps] == [4, 4]
    assert {key: x.shape for key, x in steps[0][0].items()} == {
        "w1": (64, 128),
        "b1": (128,),
        "w2": (128, 10),
        "b2": (10,),
    }
    for trees, others in zip(steps, again, strict=True):
        for mine, theirs in zip(trees, others, strict=True):
            assert all((mine[key] == theirs[key]).all() for key in mine)
    assert len({tree["w1"].tobytes() for trees in steps for tree in trees}) == 8
    path = tmp_path / "digits.npz"
    digits.record(path, 4, 2, 0)
    recording = Recording(path)
    assert (recording.steps, recording.ranks, recording.coordinates) == (2, 4, 9610)


def test_recording_trains(digits: ModuleType) -> None:
    early, late = (next(digits.recorded(4, 1, before=before)) for before in (0, 60))
    sizes = [sum(float((tree["w2"] ** 2).sum()) for tree in trees) for trees in (early, late)]
    assert sizes[1] < sizes[0] / 4


def test_every_codec_has_a_setting(digits: ModuleType) -> None:
    ids = {text.partition(":")[0] for text in digits.SETTINGS.values()}
    assert registry._BUILT_IN.keys() <= ids
    for name in digits.available(list(digits.SETTINGS)).values():
        gccomm.get_codec(name)


def test_digits_benchmark(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    path = tmp_path / "found.json"
    argv = ["--ranks", "2", "--seeds", "2", "--epochs", "2", "--codecs", "uniform", "uniform:wire_bits=2"]
    done = subprocess.run(
        [sys.executable, "-W", "error", str(DIGITS), *argv, "--json", str(path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    raw, eight, two = report["rows"]
    assert [row["name"] for row in report["rows"]] == ["raw", "uniform", "uniform:wire_bits=2"]
    assert raw["points"] == [0, 0]
    assert raw["mean_accuracy"] > 0.8
    expected = [100 * (a - b) for a, b in zip(eight["accuracies"], raw["accuracies"], strict=True)]
    assert eight["points"] == pytest.approx(expected)
    assert two["ratio"] > eight["ratio"] > 3
    assert f"{two['mean_accuracy']:.2%}" in done.stdout
