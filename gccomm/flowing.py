"""Which calls leave their words on a device, and which of them may go into a graph."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import TYPE_CHECKING, Any

from gccomm.errors import NegotiationError
from gccomm.on_device import DeviceCall
from gccomm.options import Place
from gccomm.plan import Plan
from gccomm.steps import Context

if TYPE_CHECKING:
    from gccomm.flow import Board, Flow
    from gccomm.reduction import Reduction
    from gccomm.remembered import Leaf

__all__ = ["Flowing", "least_piece"]

PIECE_COORDINATES = 1 << 23  # of a piece that a device works on: kernels that are worth their start

UNCAPTURED = (
    "this call cannot be captured in a graph, as the host has to look at words on the way. A call can be "
    "that is made over NCCL, on float arrays of one device that no rank has None for, with a codec of agreed "
    'scales that cannot overflow (uniform, rotated with headroom="safe", raw, bf16, fp16), without '
    'nonfinite="raise", in a step of a Reducer that does not measure its error, after such calls outside of '
    "the graph (warm-up)"
)


def least_piece(place: Place, leaves: Iterable[Leaf]) -> int:
    """Return how many coordinates a piece has at least: many, where words stay on a device."""
    if place.board is None or any(leaf.device == "cpu" for leaf in leaves):
        return 0
    return PIECE_COORDINATES // (place.hosts.speakers if place.hosts is not None else 1)


class Flowing:
    """The part of a call on devices that has to do with words that stay there, and with graphs.

    Parameters
    ----------
    place : Place
        Where the rank stands.
    plan : Plan
        Of the call, with devices.
    devices : DeviceCall
        The rest of it.

    Raises
    ------
    NegotiationError
        The call is made while a graph is captured, and its words do not stay on a device.
    """

    def __init__(self, place: Place, plan: Plan, devices: DeviceCall) -> None:
        self._place, self._plan = place, plan
        self._graph: Board | None = None
        device = plan.devices[0]
        stays = place.board is not None and all(
            spec.worked_on == device and spec.route.device_words and spec.route.operation is None
            for spec in plan.specs
        )
        if devices.captured:
            if not stays:
                raise NegotiationError(UNCAPTURED)
            assert place.board is not None
            self._graph = place.board(device)
            self._graph.queue.hold(self._graph.counter)
        self._stays = stays

    @property
    def captured(self) -> bool:
        """Whether the call goes into a graph, which keeps all that it uses."""
        return self._graph is not None

    def flow(self, reduction: Reduction, context: Context, *, looked_at: bool) -> Flow | None:
        """Return the flow of a call, or None where its words do not stay on a device.

        Parameters
        ----------
        reduction : Reduction
            Whose call it is.
        context : Context
            Of the call.
        looked_at : bool
            The host has to look at words for another reason than the codecs.

        Raises
        ------
        NegotiationError
            The call cannot go into a graph.
        """
        if not self._stays:
            return None
        from gccomm.flow import Flow

        assert self._place.board is not None
        looked_at |= self.captured and reduction.options.nonfinite == "raise"
        board = self._place.board(self._plan.devices[0])
        codecs = {spec.route for spec in self._plan.specs}
        able = board.flows and not looked_at and all(codec.flows(context) for codec in codecs)
        if self.captured:
            able = able and not any(codec.looks(context) for codec in codecs)
        flow = Flow(board, (reduction.reducer, self._plan.layout), able, counted=self.captured)
        if self.captured and not flow.flowing:
            raise NegotiationError(UNCAPTURED)
        return flow

    def carry(self, old: MutableMapping[str, Any], new: dict[str, Any]) -> None:
        """Let each launch of a graph begin with the residuals that the one before has left."""
        for key, residual in new.items():
            old[key][...] = residual
            new[key] = old[key]

    def require_residual(self, key: str, residual: Any) -> None:
        """Raise NegotiationError where a graph would have no residual to begin with."""
        if self.captured and residual is None:
            raise NegotiationError(f"{key!r} has no residual yet: {UNCAPTURED}")

    def release(self, used: Any) -> None:
        """End the call; ``used`` is what a graph needs besides."""
        if self._graph is not None:
            self._graph.kept.append((self._graph.queue.release(), used))
            self._graph = None
