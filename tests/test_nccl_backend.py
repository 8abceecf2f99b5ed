"""The NCCL back end's operations, against a stand-in for CuPy and NCCL whose ranks are threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from inspect import signature
from types import SimpleNamespace
from typing import Any, NamedTuple

import gccomm_local
import gccomm_nccl
import ml_dtypes
import numpy as np
import pytest
from gccomm_nccl import library, staging
from gccomm_nccl.backend import NcclBackend

from gccomm import backends
from gccomm.errors import BackendError, CollectiveTimeout
from tests.fake_gpu import Machine
from tests.fake_nccl import MAX, SUM, FakeNccl, install
from tests.on_threads import on_threads, raised

LENGTHS = (0, 1, 7, 255, 2501, 100_003)


class Site(NamedTuple):
    machine: Machine
    nccl: FakeNccl


@pytest.fixture(params=["cupy", "cupy13", "nccl4py"])
def site(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A machine with 5 GPUs, behind each of the wrappers."""
    machine = Machine(5)
    return Site(machine, install(monkeypatch, machine, request.param))


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> Site:
    machine = Machine(5)
    return Site(machine, install(monkeypatch, machine))


def on_ranks(size: int, work: Callable[[NcclBackend], Any], *, closes: bool = True) -> list[Any]:
    """Call `work` on a thread per rank; return what each returned or raised."""

    def body(base: Any) -> Any:
        backend = gccomm_nccl.over(base)
        result = work(backend)
        if closes:
            backend.close()
        return result

    return on_threads(body, gccomm_local.group(size), 20)


def words_of(rank: int, length: int) -> np.ndarray:
    return np.random.default_rng(rank).integers(0, 2**32, length, np.uint32)


def every(size: int, length: int) -> np.ndarray:
    return np.stack([words_of(rank, length) for rank in range(size)])


# Host memory


@pytest.mark.parametrize("size", [1, 3])
def test_words_of_the_host(site: Site, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging.Staging.__init__, "__defaults__", (4096,))  # several pieces

    def work(backend: NcclBackend) -> list[tuple[np.ndarray, np.ndarray]]:
        found = []
        for length in LENGTHS:
            largest, total = words_of(backend.rank, length), words_of(backend.rank, length)
            backend.maximum(largest)
            backend.sum_words(total)
            found.append((largest, total))
        return found

    for found in raised(on_ranks(size, work)):
        for length, (largest, total) in zip(LENGTHS, found, strict=True):
            np.testing.assert_array_equal(largest, every(size, length).max(axis=0), strict=True)
            np.testing.assert_array_equal(
                total, every(size, length).sum(axis=0, dtype=np.uint32), strict=True
            )


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_float_sums_of_the_host(site: Site, dtype: Any) -> None:
    real = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    inputs = (every(3, 2501) % 16).astype(np.float32).astype(real)  # exact in any order
    kept = inputs.copy()

    def work(backend: NcclBackend) -> np.ndarray:
        mine = inputs[backend.rank]
        send = mine.view(np.uint16) if real.itemsize == 2 else mine
        recv = np.empty_like(send)
        backend.sum_floats(send, recv, dtype)
        again = send.copy()
        backend.sum_floats(again, again, dtype)
        np.testing.assert_array_equal(again, recv)
        return recv.view(real)

    expected = kept.astype(np.float64).sum(axis=0)
    for found in raised(on_ranks(3, work)):
        np.testing.assert_array_equal(found.astype(np.float64), expected)
    np.testing.assert_array_equal(inputs.view(np.uint8), kept.view(np.uint8))


def test_every_root_can_broadcast(site: Site) -> None:
    def work(backend: NcclBackend) -> list[np.ndarray]:
        found = []
        for root in range(3):
            buffer = np.full(77 + root, backend.rank, np.uint8)
            backend.broadcast(buffer, root)
            found.append(buffer)
        return found

    for found in raised(on_ranks(3, work)):
        for root, buffer in enumerate(found):
            np.testing.assert_array_equal(buffer, np.full(77 + root, root, np.uint8))


