"""Reductions by a codec's own arithmetic, on the ranks of this run: in segments, over messages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gccomm_mpi
import numpy as np
import pytest
from gccomm_mpi import hops, messages
from gccomm_mpi.choice import ROUNDS

import gccomm
from gccomm import testing
from gccomm.steps import Fold
from gccomm.transfers import Folding, execute

CODEC = "rehop:wire_bits=5"


@pytest.fixture
def backend(world: Any) -> Iterator[Any]:
    parent = world.Dup()
    handle = gccomm_mpi.connect(parent)
    yield handle
    handle.close()
    parent.Free()


class Sums:
    """A fold of blocks of 1, 2, 3, 1, 2 ... words whose results have one word more: the sums, and a hash."""

    def __init__(self, rank: int, blocks: int) -> None:
        self.rank, self.seen = rank, [0] * blocks
        self.sizes = [1 + b % 3 for b in range(blocks)]
        self.ends = np.cumsum([0, *self.sizes]).tolist()
        self.result: dict[int, tuple[int, ...]] = {}
        self.step = Fold(blocks, 4, self.sent, self.folded, self.encode, self.fold, self.decode)

    def sent(self, lo: int, hi: int) -> int:
        return int(self.ends[hi] - self.ends[lo])

    def folded(self, lo: int, hi: int) -> int:
        return self.sent(lo, hi) + hi - lo

    def words(self, rank: int, b: int) -> np.ndarray:
        return np.random.default_rng([rank, b]).integers(0, 2**32, self.sizes[b], np.uint32)

    def encode(self, lo: int, hi: int, out: np.ndarray) -> None:
        assert out.size == self.sent(lo, hi)
        out[:] = np.concatenate([self.words(self.rank, b) for b in range(lo, hi)])
        for b in range(lo, hi):
            self.seen[b] += 1

    def fold(self, lo: int, hi: int, parts: Any, out: np.ndarray) -> None:
        assert out.size == self.folded(lo, hi)
        at = 0
        for b in range(lo, hi):
            first = self.sent(lo, b)
            rows = [part[first : first + self.sizes[b]] for part in parts]
            out[at : at + self.sizes[b]] = np.sum(rows, axis=0, dtype=np.uint32)
            order = sum((r + 1) * int(row[0]) for r, row in enumerate(rows))
            out[at + self.sizes[b]] = order & 0xFFFFFFFF
            at += self.sizes[b] + 1

    def decode(self, lo: int, hi: int, words: np.ndarray) -> None:
        assert words.size == self.folded(lo, hi)
        for b in range(lo, hi):
            assert self.seen[b] == 1, "decoded before it was encoded, or encoded twice"
            first = self.folded(lo, b)
            assert b not in self.result
            self.result[b] = tuple(words[first : first + self.sizes[b] + 1].tolist())

    def expected(self, ranks: int) -> dict[int, tuple[int, ...]]:
        found = {}
        for b, size in enumerate(self.sizes):
            out = np.zeros(size + 1, np.uint32)
            parts = [self.words(r, b) for r in range(ranks)]
            out[:-1] = np.sum(parts, axis=0, dtype=np.uint32)
            out[-1] = sum((r + 1) * int(row[0]) for r, row in enumerate(parts)) & 0xFFFFFFFF
            found[b] = tuple(out.tolist())
        return found


def run(backend: Any, blocks: int) -> Sums:
    sums = Sums(backend.rank, blocks)
    memory = np.empty(sums.sent(0, blocks), np.uint32), np.empty(sums.folded(0, blocks), np.uint32)
    execute(Folding(sums.step, *memory), backend)
    return sums


@pytest.mark.parametrize("segment_bytes", [1, 100, 56 << 10])
def test_every_block_is_folded_once_in_the_order_of_the_ranks(
    backend: Any, world: Any, monkeypatch: pytest.MonkeyPatch, segment_bytes: int
) -> None:
    """Shares of no, few and many segments, blocks of different sizes, results larger than what is sent."""
    monkeypatch.setattr(hops, "SEGMENT_BYTES", segment_bytes)
    for blocks in (0, 1, 2, 3, 7, 40, 121):
        assert run(backend, blocks).result == Sums(0, blocks).expected(world.size)


@pytest.mark.parametrize("segment_bytes", [40, 1000, 512 << 10])
def test_several_on_their_way(backend: Any, world: Any, segment_bytes: int) -> None:
    """In segments of any length, with sums in between, and ended while others go on."""
    channel = backend._channel
    every, flights = [], []
    for blocks in (50, 0, 121, 3):
        sums = Sums(backend.rank, blocks)
        memory = np.empty(sums.sent(0, blocks), np.uint32), np.empty(sums.folded(0, blocks), np.uint32)
        moves = hops.fold(channel.messages.link, sums.step, *memory, segment_bytes)
        flights.append(channel.launch("fold", moves, memory))
        every.append(sums)
        ones = np.ones(1000, np.uint32)
        backend.sum_words(ones)
        assert set(ones.tolist()) == {world.size}
    for flight, sums in zip(flights, every, strict=True):
        channel.land(flight)
        assert sums.result == Sums(0, len(sums.sizes)).expected(world.size)


def test_a_codec_that_waits_lets_others_go_on(backend: Any, world: Any) -> None:
    """As one does that waits for a device while it encodes."""
    every, memories, flights = [], [], []
    for _ in range(3):
        sums = Sums(backend.rank, 50)
        encode, decode = sums.step.encode, sums.step.decode
        sums.step = replace(
            sums.step,
            encode=lambda *a, encode=encode: (backend.go_on(), encode(*a), backend.go_on()),
            decode=lambda *a, decode=decode: (backend.go_on(), decode(*a), backend.go_on()),
        )
        memory = np.empty(sums.sent(0, 50), np.uint32), np.empty(sums.folded(0, 50), np.uint32)
        flights.append(backend.begin_fold(sums.step, *memory))
        every.append(sums)
        memories.append(memory)
    for flight, sums in zip(flights, every, strict=True):
        backend.end(flight)
        assert sums.result == Sums(0, 50).expected(world.size)


def test_segments_are_tried_where_ranks_are_apart(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend.size == 1:
        pytest.skip("nothing is sent")
    monkeypatch.setattr(messages, "SEGMENT_BYTES", 64)  # or arrays are too small to be tried
    monkeypatch.setattr(backend._channel, "one_host", False)
    for _ in range(2 * ROUNDS + 1):
        assert run(backend, 80).result == Sums(0, 80).expected(backend.size)
    (line,) = [line for line in backend.algorithms if line.startswith("folds")]
    assert "(ms: fold " in line
    assert "long-fold " in line


def test_the_order_does_not_hang_on_who_is_late(backend: Any, world: Any) -> None:
    for late in range(world.size):
        if world.rank == late:
            time.sleep(0.02)
        assert run(backend, 50).result == Sums(0, 50).expected(world.size)


def test_mixed_with_other_reductions(backend: Any, world: Any) -> None:
    """In turn with sums and own operations of every size, which use the same messages."""
    for length in (10, 100_000, 11, 200_000):
        ones = np.ones(length, np.uint32)
        backend.sum_words(ones)
        assert set(ones.tolist()) == {world.size}
        assert run(backend, 33).result == Sums(0, 33).expected(world.size)
        backend.combine_words(ones, "saturate:16", 0)


def test_the_bits_of_the_simulation(comm: Any, world: Any) -> None:
    """Of several dtypes and sizes, fused, over several pieces, in a result that overwrites its input."""
    shapes = {"a": (3000,), "b": (3, 700), "c": (1 << 18,), "d": (20,)}
    trees = []
    for rank in range(world.size):
        rng = np.random.default_rng(rank)
        wide = {key: rng.standard_normal(shape) for key, shape in shapes.items()}
        trees.append({key: x if key == "b" else x.astype(np.float32) for key, x in wide.items()})
    expected = testing.simulate(trees, CODEC, "mean")[0][0]
    reducer = gccomm.Reducer(CODEC, comm=comm)
    tree = {key: x.copy() for key, x in trees[world.rank].items()}
    found = reducer(tree, out=tree)
    for key, y in expected.items():
        np.testing.assert_array_equal(found[key].view(np.uint8), y.view(np.uint8))
    assert len(set(world.allgather(reducer.stats.wire_bytes))) == 1


@pytest.mark.parametrize("settings", [{"GCCOMM_WINDOW": "0"}, {}])
def test_with_and_without_shared_memory(world: Any, monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    xs = [np.random.default_rng(r).standard_normal(70_000, dtype=np.float32) for r in range(world.size)]
    parent = world.Dup()
    with gccomm.init(comm=parent) as comm:
        y = comm.compressed_allreduce(xs[world.rank], codec=CODEC)
        np.testing.assert_array_equal(y, testing.simulate(xs, CODEC)[0][0])
    parent.Free()


def test_pieces_on_their_way(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pieces over messages, in a result that overwrites its input, with residuals."""
    monkeypatch.setenv("GCCOMM_WINDOW", "0")
    xs = [np.random.default_rng(r).standard_normal(5 << 19, dtype=np.float32) for r in range(world.size)]
    names = "uniform:widening=true", "rotated:headroom=safe,widening=true"
    parent = world.Dup()
    with gccomm.init(comm=parent) as comm:
        for name in names:
            trees = [{"x": x} for x in xs]
            expected = testing.simulate(trees, name, "mean", steps=2, error_feedback=True)[0][0]["x"]
            reducer = gccomm.Reducer(name, comm=comm, error_feedback=True)
            for _ in range(2):
                tree = {"x": xs[world.rank].copy()}
                found = reducer(tree, out=tree)
            np.testing.assert_array_equal(found["x"], expected)
            assert reducer.stats.messages > 3
    parent.Free()


def test_a_world_of_one() -> None:
    from mpi4py import MPI

    handle = gccomm_mpi.connect(MPI.COMM_SELF)
    assert run(handle, 10).result == Sums(0, 10).expected(1)
    handle.close()
