"""Jobs of real processes that fail, are interrupted, stall or end early: nobody waits for ever."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gccomm_launch.mpiexec import Launcher, NoLauncherError, find_launcher

import gccomm

pytestmark = pytest.mark.timeout(90)

GRACE = 10  # seconds within which all processes of a job must be gone

PREAMBLE = """
import os, pathlib, signal, sys, time
signal.alarm(60)
HERE = pathlib.Path(sys.argv[1])
(HERE / f"pid-{os.getpid()}").touch()
import numpy as np
import gccomm

def say(what):
    (HERE / what).touch()

def wait_for(what):
    while not (HERE / what).exists():
        time.sleep(0.01)
"""


def script(body: str) -> str:
    return f"{PREAMBLE}\n{body}"


class Job:
    """A running job, its processes and what they wrote."""

    def __init__(
        self,
        launcher: Launcher,
        here: Path,
        body: str,
        n: int,
        runner: tuple[str, ...],
        environ: dict[str, str],
    ) -> None:
        self.here, self.path = here, here / "job.py"
        self.path.write_text(script(body))
        cores = len(os.sched_getaffinity(0))
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **environ}
        launcher.prepare(variables, root=os.geteuid() == 0)
        command = [str(launcher.path), "-n", str(n), *launcher.options(n, cores), sys.executable, *runner]
        with (here / "stdout").open("wb") as stdout, (here / "stderr").open("wb") as stderr:
            self.process = subprocess.Popen(
                [*command, str(self.path), str(here)],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return (self.here / "stdout").read_text()

    @property
    def errors(self) -> str:
        return (self.here / "stderr").read_text()

    def wait_for(self, *names: str) -> None:
        """Wait until the ranks have said all of ``names``."""
        end = time.monotonic() + 40
        while not all((self.here / name).exists() for name in names):
            assert time.monotonic() < end, f"{names} were not said; {self.errors}"
            assert self.process.poll() is None, self.errors
            time.sleep(0.02)

    def pid(self, rank: int) -> int:
        return int((self.here / f"rank{rank}").read_text())

    def alive(self) -> list[int]:
        """Return the ranks' processes that still run."""
        pids = [int(path.name[4:]) for path in self.here.glob("pid-*")]
        return [pid for pid in pids if self._is_ours(pid)]

    def _is_ours(self, pid: int) -> bool:
        try:
            return str(self.path).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return False

    def end(self, within: float = GRACE) -> int:
        """Return the exit status once launcher and ranks are gone; fail where they take too long."""
        end = time.monotonic() + within
        try:
            status = self.process.wait(within)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the job still runs after {within} s; stderr: {self.errors}")
        while self.alive():
            assert time.monotonic() < end, f"processes {self.alive()} are left"
            time.sleep(0.02)
        return status

    def kill(self) -> None:
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


Start = Callable[..., Job]


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    try:
        return find_launcher()
    except NoLauncherError as error:
        pytest.skip(str(error))


@pytest.fixture
def start(launcher: Launcher, tmp_path: Path) -> Iterator[Start]:
    jobs: list[Job] = []

    def begin(body: str, n: int = 2, runner: tuple[str, ...] = (), **environ: str) -> Job:
        jobs.append(Job(launcher, tmp_path, body, n, runner, environ))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.kill()


INIT = """
comm = gccomm.init("mpi")
(HERE / f"rank{comm.rank}.part").write_text(str(os.getpid()))
(HERE / f"rank{comm.rank}.part").rename(HERE / f"rank{comm.rank}")
x = np.full(5000, comm.rank + 1, np.float32)
"""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("error", ["RuntimeError('lost')", "KeyboardInterrupt()", "SystemExit(3)"])
def test_rank_that_raises_ends_the_job(start: Start, when: str, error: str) -> None:
    """Before or after the first call of all; mpi4py's runner sees exits, too."""
    body = f"""
if {when == "after"}:
    comm.compressed_allreduce(x)
if comm.rank == 1:
    raise {error}
comm.compressed_allreduce(x)
print("went on")
"""
    job = start(INIT + body, runner=("-m", "mpi4py") if "Exit" in error else ())
    assert job.end(30) != 0
    assert "went on" not in job.output
    assert error.partition("(")[0] in job.errors or "Exit" in error


def test_rank_that_raises_before_it_joins_ends_the_job(start: Start) -> None:
    body = """
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    raise RuntimeError("lost")
gccomm.init("mpi")
"""
    job = start(body, runner=("-m", "mpi4py"))
    assert job.end(30) != 0
    assert "lost" in job.errors


def test_failure_after_the_agreement_ends_the_job_before_a_wrong_sum(start: Start) -> None:
    job = start(
        INIT
        + """
from gccomm.operand import Operand
original, armed = Operand.decode, False
def decode(self, *args, **options):
    if comm.rank == 1 and armed:
        raise MemoryError("no memory to decode")
    return original(self, *args, **options)
Operand.decode = decode
comm.compressed_allreduce(x, codec="rotated:headroom=checked")
armed = True
for _ in range(3):
    try:
        x = np.full(2_000_000, comm.rank + 1, np.float32)
        y = comm.compressed_allreduce(x, codec="rotated:headroom=checked")
    except MemoryError:
        print("caught", flush=True)
        continue
    assert np.abs(y - 3).max() < 0.1
    print("right", flush=True)
print("went on", flush=True)
"""
    )
    assert job.end(30) != 0
    assert "went on" not in job.output
    assert "MemoryError" in job.errors
    assert "rank 1 of 2 aborts the job" in job.errors


