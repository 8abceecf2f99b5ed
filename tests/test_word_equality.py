"""The native kernels give the same words and results, bit for bit, as the reference under NumPy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gccomm import kernels
from gccomm import lanes as ln
from gccomm.kernels import reference
from tests.word_batches import FLOATS, INTEGERS, Array, Batch, Tensor, agree, assert_same, every_level, make

WIDTHS = ln.WIDTHS[:-1]
RANKS = (1, 2, 3, 4, 17)
SIZES = (1, 7, 1023, 1024, 1025, 2600)
LARGEST_LIMIT = 32767 * 65536


@dataclasses.dataclass
class Lanes:
    """Parameters of a lane codec."""

    width: int
    limit: int
    shift: int
    n: int
    subtract: bool
    mean: bool

    @classmethod
    def draw(cls, width: int, n: int, rng: np.random.Generator) -> Lanes:
        safe = ln.safe_limit(min(width, 16), n)
        limit = int(
            rng.choice([safe, min(safe * 3, LARGEST_LIMIT), LARGEST_LIMIT, 1], p=[0.7, 0.1, 0.1, 0.1])
        )
        flags = rng.random(2) < 0.5
        return cls(width, limit, ln.rank_shift(int(rng.integers(n)), n), n, bool(flags[0]), bool(flags[1]))


def specify_encode(tensor: Tensor, scales: Array, p: Lanes) -> list[list[Array]]:
    def blocks(numbers: Array, index: Array, length: int) -> tuple[Array, ...]:
        hashes, rest = tensor.hashes(numbers, length), tensor.rest(index)
        return reference.encode(
            np, tensor.x[index], scales[numbers], hashes, p.shift,
            width=p.width, limit=p.limit, residual=rest,
        )  # fmt: skip

    return tensor.map_blocks(blocks)


def specify_decode(tensor: Tensor, scales: Array, words: list[Array], p: Lanes) -> list[list[Array]]:
    def blocks(numbers: Array, index: Array, length: int) -> tuple[Array, ...]:
        hashes = tensor.hashes(numbers, length)
        sums = reference.unpack(np, np.stack([words[k] for k in numbers]), p.width, length)
        convert = reference.wide_sums if p.width == 32 else reference.centred_sums
        centred = convert(np, sums, hashes, n=p.n, subtract=p.subtract)
        values = reference.dequantise(
            np, centred, scales[numbers], limit=p.limit, n=p.n, mean=p.mean, dtype=tensor.dtype
        )
        return values, reference.check_words(np, hashes, sums), reference.block_energy(np, centred, p.width)

    return tensor.map_blocks(blocks)


def check_lanes(tensors: list[Tensor], p: Lanes, rng: np.random.Generator) -> None:
    batch = Batch(tensors, lambda _, length: ln.words(p.width, length))
    local, scales = agree(tensors, rng)
    parts = [scales[a:b] for a, b in zip(batch.starts[:-1], batch.starts[1:], strict=True)]
    sent = [specify_encode(tensor, part, p) for tensor, part in zip(tensors, parts, strict=True)]
    sums = rng.integers(0, 2**32, batch.words.size).astype(np.uint32)
    blocks = np.split(sums, batch.word_starts[1:-1])
    split = [blocks[a:b] for a, b in zip(batch.starts[:-1], batch.starts[1:], strict=True)]
    got = [specify_decode(*args, p) for args in zip(tensors, parts, split, strict=True)]
    cuts = tuple(rng.random(2))
    found = np.zeros(batch.blocks, np.uint32)
    check = np.zeros((batch.blocks, 2), np.uint32)
    energy = np.zeros(batch.blocks, np.uint32)
    for level in every_level():
        batch.run(kernels.maxima, ("blocks", found), cuts=cuts)
        assert_same(found, local)
        into = ("words", batch.words), p.width, p.limit
        batch.run(kernels.encode, scales, *into, p.shift, ("blocks", check), cuts=cuts)
        assert_same(batch.words, [word for one in sent for word in one[0]])
        assert_same(check, [pair for one in sent for pair in one[2]])
        stream = level == kernels.isas()[-1]
        extra = ("blocks", check), ("blocks", energy)
        flags = p.n, p.subtract, p.mean, stream
        batch.run(kernels.decode, scales, ("words", sums), p.width, p.limit, *flags, *extra, cuts=cuts)
        assert_same(check, [pair for one in got for pair in one[1]])
        assert_same(energy, [e for one in got for e in one[2]])
        for k, tensor in enumerate(tensors):
            assert_same(batch.rests[k], sent[k][1])
            assert_same(batch.results[k], got[k][0], tensor.dtype)
        batch.run(kernels.decode, scales, ("words", sums), p.width, p.limit, *flags)  # no check words
        for k, tensor in enumerate(tensors):
            assert_same(batch.results[k], got[k][0], tensor.dtype)


@pytest.mark.parametrize("width", ln.WIDTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_lane_codec(dtype: str, width: int) -> None:
    rng = np.random.default_rng([width, FLOATS.index(dtype)])
    for n in RANKS:
        for size in SIZES:
            check_lanes([make(dtype, size, rng)], Lanes.draw(width, n, rng), rng)
        check_lanes([make(dtype, 4200, rng, row=1400)], Lanes.draw(width, n, rng), rng)


@pytest.mark.parametrize(
    ("dtype", "width"), [("float32", 8), ("float64", 5), ("float16", 16), ("bfloat16", 4)]
)
def test_lane_codec_on_a_large_tensor(dtype: str, width: int) -> None:
    rng = np.random.default_rng(width)
    check_lanes([make(dtype, 2**20 + 3, rng)], Lanes.draw(width, 4, rng), rng)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[tuple[str, int, int]], int, int, int]:
    shapes = []
    for _ in range(draw(st.integers(1, 5))):
        row = draw(st.one_of(st.integers(512, 2100), st.sampled_from([512, 1024, 2048])))
        flat = draw(st.booleans())
        size = draw(st.integers(1, 3000)) if flat else row * draw(st.integers(1, 4))
        shapes.append((draw(st.sampled_from(FLOATS)), size, size if flat else row))
    widths, ranks = st.sampled_from(ln.WIDTHS), st.one_of(st.sampled_from(RANKS), st.integers(1, 1000))
    return shapes, draw(widths), draw(ranks), draw(st.integers(0, 2**32))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(batches())
def test_lane_codec_on_batches_in_pieces(case: tuple[list[tuple[str, int, int]], int, int, int]) -> None:
    shapes, width, n, seed = case
    rng = np.random.default_rng(seed)
    tensors = [make(dtype, size, rng, row=row) for dtype, size, row in shapes]
    for tensor in tensors:
        tensor.key = (int(rng.integers(2**32)), int(rng.integers(2**32)))
    if n > (2 ** (width - 1) - 1) * 65536:
        n = 1
    check_lanes(tensors, Lanes.draw(width, n, rng), rng)


def test_absent_input_counts_as_zeros() -> None:
    rng = np.random.default_rng(0)
    for dtype in FLOATS:
        tensor = make(dtype, 1500, rng)
        tensor.x[:] = 0
        tensor.residual = rng.standard_normal(1500).astype(tensor.wide)
        absent, present = (Batch([tensor], lambda _, length: ln.words(8, length)) for _ in range(2))
        absent.table["src"] = 0
        for batch in (absent, present):
            scales = np.zeros(2, np.uint32)
            batch.run(kernels.maxima, ("blocks", scales))
            batch.run(kernels.encode, scales, ("words", batch.words), 8, 1000, 5, 0)
        assert absent.words.any()
        assert_same(absent.words, [present.words])
        assert_same(absent.rests[0], [present.rests[0]])


def test_empty_tensors_leave_no_trace() -> None:
    rng = np.random.default_rng(3)
    a, b = make("float32", 1030, rng), make("float64", 5, rng)
    empty = Tensor(np.zeros(0, np.float32), "float32", 0)
    outputs = []
    for tensors in ([a, b], [empty, a, empty, empty, b, empty], [empty]):
        batch = Batch(tensors, lambda _, length: ln.words(6, length))
        scales = np.zeros(batch.blocks, np.uint32)
        batch.run(kernels.maxima, ("blocks", scales), cuts=(0.4,))
        batch.run(kernels.encode, scales, ("words", batch.words), 6, 1000, 5, 0, cuts=(0.4,))
        batch.run(kernels.decode, scales, ("words", batch.words), 6, 1000, 3, True, False, False, cuts=(0.4,))
        outputs.append([scales, batch.words, np.concatenate([r.astype(np.float64) for r in batch.results])])
    for plain, padded, nothing in zip(*outputs, strict=True):
        assert_same(padded, [plain])
        assert nothing.size == 0


@pytest.mark.parametrize("dtype", FLOATS)
def test_exact_words(dtype: str) -> None:
    rng = np.random.default_rng(7)
    for n in (*RANKS, 1000):
        for size in (1, 7, 300, 1023, 1025):
            check_exact(make(dtype, size, rng), n, bool(rng.random() < 0.5), rng)


def check_exact(tensor: Tensor, n: int, mean: bool, rng: np.random.Generator) -> None:
    batch = Batch([tensor], lambda _, length: 2 * length)
    _, scales = agree([tensor], rng, clamp=False)
    sums = rng.integers(0, 2**32, batch.words.size).astype(np.uint32)
    parts = np.split(sums, batch.word_starts[1:-1])

    def blocks(numbers: Array, index: Array, length: int) -> tuple[Array, ...]:
        s, rest = scales[numbers], tensor.rest(index)
        words = reference.exact_encode(np, tensor.x[index], s, n=n, residual=rest)
        summed = np.stack([parts[k] for k in numbers])
        values = reference.exact_decode(np, summed, s, n=n, mean=mean, dtype=tensor.dtype)
        lost = reference.nonfinite(s, tensor.dtype == "float64")[:, None]
        kept = np.zeros(index.shape, tensor.wide) if rest is None else np.where(lost, rest, 0)
        return words, values, kept.astype(tensor.wide)

    words, values, kept = tensor.map_blocks(blocks)
    for _ in every_level():
        batch.run(kernels.exact_encode, scales, ("words", batch.words), n, cuts=(0.5,))
        batch.run(kernels.exact_decode, scales, ("words", sums), n, mean, cuts=(0.5,))
        assert_same(batch.words, words)
        assert_same(batch.results[0], values, tensor.dtype)
        assert_same(batch.rests[0], kept)


def integer_tensor(dtype: str, size: int, n: int, bits: int, rng: np.random.Generator) -> Tensor:
    if dtype == "bool":
        x = rng.random(size) < 0.5
    else:
        info = np.iinfo(dtype)
        low, high = max(int(info.min), -(2**bits)), min(int(info.max), 2**bits - 1)
        x = rng.integers(low, high, size, dtype=dtype, endpoint=True)
        x[::5], x[1::5] = low, high
    width, digits = ln.integer_format(int(reference.integer_range(np, x)), n)
    return Tensor(x, dtype, size, width=width, digits=digits)


def count_integer_words(tensor: Tensor, length: int) -> int:
    return tensor.digits * length if tensor.digits else ln.words(tensor.width, length)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers(dtype: str) -> None:
    rng = np.random.default_rng(INTEGERS.index(dtype))
    for n in RANKS:
        sizes = zip((1, 7, 1023, 1025, 2500), (3, 8, 16, 31, 64), strict=True)
        check_integers([integer_tensor(dtype, size, n, bits, rng) for size, bits in sizes], n, rng)


def specify_integers(tensor: Tensor, n: int, rng: np.random.Generator) -> tuple[list[list[Array]], int]:
    """Return each block's words, the summed words of n ranks and the results; and how many do not fit."""
    form = {"width": tensor.width, "digits": tensor.digits}
    misfits = 0

    def blocks(_: Array, index: Array, length: int) -> tuple[Array, ...]:
        nonlocal misfits
        x = tensor.x[index]
        ranks = [reference.integer_encode(np, rng.permuted(x, axis=1), **form) for _ in range(n)]
        summed = np.asarray(np.sum(ranks, axis=0, dtype=np.uint32))
        values, lost = reference.integer_decode(np, summed, length=length, dtype=tensor.dtype, **form)
        misfits += int(lost)
        return reference.integer_encode(np, x, **form), summed, values

    return tensor.map_blocks(blocks), misfits


