"""Examples and benchmarks run as their docstrings say."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gccomm_launch.mpiexec import NoLauncherError, find_launcher

import gccomm

ROOT = Path(__file__).parents[1]
TRAIN = ROOT / "examples" / "train_digits.py"
TRAIN_CUPY = ROOT / "examples" / "train_cupy.py"
END_TO_END = ROOT / "benchmarks" / "end_to_end.py"
LIMIT_S = 240
RUN = [sys.executable, "-m", "gccomm_launch.cli", "run", "-n"]

pytest.importorskip("sklearn")


def finished(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False, stdin=subprocess.DEVNULL
    )


def trained(command: Sequence[str], *arguments: str, script: Path = TRAIN) -> dict[str, Any]:
    """Return the JSON line of a training."""
    done = finished([*command, str(script), "--json", *arguments])
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
def convolutional() -> ModuleType:
    return load(TRAIN_CUPY)


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


# The same in CuPy, or without a GPU in NumPy


def test_the_convolutional_network_trains_alone() -> None:
    alone = [sys.executable, "-W", "error"]
    result = trained(alone, "--epochs", "4", script=TRAIN_CUPY)
    assert result.keys() == trained(alone, "--epochs", "1").keys()
    assert result["accuracy"] > 0.94
    assert result["wire_bytes"] * 3 < result["float32_bytes"]
    again = trained(alone, "--epochs", "4", "--seed", "1", script=TRAIN_CUPY)
    assert again["digests"] != result["digests"]


@pytest.mark.usefixtures("_launcher")
def test_ranks_of_the_convolutional_network_end_with_equal_weights() -> None:
    result = trained([*RUN, "2"], "--epochs", "2", "--codec", "uniform:wire_bits=4", script=TRAIN_CUPY)
    assert result["ranks"] == len(result["digests"]) == 2
    assert len(set(result["digests"])) == 1
    assert result["accuracy"] > 0.9


def test_gradients_of_the_convolutional_network(convolutional: ModuleType) -> None:
    rng = np.random.default_rng(0)
    weights = {key: value.astype(np.float64) for key, value in convolutional.initial_weights(0).items()}
    net = convolutional.ConvNet(np)
    x, y = rng.standard_normal((5, 64)), rng.integers(0, 10, 5)
    _, found = net.gradients(weights, x, y)
    assert found.keys() == weights.keys()
    decay = convolutional.train_digits.DECAY

    def objective(values: dict[str, Any]) -> float:
        norms = sum((values[key] ** 2).sum() for key in ("k1", "k2", "w"))
        return float(net.gradients(values, x, y)[0] + decay / 2 * norms)

    for key, gradient in found.items():
        assert gradient.shape == weights[key].shape
        direction = rng.standard_normal(gradient.shape)
        up, down = ({**weights, key: weights[key] + s * 1e-6 * direction} for s in (1, -1))
        slope = (objective(up) - objective(down)) / 2e-6
        assert slope == pytest.approx(float((gradient * direction).sum()), rel=1e-5), key


@pytest.mark.parametrize("stride", [1, 2])
def test_patches_are_what_a_convolution_multiplies(convolutional: ModuleType, stride: int) -> None:
    signal = pytest.importorskip("scipy.signal")
    rng = np.random.default_rng(stride)
    x, kernel = rng.standard_normal((2, 8, 8, 3)), rng.standard_normal((27, 1))
    found = (convolutional.patches(np, x, stride) @ kernel)[..., 0]
    for image, of_image in zip(x, found, strict=True):
        want = sum(
            signal.correlate2d(image[..., c], kernel.reshape(3, 3, 3)[..., c], mode="same") for c in range(3)
        )
        np.testing.assert_allclose(of_image, want[::stride, ::stride], atol=1e-12)
    back = rng.standard_normal(convolutional.patches(np, x, stride).shape)
    adjoint = convolutional.unpatched(np, back, 8, stride)
    np.testing.assert_allclose((adjoint * x).sum(), (back * convolutional.patches(np, x, stride)).sum())


class NoDevice(RuntimeError):
    """In the place of CUDARuntimeError."""


def a_cupy(count: Any) -> ModuleType:
    """Return a stand-in for CuPy that finds so many devices, or fails."""
    used: list[int] = []

    def devices() -> int:
        if isinstance(count, Exception):
            raise count
        found: int = count
        return found

    runtime = SimpleNamespace(getDeviceCount=devices, CUDARuntimeError=NoDevice)
    device = lambda number: SimpleNamespace(use=lambda: used.append(number))  # noqa: E731
    made = ModuleType("cupy")
    made.cuda = SimpleNamespace(runtime=runtime, Device=device)  # type: ignore[attr-defined]
    made.used = used  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize(
    ("count", "why"),
    [
        (0, "CuPy sees no device"),
        (NoDevice("cudaErrorNoDevice"), "cudaErrorNoDevice"),
        (None, "CuPy cannot be imported"),
    ],
)
def test_without_a_gpu_one_line_says_why(
    count: Any,
    why: str,
    convolutional: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None if count is None else a_cupy(count))  # type: ignore[arg-type]
    assert gccomm.testing.run(convolutional.array_library, ranks=2) == [np, np]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"train_cupy: 2 of 2 ranks have no GPU ({why}")
    assert line.endswith("training in NumPy")


NUMPY_AS_CUPY = """
from types import SimpleNamespace
from numpy import *
class cuda:
    runtime = SimpleNamespace(getDeviceCount=lambda: 1, CUDARuntimeError=RuntimeError)
    Device = staticmethod(lambda number: SimpleNamespace(use=lambda: None))
"""


def test_with_a_gpu_it_trains_the_same_without_that_line(tmp_path: Path) -> None:
    """CuPy is NumPy by another name here: the way through the program is that of a GPU."""
    (tmp_path / "cupy.py").write_text(NUMPY_AS_CUPY)
    command = [sys.executable, str(TRAIN_CUPY), "--json", "--epochs", "1"]
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    without, there = (
        subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        for env in (environ, {**environ, "PYTHONPATH": str(tmp_path)})
    )
    assert there.returncode == 0, there.stderr
    assert there.stderr == ""
    assert json.loads(there.stdout.splitlines()[-1]) == json.loads(without.stdout.splitlines()[-1])


def test_each_local_rank_uses_its_device(convolutional: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = a_cupy(2)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert gccomm.testing.run(convolutional.array_library, ranks=3) == [cupy] * 3
    assert sorted(cupy.used) == [0, 0, 1]


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