def test_types_and_operators_are_nccls(site: Site) -> None:
    numbers = {"float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}
    assert {**numbers, "uint8": 1, "uint32": 3} == library.TYPES

    def work(backend: NcclBackend) -> None:
        for dtype, number in numbers.items():
            item = 2 if number in (6, 9) else 4 if number == 7 else 8
            send = np.zeros(5, f"u{item}" if item == 2 else f"f{item}")
            backend.sum_floats(send, send, dtype)  # type: ignore[arg-type]
        backend.maximum(np.zeros(3, np.uint32))
        backend.sum_words(np.zeros(4, np.uint32))

    raised(on_ranks(2, work))
    for comm in site.nccl.comms:
        asked = [entry[2:5] for entry in comm.log]
        assert asked[:6] == [(5, 6, SUM), (5, 7, SUM), (5, 8, SUM), (5, 9, SUM), (3, 3, MAX), (4, 3, SUM)]


def test_parts_of_arrays_through_each_wrapper(site: Site) -> None:
    """What each host's ranks do, where they reduce first."""

    def work(backend: NcclBackend) -> Any:
        channel, rank = backend.channel, backend.rank
        comm, own = channel.comm, channel.stream.ptr
        with channel.device:
            x = site.machine.cupy.asarray(words_of(rank, 30))
            y = site.machine.cupy.asarray(np.zeros(30, np.uint32))
            site.machine.cupy.cuda.get_current_stream().synchronize()
            at, to = x.data.ptr, y.data.ptr
            with channel.library.group():
                comm.reduce_scatter(at, to + 40 * rank, 10, "uint32", "sum", own)
            comm.all_gather(to + 40 * rank, to, 10, "uint32", own)
            comm.reduce(at, at, 30, "uint32", "max", 1, own)
            channel.stream.synchronize()
            return y.host().copy(), x.host().copy()

    for rank, (gathered, reduced) in enumerate(raised(on_ranks(3, work))):
        assert (gathered == every(3, 30).sum(axis=0, dtype=np.uint32)).all()
        assert (reduced == (every(3, 30).max(axis=0) if rank == 1 else words_of(rank, 30))).all()


def test_the_real_wrappers_have_these_numbers() -> None:
    nccl = pytest.importorskip("cupy.cuda.nccl", exc_type=ImportError)
    for name, number in library.TYPES.items():
        if hasattr(nccl, f"NCCL_{name.upper()}"):  # bfloat16 from CuPy 14 on
            assert getattr(nccl, f"NCCL_{name.upper()}") == number
    assert (library.OPERATORS["sum"], library.OPERATORS["max"]) == (nccl.NCCL_SUM, nccl.NCCL_MAX)
    for name, count in (("reduce", 7), ("reduceScatter", 6), ("allGather", 5)):
        assert getattr(nccl.NcclCommunicator, name).__doc__.count(",") == count
    found = library.CupyNccl()
    assert len(found.unique_id()) == 128
    assert found.version.startswith("2.")


def test_the_real_nccl4py_is_called_by_its_own_names() -> None:
    core = pytest.importorskip("nccl.core", exc_type=ImportError)
    for name, number in library.TYPES.items():
        assert int(getattr(core, name.upper())) == number
    found = library.Nccl4py()
    unique = found.unique_id()
    assert len(unique) == 128
    assert bytes(core.UniqueId.from_bytes(unique)) == unique
    buffer = pytest.importorskip("nccl.core.buffer", exc_type=ImportError).NcclBuffer
    asked: list[tuple[int, ...]] = []

    class Communicator:
        rank, nranks, device = 0, 2, SimpleNamespace(device_id=0)

        def allreduce(self, send: Any, recv: Any, op: Any, *, stream: int) -> None:
            mine, theirs = buffer(send), buffer(recv)
            asked.append((mine.ptr, theirs.ptr, mine.count, int(theirs.dtype), int(op), stream))

        def broadcast(self, send: Any, recv: Any, root: int, *, stream: int) -> None:
            asked.append((buffer(recv).ptr, buffer(recv).count, int(buffer(recv).dtype), root, stream))

        def reduce(self, send: Any, recv: Any, op: Any, root: int, *, stream: int) -> None:
            asked.append((buffer(send).ptr, buffer(recv).ptr, buffer(send).count, int(op), root, stream))

        def reduce_scatter(self, send: Any, recv: Any, op: Any, *, stream: int) -> None:
            asked.append((buffer(recv).ptr, buffer(send).count, buffer(recv).count, int(op), stream))

        def allgather(self, send: Any, recv: Any, *, stream: int) -> None:
            asked.append((buffer(recv).ptr, buffer(send).count, buffer(recv).count, stream))

    real = pytest.importorskip("nccl.core.communicator", exc_type=ImportError).Communicator
    for name in ("allreduce", "broadcast", "reduce", "reduce_scatter", "allgather"):
        theirs, ours = (list(signature(getattr(kind, name)).parameters) for kind in (real, Communicator))
        assert theirs.index("stream") == ours.index("stream")
    comm, room = found.adopt(Communicator()), np.zeros(100)
    at = room.ctypes.data
    for name, number in library.TYPES.items():
        comm.all_reduce(at, at + 256, 7, name, "max", 77)
        assert asked[-1] == (at, at + 256, 7, number, MAX, 77)
    comm.broadcast(at, 9, 1, 77)
    assert asked[-1] == (at, 9, 1, 1, 77)
    comm.reduce(at, at + 256, 7, "float32", "sum", 1, 77)
    assert asked[-1] == (at, at + 256, 7, SUM, 1, 77)
    comm.reduce_scatter(at, at + 256, 7, "uint32", "max", 77)
    assert asked[-1] == (at + 256, 14, 7, MAX, 77)
    comm.all_gather(at, at + 256, 7, "float16", 77)
    assert asked[-1] == (at + 256, 7, 14, 77)


@pytest.mark.parametrize("summing", [(0,), (1, 2), (0, 3)])
def test_a_maximum_and_a_sum_of_one_size_meet(one: Site, summing: tuple[int, ...]) -> None:
    def work(backend: NcclBackend) -> list[int]:
        words, ones = np.full(256, backend.rank, np.uint32), np.ones(3, np.uint32)
        (backend.sum_words if backend.rank in summing else backend.maximum)(words)
        backend.sum_words(ones)  # the group is still whole
        return ones.tolist()

    assert raised(on_ranks(4, work)) == [[4, 4, 4]] * 4


def test_split_by_color_and_key(site: Site) -> None:
    def work(backend: NcclBackend) -> Any:
        part = backend.split(None if backend.rank == 4 else backend.rank % 2, -backend.rank)
        if part is None:
            return None
        words = np.array([1 << backend.rank], np.uint32)
        part.sum_words(words)
        found = part.rank, part.size, part.local_rank, int(words[0])
        part.close()
        return found

    expected = [(1, 2, 1, 5), (1, 2, 1, 10), (0, 2, 0, 5), (0, 2, 0, 10), None]
    assert raised(on_ranks(5, work)) == expected


def test_argument_errors_leave_it_usable(one: Site) -> None:
    def work(backend: NcclBackend) -> int:
        with pytest.raises(ValueError, match="`root` must be a rank"):
            backend.broadcast(np.zeros(1, np.uint8), 2)
        with pytest.raises(ValueError, match="`color` must be None or at least 0"):
            backend.split(-1, 0)
        with pytest.raises(ValueError, match=r"`dtype` must be one of .*; got 'int8'"):
            backend.sum_floats(np.zeros(1), np.zeros(1), "int8")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="no `operation` of its own"):
            backend.combine_words(np.zeros(1, np.uint32), "exponent", 0)
        with pytest.raises(ValueError, match="cannot fold"):
            backend.fold_words(None, None, None)  # type: ignore[arg-type]
        words = np.ones(1, np.uint32)
        backend.sum_words(words)
        return int(words[0])

    assert raised(on_ranks(2, work)) == [2, 2]
    assert backends.operations_of(NcclBackend) == frozenset()  # type: ignore[arg-type]


