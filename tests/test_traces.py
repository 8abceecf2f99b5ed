"""Timelines: valid files, spans that nest, the times of the statistics, nothing where it is off."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gccomm_launch.cli import main

import gccomm
from gccomm import timeline, traces
from gccomm.codecs import get_codec
from gccomm.reduction import KeyState

Event = Mapping[str, Any]
KINDS = {"call", "piece", "prepare", "deliver", "encode", "wire", "decode"}


def complete(trace: Mapping[str, Any]) -> list[Event]:
    """Return the complete events, after a look at what every viewer asks of a file."""
    assert trace["displayTimeUnit"] == "ms"
    for event in trace["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["cat"] for event in events} <= KINDS
    assert all(event["dur"] >= 0 and event["ts"] >= 0 and isinstance(event["tid"], int) for event in events)
    return events


def check_nesting(events: Iterable[Event]) -> None:
    """Of two spans of one row, either one holds the other or they are apart (to a rounding error of ts)."""
    rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    slack = 1e-3  # microseconds
    for spans in rows.values():
        open_: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_ and open_[-1] <= start + slack:
                open_.pop()
            assert not open_ or end <= open_[-1] + slack
            open_.append(end)


def seconds(events: Iterable[Event], rank: int, kind: str) -> float:
    """Return the time that a rank itself spent in phases of a kind."""
    mine = (e for e in events if e["pid"] == rank and e["tid"] == 0 and e["cat"] == kind)
    return sum(e["dur"] for e in mine) / 1e6


@pytest.mark.parametrize("codec", ["raw", "bf16", "uniform", "rotated:headroom=checked"])
def test_of_all_ranks(codec: str, tmp_path: Path) -> None:
    """Three pieces and more; the sums of a rank's own phases are what its statistics say."""
    path, ranks = tmp_path / "trace.json", 3
    x = np.random.default_rng(0).standard_normal((3 << 20) + 5000).astype(np.float32)

    def program(comm: gccomm.Communicator) -> Any:
        reducer = gccomm.Reducer(codec, comm=comm)
        with gccomm.tracing(path, comm=comm):
            reducer({"w": x})
        return reducer.stats

    stats = gccomm.testing.run(program, ranks)
    events = complete(json.loads(path.read_text()))
    check_nesting(events)
    assert {event["pid"] for event in events} == set(range(ranks))
    for rank in range(ranks):
        for kind, expected in (
            ("encode", stats[rank].encode_s),
            ("wire", stats[rank].wire_s),
            ("decode", stats[rank].decode_s),
        ):
            assert seconds(events, rank, kind) == pytest.approx(expected, rel=1e-6, abs=1e-6)
        calls = [e for e in events if e["pid"] == rank and e["cat"] == "call"]
        assert [call["args"]["step"] for call in calls] == [0]
        assert "error" not in calls[0]["args"]
        pieces = [e for e in events if e["pid"] == rank and e["cat"] == "piece"]
        assert sorted(e["name"] for e in pieces) == [f"piece {k}" for k in range(len(pieces))]
        assert len(pieces) >= 3
        wire = [e for e in events if e["pid"] == rank and e["tid"] == 0 and e["name"] in ("wire", "agree")]
        assert sum(e["args"]["bytes"] for e in wire) == stats[rank].wire_bytes
        assert len(wire) == stats[rank].messages


@pytest.mark.parametrize("pieces", [1, 3])
def test_spans_that_are_sent_again(pieces: int, tmp_path: Path) -> None:
    """They belong to no piece: these have ended."""
    path, ranks, codec = tmp_path / "trace.json", 4, get_codec("rotated:headroom=checked")
    x = np.random.default_rng(0).standard_normal(pieces << 20, np.float32)

    def program(comm: gccomm.Communicator) -> int:
        reducer = gccomm.Reducer(codec, comm=comm)
        state = KeyState("float32", x.shape, codec.fingerprint, {"ratio": 0.05})  # far too little
        reducer._reduction.set_states({"x": state})
        with gccomm.tracing(path, comm=comm):
            reducer({"x": x})
        return reducer.stats.spans_redone

    assert min(gccomm.testing.run(program, ranks)) > 0
    events = complete(json.loads(path.read_text()))
    check_nesting(events)
    for rank in range(ranks):
        mine = [e for e in events if e["pid"] == rank]
        assert len([e for e in mine if e["cat"] == "piece"]) == pieces
        last = max((e for e in mine if e["tid"] == 0 and e["name"] == "wire"), key=lambda e: e["ts"])
        assert "piece" not in last["args"]


def test_pieces_on_their_way_have_rows_of_their_own(tmp_path: Path) -> None:
    x = np.ones(4 << 20, np.float32)
    path = tmp_path / "trace.json"
    with gccomm.tracing(path):
        gccomm.compressed_allreduce(x, codec="uniform")
    trace = json.loads(path.read_text())
    events = complete(trace)
    ways = {event["tid"] for event in events if event["cat"] == "piece"}
    assert ways == {1, 2}
    names = [
        e["args"]["name"] for e in json.loads(path.read_text())["traceEvents"] if e["name"] == "thread_name"
    ]
    assert names == ["rank", "piece on way 1", "piece on way 2"]


def test_off_records_nothing() -> None:
    assert timeline.begin(0, None) is None  # type: ignore[arg-type]  # not looked at
    reduction = gccomm.Reducer("uniform")
    reduction(np.ones(5000, np.float32))
    assert timeline.begin(0, None) is None  # type: ignore[arg-type]


