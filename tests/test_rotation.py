"""The shared rotation: orthonormal, invertible, within range, and unbiased after rounding."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pytest

from gccomm import kernels
from gccomm import lanes as ln
from gccomm.kernels import reference
from gccomm.kernels.reference import Grid, Rotation
from gccomm.kernels.reference.rotation import parts
from tests.word_batches import Batch, Tensor

Array: TypeAlias = np.ndarray[Any, Any]
LENGTHS = (1, 63, 64, 65, 127, 320, 512, 700, 768, 960, 1000, 1023, 1024)
BOTH = pytest.mark.parametrize("rotations", [1, 2])


def rotation_of(blocks: int, rotations: int, key: int = 1) -> Rotation:
    return Rotation(reference.sign_words(np, key, key ^ 0xABCDEF, np.arange(blocks)), rotations)


def draw(blocks: int, length: int) -> Array:
    return np.random.default_rng(length).standard_normal((blocks, length)).astype(np.float32)


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (0, []),
        (1, [(0, 64)]),
        (64, [(0, 64)]),
        (65, [(0, 128)]),
        (700, [(0, 512), (512, 128), (640, 64)]),
        (768, [(0, 512), (512, 256)]),
        (961, [(0, 1024)]),
        (1024, [(0, 1024)]),
    ],
)
def test_parts_are_the_binary_digits_of_the_padded_length(
    length: int, expected: list[tuple[int, int]]
) -> None:
    assert parts(length) == expected
    assert sum(size for _, size in expected) == reference.padded(length)


def test_only_blocks_can_be_rotated() -> None:
    with pytest.raises(ValueError, match="a block of 1025 coordinates"):
        parts(1025)


@BOTH
@pytest.mark.parametrize("length", LENGTHS)
def test_energy_is_kept(length: int, rotations: int) -> None:
    x = draw(20, length)
    y = reference.rotate(np, x, rotation_of(20, rotations))
    before, after = (np.sum(a.astype(np.float64) ** 2, axis=1) for a in (x, y))
    np.testing.assert_allclose(after * 1024, before, rtol=1e-6)


@BOTH
@pytest.mark.parametrize("length", LENGTHS)
def test_rotating_back_gives_the_coordinates(length: int, rotations: int) -> None:
    x, rotation = draw(20, length), rotation_of(20, rotations)
    y = reference.rotate(np, x, rotation)
    back = reference.unrotate(np, y, rotation, length, np.zeros(20, np.uint32))
    assert back.shape == x.shape
    np.testing.assert_allclose(back, x, atol=2e-6)


def walsh_hadamard(size: int) -> Array:
    """Return the matrix that butterflies with the strides 1, 2, 4 ... make."""
    hadamard = np.ones((1, 1))
    while len(hadamard) < size:
        hadamard = np.kron([[1, 1], [1, -1]], hadamard)
    return hadamard


def matrix_of(size: int) -> Array:
    """Return the matrix of a part: of longer ones, from the product of three over runs of 256."""
    if size < 256:
        return walsh_hadamard(size)
    rows, turns = np.kron(walsh_hadamard(16), np.eye(16)), np.zeros((256, 256))
    for row in range(16):
        for place in range(16):
            turns[16 * row + place, 16 * row + (place + row) % 16] = 1
    return np.kron(walsh_hadamard(size // 256), rows @ turns @ rows)


@pytest.mark.parametrize("size", [64, 128, 256, 512, 1024])
def test_matrices_are_hadamard_matrices(size: int) -> None:
    """Of 1 and -1, with orthogonal rows: every coordinate reaches every other with the same weight."""
    matrix = matrix_of(size)
    assert (np.abs(matrix) == 1).all()
    np.testing.assert_array_equal(matrix @ matrix.T, size * np.eye(size))


@BOTH
@pytest.mark.parametrize("size", [64, 128, 256, 512, 1024])
def test_rotation_is_the_hadamard_matrix_with_signs(size: int, rotations: int) -> None:
    hadamard = matrix_of(size)
    orthonormal = hadamard / np.sqrt(size)
    x, rotation = draw(1, size), rotation_of(1, rotations)
    expected = x[0].astype(np.float64)
    for words in rotation.signs[0, :rotations]:
        bits = [(int(words[i % 32]) >> (i // 32)) & 1 for i in range(size)]
        expected = orthonormal @ (expected * (1 - 2 * np.array(bits)))
    found = reference.rotate(np, x, rotation)[0]
    np.testing.assert_allclose(found * 32.0, expected, atol=2e-6)


@BOTH
def test_parts_have_equal_magnitudes(rotations: int) -> None:
    x = np.random.default_rng(0).standard_normal((400, 960)).astype(np.float32)  # 512 + 256 + 128 + 64
    y = reference.rotate(np, x, rotation_of(400, rotations)) * 32.0
    for start, size in parts(960):
        assert np.std(y[:, start : start + size]) == pytest.approx(1, rel=0.03), size


@BOTH
@pytest.mark.parametrize("length", [64, 700, 1024])
@pytest.mark.parametrize("magnitude", [3e38, 3.4028235e38])
def test_no_intermediate_leaves_the_range(magnitude: float, length: int, rotations: int) -> None:
    signs = np.sign(draw(8, length)) * np.float32(1)
    for x in (np.ones((8, length), np.float32), signs):
        y = reference.rotate(np, x * np.float32(magnitude), rotation_of(8, rotations))
        assert np.isfinite(y).all()
        assert float(np.abs(y).max()) <= magnitude * 1.000001


def test_spread_of_a_single_coordinate() -> None:
    x = np.zeros((1, 1024), np.float32)
    x[0, 137] = 32
    y = reference.rotate(np, x, rotation_of(1, 1))
    assert (np.abs(y) == 1 / 32).all()


def test_signs_are_fair_and_differ() -> None:
    signs = reference.sign_words(np, 5, 6, np.arange(2000))
    bits = (signs[..., None] >> np.arange(32, dtype=np.uint32)) & 1
    deviation = np.abs(bits.mean(axis=0) - 0.5) * 2 * np.sqrt(2000)
    assert deviation.max() < 5
    flat = bits.reshape(2000, -1)[:, ::61].astype(np.float64) - 0.5
    products = np.abs(flat.T @ flat) * 4 / np.sqrt(2000)
    assert products[~np.eye(len(products), dtype=bool)].max() < 5.5
    assert not np.array_equal(signs, reference.sign_words(np, 6, 5, np.arange(2000)))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_maxima_of_small_and_large_blocks_are_theirs_times_a_power(dtype: str) -> None:
    x = draw(1, 1024).astype(dtype)
    rotation = rotation_of(1, 1)
    wide = dtype == "float64"
    scale, energy = reference.maxima_and_energies(np, x, None, rotation)
    mantissa, exponent = reference.split_scale(np, scale, wide)
    for power in (-120, -100, -60, 60, 100) if not wide else (-1000, -140, 140, 1000):
        scaled = np.ldexp(x, power).astype(dtype)
        found, other = reference.maxima_and_energies(np, scaled, None, rotation)
        np.testing.assert_array_equal(other, energy)
        again = reference.split_scale(np, found, wide)
        np.testing.assert_allclose(again[0], mantissa, rtol=2e-4 if power == -120 else 1e-6)
        np.testing.assert_array_equal(again[1], exponent + power)


def test_patterns_times_powers_are_rounded_up() -> None:
    rng = np.random.default_rng(0)
    patterns = rng.integers(0, 0x7F800000, 5000).astype(np.uint32)
    patterns[:500] >>= 9  # subnormal
    exponents = rng.integers(-290, 290, 5000).astype(np.int32)
    found = reference.scales.pattern_times_power(np, patterns, exponents).view(np.float32).astype(np.float64)
    exact = np.ldexp(patterns.view(np.float32).astype(np.float64), exponents)
    top = float(np.finfo(np.float32).max)
    assert (found[exact > top] == top).all()
    inside = exact <= top
    below = np.nextafter(found.astype(np.float32), np.float32(-1)).astype(np.float64)
    assert (found[inside] >= exact[inside]).all()
    assert (below[inside & (exact > 0)] < exact[inside & (exact > 0)]).all()


def round_trip(x: Array, key: int, rotations: int, **options: Any) -> Array:
    """Encode and decode one rank's blocks with a step key of their own."""
    blocks, length = x.shape
    rotation = rotation_of(blocks, rotations, key) if rotations else None
    size = reference.padded(length) if rotations else length
    hashes = reference.block_hashes(np, *reference.block_keys(np, key, key + 1, np.arange(blocks)), size)
    scales, _ = reference.maxima_and_energies(np, x, None, rotation)
    offset = options.pop("offset", 0)
    limit = ln.safe_limit(4, 1)
    sent = reference.encode(np, x, scales, hashes, 0, width=4, limit=limit, rotation=rotation, **options)
    return np.asarray(reference.decode(
        np, sent.words, scales, hashes, length=length, width=4, limit=limit, n=1,
        subtract=options.get("grid") is None, mean=False, dtype="float32",
        ratios=options.get("ratios"), rotation=rotation, offset=offset,
    ))  # fmt: skip


