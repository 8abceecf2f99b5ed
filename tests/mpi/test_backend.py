"""The MPI back end on the ranks of this run."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gccomm_mpi
import numpy as np
import pytest

from gccomm.errors import BackendError

# Below and above the size from which ranks exchange shares (32 KiB a rank).
LENGTHS = (0, 1, 7, 255, 2501, 100_003)


@pytest.fixture(scope="module", params=["window", "messages"])
def backend(request: pytest.FixtureRequest, world: Any) -> Iterator[Any]:
    """Through memory that ranks share, where they can, and through MPI's messages, as between hosts."""
    if request.param == "window":
        handle = gccomm_mpi.connect()
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GCCOMM_WINDOW", "0")
            handle = gccomm_mpi.connect(world.Dup())
        assert handle.room(4) is None
    yield handle
    handle.close()


def words_of(rank: int, length: int) -> np.ndarray:
    return np.random.default_rng(rank).integers(0, 2**32, length, np.uint32)


def every(world: Any, length: int) -> np.ndarray:
    return np.stack([words_of(rank, length) for rank in range(world.size)])


def test_ranks(backend: Any, world: Any) -> None:
    assert (backend.name, backend.rank, backend.size) == ("mpi", world.rank, world.size)
    assert 0 <= backend.local_rank < backend.size
    if backend.one_host:
        assert backend.local_rank == backend.rank


@pytest.mark.parametrize("length", LENGTHS)
def test_maximum_is_unsigned(backend: Any, world: Any, length: int) -> None:
    words = words_of(world.rank, length)
    backend.maximum(words)
    np.testing.assert_array_equal(words, every(world, length).max(axis=0), strict=True)


@pytest.mark.parametrize("length", LENGTHS)
def test_word_sum_wraps(backend: Any, world: Any, length: int) -> None:
    words = words_of(world.rank, length)
    backend.sum_words(words)
    expected = every(world, length).astype(np.uint64).sum(axis=0) % 2**32
    np.testing.assert_array_equal(words, expected.astype(np.uint32), strict=True)


@pytest.mark.parametrize("length", [1, 7, 256, 4096, 100_003])
@pytest.mark.parametrize("only", ["first", "last"])
def test_a_maximum_and_a_sum_of_one_size_complete(backend: Any, world: Any, length: int, only: str) -> None:
    """Each rank gets a mixture, and can see in what it gets that the calls differ; then all goes on."""
    alone = 0 if only == "first" else world.size - 1
    for reverse in (False, True):
        words = words_of(world.rank, length)
        (backend.sum_words if (world.rank == alone) != reverse else backend.maximum)(words)
        words = words_of(world.rank, length)
        backend.sum_words(words)
        np.testing.assert_array_equal(words, every(world, length).sum(axis=0, dtype=np.uint32))


