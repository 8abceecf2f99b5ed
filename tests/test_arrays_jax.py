"""Views of JAX arrays: read in place, never written; results are new arrays on the same device."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from gccomm.arrays import out_view, view

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")


def aligned(n, dtype, shift=0):
    """Return `n` elements whose address is `shift` bytes past a multiple of 64."""
    memory = np.zeros(n * np.dtype(dtype).itemsize + 128, np.uint8)
    start = -memory.ctypes.data % 64 + shift
    return memory[start : start + n * np.dtype(dtype).itemsize].view(dtype)


@pytest.mark.parametrize(
    "dtype",
    [
        "float16",
        "bfloat16",
        "float32",
        "complex64",
        "bool",
        "int8",
        "int16",
        "int32",
        "uint8",
        "uint16",
        "uint32",
    ],
)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0, 4)])
def test_round_trip(dtype, shape):
    x = jnp.ones(shape, dtype)
    v = view(x)
    assert (v.kind, v.device, v.shape, v.user_dtype) == ("jax", "cpu", shape, dtype)
    assert not v.data.flags.writeable
    y = v.wrap(v.data.copy())
    assert isinstance(y, jax.Array)
    assert (y.dtype, y.shape, y.sharding) == (x.dtype, x.shape, x.sharding)
    assert (np.asarray(y) == np.asarray(x)).all()


def test_input_is_read_in_place():
    x = jnp.arange(1000, dtype=jnp.float32)
    assert view(x).pointer == x.unsafe_buffer_pointer()
    b = jnp.ones(1000, jnp.bfloat16)
    assert view(b).pointer == b.unsafe_buffer_pointer()
    assert view(b).dtype == "bfloat16"
    assert (view(b).data == 0x3F80).all()


def test_aligned_results_are_handed_over_without_a_copy():
    v = view(jnp.ones((10, 100), jnp.float32))
    result = aligned(1000, np.float32)
    result[:] = np.arange(1000)
    address = result.ctypes.data
    alive = weakref.ref(result.base)
    y = v.wrap(result).block_until_ready()
    assert y.unsafe_buffer_pointer() == address
    del result
    gc.collect()
    assert alive() is not None
    assert (np.asarray(y).reshape(-1) == np.arange(1000)).all()


def test_other_results_are_copied():
    v = view(jnp.ones(1000, jnp.bfloat16))
    result = aligned(1000, np.uint16, shift=2)
    result[:] = 0x4000
    y = v.wrap(result).block_until_ready()
    assert y.unsafe_buffer_pointer() % 64 == 0
    assert (np.asarray(y).astype(np.float32) == 2).all()


def test_commitment_and_weak_types_are_kept():
    free, committed = jnp.ones(3), jax.device_put(jnp.ones(3), jax.devices()[0])
    for x in (free, committed, jax.grad(lambda p: p * p)(1.0), jnp.float32(1)):
        v = view(x)
        y = v.wrap(v.data.copy())
        assert (y.committed, y.weak_type, y.dtype) == (x.committed, x.weak_type, x.dtype)
        assert (y == x).all()


def test_weak_scalar_from_before_x64_stays_32_bits():
    v = view(jax.grad(lambda p: p * p)(1.0))
    with jax.enable_x64(True):
        y = v.wrap(v.data.copy())
    assert (y.dtype, float(y)) == (np.dtype("float32"), 2.0)


@pytest.mark.parametrize("dtype", ["float64", "int64", "uint64", "complex128"])
def test_64_bits_are_kept_after_x64_is_off_again(dtype):
    with jax.enable_x64(True):
        x = jnp.ones(3, dtype)
    assert not jax.config.jax_enable_x64
    v = view(x)
    y = v.wrap(v.data.copy())
    assert y.dtype == np.dtype(dtype)
    assert not jax.config.jax_enable_x64


def test_numpy_float64_stays_numpy_float64():
    x = np.array([1 + 1e-12, 1e300])
    v = view(x)
    y = v.wrap(v.data.copy())
    assert type(y) is np.ndarray
    assert y.tolist() == x.tolist()


def test_tracers_are_refused():
    def reduce(x):
        return view(x)

    for transform in (jax.jit, jax.grad, jax.vmap):
        with pytest.raises(TypeError, match=r"dtype float32.*outside jit"):
            transform(lambda x: reduce(x))(jnp.ones(4) if transform is not jax.grad else jnp.float32(1))


def test_deleted_arrays_are_refused():
    x = jnp.ones(3)
    x.delete()
    with pytest.raises(ValueError, match="deleted or donated"):
        view(x)


def test_result_after_the_input_was_donated():
    x = jnp.ones(3)
    v = view(x)
    x.delete()
    assert v.wrap(np.array([1, 2, 3], np.float32)).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "make", [lambda: jax.random.key(0), lambda: jnp.ones(3, "int4"), lambda: jnp.ones(3, "float8_e4m3fn")]
)
def test_other_dtypes_are_refused(make):
    x = make()
    with pytest.raises(TypeError, match=r"dtypes are float16, bfloat16") as caught:
        view(x)
    assert str(x.dtype) in str(caught.value)


def test_out_is_refused():
    x = jnp.ones(3)
    with pytest.raises(TypeError, match=r"immutable.*numpy\.ndarray"):
        out_view(x, view(x))
    with pytest.raises(BufferError, match="read-only"):
        out_view(np.asarray(x), view(x))


class Elsewhere(SimpleNamespace):
    """What a JAX array on other devices tells of itself."""

    dtype = np.dtype("float32")
    shape = (3,)

    def is_deleted(self):
        return False


def elsewhere(platform, addressable=True, device=(1, 0)):
    sharding = SimpleNamespace(device_set={type("Device", (), {"platform": platform})()})
    facts = {"sharding": sharding, "is_fully_addressable": addressable}
    return Elsewhere(**facts, __dlpack_device__=lambda: device)


def test_gpu_arrays_and_arrays_of_other_processes(monkeypatch):
    from gccomm.interop import jax as bridge

    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(BufferError, match=r"cuda:2.*CuPy.*jax\.device_get"):
        bridge._view(elsewhere("gpu", device=(2, 2)))
    for platform in ("gpu", "rocm", "tpu"):
        with pytest.raises(BufferError, match=r"only that of CUDA.*jax\.device_get"):
            bridge._view(elsewhere(platform, device=(10, 0)))
    with pytest.raises(TypeError, match="another process"):
        bridge._view(elsewhere("cpu", addressable=False))


SEVERAL_DEVICES = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from gccomm.arrays import view
mesh = jax.make_mesh((2,), ("a",))
sharded = jax.device_put(np.ones(4, np.float32), NamedSharding(mesh, PartitionSpec("a")))
try:
    view(sharded)
except TypeError as error:
    assert "2 devices" in str(error) and "addressable_shards" in str(error), error
else:
    raise SystemExit("a sharded array was accepted")
second = jax.device_put(np.ones(4, np.float32), jax.devices()[1])
v = view(second)
assert v.wrap(v.data.copy()).sharding == second.sharding
shard = sharded.addressable_shards[1].data
v = view(shard)
assert v.wrap(v.data.copy()).devices() == shard.devices()
"""


def test_arrays_over_several_devices():
    environment = dict(os.environ)
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    environment["JAX_PLATFORMS"] = "cpu"
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-W", "error", "-c", SEVERAL_DEVICES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
