"""Calls on small arrays that are repeated: through shared memory, and as messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gccomm
from gccomm.codecs.floats import Raw
from gccomm.codecs.uniform import Uniform
from gccomm.repeats import Repeat
from gccomm.steps import Agree, FloatSum

CODECS = ["uniform:wire_bits=5", "rotated", "raw", "bf16"]
LONG = (256 * 1024,), (1 << 20,)  # more scales than go with the header where messages have one length
SHAPES = [(1024,), (5,), (130, 513), (1, 180 * 1024 + 3), *LONG, (1999, 513)]
CALLS = 5


@pytest.fixture(params=["1", "0"], ids=["shared memory", "messages"])
def comm(world: Any, request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[gccomm.Communicator]:
    monkeypatch.setenv("GCCOMM_WINDOW", request.param)
    parent = world.Dup()
    with gccomm.init("mpi", comm=parent) as made:
        yield made
    parent.Free()


def draw(rank: int, step: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.random.default_rng([rank, step]).standard_normal(shape).astype(np.float32)


def calls(comm: gccomm.Communicator, codec: str, shape: tuple[int, ...], usual: set[int]) -> list[Any]:
    """Make calls; those of ``usual`` in a way that is not repeated, on this rank."""
    found = []
    for step in range(CALLS):
        x = draw(comm.rank, step, shape)
        out = np.empty_like(x) if step in usual else None
        found.append(comm.compressed_allreduce(x, "sum", codec, out=out).tobytes())
    return found


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_of_other_calls(
    comm: gccomm.Communicator, codec: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    begin = Repeat.begin
    monkeypatch.setattr(Repeat, "begin", lambda self, x, step: steps.append(step) or begin(self, x, step))
    twin = comm.split(0)
    assert twin is not None
    with twin:
        expected = calls(twin, codec, shape, set(range(CALLS)))
        assert not steps
        # The last call is repeated by rank 0 alone.
        found = calls(comm, codec, shape, {4} if comm.rank else set())
    assert steps == ([2, 3] if comm.rank else [2, 3, 4])
    assert found == expected


@pytest.mark.parametrize("codec", ["raw", "bf16", "fp16", "uniform", "rotated"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("size", [1024, 7000])
def test_other_formats_and_means(
    comm: gccomm.Communicator, codec: str, dtype: str, op: str, size: int
) -> None:
    """Bits of calls into a given array, which are not repeated."""
    twin = comm.split(0)
    assert twin is not None
    found, expected = [], []
    with twin:
        for step in range(CALLS):
            x = draw(comm.rank, step, (size,)).astype(dtype)
            found.append(comm.compressed_allreduce(x, op, codec).tobytes())
            expected.append(twin.compressed_allreduce(x, op, codec, out=np.empty_like(x)).tobytes())
    assert found == expected


@pytest.mark.parametrize("codec", ["raw", "uniform", "rotated"])
@pytest.mark.parametrize("size", [1024, 30_000])
def test_a_rank_without_a_value(comm: gccomm.Communicator, codec: str, size: int) -> None:
    """Ranks that repeat the call go on in step with it, and the next calls are repeated again."""
    if comm.size == 1:
        pytest.skip("needs two ranks")
    reducer, other = (gccomm.Reducer(codec, comm=comm, error_feedback=False) for _ in range(2))
    for step in range(CALLS + 2):
        x = draw(comm.rank, step, (size,))
        mine = None if step == CALLS and comm.rank == 1 else x
        found = reducer(mine)
        expected = other({"": mine})[""]
        same = np.allclose(found, expected, atol=1e-5) if codec == "raw" else (found == expected).all()
        assert same


def test_none_after_another_dtype(comm: gccomm.Communicator) -> None:
    """The layout of the key is that of the last call, repeated or not."""
    reducer, x = gccomm.Reducer("uniform:wire_bits=16", comm=comm), np.ones(4096, np.float32)
    for _ in range(CALLS):
        reducer(x)
    reducer(x.astype(np.float64))
    reducer(x)
    assert reducer.state_dict()["layouts"][""][0] == "float32"
    found = reducer(None if comm.rank else x)
    assert found.dtype == np.float32
    assert np.allclose(found, 1 / comm.size, rtol=0.02)


class Halves(Raw):
    """Floats with arithmetic of the codec's own, or with two sums."""

    id = "test-halves"

    def __init__(self, sums: int) -> None:
        self.sums = sums

    def steps(self, x: Any, state: Any, ctx: Any) -> Any:
        def encode(lo: int, hi: int, out: Any) -> None:
            x.encode_floats(lo, hi, out, "float32")
            out /= 2

        def decode(lo: int, hi: int, buffer: Any) -> None:
            x.decode_floats(lo, hi, buffer, "float32", ctx)

        for _ in range(self.sums):
            yield FloatSum("float32", x.blocks, x.words, encode, decode)

    def repeats(self, ctx: Any) -> bool:
        return True


