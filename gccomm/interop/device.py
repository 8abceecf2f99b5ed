"""Views of arrays in the memory of CUDA devices: CuPy's, and any object's that names its memory.

Work on a device is done by a :class:`gccomm.kernels.cuda.queue.Queue`, which follows the streams on which
arrays were made: see :mod:`gccomm.interop.order`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import gcd, prod
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gccomm.interop import dlpack
from gccomm.interop.base import (
    BFLOAT16,
    FORMATS,
    Format,
    View,
    describe,
    format_of,
    refuse,
    refuse_dtype,
    rows_of,
)

if TYPE_CHECKING:
    from gccomm.kernels.cuda.queue import DeviceArray, Queue, Strided

__all__ = [
    "Lies",
    "Source",
    "cupy_handler",
    "cupy_out",
    "exported",
    "make_device_out",
    "make_device_view",
    "named_format",
    "placed",
    "queue_for",
    "read_dlpack",
    "to_cupy",
    "view_dlpack",
    "view_interface",
]

_LEGACY_STREAM = 1  # the default stream, in the words of DLPack and __cuda_array_interface__


class Source(NamedTuple):
    """What is to be done before the data of a view can be read or written: follow the current stream of a
    library ("cupy", "torch"; "": nothing is known of one), or one that the object names, then copy. And the
    library whose current stream is to come after results; "" where DLPack sees to it.
    """

    library: str
    stream: int | None
    strided: Strided | None
    results: str


class Lies(NamedTuple):
    """Where elements lie: number of the device, address of the first, shape, and strides in bytes (None: C
    order).
    """

    number: int
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None


def queue_for(x: Any, number: int, remedy: str) -> Queue:
    """Return the queue of a device.

    Raises
    ------
    BufferError
        CuPy is not installed.
    BackendError
        There is no such device.
    """
    from gccomm.kernels.cuda.on_cupy import queue_of

    try:
        return queue_of(number)
    except ImportError as error:
        where = f"{describe(x)} lies in GPU memory (cuda:{number})"
        message = f"{where}: {error}; or move the array to the host first, {remedy}"
        raise BufferError(message) from error


def named_format(name: str | None) -> Format | None:
    """Return the format of a dtype by its name, or None where it cannot be reduced."""
    if name is None:
        return None
    return BFLOAT16 if name == "bfloat16" else FORMATS.get(np.dtype(name))


def _plain(lies: Lies, form: Format) -> bool:
    """Whether elements lie in C order, their numbers aligned."""
    if lies.address % form.storage.itemsize:
        return False
    if lies.strides is None or 0 in lies.shape:
        return True
    step = form.storage.itemsize * form.reals
    for extent, stride in zip(reversed(lies.shape), reversed(lies.strides), strict=True):
        if extent != 1 and stride != step:
            return False
        step *= extent
    return True


def _strided(lies: Lies, item_bytes: int, owner: Any) -> Strided:
    """Return the elements in aligned parts of at most 8 bytes, of which the last axis has an element's."""
    from gccomm.kernels.cuda.queue import Strided

    strides = lies.strides
    if strides is None:
        steps = [item_bytes]
        for extent in reversed(lies.shape[1:]):
            steps.insert(0, steps[0] * extent)
        strides = tuple(steps[: len(lies.shape)])
    unit = gcd(lies.address, item_bytes, 8, *strides)
    shape, strides = (*lies.shape, item_bytes // unit), (*strides, unit)
    return Strided(lies.address, unit, shape, strides, owner)


def make_device_view(
    owner: Any,
    lies: Lies,
    form: Format,
    kind: str,
    rebuild: Callable[[View, Any], Any],
    like: Any,
    queue: Queue,
    library: str = "",
    stream: int | None = None,
    keep: Any = None,
) -> View:
    """Return the view of an object on a device; ``keep`` is what keeps the memory, by default ``owner``."""
    from gccomm.kernels.cuda.queue import DeviceArray

    item = form.storage.itemsize * form.reals
    size = form.reals
    for extent in lies.shape:
        size *= extent
    strided = None
    if _plain(lies, form):
        data = DeviceArray(lies.address, size, form.storage, queue, owner if keep is None else keep)
    else:
        data = queue.empty(size, form.storage)
        strided = _strided(lies, item, owner if keep is None else keep)
    rows, where = rows_of(lies.shape, form), (kind, queue.device, data.address)
    made = View(data, form.dtype, lies.shape, rows, *where, owner, form.user_dtype, rebuild, like)
    results = "cupy" if rebuild is to_cupy else library
    made._source = Source(library, stream, strided, results)
    return made


def make_device_out(
    owner: Any, lies: Lies, form: Format, kind: str, like: Any, queue: Queue, library: str
) -> View:
    """Return the view of an output; one that is no flat memory has a temporary, copied to it at the end."""
    made = make_device_view(owner, lies, form, kind, _fill, like, queue, library)
    if made._source.strided is not None:
        made._target, made._source = made._source.strided, Source(library, None, None, library)
    return made


def _fill(view: View, result: Any) -> Any:
    if result is not view.data:
        view.data[...] = result
    view.commit()
    return view.owner


def placed(view: View, result: Any) -> DeviceArray:
    """Return a result in the memory of the view's device: one that is on the host is copied."""
    from gccomm.kernels.cuda.queue import DeviceArray

    if isinstance(result, DeviceArray):
        return result
    made: DeviceArray = view.data.queue.empty(result.size, result.dtype)
    made[...] = result
    return made


# CuPy


def cupy_handler(kind: type) -> Callable[[Any], View] | None:
    """Return the function that views objects of a CuPy type; None for other types."""
    cupy = sys.modules["cupy"]
    array = getattr(cupy, "ndarray", None)
    if array is None or not issubclass(kind, array):
        return None
    return _view_cupy if kind is array else _refuse_subclass


def _refuse_subclass(x: Any) -> View:
    raise refuse(x, "this subclass of cupy.ndarray may carry more than its elements; pass cupy.asarray(x)")


def _cupy_lies(x: Any) -> tuple[Lies, Format, Queue]:
    form = format_of(x.dtype) if x.dtype.isnative else None  # kernels read this machine's byte order
    if form is None:
        raise refuse_dtype(x, x.dtype)
    number = int(x.device.id)
    queue = queue_for(x, number, "with cupy.asnumpy(x)")
    return Lies(number, int(x.data.ptr), tuple(x.shape), tuple(x.strides)), form, queue


def _view_cupy(x: Any) -> View:
    lies, form, queue = _cupy_lies(x)
    return make_device_view(x, lies, form, "cupy", to_cupy, x.dtype, queue, "cupy")


def to_cupy(view: View, result: Any) -> Any:
    """Return a result as CuPy's array, on the same memory."""
    result = placed(view, result)
    memory = result.address, result.nbytes, view.shape, view._like, result.owner
    return result.queue.ndarray(*memory)


def cupy_out(out: Any) -> View | None:
    """Return the view of an output that is CuPy's, or None.

    Raises
    ------
    BufferError
        Elements share memory with each other.
    """
    cupy = sys.modules.get("cupy")
    if type(out) is not getattr(cupy, "ndarray", None) or cupy is None:
        return None
    lies, form, queue = _cupy_lies(out)
    return make_device_out(out, lies, form, "cupy", out.dtype, queue, "cupy")


# Other objects


def view_interface(x: Any) -> View:
    """View an object of no library that is known by its ``__cuda_array_interface__``; results are CuPy's."""
    facts = x.__cuda_array_interface__
    try:
        dtype, address, shape, strides, stream = _interface(facts)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}"
        remedy = f"its __cuda_array_interface__ cannot be read ({why}): {facts!r:.200}; pass a CuPy array"
        raise refuse(x, remedy) from error
    if facts.get("mask") is not None:
        raise refuse(x, "the mask would be ignored; reduce the filled array, and the mask if it differs")
    form = format_of(dtype) if dtype.isnative else None
    if form is None:
        raise refuse_dtype(x, dtype)
    number = _device_of(x, address)
    if number < 0:
        raise refuse(x, f"at the address that it names, {address:#x}, is no memory of a CUDA device")
    lies = Lies(number, address, shape, strides)
    queue = queue_for(x, number, "say with cupy.asnumpy(x)")
    _require_memory(x, lies, dtype.itemsize)
    return make_device_view(x, lies, form, "cuda", to_cupy, dtype, queue, "", stream, (x, facts))


