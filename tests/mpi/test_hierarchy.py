"""Reductions over several hosts, within each through shared memory: hosts are made up here."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gccomm_mpi
import gccomm_mpi.channel
import numpy as np
import pytest
from gccomm_mpi import choice
from gccomm_mpi.choice import ROUNDS
from gccomm_mpi.small import SMALL_BYTES

import gccomm
from gccomm import batch
from gccomm.testing import simulate

# From the number of a rank to its host.
HOSTS = {
    "pairs": lambda rank: rank // 2,
    "one, then all others": lambda rank: min(rank, 1),
    "two of every second": lambda rank: rank % 2,
    "alone": lambda rank: rank,
}


class OnHosts:
    """A communicator whose ranks are on made-up hosts."""

    def __init__(self, comm: Any, host_of: Any) -> None:
        self._comm, self._host_of = comm, host_of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def Split_type(self, kind: Any, key: int) -> Any:  # noqa: N802
        del kind
        return self._comm.Split(self._host_of(self._comm.rank), key)


@pytest.fixture(params=HOSTS)
def parent(request: pytest.FixtureRequest, world: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A communicator over several hosts."""
    host_of = HOSTS[request.param]
    if host_of(world.size - 1) == 0:
        pytest.skip("too few ranks for two hosts")
    duplicate = gccomm_mpi.channel._duplicate
    monkeypatch.setattr(gccomm_mpi.channel, "_duplicate", lambda comm: OnHosts(duplicate(comm), host_of))
    made = world.Dup()
    yield made
    made.Free()


def test_every_operation_of_every_size(parent: Any, world: Any) -> None:
    handle = gccomm_mpi.connect(parent)
    channel = handle._channel
    shared = any(len({h(r) for r in range(world.size)}) < world.size for h in [channel.comm._host_of])
    assert (channel.hierarchy is not None) == shared
    assert not handle.one_host
    for count in (0, 1, 257, 20_000 * world.size, 1_300_001):
        parts = [
            np.random.default_rng([r, count]).integers(0, 2**32, count, np.uint32) for r in range(world.size)
        ]
        words = parts[world.rank].copy()
        handle.sum_words(words)
        np.testing.assert_array_equal(words, np.sum(parts, axis=0, dtype=np.uint32))
        words = parts[world.rank].copy()
        handle.maximum(words)
        np.testing.assert_array_equal(words, np.max(parts, axis=0))
        floats = (parts[world.rank] % 1000).astype(np.float32)
        total = np.empty_like(floats)
        handle.sum_floats(floats, total, "float32")
        np.testing.assert_array_equal(total, np.sum([p % 1000 for p in parts], axis=0).astype(np.float32))
        words = parts[world.rank] & 0x0F0F0F0F
        handle.combine_words(words, "saturate:8", 1)
        assert len(set(world.allgather(words.tobytes()))) == 1
    handle.close()


