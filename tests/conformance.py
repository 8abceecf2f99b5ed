"""What every codec must keep: a table with a row per configuration, inputs, and error bounds from theory.

A new codec adds rows here; the suite in ``test_conformance.py`` then runs over it unchanged. Bounds are
computed from the definitions, with none of the package's own arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from gccomm import testing
from gccomm.codecs import Codec, get_codec

Array = np.ndarray[Any, Any]
Tree = dict[str, Any]
Wide = np.longdouble  # sums of float64 up to 1e308 over many ranks are exact enough in it


@dataclass(frozen=True)
class Format:
    """Precision of a float type: unit roundoff, smallest subnormal, largest number."""

    dtype: Any
    unit: float
    tiny: float
    largest: float


FORMATS = {
    "float16": Format(np.float16, 2.0**-11, 2.0**-24, 65504.0),
    "bfloat16": Format(ml_dtypes.bfloat16, 2.0**-8, 2.0**-133, float(ml_dtypes.finfo("bfloat16").max)),
    "float32": Format(np.float32, 2.0**-24, 2.0**-149, float(np.finfo(np.float32).max)),
    "float64": Format(np.float64, 2.0**-53, 5e-324, float(np.finfo(np.float64).max)),
    "complex64": Format(np.complex64, 2.0**-24, 2.0**-149, float(np.finfo(np.float32).max)),
}
DTYPES = list(FORMATS)


def reals(x: Any) -> Array:
    """Return the coordinates of an array, flat: a complex number is two."""
    x = np.asarray(x)
    if x.dtype.kind == "c":
        x = np.ascontiguousarray(x).reshape(-1).view(x.real.dtype)
    return np.asarray(x.reshape(-1), dtype=np.float64)


def block_numbers(x: Any) -> Array:
    """Return the block of every coordinate: rows of 512 and more are cut by themselves, every 1024."""
    x = np.asarray(x)
    wide = 2 if x.dtype.kind == "c" else 1
    size, last = wide * x.size, wide * (x.shape[-1] if x.shape else 1)
    row = last if last >= 512 else max(size, 1)
    place = np.arange(size)
    return np.asarray(place // row * (-(-row // 1024)) + place % row // 1024)


def block_maxima(xs: Sequence[Any]) -> Array:
    """Return, for every coordinate, the largest magnitude that any rank has in its block."""
    blocks = block_numbers(xs[0])
    largest = np.max([np.abs(reals(x)) for x in xs], axis=0, initial=0)
    maxima = np.zeros(blocks.max(initial=0) + 1)
    np.maximum.at(maxima, blocks, largest)
    return np.asarray(maxima[blocks])


Bound = Callable[[Sequence[Any], str], Array]  # (one array a rank, dtype) -> largest error of the sum


def uniform_bound(width: int, xs: Sequence[Any], dtype: str) -> Array:
    """n steps, step = m 2^16 / floor((2^(w-1) - 1) 2^16 / n), and float32's rounding of the result."""
    n, m = len(xs), block_maxima(xs).astype(Wide)
    if dtype == "float64":  # its scale is the upper half of the pattern, rounded up
        m = m * (1 + 2.0**-19) + 2.0**-1042 * (m > 0)
    limit = ((1 << (width - 1)) - 1) * 65536 // n
    bound: Array = n * m * (65536 / limit) * (1 + 2.0**-10) + n * m * 2.0**-21
    return np.asarray(bound + (m > 0) * 2.0**-149 * (dtype != "float64"))


def float_bound(wire: str | None, xs: Sequence[Any], dtype: str) -> Array:
    """n conversions and n - 1 additions, each within half a unit of the wire's format; inf on overflow."""
    if wire is None:
        wire = "float64" if dtype == "float64" else "float32"
    form, n = FORMATS[wire], len(xs)
    magnitude = np.sum([np.abs(reals(x)).astype(Wide) for x in xs], axis=0)
    bound: Array = n * form.unit * magnitude * (1 + 2 * n * form.unit) + n * form.tiny * (wire != dtype)
    bound[magnitude + bound > form.largest] = np.inf
    return bound


def two_words_bound(xs: Sequence[Any], dtype: str) -> Array:
    """n 2^-(61 - 2 ceil(log2 n)) of the largest magnitude, and float64's rounding of the decoded sum."""
    n, m = len(xs), block_maxima(xs).astype(Wide)
    words: Array = n * m * (1 + 2.0**-19) * 2.0 ** (2 * (n - 1).bit_length() - 61) + n * m * 2.0**-53
    return np.asarray(words + (m > 0) * (2.0**-1074 if dtype == "float64" else 2.0**-149))


