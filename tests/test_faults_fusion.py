"""Odd sizes, padding, fusing, pieces: each array keeps its own scale, and what was sent can be read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gccomm
from gccomm import kernels
from gccomm.codecs import get_codec
from gccomm.kernels.table import SEGMENT
from gccomm.layout import Geometry, LeafSpec, cut
from gccomm.testing import run, simulate

pytestmark = pytest.mark.timeout(60)

F4 = np.float32
WIDTHS = [2, 3, 4, 5, 6, 8, 10, 16]
LANES = [f"uniform:wire_bits={w}" for w in WIDTHS]
CODECS = ["raw", "bf16", "fp16", *LANES]
SIZES = [1, 3, 7, 255, 256, 257, 1001, 1023, 1024, 1025, 2049]
SHAPES = [(2, 513), (3, 700), (2, 1025), (7, 11, 13), (1, 1, 512), (600, 1), (2, 511)]


def step_of(peak, n, codec):
    width = int(codec.partition("=")[2]) if codec.startswith("uniform") else 8
    return peak * 65536 / (((1 << (width - 1)) - 1) * 65536 // n) * (1 + 4e-6)


def fill_pool_with_garbage():
    """Leave NaN in the memory that the next calls take their buffers from."""
    held = [kernels.pool_empty(n) for n in (256, 4096, 8192, 16384, 65536, 1 << 20) for _ in range(4)]
    for memory in held:
        memory.view(np.uint8)[...] = 0xFF


def values(shape, rank, dtype=F4):
    return np.random.default_rng(rank).uniform(-1, 1, shape).astype(dtype)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", [*SIZES, *SHAPES], ids=str)
@pytest.mark.parametrize("below", [0, 1024])
def test_any_size_comes_back_whole_and_padding_does_not_touch_the_scale(codec, shape, below):
    n = 3
    shape = (shape,) if isinstance(shape, int) else shape
    xs = []
    for rank in range(n):  # surrounded by what must not be read
        guarded = np.full(int(np.prod(shape)) + 64, np.nan, F4)
        guarded[32:-32] = values(shape, rank).reshape(-1)
        xs.append(guarded[32:-32].reshape(shape))
    fill_pool_with_garbage()
    ys, _ = simulate(xs, codec, exact_below=below)
    clean, _ = simulate([x.copy() for x in xs], codec, exact_below=below)
    assert ys[0].shape == shape
    assert ys[0].tobytes() == clean[0].tobytes()
    top = float(np.max(np.abs(xs)))
    assert np.abs(ys[0] - np.sum(xs, axis=0)).max() <= n * step_of(top, n, codec)


@pytest.mark.parametrize("codec", ["raw", "bf16", "uniform", "uniform:wire_bits=3"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int64", "complex64"])
@pytest.mark.parametrize("size", [5, 1001, 2050])
def test_memory_around_an_output_is_left_alone(codec, dtype, size):
    def work(comm):
        guarded = np.full(size + 64, 77, dtype)
        out = guarded[32:-32]
        comm.compressed_allreduce(np.ones(size, dtype), codec=codec, out=out)
        return (guarded[:32] == 77).all() and (guarded[-32:] == 77).all() and (np.abs(out - 2) < 1).all()

    assert all(run(work, 2))


@pytest.mark.parametrize("codec", LANES)
@pytest.mark.parametrize("size", [100, 2000])
def test_small_values_survive_beside_large_ones(codec, size):
    n = 3
    trees = [
        {"big": 1e3 * values(size, r), "small": 1e-6 * values(size, r + 9), "zero": np.zeros(9, F4)}
        for r in range(n)
    ]
    ys, _ = simulate(trees, codec)
    for key, scale in (("big", 1e3), ("small", 1e-6)):
        error = np.abs(ys[0][key] - np.sum([t[key] for t in trees], axis=0))
        assert error.max() <= n * step_of(scale, n, codec)
    assert (ys[0]["zero"] == 0).all()


@pytest.mark.parametrize("codec", [c for c in CODECS if c.startswith("uniform")])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32"])
def test_result_does_not_depend_on_what_it_is_fused_with(codec, dtype):
    names = {"w": 5000, "b": 10, "x/y": (3, 700), "e": 0, "c": 1024}
    xs = [
        {k: (100 * values(s, r + i)).astype(dtype) for i, (k, s) in enumerate(names.items())}
        for r in range(3)
    ]
    fused, _ = simulate(xs, codec)
    for key in names:
        alone, _ = simulate([{key: x[key]} for x in xs], codec)
        assert alone[0][key].tobytes() == fused[0][key].tobytes()


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(
        st.sampled_from([0, 1, 5, 511, 512, 1000, 1024, 1025, 2501, 4097]), min_size=1, max_size=6
    ),
    pieces=st.sampled_from([1, 100, 1000, 1024, 2048, 5000, 1 << 20]),
    bucket_bytes=st.sampled_from([1, 1000, 4096, 100_000]),
    width=st.sampled_from(WIDTHS),
    one_host=st.booleans(),
)
def test_pieces_and_buckets_of_any_size_give_the_same_bits(sizes, pieces, bucket_bytes, width, one_host):
    kinds = [F4, np.float16, np.int16, np.float64, np.complex64]
    xs = [
        [(100 * values(s, r + i)).astype(kinds[i % len(kinds)]) for i, s in enumerate(sizes)]
        for r in range(3)
    ]
    codec = f"uniform:wire_bits={width}"
    whole, _ = simulate(xs, codec)
    cut_up, _ = simulate(xs, codec, piece_coordinates=pieces, bucket_bytes=bucket_bytes, one_host=one_host)
    assert [y.tobytes() for y in whole[0]] == [y.tobytes() for y in cut_up[0]]


def test_limit_of_a_thousand_coordinates_a_message():
    xs = [values(2501, r) for r in range(3)]
    for codec in ("raw", *LANES):
        whole, one = simulate(xs, codec)
        cut_up, many = simulate(xs, codec, piece_coordinates=1000)
        assert whole[0].tobytes() == cut_up[0].tobytes()
        assert many[0].messages > one[0].messages


@pytest.mark.parametrize("shape", [(2**31 + 1,), (2**20, 2**12), (2**33 + 5,), (3, 2**31)])
@pytest.mark.parametrize("dtype", ["int8", "float32", "float64"])
def test_layout_counts_beyond_32_bits(shape, dtype):
    codec = get_codec("uniform")
    geometry = Geometry.of(shape)
    assert geometry.size == np.prod(shape, dtype=object)
    assert geometry.offset(geometry.blocks) == geometry.size
    spec = LeafSpec("w", dtype, shape, shape, codec, mean=False)
    pieces = cut([spec])
    starts, counts = np.array([r[1:] for piece in pieces for r in piece]).T
    assert starts[0] == 0
    assert (starts[:-1] + counts[:-1] == starts[1:]).all()
    assert starts[-1] + counts[-1] == geometry.blocks
    assert counts.max() * 1024 <= 1 << 20
    for name in ("size", "row", "block0", "nblocks"):
        assert SEGMENT[name].itemsize == 8


@pytest.mark.parametrize("width", WIDTHS)
def test_bytes_on_the_wire_are_those_of_the_lane_width(width):
    size = 1 << 20
    _, stats = simulate([np.ones(size, F4)] * 2, f"uniform:wire_bits={width}")
    payload = size * 4 / (32 // width)
    scales = size / 1024 * 4
    sent = stats[0].wire_bytes - stats[0].measure_bytes
    assert payload + scales <= sent <= 1.01 * payload + scales + 2048
    assert stats[0].float32_bytes == 4 * size
    assert stats[0].ratio == pytest.approx(stats[0].float32_bytes / stats[0].wire_bytes)
    assert stats[0].codecs == {"uniform": size}


def test_what_is_compressed_can_be_chosen_by_key_and_read_afterwards():
    tree = {
        "layers": [{"w": np.ones((64, 64), F4), "b": np.full(64, 0.1, F4)}] * 2,
        "head": {"w": np.linspace(0, 1, 4000, dtype=F4)},
        "loss": np.float32(0.123456),
        "tokens": np.int64(12_345_678_901),
    }

    def work(comm):
        reducer = gccomm.Reducer(
            {"head/*": "raw", "layers/*": "uniform:wire_bits=4"},
            comm=comm,
            op={"tokens": "sum", "loss": "sum"},
        )
        return reducer(tree), reducer.stats

    for y, stats in run(work, 3):
        assert np.abs(y["head"]["w"] - tree["head"]["w"]).max() < 1e-6
        assert np.abs(y["layers"][1]["b"] - F4(0.1)).max() < 1e-7
        assert abs(y["loss"] - 3 * np.float32(0.123456)) < 1e-7
        assert y["tokens"] == 3 * 12_345_678_901
        assert stats.codecs == {"raw": 4000, "uniform": 2 * 4096, "two-words": 2 * 64 + 1, "integers": 1}
        full = sum(4 * c for c in stats.codecs.values())
        assert stats.float32_bytes == full
        assert stats.wire_bytes < full


def test_size_from_which_arrays_are_compressed_is_exact():
    for size, below, codec in (
        (1023, 1024, "two-words"),
        (1024, 1024, "rotated"),
        (1, 0, "rotated"),
        (9, 9, "rotated"),
    ):
        _, stats = simulate([np.ones(size, F4)] * 2, exact_below=below)
        assert stats[0].codecs == {codec: size}


def test_small_arrays_are_as_good_as_exact():
    xs = [values(1000, r, np.float64) * 10.0**r for r in range(5)]
    ys, _ = simulate(xs)
    exact = np.sum(np.array(xs, np.longdouble), axis=0)
    assert np.abs(ys[0] - exact).max() <= 5 * 2.0 ** -(61 - 2 * 3) * np.abs(xs).max() + 1e4 * 2.0**-52


def test_ten_thousand_arrays_in_one_call():
    tree = {f"k{i}": np.full(1 + i % 3, i, F4) for i in range(10_000)}
    ys, stats = simulate([tree, tree])
    assert all((ys[1][key] == 2 * x).all() for key, x in tree.items())
    assert stats[0].messages < 10
