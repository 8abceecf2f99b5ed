"""Tests on a GPU; without one they are skipped, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gccomm import kernels
from tests import test_word_equality as words
from tests import test_word_equality_rotations as rotations
from tests.cuda_on_cpu import InPlace
from tests.gpu.bridge import Bridged

FOLDER = Path(__file__).resolve().parent


def why_not() -> str:
    """Return why there is no GPU to test on, or nothing."""
    try:
        import cupy
    except ImportError as error:
        return f"no GPU: CuPy cannot be imported ({error})"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no GPU: {error}"
    return "" if count else "no GPU: CuPy sees no device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if FOLDER in item.path.parents]
    reason = why_not() if here else ""
    for item in here if reason else ():
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def cupy() -> Any:
    """CuPy, on a stream of the user's own."""
    import cupy

    with cupy.cuda.Stream(non_blocking=True):
        yield cupy


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Bridged:
    """Put the kernels of the device into the cases of the CPU's."""
    found = Bridged(kernels.of_device("cuda:0"))
    for module in (words, rotations):
        monkeypatch.setattr(module, "kernels", InPlace(found))  # type: ignore[arg-type]
        monkeypatch.setattr(module, "every_level", lambda: iter(["device"]))
    return found
