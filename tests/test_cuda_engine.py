"""Whole reductions with the device's kernels, run on the CPU, in place of the CPU's: the same bits.

What codecs, engine and operands do with a device is what they do here, but that its memory is the host's.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gccomm import get_codec, kernels, testing
from gccomm.codecs.lane_sums import takes_lane_sums
from gccomm.errors import BackendError
from gccomm.kernels.cuda import device as device_module
from gccomm.layout import LeafSpec
from gccomm.operand import Operand
from gccomm.plan import Plan
from gccomm.steps import Context
from tests.cuda_on_cpu import OnCpu, kernels_on_cpu
from tests.devices import same, trees

CODECS = (
    "rotated",
    "rotated:wire_bits=4,headroom=checked",
    "rotated:wire_bits=4,headroom=clipped",
    "rotated:wire_bits=3,rotations=2",
    "rotated:scales=predicted",
    "uniform:wire_bits=2",
    "uniform:wire_bits=5",
    "uniform:wire_bits=16,scales=predicted",
    "thc",
    "qsgd-mn:wire_bits=6",
    "qsgd-mn-ts:wire_bits=10",
    "grandk-mn",
    "global-qsgd",
    "global-qsgd:dithering=exponential",
    "intsgd",
    "topkc",
    "topkc:values=lanes",
    "powersgd",
    "raw",
    "bf16",
    "fp16",
)


def inputs(step: int, ranks: int) -> list[dict[str, Any]]:
    """Return a tree a rank, with subnormal numbers."""
    found = trees(step, ranks)
    for rank, tree in enumerate(found):
        rng = np.random.default_rng([step, rank, 1])
        tree["tiny"] = (rng.standard_normal(1100) * 1e-42).astype(np.float32)
    return found


def reduce(codec: str, ranks: int) -> tuple[list[dict[str, Any]], list[Any]]:
    """Three steps with small pieces; the last one's results."""
    return testing.simulate(
        lambda step: inputs(step, ranks), codec, steps=3, piece_coordinates=4096, op="sum"
    )


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> OnCpu:
    found = kernels_on_cpu("random")
    monkeypatch.setattr(kernels, "of_device", lambda _device: found)
    assert isinstance(found.launcher, OnCpu)
    return found.launcher


@pytest.mark.parametrize("codec", CODECS)
def test_reductions_give_the_same_bits(codec: str, request: pytest.FixtureRequest) -> None:
    ranks = 4 if "checked" in codec else 3
    expected, plain = reduce(codec, ranks)
    launches = request.getfixturevalue("on_device").launches
    found, stats = reduce(codec, ranks)
    for rank in range(ranks):
        assert same(found[rank], expected[rank])
        assert stats[rank].wire_bytes == plain[rank].wire_bytes
        np.testing.assert_equal(stats[rank].vnmse_estimate, plain[rank].vnmse_estimate)
    assert launches["gccomm_int_decode"] > 0


def test_redone_spans_and_failures_are_the_same(request: pytest.FixtureRequest) -> None:
    rng = np.random.default_rng(8)
    xs = [rng.standard_normal(1 << 17).astype(np.float32) for _ in range(4)]
    spikes = [x.copy() for x in xs]
    for x in spikes:  # much larger sums than in the steps before
        x[: 1 << 16] = 1.0
    runs: list[Any] = []
    for turn in range(2):
        if turn:
            request.getfixturevalue("on_device")
        runs.append(
            testing.simulate(
                lambda step: spikes if step == 2 else xs, "rotated:headroom=checked,wire_bits=4", steps=3
            )
        )
    (expected, plain), (found, stats) = runs
    assert stats[0].spans_redone == plain[0].spans_redone
    assert stats[0].spans_redone > 0
    assert found[0].tobytes() == expected[0].tobytes()


def test_sums_that_do_not_fit_and_infinities(on_device: OnCpu) -> None:
    with pytest.raises(OverflowError, match="4 integer sums do not fit int8"):
        testing.simulate([{"a": np.full(4, 100, np.int8)}] * 2)
    x = np.ones(3000, np.float32)
    x[1500] = np.inf
    found, _ = testing.simulate([x, np.ones(3000, np.float32)])
    assert np.isnan(found[0][1024:2048]).all()
    assert np.isfinite(found[0][:1024]).all()
    with pytest.raises(Exception, match="inf or NaN"):
        testing.simulate([x, x], nonfinite="raise")


def test_operands_ask_for_the_kernels_of_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def of_device(device: str) -> Any:
        asked.append(device)
        return kernels

    monkeypatch.setattr(kernels, "of_device", of_device)
    codec = get_codec("uniform")
    specs = [
        LeafSpec(str(i), "float32", (2000,), (2000,), codec, False, device=where)
        for i, where in enumerate(("cpu", "cuda:0", "cpu", "cuda:1"))
    ]
    plan = Plan(specs, 2)
    assert [[s.leaf for s in x.segments] for x in plan.operands] == [[0, 2], [1], [3]]
    assert asked == ["cpu", "cuda:0", "cuda:1"]
    assert all(isinstance(x, Operand) and x.on_host for x in plan.operands)


def test_shared_memory_sums_no_lanes_of_a_device(on_device: OnCpu) -> None:
    x = Plan([LeafSpec("", "float32", (2000,), (2000,), get_codec("uniform"), False)], 2).operands[0]
    assert not x.on_host
    assert not takes_lane_sums(x, Context(0, 2, 0, sums_lanes=True))


def test_devices_without_kernels_are_named() -> None:
    assert kernels.of_device("cpu") is kernels
    for name in ("rocm:0", "cuda:x", ""):
        with pytest.raises(ValueError, match="no kernels for the device"):
            kernels.of_device(name)
    with pytest.raises((ImportError, BackendError), match=r"CuPy|CUDA device"):
        kernels.of_device("cuda:99")


def test_the_devices_functions_have_the_signatures_of_the_cpus() -> None:
    """Which are those of the stub."""
    path = Path(kernels.__file__).with_name("_native.pyi")
    stub = {x.name: x for x in ast.parse(path.read_text("utf-8")).body if isinstance(x, ast.FunctionDef)}
    path = Path(device_module.__file__)
    (own,) = (
        x
        for x in ast.parse(path.read_text("utf-8")).body
        if isinstance(x, ast.ClassDef) and x.name == "DeviceKernels"
    )
    compared = 0
    for method in own.body:
        if isinstance(method, ast.FunctionDef) and method.name in stub:
            other = stub[method.name]
            assert method.args.args.pop(0).arg == "self"
            assert ast.dump(method.args) == ast.dump(other.args), method.name
            assert ast.dump(method.returns) == ast.dump(other.returns), method.name  # type: ignore[arg-type]
            compared += 1
    assert compared > 10


def test_the_device_has_every_function_on_blocks() -> None:
    names = {name for name in dir(device_module.DeviceKernels) if not name.startswith("_")}
    # On the CPU chunks are NumPy's; headers are guarded and noise renewed on devices alone.
    assert names - set(kernels.__all__) == {"chunk_take", "chunk_put", "guard", "renew"}
