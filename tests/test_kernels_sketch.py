"""Projections by random signs: the C++ kernels against their specification."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gccomm import kernels
from gccomm.kernels import reference
from tests.kernel_batches import BLOCK, Batch, Part, level, normal  # noqa: F401  # a fixture

Array = np.ndarray[Any, Any]


def rows_of(values: Array, lengths: Array) -> Array:
    """Return blocks that lie one behind the other as rows, filled up with zeros."""
    rows = np.zeros((len(lengths), BLOCK), values.dtype)
    for row, length, end in zip(rows, lengths, np.cumsum(lengths), strict=True):
        row[:length] = values[end - length : end]
    return rows


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("lengths", [[1024], [1024, 1024, 5], [1, 15, 16, 17, 1023, 700, 33], []])
def test_projections_of_errors(dtype: Any, lengths: list[int]) -> None:
    """Blocks are named once, often, or not at all."""
    sizes = np.array(lengths, np.int64)
    errors = normal(int(sizes.sum())).astype(dtype) * np.array(1e30, dtype)
    counts = np.array([3, 1, 0, 2, 1, 20, 4])[: len(sizes)]
    blocks = np.repeat(np.arange(len(sizes)), counts)
    numbers = np.concatenate([np.arange(count) for count in counts] or [blocks])
    starts, found = np.cumsum(sizes) - sizes, np.full(len(blocks), 77.0)
    addresses = map(kernels.address, (starts, sizes, blocks))
    where = kernels.address(errors), dtype is np.float64
    kernels.project_errors(*where, *addresses, len(blocks), kernels.address(found))
    expected = reference.project_errors(rows_of(errors, sizes)[blocks], numbers)
    assert found.tobytes() == expected.tobytes()


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("power", [0, -3, 130, -1031, 1080])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("residual", [False, True])
def test_sums_of_inputs(power: int, dtype: str, residual: bool) -> None:
    """Of several tensors, some with rows of their own, some without a value."""
    kind = np.dtype(dtype).type
    parts = [
        Part(normal(size, seed=size).astype(kind), dtype, row, absent=size == 3000)
        for size, row in ((2048, 0), (1, 0), (3000, 0), (2 * 1500, 1500), (1030, 0))
    ]
    for part in parts:
        if residual:
            part.residual = normal(part.x.size, seed=7).astype(kind)
    batch = Batch(*parts)
    found = np.empty(BLOCK)
    kernels.sum_inputs(*batch.head, 0, batch.blocks, power, kernels.address(found))
    rows = []
    for part in parts:
        x = np.zeros_like(part.x) if part.absent else part.x
        x = x + part.residual if part.residual is not None else x
        lengths = np.array([p.stop - p.start for p in part.places])
        rows.append(rows_of(x, lengths))
    assert found.tobytes() == reference.sum_inputs(np.concatenate(rows), power).tobytes()


def test_signs_are_fair_and_differ() -> None:
    rows = np.eye(BLOCK, dtype=np.float32)
    signs = np.stack([reference.project_errors(rows, np.full(BLOCK, k)) for k in range(64)])
    assert set(np.unique(signs)) == {-1.0, 1.0}
    assert abs(signs.mean()) < 5 / np.sqrt(signs.size)
    products = signs @ signs.T / BLOCK - np.eye(64)
    assert np.abs(products).max() < 6 / np.sqrt(BLOCK)
    inputs = np.stack([reference.sum_inputs(np.ones((1, BLOCK), np.float32), 0, first=k) for k in range(64)])
    assert np.abs(inputs @ signs.T).max() / BLOCK < 6 / np.sqrt(BLOCK)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="count must not be negative"):
        kernels.project_errors(0, False, 0, 0, 0, -1, 0)
    with pytest.raises(ValueError, match="power outside"):
        kernels.sum_inputs(0, 0, 0, 0, 3000, 0)
