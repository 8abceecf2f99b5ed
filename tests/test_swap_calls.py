"""Calls whose ranks swap their tensors: kernels that work out what all ranks would have sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gccomm import kernels
from gccomm.agreement import HEADER_WORDS, MISSING_WORD, Call, write_header
from gccomm.codecs import get_codec
from gccomm.kernels import LANES
from gccomm.lanes import rank_shift
from gccomm.layout import LeafSpec
from gccomm.plan import Plan
from gccomm.ready import Ready
from gccomm.running import Running
from gccomm.steps import Agree, Context
from gccomm.testing import simulate
from tests.kernel_batches import normal

MOST = 8 << 10
DONE, DIFFERS = 1, 2

Array = npt.NDArray[Any]


def call_of(**fields: Any) -> Call:
    return Call("compressed_allreduce", layout=(5, 6), policy="p", state="s", **fields)


class Side:
    """One rank's call on an array, or without one."""

    def __init__(
        self, rank: int, ranks: int, x: Array, codec: str, *, mean: bool = False, **call: Any
    ) -> None:
        self.x, self.result, self.rank, self.ranks = x, np.zeros_like(x), rank, ranks
        spec = LeafSpec("", str(x.dtype), x.shape, x.shape, get_codec(codec), mean)
        self.plan = Plan([spec], ranks)
        addresses = (np.array([kernels.address(a)], np.uint64) for a in (self.x, self.result))
        self.plan.bind(0, rank, *addresses)
        context = Context(rank, ranks, rank_shift(rank, ranks), sums_lanes=True)
        self.running = Running(self.plan.operands[0], context, (None,))
        self.ready = Ready(call_of(**call), rank, self.plan.operands[0], self.plan.keys[0])
        self.swaps = self.ready.swap(self.running.step, MOST, context)
        self.message = kernels.pool_empty(4 * HEADER_WORDS + 2 * MOST)

    @property
    def job(self) -> int:
        return kernels.address(self.ready.job)

    def pack(self, step: int = 0, *, absent: bool = False) -> None:
        source = 0 if absent else kernels.address(self.x)
        self.ready.begin(source, kernels.address(self.result), step, slow=False)
        assert kernels.swap_bytes(self.job)[1] == self.ready.nbytes <= self.message.size
        kernels.swap_pack(self.job, kernels.address(self.message))

    def finish(self, messages: Sequence[Array]) -> int:
        table = np.array([kernels.address(m) for m in messages], np.uint64)
        shifts = np.array([rank_shift(r, self.ranks) for r in range(self.ranks)], np.uint32)
        where = kernels.address(table), kernels.address(shifts)
        return kernels.swap_finish(self.job, *where, self.ranks, self.rank)


