"""Right numbers over a real MPI: its own sums saturate, wrap and add in any order; the results must not."""

from __future__ import annotations

import hashlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gccomm

F4 = np.float32
WIDTHS = [2, 3, 4, 5, 6, 8, 10, 16]
CODECS = ["raw", "bf16", "fp16", *(f"uniform:wire_bits={w}" for w in WIDTHS)]


def step_of(peak: float, n: int, width: int = 8) -> float:
    return peak * 65536 / (((1 << (width - 1)) - 1) * 65536 // n) * (1 + 4e-6)


def bound(codec: str, peak: float, n: int) -> float:
    """Return the largest error of a sum of values up to ``peak``."""
    if codec.startswith("uniform"):
        return n * step_of(peak, n, int(codec.partition("=")[2]))
    return n * n * peak * {"raw": 1e-6, "bf16": 2**-8, "fp16": 2**-11}[codec]


def same_on_all_ranks(world: Any, *ys: Any) -> bool:
    digest = hashlib.sha256(b"".join(np.asarray(y).tobytes() for y in ys)).hexdigest()
    return len(set(world.allgather(digest))) == 1


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [1, 8, 1003, 300_001])
def test_every_rank_at_the_maximum(comm: Any, world: Any, codec: str, size: int) -> None:
    x = np.full(size, 1.0, F4)
    x[1::2] = -1
    y = comm.compressed_allreduce(x, codec=codec, exact_below=0)
    assert np.abs(y - comm.size * x).max() <= bound(codec, 1, comm.size)
    assert same_on_all_ranks(world, y)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "int64", "uint64"])
