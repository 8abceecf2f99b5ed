"""All-reduces of other libraries, on the same ranks in the same run: gloo, PyTorch's DDP hooks, mpi4jax.

Each is optional. One that cannot be had on every rank is listed with the reason.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from time import monotonic, sleep
from typing import Any

import numpy as np
from mpi4py import MPI

from gccomm.layout import BLOCK
from gccomm_launch.bench_ways import Array, Way

__all__ = ["GLOO", "HOOKS", "MPI4JAX", "POWERSGD_RANK", "Peers", "open_peers"]

POWERSGD_RANK = 4  # as gccomm's own codec has it
GLOO = ("gloo", "gloo bfloat16")
HOOKS = ("DDP fp16_compress", f"DDP PowerSGD rank {POWERSGD_RANK}")
MPI4JAX = "mpi4jax"
LET_GO_S = 5
TIMEOUT = timedelta(seconds=60)  # of gloo's first meeting


class Peers:
    """The libraries that all ranks have.

    Attributes
    ----------
    unavailable : dict of str to str
        Why, by the name of a way that cannot be had.
    """

    def __init__(self, mpi: MPI.Intracomm) -> None:
        self._mpi = mpi
        self.unavailable: dict[str, str] = {}
        self.gloo = self._have(GLOO + HOOKS, self._open_gloo)
        self.mpi4jax = self._have((MPI4JAX,), lambda: import_module("mpi4jax"))

    def _have(self, names: tuple[str, ...], prepare: Callable[[], Any]) -> bool:
        """Prepare a library on all ranks, or on none of them."""
        library = "torch" if names[0] in GLOO else names[0]
        reason = "" if find_spec(library) is not None else f"{library} is not installed"
        if not any(reasons := self._mpi.allgather(reason)):
            try:
                prepare()
            except Exception as error:  # whatever a library of other people raises where it cannot be used
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
            reasons = self._mpi.allgather(reason)
        found = next(((rank, text) for rank, text in enumerate(reasons) if text), None)
        if found is not None:
            self.unavailable |= dict.fromkeys(names, f"{found[1]} (rank {found[0]})")
        return found is None

    def _open_gloo(self) -> None:
        """Join the ranks in a process group of torch.distributed; where they meet, rank 0 says by MPI."""
        import torch.distributed as dist

        if dist.is_initialized():
            raise RuntimeError("this program has a process group of its own already")
        host = os.environ.get("MASTER_ADDR", socket.gethostname())
        store: Any = None
        problem, port = "", 0
        if self._mpi.rank == 0:
            try:  # port 0: one that is free
                store = dist.TCPStore(host, 0, None, True, TIMEOUT, False)
                port = store.port
            except Exception as error:
                problem = f"no store at {host}: {error}"
        host, port, problem = self._mpi.bcast((host, port, problem))
        if problem:
            raise OSError(problem)
        if store is None:
            store = dist.TCPStore(host, port, None, False, TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=self._mpi.rank, world_size=self._mpi.size)

    def close(self) -> None:
        """Leave the process group; collective.

        A callback on a thread of gloo's may hold the group for a moment. If that let go of it last, the group
        would wait there for that very thread, and the process would abort.
        """
        if self.gloo:
            import torch.distributed as dist

            group = dist.group.WORLD
            dist.destroy_process_group()
            end = monotonic() + LET_GO_S
            while sys.getrefcount(group) > 2 and monotonic() < end:  # 2: here, and the argument
                sleep(1e-3)

    def ways(self, x: Array, op: str = "sum") -> tuple[list[Way], dict[str, str]]:
        """Return the ways to reduce an array, and why libraries that are there cannot."""
        left_out: dict[str, str] = {}
        made: list[Way] = []
        if self.gloo:
            made += [_gloo(name, x, op) for name in GLOO]
            made.append(_hook(HOOKS[0], x, op))
            if x.dtype == np.float16:
                left_out[HOOKS[1]] = "its matrix products need float32 or float64"
            else:
                made.append(_hook(HOOKS[1], x, op))
        if self.mpi4jax:
            if x.dtype == np.float32:
                made.append(_mpi4jax(x, self._mpi, op))
            else:
                left_out[MPI4JAX] = f"JAX has no {x.dtype} that MPI sums, as it is set up here"
        return made, left_out


@contextmanager
def open_peers(mpi: MPI.Intracomm, wanted: bool = True) -> Iterator[Peers | None]:
    """Give the peers of these ranks; None where they are not wanted. Collective."""
    peers = Peers(mpi) if wanted else None
    try:
        yield peers
    finally:
        if peers is not None:
            peers.close()


def _gloo(name: str, x: Array, op: str) -> Way:
    """Return gloo's all-reduce in the array's own type or in bfloat16, conversions included."""
    import torch
    import torch.distributed as dist

    source = torch.from_numpy(x)
    dtype = torch.bfloat16 if name.endswith("bfloat16") else source.dtype

    def call() -> Array:
        total = source.to(dtype, copy=True)
        dist.all_reduce(total)
        if op == "mean":
            total /= dist.get_world_size()
        result: Array = total.to(source.dtype).numpy()
        return result

    wire_bytes: int = x.size * dtype.itemsize
    return Way(name, "gloo", call, lambda: wire_bytes)


class _Bucket:
    """What a hook of DDP's sees of a bucket: flat memory and the gradient in it."""

    def __init__(self, buffer: Any, shape: tuple[int, ...]) -> None:
        self._buffer, self._shape = buffer, shape

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def buffer(self) -> Any:
        return self._buffer

    def gradients(self) -> list[Any]:
        return [self._buffer.view(self._shape)]


def _hook(name: str, x: Array, op: str) -> Way:
    """Return a communication hook of DDP's on a bucket that holds the array.

    The copy into the bucket, which DDP makes, is part of a call. Hooks give the mean; for a sum the input is
    multiplied by n in that copy. PowerSGD sees a matrix where the array is whole blocks, as the codec does.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    source, n = torch.from_numpy(x), dist.get_world_size()
    bucket = _Bucket(torch.empty_like(source), (-1, BLOCK) if x.size % BLOCK == 0 else (-1,))
    low_rank = name == HOOKS[1]
    state: Any = None
    if low_rank:
        state = powerSGD_hook.PowerSGDState(None, POWERSGD_RANK, start_powerSGD_iter=2)
    hook = powerSGD_hook.powerSGD_hook if low_rank else default_hooks.fp16_compress_hook

    def call() -> Array:
        torch.mul(source, n if op == "sum" else 1, out=bucket.buffer())
        result: Array = hook(state, bucket).wait().numpy()
        return result

    if not low_rank:
        return Way(name, "gloo", call, lambda: 2 * x.size)
    for _ in range(2):  # the hook sends these without compression
        call()

    def wire_bytes() -> int:
        sent = state.total_numel_after_compression / max(1, state.iter - 2)
        return round(float(sent) * x.itemsize)

    return Way(name, "peer", call, wire_bytes)


def _mpi4jax(x: Array, mpi: MPI.Intracomm, op: str) -> Way:
    """Return mpi4jax's all-reduce under jit; the array is JAX's before the call."""
    import jax
    import mpi4jax

    source = jax.numpy.asarray(x)

    def reduce(values: Any) -> Any:
        found = mpi4jax.allreduce(values, op=MPI.SUM, comm=mpi)
        total = found[0] if isinstance(found, tuple) else found  # with a token in older versions
        return total / mpi.size if op == "mean" else total

    compiled = jax.jit(reduce)
    return Way(MPI4JAX, "mpi", lambda: np.asarray(compiled(source).block_until_ready()), lambda: x.nbytes)
