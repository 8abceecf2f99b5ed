"""Ranks that differ: one error, the same on every rank, and a communicator that goes on working."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest

import gccomm
from gccomm.testing import run

pytestmark = pytest.mark.timeout(60)

F4 = np.float32


def disagree(call, ranks=3):
    """Return the text of the MismatchError that ``call`` raises alike on all ranks; later calls must work."""

    def work(comm):
        with pytest.raises(gccomm.MismatchError) as caught:
            call(comm)
        assert (comm.compressed_allreduce(np.ones(2000, F4)) > 2.9).all()
        assert comm.broadcast(comm.rank, 1) == 1
        return str(caught.value)

    texts = run(work, ranks)
    assert len(set(texts)) == 1
    return texts[0]


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize(
    ("usual", "other", "words"),
    [
        (np.ones(4, F4), np.ones(5, F4), ["float32[4]", "float32[5]"]),
        (np.ones(5000, F4), np.ones(5001, F4), ["5000", "5001"]),
        (np.ones((3, 4), F4), np.ones((4, 3), F4), ["3x4", "4x3"]),
        (np.ones(4, F4), np.ones((4, 1), F4), ["[4]", "[4x1]"]),
        (np.ones(4, F4), np.ones((), F4), ["[4]", "scalar"]),
        (np.ones(4, F4), np.empty(0, F4), ["[4]", "[0]"]),
        (np.ones(4, F4), np.ones(4), ["float32", "float64"]),
        (np.ones(4, F4), np.ones(4, np.int32), ["float32", "int32"]),
        (np.ones(4, np.int32), np.ones(4, np.uint32), ["int32", "uint32"]),
        (np.ones(4, np.complex64), np.ones((4, 2), F4), ["complex", "4x2"]),
        (np.ones(4, np.int8), np.ones(4, bool), ["int8", "bool"]),
        ({"a": np.ones(4, F4)}, {"b": np.ones(4, F4)}, ["'a'", "'b'"]),
        ({"a": np.ones(4, F4)}, {"a": np.ones(4, F4), "b": np.ones(4, F4)}, ["no such array", "'b'"]),
        ({"a": np.ones(4, F4)}, [np.ones(4, F4)], ["'a'", "'0'"]),
        ({"a": np.ones(4, F4)}, {}, ["'a'", "no such array"]),
        ({"a": np.ones(4, F4)}, {"a": None}, ["'a'", "None"]),
        ({"a": 1.0, "b": 2}, {"a": 1, "b": 2}, ["float64", "int64"]),
    ],
)
def test_different_arrays_on_one_rank(usual, other, words, odd):
    def call(comm):
        comm.compressed_allreduce(other if comm.rank == odd else usual)

    text = disagree(call)
    assert all(word in text for word in words)
    assert f"on rank {odd}" in text
    rest = ", ".join(str(r) for r in range(3) if r != odd)
    assert f"on ranks {rest}" in text


@pytest.mark.parametrize("count", [3, 3000])
def test_error_names_the_array_among_many(count):
    def call(comm):
        tree = {f"layer{i}": np.ones(count, F4) for i in range(200)}
        if comm.rank == 2:
            tree["layer137"] = np.ones(count + 1, F4)
        comm.compressed_allreduce(tree)

    assert "layer137" in disagree(call)


@pytest.mark.parametrize("key", ["ключ/λ", "a" * 5000, "new\nline", "\ud800", 'quote"', "\x00"])
def test_any_key_can_be_named(key):
    text = disagree(lambda comm: comm.compressed_allreduce({key: np.ones(3 + (comm.rank == 1), F4)}))
    assert "float32[4]" in text or len(key) > 900


@pytest.mark.parametrize(
    ("option", "usual", "other", "count"),
    [
        ("op", "sum", "mean", 4),
        ("op", "sum", "mean", 4000),
        ("codec", "uniform", "uniform:wire_bits=4", 4000),  # below 1024 coordinates both are exact, and equal
        ("codec", "uniform", "raw", 4),
        ("codec", "uniform", "raw", 4000),
        ("exact_below", 1024, 0, 4),
        ("exact_below", 1024, 0, 4000),
        ("nonfinite", "propagate", "raise", 4),
    ],
)
def test_different_options_of_a_call(option, usual, other, count):
    def call(comm):
        value = other if comm.rank == 1 else usual
        comm.compressed_allreduce(np.ones(count, F4), **{option: value})

    text = disagree(call)
    assert str(other).partition("=")[2] in text or str(other).lower() in text.lower()
    assert "rank 1" in text


@pytest.mark.parametrize(
    ("option", "usual", "other"),
    [
        ("op", "sum", "mean"),
        ("codec", {"w*": "raw"}, {"w*": "bf16"}),
        ("error_feedback", False, True),
        ("bucket_bytes", 25 << 20, 1 << 20),
        ("seed", 0, 1),
        ("exact_below", 1024, 1025),
        ("nonfinite", "propagate", "raise"),
    ],
)
def test_different_options_of_a_reducer(option, usual, other):
    def call(comm):
        reducer = gccomm.Reducer(comm=comm, **{option: other if comm.rank == 0 else usual})
        reducer({"w": np.ones(3000, F4)})

    assert "rank 0" in disagree(call)


CALLS = {
    "allreduce": lambda comm: comm.allreduce(np.ones(3000, F4)),
    "compressed": lambda comm: comm.compressed_allreduce(np.ones(3000, F4)),
    "broadcast": lambda comm: comm.broadcast(np.ones(3, F4)),
    "barrier": lambda comm: comm.barrier(),
    "split": lambda comm: comm.split(0),
    "close": lambda comm: comm.close(),
    "reducer": lambda comm: gccomm.Reducer(comm=comm)({"w": np.ones(3000, F4)}),
}


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(CALLS, 2)))
def test_different_calls_on_different_ranks(first, second):
    def call(comm):
        CALLS["reducer"](comm)  # so that a reducer made on some ranks only is not what is seen
        CALLS[first if comm.rank == 1 else second](comm)

    text = disagree(call)
    assert "rank 1" in text


@pytest.mark.parametrize("root", [0, 1])
def test_different_roots_and_arrays_of_a_broadcast(root):
    assert "root" in disagree(lambda comm: comm.broadcast(np.ones(3), root if comm.rank == 2 else 2))
    assert "float64[4]" in disagree(lambda comm: comm.broadcast(np.ones(3 + (comm.rank == root)), root))


def test_two_calls_in_another_order_on_one_rank():
    def call(comm):
        arrays = {"a": np.full(1500, 1, F4), "b": np.full(1500, 2, F4)}
        for key in "ba" if comm.rank == 1 else "ab":
            comm.compressed_allreduce({key: arrays[key]})

    assert "'a'" in disagree(call)


def test_two_reducers_swapped_on_one_rank():
    def work(comm):
        first, second = gccomm.Reducer("uniform", comm=comm), gccomm.Reducer("uniform", comm=comm)
        grads = {"w": np.full(2000, comm.rank, F4)}
        order = (second, first) if comm.rank == 1 else (first, second)
        texts = []
        for reducer in order:
            with pytest.raises(gccomm.MismatchError, match="reducer") as caught:
                reducer(grads)
            texts.append(str(caught.value))
        assert first.step == second.step == 0
        for reducer in (first, second):
            assert np.abs(reducer(grads)["w"] - 1).max() <= 2 * 3 / 127
        return texts

    results = run(work, 3)
    assert all(texts == results[0] for texts in results)


def test_insertion_order_of_keys_does_not_matter():
    def work(comm):
        keys = ["a", "b", "c"]
        tree = {k: np.full(1500, ord(k), F4) for k in (keys if comm.rank else reversed(keys))}
        y = comm.compressed_allreduce(tree, "mean", "uniform")
        assert list(y) == list(tree)
        return all(np.abs(y[k] - ord(k)).max() <= 3 for k in keys)

    assert all(run(work, 3))


def test_fewer_steps_on_one_rank_meet_the_barrier():
    def call(comm):
        for _ in range(5 if comm.rank == 0 else 4):
            comm.compressed_allreduce(np.ones(10, F4))
        if comm.rank != 0:
            comm.barrier()

    text = disagree(call)
    assert "compressed_allreduce on rank 0" in text
    assert "barrier on ranks 1, 2" in text


def test_fewer_steps_on_one_rank_are_reported_as_a_stall(monkeypatch, capfd):
    monkeypatch.setenv("GCCOMM_STALL_S", "0.2")
    reported = threading.Event()

    def work(comm):
        reducer = gccomm.Reducer(comm=comm)
        for _ in range(5 if comm.rank == 0 else 4):
            reducer({"w": np.ones(10, F4)})
        if comm.rank == 0:
            return
        reported.wait(2)
        reducer({"w": np.ones(10, F4)})

    threading.Timer(0.8, reported.set).start()
    run(work, 2)
    report = capfd.readouterr().err
    assert report.count("rank 0 of 2 has waited") == 1
    assert "compressed_allreduce of reducer 1, step 4" in report
    assert "GCCOMM_TIMEOUT_S" in report


def test_limit_on_waiting_breaks_the_communicator_on_the_rank_that_waited(monkeypatch):
    monkeypatch.setenv("GCCOMM_TIMEOUT_S", "0.3")
    waited = threading.Event()

    def work(comm):
        if comm.rank == 1:
            waited.wait(20)
            with pytest.raises(gccomm.BackendError):
                comm.allreduce(1)
            return
        with pytest.raises(
            gccomm.CollectiveTimeout, match=r"rank 0 of 2 .*compressed_allreduce, step 0.*0\.3 s"
        ):
            comm.allreduce(1)
        waited.set()
        with pytest.raises(gccomm.BackendError, match="broken"):
            comm.barrier()

    run(work, 2)


@pytest.mark.parametrize("value", ["-1", "soon", "nan"])
def test_bad_limits_are_refused(monkeypatch, value):
    monkeypatch.setenv("GCCOMM_TIMEOUT_S", value)
    with pytest.raises(ValueError, match="GCCOMM_TIMEOUT_S"):
        run(lambda comm: comm.barrier(), 2)
