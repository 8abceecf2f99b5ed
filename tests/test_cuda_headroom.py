"""The kernels of checked headroom, run on the CPU, against what NumPy does for arrays of the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gccomm import get_codec, kernels
from gccomm.codecs import headroom as host
from gccomm.kernels.cuda import headroom
from gccomm.lanes import FIXED_POINT, safe_limit
from gccomm.layout import LeafSpec, Range
from gccomm.operand import Operand, segment_table
from gccomm.steps import Context
from tests.cuda_on_cpu import SCHEDULES, kernels_on_cpu

SIZES = (1, 64, 1000, 1024, 1025, 5003, 150_000)


def operand(dtype: str) -> Operand:
    """Return blocks of tensors of many sizes, of one of them not from its beginning."""
    codec = get_codec("rotated:headroom=checked")
    specs = [LeafSpec(str(n), dtype, (n,), (n,), codec, False) for n in SIZES]
    segments = [Range(i, 0, -(-n // 1024)) for i, n in enumerate(SIZES)]
    segments[-1] = Range(len(SIZES) - 1, 30, 100)
    return Operand(codec, specs, segments, segment_table(segments, specs))


def scales_of(x: Operand, rng: np.random.Generator, *, low: np.ndarray | None = None) -> np.ndarray:
    """Return scale words of all magnitudes, at least those of ``low``; some are zero, inf or NaN."""
    values = np.exp(rng.uniform(-80, 80, x.blocks))
    if low is not None:
        values = np.maximum(values, np.where(x.nonfinite_scales(low), 0, x.scale_values(low)))
    words = x.scale_words(values)
    words[rng.random(x.blocks) < 0.1] = 0
    words[rng.random(x.blocks) < 0.1] = x.scale_words(np.array([np.inf, np.nan]))[rng.integers(2)]
    return words if low is None else np.maximum(words, low)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("n", [4, 7, 64, 4096])
def test_energies_as_they_are_shared(n: int, dtype: str, schedule: str) -> None:
    x, rng = operand(dtype), np.random.default_rng(n)
    own = scales_of(x, rng)
    own[x.nonfinite_scales(own)] = 0
    energy = rng.integers(0, 1 << 30, x.blocks, np.uint32)
    energy[own == 0] = 0
    scales = scales_of(x, rng, low=own)
    scales[::5] = own[::5]
    expected = np.empty(x.blocks, np.uint32)
    host._share(x, np.stack([own, energy]), scales, n, expected)
    out = np.full(x.blocks, 77, np.uint32)
    launcher = kernels_on_cpu(schedule).launcher
    headroom.share(launcher, x.table, *map(kernels.address, (own, energy, scales)), n, kernels.address(out))
    np.testing.assert_array_equal(out, expected)
    assert len(np.unique(out)) > 20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("width", [2, 4, 8, 16])
@pytest.mark.parametrize("n", [2, 4, 7, 64, 4096])
def test_steps(n: int, width: int, dtype: str) -> None:
    x, rng = operand(dtype), np.random.default_rng([n, width])
    scales = scales_of(x, rng)
    energies = np.exp2(rng.uniform(0, 31, x.blocks)).astype(np.uint32)
    energies[::9] = 0
    ratios = np.exp(rng.uniform(-3, np.log(n), x.count))
    expected = host._steps(x, scales, energies, ratios, n, width)
    bracket = (2 ** (width - 1) - 1) ** 2 - host.DEVIATIONS**2 * n / 12
    out = np.empty(x.blocks, np.float32)
    safe = FIXED_POINT / safe_limit(width, n)
    fields = headroom.Bracket(n / 2 * 2.0**-20, host.DEVIATIONS, bracket, safe, 1 / host.LARGEST)
    used = kernels.address(energies) if n > 3 and bracket > 0 else 0
    launcher, where = kernels_on_cpu("random").launcher, kernels.address(out)
    headroom.steps(launcher, x.table, kernels.address(scales), used, ratios, fields, where)
    assert out.tobytes() == expected.tobytes()
    assert (out[scales == 0] == 0).all()


def test_check_words_by_span() -> None:
    x, rng = operand("float32"), np.random.default_rng(0)
    starts, check = host.span_starts(x), rng.integers(0, 1 << 32, (x.blocks, 2), np.uint32)
    assert len(starts) == len(SIZES) + 2  # one segment reaches into three spans
    expected = np.add.reduceat(check, starts, axis=0, dtype=np.uint32)
    out, wrong = np.empty_like(expected), np.full(len(starts), 7, np.uint32)
    launcher: Any = kernels_on_cpu("random").launcher
    given = kernels.address(check), starts, x.blocks
    headroom.span_checks(launcher, *given, 0, kernels.address(out))
    np.testing.assert_array_equal(out, expected)
    expected[1, 0] += 1
    expected[5, 1] += 1
    headroom.span_checks(launcher, *given, kernels.address(expected), kernels.address(wrong))
    assert np.flatnonzero(wrong).tolist() == [1, 5]
    assert set(wrong.tolist()) == {0, 1}


def test_a_look_without_a_device_is_refused() -> None:
    """Words that stay on a device are what it is for."""
    from gccomm import testing
    from gccomm.codecs.rotated import Rotated
    from gccomm.errors import BackendError
    from gccomm.steps import Look, Steps

    class Looking(Rotated):
        id = "looking"

        def steps(self, x: Any, state: Any, ctx: Context) -> Steps:
            yield Look()

    with pytest.raises(BackendError, match="a look where no words are on a device"):
        testing.simulate([np.ones(3000, np.float32)] * 2, Looking())
