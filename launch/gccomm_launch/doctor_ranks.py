"""`gccomm doctor` as a rank of a job: one report, by rank 0, of what all ranks have found."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from gccomm_launch.doctor_cuda import cuda, devices_of
from gccomm_launch.doctor_findings import WIDTH, Answer, Finding, ask, print_report
from gccomm_launch.doctor_host import host
from gccomm_launch.doctor_mpi import cuda_aware_mpi, facts, judge_mpi
from gccomm_launch.doctor_trials import by_host, check, device_of, judge_trial, on_device, registered

__all__ = ["bindings", "mismatch", "of_job", "others_problems"]

_PLACES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
_GRACE_S = 3.0  # for rank 0 to speak first


def of_job(timeout_s: float, as_json: bool, launcher: str) -> int:
    """Report on the ranks of this job; collective.

    Parameters
    ----------
    timeout_s : float
        Seconds that each stage may take.
    as_json : bool
        Print one JSON object.
    launcher : str
        What started this process.

    Returns
    -------
    int
        The same on all ranks: 1 where there is a problem on any.
    """
    first = _place() == "0"
    findings = host(timeout_s) if first else []
    of_cuda = cuda(timeout_s)  # every rank: each may see devices of its own
    alone = ask(
        ["-m", "gccomm_launch.doctor_mpi"], timeout_s
    )  # MPI may abort a process of a foreign launcher
    failure = alone.failure if alone.facts is None else mismatch(os.environ, alone.facts)
    if not failure:
        with _watched("MPI's start", timeout_s, findings, first):
            failure = _start()
    if failure:
        text = f"this process, started by {launcher}, cannot be a rank: {failure}"
        findings.append(Finding("MPI", "problem", text, "start the job by `gccomm run`"))
        if first:
            return print_report(findings, as_json)
        time.sleep(_GRACE_S)  # launchers end all ranks when one ends with an error
        return 1
    return _joined(timeout_s, as_json, launcher, findings, of_cuda)


def _joined(
    timeout_s: float, as_json: bool, launcher: str, findings: list[Finding], of_cuda: Sequence[Finding]
) -> int:
    from mpi4py import MPI

    world, said = MPI.COMM_WORLD, facts()
    findings += judge_mpi(Answer(said), {})
    findings.append(Finding("launcher", "ok", f"{launcher}, {world.size} rank{'s' * (world.size > 1)}"))
    ranks: list[dict[str, Any]] = world.allgather(_self(of_cuda))
    findings += [*of_cuda, *cuda_aware_mpi(said, devices_of(of_cuda), os.environ), *bindings(ranks)]
    with _watched("the self-tests", timeout_s, findings, world.rank == 0):
        findings += _trials(all(rank["devices"] for rank in ranks), [rank["host"] for rank in ranks])
    problems: list[list[Finding]] = world.allgather([f for f in findings if f.status == "problem"])
    if world.rank == 0:
        print_report([*findings, *others_problems(problems)], as_json, ranks)
        sys.stdout.flush()
    world.Barrier()  # launchers end all ranks when one ends with an error
    return int(any(problems))


def mismatch(environ: Mapping[str, str], said: Mapping[str, Any]) -> str:
    """Return how launcher and library do not belong together, or nothing.

    Parameters
    ----------
    environ : mapping
        Variables of a rank.
    said : mapping
        What MPI says of itself outside of the job.
    """
    is_open_mpi = said["vendor"] == "Open MPI"
    library = f"the MPI library that mpi4py loads is {said['vendor']} {said['version']}"
    if "OMPI_COMM_WORLD_SIZE" in environ and not is_open_mpi:
        return f"the launcher is Open MPI's, and {library}"
    if "MPI_LOCALNRANKS" in environ and is_open_mpi:
        return f"the launcher is Hydra (MPICH, Intel MPI), and {library}"
    return ""


def others_problems(problems: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Return the problems that ranks have and rank 0 has not, each once; given those of all ranks."""
    told = {(finding.subject, finding.text) for finding in problems[0]}
    found = []
    for rank, those in enumerate(problems):
        for finding in those:
            if (finding.subject, finding.text) not in told:
                told.add((finding.subject, finding.text))
                text = f"{finding.subject}: {finding.text}"
                found.append(Finding(f"rank {rank}", "problem", text, finding.remedy))
    return found


