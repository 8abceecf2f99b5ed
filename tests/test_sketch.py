"""The measured error of codecs in lanes against the true one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gccomm_launch.accuracy_families import FAMILIES
from gccomm_launch.accuracy_measure import vnmse

from gccomm.testing import simulate_steps

LANE_CODECS = (
    "uniform",
    "rotated:headroom=safe",
    "rotated:headroom=checked",
    "rotated:headroom=clipped",
    "rotated:scales=predicted",
    "uniform:scales=predicted",
    "qsgd-mn",
    "qsgd-mn:norm=max",
    "qsgd-mn-ts",
    "global-qsgd",
    "intsgd",
    "thc",
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("width", "n"), [(4, 4), (8, 2), (8, 16), (16, 4), (16, 16)])
@pytest.mark.parametrize("codec", LANE_CODECS)
def test_estimates_are_near_the_true_error(codec: str, width: int, n: int, family: str) -> None:
    """Of steps that clamp nothing; errors far below the sum and far above it, in fine lanes and coarse."""
    text = f"{codec}{',' if ':' in codec else ':'}wire_bits={width}"
    true: list[float] = []
    estimated: list[float] = []

    def inputs(step: int) -> list[Any]:
        return FAMILIES[family](n, step, 0, 1 << 16)

    for step, xs, ys, stats in simulate_steps(inputs, text, steps=4, error_feedback=False):
        if step > 0 and not stats[0].clamps and not stats[0].spans_redone:
            exact = np.sum(xs, axis=0, dtype=np.float64)
            true.append(vnmse(ys[0], [exact]))
            estimated.append(stats[0].vnmse_estimate)
    if not true:
        pytest.skip("every step clamped, or sent spans again")
    assert np.mean(estimated) == pytest.approx(np.mean(true), rel=0.2)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("codec", LANE_CODECS)
def test_blocks_that_are_lost_do_not_spoil_the_estimate(codec: str, bad: float) -> None:
    """Also where their scales, being predicted, are finite: then the step is not measured."""

    def inputs(step: int) -> list[Any]:
        xs = np.random.default_rng(step).standard_normal((2, 1 << 15)).astype(np.float32)
        if step == 2:
            xs[1, 5000] = bad
        return list(xs)

    estimates = []
    for _, xs, ys, stats in simulate_steps(inputs, codec, steps=4, error_feedback=False):
        assert len({s.vnmse_estimate for s in stats if not np.isnan(s.vnmse_estimate)}) <= 1
        good = np.isfinite(np.sum(xs, axis=0)) & np.isfinite(ys[0])
        if good.any():
            true = vnmse(ys[0][good], [np.sum(xs, axis=0, dtype=np.float64)[good]])
            estimates.append((stats[0].vnmse_estimate, true))
    for estimate, true in estimates[1:]:
        assert np.isnan(estimate) or estimate == pytest.approx(true, rel=0.5)
