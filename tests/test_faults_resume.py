"""A reducer's state on its way to a checkpoint and back."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import gccomm
from gccomm.testing import run

pytestmark = pytest.mark.timeout(60)

F4 = np.float32


def gradients(rank, step, count=1500):
    rng = np.random.default_rng([rank, step])
    return {"a": rng.normal(size=count).astype(F4), "b": (100 * rng.normal(size=count)).astype(F4)}


def bits(tree):
    return {key: np.asarray(y).tobytes() for key, y in tree.items()}


@pytest.mark.parametrize("feedback", [False, True])
def test_resumed_run_gives_the_same_bits(feedback, tmp_path):
    def make(comm):
        return gccomm.Reducer("uniform:wire_bits=4", comm=comm, error_feedback=feedback, seed=7)

    def work(comm):
        whole = make(comm)
        results = [bits(whole(gradients(comm.rank, step))) for step in range(8)]
        first = make(comm)
        for step in range(4):
            first(gradients(comm.rank, step))
        path = tmp_path / f"{comm.rank}"
        path.write_bytes(pickle.dumps(first.state_dict()))
        kept = first.state_dict()
        first(gradients(comm.rank, 4))  # must not change what was taken
        assert kept["step"] == 4
        second = make(comm)
        second.load_state_dict(pickle.loads(path.read_bytes()))
        assert second.step == 4
        return results[4:] == [bits(second(gradients(comm.rank, step))) for step in range(4, 8)]

    assert all(run(work, 3))


def test_state_that_only_some_ranks_loaded_is_a_mismatch_and_can_be_mended():
    def work(comm):
        old = gccomm.Reducer(comm=comm)
        old(gradients(comm.rank, 0))
        state = old.state_dict()
        new = gccomm.Reducer(comm=comm)
        if comm.rank == 1:
            new.load_state_dict(state)
        with pytest.raises(gccomm.MismatchError, match=r"step.*1 on rank 1") as caught:
            new(gradients(comm.rank, 1))
        new.load_state_dict(state)
        assert bits(new(gradients(comm.rank, 1))) == bits(old(gradients(comm.rank, 1)))
        return str(caught.value)

    assert len(set(run(work, 3))) == 1


CHANGES = [{"version": v} for v in (0, 99, "1", None)] + [{"seed": v} for v in (1, None, "0")]
CHANGES += [{"step": v} for v in (-1, 2.5, "3", None, float("nan"))]
CHANGES += [{"residuals": v} for v in (None, [1], {"a": 1}, {"a": np.zeros((2, 2))}, {"a": np.zeros(3, int)})]
CHANGES += [{"residuals": {"a": "text"}}, {"residuals": {"a": np.array([None])}}]


@pytest.mark.parametrize("change", CHANGES, ids=repr)
def test_malformed_state_is_refused_and_changes_nothing(change):
    def work(comm):
        reducer = gccomm.Reducer(comm=comm, error_feedback=True)
        for step in range(3):
            reducer(gradients(comm.rank, step))
        good = reducer.state_dict()
        with pytest.raises((TypeError, ValueError), match=next(iter(change)).rstrip("s")):
            reducer.load_state_dict({**good, **change})
        for key in good:
            with pytest.raises(ValueError, match=key):
                reducer.load_state_dict({k: v for k, v in good.items() if k != key})
        state = reducer.state_dict()
        same = all((state["residuals"][key] == good["residuals"][key]).all() for key in "ab")
        return state["step"], sorted(state["residuals"]), same

    assert run(work, 1) == [(3, ["a", "b"], True)]
