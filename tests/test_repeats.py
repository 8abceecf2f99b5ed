"""Calls on small arrays that are repeated: the results, figures and errors of any other call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gccomm
from gccomm import timeline
from gccomm.codecs import get_codec
from gccomm.codecs.floats import Raw
from gccomm.codecs.rotated import Rotated
from gccomm.codecs.uniform import Uniform
from gccomm.repeats import KEPT, KEPT_WORDS, Repeat
from gccomm.testing import run, simulate

F4 = np.float32
CODECS = (
    "uniform:wire_bits=8",
    "uniform:wire_bits=5",
    "rotated",
    "rotated:wire_bits=4,rotations=2,headroom=safe",
    "raw",
    "bf16",
    "fp16",
)
CALLS = 5


def draw(rank: int, step: int, shape: tuple[int, ...], dtype: Any = F4) -> np.ndarray[Any, Any]:
    return np.random.default_rng([rank, step]).standard_normal(shape).astype(dtype)


def same(mine: Any, other: Any) -> bool:
    return mine.dtype == other.dtype and mine.shape == other.shape and mine.tobytes() == other.tobytes()


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the steps that are repeated from now on, by all ranks."""
    steps: list[int] = []
    begin = Repeat.begin

    def noted(self: Repeat, array: Any, step: int) -> Any:
        steps.append(step)
        return begin(self, array, step)

    monkeypatch.setattr(Repeat, "begin", noted)
    return steps


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("shape", [(1024,), (7,), (3, 700), (20001,)])
def test_results_are_those_of_other_calls(
    codec: str, ranks: int, shape: tuple[int, ...], repeated: list[int]
) -> None:
    def calls(comm: gccomm.Communicator) -> list[Any]:
        found = []
        for step in range(CALLS):
            found.append(comm.compressed_allreduce(draw(comm.rank, step, shape), "sum", codec))
            assert comm.stats.messages >= 2
            assert comm.stats.float32_bytes == 4 * found[-1].size
        return found

    found = run(calls, ranks)
    assert sorted(repeated) == [2] * ranks + [3] * ranks + [4] * ranks
    repeated.clear()
    expected = run(lambda comm: by_out(comm, codec, shape), ranks)
    assert not repeated
    for mine, others in zip(found, expected, strict=True):
        assert all(same(a, b) for a, b in zip(mine, others, strict=True))


def by_out(comm: gccomm.Communicator, codec: str, shape: tuple[int, ...]) -> list[Any]:
    """Make the same calls in the usual way."""
    found = []
    for step in range(CALLS):
        x = draw(comm.rank, step, shape)
        found.append(comm.compressed_allreduce(x, "sum", codec, out=np.empty_like(x)))
    return found


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("codec", ["rotated", "raw", "bf16"])
def test_dtypes_and_means(dtype: Any, op: str, codec: str, repeated: list[int]) -> None:
    def calls(comm: gccomm.Communicator) -> list[Any]:
        return [comm.compressed_allreduce(draw(comm.rank, s, (2, 900), dtype), op, codec) for s in range(4)]

    found = run(calls, 3)
    assert len(repeated) == 6
    xs = [draw(rank, 3, (2, 900), dtype) for rank in range(3)]
    expected, _ = simulate(lambda _step: xs, codec, op=op, steps=4)
    assert all(same(found[rank][3], expected[rank]) for rank in range(3))


def test_ranks_need_not_repeat_together() -> None:
    """Strided arrays, `out` and traces take the usual way on one rank, and all get the same."""

    def calls(comm: gccomm.Communicator) -> list[Any]:
        found = []
        for step in range(8):
            x = draw(comm.rank, step, (2000,))
            if step % 3 == comm.rank:
                x = np.repeat(x, 2)[::2]
            if step == 5 and comm.rank == 2:
                found.append(comm.compressed_allreduce(x, "sum", "uniform", out=np.empty_like(x)))
            elif step == 6 and comm.rank == 1:
                with timeline.recording():
                    found.append(comm.compressed_allreduce(x, "sum", "uniform"))
            else:
                found.append(comm.compressed_allreduce(x, "sum", "uniform"))
        return found

    found = run(calls, 3)
    for step in range(8):
        xs = [draw(rank, step, (2000,)) for rank in range(3)]
        expected, _ = simulate(lambda _s, xs=xs: xs, "uniform", op="sum", steps=step + 1)
        assert all(same(found[rank][step], expected[0]) for rank in range(3))


