"""The self-tests of `gccomm doctor`: all-reduces whose sums are known, one back end after the other.

Run as a module with the name of one, it makes them and prints what came of it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import warnings
import zlib
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

from gccomm_launch.doctor_findings import Answer, Finding, ask

__all__ = [
    "CODECS",
    "WrongSumError",
    "by_host",
    "check",
    "device_of",
    "judge_trial",
    "on_device",
    "registered",
    "trials",
]

CODECS = {"raw": 0.0, "uniform": 1e-2, "rotated": 1e-2}
"""What is tried, and the largest vNMSE that it may have on any number of ranks."""

_COORDINATES = 5000
_LAUNCHED_RANKS = 2


class WrongSumError(RuntimeError):
    """A sum is not what it must be."""


def trials(names: Sequence[str], launched: bool, devices: int, timeout_s: float) -> list[Finding]:
    """Return what comes of the self-tests of back ends; each is made in a process, or a job, of its own.

    Parameters
    ----------
    names : sequence of str
        Entry points of back ends.
    launched : bool
        Whether MPI and its launcher are there.
    devices : int
        CUDA devices that there are.
    timeout_s : float
        Seconds that each may take.
    """
    tried = [name for name in names if (name != "mpi" or launched) and (name != "nccl" or devices)]
    if devices and importlib.util.find_spec("cupy") is not None:
        tried += ["cuda", *(["mpi-gpu"] if launched else [])]
    found = []
    for name in tried:
        ranks = min(devices, _LAUNCHED_RANKS) if name == "nccl" else _LAUNCHED_RANKS
        job = name in ("mpi", "mpi-gpu") or (name == "nccl" and launched)
        found.append(judge_trial(name, ask(_arguments(name, ranks if job else 0), timeout_s)))
    return found


def registered() -> list[str]:
    """Return the names of the back ends that are installed."""
    return sorted(point.name for point in entry_points(group="gccomm.backends"))


def _arguments(name: str, ranks: int) -> list[str]:
    """Return how Python makes a self-test; on no ranks: without a launcher."""
    here = ["-m", "gccomm_launch.doctor_trials", name]
    return ["-m", "gccomm_launch", "run", "-n", str(ranks), *here] if ranks else here


def judge_trial(name: str, answer: Answer) -> Finding:
    """Return what the answer of a self-test means."""
    subject = f"self-test {name}"
    if answer.facts is None:
        what = "CUDA kernels" if name == "cuda" else f"an all-reduce over `{name}`"
        return Finding(subject, "problem", f"{what} {answer.failure}", _remedy(name))
    facts = answer.facts
    if name == "cuda":
        return Finding(subject, "ok", f"words and results of {facts['kernels']} are the CPU's", facts=facts)
    text = f"sums of {', '.join(facts['codecs'])} are right"
    if facts["ranks"] > 1:
        text = f"{facts['ranks']} ranks: {text}, and the same on all"
    if name == "nccl-by-host" and "by-host" not in facts["back_end"]:
        return Finding(subject, "absent", "; ".join([*facts["notes"], "over MPI " + text]), facts=facts)
    if facts.get("no_window"):
        text += f"; ranks do not share memory: {facts['no_window']}"
    return Finding(subject, "ok", text, facts=facts)


def _remedy(name: str) -> str:
    if name.startswith("mpi"):
        return "see that another MPI program runs: `gccomm run -n 2 -m mpi4py.bench helloworld`"
    if name in ("nccl", "cuda"):
        return f"the whole text: NCCL_DEBUG=INFO python -m gccomm_launch.doctor_trials {name}"
    return f"the whole text: python -m gccomm_launch.doctor_trials {name}"


def check(comm: Any, xp: Any = None) -> dict[str, Any]:
    """Reduce arrays over a communicator and compare the sums with the true ones; collective.

    Parameters
    ----------
    comm : gccomm.Communicator
        The ranks.
    xp : module, optional
        Array library to make arrays with, NumPy by default; of others ``asnumpy`` is used.

    Returns
    -------
    dict
        "ranks", and "codecs" with the vNMSE of each.

    Raises
    ------
    WrongSumError
        A sum is wrong, or not the same on all ranks.
    """
    import numpy as np

    xp, n = xp or np, comm.size
    host = getattr(xp, "asnumpy", np.asarray)
    base = ((np.arange(_COORDINATES) * 37) % 201 - 100).astype(np.float32)
    total = n * (n + 1) // 2
    found = {}
    for codec, most in CODECS.items():
        tree = {"floats": base * (comm.rank + 1), "integers": np.arange(300) * (comm.rank + 1)}
        mine = {key: xp.asarray(value) for key, value in tree.items()}
        sums = {key: host(value) for key, value in comm.compressed_allreduce(mine, codec=codec).items()}
        if not np.array_equal(sums["integers"], np.arange(300) * total):
            raise WrongSumError(f"{codec}: integers have a wrong sum")
        error = sums["floats"].astype(np.float64) - base.astype(np.float64) * total
        found[codec] = float((error**2).sum() / ((base.astype(np.float64) * total) ** 2).sum())
        if not found[codec] <= most:
            raise WrongSumError(f"{codec}: vNMSE {found[codec]:.3g} of a sum, where {most:g} is the most")
        if codec != "raw":
            _require_same(comm, zlib.crc32(sums["floats"].tobytes()), codec)
    return {"ranks": n, "codecs": found}


def device_of(local_rank: int, count: int, wanted: str | None) -> int:
    """Return which of the devices that a rank sees it is to use: the one that ``GCCOMM_CUDA_DEVICE`` names
    (``wanted``), where it is there, else that of its local rank.
    """
    named = wanted is not None and wanted.isdecimal() and int(wanted) < count
    return int(wanted) if named and wanted is not None else local_rank % count


def on_device(comm: Any) -> dict[str, Any]:
    """Do the same with arrays of the device of this rank."""
    import cupy

    count = int(cupy.cuda.runtime.getDeviceCount())
    place = device_of(comm.local_rank, count, os.environ.get("GCCOMM_CUDA_DEVICE"))
    with cupy.cuda.Device(place):
        return check(comm, cupy)


def by_host() -> dict[str, Any]:
    """Do that with NCCL within hosts and MPI between them; collective over the job.

    Returns
    -------
    dict
        As of :func:`check`, with "back_end", and in "notes" why NCCL has not joined, if so.
    """
    from mpi4py import MPI

    import gccomm

    parent = MPI.COMM_WORLD.Dup()
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        with gccomm.init(comm=parent, hierarchical=True) as comm:
            on_device(comm)  # after whose first call NCCL joins
            found = {**on_device(comm), "back_end": comm.backend}
    parent.Free()
    return {**found, "notes": [str(note.message) for note in notes]}


def _require_same(comm: Any, digest: int, codec: str) -> None:
    """Raise unless all ranks have the same digest: then all of them are their mean."""
    import numpy as np

    if int(comm.allreduce(np.int64(digest))) != comm.size * digest:
        raise WrongSumError(f"{codec}: the ranks' sums differ")


def why_no_window() -> str:
    """Return why ranks of this host do not share memory, or nothing; collective over the job."""
    import gccomm_mpi

    handle = gccomm_mpi.connect()
    reason = handle.no_window
    handle.close()
    return reason


def main(name: str) -> None:
    """Make the self-test `name` and print its facts, on rank 0."""
    if name == "cuda":
        from gccomm_launch.doctor_kernels import compare

        print(json.dumps({"kernels": compare()}))
        return
    import gccomm

    if name == "local":
        print(json.dumps(gccomm.testing.run(check, ranks=_LAUNCHED_RANKS)[0]))
        return
    comm = gccomm.init(backend=name.removesuffix("-gpu"))
    found = on_device(comm) if name in ("nccl", "mpi-gpu") else check(comm)
    if name == "mpi":
        found["no_window"] = why_no_window()
    if comm.rank == 0:
        print(json.dumps(found))
    comm.close()


if __name__ == "__main__":
    main(sys.argv[1])
