"""The agreement message: proves with one MAX that all ranks make the same call, and says who differs where
they do not.

Every collective entry point starts with one MAX all-reduce of :data:`MESSAGE_WORDS` uint32 words, a header
and the first scales; of others only where a back end lets ranks hold different numbers of them, perhaps a
whole array behind the header. (Or with a SUM, where nothing is to be agreed on: below.) Header fields
travel as pairs (v, ~v): max(v) = v and max(~v) = ~v hold together only if all ranks sent the same v, in
signed and unsigned order alike. Ranks in different calls therefore complete the same message and all see the
mismatch; a rank whose own arguments are bad takes part with the error flag set. Only then a second exchange
carries text, one slot a rank, so that the error names ranks and fields.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from gccomm import errors
from gccomm.steps import Words
from gccomm.transfers import Maximum, Transfer

__all__ = [
    "HEADER_WORDS",
    "MESSAGE_WORDS",
    "SCALE_WORDS",
    "SUM_WORDS",
    "Call",
    "Links",
    "digest",
    "exchange_texts",
    "tag_of",
    "verify",
    "verify_summed",
    "write_header",
    "write_summed",
]

HEADER_WORDS = 64
SCALE_WORDS = 192
MESSAGE_WORDS = HEADER_WORDS + SCALE_WORDS
WIRE_VERSION = 0x67630001
OPCODES = {"compressed_allreduce": 1, "broadcast": 2, "barrier": 3, "split": 4, "close": 5, "redo": 6}
FIELDS = (
    "version",
    "opcode",
    "communicator",
    "reducer",
    "step",
    "layout",
    "layout",
    "policy",
    "policy",
    "state",
    "state",
)
ERROR_WORD = 2 * len(FIELDS)  # rank + 1 of a rank that failed its own checks
MISSING_WORD = ERROR_WORD + 1  # some rank passed None for a key that is known
FLOWING_WORD = MISSING_WORD + 1  # FLOWING: some rank does not wait for the header, its device looks at it
SLOW_WORD = FLOWING_WORD + 1  # some rank has found links to be slow
FLOWING = 0x5EEDF10D  # which words of a rank in another call, that may come to lie there, are not
SLOT_BYTES = 3 * 1024  # text of one rank in the second exchange; three bytes a word keep words below 2^31
SUM_WORDS = 8  # of a summed header
SUMMED_SLOW = 4  # in it: how many ranks have found links to be slow
# Where the other kind of header has the number of a reducer, which no multiple of this comes near to for
# some thousand ranks: a MAX of both kinds never looks as if all ranks made one call.
SUMMED_MARK, MARK = 2 * FIELDS.index("reducer"), 0x9E3779B9
TEXT_LIMIT = 600  # bytes of a text in a slot, escapes included


@lru_cache(maxsize=256)
def digest(text: str) -> tuple[int, int]:
    """Return a stable 64-bit hash of ``text`` as two uint32 values."""
    raw = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(raw[:4], "little"), int.from_bytes(raw[4:], "little")


@dataclass(slots=True)
class Links:
    """What ranks know of the links between hosts.

    Not every rank sends over them, and none can tell when others have timed them; so headers carry it, and
    what follows from it is the same on all ranks.

    Attributes
    ----------
    found : callable
        Whether this rank has found that the link is slow beside what a piece costs otherwise.
    slow : bool
        Whether some rank had found so in the last header.
    """

    found: Callable[[], bool] = lambda: False
    slow: bool = False


@dataclass(slots=True)
class Call:
    """One rank's view of a collective call.

    Attributes
    ----------
    opcode : str
        A key of ``OPCODES``.
    communicator, reducer, step : int
        Number of the communicator on its group of ranks (``init`` makes one), of the reducer on it (0: the
        functions), and of the call.
    layout : tuple of int
        Digest of keys, shapes, dtypes, codecs and ops; ``leaves()`` gives the same as one line a leaf.
    policy, state : str
        Options, and choices of codec and op with what they have adapted, that must be equal on all ranks, as
        text.
    error : BaseException or None
        This rank's own failure, shared with the others.
    missing : bool
        This rank passed None for a known key.
    links : Links
        What the header says of links, and where what all headers say is noted.
    """

    opcode: str
    communicator: int = 0
    reducer: int = 0
    step: int = 0
    layout: tuple[int, int] = (0, 0)
    leaves: Callable[[], Sequence[str]] = field(default=lambda: ())
    policy: str = ""
    state: str = ""
    error: BaseException | None = None
    missing: bool = False
    links: Links = field(default_factory=Links)

    def values(self) -> list[int]:
        """Return the header's values in the order of ``FIELDS``."""
        head = [WIRE_VERSION, OPCODES[self.opcode], self.communicator, self.reducer, self.step & 0xFFFFFFFF]
        return [*head, *self.layout, *digest(self.policy), *digest(self.state)]

    def hashes(self) -> tuple[int, int]:
        """Return two independent 32-bit hashes of the header's values."""
        return digest(",".join(map(str, self.values())))

    def describe(self) -> str:
        """Return what this rank is doing, for reports."""
        where = f" of reducer {self.reducer}" if self.reducer else ""
        return f"{self.opcode}{where}, step {self.step}"