def test_results_are_new_and_inputs_unchanged(repeated: list[int]) -> None:
    x = draw(0, 0, (1500,))
    with run_alone() as comm:
        results = [comm.compressed_allreduce(x, "sum", "uniform:wire_bits=16") for _ in range(5)]
    assert len(repeated) == 3
    assert same(x, draw(0, 0, (1500,)))
    assert len({r.ctypes.data for r in results}) == 5
    assert all(np.allclose(r, x, atol=1e-3) for r in results)


def run_alone() -> gccomm.Communicator:
    return gccomm.init("local")


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_not_finite_propagate(bad: float, repeated: list[int]) -> None:
    def calls(comm: gccomm.Communicator) -> Any:
        for step in range(4):
            x = draw(comm.rank, step, (2048,))
            if step == 3 and comm.rank == 1:
                x[5] = bad
            y = comm.compressed_allreduce(x, "sum", "rotated")
        return y

    for y in run(calls, 2):
        assert np.isnan(y[:1024]).all()
        assert np.isfinite(y[1024:]).all()
    assert len(repeated) == 4


def test_mismatch_names_ranks_and_the_next_call_works(repeated: list[int]) -> None:
    def calls(comm: gccomm.Communicator) -> list[str]:
        texts = []
        for step in range(6):
            n = 1001 if step == 4 and comm.rank == 1 else 1000
            try:
                comm.compressed_allreduce(draw(comm.rank, step, (n,)), "sum", "uniform", exact_below=0)
            except gccomm.MismatchError as error:
                texts.append(str(error))
        return texts

    first, second = run(calls, 2)
    assert first == second
    assert len(first) == 1
    assert "float32[1000]" in first[0]
    assert "float32[1001]" in first[0]
    assert len(repeated) == 3 * 2 + 1  # not by the rank whose array was another one


def test_errors_of_another_rank_reach_the_one_that_repeats(repeated: list[int]) -> None:
    def calls(comm: gccomm.Communicator) -> list[str]:
        texts = []
        for step in range(5):
            x: Any = draw(comm.rank, step, (3000,))
            if step == 3 and comm.rank == 0:
                x = np.array(["text"])
            try:
                comm.compressed_allreduce(x, "sum", "rotated")
            except TypeError as error:
                texts.append(str(error))
        return texts

    first, second = run(calls, 2)
    assert first == second
    assert len(first) == 1
    assert first[0].startswith("rank 0: ")


def test_options_that_are_equal_but_bad_are_still_refused() -> None:
    with run_alone() as comm:
        x = draw(0, 0, (1024,))
        for _ in range(4):
            comm.compressed_allreduce(x, "sum", "uniform", exact_below=1)
        for bad in (True, 1.0):
            with pytest.raises(TypeError, match="exact_below"):
                comm.compressed_allreduce(x, "sum", "uniform", exact_below=bad)


def test_reducer_repeats_between_measured_steps(repeated: list[int]) -> None:
    def calls(comm: gccomm.Communicator) -> list[Any]:
        reducer = gccomm.Reducer("rotated", comm=comm)
        found = []
        for step in range(20):
            found.append(reducer(draw(comm.rank, step, (3000,))))
            assert reducer.step == step + 1
            assert np.isfinite(reducer.stats.vnmse_estimate)
        return found

    found = run(calls, 2)
    assert 16 not in repeated  # a step in which the error is measured
    assert repeated.count(19) == 2
    twin = run(lambda comm: as_dicts(comm), 2)
    for rank in range(2):
        assert all(same(a, b) for a, b in zip(found[rank], twin[rank], strict=True))