@pytest.mark.parametrize("sums", [1, 2])
def test_floats_of_a_codec_of_somebody_else(comm: gccomm.Communicator, sums: int) -> None:
    x = np.full(2000, 2, np.float32)
    for _ in range(CALLS + 1):
        assert set(comm.compressed_allreduce(x, "sum", Halves(sums)).tolist()) == {comm.size}


class TwoSums(Raw):
    """Two sums of floats that a back end could make by itself."""

    id = "test-two-sums"

    def steps(self, x: Any, state: Any, ctx: Any) -> Any:
        yield from super().steps(x, state, ctx)
        yield from super().steps(x, state, ctx)

    def repeats(self, ctx: Any) -> bool:
        return True


class Stores(Raw):
    """Arithmetic behind the sum."""

    id = "test-stores"

    def steps(self, x: Any, state: Any, ctx: Any) -> Any:
        yield from super().steps(x, state, ctx)
        x.store(0, np.full(x.coordinates, 7, np.float32))

    def repeats(self, ctx: Any) -> bool:
        return True


class AgreesLate(Uniform):
    """An agreement behind the sum."""

    id = "test-agrees-late"

    def steps(self, x: Any, state: Any, ctx: Any) -> Any:
        yield from super().steps(x, state, ctx)
        found = yield Agree(1, lambda out: out.fill(7))
        assert found.tolist() == [7]
        x.store(0, np.full(x.coordinates, 7, np.float32))

    def repeats(self, ctx: Any) -> bool:
        return True


@pytest.mark.parametrize("codec", [TwoSums(), Stores(), AgreesLate()])
def test_what_follows_a_sum_is_done_in_every_call(comm: gccomm.Communicator, codec: Any) -> None:
    """By ranks that repeat it as by others, in as many messages."""
    x, messages = np.ones(1500, np.float32), set()
    for step in range(CALLS + 2):
        out = np.empty_like(x) if step == CALLS and comm.rank else None
        found = comm.compressed_allreduce(x, "sum", codec, out=out)
        assert set(found.tolist()) == {comm.size if isinstance(codec, TwoSums) else 7}
        messages.add(comm.stats.messages)
    assert len(messages) == 1


