"""What a link of the lab carries: bytes through a plain TCP connection between two hosts.

Both ends are this module, run in their hosts: ``receive``, which prints its port and then the rate, and
``send ADDRESS PORT SECONDS``.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing

from gccomm_launch.netlab_agent import agent, enter
from gccomm_launch.netlab_plan import Lab, address
from gccomm_launch.netlab_system import NetlabError, standing

__all__ = ["link_rate", "pairs", "transfer"]

# Not counted: TCP finds its rate, and the buckets' bursts are spent.
_WARMUP_S = 0.3
_PATIENCE_S = 20.0
_SELF = (sys.executable, "-P", "-m", "gccomm_launch.netlab_probe")


def link_rate(source: int = 1, target: int = 2, seconds: float = 1.0) -> float:
    """Return what the links from one host of the lab to another carry.

    Parameters
    ----------
    source, target : int
        Numbers of two hosts, from 1 on.
    seconds : float
        How long to measure.

    Returns
    -------
    float
        Bytes per second of one TCP connection's payload.

    Raises
    ------
    NetlabError
        No lab is up, or the hosts do not reach each other.
    """
    return transfer(standing(), source, target, seconds)


def pairs(lab: Lab) -> list[tuple[int, int]]:
    """Return hosts between which to measure: both ways within the first rack, and to the last rack."""
    within = [(1, 2), (2, 1)] if lab.hosts > 1 and lab.rack(2) == 1 else []
    return [*within, (1, lab.hosts)] if lab.racks > 1 else within


def transfer(lab: Lab, source: int, target: int, seconds: float = 1.0) -> float:
    """Return the bytes per second that one TCP connection carries in a lab; see :func:`link_rate`."""
    with agent(lab.hosts_file()) as path:
        into = enter(path, f"h{target}", [*_SELF, "receive"])
        receiver = subprocess.Popen(into, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        with receiver:
            try:
                assert receiver.stdout is not None
                port = receiver.stdout.readline().strip()
                send = [*_SELF, "send", address(target), port or "0", str(seconds + _WARMUP_S)]
                sent = subprocess.run(
                    enter(path, f"h{source}", send),
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=seconds + _PATIENCE_S,
                )
                answer, errors = receiver.communicate(timeout=_PATIENCE_S)
            except subprocess.TimeoutExpired:
                answer, errors, sent = "", "no answer in time", None
            finally:
                receiver.kill()
    if not answer:
        reason = (errors.strip() or (sent.stderr.strip() if sent else "") or "no message").splitlines()[-1]
        message = f"h{source} cannot send to h{target}: {reason}"
        raise NetlabError(message)
    return float(answer)


def _receive() -> None:
    with closing(socket.create_server(("", 0))) as server:
        print(server.getsockname()[1], flush=True)
        server.settimeout(_PATIENCE_S)
        connection, _ = server.accept()
    buffer = memoryview(bytearray(1 << 20))
    total, start, end = 0, 0.0, 0.0
    with closing(connection):
        first = time.monotonic()
        while received := connection.recv_into(buffer):
            end = time.monotonic()
            if start:
                total += received
            elif end - first >= _WARMUP_S:
                start = end
    if end <= start:
        sys.exit("too few bytes to measure")
    print(total / (end - start))


def _send(host: str, port: int, seconds: float) -> None:
    block = bytes(256 << 10)
    with socket.create_connection((host, port), timeout=_PATIENCE_S) as connection:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            connection.sendall(block)


def _main(argv: Sequence[str]) -> None:
    if argv[0] == "receive":
        _receive()
    else:
        _send(argv[1], int(argv[2]), float(argv[3]))


if __name__ == "__main__":
    _main(sys.argv[1:])
