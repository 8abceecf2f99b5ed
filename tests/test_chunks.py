"""Chunks of whole tensors: energies of the CPU's and the device's kernels are the reference's, bit for bit;
what a device takes out of a tensor and puts back is what NumPy would.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import gccomm
from gccomm import kernels, testing
from gccomm.kernels import reference
from gccomm.kernels.cuda.device import DeviceKernels
from tests.cuda_on_cpu import SCHEDULES, OnCpu, kernels_on_cpu
from tests.word_batches import FLOATS, Array, Tensor, every_level, make

SIZES = (1, 7, 31, 32, 33, 64, 100, 1000, 1024, 1500, 5000, 65536)
CASES = [
    (1, 64),
    (63, 64),
    (64, 64),
    (2600, 64),
    (2600, 100),
    (2048, 32),
    (70_000, 65536),
    (3000, 1),
    (999, 7),
]


def table(tensor: Tensor, out: Array | None = None, rest: Array | None = None) -> Array:
    found = np.zeros(1, kernels.SEGMENT)
    found["src"], found["size"], found["row"] = kernels.address(tensor.x), tensor.x.size, tensor.row
    found["nblocks"], found["dtype"] = len(tensor.lengths()), kernels.DTYPE_CODES[tensor.dtype]
    for field, array in (("res_in", tensor.residual), ("dst", out), ("res_out", rest)):
        found[field] = 0 if array is None else kernels.address(array)
    return found


def values(tensor: Tensor) -> Array:
    """Return coordinates plus residuals as float32 or float64, by the kernel that converts floats."""
    found = np.zeros(tensor.x.size, tensor.wide)
    head = table(tensor)
    where = kernels.address(head), 1, 0, len(tensor.lengths()), kernels.address(found)
    kernels.float_encode(*where, kernels.DTYPE_CODES[str(found.dtype)])
    return found


def energies(used: Any, tensor: Tensor, size: int, power: int) -> Array:
    found, head = np.full(-(-tensor.x.size // size), -1.0), table(tensor)
    used.chunk_energies(kernels.address(head), size, power, kernels.address(found))
    return found


def finite(dtype: str, size: int, rng: np.random.Generator, row: int = 0) -> Tensor:
    """Make a tensor without infinities: magnitudes of many blocks."""
    x = rng.standard_normal(size) * np.exp2(rng.integers(-12, 12, size // 100 + 1))[np.arange(size) // 100]
    found = x.astype(ml_dtypes.bfloat16).view(np.uint16) if dtype == "bfloat16" else x.astype(dtype)
    rest = rng.standard_normal(size).astype("f8" if dtype == "float64" else "f4")
    return Tensor(found, dtype, row or size, rest if rng.random() < 0.5 else None)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_energies_are_those_of_the_reference(dtype: str, size: int) -> None:
    rng = np.random.default_rng([size, FLOATS.index(dtype)])
    device = kernels_on_cpu("random")
    for tensor in (
        make(dtype, 5003, rng),  # all magnitudes, infinities and NaNs
        make(dtype, 4200, rng, row=700),
        finite(dtype, 7000, rng),
        finite(dtype, size, rng),
        finite(dtype, 1, rng),
    ):
        for power in (0, -600) if dtype == "float64" else (0,):
            want = reference.chunk_energies(values(tensor), size, power)
            for _ in every_level():
                np.testing.assert_array_equal(bits(energies(kernels, tensor, size, power)), bits(want))
            np.testing.assert_array_equal(bits(energies(device, tensor, size, power)), bits(want))


def bits(x: Array) -> Array:
    """Return patterns, those of NaNs made equal: their signs are the processor's."""
    return np.where(np.isnan(x), np.float64(np.nan), x).view(np.uint64)


