"""What every codec must keep on the wire: sums of encodings, room for the worst case, no trace of fusion."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gccomm_local import LocalBackend

import gccomm
from gccomm import arrays, kernels, testing
from gccomm.codecs import get_codec
from gccomm.errors import NegotiationError
from gccomm.lanes import rank_shift
from gccomm.layout import LeafSpec
from gccomm.plan import Plan
from gccomm.steps import Context
from tests.conformance import (
    BIT_ROWS,
    ROWS,
    Row,
    all_shapes,
    assert_same_bits,
    assert_within,
    bits_of,
    mixed,
    over,
)
from tests.conformance_driver import KEY, Ranks, add_words, join, split


def test_lanes_by_hand() -> None:
    """The driver's own arithmetic: splitting and joining, and sums that leave their lanes are seen."""
    words = np.random.default_rng(0).integers(0, 1 << 32, 100, dtype=np.uint64).astype(np.uint32)
    for width in (2, 4, 8, 16):
        np.testing.assert_array_equal(join(split(words, width), width), words)
    np.testing.assert_array_equal(split(np.array([0x0001FF7F], np.uint32), 8).ravel(), [127, -1, 2, 0])
    with pytest.raises(AssertionError, match="a lane of 8 bits sums to 128"):
        add_words([np.array([127], np.uint32), np.array([1], np.uint32)], ((0, 1, 8),))


@pytest.mark.parametrize("n", [1, 3, 4])
@over(ROWS)
def test_sums_of_encodings_decode_as_sums(row: Row, n: int) -> None:
    """Steps driven by hand, words added lane by lane in another order, give the bits of the engine."""
    inputs = [[{KEY: x} for x in row.draw(n, seed)] for seed in range(3)]
    for op in ("sum", "mean"):
        ranks = Ranks(row.carrier(n), n, mean=op == "mean", seed=11)
        options: dict[str, Any] = {"seed": 11, "steps": 3, "exact_below": row.exact_below}
        engine = testing.simulate_steps(
            lambda step: inputs[step], row.make(), op, error_feedback=False, **options
        )
        for step, trees, ys, _ in engine:
            by_hand = ranks.reduce([tree[KEY] for tree in trees])
            np.testing.assert_array_equal(
                by_hand.view(np.uint8), bits_of(ys[0][KEY]), err_msg=f"{op}, step {step}"
            )
            assert ranks.sent


@pytest.mark.parametrize("shape", [(), (1,), (63,), (65,), (1025,), (2, 1025), (64 * 1024 + 1,)], ids=str)
@over([row for row in ROWS if not row.operation])
def test_edges_by_hand(row: Row, shape: tuple[int, ...]) -> None:
    """Buffers of exactly the promised sizes, at the edges of words, blocks and spans."""
    rng = np.random.default_rng(len(shape))
    xs = [np.asarray(rng.standard_normal(shape), dtype=np.float32) for _ in range(2)]
    y = Ranks(row.carrier(), 2, seed=2).reduce(xs)
    expected = row.simulate([{KEY: x} for x in xs], seed=2)[0][KEY]
    np.testing.assert_array_equal(y.view(np.uint8), bits_of(expected))


@over([row for row in ROWS if row.spoils == "tensor" and not row.operation])
def test_long_tensors_travel_in_several_sums(row: Row) -> None:
    """1,027 blocks: what belongs to the whole tensor does not depend on the cut."""
    rng = np.random.default_rng(1)
    xs = [rng.standard_normal((1027, 1024)).astype(np.float32) for _ in range(2)]
    y = Ranks(row.carrier(), 2).reduce(xs)
    expected = row.simulate([{KEY: x} for x in xs])[0][KEY]
    np.testing.assert_array_equal(y.view(np.uint8), bits_of(expected))