def as_dicts(comm: gccomm.Communicator) -> list[Any]:
    """Make the same calls with the array in a dict of the same key, which is not repeated."""
    reducer = gccomm.Reducer("rotated", comm=comm)
    return [reducer({"": draw(comm.rank, step, (3000,))})[""] for step in range(20)]


def test_reducer_with_another_layout_or_a_none_in_between(repeated: list[int]) -> None:
    def calls(comm: gccomm.Communicator) -> None:
        reducer = gccomm.Reducer("uniform:wire_bits=16", comm=comm, op="sum", exact_below=0)
        for step in range(12):
            n = 5000 if step in (7, 8) else 4000
            x = draw(comm.rank, step, (n,))
            y = reducer(None if step == 10 and comm.rank == 1 else x)
            xs = [draw(rank, step, (n,)) for rank in range(1 if step == 10 else comm.size)]
            assert np.allclose(y, np.sum(xs, axis=0), atol=1e-3)

    run(calls, 2)
    assert 9 not in repeated  # the key had another layout before
    assert repeated.count(10) == 1  # by the rank that has an array
    assert repeated.count(11) == 2


def test_another_place_makes_the_call_ready_anew(repeated: list[int]) -> None:
    """As when NCCL joins ranks: the first message may then have another length."""
    with run_alone() as comm:
        x = draw(0, 0, (2000,))
        for step in range(6):
            if step == 4:
                comm._place = replace(comm._place, first_words=0)
            comm.compressed_allreduce(x, "sum", "uniform")
        assert repeated == [2, 3, 5]


def test_what_is_kept_is_bounded() -> None:
    with run_alone() as comm:
        for n in range(1100, 1100 + 3 * KEPT):
            for _ in range(3):
                comm.compressed_allreduce(np.ones(n, F4), "sum", "uniform")
        (reduction,) = comm._reductions.values()
        assert len(reduction.repeats._kept) == KEPT


@pytest.mark.parametrize(
    "codec", ["qsgd-mn", "thc", "intsgd", "topkc", "rotated:headroom=checked", "grandk-mn", "powersgd"]
)
def test_other_codecs_are_not_repeated(codec: str, repeated: list[int]) -> None:
    with run_alone() as comm:
        for _ in range(4):
            comm.compressed_allreduce(draw(0, 0, (64, 64)), "sum", codec)
    assert not repeated


def test_steps_of_a_subclass_are_not_repeated(repeated: list[int]) -> None:
    class Other(Uniform):
        id = "test-other-steps"

        def steps(self, x: Any, state: Any, ctx: Any) -> Any:
            return super().steps(x, state, ctx)

    with run_alone() as comm:
        for codec, count in ((Other(), 0), (get_codec("uniform"), 2)):
            repeated.clear()
            for _ in range(4):
                comm.compressed_allreduce(draw(0, 0, (2000,)), "sum", codec)
            assert len(repeated) == count


def test_memory_that_cannot_be_had_is_reported_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def calls(comm: gccomm.Communicator) -> list[str]:
        texts = []
        for step in range(6):
            x = draw(comm.rank, step, (2000,))
            if step == 4 and comm.rank == 1:
                comm._reductions[next(iter(comm._reductions))].repeats._kept[x.shape, x.dtype]._nbytes = -1
            try:
                y = comm.compressed_allreduce(x, "sum", "uniform:wire_bits=16")
                assert y.shape == (2000,)
            except ValueError as error:
                texts.append(str(error))
        return texts

    assert run(calls, 2) == [[], []]  # the usual way is taken, and it works


