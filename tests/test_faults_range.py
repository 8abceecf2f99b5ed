"""Range and scale: sums at the edge of their lanes, many ranks, spikes, bad parameters, exact integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gccomm
from gccomm.reduction import Options, Place, Reduction
from gccomm.testing import run, simulate

pytestmark = pytest.mark.timeout(60)

WIDTHS = [2, 3, 4, 5, 6, 8, 10, 16]
FLOAT_CODECS = ["raw", "bf16", "fp16"]
ALL_CODECS = FLOAT_CODECS + [f"uniform:wire_bits={w}" for w in WIDTHS]
WRONG = (TypeError, ValueError)


def step_of(peak: float, n: int, width: int = 8) -> float:
    """Return the quantisation step of a block with this agreed maximum (a little more for scale rounding)."""
    limit = ((1 << (width - 1)) - 1) * 65536 // n
    return peak * 65536 / limit * (1 + 4e-6)


def tolerance(codec: str, peak: float, n: int) -> float:
    """Return the largest error of a mean of values up to ``peak``."""
    if codec.startswith("uniform"):
        return step_of(peak, n, int(codec.partition("=")[2]))
    return peak * {"raw": 1e-6, "bf16": 2**-7, "fp16": 2**-10}[codec]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("signs", ["plus", "minus", "alternating", "by rank"])
def test_every_rank_at_the_maximum_stays_in_range(width, n, signs):
    base = np.full(1003, 1.0, np.float32)
    if signs == "alternating":
        base[::2] = -1
    factors = [-1.0 if signs == "minus" or (signs == "by rank" and r % 2) else 1.0 for r in range(n)]
    xs = [(base * f).astype(np.float32) for f in factors]
    ys, _ = simulate(xs, f"uniform:wire_bits={width}", exact_below=0)  # raises where a lane overflows
    assert np.abs(ys[0] - np.sum(xs, axis=0)).max() <= n * step_of(1.0, n, width)
    assert all(y.tobytes() == ys[0].tobytes() for y in ys)


@settings(max_examples=60, deadline=None)
@given(
    peak=st.floats(1e-30, 1e30),
    width=st.sampled_from(WIDTHS),
    n=st.integers(1, 9),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
)
def test_rounding_up_at_the_maximum_never_leaves_a_lane(peak, width, n, seed, dtype):
    info = np.finfo(dtype)
    peak = float(np.clip(peak, float(info.tiny), float(info.max) / 16))
    rng = np.random.default_rng(seed)
    choices = np.array([peak, -peak, np.nextafter(peak, 0), peak / 3, 0.0])
    xs = [rng.choice(choices, 700, p=[0.5, 0.2, 0.1, 0.1, 0.1]).astype(dtype) for _ in range(n)]
    ys, _ = simulate(xs, f"uniform:wire_bits={width}", seed=seed, exact_below=0)
    top = max(float(np.abs(x).max()) for x in xs)
    error = np.abs(ys[0].astype(np.float64) - np.sum(xs, axis=0, dtype=np.float64)).max()
    assert error <= n * (step_of(top, n, width) + top * float(info.eps)) + float(info.smallest_subnormal)


@pytest.mark.parametrize("width", [2, 3, 8])
def test_more_ranks_than_levels_still_fit(width):
    n = 130  # floor(127 / 130) whole levels would be none
    rng = np.random.default_rng(1)
    xs = [rng.uniform(-1, 1, 1100).astype(np.float32) for _ in range(n)]
    for x in xs:
        x[:50] = 1
    ys, _ = simulate(xs, f"uniform:wire_bits={width}", exact_below=0)
    assert np.abs(ys[0] - np.sum(xs, axis=0, dtype=np.float64)).max() <= n * step_of(1.0, n, width)


def test_three_bits_on_four_live_ranks():
    def work(comm):
        return comm.compressed_allreduce(np.ones(2000, np.float32), codec="uniform:wire_bits=3")

    for y in run(work, 4):
        assert np.abs(y - 4).max() <= 4 * step_of(1.0, 4, 3)


def prepare(x, n, codec="raw"):
    """Return the error that a rank of ``n`` brings to the agreement; nothing is sent."""
    options = Options(lambda _: gccomm.get_codec(codec), lambda _: "sum")
    return Reduction(options).start(x, Place(0, n)).call.error


def test_too_many_ranks_for_a_lane_are_refused_with_the_numbers():
    x = np.ones(2048, np.float32)
    assert prepare(x, 65536, "uniform:wire_bits=2") is None
    error = prepare(x, 65537, "uniform:wire_bits=2")
    assert isinstance(error, gccomm.NegotiationError)
    assert all(number in str(error) for number in ("65537 ranks", "2 bits", "65536"))


@pytest.mark.parametrize("n", [32_769, 100_000])
def test_too_many_ranks_for_wide_integers_are_refused_before_anything_is_sent(n):
    error = prepare(np.array([2**40], np.int64), n)
    assert isinstance(error, gccomm.NegotiationError)
    assert str(n) in str(error)
    assert prepare(np.array([2**40], np.int64), 32_768) is None
    assert prepare(np.array([100], np.int8), n) is None


@pytest.mark.parametrize("codec", ALL_CODECS)
@pytest.mark.parametrize("exact_below", [0, 1024])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_mean_of_a_constant_at_every_number_of_ranks(codec, exact_below, n):
    ys, _ = simulate([np.full(64, 0.5, np.float32)] * n, codec, "mean", exact_below=exact_below)
    assert np.abs(ys[0] - 0.5).max() <= tolerance(codec, 0.5, n)


@pytest.mark.parametrize("codec", ALL_CODECS)
def test_spike_after_small_steps_and_small_steps_after_a_spike(codec):
    values = [1e-3] * 20 + [1.0] + [1e-3] * 3

    def work(comm):
        reducer = gccomm.Reducer(codec, comm=comm, op="sum", error_feedback=False)
        return [(reducer({"w": np.full(1003, v, np.float32)})["w"], reducer.stats.clamps) for v in values]

    for results in run(work, 3):
        for value, (y, clamps) in zip(values, results, strict=True):
            assert np.abs(y - 3 * value).max() <= 3 * tolerance(codec, value, 3)
            assert clamps == 0


def test_large_values_are_not_clipped_to_a_fixed_range():
    low, high = (simulate([np.full(1500, v, np.float32)] * 2, "uniform")[0][0] for v in (9.0, 20.0))
    assert np.abs(low - 18).max() <= 2 * step_of(9, 2)
    assert np.abs(high - 40).max() <= 2 * step_of(20, 2)


@pytest.mark.parametrize("bits", [0, 1, -1, 99, 2.5, 7, 9, 32])
def test_bad_lane_widths_are_refused_at_construction(bits):
    with pytest.raises(ValueError, match="wire_bits"):
        gccomm.get_codec("uniform", wire_bits=bits)


@pytest.mark.parametrize("bits", [8.0, True, "8", None, float("nan"), float("inf"), [8]])
def test_lane_widths_that_are_no_integers_are_refused_at_construction(bits):
    with pytest.raises((TypeError, ValueError), match="wire_bits"):
        gccomm.get_codec("uniform", wire_bits=bits)


@pytest.mark.parametrize(
    "codec", ["uniform:wire_bits=0", "uniform:wire_bits=NaN", "uniform:wire_bits", "qsgd?"]
)
def test_bad_codecs_are_refused_at_construction_and_by_calls(codec):
    with pytest.raises(ValueError, match=r"wire_bits|options are written|no codec"):
        run(lambda comm: gccomm.Reducer(codec, comm=comm), 1)
    with pytest.raises(ValueError, match=r"wire_bits|options are written|no codec"):
        run(lambda comm: comm.compressed_allreduce(np.ones(3), codec=codec), 2)


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        *(("exact_below", v, WRONG) for v in (2.5, True, float("nan"), "1024", None)),
        *(("bucket_bytes", v, WRONG) for v in (2.5, True, float("inf"), None)),
        *(("exact_below", -1, ValueError), ("bucket_bytes", 0, ValueError), ("bucket_bytes", -1, ValueError)),
        *(("op", v, ValueError) for v in ("max", "SUM", "")),
        *(("op", v, WRONG) for v in (None, 3, {"w": "max"}, {3: "sum"})),
        *(("nonfinite", v, WRONG) for v in ("ignore", None, True)),
        *(("seed", v, TypeError) for v in (1.5, None, True, "0")),
        *(("error_feedback", v, TypeError) for v in (1, "yes", 0.0)),
        *(("codec", v, TypeError) for v in (3, None, {"id": 4}, {3: "raw"}, {"w": 8})),
    ],
)
def test_bad_reducer_options_are_refused_at_construction(option, value, error):
    with pytest.raises(error):
        run(lambda comm: gccomm.Reducer(comm=comm, **{option: value}), 1)


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("int8", [100, 100]),
        ("int8", [-100, -100]),
        ("int16", [20_000, 20_000]),
        ("uint8", [200, 100]),
        ("int32", [2**31 - 1, 1]),
        ("int64", [2**63 - 1, 1]),
        ("int64", [-(2**63), -1]),
        ("uint64", [2**64 - 1, 1]),
    ],
)
@pytest.mark.parametrize("size", [1, 8, 1000])
def test_integer_sum_that_does_not_fit_raises_on_all_ranks(dtype, values, size):
    def work(comm):
        x = np.zeros(size, dtype)
        x[-1] = values[comm.rank]
        out = np.full(size, 7, dtype)
        with pytest.raises(OverflowError, match=rf"(?=.*\b1\b)(?=.*not fit).*\b{dtype}\b") as caught:
            comm.compressed_allreduce(x, out=out)
        assert (out == 7).all()
        assert comm.allreduce(1) == comm.size
        return str(caught.value)

    assert len(set(run(work, 2))) == 1


def test_integer_overflow_names_the_array_and_its_dtype():
    tree = {"a": np.array([5]), "b": np.full(3, 100, np.int8), "c": np.array([6], np.uint16), "w": np.ones(5)}
    for keys in ("ab", "abcw", "bcw", "wcba"):
        with pytest.raises(OverflowError, match=r"(?=.*\b3\b)(?=.*not fit).*\bint8\b.*'b'") as caught:
            simulate([{k: tree[k] for k in keys}] * 2)
        assert not any(name in str(caught.value) for name in ("'a'", "'c'", "'w'", "int64", "uint16"))


@pytest.mark.parametrize(
    ("dtype", "values", "total"),
    [
        ("int8", [100, 100, -100], 100),
        ("int8", [-128, 127, 1], 0),
        ("int8", [127, -128, -127], -128),
        ("uint8", [200, 55, 0], 255),
        ("int16", [30_000, 30_000, -30_000], 30_000),
        ("int64", [2**62, 2**62, -(2**62)], 2**62),
        ("int64", [-(2**63), 2**63 - 1, 0], -1),
        ("uint64", [2**63, 2**63 - 1, 0], 2**64 - 1),
        ("int64", [2**53 + 1, 0, 0], 2**53 + 1),
        ("int64", [1, 2**53, 2**53], 2**54 + 1),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_integer_sums_are_exact_whatever_partial_sums_do(dtype, values, total, size):
    ys, _ = simulate([np.full(size, v, dtype) for v in values], "uniform")
    for y in ys:
        assert y.dtype == dtype
        assert (y == np.array(total, dtype)).all()


def test_integer_ranges_are_agreed_and_not_taken_from_one_rank():
    small, large = np.ones(3000, np.int32), np.full(3000, 2**30, np.int32)
    for order in ([small, large], [large, small], [small, -large], [-large, small]):
        ys, _ = simulate(order)
        assert (ys[0] == order[0] + order[1]).all()
