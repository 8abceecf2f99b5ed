"""What every codec must keep: a table with a row per configuration, and inputs for the suite.

A new codec adds rows here; the suite in ``test_conformance*.py`` then runs over it unchanged. Bounds are in
``conformance_bounds.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from gccomm import testing
from gccomm.codecs import Codec, get_codec
from gccomm.codecs.exact import TwoWords
from tests import conformance_bounds as bounds
from tests.conformance_bounds import (
    FORMATS,
    Array,
    Bound,
    Wide,
    block_norms,
    block_numbers,
    by_block,
    reals,
    wide,
)

Tree = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One configuration and what it promises.

    Attributes
    ----------
    codec : str
        Id with options.
    bound : Bound
        Largest error of a sum's coordinate, before it is rounded to the dtype.
    name : str
        Of the test, where it is not ``codec``.
    norms : bool
        The bound is of the norm of a block's error.
    lossless : bool
        Small tensors do not bypass it.
    noisy, unbiased : bool
        The noise changes with seed and step; it has mean zero.
    bits : bool
        The same bits however tensors are fused and cut, and over every back end.
    spoils : str
        What becomes NaN with a coordinate that is not finite: "coordinate", "block" or "tensor".
    zeros : bool
        A coordinate that is zero on all ranks stays zero.
    square : callable or None
        From inputs to the expected squared error.
    feedback : bool
        Error feedback can be had.
    conserves : bool
        Over several ranks too, what is sent and what is left add up to what was given.
    most : int or None
        Most ranks.
    cost : float
        Bits of a coordinate on the wire, scales and check words not counted (of a matrix of 256 by 1024).
    shape : tuple of int
        Of an array that the codec compresses, with 5000 coordinates.
    exact_below : int
        Passed on: 0 to send every array through the codec.
    """

    codec: str
    bound: Bound
    name: str = ""
    norms: bool = False
    lossless: bool = False
    noisy: bool = True
    unbiased: bool = True
    bits: bool = True
    spoils: str = "block"
    zeros: bool = True
    square: Callable[[Sequence[Any]], float] | None = None
    feedback: bool = True
    conserves: bool = True
    most: int | None = None
    cost: float = 8.0
    shape: tuple[int, ...] = (2, 2500)
    exact_below: int = 0

    def __str__(self) -> str:
        return self.name or self.codec

    @property
    def operation(self) -> bool:
        """Whether it reduces by an operation of the back end's own."""
        return self.make().operation is not None

    def mean_unit(self, dtype: str) -> float:
        """Return the relative error that the division by n may add to what the dtype's rounding does."""
        in_float32 = dtype != "float64" or self.codec in ("bf16", "fp16", "topkc")
        return 2.0**-22 if in_float32 else 2.0**-52

    def make(self) -> Codec:
        return get_codec(self.codec)

    def carrier(self, n: int = 1) -> Codec:
        """Return the codec whose steps run on n ranks."""
        return TwoWords() if self.exact_below else self.make().for_array(math.prod(self.shape), n)

    def simulate(self, trees: Any, op: str = "sum", feedback: bool | None = False, **options: Any) -> Any:
        """Reduce in lockstep and return the results; ranks must agree to the bit."""
        options.setdefault("exact_below", self.exact_below)
        ys, _ = testing.simulate(trees, self.make(), op, error_feedback=feedback, **options)
        for y in ys[1:]:
            assert_same_bits(y, ys[0])
        return ys

    def draw(self, n: int, seed: int = 0, dtype: str = "float32", scale: float = 1.0) -> list[Any]:
        """Return an array a rank of the row's shape."""
        return [draw(np.random.default_rng([seed, r]), self.shape, dtype, scale) for r in range(n)]


LEVELS: dict[str, Any] = {"spoils": "tensor", "most": 127}
ROTATED: dict[str, Any] = {"norms": True, "zeros": False, "most": 127 << 16}
TABLE: dict[str, Any] = {"norms": True, "zeros": False, "unbiased": False, "most": 255}
FLOATS: dict[str, Any] = {"lossless": True, "noisy": False, "unbiased": False, "bits": False}
FLOATS |= {"spoils": "coordinate", "conserves": False}

