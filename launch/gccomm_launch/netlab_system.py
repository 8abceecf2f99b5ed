"""What of a lab is on this machine: whether it can be, building it, finding it again, removing it."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir

from gccomm_launch.netlab_agent import FOLDER
from gccomm_launch.netlab_plan import PREFIX, Lab, build

__all__ = [
    "NetlabError",
    "existing",
    "occupied",
    "processes",
    "raise_lab",
    "save",
    "standing",
    "tear_down",
    "why_not",
]

# Both go with a reboot, as namespaces do.
STATE = Path("/run/gccomm-netlab")
NAMESPACES = Path("/run/netns")

_TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "setpriv": "util-linux",
    "mount": "mount",
    "hostname": "hostname",
}
_TRIAL = (
    "ip link add name bridge type bridge && ip link add name near type veth peer name far && "
    "tc qdisc add dev near root tbf rate 1gbit burst 256kb latency 50ms && ip link set dev far up && "
    "ip link set dev near up && ip route add 10.77.0.0/16 dev near congctl cubic && "
    "mount -t tmpfs lab /dev/shm && hostname lab"
)


class NetlabError(RuntimeError):
    """The lab cannot be built, or is not there."""


def why_not() -> str | None:
    """Return why this process cannot have a network lab, in one line with the remedy, or None if it can.

    Leaves nothing behind: what it tries is in namespaces that go with the process that tries it.
    """
    if sys.platform != "linux":
        return f"a network lab is made of Linux's network namespaces, and this is {sys.platform}: use Linux"
    if os.geteuid() != 0:
        return "a network lab needs root: start it as root, say by sudo"
    missing = {package for tool, package in _TOOLS.items() if shutil.which(tool) is None}
    if missing:
        packages = " ".join(sorted(missing))
        return f"a network lab needs commands of {packages}: apt install {packages}"
    tried = _tool("unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "sh", "-c", _TRIAL)
    if tried.returncode == 0:
        return None
    reason = (tried.stderr.strip().splitlines() or ["no message"])[-1]
    return (
        f"root may not make a network lab here ({reason}): use a machine of your own, or a container that is "
        "privileged, whose kernel has veth, bridge, sch_tbf and tcp_cubic"
    )


def existing() -> list[str]:
    """Return the namespaces of a lab, whole or not."""
    return sorted(path.name for path in NAMESPACES.glob(f"{PREFIX}*"))


def standing() -> Lab:
    """Return the lab that is up.

    Raises
    ------
    NetlabError
        There is none, or it is not whole.
    """
    found = existing()
    if not found:
        message = "no lab is up; `gccomm netlab up` builds one"
        raise NetlabError(message)
    try:
        lab = Lab.from_json((STATE / "lab.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        lab = None
    if lab is None or sorted(lab.namespaces()) != found:
        message = f"the lab is not whole ({' '.join(found)}); `gccomm netlab down` removes what there is"
        raise NetlabError(message)
    return lab


def raise_lab(lab: Lab) -> None:
    """Build a lab; nothing is left of one that cannot be built.

    Raises
    ------
    NetlabError
        A command has failed, or a lab is there already.
    """
    if found := existing():
        message = f"a lab is up already ({' '.join(found)}); `gccomm netlab down` removes it"
        raise NetlabError(message)
    try:
        for command in build(lab):
            done = _tool(*command)
            if done.returncode != 0:
                message = f"`{' '.join(command)}` has failed: {done.stderr.strip()}"
                raise NetlabError(message)
        save(lab)
    except BaseException:
        tear_down()
        raise


def save(lab: Lab) -> None:
    """Note the lab, for later commands."""
    STATE.mkdir(mode=0o755, exist_ok=True)
    part = STATE / "lab.json.part"
    part.write_text(lab.to_json() + "\n", encoding="utf-8")
    part.replace(STATE / "lab.json")


def tear_down() -> list[str]:
    """Remove all of a lab, whole or not, with the processes in it; return its namespaces' names.

    Raises
    ------
    NetlabError
        Something cannot be removed.
    """
    found = existing()
    _end_processes(found)
    failed = [
        done.stderr.strip() for name in found if (done := _tool("ip", "netns", "delete", name)).returncode
    ]
    if failed:
        raise NetlabError("; ".join(failed))
    # Folders of jobs that were killed and could not remove them.
    folders = [path for path in Path(gettempdir()).glob(f"{FOLDER}*") if path.stat().st_uid == os.geteuid()]
    for folder in [STATE, *folders]:
        shutil.rmtree(folder, ignore_errors=True)
    return found


@contextmanager
def occupied() -> Iterator[Lab]:
    """Give the lab that is up, for the caller alone: of two jobs at a time each would see half a link.

    Raises
    ------
    NetlabError
        No lab is up, or another process is in it.
    """
    lab = standing()
    handle = os.open(STATE, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = "another `gccomm netlab run` or `probe` is in the lab; wait for its end"
            raise NetlabError(message) from None
        yield lab
    finally:
        os.close(handle)


def _end_processes(names: Sequence[str]) -> None:
    end = time.monotonic() + 10
    while numbers := [number for name in names for number in processes(name)]:
        for number in numbers:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        if time.monotonic() > end:
            message = f"processes {numbers} in the lab do not end"
            raise NetlabError(message)
        time.sleep(0.02)


def processes(name: str) -> list[int]:
    """Return the processes in a namespace."""
    return [int(number) for number in _tool("ip", "netns", "pids", name).stdout.split()]


def _tool(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
