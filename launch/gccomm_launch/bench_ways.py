"""The ways to all-reduce one array that `gccomm bench` compares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

import gccomm
from gccomm.layout import BLOCK

__all__ = ["KEPT", "PIECES", "Array", "Way", "all_ways", "codec_way", "mpi_ways", "usable_ways"]

Array = npt.NDArray[np.floating[Any]]

# Bytes of a piece; one of these is the best on most machines.
KEPT = " (kept out)"  # suffix of the ways that write into an array of earlier calls
PIECES = (256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20)


@dataclass(frozen=True)
class Way:
    """One way to all-reduce an array.

    Attributes
    ----------
    name : str
        What reports call it.
    kind : str
        "mpi": MPI's own reduction of the array; "float": gccomm's float sums (raw, bf16, fp16); "codec": its
        other codecs; "gloo": torch.distributed's floats; "peer": another library's compression.
    call : callable
        Reduces and returns the result; collective.
    wire_bytes : callable
        Payload that this rank handed to MPI in the last call.
    """

    name: str
    kind: Literal["mpi", "float", "codec", "gloo", "peer"]
    call: Callable[[], Array]
    wire_bytes: Callable[[], int]


def all_ways(
    x: Array,
    comm: gccomm.Communicator,
    mpi: MPI.Intracomm,
    codecs: Sequence[str],
    op: str = "sum",
    peers: Sequence[Way] = (),
) -> list[Way]:
    """Return MPI's ways, those of other libraries, gccomm's raw and bf16, and the codecs.

    Parameters
    ----------
    x : array
        This rank's input, shape (count,).
    comm, mpi
        The same ranks as gccomm's and as mpi4py's communicator.
    codecs : sequence of str
        Ids, with options.
    op : str
        "sum" or "mean".
    peers : sequence of Way
        Other libraries' ways.
    """
    floats = [codec_way(name, x, comm, op) for name in ("raw", "bf16")]
    others = [codec_way(name, x, comm, op) for name in dict.fromkeys(codecs) if name not in ("raw", "bf16")]
    return [*mpi_ways(x, mpi, op), *peers, *floats, *others]


def usable_ways(ways: Sequence[Way]) -> tuple[list[Way], dict[str, str]]:
    """Call each way once; collective.

    Returns
    -------
    ways : list of Way
        Those that all ranks can use.
    refused : dict
        Why, of the others: a codec refuses numbers of ranks, the same on all of them.
    """
    usable, refused = [], {}
    for way in ways:
        try:
            way.call()
        except gccomm.NegotiationError as error:
            refused[way.name] = str(error)
        else:
            usable.append(way)
    return usable, refused


def codec_way(name: str, x: Array, comm: gccomm.Communicator, op: str = "sum") -> Way:
    """Return gccomm's all-reduce of `x` with a codec; its results come from gccomm's pool.

    A codec that adapts from step to step runs in a Reducer, others in the function. An array of whole blocks
    is a matrix of them, as low-rank codecs need.
    """
    codec = gccomm.get_codec(name)
    x = x.reshape(-1, BLOCK) if x.size % BLOCK == 0 else x
    if codec.stateful:
        reducer = gccomm.Reducer(codec, comm=comm, op=op)
        tree = {"x": x} if codec.biased else x  # error feedback wants a key

        def step() -> Array:
            found = reducer(tree)
            result: Array = (found["x"] if codec.biased else found).reshape(-1)
            return result

        return Way(name, "codec", step, lambda: reducer.stats.wire_bytes)

    def call() -> Array:
        result: Array = comm.compressed_allreduce(x, op, codec)
        return result.reshape(-1)

    return Way(name, "codec" if codec.lossy else "float", call, lambda: comm.stats.wire_bytes)


def mpi_ways(x: Array, mpi: MPI.Intracomm, op: str = "sum") -> list[Way]:
    """Return MPI_Allreduce in one call and in pieces, each with new result arrays and with a kept one.

    float16 arrays are summed as float32, which they are converted to here: outside of the timed call.
    """
    source = x.astype(np.float32) if x.dtype == np.float16 else x
    kept = np.full_like(source, 0)  # written, so that its pages are mapped
    ways = []
    for piece in [0, *(size for size in PIECES if size < source.nbytes)]:
        name = f"MPI_Allreduce in {_label(piece)}" if piece else "MPI_Allreduce"
        for out, suffix in ((None, ""), (kept, KEPT)):
            call = _allreduce(source, out, mpi, piece, op)
            ways.append(Way(name + suffix, "mpi", call, lambda: source.nbytes))
    return ways


def _label(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def _allreduce(
    source: Array, kept: Array | None, mpi: MPI.Intracomm, piece: int, op: str
) -> Callable[[], Array]:
    """Return a call that reduces pieces of `piece` bytes, 0 for the whole, into `kept` or a new array."""
    datatype = MPI.DOUBLE if source.dtype == np.float64 else MPI.FLOAT
    step = piece // source.itemsize or max(source.size, 1)
    divisor = source.dtype.type(mpi.size) if op == "mean" else None

    def call() -> Array:
        out = np.empty_like(source) if kept is None else kept
        for part, target in _parts(source, out, step):
            mpi.Allreduce((part, datatype), (target, datatype), MPI.SUM)
            if divisor is not None:
                np.divide(target, divisor, out=target)
        return out

    return call


def _parts(source: Array, out: Array, step: int) -> Iterator[tuple[Array, Array]]:
    for low in range(0, source.size, step):
        yield source[low : low + step], out[low : low + step]