_norm = partial(bounds.level_bound, 8, "l2")
_max = partial(bounds.level_bound, 8, "max")
_fine = partial(bounds.fine_bound, 8, 32, 2, "l2")
_uniform = partial(bounds.uniform_bound, 8)

ROWS = [
    Row(codec="raw", bound=partial(bounds.float_bound, None), cost=32, **FLOATS),
    Row(codec="bf16", bound=partial(bounds.float_bound, "bfloat16"), cost=16, **FLOATS),
    Row(codec="fp16", bound=partial(bounds.float_bound, "float16"), cost=16, **FLOATS),
    *(
        Row(
            codec=f"uniform:wire_bits={w}",
            bound=partial(bounds.uniform_bound, w),
            square=partial(bounds.uniform_square, w),
            feedback=w > 2,
            most=((1 << (w - 1)) - 1) << 16,
            cost=32 / (32 // w),
        )
        for w in (2, 5, 8, 16)
    ),
    Row(codec="uniform:scales=predicted", bound=_uniform, most=127 << 16),
    Row(codec="uniform:widening=true", bound=_uniform, most=127 << 16),
    Row(
        codec="uniform",
        name="two words",
        bound=bounds.two_words_bound,
        unbiased=False,
        noisy=False,
        feedback=False,
        cost=64,
        exact_below=1 << 40,
    ),
    Row(codec="rotated:headroom=safe", bound=partial(bounds.rotated_bound, 8), **ROTATED),
    Row(codec="rotated:headroom=checked", bound=partial(bounds.rotated_bound, 8), **ROTATED),
    Row(
        codec="rotated:wire_bits=4,rotations=2,headroom=safe",
        bound=partial(bounds.rotated_bound, 4),
        **ROTATED | {"most": 7 << 16, "cost": 4},
    ),
    Row(
        codec="rotated:wire_bits=4,headroom=clipped",
        bound=partial(bounds.clipped_bound, 4),
        **ROTATED | {"most": 7 << 16, "cost": 4, "unbiased": False, "noisy": True},
    ),
    Row(
        codec="rotated:wire_bits=4,headroom=clipped,widening=true",
        bound=partial(bounds.clipped_bound, 4),
        **ROTATED | {"most": 7 << 16, "cost": 4, "unbiased": False, "noisy": True},
    ),
    Row(codec="rotated", bound=partial(bounds.rotated_bound, 8), **ROTATED),
    Row(codec="rotated:scales=predicted", bound=partial(bounds.rotated_bound, 8), **ROTATED),
    *(
        Row(
            codec=codec,
            bound=partial(bounds.rehop_bound, w),
            conserves=False,
            cost=32 / (32 // w),
            **ROTATED | {"most": None},
        )
        for codec, w in (("rehop", 4), ("rehop:wire_bits=5,rotations=2", 5))
    ),
    Row(
        codec="qsgd-mn",
        bound=_norm,
        square=partial(bounds.level_square, 8, "l2"),
        feedback=False,
        **LEVELS,
    ),
    Row(codec="qsgd-mn:norm=max", bound=_max, square=partial(bounds.level_square, 8, "max"), **LEVELS),
    Row(codec="qsgd-mn-ts", bound=_fine, feedback=False, **LEVELS),
    Row(
        codec="qsgd-mn-ts:norm=max,fine=2,levels=16",
        bound=partial(bounds.fine_bound, 8, 2, 16, "max"),
        **LEVELS,
    ),
    Row(
        codec="grandk-mn",
        bound=partial(bounds.drawn_bound, 10, False, _max),
        cost=0.8,
        unbiased=False,
        **LEVELS,
    ),
    Row(
        codec="grandk-mn:keep=4,scaled=true,wire_bits=16",
        bound=partial(bounds.drawn_bound, 4, True, partial(bounds.level_bound, 16, "max")),
        square=partial(bounds.drawn_square, 4),
        feedback=False,
        **LEVELS | {"most": 32767, "cost": 4},
    ),
    Row(
        codec="grandk-mn-ts",
        bound=partial(bounds.drawn_bound, 10, False, _max),
        cost=0.8,
        unbiased=False,
        **LEVELS,
    ),
    Row(codec="global-qsgd", bound=_max, square=partial(bounds.level_square, 8, "max"), **LEVELS),
    Row(
        codec="global-qsgd:dithering=exponential",
        bound=bounds.exponent_bound,
        bits=False,
        conserves=False,
        **LEVELS | {"most": None},
    ),
    Row(codec="intsgd", bound=_max, square=partial(bounds.level_square, 8, "max"), **LEVELS),
    Row(codec="thc", bound=partial(bounds.table_bound, 4, 1 / 32, False), **TABLE),
    Row(
        codec="thc:bits=5,rotations=2,saturate=true,overflow=0.001",
        bound=partial(bounds.table_bound, 5, 0.001, True),
        bits=False,
        **TABLE | {"most": 127**2},
    ),
    Row(
        codec="topkc",
        bound=partial(bounds.chunk_bound, 0.1, 64, partial(bounds.float_bound, "bfloat16")),
        cost=2.1,
        noisy=False,
        unbiased=False,
        bits=False,
        conserves=False,
        **LEVELS | {"most": None},
    ),
    Row(
        codec="topkc:fraction=0.3,chunk=100,values=lanes",
        bound=partial(bounds.chunk_bound, 0.3, 100, partial(bounds.level_bound, 8, "max")),
        cost=2.72,
        unbiased=False,
        **LEVELS | {"most": 127 << 16},
    ),
    *(
        Row(
            codec=codec,
            bound=partial(bounds.low_rank_bound, 4),
            unbiased=False,
            bits=False,
            zeros=False,
            shape=(50, 100),
            cost=32 * 4 * (1 / 256 + 1 / 1024),
            **LEVELS | {"most": None},
        )
        for codec in ("powersgd", "powersgd:warm_start=false")
    ),
]
BIT_ROWS = [row for row in ROWS if row.bits]
NOISY_ROWS = [row for row in ROWS if row.noisy]
UNBIASED_ROWS = [row for row in ROWS if row.unbiased]
FEEDBACK_ROWS = [row for row in ROWS if row.feedback and row.make().rounds]


def over(some: Sequence[Row]) -> pytest.MarkDecorator:
    """Run a test for each of these rows, as its argument ``row``."""
    return pytest.mark.parametrize("row", some, ids=str)


SHAPES: list[tuple[int, ...]] = [
    (), (0,), (3, 0), (1,), (31,), (63,), (64,), (65,), (511,), (512,), (513,), (1023,), (1024,), (1025,),
    (2049,), (3, 511), (3, 700), (5, 1100), (2, 3, 512),
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


def mixed(n: int) -> list[Tree]:
    """Return a tree a rank with arrays of several shapes in every dtype."""
    rng, shapes = np.random.default_rng(n), [(65,), (1025,), (3, 700), (50, 101)]
    keys = [(f"{dtype} {shape}", dtype, shape) for dtype in FORMATS for shape in shapes]
    return [{key: draw(rng, shape, dtype) for key, dtype, shape in keys} for _ in range(n)]


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
    """Check a result against the true sum or mean, coordinate by coordinate or block by block."""
    form, n = FORMATS[dtype], len(xs)
    bound = np.array(row.bound(xs, dtype), dtype=Wide)
    exact = wide(xs).sum(axis=0)
    overflow = np.isinf(bound)
    rounding = form.unit * np.abs(exact)
    if op == "mean":
        exact, bound = exact / n, bound / n
        rounding = np.abs(exact) * (2 * form.unit + row.mean_unit(dtype))
    bound, rounding = bound * (1 + 2 * form.unit), rounding + form.tiny
    got = reals(y).astype(Wide)
    assert not np.isnan(got[~overflow]).any(), name
    with np.errstate(invalid="ignore"):
        good = (np.abs(got - exact) <= bound + rounding) | overflow
    good |= (got == np.inf) & (exact + bound + rounding > form.largest)  # out of range, with its sign
    good |= (got == -np.inf) & (exact - bound - rounding < -form.largest)
    worst = int(np.argmin(good)) if not good.all() else 0
    assert good.all(), f"{name}[{worst}]: {got[worst]} is not within {bound[worst]} of {exact[worst]}"
    if row.norms and np.isfinite(got).all():
        blocks = block_numbers(xs[0])
        allowed = by_block(bound, blocks) / np.bincount(blocks) + block_norms(rounding, blocks)
        norms = block_norms(got - exact, blocks)
        assert (norms <= allowed).all(), f"{name}: errors of blocks {norms} are not within {allowed}"
