"""Arithmetic of lanes: how many coordinates share a 32-bit word, and how far each may reach.

A word is ``sum_k q_k 2**(width k) mod 2**32`` with signed ``q_k``.  Addition mod 2**32 is linear, so partial
sums may wrap in any order; only the final sum of a lane must fit in ``width`` bits.
"""

from __future__ import annotations

__all__ = [
    "FIXED_POINT",
    "MAX_DIGIT_RANKS",
    "WIDTHS",
    "integer_format",
    "lanes",
    "rank_place",
    "rank_shift",
    "safe_limit",
    "wire_bits",
    "words",
]

WIDTHS = (2, 3, 4, 5, 6, 8, 10, 16, 32)
"""Lane widths in bits; quantised codecs use those up to 16."""

FIXED_POINT = 1 << 16
"""One quantisation level in the fixed point that rounding works in."""

MAX_DIGIT_RANKS = 1 << 15
"""Most ranks whose 16-bit digits add up inside a 32-bit word, with room for the carries."""


def lanes(width: int) -> int:
    """Return the number of lanes in a word.

    Parameters
    ----------
    width : int
        Lane width in bits, one of :data:`WIDTHS`.

    Raises
    ------
    ValueError
        If `width` is not a lane width.
    """
    if width not in WIDTHS:
        raise ValueError(f"lane width {width} is not one of {', '.join(map(str, WIDTHS))}")
    return 32 // width


def words(width: int, length: int) -> int:
    """Return the number of words of a block of `length` coordinates in lanes of `width` bits."""
    if length < 0:
        raise ValueError(f"block length {length} is negative")
    return -(-length // lanes(width))


def wire_bits(width: int) -> float:
    """Return the bits that a coordinate costs on the wire: 32 over the number of lanes."""
    return 32 / lanes(width)


def _check_ranks(n: int) -> None:
    if n < 1:
        raise ValueError(f"number of ranks is {n}; it must be at least 1")


def rank_place(rank: int, n: int) -> int:
    """Return a rank's place in van der Corput order.

    Parameters
    ----------
    rank : int
        Rank, ``0 <= rank < n``.
    n : int
        Number of ranks.

    Returns
    -------
    int
        Place of `rank` when ranks 0..n-1 are sorted by their bit-reversed number of ``ceil(log2 n)`` bits.
        Neighbouring ranks come to lie far apart, so that the dithers of any few consecutive ranks are spread.

    Raises
    ------
    ValueError
        If `n` is less than 1 or `rank` is not a rank of `n`.
    """
    _check_ranks(n)
    if not 0 <= rank < n:
        raise ValueError(f"rank {rank} is outside 0..{n - 1}")
    bits = (n - 1).bit_length()
    # Count the ranks r < n whose reversed number lies below this one's: such an r agrees with it in its
    # lowest `low` bits and has a 0 where this one has a 1, so r = prefix + multiple of 2**(low + 1).
    place = 0
    for low in range(bits):
        if rank >> low & 1:
            prefix = rank & ((1 << low) - 1)
            place += (n - 1 - prefix) // (2 << low) + 1
    return place


def rank_shift(rank: int, n: int) -> int:
    """Return a rank's shift of the shared dither, ``floor(place * 65536 / n)``, in 0..65535."""
    return rank_place(rank, n) * FIXED_POINT // n


def safe_limit(width: int, n: int) -> int:
    """Return the largest fixed-point coordinate that can never overflow a lane.

    The dithers of the ranks are the n shifts of one number, so the rounded values add up to the floor of the
    sum: each rank may use the n-th part of the lane, a fraction of a level included.

    Parameters
    ----------
    width : int
        Lane width in bits, at most 16.
    n : int
        Number of ranks.

    Returns
    -------
    int
        ``floor((2**(width-1) - 1) * 65536 / n)``, in units of 2**-16 levels.

    Raises
    ------
    ValueError
        If `width` is no width of a quantised codec, or there are so many ranks that nothing is left.
    """
    _check_ranks(n)
    if lanes(width) < 2:
        raise ValueError(f"lane width {width} carries integers only; quantised codecs use widths up to 16")
    half = (1 << (width - 1)) - 1
    limit = half * FIXED_POINT // n
    if limit == 0:
        raise ValueError(
            f"{n} ranks do not fit in lanes of {width} bits: at most {half * FIXED_POINT} ranks do; "
            "use a larger wire_bits or split the communicator"
        )
    return limit


def integer_format(bits: int, n: int) -> tuple[int, int]:
    """Choose how integers of an agreed range travel.

    Parameters
    ----------
    bits : int
        Range: the smallest B with ``-2**B <= x < 2**B`` for every x on every rank, 0..64.
    n : int
        Number of ranks.

    Returns
    -------
    width : int
        The narrowest lane with ``n * 2**bits <= 2**(width-1)``; 32 where digits are used.
    digits : int
        0, or, if not even a lane of 32 bits holds the sum, the number ``ceil((bits + 1) / 16)`` of 16-bit
        digits per coordinate, each in a 32-bit word of its own, the top one signed.

    Raises
    ------
    ValueError
        If `bits` is outside 0..64, or digits are needed on more than 32,768 ranks.
    """
    _check_ranks(n)
    if not 0 <= bits <= 64:
        raise ValueError(f"integer range of {bits} bits is outside 0..64")
    for width in WIDTHS:
        if n << bits <= 1 << (width - 1):
            return width, 0
    if n > MAX_DIGIT_RANKS:
        raise ValueError(
            f"integers of {bits} bits cannot be summed exactly over {n} ranks, only over {MAX_DIGIT_RANKS}; "
            "use smaller integers or split the communicator"
        )
    return 32, -(-(bits + 1) // 16)
