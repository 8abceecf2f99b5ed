"""GCCOMM_NUM_THREADS: several threads share the blocks of a kernel, and write the same words."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gccomm import kernels

SCRIPT = """
import os, sys, zlib
import numpy as np
import gccomm
from gccomm import kernels
from gccomm.testing import simulate

def digest(tree):
    return [zlib.crc32(np.asarray(tree[key]).tobytes()) for key in sorted(tree)]

shapes = [(700, 1000), (300_001,), (2, 1023), (64 * 1024,)]
trees = [
    {str(s): np.random.default_rng([rank, *s]).standard_normal(s, np.float32) for s in shapes}
    for rank in range(4)
]
trees[1]["(2, 1023)"][0, 3] = 1e-42
trees[2]["(300001,)"][200_000] = np.nan
print(kernels.threads())
for codec in ("uniform:wire_bits=5", "rotated:wire_bits=8,headroom=checked", "rotated", "thc", "qsgd-mn"):
    for steps in (1, 3):
        ys, _ = simulate(trees, codec, steps=steps)
        print(codec, steps, digest(ys[0]), digest(ys[3]))
if os.fork() == 0:
    print(digest(simulate(trees, "uniform")[0][0]), flush=True)
    os._exit(0)
_, status = os.wait()
sys.exit(status)
"""


def run(threads: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GCCOMM_NUM_THREADS": threads}
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", SCRIPT]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)


def test_words_do_not_depend_on_threads() -> None:
    alone, shared = run("1"), run("3")
    assert alone.returncode == 0, alone.stderr
    assert shared.returncode == 0, shared.stderr
    first, *lines = alone.stdout.splitlines()
    assert first == "1"
    assert len(lines) == 11
    assert shared.stdout.splitlines() == ["3", *lines]


def test_one_thread_unless_asked() -> None:
    assert kernels.threads() == int(os.environ.get("GCCOMM_NUM_THREADS", "1"))


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "3 ", "257", "99999999999"])
def test_other_texts(text: str) -> None:
    done = run(text)
    assert done.returncode != 0
    assert f'GCCOMM_NUM_THREADS must be a number of threads from 1 to 256; got "{text}"' in done.stderr
