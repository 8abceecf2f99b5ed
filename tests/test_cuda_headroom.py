"""The kernels of checked headroom for devices, run on the CPU, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gccomm import get_codec, kernels, testing
from gccomm.codecs.headroom import Sizes
from gccomm.codecs.rotated import Rotated
from gccomm.errors import BackendError
from gccomm.kernels import reference
from gccomm.kernels.cuda import headroom
from gccomm.layout import LeafSpec, Range
from gccomm.operand import Operand, segment_table
from gccomm.steps import Context, Look, Steps
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


class Memory:
    """Arrays where kernels reach them: the host's own, as kernels run on the CPU."""

    def __init__(self, launcher: Any) -> None:
        self.launcher = launcher
        self._arrays: dict[int, np.ndarray] = {}

    def put(self, array: np.ndarray) -> int:
        """Return the address of an array there."""
        found = kernels.address(array)
        self._arrays[found] = array
        return found

    def get(self, address: int) -> np.ndarray:
        """Return what is there now."""
        return self._arrays[address]


@pytest.fixture(params=SCHEDULES)
def memory(request: pytest.FixtureRequest) -> Memory:
    return Memory(kernels_on_cpu(request.param).launcher)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("n", [4, 7, 64, 4096])
def test_energies_as_they_are_shared(n: int, dtype: str, memory: Memory) -> None:
    x, rng = operand(dtype), np.random.default_rng(n)
    own = scales_of(x, rng)
    own[x.nonfinite_scales(own)] = 0
    energy = rng.integers(0, 1 << 30, x.blocks, np.uint32)
    energy[own == 0] = 0
    scales = scales_of(x, rng, low=own)
    scales[::5] = own[::5]
    expected = reference.share_energies(own, energy, scales, x.float64, n)
    *given, out = (memory.put(a) for a in (own, energy, scales, np.full(x.blocks, 77, np.uint32)))
    headroom.share(memory.launcher, x.table, *given, n, out)
    np.testing.assert_array_equal(memory.get(out), expected)
    assert len(np.unique(expected)) > 20


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("width", [2, 4, 8, 16])
@pytest.mark.parametrize("n", [2, 4, 7, 64, 4096])
def test_steps(n: int, width: int, dtype: str, memory: Memory) -> None:
    x, rng = operand(dtype), np.random.default_rng([n, width])
    scales = scales_of(x, rng)
    energies = np.exp2(rng.uniform(0, 31, x.blocks)).astype(np.uint32)
    energies[::9] = 0
    ratios = np.exp(rng.uniform(-3, np.log(n), x.count))
    sizes, carried = Sizes.of(n, width), x.codec.carried(x.lengths)
    shared, by_block = n > 3 and sizes.bracket > 0, np.repeat(ratios, np.diff(x.bounds))
    given = scales, energies if shared else None, by_block, carried, x.float64
    expected = reference.choose_steps(*given, *sizes)
    used = memory.put(energies) if shared else 0
    out = memory.put(np.empty(x.blocks, np.float32))
    headroom.steps(memory.launcher, x.table, memory.put(scales), used, ratios, sizes, out)
    found = memory.get(out)
    assert found.tobytes() == expected.tobytes()
    assert (found[scales == 0] == 0).all()


def test_check_words_by_span(memory: Memory) -> None:
    x, rng = operand("float32"), np.random.default_rng(0)
    starts, check = x.span_starts, rng.integers(0, 1 << 32, (x.blocks, 2), np.uint32)
    assert len(starts) == len(SIZES) + 2  # one segment reaches into three spans
    expected = reference.sum_spans(check, starts)
    given = memory.put(check.reshape(-1)), starts, x.blocks
    out, wrong = (memory.put(np.full(k * len(starts), 7, np.uint32)) for k in (2, 1))
    headroom.span_checks(memory.launcher, *given, 0, out)
    np.testing.assert_array_equal(memory.get(out), expected.reshape(-1))
    expected[1, 0] += 1
    expected[5, 1] += 1
    headroom.span_checks(memory.launcher, *given, memory.put(expected.reshape(-1)), wrong)
    assert memory.get(wrong).tolist() == [0, 1, 0, 0, 0, 1, *[0] * (len(starts) - 6)]


def test_a_look_without_a_device_is_refused() -> None:
    """Words that stay on a device are what it is for."""

    class Looking(Rotated):
        id = "looking"

        def steps(self, x: Any, state: Any, ctx: Context) -> Steps:
            yield Look()

    with pytest.raises(BackendError, match="a look where no words are on a device"):
        testing.simulate([np.ones(3000, np.float32)] * 2, Looking())
