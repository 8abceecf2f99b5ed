"""What surrounds the native kernels: levels, arguments, floating-point mode, addresses, pool of results."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gccomm import kernels
from tests.kernel_batches import Array, Part, lane_batch, level, normal

__all__ = ["level"]


def test_levels_can_be_chosen() -> None:
    assert kernels.isa() in kernels.isas()
    with pytest.raises(ValueError, match="there are: "):
        kernels.set_isa("x86-64-v9")
    script = "from gccomm.kernels import _native; print(_native.isa())"
    for name in kernels.isas():
        child = {**os.environ, "GCCOMM_ISA": name}
        run = subprocess.run(
            [sys.executable, "-c", script], env=child, capture_output=True, text=True, check=True
        )
        assert run.stdout.strip() == name


@pytest.mark.parametrize(
    ("width", "limit", "n"), [(7, 100, 1), (0, 100, 1), (8, 0, 1), (8, 2147418113, 1), (8, 100, 0)]
)
def test_bad_arguments_are_refused(width: int, limit: int, n: int) -> None:
    batch = lane_batch(8, Part(normal(10)))
    scales, words = batch.maxima(), np.zeros(100, dtype=np.uint32)
    where = (kernels.address(scales), kernels.address(words), 0)
    with pytest.raises(ValueError, match=r"lane width|limit|outside"):
        kernels.decode(*batch.head, 0, 1, *where, width, limit, n, True, False, False)


@pytest.mark.skipif(
    platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc", reason="glibc's fenv_t"
)
def test_the_callers_floating_point_mode_does_not_matter(level: str) -> None:
    libm = ctypes.CDLL("libm.so.6")
    x = (normal(3000) * np.float32(1e-41)).astype(np.float32)
    part = Part(x)
    batch = lane_batch(8, part)

    def bits() -> list[bytes]:
        scales = batch.maxima()
        words = batch.encode(scales, 8, 1 << 22)
        batch.decode(scales, words, 8, 1 << 22)
        return [scales.tobytes(), words.tobytes(), part.rest.tobytes(), part.out.tobytes()]

    expected = bits()
    saved = (ctypes.c_uint32 * 8)()  # the x87 state, then MXCSR
    libm.fegetenv(saved)
    changed = (ctypes.c_uint32 * 8)(*saved)
    changed[7] |= 0x8040 | 0x4000  # flush subnormals to zero, both ways; round upward
    libm.fesetenv(changed)
    try:
        found = bits()
        after = (ctypes.c_uint32 * 8)()
        libm.fegetenv(after)
    finally:
        libm.fesetenv(saved)
    assert found == expected
    assert after[7] & 0xFFC0 == changed[7] & 0xFFC0


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(3, dtype=np.float32),
        np.zeros((), dtype=np.float64),
        np.zeros((0, 4), dtype=np.int8),
        np.zeros(5, dtype=">f4"),
        np.zeros(4, dtype=ml_dtypes.bfloat16),
        np.broadcast_to(np.float32(1), (3,)),
        np.arange(10)[::-2],
        np.zeros(2, dtype="datetime64[s]"),
    ],
    ids=lambda a: f"{a.dtype}-{a.shape}",
)
def test_address(array: Array) -> None:
    assert kernels.address(array) == array.__array_interface__["data"][0]


@pytest.mark.parametrize("thing", [None, 3, [1.0], b"abc", np.float32(1)])
def test_address_refuses_what_is_no_array(thing: Any) -> None:
    with pytest.raises(TypeError, match="NumPy array"):
        kernels.address(thing)


@pytest.fixture
def trimmed() -> Iterator[None]:
    gc.collect()
    kernels.pool_trim()
    yield
    kernels.pool_trim()


@pytest.mark.parametrize("nbytes", [0, 1, 63, 4096, 100_000, (4 << 20) - 1, 4 << 20, (6 << 20) + 1])
def test_pool_memory_is_aligned_and_writable(trimmed: None, nbytes: int) -> None:
    array = kernels.pool_empty(nbytes)
    assert array.shape == (nbytes,)
    assert array.dtype == np.uint8
    assert kernels.address(array) % (2 << 20 if nbytes >= 4 << 20 else 64) == 0
    array[:] = 255
    assert array.sum() == 255 * nbytes


def test_pool_takes_memory_back_with_the_last_view(trimmed: None) -> None:
    start = kernels.pool_stats()
    array = kernels.pool_empty(1 << 20)
    where, view = kernels.address(array), array.view(np.float32)[10:]
    del array
    assert kernels.pool_stats()["outstanding"] == start["outstanding"] + (1 << 20)
    del view
    assert kernels.pool_stats() == {
        **kernels.pool_stats(),
        "outstanding": start["outstanding"],
        "free": 1 << 20,
    }
    again = kernels.pool_empty((1 << 20) - 100)  # the same size class
    assert kernels.address(again) == where
    kernels.pool_trim()
    assert kernels.pool_stats()["free"] == 0


def test_pool_keeps_a_bounded_amount(trimmed: None) -> None:
    for nbytes in range(1 << 20, 40 << 20, 1 << 20):
        array = kernels.pool_empty(nbytes)
        del array
        stats = kernels.pool_stats()
        assert stats["outstanding"] + stats["free"] <= max(64 << 20, 1.5 * stats["high_water"])


def test_pool_refuses_impossible_sizes() -> None:
    with pytest.raises(ValueError, match="negative"):
        kernels.pool_empty(-1)
    before = kernels.pool_stats()["outstanding"]
    for nbytes in (1 << 62, (1 << 63) - 1):
        with pytest.raises(MemoryError):
            kernels.pool_empty(nbytes)
    assert kernels.pool_stats()["outstanding"] == before


def test_pool_is_thread_safe(trimmed: None) -> None:
    start, wrong = kernels.pool_stats()["outstanding"], []

    def churn(number: int) -> None:
        rng = np.random.default_rng(number)
        held: list[Array] = []
        for _ in range(300):
            array = kernels.pool_empty(int(rng.integers(1, 1 << 16)))
            array[:] = number
            held.append(array)
            if len(held) > 5:
                old = held.pop(int(rng.integers(len(held))))
                if not (old == number).all():
                    wrong.append(number)

    threads = [threading.Thread(target=churn, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert kernels.pool_stats()["outstanding"] == start


def test_pool_arrays_may_outlive_the_interpreter() -> None:
    script = (
        "import sys, atexit; from gccomm import kernels; import numpy as np\n"
        "sys.kept = kernels.pool_empty(5 << 20).view(np.float32)\n"
        "np.kept = kernels.pool_empty(1000)\n"
        "cycle = [kernels.pool_empty(77)]; cycle.append(cycle)\n"
        "atexit.register(lambda a: a.fill(1), kernels.pool_empty(88))\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
