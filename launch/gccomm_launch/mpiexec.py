"""Finds the launcher of the MPI library in this Python environment, and what it must be told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Launcher", "NoLauncherError", "family_of", "find_launcher"]

# Asks for the library without initialising MPI.
_PROBE = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0])"

# Which launcher family starts which libraries.
_SERVES = {"Hydra": ("MPICH", "MVAPICH", "Intel MPI"), "Intel MPI": ("Intel MPI",), "Open MPI": ("Open MPI",)}


class NoLauncherError(RuntimeError):
    """No MPI, or no launcher that belongs to its library."""


@dataclass(frozen=True)
class Launcher:
    """An mpiexec and its family: "Hydra", "Intel MPI", "Open MPI", or "" where it does not say."""

    path: Path
    family: str

    def options(self, size: int, cores: int) -> list[str]:
        """Return the options for `size` ranks on a host of `cores` cores."""
        if self.family != "Open MPI":
            return []
        # Bound to one core, a rank's own threads (BLAS, PyTorch) would share it.
        options = ["--bind-to", "none"]
        return [*options, "--oversubscribe"] if size > cores else options

    def prepare(self, environ: MutableMapping[str, str], *, root: bool) -> None:
        """Set the variables without which the launcher refuses to start."""
        if root and self.family == "Open MPI":
            environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
            environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")


def find_launcher(path: str | None = None) -> Launcher:
    """Return the launcher beside this Python, or else on PATH, that belongs to the library mpi4py loads.

    Parameters
    ----------
    path : str, optional
        The only candidate.

    Raises
    ------
    NoLauncherError
        There is none; the text says what was found.
    """
    library = _library()
    rejected: list[str] = []
    for candidate in _candidates(path):
        family = family_of(candidate)
        if family is None:
            rejected.append(f"{candidate} does not run")
        elif family == "" or library in _SERVES[family]:
            return Launcher(candidate, family)
        else:
            rejected.append(f"{candidate} is {family}'s")
    found = "; ".join(rejected) or "there is no mpiexec or mpirun beside this Python or on PATH"
    message = f"no launcher for the MPI library that mpi4py loads, {library}: {found}"
    raise NoLauncherError(message)


def _library() -> str:
    probe = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, check=False)
    if probe.returncode == 0:
        return probe.stdout.strip()
    reason = (probe.stderr.strip().splitlines() or ["no message"])[-1]
    remedy = 'install one, say by `pip install "gccomm[mpich]"`'
    message = f"there is no usable MPI in this environment ({reason}); {remedy}"
    raise NoLauncherError(message)


def _candidates(path: str | None) -> list[Path]:
    if path is not None:
        found = shutil.which(path)
        return [Path(found or path)]
    # Not resolved: in a virtual environment the interpreter is a link, and the launcher lies beside the link.
    folders = dict.fromkeys([Path(sys.executable).parent, Path(sys.prefix) / "bin"])
    names = [folder / name for folder in folders for name in ("mpiexec", "mpirun")]
    on_path = [Path(found) for name in ("mpiexec", "mpirun") if (found := shutil.which(name))]
    return list(dict.fromkeys([name for name in names if os.access(name, os.X_OK)] + on_path))


def family_of(path: Path) -> str | None:
    """Return the family of a launcher, "" if it does not say, or None if it does not run."""
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = (answer.stdout + answer.stderr).lower()
    for mark, family in (("intel(r) mpi", "Intel MPI"), ("hydra", "Hydra"), ("open mpi", "Open MPI")):
        if mark in text:
            return family
    return "" if answer.returncode == 0 else None