def tag_of(call: Call) -> int:
    """Return what the tags of a call's messages are made of: the same on all ranks."""
    tag = 0
    for value in call.values():
        tag = (tag * 0x01000193 ^ value) & 0xFFFFFFFF
    return tag


def write_header(call: Call, rank: int, message: Words) -> None:
    """Write the header of ``call`` into ``message[:HEADER_WORDS]``."""
    values = np.array(call.values(), dtype=np.uint32)
    message[:HEADER_WORDS] = 0
    message[0 : 2 * len(values) : 2] = values
    message[1 : 2 * len(values) : 2] = ~values
    message[ERROR_WORD] = rank + 1 if call.error is not None else 0
    message[MISSING_WORD] = call.missing
    message[SLOW_WORD] = call.links.found()


def verify(
    call: Call, rank: int, size: int, message: Words
) -> Generator[Transfer, None, BaseException | None]:
    """Check the reduced header; on any difference run the second exchange and return the error that every
    rank returns. Where others do not wait for that, as their devices check the header, the error is raised.
    """
    pairs = message[: 2 * len(FIELDS)].reshape(-1, 2)
    same = bool((pairs[:, 0] == ~pairs[:, 1]).all())
    if same and message[ERROR_WORD] == 0:
        return None
    if message[FLOWING_WORD] == FLOWING:
        raise _alone(call, rank, pairs)
    return (yield from _explain(call, rank, size))


def _alone(call: Call, rank: int, pairs: Words) -> BaseException:
    """Return the error of a rank that others do not wait for, so that none can be told of it."""
    if call.error is not None:
        return call.error
    own = np.array(call.values(), dtype=np.uint32)
    differs = list(dict.fromkeys(np.array(FIELDS)[(pairs[:, 0] != own) | (pairs[:, 1] != ~own)].tolist()))
    where = f"in {', '.join(differs)}" if differs else "in its arguments, which are bad"
    return errors.MismatchError(
        f"rank {rank}: {call.describe()} differs from another rank's call {where}. Others go on by a layout "
        "that had been agreed on, without waiting: the communicator is broken. Every rank must make the same "
        "calls in the same order, with the same keys, shapes, dtypes and options"
    )


def write_summed(call: Call, message: Words) -> None:
    """Write the header of a call whose first message is a SUM: two hashes and three flags."""
    message[:SUM_WORDS] = 0
    message[:2] = call.hashes()
    message[2] = call.error is not None
    message[3] = call.missing
    message[SUMMED_SLOW] = call.links.found()
    message[SUMMED_MARK] = MARK


def verify_summed(
    call: Call, rank: int, size: int, message: Words
) -> Generator[Transfer, None, BaseException | None]:
    """Check a summed header, as :func:`verify` does the other kind.

    Each hash must be n times this rank's own. A rank in another call sends its own first message, under MAX
    or SUM, and neither side's check can then hold, on any rank: both hashes would have to cancel by chance,
    and the MAX of a mark and the number of a reducer is no such number.
    """
    expected = [value * size & 0xFFFFFFFF for value in call.hashes()]
    if message[:2].tolist() == expected and message[2] == 0:
        call.links.slow = bool(message[SUMMED_SLOW])
        return None
    return (yield from _explain(call, rank, size))


def _explain(call: Call, rank: int, size: int) -> Generator[Transfer, None, BaseException]:
    leaves = list(call.leaves())
    reports = yield from exchange_texts(_report(call, leaves), rank, size)
    failed = [r for r in range(size) if reports[r]["error"]]
    if failed:
        first = failed[0]
        own = call.error if first == rank else None
        return _rebuild(reports[first]["error"], first, own)
    names = ["version", "call", "communicator", "reducer", "step", "options"]
    if len({str(r["layout"]) for r in reports}) == 1:  # else the array that differs says more
        names.append("state")
    doing = [r["doing"] for r in reports]
    for name in names:
        values = [r[name] for r in reports]
        if len(set(map(str, values))) > 1:
            return errors.MismatchError(_disagreement(name, values, doing))
    index = yield from _first_difference(leaves, max(r["leaves"] for r in reports))
    mine = leaves[index] if index < len(leaves) else "(no such array)"
    texts = yield from exchange_texts({"leaf": _shorten(mine, 2 * TEXT_LIMIT)}, rank, size)
    values = [t["leaf"] for t in texts]
    return errors.MismatchError(_disagreement(f"array {index} of the tree", values, doing))