@pytest.mark.parametrize("codec", ["uniform", "rotated", "bf16"])
@pytest.mark.parametrize("dtype", [">f4", ">f8", ">f2"])
def test_byte_swapped_arrays_are_not_read_as_native_ones(codec: str, dtype: str) -> None:
    def calls(comm: gccomm.Communicator) -> list[Any]:
        x = [draw(comm.rank, step, (2000,)) for step in range(CALLS)]
        found = [comm.compressed_allreduce(a.astype(dtype), codec=codec) for a in x]
        twin = comm.split(0)
        assert twin is not None
        native = np.dtype(dtype).newbyteorder("=")
        return [found, [twin.compressed_allreduce(a.astype(native), codec=codec) for a in x]]

    for found, expected in run(calls, ranks=2):
        for y, z in zip(found, expected, strict=True):
            np.testing.assert_array_equal(y, z)


def test_an_own_codec_that_inherits_from_rotated_is_not_replaced_for_small_arrays() -> None:
    seen: list[int] = []

    class Mine(Rotated):
        id = "test-mine"

        def steps(self, x: Any, state: Any, ctx: Any) -> Any:
            seen.append(x.coordinates)
            return (yield from super().steps(x, state, ctx))

    run(lambda comm: gccomm.Reducer(Mine(), comm=comm)({"x": np.ones(5000, F4)}), ranks=4)
    assert seen == [5000] * 4


@pytest.mark.parametrize("serves", [True, False])
@pytest.mark.parametrize("base", [Uniform, Rotated])
def test_steps_of_a_codec_serve_later_calls(base: Any, serves: bool, repeated: list[int]) -> None:
    """Where it says that they do."""
    started: list[int] = []

    class Mine(base):  # type: ignore[misc]
        id = "test-mine"
        steps_serve = serves

        def steps(self, x: Any, state: Any, ctx: Any) -> Any:
            started.append(ctx.step)
            return (yield from super().steps(x, state, ctx))

        def repeats(self, ctx: Any) -> bool:
            return True

    def calls(codec: Any) -> Any:
        return lambda comm: [
            comm.compressed_allreduce(draw(comm.rank, step, (3000,)), "sum", codec) for step in range(CALLS)
        ]

    found, expected = run(calls(Mine()), ranks=2), run(calls(base()), ranks=2)
    assert len(started) == 2 * (3 if serves else CALLS)  # of two calls, and of the first that repeats them
    assert len(repeated) == 2 * 2 * (CALLS - 2)
    for mine, others in zip(found, expected, strict=True):
        assert all(same(a, b) for a, b in zip(mine, others, strict=True))


def test_memory_for_long_sums_is_not_kept(repeated: list[int]) -> None:
    """It comes from the pool in each call; that of short ones stays."""

    def sizes(comm: gccomm.Communicator) -> list[int]:
        for step in range(CALLS):
            for size in (5000, 150_000):
                comm.compressed_allreduce(draw(comm.rank, step, (size,)), "sum", "uniform:wire_bits=16")
        assert comm._reductions._last is not None
        reduction = comm._reductions._last[1]
        return [len(kept._words) for kept in reduction.repeats._kept.values()]

    for short, long in run(sizes, ranks=2):
        assert 0 < short <= KEPT_WORDS
        assert long == 0
    assert len(repeated) == 2 * 2 * (CALLS - 2)


def test_a_codec_that_needs_more_words_than_it_said_is_repeated(repeated: list[int]) -> None:
    class Wider(Raw):
        id = "test-wider"

        def adds(self, dtype: str, *, mean: bool) -> bool:
            return False

        def weight(self, item_bytes: int) -> int:
            return 1

        def wire_dtype(self, x: Any) -> Any:
            return "float64"

    def calls(comm: gccomm.Communicator) -> list[bool]:
        found = []
        for step in range(CALLS):
            x = draw(comm.rank, step, (150_000,))
            expected = sum(draw(rank, step, x.shape).astype(np.float64) for rank in range(2))
            result = comm.compressed_allreduce(x, "sum", Wider())
            found.append(same(result, np.asarray(expected).astype(F4)))
        return found

    assert run(calls, ranks=2) == [[True] * CALLS] * 2
    assert len(repeated) == 2 * (CALLS - 2)
