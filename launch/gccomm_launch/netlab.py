"""`gccomm netlab`: a network of hosts on this machine, with links of a given rate, and MPI jobs in it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from gccomm_launch.arguments import positive
from gccomm_launch.mpiexec import NoLauncherError, find_launcher
from gccomm_launch.netlab_agent import agent, enter
from gccomm_launch.netlab_jobs import launch, places, prepare
from gccomm_launch.netlab_plan import Lab
from gccomm_launch.netlab_probe import link_rate, pairs, transfer
from gccomm_launch.netlab_rates import FasterThanLinkError, check_not_faster, format_rate, rate
from gccomm_launch.netlab_system import (
    NetlabError,
    occupied,
    processes,
    raise_lab,
    save,
    standing,
    tear_down,
    why_not,
)

__all__ = ["FasterThanLinkError", "Lab", "NetlabError", "check_not_faster", "link_rate", "netlab", "why_not"]

# A host and its switch are a namespace each; more would take minutes to build.
_MOST_HOSTS = 64


def netlab(argv: Sequence[str]) -> int:
    """Build, use or remove the network lab.

    Parameters
    ----------
    argv : sequence of str
        See ``gccomm netlab --help``.

    Returns
    -------
    int
        0; 1 where there can be no lab, or it is not as the command needs it; ``run``: the job's status.

    Raises
    ------
    SystemExit
        `argv` is wrong (status 2).
    """
    options = _parser().parse_args(argv)
    command, _ = _COMMANDS[options.command]
    try:
        return command(options.arguments)
    except (FasterThanLinkError, NetlabError, NoLauncherError) as error:
        print(f"gccomm netlab {options.command}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, _COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, (_, text) in _COMMANDS.items()]
    lines += ["", "`gccomm netlab COMMAND --help` shows the options of a command."]
    parser = argparse.ArgumentParser(
        prog="gccomm netlab",
        description="Hosts on this machine, each a network namespace behind a link of limited rate, and MPI "
        "jobs in them over TCP. Needs root and iproute2.",
        epilog="\n".join(["commands:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=list(_COMMANDS), metavar="COMMAND", help="see below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the command")
    return parser


def _up(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="gccomm netlab up", description="Build the lab, and measure its links."
    )
    add = parser.add_argument
    add("--hosts", type=positive, default=4, metavar="N", help="hosts h1, h2, ... (default 4)")
    add("--rate", type=rate, default="1gbit", help="of each host's link, each way (default 1gbit)")
    add("--racks", type=positive, default=1, metavar="R", help="switches that the hosts are spread over")
    add("--rack-rate", type=rate, metavar="RATE", help="of each switch's link to the others (default --rate)")
    add("--congestion", default="cubic", metavar="NAME", help="TCP's congestion control (default cubic)")
    options = parser.parse_args(argv)
    if options.hosts > _MOST_HOSTS:
        parser.error(f"--hosts {options.hosts} is more than {_MOST_HOSTS}")
    if options.racks > options.hosts:
        parser.error(f"--racks {options.racks} is more than --hosts {options.hosts}")
    if options.rack_rate and options.racks == 1:
        parser.error("--rack-rate needs --racks of at least 2")
    _need_root()
    rack_rate = options.rack_rate or 0
    lab = Lab(options.hosts, options.rate, options.racks, rack_rate, congestion=options.congestion)
    raise_lab(lab)
    print("\n".join(lab.describe()))
    try:
        _measure(lab)
    except BaseException:
        tear_down()
        raise
    return 0


def _run(argv: Sequence[str]) -> int:
    from gccomm_launch.run import add_program, limit_threads, program_of, supervise

    parser = argparse.ArgumentParser(
        prog="gccomm netlab run",
        description="Run a Python script on N processes of the lab's hosts; one failing process ends all.",
    )
    per_host_help = "ranks a host, host after host (default: as few as all hosts can do with)"
    parser.add_argument("--per-host", type=positive, metavar="K", help=per_host_help)
    add_program(parser)
    options = parser.parse_args(argv)
    program = program_of(parser, options)
    _need_root()
    launcher = find_launcher(options.mpiexec)
    with occupied() as lab, agent(lab.hosts_file()) as path:
        try:
            where = places(options.n, options.per_host, lab)
        except ValueError as error:
            parser.error(str(error))
        environ = dict(os.environ)
        prepare(environ, launcher, lab, options.n, len(os.sched_getaffinity(0)))
        limit_threads(environ, options.n)
        command = enter(path, where[0][0], launch(launcher, path, where, program))
        return supervise(command, environ, group=True)


def _status(argv: Sequence[str]) -> int:
    argparse.ArgumentParser(prog="gccomm netlab status", description="Show the lab.").parse_args(argv)
    lab = standing()
    print("\n".join(lab.describe()))
    running = sum(len(processes(name)) for name in lab.namespaces())
    print(f"processes in it: {running}")
    return 0


def _probe(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="gccomm netlab probe", description="Measure what links carry by a TCP connection."
    )
    parser.add_argument("--seconds", type=positive, default=1, metavar="S", help="for each (default 1)")
    options = parser.parse_args(argv)
    _need_root()
    with occupied() as lab:
        _measure(lab, options.seconds)
    return 0


def _down(argv: Sequence[str]) -> int:
    description = "Remove the lab, with all processes in it, also what a crash has left of one."
    argparse.ArgumentParser(prog="gccomm netlab down", description=description).parse_args(argv)
    _need_root()
    removed = tear_down()
    print(f"removed {' '.join(removed)}" if removed else "no lab was up")
    return 0


def _need_root() -> None:
    reason = why_not()
    if reason is not None:
        raise NetlabError(reason)


def _measure(lab: Lab, seconds: float = 1.0) -> None:
    """Measure, print and note what links carry."""
    within: list[float] = []
    across: list[float] = []
    for source, target in pairs(lab):
        carried = transfer(lab, source, target, seconds)
        bits = lab.path_rate(source, target)
        print(
            f"h{source} to h{target}: {carried / 1e6:.1f} MB/s ({format_rate(bits)} is {bits / 8e6:.1f} MB/s)"
        )
        check_not_faster(carried * seconds, seconds, bits)
        (within if lab.rack(source) == lab.rack(target) else across).append(carried)
    save(replace(lab, measured=min(within or across or [0.0]), measured_across=min(across or [0.0])))


_COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "up": (_up, "build the lab: hosts, links, switches"),
    "run": (_run, "run a script on ranks in the lab's hosts"),
    "status": (_status, "show the lab"),
    "probe": (_probe, "measure what its links carry"),
    "down": (_down, "remove the lab and every process in it"),
}
