"""Arrays on devices that do not exist: the stand-in for CuPy, ready to be used."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gccomm.kernels.cuda import on_cupy
from tests.cuda_on_cpu import OnCpu, kernels_on_cpu
from tests.fake_cupy import FakeCupy, Stream

__all__ = ["FAKE_NVRTC", "cupy", "from_device", "on_device", "same", "trees", "two_devices"]

FAKE_NVRTC = SimpleNamespace(
    NVRTCError=RuntimeError,
    getSupportedArchs=lambda: [90],
    getVersion=lambda: (12, 9),
    createProgram=lambda *_: 1,
    compileProgram=lambda *_: None,
    getCUBIN=lambda _: b"code",
    destroyProgram=lambda _: None,
)


def _installed(monkeypatch: pytest.MonkeyPatch, devices: int) -> Iterator[FakeCupy]:
    # Not pytest's folders: several ranks would tidy these up at once.
    with tempfile.TemporaryDirectory(prefix="gccomm-") as folder:
        monkeypatch.setenv("GCCOMM_CACHE_DIR", folder)
        yield from _ready(monkeypatch, devices)


def _ready(monkeypatch: pytest.MonkeyPatch, devices: int) -> Iterator[FakeCupy]:
    shim = kernels_on_cpu("random").launcher
    assert isinstance(shim, OnCpu)
    found = FakeCupy(shim, devices, FAKE_NVRTC, strict=True)
    monkeypatch.setitem(sys.modules, "cupy", found)
    on_cupy.forget_devices()
    with found.stream(non_blocking=True):  # the user works on a stream of his own
        yield found
    on_cupy.forget_devices()


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCupy]:
    """CuPy with one device."""
    yield from _installed(monkeypatch, 1)


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCupy]:
    """CuPy with two devices."""
    yield from _installed(monkeypatch, 2)


def on_device(cupy: FakeCupy, tree: Any, device: int = 0) -> Any:
    """Return a tree of NumPy arrays as arrays of a device, whose content comes late."""
    if isinstance(tree, dict):
        return {key: on_device(cupy, value, device) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(on_device(cupy, value, device) for value in tree)
    if not isinstance(tree, np.ndarray):
        return tree
    with cupy.cuda.Device(device):
        return cupy.asarray(tree)


def from_device(cupy: FakeCupy, tree: Any) -> Any:
    """Return a tree of arrays of a device as NumPy arrays."""
    if isinstance(tree, dict):
        return {key: from_device(cupy, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(from_device(cupy, value) for value in tree)
    return cupy.asnumpy(tree) if isinstance(tree, cupy.ndarray) else tree


def trees(step: int, ranks: int) -> list[dict[str, Any]]:
    """Return a tree a rank: all dtypes, odd sizes, rows, tails, small tensors, integers, complex numbers."""
    found = []
    for rank in range(ranks):
        rng = np.random.default_rng([step, rank])
        tails = rng.standard_normal(5003) * np.exp(rng.standard_normal(5003) * 2)
        found.append(
            {
                "single": tails.astype(np.float32),
                "double": rng.standard_normal((3, 700)),
                "half": rng.standard_normal(2049).astype(np.float16),
                "brain": rng.standard_normal((2, 750)).astype(ml_dtypes.bfloat16),
                "complex": (rng.standard_normal(800) + 1j * rng.standard_normal(800)).astype(np.complex64),
                "wide": rng.standard_normal((2, 3)) * 1j,
                "none": np.zeros((0, 4), np.float32),
                "scalar": np.array(rng.standard_normal(), np.float32),
                "long": rng.integers(-(2**60), 2**60, 1100),
                "short": rng.integers(0, 9, 300).astype(np.uint8),
                "flags": rng.random(40) < 0.5,
            }
        )
    return found


def same(found: Any, expected: Any) -> bool:
    """Return whether trees of NumPy arrays have the same bits."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    if not isinstance(expected, np.ndarray):
        return bool(found == expected)
    kinds = found.dtype == expected.dtype and found.shape == expected.shape
    return kinds and found.tobytes() == expected.tobytes()


def other_stream(cupy: FakeCupy) -> Stream:
    """Return another stream of the user's."""
    return cupy.stream(non_blocking=True)
