"""What the engine asks of a transport: one in-place collective at a time, as data.

The engine is a generator of transfers, which may begin one and finish it later. A driver hands each to a
back end; the lockstep driver
combines the transfers of many engines in one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from gccomm.backends import Backend
from gccomm.steps import Buffer, FloatName, Fold, Words

__all__ = [
    "Between",
    "Broadcast",
    "CallAdd",
    "Combine",
    "Finish",
    "FloatAdd",
    "Folding",
    "HostSum",
    "LaneAdd",
    "Maximum",
    "Pause",
    "Start",
    "Together",
    "Transfer",
    "Whole",
    "WordAdd",
    "at_once",
    "execute",
]


@dataclass(frozen=True, slots=True)
class Maximum:
    """Elementwise unsigned MAX over ranks, in place."""

    words: Words


@dataclass(frozen=True, slots=True)
class WordAdd:
    """Elementwise SUM mod 2^32 over ranks, in place or into ``out``; ``lanes`` lists (first word, end word,
    lane width).
    """

    words: Words
    lanes: tuple[tuple[int, int, int], ...] = ()
    out: Words | None = None


@dataclass(frozen=True, slots=True)
class FloatAdd:
    """Elementwise float SUM from ``send`` into ``recv`` (which may be the same array)."""

    send: Buffer
    recv: Buffer
    dtype: FloatName


@dataclass(frozen=True, slots=True)
class Combine:
    """Elementwise reduction of uint32 words, in place, by one of gccomm's own operations.

    ``operation`` is one of :data:`gccomm.operations.OPERATIONS`; ``seed`` a 32-bit word, equal on all ranks.
    """

    words: Words
    operation: str
    seed: int


@dataclass(frozen=True, slots=True)
class Folding:
    """A :class:`gccomm.steps.Fold`, encoding and decoding included, in memory for this rank's words and for
    those of the result.
    """

    step: Fold
    sent: Words
    folded: Words


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Bytes of rank ``root`` to every rank, in place."""

    buffer: Buffer
    root: int


@dataclass(slots=True)
class LaneAdd:
    """Agreement on scales and SUM of lanes, encoded and decoded by the back end, for those that do so.

    ``job`` is a :data:`gccomm.kernels.LANES` record, shape (1,); ``seconds`` are those of encoding and of
    decoding, afterwards.
    """

    job: Buffer
    seconds: tuple[float, float] = (0.0, 0.0)


@dataclass(slots=True)
class CallAdd:
    """A whole call: agreement on its header, and the SUM behind it, for back ends that do both by themselves.

    ``job`` is a :data:`gccomm.kernels.CALL` record, shape (1,). Afterwards ``same`` says whether all ranks
    have made this call; where they have not, nothing was summed. ``seconds`` as of :class:`LaneAdd`.
    """

    job: Buffer
    same: bool = True
    seconds: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class HostSum:
    """Elementwise float SUM, in rank order, over the ranks of each host, into ``recv`` of the one at place
    ``speaker``, or None on others.
    """

    send: Buffer
    recv: Buffer | None
    dtype: FloatName
    speaker: int


@dataclass(frozen=True, slots=True)
class Between:
    """A reduction over the hosts of what the ranks at place ``speaker`` hold; all ranks get the result."""

    transfer: Whole
    speaker: int


@dataclass(frozen=True, slots=True)
class Together:
    """Reductions in the memory of a device, which its back end makes as one group."""

    transfers: tuple[WordAdd | FloatAdd, ...]


Whole: TypeAlias = (
    Maximum
    | WordAdd
    | FloatAdd
    | Combine
    | Folding
    | Broadcast
    | LaneAdd
    | CallAdd
    | HostSum
    | Between
    | Together
)


@dataclass(frozen=True, slots=True)
class Start:
    """Begin a transfer; the answer is a handle. Its arrays are left alone until it is finished."""

    transfer: Whole