def sides_of(ranks: int, codec: str, size: int, dtype: str = "float32", **more: Any) -> list[Side]:
    return [Side(r, ranks, normal(size, seed=r).astype(dtype), codec, **more) for r in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("codec", ["uniform:wire_bits=5", "uniform", "rotated:headroom=safe"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("size", [1024, 1037])
def test_lanes_have_the_bits_of_messages(ranks: int, codec: str, dtype: str, size: int) -> None:
    sides = sides_of(ranks, codec, size, dtype)
    for side in sides:
        assert side.swaps
        side.pack()
    messages = [side.message for side in sides]
    assert [side.finish(messages) for side in sides] == [DONE] * ranks
    expected, _ = simulate([side.x for side in sides], codec)
    for side in sides:
        assert side.result.tobytes() == expected[0].tobytes()


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("codec", ["raw", "bf16", "fp16"])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("size", [1, 2, 1025])
def test_floats(ranks: int, codec: str, mean: bool, size: int) -> None:
    """Also where what travels ends within a word."""
    sides = sides_of(ranks, codec, size, mean=mean)
    for side in sides:
        side.pack()
    messages = [side.message for side in sides]
    assert [side.finish(messages) for side in sides] == [DONE] * ranks
    exact = np.sum([side.x.astype(np.float64) for side in sides], axis=0) / (ranks if mean else 1)
    eps = {"raw": 2**-22, "bf16": 2**-7, "fp16": 2**-10}[codec]
    for side in sides:
        assert side.result.tobytes() == sides[0].result.tobytes()
        assert np.allclose(side.result, exact, rtol=4 * eps, atol=4 * ranks * eps)


@pytest.mark.parametrize("codec", ["raw", "bf16", "uniform"])
def test_a_tensor_that_is_not_there_counts_as_zeros(codec: str) -> None:
    sides = sides_of(3, codec, 1024)
    sides[1].x[:] = 0
    for absent in (False, True):
        for side in sides:
            side.result[:] = 9
            side.message[:] = 255
            side.pack(absent=absent and side.rank == 1)
        assert all(side.finish([s.message for s in sides]) == DONE for side in sides)
        if not absent:
            expected = sides[0].result.copy()
    assert all((side.result == expected).all() for side in sides)


def test_the_flag_of_a_value_that_is_missing_is_no_difference() -> None:
    sides = sides_of(2, "raw", 100)
    sides[1] = Side(1, 2, sides[1].x, "raw", missing=True)
    for side in sides:
        side.pack()
    assert all(side.finish([s.message for s in sides]) == DONE for side in sides)
    assert all(side.ready.agreed[MISSING_WORD] == 1 for side in sides)


@pytest.mark.parametrize("fields", [{"step": 8}, {"error": ValueError("bad")}, {"reducer": 3}])
@pytest.mark.parametrize("codec", ["raw", "uniform"])
def test_ranks_that_differ_sum_nothing(fields: dict[str, Any], codec: str) -> None:
    """What the header of the other one says is agreed on."""
    side, other = Side(0, 2, normal(1024), codec), np.zeros(4 * HEADER_WORDS + MOST, np.uint8)
    side.pack(step=7)
    words = other.view(np.uint32)
    write_header(call_of(**{"step": 7, **fields}), 1, words)
    assert side.finish([side.message, other]) == DIFFERS
    assert not side.result.any()
    own = side.message.view(np.uint32)[:HEADER_WORDS]
    assert (side.ready.agreed[:HEADER_WORDS] == np.maximum(own, words[:HEADER_WORDS])).all()


@pytest.mark.parametrize("codec", ["thc", "qsgd-mn", "rotated:headroom=checked", "topkc", "intsgd"])
def test_codecs_that_begin_otherwise_do_not_swap(codec: str) -> None:
    side = Side(0, 2, normal(1024), codec)
    assert not side.swaps
    assert not side.ready.whole


def test_floats_that_are_too_long_do_not_swap() -> None:
    x = np.ones(MOST // 2, np.float16)
    assert Side(0, 2, x[: MOST // 4], "raw").swaps
    assert Side(0, 2, np.ones(MOST // 4 + 1, np.float32), "raw").swaps is False


@pytest.mark.parametrize(
    ("codec", "nbytes", "dtype", "more", "swaps"),
    [
        ("raw", 4096, "float32", {}, True),
        ("raw", 4096, "int32", {}, False),
        ("uniform", 4096, "bfloat16", {}, True),
        ("uniform", 8196, "float32", {}, False),
        ("uniform", 0, "float32", {}, False),
        ("uniform", 4096, "float32", {"feedback": True}, False),
        ("qsgd-mn", 4096, "float32", {}, False),
    ],
)
def test_which_layouts_swap(codec: str, nbytes: int, dtype: str, more: dict[str, Any], swaps: bool) -> None:
    route = get_codec(codec)
    shape = (nbytes // (2 if dtype == "bfloat16" else 4),)
    spec = LeafSpec("a", dtype, shape, shape, route, False, **more)
    assert Plan([spec], 2).swaps(MOST) is swaps
    assert not Plan([spec], 2).swaps(0)
    assert not Plan([spec, LeafSpec("b", *[dtype, shape, shape, route, False])], 2).swaps(MOST)
    assert not Plan([spec], 2, nones=("b",)).swaps(MOST)


@pytest.mark.parametrize(
    ("field", "value"), [("header_words", -1), ("count", -1), ("item", 0), ("kind", 6), ("wire", 4)]
)
def test_fields_out_of_range_are_refused(field: str, value: int) -> None:
    side = Side(0, 2, normal(1024), "raw")
    side.pack()
    side.ready.job[field] = value
    for function in (kernels.swap_bytes, lambda job: kernels.swap_pack(job, 0)):
        with pytest.raises(ValueError, match=r"must|outside"):
            function(side.job)
    with pytest.raises(ValueError, match=r"must|outside"):
        side.finish([side.message] * 2)


@pytest.mark.parametrize(("field", "value"), [("width", 7), ("limit", 0), ("rotations", 3), ("segments", 2)])
def test_lanes_out_of_range_are_refused(field: str, value: int) -> None:
    side = Side(0, 2, normal(1024), "uniform")
    lanes = np.zeros(1, LANES)
    lanes[...] = side.running.step.job  # type: ignore[union-attr]
    lanes[field] = value
    side.ready.job["lanes"] = kernels.address(lanes)
    with pytest.raises(ValueError, match=r"must|no such|outside|only"):
        kernels.swap_bytes(side.job)


def test_integers_are_refused() -> None:
    side = Side(0, 2, normal(1024), "uniform")
    side.plan.table["dtype"] = kernels.DTYPE_CODES["int32"]
    with pytest.raises(ValueError, match="only floats are swapped"):
        kernels.swap_bytes(side.job)


def test_ranks_out_of_range_are_refused() -> None:
    side = Side(0, 2, normal(1024), "raw")
    side.pack()
    side.rank = 2
    with pytest.raises(ValueError, match="no such ranks"):
        side.finish([side.message] * 2)


def test_a_step_of_another_kind_is_none_to_swap() -> None:
    side = Side(0, 2, normal(1024), "raw")
    assert not side.ready.swap(Agree(1, lambda _out: None), MOST, Context(0, 2, 0))
