"""`gccomm run`, and how a job of MPI processes ends when something goes wrong in one of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

import pytest
from gccomm_launch.mpiexec import Launcher, NoLauncherError, find_launcher
from gccomm_launch.run import run

LIMIT_S = 60
RUN = [sys.executable, "-c", "import sys; from gccomm_launch.run import run; sys.exit(run(sys.argv[1:]))"]


@pytest.fixture(scope="module")
def launcher() -> Launcher:
    try:
        return find_launcher()
    except NoLauncherError as error:
        pytest.skip(str(error))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A rank that connects, does what its first argument says on rank 1, and sums with the others."""
    body = """
        import os, signal, sys, time
        import numpy as np
        import gccomm_mpi
        from gccomm.errors import CollectiveTimeout

        backend = gccomm_mpi.connect()
        threads = os.environ["OMP_NUM_THREADS"]
        print(f"rank {backend.rank} of {backend.size} {sys.argv[1:]} {threads}\\n", end="")
        print(f"pid {os.getpid()}\\n", end="", flush=True)
        mode = sys.argv[1]
        if backend.rank == 1:
            if mode == "raise":
                raise ValueError("rank 1 has had enough")
            if mode == "exit":
                sys.exit(7)
            if mode == "abort":
                backend.abort("rank 1 says so")
            if mode in ("sleep", "deaf", "deadline"):
                if mode == "deaf":
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(300)
        if mode == "deadline":
            backend.interrupt_deadline = time.monotonic() + 0.1
        backend.set_activity("all-reduce of 'w'")
        words = np.ones(int(os.environ.get("WORDS", "100000")), np.uint32)
        try:
            backend.sum_words(words)
        except CollectiveTimeout as error:
            print("caught", error, flush=True)
            backend.close()
            sys.exit(0)
        print(f"sum {words[0]}\\n", end="", flush=True)
    """
    path = tmp_path / "rank.py"
    path.write_text(dedent(body))
    return path