@pytest.mark.parametrize("longest", ["first", "last"])
def test_small_arrays_of_different_lengths(parent: Any, world: Any, longest: str) -> None:
    """What all ranks hold is reduced, and nothing is written behind what a rank holds."""
    handle = gccomm_mpi.connect(parent)
    assert handle.first_words == SMALL_BYTES // 4
    place = world.rank if longest == "last" else world.size - 1 - world.rank
    own = 256 + 1792 * place // (world.size - 1)
    memory = np.full(SMALL_BYTES // 4 + 1, 77, np.uint32)
    for reduce, expected in (
        (handle.sum_words, world.size * (world.size + 1) // 2),
        (handle.maximum, world.size),
    ):
        memory[:own] = world.rank + 1
        reduce(memory[:own])
        assert (memory[:256] == expected).all()
        assert (memory[own:] == 77).all()
    handle.close()


@pytest.mark.parametrize("blocks", [192, 193, 1024, 1985])
def test_scales_go_with_the_header(parent: Any, world: Any, blocks: int) -> None:
    """Those of the first piece; ranks do not swap arrays where hosts add up words."""
    xs = [np.random.default_rng(r).standard_normal(1024 * blocks, np.float32) for r in range(world.size)]
    with gccomm.init(comm=parent) as comm:
        found = comm.compressed_allreduce(xs[world.rank], codec="uniform")
        assert comm.stats.messages == (2 if blocks <= 1024 else 4)
        np.testing.assert_array_equal(found, simulate(xs, "uniform")[0][world.rank])
        small = comm.compressed_allreduce(np.ones(1024, np.float32), "sum", codec="uniform")
        assert comm.stats.messages == (1 if comm._backend.swap_bytes else 2)
        np.testing.assert_allclose(small, world.size, rtol=0.1)


@pytest.mark.parametrize(("usual", "other"), [(193, 194), (1, 1500), (1500, 1), (1024, 3072), (3072, 1)])
def test_ranks_that_differ_all_get_the_error(parent: Any, world: Any, usual: int, other: int) -> None:
    """Whatever their first messages hold: a header alone, or more or less behind it."""
    blocks = other if world.rank == world.size - 1 else usual
    with gccomm.init(comm=parent) as comm:
        for codec in ("uniform", "rotated", "uniform:scales=predicted"):
            with pytest.raises(gccomm.MismatchError, match=f"rank {world.size - 1}"):
                comm.compressed_allreduce(np.ones(1024 * blocks, np.float32), codec=codec)
            total = comm.compressed_allreduce(np.ones(1024 * usual, np.float32), "sum", codec=codec)
            np.testing.assert_allclose(total, world.size, rtol=0.1)


@pytest.mark.parametrize("hierarchical", [None, True])
def test_pieces_go_on_where_links_are_slow(
    parent: Any, world: Any, monkeypatch: pytest.MonkeyPatch, hierarchical: bool | None
) -> None:
    """Kernels stop for them, also those of folds, which are themselves on their way; results are the same."""
    monkeypatch.setattr(batch, "PORTION", 16)
    xs = [np.random.default_rng(r).standard_normal(1_100_000).astype(np.float32) for r in range(world.size)]
    codecs = "rotated:headroom=checked", "uniform:scales=predicted", "uniform:widening=true", "rehop"
    found, called = [], []
    for slow in (False, True):
        mine = parent.Dup()
        with gccomm.init(comm=mine, hierarchical=hierarchical) as comm:
            comm._place.links.found = lambda slow=slow: slow
            go_on = comm._backend.go_on
            noted = replace(comm._place, go_on=lambda go_on=go_on: (called.append(0), go_on())[1])
            comm._place = noted
            made = []
            for codec in codecs:
                reducer = gccomm.Reducer(codec, comm=comm, op="sum", error_feedback=False)
                made += [reducer(xs[world.rank]) for _ in range(2)]
                assert len(set(world.allgather(made[-1].tobytes()))) == 1
        mine.Free()
        found.append(made)
        assert bool(called) is slow
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_ranks_that_know_of_other_links_choose_alike(
    parent: Any, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folds are between all ranks; but only ranks that lead their hosts have timed what is between these."""
    monkeypatch.setattr(choice, "SLOW_LINK", 1e12)
    with gccomm.init(comm=parent) as comm:
        chooser = comm._backend._channel.chooser
        words = np.ones(1 << 19, np.uint32)
        for _ in range(6 * ROUNDS):
            comm._backend.sum_words(words)
        assert any(world.allgather(chooser.slow))
        x = np.random.default_rng(world.rank).standard_normal(1 << 20).astype(np.float32)
        for _ in range(2 * ROUNDS + 2):
            found = comm.compressed_allreduce(x, codec="rehop")
        assert len(set(world.allgather(found.tobytes()))) == 1
        chosen = {
            kind: trial.chosen for (kind, _), trial in chooser.trials.items() if kind.startswith("folds")
        }
        assert "long-fold" not in chosen.values()
        assert len({str(entry) for entry in world.allgather(chosen)}) == 1


def test_several_are_on_their_way(parent: Any, world: Any) -> None:
    """Words and maxima that are begun, two at a time, from room that is given and elsewhere."""
    handle = gccomm_mpi.connect(parent)
    hierarchy = handle._channel.hierarchy
    begun: deque[tuple[Any, Any, Any]] = deque()
    flights = 0

    def end() -> None:
        going, found, expected = begun.popleft()
        if going is not None:
            handle.end(going)
        np.testing.assert_array_equal(found, expected)

    for number in range(48):  # more than the trials of algorithms
        kind, count = ("words", 50_000 * world.size) if number % 3 else ("maximum", 700)
        if number > 40:
            count = 400_000  # more than a slot
        parts = [
            np.random.default_rng([r, number]).integers(0, 2**32, count, np.uint32) for r in range(world.size)
        ]
        found = parts[world.rank].copy()
        room = handle.room(found.nbytes) if number % 2 else None
        send = found.copy() if room is None else room.view(np.uint32)
        send[...] = found
        going = handle.begin(kind, send, found)
        flights += getattr(going, "flight", None) is not None
        join = np.sum if kind == "words" else np.max
        begun.append((going, found, join(parts, axis=0).astype(np.uint32)))
        if len(begun) == 2:
            end()
    while begun:
        end()
    if hierarchy is not None:
        assert (flights > 0) == (hierarchy.place == 0)
    handle.close()


def test_results_are_those_of_messages(parent: Any, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {
        "a": np.random.default_rng(world.rank).standard_normal((600, 1024)).astype(np.float32),
        "b": np.arange(5000) * (world.rank + 1),
        "c": np.random.default_rng(world.rank).standard_normal(50),
    }
    found = []
    for hierarchy in ("1", "0"):
        monkeypatch.setenv("GCCOMM_HIERARCHY", hierarchy)
        mine = parent.Dup()
        with gccomm.init(comm=mine) as comm:
            assert hierarchy == "1" or comm._backend._channel.hierarchy is None
            made = []
            for codec in ("rotated", "uniform:wire_bits=4,scales=predicted", "rotated:headroom=checked"):
                reducer = gccomm.Reducer(codec, comm=comm, op="sum")
                made += [reducer(tree) for _ in range(3)]
            with pytest.raises(gccomm.MismatchError):
                comm.allreduce(np.ones(5 + (comm.rank == comm.size - 1)))
            assert (comm.allreduce(np.ones(5)) == comm.size).all()
            found.append(made)
        mine.Free()
    for one, other in zip(*found, strict=True):
        for key in tree:
            assert one[key].tobytes() == other[key].tobytes()


def test_splits_and_closing(parent: Any, world: Any) -> None:
    for _ in range(5):
        mine = parent.Dup()
        with gccomm.init(comm=mine) as comm, comm.split(0, key=-comm.rank) as part:
            assert (part.allreduce(np.ones(100_000)) == world.size).all()
        mine.Free()


def hosts_of(parent: Any, world: Any) -> list[int]:
    made = gccomm_mpi.channel._duplicate(parent)
    hosts = [made._host_of(rank) for rank in range(world.size)]
    made.Free()
    return hosts


@pytest.mark.parametrize(
    "codec",
    [
        "uniform",
        "rotated:wire_bits=4,headroom=checked",
        "uniform:scales=predicted",
        "thc:saturate=True",
        "rehop",
        "bf16",
        "powersgd",
    ],
)
def test_sums_of_hosts_are_those_of_the_simulation(parent: Any, world: Any, codec: str) -> None:
    """To the bit, with feedback, integers, small arrays and pieces of several messages."""
    hosts = hosts_of(parent, world)
    if len(set(hosts)) in (1, world.size):
        pytest.skip("no host has several ranks")

    def tree(rank: int, step: int) -> dict[str, Any]:
        rng = np.random.default_rng((rank, step))
        return {
            "a": rng.standard_normal((1200, 1024)).astype(np.float32),
            "b": np.arange(5000) * (rank + 1),
            "c": rng.standard_normal(50),
            "d": rng.standard_normal(3000).astype(np.float16),
        }

    simulated = gccomm.testing.simulate_steps(
        lambda step: [tree(rank, step) for rank in range(world.size)],
        codec, steps=3, hosts=hosts, error_feedback=True,
    )  # fmt: skip
    mine = parent.Dup()
    with gccomm.init(comm=mine, hierarchical=True) as comm:
        assert comm._backend.hosts.number == len(set(hosts))
        reducer = gccomm.Reducer(codec, comm=comm, op="sum", error_feedback=True)
        for step, _, expected, _ in simulated:
            found = reducer(tree(comm.rank, step))
            for key, value in expected[comm.rank].items():
                assert found[key].tobytes() == value.tobytes(), (step, key)
        assert reducer.stats.host_bytes > 0
    mine.Free()


def test_errors_over_hosts(parent: Any, world: Any) -> None:
    """Every rank raises the same, and the next call works."""
    mine = parent.Dup()
    with gccomm.init(comm=mine, hierarchical=True) as comm:
        with pytest.raises(gccomm.MismatchError) as caught:
            comm.compressed_allreduce(np.ones(5000 + (comm.rank == comm.size - 1), np.float32))
        assert len(set(world.allgather(str(caught.value)))) == 1
        x = np.ones(5000, np.float32)
        x[77] = np.nan if comm.rank == 1 else 1
        with pytest.raises(gccomm.NonFiniteError, match="rank 1: input holds inf or NaN"):
            comm.compressed_allreduce(x, nonfinite="raise")
        found = comm.compressed_allreduce(x)
        assert np.isnan(found[:1024]).all()
        np.testing.assert_allclose(found[1024:], comm.size, rtol=0.1)
        with comm.split(0, key=comm.rank) as part:
            assert part._backend._channel.hierarchical is True
            np.testing.assert_allclose(
                part.compressed_allreduce(np.ones(5000, np.float32)), comm.size, rtol=0.1
            )
        if comm._backend.hosts is not None:
            with pytest.raises(ValueError, match="in use with hierarchical=True, not False"):
                gccomm.init(comm=mine, hierarchical=False)
    mine.Free()


def test_settings_of_hosts(parent: Any, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    several = len(set(hosts_of(parent, world))) < world.size
    for variable, argument, words, floats in (
        ("", None, several, False),
        ("", False, False, False),
        ("floats", False, several, several),
        ("0", True, False, False),
        ("words", True, several, False),
    ):
        monkeypatch.setenv("GCCOMM_HIERARCHY", variable)
        mine = parent.Dup()
        with gccomm.init(comm=mine, hierarchical=argument) as comm:
            channel = comm._backend._channel
            assert (channel.hierarchy is not None, channel.hosts is not None) == (words, floats)
            np.testing.assert_allclose(
                comm.compressed_allreduce(np.ones(5000, np.float32)), comm.size, rtol=0.1
            )
        mine.Free()
    monkeypatch.delenv("GCCOMM_HIERARCHY")
    with pytest.raises(
        ValueError, match="`hierarchical` must be equal on all ranks; it is True on rank 0"
    ) as e:
        gccomm_mpi.connect(parent, hierarchical=True if world.rank == 0 else None)
    assert len(set(world.allgather(str(e.value)))) == 1
    monkeypatch.setenv("GCCOMM_WINDOW", "0")
    if several:
        with pytest.raises(
            gccomm.BackendError, match="need memory that ranks of a host share: GCCOMM_WINDOW=0"
        ):
            gccomm_mpi.connect(parent, hierarchical=True)


def test_sums_of_hosts_are_in_the_timeline(parent: Any, world: Any, tmp_path: Path) -> None:
    """A rank's phases add up to its statistics; only what goes between hosts counts as the wire's bytes."""
    path = Path(world.bcast(str(tmp_path / "trace.json")))
    mine = parent.Dup()
    with gccomm.init(comm=mine, hierarchical=True) as comm:
        reducer = gccomm.Reducer("uniform", comm=comm)
        with gccomm.tracing(path, comm=comm):
            reducer({"w": np.ones(3 << 20, np.float32)})
        world.Barrier()
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
        own = [e for e in events if e["pid"] == comm.rank and e["tid"] == 0]
        for kind in ("encode", "wire", "decode"):
            spent = sum(e["dur"] for e in own if e["cat"] == kind) / 1e6
            assert spent == pytest.approx(getattr(reducer.stats, f"{kind}_s"), rel=1e-6, abs=1e-6)
        sums = [e for e in own if e["name"] == "host sum"]
        assert sum(e["args"]["bytes"] for e in sums) == reducer.stats.host_bytes
        assert (len(sums) > 0) == (comm._backend.hosts is not None)
        wired = [e for e in own if e["name"] in ("wire", "agree")]
        assert sum(e["args"]["bytes"] for e in wired) == reducer.stats.wire_bytes
        assert len(wired) == reducer.stats.messages
    mine.Free()