def test_energies_are_sums_of_squares() -> None:
    x = np.random.default_rng(0).standard_normal(10_000)
    want = (np.r_[x, np.zeros(96 * 105 - 10_000)].reshape(-1, 96) ** 2).sum(axis=1)
    np.testing.assert_allclose(reference.chunk_energies(x, 96), want, rtol=1e-14)
    np.testing.assert_allclose(reference.chunk_energies(x, 96, 3), 64 * want, rtol=1e-14)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_chunks_are_taken_and_put(dtype: str, schedule: str) -> None:
    rng = np.random.default_rng(FLOATS.index(dtype))
    device = kernels_on_cpu(schedule)
    for length, size in CASES:
        tensor = finite(dtype, length, rng)
        count = -(-length // size)
        for chosen in (np.arange(count), np.flatnonzero(rng.random(count) < 0.4), np.array([count - 1])):
            for power in (0, 5, -70):
                one_case(device, tensor, size, chosen.astype(np.int64), power, n=int(rng.integers(1, 5)))


def one_case(device: DeviceKernels, tensor: Tensor, size: int, chosen: Array, power: int, n: int) -> None:
    """Compare with NumPy, on one tensor."""
    v = values(tensor)
    mask = np.isin(np.arange(v.size) // size, chosen)
    out, rest = np.full(tensor.x.size + 2, 77, tensor.x.dtype), np.full(v.size + 2, 77, v.dtype)
    head = np.repeat(table(tensor), 2)
    head[1:] = table(tensor, out[1:], rest[1:])
    taken = np.full(int(mask.sum()) + 1, 77, v.dtype)
    where = kernels.address(head), size
    device.chunk_take(*where, -power, kernels.address(chosen), len(chosen), kernels.address(taken))
    np.testing.assert_array_equal(taken[:-1], np.ldexp(v[mask], -power))
    assert taken[-1] == 77
    places = np.full(-(-v.size // size), -1, np.int32)
    places[chosen] = np.arange(len(chosen), dtype=np.int32)
    sums, left = taken[:-1] * 2, taken[:-1] / 3
    arrays = (kernels.address(x) for x in (places, sums, left))
    device.chunk_put(*where, power, *arrays, len(sums), n)
    want = np.zeros(v.size, v.dtype if power == 0 else np.float64)
    want[mask] = sums / v.dtype.type(n) if power == 0 else np.ldexp(sums.astype(np.float64) / n, power)
    with np.errstate(over="ignore"):
        kind = ml_dtypes.bfloat16 if tensor.dtype == "bfloat16" else tensor.dtype
        np.testing.assert_array_equal(out[1:-1].view(kind), want.astype(kind))
    v[mask] = np.ldexp(left, power)
    np.testing.assert_array_equal(rest[1:-1], v)
    assert {int(out[0]), int(out[-1]), int(rest[0]), int(rest[-1])} == {77}


def test_bad_sizes_are_refused() -> None:
    tensor, out = finite("float32", 10, np.random.default_rng(0)), np.zeros(10)
    head = table(tensor)
    for used in (kernels, kernels_on_cpu()):
        with pytest.raises(ValueError, match="chunks"):
            used.chunk_energies(kernels.address(head), 0, 0, kernels.address(out))


# The codec on a device


@pytest.mark.parametrize("values", ["bf16", "lanes"])
def test_training_with_residuals_is_the_same_on_a_device(
    values: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def steps() -> list[Any]:
        def program(comm: gccomm.Communicator) -> Any:
            reducer = gccomm.Reducer(f"topkc:values={values},chunk=50", op="mean", exact_below=0)
            for step in range(3):
                rng = np.random.default_rng([step, comm.rank])
                tree = {
                    "f": (rng.standard_normal(3001) * 10.0 ** rng.integers(-3, 3)).astype(np.float32),
                    "d": rng.standard_normal((3, 700)) * 1e300,
                    "h": rng.standard_normal(2049).astype(np.float16),
                    "b": rng.standard_normal(1500).astype(ml_dtypes.bfloat16),
                    "tiny": (rng.standard_normal(1100) * 1e-42).astype(np.float32),
                    "zero": np.zeros(300, np.float32),
                }
                found = reducer(tree)
            return found, reducer.state_dict()["residuals"]

        return testing.run(program, 1)  # the shim knows one thread

    expected = steps()
    device = kernels_on_cpu("random")
    monkeypatch.setattr(kernels, "of_device", lambda _device: device)
    for (want, kept), (found, rest) in zip(expected, steps(), strict=True):
        for key in want:
            assert found[key].tobytes() == want[key].tobytes(), key
            assert rest[key].tobytes() == kept[key].tobytes(), key


def test_no_whole_tensor_comes_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    device = kernels_on_cpu()
    launcher = device.launcher
    assert isinstance(launcher, OnCpu)
    moved = {"upload": 0, "download": 0}
    upload, download = launcher.upload, launcher.download

    def up(to: int, source: Any) -> None:
        moved["upload"] += source.nbytes
        upload(to, source)

    def down(to: Any, source: int) -> None:
        moved["download"] += to.nbytes
        download(to, source)

    monkeypatch.setattr(launcher, "upload", up)
    monkeypatch.setattr(launcher, "download", down)
    monkeypatch.setattr(kernels, "of_device", lambda _device: device)
    x = np.random.default_rng(0).standard_normal(1 << 18).astype(np.float32)
    testing.simulate([x], "topkc", exact_below=0)
    kernels_used = set(launcher.launches)
    assert {"gccomm_chunk_energies", "gccomm_chunk_take", "gccomm_chunk_put"} <= kernels_used
    # A tenth of it, in bfloat16 too, and 8 bytes a chunk; back, what rounding left, and 4 bytes a chunk, too.
    assert moved["download"] < 0.2 * x.nbytes
    assert moved["upload"] < 0.4 * x.nbytes