def job(*arguments: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `gccomm run` to its end."""
    return subprocess.run(
        [*RUN, *map(str, arguments)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )


def gone(output: str) -> bool:
    """Whether the processes that have printed their number go within ten seconds, zombies apart."""
    numbers = [int(number) for number in re.findall(r"pid (\d+)", output)]  # lines of ranks may run together
    assert numbers
    end = time.monotonic() + 10
    while any(map(alive, numbers)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, numbers))


def alive(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.usefixtures("launcher")
def test_ranks_arguments_and_threads(script: Path) -> None:
    done = job("-n", "2", script, "sum", "-m", "--flag")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    threads = int(os.environ.get("OMP_NUM_THREADS", threads))
    for rank in range(2):
        assert f"rank {rank} of 2 ['sum', '-m', '--flag'] {threads}" in lines
    assert lines.count("sum 2") == 2


@pytest.mark.usefixtures("launcher")
def test_more_ranks_than_cores_and_own_thread_count(script: Path) -> None:
    ranks = len(os.sched_getaffinity(0)) + 1
    if ranks > 9:
        pytest.skip("that would be many processes")
    done = job("-n", str(ranks), script, "sum", OMP_NUM_THREADS="3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("['sum'] 3") == ranks
    assert done.stdout.count(f"sum {ranks}") == ranks


@pytest.mark.usefixtures("launcher")
def test_module(script: Path) -> None:
    done = job("-n", "1", "-m", "rank", "sum", "--flag", PYTHONPATH=str(script.parent))
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 1 ['sum', '--flag']" in done.stdout


@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize(
    ("mode", "status", "text"),
    [
        ("raise", 1, "ValueError: rank 1 has had enough"),
        ("exit", 7, ""),
        ("abort", 1, "gccomm: rank 1 of 2 aborts the job: rank 1 says so"),
        ("deadline", 130, "aborts the job: interrupted while waiting in sum (all-reduce of 'w')"),
    ],
)
def test_one_rank_ends_the_job(script: Path, mode: str, status: int, text: str) -> None:
    done = job("-n", "2", script, mode)
    assert done.returncode == status
    assert text in done.stderr
    assert gone(done.stdout)


@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize(
    ("fails", "status", "text"),
    [
        ("raise ImportError('not on this host')", 1, "ImportError: not on this host"),
        ("sys.exit(7)", 7, "before it joined MPI"),
        ("sys.exit('no data here')", 1, "no data here"),
        ("1 +", 1, "SyntaxError"),
    ],
)
def test_a_rank_that_fails_before_mpi_ends_the_job(
    tmp_path: Path, fails: str, status: int, text: str
) -> None:
    """The others wait for it in MPI_Init, where no time limit of gccomm's holds."""
    body = f"""
        import os, sys
        print(f"pid {{os.getpid()}}", flush=True)
        if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
            exec({fails!r})
        import gccomm_mpi
        gccomm_mpi.connect()
    """
    script = tmp_path / "early.py"
    script.write_text(dedent(body))
    done = job("-n", "2", script)
    assert done.returncode == status, done.stderr
    assert text in done.stderr
    assert gone(done.stdout)


def test_uncaught_exception_ends_the_job_without_a_runner(script: Path, launcher: Launcher) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    launcher.prepare(environ, root=os.geteuid() == 0)
    done = subprocess.run(
        [launcher.path, "-n", "2", *launcher.options(2, 1), sys.executable, script, "raise"],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 1
    assert "ValueError: rank 1 has had enough" in done.stderr
    assert "gccomm: rank 1 of 2 aborts the job: uncaught ValueError" in done.stderr
    assert gone(done.stdout)


@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize("words", ["3", "100000"])
def test_timeout_and_stall_report(script: Path, words: str) -> None:
    done = job("-n", "2", script, "sleep", GCCOMM_TIMEOUT_S="1", GCCOMM_STALL_S="0.3", WORDS=words)
    # Rank 0 catches the timeout and ends in good order: it may not wait for rank 1 in MPI_Finalize.
    assert done.returncode == 1
    assert "caught rank 0 of 2 has waited 1.0 s in sum (all-reduce of 'w')" in done.stdout
    assert "gccomm: rank 0 of 2 has waited 0.3 s in sum (all-reduce of 'w')" in done.stderr
    assert "it ends after a collective operation that has failed or timed out" in done.stderr
    assert gone(done.stdout)


@contextmanager
def started(script: Path, mode: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a job of two and wait until both ranks have connected."""
    with (
        log.open("w") as out,
        subprocess.Popen([*RUN, "-n", "2", script, mode], stdout=out, stderr=out) as process,
    ):
        try:
            end = time.monotonic() + LIMIT_S
            while log.read_text().count("pid ") < 2:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < end, "the ranks do not start"
                time.sleep(0.05)
            yield process
        finally:
            process.kill()


@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize(
    ("number", "mode"), [(signal.SIGINT, "sleep"), (signal.SIGTERM, "sleep"), (signal.SIGTERM, "deaf")]
)
def test_signals_end_all_processes(script: Path, tmp_path: Path, number: int, mode: str) -> None:
    log = tmp_path / "log"
    with started(script, mode, log) as process:
        process.send_signal(number)
        assert process.wait(timeout=LIMIT_S) == 128 + number
    assert gone(log.read_text())


@pytest.mark.usefixtures("launcher")
def test_launcher_of_another_mpi_is_named(script: Path) -> None:
    # What a foreign launcher leaves behind: its variables, and a world of one.
    done = subprocess.run(
        [sys.executable, script, "sum"],
        env={**os.environ, "MV2_COMM_WORLD_SIZE": "4", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 1
    assert "BackendError: MVAPICH2's mpirun_rsh started 4 processes, but the MPI library" in done.stderr
    assert "gccomm run" in done.stderr


@pytest.mark.usefixtures("launcher")
def test_launcher_of_another_family_is_refused(script: Path, tmp_path: Path) -> None:
    fake = tmp_path / "mpiexec"
    other = "Intel(R) MPI Library" if find_launcher().family != "Intel MPI" else "mpiexec (Open MPI) 5"
    fake.write_text(f"#!/bin/sh\necho '{other}'\n")
    fake.chmod(0o755)
    done = job("-n", "2", "--mpiexec", fake, script, "sum")
    assert done.returncode == 1
    assert f"no launcher for the MPI library that mpi4py loads, {library()}: {fake} is " in done.stderr
    done = job("-n", "2", "--mpiexec", tmp_path / "none", script, "sum")
    assert done.returncode == 1
    assert "none does not run" in done.stderr


def library() -> str:
    code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0])"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_no_mpi_says_what_to_install(script: Path, tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('no mpi4py here')")
    done = job("-n", "2", script, "sum", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert (
        "no usable MPI in this environment (ImportError: no mpi4py here); install one, say by `pip"
        in done.stderr
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["script.py"], "the following arguments are required: -n"),
        (["-n", "0", "script.py"], "-n must be at least 1; got 0"),
        (["-n", "two", "script.py"], "invalid int value: 'two'"),
        (["-n", "2"], "a script, or -m and a module, is missing"),
        (["-n", "2", "-m"], "a script, or -m and a module, is missing"),
        (["-n", "2", "no_such_script.py"], "there is no script no_such_script.py"),
    ],
)
def test_wrong_arguments(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(arguments)
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_open_mpi_is_told_about_root_and_crowding() -> None:
    launcher = Launcher(Path("mpiexec"), "Open MPI")
    environ: dict[str, str] = {}
    launcher.prepare(environ, root=False)
    assert environ == {}
    launcher.prepare(environ, root=True)
    assert environ == {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    assert launcher.options(2, 2) == ["--bind-to", "none"]
    assert launcher.options(3, 2) == ["--bind-to", "none", "--oversubscribe"]
    assert Launcher(Path("mpiexec"), "Hydra").options(3, 2) == []
