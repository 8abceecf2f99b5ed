"""The kernel that joins the arrays of ranks, and the flags by which ranks meet."""

from __future__ import annotations

import threading
import time

import ml_dtypes
import numpy as np
import pytest

from gccomm import kernels
from gccomm.kernels import JOININGS
from tests.kernel_batches import Array, level

__all__ = ["level"]

DTYPES = {
    "words": np.uint32,
    "maximum": np.uint32,
    "float32": np.float32,
    "float64": np.float64,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
}
COUNTS = (0, 1, 7, 15, 16, 17, 63, 64, 65, 1000, 4099)


def draw(kind: str, ranks: int, count: int, offset: int) -> list[Array]:
    """Return an array a rank that begins ``offset`` elements behind a line of the cache."""
    rng, dtype = np.random.default_rng([ranks, count, offset]), np.dtype(DTYPES[kind])
    made = []
    for _ in range(ranks):
        room = kernels.pool_empty((count + offset) * dtype.itemsize).view(dtype)
        room[:] = rng.integers(0, 2**32, room.size, np.uint32) if dtype == np.uint32 else 0
        if dtype != np.uint32:
            room[:] = (rng.standard_normal(room.size) * np.exp(rng.standard_normal(room.size))).astype(dtype)
        made.append(room[offset:])
    return made


def reference(kind: str, parts: list[Array]) -> Array:
    """Join in order; 16-bit floats in float32, rounded once."""
    dtype = parts[0].dtype
    wide = [x.astype(np.float32) if dtype.itemsize == 2 else x for x in parts]
    total = wide[0].copy()
    for x in wide[1:]:
        total = np.maximum(total, x) if kind == "maximum" else total + x
    return np.asarray(total.astype(dtype))


def join(kind: str, parts: list[Array], out: Array, stream: bool = False) -> None:
    table = np.array([kernels.address(x.view(np.uint8)) for x in parts], np.uint64)
    where = kernels.address(out.view(np.uint8))
    kernels.join_parts(kernels.address(table), len(parts), where, out.size, JOININGS[kind], stream)


@pytest.mark.parametrize("kind", JOININGS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("offset", [0, 1, 5])
def test_parts_are_joined_in_order(level: str, kind: str, ranks: int, offset: int) -> None:
    for count in COUNTS:
        parts = draw(kind, ranks, count, offset)
        for stream in (False, True):
            around = np.zeros(count + offset + 40, DTYPES[kind])
            join(kind, parts, around[offset : offset + count], stream)
            assert around[offset : offset + count].tobytes() == reference(kind, parts).tobytes()
            assert not around[:offset].any()
            assert not around[offset + count :].any()


@pytest.mark.parametrize("kind", JOININGS)
@pytest.mark.parametrize("own", [0, 2])
def test_the_result_may_replace_a_part(level: str, kind: str, own: int) -> None:
    parts = draw(kind, 3, 1003, 3)
    expected = reference(kind, parts)
    join(kind, parts, parts[own])
    assert parts[own].tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16", "float16"])
def test_inf_and_nan_come_through(level: str, kind: str) -> None:
    a = np.array([np.inf, np.inf, np.nan, 1, 1e-8], np.float64).astype(DTYPES[kind])
    b = np.array([1, -np.inf, 1, np.nan, 1e-8], np.float64).astype(DTYPES[kind])
    out = np.zeros(5, DTYPES[kind])
    join(kind, [a, b], out)
    found = out.astype(np.float64)
    assert found[0] == np.inf
    assert np.isnan(found[1:4]).all()
    assert out[4] == (a[4].astype(np.float64) + b[4].astype(np.float64)).astype(DTYPES[kind])


def test_bad_arguments_are_refused() -> None:
    x = np.zeros(4, np.uint32)
    table = np.array([kernels.address(x)], np.uint64)
    for ranks, count, kind in ((0, 4, 0), (-1, 4, 0), (1, -1, 0), (1, 4, 6), (1, 4, -1)):
        with pytest.raises(ValueError, match=r"ranks|kind"):
            kernels.join_parts(kernels.address(table), ranks, kernels.address(x), count, kind)


def test_flags_are_seen_once_all_are_up() -> None:
    flags = np.zeros(48, np.uint32)
    watched = np.array([kernels.address(flags[at:]) for at in (0, 16, 32)], np.uint64)

    def come(number: int, spins: int = 5) -> bool:
        return kernels.await_flags(kernels.address(watched), 3, number, spins)

    assert come(0)
    assert not come(1)
    for at in (0, 16, 32):
        assert not come(1)
        kernels.raise_flag(kernels.address(flags[at:]), 1 + (at > 0))
    assert come(1)
    assert not come(2)
    flags[:] = 0xFFFFFFFF
    assert come(0xFFFFFFFF)
    assert not come(3)  # mod 2^32
    flags[:] = 2
    assert come(0xFFFFFFFF)


def test_what_was_written_before_a_flag_is_seen_behind_it() -> None:
    flag, data, seen = np.zeros(1, np.uint32), np.zeros(100_000, np.uint32), []
    watched = np.array([kernels.address(flag)], np.uint64)

    def watch() -> None:
        for number in range(1, 200):
            while not kernels.await_flags(kernels.address(watched), 1, number, 1000):
                time.sleep(0)
            seen.append(bool((data >= number).all()))

    thread = threading.Thread(target=watch)
    thread.start()
    for number in range(1, 200):
        data[:] = number
        kernels.raise_flag(kernels.address(flag), number)
    thread.join()
    assert all(seen)
    assert len(seen) == 199
