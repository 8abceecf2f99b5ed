"""The agreement message: who differs in what, on every rank the same, under unsigned and signed MAX alike."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from gccomm import agreement, errors
from gccomm.agreement import FIELDS, HEADER_WORDS, MESSAGE_WORDS, Call, Links, digest
from gccomm.codecs import get_codec
from gccomm.engine import Outcome, rendezvous
from gccomm.reduction import Options, Place, Reduction
from gccomm.transfers import Transfer
from tests.lockstep import drive

LEAVES = ("'a': float32[3], sum, Raw()", "'b': float32[3], sum, Raw()", "'c': int8[1], sum, Integers()")


@pytest.fixture(params=[False, True], ids=["unsigned", "signed"])
def signed(request: pytest.FixtureRequest) -> bool:
    """Whether the back end compares words as signed numbers, as torch's gloo does."""
    return bool(request.param)


def call(**changes: Any) -> Call:
    leaves = changes.pop("leaves", LEAVES)
    plain = Call(
        "compressed_allreduce", layout=digest("\n".join(leaves)), leaves=lambda: leaves, policy="seed=0"
    )
    return replace(plain, **changes)


def agree(calls: Sequence[Call], **kwargs: Any) -> BaseException | None:
    """Run the message; check that every rank comes to the same error, and return it."""
    outcomes, _ = drive([rendezvous(c, r, len(calls)) for r, c in enumerate(calls)], **kwargs)
    kinds = {(type(o.error), str(o.error)) for o in outcomes}
    assert len(kinds) == 1
    return outcomes[0].error


def with_one(n: int, odd: int, **changes: Any) -> list[Call]:
    return [call(**changes) if rank == odd else call() for rank in range(n)]


def test_equal_calls_agree_in_one_message_of_one_kibibyte() -> None:
    for n in (1, 2, 5):
        outcomes, sent = drive([rendezvous(call(), r, n) for r in range(n)])
        assert all(o.error is None for o in outcomes)
        assert [words.nbytes for words in sent[0]] == [1024] * n
        assert len(sent) == 1
        assert HEADER_WORDS + agreement.SCALE_WORDS == MESSAGE_WORDS


def test_header_holds_every_field_and_its_complement() -> None:
    message = np.full(MESSAGE_WORDS, 7, dtype=np.uint32)
    mine = call(step=(5 << 32) + 3, reducer=2, policy="p", state="s")
    agreement.write_header(mine, 6, message)
    pairs = message[: 2 * len(FIELDS)].reshape(-1, 2)
    assert pairs[:, 0].tolist() == mine.values()
    assert (pairs[:, 0] ^ pairs[:, 1]).tolist() == [0xFFFFFFFF] * len(FIELDS)
    assert message[2 * len(FIELDS) : HEADER_WORDS].tolist() == [0] * (HEADER_WORDS - 2 * len(FIELDS))
    assert (message[HEADER_WORDS:] == 7).all()  # the scales are not touched
    agreement.write_header(replace(mine, error=ValueError(), missing=True), 6, message)
    assert message[agreement.ERROR_WORD] == 7
    assert message[agreement.MISSING_WORD] == 1


def test_digest_is_blake2b_in_two_little_endian_words() -> None:
    assert digest("") == (0x57A0A6E4, 0xB4B27974)
    assert digest("\ud800") != digest("\ud801")  # lone surrogates hash too


MISMATCHES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "call": ({"opcode": "barrier"}, ["compressed_allreduce on ranks 0, 2", "barrier on rank 1"]),
    "reducer": ({"reducer": 4}, ["0 on ranks 0, 2", "4 on rank 1"]),
    "step": ({"step": 9}, ["0 on ranks 0, 2", "9 on rank 1"]),
    "communicator": ({"communicator": 1}, ["0 on ranks 0, 2", "1 on rank 1"]),
    "options": ({"policy": "seed=1"}, ["seed=0 on ranks 0, 2", "seed=1 on rank 1"]),
    "state": ({"state": "c=0.5"}, ["c=0.5 on rank 1"]),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_field_that_differs_is_named_with_its_ranks(name: str, signed: bool) -> None:
    changes, parts = MISMATCHES[name]
    error = agree(with_one(3, 1, **changes), signed=signed)
    assert type(error) is errors.MismatchError
    assert f"ranks disagree about {name}" in str(error)
    assert all(part in str(error) for part in parts)
    assert "Nothing was changed; the communicator is usable" in str(error)


