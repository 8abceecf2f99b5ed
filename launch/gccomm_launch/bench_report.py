"""What `gccomm bench` found: rows, comparisons, and how they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gccomm_launch.bench_ways import KEPT, Way

__all__ = ["HEADER", "Comparison", "Row", "compare", "machine", "make_row"]

HEADER = (
    f"{'size(B)':>11} {'count':>10}  {'codec':<36} {'wire_bytes':>11} {'time(us)':>10} {'algbw(GB/s)':>11} "
    f"{'busbw(GB/s)':>11} {'vNMSE':>9}"
)


@dataclass(frozen=True)
class Row:
    """One way at one size.

    Attributes
    ----------
    size, count : int
        Bytes of the array uncompressed (float32, or float64 for float64), and coordinates.
    codec, kind : str
        Name and kind of the :class:`~gccomm_launch.bench_ways.Way`.
    wire_bytes : int
        Payload that a rank hands to MPI in one call.
    time_us, min_us, quartiles_us : float, float, list of float
        Median, least, and first and third quartile over the calls of the slowest rank's time.
    algbw, busbw : float
        size / time, and that times 2(n-1)/n, in GB/s (1e9): nccl-tests' definitions on the uncompressed size.
    vnmse : float
        ||error||^2 / ||sum||^2.
    """

    size: int
    count: int
    codec: str
    kind: str
    wire_bytes: int
    time_us: float
    min_us: float
    quartiles_us: list[float]
    algbw: float
    busbw: float
    vnmse: float

    def line(self) -> str:
        """Return the row under :data:`HEADER`."""
        return (
            f"{self.size:>11} {self.count:>10}  {self.codec:<36} {self.wire_bytes:>11} {self.time_us:>10.1f} "
            f"{self.algbw:>11.3f} {self.busbw:>11.3f} {self.vnmse:>9.2e}"
        )


@dataclass(frozen=True)
class Comparison:
    """The codecs against the uncompressed ways at one size; ratios are those ways' times over the codec's.

    Attributes
    ----------
    size : int
        As of :class:`Row`.
    best_uncompressed : str
        The fastest of MPI's ways, raw, bf16 and peers' floats with a new result each call, as gccomm's codecs
        give.
    best_kept_out : str
        The fastest of all of them, those that write into a kept array included.
    best_full_precision : str
        The fastest of them that sends full precision.
    speedup : dict
        By codec, raw and bf16: ratios to "best_uncompressed", "best_kept_out", "best_full_precision" and
        "one_call", which is MPI_Allreduce with a new result array.
    """

    size: int
    best_uncompressed: str
    best_kept_out: str
    best_full_precision: str
    speedup: dict[str, dict[str, float]]

    def lines(self) -> list[str]:
        """Return what is printed below the rows."""
        lines = [f"# best uncompressed way, new result each call: {self.best_uncompressed}"]
        if self.best_kept_out != self.best_uncompressed:
            lines.append(f"# best of all, into a kept array: {self.best_kept_out}")
        if self.best_full_precision != self.best_uncompressed:
            lines.append(f"# best of them in full precision: {self.best_full_precision}")
        lines += [
            f"# {name}: {s['best_uncompressed']:.2f} times as fast as the best uncompressed way "
            f"({s['best_kept_out']:.2f} of all), {s['one_call']:.2f} times as fast as one MPI_Allreduce"
            for name, s in self.speedup.items()
        ]
        return lines


def make_row(
    way: Way, seconds: npt.NDArray[np.float64], size: int, count: int, ranks: int, vnmse: float
) -> Row:
    """Return the row of a way from the times of its calls, shape (iters,), in seconds."""
    time = float(np.median(seconds))
    low, high = (float(q) * 1e6 for q in np.quantile(seconds, (0.25, 0.75)))
    algbw = size / time / 1e9
    return Row(
        size=size,
        count=count,
        codec=way.name,
        kind=way.kind,
        wire_bytes=way.wire_bytes(),
        time_us=time * 1e6,
        min_us=float(seconds.min()) * 1e6,
        quartiles_us=[low, high],
        algbw=algbw,
        busbw=algbw * 2 * (ranks - 1) / ranks,
        vnmse=vnmse,
    )


def compare(rows: Sequence[Row]) -> Comparison:
    """Compare the rows of one size; the first is MPI_Allreduce in one call.

    Raises
    ------
    ValueError
        It is not.
    """
    one_call = rows[0]
    if one_call.kind != "mpi":
        message = f"the first row must be MPI's own all-reduce; got {one_call.codec!r}"
        raise ValueError(message)
    plain = [row for row in rows if row.kind in ("mpi", "float", "gloo")]
    best = min((row for row in plain if not row.codec.endswith(KEPT)), key=lambda row: row.time_us)
    kept = min(plain, key=lambda row: row.time_us)
    full = min((row for row in plain if row.wire_bytes >= row.size), key=lambda row: row.time_us)
    speedup = {
        row.codec: {
            "best_uncompressed": best.time_us / row.time_us,
            "best_kept_out": kept.time_us / row.time_us,
            "best_full_precision": full.time_us / row.time_us,
            "one_call": one_call.time_us / row.time_us,
        }
        for row in rows
        if row.kind in ("float", "codec")
    }
    return Comparison(one_call.size, best.codec, kept.codec, full.codec, speedup)


def machine() -> dict[str, Any]:
    """Return where and with what a measurement is made, ready for JSON; MPI must be in use."""
    from mpi4py import MPI

    from gccomm_launch import machine as without_mpi

    vendor, numbers = MPI.get_vendor()
    found = without_mpi.machine(("gccomm", "numpy", "mpi4py"))
    return {**found, "mpi": f"{vendor} {'.'.join(map(str, numbers))}"}
