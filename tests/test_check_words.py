"""The check words of a span: what overflows and flipped bits do to decoded sums, they must see."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gccomm.kernels.reference.hashing import block_hashes, block_keys
from gccomm.kernels.reference.packing import unpack
from gccomm.lanes import lanes
from gccomm.layout import BLOCK, SPAN
from gccomm.noise import step_key, tensor_key

PATTERNS = 1_000_000
WIDTHS = [2, 3, 4, 5, 6, 8, 10, 16]
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def hashes() -> Array:
    """The weights of the coordinates of many spans, shape (spans, blocks, coordinates)."""
    spans = 16
    keys = step_key(*tensor_key("layer.weight", 3), 7)
    k0, k1 = block_keys(np, *keys, np.arange(spans * SPAN, dtype=np.uint32))
    return block_hashes(np, k0, k1, BLOCK).reshape(spans, SPAN, BLOCK)


def rotl(h: Array) -> Array:
    return (h << np.uint32(16)) | (h >> np.uint32(16))


class Changes:
    """Changes of decoded sums, pattern by pattern, and what both check words make of them."""

    def __init__(self, hashes: Array, rng: np.random.Generator, count: int) -> None:
        self.flat = hashes.reshape(len(hashes), -1)
        self.spans = rng.integers(0, len(hashes), count)
        self.first, self.second = np.zeros((2, count), dtype=np.uint32)
        self.changed = np.zeros(count, dtype=bool)

    def add(self, places: Array, deltas: Array) -> None:
        """Change the sums at ``places`` (in the span), shape (patterns, lanes), by ``deltas``."""
        h = self.flat[self.spans[:, None], places]
        words = deltas.astype(np.int64).astype(np.uint32)
        self.first += (h * words).sum(axis=1, dtype=np.uint32)
        self.second += (rotl(h) * words).sum(axis=1, dtype=np.uint32)
        self.changed |= (deltas != 0).any(axis=1)

    def missed(self) -> int:
        """Return how many patterns leave both check words as they are."""
        assert self.changed.mean() > 0.9
        return int(np.count_nonzero((self.first == 0) & (self.second == 0) & self.changed))


def full_words(width: int) -> int:
    """Return how many words of a block have a coordinate in every lane."""
    words = -(-BLOCK // lanes(width))
    return words - (words * lanes(width) - BLOCK)


def sums_of_a_word(rng: np.random.Generator, width: int, count: int) -> Array:
    """Return lane sums that fit, shape (count, lanes)."""
    half = 1 << (width - 1)
    return rng.integers(-half, half, (count, lanes(width)))


def places_of(width: int, block: Array, word: Array) -> Array:
    """Return the places of a word's lanes in the span, shape (count, lanes)."""
    place = np.arange(lanes(width)) * -(-BLOCK // lanes(width)) + word[:, None]
    return block[:, None] * BLOCK + place


def packed(q: Array, width: int) -> Array:
    weights = np.left_shift(1, width * np.arange(lanes(width)), dtype=np.int64)
    return (q * weights).sum(axis=1).astype(np.uint32)[:, None]


def overflow(rng: np.random.Generator, width: int, lane: Array, turns: int) -> Array:
    """Return decoded sums less the true ones, of words with a lane that is ``turns`` 2^w too large."""
    q = sums_of_a_word(rng, width, len(lane))
    q[np.arange(len(lane)), lane] += turns << width
    return np.asarray(unpack(np, packed(q, width), width, lanes(width)) - q)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("top", [False, True], ids=["any lane", "top lanes"])
@pytest.mark.parametrize("turns", [(1,), (1, -1), (2, -1, -1)], ids=["single", "pair", "triple"])
@pytest.mark.parametrize("near", [False, True], ids=["anywhere", "in one block and lane"])
def test_overflows_are_seen(hashes: Array, width: int, top: bool, turns: tuple[int, ...], near: bool) -> None:
    """Lanes that overflow by turns that a plain sum would not see: they add up to nothing."""
    rng = np.random.default_rng([width, top, len(turns), near])
    count, words = PATTERNS // (len(WIDTHS) * 4), full_words(width)
    changes = Changes(hashes, rng, count)
    block, word = rng.integers(0, SPAN, count), rng.integers(0, words, count)
    lane = np.full(count, lanes(width) - 1) if top else rng.integers(0, lanes(width), count)
    for i, turn in enumerate(turns):
        if not near:
            block = (block + i * rng.integers(1, SPAN // 3, count)) % SPAN
            lane = lane if top else rng.integers(0, lanes(width), count)
        changes.add(places_of(width, block, (word + i * 7) % words), overflow(rng, width, lane, turn))
    assert changes.missed() == 0


@pytest.mark.parametrize("width", [2, 4, 8, 16])
@pytest.mark.parametrize("turns", [(1, 1), (1, -1), (1, -2), (-2, 1)])
def test_overflows_half_a_block_apart_are_seen(hashes: Array, width: int, turns: tuple[int, int]) -> None:
    """Their weights come from one hash."""
    rng = np.random.default_rng([width, 2 + turns[0], 2 + turns[1]])
    count, half = PATTERNS // 16, lanes(width) // 2
    q, rows = sums_of_a_word(rng, width, count), np.arange(count)
    lane = rng.integers(0, half, count)
    q[rows, lane] += turns[0] << width
    q[rows, lane + half] += turns[1] << width
    places = places_of(width, rng.integers(0, SPAN, count), rng.integers(0, BLOCK // lanes(width), count))
    assert (np.diff(places[:, [0, half]]) == BLOCK // 2).all()
    changes = Changes(hashes, rng, count)
    changes.add(places, unpack(np, packed(q, width), width, lanes(width)) - q)
    assert changes.missed() == 0


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("flips", [1, 2])
def test_flipped_bits_are_seen(hashes: Array, width: int, flips: int) -> None:
    """Bits of summed words that flip on the way."""
    rng = np.random.default_rng([width, flips])
    count, words = PATTERNS // len(WIDTHS), full_words(width)
    changes = Changes(hashes, rng, count)
    block, word = rng.integers(0, SPAN, count), rng.integers(0, words, count)
    for i in range(flips):
        before = packed(sums_of_a_word(rng, width, count), width)
        bits = np.uint32(1) << rng.integers(0, width * lanes(width), (count, 1)).astype(np.uint32)
        after = unpack(np, before ^ bits, width, lanes(width))
        places = places_of(width, (block + i) % SPAN, word)
        changes.add(places, after - unpack(np, before, width, lanes(width)))
    assert changes.missed() == 0


def test_weaker_sums_miss_them(hashes: Array) -> None:
    """The test can fail: one unweighted sum does not see a pair that cancels."""
    rng = np.random.default_rng(0)
    for weights, expected in ((np.ones_like(hashes), 1000), (hashes, 0)):
        changes = Changes(weights, rng, 1000)
        place = rng.integers(0, SPAN * BLOCK // 2, (1000, 1))
        changes.add(place, np.full((1000, 1), 256))
        changes.add(place + SPAN * BLOCK // 2, np.full((1000, 1), -256))
        assert changes.missed() == expected