def test_handles_share_one_communicator_which_the_last_one_frees(one: Site) -> None:
    def work(base: Any) -> list[bool]:
        first, second = gccomm_nccl.over(base), gccomm_nccl.over(base)
        assert first.channel is second.channel
        comm = next(c for c in one.nccl.comms if c.rank == base.rank)
        found = [comm.destroyed]
        first.close()
        first.close()
        with pytest.raises(BackendError, match="sum of 1 words: this communicator is closed"):
            first.sum_words(np.ones(1, np.uint32))
        words = np.ones(1, np.uint32)
        second.sum_words(words)
        assert words[0] == 1
        found.append(comm.destroyed)
        second.close()
        return [*found, comm.destroyed]

    before = set(threading.enumerate())
    assert work(gccomm_local.connect()) == [False, False, True]
    assert not any("watchdog" in thread.name for thread in set(threading.enumerate()) - before)


# Failures


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCCOMM_TIMEOUT_S", "0.3")


@pytest.mark.usefixtures("hasty")
def test_a_rank_that_does_not_come_ends_in_a_timeout(one: Site) -> None:
    def work(backend: NcclBackend) -> str:
        backend.set_activity(lambda: "all-reduce of 'w'")
        if backend.rank == 1:
            time.sleep(1.5)
            return ""
        with pytest.raises(CollectiveTimeout, match=r"sum of 3 words \(all-reduce of 'w'\)") as caught:
            backend.sum_words(np.ones(3, np.uint32))
        with pytest.raises(
            BackendError, match="maximum of 1 words: this communicator is broken: rank 0 of 2"
        ):
            backend.maximum(np.ones(1, np.uint32))
        backend.close()
        return str(caught.value)

    assert "rank 0 of 2 has waited" in raised(on_ranks(2, work, closes=False))[0]
    assert [comm.aborted for comm in sorted(one.nccl.comms, key=lambda c: c.rank)] == [True, False]


