"""Whole calls through memory that ranks share, without Python in between: two ranks in this process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gccomm import kernels
from gccomm.agreement import HEADER_WORDS, MESSAGE_WORDS, SLOW_WORD, Call, tag_of, write_header
from gccomm.kernels import EXCHANGE, LANES
from gccomm.layout import BLOCK
from gccomm.noise import step_key, tensor_key
from gccomm.options import Place
from gccomm.ready import Ready
from gccomm.steps import Context, FloatSum
from tests.kernel_batches import Part, lane_batch, normal

RANKS, TURNS, SLOT_BYTES, FLAG_BYTES = 2, 4, 64 << 10, 64
KEY = tensor_key("weights", 7)
WAITS, DONE, DIFFERS = range(3)

Array = npt.NDArray[Any]


class Shared:
    """Slots and flags of all ranks, and a record of each that works on them."""

    def __init__(self, number: int = 0) -> None:
        # Streams need whole lines of the cache.
        self.slots = kernels.pool_empty(TURNS * RANKS * SLOT_BYTES).reshape(TURNS, RANKS, SLOT_BYTES)
        self.flags = np.zeros((2, RANKS, FLAG_BYTES), np.uint8)
        tables = [np.array([[kernels.address(s) for s in turn] for turn in self.slots], np.uint64)]
        tables += [np.array([kernels.address(f) for f in kind], np.uint64) for kind in self.flags]
        self.own = np.zeros((RANKS, 3 * SLOT_BYTES), np.uint8)
        self.alive, self.records = tables, np.zeros(RANKS, EXCHANGE)
        for rank, record in enumerate(self.records):
            record["slots"], record["up"], record["down"] = map(kernels.address, tables)
            record["own"], record["slot_bytes"] = kernels.address(self.own[rank]), SLOT_BYTES
            record["turns"], record["ranks"], record["rank"], record["spins"] = TURNS, RANKS, rank, 1
            record["number"] = number
        self.flags[..., :4].view(np.uint32)[...] = number

    def go_on(self) -> None:
        """Be ready for the next call."""
        for record in self.records:
            record["number"] += record["finished"]
            record["posted"] = record["finished"] = record["event"] = 0

    def at(self, rank: int) -> int:
        return kernels.address(self.records[rank : rank + 1])


class Operand:
    """What a record needs of one."""

    mean, rotated = False, None

    def __init__(self, x: Array) -> None:
        self.batch = lane_batch(8, Part(x))
        self.address, self.blocks = kernels.address(self.batch.table), self.batch.blocks
        self.offsets = np.minimum(np.arange(self.blocks + 1) * BLOCK, x.size)
        self.specs = (SimpleNamespace(dtype="float32"),)


class Side:
    """One rank's call on an array; the other fields are those of the record."""

    def __init__(self, rank: int, x: Array, call: Call, *, converts: bool = False, **fields: int) -> None:
        self.x, self.result, self.call, self.operand = x, np.zeros_like(x), call, Operand(x)
        self.operand.mean = bool(fields.get("mean"))
        if converts:
            self.operand.specs[0].dtype = "any other"
        self.ready = Ready(call, rank, self.operand, KEY)  # type: ignore[arg-type]
        self.ready.agreed[:] = 9
        step = FloatSum("float32", self.operand.blocks, x.size, nothing, nothing, plain=True)
        self.ready.take(step, Place(rank, RANKS, call_bytes=4 << 10), Context(rank, RANKS, 0))
        for name, value in fields.items():
            self.ready.job[name] = value

    @property
    def job(self) -> int:
        return kernels.address(self.ready.job)

    def begin(self, step: int, *, slow: bool = False) -> None:
        self.call.step = step
        self.ready.begin(kernels.address(self.x), kernels.address(self.result), step, slow=slow)


def nothing(*_: Any) -> None:
    pass


def drive(shared: Shared, sides: list[Side]) -> list[int]:
    """Call for each rank in turn until all have an answer."""
    answers = [WAITS] * RANKS
    for _ in range(1000):
        for rank, side in enumerate(sides):
            if answers[rank] == WAITS:
                answers[rank] = kernels.exchange_call(shared.at(rank), side.job)
        if WAITS not in answers:
            return answers
    raise AssertionError(f"no end: {answers}")


def call_of(**fields: Any) -> Call:
    return Call("compressed_allreduce", layout=(5, 6), policy="p", state="s", **fields)