def test_redone_spans_by_hand() -> None:
    """Equal ranks and c far too small: lanes overflow, and the same integers travel in wide ones."""
    (row,) = (row for row in ROWS if "checked" in row.codec)
    for n, kind, scale in ((8, np.float32, 1.0), (5, np.float64, 1e-300)):
        x = (np.random.default_rng(n).standard_normal(65 * 1024 + 70) * scale).astype(kind)
        ranks = Ranks(row.make(), n, state={"ratio": 0.05})
        y = ranks.reduce([x] * n)
        assert [sent.kind for sent in ranks.sent][:4] == ["Agree", "Energies", "Sum", "Redo"]
        assert_within(row, [x] * n, y, str(x.dtype))


@over(ROWS)
def test_the_wire_carries_what_was_promised(row: Row) -> None:
    """Bits a coordinate, and at most 0.2 for scales, energies, check words, counters and headers."""
    x = np.random.default_rng(0).standard_normal((256, 1024)).astype(np.float32)
    for _, _, _, stats in testing.simulate_steps(
        [{KEY: x}] * 2, row.make(), steps=2, exact_below=row.exact_below, error_feedback=False
    ):
        assert stats[0].measure_bytes <= 8192
        bits = 8 * (stats[0].wire_bytes - stats[0].measure_bytes) / x.size
        assert row.cost - 0.01 <= bits <= row.cost + 0.2
        assert stats[0].ratio == pytest.approx(4 * x.size / stats[0].wire_bytes)


WORST = {
    "plus": np.ones(1024),
    "minus": -np.ones(1024),
    "mixed": np.where(np.random.default_rng(6).random(1024) < 0.5, -1, 1),
    "one hot": np.eye(1, 1024, 77)[0],
}


