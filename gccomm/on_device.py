"""What a call does for arrays in the memory of devices: order, staging by way of the host, handing over."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from gccomm import kernels, trees
from gccomm.interop import order
from gccomm.interop.base import View
from gccomm.memory import address, device_of, empty, moved
from gccomm.plan import Plan
from gccomm.remembered import STORAGE
from gccomm.steps import Buffer

__all__ = ["DeviceCall", "broadcast_results", "host_copy", "line"]


class DeviceCall:
    """The part of a call that has to do with devices.

    Parameters
    ----------
    plan : Plan
        Of the call, with devices.
    views, outs : sequence of View or None
        By leaf: inputs and outputs.
    when : Moment, optional
        What the arrays come after; by default, the current streams of this thread.
    go_on : callable, optional
        Lets what is on its way between ranks go on while the host waits for a device.

    Attributes
    ----------
    later : bool
        Results are handed over after the end of the call, or let go of: nobody waits at its end.
    """

    def __init__(
        self,
        plan: Plan,
        views: Sequence[View | None],
        outs: Sequence[View | None],
        when: order.Moment | None = None,
        go_on: Callable[[], bool] | None = None,
    ) -> None:
        self._plan, self._views, self._outs = plan, views, outs
        self._queues = [kernels.of_device(name).launcher.queue for name in plan.devices]
        self._staged: list[Buffer] = []
        self._homes = {  # where results of the host's work go: allocated before anything is sent
            i: empty(spec.device, math.prod(spec.row_shape), STORAGE.get(spec.dtype) or spec.dtype)
            for i, (spec, out) in enumerate(zip(plan.specs, outs, strict=True))
            if spec.staged and out is None
        }
        self._over = self.later = False
        self._unseen: list[tuple[Any, Any]] = []  # queues, and the events of what they still do
        order.begin([*views, *outs], when)
        for queue in self._queues:
            queue.meanwhile(go_on)

    def source(self, i: int) -> int:
        """Return the address at which leaf ``i`` is read: a copy's, where the host does the work."""
        view, spec = self._views[i], self._plan.specs[i]
        if view is None:
            return 0
        if not spec.staged:
            return view.pointer
        copy = empty("cpu", view.data.size, STORAGE.get(spec.dtype) or spec.dtype)
        copy[...] = view.data
        self._staged.append(copy)
        return address(copy)

    def bring(self, results: list[Any]) -> None:
        """Bring the results that were made on the host, and go into no output, to their devices."""
        for i, home in self._homes.items():
            home[...] = results[i]
            results[i] = home

    def hand_over(self, results: Sequence[Any], libraries: Sequence[str]) -> Callable[[], None]:
        """Return what lets the caller's streams come after results, of a library each, in his thread."""
        self._over, self._unseen = True, []
        arrays = []
        for result, library, out in zip(results, libraries, self._outs, strict=True):
            array, of = (result, library) if out is None else (out.data, out.library)
            if device_of(array) != "cpu":
                arrays.append((of, array))
        return order.Handover(arrays, self._queues, (self._views, self._outs))

    @property
    def captured(self) -> bool:
        """Whether the call goes into a graph, and is not done now."""
        return any(queue.capturing() for queue in self._queues)

    def end(self) -> None:
        """End the call; where nothing is handed over, wait until the caller's arrays are no longer used."""
        for queue in self._queues:
            queue.meanwhile(None)
            if self._over:
                continue
            if queue.capturing():
                order.rejoin(queue, self._views)
            elif self.later:
                self._unseen.append((queue, queue.record()))
            else:
                queue.wait()

    def __del__(self) -> None:
        """Wait for what was to be handed over and is not, before the caller's arrays go."""
        if sys is None or sys.is_finalizing():
            return
        for queue, event in getattr(self, "_unseen", ()):
            queue.complete(event)


def broadcast_results(treedef: Any, views: Sequence[View | None], buffers: Sequence[Any]) -> Any:
    """Return the tree of what a broadcast has left in buffers of the host."""
    pairs = list(zip(views, buffers, strict=True))
    arrays = [b if v is None or v.device == "cpu" else moved(b, v.device) for v, b in pairs]
    values = [None if v is None else v.wrap(a) for v, a in zip(views, arrays, strict=True)]
    there = [
        (v.library, a) for v, a in zip(views, arrays, strict=True) if v is not None and v.device != "cpu"
    ]
    if there:
        queues = {a.queue.number: a.queue for _, a in there}
        order.Handover(there, list(queues.values()), views)()
    return trees.unflatten(treedef, values)


def line(key: str, view: View | None) -> str:
    """Return a text that is equal on all ranks, for a leaf of a broadcast."""
    return f"{key!r}: None" if view is None else f"{key!r}: {view.user_dtype}{list(view.shape)}"


def host_copy(view: View) -> Any:
    """Return a copy of a leaf's data on the host."""
    buffer = kernels.pool_empty(view.data.nbytes).view(view.data.dtype)
    buffer[...] = view.data
    return buffer