def test_another_wire_version_is_named(signed: bool) -> None:
    other = mock.patch.object(agreement, "WIRE_VERSION", 0x67630002)
    error = agree(with_one(3, 1), signed=signed, around=lambda rank: other if rank == 2 else nullcontext())
    assert type(error) is errors.MismatchError
    assert f"about version (in compressed_allreduce, step 0): {0x67630001} on ranks 0, 1" in str(error)
    assert f"{0x67630002} on rank 2" in str(error)


@pytest.mark.parametrize("value", [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
def test_every_pair_of_header_values_is_seen_to_differ(value: int, signed: bool) -> None:
    for other in (0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF):
        error = agree([call(layout=(value, 0)), call(layout=(other, 0))], signed=signed)
        assert (error is None) == (value == other)


LEAF_CHANGES: dict[str, tuple[tuple[str, ...], list[str]]] = {
    "first": (
        ("'a': float32[4], sum, Raw()", *LEAVES[1:]),
        ["array 0 ", "'a': float32[3]", "'a': float32[4]"],
    ),
    "middle": ((LEAVES[0], "'x': float32[3], sum, Raw()", LEAVES[2]), ["array 1 ", "'b': ", "'x': "]),
    "two": ((LEAVES[0], "'y': ", "'z': "), ["array 1 ", "'b': ", "'y': "]),
    "fewer": (LEAVES[:2], ["array 2 ", "'c': int8[1]", "(no such array) on rank 1"]),
    "more": ((*LEAVES, "'d': bool[1]"), ["array 3 ", "(no such array) on ranks 0, 2", "'d': bool[1]"]),
    "none": ((), ["array 0 ", "'a': float32[3]", "(no such array) on rank 1"]),
}


@pytest.mark.parametrize("name", LEAF_CHANGES)
def test_the_first_array_that_differs_is_named(name: str, signed: bool) -> None:
    leaves, parts = LEAF_CHANGES[name]
    error = agree(with_one(3, 1, leaves=leaves, layout=digest("\n".join(leaves))), signed=signed)
    assert type(error) is errors.MismatchError
    assert all(part in str(error) for part in parts), str(error)
    assert "on ranks 0, 2" in str(error)
    assert "on rank 1" in str(error)


@pytest.mark.parametrize("letter", ["k", "ü", "層", "\U0001f600"])
@pytest.mark.parametrize("length", [50, 400, 2000])
def test_what_differs_is_named_behind_a_long_key(letter: str, length: int) -> None:
    leaves = [(f"{letter * length!r}: {dtype}[3], sum, Raw()",) for dtype in ("float32", "int16")]
    error = agree([call(leaves=x, layout=digest(x[0])) for x in leaves])
    assert type(error) is errors.MismatchError
    assert letter * 20 in str(error)
    assert "float32[3], sum, Raw() on rank 0" in str(error)
    assert "int16[3], sum, Raw() on rank 1" in str(error)


def test_words_stay_below_two_to_the_31_but_for_the_pairs() -> None:
    leaves = ("'é': float32[3]", *LEAVES[1:])
    changed = call(leaves=leaves, layout=digest("\n".join(leaves)))
    cases = [with_one(3, 1, step=2**31), with_one(3, 2, error=ValueError("ÿ" * 700)), [call(), changed]]
    for calls in cases:
        _, sent = drive([rendezvous(c, r, len(calls)) for r, c in enumerate(calls)])
        rest = [words[2 * len(FIELDS) :] for words in sent[0]] + [w for words in sent[1:] for w in words]
        assert len(sent) >= 2
        assert max(int(w.max()) for w in rest) < 1 << 31


def reductions(n: int, size: int) -> list[Generator[Transfer, None, Outcome]]:
    """Return transfers of a call with floats of the largest scales, NaN and integers of every size."""
    codec = get_codec("uniform")
    runs = []
    for rank in range(n):
        big = np.full(size, (-1) ** rank * np.finfo(np.float32).max, dtype=np.float32)
        big[0] = -np.nan if rank else np.inf
        ints = np.array([-(2**61), 2**61], dtype=np.int64)
        tree = {"f": big, "d": big.astype(np.float64)[1:] * 1e200, "i": ints, "s": big[:5]}
        reduction = Reduction(Options(lambda _: codec, lambda _: "sum"))
        attempt = reduction.start(tree, Place(rank, n, one_host=False))
        assert attempt.call.error is None
        runs.append(attempt.transfers())
    return runs


@pytest.mark.parametrize("codec", ["uniform", "intsgd"])  # a header under MAX, and one that is summed
def test_what_one_rank_has_found_of_links_all_know(codec: str) -> None:
    links = [Links(lambda: False), Links(lambda: True), Links(lambda: False)]
    reduced = [Reduction(Options(lambda _: get_codec(codec), lambda _: "sum")) for _ in links]

    def call(sizes: Sequence[int]) -> list[BaseException | None]:
        trees = [np.ones(size, np.float32) for size in sizes]
        places = [Place(rank, len(links), one_host=False, links=x) for rank, x in enumerate(links)]
        attempts = [r.start(x, p) for r, x, p in zip(reduced, trees, places, strict=True)]
        return [outcome.error for outcome in drive([a.transfers() for a in attempts])[0]]

    assert all(isinstance(error, errors.MismatchError) for error in call([5000, 5000, 5001]))
    assert [x.slow for x in links] == [False] * 3  # nothing has been agreed on
    assert call([5000] * 3) == [None] * 3
    assert [x.slow for x in links] == [True] * 3
    links[1].found = lambda: False
    assert [x.slow for x in links] == [True] * 3
    assert call([5000] * 3) == [None] * 3
    assert [x.slow for x in links] == [False] * 3


def test_a_whole_call_needs_no_unsigned_maximum() -> None:
    outcomes, unsigned = drive(reductions(3, 300_000))
    again, signed = drive(reductions(3, 300_000), signed=True)
    assert [o.error for o in outcomes + again] == [None] * 6
    assert len(unsigned) == len(signed)
    for a, b in zip(unsigned, signed, strict=True):
        np.testing.assert_array_equal(a, b)
    tail = [words[2 * len(FIELDS) :] for words in unsigned[0]] + [w for ws in unsigned[1:] for w in ws]
    assert max(int(w.max()) for w in tail) < 1 << 31


KINDS: list[BaseException] = [
    *(k("the reason") for k in (TypeError, ValueError, BufferError, OverflowError, MemoryError)),
    *(k("the reason") for k in (errors.MismatchError, errors.NegotiationError, errors.NonFiniteError)),
    errors.BackendError("the reason"),
    errors.UnknownCodecError("unfiorm", "the reason"),
]


@pytest.mark.parametrize("error", KINDS, ids=lambda e: type(e).__name__)
def test_a_failure_of_one_rank_is_raised_alike_on_all(error: BaseException) -> None:
    calls = with_one(3, 2, error=error, layout=(0, 0))
    outcomes, _ = drive([rendezvous(c, r, 3) for r, c in enumerate(calls)])
    for rank, outcome in enumerate(outcomes):
        assert type(outcome.error) is type(error)
        assert str(outcome.error) == "rank 2: the reason"
        assert outcome.error.__cause__ is (error if rank == 2 else None)


def test_a_failure_of_another_type_keeps_its_name() -> None:
    class OddError(Exception):
        pass

    error = agree(with_one(2, 0, error=OddError("why")))
    assert type(error) is errors.GccommError
    assert str(error) == "rank 0: OddError: why"
    assert str(agree(with_one(2, 1, error=KeyError("k")))) == "rank 1: KeyError: 'k'"


def test_the_lowest_rank_that_failed_is_named_whatever_the_others_do() -> None:
    calls = [
        call(step=8),
        call(error=TypeError("one")),
        call(opcode="close"),
        call(error=ValueError("three")),
    ]
    error = agree(calls)
    assert type(error) is TypeError
    assert str(error) == "rank 1: one"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "one \"two\" 'three' \\ four",
        "line\nbreak\r\n\ttab",
        "ÄÖÜ ß 漢字 \U0001f600",
        "\x00\x7f\x80",
        "\ud800",
    ],
    ids=["empty", "quotes", "newlines", "non-ascii", "controls", "surrogate"],
)
def test_texts_arrive_as_they_are(text: str, signed: bool) -> None:
    assert str(agree(with_one(3, 1, error=ValueError(text)), signed=signed)) == f"rank 1: {text}"


