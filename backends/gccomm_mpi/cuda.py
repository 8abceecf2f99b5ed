"""The operations of a group of MPI processes whose library takes memory of CUDA devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from gccomm.backends import DeviceBuffer, FloatName, Words
from gccomm.errors import BackendError
from gccomm_mpi.backend import MpiBackend
from gccomm_mpi.device import reduce_by_host, reduce_on_device
from gccomm_mpi.operators import MAXIMUM, SUM, Operator, sum_of

__all__ = ["CudaBackend"]

Array = npt.NDArray[Any]


class CudaBackend(MpiBackend):
    """A handle with ``GCCOMM_MPI_CUDA=1``: reductions also take `DeviceBuffer` objects.

    They wait for the buffer's stream first, and return when they are complete. 16-bit floats, which MPI has
    no operation for, go by way of the host.
    """

    @property
    def device(self) -> str:
        """The device that is CUDA's current one in this thread, such as "cuda:0"."""
        from gccomm.kernels.cuda.on_cupy import current_device

        return f"cuda:{current_device()}"

    @property
    def first_words(self) -> int:
        """0: MPI's own reductions, which take the memory of devices, want as many words of all ranks."""
        return 0

    def takes_device(self, device: str, /) -> bool:
        """Return whether reductions take buffers of a device."""
        return device.startswith("cuda:")

    def require_whole(self) -> None:
        """Raise BackendError where the communicator is broken."""
        if self._channel.broken is not None:
            raise BackendError(f"this communicator is broken: {self._channel.broken}")

    def oversee(self, look: Callable[[], BaseException | None], doom: Callable[[], None]) -> None:
        """Have ``look()`` called before each reduction on a device, which raises the error that it returns,
        after ``doom()``.
        """
        self._channel.overseers.append((look, doom))

    def maximum(self, words: Words | DeviceBuffer, /) -> None:
        """Replace each word by its maximum over the ranks, as unsigned numbers."""
        if isinstance(words, np.ndarray):
            super().maximum(words)
        else:
            self._reduce_there("maximum", words, words, MAXIMUM)

    def sum_words(self, words: Words | DeviceBuffer, /) -> None:
        """Replace each word by its sum over the ranks, mod 2^32."""
        if isinstance(words, np.ndarray):
            super().sum_words(words)
        else:
            self._reduce_there("sum", words, words, SUM)

    def sum_floats(self, send: Array | DeviceBuffer, recv: Array | DeviceBuffer, dtype: FloatName, /) -> None:
        """Write the sum of `send` over the ranks to `recv`; its order depends on size and library.

        Raises
        ------
        ValueError
            `dtype` is no float format.
        """
        if isinstance(send, np.ndarray):
            assert isinstance(recv, np.ndarray)
            super().sum_floats(send, recv, dtype)
        else:
            assert not isinstance(recv, np.ndarray)
            self._reduce_there(f"{dtype} sum", send, recv, sum_of(dtype))

    def begin(self, kind: str, send: Any, recv: Any, /) -> Any:
        """Begin a reduction; of buffers on a device it is complete then."""
        if isinstance(recv, np.ndarray):
            return super().begin(kind, send, recv)
        if kind == "maximum":
            self.maximum(recv)
        elif kind == "words":
            self.sum_words(recv)
        else:
            self.sum_floats(send, recv, kind)  # type: ignore[arg-type]
        return None

    def _reduce_there(self, name: str, send: DeviceBuffer, recv: DeviceBuffer, operator: Operator) -> None:
        for look, doom in self._channel.overseers:
            error = look()
            if error is not None:
                doom()
                raise error
        if operator.kind in ("bfloat16", "float16"):
            reduce_by_host(send, recv, operator, lambda a, b: self._reduce(name, a, b, operator))
            return
        with self._operation(name, (send, recv)) as channel:
            reduce_on_device(channel, name, send, recv, operator)