def _place() -> str:
    """Return this process's number in the job, as its launcher tells it."""
    return next((os.environ[name] for name in _PLACES if name in os.environ), "0")


def _start() -> str:
    """Make MPI and gccomm start; return why they do not."""
    import gccomm

    try:
        gccomm.init(backend="mpi")
    except (RuntimeError, ImportError, ValueError) as error:
        return str(error)
    return ""


@contextmanager
def _watched(stage: str, timeout_s: float, findings: Sequence[Finding], first: bool) -> Iterator[None]:
    """End the job, with what has been found, if this rank does not come through a stage: what hangs there
    cannot be stopped otherwise.
    """

    def end() -> None:
        text = f"rank {_place()} on {platform.node()} has not come through {stage} within {timeout_s:g} s"
        last = Finding(stage, "problem", text, "GCCOMM_STALL_S=5, or the launcher's own messages, say more")
        with suppress(OSError, ValueError):
            lines = [line for finding in [*findings, last] for line in finding.lines(WIDTH)]
            print("\n".join(lines), file=sys.stderr, flush=True)
        os._exit(1)

    timer = threading.Timer(timeout_s if first else timeout_s + _GRACE_S, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _self(of_cuda: Sequence[Finding]) -> dict[str, Any]:
    """Return what this rank is: its host, cores and devices."""
    import gccomm

    comm = gccomm.init()
    return {
        "rank": comm.rank,
        "host": platform.node(),
        "local_rank": comm.local_rank,
        "cores": sorted(os.sched_getaffinity(0)),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "wanted": os.environ.get("GCCOMM_CUDA_DEVICE"),
        "devices": devices_of(of_cuda),
    }


def bindings(ranks: Sequence[dict[str, Any]]) -> list[Finding]:
    """Return one finding a rank, and one for each device that ranks share: of the devices that a rank sees it
    is to use that of its local rank, or the one that ``GCCOMM_CUDA_DEVICE`` names.
    """
    found, users = [], dict[tuple[str, str], list[int]]()
    for rank in ranks:
        text = f"{rank['host']}, local rank {rank['local_rank']}, cores: {len(rank['cores'])}"
        devices = rank["devices"]
        if devices:
            place = device_of(rank["local_rank"], len(devices), rank.get("wanted"))
            device = devices[place]
            text += f", cuda:{place} of {len(devices)}: {device['name']} ({device['bus']})"
            users.setdefault((rank["host"], device["bus"]), []).append(rank["rank"])
        found.append(Finding(f"rank {rank['rank']}", "ok", text, facts=rank))
    for (where, bus), sharing in users.items():
        if len(sharing) > 1:
            text = f"ranks {', '.join(map(str, sharing))} of {where} share the device {bus}"
            remedy = "fewer ranks a host, or more devices in CUDA_VISIBLE_DEVICES; NCCL shares from 2.30 on"
            found.append(Finding("GPU binding", "absent", text, remedy))
    return found


def _trials(devices: bool, hosts: Sequence[str]) -> list[Finding]:
    """Return what comes of the self-tests on all ranks, which are on these hosts."""
    import gccomm

    found = [_trial("mpi", lambda: check(gccomm.init()))]
    if devices:
        found.append(_trial("mpi-gpu", lambda: on_device(gccomm.init())))
        if "nccl" in registered():
            found.append(_trial("nccl", lambda: on_device(gccomm.init(backend="nccl"))))
            if 1 < len(set(hosts)) < len(hosts):
                found.append(_trial("nccl-by-host", by_host))
    return found


def _trial(name: str, tried: Callable[[], dict[str, Any]]) -> Finding:
    try:
        return judge_trial(name, Answer(tried()))
    except Exception as error:  # of whatever library: the report tells of it
        return judge_trial(name, Answer(None, f"has failed: {type(error).__name__}: {error}"))