def _interface(
    facts: Any,
) -> tuple[np.dtype[Any], int, tuple[int, ...], tuple[int, ...] | None, int | None]:
    """Return dtype, address, shape, strides in bytes and stream of a ``__cuda_array_interface__``."""
    if not isinstance(facts["typestr"], str):
        raise TypeError(f"typestr must be a text, not {facts['typestr']!r}")
    dtype, address = np.dtype(facts["typestr"]), index(facts["data"][0])
    shape, strides = tuple(map(index, facts["shape"])), facts.get("strides")
    # None: no order is needed. A version that has no such entry leaves it open.
    stream = facts.get("stream") if index(facts.get("version", 0)) >= 3 else _LEGACY_STREAM
    if stream is not None and index(stream) < 0:
        raise ValueError(f"there is no stream {stream}")
    return (
        dtype,
        address,
        shape,
        None if strides is None else tuple(map(index, strides)),
        None if stream is None else index(stream),
    )


def _device_of(x: Any, address: int) -> int:
    """Return the number of the device that an address belongs to."""
    from gccomm.kernels.cuda.on_cupy import device_of

    number = getattr(getattr(x, "device", None), "id", 0)
    try:
        found = device_of(address) if address else None
    except ImportError:
        found = 0  # the error of `queue_for` follows
    if found is None:
        return number if isinstance(number, int) else 0  # an empty one's; `_require_memory` refuses others
    return found


