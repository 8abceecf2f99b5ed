"""Memory of CUDA devices through an MPI library that takes it, where the user says that his does."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from gccomm.backends import DeviceBuffer
from gccomm.errors import BackendError
from gccomm_mpi.operators import Operator

if TYPE_CHECKING:
    from gccomm_mpi.channel import Channel

__all__ = ["cuda_support", "reduce_by_host", "reduce_on_device", "require_cuda"]

_MOST_BYTES = 1 << 30  # of one call of MPI's, which counts in C ints


def cuda_support() -> bool | None:
    """Return whether the MPI library says that it takes device memory; None where it does not say."""
    query = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    if query is None:
        return None
    query.restype = ctypes.c_int
    return bool(query())


def require_cuda() -> None:
    """Raise BackendError where the MPI library says that it does not take device memory."""
    if cuda_support() is False:
        vendor, version = MPI.get_vendor()
        msg = (
            f"GCCOMM_MPI_CUDA=1, but {vendor} {'.'.join(map(str, version))} says that it is not CUDA-aware "
            "(MPIX_Query_cuda_support): unset the variable, and words are staged through the host; or use an "
            "MPI library that was built, and is set, to take device memory"
        )
        raise BackendError(msg)


def reduce_on_device(
    channel: Channel, name: str, send: DeviceBuffer, recv: DeviceBuffer, operator: Operator
) -> None:
    """Reduce buffers in a device's memory by MPI's own all-reduce, after what their streams have to do.

    By the blocking one: Open MPI's MPI_Iallreduce reads device memory as if it were the host's. What other
    ranks are waited for, with a limit, is a barrier before it. MPI's own operations alone: those of gccomm's
    are functions of the host's.
    """
    from gccomm.kernels.cuda.on_cupy import device_at, synchronize

    item = operator.datatype.Get_size()
    step = _MOST_BYTES // item
    with device_at(recv.address):
        for stream in {send.stream, recv.stream}:
            synchronize(stream)
        channel.complete(channel.comm.Ibarrier(), name)
        for lo in range(0, recv.size, step):
            count = min(step, recv.size - lo)
            target = [_memory(recv.address + lo * item, count * item), count, operator.datatype]
            source: Any = MPI.IN_PLACE
            if send.address != recv.address:
                source = [_memory(send.address + lo * item, count * item), count, operator.datatype]
            channel.comm.Allreduce(source, target, operator.op)


def reduce_by_host(send: DeviceBuffer, recv: DeviceBuffer, operator: Operator, reduce: Any) -> None:
    """Reduce buffers by a function on two arrays of the host, to which and from which they are copied."""
    from gccomm.kernels.cuda.on_cupy import copy_from, copy_to, device_at

    words = np.empty(recv.size, np.dtype(f"u{operator.datatype.Get_size()}"))
    with device_at(recv.address):
        copy_from(words, send.address, send.stream)
        reduce(words, words)
        copy_to(recv.address, words, recv.stream)


def _memory(address: int, nbytes: int) -> Any:
    return MPI.buffer.fromaddress(address, nbytes)
