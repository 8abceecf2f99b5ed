"""Words in a device's memory, in the place of NumPy's arrays of them.

Kernels take their addresses and back ends reduce them, in the order of the device's queue, so that the host
waits for neither. Whatever else is asked of them is done with a copy on the host, and waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from numpy.lib.mixins import NDArrayOperatorsMixin

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gccomm.flow import Board

__all__ = ["DeviceWords"]


class DeviceWords(NDArrayOperatorsMixin):
    """Flat numbers in the memory of a board's device.

    Attributes
    ----------
    address, size : int
        Of the first number, and how many there are.
    dtype : numpy.dtype
        Of one.
    """

    __slots__ = ("_board", "_owner", "address", "dtype", "size")
    ndim = 1

    def __init__(self, address: int, size: int, dtype: np.dtype[Any], board: Board, owner: Any) -> None:
        self.address, self.size, self.dtype = address, size, dtype
        self._board, self._owner = board, owner

    @classmethod
    def empty(cls, size: int, dtype: Any, board: Board) -> DeviceWords:
        """Return memory of no known content."""
        of = np.dtype(dtype)
        memory = board.queue.empty(size * of.itemsize, np.uint8)
        return cls(memory.address, size, of, board, memory.owner)

    @property
    def stream(self) -> int:
        """Handle of the stream in whose order they are."""
        return self._board.queue.stream

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.size * self.dtype.itemsize

    @property
    def shape(self) -> tuple[int]:
        """(size,)."""
        return (self.size,)

    def __len__(self) -> int:
        return self.size

    def view(self, dtype: Any) -> DeviceWords:
        """Return the same memory as numbers of another dtype."""
        to = np.dtype(dtype)
        return DeviceWords(self.address, self.nbytes // to.itemsize, to, self._board, self._owner)

    def host(self) -> npt.NDArray[Any]:
        """Return a copy on the host, once all before it is done; errors are those of `Board.wait`."""
        found = np.empty(self.size, self.dtype)
        self._board.queue.download(found.view(np.uint8), self.address)
        self._board.wait()
        return found

    def __getitem__(self, where: Any) -> Any:
        if isinstance(where, slice):
            lo, hi, step = where.indices(self.size)
            if step == 1:
                address = self.address + lo * self.dtype.itemsize
                return DeviceWords(address, max(hi - lo, 0), self.dtype, self._board, self._owner)
        return self.host()[where]

    def __setitem__(self, where: Any, value: Any) -> None:
        if not isinstance(where, slice):
            place = range(self.size)[where]
            where = slice(place, place + 1)
        part = self[where]
        if not isinstance(part, DeviceWords):
            raise TypeError(f"only consecutive words of a device can be written, not [{where!r}]")
        if isinstance(value, DeviceWords):
            self._board.copy(part, value)
        elif part.nbytes:
            given = np.broadcast_to(np.asarray(value).astype(self.dtype, copy=False), part.shape)
            self._board.queue.upload(part.address, np.ascontiguousarray(given).view(np.uint8))
            self._board.queue.finish(wait=False)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.host())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("memory of a device cannot be an array of the host without a copy")
        return self.host() if dtype is None else self.host().astype(dtype, copy=False)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **how: Any) -> Any:
        out, given = how.pop("out", None), [_on_host(x) for x in inputs]
        if out is None or not isinstance(out[0], DeviceWords):
            return getattr(ufunc, method)(*given, **how, **({} if out is None else {"out": out}))
        out[0][:] = getattr(ufunc, method)(*given, **how)
        return out[0]

    def __array_function__(self, function: Any, types: Any, args: Any, how: Any) -> Any:
        del types
        if function is np.copyto and isinstance(args[0], DeviceWords):
            args[0][:] = args[1]
            return None
        if isinstance(how.get("out"), DeviceWords):
            how["out"][:] = function(*map(_on_host, args), **{k: v for k, v in how.items() if k != "out"})
            return how["out"]
        return function(*map(_on_host, args), **{k: _on_host(v) for k, v in how.items()})

    def __getattr__(self, name: str) -> Any:
        """Return a method of the copy on the host, such as ``astype``, ``copy`` or ``any``."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.host(), name)

    def __repr__(self) -> str:
        return f"<{self.size} {self.dtype} on {self._board.queue.device}>"


def _on_host(x: Any) -> Any:
    """Return an argument of NumPy's with words of devices as arrays."""
    if isinstance(x, DeviceWords):
        return x.host()
    return type(x)(map(_on_host, x)) if type(x) in (list, tuple) else x
