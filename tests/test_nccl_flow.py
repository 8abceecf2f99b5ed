"""Calls whose words stay on a device, over NCCL: the bits of the CPU's, order, waits."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

import gccomm
from gccomm import kernels, testing
from gccomm.communicator import Communicator
from gccomm.device_words import DeviceWords
from gccomm.flow import DOOM, HEADER, TAG, Board
from gccomm.kernels.cuda import on_cupy
from tests.cuda_on_cpu import kernels_on_cpu
from tests.devices import trees
from tests.nccl_site import FLOWING, WAITING, Marks, Site, floats, same, site

__all__ = ["site"]


def steps(site: Site, codec: str, ranks: int, make: Any, number: int = 4, **options: Any) -> Any:
    """Return each rank's results of the steps, statistics of the last one, and its communicator's waits."""

    def program(comm: Communicator) -> Any:
        reducer = gccomm.Reducer(codec, comm=comm, op="sum", **options)
        found = []
        for step in range(number):
            found.append(site.back(reducer(site.there(make(step, ranks)[comm.rank], comm.rank))))
        return found, reducer.stats

    return site.run(ranks, program)


def expected(codec: str, ranks: int, make: Any, number: int = 4, **options: Any) -> list[Any]:
    def program(comm: Communicator) -> Any:
        reducer = gccomm.Reducer(codec, comm=comm, op="sum", **options)
        return [reducer(make(step, ranks)[comm.rank]) for step in range(number)], reducer.stats

    return testing.run(program, ranks)


@pytest.mark.parametrize("codec", [*FLOWING, *WAITING])
def test_results_are_the_bits_of_the_cpus(site: Site, codec: str) -> None:
    """With integers among the arrays, whose formats the host chooses in every call."""
    ranks = 4 if "checked" in codec else 3
    wanted = expected(codec, ranks, trees)
    found = steps(site, codec, ranks, trees)
    for (results, stats), (others, plain) in zip(found, wanted, strict=True):
        for mine, other in zip(results, others, strict=True):
            assert same(mine, other)
        assert stats.codecs == plain.codecs
        np.testing.assert_equal(stats.vnmse_estimate, plain.vnmse_estimate)


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("codec", FLOWING)
def test_a_known_layout_is_not_waited_for(site: Site, codec: str, feedback: bool) -> None:
    wanted = expected(codec, 3, floats, 7, error_feedback=feedback)
    marks = Marks(site, 3)

    def program(comm: Communicator) -> Any:
        reducer = gccomm.Reducer(codec, comm=comm, op="sum", error_feedback=feedback)
        inputs = [site.there(floats(step, 3)[comm.rank], comm.rank) for step in range(7)]
        found = [reducer(x) for x in inputs[:4]]
        before = marks(comm)
        found += [reducer(x) for x in inputs[4:]]
        assert marks(comm) == before
        comm.synchronize()
        assert marks(comm) > before
        return [site.back(x) for x in found]

    for results, (others, _) in zip(site.run(3, program), wanted, strict=True):
        for mine, other in zip(results, others, strict=True):
            assert same(mine, other)


def test_several_pieces_are_on_their_way(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gccomm.flowing.PIECE_COORDINATES", 0)
    options = {"bucket_bytes": 9000}
    wanted = expected("rotated:headroom=safe", 2, floats, 6, **options)
    found = steps(site, "rotated:headroom=safe", 2, floats, 6, **options)
    for (results, stats), (others, _) in zip(found, wanted, strict=True):
        assert stats.messages > 6
        for mine, other in zip(results, others, strict=True):
            assert same(mine, other)


def test_more_messages_than_tags_are_sent_at_a_time(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gccomm.flowing.PIECE_COORDINATES", 0)
    monkeypatch.setattr("gccomm.flow.TAGS", 3)

    def make(step: int, ranks: int) -> list[Any]:
        return [
            {"x": np.random.default_rng([step, r]).standard_normal(20_000).astype(np.float32)}
            for r in range(ranks)
        ]

    wanted = expected("uniform", 2, make, 5, bucket_bytes=5000)
    for (results, stats), (others, _) in zip(
        steps(site, "uniform", 2, make, 5, bucket_bytes=5000), wanted, strict=True
    ):
        assert stats.messages > 10
        assert all(map(same, results, others))


def test_functions_and_means(site: Site) -> None:
    xs = [
        [np.random.default_rng([s, r]).standard_normal((40, 70)).astype(np.float16) for r in range(2)]
        for s in range(4)
    ]
    wanted = testing.run(
        lambda comm: [comm.compressed_allreduce(x[comm.rank], "mean", "uniform") for x in xs], 2
    )
    marks = Marks(site, 2)

    def program(comm: Communicator) -> Any:
        there = [site.there(x[comm.rank], comm.rank) for x in xs]
        found = [comm.compressed_allreduce(there[0], "mean", "uniform")]
        before = marks(comm)
        found += [comm.compressed_allreduce(x, "mean", "uniform") for x in there[1:]]
        assert marks(comm) == before
        return [site.back(x) for x in found]

    for results, others in zip(site.run(2, program), wanted, strict=True):
        assert all(map(same, results, others))


def test_asynchronous_calls_and_pushed_steps(site: Site) -> None:
    tree = floats(0, 2)
    wanted = testing.run(lambda comm: comm.compressed_allreduce(tree[comm.rank], codec="uniform"), 2)

    def program(comm: Communicator) -> Any:
        there = site.there(tree[comm.rank], comm.rank)
        found = [comm.compressed_allreduce_async(there, codec="uniform").wait()]
        reducer = gccomm.Reducer("uniform", comm=comm, op="sum")
        for _ in range(5):
            for key, x in there.items():
                reducer.push(key, x)
            reducer.wait()
        return site.back(found[0])

    for found, other in zip(site.run(2, program), wanted, strict=True):
        assert same(found, other)


def test_handles_that_are_dropped(site: Site) -> None:
    """Nobody waits for them; their memory is waited for before it goes, and the calls after them go on."""
    tree = floats(0, 2)

    def last(comm: Communicator) -> Any:
        return [comm.compressed_allreduce(tree[comm.rank], codec="uniform") for _ in range(43)][40:]

    wanted = testing.run(last, 2)

    def program(comm: Communicator) -> Any:
        there = site.there(tree[comm.rank], comm.rank)
        for _ in range(40):
            comm.compressed_allreduce_async(there, codec="uniform")
        works = [comm.compressed_allreduce_async(there, codec="uniform") for _ in range(3)]
        found = works[2 * comm.rank].wait()
        del works
        comm.barrier()
        return site.back(found)

    for rank, found in enumerate(site.run(2, program)):
        assert same(found, wanted[rank][2 * rank])


def test_non_finite_blocks_are_nan_and_nothing_is_broken(site: Site) -> None:
    x = np.ones(3000, np.float32)
    x[1500] = np.inf

    def program(comm: Communicator) -> Any:
        mine = site.there(x if comm.rank else np.ones_like(x), comm.rank)
        found = [comm.compressed_allreduce(mine, codec="uniform") for _ in range(3)]
        comm.synchronize()
        return [site.back(y) for y in found]

    for found in site.run(2, program):
        for y in found:
            assert np.isnan(y[1024:2048]).all()
            assert (y[:1024] == 2).all()


def test_closing_waits_for_what_was_enqueued(site: Site) -> None:
    tree = floats(0, 2)

    def last(comm: Communicator) -> Any:
        return [comm.compressed_allreduce(tree[comm.rank], codec="uniform") for _ in range(3)][-1]

    wanted = testing.run(last, 2)

    def program(comm: Communicator) -> Any:
        x = site.there(tree[comm.rank], comm.rank)
        for _ in range(3):
            found = comm.compressed_allreduce(x, codec="uniform")
        queue = next(iter(comm._boards.found.values())).queue
        stream = site.machine.streams[queue.stream]
        event = stream.record()
        assert event.mark is not None
        assert not event.mark.done
        comm.close()
        assert event.mark.done
        return site.back(found)

    for found, other in zip(site.run(2, program), wanted, strict=True):
        assert same(found, other)


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("before", [0, HEADER])
@pytest.mark.parametrize("doomed", [False, True])
@pytest.mark.parametrize("differs", [False, True])
def test_the_guard(count: int, before: int, doomed: bool, differs: bool) -> None:
    device = kernels_on_cpu()
    got, flags = np.arange(3, dtype=np.uint32), np.array([before, doomed], np.uint32)
    expected, spoilt = got.copy(), np.zeros(5001, np.uint16)
    expected[2] += differs
    places = [int(a.ctypes.data) for a in (got, expected, flags, spoilt)]
    device.guard(places[0], places[1], count, places[2], TAG, places[3], 5000)
    found = DOOM if doomed else TAG if differs and count else 0
    assert flags.tolist() == [before | found, doomed]
    assert (spoilt[:5000] == (0xFFFF if before | found else 0)).all()
    assert spoilt[5000] == 0


def test_words_of_a_device_are_arrays_to_numpy(site: Site) -> None:
    """What codecs do with words that they look at."""
    board = Board(on_cupy.device_kernels(0), 0, lambda: None)
    words = DeviceWords.empty(6, np.uint32, board)
    words[:] = np.arange(6, dtype=np.uint32)
    words[1:3] = 9
    words[-1] = 77
    words[:1] = words[4:5]
    assert words.tolist() == [4, 9, 9, 3, 4, 77]
    assert board.waits == 1
    assert len(words) == 6
    assert int(words[2]) == 9
    assert (words[2:4] != np.array([9, 4])).tolist() == [False, True]
    assert (words + np.uint32(1)).dtype == np.uint32
    np.copyto(words[:2], np.array([5, 6], np.uint32))
    np.left_shift(np.uint32(1), np.array([3, 4], np.uint32), out=words[2:4])
    assert words[:4].max() == 16
    assert list(words[:2]) == [5, 6]
    assert np.concatenate([words[:1], [1]]).tolist() == [5, 1]
    assert words.view(np.uint16).size == 12
    assert kernels.address(words[3:]) == words.address + 12
    with pytest.raises(TypeError, match="only consecutive words"):
        words[::2] = 0
    with pytest.raises(ValueError, match="2 words do not fit into 3"):
        words[:3] = words[:2]
    with pytest.raises(ValueError, match="without a copy"):
        np.array(words, copy=False)


def test_pushed_buckets_that_cannot_overflow_are_waited_for_by_nobody(site: Site) -> None:
    """Neither when their turn is over nor by `wait`."""
    marks, size = Marks(site, 2), 40_000

    def program(comm: Communicator) -> Any:
        reducer = gccomm.Reducer("uniform", comm=comm, op="sum", bucket_bytes=170_000, error_feedback=False)
        there = {key: site.there(np.full(size, i, np.float32), comm.rank) for i, key in enumerate("abcd")}
        for step in range(7):
            before = marks(comm)
            for key, x in there.items():
                reducer.push(key, x)
            found = reducer.wait()
            if step > 3:
                assert marks(comm) == before
        return [float(site.back(found[key])[0]) for key in "abcd"]

    assert site.run(2, program) == [[0, 2, 4, 6]] * 2


def test_buckets_of_a_reducer_that_goes_before_wait_are_waited_for(site: Site) -> None:
    """Their arrays are read until then."""

    def program(comm: Communicator) -> Any:
        x = site.there(np.ones(5000, np.float32), comm.rank)
        reducer = gccomm.Reducer("uniform", comm=comm, bucket_bytes=1)
        for _ in range(4):
            for key in "ab":
                reducer.push(key, x)
            reducer.wait()
        reducer.push("a", x)
        step = reducer._pushes._step
        assert step is not None
        step.tasks[0].done.wait(30)
        (attempt,) = step.attempts.values()
        assert attempt._devices is not None
        ((_, event),) = attempt._devices._unseen
        assert not event.mark.done
        del reducer, step, attempt
        gc.collect()
        assert event.mark.done

    site.run(1, program)
