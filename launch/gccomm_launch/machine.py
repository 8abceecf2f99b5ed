"""Where and with what a measurement is made, as reports write it down."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

__all__ = ["machine"]


def machine(packages: Sequence[str] = ("gccomm", "numpy")) -> dict[str, Any]:
    """Return date, processor, instruction set of the kernels, system and versions, ready for JSON.

    Parameters
    ----------
    packages : sequence of str
        Installed distributions whose versions to report.
    """
    from gccomm import kernels

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "isa": kernels.isa(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
    }


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
