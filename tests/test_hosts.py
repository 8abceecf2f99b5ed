"""Hosts that add up their ranks' floats before they compress, over virtual ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import gccomm
from gccomm.testing import simulate, simulate_steps

PAIRS = (0, 0, 1, 1)
LANES = (
    "uniform",
    "rotated",
    "rotated:headroom=checked",
    "uniform:scales=predicted",
    "qsgd-mn:norm=max",
    "thc",
)
OTHERS = ("rehop", "topkc", "powersgd", "intsgd", "grandk-mn", "bf16", "fp16", "raw")
OWN = ("thc:saturate=True", "global-qsgd:dithering=exponential")


def tree(rank: int, step: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng((rank, step))
    return {
        "w": rng.standard_normal((150, 1024)).astype(np.float32),
        "half": rng.standard_normal(5000).astype(np.float16),
        "double": rng.standard_normal((3, 700)),
        "small": rng.standard_normal(10),
        "count": np.arange(2000) * (rank + 1),
    }


def inputs(ranks: int = 4, step: int = 0) -> list[dict[str, Any]]:
    return [tree(rank, step) for rank in range(ranks)]


def error(found: Any, trees: Sequence[Any], key: str) -> float:
    exact = np.sum([np.asarray(x[key], np.float64) for x in trees], axis=0)
    return float(np.linalg.norm(np.asarray(found[key], np.float64) - exact) / np.linalg.norm(exact))


def same(one: Any, other: Any) -> bool:
    return all(one[key].tobytes() == other[key].tobytes() for key in one)


@pytest.mark.parametrize("hosts", [PAIRS, (0, 1, 1, 1), (0, 1, 0, 1), (3, 1, 1, 3, 2, 2)])
@pytest.mark.parametrize("codec", [*LANES, *OTHERS, *OWN])
def test_all_ranks_get_the_same_bits(codec: str, hosts: Sequence[int]) -> None:
    for _, trees, found, _ in simulate_steps(
        lambda step: inputs(len(hosts), step), codec, steps=3, hosts=hosts, error_feedback=False
    ):
        assert all(same(found[0], other) for other in found[1:])
        total = sum(rank + 1 for rank in range(len(hosts)))
        np.testing.assert_array_equal(found[0]["count"], np.arange(2000) * total)
        assert error(found[0], trees, "small") < 1e-6 or codec in ("bf16", "fp16")


@pytest.mark.parametrize("codec", ["uniform", "rotated:headroom=safe", "qsgd-mn:norm=max", "bf16"])
def test_the_error_is_that_of_fewer_ranks(codec: str) -> None:
    """Eight ranks on two hosts: what two ranks that hold the hosts' sums get."""
    trees = inputs(8)
    flat = simulate(trees, codec, one_host=False)[0][0]
    by_host = simulate(trees, codec, hosts=(0,) * 4 + (1,) * 4)[0][0]
    halves = [trees[:4], trees[4:]]
    sums = [{k: np.add.reduce([x[k] for x in half]) for k in ("w", "double")} for half in halves]
    two = simulate(sums, codec, one_host=False)[0][0]
    for key in ("w", "double"):
        np.testing.assert_array_equal(by_host[key], two[key])
        assert error(by_host, trees, key) < 0.8 * error(flat, trees, key)


@pytest.mark.parametrize("codec", ["uniform", "rotated:headroom=checked", "uniform:scales=predicted"])
@pytest.mark.parametrize("feedback", [False, True])
def test_results_do_not_hang_on_pieces(codec: str, feedback: bool) -> None:
    found = []
    for more in ({}, {"piece_coordinates": 1 << 16}, {"bucket_bytes": 100_000}):
        how: dict[str, Any] = {"hosts": PAIRS, "error_feedback": feedback, **more}
        found.append([y for *_, y, _ in simulate_steps(lambda s: inputs(step=s), codec, steps=4, **how)])
    for one in found[1:]:
        assert all(same(a[0], b[0]) for a, b in zip(found[0], one, strict=True))


def test_means_divide_by_all_ranks() -> None:
    trees = [{"w": x["w"], "half": x["half"], "small": x["small"]} for x in inputs()]
    for codec in ("uniform", "rotated", "bf16", "powersgd", *OWN):
        total, mean = (simulate(trees, codec, op, hosts=PAIRS)[0][0] for op in ("sum", "mean"))
        for key in trees[0]:
            rest = mean[key].astype(np.float64) - total[key].astype(np.float64) / 4
            assert np.abs(rest).max() <= 2e-3 * np.abs(mean[key].astype(np.float64)).max()


