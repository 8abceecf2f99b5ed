"""Checked headroom: steps that hold the expected sum, check words, and spans that travel again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import gccomm
from gccomm import testing
from gccomm.codecs import get_codec
from gccomm.codecs.headroom import Learnt, next_ratio
from gccomm.errors import BackendError
from gccomm.reduction import KeyState
from gccomm.stats import Stats
from gccomm.transfers import WordAdd

Array = np.ndarray[Any, Any]
SIZE = 64 * 1024 * 2 + 700  # three spans, the last one short


def gaussian(n: int, step: int, size: int = SIZE, common: float = 0.0) -> list[Array]:
    """Return one array a rank; ``common`` is the correlation of two ranks."""
    rng = np.random.default_rng([n, step])
    shared = rng.standard_normal(size) * np.sqrt(common)
    own = [rng.standard_normal(size) * np.sqrt(1 - common) for _ in range(n)]
    return [(shared + x).astype(np.float32) for x in own]


def vnmse(y: Array, xs: list[Array]) -> float:
    exact = np.sum(xs, axis=0, dtype=np.float64)
    return float(((y - exact) ** 2).sum() / (exact**2).sum())


def reduce_with(ratio: float, xs: list[Array], codec: str, **options: Any) -> tuple[Array, Stats]:
    """Reduce once, with what the codec has adapted set to ``ratio``."""
    made = get_codec(codec)

    def program(comm: gccomm.Communicator) -> tuple[Array, Stats]:
        reducer = gccomm.Reducer(made, comm=comm, op="sum", **options)
        layout = str(xs[0].dtype), xs[0].shape, made.fingerprint
        reducer._reduction.set_states({"x": KeyState(*layout, {"ratio": ratio})})
        return reducer({"x": xs[comm.rank]})["x"], reducer.stats

    results = testing.run(program, ranks=len(xs))
    for y, _ in results[1:]:
        np.testing.assert_array_equal(y, results[0][0])
    return results[0]


@pytest.mark.parametrize("n", [4, 16, 64])
def test_steps_shrink_to_the_expected_sum(n: int) -> None:
    safe = testing.simulate(lambda s: gaussian(n, s, 1 << 16), "rotated:headroom=safe", steps=3)
    checked, stats = testing.simulate(lambda s: gaussian(n, s, 1 << 16), "rotated:headroom=checked", steps=3)
    xs = gaussian(n, 2, 1 << 16)
    assert vnmse(checked[0], xs) < {4: 6.5e-4, 16: 2.6e-3, 64: 1.05e-2}[n]
    assert vnmse(checked[0], xs) < vnmse(safe[0][0], xs) / (n**0.5 * 0.8)
    assert stats[0].spans_redone == 0
    assert stats[0].vnmse_estimate == pytest.approx(vnmse(checked[0], xs), rel=0.2)


def test_correlated_ranks_get_room_for_their_sum() -> None:
    ys, stats = testing.simulate(lambda s: gaussian(16, s, 1 << 16, 0.5), "rotated:headroom=checked", steps=4)
    assert stats[0].spans_redone == 0
    assert vnmse(ys[0], gaussian(16, 3, 1 << 16, 0.5)) < 2.6e-3


def test_the_first_step_is_no_worse_than_safe() -> None:
    xs = gaussian(16, 0, 1 << 16)
    safe, _ = testing.simulate(xs, "rotated:headroom=safe")
    checked, stats = testing.simulate(xs, "rotated:headroom=checked")
    assert stats[0].spans_redone == 0
    assert vnmse(checked[0], xs) <= vnmse(safe[0], xs) * 1.001


@pytest.mark.parametrize(("width", "n"), [(8, 4), (8, 16), (4, 4), (5, 8), (10, 6), (16, 5), (16, 17)])
def test_failed_spans_give_what_wide_lanes_would(width: int, n: int) -> None:
    """All ranks alike and c far too small: most spans overflow; for 16 bits even lanes of 16 bits would."""
    xs = gaussian(1, 0) * n
    y, stats = reduce_with(0.05, xs, f"rotated:headroom=checked,wire_bits={width}")
    assert stats.spans_redone >= 3 * (width > 4)
    largest = np.abs(xs[0]).max()
    half = 2 ** (width - 1) - 1
    step = 5.4 * np.sqrt(0.05 * n / (half**2 - 5.4**2 * n / 12))  # over the standard deviation
    exact = np.sum(xs, axis=0, dtype=np.float64)
    # Equal ranks share n shifts of one dither, subtracted: an error of a step at most, before rotating back.
    assert np.sqrt(((y - exact) ** 2).mean()) < max(step, n * largest / 32767)


def test_what_failed_raises_the_ratio() -> None:
    """The next step must not fail for the same reason."""
    xs = gaussian(1, 0) * 16
    made = get_codec("rotated:headroom=checked")

    def program(comm: gccomm.Communicator) -> list[int]:
        reducer = gccomm.Reducer(made, comm=comm, op="sum")
        state = KeyState("float32", xs[0].shape, made.fingerprint, {"ratio": 0.05})
        reducer._reduction.set_states({"x": state})
        redone = []
        for _ in range(2):
            reducer({"x": xs[comm.rank]})
            redone.append(reducer.stats.spans_redone)
        return redone

    for redone in testing.run(program, ranks=16):
        assert redone[0] > 0
        assert redone[1] == 0


@contextmanager
def corrupted(monkeypatch: pytest.MonkeyPatch, change: Callable[[int, list[Array]], None]) -> Iterator[None]:
    """Let ``change(number, words of the ranks)`` loose on every SUM of more than 100 words, once summed."""
    combine, number = testing._combine, 0

    def wrong(transfers: list[Any]) -> None:
        nonlocal number
        combine(transfers)
        if isinstance(transfers[0], WordAdd) and transfers[0].words.size > 100 + SIZE // 1024:
            change(number, [t.words for t in transfers])
            number += 1

    with monkeypatch.context() as patch:
        patch.setattr(testing, "_combine", wrong)
        yield


def test_a_corrupted_span_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    xs = gaussian(4, 0)
    clean, _ = testing.simulate(xs, "rotated:headroom=checked")

    def flip_once(number: int, words: list[Array]) -> None:
        if number == 0:
            for w in words:
                w[777] ^= np.uint32(1 << 13)

    with corrupted(monkeypatch, flip_once):
        ys, stats = testing.simulate(xs, "rotated:headroom=checked")
    assert stats[0].spans_redone == 1
    np.testing.assert_array_equal(ys[0], clean[0])


def test_a_span_that_is_wrong_twice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def flip(number: int, words: list[Array]) -> None:
        del number
        for w in words:
            w[777] ^= np.uint32(1 << 13)

    with (
        corrupted(monkeypatch, flip),
        pytest.raises(BackendError, match="wrong twice, in wide lanes too: sums were corrupted"),
    ):
        testing.simulate(gaussian(4, 0), "rotated:headroom=checked")


def test_ranks_that_saw_different_sums_do_not_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def flip(number: int, words: list[Array]) -> None:
        words[number % 4][1000 * (1 + number)] ^= np.uint32(4)
        words[1][33] ^= np.uint32(4)

    with corrupted(monkeypatch, flip), pytest.raises(BackendError):
        testing.simulate(gaussian(4, 0), "rotated:headroom=checked")


def test_results_in_place_are_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `out` is the input, a span that must be sent again still finds it."""
    xs = gaussian(1, 0) * 8
    expected, stats = reduce_with(0.05, xs, "rotated:headroom=checked")
    assert stats.spans_redone

    def program(comm: gccomm.Communicator) -> Array:
        made = get_codec("rotated:headroom=checked")
        reducer = gccomm.Reducer(made, comm=comm, op="sum")
        state = KeyState("float32", xs[0].shape, made.fingerprint, {"ratio": 0.05})
        reducer._reduction.set_states({"x": state})
        mine = {"x": xs[comm.rank].copy()}
        assert reducer(mine, out=mine)["x"] is mine["x"]
        return mine["x"]

    for y in testing.run(program, ranks=8):
        np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_error_feedback_keeps_what_a_redone_span_left(dtype: str) -> None:
    """The same integers leave the same residual, however wide their lanes."""
    xs = [x.astype(dtype) for x in gaussian(1, 0) * 8]
    y, stats = reduce_with(0.05, xs, "rotated:headroom=checked", error_feedback=True)
    plain, _ = reduce_with(0.05, xs, "rotated:headroom=checked")
    assert stats.spans_redone
    np.testing.assert_array_equal(y, plain)