@dataclass(frozen=True, slots=True)
class Finish:
    """Wait until the transfer of a handle is complete on this rank."""

    handle: Any


@dataclass(frozen=True, slots=True)
class Pause:
    """What follows waits for a device: a driver may go on with other things, and come back once ``ready()``
    returns True, or earlier: it waits then by itself. Nothing is to be executed.
    """

    ready: Callable[[], bool]


Transfer: TypeAlias = Whole | Start | Finish | Pause


def at_once(transfers: Sequence[Transfer]) -> list[Whole]:
    """Return the transfers of all ranks for a driver that completes what is begun, and begins no more: what
    to do now, if anything.
    """
    return [t.transfer if isinstance(t, Start) else t for t in transfers if not isinstance(t, Finish | Pause)]


def _begin(transfer: Whole, backend: Any) -> Any:
    """Return a handle, or None where the transfer is complete: a back end need not have any."""
    if not hasattr(backend, "begin"):
        return execute(transfer, backend)
    match transfer:
        case Between():
            return _begin(transfer.transfer, backend.between(transfer.speaker))
        case WordAdd() | FloatAdd():
            return backend.begin(*_named(transfer))
        case Maximum():
            return backend.begin("maximum", transfer.words, transfer.words)
        case Folding() if hasattr(backend, "begin_fold"):
            return backend.begin_fold(transfer.step, transfer.sent, transfer.folded)
        case Together():
            return backend.begin_many([_named(part) for part in transfer.transfers])
    return execute(transfer, backend)


def _end(handle: Any, backend: Any) -> None:
    """Complete what was begun, unless it is complete."""
    if handle is not None:
        backend.end(handle)


def _named(transfer: WordAdd | FloatAdd) -> tuple[str, Any, Any]:
    """Return the kind of a reduction, and what it reads and writes."""
    if isinstance(transfer, WordAdd):
        return "words", transfer.words, transfer.words if transfer.out is None else transfer.out
    return transfer.dtype, transfer.send, transfer.recv


def _by_host(transfer: Between | HostSum, backend: Any) -> None:
    """Run a transfer over a back end that has hosts."""
    if isinstance(transfer, Between):
        execute(transfer.transfer, backend.between(transfer.speaker))
    else:
        backend.host_sum(transfer.send, transfer.recv, transfer.dtype, transfer.speaker)


def _by_itself(transfer: CallAdd | LaneAdd, backend: Any) -> None:
    """Run a transfer over a back end that says that it makes it by itself."""
    if isinstance(transfer, CallAdd):
        transfer.same, *seconds = backend.sum_call(transfer.job)
        transfer.seconds = seconds[0], seconds[1]
    else:
        transfer.seconds = backend.sum_lanes(transfer.job)


def execute(transfer: Transfer, backend: Backend) -> Any:
    """Run one transfer over a back end until it is complete on this rank; return the handle of a start."""
    match transfer:
        case CallAdd() | LaneAdd():
            _by_itself(transfer, backend)
        case Start():
            return _begin(transfer.transfer, backend)
        case Between() | HostSum():
            _by_host(transfer, backend)
        case Finish():
            _end(transfer.handle, backend)
        case Together():
            _end(_begin(transfer, backend), backend)
        case WordAdd(out=None):
            backend.sum_words(transfer.words)
        case WordAdd():
            backend.sum_into(transfer.words, transfer.out)  # type: ignore[attr-defined]  # has it, as it has room
        case Maximum():
            backend.maximum(transfer.words)
        case FloatAdd():
            backend.sum_floats(transfer.send, transfer.recv, transfer.dtype)
        case Combine():
            backend.combine_words(transfer.words, transfer.operation, transfer.seed)
        case Folding():
            backend.fold_words(transfer.step, transfer.sent, transfer.folded)  # type: ignore[attr-defined]
        case Broadcast():
            backend.broadcast(transfer.buffer, transfer.root)
    return None
