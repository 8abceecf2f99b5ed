"""The kernels of checked headroom on a GPU, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gccomm import kernels
from tests.test_cuda_headroom import (
    Memory,
    test_check_words_by_span,
    test_energies_as_they_are_shared,
    test_steps,
)

__all__ = ["test_check_words_by_span", "test_energies_as_they_are_shared", "test_steps"]


class OnDevice(Memory):
    """Arrays in the memory of a device."""

    def put(self, array: np.ndarray) -> int:
        made: Any = self.launcher.queue.empty(array.size, array.dtype)
        made[...] = array
        self._arrays[made.address] = made
        return int(made.address)

    def get(self, address: int) -> np.ndarray:
        return np.array(self._arrays[address])


@pytest.fixture
def memory() -> Memory:
    return OnDevice(kernels.of_device("cuda:0").launcher)