@pytest.mark.parametrize("kind", ["barrier", "raw", "uniform", "large", "broadcast", "split"])
@pytest.mark.parametrize("summed", ["first", "last"])
@pytest.mark.parametrize("calls", [1, CALLS])
def test_a_summed_header_of_zeros_is_none_of_another_call(
    comm: gccomm.Communicator, world: Any, kind: str, summed: str, calls: int
) -> None:
    """The words behind it are zeros, too: under a MAX nothing but the header could tell."""
    if comm.size == 1:
        pytest.skip("needs two ranks")
    reducer = gccomm.Reducer("uniform:scales=predicted", op="sum", comm=comm)
    x = np.zeros(1024, np.float32)
    for _ in range(calls):
        reducer(x)
        comm.compressed_allreduce(x + 1, "sum", "raw")
    size = 1 << 20 if kind == "large" else 1024
    others: dict[str, Any] = {"barrier": comm.barrier, "split": lambda: comm.split(0)}
    others["broadcast"] = lambda: comm.broadcast(x)
    codec = "uniform" if kind == "uniform" else "raw"
    other = others.get(kind, lambda: comm.compressed_allreduce(np.ones(size, np.float32), "sum", codec))
    mine = comm.rank == (0 if summed == "first" else comm.size - 1)
    with pytest.raises(gccomm.MismatchError) as caught:
        reducer(x) if mine else other()
    assert len(set(world.allgather(str(caught.value)))) == 1
    assert (comm.allreduce(x + 1) == comm.size).all()


def test_links_of_a_call_that_does_not_match_are_not_taken_over(comm: gccomm.Communicator) -> None:
    if comm.size == 1:
        pytest.skip("needs two ranks")
    for step in range(CALLS):
        comm.compressed_allreduce(draw(comm.rank, step, (1024,)), "sum", "uniform")
    links = comm._place.links
    links.found = lambda: comm.rank == 1
    with pytest.raises(gccomm.MismatchError):
        comm.compressed_allreduce(np.ones(1024 + comm.rank % 2, np.float32), "sum", "uniform")
    assert links.slow is False


def test_a_mismatch_reaches_all_and_the_next_call_works(comm: gccomm.Communicator) -> None:
    if comm.size == 1:
        pytest.skip("needs two ranks")
    for step in range(4):
        comm.compressed_allreduce(draw(comm.rank, step, (1024,)), "sum", "uniform")
    x, other = np.ones(1024, np.float32), np.ones(1025, np.float32)
    with pytest.raises(gccomm.MismatchError, match=r"float32\[1025\]"):
        comm.compressed_allreduce(other if comm.rank == 1 else x, "sum", "uniform")
    with pytest.raises(ValueError, match="rank 1: "):
        comm.compressed_allreduce(x, "sum" if comm.rank != 1 else "product", "uniform")
    result = comm.compressed_allreduce(np.ones(1024, np.float32), "sum", "uniform:wire_bits=16")
    assert np.allclose(result, comm.size, atol=1e-2)


def test_repeated_calls_between_asynchronous_ones(comm: gccomm.Communicator) -> None:
    if comm._backend.no_threads:  # type: ignore[attr-defined]
        pytest.skip("MPI allows no second thread")
    x = np.ones(2000, np.float32)
    works, found = [], []
    for _ in range(6):
        works.append(comm.compressed_allreduce_async(x, "sum", "uniform:wire_bits=16"))
        found.append(comm.compressed_allreduce(x, "sum", "uniform:wire_bits=16"))
    for result in (*found, *(work.wait(20) for work in works)):
        assert np.allclose(result, comm.size, atol=1e-2)


def test_a_slow_link_that_one_rank_has_timed_halves_pieces_on_all(comm: gccomm.Communicator) -> None:
    """Ranks that repeat calls hear of it as those that do not; the results stay the same."""
    twin = comm.split(0)
    assert twin is not None
    with twin:
        expected = [*calls(twin, "uniform", (3000,), set()), *calls(twin, "uniform", (3 << 20,), set())]
        whole = twin.stats.messages
    links = comm._place.links
    links.found = lambda: comm.rank == comm.size - 1 and comm._step >= CALLS - 1
    found = calls(comm, "uniform", (3000,), {CALLS - 1} if comm.rank == 0 else set())
    assert links.slow is True
    found += calls(comm, "uniform", (3 << 20,), set())
    assert found == expected
    in_one = comm._backend.sums_lanes  # type: ignore[attr-defined]  # one piece, of any size
    assert (comm.stats.messages > whole) is not in_one
