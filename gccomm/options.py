"""Where a rank stands, and what must be equal on all ranks of a reduction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gccomm.agreement import Links
from gccomm.codecs.base import Codec
from gccomm.layout import PIECE_COORDINATES
from gccomm.steps import Buffer

if TYPE_CHECKING:
    from gccomm.flow import Board
    from gccomm.hosts import Hosts

__all__ = ["Options", "Place"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands: its number, the number of ranks, whether they share one host, the operations of
    its back end's own, where that would have the data of the next sum (None: anywhere), and whether it sums
    lanes by itself; the hosts, where these add up their ranks' floats before they compress; the most words of
    the first message of a call, where that may be of different lengths on ranks in different calls; what lets
    reductions on their way go on, and returns whether there are any; where the back end reduces in the
    memory of devices, the board of a device by its name; what is known of the links between hosts; and how
    many bytes of floats are reduced at once in calls that the back end makes by itself, 0: it makes none, and
    up to how many of a tensor its ranks swap it whole in such a call, with the header, 0: they do not.
    """

    rank: int
    size: int
    one_host: bool = True
    operations: frozenset[str] = frozenset()
    room: Callable[[int], Buffer | None] = lambda _nbytes: None
    sums_lanes: bool = False
    hosts: Hosts | None = None
    first_words: int = 0
    go_on: Callable[[], bool] | None = None
    board: Callable[[str], Board] | None = None
    links: Links = field(default_factory=Links)
    call_bytes: int = 0
    swap_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Options:
    """What must be equal on all ranks of a reduction besides the arrays themselves.

    ``codec``, ``op`` and ``feedback`` give the choice for a key; ``choices`` says the same in words.
    """

    codec: Callable[[str], Codec]
    op: Callable[[str], str]
    feedback: Callable[[str, Codec], bool] = field(default=lambda _key, _codec: False)
    exact_below: int = 1024
    nonfinite: str = "propagate"
    seed: int = 0
    bucket_bytes: int = 25 << 20
    piece_coordinates: int = PIECE_COORDINATES
    measure: int = 0  # errors in every so many steps, and the first ones; 0: never
    choices: str = ""

    @classmethod
    def single(
        cls, codec: Codec, op: str, feedback: bool, exact_below: int, nonfinite: str, **more: Any
    ) -> Options:
        """Return options whose codec, operation and feedback are the same for all keys."""
        choices = f"codec={codec!r}, op={op!r}"
        ways = (lambda _key: codec, lambda _key: op, lambda _key, _codec: feedback)
        return cls(*ways, exact_below, nonfinite, choices=choices, **more)

    def text(self) -> str:
        """Return the options that neither a leaf nor ``choices`` carries, for the agreement."""
        return (
            f"exact_below={self.exact_below}, nonfinite={self.nonfinite!r}, seed={self.seed}, "
            f"bucket_bytes={self.bucket_bytes}, piece_coordinates={self.piece_coordinates}"
        )
