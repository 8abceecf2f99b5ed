"""Jobs of real processes that end, fail or are interrupted with asynchronous calls on their way."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gccomm_launch.mpiexec import Launcher, NoLauncherError, find_launcher

from tests.test_processes import INIT, Job, Start

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(name="launcher", scope="module")
def find() -> Launcher:
    try:
        return find_launcher()
    except NoLauncherError as error:
        pytest.skip(str(error))


@pytest.fixture(name="start")
def begin(launcher: Launcher, tmp_path: Path) -> Iterator[Start]:
    jobs: list[Job] = []

    def run(body: str, n: int = 2, runner: tuple[str, ...] = (), **environ: str) -> Job:
        jobs.append(Job(launcher, tmp_path, body, n, runner, environ))
        return jobs[-1]

    yield run
    for job in jobs:
        job.kill()


@pytest.mark.parametrize(
    "last",
    [
        "comm.compressed_allreduce_async(x)",
        "works = [comm.compressed_allreduce_async(x) for _ in range(20)]",
        "comm.compressed_allreduce_async(x).wait()",
        "comm.compressed_allreduce_async(x); sys.exit(0)",
        "comm.compressed_allreduce_async(x); comm.close()",
        "r = gccomm.Reducer(bucket_bytes=1); [(r.push('a', x), r.push('b', x), r.wait()) for _ in range(3)]",
        "parts = [comm.split(0) for _ in range(3)]; works = [p.compressed_allreduce_async(x) for p in parts]",
    ],
    ids=["dropped", "kept", "waited", "exit", "closed", "reducer", "several"],
)
@pytest.mark.parametrize("late", [0, 1])
def test_program_may_end_at_once_after_its_last_call(start: Start, last: str, late: int) -> None:
    """What is open is completed; a rank may come late."""
    job = start(f"{INIT}\nif comm.rank == {late}: time.sleep(0.5)\n{last}")
    assert job.end(30) == 0, job.errors
    assert (job.output, job.errors) == ("", "")


def test_errors_that_nobody_has_seen_are_told_at_the_end(start: Start) -> None:
    job = start(INIT + "work = comm.compressed_allreduce_async(x[comm.rank:])")
    assert job.end(30) == 0, job.errors
    assert job.errors.count("nobody has waited for it: MismatchError") == 2


WAITING = (
    INIT
    + """
comm.compressed_allreduce_async(x).wait()
if comm.rank == 1:
    say("asleep")
    time.sleep(50)
work = comm.compressed_allreduce_async(x)
say("waiting")
ENDING
print("went on", flush=True)
"""
)
ENDS = {
    "wait": "work.wait()",
    "compute": "time.sleep(50)",
    "blocking": "comm.barrier()",
    "exit": "sys.exit(0)",
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank_ends_the_job(start: Start, end: str, rank: int) -> None:
    job = start(WAITING.replace("ENDING", ENDS[end]))
    job.wait_for("rank0", "rank1", "asleep", "waiting")
    time.sleep(0.2)
    os.kill(job.pid(rank), signal.SIGKILL)
    assert job.end() != 0
    assert "went on" not in job.output


@pytest.mark.parametrize("end", ENDS)
def test_interrupt_ends_all_processes(start: Start, end: str) -> None:
    """Rank 0 has a call on its way that rank 1 does not come to."""
    job = start(WAITING.replace("ENDING", ENDS[end]))
    job.wait_for("rank0", "rank1", "asleep", "waiting")
    time.sleep(0.3)
    os.kill(job.pid(0), signal.SIGINT)
    assert job.end() != 0
    assert "went on" not in job.output
    assert "aborts the job" in job.errors


@pytest.mark.parametrize("end", ENDS)
def test_signal_to_the_launcher_ends_all_processes(start: Start, end: str) -> None:
    job = start(WAITING.replace("ENDING", ENDS[end]))
    job.wait_for("rank0", "rank1", "asleep", "waiting")
    job.process.send_signal(signal.SIGTERM)
    assert job.end() != 0
    assert "went on" not in job.output


def test_exception_with_a_call_on_its_way_ends_the_job(start: Start) -> None:
    job = start(WAITING.replace("ENDING", "raise RuntimeError('lost')"))
    assert job.end(30) != 0
    assert "RuntimeError: lost" in job.errors
    assert "aborts the job" in job.errors


def test_time_limit_of_the_communicator_breaks_it(start: Start) -> None:
    body = """
try:
    work.wait()
except gccomm.CollectiveTimeout as error:
    print(error)
try:
    comm.compressed_allreduce_async(x).wait()
except gccomm.BackendError as error:
    print(error, flush=True)
"""
    job = start(WAITING.replace("ENDING", body), GCCOMM_TIMEOUT_S="1")
    job.wait_for("waiting")
    assert job.end(30) != 0  # MPI cannot take back what a rank has begun
    assert "another rank has not come within GCCOMM_TIMEOUT_S = 1 s" in job.output
    assert "this communicator is broken: a collective timed out" in job.output


def test_failure_after_the_agreement_ends_the_job(start: Start) -> None:
    job = start(
        INIT
        + """
from gccomm.operand import Operand
comm.compressed_allreduce_async(x, codec="rotated:headroom=checked").wait()
def decode(self, *args, **options):
    raise MemoryError("no memory to decode")
if comm.rank == 1:
    Operand.decode = decode
comm.compressed_allreduce_async(x, codec="rotated:headroom=checked").wait()
comm.compressed_allreduce_async(x, codec="rotated:headroom=checked").wait()
print("went on", flush=True)
"""
    )
    assert job.end(30) != 0
    assert "went on" not in job.output
    assert "MemoryError" in job.errors
    assert "rank 1 of 2 aborts the job" in job.errors


def test_forked_children_leave_the_thread_alone(start: Start) -> None:
    job = start(
        INIT
        + """
work = comm.compressed_allreduce_async(x)
work.wait()
child = os.fork()
if child == 0:
    try:
        comm.compressed_allreduce_async(x)
    except gccomm.BackendError as error:
        say(f"{comm.rank} refused" if "forked" in str(error) else "wrong")
    del comm, work
    os._exit(0)
os.waitpid(child, 0)
comm.compressed_allreduce_async(x).wait()
""",
        runner=("-W", "ignore::DeprecationWarning"),
    )
    assert job.end(30) == 0, job.errors
    assert all((job.here / f"{rank} refused").exists() for rank in (0, 1))


@pytest.mark.parametrize("level", ["single", "funneled", "serialized"])
def test_levels_without_threads_are_refused(start: Start, level: str) -> None:
    body = """
from mpi4py import MPI
work = comm.compressed_allreduce_async(x)
try:
    work.wait()
except gccomm.NegotiationError as error:
    assert MPI.Query_thread() < MPI.THREAD_MULTIPLE
    assert "they need MPI_THREAD_MULTIPLE" in str(error)
else:
    assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
assert comm.allreduce(1) == 2
say(f"{comm.rank} ended")
"""
    job = start(f"import mpi4py\nmpi4py.rc.thread_level = {level!r}\n{INIT}{body}")
    assert job.end(30) == 0, job.errors
    assert all((job.here / f"{rank} ended").exists() for rank in (0, 1))