@pytest.mark.parametrize("rotations", [1, 2])
@pytest.mark.parametrize("length", [100, 1024])
def test_rounding_is_unbiased_over_steps(length: int, rotations: int) -> None:
    x, steps = draw(2, length), 400
    errors = np.array([round_trip(x, key, rotations) - x for key in range(steps)], np.float64)
    spread = errors.std(axis=0)
    assert spread.min() > 0.01  # 4 bits
    z = errors.mean(axis=0) / spread * np.sqrt(steps)
    assert np.abs(z).max() < 5
    assert np.mean(z**2) == pytest.approx(1, abs=0.3)


@pytest.mark.parametrize("points", [[0, 1, 2, 4, 7, 10, 12, 13, 14], [0, 3, 7], [0, 2, 5, 6, 9, 11, 13, 15]])
def test_grids_are_unbiased_and_hit_their_points(points: list[int]) -> None:
    g = points[-1]
    at = np.searchsorted(points, np.arange(g), side="right") - 1
    grid = Grid(np.array(points, np.int32)[at], np.diff(points).astype(np.int32)[at])
    x = np.random.default_rng(0).uniform(-1, 1, (2, 100)).astype(np.float32)
    x[:, 0] = 1
    ratios = np.full(2, 2 / g, np.float32)
    options = {"ratios": ratios, "grid": grid, "offset": (g % 2) << 14}
    found = np.array([round_trip(x, key, 0, **options) for key in range(600)], np.float64)
    levels = found / (2 / g) + g / 2
    np.testing.assert_allclose(levels, np.rint(levels), atol=1e-4)
    assert set(np.rint(levels).astype(int).ravel().tolist()) == set(points)
    errors = found - x
    bound = 4.5 * np.maximum(errors.std(axis=0), 0.02) / np.sqrt(len(found))
    assert (np.abs(errors.mean(axis=0)) < bound + 1e-4).all()


