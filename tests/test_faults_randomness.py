"""Rounding noise: unbiased, different where it must be, the same on all ranks, and no one else's."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys

import numpy as np
import pytest

import gccomm
from gccomm.testing import run, simulate

pytestmark = pytest.mark.timeout(60)

F4 = np.float32


def step_of(peak, n, width=8):
    return peak * 65536 / (((1 << (width - 1)) - 1) * 65536 // n)


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_mean_over_steps_is_the_true_value(width, n):
    """The noise is fresh each step, so the error of an average over T steps falls as 1 / sqrt(T)."""
    steps = 400
    rng = np.random.default_rng(n)
    xs = [rng.uniform(-1, 1, 1024).astype(F4) for _ in range(n)]
    for x in xs:
        x[0] = 1
    true = np.sum(xs, axis=0, dtype=float)
    ys = [simulate(lambda _: xs, f"uniform:wire_bits={width}", seed=s, steps=1)[0][0] for s in range(steps)]
    errors = np.array(ys, dtype=float) - true
    step = step_of(1, n, width)
    deviation = step * np.sqrt((n + 1) / 12)
    assert np.abs(errors.mean()) <= 6 * deviation / np.sqrt(steps * 1024)
    assert np.abs(errors.mean(axis=0)).max() <= 6 * deviation / np.sqrt(steps)
    assert errors.std() <= deviation * 1.1
    assert errors[:, 1:].std() > 0.2 * step / np.sqrt(12)


def test_noise_differs_between_steps_keys_seeds_blocks_and_coordinates():
    x = np.full(4096, 0.3, F4)
    x[::1024] = 1

    def result(step=0, key="w", seed=0):
        trees = [{key: x}] * 3
        return simulate(trees, "uniform:wire_bits=4", seed=seed, steps=step + 1)[0][0][key]

    base = result()
    for other in (result(step=1), result(key="v"), result(seed=1), result(key="W")):
        assert (other != base).mean() > 0.1
    assert base.tobytes() == result().tobytes()
    blocks = base.reshape(4, 1024)
    assert (blocks[0] != blocks[1]).mean() > 0.1
    assert np.unique(blocks[0][1:]).size > 1


def test_ranks_that_agree_do_not_make_the_same_error_n_times():
    """With one noise for all ranks the errors would add up: n steps instead of one."""
    n = 8
    x = np.random.default_rng(0).uniform(-1, 1, 4096).astype(F4)
    x[::1024] = 1
    ys, _ = simulate([x] * n, "uniform:wire_bits=8")
    assert np.abs(ys[0] - n * x.astype(float)).max() <= 1.01 * step_of(1, n)


SCRIPT = """
import hashlib, numpy as np, gccomm
x = [{"w": np.linspace(-1, r + 1, 3000, dtype=np.float32), "\\u03bb/b": np.ones(2000)} for r in range(3)]
ys, _ = gccomm.testing.simulate(x, "uniform:wire_bits=4", steps=3)
print(hashlib.sha256(ys[0]["w"].tobytes() + ys[0]["\\u03bb/b"].tobytes()).hexdigest())
"""


def test_bits_do_not_depend_on_the_process():
    """Python's own hash of a string is salted per process; the noise of a key must not be."""
    digests = set()
    for salt in ("0", "1"):
        environ = {**os.environ, "PYTHONHASHSEED": salt}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, check=True
        )
        digests.add(done.stdout)
    assert len(digests) == 1
    assert len(digests.pop()) == 65


def test_random_states_of_the_user_are_not_moved():
    torch = pytest.importorskip("torch")

    def states():
        kind, keys, *rest = np.random.get_state()  # noqa: NPY002 - the state that must not move
        return random.getstate(), (kind, keys.tobytes(), *rest), torch.get_rng_state().numpy().tobytes()

    def work(comm):
        reducer = gccomm.Reducer("uniform", comm=comm, error_feedback=True, seed=3)
        for _ in range(3):
            reducer({"w": np.ones(3000, F4), "t": torch.ones(2000), "b": 1.5})
            comm.compressed_allreduce(np.ones(3000, F4), codec="bf16")
        comm.broadcast(np.ones(4))
        comm.barrier()

    before = states()
    run(work, 3)
    simulate([np.ones(2000, F4)] * 2)
    assert states() == before


def test_process_wide_settings_are_left_as_they_were():
    """Floating-point flags, NumPy's error state, print options: also after subnormals and overflows."""
    tiny = np.float32(1e-40)
    before = np.geterr(), np.get_printoptions()
    with gccomm.init("local") as comm:
        for codec in ("uniform", "bf16", "fp16", "raw"):
            comm.compressed_allreduce(np.full(3000, 1e-40, F4), codec=codec)
            comm.compressed_allreduce(np.full(3000, 3e38, F4), codec=codec)
            assert float(tiny * np.ones(8, F4)[3]) == float(tiny)
    assert (np.geterr(), np.get_printoptions()) == before


def test_import_starts_no_library_and_touches_nothing():
    code = (
        "import sys, signal, warnings, numpy\n"
        "hook, handler, filters = sys.excepthook, signal.getsignal(signal.SIGINT), list(warnings.filters)\n"
        "import gccomm\n"
        "loaded = {'mpi4py', 'jax', 'torch', 'cupy', 'gccomm_mpi', 'gccomm_nccl'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "assert sys.excepthook is hook and signal.getsignal(signal.SIGINT) is handler\n"
        "assert warnings.filters == filters\n"
        "import threading; assert threading.active_count() == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("feedback", [False, True])
def test_replicas_never_drift_apart(feedback):
    """200 steps over 12 decades, with NaN, inf and -0.0 in between: the same bytes on every rank."""

    def work(comm):
        reducer = gccomm.Reducer("uniform:wire_bits=5", comm=comm, error_feedback=feedback)
        rng, shared = np.random.default_rng(comm.rank), np.random.default_rng(99)
        digest = hashlib.sha256()
        for step in range(200):
            size = int(shared.integers(1, 3000))
            scale = 10.0 ** shared.uniform(-6, 6)
            x = (scale * rng.normal(size=size)).astype(F4)
            x[rng.random(size) < 0.1] = -0.0
            if step % 17 == comm.rank:
                x[rng.integers(size)] = (np.nan, np.inf, -np.inf)[step % 3]
            with np.errstate(over="ignore"):
                half = x[:50].astype(np.float16)
            tree = {f"w{size}": x, "h": half, "d": x.astype(np.float64), "c": x[:40].astype(np.complex64)}
            for key, y in (reducer(tree) if not feedback else reducer({f"w{size}": x})).items():
                digest.update(key.encode() + y.tobytes())
        return digest.hexdigest()

    assert len(set(run(work, 3))) == 1
