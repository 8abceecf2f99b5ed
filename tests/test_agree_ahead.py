"""Over links ranks agree on pieces while those before them are on their way."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from gccomm import testing
from gccomm.agreement import HEADER_WORDS, MESSAGE_WORDS, Links
from gccomm.options import Place
from gccomm.testing import simulate
from gccomm.transfers import Finish, Maximum, Start, WordAdd

PIECE = 64 * 1024  # coordinates
BLOCKS = PIECE // 1024


def moves_of(
    monkeypatch: pytest.MonkeyPatch, pieces: int, codec: str, size: int = PIECE, **options: Any
) -> list[tuple[str, int]]:
    """Return what the first rank does with its words, and how many they are."""
    made: list[tuple[str, int]] = []
    at_once = testing.at_once

    def noted(transfers: Any) -> Any:
        first = transfers[0]
        what = first.transfer if isinstance(first, Start) else first
        if isinstance(what, Maximum | WordAdd):
            made.append((type(what).__name__, len(what.words)))
        elif isinstance(first, Finish):
            made.append(("Finish", 0))
        return at_once(transfers)

    monkeypatch.setattr(testing, "at_once", noted)
    xs = [np.random.default_rng(r).standard_normal(pieces * PIECE).astype(np.float32) for r in range(3)]
    found, _ = simulate(xs, codec, piece_coordinates=size, one_host=False, **options)
    monkeypatch.setattr(testing, "at_once", at_once)
    whole, _ = simulate(xs, codec, **options)
    np.testing.assert_array_equal(found[0], whole[0])
    return made


@pytest.mark.parametrize("codec", ["uniform", "rotated"])
def test_one_two_then_two_pieces_at_a_time(monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    """Each time when the first sum of those agreed before has begun."""
    made = moves_of(monkeypatch, 7, codec)
    assert made[0] == ("Maximum", MESSAGE_WORDS)
    assert HEADER_WORDS + BLOCKS <= MESSAGE_WORDS  # the first piece's scales went with it
    assert [entry for entry in made[1:] if entry[0] == "Maximum"] == [
        ("Maximum", count * BLOCKS) for count in (1, 2, 2, 1)
    ]
    names = [name for name, _ in made[1:]]
    assert names[:6] == ["WordAdd", "Maximum", "WordAdd", "Maximum", "Finish", "WordAdd"]
    assert names.count("WordAdd") == names.count("Finish") == 7
    for place, (name, _) in enumerate(made[1:], 1):
        if name == "Maximum":  # never without a sum on its way
            begun = [entry[0] for entry in made[1:place]]
            assert begun.count("WordAdd") > begun.count("Finish")


@pytest.mark.parametrize("codec", ["uniform", "rotated"])
def test_halves_of_the_first_and_last_piece_over_slow_links(
    monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    """Both halves of the first one go with the header; so do those of the last one go together."""
    monkeypatch.setattr(testing, "Place", partial(Place, links=Links(slow=True)))
    made = moves_of(monkeypatch, 8, codec, size=2 * PIECE)
    agreed = [words for name, words in made if name == "Maximum"]
    assert HEADER_WORDS + 2 * BLOCKS <= MESSAGE_WORDS
    assert agreed == [MESSAGE_WORDS, 2 * BLOCKS, 4 * BLOCKS]
    assert [name for name, _ in made].count("WordAdd") == 6


def test_floats_agree_on_nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    made = moves_of(monkeypatch, 4, "raw")
    assert [name for name, _ in made if name != "Finish"] == ["Maximum"]


def test_energies_of_checked_headroom_follow_their_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(size: int, **options: Any) -> Any:
        xs = [np.random.default_rng(r).standard_normal(size).astype(np.float32) for r in range(4)]
        return simulate(xs, "rotated:headroom=checked", steps=3, **options)

    cut, (stats, *_) = steps(5 * PIECE, piece_coordinates=PIECE, one_host=False)
    whole, _ = steps(5 * PIECE)
    np.testing.assert_array_equal(cut[0], whole[0])
    # The header with a piece's scales; 1, 2 and 1 pieces' scales; the energies of four groups; five sums.
    assert stats.messages == 1 + 3 + 4 + 5
