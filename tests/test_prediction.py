"""Predicted scales: steps without a round of their own, and what happens when the prediction was wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gccomm
from gccomm import testing
from gccomm.agreement import MESSAGE_WORDS, SUM_WORDS
from gccomm.codecs.prediction import Observed, next_scales
from gccomm.errors import MismatchError, NegotiationError, NonFiniteError
from gccomm.kernels.reference.counters import AGREED, FACTORS

Array = np.ndarray[Any, Any]
CODECS = ["uniform:scales=predicted", "rotated:scales=predicted", "uniform:scales=predicted,wire_bits=4"]
SIZE = 40 * 1024 + 500


def draw(n: int, step: int, size: int = SIZE, scale: float = 1.0) -> list[Array]:
    rng = np.random.default_rng([n, step])
    return [(rng.standard_normal(size) * scale).astype(np.float32) for _ in range(n)]


def vnmse(y: Array, xs: list[Array]) -> float:
    exact = np.sum(xs, axis=0, dtype=np.float64)
    return float(((y - exact) ** 2).sum() / (exact**2).sum())


def run(n: int, codec: str, inputs: Any, **options: Any) -> list[list[Any]]:
    """Reduce ``inputs(step, rank)`` until it is None; return each rank's (result, stats, state) by step."""

    def program(comm: gccomm.Communicator) -> list[Any]:
        options.setdefault("op", "sum")
        reducer = gccomm.Reducer(codec, comm=comm, exact_below=0, **options)
        found = []
        step = 0
        while (x := inputs(step, comm.rank)) is not None:
            y = reducer({"x": x})["x"]
            values = reducer._reduction.states["x"].values
            found.append((np.array(y), reducer.stats, {k: np.copy(v) for k, v in values.items()}))
            step += 1
        return found

    results = testing.run(program, ranks=n)
    for other in results[1:]:
        for (y, _, state), (z, _, expected) in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(y, z)
            np.testing.assert_array_equal(state["scales"], expected["scales"])
            assert state["agree"] == expected["agree"]
    return results


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("n", [1, 2, 4, 17])
def test_steady_steps_need_one_message(codec: str, n: int) -> None:
    """The first step agrees; then the sum is all there is: 1 KiB with its header, and the rest."""
    steps = 5
    data = [draw(n, s) for s in range(steps)]
    found = run(n, codec, lambda s, r: data[s][r] if s < steps else None)[0]
    assert found[0][1].messages == 2
    for y, stats, state in found[1:]:
        assert stats.messages == 2
        assert stats.clamps == 0
        assert not state["agree"]
        assert y.shape == (SIZE,)
    lanes = 32 // gccomm.get_codec(codec).wire_bits
    words = -(-1024 // lanes) * 40 + -(-512 // lanes) + 4
    assert found[-1][1].wire_bytes <= 4 * (words + SUM_WORDS + 41 * (1 + (n > 15)) + 3)


@pytest.mark.parametrize("codec", CODECS[:2])
def test_errors_are_near_those_of_agreed_scales(codec: str) -> None:
    n, steps = 4, 6
    ys, stats = testing.simulate(lambda s: draw(n, s), codec, steps=steps, exact_below=0)
    safe = codec.replace("scales=predicted", "headroom=safe" if "rotated" in codec else "scales=agreed")
    plain, _ = testing.simulate(lambda s: draw(n, s), safe, steps=steps, exact_below=0)
    xs = draw(n, steps - 1)
    assert vnmse(ys[0], xs) < 4 * vnmse(plain[0], xs)
    assert stats[0].vnmse_estimate == pytest.approx(vnmse(ys[0], xs), rel=0.2)


def test_predictions_follow_the_input() -> None:
    """Down by 3 % a step for a hundred steps, to a twentieth: steps follow, and nothing is clamped."""
    n, steps = 3, 100
    ys, stats = testing.simulate(
        lambda s: draw(n, s, 8192, 0.97**s), "rotated:scales=predicted", steps=steps, exact_below=0
    )
    xs = draw(n, steps - 1, 8192, 0.97 ** (steps - 1))
    assert vnmse(ys[0], xs) < 5e-3
    assert stats[0].clamps == 0


@pytest.mark.parametrize("codec", CODECS)
def test_a_clamp_is_reported_and_agreed_upon(codec: str) -> None:
    n = 3
    scales = [1.0, 1.0, 10.0, 10.0, 10.0]
    data = [draw(n, s, SIZE, scale) for s, scale in enumerate(scales)]
    found = run(n, codec, lambda s, r: data[s][r] if s < len(scales) else None)[0]
    clamps = [stats.clamps for _, stats, _ in found]
    assert clamps[:2] == [0, 0]
    assert clamps[2] > SIZE  # most of the coordinates of all ranks
    assert clamps[3:] == [0, 0]
    assert [bool(state["agree"]) for *_, state in found] == [False, False, True, False, False]
    assert vnmse(found[2][0], data[2]) > 0.1
    assert vnmse(found[3][0], data[3]) < 0.1 if "wire_bits=4" not in codec else 0.6


@pytest.mark.parametrize("codec", CODECS[:2])
def test_what_was_clamped_is_in_the_residual(codec: str) -> None:
    n, steps = 2, 12
    data = [draw(n, s, 4096, 20.0 if s == 3 else 1.0) for s in range(steps)]
    found = run(n, codec, lambda s, r: data[s][r] if s < steps else None, error_feedback=True)[0]
    assert found[3][1].clamps > 0
    total = np.sum([y for y, *_ in found], axis=0, dtype=np.float64)
    exact = np.sum(data, axis=(0, 1), dtype=np.float64)
    assert np.abs(total - exact).max() < 1.5  # a few steps of the last step's size, not the clamp's 40


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("feedback", [False, True])
def test_a_value_that_is_not_finite_spoils_its_block_on_every_rank(
    codec: str, bad: float, feedback: bool
) -> None:
    n, steps = 3, 4
    data = [draw(n, s) for s in range(steps)]
    data[2][1][5000] = bad

    def inputs(step: int, rank: int) -> Array | None:
        return data[step][rank] if step < steps else None

    found = run(n, codec, inputs, error_feedback=feedback)[0]
    spoilt = np.isnan(found[2][0])
    np.testing.assert_array_equal(np.flatnonzero(spoilt), np.arange(4 * 1024, 5 * 1024))
    assert np.isfinite(found[3][0]).all()
    assert found[2][2]["agree"]
    assert not found[3][2]["agree"]
    assert found[2][1].clamps == 0


def test_nothing_is_changed_where_that_is_an_error() -> None:
    n = 2
    data = [draw(n, s) for s in range(3)]

    def program(comm: gccomm.Communicator) -> Array:
        reducer = gccomm.Reducer("rotated:scales=predicted", comm=comm, nonfinite="raise", op="sum")
        reducer({"x": data[0][comm.rank]})
        reducer({"x": data[1][comm.rank]})
        before = reducer.state_dict()
        spoilt = data[2][comm.rank].copy()
        spoilt[3] = np.nan if comm.rank else 0
        with pytest.raises(NonFiniteError, match="rank 1"):
            reducer({"x": spoilt})
        after = reducer.state_dict()
        assert after["step"] == before["step"] == 2
        np.testing.assert_array_equal(
            after["states"]["x"]["values"]["scales"], before["states"]["x"]["values"]["scales"]
        )
        result: Array = reducer({"x": data[2][comm.rank]})["x"]
        return result

    first, second = testing.run(program, ranks=2)
    np.testing.assert_array_equal(first, second)


def test_zero_blocks() -> None:
    n, steps = 2, 5
    data = [draw(n, s) for s in range(steps)]
    for step in range(steps):
        for x in data[step]:
            x[: 1024 * (20 if step == 3 else 30)] = 0
    found = run(n, "uniform:scales=predicted", lambda s, r: data[s][r] if s < steps else None)[0]
    assert [bool(state["agree"]) for *_, state in found] == [False, False, False, True, False]
    assert not found[4][0][: 1024 * 30].any()
    assert vnmse(found[4][0], data[4]) < 1e-2


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_other_dtypes(dtype: str, scale: float) -> None:
    n, steps = 2, 4
    scale = scale if dtype == "float16" else scale**70

    def inputs(step: int, rank: int) -> Array | None:
        return (draw(n, step)[rank] * np.float64(scale)).astype(dtype) if step < steps else None

    found = run(n, "rotated:scales=predicted", inputs)[0]
    exact = [np.asarray(inputs(steps - 1, r), dtype=np.float64) / scale for r in range(n)]
    assert vnmse(found[-1][0].astype(np.float64) / scale, exact) < (3e-2 if scale == 1e-4 else 3e-3)
    assert found[-1][1].messages == 2


def test_trees_agree_on_what_has_no_prediction() -> None:
    """Small arrays and integers need a round in every step; a new key needs one in its first."""

    def program(comm: gccomm.Communicator) -> list[int]:
        reducer = gccomm.Reducer("uniform:scales=predicted", comm=comm, op="sum")
        tree: dict[str, Any] = {"w": draw(2, 0)[comm.rank]}
        messages = []
        for step in range(6):
            if step == 2:
                tree["v"] = draw(2, 9)[comm.rank]
            if step == 4:
                tree["b"] = np.ones(5, np.float32)
            result = reducer(tree)
            assert step < 4 or result["b"].tolist() == [2.0] * 5
            messages.append(reducer.stats.messages)
        return messages

    for messages in testing.run(program, ranks=2):
        assert messages == [2, 2, 2, 2, 2, 2]


def test_pieces_and_fusion_do_not_show() -> None:
    n, steps = 3, 4
    whole, _ = testing.simulate(lambda s: draw(n, s, 300_000), "rotated:scales=predicted", steps=steps)
    for options in ({"piece_coordinates": 1 << 16}, {"one_host": False}, {"bucket_bytes": 1 << 18}):
        cut, _ = testing.simulate(
            lambda s: draw(n, s, 300_000), "rotated:scales=predicted", steps=steps, **options
        )
        np.testing.assert_array_equal(whole[0], cut[0])


def test_resuming_goes_on_exactly() -> None:
    n, steps = 2, 6
    data = [draw(n, s) for s in range(steps)]

    def program(comm: gccomm.Communicator) -> None:
        first = gccomm.Reducer("rotated:scales=predicted", comm=comm)
        for step in range(3):
            first({"x": data[step][comm.rank]})
        second = gccomm.Reducer("rotated:scales=predicted", comm=comm)
        second.load_state_dict(first.state_dict())
        for step in range(3, steps):
            x = {"x": data[step][comm.rank]}
            np.testing.assert_array_equal(first(x)["x"], second(x)["x"])
            assert first.stats.messages == second.stats.messages == 2

    testing.run(program, ranks=n)


def test_a_state_that_only_one_rank_has_is_a_mismatch() -> None:
    data = [draw(2, s) for s in range(3)]

    def program(comm: gccomm.Communicator) -> str:
        reducer = gccomm.Reducer("uniform:scales=predicted", comm=comm)
        reducer({"x": data[0][comm.rank]})
        state = reducer.state_dict()
        reducer({"x": data[1][comm.rank]})
        if comm.rank == 1:
            reducer.load_state_dict({**state, "step": 2})
        with pytest.raises(MismatchError) as caught:
            reducer({"x": data[2][comm.rank]})
        assert comm.allreduce(np.ones(3)).tolist() == [2.0] * 3  # the communicator is usable
        return str(caught.value)

    first, second = testing.run(program, ranks=2)
    assert first == second
    assert "state" in first


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_rank_in_another_call_is_a_mismatch(n: int) -> None:
    """The first words of a predicted step and the message of any other call are of one size."""
    data = [draw(n, s) for s in range(3)]

    def program(comm: gccomm.Communicator) -> str:
        reducer = gccomm.Reducer("uniform:scales=predicted", comm=comm)
        for step in range(2):
            reducer({"x": data[step][comm.rank]})
        call = comm.barrier if comm.rank == n - 1 else lambda: reducer({"x": data[2][comm.rank]})
        with pytest.raises(MismatchError) as caught:
            call()
        result = reducer({"x": data[2][comm.rank]})["x"]
        assert vnmse(n * result, data[2]) < 1e-1
        return str(caught.value)

    texts = testing.run(program, ranks=n)
    assert len(set(texts)) == 1
    assert "barrier" in texts[0]


@pytest.mark.parametrize("n", [2, 3])
def test_a_rank_whose_input_is_bad_tells_the_others(n: int) -> None:
    data = [draw(n, s) for s in range(3)]

    def program(comm: gccomm.Communicator) -> str:
        reducer = gccomm.Reducer("rotated:scales=predicted", comm=comm)
        for step in range(2):
            reducer({"x": data[step][comm.rank]})
        bad = np.array(["text"]) if comm.rank == 1 else data[2][comm.rank]
        with pytest.raises(TypeError) as caught:
            reducer({"x": bad})
        reducer({"x": data[2][comm.rank]})
        return str(caught.value)

    texts = testing.run(program, ranks=n)
    assert len(set(texts)) == 1
    assert "rank 1" in texts[0]


def test_none_on_some_ranks_counts_as_zeros() -> None:
    data = [draw(2, s) for s in range(3)]

    def inputs(step: int, rank: int) -> Array | None:
        return data[step][rank] if step < 3 else None

    def program(comm: gccomm.Communicator) -> Array:
        reducer = gccomm.Reducer("uniform:scales=predicted", comm=comm, op="sum")
        for step in range(2):
            reducer({"x": data[step][comm.rank]})
        result: Array = reducer({"x": data[2][0] if comm.rank == 0 else None})["x"]
        return result

    first, second = testing.run(program, ranks=2)
    np.testing.assert_array_equal(first, second)
    assert vnmse(first, [data[2][0]]) < 1e-2


def test_next_scales() -> None:
    scales = np.array([1, 2, 3], dtype=np.uint32)
    state = next_scales([Observed(scales[:2], False), Observed(scales[2:], True)])
    np.testing.assert_array_equal(state["scales"], scales)
    assert state["agree"] is True
    assert FACTORS[AGREED] > 1
    assert MESSAGE_WORDS == 256


def test_checked_headroom_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a round before the sum"):
        gccomm.get_codec("rotated", scales="predicted", headroom="checked")


@pytest.mark.parametrize(("n", "codec"), [(4, "rotated:wire_bits=4"), (4, "uniform:wire_bits=4")])
def test_feedback_needs_more_levels(n: int, codec: str) -> None:
    """Predicted steps are twice as wide: what is enough for agreed scales would diverge."""
    data = draw(n, 0)
    testing.simulate([{"x": x} for x in data], codec, error_feedback=True)
    with pytest.raises(NegotiationError, match=r"has 1.75 levels and needs more than 2.25"):
        testing.simulate([{"x": x} for x in data], f"{codec},scales=predicted", error_feedback=True)