def test_an_error_in_the_background_ends_the_wait(site: Site) -> None:
    def work(backend: NcclBackend) -> str:
        if backend.rank == 1:
            return ""
        for comm in site.nccl.comms:
            comm.asynchronous = 2
        with pytest.raises(BackendError, match=r"NCCL has failed.*remote process exited") as caught:
            backend.sum_words(np.ones(3, np.uint32))
        return str(caught.value)

    assert "rank 0" in raised(on_ranks(2, work, closes=False))[0]


def test_what_an_abort_lets_come_is_no_result(one: Site) -> None:
    """The watchdog fails between the wait's look at the channel and its look at the event."""

    def work(backend: NcclBackend) -> None:
        channel = backend.channel
        done = channel.done

        def late(event: Any) -> bool:
            channel.fail(BackendError("a cable was cut"))
            return done(event)

        if backend.rank == 0:
            channel.done = late  # type: ignore[method-assign]
            with pytest.raises(BackendError, match="a cable was cut"):
                backend.sum_words(np.ones(3, np.uint32))

    raised(on_ranks(2, work, closes=False))


def test_what_nccl_refuses_breaks_the_communicator(site: Site) -> None:
    def work(backend: NcclBackend) -> None:
        site.nccl.refuse = "unhandled system error"
        text = r"NCCL failed in sum of 3 words: unhandled system error"
        with pytest.raises(BackendError, match=text):
            backend.sum_words(np.ones(3, np.uint32))
        with pytest.raises(BackendError, match=f"maximum.*is broken: rank 0: {text}"):
            backend.maximum(np.ones(3, np.uint32))

    raised(on_ranks(1, work))
    assert site.nccl.comms[0].aborted


def test_a_failed_device_is_named(one: Site) -> None:
    def work(backend: NcclBackend) -> None:
        one.machine.status = 700
        with pytest.raises(BackendError, match="the CUDA device 0 failed: error 700"):
            backend.sum_words(np.ones(3, np.uint32))

    raised(on_ranks(1, work))


def test_an_interrupt_ends_the_wait(one: Site) -> None:
    def work(backend: NcclBackend) -> None:
        if backend.rank == 0:
            backend.interrupt_deadline = time.monotonic() + 0.05
            assert backend.interrupt_deadline is not None
            with pytest.raises(BackendError, match="rank 0: interrupted while waiting in sum of 3 words"):
                backend.sum_words(np.ones(3, np.uint32))

    raised(on_ranks(2, work, closes=False))