@pytest.mark.parametrize("letter", ["x", '"', "\n", "\x00", "ß", "漢", "\U0001f600"], ids=ascii)
@pytest.mark.parametrize("length", [89, 899, 900, 5000])
def test_long_texts_are_cut_but_never_garbled(letter: str, length: int) -> None:
    error = agree(with_one(2, 1, error=ValueError(letter * length), policy="p" * 5000, state=letter * 5000))
    assert type(error) is ValueError
    prefix, _, text = str(error).partition("rank 1: ")
    assert prefix == ""
    kept = re.sub(r"\.\.\.\[hash [0-9a-f]{8}\]\.\.\.", "", text)
    assert kept == letter * len(kept)
    assert min(length, 100) <= len(kept) <= length


def test_slots_are_whole_json_and_hold_one_rank_each() -> None:
    n = 12
    calls = [call(policy=f"seed={r}", error=ValueError(f"é{r}") if r > 9 else None) for r in range(n)]
    _, sent = drive([rendezvous(c, r, n) for r, c in enumerate(calls)])
    for rank, words in enumerate(sent[1]):
        slots = words.reshape(n, -1)
        assert [r for r in range(n) if slots[r].any()] == [rank]
        octets = np.stack([slots[rank] >> shift & 255 for shift in (0, 8, 16)], axis=-1).astype(np.uint8)
        report = json.loads(octets.tobytes())
        assert report["options"] == f"seed={rank}"
        assert report["error"] == (["ValueError", f"é{rank}"] if rank > 9 else None)