def _require_memory(x: Any, lies: Lies, item_bytes: int) -> None:
    """Raise TypeError where not all elements that an object names are in the memory of its device."""
    from gccomm.kernels.cuda.on_cupy import device_of

    shape, strides = lies.shape, lies.strides
    wrong = ""
    if any(n < 0 for n in shape) or (strides is not None and len(strides) != len(shape)):
        wrong = "no array has these"
    elif 0 not in shape:
        first, last = _ends(lies, item_bytes)
        if not lies.address or first < 0 or last >= 1 << 64:
            wrong = "no memory is there"
        else:
            found = [device_of(first), device_of(last)]
            if found != [lies.number] * 2:
                wrong = f"not all of that is memory of cuda:{lies.number}"
    if wrong:
        raise refuse(
            x, f"it names address {lies.address:#x}, shape {shape}, strides {strides} in bytes, and {wrong}"
        )


def _ends(lies: Lies, item_bytes: int) -> tuple[int, int]:
    """Return the addresses of the first and the last byte of elements, of which there are some."""
    if lies.strides is None:
        return lies.address, lies.address + item_bytes * prod(lies.shape) - 1
    steps = [(n - 1) * stride for n, stride in zip(lies.shape, lies.strides, strict=True)]
    low, high = (sum(step for step in steps if (step < 0) == before) for before in (True, False))
    return lies.address + low, lies.address + high + item_bytes - 1


def view_dlpack(x: Any, number: int) -> View:
    """View an object on a CUDA device by DLPack; results are its library's, if that reads DLPack."""
    queue = queue_for(x, number, "with its library's own function")
    form, lies, capsule = read_dlpack(x, queue)
    _require_memory(x, lies, form.storage.itemsize * form.reals)
    # Looked up now: on the way back it would be too late to fail.
    namespace: Any = x.__array_namespace__() if hasattr(x, "__array_namespace__") else None
    take = getattr(namespace, "from_dlpack", None)
    rebuild, like = (_to_dlpack, take) if take is not None else (to_cupy, _cupy_dtype(form))
    return make_device_view(x, lies, form, "dlpack", rebuild, like, queue, keep=(x, capsule))


def _cupy_dtype(form: Format) -> Any:
    if form.user_dtype == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(form.user_dtype)


def read_dlpack(x: Any, queue: Queue) -> tuple[Format, Lies, Any]:
    """Let the queue follow an object's stream; return format and place of its elements, and the capsule."""
    try:
        capsule = x.__dlpack__(stream=queue.stream)
        tensor = dlpack.read(capsule)
    except Exception as error:  # whatever the object's own code raises
        why = f"{type(error).__name__}: {error}"
        raise refuse(x, f"it cannot be read through DLPack ({why}); pass a CuPy array") from error
    if tensor.device[0] not in (dlpack.CUDA, dlpack.CUDA_MANAGED) or tensor.device[1] != queue.number:
        there = f"its DLPack capsule says device {tensor.device}, and the object itself {queue.device}"
        raise refuse(x, f"{there}; pass a CuPy array")
    form = named_format(tensor.dtype)
    if form is None:
        raise refuse_dtype(x, getattr(x, "dtype", None))
    item = form.storage.itemsize * form.reals
    strides = None if tensor.strides is None else tuple(item * s for s in tensor.strides)
    return form, Lies(queue.number, tensor.address, tensor.shape, strides), capsule


def _to_dlpack(view: View, result: Any) -> Any:
    return view._like(exported(view, placed(view, result)))


def exported(view: View, result: DeviceArray, *, anywhere: bool = True) -> dlpack.Export:
    """Return a result as an object that other libraries take over by DLPack."""
    queue = result.queue
    where = (dlpack.CUDA, queue.number)
    result.owner.anywhere |= anywhere
    return dlpack.Export(result.address, view.user_dtype, view.shape, where, result.owner, queue.lead)