@pytest.mark.parametrize("step", [0, 1, 0xFFFFFFFF, (1 << 32) + 3, 1 << 63])
@pytest.mark.parametrize("slow", [False, True])
def test_what_is_of_one_call_alone(step: int, slow: bool) -> None:
    side, other = (Side(1, normal(3000), call_of()) for _ in range(2))
    twin = other.operand.batch.table
    side.ready.job["twin"] = kernels.address(twin)
    side.begin(step, slow=slow)
    table = side.operand.batch.table
    assert table["src"][0] == kernels.address(side.x)
    assert table["dst"][0] == kernels.address(side.result)
    for found in (table, twin):
        assert (found["key0"][0], found["key1"][0]) == step_key(*KEY, step)
        assert (found["sign0"][0], found["sign1"][0]) == step_key(*KEY, step)
    expected = np.zeros(MESSAGE_WORDS, np.uint32)
    write_header(side.call, 1, expected)
    expected[SLOW_WORD] = slow
    assert (side.ready.agreed == expected).all()
    assert (side.ready.header == expected[:HEADER_WORDS]).all()
    assert side.ready.tag == tag_of(side.call)


@pytest.mark.parametrize("size", [1, 5, 1024, 3000, 10_000])
@pytest.mark.parametrize("number", [0, (1 << 32) - 4])
def test_floats_as_they_are(size: int, number: int) -> None:
    """Also in several chunks, call after call, and where the numbers of messages start again."""
    shared = Shared(number)
    sides = [Side(rank, normal(size, seed=rank), call_of()) for rank in range(RANKS)]
    for step in range(6):
        for side in sides:
            side.begin(step)
        assert drive(shared, sides) == [DONE] * RANKS
        shared.go_on()
        for side in sides:
            assert (side.result == sides[0].x + sides[1].x).all()
            side.result[...] = 0


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("size", [3, 1024, 70_000, 131_072])
@pytest.mark.parametrize("chunk", [1000, 1024, 5000, 16_384])
def test_floats_that_are_converted(mean: bool, size: int, chunk: int) -> None:
    """Also in chunks that end within blocks, and that memory between calls is too large for."""
    more = {"mean": mean, "chunk": chunk}
    sides = [Side(r, normal(size, seed=r), call_of(), converts=True, **more) for r in range(RANKS)]
    shared = Shared()
    for step in range(2):
        for side in sides:
            side.begin(step)
        assert drive(shared, sides) == [DONE] * RANKS
        expected = (sides[0].x + sides[1].x) / np.float32(RANKS if mean else 1)
        for side in sides:
            assert (side.result == expected).all()
            side.ready.release()
            side.result[...] = 0
        shared.go_on()


@pytest.mark.parametrize(
    ("changes", "whole"),
    [({}, True), ({"plain": False}, False), ({"call_bytes": 0}, False)],
)
def test_what_the_back_end_makes_by_itself(changes: dict[str, Any], whole: bool) -> None:
    x = normal(3000)
    ready = Ready(call_of(), 0, Operand(x), KEY)  # type: ignore[arg-type]
    step = FloatSum("float32", 3, x.size, nothing, nothing, plain=changes.get("plain", True))
    ready.take(step, Place(0, RANKS, call_bytes=changes.get("call_bytes", 4096)), Context(0, RANKS, 0))
    assert ready.whole is whole


@pytest.mark.parametrize("fields", [{"step": 8}, {"missing": True}, {"error": ValueError("bad")}])
def test_ranks_that_differ_sum_nothing(fields: dict[str, Any]) -> None:
    """The other rank's message is that of any call."""
    shared, side, message = Shared(), Side(0, normal(3000), call_of()), np.zeros(MESSAGE_WORDS, np.uint32)
    side.begin(7)
    write_header(call_of(**{"step": 7, **fields}), 1, message)
    arrays = kernels.address(message), kernels.address(message), message.size, 4, message.size
    assert kernels.exchange_call(shared.at(0), side.job) == WAITS
    assert kernels.exchange_array(shared.at(1), *arrays, 1, False)
    assert kernels.exchange_call(shared.at(0), side.job) == DIFFERS
    assert (side.ready.agreed == message).all()
    assert not side.result.any()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("words", 0),
        ("words", 1 << 20),
        ("count", -1),
        ("item", 0),
        ("chunk", 0),
        ("chunk", 1 << 20),
        ("kind", 6),
        ("wire", 4),
    ],
)
def test_fields_out_of_range_are_refused(field: str, value: int) -> None:
    side = Side(0, normal(3000), call_of())
    side.ready.job[field] = value
    with pytest.raises(ValueError, match=r"must|outside"):
        kernels.exchange_call(Shared().at(0), side.job)


def test_lanes_out_of_range_are_refused() -> None:
    side, lanes = Side(0, normal(3000), call_of()), np.zeros(1, LANES)
    side.ready.job["lanes"] = kernels.address(lanes)
    with pytest.raises(ValueError, match="no such lane width"):
        kernels.exchange_call(Shared().at(0), side.job)
