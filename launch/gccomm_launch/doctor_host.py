"""What `gccomm doctor` finds out about Python, NumPy, the kernels of the CPU, and the network lab.

Run as a module, it prints what has to be asked of compiled code.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from gccomm_launch.doctor_findings import Answer, Finding, ask
from gccomm_launch.netlab_system import why_not

__all__ = ["host", "installed", "judge_kernels"]

_LIBRARIES = ("jax", "torch", "ml_dtypes")


def installed(*names: str) -> dict[str, str]:
    """Return the versions of those of the distributions that are installed; imports none."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def host(timeout_s: float) -> list[Finding]:
    """Return what is found on this host; asks in a process of its own."""
    found = [_python(), *judge_kernels(ask(["-m", "gccomm_launch.doctor_host"], timeout_s))]
    there = installed(*_LIBRARIES)
    if there:
        found.append(Finding("libraries", "ok", ", ".join(f"{k} {v}" for k, v in there.items()), facts=there))
    return [*found, netlab()]


def _python() -> Finding:
    text = f"{platform.python_version()}, {platform.system()} {platform.release()} {platform.machine()}"
    return Finding("Python", "ok", f"{text}, {sys.executable}", facts={"version": platform.python_version()})


def judge_kernels(answer: Answer) -> list[Finding]:
    """Return what the answer of this module, run as a program, means."""
    remedy = (
        "install gccomm again, in this environment: pip install --force-reinstall --no-deps . (or gccomm)"
    )
    if answer.facts is None:
        text = f"a program that imports NumPy and gccomm's kernels {answer.failure}"
        return [Finding("kernels", "problem", text, remedy)]
    facts = answer.facts
    text = f"{facts['isa']} (of {', '.join(facts['isas'])}), "
    text += f"threads: {facts['threads']}, cores: {facts['cores']}"
    return [
        Finding("NumPy", "ok", facts["numpy"], facts={"version": facts["numpy"]}),
        Finding("kernels", "ok", text, facts=facts),
    ]


def netlab() -> Finding:
    """Return whether `gccomm netlab` can build a lab here."""
    reason = why_not()
    if reason is None:
        return Finding("netlab", "ok", "root, iproute2 and network namespaces are there")
    text, _, remedy = reason.rpartition(": ")
    return Finding("netlab", "absent", text, remedy)


def facts() -> dict[str, Any]:
    """Return what NumPy and the kernels say."""
    import numpy as np

    from gccomm import kernels

    return {
        "numpy": np.__version__,
        "isa": kernels.isa(),
        "isas": kernels.isas(),
        "threads": kernels.threads(),
        "cores": len(os.sched_getaffinity(0)),
    }


if __name__ == "__main__":
    print(json.dumps(facts()))