def test_nonfinite_and_zero_blocks_leave_the_ratio_alone() -> None:
    made = get_codec("rotated:headroom=checked")

    def program(comm: gccomm.Communicator) -> list[Any]:
        reducer = gccomm.Reducer(made, comm=comm, op="sum")
        ratios, kept = [], []
        for step in range(3):
            x = gaussian(4, step)[comm.rank]
            x[: 1024 * 100] = 0
            if step == 1 and comm.rank == 2:
                x[-1] = np.nan
            y = reducer({"x": x})["x"]
            assert np.isnan(y).any() == (step == 1)
            assert not y[: 1024 * 100].any()
            ratios.append(reducer._reduction.states["x"].values["ratio"])
            kept.append(y)
        return ratios

    results = testing.run(program, ranks=4)
    assert results == [results[0]] * 4
    first, second, third = results[0]
    assert first == second
    assert first == pytest.approx(1.03, rel=0.05)
    assert third == pytest.approx(1.03, rel=0.05)


def test_next_ratio() -> None:
    part = Learnt(4.0, 1.0, 2.0, exponent=0, ranks=8, spans=16, redone=0, valid=True)
    assert next_ratio(None, [part]) == pytest.approx(1.545)
    assert next_ratio(2.0, [part._replace(valid=False)]) == 2.0
    assert next_ratio(None, [part._replace(valid=False)]) == 8.0
    assert next_ratio(2.0, [part, part._replace(redone=3)]) == pytest.approx(1.545)
    assert next_ratio(2.0, [part, part._replace(redone=4)]) == 4.0
    assert next_ratio(6.0, [part, part._replace(redone=4)]) == 8.0
    assert next_ratio(2.0, [part, part._replace(redone=16)]) == 8.0
    assert next_ratio(3.0, [part._replace(spans=2, redone=1)]) == pytest.approx(1.545)
    assert next_ratio(3.0, [part._replace(spans=1, redone=1)]) == 6.0
    assert next_ratio(2.0, [part._replace(energy=1e9)]) == 8.0
    assert next_ratio(2.0, [part._replace(noise=9.0)]) == pytest.approx(1.545)
    assert next_ratio(2.0, [part._replace(energy=0.1, noise=0.09)]) == 0.05
    assert next_ratio(2.0, [part._replace(parts=0.0)]) == 2.0
    far = [part, part._replace(energy=5.0, exponent=-3000), part._replace(exponent=1)]
    assert next_ratio(2.0, far) == pytest.approx(1.545)


