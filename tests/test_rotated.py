"""``rotated``: its accuracy over the families of inputs, and what a rotation must not change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gccomm_launch import accuracy_families as families

import gccomm
from gccomm import testing
from gccomm.codecs import get_codec
from gccomm.codecs.lane_sums import lane_sum_of
from gccomm.codecs.rotated import SMALL, Rotated
from gccomm.errors import NegotiationError
from gccomm.operand import Operand
from gccomm.steps import Context

Array = np.ndarray[Any, Any]
DENSE = ["gaussian", "heavy", "layers", "correlated"]
ALL = [*DENSE, "embedding"]
SAFE = {4: 1.3e-3, 16: 2.8e-2, 64: 0.62}
CHECKED = {4: 6.5e-4, 16: 2.6e-3, 64: 1.05e-2}


def measure(codec: str, family: str, n: int, steps: int = 4, coordinates: int = 1 << 17) -> tuple[Any, ...]:
    """Return vNMSE, its estimate (means from the third step on) and spans redone over all steps."""
    draw = getattr(families, family)
    errors, estimates, redone = [], [], 0
    for step, xs, ys, stats in testing.simulate_steps(
        lambda s: draw(n, s, 0, coordinates), codec, steps=steps
    ):
        exact = np.sum(xs, axis=0, dtype=np.float64)
        redone += stats[0].spans_redone
        if step >= 2:
            errors.append(((ys[0] - exact) ** 2).sum() / (exact**2).sum())
            estimates.append(stats[0].vnmse_estimate)
    return np.mean(errors), np.mean(estimates), redone


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("n", [4, 16, 64])
def test_safe_headroom_is_as_accurate_as_promised(family: str, n: int) -> None:
    error, estimate, redone = measure("rotated:headroom=safe", family, n)
    assert error < SAFE[n]
    assert estimate == pytest.approx(error, rel=0.2)
    assert redone == 0


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("n", [4, 16, 64])
def test_checked_headroom_is_as_accurate_as_promised(family: str, n: int) -> None:
    error, estimate, redone = measure("rotated:headroom=checked", family, n)
    assert error < CHECKED[n]
    assert estimate == pytest.approx(error, rel=0.2)
    assert redone <= 1  # of 8, by chance


def test_under_a_percent_of_spans_is_redone() -> None:
    """Out of 400, fresh draws all."""
    _, _, redone = measure("rotated:headroom=checked", "gaussian", 4, steps=50, coordinates=1 << 19)
    assert redone < 4


@pytest.mark.parametrize("family", DENSE)
def test_four_bits_on_four_ranks(family: str) -> None:
    safe, *_ = measure("rotated:headroom=safe,wire_bits=4", family, 4)
    checked, _, redone = measure("rotated:headroom=checked,wire_bits=4", family, 4)
    assert safe < 0.42
    assert checked < 0.28
    assert checked <= safe * 1.01
    assert redone <= 1


@pytest.mark.parametrize(
    ("width", "n"), [(2, 1), (3, 2), (4, 4), (5, 8), (6, 16), (8, 2), (8, 64), (10, 17), (16, 4), (16, 64)]
)
@pytest.mark.parametrize("headroom", ["safe", "checked"])
def test_the_estimate_is_right_where_a_rank_has_a_level(width: int, n: int, headroom: str) -> None:
    codec = f"rotated:wire_bits={width},headroom={headroom}"
    error, estimate, _ = measure(codec, "gaussian", n, steps=6, coordinates=1 << 16)
    assert estimate == pytest.approx(error, rel=0.2)


@pytest.mark.parametrize("codec", ["rotated:headroom=safe", "rotated:rotations=2", "rotated:wire_bits=4"])
def test_unbiased(codec: str) -> None:
    """Over 400 seeds every coordinate's error has a mean of zero: z-scores of normal size."""
    rng = np.random.default_rng(1)
    xs = [
        (rng.standard_normal(2048) * np.exp(rng.standard_normal(2048))).astype(np.float32) for _ in range(3)
    ]
    exact = np.sum(xs, axis=0, dtype=np.float64)
    errors = np.array([testing.simulate(xs, codec, seed=s)[0][0] - exact for s in range(400)])
    z = errors.mean(axis=0) / (errors.std(axis=0) / 20)
    assert np.abs(z).max() < 5.5
    assert z.std() == pytest.approx(1, abs=0.1)