@over(ROWS)
def test_worst_cases_leave_no_lane(row: Row) -> None:
    """All ranks at the maximum, of one sign and of both, up to the most ranks there may be: the simulation
    compares every lane's sum with its range.
    """
    tree = {name: (x * 1.9999999).astype(np.float32) for name, x in WORST.items()}
    opposite = {name: -x for name, x in tree.items()}
    numbers = [*range(1, 18), 64]
    if row.most is not None and row.most < 1000:
        numbers.append(row.most)
    for n in numbers:
        arrangements = [[tree] * n]
        if n in (2, 5, 17):
            arrangements.append([tree, opposite] * (n // 2) + [tree] * (n % 2))
        for trees in arrangements:
            y = row.simulate(trees, "mean")[0]
            for name in tree if n in (1, 2, 3, 5, 16, 17, 64, row.most) else ():
                xs = [one[name] for one in trees]
                assert_within(row, xs, y[name], "float32", "mean", f"{name}, n={n}")


@pytest.mark.parametrize("width", [2, 3, 4, 5, 6, 8, 10, 16])
@over([row for row in BIT_ROWS if hasattr(row.make(), "wire_bits") and not row.exact_below])
def test_worst_cases_in_every_width(row: Row, width: int) -> None:
    codec = get_codec(row.make().config(), wire_bits=width)
    tree = {name: x.astype(np.float32) for name, x in WORST.items()}
    for n in (1, 2, 3, 5, 8, 16):
        try:
            codec.require_size(n, 4)
        except NegotiationError:
            continue
        ys, _ = testing.simulate([tree] * n, codec, exact_below=0, error_feedback=False)
        for name, x in tree.items():
            assert np.isfinite(ys[0][name]).all()
            assert (ys[0][name] * x).sum() >= 0


@pytest.mark.parametrize("codec", ["uniform:wire_bits=2", "rotated:wire_bits=2,headroom=safe"])
def test_as_many_ranks_as_fixed_point_has_room_for(codec: str) -> None:
    """65,536 ranks in lanes of two bits, all at the maximum: each sends almost nothing, and no lane is left.

    The ranks share the memory of one; the words of all are added.
    """
    made, n = get_codec(codec), 1 << 16
    x = np.where(np.arange(128) < 64, 1.5, -1.5).astype(np.float32)
    y, view = np.empty_like(x), arrays.view(x)
    plan = Plan([LeafSpec(KEY, view.dtype, view.shape, view.row_shape, made, False)], n)
    address = np.array([kernels.address(x)], np.uint64), np.array([kernels.address(y)], np.uint64)
    plan.bind(0, 0, *address)
    operand = plan.operands[0]
    scales = np.empty(operand.blocks, np.uint32)
    operand.maxima(scales, None, getattr(made, "rotations", 0))
    words = np.empty((n, operand.words), np.uint32)
    for rank, out in enumerate(words):
        steps = made.steps(operand, [None], Context(rank, n, rank_shift(rank, n)))
        next(steps)
        step: Any = steps.send(scales)
        step.encode(0, operand.blocks, out)
    total = split(words.reshape(-1), 2).reshape(16, n, -1).sum(axis=1)
    assert np.abs(total).max() == 1
    step.decode(0, operand.blocks, join(total, 2))
    assert np.abs(y - n * x.astype(np.float64)).max() <= 1.5 * n * (1 if "uniform" in codec else 32)
    made.require_size(n, 4)
    with pytest.raises(NegotiationError, match="65537 ranks"):
        made.require_size(n + 1, 4)


FUSED = ["float32 (1025,)", "float16 (3, 700)", "complex64 (50, 101)", "float64 (65,)"]


@over(BIT_ROWS)
def test_fusion_is_invisible(row: Row) -> None:
    """The same bits alone or with others, for any bucket or piece, one host or many; in a third step too."""
    trees = mixed(3)
    steps = 3 if row.make().stateful else 1
    fused = row.simulate(trees, steps=steps)[0]
    for key in FUSED:
        alone = row.simulate([{key: tree[key]} for tree in trees], steps=steps)[0]
        assert_same_bits(alone[key], fused[key])
        wrapped = [{"a": tree[FUSED[0]], key: tree[key], "zzz": tree[FUSED[1]]} for tree in trees]
        assert_same_bits(row.simulate(wrapped, steps=steps)[0][key], fused[key])
    for bucket_bytes, piece in ((1, 1 << 19), (5000, 1 << 19), (25 << 20, 1), (25 << 20, 3000)):
        for one_host in (True, False):
            options: dict[str, Any] = {"bucket_bytes": bucket_bytes, "piece_coordinates": piece}
            assert_same_bits(row.simulate(trees, one_host=one_host, steps=steps, **options)[0], fused)


@over(BIT_ROWS)
def test_pieces_of_long_tensors_are_invisible(row: Row) -> None:
    """131 blocks: pieces end between spans, within them, and not at all."""
    rng = np.random.default_rng(1)
    xs = [{KEY: rng.standard_normal(130 * 1024 + 7).astype(np.float32)} for _ in range(2)]
    whole = row.simulate(xs, steps=2)[0]
    for piece in (1 << 16, 100 * 1024, 5000):
        for one_host in (True, False):
            cut = row.simulate(xs, steps=2, piece_coordinates=piece, one_host=one_host)[0]
            assert_same_bits(cut, whole)


@over([row for row in ROWS if not row.bits])
def test_fusion_of_float_sums_changes_rounding_only(row: Row) -> None:
    trees = [{key: tree[key] for key in ("1025", "5x1100")} for tree in all_shapes(3, "float32")]
    fused = row.simulate(trees)[0]
    for options in ({"bucket_bytes": 1}, {"piece_coordinates": 3000}, {"one_host": False}):
        for key, y in row.simulate(trees, **options)[0].items():
            if row.operation:  # its noise hangs on the place in the message
                assert_within(row, [tree[key] for tree in trees], y, "float32")
            else:
                np.testing.assert_allclose(y, fused[key], rtol=1e-4, atol=1e-4)


@over(ROWS)
def test_threads_give_the_bits_of_lockstep(row: Row) -> None:
    n, codec = 3, row.make()
    trees = mixed(n)
    options: Any = {"op": "mean", "codec": codec, "exact_below": row.exact_below}
    results = testing.run(lambda comm: comm.compressed_allreduce(trees[comm.rank], **options), n)
    for result in results:
        if row.bits:
            assert_same_bits(result, row.simulate(trees, "mean")[0])
        for key, y in result.items():
            assert_same_bits(y, results[0][key])
            xs = [tree[key] for tree in trees]
            assert_within(row, xs, y, key.split()[0], "mean", key)


@over(ROWS)
@pytest.mark.parametrize("scale", [1e-320, 1e-40, 1.0, 1e36, 1e300])
def test_a_rank_whose_numpy_raises_gives_the_same_bits(row: Row, scale: float) -> None:
    """What a program does about its own floating-point errors is none of the reduction's business."""
    dtype = "float32" if 1e-45 < scale < 1e39 else "float64"
    trees = [{KEY: x} for x in row.draw(2, 3, dtype, scale)]
    trees[1][KEY].reshape(-1)[7::1500] = 0

    def program(comm: gccomm.Communicator, state: str) -> tuple[Any, ...]:
        reducer = gccomm.Reducer(row.make(), comm=comm, exact_below=row.exact_below)
        with np.errstate(all=state if comm.rank == 1 else "warn"):  # type: ignore[arg-type]
            return tuple(reducer(trees[comm.rank]) for _ in range(3))

    plain = testing.run(lambda comm: program(comm, "warn"), 2)
    for found in testing.run(lambda comm: program(comm, "raise"), 2):
        for y, expected in zip(found, plain[0], strict=True):
            assert_same_bits(y, expected)


# Refusals


@over([row for row in ROWS if row.most is not None])
def test_one_rank_too_many_is_refused(row: Row) -> None:
    codec, most = row.make(), row.most
    assert most is not None
    codec.require_size(most, 4)
    codec.require_size(1, 8)
    with pytest.raises(NegotiationError, match=rf"{most + 1}\b.*larger wire_bits"):
        codec.require_size(most + 1, 4)
    with pytest.raises(NegotiationError):
        codec.require_size(10 * most, 4)


@over([row for row in ROWS if row.most is not None and row.most < 1 << 16 and not row.exact_below])
def test_all_ranks_refuse_alike_and_go_on(row: Row) -> None:
    codec = get_codec(row.make().config(), wire_bits=2)
    n = next(n for n in range(2, 5) if not _fits(codec, n))

    def program(comm: gccomm.Communicator) -> str:
        x = np.ones(row.shape, np.float32)
        with pytest.raises(NegotiationError) as caught:
            comm.compressed_allreduce(x, codec=codec)
        with pytest.raises(NegotiationError) as again:
            gccomm.Reducer(codec, comm=comm, error_feedback=False)({"x": x})
        assert (comm.compressed_allreduce(x, codec="raw") == n).all()
        assert str(caught.value) == str(again.value)
        return str(caught.value)

    texts = testing.run(program, n)
    assert len(set(texts)) == 1
    assert f"{n} ranks" in texts[0]


def _fits(codec: gccomm.Codec, n: int) -> bool:
    try:
        codec.require_size(n, 4)
    except NegotiationError:
        return False
    return True


@over([row for row in ROWS if row.operation])
def test_own_operations_are_refused_where_they_lack(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = row.make()

    def program(comm: gccomm.Communicator) -> str:
        x = np.ones(2000, np.float32)
        with pytest.raises(NegotiationError) as caught:
            comm.compressed_allreduce(x, codec=codec)
        assert (comm.compressed_allreduce(x, codec="raw") == 2).all()
        return str(caught.value)

    assert np.isfinite(row.simulate([np.ones(2000, np.float32)] * 2)[0]).all()
    monkeypatch.setattr(LocalBackend, "operations", frozenset({"other"}))
    texts = testing.run(program, 2)
    assert texts[0] == texts[1]
    for part in (str(codec.operation), repr(codec), "other"):
        assert part in texts[0]
