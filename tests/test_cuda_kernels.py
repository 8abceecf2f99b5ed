"""The CUDA kernels, run on the CPU, give the same words and results, bit for bit, as the reference.

The cases are those of the CPU's kernels; the device's take their place.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gccomm import kernels
from gccomm import lanes as ln
from gccomm.kernels.cuda.device import DeviceKernels
from tests import cuda_sanitized
from tests import test_word_equality as words
from tests import test_word_equality_rotations as rotations
from tests.cuda_on_cpu import SCHEDULES, InPlace, OnCpu, Text, build, kernels_on_cpu
from tests.kernel_batches import Part, lane_batch
from tests.word_batches import FLOATS, INTEGERS, Batch, make


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> DeviceKernels:
    """Put the device's kernels into the cases; threads run in an order drawn at random, or the one given."""
    found = kernels_on_cpu(getattr(request, "param", "random"))
    for module in (words, rotations):
        monkeypatch.setattr(module, "kernels", InPlace(found))
        monkeypatch.setattr(module, "every_level", _once)
    return found


def _once() -> Iterator[str]:
    yield "device"


@pytest.mark.parametrize("width", ln.WIDTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_lane_codec(device: DeviceKernels, dtype: str, width: int) -> None:
    words.test_lane_codec(dtype, width)


def test_lane_codec_on_batches_in_pieces(device: DeviceKernels) -> None:
    words.test_lane_codec_on_batches_in_pieces()


def test_absent_inputs_and_empty_tensors(device: DeviceKernels) -> None:
    words.test_absent_input_counts_as_zeros()
    words.test_empty_tensors_leave_no_trace()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("turns", [0, 1, 2])
def test_rotations_on_all_sizes(device: DeviceKernels, turns: int, dtype: str) -> None:
    rotations.test_all_sizes(turns, dtype)


@pytest.mark.parametrize("width", ln.WIDTHS)
@pytest.mark.parametrize("turns", [0, 1, 2])
def test_rotations_in_all_widths(device: DeviceKernels, turns: int, width: int) -> None:
    rotations.test_all_widths(turns, width)


@pytest.mark.parametrize("device", SCHEDULES, indirect=True)
def test_rotations_on_batches_in_pieces(device: DeviceKernels) -> None:
    rotations.test_batches_in_pieces()


@pytest.mark.parametrize("magnitude", [3.4028235e38, 1e38, 1e-45, 1e-38, 2.0**-100, 2.0**-84, -0.0])
@pytest.mark.parametrize("turns", [0, 1, 2])
def test_ends_of_the_range(device: DeviceKernels, turns: int, magnitude: float) -> None:
    rotations.test_ends_of_the_range(magnitude, turns)


@pytest.mark.parametrize("dtype", FLOATS)
def test_exact_words(device: DeviceKernels, dtype: str) -> None:
    words.test_exact_words(dtype)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers(device: DeviceKernels, dtype: str) -> None:
    words.test_integers(dtype)


@pytest.mark.parametrize("wire", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_float_wires(device: DeviceKernels, dtype: str, wire: str) -> None:
    words.test_float_wires(dtype, wire)


def test_floats_of_several_segments_from_any_block_on(device: DeviceKernels) -> None:
    rng = np.random.default_rng(4)
    tensors = [make("float32", size, rng) for size in (1500, 40, 2100)]
    batch = Batch(tensors, lambda _tensor, length: -(-length // 4))  # words that are no coordinates
    sizes = [tensor.x.size for tensor in tensors]
    sent, again = np.zeros(sum(sizes), np.float32), np.zeros(sum(sizes), np.float32)
    head, code = (kernels.address(batch.table), len(batch.table)), kernels.DTYPE_CODES["float32"]
    kernels.float_encode(*head, 0, batch.blocks, kernels.address(sent), code)
    for lo, hi, at in ((0, 2, 0), (2, 4, 1500), (4, 6, 1540 + 1024)):
        device.float_encode(*head, lo, hi, kernels.address(again) + 4 * at, code)
    assert again[: 1540 + 1024].tobytes() == np.r_[sent[:1540], again[1540 : 1540 + 1024]].tobytes()
    assert again[:1540].tobytes() == sent[:1540].tobytes()


def test_one_block_of_a_tensor_and_nothing_around_it() -> None:
    device, x = kernels_on_cpu(), np.random.default_rng(1).standard_normal(5000).astype(np.float32)
    part = Part(x, start=2, count=2)
    batch = lane_batch(6, part)
    scales, sums = np.full(2, 0x40800000, np.uint32), np.arange(2 * 205, dtype=np.uint32)
    where = kernels.address(scales), kernels.address(sums), 0
    for dithers in (0, 1):
        device.decode(*batch.head, 0, 2, *where, 6, 1000, 3, True, False, False, dithers=dithers)
        assert part.untouched()
        found = part.out.copy()
        kernels.decode(*batch.head, 0, 2, *where, 6, 1000, 3, True, False, False, dithers=dithers)
        assert found.tobytes() == part.out.tobytes()


def test_bad_arguments_are_refused() -> None:
    device, batch = kernels_on_cpu(), lane_batch(8, Part(np.zeros(5, np.float32)))
    x, grid = np.zeros(2, np.float32), np.array([1024], np.int32)
    at = (*batch.head, 0, 1, kernels.address(x), kernels.address(x), 0)
    for message, arguments in {
        "width": (7, 1000, 0),
        "limit": (8, 0, 0),
        "clamp": (8, 1000, 0, 0, -1),
        "with ratios a clamp": (8, 1000, 0, 0, 0, kernels.address(x)),
        "rotations": (8, 1000, 0, 0, 0, 0, 3),
        "grid needs": (8, 1000, 0, 0, 0, 0, 0, 0, False, kernels.address(grid)),
        "1 to 1023": (8, 1000, 0, 0, 0, kernels.address(x), 0, 0, False, kernels.address(grid)),
    }.items():
        for found in (device, kernels):
            with pytest.raises(ValueError, match=message):
                found.encode(*at, *arguments)
    with pytest.raises(ValueError, match="n = 0"):
        device.decode(*at, 8, 1000, 0, True, False, False)
    with pytest.raises(ValueError, match="wire"):
        device.float_encode(*batch.head, 0, 1, kernels.address(x), 4)
    with pytest.raises(ValueError, match="kept"):
        device.maxima(*batch.head, 0, 1, kernels.address(x), kept=kernels.address(x))


# The shim itself

TOYS = """
#define KERNEL extern "C" __global__ void
KERNEL good(unsigned* x) {
    __shared__ unsigned held[128];
    const unsigned t = threadIdx.x;
    held[t] = x[t];
    __syncthreads();
    x[t] = held[127 - t] + __shfl_xor_sync(0xFFFFFFFFu, t, 5);
}
KERNEL lacks_a_barrier(unsigned* x) {
    __shared__ unsigned held[128];
    held[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = held[127 - threadIdx.x] + (threadIdx.x ^ 5);
}
KERNEL half_a_block_waits(unsigned* x) {
    if (threadIdx.x < 64) __syncthreads();
    x[0] = 1;
}
KERNEL half_a_warp_shuffles(unsigned* x) {
    if (threadIdx.x % 32 < 16) x[0] = __shfl_xor_sync(0xFFFFFFFFu, x[0], 1);
    __syncthreads();
}
"""
TOY_NAMES = ("good", "lacks_a_barrier", "half_a_block_waits", "half_a_warp_shuffles")


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("toys"), text=Text(TOYS, TOY_NAMES))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_shim_finds_what_a_device_would_make_of_bad_kernels(toys: Path, schedule: str) -> None:
    shim, before = OnCpu(toys, schedule), np.arange(128, dtype=np.uint32) * 3
    expected = before[::-1] + (np.arange(128, dtype=np.uint32) ^ 5)

    def run(name: str) -> Any:
        x = before.copy()
        shim.run(name, 1, [np.uint64(x.ctypes.data)])
        return x

    assert run("good").tolist() == expected.tolist()
    assert run("lacks_a_barrier").tolist() != expected.tolist()
    for name in ("half_a_block_waits", "half_a_warp_shuffles"):
        with pytest.raises(RuntimeError, match="others never reach"):
            run(name)
    with pytest.raises(RuntimeError, match="no such kernel"):
        run("none")


def test_under_sanitizers(tmp_path: Path) -> None:
    environment = cuda_sanitized.environment()
    if environment is None:
        pytest.skip("the compiler has no address sanitizer")
    done = subprocess.run(
        cuda_sanitized.command(str(tmp_path)),
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout.split() == ["overrun", "found", "cases", "passed"]
