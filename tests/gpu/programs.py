"""What ranks do on a GPU, compared with what comes of it on the CPU. As a program: on a back end's ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gccomm_launch.doctor_trials import device_of

sys.path.append(str(Path(__file__).resolve().parents[2]))  # last: gccomm is the one that is installed

import gccomm
from gccomm import testing
from gccomm.codecs import get_codec
from tests.devices import trees
from tests.test_cuda_engine import CODECS

__all__ = ["ALL_CODECS", "compare", "expected", "own_operation", "reduced"]

STEPS = 3
ALL_CODECS = (*CODECS, "rehop", "uniform:widening=True")
ON_DEVICE = (
    "uniform:wire_bits=5",
    "rotated:headroom=safe",
    "rotated:wire_bits=4,headroom=checked",
    "raw",
    "bf16",
)
"""Codecs whose words stay there."""
FLOAT_SUMS = ("raw", "bf16", "fp16", "powersgd", "topkc")
"""Codecs whose float sums need not have the same bits in another order."""


def own_operation(codec: str) -> bool:
    """Return whether a codec reduces by an operation of gccomm's own, which NCCL has not."""
    return get_codec(codec).operation is not None


def floats_of(step: int, ranks: int, rank: int) -> dict[str, Any]:
    """Return a rank's arrays of floats and complex numbers."""
    tree = trees(step, ranks)[rank]
    return {key: value for key, value in tree.items() if value.dtype.kind in "fc" or key == "brain"}


def reduced(comm: gccomm.Communicator, codec: str, place: Any = None) -> tuple[Any, Any]:
    """Return the results of the last of three steps, and residuals, as NumPy arrays.

    Parameters
    ----------
    comm : gccomm.Communicator
        The ranks.
    codec : str
        Of the steps.
    place : module, optional
        CuPy, to have the arrays on the current device.
    """
    reducer = gccomm.Reducer(codec, comm=comm, op="mean", seed=5)
    found: dict[str, Any] = {}
    for step in range(STEPS):
        mine = floats_of(step, comm.size, comm.rank)
        if place is not None:
            mine = {key: place.asarray(value) for key, value in mine.items()}
            assert all(isinstance(value, place.ndarray) for value in mine.values())
        found = reducer(mine)
        if place is not None:
            assert all(isinstance(value, place.ndarray) for value in found.values())
    to_host = np.asarray if place is None else place.asnumpy
    rest = reducer.state_dict()["residuals"]
    return {key: to_host(value) for key, value in found.items()}, rest


def expected(codec: str, ranks: int) -> list[tuple[Any, Any]]:
    """Return what `reduced` gives for each rank on the CPU."""
    return testing.run(lambda comm: reduced(comm, codec), ranks)


def compare(comm: gccomm.Communicator, codec: str, cupy: Any) -> None:
    """Raise AssertionError unless the device gives the CPU's bits: of float sums, the same numbers."""
    want, kept = expected(codec, comm.size)[comm.rank]
    found, rest = reduced(comm, codec, cupy)
    assert found.keys() == want.keys()
    assert rest.keys() == kept.keys()
    exact = comm.size == 1 or not codec.startswith(FLOAT_SUMS)
    for name, ours, theirs in (("results", found, want), ("residuals", rest, kept)):
        for key in theirs:
            assert_alike(np.asarray(ours[key]), theirs[key], exact, f"{codec}: {name} of {key}")


def assert_alike(found: Any, want: Any, exact: bool, what: str) -> None:
    """Compare bits, or numbers where their order of addition is free."""
    assert found.dtype == want.dtype
    if exact:
        assert found.tobytes() == want.tobytes(), f"{what} differ"
        return
    ours, theirs = found.astype(np.complex128), want.astype(np.complex128)
    atol = 0.02 * float(np.abs(theirs).max(initial=0))
    np.testing.assert_allclose(ours, theirs, atol=atol, rtol=0.02, err_msg=what)


