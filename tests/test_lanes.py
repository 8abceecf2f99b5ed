"""Lane sizes, rank shifts, limits and integer formats."""

from __future__ import annotations

import pytest

from gccomm import lanes as ln

QUANTISED = ln.WIDTHS[:-1]


def test_lanes_of_every_width() -> None:
    assert [ln.lanes(w) for w in ln.WIDTHS] == [16, 10, 8, 6, 5, 4, 3, 2, 1]
    assert ln.wire_bits(8) == 8
    assert ln.wire_bits(5) == pytest.approx(16 / 3)


@pytest.mark.parametrize("width", [-8, 0, 1, 7, 12, 24, 33, 64])
def test_other_widths_are_refused(width: int) -> None:
    with pytest.raises(ValueError, match=f"width {width} is not one of 2, 3, 4"):
        ln.lanes(width)


@pytest.mark.parametrize("width", ln.WIDTHS)
def test_words_are_the_fewest_that_suffice(width: int) -> None:
    count = 32 // width
    for length in (0, 1, 2, 31, 32, 33, 1023, 1024, 1025):
        words = ln.words(width, length)
        assert words * count >= length > (words - 1) * count or words == length == 0


def test_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 is negative"):
        ln.words(8, -1)


def reversed_bits(number: int, bits: int) -> int:
    return sum((number >> k & 1) << (bits - 1 - k) for k in range(bits))


@pytest.mark.parametrize("n", [*range(1, 70), 127, 128, 129, 1000, 4096])
def test_places_sort_the_ranks_by_their_reversed_bits(n: int) -> None:
    bits = (n - 1).bit_length()
    order = sorted(range(n), key=lambda rank: reversed_bits(rank, bits))
    assert [ln.rank_place(rank, n) for rank in order] == list(range(n))


def test_shifts_are_the_multiples_of_an_nth() -> None:
    assert [ln.rank_shift(r, 1) for r in range(1)] == [0]
    assert [ln.rank_shift(r, 4) for r in range(4)] == [0, 32768, 16384, 49152]
    assert [ln.rank_shift(r, 3) for r in range(3)] == [0, 43690, 21845]
    for n in (5, 17, 1000, 70_000):
        assert sorted(ln.rank_shift(r, n) for r in range(n)) == [p * 65536 // n for p in range(n)]


@pytest.mark.parametrize(("rank", "n"), [(-1, 4), (4, 4), (0, 0), (0, -1)])
def test_impossible_ranks_are_refused(rank: int, n: int) -> None:
    with pytest.raises(ValueError, match="rank"):
        ln.rank_place(rank, n)


@pytest.mark.parametrize("width", QUANTISED)
def test_safe_limit_is_the_largest_nth_part(width: int) -> None:
    lane = ((1 << (width - 1)) - 1) << 16
    for n in (1, 2, 3, 7, 64, 1000, lane):
        limit = ln.safe_limit(width, n)
        assert limit >= 1
        assert limit * n <= lane < (limit + 1) * n


def test_safe_limit_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"65537 ranks .* 2 bits: at most 65536 .* larger wire_bits"):
        ln.safe_limit(2, 65537)
    with pytest.raises(ValueError, match="width 32 carries integers only"):
        ln.safe_limit(32, 2)
    with pytest.raises(ValueError, match="at least 1"):
        ln.safe_limit(8, 0)


@pytest.mark.parametrize("n", [1, 2, 3, 16, 17, 1000, 32_768])
def test_integer_format_holds_the_sum_and_is_the_smallest(n: int) -> None:
    for bits in range(65):
        width, digits = ln.integer_format(bits, n)
        if digits == 0:
            assert n * 2**bits <= 2 ** (width - 1)
            assert all(n * 2**bits > 2 ** (narrower - 1) for narrower in ln.WIDTHS if narrower < width)
        else:
            assert width == 32
            assert n * 2**bits > 2**31
            assert 16 * (digits - 1) < bits + 1 <= 16 * digits


def test_integer_formats_of_common_cases() -> None:
    assert ln.integer_format(0, 1) == (2, 0)
    assert ln.integer_format(7, 4) == (10, 0)
    assert ln.integer_format(31, 1) == (32, 0)
    assert ln.integer_format(31, 2) == (32, 2)
    assert ln.integer_format(63, 2) == (32, 4)
    assert ln.integer_format(64, 2) == (32, 5)


def test_integer_format_says_what_it_cannot_do() -> None:
    assert ln.integer_format(1, 1 << 20) == (32, 0)
    with pytest.raises(ValueError, match=r"31 bits .* 32769 ranks, only over 32768"):
        ln.integer_format(31, 32_769)
    for bits in (-1, 65):
        with pytest.raises(ValueError, match=r"outside 0\.\.64"):
            ln.integer_format(bits, 2)
