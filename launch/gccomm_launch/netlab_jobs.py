"""MPI jobs in a lab: which host has which ranks, and what launchers and libraries must be told."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from pathlib import Path

from gccomm_launch.mpiexec import Launcher, NoLauncherError
from gccomm_launch.netlab_plan import VARIABLE, Lab, address

__all__ = ["launch", "places", "prepare"]

# Open MPI's own TCP, and shared memory within a host. A daemon that detached itself would end its host.
_OPEN_MPI = (
    *("--prtemca", "prte_if_include", "eth0", "--leave-session-attached"),
    *("--mca", "pml", "ob1", "--mca", "btl", "tcp,sm,self", "--mca", "btl_tcp_if_include", "eth0"),
)
# MPICH's choice of network is made by variables only.
_MPICH = {
    "MPICH_CH4_NETMOD": "ofi",
    "FI_PROVIDER": "tcp",
    "FI_TCP_IFACE": "eth0",
    "UCX_NET_DEVICES": "eth0",  # if the other module is chosen
}


def places(ranks: int, per_host: int | None, lab: Lab) -> list[tuple[str, int]]:
    """Return hosts and their numbers of ranks, in the order of ranks.

    Parameters
    ----------
    ranks : int
        Of the job.
    per_host : int or None
        Ranks that a host gets before the next gets any; None: as few as all hosts can do with.
    lab : Lab
        The hosts.

    Raises
    ------
    ValueError
        There are too few hosts.
    """
    each = per_host or -(-ranks // lab.hosts)
    needed = -(-ranks // each)
    if needed > lab.hosts:
        message = f"{ranks} ranks, {each} a host, need {needed} hosts; the lab has {lab.hosts}"
        raise ValueError(message)
    return [(name, min(each, ranks - each * k)) for k, name in enumerate(lab.names[:needed])]


def launch(
    launcher: Launcher, agent: Path, where: Sequence[tuple[str, int]], program: Sequence[str]
) -> list[str]:
    """Return the launcher's command, to be run in the first host.

    Raises
    ------
    NoLauncherError
        The launcher is neither MPICH's nor Open MPI's.
    """
    hosts = ",".join(f"{name}:{count}" for name, count in where)
    if launcher.family == "Hydra":
        options = ["-launcher", "ssh", "-launcher-exec", str(agent), "-iface", "eth0", "-hosts", hosts]
    elif launcher.family == "Open MPI":
        # Its folders are named by processes' numbers, which are the same on several hosts.
        own = [
            "--prtemca",
            "plm_ssh_agent",
            str(agent),
            "--prtemca",
            "prte_tmpdir_base",
            str(agent.parent / "tmp"),
        ]
        options = ["--host", hosts, *own, *_OPEN_MPI, "--bind-to", "none"]
    else:
        message = f"the lab knows the launchers of MPICH and Open MPI; {launcher.path} is neither"
        raise NoLauncherError(message)
    return [str(launcher.path), *options, "-n", str(sum(count for _, count in where)), *program]


def prepare(environ: MutableMapping[str, str], launcher: Launcher, lab: Lab, ranks: int, cores: int) -> None:
    """Set the variables of a job of `ranks` ranks; MPI's and MASTER_PORT only where they are not set."""
    launcher.prepare(environ, root=True)
    if launcher.family == "Open MPI" and ranks > cores:
        # Each host has cores enough for its own ranks, as it sees it; yet all hosts share them.
        environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    if launcher.family == "Hydra":
        for name, value in _MPICH.items():
            environ.setdefault(name, value)
    environ[VARIABLE] = lab.to_json()
    # torch.distributed's meeting point, and gloo's interface.
    environ["MASTER_ADDR"] = address(1)
    environ["GLOO_SOCKET_IFNAME"] = "eth0"
    environ.setdefault("MASTER_PORT", "29500")
