"""The kernels of predicted scales, and check sums, word for word as the reference says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gccomm import kernels
from gccomm.codecs.base import state_digest
from gccomm.kernels import reference
from tests.kernel_batches import Array, level

__all__ = ["level"]

BITS = (4, 8, 16, 32)
SPECIAL = {
    False: (0, 1, 2, 0x7FFFFF, 0x800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000),
    True: (0, 1, 2, 0xFFFFF, 0x100000, 0x3FF00000, 0x7FEFFFFF, 0x7FF00000, 0x7FF80000),
}


def draw_scales(blocks: int, wide: bool) -> tuple[Array, Array]:
    """Return scale words of a rank and predicted ones: most of them close, some of them special."""
    rng, special = np.random.default_rng([blocks, wide]), SPECIAL[wide]
    predicted = rng.integers(0, special[6], blocks, dtype=np.uint32)
    near = 1 << (20 if wide else 23)
    own = np.clip(predicted.astype(np.int64) - rng.integers(-near // 4, 3 * near, blocks), 0, special[6])
    pairs = np.array([(a, b) for a in special for b in special], dtype=np.uint32)[:blocks]
    own = own.astype(np.uint32)
    own[: len(pairs)], predicted[: len(pairs)] = pairs[:, 0], pairs[:, 1]
    return own, predicted


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("blocks", [0, 1, 7, 16, 81, 1000])
def test_counters_of_a_rank(level: str, wide: bool, bits: int, blocks: int) -> None:
    own, predicted = draw_scales(blocks, wide)
    expected = reference.count_intervals(own, predicted, wide, bits)
    found = np.full((blocks, bits // 4), 0xDEADBEEF, dtype=np.uint32)
    beyond = kernels.count_intervals(
        kernels.address(own), kernels.address(predicted), blocks, wide, bits, kernels.address(found)
    )
    np.testing.assert_array_equal(found, expected)
    assert beyond == (own > predicted).sum()
    if blocks == 1000:
        _, most = reference.highest_intervals(expected, bits, 1)
        assert most == 7
        intervals, _ = reference.highest_intervals(expected, bits, 1)
        assert len(np.unique(intervals)) == 8  # every interval comes


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("ranks", [1, 2, 15, 16, 255, 70000])
def test_the_highest_counter_that_is_not_zero(level: str, bits: int, ranks: int) -> None:
    if ranks >= 1 << bits:
        ranks = (1 << bits) - 1
    rng = np.random.default_rng(ranks)
    counts = rng.multinomial(ranks, [0.5, 0.3, 0.1, 0.05, 0.02, 0.02, 0.005, 0.005], 300).astype(np.uint64)
    counts[:8] = np.eye(8, dtype=np.uint64) * ranks
    digits = counts.reshape(300, -1, 32 // bits) << (np.arange(32 // bits, dtype=np.uint64) * np.uint64(bits))
    sums = digits.sum(axis=2, dtype=np.uint64).astype(np.uint32)
    found = np.empty(300, dtype=np.uint32)

    def highest() -> int:
        return kernels.highest_intervals(
            kernels.address(sums), len(sums), bits, ranks, kernels.address(found)
        )

    expected, most = reference.highest_intervals(sums, bits, ranks)
    assert highest() == most == 7
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(found, 7 - np.argmax(counts[:, ::-1] > 0, axis=1))
    for row, word in ((0, 0), (299, sums.shape[1] - 1)):
        for flip in (1, 1 << 31):
            sums[row, word] ^= np.uint32(flip)
            assert highest() == reference.highest_intervals(sums, bits, ranks)[1] == -1
            sums[row, word] ^= np.uint32(flip)
    assert highest() == 7


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("blocks", [0, 1, 17, 2000])
def test_next_predictions(level: str, wide: bool, blocks: int) -> None:
    scales, _ = draw_scales(blocks, wide)
    intervals = np.arange(blocks, dtype=np.uint32) % 9
    found = np.empty(blocks, dtype=np.uint32)
    kernels.predict_scales(
        kernels.address(scales), kernels.address(intervals), blocks, wide, kernels.address(found)
    )
    np.testing.assert_array_equal(found, reference.predict_scales(scales, intervals, wide))
    assert (found <= SPECIAL[wide][6]).all()  # finite


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 63, 64, 65, 127, 128, 4096, 10001])
def test_check_sums(level: str, nbytes: int) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes + 1, dtype=np.uint8)
    for seed in (0, 1, (1 << 64) - 1):
        for at in (0, 1):
            part = data[at : at + nbytes]
            found = kernels.digest(kernels.address(part), nbytes, seed)
            assert found == reference.digest(part, seed)


@given(st.binary(min_size=1, max_size=300), st.data())
def test_check_sums_differ(data: bytes, draw: st.DataObject) -> None:
    """One or two bits that differ, and zeros at the end, are seen."""
    first = np.frombuffer(data, np.uint8).copy()
    bits = draw.draw(st.sets(st.integers(0, 8 * len(data) - 1), min_size=1, max_size=2))
    second = first.copy()
    for bit in bits:
        second[bit // 8] ^= 1 << bit % 8
    longer = np.concatenate([first, np.zeros(1, np.uint8)])
    sums = [kernels.digest(kernels.address(x), x.nbytes, 0) for x in (first, second, longer)]
    assert len(set(sums)) == 3


def test_digests_of_states() -> None:
    scales = np.arange(12, dtype=np.uint32)
    state = {"scales": scales, "agree": False}
    assert state_digest(state) == state_digest({"agree": False, "scales": scales.copy()})
    strided = np.repeat(scales, 2)[::2]
    assert state_digest({"scales": strided, "agree": False}) == state_digest(state)
    others = [
        {**state, "agree": True},
        {**state, "scales": scales.view(np.int32)},
        {**state, "scales": scales.reshape(3, 4)},
        {**state, "scales": scales[::-1]},
        {"scale": scales, "agree": False},
        {},
    ]
    assert len({state_digest(x) for x in [state, *others]}) == 1 + len(others)


def test_what_no_kernel_takes() -> None:
    with pytest.raises(ValueError, match="counters have 4, 8, 16 or 32 bits"):
        kernels.count_intervals(0, 0, 0, False, 5, 0)
    with pytest.raises(ValueError, match="blocks must not be negative"):
        kernels.highest_intervals(0, -1, 4, 1, 0)
    with pytest.raises(ValueError, match="blocks must not be negative"):
        kernels.predict_scales(0, 0, -1, False, 0)
    with pytest.raises(ValueError, match="nbytes must not be negative"):
        kernels.digest(0, -1, 0)
