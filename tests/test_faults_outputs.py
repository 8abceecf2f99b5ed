"""In-place results and ``out``, aliased memory, and who owns a result."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import gccomm
from gccomm.testing import run

pytestmark = pytest.mark.timeout(60)

CODECS = ["raw", "bf16", "uniform"]
DTYPES = ["float16", "float32", "float64", "complex64", "int32", "bool"]


def reduced(x, codec, n=3):
    """Return what ``n`` ranks that hold ``x`` get, without ``out``."""
    return run(lambda comm: comm.compressed_allreduce(x.copy(), codec=codec), n)[0]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [10, 3000])
def test_strided_array_is_reduced_in_place(codec, dtype, count):
    expected = reduced(np.arange(count).astype(dtype)[::2], codec)

    def work(comm):
        base = np.arange(count).astype(dtype)
        x = base[::2]
        result = comm.compressed_allreduce(x, codec=codec, out=x)
        assert result is x
        assert (base[1::2] == np.arange(count).astype(dtype)[1::2]).all()
        return x

    for x in run(work, 3):
        assert (x == expected).all()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [6, 2000])
@pytest.mark.parametrize("where", ["same", "behind", "before", "backwards", "transposed"])
def test_output_may_overlap_the_input(codec, dtype, count, where):
    size = count + count // 2
    values = (np.arange(size) % 13).astype(dtype)

    def views(base):
        if where == "transposed":
            x = base[: count // 2 * 2].reshape(2, -1)[:, :2]
            return x, x.T
        starts = {"same": (0, 0), "behind": (0, count // 2), "before": (count // 2, 0), "backwards": (0, 0)}
        first, second = (base[s : s + count] for s in starts[where])
        return first, second[::-1] if where == "backwards" else second

    expected = reduced(views(values)[0], codec)

    def work(comm):
        x, out = views(values.copy())
        assert comm.compressed_allreduce(x, codec=codec, out=out) is out
        return out.copy()

    for out in run(work, 3):
        assert (out == expected).all()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bucket_bytes", [4096, 25 << 20])
@pytest.mark.parametrize("count", [100, 5000])
def test_outputs_may_be_each_others_inputs(codec, bucket_bytes, count):
    def work(comm):
        reducer = gccomm.Reducer(codec, comm=comm, op="sum", bucket_bytes=bucket_bytes)
        a, b, c = (np.full(count, v, np.float32) for v in (1, 2, 4))
        reducer({"a": a, "b": b, "c": c}, out={"a": b, "b": c, "c": a})
        return a, b, c

    for results in run(work, 3):
        for result, value in zip(results, (4, 1, 2), strict=True):
            assert np.abs(result - 3 * value).max() <= 3 * 3 * value / 127


@pytest.mark.parametrize("codec", CODECS)
def test_output_overlapping_another_input_of_the_tree(codec):
    def work(comm):
        base = np.ones(6000, np.float32)
        base[3000:] = 2
        tree = {"a": base[:3000], "b": base[1500:4500]}
        reducer = gccomm.Reducer(codec, comm=comm, op="sum", bucket_bytes=4096)
        out = reducer(tree, out={"a": tree["a"], "b": np.empty(3000, np.float32)})
        return base[:3000].copy(), out["b"]

    for a, b in run(work, 3):
        assert np.abs(a - 3).max() <= 0.1
        assert np.abs(b - np.repeat([3, 6], 1500)).max() <= 0.3


def read_only():
    x = np.ones(4, np.float32)
    x.flags.writeable = False
    return x


@pytest.mark.parametrize(
    ("out", "kind", "text"),
    [
        (lambda: np.ones(4), ValueError, "float64"),
        (lambda: np.ones(4, np.int32), ValueError, "int32"),
        (lambda: np.ones(5, np.float32), ValueError, "shape"),
        (lambda: np.ones((2, 2), np.float32), ValueError, "shape"),
        (read_only, BufferError, "read-only"),
        (lambda: np.broadcast_to(np.float32(1), 4), BufferError, "read-only|share memory"),
        (lambda: [1.0, 1.0, 1.0, 1.0], (TypeError, ValueError), "out"),
        (lambda: {"w": np.ones(4, np.float32)}, (TypeError, ValueError), "keys"),
        (lambda: 1.5, TypeError, "out"),
        (lambda: "out", TypeError, "out"),
        (lambda: bytearray(16), TypeError, "out"),
    ],
    ids=[
        "dtype",
        "integers",
        "length",
        "shape",
        "read-only",
        "broadcast",
        "list",
        "keys",
        "scalar",
        "text",
        "bytes",
    ],
)
def test_wrong_output_on_one_rank_is_refused_on_every_rank(out, kind, text):
    def work(comm):
        x = np.full(4, comm.rank, np.float32)
        mine = out() if comm.rank == 2 else np.full(4, 7, np.float32)
        with pytest.raises(kind, match=text) as caught:
            comm.compressed_allreduce(x, out=mine)
        if comm.rank != 2:
            assert (mine == 7).all()
        assert (x == comm.rank).all()
        assert comm.allreduce(1) == 3
        return caught.type, str(caught.value)

    seen = run(work, 3)
    assert len(set(seen)) == 1
    assert "rank 2" in seen[0][1]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "int64"])
@pytest.mark.parametrize("count", [4, 5000, 600_000])
def test_earlier_results_do_not_change(codec, dtype, count):
    def work(comm):
        x = (np.arange(count) % 100).astype(dtype)
        first = comm.compressed_allreduce(x, codec=codec)
        kept = first.copy()
        second = comm.compressed_allreduce(-3 * x, codec=codec)
        assert (first == kept).all()
        assert not np.shares_memory(first, second)
        assert not np.shares_memory(first, x)
        first[...] = 0
        assert (second == comm.compressed_allreduce(-3 * x, codec=codec)).all() or codec == "uniform"
        assert x[-1] == (count - 1) % 100
        return True

    assert all(run(work, 2))


@pytest.mark.parametrize("codec", CODECS)
def test_results_of_a_tree_share_no_memory(codec):
    def work(comm):
        x = np.ones(2000, np.float32)
        tree = [x, x, x[:500], np.ones(3, np.float32), np.ones(3, np.int8)]
        results = comm.compressed_allreduce(tree, codec=codec)
        for i, a in enumerate(results):
            assert not any(np.shares_memory(a, b) for b in [*results[:i], *tree])
            a[...] = i
        return [float(a[0]) for a in results]

    assert run(work, 2) == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 2


@pytest.mark.parametrize("count", [5, 3000, 600_000])
@pytest.mark.parametrize("keep", ["slice", "reshape", "memoryview", "cast", "real"])
def test_memory_lives_as_long_as_any_view_of_it(count, keep):
    """Results come from a pool: what a view still shows must not be given to a later call."""
    dtype = np.complex64 if keep == "real" else np.float32
    views = {
        "slice": lambda y: y[1:4],
        "reshape": lambda y: y.reshape(1, -1),
        "memoryview": memoryview,
        "cast": lambda y: y.view(np.int32),
        "real": lambda y: y.real,
    }

    def work(comm):
        held = [views[keep](comm.compressed_allreduce(np.full(count, i, dtype))) for i in range(4)]
        kept = [np.array(view) for view in held]
        gc.collect()
        for i in range(8):
            comm.compressed_allreduce(np.full(count, -5 - i, dtype))
        return all((np.array(view) == before).all() for view, before in zip(held, kept, strict=True))

    assert all(run(work, 2))


@pytest.mark.parametrize("codec", [*CODECS, "fp16"])
@pytest.mark.parametrize("count", [100, 300_000])
def test_temporaries_may_be_given_as_input(codec, count):
    """The call itself holds what it reads, also where it reads a copy or the caller's memory in place."""

    def work(comm):
        junk = []
        for i in range(3):
            x = np.full(count, i + 1, np.float32)
            y = comm.compressed_allreduce(x * comm.rank, codec=codec)
            z = comm.compressed_allreduce(np.flip(x * comm.rank)[::1], codec=codec)
            junk.append(np.full(count, 1e9, np.float32))
            bound = (i + 1) * 4 * 4 * 3 / 127
            assert np.abs(y - 6 * (i + 1)).max() <= bound
            assert np.abs(z - 6 * (i + 1)).max() <= bound
        return len(junk)

    assert run(work, 4) == [3] * 4