def test_abort_breaks_it(one: Site) -> None:
    def work(backend: NcclBackend) -> None:
        backend.abort("it fell over")
        with pytest.raises(BackendError, match="rank 0 aborted: it fell over"):
            backend.maximum(np.ones(1, np.uint32))

    raised(on_ranks(1, work))
    assert one.nccl.comms[0].aborted


# How it is found


def test_a_missing_library_is_an_error_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    monkeypatch.delenv("GCCOMM_NCCL", raising=False)
    results = on_ranks(2, lambda backend: None)
    for result in results:
        assert isinstance(result, BackendError)
        assert "needs CuPy" in str(result)
        assert "rank 0: " in str(result)
        assert 'pip install "gccomm[nccl12]"' in str(result)


def test_what_one_dtype_needs_is_missed_before_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a sum of bfloat16 it would break the communicator."""
    install(monkeypatch, Machine(2), "nccl4py")
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    for result in on_ranks(2, lambda backend: None):
        assert isinstance(result, BackendError)
        assert "cannot use nccl4py: its bfloat16 needs ml_dtypes" in str(result)
        assert "GCCOMM_NCCL=cupy" in str(result)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (-1, "no CUDA device can be used: cudaErrorInsufficientDriver"),
        (2, "rank 2: local rank 2 has no CUDA device 2"),
    ],
)
def test_a_missing_device_is_an_error_on_all_ranks(one: Site, count: int, text: str) -> None:
    one.machine.devices = count
    results = on_ranks(3, lambda backend: None)
    assert all(isinstance(result, BackendError) and text in str(result) for result in results)


def test_two_ranks_on_one_device(one: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    one.machine.devices = 1
    results = on_ranks(2, lambda backend: None)
    assert all("ranks 0 and 1 have the same GPU" in str(result) for result in results)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert raised(on_ranks(2, lambda backend: backend.device)) == ["cuda:0", "cuda:0"]


def test_a_variable_names_the_device(one: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCCOMM_CUDA_DEVICE", "3")
    assert raised(on_ranks(1, lambda backend: (backend.device, backend.takes_device("cuda:3"))))[0] == (
        "cuda:3",
        True,
    )
    monkeypatch.setenv("GCCOMM_CUDA_DEVICE", "last")
    assert "must be the number of a CUDA device, got 'last'" in str(on_ranks(1, lambda b: None)[0])


@pytest.mark.usefixtures("hasty")
def test_a_rank_that_never_joins_ends_in_a_timeout(one: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one.nccl, "join", lambda *_: time.sleep(1.5))
    results = on_ranks(1, lambda backend: None)
    assert "rank 0 of 1 has waited" in str(results[0])
    assert "joining NCCL" in str(results[0])


def test_a_given_communicator_is_used_as_it_is(site: Site) -> None:
    wrapped = library.load()

    def make() -> Iterator[Any]:
        with site.machine.cupy.cuda.Device(2):
            yield wrapped.join(1, 0, bytes(128))

    comm = next(make())
    program = comm._comm  # type: ignore[attr-defined]
    backend = gccomm_nccl.connect(program)
    assert (backend.rank, backend.size, backend.local_rank, backend.device) == (0, 1, 0, "cuda:2")
    words = np.ones(3, np.uint32)
    backend.sum_words(words)
    assert words.tolist() == [1, 1, 1]
    backend.close()
    assert not site.nccl.comms[0].destroyed
    with pytest.raises(ValueError, match="`device` is 1, but `comm` is one of device 2"):
        gccomm_nccl.connect(program, device=1)


def test_settings_are_checked(one: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="hierarchical=True"):
        gccomm_nccl.connect(hierarchical=True)
    monkeypatch.setenv("GCCOMM_NCCL", "rccl")
    with pytest.raises(ValueError, match="GCCOMM_NCCL must be one of nccl4py, cupy; got 'rccl'"):
        library.load()
