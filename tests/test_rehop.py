"""``rehop``: the whole way by the specification, its variance, and what must not depend on n."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gccomm_launch import accuracy_families as families

import gccomm
from gccomm import testing
from gccomm.codecs.rehop import _AGAIN
from gccomm.errors import BackendError, NegotiationError, NonFiniteError
from gccomm.kernels import reference
from gccomm.kernels.reference import Rotation
from gccomm.lanes import rank_shift
from gccomm.noise import private_keys, step_key, tensor_key

Array = np.ndarray[Any, Any]


def gaussian(n: int, blocks: int = 64, seed: int = 0) -> list[Array]:
    rng = np.random.default_rng([seed, n])
    return [rng.standard_normal(1024 * blocks, dtype=np.float32) for _ in range(n)]


def vnmse(y: Array, xs: list[Array]) -> float:
    exact = np.sum(xs, axis=0, dtype=np.float64)
    return float(((y - exact) ** 2).sum() / (exact**2).sum())


class Specified:
    """What the reference does with arrays of whole blocks, all ranks' together."""

    def __init__(self, n: int, width: int, seed: int, blocks: int, rotations: int = 1) -> None:
        self.n, self.width, self.blocks = n, width, blocks
        self.limit = ((1 << (width - 1)) - 1) << 16
        self.key = step_key(*tensor_key("", seed), 0)
        numbers = np.arange(blocks)
        self.rotation = Rotation(reference.sign_words(np, *self.key, numbers), rotations)
        again = private_keys(np.array([self.key], np.uint32), _AGAIN)[0].tolist()
        self.hashes, self.again = (
            reference.block_hashes(np, *reference.block_keys(np, *key, numbers), 1024)
            for key in (self.key, again)
        )

    def steps(self, xs: list[Array]) -> tuple[Array, Array, Array]:
        """Return each rank's words, its scales, and the steps that these stand for."""
        words, scales = [], []
        for rank, x in enumerate(xs):
            rows = x.reshape(-1, 1024)
            own, _ = reference.maxima_and_energies(np, rows, None, self.rotation)
            sent = reference.encode(
                np, rows, own, self.hashes, rank_shift(rank, self.n), width=self.width, limit=self.limit,
                rotation=self.rotation, subtract=True,
            )  # fmt: skip
            words.append(sent.words)
            scales.append(own)
        all_scales = np.array(scales)
        return np.array(words), all_scales, all_scales.view(np.float32) * (65536 / self.limit)

    def fold(self, words: Array, scales: Array) -> tuple[Array, Array, int]:
        down = (self.n - 1).bit_length() + 1
        shifts = np.array([rank_shift(r, self.n) for r in range(self.n)], np.uint32)
        return *reference.hop_fold(
            words, scales, self.hashes, self.again, shifts,
            width=self.width, limit=self.limit, down=down, wide=False,
        ), down  # fmt: skip

    def reduce(self, xs: list[Array], mean: bool) -> Array:
        words, scales, _ = self.steps(xs)
        sums, found, down = self.fold(words, scales)
        q = reference.unpack(np, sums, self.width, 1024)
        centred = reference.centred_sums(np, q, self.again, n=1, subtract=True)
        ratios = np.full(self.blocks, 2.0**down * 65536 / self.limit, np.float32)
        y = reference.dequantise(
            np, centred, found, limit=1, n=self.n, mean=mean, dtype="float32", ratios=ratios,
            rotation=self.rotation, length=1024,
        )  # fmt: skip
        return np.asarray(y).reshape(-1)


