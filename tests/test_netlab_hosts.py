"""The network lab's hosts, links and jobs, and the benchmarks in it, where this machine can have one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from gccomm_launch import netlab_system
from gccomm_launch.mpiexec import NoLauncherError, find_launcher
from gccomm_launch.netlab import (
    Lab,
    check_not_faster,
    link_rate,
    netlab,
    why_not,
)
from gccomm_launch.netlab_plan import VARIABLE

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 120
GIGABIT = 10**9
GCCOMM = [sys.executable, "-m", "gccomm_launch.cli", "netlab"]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """Two hosts in one rack and one in another."""
    reason = why_not()
    if reason is None and (found := netlab_system.existing()):
        reason = f"a lab is up already ({' '.join(found)})"
    if reason is not None:
        pytest.skip(reason)
    assert netlab(["up", "--hosts", "3", "--rate", "200mbit", "--racks", "2", "--rack-rate", "50mbit"]) == 0
    try:
        yield netlab_system.standing()
    finally:
        assert netlab(["down"]) == 0
        assert netlab_system.existing() == []
        assert not netlab_system.STATE.exists()


@pytest.fixture(scope="module")
def mpi_lab(lab: Lab) -> Lab:
    try:
        family = find_launcher().family
    except NoLauncherError as error:
        pytest.skip(str(error))
    if family not in ("Hydra", "Open MPI"):
        pytest.skip(f"the lab does not know {family or 'this launcher'}")
    return lab


@pytest.fixture
def rank(tmp_path: Path) -> Path:
    """A rank that says where it is, sums, and does what its argument says on the last rank."""
    body = """
        import os, socket, sys, time
        import numpy as np
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        mode = sys.argv[1]
        total = np.empty(1 << 18, np.float32)
        world.Allreduce(np.full(1 << 18, world.rank + 1, np.float32), total)
        near = world.Split_type(MPI.COMM_TYPE_SHARED).allgather(world.rank)
        names = [socket.gethostname(), os.environ["MASTER_ADDR"], os.environ["GLOO_SOCKET_IFNAME"]]
        words = [world.rank, names, near, total.min(), total.max()]
        sys.stdout.write("|".join(map(str, words)) + chr(10))
        sys.stdout.flush()
        if mode == "raise" and world.rank == world.size - 1:
            raise ValueError("the last rank has had enough")
        if mode in ("raise", "sleep"):
            time.sleep(300)
    """
    path = tmp_path / "rank.py"
    path.write_text(dedent(body))
    return path


def job(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [*GCCOMM, "run", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=LIMIT_S, stdin=subprocess.DEVNULL
    )


def deserted(lab: Lab) -> bool:
    """Whether no process is left in the lab within five seconds."""
    end = time.monotonic() + 5
    while any(netlab_system.processes(name) for name in lab.namespaces()):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_links_are_limited_both_ways(lab: Lab) -> None:
    for source, target, bits in ((1, 2, 200), (2, 1, 200), (1, 3, 50), (3, 1, 50)):
        carried = link_rate(source, target)
        assert carried > 0
        check_not_faster(carried, 1.0, bits * 10**6)
    assert deserted(lab)


def test_tcp_does_not_depend_on_the_machine(lab: Lab) -> None:
    command = ["ip", "-n", "gccomm-lab-h1", "route"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "10.77.0.0/16 dev eth0 scope link src 10.77.0.1 congctl cubic"
    assert lab.congestion == "cubic"


def test_a_second_lab_is_refused(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    assert netlab(["up"]) == 1
    assert "a lab is up already" in capsys.readouterr().err
    assert netlab(["status"]) == 0
    assert "3 hosts (h1 to h3, 10.77.0.1 to 10.77.0.3), 200mbit each way" in capsys.readouterr().out


def test_probe_is_noted(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    assert netlab(["probe"]) == 0
    assert "h2 to h1: " in capsys.readouterr().out
    noted = netlab_system.standing()
    assert 0 < noted.measured < lab.rate / 8 * 1.02
    assert 0 < noted.measured_across < lab.rack_rate / 8 * 1.02


@pytest.mark.parametrize(("ranks", "each"), [(3, 1), (4, 2), (3, 2)])
def test_ranks_have_hosts(mpi_lab: Lab, rank: Path, ranks: int, each: int) -> None:
    done = job("-n", ranks, "--per-host", each, rank, "sum")
    assert done.returncode == 0, done.stderr
    total = float(ranks * (ranks + 1) // 2)
    for number in range(ranks):
        host = number // each
        near = list(range(host * each, min(host * each + each, ranks)))
        names = [f"h{host + 1}", "10.77.0.1", "eth0"]
        assert f"{number}|{names}|{near}|{total}|{total}" in done.stdout.splitlines()
    assert deserted(mpi_lab)


def test_module_and_too_many_ranks(mpi_lab: Lab, rank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(rank.parent))
    done = job("-n", "1", "-m", "rank", "sum")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("0|")
    done = job("-n", "7", "--per-host", "2", rank, "sum")
    assert done.returncode == 2
    assert "7 ranks, 2 a host, need 4 hosts; the lab has 3" in done.stderr


def test_one_rank_ends_the_job(mpi_lab: Lab, rank: Path) -> None:
    done = job("-n", "2", rank, "raise")
    assert done.returncode == 1
    assert "ValueError: the last rank has had enough" in done.stderr
    assert deserted(mpi_lab)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_leave_nothing_behind(mpi_lab: Lab, rank: Path, tmp_path: Path, number: int) -> None:
    log = tmp_path / "log"
    command = [*GCCOMM, "run", "-n", "4", str(rank), "sleep"]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        end = time.monotonic() + LIMIT_S
        while log.read_text().count("|") < 16:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, "the ranks do not start"
            time.sleep(0.05)
        refused = job("-n", "1", rank, "sum")
        assert refused.returncode == 1
        assert "another `gccomm netlab run` or `probe` is in the lab" in refused.stderr
        process.send_signal(number)
        assert process.wait(timeout=LIMIT_S) in (128 + number, -number)
    assert deserted(mpi_lab)


@pytest.mark.parametrize(
    ("pretended", "status", "reason"),
    [
        (Lab(3, 10**6, measured=119e3), 1, "is faster than the link: 1mbit carries at most"),
        (Lab(3, GIGABIT), 2, "what the links carry is not known; measure it by `gccomm netlab probe`"),
    ],
)
def test_benchmark_refuses(mpi_lab: Lab, tmp_path: Path, pretended: Lab, status: int, reason: str) -> None:
    wrapper, found = tmp_path / "wrapper.py", tmp_path / "found.json"
    wrapper.write_text(
        f"import os, runpy; os.environ[{VARIABLE!r}] = {pretended.to_json()!r}\n"
        f"runpy.run_path({str(ROOT / 'benchmarks' / 'lab.py')!r}, run_name='__main__')\n"
    )
    done = job("-n", "2", wrapper, "--size", "1M", "--iters", "1", "--warmup", "0", "--json", found)
    assert done.returncode == status
    assert reason in done.stderr
    assert not found.exists()


def test_benchmark_needs_a_link(mpi_lab: Lab) -> None:
    done = job("-n", "2", "--per-host", "2", ROOT / "benchmarks" / "lab.py", "--size", "64K")
    assert done.returncode == 2
    assert "all ranks are on one host, so there is no link to measure" in done.stderr


def test_benchmark(mpi_lab: Lab, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    script_ = ROOT / "benchmarks" / "lab.py"
    done = job("-n", "2", script_, "--size", "1M", "--iters", "2", "--warmup", "1", "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    ways = [row["codec"] for row in report["rows"]]
    assert ways[:2] == ["MPI_Allreduce", "MPI_Allreduce, a byte a coordinate"]
    assert {"raw", "bf16", "uniform:wire_bits=8", "uniform:wire_bits=5", "rotated:wire_bits=8"} <= set(ways)
    assert report["hosts"] == [1, 2]
    assert all(f" {way} " in done.stdout for way in ways)
    for row in report["rows"]:
        mpi_lab.check(row["wire_bytes"], row["time_us"] / 1e6, report["hosts"])


def test_ranks_of_a_host_send_through_one_of_them(mpi_lab: Lab, tmp_path: Path) -> None:
    """Two hosts of two ranks: memory within each, one leader between; results equal on all ranks."""
    body = """
        import numpy as np
        import gccomm

        with gccomm.init() as comm:
            channel = comm._backend._channel
            leader = channel.hierarchy.leaders is not None
            tree = {"w": np.random.default_rng(comm.rank).standard_normal((300, 1024)).astype(np.float32)}
            found = comm.compressed_allreduce(tree)["w"]
            exact = comm.compressed_allreduce(tree, codec="raw")["w"]
            close = bool(np.linalg.norm(found - exact) < 0.05 * np.linalg.norm(exact))
            sums = comm._backend._channel.comm.allgather(found.tobytes())
            line = f"rank {comm.rank}|{comm.local_rank}|{leader}|{close}|{len(set(sums))}"
            print(line + chr(10), end="", flush=True)  # in one write: lines of ranks must not mix
    """
    path = tmp_path / "pairs.py"
    path.write_text(dedent(body))
    found = job("-n", "4", "--per-host", "2", path)
    assert found.returncode == 0, found.stderr
    lines = sorted(line for line in found.stdout.splitlines() if line.startswith("rank"))
    assert lines == [f"rank {r}|{r % 2}|{r % 2 == 0}|True|1" for r in range(4)]


def test_hosts_add_up_floats(mpi_lab: Lab, tmp_path: Path) -> None:
    """Two hosts of two ranks, which speak by turns: to the bit what the simulation gives."""
    body = """
        import numpy as np
        import gccomm

        with gccomm.init(hierarchical=True) as comm:
            draw = [np.random.default_rng(r).standard_normal((3000, 1024), np.float32) for r in range(4)]
            trees = [{"w": x} for x in draw]
            found = comm.compressed_allreduce(trees[comm.rank])["w"]
            expected = gccomm.testing.simulate(trees, hosts=[0, 0, 1, 1])[0][comm.rank]["w"]
            same = bool(np.array_equal(found, expected))
            line = f"rank {comm.rank}|{tuple(comm._backend.hosts)}|{same}"
            print(line + chr(10), end="", flush=True)  # in one write: lines of ranks must not mix
    """
    path = tmp_path / "floats.py"
    path.write_text(dedent(body))
    found = job("-n", "4", "--per-host", "2", path)
    assert found.returncode == 0, found.stderr
    lines = sorted(line for line in found.stdout.splitlines() if line.startswith("rank"))
    assert lines == [f"rank {r}|(2, {r // 2}, {r % 2}, 2)|True" for r in range(4)]


def test_benchmark_of_hierarchies(mpi_lab: Lab, tmp_path: Path) -> None:
    path, script_ = tmp_path / "found.json", ROOT / "benchmarks" / "hierarchy.py"
    done = job("-n", "4", "--per-host", "2", script_, "--size", "256K", "--iters", "2", "--json", path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert {row["levels"] for row in rows} == {"flat", "words", "floats"}
    errors = {(row["codec"], row["levels"]): row["vnmse"] for row in rows}
    for codec in ("uniform:wire_bits=8", "rotated:wire_bits=8"):
        assert errors[codec, "flat"] == errors[codec, "words"] > 1.5 * errors[codec, "floats"]
    done = job("-n", "2", script_, "--size", "64K")
    assert done.returncode == 2
    assert "every host has one rank" in done.stderr
