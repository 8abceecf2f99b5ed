"""The benchmark of GPUs on a stand-in for CuPy: what it runs, and what it makes of times."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import gccomm
from tests.devices import cupy
from tests.fake_cupy import FakeCupy

__all__ = ["cupy"]

GPU = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_benchmark", GPU)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def test_kernels_are_shares_of_the_copy(bench: ModuleType, cupy: FakeCupy) -> None:
    case = bench.Case("cuda:0", 1)

    def clock(work: Callable[[], None]) -> float:
        work()
        case.queue.wait()
        return 1e-3 if work == case.copy else 1.25e-3

    rate, rows = bench.measure_kernels(case, clock, 2)
    assert rate == pytest.approx(8 * (1 << 18) / 1e-3)
    shares = {(row.codec, row.kernel, row.width): row.share for row in rows}
    assert len(rows) == 10
    assert shares["uniform", "maxima", 0] == pytest.approx(0.5 / 1.25)
    for codec in ("uniform", "rotated"):
        for kernel in ("encode", "decode"):
            assert shares[codec, kernel, 8] == pytest.approx((5 + 4 / 1024) / 8 / 1.25)
            assert shares[codec, kernel, 4] == pytest.approx((4.5 + 4 / 1024) / 8 / 1.25)
    assert [row.met for row in rows] == [row.bar is None for row in rows]
    decoded, x = np.asarray(case.out), np.asarray(case.x)
    assert np.corrcoef(decoded, x)[0, 1] > 0.6  # of one rank's words, in 4 bits


def test_rows_and_bars(bench: ModuleType) -> None:
    good = bench.Row("encode", "uniform", 8, 10**9, 500.0, 0.83, 0.8)
    bad = bench.Row("decode", "rotated", 4, 10**9, 500.0, 0.55, 0.6)
    free = bench.Row("maxima", "uniform", 0, 10**9, 500.0, 0.4, None)
    assert good.line().split()[:3] == ["uniform", "encode", "8"]
    assert good.line().endswith("500.0 us   2000.0 GB/s   83.0%  at least 80%")
    assert bad.line().endswith("55.0%  BELOW 60%")
    assert free.line().endswith("40.0%")
    calls = [{"back_end": "nccl", "codec": "raw", "ms": 1.5}]
    lines = bench.summary({"name": "Card"}, 3e12, [good, bad, free], calls)
    assert lines[0] == "Card: a copy reads and writes 3000.0 GB/s"
    assert lines[4].split() == ["nccl", "raw", "1.500", "ms"]
    assert lines[-1] == "1 below their bars"
    assert bench.summary({"name": "Card"}, 3e12, [good, free], [])[-1] == "all bars are met"


def test_results_are_kept_by_the_name_of_the_card(bench: ModuleType) -> None:
    assert (
        bench.file_for("NVIDIA H100 80GB HBM3") == GPU.parent / "results" / "gpu_nvidia_h100_80gb_hbm3.json"
    )


def test_calls_are_timed_from_idle_to_idle(bench: ModuleType, cupy: FakeCupy) -> None:
    x = cupy.asarray(np.ones(5000, np.float32))
    waits: list[int] = []
    comm = gccomm.Communicator(gccomm.backends.load("local")())
    found = bench.measure_calls(comm, x, lambda: waits.append(1), 3, ("uniform", "raw"))
    assert [(call["back_end"], call["codec"]) for call in found] == [("local", "uniform"), ("local", "raw")]
    assert all(call["ms"] > 0 for call in found)
    assert len(waits) == 2 * 2 * 5


def test_without_a_gpu_it_says_so(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert bench.main([]) == 2
    assert "no GPU can be used: ModuleNotFoundError" in capsys.readouterr().err


class Stream:
    """In the place of CuPy's, with graphs that do nothing, or none."""

    fails = False

    def __init__(self, non_blocking: bool = True) -> None:
        self.launched = 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def begin_capture(self) -> None:
        if self.fails:
            raise RuntimeError("cudaErrorStreamCaptureUnsupported")

    def end_capture(self) -> SimpleNamespace:
        return SimpleNamespace(launch=lambda stream: None)


@pytest.mark.parametrize("fails", [False, True])
def test_graphs_are_timed_or_it_is_said_why_not(
    fails: bool, bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stream, "fails", fails)
    comm = gccomm.Communicator(gccomm.backends.load("local")())
    monkeypatch.setattr(gccomm.Communicator, "synchronize", lambda _: None, raising=False)
    library = SimpleNamespace(cuda=SimpleNamespace(Stream=Stream))
    found = bench.measure_graph(comm, library, np.ones(2000, np.float32), 3)
    if fails:
        error = "RuntimeError: cudaErrorStreamCaptureUnsupported"
        assert found == {"back_end": "local", "error": error}
    else:
        assert found.pop("replay_ms") > 0
        assert found == {"back_end": "local", "codec": "uniform"}