@pytest.mark.parametrize("n", [2, 3, 4, 7])
@pytest.mark.parametrize(("width", "rotations"), [(2, 1), (4, 1), (5, 2), (8, 1), (16, 1)])
def test_the_whole_way_by_the_specification(n: int, width: int, rotations: int) -> None:
    xs = gaussian(n, 5)
    xs[1][1024:2048] *= 1e-30
    xs[0][3072:] = 0
    for op in ("sum", "mean"):
        options = {"wire_bits": width, "rotations": rotations}
        y = testing.simulate(xs, gccomm.get_codec("rehop", **options), op, seed=9)[0][0]
        expected = Specified(n, width, 9, 5, rotations).reduce(xs, op == "mean")
        np.testing.assert_array_equal(y.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("n", [2, 3, 8, 16])
@pytest.mark.parametrize("width", [3, 4, 5, 8])
def test_the_error_has_the_variance_of_theory(n: int, width: int) -> None:
    """A twelfth of the squared steps of all ranks and of the sum, in each rotated coordinate."""
    xs = gaussian(n)
    spec = Specified(n, width, 4, 64)
    words, scales, steps = spec.steps(xs)
    _, found, down = spec.fold(words, scales)
    last = found.view(np.float32) * (2.0**down * 65536 / spec.limit)
    squares = (steps.astype(np.float64) ** 2).sum() + (last.astype(np.float64) ** 2).sum()
    expected = 1024 * 1024 / 12 * squares
    exact = np.sum(xs, axis=0, dtype=np.float64)
    y = testing.simulate(xs, f"rehop:wire_bits={width}", seed=4)[0][0]
    assert ((y - exact) ** 2).sum() == pytest.approx(expected, rel=0.03)


def test_the_error_does_not_grow_with_the_ranks() -> None:
    """Nor do the bytes: two roundings, however many ranks there are."""
    runs = {n: testing.simulate(gaussian(n), "rehop:wire_bits=5") for n in (2, 4, 8, 64)}
    errors = {n: vnmse(ys[0], gaussian(n)) for n, (ys, _) in runs.items()}
    assert errors[64] == pytest.approx(errors[8], rel=0.1)
    assert errors[8] == pytest.approx(errors[2], rel=0.15)
    assert errors[64] < 0.0095
    assert len({stats[0].wire_bytes for _, stats in runs.values()}) == 1


@pytest.mark.parametrize("family", ["gaussian", "heavy", "layers", "correlated", "embedding"])
@pytest.mark.parametrize("n", [4, 16])
def test_accuracy_over_the_families(family: str, n: int) -> None:
    """In 5.3 bits at 16 ranks less error than ``rotated`` has with any headroom in so many, and at 4 ranks
    about as much.
    """
    xs = getattr(families, family)(n, 0, 0, 1 << 16)
    error = vnmse(testing.simulate(xs, "rehop:wire_bits=5")[0][0], xs)
    assert error < 0.011
    others = []
    for headroom in ("safe", "checked", "clipped"):
        codec = f"rotated:wire_bits=5,headroom={headroom}"
        others.append(vnmse(testing.simulate(xs, codec, steps=3, error_feedback=False)[0][0], xs))
    assert error < min(others) * (0.25 if n == 16 else 1)


def test_equal_ranks_have_less_error() -> None:
    """Their dithers are the shifts of one number: what the first rounding loses cancels."""
    x = gaussian(1)[0]
    own = vnmse(testing.simulate([x], "rehop")[0][0], [x])
    equal = vnmse(testing.simulate([x] * 16, "rehop")[0][0], [x] * 16)
    assert equal < 1.05 * own
    different = gaussian(16)
    assert equal < 0.6 * vnmse(testing.simulate(different, "rehop")[0][0], different)


def test_one_rank_is_rounded_once() -> None:
    """As ``rotated`` does it with the same levels."""
    x = gaussian(1, 3)
    y = testing.simulate(x, "rehop:wire_bits=6")[0][0]
    z = testing.simulate(x, "rotated:wire_bits=6,headroom=safe")[0][0]
    np.testing.assert_array_equal(y, z)


def test_nothing_is_agreed_upon_but_the_call() -> None:
    stats = testing.simulate(gaussian(4), "rehop")[1][0]
    assert stats.messages == 2
    assert stats.clamps == stats.spans_redone == 0


def test_what_is_not_finite_spoils_its_block_on_every_rank() -> None:
    for bad in (np.nan, np.inf, -np.inf):
        xs = gaussian(3, 4)
        xs[2][1500] = bad
        y = testing.simulate(xs, "rehop")[0][1]
        assert np.isnan(y[1024:2048]).all()
        assert np.isfinite(np.delete(y, np.s_[1024:2048])).all()
        with pytest.raises(NonFiniteError):
            testing.simulate(xs, "rehop", nonfinite="raise")


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ranks_of_very_different_magnitudes(dtype: Any) -> None:
    """The small ones' values are below a step of the sum's, and not lost on the average."""
    big, small = (x.astype(dtype) for x in gaussian(2, 8))
    xs = [big * dtype(1e30), small * dtype(1e-30), big * dtype(-1e30)]
    y = testing.simulate(xs, "rehop:wire_bits=8")[0][0]
    assert np.abs(y).max() <= 6.6 * np.sqrt(3 / 12) * 5e30 / 127  # three steps of at most 5 / 127
    runs = [testing.simulate([big, small / 50], "rehop", seed=s)[0][0] for s in range(60)]
    left = np.mean(runs, axis=0) - big
    assert (left @ small) / (small @ small) == pytest.approx(1 / 50, abs=0.01)


def test_cuts_do_not_show() -> None:
    xs = gaussian(3, 40)
    whole = testing.simulate(xs, "rehop")[0][0]
    for piece in (1024, 5000, 1 << 20):
        np.testing.assert_array_equal(testing.simulate(xs, "rehop", piece_coordinates=piece)[0][0], whole)


def test_feedback() -> None:
    """The first rounding is fed back; lanes of one level are refused."""
    xs = [{"x": x} for x in gaussian(4, 2)]
    exact = np.sum([x["x"] for x in xs], axis=0, dtype=np.float64)
    total, steps = np.zeros(2048), 30
    for _, _, ys, _ in testing.simulate_steps(xs, "rehop", steps=steps, error_feedback=True):
        total += ys[0]["x"]
    assert ((total / steps - exact) ** 2).sum() / (exact**2).sum() < 0.002
    with pytest.raises(NegotiationError, match=r"lanes of 2 bits would diverge.*larger wire_bits"):
        testing.simulate(xs, "rehop:wire_bits=2", error_feedback=True)


def test_ranks_that_fold_different_sizes_are_told() -> None:
    from gccomm.operations import fold_all
    from gccomm.steps import Fold

    nothing: Any = lambda *_: None  # noqa: E731
    steps = [Fold(k, 1, nothing, nothing, nothing, nothing, nothing) for k in (1, 2)]
    words = [np.zeros(k, np.uint32) for k in (1, 2)]
    with pytest.raises(ValueError, match=r"different sizes: \[1, 2\]"):
        fold_all(steps, words, words)


@pytest.mark.parametrize("part", ["hop_encode", "hop_fold"])
def test_a_failure_breaks_the_group(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the arithmetic raises: no rank gets sums that lack another one."""
    xs = gaussian(3, 4)

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    def program(comm: gccomm.Communicator) -> str:
        with pytest.raises((MemoryError, BackendError)) as caught:
            comm.compressed_allreduce(xs[comm.rank], codec="rehop")
        with pytest.raises(BackendError, match="broken"):
            comm.compressed_allreduce(xs[comm.rank], codec="raw")
        return type(caught.value).__name__

    monkeypatch.setattr(f"gccomm.kernels.{part}", fail)
    assert "MemoryError" in testing.run(program, 3)
