"""``Reducer``: choices by key, and everything that it carries from step to step except error feedback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gccomm
from gccomm import Reducer, testing
from gccomm.codecs.uniform import Uniform
from gccomm.errors import GccommError, MismatchError, NonFiniteError

Array = np.ndarray[Any, Any]
Body = Callable[[gccomm.Communicator], Any]


def gaussian(rank: int, step: int = 0, size: int = 2048) -> Array:
    return np.random.default_rng([rank, step, size]).standard_normal(size).astype(np.float32)


def on_ranks(n: int) -> Callable[[Body], list[Any]]:
    """Decorate a function of a communicator: it becomes the results of n ranks."""
    return lambda body: testing.run(body, n)


def caught(kind: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as info:
        call()
    return str(info.value)


TREE: dict[str, Any] = {
    "encoder": {"weight": gaussian(0, size=2100).reshape(3, 700), "bias": np.ones(1100, np.float32)},
    "head": np.ones(1500, np.float32),
    "count": np.int64(3),
    "mask": np.array([True, False]),
}
CODECS: dict[str, str | gccomm.Codec] = {"*/bias": "raw", "encoder/*": Uniform(4), "nothing*": "bf16"}
OPS = {"count": "sum", "mask": "sum", "encoder/bias": "sum", "*": "mean"}


def test_codecs_and_ops_by_key() -> None:
    """The first pattern that matches wins; what none matches has the default codec."""

    @on_ranks(3)
    def results(comm: gccomm.Communicator) -> tuple[Any, Any]:
        reducer = Reducer(CODECS, op=OPS)
        return reducer(TREE), reducer.stats

    for tree, stats in results:
        assert stats.codecs == {"uniform": 3 * 700, "rotated": 1500, "raw": 1100, "integers": 3}
        np.testing.assert_array_equal(tree["encoder"]["bias"], 3)
        error = np.abs(tree["encoder"]["weight"] - TREE["encoder"]["weight"]).max()
        assert 0.1 < error < np.abs(TREE["encoder"]["weight"]).max() / 2  # 4 bits: coarse levels
        np.testing.assert_allclose(tree["head"], 1, atol=0.05)
        assert tree["count"] == 9
        assert tree["mask"].tolist() == [True, False]


def test_integers_need_a_sum() -> None:
    @on_ranks(2)
    def texts(comm: gccomm.Communicator) -> str:
        return caught(TypeError, lambda: Reducer("uniform")(TREE))

    assert len(set(texts)) == 1
    assert "the mean of integers is not an integer: 'count' is int64" in texts[0]


def test_mean_is_the_default_and_agrees_with_the_function() -> None:
    @on_ranks(2)
    def results(comm: gccomm.Communicator) -> tuple[Array, Array]:
        by_function = comm.compressed_allreduce({"w": gaussian(comm.rank)}, "mean", "uniform:wire_bits=6")
        return Reducer("uniform:wire_bits=6")({"w": gaussian(comm.rank)})["w"], by_function["w"]

    for a, b in results:
        np.testing.assert_array_equal(a, b)


def test_results_are_those_of_the_simulation() -> None:
    @on_ranks(3)
    def results(comm: gccomm.Communicator) -> Array:
        reducer = Reducer("uniform:wire_bits=4", op="sum", seed=7, error_feedback=True)
        for step in range(3):
            result = reducer({"w": gaussian(comm.rank, step)})
        return np.asarray(result["w"])

    def inputs(step: int) -> list[dict[str, Array]]:
        return [{"w": gaussian(rank, step)} for rank in range(3)]

    ys, _ = testing.simulate(inputs, Uniform(4), "sum", 7, 3, error_feedback=True)
    for result in results:
        np.testing.assert_array_equal(result, ys[0]["w"])


def test_two_reducers_are_independent() -> None:
    """Interleaved with another one, each gives what it gives alone."""

    def alone(comm: gccomm.Communicator, seed: int) -> list[Array]:
        reducer = Reducer("uniform:wire_bits=4", comm=comm, seed=seed, error_feedback=True)
        return [reducer({"w": gaussian(comm.rank, step)})["w"] for step in range(3)]

    def mixed(comm: gccomm.Communicator) -> list[list[Array]]:
        one = Reducer("uniform:wire_bits=4", comm=comm, seed=1, error_feedback=True)
        two = Reducer("uniform:wire_bits=4", comm=comm, seed=2, error_feedback=True)
        results: list[list[Array]] = [[], []]
        for step in range(3):
            results[0].append(one({"w": gaussian(comm.rank, step)})["w"])
            comm.allreduce(1.0)
            results[1].append(two({"w": gaussian(comm.rank, step)})["w"])
        assert (one.step, two.step) == (3, 3)
        return results

    expected = [testing.run(lambda comm, s=seed: alone(comm, s), 2)[0] for seed in (1, 2)]  # type: ignore[misc]
    np.testing.assert_array_equal(testing.run(mixed, 2)[0], expected)
    assert not np.array_equal(expected[0], expected[1])


def test_reducers_made_in_another_order_are_told_apart() -> None:
    @on_ranks(2)
    def texts(comm: gccomm.Communicator) -> str:
        reducers = [Reducer("uniform"), Reducer("uniform")]
        return caught(MismatchError, lambda: reducers[comm.rank](gaussian(0)))

    assert texts[0] == texts[1]
    assert "disagree about reducer" in texts[0]
    assert "1 on rank 0; 2 on rank 1" in texts[0]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (({"seed": 1}, {"seed": 2}), "seed=2"),
        (({"bucket_bytes": 100}, {"bucket_bytes": 200}), "bucket_bytes=200"),
        (({"exact_below": 1}, {"exact_below": 2}), "exact_below=2"),
        (({"nonfinite": "raise"}, {"nonfinite": "propagate"}), "nonfinite='propagate'"),
        (({"op": "sum"}, {"op": "mean"}), "mean, Uniform(wire_bits=8) on rank 1"),
        (({"codec": "raw"}, {"codec": "bf16"}), "BFloat16() on rank 1"),
        (({"error_feedback": True}, {"error_feedback": False}), "error feedback on rank 0"),
    ],
)
def test_options_that_differ_are_named(options: tuple[dict[str, Any], ...], part: str) -> None:
    @on_ranks(2)
    def texts(comm: gccomm.Communicator) -> tuple[str, float]:
        reducer = Reducer(**{"codec": "uniform", **options[comm.rank]})
        text = caught(MismatchError, lambda: reducer({"k": gaussian(0)}))
        assert reducer.step == 0
        return text, comm.compressed_allreduce(1.0)

    assert texts[0] == texts[1]
    assert part in texts[0][0]
    assert texts[0][1] == 2


def test_none_counts_as_zeros_where_others_have_the_key() -> None:
    @on_ranks(3)
    def results(comm: gccomm.Communicator) -> list[Any]:
        reducer = Reducer("uniform", op="sum")
        tree: dict[str, Any] = {"w": gaussian(comm.rank), "s": np.full(5, 2.0), "i": np.int32(4)}
        without = dict.fromkeys(tree) if comm.rank == 1 else tree
        zeros = {key: x * 0 for key, x in tree.items()} if comm.rank == 1 else tree
        outcome = [reducer(tree), reducer(without)]
        again = Reducer("uniform", op="sum")
        return [*outcome, again(tree), again(zeros)]

    for first, missing, same_first, zeros in results:
        for key in first:
            np.testing.assert_array_equal(first[key], same_first[key])
            np.testing.assert_array_equal(missing[key], zeros[key])
            assert type(missing[key]) is type(zeros[key])
            assert missing[key].dtype == zeros[key].dtype


def test_none_on_all_ranks_stays_none_whether_known_or_not() -> None:
    @on_ranks(2)
    def results(comm: gccomm.Communicator) -> list[Any]:
        reducer = Reducer("raw", op="sum")
        x = np.ones(2000, np.float32)
        trees = [{"a": None, "b": x}, {"a": x, "b": x}, {"a": None, "b": None}, {"a": x, "b": None}]
        return [reducer(tree) for tree in trees]

    for unknown, full, known, half in results:
        assert unknown["a"] is None
        assert (full["a"] == 2).all()
        assert known == {"a": None, "b": None}
        assert half["b"] is None
        assert (half["a"] == 2).all()
        assert (unknown["b"] == 2).all()


def test_none_on_some_ranks_for_an_unknown_key_is_a_mismatch() -> None:
    @on_ranks(2)
    def texts(comm: gccomm.Communicator) -> str:
        reducer = Reducer("uniform")
        x = gaussian(0)
        text = caught(MismatchError, lambda: reducer({"a": x, "b": x if comm.rank else None}))
        assert reducer({"a": x, "b": x})["b"].shape == x.shape
        return text

    assert texts[0] == texts[1]
    assert "'b'" in texts[0]


@pytest.mark.parametrize("nonfinite", ["raise", "propagate"])
def test_nonfinite_input(nonfinite: str) -> None:
    @on_ranks(2)
    def results(comm: gccomm.Communicator) -> Any:
        reducer = Reducer("uniform", op="sum", nonfinite=nonfinite)
        x = gaussian(comm.rank)
        bad = x.copy()
        bad[1030] = np.inf if comm.rank == 1 else 0
        out = np.full(2048, 5, np.float32)
        if nonfinite == "raise":
            text = caught(NonFiniteError, lambda: reducer({"w": bad}, out={"w": out}))
            return text, out, reducer.step, reducer({"w": x})["w"]
        return "", reducer({"w": bad}, out={"w": out})["w"], reducer.step, reducer({"w": x})["w"]

    for text, first, step, second in results:
        if nonfinite == "raise":
            assert text == results[0][0]
            assert "rank 1: input holds inf or NaN in 'w'" in text
            assert (first == 5).all()
        else:
            assert np.isnan(first[1024:]).all()
            assert np.isfinite(first[:1024]).all()
        assert step == (nonfinite == "propagate")
        assert np.isfinite(second).all()


def test_stats_of_the_last_step() -> None:
    @on_ranks(2)
    def results(comm: gccomm.Communicator) -> Any:
        reducer = Reducer("uniform:wire_bits=4", op="sum")
        assert (reducer.stats.messages, reducer.stats.ratio) == (0, 1.0)
        reducer({"w": gaussian(comm.rank, size=1 << 16), "b": np.ones(10)})
        first = reducer.stats
        comm.allreduce(1.0)
        assert reducer.stats is first  # calls of others do not count
        reducer(np.ones(3, np.int8))
        return first, reducer.stats

    for first, second in results:
        assert first.codecs == {"uniform": 1 << 16, "two-words": 10}
        assert first.float32_bytes == 4 * ((1 << 16) + 10)
        assert 7 < first.float32_bytes / (first.wire_bytes - first.measure_bytes) < 8
        assert 0 < first.vnmse_estimate < 1
        assert min(first.encode_s, first.wire_s, first.decode_s) > 0
        assert second.codecs == {"integers": 3}
        assert second.vnmse_estimate == first.vnmse_estimate  # the last one known


@pytest.mark.parametrize(
    "options",
    [
        {"codec": 3},
        {"codec": {"w": "unifrom"}},
        {"codec": {3: "raw"}},
        {"op": "max"},
        {"op": {"*": "max"}},
        {"op": {3: "sum"}},
        {"error_feedback": "yes"},
        {"error_feedback": 1},
        {"bucket_bytes": 0},
        {"bucket_bytes": 1.5},
        {"exact_below": -1},
        {"exact_below": True},
        {"seed": 0.5},
        {"seed": None},
        {"nonfinite": "ignore"},
    ],
    ids=str,
)
def test_bad_options_are_refused_and_named(options: dict[str, Any]) -> None:
    def attempt(comm: gccomm.Communicator) -> str:
        try:
            Reducer(**options)
        except (TypeError, ValueError) as error:
            return str(error)
        raise GccommError("accepted")

    (text,) = testing.run(attempt, 1)
    assert any(f"`{name}`" in text for name in options) or "no codec has the id 'unifrom'" in text