@dataclass(frozen=True)
class Row:
    """One configuration and what it promises.

    Attributes
    ----------
    name : str
        Of the test.
    codec : str
        Id with options.
    bound : Bound
        Largest error of a sum's coordinate, before it is rounded to the dtype.
    lossless : bool
        Small tensors do not bypass it.
    unbiased : bool
        Rounds at random, with mean zero; the noise changes with seed and step.
    bits : bool
        The same bits however tensors are fused and cut, and over every back end.
    exact_below : int
        Passed on: 0 to send every array through the codec.
    """

    name: str
    codec: str
    bound: Bound
    lossless: bool
    unbiased: bool
    bits: bool
    exact_below: int = 0

    def mean_unit(self, dtype: str) -> float:
        """Return the relative error that the division by n may add to what the dtype's rounding does."""
        in_float32 = dtype != "float64" or self.codec in ("bf16", "fp16")
        return 2.0**-22 if in_float32 else 2.0**-52

    def make(self) -> Codec:
        return get_codec(self.codec)

    def simulate(self, trees: Any, op: str = "sum", **options: Any) -> list[Any]:
        """Reduce in lockstep and return the results; ranks must agree to the bit."""
        codec = self.make()
        ys, _ = testing.simulate(trees, codec, op, exact_below=self.exact_below, **options)
        for y in ys[1:]:
            assert_same_bits(y, ys[0])
        return ys


def _row(codec: str, bound: Bound, *, lossless: bool, unbiased: bool, bits: bool) -> Row:
    return Row(codec, codec, bound, lossless, unbiased, bits)


ROWS = [
    _row("raw", partial(float_bound, None), lossless=True, unbiased=False, bits=False),
    _row("bf16", partial(float_bound, "bfloat16"), lossless=True, unbiased=False, bits=False),
    _row("fp16", partial(float_bound, "float16"), lossless=True, unbiased=False, bits=False),
    *(
        _row(f"uniform:wire_bits={w}", partial(uniform_bound, w), lossless=False, unbiased=True, bits=True)
        for w in (2, 3, 4, 5, 6, 8, 10, 16)
    ),
    Row("two words", "uniform", two_words_bound, False, False, True, exact_below=1 << 40),
]
BIT_ROWS = [row for row in ROWS if row.bits]
NOISY_ROWS = [row for row in ROWS if row.unbiased]

SHAPES: list[tuple[int, ...]] = [
    (), (0,), (3, 0), (1,), (31,), (33,), (511,), (512,), (513,), (1023,), (1024,), (1025,), (2049,),
    (3, 511), (3, 700), (5, 1100), (2, 3, 512),
]  # fmt: skip


def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, scale: float = 1.0) -> Any:
    """Return values of mixed magnitude."""
    x = np.asarray(rng.standard_normal(shape) * np.exp(rng.standard_normal(shape)) * scale)
    if dtype == "complex64":
        return (x + 1j * rng.standard_normal(shape) * scale).astype(np.complex64)
    return x.astype(FORMATS[dtype].dtype)


def all_shapes(n: int, dtype: str, seed: int = 0, scale: float = 1.0) -> list[Tree]:
    """Return a tree a rank with an array of each shape."""
    rng = np.random.default_rng([seed, n])
    return [{"x".join(map(str, s)) or "scalar": draw(rng, s, dtype, scale) for s in SHAPES} for _ in range(n)]


def bits_of(x: Any) -> Array:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def assert_same_bits(a: Any, b: Any) -> None:
    """Compare arrays or flat trees of arrays bit by bit."""
    if isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            np.testing.assert_array_equal(bits_of(a[key]), bits_of(b[key]), err_msg=key)
    else:
        np.testing.assert_array_equal(bits_of(a), bits_of(b))


def same_bits(a: Any, b: Any) -> bool:
    return bool(np.array_equal(bits_of(a), bits_of(b)))


def assert_within(row: Row, xs: Sequence[Any], y: Any, dtype: str, op: str = "sum", name: str = "") -> None:
    """Check a result against the true sum or mean, coordinate by coordinate."""
    form, n = FORMATS[dtype], len(xs)
    bound = row.bound(xs, dtype)
    exact = np.sum([reals(x).astype(Wide) for x in xs], axis=0)
    overflow = np.isinf(bound)
    if op == "mean":
        exact, bound = exact / n, bound / n + np.abs(exact / n) * row.mean_unit(dtype)
    bound = bound + form.unit * (np.abs(exact) + bound) * (2 if op == "mean" else 1) + form.tiny
    got = reals(y).astype(Wide)
    assert not np.isnan(got[~overflow]).any(), name
    with np.errstate(invalid="ignore"):
        good = (np.abs(got - exact) <= bound) | overflow
    good |= (got == np.inf) & (exact + bound > form.largest)  # a sum out of range, with its sign
    good |= (got == -np.inf) & (exact - bound < -form.largest)
    worst = int(np.argmin(good)) if not good.all() else 0
    assert good.all(), f"{name}[{worst}]: {got[worst]} is not within {bound[worst]} of {exact[worst]}"
