"""Zeros, subnormals, the ends of each float format, inf and NaN: what comes back, on every rank."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import gccomm
from gccomm.testing import run, simulate

pytestmark = pytest.mark.timeout(60)

BFLOAT16 = ml_dtypes.bfloat16
FLOATS = [np.float16, BFLOAT16, np.float32, np.float64, np.complex64, np.complex128]
LANE_CODECS = [f"uniform:wire_bits={w}" for w in (2, 5, 8, 16)]
CODECS = ["raw", "bf16", "fp16", *LANE_CODECS]
ROUTES = [(codec, below) for codec in CODECS for below in (0, 4096)]  # by the codec itself, and exactly


def step_of(peak: float, n: int, width: int = 8) -> float:
    limit = ((1 << (width - 1)) - 1) * 65536 // n
    return peak * 65536 / limit * (1 + 4e-6)


def same_bits(ys) -> bool:
    return all(y.tobytes() == ys[0].tobytes() for y in ys)


@pytest.mark.parametrize(("codec", "below"), ROUTES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_all_zero_input_gives_exact_zeros(codec, below, dtype, op):
    ys, stats = simulate([np.zeros(1500, dtype)] * 3, codec, op, exact_below=below)
    assert ys[0].dtype == dtype
    assert (ys[0] == 0).all()
    assert np.isnan(stats[0].vnmse_estimate)  # nothing was measured: no 0 / 0


@pytest.mark.parametrize(("codec", "below"), ROUTES)
def test_zeros_on_one_rank_only_leave_the_other_ranks_values(codec, below):
    x = np.linspace(-1, 1, 500, dtype=np.float32)
    ys, _ = simulate([np.zeros_like(x), x], codec, exact_below=below)
    width = int(codec.partition("=")[2] or 8)
    assert np.abs(ys[0] - x).max() <= 2 * step_of(1, 2, width)
    assert ys[0][250] == pytest.approx(float(x[250]), abs=2 * step_of(1, 2, width))


@pytest.mark.parametrize("codec", CODECS)
def test_zero_block_inside_other_blocks_stays_zero(codec):
    x = np.ones(5 * 1024, np.float32)
    x[1024:2048] = 0
    ys, _ = simulate([x, -2 * x, x / 2], codec)
    assert (ys[0][1024:2048] == 0).all()
    assert np.abs(ys[0][2048:] + 0.5).max() <= 3 * step_of(2, 3, int(codec.partition("=")[2] or 8))


@pytest.mark.parametrize("codec", LANE_CODECS)
@pytest.mark.parametrize("below", [0, 4096])
@pytest.mark.parametrize("count", [500, 3000])
def test_mean_of_large_float32_is_not_inf(codec, below, count):
    """The sum, 4e38, is beyond float32, and so is the squared norm; the mean is not."""
    ys, stats = simulate([np.full(count, 1e38, np.float32)] * 4, codec, "mean", exact_below=below)
    error = step_of(1e38, 4, int(codec.partition("=")[2])) if below == 0 else 1e38 * 1e-6
    assert np.abs(ys[0] - np.float64(1e38)).max() <= error
    assert not np.isinf(stats[0].vnmse_estimate)


@pytest.mark.parametrize("codec", ["raw", "bf16"])
def test_mean_by_float_sums_is_right_or_inf_but_never_nan(codec):
    """Float sums add first, as MPI does: a sum beyond their range is inf, and so is its mean."""
    ys, _ = simulate([np.full(1100, 1e38, np.float32)] * 4, codec, "mean")
    y = ys[0].astype(np.float64)
    assert (np.isposinf(y) | (np.abs(y - 1e38) <= 1e38 * 2**-7)).all()


@pytest.mark.parametrize(("codec", "below"), [(c, b) for c in LANE_CODECS for b in (0, 4096)])
@pytest.mark.parametrize(
    ("dtype", "value"), [(np.float64, 1e300), (np.float64, 1.7e308), (np.float32, 3.4e38)]
)
def test_mean_near_the_top_of_the_format(codec, below, dtype, value):
    ys, stats = simulate([np.full(1200, value, dtype)] * 3, codec, "mean", exact_below=below)
    lossy = below == 0
    error = step_of(value / 3, 1, int(codec.partition("=")[2])) * 3 if lossy else value * 1e-6
    top = float(np.finfo(dtype).max)
    assert np.abs(np.minimum(ys[0].astype(np.longdouble), top) - value).max() <= error
    assert not np.isnan(ys[0]).any()
    assert not np.isinf(stats[0].vnmse_estimate)


@pytest.mark.parametrize(("codec", "below"), ROUTES)
@pytest.mark.parametrize(
    ("dtype", "value"), [(np.float32, 1e38), (np.float64, 1e308), (np.float16, 4e4), (BFLOAT16, 1e38)]
)
def test_sum_beyond_the_format_is_inf_and_never_nan(codec, below, dtype, value):
    x = np.full(2100, value, dtype)
    x[1::2] *= -1
    x[-40:] = 1
    ys, _ = simulate([x] * 4, codec, exact_below=below)
    assert (ys[0][:2000:2] == np.inf).all()
    assert (ys[0][1:2000:2] == -np.inf).all()
    assert not np.isnan(ys[0]).any()


@pytest.mark.parametrize("codec", LANE_CODECS)
@pytest.mark.parametrize("below", [0, 4096])
@pytest.mark.parametrize(
    ("dtype", "value"), [(np.float32, 1e-40), (np.float32, 1.5e-45), (np.float64, 5e-324)]
)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_subnormal_maxima_are_reduced_like_any_other(codec, below, dtype, value, op):
    n, width = 3, int(codec.partition("=")[2])
    x = np.full(1100, value, dtype)
    x[::3] = 0
    ys, _ = simulate([x] * n, codec, op, exact_below=below)
    smallest = float(np.finfo(dtype).smallest_subnormal)
    factor = n if op == "sum" else 1
    # The scale of a float64 block is the upper half of a pattern: it cannot be below 2^-1042.
    peak = max(np.longdouble(value), np.longdouble(2) ** -1042 if dtype is np.float64 else 0)
    error = (step_of(1, n, width) if below == 0 else 0) * peak * factor
    assert np.abs(ys[0] - x.astype(np.longdouble) * factor).max() <= error + smallest
    assert (ys[0][::3] == 0).all()


@pytest.mark.parametrize(("codec", "below"), ROUTES)
def test_half_precision_mean_neither_overflows_nor_underflows(codec, below):
    large, small = (
        simulate([np.full(8, v, np.float16)] * 4, codec, "mean", exact_below=below)[0][0]
        for v in (40_000, 1e-7)
    )
    exact = not (codec.startswith("uniform") and below == 0)
    if codec == "fp16":  # its own range ends at 65504, as documented
        assert np.isposinf(large).all()
    else:
        width = int(codec.partition("=")[2] or 16)
        bound = (0 if exact else step_of(40_000, 4, width)) + (40_000 * 2**-7 if codec == "bf16" else 0)
        assert np.abs(large.astype(float) - 40_000).max() <= bound + 16
    assert (small == np.float16(1e-7)).all() or not exact


def test_half_precision_sum_is_rounded_once():
    """In float16, 1 + 2^-11 + 2^-24 lies just above the middle of two numbers; float32 would lose that."""
    ys, _ = simulate([np.full(3, x, np.float16) for x in (1.0, 2.0**-11, 2.0**-24)], "uniform")
    assert (ys[0] == np.float16(1 + 2.0**-10)).all()


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16])
@pytest.mark.parametrize("below", [0, 4096])
def test_half_precision_mean_of_equal_values(dtype, below):
    x = np.linspace(0.1, 3, 1200).astype(dtype)
    ys, _ = simulate([x] * 5, "uniform:wire_bits=16", "mean", exact_below=below)
    bound = (step_of(3, 5, 16) if below == 0 else 0) + 3 * float(ml_dtypes.finfo(dtype).eps)
    assert np.abs(ys[0].astype(float) - x.astype(float)).max() <= bound
    if below:
        assert (ys[0] == x).all()


def poison(kind: str, dtype) -> np.ndarray:
    values = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "-nan": -np.nan}
    return np.array(values[kind], dtype)


@pytest.mark.parametrize("kind", ["nan", "-nan", "inf", "-inf"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("codec", "below"), ROUTES)
def test_nonfinite_value_on_one_rank_reaches_every_rank(kind, dtype, codec, below):
    xs = [np.ones(3 * 1024, dtype) for _ in range(3)]
    at = 1500
    xs[2][at] = poison(kind, dtype)
    ys, _ = simulate(xs, codec, "mean", exact_below=below)
    assert same_bits(ys)
    y = ys[0]
    assert not np.isfinite(y[at])
    per_block = 1024 // (2 if np.iscomplexobj(y) else 1)
    block = slice(at // per_block * per_block, (at // per_block + 1) * per_block)
    if codec.startswith("uniform"):
        assert np.isnan(y[block]).all()
    clean = np.ones(len(y), bool)
    clean[block] = False
    assert np.isfinite(y[clean]).all()


@pytest.mark.parametrize(("codec", "below"), ROUTES)
def test_opposite_infinities_and_nan_with_a_payload_are_seen(codec, below):
    payload = np.array([0x7F800001], np.uint32).view(np.float32)[0]
    cases = [(np.inf, -np.inf), (payload, 1.0), (np.nan, np.inf), (3.0e38, np.inf)]
    for a, b in cases:
        xs = [np.ones(1200, np.float32), np.ones(1200, np.float32)]
        xs[0][3], xs[1][3] = a, b
        ys, _ = simulate(xs, codec, exact_below=below)
        assert not np.isfinite(ys[0][3])


@pytest.mark.parametrize("size", [5, 5000])
@pytest.mark.parametrize("codec", ["uniform", "raw", "bf16"])
def test_raise_on_nonfinite_changes_nothing_and_the_next_call_works(size, codec):
    def work(comm):
        reducer = gccomm.Reducer(codec, comm=comm, nonfinite="raise", error_feedback=codec == "uniform")
        x = np.full(size, comm.rank, np.float32)
        before = reducer({"w": x})["w"].tobytes(), reducer.state_dict()
        bad, out = x.copy(), {"w": np.full(size, 7, np.float32)}
        bad[-1] = np.inf if comm.rank == 1 else 0
        with pytest.raises(gccomm.NonFiniteError, match=r"rank 1: .*'w'") as caught:
            reducer({"w": bad}, out=out)
        after = reducer.state_dict()
        assert (out["w"] == 7).all()
        assert after["step"] == before[1]["step"] == 1
        for key, value in before[1]["residuals"].items():
            assert (after["residuals"][key] == value).all()
        assert np.isfinite(reducer({"w": x})["w"]).all()
        return str(caught.value)

    assert len(set(run(work, 3))) == 1


def test_every_rank_takes_the_same_decision_to_skip_a_step():
    rng = np.random.default_rng(4)
    plan = rng.integers(0, 6, 30)  # the rank that overflows at each step, or nobody

    def work(comm):
        reducer = gccomm.Reducer("uniform", comm=comm)
        steps = 0
        for who in plan:
            grads = {"w": np.ones(2000, np.float16), "b": np.ones(4, np.float16)}
            if who == comm.rank:
                grads["b" if steps % 2 else "w"][1] = np.inf
            found = reducer(grads)
            if all(np.isfinite(g).all() for g in found.values()):
                steps += 1
                comm.barrier()  # only a rank that steps makes this call: hangs or fails if ranks differ
        return steps

    results = run(work, 3)
    assert set(results) == {int((plan > 2).sum())}


def test_negative_zero_and_mixed_signs_of_zero_stay_zero():
    for codec, below in ROUTES:
        xs = [np.full(1100, z, np.float32) for z in (-0.0, 0.0, -0.0)]
        ys, _ = simulate(xs, codec, exact_below=below)
        assert (ys[0] == 0).all()
        assert same_bits(ys)
