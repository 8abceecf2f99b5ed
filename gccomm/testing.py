"""Many ranks in one process: in lockstep for accuracy and range checks, or one thread each for programs."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Literal, TypeVar

import numpy as np

from gccomm.checks import check_options, integer
from gccomm.codecs import Codec, get_codec
from gccomm.engine import Outcome
from gccomm.errors import BackendError
from gccomm.hosts import Hosts
from gccomm.layout import PIECE_COORDINATES
from gccomm.operations import PROVIDED, fold_all
from gccomm.reduction import Attempt, Options, Place, Reduction
from gccomm.stats import Stats
from gccomm.steps import Words
from gccomm.transfers import (
    Between,
    Broadcast,
    Combine,
    FloatAdd,
    Folding,
    HostSum,
    Maximum,
    Transfer,
    Whole,
    WordAdd,
    at_once,
)

__all__ = ["run", "simulate", "simulate_steps"]

T = TypeVar("T")


def simulate(
    xs: Sequence[Any] | Callable[[int], Sequence[Any]],
    codec: str | Codec = "rotated",
    op: str = "sum",
    seed: int = 0,
    steps: int = 1,
    **options: Any,
) -> tuple[list[Any], list[Stats]]:
    """Reduce over virtual ranks in lockstep, and return what the last step gave.

    Arguments and errors are those of :func:`simulate_steps`.

    Returns
    -------
    ys : list
        Results of the last step, one per rank.
    stats : list of Stats
        Figures of the last step, one per rank.
    """
    ys: list[Any] = []
    stats: list[Stats] = []
    for _, _, ys, stats in simulate_steps(xs, codec, op, seed, steps, **options):  # noqa: B007
        pass
    return ys, stats


def simulate_steps(
    xs: Sequence[Any] | Callable[[int], Sequence[Any]],
    codec: str | Codec = "rotated",
    op: str = "sum",
    seed: int = 0,
    steps: int = 1,
    *,
    exact_below: int = 1024,
    error_feedback: bool | None = None,
    bucket_bytes: int = 25 << 20,
    piece_coordinates: int = PIECE_COORDINATES,
    nonfinite: str = "propagate",
    one_host: bool = True,
    hosts: Sequence[int] | None = None,
) -> Iterator[tuple[int, Sequence[Any], list[Any], list[Stats]]]:
    """Reduce over virtual ranks in lockstep, the code of a real run without processes, step by step.

    Besides, every final sum of a lane is compared with the lane's range. Arguments are checked in the call
    itself, where a function is also asked for the inputs of step 0; a step is computed when it is asked for.

    Parameters
    ----------
    xs : sequence, or function from step to sequence
        One array or tree per virtual rank.
    codec, op, seed, exact_below, error_feedback, bucket_bytes, nonfinite
        As of :class:`gccomm.Reducer`.
    steps : int
        How many steps to run, from step 0 on.
    piece_coordinates : int
        Most coordinates of a piece; the results of lane codecs do not depend on it (with checked headroom
        where a piece holds a span, 65,536).
    one_host : bool
        Agree piece by piece, as ranks that share a host do.
    hosts : sequence of int, optional
        The host of each virtual rank, two or more of them: hosts add up their ranks' floats before they
        compress, as with ``gccomm.init(hierarchical=True)``.

    Returns
    -------
    iterator of (step, inputs, ys, stats)
        The step's number, and its inputs, results and figures, one per rank.

    Raises
    ------
    OverflowError
        A lane's sum left its range: a fault of the codec (also raised, as on all ranks, for sums that an
        integer dtype cannot hold).
    """
    exact_below = check_options(op, exact_below, nonfinite)
    _check_numbers(seed, steps, bucket_bytes, piece_coordinates)
    chosen = get_codec(codec)
    feedback = chosen.biased if error_feedback is None else error_feedback
    sizes = {"bucket_bytes": bucket_bytes, "piece_coordinates": piece_coordinates}
    options = Options.single(chosen, op, feedback, exact_below, nonfinite, seed=seed, measure=1, **sizes)
    first = list(xs(0) if callable(xs) else xs)
    if not first:
        msg = "`xs` must hold one array or tree for each virtual rank, got none"
        raise ValueError(msg)
    reductions = [Reduction(options, remember=True) for _ in first]
    return _steps(reductions, xs, first, steps, _places(len(first), one_host, hosts))


def _check_numbers(seed: int, steps: int, bucket_bytes: int, piece_coordinates: int) -> None:
    integer("bucket_bytes", bucket_bytes, "a number of bytes", 1)
    integer("piece_coordinates", piece_coordinates, "a number of coordinates", 1)
    integer("seed", seed, "an integer")
    integer("steps", steps, "a number of steps", 1)


def _places(size: int, one_host: bool, hosts: Sequence[int] | None) -> list[Place]:
    """Return where virtual ranks stand."""
    if hosts is None:
        return [Place(rank, size, one_host, PROVIDED) for rank in range(size)]
    names = list(dict.fromkeys(hosts))
    if len(hosts) != size or len(names) < 2:
        msg = f"`hosts` must name a host for each of {size} ranks, two hosts at least, got {hosts!r}"
        raise ValueError(msg)
    speakers = min(list(hosts).count(name) for name in names)
    found = [
        Hosts(len(names), names.index(name), list(hosts[:rank]).count(name), speakers)
        for rank, name in enumerate(hosts)
    ]
    return [Place(rank, size, False, PROVIDED, hosts=found[rank]) for rank in range(size)]


def _steps(
    reductions: Sequence[Reduction],
    xs: Sequence[Any] | Callable[[int], Sequence[Any]],
    first: Sequence[Any],
    steps: int,
    places: Sequence[Place],
) -> Iterator[tuple[int, Sequence[Any], list[Any], list[Stats]]]:
    inputs = first
    for step in range(steps):
        if callable(xs) and step:
            inputs = xs(step)
        yield step, inputs, *_step(reductions, inputs, places)  # keeps no reference to the results


def _step(
    reductions: Sequence[Reduction], inputs: Sequence[Any], places: Sequence[Place]
) -> tuple[list[Any], list[Stats]]:
    with np.errstate(all="ignore"):  # as in a call
        attempts = [r.start(x, p) for r, x, p in zip(reductions, inputs, places, strict=True)]
        outcomes = _lockstep([a.transfers() for a in attempts], [p.hosts for p in places])
        return _finish(attempts, outcomes), [o.stats for o in outcomes]


def _finish(attempts: Sequence[Attempt], outcomes: Sequence[Outcome]) -> list[Any]:
    errors = [o.error for o in outcomes]
    if len({(type(e), str(e)) for e in errors}) > 1:
        raise BackendError(f"virtual ranks end differently: {errors!r}")
    try:
        for attempt, outcome in zip(attempts, outcomes, strict=True):
            attempt.commit(outcome)
            for note in attempt.notes:
                warnings.warn(note, stacklevel=2)
        results = [attempt.deliver() for attempt in attempts]
        for attempt in attempts:
            if attempt.handover is not None:
                attempt.handover()
        return results
    finally:
        for attempt in attempts:
            attempt.release()


def _lockstep(
    runs: Sequence[Generator[Transfer, None, Outcome]], hosts: Sequence[Hosts | None]
) -> list[Outcome]:
    """Advance all ranks to their next transfer, combine, and go on."""
    while True:
        transfers, outcomes = [], []
        for run_ in runs:
            try:
                transfers.append(next(run_))
            except StopIteration as stop:
                outcomes.append(stop.value)
        if outcomes and transfers:
            raise BackendError(f"{len(outcomes)} of {len(runs)} virtual ranks ended before the others")
        if outcomes:
            return outcomes
        whole = at_once(transfers)
        if whole and isinstance(whole[0], HostSum | Between):
            _combine_by_host(whole, [h for h in hosts if h is not None])
        elif whole:
            _combine(whole)


def _combine_by_host(transfers: Sequence[Whole], hosts: Sequence[Hosts]) -> None:
    """Sum within hosts, or reduce what speakers have and hand it to the others."""
    sums = [t for t in transfers if isinstance(t, HostSum)]
    between = [t for t in transfers if isinstance(t, Between)]
    if len(sums) not in (0, len(transfers)) or len(between) not in (0, len(transfers)):
        raise BackendError(f"virtual ranks make different transfers: {[type(t).__name__ for t in transfers]}")
    for index in range(hosts[0].number if sums else 0):
        mine = [s for s, h in zip(sums, hosts, strict=True) if h.host == index]
        total = mine[0].send.copy()
        for other in mine[1:]:
            total += other.send
        (target,) = (s.recv for s in mine if s.recv is not None)
        target[...] = total
    if between:
        speaks = [h.place == t.speaker for t, h in zip(between, hosts, strict=True)]
        _combine([t.transfer for t, own in zip(between, speaks, strict=True) if own])
        result = next(_result(t.transfer) for t, own in zip(between, speaks, strict=True) if own)
        for whole in [t.transfer for t, own in zip(between, speaks, strict=True) if not own]:
            _result(whole)[...] = result
            if isinstance(whole, Folding):
                whole.step.decode(0, whole.step.blocks, whole.folded)


def _result(transfer: Whole) -> Any:
    if isinstance(transfer, FloatAdd):
        return transfer.recv
    if isinstance(transfer, Folding):
        return transfer.folded
    assert isinstance(transfer, Maximum | WordAdd | Combine)
    return transfer.words


def _combine(transfers: Sequence[Whole]) -> None:
    from gccomm_local import combine, combine_each

    head = transfers[0]
    if any(type(t) is not type(head) for t in transfers):
        words = [t for t in transfers if isinstance(t, Maximum | WordAdd)]
        if len(words) == len(transfers) and len({t.words.size for t in words}) == 1:
            # As over MPI, a maximum and a sum of one size meet: the header then tells that calls differ.
            kinds: list[Literal["max", "sum"]] = ["max" if isinstance(t, Maximum) else "sum" for t in words]
            combine_each(kinds, [t.words for t in words])
            return
        raise BackendError(f"virtual ranks make different transfers: {[type(t).__name__ for t in transfers]}")
    if isinstance(head, Maximum):
        combine("max", [t.words for t in transfers if isinstance(t, Maximum)])
    elif isinstance(head, WordAdd):
        adds = [t for t in transfers if isinstance(t, WordAdd)]
        _check_lanes([t.words for t in adds], head.lanes)
        combine("sum", [t.words for t in adds])
    elif isinstance(head, FloatAdd):
        floats = [t for t in transfers if isinstance(t, FloatAdd)]
        for t in floats:
            np.copyto(t.recv, t.send)
        combine("float", [t.recv for t in floats], dtype=head.dtype)
    elif isinstance(head, Combine):
        own = [t for t in transfers if isinstance(t, Combine)]
        if len({(t.operation, t.seed) for t in own}) > 1:
            calls = [f"{t.operation}, seed {t.seed}" for t in own]
            raise BackendError(f"virtual ranks make different reductions: {calls}")
        combine("own", [t.words for t in own], operation=head.operation, seed=head.seed)
    elif isinstance(head, Folding):
        _fold([t for t in transfers if isinstance(t, Folding)])
    elif isinstance(head, Broadcast):
        buffers = [t.buffer for t in transfers if isinstance(t, Broadcast)]
        for buffer in buffers:
            np.copyto(buffer, buffers[head.root])
    else:
        raise BackendError(f"virtual ranks share no memory to reduce through: {head!r}")


def _fold(transfers: Sequence[Folding]) -> None:
    for t in transfers:
        t.step.encode(0, t.step.blocks, t.sent)
    fold_all([t.step for t in transfers], [t.sent for t in transfers], [t.folded for t in transfers])
    for t in transfers:
        t.step.decode(0, t.step.blocks, t.folded)


def _check_lanes(words: Sequence[Words], lanes: Sequence[tuple[int, int, int]]) -> None:
    """Raise OverflowError where the true sum of a lane does not fit it."""
    for lo, hi, width in lanes:
        half = 1 << (width - 1)
        total = np.zeros((32 // width, hi - lo), dtype=np.int64)
        for one in words:
            total += _signed_lanes(one[lo:hi], width)
        if total.size and (total.max() >= half or total.min() < -half):
            raise OverflowError(f"a lane of {width} bits sums to {total.min()}..{total.max()}")


def _signed_lanes(words: Words, width: int) -> Any:
    """Return the signed lanes of one rank's words, shape (lanes, words)."""
    if width == 32:
        return words.view(np.int32).astype(np.int64)[None]
    shifts = (np.arange(32 // width, dtype=np.uint32) * np.uint32(width))[:, None]
    half = np.uint32(1 << (width - 1))
    bias = np.bitwise_or.reduce(half << shifts, axis=None)
    fields = (words + bias) >> shifts & np.uint32((1 << width) - 1)
    return fields.astype(np.int64) - int(half)


def run(fn: Callable[[Any], T], ranks: int = 4) -> list[T]:
    """Call ``fn(comm)`` on ``ranks`` threads, each with its communicator; the functions of gccomm use it by
    default there.

    Returns
    -------
    list
        What each rank returned.

    Raises
    ------
    Exception
        That of the first rank that failed by itself; the other ranks are released from their collectives.
    """
    from gccomm_local import group

    from gccomm.api import using
    from gccomm.communicator import Communicator

    backends = group(ranks)
    results: list[Any] = [None] * ranks
    failures: list[tuple[int, BaseException]] = []

    def work(rank: int) -> None:
        comm = Communicator(backends[rank])
        token = using.set(comm)
        try:
            results[rank] = fn(comm)
            comm.turn.drain()
        except BaseException as error:
            failures.append((rank, error))
            backends[rank].abort(f"rank {rank} ended with {error!r}")
        finally:
            using.reset(token)

    threads = [threading.Thread(target=work, args=(r,), name=f"rank {r}", daemon=True) for r in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        own = [error for _, error in failures if not isinstance(error, BackendError)]
        raise (own or [error for _, error in failures])[0]
    return results
