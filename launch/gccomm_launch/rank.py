"""What `gccomm run` starts as each rank: mpi4py's runner, and word of a rank that fails before it joins MPI.

mpi4py's runner ends the job through MPI where a rank raises or exits with an error. A rank that has not
initialised MPI by then just exits, and MPICH's launcher lets the others wait for it in `MPI_Init` for ever.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from pathlib import Path

__all__ = ["FAILED", "rank"]

FAILED = "_GCCOMM_RUN_FAILED"
"""Variable, of gccomm's own use, that names the file which such a rank leaves its exit status in."""


def rank() -> None:
    """Run the script or module of the command line; register what is to be told when it fails."""
    from mpi4py.run import main  # late: `gccomm run` itself needs no MPI to say that there is none

    try:
        main()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if status:
            atexit.register(_tell, status)  # after the traceback, if there is one
        raise
    except KeyboardInterrupt:
        atexit.register(_tell, 130)
        raise
    except BaseException:
        atexit.register(_tell, 1)
        raise


def _tell(status: int) -> None:
    """Leave the status for `gccomm run`, where MPI cannot end the job."""
    path = os.environ.get(FAILED)
    if path is None or "mpi4py.MPI" in sys.modules:
        return
    line = f"gccomm run: a rank has failed with status {status} before it joined MPI; the job is ended\n"
    sys.stderr.write(line)
    sys.stderr.flush()
    with suppress(OSError):  # of a job that has ended already
        part = Path(f"{path}.{os.getpid()}")
        part.write_text(str(status & 0xFF or 1))
        part.rename(path)


if __name__ == "__main__":
    rank()