def _report(call: Call, leaves: Sequence[str]) -> dict[str, Any]:
    error = None
    if call.error is not None:
        error = [type(call.error).__name__[:100], _shorten(_text_of(call.error), 2 * TEXT_LIMIT)]
    return {
        "version": WIRE_VERSION,
        "call": call.opcode,
        "communicator": call.communicator,
        "reducer": call.reducer,
        "step": call.step,
        "layout": call.layout,
        "options": _shorten(call.policy),
        "state": _shorten(call.state),
        "leaves": len(leaves),
        "error": error,
        "doing": call.describe(),
    }


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a user's exception class may fail here, and must not fail the exchange
        return "(its text cannot be had)"


def _shorten(text: str, limit: int = TEXT_LIMIT) -> str:
    """Return ``text``, or its ends and its hash where it takes more than ``limit`` bytes as JSON.

    Differences may lie at either end, or in the middle: then the hash differs.
    """
    shown, keep = text, limit
    while len(_encoded(shown)) > limit:
        keep = keep * 2 // 3
        shown = f"{text[: keep // 2]}...[hash {digest(text)[0]:08x}]...{text[-(keep // 2) :]}"
    return shown


def _encoded(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def exchange_texts(report: dict[str, Any], rank: int, size: int) -> Generator[Transfer, None, list[Any]]:
    """All-gather one JSON object a rank through a MAX of slots."""
    raw = _encoded(report)
    padded = np.frombuffer(raw.ljust(SLOT_BYTES, b" "), dtype=np.uint8).astype(np.uint32).reshape(-1, 3)
    slots = np.zeros((size, SLOT_BYTES // 3), dtype=np.uint32)
    slots[rank] = padded[:, 0] | padded[:, 1] << 8 | padded[:, 2] << 16
    yield Maximum(slots.reshape(-1))
    octets = np.stack([slots & 255, slots >> 8 & 255, slots >> 16 & 255], axis=-1).astype(np.uint8)
    try:
        return [json.loads(octets[r].tobytes().decode("utf-8", "surrogatepass")) for r in range(size)]
    except ValueError:  # of UnicodeDecodeError and of JSONDecodeError the base
        msg = f"rank {rank}: reports of ranks were damaged on the way: messages of different calls met"
        raise errors.BackendError(msg) from None


def _first_difference(leaves: Sequence[str], count: int) -> Generator[Transfer, None, int]:
    """Return the index of the first leaf that is not the same on all ranks."""
    pairs = np.full((count, 2), 0xFFFFFFFF, dtype=np.uint32)
    for i, text in enumerate(leaves):
        value = digest(text)[0] & 0x7FFFFFFF
        pairs[i] = value, value ^ 0x7FFFFFFF
    flat = pairs.reshape(-1) & np.uint32(0x7FFFFFFF)
    yield Maximum(flat)
    differs = np.flatnonzero(flat[0::2] != flat[1::2] ^ 0x7FFFFFFF)
    return int(differs[0]) if differs.size else 0


def _disagreement(name: str, values: Sequence[Any], doing: Sequence[str]) -> str:
    groups: dict[str, list[int]] = {}
    for r, value in enumerate(values):
        groups.setdefault(str(value), []).append(r)
    parts = [f"{text} on {_ranks(members)}" for text, members in groups.items()]
    calls = "" if name == "call" else f" (in {doing[0]})"
    return (
        f"ranks disagree about {name}{calls}: {'; '.join(parts)}. Every rank must make the same calls in the "
        "same order, with the same keys, shapes, dtypes and options. Nothing was changed; the communicator "
        "is usable"
    )


def _ranks(members: Sequence[int]) -> str:
    shown = ", ".join(map(str, members[:8])) + (f" and {len(members) - 8} more" if len(members) > 8 else "")
    return f"rank {shown}" if len(members) == 1 else f"ranks {shown}"


_KINDS: dict[str, type[BaseException]] = {
    kind.__name__: kind
    for kind in (
        TypeError,
        ValueError,
        BufferError,
        OverflowError,
        MemoryError,
        errors.GccommError,
        errors.MismatchError,
        errors.NegotiationError,
        errors.NonFiniteError,
        errors.BackendError,
    )
}


def _rebuild(report: Sequence[str], rank: int, own: BaseException | None) -> BaseException:
    """Return the failing rank's error, of the same type and with the same text on every rank."""
    name, text = report
    if name == "UnknownCodecError":
        codec_id = own.codec_id if isinstance(own, errors.UnknownCodecError) else ""
        error: BaseException = errors.UnknownCodecError(codec_id, f"rank {rank}: {text}")
    elif name in _KINDS:
        error = _KINDS[name](f"rank {rank}: {text}")
    else:
        error = errors.GccommError(f"rank {rank}: {name}: {text}")
    error.__cause__ = own
    return error
