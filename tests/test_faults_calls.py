"""Calls that come at the wrong moment or from the wrong place, and codecs that misuse the step protocol."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gccomm
from gccomm.codecs.uniform import Uniform
from gccomm.kernels import pool_stats
from gccomm.lanes import safe_limit
from gccomm.steps import Agree, Sum
from gccomm.testing import run, simulate

F4 = np.float32


class TwoRounds(Uniform):
    """Agrees twice and keeps its first answer."""

    id = "test-two-rounds"

    def steps(self, x: Any, state: Any, ctx: Any) -> Iterator[Any]:
        width, limit = self.wire_bits, safe_limit(self.wire_bits, ctx.size)
        scales = yield Agree(x.blocks, x.maxima)
        kept = scales.copy()
        again = yield Agree(3 * x.blocks, lambda out: out.fill(7))
        assert (again == 7).all()
        assert (scales == kept).all()
        yield Sum(
            x.blocks,
            x.size,
            lambda lo, hi, out: x.encode(lo, hi, out, scales, width, limit, ctx),
            lambda lo, hi, words: x.decode(lo, hi, words, scales, width, limit, ctx),
            lambda lo, hi: ((0, x.size(lo, hi), width),),
        )
        return state


class FailsFirst(Uniform):
    """Fails before its first step where its option says so."""

    id = "test-fails-first"

    def steps(self, x: Any, state: Any, ctx: Any) -> Iterator[Any]:
        if ctx.rank == 1:
            raise ValueError("no table for this input")
        return (yield from super().steps(x, state, ctx))


@pytest.mark.parametrize("one_host", [True, False])
@pytest.mark.parametrize("piece", [1024, 1 << 20])
def test_answers_of_earlier_rounds_stay(one_host: bool, piece: int) -> None:
    xs = [
        np.random.default_rng(r).normal(size=300_000 if piece > 5000 else 5000).astype(F4) for r in range(3)
    ]
    options: dict[str, Any] = {"one_host": one_host, "piece_coordinates": piece}
    ys, _ = simulate(xs, TwoRounds(), **options)
    plain, _ = simulate(xs, "uniform", **options)
    assert (ys[0] == plain[0]).all()


def test_codec_that_fails_before_its_first_step_fails_on_all_ranks() -> None:
    def work(comm: gccomm.Communicator) -> str:
        with pytest.raises(ValueError, match="rank 1: no table") as caught:
            comm.compressed_allreduce(np.ones(3000, F4), codec=FailsFirst())
        assert float(comm.compressed_allreduce(1.0)) == comm.size
        return str(caught.value)

    assert len(set(run(work, 3))) == 1


class NoGenerator(Uniform):
    """Returns its steps."""

    id = "test-no-generator"

    def steps(self, x: Any, state: Any, ctx: Any) -> Any:
        return [Agree(x.blocks, x.maxima)]


class NoStep(Uniform):
    """Yields what is none."""

    id = "test-no-step"

    def steps(self, x: Any, state: Any, ctx: Any) -> Any:
        yield "sum"


@pytest.mark.parametrize("codec", [NoGenerator(), NoStep()])
def test_codec_whose_steps_are_none_is_named(codec: gccomm.Codec) -> None:
    def work(comm: gccomm.Communicator) -> None:
        with pytest.raises(TypeError, match=rf"{type(codec).__name__}\.steps must "):
            comm.compressed_allreduce(np.ones(3000, F4), codec=codec)
        assert float(comm.compressed_allreduce(1.0)) == comm.size

    run(work, 2)


def test_codecs_cannot_be_changed_once_made() -> None:
    codec = gccomm.get_codec("uniform", wire_bits=4)
    with pytest.raises(AttributeError, match="immutable"):
        codec.wire_bits = 16  # type: ignore[attr-defined]
    mine = Uniform(4)
    gccomm.compressed_allreduce(np.ones(2000, F4), codec=mine, comm=gccomm.init("local"))
    with pytest.raises(AttributeError, match="immutable"):
        mine.wire_bits = 16


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs POSIX signals")
def test_call_from_a_signal_handler_within_a_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = run(lambda c: c, 1)[0]
    seen: list[BaseException] = []

    def handler(signum: int, frame: Any) -> None:
        try:
            comm.allreduce(np.full(3, -7.0))
        except gccomm.BackendError as error:
            seen.append(error)

    previous = signal.signal(signal.SIGUSR1, handler)
    whole = comm._backend.maximum

    def interrupted(words: Any) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        whole(words)

    monkeypatch.setattr(comm._backend, "maximum", interrupted)
    try:
        assert (comm.allreduce(np.full(3, 2.0)) == 2).all()
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert [str(e) for e in seen if "from within another" in str(e)] == [str(e) for e in seen] != []


def test_cached_plans_keep_no_array_alive() -> None:
    comm = gccomm.init("local")
    before = pool_stats()["outstanding"]
    for codec in ("raw", "uniform", "bf16"):
        for size in range(200_000, 205_000, 1000):
            x = np.ones(size, F4)
            gone = weakref.ref(x)
            y = comm.compressed_allreduce(x, codec=codec)
            del x, y
            gc.collect()
            assert gone() is None
    assert pool_stats()["outstanding"] <= before + (1 << 16)


def test_forked_process_is_no_rank() -> None:
    program = (
        "import os, gccomm\n"
        "comm = gccomm.init('local'); comm.allreduce(1.0)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try: comm.allreduce(1.0)\n"
        "    except gccomm.BackendError as error: os._exit(7 if 'forked' in str(error) else 8)\n"
        "    os._exit(9)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7\n"
        "assert comm.allreduce(2.0) == 2.0\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_barriers_do_not_move_the_noise() -> None:
    x = np.random.default_rng(0).normal(size=3000).astype(F4)

    def work(comm: gccomm.Communicator, *, barriers: int) -> bytes:
        for _ in range(barriers):
            comm.barrier()
        return bytes(comm.compressed_allreduce(x).tobytes())

    assert run(lambda c: work(c, barriers=0), 2) == run(lambda c: work(c, barriers=3), 2)


def test_bad_text_of_a_users_error_is_shared_all_the_same() -> None:
    class Odd(TypeError):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    class Bad:
        @property
        def __array_interface__(self) -> Any:
            raise Odd

    def work(comm: gccomm.Communicator) -> float:
        with pytest.raises(Exception, match="rank 1"):
            comm.compressed_allreduce(Bad() if comm.rank == 1 else np.ones(3))
        return float(comm.compressed_allreduce(1.0))

    assert run(work, 2) == [2.0, 2.0]


def test_unknown_codec_error_survives_pickling() -> None:
    with pytest.raises(gccomm.UnknownCodecError) as caught:
        gccomm.get_codec("unheard-of")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.codec_id, str(again)) == ("unheard-of", str(caught.value))


@pytest.mark.parametrize(
    ("options", "name"),
    [({"op": "max"}, "op"), ({"nonfinite": "no"}, "nonfinite"), ({"bucket_bytes": 0}, "bucket_bytes")],
)
def test_simulate_checks_its_options(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}`"):
        simulate([np.ones(3)], **options)


def test_nonfinite_error_names_the_array_that_has_it() -> None:
    tree = {"a": np.ones(10, F4), "c": np.full(10, np.nan, F4), "h": np.ones(2000, F4)}
    with pytest.raises(gccomm.NonFiniteError, match=r"in 'c'\. Nothing"):
        gccomm.compressed_allreduce(tree, nonfinite="raise", comm=gccomm.init("local"))


@pytest.mark.parametrize("value", [1.0, 3, np.ones(5, F4), {}])
def test_codecs_that_differ_are_seen_where_none_is_used(value: Any) -> None:
    """Integers, small arrays and empty trees travel without the codec; ranks must name the same one."""

    def work(comm: gccomm.Communicator) -> None:
        with pytest.raises(gccomm.MismatchError, match=r"wire_bits=8.* on rank 0; .*wire_bits=4.* on rank 1"):
            comm.compressed_allreduce(value, codec=f"uniform:wire_bits={8 - 4 * comm.rank}")
        assert comm.compressed_allreduce(1) == 2

    run(work, 2)
