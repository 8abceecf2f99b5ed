"""Other libraries in `gccomm bench`: the same sums on the same ranks, and reasons for absent ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import pytest
from gccomm_launch import bench_peers
from gccomm_launch.bench import bench
from gccomm_launch.bench_peers import GLOO, HOOKS, MPI4JAX, Peers, open_peers
from gccomm_launch.bench_timing import exact_sum, vnmse

torch_is_there = find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not torch_is_there, reason="PyTorch is not installed")


@pytest.fixture
def peers(world: Any) -> Iterator[Peers]:
    with open_peers(world) as found:
        assert found is not None
        yield found


def test_each_is_there_or_has_a_reason(peers: Peers) -> None:
    ways, left_out = peers.ways(np.ones(4096, np.float32))
    assert not left_out
    names = {way.name for way in ways}
    assert names | peers.unavailable.keys() == {*GLOO, *HOOKS, MPI4JAX}
    assert not names & peers.unavailable.keys()
    assert all(reason for reason in peers.unavailable.values())
    if not torch_is_there:
        assert "torch is not installed" in peers.unavailable["gloo"]


@needs_torch
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_sums(dtype: str, op: str, peers: Peers, world: Any) -> None:
    """Low rank apart, which a matrix of low rank is for."""
    x = np.random.default_rng(world.rank).standard_normal(200_003).astype(dtype)
    before = x.copy()
    exact = exact_sum(x, world, op)
    for way in peers.ways(x, op)[0]:
        if way.name == HOOKS[1]:
            continue  # a vector it sends as it is, which the next test looks at
        for _ in range(2):
            assert vnmse(way.call(), exact, world) < 1e-4, way.name
        assert way.wire_bytes() == x.size * (x.itemsize if way.name in ("gloo", MPI4JAX) else 2)
    np.testing.assert_array_equal(x, before)


@needs_torch
def test_powersgd_is_the_hook_s(peers: Peers, world: Any) -> None:
    """Exact on a matrix of its rank that is the same on all ranks; the words of both factors travel."""
    left, right = (np.random.default_rng(k).standard_normal((shape, 4)) for k, shape in enumerate((64, 1024)))
    x = (left @ right.T).astype(np.float32).reshape(-1)
    way = next(way for way in peers.ways(x)[0] if way.name == HOOKS[1])
    exact = exact_sum(x, world)
    way.call()
    assert vnmse(way.call(), exact, world) < 1e-6
    assert way.wire_bytes() == 4 * 4 * (64 + 1024)


@needs_torch
def test_what_a_library_cannot_do_is_said(peers: Peers) -> None:
    ways, left_out = peers.ways(np.ones(4096, np.float16))
    assert HOOKS[1] not in [way.name for way in ways]
    assert "float32 or float64" in left_out[HOOKS[1]]


@needs_torch
def test_a_group_that_another_thread_holds_is_not_let_go_before(world: Any) -> None:
    """The last one to hold it waits for gloo's threads, which one of these cannot."""
    import torch.distributed as dist

    found, held = Peers(world), []
    if found.gloo:
        held.append(dist.group.WORLD)
        Timer(0.2, held.clear).start()
    found.close()
    assert not held


def test_one_rank_without_it_is_enough(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    last = world.size - 1
    if world.rank == last:
        monkeypatch.setattr(bench_peers, "find_spec", lambda _name: None)
    missing = Peers(world)
    assert missing.unavailable.keys() == {*GLOO, *HOOKS, MPI4JAX}
    if torch_is_there:
        assert missing.unavailable["gloo"] == f"torch is not installed (rank {last})"
    missing.close()


def test_a_library_that_fails_is_named(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_name: str) -> Any:
        raise RuntimeError("built for another MPI\nand more")

    monkeypatch.setattr(bench_peers, "find_spec", lambda name: True if name == "mpi4jax" else None)
    monkeypatch.setattr(bench_peers, "import_module", fails)
    assert Peers(world).unavailable[MPI4JAX] == "RuntimeError: built for another MPI (rank 0)"


def test_report_timeline_and_figure(
    comm: Any, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = request.getfixturevalue("tmp_path") if comm.rank == 0 else Path()
    argv = ["-b", "8K", "-e", "64K", "-f", "8", "-i", "2", "-w", "0", "--codecs", "uniform:wire_bits=5"]
    files = {name: folder / f"only-rank-0-writes.{name}" for name in ("json", "svg", "trace")}
    argv += ["--json", str(files["json"]), "--plot", str(files["svg"]), "--trace", str(files["trace"])]
    if find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed")
    assert bench(argv) == 0
    out = capfd.readouterr().out
    if comm.rank:
        assert not any(path.exists() for path in files.values())
        return
    report = json.loads(files["json"].read_text())
    names = {row["codec"] for row in report["rows"]} | report["unavailable"].keys()
    assert names >= {*GLOO, *HOOKS, MPI4JAX}
    assert all(f"# {name}: not available: {why}" in out for name, why in report["unavailable"].items())
    assert {bound["size"] for bound in report["bounds"]} == {8192, 65536}
    assert files["svg"].read_text().count("<path") > 10
    events = json.loads(files["trace"].read_text())["traceEvents"]
    calls = [event for event in events if event.get("cat") == "call"]
    assert {event["pid"] for event in calls} == set(range(comm.size))
    assert {event["name"] for event in calls} == {
        f"{codec}, {size} bytes" for codec in ("raw", "bf16", "uniform:wire_bits=5") for size in (8192, 65536)
    }
