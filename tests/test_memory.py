"""Memory of calls: bounded besides results and residuals, and not growing with the steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
import gccomm, memory
comm = gccomm.init("local")
found = {work}
print(json.dumps(found))
"""
TREE = 200 << 20


def in_a_process(work: str) -> Any:
    """Run `work` where nothing else has taken memory before."""
    argv = [sys.executable, "-c", PROGRAM.format(work=work), str(BENCHMARKS)]
    environ = {**os.environ, "GCCOMM_TRACE": ""}
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("bits", [4, 8])
def test_peak_of_lane_codecs(bits: int) -> None:
    """Beside results and residuals a call takes twice its wire words and 64 MiB at most."""
    wanted = f"wire_bits={bits}"
    work = f"[memory.peak(c, {TREE}, comm) for c in memory.CODECS if {wanted!r} in c]"
    rows = in_a_process(work)
    assert {row["codec"].partition(":")[0] for row in rows} >= {"uniform", "rotated", "thc", "intsgd"}
    for row in rows:
        assert row["bound_bytes"] == TREE * bits // 32 * 2 + (64 << 20)
        assert row["extra_bytes"] <= row["bound_bytes"], row
        results_and_residuals = 3 * TREE  # those of two steps
        assert row["pool_high_water_bytes"] <= results_and_residuals + row["bound_bytes"], row


GREEDY = """(
    kept := [],
    uniform := type(gccomm.get_codec("uniform")),
    steps := uniform.steps,
    keep := lambda x: kept.append(bytearray(b"1") * (4 * x.coordinates)),
    setattr(uniform, "steps", lambda self, x, state, ctx: (keep(x), steps(self, x, state, ctx))[1]),
    memory.peak("uniform:wire_bits=4", TREE, comm),
)[-1]"""


def test_a_peak_is_seen() -> None:
    """A codec that keeps a copy of everything is above the bound: the other test can fail."""
    row = in_a_process(GREEDY.replace("TREE", str(TREE)))
    assert row["extra_bytes"] > row["bound_bytes"]


def test_no_growth_over_steps() -> None:
    found = in_a_process("memory.growth(600, comm)")
    assert found["tensors"] == 161
    assert found["spread_bytes"] <= 5 << 20
    assert min(found["resident_bytes"]) > 10 << 20
