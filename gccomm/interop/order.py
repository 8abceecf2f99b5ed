"""The order of work between the streams of a caller's libraries and gccomm's own.

Arrays are read after what the caller's current streams have to do when he makes the call, and what he asks
those streams for after it comes after the results. Both go by events: the host does not wait.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gccomm import trees

if TYPE_CHECKING:
    from gccomm.interop.base import View
    from gccomm.kernels.cuda.queue import DeviceArray, Queue

__all__ = ["Handover", "Handovers", "Moment", "begin", "moment", "rejoin"]


class Moment:
    """When an asynchronous call was asked for, as events of the streams that were current then.

    Attributes
    ----------
    events : dict of (str, int, int) to event
        By library, number of the device, and stream.
    """

    __slots__ = ("events",)

    def __init__(self) -> None:
        self.events: dict[tuple[str, int, int], Any] = {}

    def take(self, library: str, queue: Queue) -> None:
        """Note the present moment of a library's current stream."""
        stream = _current(library, queue.number)
        self.events[library, queue.number, stream] = queue.record(stream)

    def copy(self) -> Moment:
        """Return it as it is now."""
        made = Moment()
        made.events.update(self.events)
        return made

    def of(self, library: str, number: int) -> list[Any]:
        """Return the events of a library's streams on a device."""
        return [event for (name, n, _), event in self.events.items() if (name, n) == (library, number)]


def _current(library: str, number: int) -> int:
    """Return the stream that a library would use now in this thread."""
    module = sys.modules[library]
    if library == "torch":
        return int(module.cuda.current_stream(number).cuda_stream)
    return int(module.cuda.get_current_stream(number).ptr)


def moment(tree: Any, old: Moment | None = None) -> Moment | None:
    """Return the present moment of the streams on which arrays of a tree are made; None where there are none.

    With ``old``, that moment and this one. Without CuPy there is nothing to do: arrays of devices need it.
    """
    if "cupy" not in sys.modules and not _torch_uses_cuda():
        return old
    found = old
    try:
        leaves = trees.flatten(tree)[1]
        for library, number in {place for x in leaves if (place := _place(x)) is not None}:
            from gccomm.kernels.cuda.on_cupy import queue_of

            found = found or Moment()
            found.take(library, queue_of(number))
    except Exception:  # the call itself finds what is wrong, and tells every rank
        return old
    return found


def _torch_uses_cuda() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def _place(x: Any) -> tuple[str, int] | None:
    library = type(x).__module__.partition(".")[0]
    if library == "cupy" and hasattr(x, "data") and hasattr(x, "device"):
        return "cupy", int(x.device.id)
    if library == "torch" and getattr(x, "is_cuda", False):
        return "torch", int(x.device.index)
    return None


def begin(views: Iterable[View | None], when: Moment | None = None) -> None:
    """Let the devices' queues follow the streams on which arrays were made, then copy what must be copied.

    These are the streams that are current in this thread, or those of the moment ``when``.
    """
    followed: set[tuple[int, str, int | None]] = set()
    for view in views:
        if view is None or view._source is None:
            continue
        queue, source = view.data.queue, view._source
        mark = queue.number, source.library, source.stream
        if mark not in followed:
            followed.add(mark)
            _follow(queue, source.library, source.stream, when)
        if source.strided is not None:
            queue.gather(view.data, source.strided)


def _follow(queue: Queue, library: str, stream: int | None, when: Moment | None) -> None:
    if stream is not None:
        queue.follow(stream)
    elif library:
        events = [] if when is None else when.of(library, queue.number)
        for event in events:
            queue.after(event)
        if not events:
            queue.follow(_current(library, queue.number))


def rejoin(queue: Queue, views: Iterable[View | None]) -> None:
    """Let the streams of arrays come after the queue, which a call that has failed in a graph has begun."""
    libraries = {view._source.library for view in views if view is not None and view._source is not None}
    for library in libraries - {""}:
        queue.lead(_current(library, queue.number))


class Handover:
    """Results that are given to a caller, whose streams are to come after them.

    Parameters
    ----------
    arrays : iterable of (str, DeviceArray)
        Memory that results are in, and the library that they are made of ("": one that reads DLPack).
    queues : sequence of Queue
        All that the call has used.
    keep : nested sequences of View or None
        Memory of the caller's that is used until then; that of libraries whose streams are not known, until
        the queues have done all they have to do by now.
    """

    def __init__(self, arrays: Iterable[tuple[str, DeviceArray]], queues: Sequence[Queue], keep: Any) -> None:
        self._arrays, self._keep, self._taken = list(arrays), keep, False
        self._queues, self._ends = list(queues), {queue.number: queue.record() for queue in queues}
        for queue in queues:
            lent = [(v.data, v.owner, v._source) for v in _views(keep) if _lent(v, queue)]
            if lent and not queue.capturing():  # what a graph uses is kept elsewhere
                queue.keep(self._ends[queue.number], lent)

    def __call__(self) -> None:
        """Let the streams that are current in this thread come after the results."""
        from gccomm.kernels.cuda.queue import Loan

        streams: dict[tuple[str, int], int] = {}
        for library, array in self._arrays:
            queue = array.queue
            place = library, queue.number
            if not library:
                continue
            if place not in streams:
                streams[place] = _current(library, queue.number)
                queue.lead(streams[place], self._ends[queue.number])
            if isinstance(array.owner, Loan):
                array.owner.streams.add(streams[place])
        self._keep, self._taken = None, True

    def __del__(self) -> None:
        """Wait for what nobody has waited for, before its memory goes."""
        if self._taken or sys is None or sys.is_finalizing():
            return
        for queue in self._queues:
            queue.complete(self._ends[queue.number])


def _views(keep: Any) -> Iterable[Any]:
    """Return the views in nested lists and tuples."""
    if isinstance(keep, (list, tuple)):
        for part in keep:
            yield from _views(part)
    elif keep is not None:
        yield keep


def _lent(view: Any, queue: Queue) -> bool:
    """Whether a library that knows nothing of the queue's stream may use a view's memory again as soon as the
    view is let go of.
    """
    return view._source is not None and view._source.library == "" and view.data.queue is queue


class Handovers:
    """Several of them, one after the other."""

    def __init__(self, parts: Sequence[Callable[[], None]]) -> None:
        self._parts = parts

    def __call__(self) -> None:
        """Hand all of them over."""
        for part in self._parts:
            part()
