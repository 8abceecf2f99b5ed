"""A meeting of processes over TCP: each brings a few values, and all get those of all.

Rank 0 listens and the others come to it. The connections stay: a process that ends without a word, or says
why it gives up, is then known to all, so that none waits for it in NCCL, which would not notice.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from gccomm.backends import Patience
from gccomm.errors import BackendError
from gccomm_nccl.link import NAP_S, Link

__all__ = ["Store", "job_name"]

MAGIC = "gccomm store 1"


class Store:
    """One process of a meeting; making it is collective.

    Parameters
    ----------
    rank, size : int
        This process, and how many there are.
    address : (str, int)
        Where rank 0 listens.
    job : str
        Name of the job: processes of another one are sent away.

    Raises
    ------
    BackendError
        The port is taken, or a process of another kind, size or job answers there.
    CollectiveTimeout
        Not all came within ``GCCOMM_TIMEOUT_S``.
    """

    local_rank: int | None = None

    def __init__(self, rank: int, size: int, address: tuple[str, int], job: str = "") -> None:
        self.rank, self.size = rank, size
        self._address, self._job = address, job
        self._patience = Patience(rank, size)
        self._links: dict[int, Link] = {}  # by rank: of rank 0 to all others, of these to rank 0
        self._lost: str | None = None
        self._lock = threading.Lock()  # the watchdogs of several groups may look
        try:
            if size > 1:
                self._welcome() if rank == 0 else self._come()
        except BaseException:
            self.close(whole=False)
            raise

    def _where(self) -> str:
        return f"{self._address[0]}:{self._address[1]}"

    def _hello(self) -> dict[str, Any]:
        return {"magic": MAGIC, "rank": self.rank, "size": self.size, "job": self._job}

    def _welcome(self) -> None:
        """Listen until all others have come."""
        wait = self._patience.begin(f"waiting for {self.size - 1} processes at {self._where()}")
        with _listen(self._address) as server:
            server.settimeout(NAP_S)
            while len(self._links) < self.size - 1:
                wait.check()
                with suppress(TimeoutError):
                    link = Link(server.accept()[0])
                    if (rank := self._admit(link)) is not None:
                        self._links[rank] = link

    def _admit(self, link: Link) -> int | None:
        """Return the rank of who has come, or None where it does not belong here."""
        try:
            hello = link.receive(time.monotonic() + 5)
        except (OSError, ValueError):  # a port scanner, or one that has gone again
            link.close()
            return None
        rank, refusal = hello.get("rank"), None
        mine = {"magic": MAGIC, "size": self.size, "job": self._job}
        wrong = [f"{k} is {hello.get(k)!r}, expected {v!r}" for k, v in mine.items() if hello.get(k) != v]
        if wrong:
            refusal = f"the process at {self._where()} belongs to another job: {'; '.join(wrong)}"
        elif type(rank) is not int or not 0 < rank < self.size:
            refusal = f"rank {rank!r} is none of 1 to {self.size - 1}"
        elif rank in self._links:
            refusal = f"there are two processes of rank {rank}"
        with suppress(OSError):
            link.send({"refusal": refusal})
        if refusal is not None:
            link.close()
            return None
        return int(rank)  # type: ignore[arg-type]  # an int, as seen above

    def _come(self) -> None:
        """Go to rank 0, which may not be there yet."""
        wait = self._patience.begin(f"waiting for rank 0 at {self._where()}")
        while True:
            wait.check()
            try:
                link = Link(socket.create_connection(self._address, timeout=5))
            except OSError:
                time.sleep(NAP_S)
                continue
            self._links[0] = link
            link.send(self._hello())
            try:
                answer = link.receive(None, wait.check)
            except (OSError, ValueError) as error:
                msg = f"rank {self.rank}: what listens at {self._where()} is not gccomm's rank 0: {error}"
                raise BackendError(msg) from error
            if answer.get("refusal"):
                raise BackendError(f"rank {self.rank}: {answer['refusal']}")
            return

    def exchange(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Return what all processes bring, by rank; collective.

        Raises
        ------
        BackendError
            A process has gone.
        """
        wait = self._patience.begin("an exchange of settings")
        if self.size == 1:
            return [mine]
        try:
            if self.rank > 0:
                self._links[0].send(mine)
                answer = self._links[0].receive(None, wait.check)
                if "all" not in answer:
                    raise ValueError(answer.get("lost", "it sends something else"))
                found: list[dict[str, Any]] = answer["all"]
                return found
            brought = {0: mine}
            for rank, link in sorted(self._links.items()):
                brought[rank] = link.receive(None, wait.check)
            together = [brought[rank] for rank in range(self.size)]
            for link in self._links.values():
                link.send({"all": together})
            return together
        except (OSError, ValueError) as error:
            msg = f"rank {self.rank}: a process has gone while starting: {error}"
            self._tell({"lost": msg})
            raise BackendError(msg) from error

    def lost(self) -> str | None:
        """Return why the group cannot go on, once a process has gone or has said so; waits for nothing.

        Rank 0 hands it on, so it is to look now and then, whatever it does.
        """
        with self._lock:
            self._look()
            return self._lost

    def _look(self) -> None:
        for rank, link in list(self._links.items()):
            if self._lost is not None:
                return
            try:
                said = link.poll()
            except (OSError, ValueError):
                said = {"lost": f"rank {rank} has gone"}
            if said is None:
                continue
            if said.get("bye"):  # an orderly end, after all of them have agreed to it
                self._links.pop(rank).close()
                continue
            self._lost = str(said.get("lost", f"rank {rank} sent {said!r:.80}"))
            if self.rank == 0:
                self._tell({"lost": self._lost})

    def warn(self, reason: str) -> None:
        """Tell all others that this process gives up."""
        with self._lock:
            self._lost = self._lost or reason
            self._tell({"lost": reason})

    abort = warn

    def close(self, *, whole: bool = True) -> None:
        """Leave, with a word where all have agreed to it; waits for nobody."""
        with self._lock:
            if whole:
                self._tell({"bye": True})
            for link in self._links.values():
                link.close()
            self._links.clear()

    def _tell(self, message: dict[str, Any]) -> None:
        for link in self._links.values():
            with suppress(OSError):
                link.send(message)


def _listen(address: tuple[str, int]) -> socket.socket:
    """Listen at an address of this host; where it is not its own, at its port on all interfaces."""
    host, port = address
    try:
        return socket.create_server((host, port), backlog=128)
    except OSError as error:
        # Otherwise the name may stand for this host from outside only.
        if error.errno == errno.EADDRINUSE or not host:
            msg = f"rank 0 cannot listen at {host}:{port}: {error}. GCCOMM_PORT names another port"
            raise BackendError(msg) from error
    return _listen(("", port))


def job_name() -> str:
    """Return the launcher's name of this job, if it has one."""
    return os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get("SLURM_JOB_ID") or ""
