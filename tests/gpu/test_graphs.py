"""Steps over NCCL captured in a CUDA graph after a warm-up, and replayed with other inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gccomm

WARM_UP = 4  # of which the first three are measured
LARGEST_ERRORS = {"raw": 0.0, "bf16": 1e-2, "fp16": 1e-2, "uniform": 2e-2, "rotated:headroom=safe": 2e-2}
"""Relative, of a world of one."""


@pytest.fixture(scope="module")
def comm() -> Iterator[gccomm.Communicator]:
    if "nccl" not in gccomm.backends.available():
        pytest.skip("no back end `nccl` is installed")
    with gccomm.init(backend="nccl") as made:
        yield made


@pytest.mark.parametrize("codec", LARGEST_ERRORS)
def test_a_captured_step_is_replayed(codec: str, comm: gccomm.Communicator, cupy: Any) -> None:
    reducer = gccomm.Reducer(codec, comm=comm, op="mean", error_feedback=False)
    rng, stream = np.random.default_rng(0), cupy.cuda.get_current_stream()
    draws = [rng.standard_normal((300, 1000)).astype(np.float32) for _ in range(4)]
    x = {"w": cupy.asarray(draws[0])}
    for _ in range(WARM_UP):
        reducer(x)
    comm.synchronize()
    stream.begin_capture()
    y = reducer(x)["w"]
    graph = stream.end_capture()
    for drawn in draws[1:]:
        x["w"].set(drawn, stream=stream)
        graph.launch(stream)
        found = y.get(stream=stream)
        error = np.linalg.norm(found - drawn) / np.linalg.norm(drawn)
        assert error <= LARGEST_ERRORS[codec]
    comm.synchronize()  # raises what launches have found
    eager = cupy.asnumpy(reducer(x)["w"])
    assert np.linalg.norm(eager - draws[-1]) <= LARGEST_ERRORS[codec] * np.linalg.norm(draws[-1])


def test_launches_have_noise_of_their_own(comm: gccomm.Communicator, cupy: Any) -> None:
    reducer = gccomm.Reducer("uniform:wire_bits=4", comm=comm, op="mean", error_feedback=False)
    stream = cupy.cuda.get_current_stream()
    x = {"w": cupy.asarray(np.random.default_rng(0).standard_normal(100_000).astype(np.float32))}
    for _ in range(WARM_UP):
        reducer(x)
    comm.synchronize()
    stream.begin_capture()
    y = reducer(x)["w"]
    graph = stream.end_capture()
    found = []
    for _ in range(24):
        graph.launch(stream)
        found.append(y.get(stream=stream).astype(np.float64) - x["w"].get(stream=stream))
    one, mean = np.linalg.norm(found[0]), np.linalg.norm(np.mean(found, axis=0))
    assert mean < 0.3 * one  # errors cancel: 1 / sqrt(24) is 0.2
