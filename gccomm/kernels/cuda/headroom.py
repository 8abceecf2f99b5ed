"""Checked headroom in a device's memory: what the CPU's kernels do, bit for bit.

All arrays but tables, ratios and the starts of spans lie in the memory of the device; nothing waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gccomm.kernels.cuda import THREADS
from gccomm.kernels.cuda.device import Launcher

__all__ = ["share", "span_checks", "steps"]


def share(launcher: Launcher, table: Any, own: int, energy: int, scales: int, n: int, out: int) -> None:
    """Write this rank's energies relative to the agreed maxima.

    Parameters
    ----------
    launcher : Launcher
        The device.
    table : array of gccomm.kernels.table.SEGMENT
        Segments of the blocks.
    own, energy : int
        Addresses of this rank's maxima, and of its energies relative to these; uint32, one a block.
    scales : int
        Address of the agreed maxima.
    n : int
        Number of ranks.
    out : int
        Where the words go.
    """
    count = int(table["nblocks"].sum())
    where = np.uint64(own), np.uint64(energy), np.uint64(scales)
    args = [*where, np.float64(2 / n), np.float64(2**31 // n), np.uint64(out)]
    _run(launcher, "gccomm_share", count, [*_table(launcher, table), np.int64(count), *args])


def steps(
    launcher: Launcher,
    table: Any,
    scales: int,
    energies: int,
    ratios: npt.NDArray[np.float64],
    sizes: Sequence[float],
    out: int,
) -> None:
    """Write each block's step over its maximum.

    Parameters
    ----------
    scales, energies : int
        Addresses of the agreed maxima, and of the sums of all ranks' energies, 0 where there are none.
    ratios : array of float64
        c of each segment's key; of the host.
    sizes : sequence of float
        A :class:`gccomm.codecs.headroom.Sizes`.
    out : int
        Where the steps go, float32.
    """
    count = int(table["nblocks"].sum())
    where = np.uint64(scales), np.uint64(energies), _sent(launcher, ratios)
    args = [*where, *map(np.float64, sizes), np.uint64(out)]
    _run(launcher, "gccomm_steps", count, [*_table(launcher, table), np.int64(count), *args])


def span_checks(
    launcher: Launcher, check: int, starts: npt.NDArray[np.int64], blocks: int, expected: int, out: int
) -> None:
    """Add up check words by span.

    Parameters
    ----------
    check : int
        Address of two words a block.
    starts : array of int64
        First block of every span; of the host.
    blocks : int
        Number of blocks.
    expected : int
        Address of two words a span that the sums are compared with, or 0.
    out : int
        Where the sums go, two a span; with ``expected``, 1 for a span whose sums differ from it, else 0.
    """
    counts = np.int64(len(starts)), np.int64(blocks)
    args = [np.uint64(check), _sent(launcher, starts), *counts, np.uint64(expected), np.uint64(out)]
    _run(launcher, "gccomm_span_checks", len(starts), args)


def _table(launcher: Launcher, table: Any) -> Sequence[np.generic]:
    return _sent(launcher, table), np.int64(len(table))


def _sent(launcher: Launcher, array: npt.NDArray[Any]) -> np.uint64:
    """Return where the device has an array of the host's, until the call ends."""
    there = launcher.take(array.nbytes)
    launcher.upload(there, np.ascontiguousarray(array).view(np.uint8))
    return np.uint64(there)


def _run(launcher: Launcher, name: str, threads: int, args: Sequence[np.generic]) -> None:
    try:
        if threads:
            launcher.launch(name, -(-threads // THREADS), list(args))
    finally:
        launcher.finish(wait=False)
