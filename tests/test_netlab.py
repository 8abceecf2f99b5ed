"""The network lab: its parts, anywhere. Hosts and links: `test_netlab_hosts.py`."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gccomm_launch import netlab_system
from gccomm_launch.mpiexec import Launcher, NoLauncherError
from gccomm_launch.netlab import (
    FasterThanLinkError,
    Lab,
    NetlabError,
    check_not_faster,
    link_rate,
    netlab,
    why_not,
)
from gccomm_launch.netlab_agent import SCRIPT, enter
from gccomm_launch.netlab_jobs import launch, places, prepare
from gccomm_launch.netlab_plan import VARIABLE, build
from gccomm_launch.netlab_probe import pairs
from gccomm_launch.netlab_rates import burst, format_rate, rate

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 120
GIGABIT = 10**9
GCCOMM = [sys.executable, "-m", "gccomm_launch.cli", "netlab"]


@pytest.mark.parametrize(
    ("text", "bits"),
    [("1gbit", 10**9), ("2.5gbit", 2_500_000_000), ("100Mbit", 10**8), ("1500kbit", 1_500_000)],
)
def test_rate(text: str, bits: int) -> None:
    assert rate(text) == bits
    assert rate(format_rate(bits)) == bits


@pytest.mark.parametrize("text", ["1", "gbit", "-1gbit", "1gbps", "1 gbit x", "900kbit", "200gbit", "nan"])
def test_rate_that_is_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="between 1mbit and 100gbit"):
        rate(text)


def test_burst_grows_with_the_rate() -> None:
    assert burst(10**8) == burst(GIGABIT) == 256 << 10
    assert burst(10**10) == 256 << 10  # 0.2 ms
    assert burst(10**11) == 2_500_000


def test_faster_than_the_link_is_refused() -> None:
    check_not_faster(125e6, 1.0, GIGABIT)
    check_not_faster(2 * burst(GIGABIT), 1e-6, GIGABIT)  # what the buckets hold
    with pytest.raises(FasterThanLinkError, match=r"16\.777 MB in 3\.000 ms is faster than the link: 1gbit"):
        check_not_faster(16 << 20, 0.003, GIGABIT)


def test_bound_and_check_of_an_all_reduce() -> None:
    lab = Lab(4, GIGABIT, measured=100e6)
    assert lab.bound(100_000_000, [1, 2, 3, 4]) == pytest.approx(1.5)
    assert lab.bound(100_000_000, [1, 1, 2, 2]) == pytest.approx(1.0)
    racks = Lab(4, GIGABIT, 2, GIGABIT // 10, measured=100e6, measured_across=10e6)
    assert racks.bound(10_000_000, [1, 2, 3, 4]) == pytest.approx(1.0)
    assert racks.bound(10_000_000, [1, 2]) == pytest.approx(0.1)
    lab.check(100_000_000, 1.25, range(1, 5))
    racks.check(100_000_000, 1.25, [1, 2])
    for case, hosts in ((lab, range(1, 5)), (racks, range(2, 4))):
        with pytest.raises(FasterThanLinkError):
            case.check(100_000_000, 1.0, hosts)


def test_a_lab_travels_in_a_variable() -> None:
    lab = Lab(4, GIGABIT, 2, 10**8, 119e6, 11e6, "reno")
    assert Lab.from_environ({VARIABLE: lab.to_json()}) == lab
    assert Lab.from_environ({}) is None


def test_racks() -> None:
    lab = Lab(5, GIGABIT, 2, 10**8)
    assert [lab.rack(number) for number in range(1, 6)] == [1, 1, 1, 2, 2]
    assert (lab.path_rate(1, 3), lab.path_rate(3, 4)) == (GIGABIT, 10**8)
    assert pairs(lab) == [(1, 2), (2, 1), (1, 5)]
    assert pairs(Lab(2, GIGABIT, 2)) == [(1, 2)]
    assert pairs(Lab(1, GIGABIT)) == []
    lines = lab.describe()
    assert lines[0] == "5 hosts (h1 to h5, 10.77.0.1 to 10.77.0.5), 1gbit each way, TCP cubic"
    assert lines[1] == "2 racks (h1 h2 h3; h4 h5), 100mbit between them"


def test_both_ends_of_a_link_are_limited() -> None:
    commands = [" ".join(command) for command in build(Lab(2, 10**10))]
    shaper = "tbf rate 10000000000bit burst 262144b latency 50ms"
    assert f"tc -n gccomm-lab-h2 qdisc add dev eth0 root {shaper}" in commands
    assert f"tc -n gccomm-lab-r1 qdisc add dev h2 root {shaper}" in commands
    assert "ip -n gccomm-lab-r1 link set h2 master bridge" in commands
    assert "ip -n gccomm-lab-h2 address add 10.77.0.2/16 dev eth0 noprefixroute" in commands
    route = "ip -n gccomm-lab-h2 route add 10.77.0.0/16 dev eth0 src 10.77.0.2 congctl cubic"
    assert route in commands
    assert not any("core" in command for command in commands)


def test_racks_are_joined_by_limited_links() -> None:
    commands = [" ".join(command) for command in build(Lab(2, GIGABIT, 2, 10**8))]
    shaper = "tbf rate 100000000bit burst 262144b latency 50ms"
    assert f"tc -n gccomm-lab-r2 qdisc add dev uplink root {shaper}" in commands
    assert f"tc -n gccomm-lab-core qdisc add dev r2 root {shaper}" in commands
    made = [command.split()[-1] for command in commands if command.startswith("ip netns add")]
    assert made == Lab(2, GIGABIT, 2).namespaces()


@pytest.mark.parametrize(
    ("ranks", "per_host", "found"),
    [
        (4, None, {"h1": 1, "h2": 1, "h3": 1, "h4": 1}),
        (2, None, {"h1": 1, "h2": 1}),
        (5, None, {"h1": 2, "h2": 2, "h3": 1}),
        (3, 2, {"h1": 2, "h2": 1}),
    ],
)
def test_places(ranks: int, per_host: int | None, found: dict[str, int]) -> None:
    assert places(ranks, per_host, Lab(4, GIGABIT)) == list(found.items())


def test_too_few_hosts() -> None:
    with pytest.raises(ValueError, match="5 ranks, 2 a host, need 3 hosts; the lab has 2"):
        places(5, 2, Lab(2, GIGABIT))


def test_launchers_are_told_about_hosts_and_links(tmp_path: Path) -> None:
    agent, where = tmp_path / "agent", [("h1", 2), ("h2", 1)]
    hydra = launch(Launcher(Path("mpiexec"), "Hydra"), agent, where, ["python", "x.py"])
    assert hydra[:7] == ["mpiexec", "-launcher", "ssh", "-launcher-exec", str(agent), "-iface", "eth0"]
    assert hydra[7:] == ["-hosts", "h1:2,h2:1", "-n", "3", "python", "x.py"]
    open_mpi = " ".join(launch(Launcher(Path("mpiexec"), "Open MPI"), agent, where, ["python"]))
    assert f"--prtemca plm_ssh_agent {agent} " in open_mpi
    assert "--host h1:2,h2:1 " in open_mpi
    assert " --mca btl tcp,sm,self --mca btl_tcp_if_include eth0 " in open_mpi
    with pytest.raises(NoLauncherError, match="MPICH and Open MPI; mpiexec is neither"):
        launch(Launcher(Path("mpiexec"), "Intel MPI"), agent, where, ["python"])


def test_variables_of_a_job() -> None:
    lab = Lab(2, GIGABIT)
    environ = {"FI_PROVIDER": "sockets"}
    prepare(environ, Launcher(Path("mpiexec"), "Hydra"), lab, 4, 2)
    assert (environ["FI_PROVIDER"], environ["FI_TCP_IFACE"]) == ("sockets", "eth0")
    assert (environ["MASTER_ADDR"], environ["GLOO_SOCKET_IFNAME"]) == ("10.77.0.1", "eth0")
    assert Lab.from_environ(environ) == lab
    environ = {}
    prepare(environ, Launcher(Path("mpiexec"), "Open MPI"), lab, 2, 2)
    assert "OMPI_MCA_mpi_yield_when_idle" not in environ
    assert "MPICH_CH4_NETMOD" not in environ
    prepare(environ, Launcher(Path("mpiexec"), "Open MPI"), lab, 3, 2)
    assert environ["OMPI_MCA_mpi_yield_when_idle"] == "1"


def test_agent_takes_the_arguments_of_ssh(tmp_path: Path) -> None:
    path, tools = tmp_path / "agent", tmp_path / "tools"
    path.write_text(SCRIPT)
    path.chmod(0o755)
    tools.mkdir()
    (tools / "ip").write_text('#!/bin/sh\nfor word in "$@"; do printf "[%s]" "$word"; done\n')
    (tools / "ip").chmod(0o755)
    environ = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    for options in ([], ["-x"]):
        command = [str(path), *options, "h2", "echo", "a b"]
        said = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
        assert said.startswith("[netns][exec][gccomm-lab-h2][unshare][--mount][--uts][--ipc][--pid]")
        assert said.endswith(f"[sh][h2][{tmp_path}][echo][a b]")
    assert enter(path, "h1", ["python", "a b"])[-3:] == [str(path), "h1", "exec python 'a b'"]


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([], "the following arguments are required"),
        (["begin"], "invalid choice: 'begin'"),
        (["up", "--hosts", "0"], "at least 1"),
        (["up", "--hosts", "65"], "--hosts 65 is more than 64"),
        (["up", "--hosts", "2", "--racks", "3"], "--racks 3 is more than --hosts 2"),
        (["up", "--rate", "fast"], "between 1mbit and 100gbit"),
        (["up", "--rack-rate", "1gbit"], "--rack-rate needs --racks"),
        (["run", "script.py"], "the following arguments are required: -n"),
        (["run", "-n", "2"], "a script, or -m and a module, is missing"),
        (["run", "-n", "2", "no_such_script.py"], "there is no script"),
        (["run", "-n", "2", "--per-host", "0", "x.py"], "at least 1"),
        (["probe", "--seconds", "0"], "at least 1"),
        (["down", "all"], "unrecognized arguments: all"),
    ],
)
def test_wrong_arguments(argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        netlab(argv)
    assert caught.value.code == 2
    assert reason in " ".join(capsys.readouterr().err.split())


def test_without_root(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert netlab(["up"]) == netlab(["down"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"gccomm netlab {command}: a network lab needs root: start it as root, say by sudo"
        for command in ("up", "down")
    ]


def test_without_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool in ("ip", "tc") else f"/bin/{tool}")
    assert why_not() == "a network lab needs commands of iproute2: apt install iproute2"


def test_root_that_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    monkeypatch.setattr(netlab_system, "_TRIAL", "echo not permitted >&2; exit 1")
    monkeypatch.setattr(
        netlab_system,
        "_tool",
        lambda *command: subprocess.CompletedProcess(command, 1, "", "not permitted\n"),
    )
    reason = why_not()
    assert reason is not None
    assert "(not permitted): use a machine of your own" in reason


@pytest.fixture
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which there is no lab."""
    monkeypatch.setattr(netlab_system, "STATE", tmp_path / "state")
    monkeypatch.setattr(netlab_system, "NAMESPACES", tmp_path)
    monkeypatch.setattr(netlab_system, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr("gccomm_launch.netlab.why_not", lambda: None)


@pytest.mark.usefixtures("_elsewhere")
def test_no_lab(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [netlab([command]) for command in ("status", "probe")] == [1, 1]
    assert "no lab is up; `gccomm netlab up` builds one" in capsys.readouterr().err
    with pytest.raises(NetlabError, match="no lab is up"):
        link_rate()


@pytest.mark.usefixtures("_elsewhere")
def test_half_a_lab(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gccomm-lab-h1").touch()
    assert [netlab([command]) for command in ("status", "up")] == [1, 1]
    errors = capsys.readouterr().err
    assert "the lab is not whole (gccomm-lab-h1); `gccomm netlab down` removes what there is" in errors
    assert "gccomm netlab up: a lab is up already (gccomm-lab-h1)" in errors


@pytest.mark.usefixtures("_elsewhere")
@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("tbf", "root tbf rate 1000000000bit burst 262144b latency 50ms` has failed: no tbf"),
        ("congctl", "src 10.77.0.1 congctl nosuch` has failed: no congctl"),
    ],
)
def test_lab_that_cannot_be_built_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], word: str, text: str
) -> None:
    def tool(*command: str) -> subprocess.CompletedProcess[str]:
        if command[:3] == ("ip", "netns", "add"):
            (tmp_path / command[3]).touch()
        if command[:3] == ("ip", "netns", "delete"):
            (tmp_path / command[3]).unlink()
        failed = word in command
        return subprocess.CompletedProcess(command, failed, "", f"no {word}" if failed else "")

    monkeypatch.setattr(netlab_system, "_tool", tool)
    assert netlab(["up", "--congestion", "nosuch"]) == 1
    assert text in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