@pytest.mark.parametrize("low", [[], [0] * 1024])
def test_grids_have_a_bounded_number_of_steps(low: list[int]) -> None:
    table = np.array(low, np.int32)
    x, one = np.ones((1, 4), np.float32), np.ones(1, np.float32)
    with pytest.raises(ValueError, match=f"a grid of {len(low)} steps"):
        reference.quantise(
            np, x, one.view(np.uint32), x.view(np.uint32), 0, 1, ratios=one, grid=Grid(table, table)
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rotations": 3}, "rotations must be"),
        ({"rotations": -1}, "rotations must be"),
        ({"clamp": -1}, "clamp outside"),
        ({"clamp": 2147418113}, "clamp outside"),
        ({"ratios": True}, "a clamp or a grid"),
        ({"grid": 3}, "a grid needs ratios"),
        ({"grid": 0, "ratios": True}, "1 to 1023 steps"),
        ({"grid": 1024, "ratios": True}, "1 to 1023 steps"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    batch = Batch([Tensor(np.zeros(4, np.float32), "float32", 4)], lambda _, length: ln.words(8, length))
    scales, ratios = np.zeros(1, np.uint32), np.ones(1, np.float32)
    if options.get("ratios"):
        options = {**options, "ratios": kernels.address(ratios)}
    table = np.array([options.get("grid", 0), 0, 1], np.int32)
    if "grid" in options:
        options = {**options, "grid": kernels.address(table)}
    where = kernels.address(scales), kernels.address(batch.words), 0
    with pytest.raises(ValueError, match=message):
        kernels.encode(kernels.address(batch.table), 1, 0, 1, *where, 8, 100, 0, **options)


@pytest.mark.parametrize("rotations", [-1, 3])
def test_wrong_numbers_of_rotations_are_refused(rotations: int) -> None:
    batch = Batch([Tensor(np.zeros(4, np.float32), "float32", 4)], lambda _, length: ln.words(8, length))
    head, out = (kernels.address(batch.table), 1, 0, 1), kernels.address(np.zeros(1, np.uint32))
    with pytest.raises(ValueError, match="rotations must be"):
        kernels.maxima(*head, out, 0, rotations)
    with pytest.raises(ValueError, match="rotations must be"):
        kernels.decode(*head, out, out, 0, 8, 100, 1, True, False, False, rotations=rotations)
