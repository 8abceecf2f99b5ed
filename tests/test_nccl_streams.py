"""Device memory over the NCCL back end: the order of streams, lifetimes, groups, the watchdog, graphs."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any, NamedTuple

import numpy as np
import pytest
from gccomm_nccl.backend import NcclBackend

from gccomm.errors import BackendError, CollectiveTimeout
from tests.fake_gpu import Action, Machine, Memory, Stream
from tests.test_nccl_backend import Site, hasty, on_ranks, one, raised, site

__all__ = ["hasty", "one", "site"]


class Words(NamedTuple):
    """A device buffer."""

    memory: Memory
    size: int
    stream: int

    @property
    def address(self) -> int:
        return self.memory.ptr

    @property
    def values(self) -> np.ndarray:
        return self.memory.bytes.view(np.uint32)


def make(machine: Machine, stream: Stream, values: Any) -> Words:
    """Return words that a stream writes when it comes to it."""
    given = np.asarray(values, np.uint32)
    with machine.cupy.cuda.Device(stream.device_id), stream:
        memory = machine.cupy.cuda.alloc(given.nbytes)
    words = Words(memory, given.size, stream.ptr)
    put(machine, stream, lambda: np.copyto(words.values, given))
    return words


def put(machine: Machine, stream: Stream, work: Any) -> None:
    with machine.changed:
        stream.put(Action(work))


def stream_of(machine: Machine, rank: int) -> Stream:
    with machine.cupy.cuda.Device(rank):
        return machine.cupy.cuda.Stream(non_blocking=True)  # type: ignore[no-any-return]


def test_a_sum_comes_after_what_was_there_and_before_what_follows(site: Site) -> None:
    def work(backend: NcclBackend) -> list[int]:
        stream = stream_of(site.machine, backend.rank)
        words = make(site.machine, stream, [backend.rank + 1, 10])
        backend.sum_words(words)
        copy: list[int] = []
        put(site.machine, stream, lambda: copy.extend(words.values.tolist()))
        put(site.machine, stream, lambda: words.values.fill(0))
        backend.maximum(words)
        assert copy == []
        stream.synchronize()
        assert words.values.tolist() == [0, 0]
        return copy

    assert raised(on_ranks(3, work)) == [[6, 30]] * 3


def test_floats_of_one_buffer_into_another(one: Site) -> None:
    def work(backend: NcclBackend) -> list[float]:
        stream = stream_of(one.machine, backend.rank)
        send = make(one.machine, stream, np.full(3, backend.rank + 1, np.float32).view(np.uint32))
        recv = make(one.machine, stream, np.zeros(3, np.uint32))
        backend.sum_floats(send, recv, "float32")
        empty = Words(send.memory, 0, send.stream)
        backend.sum_floats(empty, empty, "float16")
        stream.synchronize()
        assert send.values.view(np.float32).tolist() == [backend.rank + 1] * 3
        return recv.values.view(np.float32).tolist()

    assert raised(on_ranks(2, work)) == [[3.0] * 3] * 2


def test_the_host_waits_for_nothing_and_the_default_stream_is_left_alone(site: Site) -> None:
    together = threading.Barrier(2)  # the count is of both

    def work(backend: NcclBackend) -> None:
        stream = stream_of(site.machine, backend.rank)
        words = make(site.machine, stream, [1, 2])
        before = site.machine.synchronisations
        together.wait(10)
        for _ in range(5):
            backend.sum_words(words)
            backend.maximum(words)
        assert site.machine.synchronisations == before
        together.wait(10)
        comm = next(c for c in site.nccl.comms if c.rank == backend.rank)
        own = {entry[-2] for entry in comm.log}
        assert own == {backend.channel.stream.ptr}
        assert stream.ptr not in own
        assert backend.channel.stream.non_blocking
        assert all(not null.todo for null in site.machine.null.values())
        stream.synchronize()
        assert words.values.tolist() == [2**5, 2**6]

    raised(on_ranks(2, work))


def test_work_of_the_default_stream_is_ordered_too(one: Site) -> None:
    """A program that uses CuPy's default gets no other result: its work is waited for by an event."""

    def work(backend: NcclBackend) -> list[int]:
        with one.machine.cupy.cuda.Device(backend.rank):
            null = one.machine.null[backend.rank]
            words = make(one.machine, null, [3])
            words = words._replace(stream=0)
            backend.sum_words(words)
            null.synchronize()
            return words.values.tolist()

    assert raised(on_ranks(2, work)) == [[6], [6]]


