"""The tools for tests: ``simulate`` sees faults of codecs, ``run`` brings errors and results of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

import gccomm
from gccomm import testing
from gccomm.codecs import Codec
from gccomm.codecs.uniform import Uniform
from gccomm.errors import BackendError, MismatchError, NegotiationError
from gccomm.lanes import safe_limit
from gccomm.steps import Agree, Context, Steps, Sum

Array = np.ndarray[Any, Any]
Wrong = Callable[[int, int], int]


class Greedy(Codec):
    """Quantises like uniform, with a limit of one's own choice: one rank's share, or more than that."""

    id: ClassVar[str] = "test-greedy"
    excess: ClassVar[float] = 1.0
    width: ClassVar[int] = 4

    def block_words(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return -(-lengths // (32 // self.width))

    def steps(self, x: Any, state: Any, ctx: Context) -> Steps:
        width, limit = self.width, int(safe_limit(self.width, ctx.size) * self.excess)
        scales = yield Agree(x.blocks, x.maxima)
        yield Sum(
            x.blocks,
            x.size,
            lambda lo, hi, out: x.encode(lo, hi, out, scales, width, limit, ctx),
            lambda lo, hi, words: x.decode(lo, hi, words, scales, width, limit, ctx, subtract=False),
            lambda lo, hi: ((0, x.size(lo, hi), width),),
        )
        return state


class TooGreedy(Greedy):
    """Takes more than its share of the lane."""

    id: ClassVar[str] = "test-too-greedy"
    excess: ClassVar[float] = 1.3


class Uneven(Greedy):
    """Rank 1 leaves the sum out."""

    id: ClassVar[str] = "test-uneven"

    def steps(self, x: Any, state: Any, ctx: Context) -> Steps:
        yield Agree(x.blocks, x.maxima)
        if ctx.rank != 1:
            yield Sum(x.blocks, x.size, lambda *_: None, lambda *_: None)
        return state


class Talkative(Greedy):
    """Yields what is no step."""

    id: ClassVar[str] = "test-talkative"

    def steps(self, x: Any, state: Any, ctx: Context) -> Steps:
        yield from super().steps(x, state, ctx)
        yield "a word"


class Failing(Greedy):
    """Fails while the ranks are in the call."""

    id: ClassVar[str] = "test-failing"

    def steps(self, x: Any, state: Any, ctx: Context) -> Steps:
        yield Agree(x.blocks, x.maxima)
        raise ZeroDivisionError(f"in rank {ctx.rank}")


class TooMany(Greedy):
    """Serves no number of ranks."""

    id: ClassVar[str] = "test-too-many"

    def require_size(self, size: int, item_bytes: int) -> None:
        raise NegotiationError("too many")


def ones(n: int, size: int = 2000) -> list[Array]:
    return [np.ones(size, np.float32) for _ in range(n)]


@pytest.mark.parametrize("n", [2, 3, 4, 16])
def test_a_codec_whose_lanes_overflow_is_caught(n: int) -> None:
    ys, _ = testing.simulate(ones(n), Greedy())
    np.testing.assert_allclose(ys[0], n, rtol=0.3)
    with pytest.raises(OverflowError, match=r"a lane of 4 bits sums to \d+\.\.\d+"):
        testing.simulate(ones(n), TooGreedy())
    with pytest.raises(OverflowError, match=r"a lane of 4 bits sums to -\d+\.\.-\d+"):
        testing.simulate([-x for x in ones(n)], TooGreedy())


def test_an_overflow_of_a_single_lane_is_caught() -> None:
    """Whatever its place in the block: most lanes are far from their limits."""
    for place in (0, 1, 127, 128, 896, 1023, 1999):
        xs = [np.where(np.arange(2000) == place, 1, 0.01).astype(np.float32) for _ in range(3)]
        testing.simulate(xs, Greedy())
        with pytest.raises(OverflowError, match="a lane of 4 bits"):
            testing.simulate(xs, TooGreedy())


@pytest.mark.parametrize("width", [2, 3, 4, 5, 6, 8, 10, 16, 32])
def test_signed_lanes_of_words(width: int) -> None:
    """Against the definition: word = sum of q_k 2^(wk) mod 2^32."""
    half, lanes = 1 << (width - 1), 32 // width
    rng = np.random.default_rng(width)
    q = rng.integers(-half, half, (lanes, 50))
    q[:, :2] = -half, half - 1
    words = [sum(int(q[k, j]) << (width * k) for k in range(lanes)) % 2**32 for j in range(50)]
    np.testing.assert_array_equal(testing._signed_lanes(np.array(words, np.uint32), width), q)


def test_ranks_that_take_different_ways_are_caught() -> None:
    with pytest.raises(BackendError, match="virtual ranks"):
        testing.simulate(ones(3), Uneven())


def test_a_codec_that_yields_what_is_no_step_is_caught() -> None:
    with pytest.raises(TypeError, match=r"Talkative\.steps must be .* it yielded 'a word'"):
        testing.simulate(ones(2), Talkative())


def test_simulate_runs_steps_from_zero() -> None:
    seen: list[int] = []

    def inputs(step: int) -> list[Array]:
        seen.append(step)
        return [np.full(2000, 1.0 + step, np.float32)] * 2

    ys, stats = testing.simulate(inputs, Uniform(16), "mean", steps=3)
    assert seen == [0, 1, 2]
    np.testing.assert_allclose(ys[0], 3, rtol=1e-3)
    assert len(ys) == len(stats) == 2


def test_simulate_raises_what_all_ranks_would() -> None:
    with pytest.raises(MismatchError, match="array 0"):
        testing.simulate([np.ones(3), np.ones(4)])
    with pytest.raises(TypeError, match="rank 1: cannot reduce"):
        testing.simulate([np.ones(3), object()])
    with pytest.raises(NegotiationError, match="rank 0: too many"):
        testing.simulate(ones(2), TooMany())


def test_run_returns_what_each_rank_returned() -> None:
    assert testing.run(lambda comm: (comm.rank, comm.size, comm.backend), 3) == [
        (r, 3, "local") for r in range(3)
    ]
    assert testing.run(lambda comm: comm.rank) == [0, 1, 2, 3]
    assert testing.run(lambda comm: threading.current_thread().name, 2) == ["rank 0", "rank 1"]


def test_the_functions_use_the_threads_communicator() -> None:
    def body(comm: gccomm.Communicator) -> tuple[int, float, float]:
        total = gccomm.compressed_allreduce(float(comm.rank), exact_below=1024)
        return gccomm.Reducer("raw").comm.size, total, gccomm.broadcast(float(comm.rank), 2)

    assert testing.run(body, 3) == [(3, 3.0, 2.0)] * 3


def test_run_brings_the_error_of_the_rank_that_failed() -> None:
    """The others wait in a collective: they are released, and their errors do not hide the first."""
    released: list[str] = []

    def body(comm: gccomm.Communicator) -> None:
        if comm.rank == 2:
            raise LookupError("of rank 2")
        try:
            comm.barrier()
        except BackendError as error:
            released.append(str(error))
            raise

    with pytest.raises(LookupError, match="of rank 2"):
        testing.run(body, 4)
    assert len(released) == 3
    assert all("rank 2 ended with LookupError('of rank 2')" in text for text in released)


def test_run_brings_an_error_of_all_ranks() -> None:
    with pytest.raises(ValueError, match=r"rank 1: `op` must be"):
        testing.run(lambda comm: comm.compressed_allreduce(1.0, "max" if comm.rank == 1 else "sum"), 3)


def test_run_brings_base_exceptions_too() -> None:
    def body(comm: gccomm.Communicator) -> None:
        if comm.rank == 0:
            raise KeyboardInterrupt
        comm.barrier()

    with pytest.raises(KeyboardInterrupt):
        testing.run(body, 2)


def test_a_failure_inside_a_call_breaks_the_communicator() -> None:
    """After the agreement nothing may fail; if something does, later calls say so at once."""

    def body(comm: gccomm.Communicator) -> tuple[str, str]:
        texts = []
        for codec in (Failing(), Greedy()):
            try:
                comm.compressed_allreduce(np.ones(2000, np.float32), codec=codec)
            except (BackendError, ZeroDivisionError) as error:
                texts.append(f"{type(error).__name__}: {error}")
        return texts[0], texts[1]

    for first, second in testing.run(body, 2):
        assert "ZeroDivisionError" in first
        assert second.startswith("BackendError: ")
        assert "start it again, from a checkpoint" in second


def test_messages_paired_wrongly_are_seen() -> None:
    """Sums of different calls that meet on the wire carry different tags."""

    def body(comm: gccomm.Communicator) -> str:
        backend = comm._backend
        original = backend.sum_words

        def meddle(message: Any) -> None:
            if comm.rank == 1:
                message[-1] += 1  # the tag of another call
            original(message)

        backend.sum_words = meddle  # type: ignore[method-assign]
        try:
            comm.compressed_allreduce(np.ones(2000, np.float32))
        except BackendError as error:
            return str(error)
        raise AssertionError("the tag was not checked")

    for rank, text in enumerate(testing.run(body, 2)):
        assert f"rank {rank}: the tag of a sum is" in text or "broke" in text
        assert "messages of different calls were added" in text


@pytest.mark.parametrize("ranks", [0, -1])
def test_no_ranks_are_refused(ranks: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        testing.run(lambda comm: comm.rank, ranks)
