"""Lanes that widen on their way: the bits of full lanes, in fewer bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gccomm
from gccomm import kernels, lanes, testing
from gccomm.codecs.shared import SharedDither
from gccomm.codecs.widening import LEAST_KEPT, narrow_width, widening_limit
from gccomm.kernels import reference
from gccomm.lanes import safe_limit
from tests.conformance import all_shapes, assert_same_bits, mixed
from tests.word_batches import Batch, assert_same, every_level, make

CODECS = ["uniform", "uniform:wire_bits=5", "rotated:headroom=safe", "rotated:headroom=clipped,wire_bits=6"]


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let full lanes give up the levels that narrow ones do not have."""
    limit = SharedDither.limit
    monkeypatch.setattr(SharedDither, "limit", lambda codec, size: widening_limit(limit(codec, size)))


def both(codec: str) -> tuple[str, str]:
    return codec, f"{codec}{',' if ':' in codec else ':'}widening=true"


@pytest.mark.parametrize("n", [1, 2, 3, 8, 17, 64])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.usefixtures("limits")
def test_the_bits_of_full_lanes(codec: str, n: int) -> None:
    """Several tensors of several dtypes and lengths in a piece; residuals too."""
    trees = mixed(n) if n < 5 else all_shapes(n, "float32")
    for feedback in (False, True):
        if feedback and n > 3:
            continue
        full, narrow = (
            testing.simulate(trees, name, "mean", exact_below=0, steps=2, error_feedback=feedback)[0]
            for name in both(codec)
        )
        assert_same_bits(full[0], narrow[0])


@pytest.mark.parametrize(
    ("width", "n", "narrow"),
    [
        (8, 1, 8),
        (8, 2, 8),
        (8, 3, 8),
        (8, 4, 6),
        (8, 5, 6),
        (8, 8, 5),
        (8, 16, 5),
        (8, 64, 3),
        (8, 127, 2),
        (8, 128, 2),
        (5, 16, 2),
        (10, 4, 8),
        (16, 64, 10),
    ],
)
def test_the_narrowest_lane(width: int, n: int, narrow: int) -> None:
    """Of which the wire carries half, and of the wide ones half."""
    assert narrow_width(widening_limit(safe_limit(width, n))) == narrow
    x = np.random.default_rng(n).standard_normal((64, 1024)).astype(np.float32)
    names = both(f"uniform:wire_bits={width}")
    full, less = (testing.simulate([x] * n, name)[1][0] for name in names)
    words = [64 * lanes.words(w, 1024) for w in (narrow, width)]
    saved = full.wire_bytes - full.measure_bytes - less.wire_bytes
    assert saved == 2 * (words[1] - words[0]) + 4  # and the tag of a sum


def test_few_levels_are_given_up_and_only_for_narrower_lanes() -> None:
    for width in lanes.WIDTHS[:-1]:
        for n in (*range(1, 200), 255, 256, 257, 1 << 14, (1 << (width - 1)) - 1):
            full = safe_limit(width, n)
            limit = widening_limit(full)
            assert LEAST_KEPT * full <= limit <= full
            assert (limit == full) == (narrow_width(limit) == narrow_width(full))


@pytest.mark.parametrize(("width", "n"), [(8, 2), (8, 3), (8, 16), (5, 3), (4, 5), (16, 3)])
def test_where_no_lane_is_narrower_nothing_is_given_up(width: int, n: int) -> None:
    xs = [np.random.default_rng(rank).standard_normal(3000).astype(np.float32) for rank in range(n)]
    full, narrow = (testing.simulate(xs, name)[0][0] for name in both(f"uniform:wire_bits={width}"))
    np.testing.assert_array_equal(full, narrow)


@pytest.mark.parametrize(("width", "n"), [(8, 4), (8, 8), (10, 4)])
def test_steps_are_a_little_wider_where_levels_are_given_up(width: int, n: int) -> None:
    xs = [np.random.default_rng(rank).standard_normal(1 << 16).astype(np.float32) for rank in range(n)]
    exact = np.sum(xs, axis=0, dtype=np.float64)
    full, narrow = (
        np.square(testing.simulate(xs, name)[0][0] - exact).sum()
        for name in both(f"uniform:wire_bits={width}")
    )
    wider = (safe_limit(width, n) / widening_limit(safe_limit(width, n))) ** 2
    assert 1 < wider < 1.14
    assert narrow / full == pytest.approx(wider, rel=0.02)


@pytest.mark.parametrize("width", [2, 3, 4, 5, 6, 8, 10, 16])
@pytest.mark.usefixtures("limits")
def test_no_rank_leaves_its_narrow_lane(width: int) -> None:
    """All at the maximum, of both signs, with every dither."""
    x = np.where(np.arange(4096) % 3 == 0, -1.9999999, 1.9999999).astype(np.float32)
    for n in range(1, 20):
        full, narrow = (testing.simulate([x] * n, name)[0][0] for name in both(f"uniform:wire_bits={width}"))
        np.testing.assert_array_equal(full, narrow)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_word_equality(seed: int) -> None:
    rng = np.random.default_rng(seed)
    narrow, width = sorted(rng.choice([2, 3, 4, 5, 6, 8, 10, 16], 2).tolist())
    ranks, rotated = int(rng.integers(1, 6)), bool(rng.random() < 0.5)
    tensors = [make("float32", int(rng.choice([1, 5, 63, 700, 1024, 2500])), rng) for _ in range(3)]

    def carried(length: int) -> int:
        return reference.padded(length) if rotated else length

    batch = Batch(tensors, lambda _, length: lanes.words(narrow, carried(length)))
    words = rng.integers(0, 2**32, (ranks, batch.words.size), dtype=np.uint64).astype(np.uint32)
    lengths = [carried(length) for tensor in tensors for length in tensor.lengths()]
    starts = batch.word_starts
    expected = [
        reference.widen_lanes(words[:, None, starts[b] : starts[b + 1]], narrow, width, length)[0]
        for b, length in enumerate(lengths)
    ]
    for _ in every_level():
        for lo, hi in ((0, batch.blocks), (batch.blocks // 2, batch.blocks)):
            parts = words[:, starts[lo] : starts[hi]].copy()
            addresses = np.array([kernels.address(part) for part in parts], np.uint64)
            out = np.full(sum(map(len, expected[lo:hi])), 7, np.uint32)
            kernels.widen_lanes(
                kernels.address(batch.table), len(tensors), lo, hi, kernels.address(addresses), ranks,
                kernels.address(out), int(starts[lo]), narrow, width, rotated,
            )  # fmt: skip
            assert_same(out, expected[lo:hi])


@pytest.mark.parametrize(("narrow", "width", "ranks"), [(7, 8, 1), (8, 4, 1), (8, 32, 1), (4, 8, 0)])
def test_arguments_of_the_kernel_are_checked(narrow: int, width: int, ranks: int) -> None:
    table = np.zeros(1, kernels.SEGMENT)
    at = kernels.address(table)
    with pytest.raises(ValueError, match=r"lane|ranks"):
        kernels.widen_lanes(at, 0, 0, 0, at, ranks, at, 0, narrow, width, False)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"scales": "predicted", "headroom": "safe"}, 'scales="agreed"'),
        ({"headroom": "checked"}, 'headroom=\'checked\'.*"safe" or "clipped"'),
        ({}, "headroom='auto'"),
    ],
)
def test_what_does_not_go_together_is_refused(options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=rf"`widening=True`.*{text}"):
        gccomm.get_codec("rotated", widening=True, **options)
