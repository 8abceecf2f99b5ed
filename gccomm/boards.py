"""What a communicator has to do with devices: their boards, and NCCL, which joins ranks of MPI."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gccomm import backends, kernels
from gccomm.engine import Outcome
from gccomm.errors import BackendError, GccommError, NegotiationError
from gccomm.transfers import Transfer

if TYPE_CHECKING:
    from gccomm.flow import Board

__all__ = ["Boards"]


class Boards:
    """The boards of one communicator.

    Parameters
    ----------
    backend : Backend
        Of the communicator.
    joins : bool
        Whether NCCL is to join once a call has been made on arrays of a device.

    Attributes
    ----------
    found : dict of str to Board
        By device, those that a call has needed.
    note : str or None
        What the caller is still to be warned of.
    """

    def __init__(self, backend: backends.Backend, joins: bool) -> None:
        self.backend: Any = backend
        self.joins = joins and not hasattr(backend, "takes_device")
        self.found: dict[str, Board] = {}
        self.note: str | None = None

    @property
    def able(self) -> bool:
        """Whether the back end reduces in the memory of devices, and adds up there what hosts add up."""
        hosts, able = getattr(self.backend, "hosts", None), hasattr(self.backend, "takes_device")
        return able and (hosts is None or getattr(self.backend, "hosts_on_device", False))

    def of(self, device: str) -> Board:
        """Return what host and device tell each other.

        Raises
        ------
        ValueError
            The back end works elsewhere.
        NegotiationError
            A graph is captured, and the back end waits for the device, as MPI does.
        """
        backend = self.backend
        if not backend.takes_device(device):
            msg = (
                f"arrays lie on {device}, but rank {backend.rank} of this communicator works on "
                f"{backend.device}"
            )
            raise ValueError(msg)
        if not hasattr(backend, "watched") and kernels.of_device(device).launcher.queue.capturing():
            msg = f"a call over `{backend.name}`, which waits for the device, cannot be captured in a graph"
            raise NegotiationError(f"rank {backend.rank}: {msg}; one over NCCL can be")
        if device not in self.found:
            from gccomm.flow import Board

            board = Board(
                kernels.of_device(device),
                backend.rank,
                backend.require_whole,
                groups=getattr(backend, "begin_many", None) is not None,
                await_event=getattr(backend, "await_event", None),
            )
            board.flows = getattr(backend, "flows", True)
            backend.oversee(board.look, board.doom)
            self.found[device] = board
        return self.found[device]

    def wait(self) -> Generator[Transfer, None, Outcome]:
        """Return a call without transfers that waits for the devices."""
        for board in self.found.values():
            if board.kept:  # graphs, which are launched on streams of the program's own
                self.backend.watched("launches of graphs", board.queue.wait_for_device)
            board.wait()
        yield from ()
        return Outcome()

    def close(self) -> None:
        """Wait for the devices, which may still read what the boards hold."""
        for board in self.found.values():
            if board.kept:
                with suppress(GccommError):  # it is broken: what is launched has been aborted
                    self.backend.watched("launches of graphs", board.queue.wait_for_device)
                board.queue.wait_for_device()
            board.queue.wait()
        self.found.clear()

    def join(self, device: str) -> Any:
        """Let NCCL join, and return the back end from now on; collective, after a call of all ranks on arrays
        of a device each. Where it cannot join, which all ranks find, things stay as they are.
        """
        self.joins = False
        try:
            beside = backends.load("nccl").beside  # type: ignore[attr-defined]  # it has
            self.backend = beside(self.backend, int(device.partition(":")[2]))
        except BackendError as error:
            self.note = (
                f"arrays on devices are staged through the host, as NCCL does not join: {error}. "
                'gccomm.init("mpi") says that this is meant'
            )
        return self.backend
