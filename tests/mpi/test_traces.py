"""Timelines over MPI: one file of all ranks, on one clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gccomm


def test_all_ranks_in_one_file(comm: Any, world: Any, request: pytest.FixtureRequest) -> None:
    folder = str(request.getfixturevalue("tmp_path")) if comm.rank == 0 else ""
    path = Path(world.bcast(folder)) / "trace.json"
    x = np.random.default_rng(comm.rank).standard_normal(3 << 20, np.float32)
    with gccomm.tracing(path, comm=comm):
        for _ in range(3):
            comm.compressed_allreduce(x, codec="uniform:wire_bits=4")
    stats = world.gather(comm.stats)  # the exchange of timelines is no reduction
    if comm.rank:
        return
    trace = json.loads(path.read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    calls = {r: [e for e in events if e["pid"] == r and e["cat"] == "call"] for r in range(comm.size)}
    assert all(len(calls[rank]) == 3 for rank in calls)
    assert set(trace["otherData"]["shifts_us"].values()) == {0.0}  # the clock of one machine
    for number in range(3):  # no rank ends a call before all ranks have begun it
        same = [calls[rank][number] for rank in calls]
        assert min(e["ts"] + e["dur"] for e in same) > max(e["ts"] for e in same)
    for rank, found in enumerate(stats):
        low, high = calls[rank][-1]["ts"], calls[rank][-1]["ts"] + calls[rank][-1]["dur"]
        mine = [e for e in events if e["pid"] == rank and e["tid"] == 0 and low <= e["ts"] <= high]
        seconds = {"encode": 0.0, "wire": 0.0, "decode": 0.0}
        for event in mine:
            for kind, spent in shares(event).items():
                seconds[kind] += spent
        expected = {"encode": found.encode_s, "wire": found.wire_s, "decode": found.decode_s}
        assert seconds == pytest.approx(expected, rel=1e-6, abs=1e-6)


def shares(event: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of each phase in an event: of all three where chunks are summed."""
    seconds = event["dur"] / 1e6
    if event["cat"] == "lanes":
        encode_s, decode_s = event["args"]["encode_s"], event["args"]["decode_s"]
        return {"encode": encode_s, "wire": seconds - encode_s - decode_s, "decode": decode_s}
    return {event["cat"]: seconds} if event["cat"] in ("encode", "wire", "decode") else {}


def test_a_folder_that_rank_0_lacks(comm: Any) -> None:
    path = Path("no", "such", "folder", "trace.json")
    with pytest.raises(ValueError, match="rank 0: there is no folder"), gccomm.tracing(path, comm=comm):
        raise AssertionError
    comm.barrier()
