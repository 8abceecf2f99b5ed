"""What `gccomm doctor` says about one thing, and how it asks programs that may crash or hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import IO, Any, Literal, NamedTuple

from gccomm_launch.run import GRACE_S, family, kill

__all__ = ["WIDTH", "Answer", "Finding", "ask", "in_job", "outside", "print_report", "version_text"]

WIDTH = 16
"""Columns of subjects."""

_MARKS = {"ok": "ok", "absent": "-", "problem": "PROBLEM"}
# Variables by which a launcher makes a process one of its ranks, which its children are not.
_OF_A_RANK = ("PMI_", "PMIX_", "OMPI_COMM_", "OMPI_UNIVERSE_SIZE", "MPI_LOCAL", "HYDI_", "MV2_COMM_", "PRTE_")
_OF_A_JOB = (*_OF_A_RANK, "SLURM_MPI_TYPE")
_LAST_WORDS = 300  # characters of stderr that are repeated


@dataclass(frozen=True)
class Finding:
    """What was found about one thing.

    Attributes
    ----------
    subject : str
        The thing, as "MPI" or "self-test local".
    status : str
        "ok"; "absent": not there, or not to be had here, which is no fault; "problem": there, and it does not
        work.
    text : str
        One line.
    remedy : str
        What to do about it.
    facts : dict
        The same for programs.
    """

    subject: str
    status: Literal["ok", "absent", "problem"]
    text: str
    remedy: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def lines(self, width: int) -> list[str]:
        """Return the lines of the report, subjects in a column of `width`."""
        head = f"{_MARKS[self.status]:<8} {self.subject:<{width}}  "
        found = [head + self.text]
        if self.remedy:
            found.append(" " * len(head) + f"-> {self.remedy}")
        return found


class Answer(NamedTuple):
    """What a program said: its facts, or how it failed."""

    facts: dict[str, Any] | None
    failure: str = ""


def outside(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process that is no rank of the job which this process may be in."""
    return {name: value for name, value in environ.items() if not name.startswith(_OF_A_RANK)}


def in_job(environ: Mapping[str, str]) -> bool:
    """Return whether a launcher may have started a process: if not, gccomm need not be imported to ask."""
    return any(name.startswith(_OF_A_JOB) for name in environ)


def version_text(code: int) -> str:
    """Return "13.1" for 13010, as CUDA counts its versions."""
    return f"{code // 1000}.{code % 1000 // 10}"


def ask(arguments: Sequence[str], timeout_s: float, environ: Mapping[str, str] | None = None) -> Answer:
    """Run Python with `arguments` in a session of its own, and read the JSON object it prints last.

    Whatever it does, a crash or a hang too, becomes an answer; it and its descendants are gone afterwards.

    Parameters
    ----------
    arguments : sequence of str
        Of the interpreter that runs this, as ``["-m", "gccomm_launch.doctor_mpi"]``.
    timeout_s : float
        Seconds until it is stopped.
    environ : mapping, optional
        Variables, instead of those of :func:`outside`.
    """
    variables = outside(os.environ) if environ is None else dict(environ)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:  # pipes could be held open
        process = subprocess.Popen(
            [sys.executable, "-P", *arguments],  # not what the current folder happens to have
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _stop(process)
            return Answer(None, f"has not ended within {timeout_s:g} s and was stopped" + _said(err))
        finally:
            kill(family(process.pid))
        if status != 0:
            return Answer(None, _ended(status) + _said(err))
        return _parsed(_text(out))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a program; one that is stuck in the kernel is left behind."""
    process.terminate()  # `gccomm run` ends its ranks
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S + 2)
        return
    kill(family(process.pid))
    with suppress(subprocess.TimeoutExpired):
        process.wait(5)


def _ended(status: int) -> str:
    number = -status if status < 0 else status - 128  # `gccomm run` reports a signal so
    if number in set(signal.Signals):
        return f"was ended by {signal.Signals(number).name}"
    return f"has failed (status {status})"


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _said(err: IO[bytes]) -> str:
    lines = [line.strip() for line in _text(err).splitlines() if line.strip()]
    return f": {lines[-1][:_LAST_WORDS]}" if lines else ""


def _parsed(text: str) -> Answer:
    last = (text.strip().splitlines() or [""])[-1]
    try:
        facts = json.loads(last)
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        return Answer(None, f"has printed no result: {last[:_LAST_WORDS]!r}")
    return Answer(facts)


def print_report(
    findings: Sequence[Finding], as_json: bool, ranks: Sequence[dict[str, Any]] = (), *, printed: bool = False
) -> int:
    """Print a report, or what is left of it, and return the exit status.

    Parameters
    ----------
    findings : sequence of Finding
        All of them.
    as_json : bool
        One JSON object, instead of lines.
    ranks : sequence of dict
        What the ranks of a job are, for JSON.
    printed : bool
        Whether the lines of the findings have been printed.
    """
    works = all(finding.status != "problem" for finding in findings)
    if as_json:
        found = [asdict(finding) for finding in findings]
        whole = {"version": version("gccomm"), "works": works, "findings": found}
        print(json.dumps({**whole, "ranks": list(ranks)} if ranks else whole, indent=2))
        return int(not works)
    if not printed:
        print("\n".join(line for finding in findings for line in finding.lines(WIDTH)))
    count = sum(finding.status == "problem" for finding in findings)
    print("all that is there works" if works else f"{count} problem{'s' * (count > 1)}")
    return int(not works)
