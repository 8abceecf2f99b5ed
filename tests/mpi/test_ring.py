"""The algorithms between hosts, on the ranks of this run, and the choice among them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gccomm_mpi
import ml_dtypes
import numpy as np
import pytest
from gccomm_mpi import choice, messages
from gccomm_mpi import ring as ring_module
from gccomm_mpi.choice import (
    CLEARLY,
    LEAST_TIMED,
    LONG,
    LONG_CLEARLY,
    MISSES,
    ROUNDS,
    SLOW_LINK,
    STREAM,
    STREAM_CLEARLY,
    Chooser,
)
from gccomm_mpi.exchange import swap_whole
from gccomm_mpi.halving import doubling
from gccomm_mpi.messages import _LARGE, _STREAMS, _SWAPS, ALGORITHMS, LONG_BYTES
from gccomm_mpi.operators import MAXIMUM, SUM, Operator, sum_of
from gccomm_mpi.ring import SEGMENT_BYTES

import gccomm

pytestmark = pytest.mark.usefixtures("several")


@pytest.fixture
def several(world: Any) -> None:
    if world.size == 1:
        pytest.skip("one rank has nobody to send to")


@pytest.fixture
def channel(world: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("GCCOMM_WINDOW", "0")
    parent = world.Dup()
    handle = gccomm_mpi.connect(parent)
    yield handle._channel
    handle.close()
    parent.Free()


def test_what_was_begun_goes_on_without_a_wait(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where codecs compute meanwhile; on no rank does it need the call that completes it."""
    monkeypatch.setenv("GCCOMM_WINDOW", "0")
    monkeypatch.setenv("GCCOMM_ALLREDUCE", "ring")  # or the first ones are tried, each to its end
    parent = world.Dup()
    handle = gccomm_mpi.connect(parent)
    words, sums = np.full((2, 150_000), world.rank + 1, np.uint32), np.zeros((2, 150_000), np.uint32)
    assert handle.go_on() is False
    begun = [handle.begin("words", *pair) for pair in zip(words, sums, strict=True)]
    deadline = time.monotonic() + 20
    while not all(flight.landed for flight in begun) and time.monotonic() < deadline:
        assert handle.go_on() is True
    assert (sums == world.size * (world.size + 1) // 2).all()
    world.Barrier()  # none of these can wait for another rank any more
    for flight in begun:
        handle.end(flight)
    assert handle.go_on() is False
    handle.close()
    with pytest.raises(gccomm.BackendError, match="reductions on their way: this communicator is closed"):
        handle.go_on()
    parent.Free()


EVERY: dict[str, Callable[..., Any]] = {**ALGORITHMS, "doubling": doubling}


def reduce(channel: Any, name: str, send: Any, recv: Any, operator: Operator) -> None:
    link = channel.messages.link
    channel.land(channel.launch("test", EVERY[name](link, send, recv, operator), (send, recv)))


@pytest.mark.parametrize("segment", [256, 4096, 56 << 10])
@pytest.mark.parametrize("ahead", [1, 3, 24])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("name", EVERY)
def test_sums(
    channel: Any, world: Any, monkeypatch: pytest.MonkeyPatch, name: str, segment: int, ahead: int,
    in_place: bool,
) -> None:  # fmt: skip
    """Shares of no, few and many segments, short last ones, receives posted far and hardly ahead."""
    if not name.endswith("ring") and ahead != 24:
        pytest.skip("for the ring alone")
    if name.startswith(LONG):
        monkeypatch.setitem(EVERY, name, partial(EVERY[name], segment_bytes=segment))
    monkeypatch.setattr(ring_module, "SEGMENT_BYTES", segment)
    monkeypatch.setattr(ring_module, "AHEAD_BYTES", ahead * segment)
    monkeypatch.setattr(ring_module, "LEAST_AHEAD", 1)
    monkeypatch.setattr(channel.messages.link, "segment_bytes", segment)
    for count in (1, 31, 64 * world.size, 1000, 5003, 40_001):
        parts = [
            np.random.default_rng([r, count]).integers(0, 2**32, count, np.uint32) for r in range(world.size)
        ]
        for operator, expected in ((SUM, sum(parts)), (MAXIMUM, np.max(parts, axis=0))):
            send = parts[world.rank].copy()
            recv = send if in_place else np.full_like(send, 9)
            reduce(channel, name, send, recv, operator)
            np.testing.assert_array_equal(recv, expected)
            if not in_place:
                np.testing.assert_array_equal(send, parts[world.rank])


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("name", [name for name in EVERY if name != "mpi"])
def test_sums_of_floats_have_the_same_bits_on_every_rank(
    channel: Any, world: Any, name: str, dtype: Any
) -> None:
    real = np.dtype({"bfloat16": ml_dtypes.bfloat16}.get(dtype, dtype))
    x = np.random.default_rng(world.rank).standard_normal(200_003).astype(real)
    wire = x.view(np.uint16) if real.itemsize == 2 else x
    total = np.empty_like(wire)
    reduce(channel, name, wire, total, sum_of(dtype))
    assert len(set(world.allgather(total.tobytes()))) == 1
    exact = sum(np.array(y, np.float64) for y in world.allgather(x.astype(np.float64)))
    eps = float(ml_dtypes.finfo(real).eps)
    np.testing.assert_allclose(total.view(real).astype(np.float64), exact, rtol=0, atol=40 * eps)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("kind", ["words", "maximum", "float32", "float64", "bfloat16"])
def test_two_ranks_swap_whole_arrays(
    channel: Any, world: Any, monkeypatch: pytest.MonkeyPatch, kind: str, in_place: bool
) -> None:
    """Where one message at a time is to go in long segments; what is on its way meanwhile goes on."""
    if world.size != 2:
        pytest.skip("for two ranks alone")
    monkeypatch.setattr(channel.messages.link, "segment_bytes", SEGMENT_BYTES)
    monkeypatch.setattr(channel.chooser, "fixed", "long-direct")
    swapped: list[int] = []

    def noted(link: Any, send: Any, *rest: Any) -> None:
        swapped.append(send.nbytes)
        swap_whole(link, send, *rest)

    monkeypatch.setattr(messages, "swap_whole", noted)
    monkeypatch.setattr(channel.messages, "_swapped", set())
    operator = {"words": SUM, "maximum": MAXIMUM}.get(kind) or sum_of(kind)  # type: ignore[arg-type]
    dtype = np.dtype({"float32": "f4", "float64": "f8", "bfloat16": "u2"}.get(kind, "u4"))
    sizes = [2 * SEGMENT_BYTES + 8, 300_000, LONG_BYTES, LONG_BYTES + 8]
    for nbytes in sizes:
        parts = [np.random.default_rng(r).integers(0, 99, nbytes // dtype.itemsize) for r in range(2)]
        own, other = (
            part.astype(dtype) for part in parts
        )  # of 16 bits: subnormal floats, which add as words
        send = parts[world.rank].astype(dtype)
        recv = send if in_place else np.full_like(send, 9)
        ahead = np.ones(100_000, np.uint32)
        flight = channel.messages.begin("ahead", ahead, ahead, SUM)
        channel.messages.reduce("test", send, recv, operator)
        channel.land(flight)
        assert (ahead == 2).all()
        np.testing.assert_array_equal(recv, (np.maximum if kind == "maximum" else np.add)(own, other))
        if not in_place:
            np.testing.assert_array_equal(send, parts[world.rank])
    assert swapped == sizes[:-1]


@pytest.mark.parametrize("in_place", [True, False])
def test_sizes_that_two_ranks_swap_are_remembered(
    channel: Any, world: Any, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    if world.size != 2:
        pytest.skip("for two ranks alone")
    monkeypatch.setattr(channel.messages.link, "segment_bytes", SEGMENT_BYTES)
    monkeypatch.setattr(channel.chooser, "fixed", "long-direct")
    monkeypatch.setattr(channel.messages, "_swapped", set())
    monkeypatch.setattr(messages, "MOST_SWAPPED", 2)
    asked: list[int] = []
    choose = channel.messages._reduce

    def noted(name: str, send: Any, recv: Any, *rest: Any, **more: Any) -> Any:
        asked.append(recv.nbytes)
        return choose(name, send, recv, *rest, **more)

    monkeypatch.setattr(channel.messages, "_reduce", noted)
    one, two, three = 200_000, 240_000, 300_000

    def reduce_words(nbytes: int, shape: tuple[int, ...] = (-1,)) -> list[int]:
        send = (np.arange(nbytes // 4, dtype=np.uint32) + world.rank).reshape(shape)
        recv = send if in_place else np.zeros_like(send)
        exact = 2 * np.arange(nbytes // 4, dtype=np.uint32).reshape(shape) + 1
        channel.messages.reduce("test", send, recv, SUM)
        np.testing.assert_array_equal(recv, exact)
        new = asked[:]
        asked.clear()
        return new

    assert [reduce_words(nbytes) for nbytes in (one, two, one, two)] == [[one], [two], [], []]
    assert [reduce_words(nbytes) for nbytes in (three, three, one)] == [[three], [], [one]]  # room for two
    assert reduce_words(one, (4, -1)) == [one]  # made flat first
    monkeypatch.setattr(channel.messages, "max_count", 30_000)
    assert reduce_words(three) == [120_000, 120_000, 60_000]


def test_algorithms_are_tried_by_turns(channel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice in a row, of which the second counts: a slow while slows them all, and the first after others."""
    clock, chooser, begun = Clock({"ring": 1.0, "direct": 0.5, "mpi": 0.7}), Chooser(), []
    monkeypatch.setattr(choice, "perf_counter", lambda: clock.now)
    land = clock.land

    def slowly(moves: Any) -> None:
        if isinstance(moves, str):
            begun.append(moves)
            clock.now += 9.0 * (len(begun) % 2 == 1 or len(begun) <= 6)
        land(moves)

    monkeypatch.setattr(clock, "land", slowly)
    assert clock.settle(chooser, "large sums", 1 << 20, channel.messages.link) == "direct"
    assert begun == 3 * [name for name in clock.seconds for _ in range(2)]
    assert len(begun) == 3 * ROUNDS
    (trial,) = chooser.trials.values()
    assert trial.seconds == pytest.approx(clock.seconds)


def test_several_are_on_their_way(channel: Any, world: Any) -> None:
    """Begun in one order and completed in another, of all algorithms and with small ones in between."""
    link, begun = channel.messages.link, []
    for k, name in enumerate([*EVERY, *EVERY, *EVERY]):
        words = np.full(1000 if k % 4 == 0 else 60_000 + 1000 * k, world.rank + k, np.uint32)
        flight = channel.launch(name, EVERY[name](link, words, words, SUM), words)
        begun.append((k, words, flight))
    small = np.ones(3, np.uint32)
    channel.messages.reduce("test", small, small, SUM)
    assert set(small.tolist()) == {world.size}
    order = np.random.default_rng(1 + world.rank).permutation(len(begun)).tolist()
    for k, words, flight in (begun[i] for i in order):
        channel.land(flight)
        assert (words == k * world.size + world.size * (world.size - 1) // 2).all()
    assert channel.flights == []


def test_the_fastest_algorithm_is_agreed_upon(
    channel: Any, world: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After some calls of each, by size; until then and after that the sums are right."""
    monkeypatch.setattr(channel.messages.link, "segment_bytes", SEGMENT_BYTES)  # as of a link
    names = _SWAPS if world.size == 2 else _LARGE
    chooser, trials = channel.chooser, len(names) * ROUNDS
    monkeypatch.setattr(chooser, "_tells", True)
    for call in range(trials + 3):
        for count in (40_000 * world.size, 150_000 * world.size):
            words = np.full(count, call + world.rank, np.uint32)
            channel.messages.reduce("test", words, words, SUM)
            assert (words == call * world.size + world.size * (world.size - 1) // 2).all()
        assert [trial.chosen is None for trial in chooser.trials.values()] == [call < trials - 1] * 2
    chosen = [(trial.chosen, trial.seconds) for trial in chooser.trials.values()]
    assert all(tuple(seconds) == names for _, seconds in chosen)
    assert all(found == chosen for found in world.allgather(chosen))
    sizes = (160_000 * world.size, 600_000 * world.size)
    travels = [2 * (world.size - 1) / world.size * nbytes for nbytes in sizes]
    paces = [x / min(seconds.values()) for x, (_, seconds) in zip(travels, chosen, strict=True)]
    parts = dict.fromkeys(names, CLEARLY) | {names[0]: 1.0, LONG + names[0]: LONG_CLEARLY}
    for k, (name, seconds) in enumerate(chosen):  # the first one, unless another is clearly faster
        slow = paces[k] < SLOW_LINK
        tried = [x for x in names if not (slow and x.startswith(LONG))]
        enough = [x for x in tried if seconds[x] <= parts[x] * seconds[names[0]]]
        assert name == min(enough, key=seconds.__getitem__)
    assert chooser.pace == pytest.approx(paces[-1])
    assert chooser.slow is (paces[-1] < SLOW_LINK)
    table = chooser.table()
    assert [line.split(": ")[1].split()[0] for line in table] == [name for name, _ in chosen]
    said = "".join(f"gccomm: {line}" + chr(10) for line in table)
    assert capsys.readouterr().err == (said if world.rank == 0 else "")


def test_a_stream_has_trials_of_its_own_on_messages_of_one_size(
    channel: Any, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others of the class go by the first algorithm meanwhile; what is timed is alone on the link."""
    monkeypatch.setattr(channel.messages.link, "segment_bytes", SEGMENT_BYTES)
    chooser, calls = channel.chooser, 0
    while not any(trial.chosen for trial in chooser.trials.values()):
        flights = []
        for count in (150_000, 225_000):
            words = np.full(count, 1 + world.rank, np.uint32)
            flights.append((words, channel.messages.begin("test", words, words, SUM)))
        assert [flight is None for _, flight in flights] == [True, False]
        for words, flight in flights:
            if flight is not None:
                channel.land(flight)
            assert (words == world.size * (world.size + 1) // 2).all()
        calls += 1
    assert calls == len(_STREAMS) * ROUNDS
    assert [(kind, trial.nbytes) for (kind, _), trial in chooser.trials.items()] == [(STREAM, 600_000)]
    assert channel.flights == []


class Clock:
    """A clock that goes on when something is landed, by what it takes."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds, self.now = seconds, 0.0

    def land(self, begun: Any) -> None:
        if isinstance(begun, str):
            self.now += self.seconds[begun]
        else:
            for test in begun:  # of the maximum over the ranks
                while not test():
                    pass

    def settle(self, chooser: Chooser, kind: str, nbytes: int, link: Any) -> str | None:
        names = tuple(self.seconds)
        while (chosen := chooser.settled(kind, nbytes, names)) is None:
            chooser.try_next(kind, nbytes, link, self.land, names, lambda name: name)
        return chosen


@pytest.mark.parametrize(
    ("kind", "other", "part"),
    [
        ("large sums", "direct", CLEARLY),
        ("large sums", "long-direct", CLEARLY),
        ("large sums", "long-ring", LONG_CLEARLY),
        (STREAM, "direct", STREAM_CLEARLY),
        (STREAM, "long-ring", LONG_CLEARLY),
    ],
)
def test_by_how_much_the_first_algorithm_has_to_be_beaten(
    channel: Any, monkeypatch: pytest.MonkeyPatch, kind: str, other: str, part: float
) -> None:
    link = channel.messages.link
    travels = 2 * (link.comm.size - 1) / link.comm.size * (1 << 20)
    whole = travels / SLOW_LINK / 2
    for seconds, expected in ((part * 1.01 * whole, "ring"), (part * 0.99 * whole, other)):
        clock, chooser = Clock({"ring": whole, other: seconds}), Chooser()
        monkeypatch.setattr(choice, "perf_counter", lambda clock=clock: clock.now)
        assert clock.settle(chooser, kind, 1 << 20, link) == expected
        assert chooser.pace == pytest.approx(travels / min(seconds, whole))
        assert not chooser.slow
    assert not Chooser().slow


@pytest.mark.parametrize(
    ("direct", "long_ring", "expected"),
    [(0.80, 0.90, "direct"), (0.88, 0.90, "long-ring"), (0.80, 0.70, "long-ring"), (0.88, 0.99, "ring")],
)
def test_of_those_that_are_clearly_faster_the_fastest_is_taken(
    channel: Any, monkeypatch: pytest.MonkeyPatch, direct: float, long_ring: float, expected: str
) -> None:
    ms = 1e-3  # a fast link
    clock, chooser = Clock({"ring": ms, "direct": direct * ms, "long-ring": long_ring * ms}), Chooser()
    monkeypatch.setattr(choice, "perf_counter", lambda: clock.now)
    assert clock.settle(chooser, "large sums", 1 << 20, channel.messages.link) == expected


@pytest.mark.parametrize(("mpi", "long_ring", "expected"), [
    (0.60, 0.99, "mpi"),
    (0.60, 0.61, "long-ring"),
    (0.60, 0.90, "mpi"),
    (0.69, 1.20, "mpi"),
    (0.71, 1.20, "ring"),
])  # fmt: skip
def test_in_a_stream_others_have_to_beat_the_ring_of_long_segments_as_clearly(
    channel: Any, monkeypatch: pytest.MonkeyPatch, mpi: float, long_ring: float, expected: str
) -> None:
    ms = 1e-3  # a fast link
    clock, chooser = Clock({"ring": ms, "long-ring": long_ring * ms, "mpi": mpi * ms}), Chooser()
    monkeypatch.setattr(choice, "perf_counter", lambda: clock.now)
    assert clock.settle(chooser, STREAM, 1 << 20, channel.messages.link) == expected


@pytest.mark.parametrize(("link_bytes", "shares", "longer"), [
    (SEGMENT_BYTES, 57 << 10, True),
    (SEGMENT_BYTES, 55 << 10, False),
    (LONG_BYTES, 57 << 10, False),
])  # fmt: skip
def test_long_segments_are_tried_where_they_are_longer(
    channel: Any, world: Any, monkeypatch: pytest.MonkeyPatch, link_bytes: int, shares: int, longer: bool
) -> None:
    monkeypatch.setattr(channel.messages.link, "segment_bytes", link_bytes)
    words = np.ones(shares // 4 * world.size, np.uint32)
    channel.messages.reduce("test", words, words, SUM)
    (trial,) = channel.chooser.trials.values()
    assert any(name.startswith(LONG) for name in trial.names) is longer


def test_a_ring_of_long_segments_runs_out_of_receives(channel: Any, world: Any) -> None:
    """More segments a share than receives that are posted ahead."""
    words = np.arange(5 * world.size * LONG_BYTES // 4 + 7, dtype=np.uint32)
    total = np.empty_like(words)
    reduce(channel, "long-ring", words, total, SUM)
    assert (total == words * np.uint32(world.size)).all()


@pytest.mark.parametrize(("fast", "expected"), [(True, "long-ring"), (False, "ring")])
@pytest.mark.parametrize("kind", ["large sums", STREAM])
def test_long_segments_are_left_alone_on_slow_links(
    channel: Any, monkeypatch: pytest.MonkeyPatch, kind: str, fast: bool, expected: str
) -> None:
    travels = 2 * (channel.messages.size - 1) / channel.messages.size * (1 << 20)
    second = travels / SLOW_LINK * (0.9 if fast else 2.0)
    clock, chooser = Clock({"ring": second, "long-ring": 0.6 * second}), Chooser()
    monkeypatch.setattr(choice, "perf_counter", lambda: clock.now)
    assert clock.settle(chooser, kind, 1 << 20, channel.messages.link) == expected


def test_short_sums_do_not_tell_of_the_link(channel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, chooser = Clock({"ring": 1.0, "direct": 1.0}), Chooser()
    monkeypatch.setattr(choice, "perf_counter", lambda: clock.now)
    assert clock.settle(chooser, "large sums", LEAST_TIMED - 4, channel.messages.link) == "ring"
    assert (chooser.pace, chooser.slow) == (0, False)


def test_the_largest_sums_tell_of_the_link(channel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may pass in a burst: before them or after them, of one kind or another."""
    link, chooser = channel.messages.link, Chooser()

    def settle(kind: str, nbytes: int, pace: float) -> None:
        travels = 2 * (link.comm.size - 1) / link.comm.size * nbytes
        clock = Clock({"ring": travels / pace, "direct": 2 * travels / pace})
        monkeypatch.setattr(choice, "perf_counter", lambda: clock.now)
        clock.settle(chooser, kind, nbytes, link)

    settle(STREAM, 512 << 10, 2 * SLOW_LINK)
    assert not chooser.slow
    settle(STREAM, 2 << 20, SLOW_LINK / 2)
    assert chooser.slow
    settle("large sums", 1 << 20, 3 * SLOW_LINK)
    assert chooser.slow
    settle("large sums", 2 << 20, 0.75 * SLOW_LINK)
    assert chooser.pace == pytest.approx(0.75 * SLOW_LINK)
    settle("large sums", 4 << 20, 2 * SLOW_LINK)
    assert not chooser.slow


def test_sizes_that_come_are_tried_where_the_first_one_does_not(
    channel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, chooser, names = Clock({"ring": 1.0, "direct": 0.1}), Chooser(), ("ring", "direct")
    monkeypatch.setattr(choice, "perf_counter", lambda: clock.now)
    assert chooser.settled("large sums", 700_000, names) is None
    assert [chooser.settled("large sums", 600_000, names) for _ in range(MISSES)] == ["ring"] * MISSES
    assert clock.settle(chooser, "large sums", 600_000, channel.messages.link) == "direct"
    assert chooser.settled("large sums", 700_000, names) == "direct"


def test_links_are_timed_between_hosts_only(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = world.Dup()
    handle = gccomm_mpi.connect(parent)
    assert handle.slow_links is False
    monkeypatch.setattr(handle._channel.chooser, "pace", SLOW_LINK - 1)
    assert handle.slow_links is False
    monkeypatch.setattr(handle, "one_host", False)
    assert handle.slow_links is True
    handle.close()
    parent.Free()


def test_nothing_is_on_its_way_while_a_message_is_timed(
    channel: Any, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = np.full(70_000 * world.size, 1, np.uint32)
    monkeypatch.setattr(channel.chooser, "fixed", "ring")
    flight = channel.messages.begin("test", first, first, SUM)
    assert flight is not None
    monkeypatch.setattr(channel.chooser, "fixed", None)
    begun: list[bool] = []
    launch = channel.launch
    monkeypatch.setattr(channel, "launch", lambda *a: begun.append(flight.landed) or launch(*a))
    words = np.full(70_000 * world.size, 1, np.uint32)
    assert channel.messages.begin("test", words, words, SUM) is None
    assert begun == [True]
    channel.land(flight)
    assert channel.flights == []
    assert (first == world.size).all()
    assert (words == world.size).all()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_may_be_named(world: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("GCCOMM_WINDOW", "0")
    monkeypatch.setenv("GCCOMM_ALLREDUCE", name)
    parent = world.Dup()
    handle = gccomm_mpi.connect(parent)
    used = []
    for known, run in dict(ALGORITHMS).items():
        monkeypatch.setitem(
            ALGORITHMS, known, lambda *a, known=known, run=run: (used.append(known), run(*a))[1]
        )
    for _ in range(3):
        words = np.ones(100_000 * world.size, np.uint32)
        handle.sum_words(words)
        assert (words == world.size).all()
        half = np.full(100_000 * world.size, 0x3C00, np.uint16)
        handle.end(handle.begin("float16", half, half))
        assert (half.view(np.float16) == world.size).all()
    assert set(used) == {name}
    handle.close()
    parent.Free()


@pytest.mark.parametrize(
    ("variable", "value"), [("GCCOMM_ALLREDUCE", "tree"), ("GCCOMM_WINDOW", "yes"), ("GCCOMM_WINDOW", "0")]
)
def test_settings_are_checked_on_all_ranks(
    world: Any, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    """Also where one rank alone has them."""
    if world.rank == 1:
        monkeypatch.setenv(variable, value)
    parent = world.Dup()
    with pytest.raises(ValueError, match=f"{variable} must be .*'{value}'") as caught:
        gccomm_mpi.connect(parent)
    assert len(set(world.allgather(str(caught.value)))) == 1
    parent.Free()
