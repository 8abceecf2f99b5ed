"""Keys of the shared noise: stable for ever, distinct, and made of invertible steps."""

from __future__ import annotations

import numpy as np
import pytest

from gccomm import noise

MASK = noise.MASK32


@pytest.mark.parametrize(
    ("word", "mixed"),
    [(0, 0), (1, 0x688990C0), (2, 0xD1132181), (0xFFFFFFFF, 0x6768824A), (0x12345678, 0xF5E71C96)],
)
def test_fmix_is_stable(word: int, mixed: int) -> None:
    assert noise.fmix(word) == mixed
    assert noise.fmix(word + (5 << 32)) == mixed


def test_fmix_is_a_bijection() -> None:
    def undo(x: int) -> int:
        x ^= x >> 16
        x = x * pow(0x846CA68B, -1, 1 << 32) & MASK
        x ^= (x >> 15) ^ (x >> 30)
        x = x * pow(0x7FEB352D, -1, 1 << 32) & MASK
        return x ^ (x >> 16)

    for word in range(0, 1 << 32, 98_765_431):
        assert undo(noise.fmix(word)) == word


@pytest.mark.parametrize(
    ("key", "seed", "words"),
    [
        ("", 0, (0x5BEA08CA, 0x18CC49CA)),
        ("layer/0/w", 0, (0x2E7AB80E, 0xB2069A1A)),
        ("layer/0/w", -1, (0x1E397135, 0x47E76D6B)),
        ("größe", 1 << 63, (0x1C6CB8F2, 0x183DD8EF)),
    ],
)
def test_tensor_key_is_stable(key: str, seed: int, words: tuple[int, int]) -> None:
    assert noise.tensor_key(key, seed) == words


def test_seed_counts_mod_2_to_the_64() -> None:
    assert noise.tensor_key("w", -1) == noise.tensor_key("w", (1 << 64) - 1)
    assert noise.tensor_key("w", 1 << 64) == noise.tensor_key("w", 0)
    assert noise.tensor_key("w", 1 << 32) != noise.tensor_key("w", 0)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (0, (0x8B8696AE, 0x48EA657C)),
        (1, (0x7F7050B9, 0xC7CA7E30)),
        (1 << 32, (0x8B8696AE, 0x883929FC)),
        ((1 << 63) + 5, (0x55C22149, 0x451485F9)),
    ],
)
def test_step_key_is_stable(step: int, words: tuple[int, int]) -> None:
    assert noise.step_key(0x2E7AB80E, 0xB2069A1A, step) == words


@pytest.mark.parametrize("count", [0, 1, 7, 8, 161])
@pytest.mark.parametrize("step", [0, 1, 77, 2**31, 2**32 - 1, 2**32 + 5, 2**63, -1])
def test_many_keys_at_once_are_those_one_by_one(count: int, step: int) -> None:
    keys = np.random.default_rng(count).integers(0, 2**32, (count, 2), np.uint32)
    expected = [noise.step_key(a, b, step) for a, b in keys.tolist()]
    found = noise.step_keys(keys, step)
    assert found.dtype == np.uint32
    np.testing.assert_array_equal(found, np.array(expected, np.uint32).reshape(-1, 2))


def test_keys_of_many_tensors_and_steps_are_distinct() -> None:
    tensors = {noise.tensor_key(f"layer/{layer}/{part}", 0) for layer in range(500) for part in "wb"}
    assert len(tensors) == 1000
    a, b = noise.tensor_key("w", 0)
    steps = [*range(20_000), *(1 << k for k in range(32, 64))]
    assert len({noise.step_key(a, b, step) for step in steps}) == len(steps)
    t0 = {noise.step_key(a, b, step)[0] for step in range(20_000)}
    assert len(t0) == 20_000
