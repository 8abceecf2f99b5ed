"""The reference gives the same words and results, bit for bit, under ``jax.jit`` as under NumPy.

XLA reads subnormal numbers as zero, so block maxima are 2**-90 or more here, or exactly zero.  They end below
2**120, lest a residual overflow: XLA may contract its subtraction, which would then give a finite number.
"""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import numpy as np
import pytest

from gccomm import lanes as ln
from gccomm.kernels import reference

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

Array: TypeAlias = np.ndarray[Any, Any]
EXPONENTS = {"float32": (-88, 120), "float16": (-14, 15), "bfloat16": (-88, 120)}


@pytest.fixture(autouse=True)
def _on_cpu_without_x64() -> Any:
    with jax.default_device(jax.devices("cpu")[0]), jax.enable_x64(False):
        yield


def make(dtype: str, blocks: int, length: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return blocks of all allowed magnitudes, some zero or not finite, and a residual."""
    power = np.exp2(rng.integers(*EXPONENTS[dtype], (blocks, 1)).astype(np.float64))
    power[::5] = 0
    # Nothing between 0 and a thousandth of the block's magnitude, lest a residual become subnormal.
    x = rng.uniform(1e-3, 1.9, (blocks, length)) * rng.choice([-1, 1], (blocks, length)) * power
    x[rng.random((blocks, length)) < 0.05] = 0
    rest = (rng.integers(-64, 65, (blocks, length)) / 4096 * power).astype(np.float32)
    if blocks > 4:
        x[1, 0], x[2, -1], x[3, 0] = np.inf, np.nan, -np.inf
    return reference.narrow(np, x, dtype), rest


def assert_same(found: Any, expected: Array, what: str) -> None:
    """Compare bit patterns; any NaN equals any other."""
    found = np.asarray(found)
    assert found.dtype == expected.dtype, what
    if expected.dtype.kind == "f":
        nans = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(found), nans, what)
        unsigned = f"u{expected.itemsize}"
        found, expected = (np.where(nans, 0, a.view(unsigned)) for a in (found, expected))
    np.testing.assert_array_equal(found, expected, what)


def run_lanes(
    xp: Any, x: Any, rest: Any, agreed: Any, sums: Any, t0: Any, t1: Any, first: Any, shift: Any,
    *, width: int, n: int, subtract: bool, mean: bool, dtype: str,
) -> dict[str, Any]:  # fmt: skip
    length, limit = x.shape[1], ln.safe_limit(width, n)
    numbers = xp.arange(x.shape[0], dtype=xp.uint32) + first
    hashes = reference.block_hashes(xp, *reference.block_keys(xp, t0, t1, numbers), length)
    sent = reference.encode(xp, x, agreed, hashes, shift, width=width, limit=limit, residual=rest)
    result = reference.decode(
        xp, sums, agreed, hashes, length=length, width=width, limit=limit, n=n,
        subtract=subtract, mean=mean, dtype=dtype,
    )  # fmt: skip
    return {
        "maxima": reference.maxima(xp, x),
        "maxima with residual": reference.maxima(xp, x, rest),
        "hashes": hashes,
        "words": sent.words,
        "residual": sent.residual,
        "check words": sent.check,
        "decoded": result,
        "exact words": reference.exact_encode(xp, x, agreed, n=n),
    }


def compare_lanes(dtype: str, width: int, n: int, shape: tuple[int, int], *flags: bool) -> None:
    rng = np.random.default_rng([width, n])
    x, rest = make(dtype, *shape, rng)
    maxima = reference.maxima(np, x, rest)
    agreed = np.where(rng.random(shape[0]) < 0.4, np.maximum(maxima, rng.permutation(maxima)), maxima)
    sums = rng.integers(0, 2**32, (shape[0], ln.words(width, shape[1]))).astype(np.uint32)
    key = rng.integers(0, 2**32, 3).astype(np.uint32)
    shift = np.uint32(ln.rank_shift(n // 2, n))
    run = functools.partial(run_lanes, width=width, n=n, subtract=flags[0], mean=flags[1], dtype=dtype)
    arrays = (x, rest, agreed, sums, *key, shift)
    expected = run(np, *arrays)
    found = jax.jit(functools.partial(run, jnp))(*arrays)
    for what, value in expected.items():
        assert_same(found[what], value, what)


@pytest.mark.parametrize(
    ("dtype", "width", "n", "length"),
    [
        ("float32", 2, 3, 1024),
        ("float32", 3, 1, 7),
        ("float32", 8, 4, 1023),
        ("float32", 10, 17, 1024),
        ("float16", 4, 17, 1024),
        ("float16", 16, 2, 1),
        ("bfloat16", 5, 2, 1024),
        ("bfloat16", 6, 3, 1023),
    ],
)
def test_lane_codec(dtype: str, width: int, n: int, length: int) -> None:
    compare_lanes(dtype, width, n, (24, length), n % 2 == 1, width % 4 != 0)


@pytest.mark.parametrize(("subtract", "mean"), [(True, False), (False, True)])
def test_other_flags(subtract: bool, mean: bool) -> None:
    compare_lanes("float32", 8, 3, (9, 100), subtract, mean)


def test_a_large_tensor() -> None:
    compare_lanes("float32", 8, 4, (1024, 1024), True, True)


def run_rotated(
    xp: Any, x: Any, rest: Any, agreed: Any, ratios: Any, sums: Any, t0: Any, t1: Any, shift: Any,
    *, rotations: int, width: int, n: int, dtype: str,
) -> dict[str, Any]:  # fmt: skip
    length, limit = x.shape[1], ln.safe_limit(min(width, 16), n)
    numbers = xp.arange(x.shape[0], dtype=xp.uint32)
    rotation = None
    if rotations:
        rotation = reference.Rotation(reference.sign_words(xp, t1, t0, numbers), rotations)
    size = reference.padded(length) if rotations else length
    hashes = reference.block_hashes(xp, *reference.block_keys(xp, t0, t1, numbers), size)
    step: dict[str, Any] = {"clamp": limit // 2, "ratios": ratios} if n % 2 else {}
    if n == 5:
        step["grid"] = reference.Grid(*np.array([[0, 0, 2, 3, 3], [2, 2, 1, 2, 2]], np.int32))
    sent = reference.encode(
        xp,
        x,
        agreed,
        hashes,
        shift,
        width=width,
        limit=limit,
        residual=rest,
        rotation=rotation,
        subtract=n % 3 > 0,
        **step,
    )
    words, energies = reference.maxima_and_energies(xp, x, rest, rotation)
    how = {"n": n, "subtract": True, "offset": n}
    values = {
        mean: reference.decode(
            xp, sums, agreed, hashes, length=length, width=width, limit=limit, mean=mean, dtype=dtype,
            ratios=step.get("ratios"), rotation=rotation, **how,
        )
        for mean in (False, True)
    }  # fmt: skip
    centred = reference.centred_sums(xp, reference.unpack(xp, sums, width, size), hashes, **how)
    return {
        "maxima": words,
        "energies": energies,
        "words": sent.words,
        "residual": sent.residual,
        "check words": sent.check,
        "own maxima": reference.encoded_maxima(xp, x, agreed, rest, step.get("ratios"), rotation),
        "sum": values[False],
        "mean": values[True],
        "energies of sums": reference.block_energy(xp, centred, width),
    }


@pytest.mark.parametrize(
    ("dtype", "rotations", "width", "n", "length"),
    [
        ("float32", 0, 8, 3, 700),
        ("float32", 0, 16, 5, 1024),
        ("float32", 1, 8, 4, 1024),
        ("float32", 1, 8, 2, 1000),
        ("float32", 1, 32, 3, 700),
        ("float32", 1, 4, 5, 768),
        ("float32", 2, 5, 17, 1024),
        ("float32", 2, 8, 5, 65),
        ("float16", 1, 16, 1, 1),
        ("float16", 2, 4, 2, 768),
        ("bfloat16", 2, 32, 2, 1000),
        ("bfloat16", 1, 3, 1, 1024),
    ],
)
def test_rotated_lane_codec(dtype: str, rotations: int, width: int, n: int, length: int) -> None:
    rng = np.random.default_rng([rotations, width, length])
    x, rest = make(dtype, 12, length, rng)
    maxima, _ = reference.maxima_and_energies(np, x, rest)
    agreed = np.where(rng.random(12) < 0.4, np.maximum(maxima, rng.permutation(maxima)), maxima)
    ratios = np.exp2(rng.uniform(-8, 0, 12)).astype(np.float32)
    ratios[6] = 0
    size = reference.padded(length) if rotations else length
    sums = rng.integers(0, 2**32, (12, ln.words(width, size))).astype(np.uint32)
    key = rng.integers(0, 2**32, 2).astype(np.uint32)
    run = functools.partial(run_rotated, rotations=rotations, width=width, n=n, dtype=dtype)
    arrays = (x, rest, agreed, ratios, sums, *key, np.uint32(ln.rank_shift(n // 2, n)))
    expected = run(np, *arrays)
    found = jax.jit(functools.partial(run, jnp))(*arrays)
    for what, value in expected.items():
        assert_same(found[what], value, what)


def run_wires(xp: Any, x: Any, rest: Any, *, n: int, dtype: str) -> list[Any]:
    found: list[Any] = []
    for wire in EXPONENTS:
        values, left = reference.float_encode(xp, x, wire=wire, residual=rest)
        mean = reference.float_decode(xp, values, n=n, mean=True, dtype=dtype)
        found += [values, left, mean, reference.float_decode(xp, values, n=n, mean=False, dtype=dtype)]
    return found


@pytest.mark.parametrize("dtype", EXPONENTS)
def test_float_wires(dtype: str) -> None:
    x, rest = make(dtype, 24, 500, np.random.default_rng(0))
    run = functools.partial(run_wires, n=3, dtype=dtype)
    found = jax.jit(functools.partial(run, jnp))(x, rest)
    for k, expected in enumerate(run(np, x, rest)):
        assert_same(found[k], expected, f"{list(EXPONENTS)[k // 4]}, output {k % 4}")


def test_no_blocks() -> None:
    x = np.zeros((0, 1024), np.float32)
    nothing = np.zeros(0, np.uint32)
    encode = functools.partial(reference.encode, jnp, width=8, limit=1000)
    sent = jax.jit(encode)(x, nothing, x.astype(np.uint32), 3)
    assert sent.words.shape == (0, 256)
    assert sent.check.shape == (0, 2)
    assert jax.jit(functools.partial(reference.maxima, jnp))(x).shape == (0,)


def test_jax_bfloat16_arrays_count_as_their_patterns() -> None:
    patterns, rest = make("bfloat16", 8, 100, np.random.default_rng(0))
    x = jax.lax.bitcast_convert_type(patterns, jnp.bfloat16)
    found = jax.jit(functools.partial(reference.maxima, jnp))(x, rest)
    assert_same(found, reference.maxima(np, patterns, rest), "maxima")


@pytest.mark.parametrize("dtype", EXPONENTS)
@pytest.mark.parametrize("n", [1, 3, 8])
def test_exact_sums_are_close_in_float32(dtype: str, n: int) -> None:
    """Without float64 the sum of the words is decoded in float32."""
    rng = np.random.default_rng(n)
    x, _ = make(dtype, 12, 50, rng)
    scales = reference.maxima(np, x)
    words = sum(reference.exact_encode(np, rng.permuted(x, axis=1), scales, n=n) for _ in range(n))
    run = functools.partial(reference.exact_decode, n=n, mean=True, dtype="float32")
    expected = run(np, words, scales)
    found = np.asarray(jax.jit(functools.partial(run, jnp))(words, scales))
    assert np.isnan(expected).any(axis=1).tolist() == [False, True, True, True, *[False] * 8]
    largest = np.nan_to_num(np.max(np.abs(expected), axis=1, keepdims=True))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    error = np.nan_to_num(np.abs(found - expected))
    assert (error <= 2.0**-22 * largest).all()


def run_integers(xp: Any, x: Any, sums: Any, *, width: int, digits: int, dtype: str) -> list[Any]:
    form = {"width": width, "digits": digits}
    values, misfits = reference.integer_decode(xp, sums, length=x.shape[1], dtype=dtype, **form)
    return [reference.integer_range(xp, x), reference.integer_encode(xp, x, **form), values, misfits]


@pytest.mark.parametrize("dtype", ["bool", "int8", "int16", "int32", "uint8", "uint16", "uint32"])
def test_integers(dtype: str) -> None:
    rng = np.random.default_rng(0)
    for n, bits in ((1, 1), (17, 31)):
        x = rng.integers(0, 2, (3, 50)).astype(dtype)
        if dtype != "bool":
            info = np.iinfo(dtype)
            low, high = max(int(info.min), -(2**bits)), min(int(info.max), 2**bits - 1)
            x = rng.integers(low, high, (3, 50), dtype=dtype, endpoint=True)
        width, digits = ln.integer_format(int(reference.integer_range(np, x)), n)
        run = functools.partial(run_integers, width=width, digits=digits, dtype=dtype)
        sums = reference.integer_encode(np, x, width=width, digits=digits) * np.uint32(n)
        found = jax.jit(functools.partial(run, jnp))(x, sums)
        for k, expected in enumerate(run(np, x, sums)):
            assert_same(found[k], np.asarray(expected), f"output {k}")
