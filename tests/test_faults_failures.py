"""One rank that fails, before or after the agreement, and arrays that a rank does not have."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import gccomm
from gccomm.operand import Operand
from gccomm.testing import run

pytestmark = pytest.mark.timeout(60)

F4 = np.float32
GOOD = np.ones(2000, F4)


def fails_alike(call, kind, ranks=3):
    """Return the text of the error that one rank's own argument gives all ranks; the next calls must work."""

    def work(comm):
        reducer = gccomm.Reducer(comm=comm)
        with pytest.raises(kind) as caught:
            call(comm)
        assert caught.type is kind
        assert (comm.compressed_allreduce(GOOD) > 2.9).all()
        assert (reducer({"w": GOOD})["w"] > 0.9).all()
        assert comm.broadcast(comm.rank, comm.size - 1) == comm.size - 1
        return str(caught.value)

    texts = run(work, ranks)
    assert len(set(texts)) == 1
    return texts[0]


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"x": np.array([None])}, TypeError, "object"),
        ({"x": [1.0, "two"]}, TypeError, "text cannot be summed"),
        ({"x": {"a": 1.0, object(): 2.0}}, TypeError, "mapping key"),
        ({"x": {1: 1.0, "1": 2.0}}, ValueError, "same text"),
        ({"op": "max"}, ValueError, "max"),
        ({"op": "mean", "x": np.arange(4)}, TypeError, "mean of integers"),
        ({"codec": "unifrom"}, gccomm.UnknownCodecError, "unifrom"),
        ({"codec": "uniform:wire_bits=7"}, ValueError, "wire_bits"),
        ({"codec": "uniform:levels=3"}, TypeError, "levels"),
        ({"codec": 8}, TypeError, "codec"),
        ({"exact_below": -1}, ValueError, "exact_below"),
        ({"nonfinite": "drop"}, ValueError, "nonfinite"),
        ({"out": np.ones(3, F4)}, ValueError, "out"),
        ({"x": np.full(2000, np.nan, F4), "nonfinite": "raise"}, gccomm.NonFiniteError, "NaN"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_bad_argument_on_one_rank_raises_the_same_on_every_rank(options, kind, text, odd):
    def call(comm):
        mine = {"x": GOOD, **(options if comm.rank == odd else {})}
        comm.compressed_allreduce(mine.pop("x"), **mine)

    message = fails_alike(call, kind)
    assert message.startswith(f"rank {odd}: ")
    assert text in message


@pytest.mark.parametrize("root", [-1, 3, 1.0, "0", None, True])
def test_bad_root_on_one_rank_raises_the_same_on_every_rank(root):
    kind = ValueError if type(root) is int else TypeError
    assert "root" in fails_alike(lambda comm: comm.broadcast(1.0, root if comm.rank == 1 else 0), kind)


@pytest.mark.parametrize(("color", "key"), [(-1, 0), ("red", 0), (1.5, 0), (0, "first"), (0, 0.5)])
def test_bad_split_on_one_rank_raises_the_same_on_every_rank(color, key):
    def call(comm):
        comm.split(*((color, key) if comm.rank == 2 else (0, 0)))

    fails_alike(call, ValueError if color == -1 else TypeError)


class Exploding:
    """An object whose own protocol raises what no one expects."""

    def __init__(self, error):
        self.error = error

    def __dlpack_device__(self):
        raise self.error

    def __dlpack__(self, **_):
        raise self.error


@pytest.mark.parametrize("error", [ZeroDivisionError("z"), KeyError("k"), OSError("o"), MemoryError("m")])
def test_unexpected_error_while_reading_an_argument_is_shared(error):
    kind = MemoryError if isinstance(error, MemoryError) else gccomm.GccommError
    text = fails_alike(lambda comm: comm.allreduce(Exploding(error) if comm.rank == 1 else 1.0), kind)
    assert text.startswith("rank 1: ")


def test_several_ranks_with_different_bad_arguments_raise_that_of_the_first():
    def call(comm):
        comm.compressed_allreduce(GOOD, op="max" if comm.rank == 2 else "sum", exact_below=-comm.rank)

    assert fails_alike(call, ValueError).startswith("rank 1: `exact_below`")


def test_missing_arrays_count_as_zeros_once_the_key_is_known():
    def work(comm):
        reducer = gccomm.Reducer(comm=comm)
        first = {"a": np.ones(1500, F4), "b": np.full(3, -2, F4), "c": None}
        reducer(first)
        mean = reducer({**first, "b": None if comm.rank == 1 else first["b"]})
        nobody = reducer({**first, "b": None})
        again = reducer(first)
        for y, expected in ((mean["b"], -4 / 3), (again["b"], -2)):
            assert isinstance(y, np.ndarray)
            assert (y.dtype, y.shape) == (F4, (3,))
            assert np.abs(y - expected).max() < 1e-6
        assert nobody["b"] is None
        assert mean["c"] is nobody["c"] is None
        assert np.abs(nobody["a"] - 1).max() < 0.03
        return mean["b"].tobytes()

    assert len(set(run(work, 3))) == 1


def test_missing_large_integer_and_feedback_arrays():
    def work(comm):
        reducer = gccomm.Reducer("uniform", comm=comm, op="sum", error_feedback=True)
        tree = {"w": np.full(3000, 1, F4), "n": np.int64(5), "z": np.full(4, 1j, np.complex64)}
        reducer(tree)
        y = reducer({k: None if comm.rank == i else v for i, (k, v) in enumerate(tree.items())})
        assert np.abs(y["w"] - 2).max() < 0.2
        assert y["n"] == 10
        assert type(y["n"]) is np.int64
        assert (y["z"] == 2j).all()
        return y["w"].tobytes()

    assert len(set(run(work, 3))) == 1


def test_missing_array_of_an_unknown_key_is_a_mismatch():
    def call(comm):
        gccomm.Reducer(comm=comm)({"b": None if comm.rank == 1 else np.ones(3, F4)})

    text = fails_alike(call, gccomm.MismatchError)
    assert "'b': None on rank 1" in text


@pytest.mark.parametrize("count", [3000, 3_500_000])
@pytest.mark.parametrize("codec", ["uniform", "raw"])
def test_failure_after_the_agreement_gives_errors_and_never_wrong_sums(monkeypatch, count, codec):
    names = {"uniform": "decode", "raw": "decode_floats"}
    original = getattr(Operand, names[codec])
    failed = threading.Event()

    def decode(self, lo, hi, words, *args, **options):
        if args[-1].rank == 1 and not failed.is_set():
            failed.set()
            raise MemoryError("no memory to decode")
        return original(self, lo, hi, words, *args, **options)

    monkeypatch.setattr(Operand, names[codec], decode)

    def work(comm):
        x = np.full(count, comm.rank + 1, np.float16)
        seen = []
        for _ in range(2):
            try:
                y = comm.compressed_allreduce(x, codec=codec)
            except (MemoryError, gccomm.BackendError) as error:
                seen.append(error)
            else:
                assert np.abs(y - 6).max() <= 3 * 3 * 3 / 127
                seen.append(None)
        return seen

    first, second, third = run(work, 3)
    assert isinstance(second[0], MemoryError)
    assert all(isinstance(seen[1], gccomm.BackendError) for seen in (first, second, third))
    if count > 1_000_000:  # more messages were to come, so the others cannot have ended
        assert isinstance(first[0], gccomm.BackendError)
        assert isinstance(third[0], gccomm.BackendError)


def test_closed_communicator_refuses_every_call():
    def work(comm):
        reducer = gccomm.Reducer(comm=comm)
        part = comm.split(0)
        comm.close()
        comm.close()
        calls = [lambda: comm.allreduce(1), lambda: reducer({"w": GOOD}), lambda: comm.broadcast(1)]
        for call in [*calls, comm.barrier, lambda: comm.split(0)]:
            with pytest.raises(gccomm.BackendError, match="closed"):
                call()
        return part.allreduce(1)

    assert run(work, 3) == [3] * 3


def test_rank_that_leaves_the_context_by_an_error_does_not_wait_for_the_others():
    def work(comm):
        with pytest.raises(LookupError), comm:
            raise LookupError
        return comm.allreduce(1)

    assert run(work, 3) == [3] * 3


class Foreign:
    """An array of a library that may fail to take a result over."""

    def __init__(self, array, *, fails):
        self.array, self.fails = array, fails

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __array_namespace__(self):
        return self

    def from_dlpack(self, result):
        if self.fails:
            raise RuntimeError("no room")
        return np.from_dlpack(result)


def test_failure_to_hand_a_result_over_leaves_no_rank_behind():
    """Later calls either work on all ranks or fail at once on all; they are never out of step."""

    def work(comm):
        x = Foreign(np.ones(5, F4), fails=comm.rank == 1)
        if comm.rank == 1:
            with pytest.raises(Exception, match="no room"):
                comm.compressed_allreduce(x)
        else:
            assert (comm.compressed_allreduce(x) == 3).all()
        try:
            return float(comm.compressed_allreduce(2.0))
        except gccomm.BackendError:
            return "broken"

    assert run(work, 3) in ([6.0] * 3, ["broken"] * 3)
