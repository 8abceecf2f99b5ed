"""Examples and benchmarks run as their docstrings say."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from gccomm_launch.mpiexec import NoLauncherError, find_launcher

import gccomm

ROOT = Path(__file__).parents[1]
TRAIN = ROOT / "examples" / "train_digits.py"
END_TO_END = ROOT / "benchmarks" / "end_to_end.py"
LIMIT_S = 240
RUN = [sys.executable, "-m", "gccomm_launch.cli", "run", "-n"]

pytest.importorskip("sklearn")


def finished(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False, stdin=subprocess.DEVNULL
    )


def trained(command: Sequence[str], *arguments: str) -> dict[str, Any]:
    """Return the JSON line of a training."""
    done = finished([*command, str(TRAIN), "--json", *arguments])
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    return load(TRAIN)


@pytest.fixture(scope="module")
def _launcher() -> None:
    try:
        find_launcher()
    except NoLauncherError as error:
        pytest.skip(str(error))


def test_trains_alone() -> None:
    alone = [sys.executable, "-W", "error"]
    result = trained(alone, "--epochs", "6")
    assert result["ranks"] == len(result["digests"]) == 1
    assert result["accuracy"] > 0.94
    assert result["wire_bytes"] * 3 < result["float32_bytes"]
    assert trained(alone, "--epochs", "6")["digests"] == result["digests"]
    assert trained(alone, "--epochs", "6", "--seed", "1")["digests"] != result["digests"]


@pytest.mark.usefixtures("_launcher")
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_end_with_equal_weights(ranks: int) -> None:
    result = trained([*RUN, str(ranks)], "--epochs", "6")
    assert result["ranks"] == len(result["digests"]) == ranks
    assert len(set(result["digests"])) == 1
    assert result["accuracy"] > 0.94


@pytest.mark.usefixtures("_launcher")
def test_reports_each_epoch() -> None:
    done = finished([*RUN, "2", str(TRAIN), "--epochs", "2", "--codec", "uniform:wire_bits=4"])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line[:9] for line in lines] == ["epoch  1:", "epoch  2:", "rank 0: w", "rank 1: w"]
    assert all(
        word in lines[0] for word in ("loss", "test accuracy", "bytes on the wire", "less than float32")
    )


@pytest.mark.parametrize("argv", [["--codec", "uniforms"], ["--epochs", "0"], ["--seed", "-1"]])
def test_wrong_arguments(argv: list[str], digits: ModuleType) -> None:
    with pytest.raises(SystemExit) as exit_:
        digits.parse(argv)
    assert exit_.value.code == 2


def test_gradients_are_those_of_the_loss(digits: ModuleType) -> None:
    rng = np.random.default_rng(0)
    weights = {key: value.astype(np.float64) for key, value in digits.initial_weights(0).items()}
    x, y = rng.standard_normal((5, 64)), rng.integers(0, 10, 5)
    _, found = digits.gradients(weights, x, y)

    def objective(values: dict[str, Any]) -> float:
        decay = digits.DECAY / 2 * sum((values[key] ** 2).sum() for key in ("w1", "w2"))
        return float(digits.gradients(values, x, y)[0] + decay)

    for key, gradient in found.items():
        direction = rng.standard_normal(gradient.shape)
        up, down = ({**weights, key: weights[key] + s * 1e-6 * direction} for s in (1, -1))
        slope = (objective(up) - objective(down)) / 2e-6
        assert slope == pytest.approx(float((gradient * direction).sum()), rel=1e-5)


def test_shards_are_disjoint_and_equal(digits: ModuleType) -> None:
    options = digits.parse(["--batch", "96"])
    shards = gccomm.testing.run(lambda comm: digits.Trainer(options, comm).x, ranks=4)
    assert {len(shard) for shard in shards} == {digits.TRAIN // 4}
    np.testing.assert_array_equal(np.concatenate(shards), digits.load()[0])


def test_different_weights_end_with_status_1(digits: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    options = digits.parse([])

    def differ(comm: gccomm.Communicator) -> int:
        trainer = digits.Trainer(options, comm)
        trainer.weights["b2"][3] += comm.rank
        status: int = digits.report(trainer, options, 0.0)
        return status

    assert gccomm.testing.run(differ, ranks=3) == [1, 1, 1]
    assert capsys.readouterr().err == "the ranks' weights differ\n"


@pytest.mark.usefixtures("_launcher")
def test_end_to_end_benchmark(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    small = ["--size", "128K", "--divide", "64", "--iters", "2", "--warmup", "1", "--json", str(path)]
    done = finished([*RUN, "2", str(END_TO_END), *small])
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert {row["size"] for row in report["whole_call"]["rows"]} == {128 << 10}
    many = report["many_tensors"]
    assert many["ratio"] == pytest.approx(many["tensors_us"] / many["one_tensor_us"])
    assert many["tensors"] == 161
    assert f"ratio {many['ratio']:.3f}" in done.stdout