def test_many_ranks_are_grouped_and_shortened() -> None:
    n = 40
    error = agree([call(step=3 if r in (7, 30) else 2) for r in range(n)])
    assert "2 on ranks 0, 1, 2, 3, 4, 5, 6, 8 and 30 more; 3 on ranks 7, 30" in str(error)
    error = agree([call(reducer=8 * (r == 8)) for r in range(9)])
    assert "0 on ranks 0, 1, 2, 3, 4, 5, 6, 7; 8 on rank 8." in str(error)


@pytest.mark.parametrize(
    ("trees", "parts"),
    [
        ([np.zeros(3), np.zeros(4)], ["array 0", "float64[3]", "float64[4]"]),
        ([{"a": 1.0, "b": 2}, {"a": 1.0, "c": 2}], ["array 1", "'b': int64[scalar]", "'c': int64[scalar]"]),
        ([np.zeros(3, np.int8), np.zeros(3, np.int16)], ["array 0", "int8[3]", "int16[3]"]),
        (
            [{"a": 1.0, "b": None}, {"a": 1.0}],
            ["array 1", "'b': None on rank 0", "(no such array) on rank 1"],
        ),
        ([[None], [1.0]], ["array 0", "'0': None on rank 0", "'0': float64[scalar]"]),
    ],
)
def test_trees_that_differ(trees: list[Any], parts: list[str]) -> None:
    options = Options(lambda _: get_codec("uniform"), lambda _: "sum")
    reduction = [Reduction(options) for _ in trees]
    attempts = [reduction[r].start(tree, Place(r, len(trees))) for r, tree in enumerate(trees)]
    outcomes, _ = drive([a.transfers() for a in attempts])
    for attempt, outcome in zip(attempts, outcomes, strict=True):
        with pytest.raises(errors.MismatchError) as caught:
            attempt.commit(outcome)
        assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert [r.step for r in reduction] == [0, 0]
