"""Ranks with a device each over NCCL, all of it stand-ins, for tests of calls on devices.

Kernels run on the CPU, streams are as late as they may be, ranks are threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gccomm_local
import gccomm_nccl
import numpy as np
import pytest

import gccomm
from gccomm.communicator import Communicator
from gccomm.kernels.cuda import on_cupy
from tests.cuda_on_cpu import OnCpu, kernels_on_cpu
from tests.devices import FAKE_NVRTC, same, trees
from tests.fake_gpu import Machine
from tests.fake_nccl import FakeNccl, install
from tests.on_threads import on_threads, raised

__all__ = [
    "FLOWING",
    "WAITING",
    "Beside",
    "Marks",
    "Site",
    "all_raise",
    "beside",
    "floats",
    "same",
    "site",
    "warm",
]

FLOWING = ("uniform:wire_bits=4", "uniform:wire_bits=5", "rotated:headroom=safe", "raw", "bf16", "fp16")
WAITING = (
    "rotated:wire_bits=4,headroom=checked",
    "rotated:wire_bits=4,headroom=clipped",
    "rotated:scales=predicted",
    "uniform:wire_bits=16,scales=predicted",
    "thc",
    "qsgd-mn:wire_bits=6",
    "qsgd-mn-ts:wire_bits=10",
    "grandk-mn",
    "global-qsgd",
    "intsgd",
    "topkc",
    "topkc:values=lanes",
    "powersgd",
)


class Site:
    """Ranks with a device each."""

    def __init__(self, machine: Machine, nccl: FakeNccl) -> None:
        self.machine, self.nccl = machine, nccl

    def there(self, tree: Any, rank: int) -> Any:
        """Return a tree of NumPy arrays as arrays of a rank's device."""
        if isinstance(tree, dict):
            return {key: self.there(value, rank) for key, value in tree.items()}
        with self.machine.cupy.cuda.Device(rank):
            return self.machine.cupy.asarray(tree)

    def back(self, tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: self.back(value) for key, value in tree.items()}
        return self.machine.cupy.asnumpy(tree)

    def communicator(self, base: Any) -> Communicator:
        """Return the communicator of a rank."""
        return Communicator(gccomm_nccl.over(base))

    def run(self, size: int, program: Callable[[Communicator], Any], *, closes: bool = True) -> list[Any]:
        """Call `program` on a thread per rank; return what each returned, or raise what one raised."""

        def body(base: Any) -> Any:
            with self.machine.cupy.cuda.Device(base.rank):
                stream = self.machine.cupy.cuda.Stream(non_blocking=True)
                with stream:
                    comm = self.communicator(base)
                    result = program(comm)
                    if closes:
                        comm.close()
                    return result

        return raised(on_threads(body, gccomm_local.group(size)))


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Site]:
    shim = kernels_on_cpu("random").launcher
    assert isinstance(shim, OnCpu)
    machine = Machine(4, shim, FAKE_NVRTC)
    nccl = install(monkeypatch, machine)
    monkeypatch.setenv("GCCOMM_CACHE_DIR", str(tmp_path))
    on_cupy.forget_devices()
    yield Site(machine, nccl)
    on_cupy.forget_devices()


class Beside(Site):
    """Ranks of the local back end, which NCCL joins."""

    def communicator(self, base: Any) -> Communicator:
        return Communicator(base, joins=True)


@pytest.fixture
def beside(site: Site) -> Beside:
    return Beside(site.machine, site.nccl)


def floats(step: int, ranks: int) -> list[dict[str, Any]]:
    """Return trees without integers."""
    return [{k: v for k, v in tree.items() if v.dtype.kind not in "iub"} for tree in trees(step, ranks)]


class Marks:
    """Where all ranks meet in a program, and what a rank's device has been waited for by then."""

    def __init__(self, site: Site, ranks: int) -> None:
        self._machine, self._barrier = site.machine, threading.Barrier(ranks)

    def __call__(self, comm: Communicator) -> tuple[int, int]:
        self._barrier.wait(30)
        found = self._machine.synchronisations, sum(b.waits for b in comm._boards.found.values())
        self._barrier.wait(30)
        return found


def warm(comm: Communicator, site: Site, number: int = 2) -> Any:
    """Make a layout known; return an array of it."""
    x = site.there(np.full(3000, comm.rank + 1, np.float32), comm.rank)
    for _ in range(number):
        comm.compressed_allreduce(x, codec="uniform")
    return x


def all_raise(site: Site, size: int, program: Callable[[Communicator], Any]) -> list[Any]:
    """Return what each rank's program returned or raised."""
    results: list[Any] = [None] * size

    def kept(comm: Communicator) -> None:
        try:
            results[comm.rank] = program(comm)
        except gccomm.GccommError as error:
            results[comm.rank] = error
        except (TypeError, ValueError) as error:
            results[comm.rank] = error

    site.run(size, kept, closes=False)
    return results
