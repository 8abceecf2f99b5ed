"""`gccomm bench` on the ranks of this run, at small sizes."""

from __future__ import annotations

import importlib.util
import json
import math
import signal
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gccomm_launch.bench import DEFAULT_CODECS, bench, measure_size, parse
from gccomm_launch.bench_report import Row, compare
from gccomm_launch.bench_timing import StoppedError, Stopper, exact_sum, interleaved, settle, vnmse
from gccomm_launch.bench_ways import KEPT, all_ways, mpi_ways
from gccomm_mpi.choice import ROUNDS
from gccomm_mpi.messages import ALGORITHMS

END_TO_END = Path(__file__).parents[2] / "benchmarks" / "end_to_end.py"
SIZE = 1 << 20  # more than two of the pieces


@pytest.fixture
def stopper(world: Any) -> Stopper:
    return Stopper(world)


def settings(*argv: str) -> Namespace:
    return parse(["-i", "2", "-w", "1", *argv])


def test_rows(comm: Any, world: Any, stopper: Stopper) -> None:
    rows, refused = measure_size(SIZE, settings(), comm, world, stopper)
    assert not refused
    names = [row.codec for row in rows]
    assert names[0] == "MPI_Allreduce"
    assert names[-6:] == ["raw", "bf16", *DEFAULT_CODECS]
    assert "MPI_Allreduce in 512 KiB (kept out)" in names
    assert "MPI_Allreduce in 1 MiB" not in names  # the same as the whole
    assert all((row.size, row.count) == (SIZE, SIZE // 4) for row in rows)
    assert all(row.algbw == pytest.approx(SIZE / row.time_us / 1e3) for row in rows)
    assert all(row.busbw == pytest.approx(row.algbw * 2 * (comm.size - 1) / comm.size) for row in rows)
    assert all(row.min_us <= row.quartiles_us[0] <= row.time_us <= row.quartiles_us[1] for row in rows)
    assert len(set(world.allgather(tuple(row.line() for row in rows)))) == 1  # the slowest rank's, everywhere


class Elsewhere:
    """The ranks of a communicator, each on a host of its own."""

    def __init__(self, world: Any) -> None:
        self.world = world

    def allgather(self, name: str) -> list[str]:
        return self.world.allgather(f"{name}-{self.world.rank}")


def test_algorithms_are_tried_between_hosts_before_times_are_taken(
    comm: Any, world: Any, stopper: Stopper
) -> None:
    made: list[int] = []
    calls = [lambda: made.append(0), lambda: made.append(1)]
    settle(calls, 1 << 18, stopper, world)
    assert not made  # all ranks are on one host
    settle(calls, 1 << 18, stopper, Elsewhere(world))
    rounds, odd = divmod(len(made), 2)
    assert not odd
    assert made == [0, 1] * rounds
    assert rounds >= ROUNDS * len(ALGORITHMS)  # messages of a size that are tried, of one piece a call
    made.clear()
    settle(calls, 1 << 28, stopper, Elsewhere(world))
    assert 1 < len(made) // 2 < rounds  # of many pieces


def test_errors_and_bytes(comm: Any, world: Any, stopper: Stopper) -> None:
    rows = {row.codec: row for row in measure_size(SIZE, settings(), comm, world, stopper)[0]}
    assert all(row.vnmse < 1e-12 for row in rows.values() if row.kind == "mpi")
    assert rows["raw"].vnmse < 1e-12 < rows["bf16"].vnmse < 1e-3
    assert 1e-6 < rows["uniform:wire_bits=8"].vnmse < 1e-1 < rows["uniform:wire_bits=4"].vnmse
    assert rows["MPI_Allreduce"].wire_bytes == SIZE
    assert SIZE / 4 < rows["uniform:wire_bits=8"].wire_bytes < SIZE / 4 * 1.05
    assert SIZE / 8 < rows["uniform:wire_bits=4"].wire_bytes < SIZE / 8 * 1.05


def test_codecs_that_refuse_are_left_out(comm: Any, world: Any, stopper: Stopper) -> None:
    """With the reason; the others are measured."""
    options = settings("--codecs", "qsgd-mn:wire_bits=2", "uniform:wire_bits=8", "powersgd")
    rows, refused = measure_size(SIZE, options, comm, world, stopper)
    assert [row.codec for row in rows][-2:] == ["uniform:wire_bits=8", "powersgd"]
    assert rows[-1].wire_bytes < SIZE / 8  # as a matrix
    assert list(refused) == ([] if comm.size == 1 else ["qsgd-mn:wire_bits=2"])
    assert all(f"{comm.size} ranks" in reason for reason in refused.values())


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_all_ways_find_the_same_result(dtype: str, op: str, comm: Any, world: Any) -> None:
    x = np.random.default_rng(world.rank).standard_normal(200_003).astype(dtype)
    stacked = np.array(world.allgather(x), np.float64)
    expected = stacked.sum(axis=0) if op == "sum" else stacked.mean(axis=0)
    exact = exact_sum(x, world, op)
    np.testing.assert_allclose(exact, expected, rtol=1e-12, atol=1e-12)
    before = x.copy()
    for way in all_ways(x, comm, world, ["uniform:wire_bits=16"], op):
        assert vnmse(way.call(), exact, world) < 1e-4, way.name
        assert way.wire_bytes() > 0
    np.testing.assert_array_equal(x, before)


def test_results_are_new_or_kept(world: Any) -> None:
    for way in mpi_ways(np.ones(200_000, np.float32), world):
        first, second = way.call(), way.call()
        assert (first is second) == way.name.endswith("(kept out)")
        assert (second == world.size).all()


def test_vnmse_is_that_of_the_worst_rank(world: Any) -> None:
    exact = np.full(3_000_000, 2.0)
    result = exact.astype(np.float32)
    if world.rank == world.size - 1:
        result[-1] = 4
    assert vnmse(result, exact, world) == pytest.approx(1 / 3_000_000)
    assert np.isnan(vnmse(result, np.zeros_like(exact), world))


def test_times_are_those_of_the_slowest_rank(world: Any, stopper: Stopper) -> None:
    calls: list[str] = []

    def slow() -> None:
        calls.append("slow")
        if world.rank == world.size - 1:
            time.sleep(0.02)

    seconds = interleaved([slow, lambda: calls.append("fast")], 1, 3, stopper, world)
    assert seconds.shape == (3, 2)
    assert (seconds[:, 0] >= 0.02).all()
    assert sorted(calls) == ["fast"] * 4 + ["slow"] * 4
    rounds = [sorted(calls[k : k + 2]) for k in range(0, 8, 2)]
    assert rounds == [["fast", "slow"]] * 4
    assert len(set(world.allgather(tuple(calls)))) == 1


def test_an_interrupt_of_one_rank_stops_all(world: Any, stopper: Stopper) -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    rounds: list[int] = []

    def call() -> None:
        rounds.append(1)
        if len(rounds) == 2 and world.rank == world.size - 1:
            signal.raise_signal(signal.SIGINT)

    with stopper.signals(), pytest.raises(StoppedError):
        interleaved([call], 0, 100, stopper, world)
    assert len(rounds) == 2
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_report(comm: Any, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]) -> None:
    path = Path("only-rank-0-writes.json")
    if comm.rank == 0:
        path = request.getfixturevalue("tmp_path") / "found.json"
    argv = [
        "-b",
        "8K",
        "-e",
        "64K",
        "-f",
        "8",
        "-i",
        "2",
        "-w",
        "0",
        "--codecs",
        "fp16",
        "uniform:wire_bits=5",
    ]
    assert bench([*argv, "--json", str(path)]) == 0
    out = capfd.readouterr().out
    if comm.rank:
        assert out == ""
        assert not path.exists()
        return
    report = json.loads(path.read_text())
    assert report["ranks"] == comm.size
    assert report["options"]["codecs"] == ["fp16", "uniform:wire_bits=5"]
    assert report["machine"]["versions"].keys() == {"gccomm", "numpy", "mpi4py"}
    assert [c["size"] for c in report["comparisons"]] == [8192, 65536]
    compared = ["raw", "bf16", "fp16", "uniform:wire_bits=5"]
    assert all(list(c["speedup"]) == compared for c in report["comparisons"])
    assert all(Row(**row).line() in out for row in report["rows"])


def test_number_of_ranks_is_the_launchers(comm: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert bench(["-n", str(comm.size + 1)]) == 2
    message = f"-n {comm.size + 1}, but the launcher has started {comm.size} ranks"
    assert (message in capfd.readouterr().out) == (comm.rank == 0)


def _row(codec: str, kind: str, time_us: float, wire_bytes: int) -> Row:
    return Row(1000, 250, codec, kind, wire_bytes, time_us, time_us, [time_us] * 2, 1.0, 1.0, 0.0)


def test_ratios() -> None:
    one = _row("MPI_Allreduce", "mpi", 80, 1000)
    kept = _row("pieces" + KEPT, "mpi", 25, 1000)
    pieces, half = _row("pieces", "mpi", 40, 1000), _row("bf16", "float", 30, 520)
    rows = [one, kept, pieces, half, _row("q", "codec", 20, 260)]
    comparison = compare(rows)
    assert comparison.best_uncompressed == "bf16"
    assert comparison.best_kept_out == comparison.best_full_precision == kept.codec
    ratios = {"best_uncompressed": 1.5, "best_kept_out": 1.25, "best_full_precision": 1.25, "one_call": 4.0}
    assert comparison.speedup["q"] == ratios
    assert comparison.speedup["bf16"]["best_uncompressed"] == 1.0
    with pytest.raises(ValueError, match="first row"):
        compare(rows[1:][::-1])


def test_shapes_of_resnet50() -> None:
    spec = importlib.util.spec_from_file_location("end_to_end", END_TO_END)
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    shapes = dict(benchmark.resnet50_shapes())
    assert len(shapes) == benchmark.RESNET50_TENSORS == 161
    assert sum(map(math.prod, shapes.values())) == benchmark.RESNET50_PARAMETERS == 25_557_032
    assert shapes["layer4.2.conv3"] == (2048, 512, 1, 1)