@pytest.mark.parametrize("codec", ["uniform:wire_bits=4", "rotated:wire_bits=4", "topkc", "powersgd"])
def test_residuals_add_up_to_what_is_lost(codec: str) -> None:
    """The sum of results and residuals is that of the inputs: also where blocks change speakers."""
    options = gccomm.reduction.Options.single(gccomm.get_codec(codec), "sum", True, 0, "propagate", seed=3)
    reductions = [gccomm.reduction.Reduction(options, remember=True) for _ in range(4)]
    places = gccomm.testing._places(4, False, PAIRS)
    given, got = np.zeros((150, 1024)), np.zeros((150, 1024))
    for step in range(6):
        trees = [{"w": tree(rank, step)["w"]} for rank in range(4)]
        if step % 2:  # another array goes first, so that another rank speaks for this one
            trees = [{"a": np.ones((1100, 1024), np.float32), **x} for x in trees]
        found, _ = gccomm.testing._step(reductions, trees, places)
        given += np.sum([x["w"] for x in trees], axis=0, dtype=np.float64)
        got += found[0]["w"]
        left = np.sum([r.residuals["w"] for r in reductions], axis=0, dtype=np.float64).reshape(150, 1024)
        # what bfloat16 rounds off a sum of two, and float32 off rotations, is in no residual
        assert np.abs(given - got - left).max() < (4e-3 if codec == "topkc" else 1e-3) * np.abs(given).max()
        holders = [bool(r.residuals["w"].any()) for r in reductions]
        assert holders in ([True, False, True, False], [False, True, False, True])


def test_what_is_not_finite_is_lost_on_all_ranks_and_residuals_stay() -> None:
    options = gccomm.reduction.Options.single(gccomm.get_codec("uniform"), "sum", True, 0, "propagate")
    reductions = [gccomm.reduction.Reduction(options, remember=True) for _ in range(4)]
    places = gccomm.testing._places(4, False, PAIRS)
    trees = [{"w": x["w"]} for x in inputs()]
    gccomm.testing._step(reductions, trees, places)
    before = [r.residuals["w"].copy() for r in reductions]
    trees[3]["w"] = trees[3]["w"].copy()
    trees[3]["w"][7, 5] = np.inf
    found, _ = gccomm.testing._step(reductions, trees, places)
    for y in found:
        assert np.isnan(y["w"][7]).all()
        assert np.isfinite(np.delete(y["w"], 7, axis=0)).all()
    for r, old in zip(reductions, before, strict=True):
        np.testing.assert_array_equal(r.residuals["w"][7 * 1024 : 8 * 1024], old[7 * 1024 : 8 * 1024])
    huge = [{"w": np.full(2000, 3e38, np.float32)} for _ in range(4)]  # a host's sum is beyond float32
    assert np.isnan(simulate(huge, "uniform", hosts=PAIRS)[0][0]["w"]).all()


def test_errors_are_raised_on_all_ranks() -> None:
    trees = inputs()
    trees[2]["w"][0, 0] = np.nan
    with pytest.raises(gccomm.NonFiniteError, match="rank 2: input holds inf or NaN in 'w'"):
        simulate(trees, hosts=PAIRS, nonfinite="raise")
    trees[2]["w"] = trees[2]["w"][:5]
    with pytest.raises(gccomm.MismatchError, match="ranks disagree about array 4"):
        simulate(trees, hosts=PAIRS)


def test_more_ranks_fit_where_hosts_count() -> None:
    trees = [{"w": np.full(2000, 1.0, np.float32)} for _ in range(16)]
    with pytest.raises(gccomm.NegotiationError, match="16 ranks do not fit in lanes of 4 bits"):
        simulate(trees, "qsgd-mn:wire_bits=4,norm=max")
    found, _ = simulate(trees, "qsgd-mn:wire_bits=4,norm=max", hosts=[rank // 4 for rank in range(16)])
    np.testing.assert_allclose(found[0]["w"], 16, rtol=1e-6)


def test_missing_values_count_as_zeros() -> None:
    def given(step: int) -> list[dict[str, Any]]:
        trees = [{"w": x["w"], "half": x["half"]} for x in inputs(step=step)]
        if step:
            trees[0]["w"] = trees[1]["w"] = trees[2]["half"] = None
        return trees

    for step, trees, found, _ in simulate_steps(given, "rotated", steps=2, hosts=PAIRS):
        if step:
            there = [{"w": x["w"] if x["w"] is not None else 0 * found[0]["w"]} for x in trees]
            assert error(found[0], there, "w") < 0.05
            assert all(same(found[0], other) for other in found)


def test_figures() -> None:
    trees = [{"w": x["w"]} for x in inputs()]
    found, stats = simulate(trees, "uniform", hosts=PAIRS)
    assert {s.host_bytes for s in stats} == {trees[0]["w"].nbytes}
    assert len({s.wire_bytes for s in stats}) == len({s.vnmse_estimate for s in stats}) == 1
    assert stats[0].vnmse_estimate == pytest.approx(error(found[0], trees, "w") ** 2, rel=0.3)
    assert simulate(trees, "raw", hosts=PAIRS)[1][0].host_bytes == 0


@pytest.mark.parametrize("hosts", [(0, 0, 0, 0), (0, 1)])
def test_hosts_that_are_none(hosts: Sequence[int]) -> None:
    with pytest.raises(ValueError, match="`hosts` must name a host for each of 4 ranks, two hosts at least"):
        simulate(inputs(), hosts=hosts)


def test_init_checks_its_argument() -> None:
    with pytest.raises(TypeError, match="`hierarchical` must be True, False or None, got 1"):
        gccomm.init("local", hierarchical=1)  # type: ignore[arg-type]
    with gccomm.init():  # what other tests have left open is closed
        pass
    with gccomm.init("local", hierarchical=True) as comm:
        assert comm is gccomm.init() is gccomm.init("local", hierarchical=True)
        with pytest.raises(ValueError, match="hierarchical=True before, now False"):
            gccomm.init(hierarchical=False)
        assert comm.allreduce(3.0) == 3.0
