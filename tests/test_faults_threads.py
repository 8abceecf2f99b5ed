"""Interrupts while a call is in flight, and calls from several threads."""

from __future__ import annotations

import signal
import sys
import threading

import numpy as np
import pytest

import gccomm
from gccomm.testing import run

pytestmark = pytest.mark.timeout(60)

F4 = np.float32
GOOD = np.ones(2000, F4)


def test_interrupt_is_held_back_until_the_call_is_complete():
    comm = gccomm.init("local")
    reducer = gccomm.Reducer("uniform", comm=comm)
    backend = comm._backend
    original = backend.maximum

    def maximum(words):
        signal.raise_signal(signal.SIGINT)
        original(words)

    handler = signal.default_int_handler  # a shell's background jobs start with SIGINT ignored
    before = signal.signal(signal.SIGINT, handler)
    backend.maximum = maximum
    try:
        for call in (
            lambda: reducer({"w": GOOD}),
            lambda: comm.compressed_allreduce(GOOD, codec="uniform"),
            comm.barrier,
        ):
            with pytest.raises(KeyboardInterrupt):
                call()
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        del backend.maximum
        signal.signal(signal.SIGINT, before)
    assert reducer.step == 1  # the step was complete on all ranks
    assert np.abs(reducer({"w": GOOD})["w"] - 1).max() < 0.01
    comm.close()


def test_handler_of_the_program_sees_the_interrupt_once_and_the_result_arrives():
    seen: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        with gccomm.init("local") as comm:
            original = comm._backend.sum_words

            def sum_words(words):
                signal.raise_signal(signal.SIGINT)
                assert not seen
                original(words)

            comm._backend.sum_words = sum_words
            assert np.abs(comm.compressed_allreduce(GOOD, codec="uniform") - 1).max() < 0.01
            assert seen == [signal.SIGINT]
            del comm._backend.sum_words
    finally:
        signal.signal(signal.SIGINT, previous)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_other_interrupt_handlers_are_left_alone(handler):
    previous = signal.signal(signal.SIGINT, handler)
    try:
        with gccomm.init("local") as comm:
            comm.compressed_allreduce(GOOD, codec="uniform")
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, previous)


def test_two_threads_that_share_a_reducer_are_served_one_after_the_other():
    comm = gccomm.init("local")
    reducer = gccomm.Reducer("uniform", comm=comm, op="sum")
    wrong: list[object] = []
    interval = sys.getswitchinterval()

    def work(value):
        x = np.full(3000, value, F4)
        for _ in range(150):
            y = reducer({"w": x})["w"]
            if np.abs(y - value).max() > value / 100:
                wrong.append((value, y[:3]))

    threads = [threading.Thread(target=work, args=(v,)) for v in (1.0, 1000.0)]
    sys.setswitchinterval(1e-6)
    try:
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert reducer.step == 300
    comm.close()


def test_a_state_is_loaded_between_two_calls_and_not_within_one():
    """The call that is on its way writes into the residuals it started with."""
    comm = gccomm.init("local")
    reducer = gccomm.Reducer("uniform:wire_bits=4", comm=comm, op="sum", error_feedback=True)
    x = np.linspace(-1, 1, 3000, dtype=F4)
    reducer({"w": x})
    state = reducer.state_dict()
    expected = reducer({"w": x})["w"]
    reducer.load_state_dict(state)
    inside, loaded = threading.Event(), threading.Event()
    original = comm._backend.sum_words

    def sum_words(words):
        inside.set()
        assert not loaded.wait(0.2)
        original(words)

    def load():
        inside.wait()
        reducer.load_state_dict(state)
        loaded.set()

    comm._backend.sum_words = sum_words
    thread = threading.Thread(target=load)
    thread.start()
    np.testing.assert_array_equal(reducer({"w": x})["w"], expected)
    del comm._backend.sum_words
    thread.join()
    assert reducer.step == state["step"]
    np.testing.assert_array_equal(reducer({"w": x})["w"], expected)
    comm.close()


def test_threads_of_a_rank_may_each_have_a_communicator():
    def work(comm):
        parts = [comm.split(0) for _ in range(2)]
        sums: list[float] = [0, 0]

        def reduce(i):
            for _ in range(50):
                sums[i] += float(parts[i].allreduce(i + 1.0))

        helper = threading.Thread(target=reduce, args=(1,))
        helper.start()
        reduce(0)
        helper.join()
        return sums

    assert run(work, 3) == [[150.0, 300.0]] * 3
