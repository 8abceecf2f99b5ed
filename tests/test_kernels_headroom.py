"""The kernels of checked headroom, word for word as the reference says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gccomm import get_codec, kernels
from gccomm.codecs.headroom import Sizes
from gccomm.kernels import reference
from gccomm.kernels.reference.headroom import Sums
from gccomm.layout import LeafSpec, Range
from gccomm.operand import Operand, segment_table
from tests.kernel_batches import Array, level

__all__ = ["level"]

SHAPES = ((1,), (64,), (1000,), (1024,), (1025,), (3, 700), (5003,), (150_000,))
SPECIAL = {
    False: (0, 1, 2, 0x7FFFFF, 0x800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000),
    True: (0, 1, 2, 0xFFFFF, 0x100000, 0x3FF00000, 0x7FEFFFFF, 0x7FF00000, 0x7FF80000),
}
RANKS = (1, 2, 3, 4, 7, 64, 4096, 1 << 16)


def operand(dtype: str) -> Operand:
    """Return blocks of tensors of many shapes, of one of them not from its beginning."""
    codec = get_codec("rotated:headroom=checked")
    specs = [LeafSpec(str(s), dtype, s, s, codec, False) for s in SHAPES]
    blocks = [-(-s[-1] // 1024) * (s[0] if len(s) > 1 else 1) for s in SHAPES]
    segments = [Range(i, 0, count) for i, count in enumerate(blocks)]
    segments[-1] = Range(len(SHAPES) - 1, 30, 100)
    return Operand(codec, specs, segments, segment_table(segments, specs))


def draw_scales(blocks: int, wide: bool, seed: int) -> Array:
    """Return scale words of all magnitudes; some of them special."""
    rng, special = np.random.default_rng([blocks, wide, seed]), np.array(SPECIAL[wide], np.uint32)
    words = rng.integers(0, special[7], blocks, dtype=np.uint32)
    return np.where(rng.random(blocks) < 0.2, rng.choice(special, blocks), words).astype(np.uint32)


def addresses(*arrays: Array) -> list[int]:
    return [kernels.address(array) for array in arrays]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("blocks", [0, 1, 7, 16, 81, 3000])
def test_energies_as_they_are_shared(level: str, blocks: int, ranks: int, wide: bool) -> None:
    rng = np.random.default_rng([blocks, ranks])
    own = draw_scales(blocks, wide, ranks)
    own[own >= SPECIAL[wide][7]] = 0
    scales = np.maximum(own, draw_scales(blocks, wide, ranks + 1))
    scales[::3] = np.minimum(own[::3] + rng.integers(0, 1 << 24, len(own[::3])), SPECIAL[wide][6])
    energy = np.exp2(rng.uniform(0, 32, blocks)).astype(np.uint32)
    energy[::7] = 0
    expected = reference.share_energies(own, energy, scales, wide, ranks)
    found = np.full(blocks + 1, 77, dtype=np.uint32)
    own_at, energy_at, scales_at, out = addresses(own, energy, scales, found)
    kernels.share_energies(own_at, energy_at, scales_at, blocks, wide, ranks, out)
    np.testing.assert_array_equal(found, [*expected, 77])
    if blocks == 3000:
        assert {0, 1, 2**31 // ranks} <= set(expected.tolist())
        assert len(set(expected.tolist())) > 100


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("width", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("n", RANKS)
def test_steps(level: str, n: int, width: int, dtype: str) -> None:
    x, rng, sizes = operand(dtype), np.random.default_rng([n, width]), Sizes.of(n, width)
    scales = draw_scales(x.blocks, x.float64, n)
    energies = np.exp2(rng.uniform(0, 32, x.blocks)).astype(np.uint32)
    energies[::9] = 0
    ratios = np.exp(rng.uniform(-3, np.log(n), x.count))
    ratios[1], ratios[2] = 5e-324, 1.7e308
    used = energies if n > 3 and sizes.bracket > 0 else None
    by_block = np.repeat(ratios, np.diff(x.bounds))
    carried = x.codec.carried(x.lengths)
    expected = reference.choose_steps(scales, used, by_block, carried, x.float64, *sizes)
    found = np.full(x.blocks + 1, 77, dtype=np.float32)
    scales_at, energies_at, ratios_at, out = addresses(scales, energies, ratios, found)
    energies_at = 0 if used is None else energies_at
    kernels.choose_steps(x.address, x.count, x.blocks, scales_at, energies_at, ratios_at, *sizes, out)
    assert found[:-1].tobytes() == expected.tobytes()
    assert found[-1] == 77
    np.testing.assert_array_equal(found[:-1] == 0, scales == 0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_steps_are_rounded_up(level: str, dtype: str) -> None:
    """No clamp binds at 32767 levels of the largest value."""
    x, sizes = operand(dtype), Sizes.of(4, 16)
    one = np.full(x.blocks, 0x3FF00000 if x.float64 else 0x3F800000, dtype=np.uint32)
    none, ratios, found = np.zeros_like(one), np.ones(x.count), np.empty(x.blocks, np.float32)
    where = *addresses(one, none, ratios), *sizes, kernels.address(found)
    kernels.choose_steps(x.address, x.count, x.blocks, *where)
    assert (found.astype(np.float64) >= 1 / 32767).all()
    assert (np.nextafter(found, np.float32(0)).astype(np.float64) < 1 / 32767).all()


def test_check_words_by_span(level: str) -> None:
    x, rng = operand("float32"), np.random.default_rng(0)
    starts, check = x.span_starts, rng.integers(0, 1 << 32, (x.blocks, 2), np.uint32)
    assert len(starts) == len(SHAPES) + 2  # one segment reaches into three spans
    assert x.span_counts == [1] * (len(SHAPES) - 1) + [3]
    expected = reference.sum_spans(check, starts)
    found = np.full(2 * len(starts) + 1, 77, dtype=np.uint32)
    given = *addresses(check, starts), len(starts), x.blocks, kernels.address(found)
    assert kernels.sum_spans(*given) == 0
    np.testing.assert_array_equal(found, [*expected.reshape(-1), 77])
    for wrong in ((), (1,), (0, 5, len(starts) - 1)):
        sums = expected.copy()
        for place in wrong:
            sums[place, place % 2] ^= 1 << 31
        assert kernels.sum_spans(*given, kernels.address(sums)) == len(wrong)
        assert np.flatnonzero(found[: len(starts)]).tolist() == list(wrong)


def learnt(x: Operand, arrays: list[Array], redone: Array | None, *units: float) -> list[Any]:
    """Return what the kernel learns of each segment."""
    scales, steps, energies, energy = addresses(*arrays)
    found = np.empty(x.count, dtype=kernels.LEARNT)
    again = 0 if redone is None else kernels.address(redone)
    given = scales, steps, energies, energy, again, *units, kernels.address(found)
    kernels.learn_energies(x.address, x.count, x.blocks, *given)
    return [Sums(*record[:4], valid=bool(record[4])) for record in found.tolist()]


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("kind", ["any", "subnormal", "small", "large", "zero", "one kind"])
@pytest.mark.parametrize("again", [False, True])
def test_what_a_sum_says(level: str, again: bool, kind: str, dtype: str) -> None:
    x, n, width = operand(dtype), 7, 8
    rng, special = np.random.default_rng([again, len(kind)]), SPECIAL[x.float64]
    scales = draw_scales(x.blocks, x.float64, len(kind))
    low, high = {
        "any": (0, special[8]), "subnormal": (1, special[4]), "small": (1, 64), "zero": (0, 1),
        "large": (special[6] - 64, special[7]), "one kind": (special[5], special[5] + 99999),
    }[kind]  # fmt: skip
    scales = scales if kind == "any" else rng.integers(low, high, x.blocks, dtype=np.uint32)
    steps = np.exp(rng.uniform(-20, 1, x.blocks)).astype(np.float32)
    energies, energy = rng.integers(0, 1 << 32, (2, x.blocks), dtype=np.uint32)
    energy[::4] = 0
    redone = np.zeros(x.blocks, dtype=np.uint8)
    redone[::5], redone[-40:] = again, again
    units = 4.0 ** (width - 11), n / 12, n / 2 * 2.0**-20
    found = learnt(x, [scales, steps, energies, energy], redone if again else None, *units)
    carried = x.codec.carried(x.lengths)
    for i, sums in enumerate(found):
        at = slice(int(x.bounds[i]), int(x.bounds[i + 1]))
        rows = (row[at] for row in (scales, steps, energies, energy, redone.astype(bool), carried))
        expected = reference.learn_energies(*rows, x.float64, *units)
        assert sums == expected
        if kind not in ("any", "zero") and not again:
            assert sums.energy > 0 or not energy[at].any()
            assert sums.valid


def test_what_a_sum_says_without_energies_of_ranks(level: str) -> None:
    x = operand("float32")
    scales = draw_scales(x.blocks, False, 3)
    steps, energy = np.full(x.blocks, 0.01, np.float32), np.full(x.blocks, 12345, np.uint32)
    arrays = [scales, steps, np.zeros(x.blocks, np.uint32), energy]
    expected = learnt(x, arrays, None, 0.25, 1.0, 1.0)
    found = np.empty(x.count, dtype=kernels.LEARNT)
    given = *addresses(scales, steps), 0, kernels.address(energy), 0, 0.25, 1.0, 1.0, kernels.address(found)
    kernels.learn_energies(x.address, x.count, x.blocks, *given)
    assert [Sums(*r[:4], valid=bool(r[4])) for r in found.tolist()] == expected


def test_what_no_kernel_takes() -> None:
    with pytest.raises(ValueError, match="blocks must not be negative"):
        kernels.share_energies(0, 0, 0, -1, False, 4, 0)
    with pytest.raises(ValueError, match="ranks must be positive"):
        kernels.share_energies(0, 0, 0, 0, False, 0, 0)
    with pytest.raises(ValueError, match="blocks must not be negative"):
        kernels.choose_steps(0, 0, -1, 0, 0, 0, 1, 1, 1, 1, 1, 0)
    with pytest.raises(ValueError, match="negative block or segment number"):
        kernels.choose_steps(0, -1, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0)
    with pytest.raises(ValueError, match="spans must not be negative"):
        kernels.sum_spans(0, 0, -1, 0, 0)
    with pytest.raises(ValueError, match="blocks must not be negative"):
        kernels.learn_energies(0, 0, -1, 0, 0, 0, 0, 0, 1, 1, 1, 0)
