"""What the times of `gccomm bench` are compared with in its figure: links' rates, or a plain copy."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gccomm_launch.bench_timing import Stopper, interleaved
from gccomm_launch.netlab import Lab

if TYPE_CHECKING:
    from gccomm_launch.bench_report import Row

__all__ = ["bound_row", "bound_rows", "link_bounds"]

COPY = "one copy of the array"


def bound_rows(
    rows: Sequence[Row], ranks: int, iters: int, stopper: Stopper, mpi: Any
) -> list[dict[str, Any]]:
    """Return the bounds of one size's rows; collective.

    Over links of the network lab: what float32 and each number of wire bits take at least. On one host,
    where nothing travels: the time in which all ranks copy the array, measured here.
    """
    names = mpi.allgather(socket.gethostname())
    lab = Lab.from_environ(os.environ)
    if len(set(names)) > 1 and lab is not None and lab.measured:
        hosts = [int(re.sub(r"\D", "", name)) for name in names]
        return link_bounds(rows, ranks, lab, hosts)
    source = np.ones(rows[0].size, np.uint8)
    kept = np.zeros_like(source)
    seconds = interleaved([lambda: np.copyto(kept, source)], 1, iters, stopper, mpi)
    return [bound_row(COPY, rows[0].size, float(np.median(seconds)), ranks)]


def link_bounds(rows: Sequence[Row], ranks: int, lab: Lab, hosts: Sequence[int]) -> list[dict[str, Any]]:
    """Return what float32, 16, 8 and 4 wire bits a coordinate take at least over the lab's links."""
    size, count = rows[0].size, rows[0].count
    return [
        bound_row(f"bound of {bits} bits", size, lab.bound(count * bits // 8, hosts), ranks)
        for bits in (32, 16, 8, 4)
    ]


def bound_row(name: str, size: int, seconds: float, ranks: int) -> dict[str, Any]:
    """Return a point of a bound's line."""
    busbw = size / seconds / 1e9 * 2 * (ranks - 1) / ranks
    return {"name": name, "size": size, "time_us": seconds * 1e6, "busbw": busbw}