def test_two_rotations_defend_against_input_made_to_defeat_one() -> None:
    """One coordinate a block: one rotation leaves every coordinate as large, at the edge of its lane."""
    x = np.zeros(64 * 1024, np.float32)
    x[::1024] = 1
    one, _ = testing.simulate([x], "rotated:rotations=1,wire_bits=4", seed=1)
    two, _ = testing.simulate([x], "rotated:rotations=2,wire_bits=4", seed=1)
    for ys in (one, two):
        assert np.abs(ys[0] - x).mean() < 0.05
    # After two rotations coordinates are like Gaussian ones, whatever the input.
    pair = [x, -np.roll(x, 1)]
    exact = np.sum(pair, axis=0)
    ys, _ = testing.simulate(pair, "rotated:rotations=2", seed=3)
    assert ((ys[0] - exact) ** 2).sum() / (exact**2).sum() < 5e-4


def test_zero_blocks_stay_zero_and_others_share_their_noise() -> None:
    x = np.zeros(4096, np.float32)
    x[1024 : 1024 + 3] = 5
    ys, _ = testing.simulate([x, x], "rotated")
    assert not ys[0][:1024].any()
    assert not ys[0][2048:].any()
    assert np.count_nonzero(ys[0][1024:2048]) > 1000  # noise is spread over the block


@pytest.mark.parametrize("length", [1, 63, 64, 65, 500, 640, 700, 768, 1000, 1023, 1025, 1100])
def test_every_length_is_rotated_well(length: int) -> None:
    """Remainders are cut into powers of two; the error stays that of a full block."""
    rng = np.random.default_rng(length)
    xs = [rng.standard_normal((200, length)).astype(np.float32) for _ in range(2)]
    ys, _ = testing.simulate(xs, "rotated", exact_below=0)
    exact = np.sum(xs, axis=0, dtype=np.float64)
    assert ((ys[0] - exact) ** 2).sum() / (exact**2).sum() < 3.5e-4


def test_options() -> None:
    codec = gccomm.get_codec("rotated")
    assert codec.config() == {
        "id": "rotated", "wire_bits": 8, "headroom": "auto", "rotations": 1, "scales": "agreed",
        "widening": False,
    }  # fmt: skip
    assert (
        repr(gccomm.get_codec("rotated:wire_bits=5,headroom=safe")) == "Rotated(wire_bits=5, headroom='safe')"
    )
    for option, value in (("headroom", "tight"), ("rotations", 3), ("scales", 1), ("wire_bits", 7)):
        with pytest.raises(ValueError, match=option):
            gccomm.get_codec("rotated", **{option: value})
    with pytest.raises(TypeError, match="rotations"):
        gccomm.get_codec("rotated", rotations=1.0)


@pytest.mark.parametrize(("n", "stateful", "checked"), [(3, True, False), (4, True, True), (4, False, False)])
def test_which_headroom_is_the_default(n: int, stateful: bool, checked: bool) -> None:
    """Check words and energies take a fourth message where headroom is checked."""
    x = np.random.default_rng(0).standard_normal(64 * 1024).astype(np.float32)

    def program(comm: gccomm.Communicator) -> int:
        if stateful:
            gccomm.Reducer(comm=comm)({"x": x})
        else:
            comm.compressed_allreduce({"x": x})
        return comm.stats.messages

    assert testing.run(program, ranks=n) == [3 if checked else 2] * n


@pytest.mark.parametrize(
    ("wire_bits", "n", "carried"),
    [(8, 4, 10), (8, 16, 10), (8, 17, 16), (8, 65536, 16), (8, 65537, 8), (4, 4, 5), (4, 16, 6), (4, 17, 8),
     (2, 4, 3), (10, 5, 16), (16, 4, 16)],
)  # fmt: skip
def test_small_arrays_of_a_reducer_have_wider_lanes_that_cannot_overflow(
    wire_bits: int, n: int, carried: int
) -> None:
    codec = gccomm.get_codec("rotated", wire_bits=wire_bits, rotations=2)
    small = codec.for_array(SMALL - 1, n)
    assert small.config() == {
        **codec.config(), "wire_bits": carried, "headroom": "auto" if carried == wire_bits else "safe"
    }  # fmt: skip
    assert codec.for_array(SMALL, n) is codec


