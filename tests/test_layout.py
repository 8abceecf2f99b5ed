"""Blocks and pieces: every block once and in order, within the limits, and never across two rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gccomm.codecs import Codec, get_codec
from gccomm.codecs.exact import Integers, TwoWords
from gccomm.layout import BLOCK, LARGE, PIECE_COORDINATES, SPAN, Geometry, LeafSpec, Range, cut, tapered

Shape = tuple[int, ...]
EDGES = [1, 2, 511, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049]
SHAPES: list[Shape] = [
    *((size,) for size in EDGES),
    *((3, size) for size in EDGES),
    (),
    (0,),
    (7, 0),
    (0, 700),
    (2, 3, 512),
    (5, 1100),
    (2, 0, 1024),
    (100_000, 5),
    (1, 1, 1),
]
ROUTES: list[tuple[Codec, str, int, int]] = [  # codec, dtype, bytes of a coordinate, weight of a coordinate
    (get_codec("uniform"), "float32", 4, 1),
    (get_codec("uniform"), "bfloat16", 2, 1),
    (get_codec("uniform"), "float64", 8, 1),
    (get_codec("raw"), "float64", 8, 2),
    (get_codec("raw"), "float16", 2, 1),
    (TwoWords(), "float32", 4, 2),
    (Integers(), "int64", 8, 5),
    (Integers(), "bool", 1, 1),
]


def naive_blocks(shape: Shape) -> list[tuple[int, int]]:
    """Return (first coordinate, length) of every block, from the definition."""
    size = math.prod(shape)
    row = shape[-1] if shape and shape[-1] >= 512 else size
    blocks = []
    for start in range(0, size, row) if size else ():
        blocks += [(i, min(1024, start + row - i)) for i in range(start, start + row, 1024)]
    return blocks


shapes = st.one_of(
    st.sampled_from(SHAPES[:-2]),
    st.lists(st.integers(0, 6), max_size=2).flatmap(
        lambda head: st.one_of(st.integers(0, 40), st.integers(500, 2100)).map(lambda last: (*head, last))
    ),
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_follow_the_definition(shape: Shape) -> None:
    geometry, blocks = Geometry.of(shape), naive_blocks(shape)
    assert geometry.size == math.prod(shape)
    assert geometry.blocks == len(blocks)
    assert [geometry.offset(b) for b in range(len(blocks))] == [start for start, _ in blocks]
    assert geometry.offset(len(blocks)) == geometry.size
    assert geometry.lengths(0, len(blocks)).tolist() == [length for _, length in blocks]
    if len(blocks) > 2:
        assert geometry.lengths(1, 2).tolist() == [length for _, length in blocks[1:3]]


@pytest.mark.parametrize("shape", [s for s in SHAPES if s and s[-1] >= 512], ids=str)
def test_blocks_never_straddle_rows(shape: Shape) -> None:
    geometry = Geometry.of(shape)
    for block, length in enumerate(geometry.lengths(0, geometry.blocks).tolist()):
        first, last = geometry.offset(block), geometry.offset(block) + length - 1
        assert 1 <= length <= BLOCK
        assert first // shape[-1] == last // shape[-1]


@pytest.mark.parametrize(
    ("shape", "lengths"),
    [
        ((511,), [511]),
        ((3, 511), [1024, 509]),
        ((3, 700), [700] * 3),
        ((2, 1100), [1024, 76, 1024, 76]),
        ((2, 3, 512), [512] * 6),
        ((), [1]),
        ((4, 0), []),
    ],
)
def test_known_cuts(shape: Shape, lengths: list[int]) -> None:
    geometry = Geometry.of(shape)
    assert geometry.lengths(0, geometry.blocks).tolist() == lengths


@settings(deadline=None, derandomize=True)
@given(shapes, st.integers(0, 30), st.integers(0, 6000))
def test_fit_is_the_most_whole_blocks_in_the_room(shape: Shape, block: int, room: int) -> None:
    geometry, blocks = Geometry.of(shape), naive_blocks(shape)
    block = min(block, len(blocks))
    taken = expected = 0
    for _, length in blocks[block:]:
        taken += length
        expected += taken <= room
    assert geometry.fit(block, room) == expected


def spec(number: int, shape: Shape, route: tuple[Codec, str, int, int]) -> LeafSpec:
    codec, dtype, _, _ = route
    return LeafSpec(f"leaf/{number}", dtype, shape, shape, codec, mean=False)


def coordinates(shape: Shape, r: Range) -> int:
    return sum(length for _, length in naive_blocks(shape)[r.start : r.start + r.blocks])


Leaf = tuple[Shape, tuple[Codec, str, int, int]]


def assert_complete(leaves: Sequence[Leaf], pieces: list[list[Range]]) -> None:
    """Every block of every leaf exactly once and in order; no empty piece or range."""
    order = [(r.leaf, b) for piece in pieces for r in piece for b in range(r.start, r.start + r.blocks)]
    assert order == [(i, b) for i, (shape, _) in enumerate(leaves) for b in range(len(naive_blocks(shape)))]
    assert all(piece for piece in pieces)
    assert all(r.blocks > 0 for piece in pieces for r in piece)
    assert all(len({r.leaf for r in piece}) == len(piece) for piece in pieces)


def loads(leaves: Sequence[Leaf], pieces: list[list[Range]]) -> Iterator[tuple[int, int, int, Range]]:
    """Yield weighted coordinates, bytes and blocks of each piece, and its last range."""
    for piece in pieces:
        counts = [coordinates(leaves[r.leaf][0], r) for r in piece]
        weight = sum(c * leaves[r.leaf][1][3] for c, r in zip(counts, piece, strict=True))
        nbytes = sum(c * leaves[r.leaf][1][2] for c, r in zip(counts, piece, strict=True))
        yield weight, nbytes, sum(r.blocks for r in piece), piece[-1]


def rest_of_span(leaves: Sequence[Leaf], last: Range) -> tuple[int, int] | None:
    """Return weight and bytes of the blocks that follow up to the end of their span, None at the end."""
    leaf, block = last.leaf, last.start + last.blocks
    while leaf < len(leaves):
        shape, (_, _, item_bytes, weight) = leaves[leaf]
        blocks = naive_blocks(shape)
        if block < len(blocks):
            count = sum(length for _, length in blocks[block : (block // SPAN + 1) * SPAN])
            return count * weight, count * item_bytes
        leaf, block = leaf + 1, 0
    return None


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    st.lists(st.tuples(shapes, st.sampled_from(ROUTES)), max_size=6),
    st.one_of(st.integers(1, 9000), st.just(512 * 1024)),
    st.one_of(st.integers(1, 40_000), st.just(25 << 20)),
)
def test_pieces_are_complete_within_the_limits_and_full(leaves: list[Leaf], room: int, nbytes: int) -> None:
    pieces = cut([spec(i, shape, route) for i, (shape, route) in enumerate(leaves)], room, nbytes)
    assert_complete(leaves, pieces)
    for weight, size, blocks, last in loads(leaves, pieces):
        assert blocks == 1 or (weight <= room and size <= nbytes)
        following = rest_of_span(leaves, last)
        if following is not None:  # a piece ends only where the rest of a span has no room
            assert weight + following[0] > room or size + following[1] > nbytes


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    st.lists(st.tuples(shapes, st.sampled_from(ROUTES)), max_size=6),
    st.one_of(st.integers(1, 9000), st.just(512 * 1024)),
)
def test_the_first_and_the_last_piece_are_halved_between_spans(leaves: list[Leaf], room: int) -> None:
    specs = [spec(i, shape, route) for i, (shape, route) in enumerate(leaves)]
    pieces = cut(specs, room)
    halved = tapered(pieces, specs)
    assert_complete(leaves, halved)
    if len(pieces) < 2:
        assert halved == pieces
        return
    ends = {(r.leaf, r.start + r.blocks) for piece in pieces for r in piece[-1:]}
    new = [piece[-1] for piece in halved if (piece[-1].leaf, piece[-1].start + piece[-1].blocks) not in ends]
    assert len(halved) == len(pieces) + len(new) <= len(pieces) + 2
    for leaf, start, blocks in new:
        assert (start + blocks) % SPAN == 0 or start + blocks == len(naive_blocks(leaves[leaf][0]))
    sizes = [sum(r.blocks for r in piece) for piece in pieces]
    now = [sum(r.blocks for r in piece) for piece in halved]
    tensors = any(route[0].unit == "tensor" for _, route in leaves)
    for before, first in ((sizes[0], now[0]), (sizes[-1], now[-2] if now[-1] < sizes[-1] else now[-1])):
        assert tensors or before // 2 <= first <= before // 2 + SPAN


def test_halves_of_long_pieces() -> None:
    leaf = spec(0, (3 * PIECE_COORDINATES,), ROUTES[0])
    blocks = PIECE_COORDINATES // BLOCK
    half = blocks // 2
    starts = [(r.start, r.blocks) for (r,) in tapered(cut([leaf]), [leaf])]
    assert starts == [
        (0, half),
        (half, half),
        (blocks, blocks),
        (2 * blocks, half),
        (2 * blocks + half, half),
    ]


def test_no_leaves_make_no_pieces() -> None:
    assert cut([]) == []
    assert cut([spec(0, (0, 5), ROUTES[0]), spec(1, (0,), ROUTES[0])]) == []


def test_many_small_leaves_share_a_piece() -> None:
    leaves = [spec(i, (10, 10), ROUTES[0]) for i in range(200)]
    assert cut(leaves) == [[Range(i, 0, 1) for i in range(200)]]


def test_a_large_leaf_is_cut_at_the_piece_size() -> None:
    (first, second, third) = cut([spec(0, (2 * PIECE_COORDINATES + 1,), ROUTES[0])])
    blocks = PIECE_COORDINATES // BLOCK
    assert (first, second) == ([Range(0, 0, blocks)], [Range(0, blocks, blocks)])
    assert third == [Range(0, 2 * blocks, 1)]


def test_the_bucket_limits_bytes_of_input() -> None:
    pieces = cut([spec(i, (1024,), ROUTES[0]) for i in range(4)], bucket_bytes=2 * 4096)
    assert pieces == [[Range(0, 0, 1), Range(1, 0, 1)], [Range(2, 0, 1), Range(3, 0, 1)]]


@pytest.mark.parametrize(
    ("codec", "dtype", "mean", "alone"),
    [
        ("raw", "float32", False, True),
        ("raw", "float32", True, False),
        ("raw", "float64", False, True),
        ("raw", "bfloat16", False, False),
        ("bf16", "float32", False, False),
        ("bf16", "bfloat16", False, True),
        ("bf16", "bfloat16", True, False),
        ("fp16", "float16", False, True),
        ("thc", "float32", False, False),
    ],
)
def test_long_arrays_that_are_added_up_where_they_lie_are_pieces_of_their_own(
    codec: str, dtype: str, mean: bool, alone: bool
) -> None:
    small, long = (
        LeafSpec(key, dtype, (size,), (size,), get_codec(codec), mean)
        for key, size in (("a", 5000), ("b", 3 * PIECE_COORDINATES))
    )
    pieces = cut([small, long, small], lane_sums=True)
    assert ([Range(1, 0, 3 * PIECE_COORDINATES // BLOCK)] in pieces) is alone
    assert [r.leaf for piece in pieces for r in piece if r.leaf != 1] == [0, 2]
    assert [Range(1, 0, 3 * PIECE_COORDINATES // BLOCK)] not in cut([small, long, small])
    residuals = replace(long, feedback=True)
    assert len(cut([residuals], lane_sums=True)) > 1


def test_pieces_of_one_array_have_a_limit_too() -> None:
    size = 2 * LARGE * 4096 + 5
    spec = LeafSpec("a", "float32", (size,), (size,), get_codec("raw"), False)
    pieces = cut([spec], 4096, lane_sums=True)
    assert [[(r.start, r.blocks) for r in piece] for piece in pieces] == [
        [(0, 4 * LARGE)],
        [(4 * LARGE, 4 * LARGE)],
        [(8 * LARGE, 1)],
    ]


def test_text_of_a_spec_names_all_that_ranks_must_share() -> None:
    """Any change of what must be equal changes the text; it stays one line."""
    codec = get_codec("uniform")
    plain = LeafSpec("w", "float32", (3, 4), (3, 4), codec, mean=True)
    others = [
        replace(plain, key="v\n"),
        replace(plain, dtype="float16"),
        replace(plain, shape=(12,), row_shape=(12,)),
        replace(plain, shape=(3, 2)),  # complex numbers of the same coordinates
        replace(plain, route=get_codec("uniform", wire_bits=4)),
        replace(plain, mean=False),
        replace(plain, feedback=True),
        replace(plain, device="cuda"),
    ]
    texts = [spec.text() for spec in (plain, *others)]
    assert len(set(texts)) == len(texts)
    assert not any("\n" in text for text in texts)
    for part in ("'w'", "float32[3x4]", "mean", "Uniform(wire_bits=8)"):
        assert part in texts[0]
    assert "complex of float32[3x2]" in texts[4]
    assert "error feedback" in texts[7]
    assert "'': int8[scalar]" in LeafSpec("", "int8", (), (), Integers(), mean=False).text()


@given(
    sizes=st.lists(st.integers(1, 400_000), min_size=1, max_size=5),
    piece=st.integers(SPAN * BLOCK, 5 * SPAN * BLOCK),
)
def test_pieces_end_between_spans(sizes: list[int], piece: int) -> None:
    """Where a piece can hold a span, no span of a tensor travels in two messages."""
    leaves = [spec(i, (1, size) if size < 512 else (size,), ROUTES[0]) for i, size in enumerate(sizes)]
    for ranges in cut(leaves, piece):
        for r in ranges:
            blocks = Geometry.of(leaves[r.leaf].row_shape).blocks
            assert r.start % SPAN == 0
            assert (r.start + r.blocks) % SPAN == 0 or r.start + r.blocks == blocks


def test_spans_of_a_tensor() -> None:
    assert [Geometry.of((BLOCK * blocks,)).spans for blocks in (1, SPAN, SPAN + 1, 10 * SPAN)] == [
        1,
        1,
        2,
        10,
    ]
    assert Geometry.of((0,)).spans == 0
