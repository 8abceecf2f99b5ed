"""Reductions through the memory that ranks of one host share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gccomm_mpi
import ml_dtypes
import numpy as np
import pytest
from gccomm_mpi import channel as channel_module
from gccomm_mpi import window as window_module
from gccomm_mpi.window import CHUNK_BYTES, COPIED_BYTES, FEW_RANKS, SHARED_BYTES, SLOT_BYTES

import gccomm

KINDS = {
    "words": np.uint32,
    "maximum": np.uint32,
    "float32": np.float32,
    "float64": np.float64,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
}


@pytest.fixture(params=["timed", "through the caches", "past them"])
def backend(world: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    if world.size == 1:
        pytest.skip("one rank shares nothing")
    parent = world.Dup()
    handle = gccomm_mpi.connect(parent)
    if handle._channel.window is None:
        pytest.skip(f"no window: {handle._channel.no_window}")
    handle._channel.window._state["forced"] = request.param_index
    yield handle
    handle.close()
    parent.Free()


def draw(kind: str, rank: int, count: int) -> np.ndarray[Any, Any]:
    """Small integers, whose sums are exact in any format, or words of any value."""
    dtype = np.dtype(KINDS[kind])
    rng = np.random.default_rng([rank, count])
    if dtype == np.uint32:
        return rng.integers(0, 2**32, count, dtype)
    return rng.integers(-15, 16, count).astype(dtype)


def expected(kind: str, size: int, count: int) -> np.ndarray[Any, Any]:
    parts = np.stack([draw(kind, rank, count) for rank in range(size)])
    if kind == "maximum":
        return np.asarray(parts.max(axis=0))
    return np.asarray(parts.astype(np.float64 if kind != "words" else np.uint32).sum(axis=0, dtype=None))


def sizes(item: int) -> list[int]:
    """Around the size from which ranks share the work, that of a chunk, and that of a slot."""
    edges = [SHARED_BYTES // item, CHUNK_BYTES // item, SLOT_BYTES // item]
    return [0, 1, 63, 1000, *(edge + d for edge in edges for d in (-1, 0, 1)), 2 * edges[1] + 17]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["in place", "apart", "from the room"])
def test_every_kind_of_every_size(backend: Any, kind: str, way: str) -> None:
    window, rank, dtype = backend._channel.window, backend.rank, np.dtype(KINDS[kind])
    wire = np.dtype(np.uint16) if dtype.itemsize == 2 else dtype
    for count in sizes(dtype.itemsize):
        send = draw(kind, rank, count).view(wire)
        recv = send
        if way != "in place":
            recv = np.full(count, 77).astype(wire)
        room = window.room(send.nbytes)
        if way == "from the room" and room is not None:
            room.view(wire)[:] = send
            send = room.view(wire)
        window.join("test", send, recv, kind)
        found = recv.view(dtype)
        if dtype != np.uint32:
            found = found.astype(np.float64)
        want = expected(kind, backend.size, count)
        np.testing.assert_array_equal(found, want.astype(found.dtype), err_msg=f"{count}")
        if way == "apart":
            np.testing.assert_array_equal(send.view(dtype), draw(kind, rank, count))


@pytest.mark.parametrize("slow", ["through", "past"])
def test_chunks_go_the_way_that_has_been_faster(backend: Any, slow: str) -> None:
    """All but the two of a period that are for the clock."""
    state, chunks = backend._channel.window._state, 64
    if backend.size > FEW_RANKS or state["forced"][0]:
        pytest.skip("not timed")
    data, item = np.ones(chunks * CHUNK_BYTES // 4, np.uint32), ["through", "past"].index(slow)
    times = np.full((2, 3), 1e-9)
    times[item] = 1.0
    state["times"], state["samples"] = times.reshape(1, 6), [[0, 0, 1000]]
    backend.sum_words(data)
    assert (data == backend.size).all()
    counts = state["samples"][0].tolist()
    assert sum(counts[:2]) == chunks
    assert counts[1 - item] >= chunks - 2
    assert counts[2] == 1000 + chunks


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("words", "maximum")])
def test_floats_may_lie_in_the_room_on_some_ranks_alone(backend: Any, kind: str) -> None:
    """All ranks make the same messages: those of their size."""
    window, rank, dtype = backend._channel.window, backend.rank, np.dtype(KINDS[kind])
    wire = np.dtype(np.uint16) if dtype.itemsize == 2 else dtype
    for count in sizes(dtype.itemsize):
        send, recv = draw(kind, rank, count).view(wire), np.full(count, 77).astype(wire)
        room = window.room(send.nbytes)
        if rank % 2 and room is not None:
            room.view(wire)[:] = send
            send = room.view(wire)
        window.join("test", send, recv, kind)
        found = recv.view(dtype).astype(np.float64)
        np.testing.assert_array_equal(found, expected(kind, backend.size, count), err_msg=f"{count}")


@pytest.mark.parametrize("codec", ["raw", "bf16", "fp16"])
@pytest.mark.parametrize("pushed", [False, True])
def test_a_rank_without_an_array_takes_part_in_its_sum(world: Any, codec: str, pushed: bool) -> None:
    dtype = {"raw": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}[codec]
    with gccomm.init("mpi") as comm:
        reducer = gccomm.Reducer(codec, op="sum", comm=comm)
        for count in (30_000, 65_537, 131_072, 260_000, 300_000, 540_000, 1_100_000):
            key, x = f"x{count}", np.ones(count, dtype)
            for step in range(3):
                mine = None if step and world.rank == world.size - 1 else x
                if pushed and step:
                    reducer.push(key, mine)
                    found = reducer.wait()
                else:
                    found = reducer({key: mine})
                total = world.size - (step > 0)
                assert (np.asarray(found[key], np.float32) == total).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_long_arrays_are_added_up_where_they_lie(world: Any, dtype: Any, op: str) -> None:
    """Also among short ones, from addresses inside a cache line, of any strides, and over their input."""
    kind = np.dtype(dtype).name
    sizes = {"a": 3000, "long": 2_500_001, "b": 70_000, "other": 1_100_000, "c": 1}
    scale = world.size if op == "mean" else 1
    wanted = {key: expected(kind, world.size, n).astype(dtype) / dtype(scale) for key, n in sizes.items()}

    def tree(offset: int, stride: int = 1) -> dict[str, Any]:
        made = {}
        for key, n in sizes.items():
            made[key] = np.empty(n * stride + offset, dtype)[offset::stride]
            made[key][:] = draw(kind, world.rank, n)
        return made

    with gccomm.init("mpi") as comm:
        for x, over in ((tree(0), False), (tree(1), False), (tree(0, 2), False), (tree(3), True)):
            out = x if over else None
            found = comm.compressed_allreduce(x, codec="raw", op=op, out=out)
            for key in sizes:
                np.testing.assert_array_equal(found[key], wanted[key], err_msg=key)


def test_ranks_without_a_long_array_cut_messages_alike(world: Any) -> None:
    """Beside a codec of whole tensors, whose parts go as few messages as the room of a call allows."""
    rng = np.random.default_rng(world.rank)
    tree = {"q": rng.standard_normal(8 << 20, np.float32), "r": np.ones(2 << 20, np.float32)}
    with gccomm.init("mpi") as comm:
        reducer = gccomm.Reducer({"q": "intsgd", "r": "raw"}, op="sum", comm=comm)
        for step in range(5):
            mine = {**tree, "r": None} if step > 2 and world.rank == world.size - 1 else tree
            found = reducer(mine)
            assert (found["r"] == world.size - (step > 2)).all()
            assert len(set(world.allgather(found["q"].tobytes()[:4096]))) == 1


def test_a_float_sum_that_is_not_of_the_array_itself_gets_the_room_it_needs(world: Any) -> None:
    class Halved(gccomm.codecs.floats.Raw):
        id = "halved"

        def steps(self, x: Any, state: Any, ctx: Any) -> Any:
            for step in super().steps(x, state, ctx):
                yield replace(step, direct=None)

    x = np.random.default_rng(world.rank).standard_normal(3 << 20, np.float32)
    with gccomm.init("mpi") as comm:
        one = comm.compressed_allreduce(x, codec=Halved())
        np.testing.assert_array_equal(one, comm.compressed_allreduce(x, codec="raw"))


def test_floats_get_the_same_bits_on_every_rank(backend: Any, world: Any) -> None:
    for count in (1000, 300_001):
        x = np.random.default_rng(world.rank).standard_normal(count).astype(np.float32)
        total = np.empty_like(x)
        backend.sum_floats(x, total, "float32")
        assert len(set(world.allgather(total.tobytes()))) == 1


def test_slots_are_not_written_before_all_have_read_them(backend: Any) -> None:
    """Messages of all sizes in a row, by ranks that are late in turns."""
    rng, late = np.random.default_rng(0), np.random.default_rng(backend.rank)
    for step in range(300):
        count = int(rng.integers(1, 40_000))
        words = np.full(count, (backend.rank + 1) * step, np.uint32)
        room = backend.room(words.nbytes)
        assert room is not None or words.nbytes <= COPIED_BYTES
        sums = np.empty_like(words)
        if step % 2 and room is not None:
            room.view(np.uint32)[:] = words
            backend.sum_into(room.view(np.uint32), sums)
        else:
            backend.sum_into(words, sums)
        assert (sums == step * backend.size * (backend.size + 1) // 2).all()
        if late.random() < 0.1:
            for _ in range(50):
                os.sched_yield()


def test_two_messages_may_be_on_their_way(backend: Any) -> None:
    """Finished in either order, around whole ones, by ranks that are late in turns."""
    rng, late = np.random.default_rng(0), np.random.default_rng(backend.rank)
    n, rank = backend.size, backend.rank
    for step in range(200):
        first, second, whole = (np.full(int(k), rank + step, np.uint32) for k in rng.integers(1, 60_000, 3))
        sums = np.zeros_like(second)
        one = backend.begin("words", first, first)
        if step % 3 == 0:
            backend.sum_words(whole)
        room = backend.room(second.nbytes)
        source = second if room is None else room.view(np.uint32)
        source[:] = second
        two = backend.begin("words", source, sums)
        if late.random() < 0.1:
            for _ in range(50):
                os.sched_yield()
        for handle in (one, two) if step % 2 else (two, one):
            backend.end(handle)
        if step % 3 != 0:
            backend.maximum(whole)
        expected = n * step + n * (n - 1) // 2
        assert (first == expected).all()
        assert (sums == expected).all()
        assert (whole == (n - 1 + step if step % 3 else expected)).all()


def test_a_message_on_its_way_holds_up_no_number_of_others(backend: Any) -> None:
    """Its slot is needed again: it is finished then, and its end comes to nothing."""
    n = backend.size
    for kind in ("words", "maximum"):
        first, large = np.full(5000, backend.rank, np.uint32), np.ones(10 * CHUNK_BYTES // 4 + 5, np.uint32)
        handle = backend.begin(kind, first, first)
        backend.sum_words(large)
        for _ in range(10):
            backend.maximum(np.ones(10, np.uint32))
        other = backend.begin("words", large, large)
        assert other is None
        backend.end(handle)
        assert (first == (n * (n - 1) // 2 if kind == "words" else n - 1)).all()
        assert (large == n * n).all()


def test_large_messages_are_complete_at_once(backend: Any) -> None:
    words = np.ones(SLOT_BYTES // 4 + 1, np.uint32)
    assert backend.begin("words", words, words) is None
    assert (words == backend.size).all()
    floats = np.ones(1000, np.float32)
    total = np.zeros_like(floats)
    handle = backend.begin("float32", floats, total)
    backend.end(handle)
    assert (total == backend.size).all()


def test_numbers_of_messages_wrap(backend: Any) -> None:
    window = backend._channel.window
    backend.maximum(np.ones(1, np.uint32))
    backend._channel.arrive("test")
    window._number = window._finished = window._shares = 0xFFFFFFFD
    for flags in window._flags.values():
        window_module.kernels.raise_flag(int(flags[backend.rank]), 0xFFFFFFFD)
    backend._channel.arrive("test")
    for step in range(12):
        words = np.full(100_000 if step % 3 else 10, step, np.uint32)
        backend.sum_words(words)
        assert (words == step * backend.size).all()


def test_messages_of_the_program_go_on_meanwhile(world: Any) -> None:
    """A large send that the peer takes before it joins the call: who waits must let MPI work."""
    if world.size == 1:
        pytest.skip("one rank sends nothing")
    data = np.full(1 << 20, world.rank, np.float64)
    with gccomm.init("mpi") as comm:
        for _ in range(3):
            if world.rank == 0:
                requests = [world.Isend(data, peer, 5) for peer in range(1, world.size)]
                total = comm.allreduce(np.ones(10))
                for request in requests:
                    request.Wait()
            else:
                world.Recv(data, 0, 5)
                total = comm.allreduce(np.ones(10))
                assert (data == 0).all()
            assert (total == world.size).all()


@pytest.mark.parametrize("fault", ["none", "hidden", "another"])
def test_without_common_memory_messages_are_used(
    world: Any, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """No memory on one rank, or one that cannot see that of the others: no rank uses it then."""
    if world.size == 1:
        pytest.skip("one rank shares nothing")

    def refuse(*_: Any) -> Any:
        raise OSError(28, "no space left")

    if world.rank == world.size - 1:
        if fault == "none":
            monkeypatch.setattr(os, "posix_fallocate", refuse)
        elif fault == "hidden":
            monkeypatch.setattr(window_module, "_see", refuse)
        else:
            monkeypatch.setattr(os, "pwrite", lambda *_: None)  # no token: as if it were another's memory
    parent = world.Dup()
    handle = gccomm_mpi.connect(parent)
    assert handle.room(4) is None
    assert len(set(world.allgather(handle._channel.no_window))) == 1
    assert ("memory" if fault != "another" else "not the process") in handle._channel.no_window
    words = np.ones(100_000, np.uint32)
    handle.sum_words(words)
    assert (words == world.size).all()
    handle.close()
    parent.Free()


def test_results_are_those_of_messages(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {
        "a": np.random.default_rng(world.rank).standard_normal((300, 1024)).astype(np.float32),
        "b": np.arange(5000) * (world.rank + 1),
        "c": np.random.default_rng(world.rank).standard_normal(50),
    }
    results = []
    for window in ("1", "0"):
        monkeypatch.setenv("GCCOMM_WINDOW", window)
        parent = world.Dup()
        with gccomm.init(comm=parent) as comm:
            found = []
            for codec in (
                "rotated",
                "uniform:wire_bits=4,scales=predicted",
                "thc",
                "rotated:headroom=checked",
            ):
                reducer = gccomm.Reducer(codec, comm=comm, op="sum")
                found += [reducer(tree) for _ in range(3)]
            results.append(found)
        parent.Free()
    for one, other in zip(*results, strict=True):
        for key in tree:
            assert one[key].tobytes() == other[key].tobytes()


@pytest.mark.parametrize(
    ("affinities", "started", "crowded"),
    [
        ([{0, 1}, {0, 1}], "2", False),
        ([{0, 1}] * 3, "3", True),
        ([{0, 1}] * 2, "4", True),  # a group made by split, whose other ranks compute, too
        ([{0}, {1}], "4", False),  # each is bound to a core of its own
        ([{0}, {0}], "2", True),
        ([{0, 1}, {2, 3}], "", False),
        ([{0, 1}] * 2, "many", False),
    ],
)
def test_who_shares_cores_gives_them_away_soon(
    affinities: list[set[int]], started: str, crowded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.setenv(name, started)
    assert channel_module._crowded(affinities) is crowded