@pytest.mark.parametrize(
    "options", ["headroom=checked", "headroom=safe", "headroom=clipped", "scales=predicted"]
)
def test_who_chose_a_headroom_gets_it_for_small_arrays_too(options: str) -> None:
    codec = gccomm.get_codec(f"rotated:{options}")
    assert codec.for_array(1024, 8) is codec
    assert gccomm.get_codec("rotated").for_array(1024, 3).fingerprint == Rotated().fingerprint


@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize(("n", "width"), [(4, 8), (16, 8), (64, 8), (4, 4), (16, 4)])
def test_small_arrays_of_a_reducer_are_as_exact_as_with_checked_headroom(
    family: str, n: int, width: int
) -> None:
    codec = f"rotated:wire_bits={width},headroom="
    errors = [
        measure(codec + headroom, family, n, steps=5, coordinates=SMALL // 2)[0]
        for headroom in ("auto", "checked")
    ]
    assert errors[0] < 1.1 * errors[1]


def test_a_small_array_is_sent_at_once_and_its_bits_do_not_depend_on_its_company() -> None:
    rng = np.random.default_rng(0)
    draws = rng.standard_normal((4, 3 * SMALL)).astype(np.float32)

    def program(comm: gccomm.Communicator) -> Any:
        x, large = draws[comm.rank, :5000], draws[comm.rank, SMALL:]
        alone = gccomm.Reducer(op="sum", comm=comm)
        found = [alone({"x": x})["x"] for _ in range(3)]
        messages, state = alone.stats.messages, alone.state_dict()["states"]
        among = gccomm.Reducer(op="sum", comm=comm)
        for expected in found:
            together = among({"a": large, "x": x, "z": large})
            np.testing.assert_array_equal(together["x"], expected)
        assert set(among.state_dict()["states"]) == {"a", "z"}
        function = comm.compressed_allreduce({"x": x})  # which has no steps before it to learn from
        return messages, state, found[0], function

    for messages, state, result, function in testing.run(program, ranks=4):
        exact = draws[:, :5000].sum(0, dtype=np.float64)
        errors = [((y - exact) ** 2).sum() for y in (result, function["x"])]
        assert (messages, state) == (2, {})
        assert errors[0] < errors[1] / 4


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(NegotiationError, match="65537 ranks do not fit in lanes of 2 bits"):
        gccomm.get_codec("rotated:wire_bits=2").require_size(65537, 4)


@pytest.mark.parametrize(
    ("codec", "least"),
    [("rotated", 1 << 20), ("rehop", 1 << 20), ("uniform", (2 << 20) + 4), ("bf16", (2 << 20) + 4)],
)
def test_results_that_are_too_large_for_caches_are_written_past_them(
    monkeypatch: pytest.MonkeyPatch, codec: str, least: int
) -> None:
    answers, ask = [], Context.streams

    def streams(context: Context, rotations: int = 0) -> bool:
        answers.append(ask(context, rotations))
        return answers[-1]

    monkeypatch.setattr(Context, "streams", streams)
    for more, past in [(-1, False), (0, True)]:
        x = np.ones(least // 4 + more, np.float32)
        testing.simulate([x, x], codec)
        assert set(answers) == {past}
        answers.clear()


@pytest.mark.parametrize("rotations", [0, 1])
def test_calls_that_run_as_a_whole_write_past_the_caches_too(rotations: int) -> None:
    x, result = np.ones((2, 2048), np.float32)
    operand = Operand.of_arrays(get_codec("rotated"), [x], [result], np.zeros((1, 2), np.uint32))
    for nbytes, past in [((1 << 20) - 1, False), (1 << 20, rotations > 0), ((2 << 20) + 1, True)]:
        context = Context(0, 2, 0, result_bytes=nbytes)
        step = lane_sum_of(
            operand, np.empty(2, np.uint32), 8, 1 << 20, context, agree=True, rotations=rotations
        )
        assert bool(step.job["stream"][0]) is past