@pytest.mark.parametrize("arguments", [(1 << 40,), (0, 1 << 40), (0, -(1 << 40))])
def test_split_that_mpi_cannot_express_on_one_rank_is_refused_or_served(
    start: Start, arguments: tuple[int, ...]
) -> None:
    job = start(
        INIT
        + f"arguments = {arguments}"
        + """
try:
    part = comm.split(*arguments) if comm.rank == 1 else comm.split(0)
    say(f"{comm.rank}: size {part.size}")
except (ValueError, OverflowError) as error:
    say(f"{comm.rank}: {type(error).__name__} {error}".replace("/", "|"))
assert comm.allreduce(1) == 2
"""
    )
    assert job.end(20) == 0, job.errors
    said = sorted(path.name.split(": ", 1) for path in job.here.glob("?: *"))
    assert [rank for rank, _ in said] == ["0", "1"]
    assert said[0][1] == said[1][1]


WAITING = (
    INIT
    + """
comm.compressed_allreduce(x)
if comm.rank == 1:
    say("asleep")
    time.sleep(50)
say("waiting")
comm.compressed_allreduce(x)
print("went on", flush=True)
"""
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_to_the_launcher_ends_all_processes(start: Start, number: signal.Signals) -> None:
    job = start(WAITING)
    job.wait_for("rank0", "rank1", "asleep", "waiting")
    time.sleep(0.3)
    job.process.send_signal(number)
    assert job.end() != 0
    assert "went on" not in job.output


@pytest.mark.parametrize("rank", [0, 1])
def test_interrupt_of_one_rank_ends_all_processes(start: Start, rank: int) -> None:
    """Rank 0 waits in a call, so it holds the interrupt back a while; rank 1 sleeps outside of any."""
    job = start(WAITING)
    job.wait_for("rank0", "rank1", "asleep", "waiting")
    time.sleep(0.3)
    os.kill(job.pid(rank), signal.SIGINT)
    assert job.end() != 0
    assert "went on" not in job.output
    assert "aborts the job" in job.errors
    assert ("KeyboardInterrupt" if rank else "interrupted while waiting") in job.errors


def test_interrupt_of_one_rank_waits_for_the_call_to_complete(start: Start) -> None:
    job = start(
        INIT
        + """
comm.barrier()
if comm.rank == 1:
    wait_for("interrupted")
else:
    say("waiting")
try:
    y = comm.compressed_allreduce(x, exact_below=9999)
    say(f"result {comm.rank} {y[0]}")
except KeyboardInterrupt:
    say(f"interrupt {comm.rank}")
say(f"next {comm.rank} {comm.allreduce(2)}")
"""
    )
    job.wait_for("rank0", "rank1", "waiting")
    time.sleep(0.3)
    os.kill(job.pid(0), signal.SIGINT)
    time.sleep(0.3)
    (job.here / "interrupted").touch()
    assert job.end(20) == 0, job.errors
    said = sorted(path.name for path in job.here.iterdir() if " " in path.name)
    assert said == ["interrupt 0", "next 0 4", "next 1 4", "result 1 3.0"]


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank_ends_the_job(start: Start, rank: int) -> None:
    job = start(WAITING)
    job.wait_for("rank0", "rank1", "asleep", "waiting")
    os.kill(job.pid(rank), signal.SIGKILL)
    assert job.end() != 0
    assert "went on" not in job.output


@pytest.mark.parametrize(
    "last",
    [
        "gccomm.compressed_allreduce(x)",
        "y = [comm.compressed_allreduce(x, codec=c) for c in ('raw', 'bf16', 'uniform')]",
        "reducer = gccomm.Reducer(comm=comm, error_feedback=True); reducer({'w': x}); part = comm.split(0)",
        "part = comm.split(comm.rank); part.allreduce(1); del comm, part",
        "comm.close(); reducers = [gccomm.Reducer(comm=gccomm.init('mpi')) for _ in range(3)]",
        "comm.barrier(); sys.exit(0)",
    ],
    ids=["unread", "kept", "reducer", "split", "closed", "exit"],
)
def test_program_may_end_at_once_after_its_last_call(start: Start, last: str) -> None:
    job = start(INIT + last)
    assert job.end(30) == 0, job.errors
    assert (job.output, job.errors) == ("", "")


def test_what_is_collected_after_mpi_has_ended_frees_nothing(start: Start) -> None:
    job = start(
        INIT
        + """
import gc
from mpi4py import MPI
part, reducer = comm.split(0), gccomm.Reducer(comm=comm)
reducer({"w": x})
MPI.Finalize()
try:
    comm.allreduce(1)
except gccomm.BackendError as error:
    assert "finalised" in str(error), error
    say(f"refused{part.rank}")
del comm, part, reducer
gc.collect()
"""
    )
    assert job.end(30) == 0, job.errors
    assert job.errors == ""
    assert (job.here / "refused0").exists()
    assert (job.here / "refused1").exists()


def test_stall_is_reported_with_rank_and_call(start: Start) -> None:
    job = start(
        INIT
        + """
reducer = gccomm.Reducer(comm=comm)
reducer({"w": x})
if comm.rank == 1:
    time.sleep(1.5)
assert np.abs(reducer({"w": x})["w"] - 1.5).max() < 0.25  # seven standard deviations and more
""",
        GCCOMM_STALL_S="0.4",
    )
    assert job.end(30) == 0, job.errors
    (line,) = job.errors.splitlines()
    assert "rank 0 of 2 has waited" in line
    assert "compressed_allreduce of reducer 1, step 1" in line


def test_limit_on_waiting_raises_and_then_ends_the_job(start: Start) -> None:
    job = start(
        INIT
        + """
if comm.rank == 1:
    say("asleep")
    time.sleep(50)
for expected in (gccomm.CollectiveTimeout, gccomm.BackendError, gccomm.BackendError):
    try:
        comm.compressed_allreduce(x)
    except expected as error:
        print(type(error).__name__, error, flush=True)
""",
        GCCOMM_TIMEOUT_S="0.5",
    )
    assert job.end(30) != 0
    first, second, third = job.output.splitlines()
    assert first.startswith("CollectiveTimeout")
    assert "rank 0 of 2" in first
    assert "compressed_allreduce, step 0" in first
    assert second.startswith("BackendError")
    assert "broken" in second
    assert third == second


GROWTH = """
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def loop(comm, steps):
    reducer = gccomm.Reducer(comm=comm, error_feedback=True)
    for step in range(steps + 1):
        tree = {f"w{step % 7}": np.full(1000, step, np.float32), "v": np.ones(1100, np.float16)}
        reducer(tree)
        codec = ("uniform", "raw")[step % 2]
        comm.compressed_allreduce({f"k{step % 5}": np.ones(1000, np.float32)}, codec=codec)
        if step == steps // 10:
            before = resident()
    return resident() - before
"""


def test_memory_does_not_grow_over_ten_thousand_calls_of_one_process(tmp_path: Path) -> None:
    body = script(GROWTH + "print(loop(gccomm.init('local'), 5_000))")
    done = subprocess.run(
        [sys.executable, "-c", body, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(done.stdout) < 5_000_000


def test_memory_does_not_grow_over_ten_thousand_calls_of_a_job(start: Start) -> None:
    job = start(INIT + GROWTH + "say(f'{comm.rank} grew by {loop(comm, 5_000)}')")
    assert job.end(60) == 0, job.errors
    growth = [int(path.name.rpartition(" ")[2]) for path in job.here.glob("* grew by *")]
    assert len(growth) == 2
    assert max(growth) < 5_000_000


def environment_of_another_launcher() -> dict[str, str]:
    """Return what the launcher of another MPI library would leave in the environment."""
    from mpi4py import MPI

    if "Open MPI" in MPI.get_vendor()[0]:
        return {"PMI_SIZE": "2", "PMI_RANK": "0"}
    return {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}


def test_world_of_one_under_another_librarys_launcher_is_an_error(launcher: Launcher) -> None:
    environ = {**os.environ, **environment_of_another_launcher()}
    launcher.prepare(environ, root=os.geteuid() == 0)
    done: Any = subprocess.run(
        [sys.executable, "-c", "import gccomm; gccomm.init()"],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode != 0
    assert gccomm.BackendError.__name__ in done.stderr
    assert "launcher belongs to another MPI" in done.stderr


@pytest.mark.parametrize("level", ["single", "funneled", "serialized", "multiple"])
def test_call_from_a_second_thread_says_so_where_mpi_allows_one_only(
    launcher: Launcher, tmp_path: Path, level: str
) -> None:
    body = f"""
import mpi4py, threading, warnings
mpi4py.rc.thread_level = "{level}"
comm = gccomm.init("mpi")
from mpi4py import MPI
enough = MPI.Query_thread() >= MPI.THREAD_SERIALIZED
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    thread = threading.Thread(target=lambda: comm.allreduce(1))
    thread.start()
    thread.join()
texts = [str(w.message) for w in caught]
assert len(texts) == (0 if enough else 1), texts
assert enough or "thread_level" in texts[0]
assert comm.allreduce(2) == 2
"""
    environ = dict(os.environ)
    launcher.prepare(environ, root=os.geteuid() == 0)
    command = [sys.executable, "-c", script(body), str(tmp_path)]
    done: Any = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_more_ranks_than_cores_are_told_to_the_launcher() -> None:
    assert "--oversubscribe" in Launcher(Path("mpiexec"), "Open MPI").options(4, 2)
    assert Launcher(Path("mpiexec"), "Hydra").options(4, 2) == []
