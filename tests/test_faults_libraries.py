"""JAX arrays and pytrees, PyTorch tensors: kinds, dtypes, devices, None, and calls where they cannot work."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest

import gccomm
from gccomm.testing import run

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
jnp = jax.numpy

pytestmark = pytest.mark.timeout(120)

CODECS = ["raw", "bf16", "fp16", "uniform"]


def on_every_rank(call, ranks=3):
    """Return (error type, text) of a call that fails alike on all ranks; the next call must work."""

    def work(comm):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - compared below
            call(comm)
        assert comm.allreduce(1) == comm.size
        return caught.type, str(caught.value)

    seen = run(work, ranks)
    assert len(set(seen)) == 1
    return seen[0]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "bool"])
@pytest.mark.parametrize("shape", [(), (5,), (60, 40), (0, 4)])
def test_jax_arrays_come_back_as_new_jax_arrays_of_the_same_dtype(codec, dtype, shape):
    x = jnp.ones(shape, dtype)
    for y in run(lambda comm: comm.compressed_allreduce(x, codec=codec), 3):
        assert isinstance(y, jax.Array)
        assert y is not x
        assert (y.dtype, y.shape) == (x.dtype, x.shape)
        assert y.devices() == x.devices()
        total = 1 if dtype == "bool" else 3
        assert np.abs(np.asarray(y, np.float64) - total).max(initial=0) <= 0.15
    assert (np.asarray(x) == np.ones(shape, dtype)).all()


@pytest.mark.parametrize("codec", ["raw", "uniform"])
@pytest.mark.parametrize("count", [2, 3000])
def test_float64_is_not_narrowed_while_jax_is_loaded(codec, count):
    assert not jax.config.jax_enable_x64
    x = np.resize(np.array([1 + 1e-12, 1e300]), count)
    for y in run(lambda comm: comm.compressed_allreduce(x, "mean", codec, exact_below=4096), 3):
        assert y.dtype == np.float64
        assert np.abs(y[1::2] / 1e300 - 1).max() < 1e-15
        if codec == "raw":
            assert (y[::2] == 1 + 1e-12).all()
    near_one = np.full(count, 1 + 1e-12)
    y = run(lambda comm: comm.compressed_allreduce(near_one, "mean", codec, exact_below=4096), 3)[0]
    assert (y == 1 + 1e-12).all()
    wide = run(lambda comm: comm.compressed_allreduce(np.full(2000, 1e300), "mean", codec, exact_below=0), 3)[
        0
    ]
    assert np.isfinite(wide).all()


def test_jax_results_are_not_overwritten_by_later_calls():
    def work(comm):
        held = [comm.compressed_allreduce(jnp.full(3000, i, jnp.float32)) for i in range(4)]
        kept = [np.array(y) for y in held]
        for i in range(8):
            comm.compressed_allreduce(jnp.full(3000, -9 - i, jnp.float32))
        return all((np.array(y) == k).all() for y, k in zip(held, kept, strict=True))

    assert all(run(work, 2))


def test_donated_jax_array_is_refused():
    def call(comm):
        x = jnp.ones(3)
        if comm.rank == 0:
            x.delete()
        comm.compressed_allreduce(x)

    assert on_every_rank(call)[0] is ValueError


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, lambda f: jax.grad(lambda x: f(x).sum())])
@pytest.mark.parametrize("only", [None, 1])
def test_call_while_jax_traces_is_refused_at_once(transform, only):
    def call(comm):
        def reduce(x):
            return comm.compressed_allreduce(x)

        inside = transform(reduce) if only in (None, comm.rank) else reduce
        inside(jnp.ones(4))

    kind, text = on_every_rank(call)
    assert kind is TypeError
    assert "outside jit" in text


def test_jax_array_cannot_be_an_output():
    kind, text = on_every_rank(lambda comm: comm.compressed_allreduce(jnp.ones(3), out=jnp.ones(3)))
    assert kind is TypeError
    assert "immutable" in text


class Layer(NamedTuple):
    w: Any
    b: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Head:
    scale: Any
    bias: Any


def test_trees_keep_their_structure_and_none_stays_none():
    tree = {
        "w": jnp.ones(1500),
        "frozen": None,
        "nested": (None, 2.0),
        "layers": [Layer(np.ones((2, 3), np.float32), None), Layer(jnp.ones(2), np.float16(3))],
        "head": Head(jnp.float32(4), None),
        "none": (),
    }

    def work(comm):
        return comm.compressed_allreduce(tree, "mean"), gccomm.Reducer(comm=comm)(tree)

    for pair in run(work, 3):
        for y in pair:
            assert jax.tree.structure(y) == jax.tree.structure(tree)
            assert y["frozen"] is None
            assert y["nested"] == (None, 2.0)
            assert y["layers"][0].b is None
            assert y["head"].bias is None
            assert list(y) == list(tree)
            for a, b in zip(jax.tree.leaves(y), jax.tree.leaves(tree), strict=True):
                assert type(a) is type(b)
                assert np.abs(np.asarray(a) - np.asarray(b)).max() <= 0.03


DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.int64,
    torch.bool,
]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (60, 40), (0, 4)])
def test_torch_tensors_come_back_detached_in_the_same_dtype(codec, dtype, shape):
    x = torch.ones(shape, dtype=dtype)
    if dtype.is_floating_point:
        x.requires_grad_()
    for y in run(lambda comm: comm.compressed_allreduce(x, codec=codec), 3):
        assert type(y) is torch.Tensor
        assert (y.dtype, y.shape, y.device) == (x.dtype, x.shape, x.device)
        assert not y.requires_grad
        total = torch.ones(shape, dtype=dtype) if dtype is torch.bool else 3 * torch.ones(shape)
        assert torch.allclose(y.to(torch.complex128), total.to(torch.complex128), atol=0.15)


def test_bfloat16_tensor_values():
    x = torch.tensor([1.5, -2, 3], dtype=torch.bfloat16)
    for y in run(lambda comm: comm.compressed_allreduce(x, "mean"), 3):
        assert y.dtype is torch.bfloat16
        assert y.tolist() == [1.5, -2, 3]


def test_torch_parameter_is_reduced_in_place_into_its_gradient():
    def work(comm):
        p = torch.nn.Parameter(torch.ones(2000))
        p.grad = torch.full((2000,), float(comm.rank))
        out = comm.compressed_allreduce(p.grad, "mean", "uniform", out=p.grad)
        assert out is p.grad
        assert (p == 1).all()
        return float((p.grad - 1).abs().max())

    assert max(run(work, 3)) <= 2 * 3 / 127


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.eye(3).to_sparse(), "to_dense"),
        (lambda: torch.eye(3).to_sparse_csr(), "to_dense"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "dequantize"),
        (lambda: torch.ones(3, device="meta"), "meta"),
        (lambda: torch.ones(3).to(torch.float8_e4m3fn), "float8"),
    ],
    ids=["coo", "csr", "quantised", "meta", "float8"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*quantiz", "ignore::DeprecationWarning")
def test_tensors_that_are_no_plain_memory_are_refused_everywhere(make, text):
    bad = make()
    kind, message = on_every_rank(lambda comm: comm.allreduce(bad if comm.rank == 2 else torch.ones(3)))
    assert kind is TypeError
    assert text in message


@pytest.mark.parametrize(
    "make", [lambda x: x.t(), lambda x: x.conj(), lambda x: x[::2, 1:], lambda x: x.conj().imag]
)
def test_torch_views_are_read_in_logical_order(make):
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    x = make(torch.complex(base, 2 * base))
    for y in run(lambda comm: comm.compressed_allreduce(x, "sum"), 3):
        assert torch.equal(y, (3 * x).resolve_conj().resolve_neg())


def test_torch_results_are_not_overwritten_by_later_calls():
    def work(comm):
        held = [comm.compressed_allreduce(torch.full((3000,), float(i))) for i in range(4)]
        kept = [y.clone() for y in held]
        for i in range(8):
            comm.compressed_allreduce(torch.full((3000,), -9.0 - i))
        return all(torch.equal(y, k) for y, k in zip(held, kept, strict=True))

    assert all(run(work, 2))


def test_libraries_may_differ_between_ranks_where_dtypes_agree():
    makers = [np.ones, lambda n, dtype: jnp.ones(n, dtype), lambda n, dtype: torch.ones(n)]

    def work(comm):
        return comm.compressed_allreduce(makers[comm.rank](2000, np.float32), "mean")

    results = run(work, 3)
    kinds = [
        isinstance(y, kind) for y, kind in zip(results, (np.ndarray, jax.Array, torch.Tensor), strict=True)
    ]
    assert all(kinds)
    assert len({np.asarray(y).tobytes() for y in results}) == 1