@pytest.mark.parametrize("in_place", ["same", "view", "apart"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("length", LENGTHS)
def test_float_sum(backend: Any, world: Any, length: int, dtype: Any, in_place: str) -> None:
    # small integers: exact in any order
    send = (words_of(world.rank, length) % 1000).astype(dtype)
    original = send.copy()
    recv = {"same": send, "view": send[:], "apart": np.empty_like(send)}[in_place]
    backend.sum_floats(send, recv, dtype)
    np.testing.assert_array_equal(recv, (every(world, length) % 1000).sum(axis=0).astype(dtype), strict=True)
    if in_place == "apart":
        np.testing.assert_array_equal(send, original)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_sum(backend: Any, world: Any, dtype: Any, length: int) -> None:
    real = (
        np.dtype(pytest.importorskip("ml_dtypes").bfloat16) if dtype == "bfloat16" else np.dtype(np.float16)
    )
    inputs = (every(world, length) % 16).astype(np.float32).astype(real)
    words = inputs[world.rank].copy().view(np.uint16)
    backend.sum_floats(words, words, dtype)
    expected = inputs.astype(np.float32).sum(axis=0)
    np.testing.assert_array_equal(words.view(real).astype(np.float32), expected)


def test_half_precision_sum_keeps_inf_and_nan(backend: Any, world: Any) -> None:
    values = np.array([1.0, np.inf, 1.0, 60000.0], np.float16)
    if world.rank == world.size - 1:
        values[:3] = [np.nan, 1.0, -np.inf]
    words = values.view(np.uint16)
    backend.sum_floats(words, words, "float16")
    assert np.isnan(values[0])
    assert np.isposinf(values[1]) == (world.size > 1)
    assert np.isneginf(values[2])
    assert np.isposinf(values[3]) == (world.size > 1)


def test_every_root_can_broadcast(backend: Any, world: Any) -> None:
    for root in range(world.size):
        for length in LENGTHS:
            buffer = np.full(length, world.rank, np.uint8)
            backend.broadcast(buffer, root)
            np.testing.assert_array_equal(buffer, np.full(length, root, np.uint8))


def test_large_arrays_are_cut(backend: Any, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend._channel.messages, "max_count", 1000)
    words = words_of(world.rank, 2501).reshape(41, 61)
    backend.sum_words(words)
    expected = every(world, 2501).astype(np.uint64).sum(axis=0) % 2**32
    np.testing.assert_array_equal(words.reshape(-1), expected.astype(np.uint32))

    send = np.full((3, 40_001), world.rank, np.float32)
    recv = np.empty_like(send)
    backend.sum_floats(send, recv, "float32")
    np.testing.assert_array_equal(recv, np.full_like(recv, sum(range(world.size))))

    buffer = (words_of(0, 2501) % 251).astype(np.uint8) if world.rank == 0 else np.zeros(2501, np.uint8)
    backend.broadcast(buffer, 0)
    np.testing.assert_array_equal(buffer, (words_of(0, 2501) % 251).astype(np.uint8))


def test_exchanged_float_sums_have_the_same_bits_on_every_rank(backend: Any, world: Any) -> None:
    values = np.random.default_rng(world.rank).standard_normal(300_007).astype(np.float32)
    total = np.empty_like(values)
    backend.sum_floats(values, total, "float32")
    assert len(set(world.allgather(total.tobytes()))) == 1
    inputs = [
        np.random.default_rng(rank).standard_normal(300_007).astype(np.float32) for rank in range(world.size)
    ]
    np.testing.assert_allclose(total, np.sum(inputs, axis=0, dtype=np.float64), rtol=0, atol=1e-5)


def test_memory_does_not_creep_up(backend: Any) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def calls(number: int) -> int:
        for _ in range(number):
            backend.sum_words(np.ones(1000, np.uint32))
            backend.sum_floats(np.ones(100, np.float32), np.empty(100, np.float32), "float32")
        for _ in range(number // 20):
            backend.sum_words(np.ones(100_000, np.uint32))
        return resident()

    before = calls(400)
    assert calls(4000) - before < 5_000_000


def test_split_by_color_and_key(backend: Any, world: Any) -> None:
    part = backend.split(world.rank % 2, -world.rank)
    mine = [rank for rank in reversed(range(world.size)) if rank % 2 == world.rank % 2]
    assert (part.rank, part.size) == (mine.index(world.rank), len(mine))
    words = np.array([1 << world.rank], np.uint32)
    part.sum_words(words)
    assert int(words[0]) == sum(1 << rank for rank in mine)
    part.close()

    first = backend.split(0 if world.rank == 0 else None, 0)
    assert (first is None) == (world.rank != 0)
    if first is not None:
        assert first.size == 1
        first.close()


def test_argument_errors_leave_it_usable(backend: Any, world: Any) -> None:
    with pytest.raises(ValueError, match="`root` must be a rank"):
        backend.broadcast(np.zeros(1, np.uint8), world.size)
    with pytest.raises(ValueError, match="`color` must be None or at least 0"):
        backend.split(-1, 0)
    with pytest.raises(ValueError, match="`dtype` must be"):
        backend.sum_floats(np.zeros(1), np.zeros(1), "int8")
    words = np.ones(1, np.uint32)
    backend.sum_words(words)
    assert int(words[0]) == world.size


def test_connecting_makes_one_duplicate() -> None:
    # un-freed duplicates run out at about 2,000 in MPICH
    first = gccomm_mpi.connect()
    handles = [gccomm_mpi.connect() for _ in range(2200)]
    for handle in handles:
        handle.close()
    words = np.ones(1, np.uint32)
    first.sum_words(words)
    assert int(words[0]) == first.size
    first.close()


def test_closing_frees_the_duplicate(world: Any) -> None:
    from mpi4py import MPI

    for _ in range(2200):
        gccomm_mpi.connect(MPI.COMM_SELF).close()
    parent = world.Dup()
    handle = gccomm_mpi.connect(parent)
    part = handle.split(0, 0)
    handle.close()
    words = np.ones(1, np.uint32)
    part.sum_words(words)
    assert int(words[0]) == world.size
    part.close()
    parent.Free()


def test_dropped_handles_in_any_order_do_nothing_collective(world: Any) -> None:
    parents = [world.Dup() for _ in range(3)]
    handles = [gccomm_mpi.connect(parent) for parent in parents]
    for place in range(3):
        handles[(place + world.rank) % 3] = None
        gc.collect()
    words = np.ones(1, np.uint32)
    again = gccomm_mpi.connect(parents[0])
    again.sum_words(words)
    assert int(words[0]) == world.size
    for parent in parents:
        parent.Free()


def test_parent_may_be_freed_first(world: Any) -> None:
    parent = world.Dup()
    handle = gccomm_mpi.connect(parent)
    parent.Free()
    words = np.ones(1, np.uint32)
    handle.sum_words(words)
    assert int(words[0]) == world.size
    handle.close()


def test_messages_do_not_mix_with_the_parents(backend: Any, world: Any) -> None:
    from mpi4py import MPI

    # the parent's own non-blocking all-reduce is open around ours
    theirs = np.full(100, 1, np.int32)
    request = world.Iallreduce(MPI.IN_PLACE, theirs)
    words = np.full(100, 5, np.uint32)
    backend.sum_words(words)
    request.Wait()
    assert set(words.tolist()) == {5 * world.size}
    assert set(theirs.tolist()) == {world.size}


def test_closed_handle_refuses() -> None:
    handle = gccomm_mpi.connect()
    handle.close()
    handle.close()
    with pytest.raises(BackendError, match="maximum: this communicator is closed"):
        handle.maximum(np.ones(1, np.uint32))


def test_connect_checks_its_argument(world: Any) -> None:
    from mpi4py import MPI

    for wrong in ("world", 3, MPI.COMM_NULL):
        with pytest.raises(TypeError, match="must be an mpi4py intracommunicator"):
            gccomm_mpi.connect(wrong)
    freed = world.Dup()
    freed.Free()
    with pytest.raises((TypeError, ValueError), match="`comm`"):
        gccomm_mpi.connect(freed)


def test_world_of_one() -> None:
    from mpi4py import MPI

    handle = gccomm_mpi.connect(MPI.COMM_SELF)
    words = np.array([2**32 - 1], np.uint32)
    handle.sum_words(words)
    handle.maximum(words)
    assert (handle.size, int(words[0])) == (1, 2**32 - 1)
    handle.close()


def test_mpi_errors_carry_class_and_text(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import gccomm_mpi.failure
    from mpi4py import MPI

    # broken on purpose: the end of this process must not count as an accident
    monkeypatch.setattr(gccomm_mpi.failure, "_pending", [])
    parent = world.Dup()
    handle = gccomm_mpi.connect(parent)

    def refuse(*_: Any) -> None:
        raise MPI.Exception(MPI.ERR_COUNT)

    handle._channel.window = None
    link = handle._channel.messages.link
    real = link.comm
    calls = dict.fromkeys(("Irecv", "Isend", "Recv_init", "Send_init"), refuse)
    link.comm = SimpleNamespace(**calls, rank=real.rank, size=real.size)
    with pytest.raises(BackendError, match=rf"MPI failed in sum: .*\(class {MPI.ERR_COUNT}\)"):
        handle.sum_words(np.ones(1, np.uint32))
    with pytest.raises(BackendError, match="this communicator is broken: MPI failed in sum"):
        handle.maximum(np.ones(1, np.uint32))
    with pytest.raises(BackendError, match="is broken"):
        gccomm_mpi.connect(parent)
    handle.close()
    real.Free()
    parent.Free()


def test_called_from_a_worker_thread(backend: Any, world: Any) -> None:
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("MPI serves one thread at a time")
    own = world.Dup()
    words = np.ones(5000, np.uint32)

    def work() -> None:
        for _ in range(20):
            backend.sum_words(words)
            words.fill(1)
        backend.sum_words(words)

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(20):
        own.Barrier()
    thread.join()
    own.Free()
    assert set(words.tolist()) == {world.size}


def test_second_thread_on_a_funneled_mpi_is_noted(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpi4py import MPI

    backend.sum_words(np.ones(1, np.uint32))  # from this thread
    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_FUNNELED)

    def work() -> None:
        for _ in range(2):
            backend.sum_words(np.ones(1, np.uint32))

    thread = threading.Thread(target=work)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread.start()
        thread.join()
    assert [note.category for note in caught] == [RuntimeWarning]
    assert "second thread" in str(caught[0].message)