def check_integers(tensors: list[Tensor], n: int, rng: np.random.Generator) -> None:
    batch = Batch(tensors, count_integer_words)
    specified = [specify_integers(tensor, n, rng) for tensor in tensors]
    sums = np.concatenate([words for blocks, _ in specified for words in blocks[1]])
    ranges = np.zeros(len(tensors), np.uint32)
    for _ in every_level():
        kernels.int_range(kernels.address(batch.table), len(tensors), kernels.address(ranges))
        assert ranges.tolist() == [int(reference.integer_range(np, tensor.x)) for tensor in tensors]
        batch.run(kernels.int_encode, ("words", batch.words), cuts=(0.3, 0.6))
        lost = batch.run(kernels.int_decode, ("words", sums), n, cuts=(0.3, 0.6))
        assert lost == sum(misfits for _, misfits in specified)
        assert_same(batch.words, [words for blocks, _ in specified for words in blocks[0]])
        for result, (blocks, _) in zip(batch.results, specified, strict=True):
            assert_same(result, blocks[2])


@pytest.mark.parametrize("wire", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_float_wires(dtype: str, wire: str) -> None:
    rng = np.random.default_rng([FLOATS.index(dtype), FLOATS.index(wire)])
    for size in (1, 7, 1025, 2600):
        for n in RANKS:
            tensor = make(dtype, size, rng)
            values = make(wire, size, rng).x
            sent, left = reference.float_encode(np, tensor.x, wire=wire, residual=tensor.residual)
            got = reference.float_decode(np, values, n=n, mean=n % 2 == 0, dtype=dtype)
            batch = Batch([tensor], lambda _, length: length)
            buffer = np.zeros_like(sent)
            code = kernels.DTYPE_CODES[wire]
            finite = np.isfinite(reference.add_residual(np, tensor.x, tensor.residual)).all()
            for _ in every_level():
                assert bool(batch.run(kernels.nonfinite)) != finite
                batch.run(kernels.float_encode, ("values", buffer), code, cuts=(0.5,))
                batch.run(kernels.float_decode, ("values", values), code, n, n % 2 == 0, False, cuts=(0.5,))
                assert_same(buffer, [sent], wire)
                assert_same(batch.rests[0], [left])
                assert_same(batch.results[0], [got], dtype)