@pytest.mark.parametrize("size", [1, 8, 1000])
def test_integer_sums_neither_wrap_nor_saturate(comm: Any, dtype: str, size: int) -> None:
    info = np.iinfo(dtype)
    x = np.full(size, info.max // comm.size, dtype)
    assert (comm.allreduce(x) == info.max // comm.size * comm.size).all()
    x[-1] = info.max // 2 + 1
    out = np.full(size, 3, dtype)
    with pytest.raises(OverflowError, match=rf"(?=.*\b1\b)(?=.*not fit).*\b{dtype}\b"):
        comm.allreduce(x, out=out)
    assert (out == 3).all()


def test_partial_sums_beyond_the_range(comm: Any) -> None:
    x = np.full(1000, (100, -100)[comm.rank % 2], np.int8)
    if comm.rank == comm.size - 1 and comm.size % 2:
        x[...] = 27
    assert (comm.allreduce(x) == (27 if comm.size % 2 else 0)).all()


@pytest.mark.parametrize("codec", CODECS)
def test_constant_mean_at_this_number_of_ranks(comm: Any, codec: str) -> None:
    for below in (0, 1024):
        y = comm.compressed_allreduce(np.full(64, 0.5, F4), "mean", codec, exact_below=below)
        assert np.abs(y - 0.5).max() <= bound(codec, 0.5, comm.size) / comm.size


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_float_dtypes_and_nan_on_one_rank(comm: Any, world: Any, codec: str, dtype: str) -> None:
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    x = np.linspace(-1, 1, 3000).astype(kind)
    y = comm.compressed_allreduce(x, "mean", codec)
    assert y.dtype == kind
    coarse = {"float16": 2**-10, "bfloat16": 2**-7}.get(dtype, 1e-6)
    assert (
        np.abs(y.astype(complex) - x.astype(complex)).max() <= bound(codec, 1, comm.size) / comm.size + coarse
    )
    for poison in (np.nan, np.inf, -np.inf):
        x[1500] = poison if comm.rank == comm.size - 1 else 0
        y = comm.compressed_allreduce(x, "sum", codec)
        assert not np.isfinite(y[1500].astype(complex))
        assert np.isfinite(y[:1024].astype(complex)).all()
        if codec.startswith("uniform"):
            assert same_on_all_ranks(world, np.isnan(y.astype(complex)))


def test_half_precision_means(comm: Any) -> None:
    for codec in ("raw", "uniform"):
        assert (comm.compressed_allreduce(np.full(8, 40_000, np.float16), "mean", codec) == 40_000).all()
        small = comm.compressed_allreduce(np.full(8, 1e-7, np.float16), "mean", codec)
        assert (small == np.float16(1e-7)).all()


@pytest.mark.parametrize("feedback", [False, True])
def test_replicas_never_drift_apart(comm: Any, world: Any, feedback: bool) -> None:
    reducer = gccomm.Reducer("uniform:wire_bits=5", comm=comm, error_feedback=feedback)
    rng, shared = np.random.default_rng(comm.rank), np.random.default_rng(99)
    digest = hashlib.sha256()
    for step in range(200):
        size = int(shared.integers(1, 3000))
        x = (10.0 ** shared.uniform(-6, 6) * rng.normal(size=size)).astype(F4)
        x[rng.random(size) < 0.1] = -0.0
        if step % 17 == comm.rank:
            x[rng.integers(size)] = (np.nan, np.inf, -np.inf)[step % 3]
        for y in reducer({f"w{size}": x}).values():
            digest.update(y.tobytes())
    assert len(set(world.allgather(digest.hexdigest()))) == 1


@pytest.mark.parametrize("codec", ["raw", "bf16", "uniform"])
@pytest.mark.parametrize("limit", [1, 100, 1000])
def test_messages_cut_by_a_limit_give_the_same_result(comm: Any, codec: str, limit: int) -> None:
    backend = comm._backend
    size = 2501 if limit > 1 else 40
    x = np.random.default_rng(comm.rank).normal(size=size).astype(F4)
    tree = {"w": x, "n": (1000 * x).astype(np.int64), "h": x.astype(np.float16)}
    whole = gccomm.Reducer(codec, comm=comm, op="sum", exact_below=0)(tree)
    messages = backend._channel.messages
    usual, messages.max_count = messages.max_count, limit
    try:
        cut = gccomm.Reducer(codec, comm=comm, op="sum", exact_below=0)(tree)
        sent = comm.broadcast(x, root=comm.size - 1)
    finally:
        messages.max_count = usual
    for key in tree:
        if codec == "uniform" or key == "n":
            assert whole[key].tobytes() == cut[key].tobytes()
        error = np.abs(whole[key].astype(float) - cut[key].astype(float)).max()
        assert error <= 2 * bound("bf16", 5, comm.size)
    last = np.random.default_rng(comm.size - 1).normal(size=size).astype(F4)
    assert (sent == last).all()


@pytest.mark.parametrize("codec", ["raw", "bf16", "fp16", "uniform"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "int32"])
@pytest.mark.parametrize("size", [10, 2000, 200_000])
def test_in_place_overlapping_and_strided_outputs(comm: Any, codec: str, dtype: str, size: int) -> None:
    base = (np.arange(3 * size) % 5).astype(dtype)
    expected = comm.size * base.astype(float)
    tolerance = bound("uniform:wire_bits=8", 4, comm.size) if codec != "raw" else 0.01
    x = base.copy()[::3]
    assert comm.compressed_allreduce(x, codec=codec, out=x) is x
    assert np.abs(x - expected[::3]).max() <= tolerance
    for a, b in ((0, size // 2), (size // 2, 0)):
        y = base.copy()
        comm.compressed_allreduce(y[a : a + size], codec=codec, out=y[b : b + size])
        assert np.abs(y[b : b + size] - expected[a : a + size]).max() <= tolerance


@pytest.mark.parametrize("codec", ["raw", "bf16", "fp16", "uniform"])
@pytest.mark.parametrize("size", [1000, 400_000])
def test_temporaries_and_memory_reuse(comm: Any, codec: str, size: int) -> None:
    held = []
    for i in range(1, 4):
        y = comm.compressed_allreduce(np.full(size, i, F4) + 0, codec=codec)
        junk = [np.full(size, 1e9, F4) for _ in range(3)]
        held.append((comm.size * i, y))
        del junk
    for value, y in held:
        assert np.abs(y - value).max() <= bound("uniform:wire_bits=8", value / comm.size, comm.size)