def test_results_are_the_same_with_and_without(tmp_path: Path) -> None:
    """Steps, and with them noise, are not touched."""
    x = np.random.default_rng(1).standard_normal(5000).astype(np.float32)

    def program(comm: gccomm.Communicator, traced: bool) -> list[bytes]:
        found = []
        for step in range(3):
            if traced:
                with gccomm.tracing(tmp_path / f"{step}.json", comm=comm):
                    found.append(comm.compressed_allreduce(x, codec="uniform:wire_bits=4").tobytes())
            else:
                found.append(comm.compressed_allreduce(x, codec="uniform:wire_bits=4").tobytes())
        return found

    one, other = (gccomm.testing.run(lambda comm, t=t: program(comm, t), 2) for t in (False, True))
    assert one == other


def test_a_failed_call_ends_its_span(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with gccomm.tracing(path):
        with pytest.raises(TypeError):
            gccomm.compressed_allreduce(np.ones(4, np.int32), "mean")
        gccomm.compressed_allreduce(np.ones(2000, np.float32))
    events = complete(json.loads(path.read_text()))
    check_nesting(events)
    errors = [event["args"].get("error") for event in events if event["cat"] == "call"]
    assert errors == ["TypeError", None]


def test_an_exception_leaves_the_rank_s_own_file(tmp_path: Path) -> None:
    def program() -> None:
        with gccomm.tracing(tmp_path / "trace.json"):
            gccomm.compressed_allreduce(np.ones(2000, np.float32))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        program()
    assert [path.name for path in tmp_path.iterdir()] == ["trace.0.json"]
    assert complete(json.loads((tmp_path / "trace.0.json").read_text()))
    assert timeline.begin(0, None) is None  # type: ignore[arg-type]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    def program(comm: gccomm.Communicator) -> None:
        with (
            pytest.raises(ValueError, match="rank 0: there is no folder"),
            gccomm.tracing(tmp_path / "no" / "trace.json", comm=comm),
        ):
            raise AssertionError
        comm.barrier()

    gccomm.testing.run(program, 2)


def test_more_spans_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(timeline, "LIMIT", 4)
    path = tmp_path / "trace.json"
    with gccomm.tracing(path):
        gccomm.compressed_allreduce(np.ones(2000, np.float32))
    trace = json.loads(path.read_text())
    assert len(complete(trace)) == 4
    assert trace["otherData"]["dropped"]["0"] > 0


def part(rank: int, clock: str, shift: float) -> traces.Part:
    """Return what a rank recorded of two calls, on a clock that is `shift` late."""
    events = []
    for step, met in enumerate((100.0, 250.0)):
        about = {"communicator": 0, "reducer": 1, "step": step, "met": met + shift + rank}
        common = {"ph": "X", "pid": rank, "tid": 0, "dur": 20.0}
        events.append({"name": "call", "cat": "call", "ts": met - 10 + shift, "args": about, **common})
    return {"rank": rank, "clock": clock, "dropped": 0, "events": events}


def test_clocks_of_other_machines_are_set_by_the_calls() -> None:
    merged = traces.merge([part(0, "one", 0), part(1, "one", 0), part(2, "other", 5000)])
    starts = {rank: [e["ts"] for e in complete(merged) if e["pid"] == rank] for rank in range(3)}
    assert starts[1] == starts[0] == [90, 240]
    assert starts[2] == [88, 238]  # by when the first message was there, 2 after rank 0's
    assert merged["otherData"]["shifts_us"] == {"0": 0, "1": 0, "2": -5002}


SCRIPT = """
import numpy as np, gccomm
gccomm.init("local")
gccomm.compressed_allreduce(np.ones(3000, np.float32), codec="uniform")
"""


def run_script(directory: Path, name: str, rank: int) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "SLURM_", "GCCOMM_"))}
    environ = {**kept, "GCCOMM_TRACE": name}
    if rank:  # as a launcher says it; the back end is that of a process alone all the same
        environ |= {"PMI_RANK": str(rank), "PMI_SIZE": "1"}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environ,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_whole_program_by_its_variable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        done = run_script(tmp_path, "t.json", rank)
        assert (done.returncode, done.stderr) == (0, "")
    files = [str(tmp_path / f"t.{rank}.json") for rank in (0, 1)]
    assert main(["trace", "-o", str(tmp_path / "all.json"), *files]) == 0
    events = complete(json.loads((tmp_path / "all.json").read_text()))
    check_nesting(events)
    assert {event["pid"] for event in events} == {0, 1}
    ends = {rank: max(e["ts"] + e["dur"] for e in events if e["pid"] == rank) for rank in (0, 1)}
    starts = {rank: min(e["ts"] for e in events if e["pid"] == rank) for rank in (0, 1)}
    assert ends[0] < starts[1]  # one clock: the second ran after the first
    assert main(["trace", "-o", str(tmp_path / "all.json"), files[0], files[0]]) == 1
    assert "has rank 0, which another file has too" in capsys.readouterr().err
    (tmp_path / "other.json").write_text("{}")
    assert main(["trace", "-o", str(tmp_path / "all.json"), str(tmp_path / "other.json")]) == 1
    assert "is no trace that gccomm wrote" in capsys.readouterr().err


def test_a_variable_that_names_no_folder(tmp_path: Path) -> None:
    done = run_script(tmp_path, "no/t.json", 0)
    assert done.returncode == 0
    assert "RuntimeWarning: GCCOMM_TRACE=no/t.json: there is no folder" in done.stderr
