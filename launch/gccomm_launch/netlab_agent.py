"""How a command gets into a host of the lab: by a script that is called as ssh is, HOST COMMAND...

A host is more than a network namespace. Its own UTS namespace gives it its name, by which Open MPI tells
hosts apart. Its own IPC and PID namespaces and /dev/shm keep MPI libraries from passing bytes between hosts
through shared memory, as MPICH does where it can. And when the first process of a PID namespace ends, the
kernel ends all the others.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from gccomm_launch.netlab_plan import PREFIX

__all__ = ["FOLDER", "SCRIPT", "agent", "enter"]

FOLDER = "gccomm-netlab-"

# Beside it lie the file hosts and an empty folder tmp; each host sees another folder in the place of that.
SCRIPT = f"""#!/bin/sh
# HOST COMMAND...: run COMMAND, words for a shell, in a host of the lab. Options of ssh are passed over.
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1
shift
exec ip netns exec {PREFIX}"$host" \\
    unshare --mount --uts --ipc --pid --fork --kill-child --mount-proc sh -c '
        set -e
        hostname "$1"
        mount -t tmpfs lab /dev/shm
        mount -t tmpfs lab "$2/tmp"
        mount --bind "$2/hosts" /etc/hosts
        set +e
        shift 2
        exec sh -c "$*"
    ' sh "$host" "$(dirname "$0")" "$@"
"""


@contextmanager
def agent(hosts: str) -> Iterator[Path]:
    """Write the agent and the file /etc/hosts with the text `hosts` for as long as they are needed."""
    with TemporaryDirectory(prefix=FOLDER) as name:
        folder, path = Path(name), Path(name, "agent")
        (folder / "tmp").mkdir()
        (folder / "hosts").write_text(hosts, encoding="utf-8")
        path.write_text(SCRIPT, encoding="utf-8")
        path.chmod(0o755)
        yield path


def enter(path: Path, host: str, command: Sequence[str]) -> list[str]:
    """Return the command that runs `command` in a host, by the agent at `path`; it ends with this process."""
    return ["setpriv", "--pdeathsig", "KILL", str(path), host, f"exec {shlex.join(command)}"]