def launched(comm: gccomm.Communicator, cupy: Any) -> Any:
    """Capture a step, launch it three times, and return the graph; AssertionError where sums are wrong."""
    reducer = gccomm.Reducer("uniform", comm=comm, op="sum", error_feedback=False)
    stream, x = cupy.cuda.get_current_stream(), {"w": cupy.full(5000, comm.rank + 1, np.float32)}
    for _ in range(4):  # the first three are measured
        reducer(x)
    comm.synchronize()
    stream.begin_capture()
    y = reducer(x)["w"]
    graph = stream.end_capture()
    for _ in range(3):
        x["w"] *= 2
        graph.launch(stream)
    found = cupy.asnumpy(y)
    comm.synchronize()
    np.testing.assert_allclose(found, 4 * comm.size * (comm.size + 1), rtol=0.02)
    return graph


def on_two_hosts() -> gccomm.Communicator:
    """Return a communicator of this job's ranks, of which two each are on made-up hosts."""
    import gccomm_mpi.channel
    from mpi4py import MPI

    from tests.mpi.test_hierarchy import OnHosts

    duplicate: Any = gccomm_mpi.channel._duplicate
    made_up: Any = lambda comm: OnHosts(duplicate(comm), lambda rank: rank // 2)  # noqa: E731
    gccomm_mpi.channel._duplicate = made_up
    return gccomm.init(comm=MPI.COMM_WORLD.Dup())


def compare_sums_of_hosts(comm: gccomm.Communicator, codec: str, cupy: Any) -> None:
    """Raise AssertionError unless the device gives the bits of the simulation with hosts of two ranks."""
    hosts = [rank // 2 for rank in range(comm.size)]
    *_, (_, _, want, _) = testing.simulate_steps(
        lambda step: [floats_of(step, comm.size, rank) for rank in range(comm.size)],
        codec, "mean", 5, STEPS, hosts=hosts,
    )  # fmt: skip
    found, _ = reduced(comm, codec, cupy)
    for key, value in want[comm.rank].items():
        assert_alike(found[key], value, not codec.startswith(FLOAT_SUMS), f"{codec}: results of {key}")


def by_host() -> None:
    """Compare codecs whose words stay on a device, with NCCL within hosts and MPI between them.

    What hosts add up is what ``GCCOMM_HIERARCHY`` says.
    """
    import cupy

    comm, floats = on_two_hosts(), os.environ["GCCOMM_HIERARCHY"] == "floats"
    place = comm.local_rank % cupy.cuda.runtime.getDeviceCount()
    with cupy.cuda.Device(place), cupy.cuda.Stream(non_blocking=True):
        comm.allreduce(cupy.ones(1000, cupy.float32))
        assert comm.backend == "mpi+nccl-by-host", comm.backend
        for codec in ON_DEVICE:
            (compare_sums_of_hosts if floats else compare)(comm, codec, cupy)
    print(f"rank {comm.rank} of {comm.size}: {len(ON_DEVICE)} codecs", flush=True)
    comm.close()


def main(backend: str) -> None:
    """Compare all codecs on the ranks of a job that may share a GPU; over NCCL launch a graph, and close the
    communicator before it.
    """
    if backend == "by-host":
        by_host()
        return
    import cupy

    comm = gccomm.init(backend=backend)
    count = cupy.cuda.runtime.getDeviceCount()
    place = device_of(comm.local_rank, count, os.environ.get("GCCOMM_CUDA_DEVICE"))
    codecs = [codec for codec in ALL_CODECS if backend == "mpi" or not own_operation(codec)]
    with cupy.cuda.Device(place), cupy.cuda.Stream(non_blocking=True):
        for codec in codecs:
            compare(comm, codec, cupy)
        graph = launched(comm, cupy) if backend == "nccl" else None
    comm.close()
    del graph
    print(f"rank {comm.rank} of {comm.size}: {len(codecs)} codecs", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