def test_arrays_live_until_their_event(one: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody but the back end holds the words; the stream that they were taken on goes on."""
    monkeypatch.setattr("gccomm_nccl.watchdog.PERIOD_S", 5.0)  # it finds nothing while this test looks

    def work(backend: NcclBackend) -> list[int]:
        machine = one.machine
        pool, stream = stream_of(machine, backend.rank), stream_of(machine, backend.rank)
        words = make(machine, pool, [backend.rank + 5])
        event = pool.record()
        stream.wait_event(event)
        lent = words._replace(stream=stream.ptr)
        backend.sum_words(lent)
        values = words.values
        copy: list[int] = []
        put(machine, stream, lambda: copy.extend(values.tolist()))
        del words, lent
        gc.collect()
        pool.synchronize()  # rubbish now, had they been given back
        stream.synchronize()
        return copy

    assert raised(on_ranks(2, work)) == [[11], [11]]


def test_what_is_done_is_let_go(one: Site) -> None:
    def work(backend: NcclBackend) -> None:
        stream = stream_of(one.machine, backend.rank)
        for _ in range(20):
            backend.sum_words(make(one.machine, stream, [1]))
        end = time.monotonic() + 10
        while backend.channel.watchdog.on_their_way and time.monotonic() < end:
            time.sleep(0.01)
        assert backend.channel.watchdog.on_their_way == 0

    raised(on_ranks(2, work))


@pytest.mark.parametrize("dtype", ["uint32", "float32"])
def test_several_buffers_go_as_one_group(site: Site, dtype: str) -> None:
    def work(backend: NcclBackend) -> list[list[float]]:
        stream = stream_of(site.machine, backend.rank)
        kind = np.dtype(dtype)
        buffers = [
            make(site.machine, stream, np.full(n, backend.rank + n).astype(kind).view(np.uint32))
            for n in (1, 2, 3)
        ]
        empty = make(site.machine, stream, [])
        backend.end(backend.begin_many([("words" if dtype == "uint32" else dtype, b, b) for b in buffers]))
        assert backend.begin_many([("words", empty, empty)]) is None
        stream.synchronize()
        return [b.values.view(kind).tolist() for b in buffers]

    expected = [[3.0], [5.0, 5.0], [7.0, 7.0, 7.0]]
    assert raised(on_ranks(2, work)) == [expected, expected]
    for comm in site.nccl.comms:
        assert [entry[-1] for entry in comm.log[:3]] == [True] * 3
        assert [entry[2] for entry in comm.log[:3]] == [1, 2, 3]


def test_buffers_of_several_streams_are_no_group(one: Site) -> None:
    def work(backend: NcclBackend) -> None:
        words = make(one.machine, stream_of(one.machine, 0), [1])
        other = words._replace(stream=stream_of(one.machine, 0).ptr)
        with pytest.raises(ValueError, match="`parts` must be buffers of one stream"):
            backend.begin_many([("words", words, words), ("words", other, other)])

    raised(on_ranks(1, work))


# Where nobody waits


@pytest.mark.usefixtures("hasty")
def test_the_watchdog_ends_a_sum_for_which_a_rank_does_not_come(one: Site) -> None:
    def work(backend: NcclBackend) -> str:
        if backend.rank == 1:
            return ""
        stream = stream_of(one.machine, 0)
        marked: list[str] = []
        backend.channel.dooms.append(
            lambda: marked.append("before the abort" if not comm.aborted else "late")
        )
        comm = next(c for c in one.nccl.comms if c.rank == 0)
        backend.sum_words(make(one.machine, stream, [1, 2, 3]))
        end = time.monotonic() + 10
        while backend.channel.broken is None and time.monotonic() < end:
            time.sleep(0.01)
        with pytest.raises(CollectiveTimeout, match=r"rank 0 of 2 has waited .* in sum of 3 words") as caught:
            backend.sum_words(make(one.machine, stream, [1, 2, 3]))
        with pytest.raises(BackendError, match="this communicator is broken"):
            backend.maximum(np.ones(1, np.uint32))
        assert marked == ["before the abort"]
        stream.synchronize()  # it ends
        return str(caught.value)

    assert raised(on_ranks(2, work, closes=False))[0]


@pytest.mark.usefixtures("hasty")
def test_time_before_the_own_work_is_done_does_not_count(one: Site) -> None:
    """The others are waited for from then on that this rank has come itself."""

    def work(backend: NcclBackend) -> list[int]:
        stream = stream_of(one.machine, 0)
        ready: list[bool] = []

        class Computing(Action):
            def run(self) -> bool:
                return bool(ready)

        with one.machine.changed:
            stream.put(Computing(lambda: None))
        words = make(one.machine, stream, [4])
        backend.sum_words(words)
        time.sleep(0.8)
        assert backend.channel.broken is None
        ready.append(True)
        stream.synchronize()
        return words.values.tolist()

    assert raised(on_ranks(1, work)) == [[4]]


def test_errors_in_the_background_are_found_by_the_watchdog(site: Site) -> None:
    def work(backend: NcclBackend) -> None:
        if backend.rank == 1:
            return
        backend.sum_words(make(site.machine, stream_of(site.machine, 0), [1]))
        comm = next(c for c in site.nccl.comms if c.rank == 0)
        comm.asynchronous = 6
        end = time.monotonic() + 10
        while backend.channel.broken is None and time.monotonic() < end:
            time.sleep(0.01)
        assert comm.aborted
        with pytest.raises(BackendError, match=r"rank 0: NCCL has failed: .*remote process exited"):
            backend.maximum(np.ones(1, np.uint32))

    raised(on_ranks(2, work, closes=False))


@pytest.mark.usefixtures("hasty")
def test_the_watchdog_ends_a_call_that_blocks(one: Site) -> None:
    def work(backend: NcclBackend) -> None:
        comm = one.nccl.comms[0]

        def stuck(*_: Any) -> None:  # as NCCL does while it connects
            while not comm.aborted:
                time.sleep(0.01)
            raise RuntimeError("aborted")

        comm.enqueue = stuck  # type: ignore[method-assign]
        with pytest.raises(CollectiveTimeout, match=r"rank 0 of 1 has waited .* in sum of 1 words"):
            backend.sum_words(make(one.machine, stream_of(one.machine, 0), [1]))

    raised(on_ranks(1, work, closes=False))


# Graphs


def test_a_graph_holds_the_sum_and_can_be_launched_again(site: Site) -> None:
    def work(backend: NcclBackend) -> list[list[int]]:
        machine = site.machine
        stream = stream_of(machine, backend.rank)
        words = make(machine, stream, [backend.rank + 1])
        backend.sum_words(words)  # warm-up
        stream.synchronize()
        stream.begin_capture()
        put(machine, stream, lambda: words.values.__iadd__(1))
        backend.sum_words(words)
        graph = stream.end_capture()
        found = [words.values.tolist()]
        for _ in range(2):
            graph.launch(stream)
            stream.synchronize()
            found.append(words.values.tolist())
        assert len(backend.channel.captured) == 1
        return found

    assert raised(on_ranks(2, work)) == [[[3], [8], [18]]] * 2