@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_float64_of_any_magnitude(scale: float) -> None:
    def draw(step: int) -> list[Array]:
        return [x.astype(np.float64) * scale for x in gaussian(8, step, 1 << 16)]

    ys, stats = testing.simulate(draw, "rotated:headroom=checked", steps=3)
    exact = [x.astype(np.float64) for x in gaussian(8, 2, 1 << 16)]
    assert vnmse(ys[0] / scale, exact) < 1.3e-3
    assert stats[0].spans_redone == 0


def test_the_functions_keep_no_state() -> None:
    def program(comm: gccomm.Communicator) -> tuple[Array, Array]:
        xs = gaussian(4, 0)[comm.rank]
        return tuple(comm.compressed_allreduce(xs, codec="rotated:headroom=checked") for _ in range(2))

    (first, second), *_ = testing.run(program, ranks=4)
    xs = gaussian(4, 0)
    assert vnmse(first, xs) == pytest.approx(vnmse(second, xs), rel=0.2)  # new noise, the same steps


def test_short_rows_in_the_widest_lanes() -> None:
    """Rows of 513 are padded to 576 words each when they travel again: more than they have coordinates."""

    def draw(step: int) -> list[dict[str, Array]]:  # independent for two steps, then alike: they overflow
        seeds = [(step, rank if step < 2 else 0) for rank in range(5)]
        return [{"w": np.random.default_rng(s).standard_normal((5, 513)).astype(np.float32)} for s in seeds]

    ys, stats = testing.simulate(draw, "rotated:wire_bits=16,headroom=checked", steps=3)
    assert stats[0].spans_redone == 1
    np.testing.assert_allclose(ys[0]["w"], 5 * draw(2)[0]["w"], atol=1e-2)
