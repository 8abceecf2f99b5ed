"""The tests on a GPU, in part, on a stand-in for CuPy: that they run, and that they notice what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gccomm_launch.mpiexec import NoLauncherError, find_launcher

from gccomm import kernels, testing
from gccomm.kernels.cuda import on_cupy
from gccomm.kernels.cuda.device import host_bytes
from tests import test_chunks as chunks
from tests import test_word_equality as words
from tests import test_word_equality_rotations as rotations
from tests.cuda_on_cpu import InPlace
from tests.devices import cupy
from tests.fake_cupy import FakeCupy
from tests.gpu import conftest
from tests.gpu.bridge import Bridged
from tests.gpu.programs import ALL_CODECS, compare

__all__ = ["cupy"]

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def bridged(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> Bridged:
    found = Bridged(kernels.of_device("cuda:0"))
    for module in (words, rotations):
        monkeypatch.setattr(module, "kernels", InPlace(found))  # type: ignore[arg-type]
        monkeypatch.setattr(module, "every_level", lambda: iter(["device"]))
    return found


def test_cases_of_kernels_run(bridged: Bridged) -> None:
    words.test_lane_codec("bfloat16", 5)
    words.test_lane_codec_on_batches_in_pieces()
    words.test_integers("int16")
    words.test_exact_words("float64")
    words.test_float_wires("float16", "float32")
    rotations.test_all_sizes(1, "float32")
    rng = np.random.default_rng(0)
    tensor = chunks.finite("float64", 2600, rng)
    chunks.one_case(bridged, tensor, 100, np.array([0, 5, 25]), 3, n=2)  # type: ignore[arg-type]
    assert chunks.energies(bridged, tensor, 100, 0).min() > 0


def test_wrong_words_of_a_device_are_noticed(
    bridged: Bridged, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    shim, run = cupy.shim, cupy.shim.run

    def wrong(name: str, grid: int, args: Any) -> None:
        run(name, grid, args)
        if name == "gccomm_encode":
            host_bytes(int(args[5]), 1)[0] ^= 1  # of its words

    monkeypatch.setattr(shim, "run", wrong)
    with pytest.raises(AssertionError):
        words.test_lane_codec("float32", 8)


@pytest.mark.parametrize("codec", ["rotated", "topkc", "raw", "intsgd", "rehop"])
def test_comparisons_of_steps_run(codec: str, cupy: FakeCupy) -> None:
    assert codec in ALL_CODECS
    testing.run(lambda comm: compare(comm, codec, cupy), 2)


def test_wrong_results_of_a_device_are_noticed(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    asnumpy = cupy.asnumpy
    monkeypatch.setattr(cupy, "asnumpy", lambda array: asnumpy(array) * np.asarray(1.5, array.dtype))
    with pytest.raises(AssertionError, match="rotated: results of"):
        testing.run(lambda comm: compare(comm, "rotated", cupy), 1)


NUMPY_AS_CUPY = """
import contextlib
from numpy import asarray, ndarray
asnumpy = asarray
class cuda:
    class runtime:
        getDeviceCount = staticmethod(lambda: 1)
    Device = staticmethod(lambda number: contextlib.nullcontext())
    Stream = staticmethod(lambda non_blocking: contextlib.nullcontext())
"""


def test_the_program_of_ranks_runs_over_mpi(tmp_path: Path) -> None:
    try:
        find_launcher()
    except NoLauncherError as error:
        pytest.skip(str(error))
    (tmp_path / "cupy.py").write_text(NUMPY_AS_CUPY)
    program = str(ROOT / "tests" / "gpu" / "programs.py")
    # With a safe path, mpi4py's runner would put the program's folder in the place of the first one.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "gccomm_launch", "run", "-n", "2", program, "mpi"],
        env={**environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert f"rank {rank} of 2: {len(ALL_CODECS)} codecs" in done.stdout


def test_why_there_is_no_gpu(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    assert conftest.why_not() == ""
    cupy.devices = 0
    assert conftest.why_not() == "no GPU: CuPy sees no device"
    cupy.devices = -1
    assert conftest.why_not().startswith("no GPU: cudaErrorInsufficientDriver")
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert conftest.why_not().startswith("no GPU: CuPy cannot be imported")
    on_cupy.forget_devices()


def test_without_a_gpu_all_are_skipped_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text("raise ImportError('none here')")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu/test_ranks.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no GPU: CuPy cannot be imported (none here)" in done.stdout
    assert "6 skipped" in done.stdout
