"""The launcher on CuPy, against a stand-in whose streams are late, and the kernels compiled by NVRTC."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gccomm import kernels
from gccomm.errors import BackendError
from gccomm.kernels import cuda
from gccomm.kernels.cuda import compiled as compiled_module
from gccomm.kernels.cuda import headroom, on_cupy
from gccomm.kernels.cuda.compiled import cache_folder, compiled
from gccomm.kernels.cuda.device import DeviceKernels
from tests import nvrtc
from tests.cuda_on_cpu import OnCpu, kernels_on_cpu
from tests.fake_cupy import FakeCupy, Stream
from tests.kernel_batches import Part, lane_batch

needs_nvrtc = pytest.mark.skipif(
    nvrtc.library() is None, reason="the wheel nvidia-cuda-nvrtc-cu12 is not installed"
)


# Compiling


@needs_nvrtc
@pytest.mark.parametrize("capability", ["75", "80", "90", "100"])
def test_the_kernels_compile_for_devices(capability: str, tmp_path: Path) -> None:
    if int(capability) not in nvrtc.getSupportedArchs():
        pytest.skip(f"NVRTC {nvrtc.getVersion()} knows no device of capability {capability}")
    path = compiled(nvrtc, capability, tmp_path)
    code = path.read_bytes()
    assert code.startswith(b"\x7fELF")
    for name in cuda.names():
        assert name.encode() in code
    assert path == compiled(SimpleNamespace(**_no_compiler()), capability, tmp_path)


def _no_compiler() -> dict[str, Any]:
    return {"getSupportedArchs": nvrtc.getSupportedArchs, "getVersion": nvrtc.getVersion}


@needs_nvrtc
def test_no_operation_is_fused_flushed_or_approximate(tmp_path: Path) -> None:
    newest = max(nvrtc.getSupportedArchs())
    path = compiled(nvrtc, str(newest + 1), tmp_path)  # a device that this compiler is too old for
    assert path.suffix == ".ptx"
    text = path.read_text(encoding="utf-8")
    assert f".target sm_{newest}" in text
    assert not re.findall(r"\b(?:fma|mad)\.\S*f(?:32|64)|\.ftz|\.approx|div\.full", text)
    assert re.search(r"\bmul(?:\.rn)?\.f32", text)


@needs_nvrtc
def test_what_does_not_compile_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda, "source", lambda: "this is no program")
    with pytest.raises(BackendError, match=r"(?s)cannot compile.*kernels\.cu\(1\): error"):
        compiled(nvrtc, "80", tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(BackendError, match="as old as compute capability 20"):
        compiled(nvrtc, "20", tmp_path)


def fake_nvrtc(made: list[tuple[str, ...]]) -> SimpleNamespace:
    return SimpleNamespace(
        NVRTCError=nvrtc.NVRTCError,
        getSupportedArchs=lambda: [80, 90],
        getVersion=lambda: (12, 9),
        createProgram=lambda *_: 1,
        compileProgram=lambda _, options: made.append(tuple(options)),
        getCUBIN=lambda _: b"code",
        getPTX=lambda _: "text",
        destroyProgram=lambda _: None,
    )


def test_compiled_kernels_are_kept_by_text_options_and_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[tuple[str, ...]] = []
    monkeypatch.setenv("GCCOMM_CACHE_DIR", str(tmp_path / "kept"))
    compiler = fake_nvrtc(made)
    first = compiled(compiler, "90")
    assert first.parent == tmp_path / "kept"
    assert first.read_bytes() == b"code"
    assert compiled(compiler, "90") == first
    assert made == [(*cuda.OPTIONS, "--gpu-architecture=sm_90")]
    assert compiled(compiler, "80") != first
    compiler.getVersion = lambda: (13, 0)
    assert compiled(compiler, "90") != first
    monkeypatch.setattr(cuda, "source", lambda: "another")
    assert compiled(compiler, "90").name not in {first.name}
    assert len(made) == 4
    assert compiled(compiler, "100").read_bytes() == b"text"
    assert made[-1][-1] == "--gpu-architecture=compute_90"


def test_kernels_are_compiled_where_nothing_can_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    path = compiled(fake_nvrtc([]), "90", tmp_path / "file")
    assert path.read_bytes() == b"code"
    assert tmp_path not in path.parents
    path.unlink()
    path.parent.rmdir()


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GCCOMM_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/gccomm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "gccomm"


def test_the_text_is_whole_and_in_the_package() -> None:
    text = cuda.source()
    assert '#include "' not in text
    assert text.count("GCCOMM_CORE_H") == 2
    folder = Path(cuda.__file__).parent
    for path in [*folder.glob("*.cu*"), folder.parent / "core.h"]:
        assert path.read_text(encoding="utf-8").splitlines()[-1] in text
    functions = [*(name for name in vars(DeviceKernels) if not name.startswith("_")), *headroom.__all__]
    assert {f"gccomm_{name}" for name in functions} == set(cuda.names())


# Launching


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCupy:
    shim = kernels_on_cpu("descending").launcher
    assert isinstance(shim, OnCpu)
    found = FakeCupy(shim, nvrtc=fake_nvrtc([]))
    monkeypatch.setitem(sys.modules, "cupy", found)
    monkeypatch.setenv("GCCOMM_CACHE_DIR", str(tmp_path))
    return found


def on_own_stream(cupy: FakeCupy) -> tuple[DeviceKernels, Stream]:
    launcher = on_cupy.CupyLauncher()
    return DeviceKernels(launcher), cupy.streams[launcher.queue.stream]


def test_words_and_results_come_back_in_time(cupy: FakeCupy) -> None:
    device, stream = on_own_stream(cupy)
    x = np.random.default_rng(0).standard_normal(40_000).astype(np.float32)
    both = []
    for used in (device, kernels):
        part = Part(x)
        batch = lane_batch(8, part)
        scales, words = np.zeros(batch.blocks, np.uint32), np.zeros(batch.offsets[-1], np.uint32)
        check = np.zeros((batch.blocks, 2), np.uint32)
        s, w = kernels.address(scales), kernels.address(words)
        used.maxima(*batch.head, 0, batch.blocks, s)
        used.encode(*batch.head, 0, batch.blocks, s, w, 0, 8, 127 << 16, 5, kernels.address(check))
        used.decode(*batch.head, 0, batch.blocks, s, w, 0, 8, 127 << 16, 1, True, False, False)
        stream.synchronize()
        both.append([array.tobytes() for array in (scales, words, check, part.out, part.rest)])
    assert both[0] == both[1]
    assert len(cupy.loaded) == 1


def test_arrays_of_the_device_stay_there_and_nothing_waits(cupy: FakeCupy) -> None:
    device, stream = on_own_stream(cupy)
    x = np.random.default_rng(0).standard_normal(3000).astype(np.float32)
    part = Part(x)
    batch = lane_batch(4, part)
    scales, words = cupy.cuda.alloc(4 * batch.blocks), cupy.cuda.alloc(4 * batch.offsets[-1])
    device.maxima(*batch.head, 0, batch.blocks, scales.ptr)
    device.encode(*batch.head, 0, batch.blocks, scales.ptr, words.ptr, 0, 4, 7 << 16, 0)
    device.decode(*batch.head, 0, batch.blocks, scales.ptr, words.ptr, 0, 4, 7 << 16, 1, True, False, False)
    batch.table["src"] = 0  # what was asked for must not change with the table
    assert stream.waits == 0
    assert (part.out == 77).all()
    held = cupy.held
    assert held == 3
    stream.synchronize()
    found = part.out.copy()
    batch.table["src"] = kernels.address(x)
    maxima = batch.maxima()
    assert scales.mem.bytes.tobytes() == maxima.tobytes()
    assert found.tobytes() == batch.decode(maxima, batch.encode(maxima, 4, 7 << 16), 4, 7 << 16)[0].tobytes()
    device.maxima(*batch.head, 0, batch.blocks, scales.ptr)
    assert cupy.held == 1  # pinned memory that copies have read is given back


def test_counts_begin_at_zero(cupy: FakeCupy) -> None:
    device = DeviceKernels(on_cupy.CupyLauncher())
    x = np.full(2000, 100, np.int8)
    batch = lane_batch(8, Part(x, "int8", width=8))
    words = np.full(500, 0x7F7F7F7F, np.uint32)
    for _ in range(2):
        assert device.int_decode(*batch.head, 0, 2, kernels.address(words), 0, 2) == 0
    ranges = np.full(1, 9, np.uint32)
    device.int_range(*batch.head, kernels.address(ranges))
    assert ranges.tolist() == [7]
    y = np.ones(2000, np.float32)
    batch = lane_batch(8, Part(y))
    assert device.nonfinite(*batch.head, 0, 2) == 0
    y[1999] = np.nan
    assert device.nonfinite(*batch.head, 0, 2) == 1
    assert device.nonfinite(*batch.head, 0, 1) == 0


def test_a_missing_device_driver_or_library_is_named(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match="no CUDA device 3: this process sees 1"):
        on_cupy.CupyLauncher(3)
    cupy.devices = -1
    with pytest.raises(BackendError, match="no CUDA device can be used: cudaErrorInsufficientDriver"):
        on_cupy.CupyLauncher()
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r"need CuPy.*pip install \"gccomm\[cuda12\]\""):
        on_cupy.CupyLauncher()


def test_the_text_and_its_caller_import_no_cupy() -> None:
    code = "import sys, gccomm.kernels.cuda.on_cupy as m; m.cuda.source(); assert 'cupy' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
    assert compiled_module.compiled is compiled
