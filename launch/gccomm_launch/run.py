"""`gccomm run`: start a script on several processes with the launcher of this environment."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from gccomm_launch.mpiexec import NoLauncherError, find_launcher
from gccomm_launch.rank import FAILED

__all__ = ["add_program", "family", "kill", "limit_threads", "program_of", "run", "supervise"]

# How long the launcher may take to end its ranks after a signal.
GRACE_S = 8.0

# How long it may take to pass on what a rank that has failed before MPI has printed last.
FORWARD_S = 1.0

# Thread pools that would each take all cores in every rank.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(argv: Sequence[str]) -> int:
    """Run a script under the `mpiexec` of this environment so that one failing rank ends all.

    Parameters
    ----------
    argv : sequence of str
        ``-n N [--mpiexec PATH] script.py args...`` or ``-n N [--mpiexec PATH] -m module args...``.

    Returns
    -------
    int
        Exit status of the job; 128 + s after a signal s to this process or to the launcher; 1 if there is no
        usable MPI.

    Raises
    ------
    SystemExit
        `argv` is wrong (status 2).
    """
    options, program = _parse(argv)
    try:
        launcher = find_launcher(options.mpiexec)
    except NoLauncherError as error:
        print(f"gccomm run: {error}", file=sys.stderr)
        return 1
    cores = len(os.sched_getaffinity(0))
    environ = dict(os.environ)
    launcher.prepare(environ, root=os.geteuid() == 0)
    limit_threads(environ, options.n)
    command = [str(launcher.path), "-n", str(options.n), *launcher.options(options.n, cores)]
    return supervise([*command, *program], environ)


def limit_threads(environ: MutableMapping[str, str], ranks: int) -> None:
    """Let pools of threads of `ranks` ranks share this machine's cores, unless they are set already."""
    for variable in _THREADS:
        environ.setdefault(variable, str(max(1, len(os.sched_getaffinity(0)) // ranks)))


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="gccomm run",
        description="Run a Python script on N processes of this host; one failing process ends all.",
        epilog="Several hosts need the mpiexec or srun of the cluster; see the documentation.",
    )
    add_program(parser)
    options = parser.parse_args(argv)
    return options, program_of(parser, options)


def add_program(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say what to run on how many ranks: ``-n``, ``--mpiexec``, ``-m``, the script."""
    parser.add_argument("-n", type=int, required=True, metavar="N", help="number of processes")
    parser.add_argument(
        "--mpiexec", metavar="PATH", help="launcher to use instead of the one beside this Python"
    )
    parser.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        help="run a module, as `python -m` does, with its arguments",
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, help="script and its arguments")


def program_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[str]:
    """Return a rank's command from the arguments of :func:`add_program`; status 2 where they are wrong."""
    if options.n < 1:
        parser.error(f"-n must be at least 1; got {options.n}")
    # mpi4py's runner, which aborts the job when a rank raises or exits with an error, also before MPI.
    runner = [sys.executable, "-m", "gccomm_launch.rank"]
    if options.module:
        if options.module[0].partition(".")[0] == "gccomm_launch":
            runner.insert(1, "-P")  # the installed one, in gccomm's source folder too
        return [*runner, "-m", *options.module]
    if not options.script:
        parser.error("a script, or -m and a module, is missing")
    if not Path(options.script[0]).is_file():
        parser.error(f"there is no script {options.script[0]}")
    return [*runner, *options.script]


def supervise(command: Sequence[str], environ: dict[str, str], *, group: bool = False) -> int:
    """Run `command` in a session of its own, pass signals on, and leave none of its processes behind.

    Parameters
    ----------
    command, environ
        What to run.
    group : bool
        Pass signals on to the command's process group, as a terminal does, rather than to the command.

    Returns
    -------
    int
        Exit status; 128 + s after a signal s to this process or to the command.
    """
    # A terminal belongs to our session, so the job cannot read from it.
    stdin = subprocess.DEVNULL if sys.stdin is None or sys.stdin.isatty() else None
    with _signals() as received, TemporaryDirectory(prefix="gccomm-run-") as folder:
        failed = Path(folder) / "failed"
        environ = {**environ, FAILED: str(failed)}
        process = subprocess.Popen(command, env=environ, stdin=stdin, start_new_session=True)
        try:
            status = _wait(process, received, group, failed)
        finally:
            kill(family(process.pid))
            process.wait()
    if received:
        return 128 + received[0]
    return status if status >= 0 else 128 - status


def _wait(process: subprocess.Popen[bytes], received: list[int], group: bool, failed: Path) -> int:
    """Wait for the launcher, or after a signal for `GRACE_S` seconds; a rank that has failed before MPI could
    tell the others ends the job.
    """
    forwarded, end = 0, float("inf")
    while time.monotonic() < end:
        while forwarded < len(received):
            if group:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, received[forwarded])
            else:
                process.send_signal(received[forwarded])
            forwarded += 1
            end = min(end, time.monotonic() + GRACE_S)
        try:
            return process.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            if failed.exists():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=FORWARD_S)
                return int(failed.read_text())
    return 1


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect the signals that are to be passed on."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        received.append(number)

    previous = {number: signal.signal(number, note) for number in _FORWARDED}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def family(root: int) -> list[int]:
    """Return the processes of session `root` and all that descend from it, as MPICH's ranks leave it."""
    parents: dict[int, int] = {}
    members: set[int] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # pid (name) state parent group session ...: the name may hold blanks and parentheses
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[int(entry.name)] = int(fields[1])
            if int(fields[3]) == root:
                members.add(int(entry.name))
    added = True
    while added:
        added = False
        for child, parent in parents.items():
            if parent in members and child not in members:
                members.add(child)
                added = True
    return sorted(members)


def kill(processes: Sequence[int]) -> None:
    """End processes that may be gone already."""
    for process in processes:
        try:
            os.kill(process, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
