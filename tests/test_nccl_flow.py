"""Calls whose words stay on a device, over NCCL: the bits of the CPU's, order, waits, failures, graphs.

Everything is a stand-in but gccomm: kernels run on the CPU, streams are as late as they may be, ranks are
threads with a device each.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gccomm_local
import gccomm_nccl
import numpy as np
import pytest

import gccomm
from gccomm import kernels, testing
from gccomm.communicator import Communicator
from gccomm.device_words import DeviceWords
from gccomm.flow import DOOM, HEADER, TAG, Board
from gccomm.kernels.cuda import on_cupy
from tests.cuda_on_cpu import OnCpu, kernels_on_cpu
from tests.devices import FAKE_NVRTC, trees
from tests.fake_gpu import Action, Machine
from tests.fake_nccl import FakeNccl, install

FLOWING = ("uniform:wire_bits=4", "uniform:wire_bits=5", "rotated:headroom=safe", "raw", "bf16", "fp16")
WAITING = (
    "rotated:wire_bits=4,headroom=checked",
    "rotated:wire_bits=4,headroom=clipped",
    "rotated:scales=predicted",
    "uniform:wire_bits=16,scales=predicted",
    "thc",
    "qsgd-mn:wire_bits=6",
    "qsgd-mn-ts:wire_bits=10",
    "grandk-mn",
    "global-qsgd",
    "intsgd",
    "topkc",
    "topkc:values=lanes",
    "powersgd",
)


class Site:
    """Ranks with a device each."""

    def __init__(self, machine: Machine, nccl: FakeNccl) -> None:
        self.machine, self.nccl = machine, nccl

    def there(self, tree: Any, rank: int) -> Any:
        """Return a tree of NumPy arrays as arrays of a rank's device."""
        if isinstance(tree, dict):
            return {key: self.there(value, rank) for key, value in tree.items()}
        with self.machine.cupy.cuda.Device(rank):
            return self.machine.cupy.asarray(tree)

    def back(self, tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: self.back(value) for key, value in tree.items()}
        return self.machine.cupy.asnumpy(tree)

    def run(self, size: int, program: Callable[[Communicator], Any], *, closes: bool = True) -> list[Any]:
        """Call `program` on a thread per rank; return what each returned, or raise what one raised."""
        results: list[Any] = [None] * size

        def body(base: Any) -> None:
            try:
                with self.machine.cupy.cuda.Device(base.rank):
                    stream = self.machine.cupy.cuda.Stream(non_blocking=True)
                    with stream:
                        comm = Communicator(gccomm_nccl.over(base))
                        results[base.rank] = program(comm)
                        if closes:
                            comm.close()
            except BaseException as error:
                results[base.rank] = error

        threads = [threading.Thread(target=body, args=(b,), daemon=True) for b in gccomm_local.group(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive(), "a rank hangs"
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Site]:
    shim = kernels_on_cpu("random").launcher
    assert isinstance(shim, OnCpu)
    machine = Machine(4, shim, FAKE_NVRTC)
    nccl = install(monkeypatch, machine)
    monkeypatch.setenv("GCCOMM_CACHE_DIR", str(tmp_path))
    on_cupy.forget_devices()
    yield Site(machine, nccl)
    on_cupy.forget_devices()


def floats(step: int, ranks: int) -> list[dict[str, Any]]:
    """Return trees without integers."""
    return [{k: v for k, v in tree.items() if v.dtype.kind not in "iub"} for tree in trees(step, ranks)]


def same(found: Any, expected: Any) -> bool:
    if isinstance(found, dict):
        return found.keys() == expected.keys() and all(same(found[k], expected[k]) for k in found)
    return found.dtype == expected.dtype and found.tobytes() == expected.tobytes()


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


class Marks:
    """Where all ranks meet in a program, and what a rank's device has been waited for by then."""

    def __init__(self, site: Site, ranks: int) -> None:
        self._machine, self._barrier = site.machine, threading.Barrier(ranks)

    def __call__(self, comm: Communicator) -> tuple[int, int]:
        self._barrier.wait(30)
        found = self._machine.synchronisations, sum(b.waits for b in comm._boards.values())
        self._barrier.wait(30)
        return found


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
    monkeypatch.setattr("gccomm.reduction.DEVICE_PIECE_COORDINATES", 0)
    options = {"bucket_bytes": 9000}
    wanted = expected("rotated:headroom=safe", 2, floats, 6, **options)
    found = steps(site, "rotated:headroom=safe", 2, floats, 6, **options)
    for (results, stats), (others, _) in zip(found, wanted, strict=True):
        assert stats.messages > 6
        for mine, other in zip(results, others, strict=True):
            assert same(mine, other)


def test_more_messages_than_tags_are_sent_at_a_time(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gccomm.reduction.DEVICE_PIECE_COORDINATES", 0)
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


# What goes wrong


def warm(comm: Communicator, site: Site, number: int = 2) -> Any:
    """Make a layout known; return an array of it."""
    x = site.there(np.full(3000, comm.rank + 1, np.float32), comm.rank)
    for _ in range(number):
        comm.compressed_allreduce(x, codec="uniform")
    return x


def all_raise(site: Site, size: int, program: Callable[[Communicator], Any]) -> list[Any]:
    """Return what each rank's program returned or raised."""
    results: list[Any] = [None] * size

    def kept(comm: Communicator) -> None:
        try:
            results[comm.rank] = program(comm)
        except gccomm.GccommError as error:
            results[comm.rank] = error
        except (TypeError, ValueError) as error:
            results[comm.rank] = error

    site.run(size, kept, closes=False)
    return results


@pytest.mark.parametrize("other", ["shape", "dtype", "host", "barrier", "codec", "key"])
def test_a_rank_that_makes_another_call_is_told_and_the_others_get_nans(site: Site, other: str) -> None:
    """The one that differs sees it in its own header; the others go on, and hear of it afterwards."""
    marks = threading.Barrier(3)
    nans: list[Any] = []

    def program(comm: Communicator) -> Any:
        x = warm(comm, site)
        marks.wait(30)
        if comm.rank == 1:
            if other == "barrier":
                return comm.barrier()
            strange: Any = {
                "shape": np.ones(4000, np.float32),
                "dtype": np.ones(3000, np.float64),
                "key": {"w": np.ones(3000, np.float32)},
            }.get(other, np.ones(3000, np.float32))
            there = strange if other == "host" else site.there(strange, 1)
            return comm.compressed_allreduce(
                there, codec="uniform:wire_bits=4" if other == "codec" else "uniform"
            )
        y = comm.compressed_allreduce(x, codec="uniform")
        try:
            comm.synchronize()
        finally:
            nans.append(site.back(y))
        return None

    results = all_raise(site, 3, program)
    assert all(isinstance(result, gccomm.MismatchError) for result in results), results
    assert "rank 1: " in str(results[1])
    assert "Others go on by a layout that had been agreed on" in str(results[1])
    assert "another rank made another call" in str(results[0])
    assert len(nans) == 2
    assert all(np.isnan(y).all() for y in nans)


def test_a_bad_argument_after_the_layout_is_known(site: Site) -> None:
    def program(comm: Communicator) -> Any:
        x = warm(comm, site)
        if comm.rank == 1:
            return comm.compressed_allreduce(x, op="max", codec="uniform")
        y = comm.compressed_allreduce(x, codec="uniform")
        comm.synchronize()
        return y

    results = all_raise(site, 2, program)
    assert isinstance(results[1], ValueError)
    assert isinstance(results[0], gccomm.MismatchError)


def test_a_missing_array_after_the_layout_is_known(site: Site) -> None:
    def program(comm: Communicator) -> Any:
        reducer = gccomm.Reducer("uniform", comm=comm)
        tree = site.there({"w": np.ones(3000, np.float32), "v": np.ones(2000, np.float32)}, comm.rank)
        for _ in range(4):
            reducer(tree)
        reducer({**tree, "v": None} if comm.rank else tree)
        return comm.synchronize()

    results = all_raise(site, 2, program)
    assert all(isinstance(result, gccomm.MismatchError) for result in results)
    assert "has None for an array" in str(results[1])


def test_a_sum_of_other_messages_is_nan(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tag that does not add up."""
    spoil: list[bool] = []
    from gccomm_nccl.backend import NcclBackend

    original = NcclBackend.sum_words

    def sum_words(self: Any, words: Any, /) -> None:
        original(self, words)
        if spoil and not isinstance(words, np.ndarray):
            words[len(words) - 1] = 12345

    monkeypatch.setattr(NcclBackend, "sum_words", sum_words)
    results: dict[int, Any] = {}
    marks = threading.Barrier(2)

    def program(comm: Communicator) -> None:
        x = warm(comm, site)
        marks.wait(30)
        spoil.append(True)
        y = comm.compressed_allreduce(x, codec="uniform")
        with pytest.raises(gccomm.BackendError, match="the tag of a sum is wrong"):
            comm.synchronize()
        results[comm.rank] = site.back(y)
        with pytest.raises(gccomm.BackendError, match="this communicator is broken"):
            comm.barrier()

    site.run(2, program, closes=False)
    assert all(np.isnan(y).all() for y in results.values())


@pytest.mark.parametrize("codec", ["uniform", "raw", "bf16"])
def test_a_sum_that_is_aborted_leaves_nans(site: Site, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCCOMM_TIMEOUT_S", "0.3")
    done = threading.Event()

    def program(comm: Communicator) -> Any:
        x = site.there(np.ones(3001, np.float32), comm.rank)
        for _ in range(2):
            comm.compressed_allreduce(x, codec=codec)
        if comm.rank == 1:
            done.wait(30)
            return None
        y = comm.compressed_allreduce(x, codec=codec)
        with pytest.raises(gccomm.CollectiveTimeout, match="rank 0 of 2 has waited"):
            comm.synchronize()
        done.set()
        with pytest.raises(gccomm.BackendError, match="broken"):
            comm.compressed_allreduce(x, codec=codec)
        return site.back(y)

    assert np.isnan(site.run(2, program, closes=False)[0]).all()


def test_arrays_on_another_device_are_refused_on_all_ranks(site: Site) -> None:
    def program(comm: Communicator) -> Any:
        x = site.there(np.ones(3000, np.float32), 3 if comm.rank else 0)
        with pytest.raises(ValueError, match=r"rank 1: arrays lie on cuda:3, but rank 1 .* works on cuda:1"):
            comm.compressed_allreduce(x, codec="uniform")
        return site.back(
            comm.compressed_allreduce(site.there(np.ones(3000, np.float32), comm.rank), codec="uniform")
        )

    assert all((found == 2).all() for found in site.run(2, program))


def test_arrays_of_host_and_device_together(site: Site) -> None:
    tree = {"a": np.ones(3000, np.float32), "b": np.full(2000, 2, np.float32)}

    def program(comm: Communicator) -> Any:
        mixed = {"a": tree["a"], "b": site.there(tree["b"], comm.rank)}
        found = comm.compressed_allreduce(mixed, codec="uniform")
        return found["a"], site.back(found["b"])

    for a, b in site.run(2, program):
        assert (a == 2).all()
        assert (b == 4).all()


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


# Graphs


class Captured:
    """A step of a reducer in a graph, on one rank."""

    def __init__(
        self, site: Site, comm: Communicator, codec: str, x: np.ndarray, *, feedback: bool = False
    ) -> None:
        self.site, cupy = site, site.machine.cupy
        self.stream = site.machine.current_stream(comm.rank)
        self.reducer = gccomm.Reducer(codec, comm=comm, op="sum", error_feedback=feedback)
        self.input = site.there({"w": x}, comm.rank)
        for _ in range(4):  # the first three are measured
            self.reducer(self.input)
        comm.synchronize()
        del cupy
        self.stream.begin_capture()
        self.output = self.reducer(self.input)
        self.graph = self.stream.end_capture()

    def launch(self, x: np.ndarray) -> Any:
        """Launch with another input, written where the graph reads it; return what it leaves."""
        target = self.input["w"].host()
        with self.site.machine.changed:
            self.stream.put(Action(lambda: np.copyto(target, x)))
        self.graph.launch(self.stream)
        return self.site.back(self.output)["w"]


def draws(step: int, rank: int) -> np.ndarray:
    return np.random.default_rng([step, rank]).standard_normal(5000).astype(np.float32)


@pytest.mark.parametrize("codec", FLOWING)
def test_steps_can_be_captured_and_launched(site: Site, codec: str) -> None:
    def program(comm: Communicator) -> Any:
        captured = Captured(site, comm, codec, draws(0, comm.rank))
        gc.collect()  # what the graph needs is kept by gccomm
        waits = [b.waits for b in comm._boards.values()]
        found = [captured.launch(draws(step, comm.rank)) for step in range(1, 4)]
        assert [b.waits for b in comm._boards.values()] == waits
        comm.synchronize()
        eager = site.back(comm.compressed_allreduce(site.there(draws(1, comm.rank), comm.rank), codec=codec))
        return found, eager

    results = site.run(3, program)
    for step in range(1, 4):
        total = np.sum([draws(step, rank).astype(np.float64) for rank in range(3)], axis=0)
        error = np.linalg.norm(results[0][0][step - 1] - total) / np.linalg.norm(total)
        wanted = np.linalg.norm(
            results[0][1] - np.sum([draws(1, r) for r in range(3)], axis=0)
        ) / np.linalg.norm(total)
        assert error < 2 * wanted + 1e-6
        assert all(same(results[rank][0][step - 1], results[0][0][step - 1]) for rank in range(3))


def test_launches_differ_in_their_noise(site: Site) -> None:
    x = draws(0, 0)

    def program(comm: Communicator) -> Any:
        captured = Captured(site, comm, "rotated:wire_bits=4,headroom=safe", x)
        return [captured.launch(x) for _ in range(24)]

    found = site.run(2, program)[0]
    errors = [y.astype(np.float64) - 2 * x for y in found]
    assert len({y.tobytes() for y in found}) == 24
    one, mean = (np.linalg.norm(e) for e in (errors[0], np.mean(errors, axis=0)))
    assert mean < 0.3 * one  # errors cancel: 1 / sqrt(24) is 0.2


def test_residuals_go_from_launch_to_launch(site: Site) -> None:
    x = draws(0, 0)

    def program(comm: Communicator) -> Any:
        captured = Captured(site, comm, "uniform:wire_bits=4", x, feedback=True)
        return [captured.launch(x) for _ in range(10)], captured.reducer.state_dict()["residuals"]["w"]

    (found, residual), (_, other) = site.run(2, program)
    sums = np.sum(found, axis=0, dtype=np.float64) - 20 * x
    one = np.linalg.norm(found[0] - 2 * x)
    assert np.linalg.norm(sums) < 4 * one  # it does not grow with the number of launches
    assert np.linalg.norm(residual) > 0
    assert np.linalg.norm(other) > 0


def test_what_is_wrong_in_a_launch_is_seen_after_it(site: Site) -> None:
    """Ranks that launch differently often: the tags of sums do not hang on that, but noise does; a rank that
    makes another call meanwhile is seen by the others' graph."""
    marks = threading.Barrier(2)

    def program(comm: Communicator) -> Any:
        captured = Captured(site, comm, "uniform", draws(0, comm.rank))
        marks.wait(30)
        if comm.rank == 1:
            return comm.compressed_allreduce(site.there(np.ones(9000, np.float32), 1), codec="uniform")
        y = captured.launch(draws(1, 0))
        assert np.isnan(y).all()
        return comm.synchronize()

    results = all_raise(site, 2, program)
    assert all(isinstance(result, gccomm.MismatchError) for result in results)


@pytest.mark.parametrize(
    ("codec", "dtype"), [("thc", "float32"), ("rotated:headroom=checked", "float32"), ("uniform", "int32")]
)
def test_what_the_host_has_to_look_at_cannot_be_captured(site: Site, codec: str, dtype: str) -> None:
    def program(comm: Communicator) -> Any:
        stream = site.machine.current_stream(comm.rank)
        x = site.there(np.ones(3000, dtype), comm.rank)
        comm.compressed_allreduce(x, codec=codec)
        stream.begin_capture()
        with pytest.raises(gccomm.NegotiationError, match="cannot be captured in a graph"):
            comm.compressed_allreduce(x, codec=codec)
        stream.end_capture()
        return site.back(comm.compressed_allreduce(x, codec=codec))

    for found in site.run(2, program):
        assert abs(found.mean() - 2) < 0.2


def test_a_layout_that_is_not_known_cannot_be_captured(site: Site) -> None:
    def program(comm: Communicator) -> None:
        stream = site.machine.current_stream(comm.rank)
        x = site.there(np.ones(3000, np.float32), comm.rank)
        stream.begin_capture()
        with pytest.raises(
            gccomm.NegotiationError, match=r"after such calls outside of the graph \(warm-up\)"
        ):
            comm.compressed_allreduce(x, codec="uniform")
        stream.end_capture()
        comm.compressed_allreduce(x, codec="uniform")

    site.run(2, program)
