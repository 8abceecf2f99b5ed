"""What the MPI suite shares.

Run it by
``mpiexec -n N python -m mpi4py -m pytest --with-mpi --timeout 300 --timeout-method thread tests/mpi``.

Every rank runs the same tests in the same order. mpi4py's runner aborts the job when a rank ends with an
error, and the timeout does when one rank waits for another that has left the test.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

HERE = Path(__file__).parent

# Same examples on all ranks, or collectives would not match.
hypothesis.settings.register_profile(
    "mpi", derandomize=True, database=None, deadline=None, max_examples=25, print_blob=False
)


def _with_mpi(config: pytest.Config) -> bool:
    return bool(config.getoption("--with-mpi", default=False))


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if not _with_mpi(config):
        return
    hypothesis.settings.load_profile("mpi")
    if config.option.basetemp is None:
        # Ranks that share pytest's folder delete it from under each other when they end, which is an error.
        folder = tempfile.mkdtemp(prefix="gccomm-rank-")
        config.option.basetemp = f"{folder}/pytest"
        config.add_cleanup(partial(shutil.rmtree, folder, ignore_errors=True))


def pytest_report_header(config: pytest.Config) -> str | None:
    if not _with_mpi(config):
        return None
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    return f"MPI: {vendor} {'.'.join(map(str, version))}, rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}"


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say at once what went wrong on this rank: its report at the end may be lost when it ends the job."""
    if report.failed and "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        where = f"rank {MPI.COMM_WORLD.rank}: {report.when} of {report.nodeid} failed"
        print(f"\nFAILED {where}\n{report.longreprtext}", file=sys.stderr, flush=True)


@pytest.hookimpl(wrapper=True)
def pytest_unconfigure(config: pytest.Config) -> Iterator[None]:
    """Write what there is to say before any rank ends.

    Launchers drop what they have not read from a rank's pipe when a rank ends the job, and a rank whose pipe
    they have closed already would end with an error.
    """
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if _with_mpi(config) and "mpi4py.MPI" in sys.modules:
            _meet(20)
        time.sleep(0.2)


def _meet(timeout_s: float) -> None:
    """Wait until all ranks are here, or so long."""
    from mpi4py import MPI

    end, request = time.monotonic() + timeout_s, MPI.COMM_WORLD.Ibarrier()
    while not request.Test() and time.monotonic() < end:
        time.sleep(0.01)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.mpi)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if call.when == "call":
        item.stash[FAILED] = report.failed
    return report


FAILED = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def world() -> Any:
    """mpi4py's communicator of all ranks."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture(scope="session")
def _verdicts(world: Any) -> Iterator[Callable[[bool], list[int]]]:
    from mpi4py import MPI

    comm = world.Dup()

    def ranks_with(flag: bool) -> list[int]:
        flags = np.zeros(comm.size, np.uint8)
        flags[comm.rank] = flag
        # more ranks than cores: a blocking call would spin away the time of the rank that it waits for
        request = comm.Iallreduce(MPI.IN_PLACE, flags, MPI.MAX)
        while not request.Test():
            os.sched_yield()
        return [int(rank) for rank in np.flatnonzero(flags)]

    yield ranks_with
    comm.Free()


@pytest.fixture(autouse=True)
def _same_verdict(request: pytest.FixtureRequest, _verdicts: Callable[[bool], list[int]]) -> Iterator[None]:
    """Fail a test on every rank when it failed on one, so that all of them go the same way."""
    yield
    mine = request.node.stash.get(FAILED, False)
    failed = _verdicts(mine)
    if failed and not mine:
        pytest.fail(f"this test failed on ranks {failed}")


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator that gives the same numbers on every rank."""
    return np.random.default_rng(20)


@pytest.fixture(scope="module")
def comm() -> Iterator[Any]:
    """A gccomm communicator of all ranks."""
    import gccomm

    with gccomm.init(backend="mpi") as communicator:
        yield communicator
