"""`gccomm doctor`: what is installed and works, and what to do about the rest."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from importlib.metadata import version

from gccomm_launch.arguments import positive
from gccomm_launch.doctor_cuda import cuda, devices_of
from gccomm_launch.doctor_findings import WIDTH, Finding, in_job, print_report
from gccomm_launch.doctor_host import host
from gccomm_launch.doctor_mpi import cuda_aware_mpi, mpi
from gccomm_launch.doctor_trials import registered, trials

__all__ = ["doctor"]


def doctor(argv: Sequence[str]) -> int:
    """Report on this environment, or as a rank of a job on all of its ranks.

    Parameters
    ----------
    argv : sequence of str
        ``[--json] [--timeout S]``.

    Returns
    -------
    int
        0 if all that is there works, else 1; in a job the same on all ranks.

    Raises
    ------
    SystemExit
        `argv` is wrong (status 2).
    """
    options = _parse(argv)
    if in_job(os.environ):
        from gccomm.backends import launcher
        from gccomm_launch.doctor_ranks import of_job

        found = launcher()
        if found is not None:
            return of_job(options.timeout, options.json, found[0])
    findings = []
    if not options.json:
        print(f"gccomm {version('gccomm')}")
    for finding in _alone(options.timeout):
        findings.append(finding)
        if not options.json:
            print("\n".join(finding.lines(WIDTH)), flush=True)
    return print_report(findings, options.json, printed=True)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gccomm doctor",
        description="Say what is installed and works, from Python to GPUs, and reduce arrays of known sums "
        "over every back end. The exit status is 0 if all that is there works.",
        epilog="`gccomm run -n N -m gccomm_launch doctor` asks the ranks of a job, with their GPUs.",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of lines")
    seconds = "seconds until what does not end is stopped (default 60)"
    parser.add_argument("--timeout", type=positive, default=60, metavar="S", help=seconds)
    return parser.parse_args(argv)


def _alone(timeout_s: float) -> Iterator[Finding]:
    """Yield findings as they come."""
    yield from host(timeout_s)
    of_mpi = mpi(timeout_s)
    yield from of_mpi
    of_cuda = cuda(timeout_s)
    yield from of_cuda
    devices = devices_of(of_cuda)
    yield from cuda_aware_mpi(of_mpi[0].facts, devices, os.environ)
    launched = any(finding.subject == "launcher" and finding.status == "ok" for finding in of_mpi)
    yield from trials(registered(), launched, len(devices), timeout_s)
