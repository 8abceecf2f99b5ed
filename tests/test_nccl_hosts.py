"""NCCL within hosts and another back end between them, in the memory of devices that do not exist."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gccomm_nccl import by_host, trips

import gccomm
from gccomm import testing
from gccomm.communicator import Communicator
from gccomm.kernels.cuda import on_cupy
from tests.cuda_on_cpu import OnCpu, kernels_on_cpu
from tests.devices import FAKE_NVRTC, trees
from tests.fake_gpu import Machine
from tests.fake_nccl import install
from tests.host_site import HostSite
from tests.nccl_site import FLOWING, floats, same

CODECS = (*FLOWING, "rotated:wire_bits=4,headroom=checked", "rotated:scales=predicted", "thc")
FEW = ("uniform:wire_bits=5", "rotated:wire_bits=4,headroom=checked", "bf16")
HOSTS = {
    "pairs": (0, 0, 1, 1),
    "threes": (0, 0, 0, 1, 1, 1),
    "in turns": (0, 1, 0, 1),
    "three": (0, 0, 1, 1, 2, 2),
}


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HostSite]:
    """Ranks on two hosts of two, and a device each; what is small elsewhere is sliced here."""
    shim = kernels_on_cpu("random").launcher
    assert isinstance(shim, OnCpu)
    machine = Machine(6, shim, FAKE_NVRTC)
    nccl = install(monkeypatch, machine)
    monkeypatch.setenv("GCCOMM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(by_host, "SLICED_BYTES", 2000)
    monkeypatch.setattr(trips, "CHUNK_BYTES", 4096)
    on_cupy.forget_devices()
    yield HostSite(machine, nccl)
    on_cupy.forget_devices()


def steps(site: HostSite, codec: str, make: Any, number: int = 4, **options: Any) -> list[Any]:
    """Return each rank's results, its last statistics, and the name of its back end."""
    ranks = len(site.hosts)

    def program(comm: Communicator) -> Any:
        reducer = gccomm.Reducer(codec, comm=comm, op="sum", **options)
        found = [
            site.back(reducer(site.there(make(step, ranks)[comm.rank], comm.rank))) for step in range(number)
        ]
        return found, reducer.stats, comm.backend

    return site.run(ranks, program)


def flat(codec: str, ranks: int, make: Any, number: int = 4, **options: Any) -> tuple[list[Any], Any]:
    """Return the results of steps over ranks of one host, on the CPU, and the last statistics."""

    def program(comm: Communicator) -> Any:
        reducer = gccomm.Reducer(codec, comm=comm, op="sum", **options)
        return [reducer(make(step, ranks)[comm.rank]) for step in range(number)], reducer.stats

    return testing.run(program, ranks)[0]


def large(step: int, ranks: int) -> list[dict[str, Any]]:
    """Return trees of floats, of which some words fill several chunks, and some no slice."""
    found = floats(step, ranks)
    for rank, tree in enumerate(found):
        tree["large"] = np.random.default_rng([step, rank, 1]).standard_normal(70_001).astype(np.float32)
    return found


def agree(codec: str, found: Any, other: Any) -> bool:
    """Whether two trees hold the same sums: of floats, whose order may differ, about the same."""
    if codec not in ("raw", "bf16", "fp16"):
        return same(found, other)
    unit = {"raw": 2e-6, "bf16": 2e-2, "fp16": 2e-3}[codec]
    for key, exact in other.items():
        wide, most = exact.astype(complex), np.abs(exact.astype(complex)).max(initial=0)
        step = 1e-2 if exact.dtype.itemsize == 2 else unit  # of the result's own dtype
        if not np.allclose(found[key].astype(complex), wide, rtol=0, atol=max(step, unit) * most):
            return False
    return True


CASES = [(codec, hosts) for name, hosts in HOSTS.items() for codec in (CODECS if name == "pairs" else FEW)]


@pytest.mark.parametrize(("codec", "hosts"), CASES)
def test_words_give_the_bits_of_one_host(site: HostSite, codec: str, hosts: Sequence[int]) -> None:
    site.hosts = hosts
    make = large if len(hosts) == 4 else floats
    wanted, plain = flat(codec, len(hosts), make, error_feedback=True)
    first = None
    for found, stats, name in steps(site, codec, make, error_feedback=True):
        assert name == "local+nccl-by-host"
        assert stats.host_bytes == 0
        np.testing.assert_equal(stats.vnmse_estimate, plain.vnmse_estimate)
        first = first or found
        assert all(map(same, found, first))
        assert all(agree(codec, *pair) for pair in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("codec", "hosts"), CASES)
def test_sums_of_hosts_are_those_of_the_simulation(site: HostSite, codec: str, hosts: Sequence[int]) -> None:
    """The stand-in adds in the order of the ranks, as shared memory does."""
    site.hosts, site.floats = hosts, True
    make = large if len(hosts) == 4 else floats
    simulated = list(
        testing.simulate_steps(
            lambda step: make(step, len(hosts)), codec, steps=4, hosts=hosts, error_feedback=True
        )
    )
    wanted = [expected[0] for _, _, expected, _ in simulated]
    *_, figures = simulated[2]  # the last step that a reducer measures
    first = None
    for found, stats, name in steps(site, codec, make, error_feedback=True):
        assert name == "local+nccl-by-host"
        assert stats.host_bytes == figures[0].host_bytes
        np.testing.assert_equal(stats.vnmse_estimate, figures[0].vnmse_estimate)
        first = first or found
        assert all(map(same, found, first))
        assert all(agree(codec, *pair) for pair in zip(found, wanted, strict=True))


@pytest.mark.parametrize("floats_first", [False, True])
def test_integers_small_arrays_and_several_pieces(
    site: HostSite, floats_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gccomm.flowing.PIECE_COORDINATES", 2048)
    site.floats = floats_first
    options = {"bucket_bytes": 9000}
    how: dict[str, Any] = {"hosts": site.hosts} if floats_first else {"one_host": False}
    simulated = testing.simulate_steps(lambda step: trees(step, 4), "uniform:wire_bits=5", steps=4, **how)
    wanted = [expected[0] for _, _, expected, _ in simulated]
    for found, stats, _ in steps(site, "uniform:wire_bits=5", trees, **options):
        assert stats.messages > 8
        assert all(map(same, found, wanted))


def test_words_are_reduced_on_the_device(site: HostSite) -> None:
    """NCCL has two ranks in each communicator, and a slice of what is sent lies on each."""
    steps(site, "uniform", large)
    assert [comm.group.size for comm in site.nccl.comms] == [2] * 4
    for comm in site.nccl.comms:
        assert comm.destroyed
        asked = {entry[6] for entry in comm.log}
        assert asked == {"scatter", "one", "gather", "all"}


@pytest.mark.parametrize("size", [0, 1, 255, 1023, 1024, 5000, 8193, 40_000])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_sizes_and_dtypes(site: HostSite, size: int, dtype: str) -> None:
    of = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    xs = [np.random.default_rng([r, size]).standard_normal(size).astype(of) for r in range(4)]
    codecs = ("uniform", "uniform", "rotated:headroom=checked", "raw")
    wanted = testing.run(lambda comm: [comm.compressed_allreduce(xs[comm.rank], codec=c) for c in codecs], 4)

    def program(comm: Communicator) -> Any:
        x = site.there(xs[comm.rank], comm.rank)
        return [site.back(comm.compressed_allreduce(x, codec=codec)) for codec in codecs]

    for found in site.run(4, program):
        assert all(map(same, found[:3], wanted[0]))
        assert np.allclose(found[3].astype(float), wanted[0][3].astype(float), rtol=1e-2, atol=2e-2)


def test_ranks_that_differ_all_raise_and_go_on(site: HostSite) -> None:
    """The host looks at every header: nothing is broken, unlike over NCCL alone."""

    def program(comm: Communicator) -> Any:
        x = site.there(np.full(3000, comm.rank + 1, np.float32), comm.rank)
        for _ in range(3):
            comm.compressed_allreduce(x, codec="uniform")
        strange: dict[str, Any] = {
            "shape": site.there(np.ones(4000, np.float32), comm.rank),
            "host": np.ones(3000, np.float32),
            "dtype": site.there(np.ones(3000, np.float64), comm.rank),
        }
        texts = []
        for other in strange.values():
            with pytest.raises(gccomm.MismatchError) as caught:
                comm.compressed_allreduce(other if comm.rank == 3 else x, codec="uniform")
            texts.append(str(caught.value))
        call = comm.barrier if comm.rank == 0 else lambda: comm.compressed_allreduce(x, codec="uniform")
        with pytest.raises(gccomm.MismatchError) as caught:
            call()
        with pytest.raises(ValueError, match="rank 1: `op` must be"):
            comm.compressed_allreduce(x, op="max" if comm.rank == 1 else "sum", codec="uniform")
        found = comm.compressed_allreduce(x, codec="raw")
        comm.synchronize()
        return [*texts, str(caught.value)], site.back(found)

    results = site.run(4, program)
    assert all(texts == results[0][0] for texts, _ in results)
    assert all((found == 10).all() for _, found in results)


def test_what_is_not_finite_and_missing_arrays(site: HostSite) -> None:
    bad = np.ones(3000, np.float32)
    bad[1500] = np.inf

    def program(comm: Communicator) -> Any:
        reducer = gccomm.Reducer("uniform", comm=comm, op="sum", exact_below=0)
        tree = site.there({"w": np.ones(3000, np.float32), "v": np.ones(2000, np.float32)}, comm.rank)
        reducer(tree)
        without = reducer({**tree, "v": None} if comm.rank == 2 else tree)
        tree["w"] = site.there(bad, comm.rank) if comm.rank == 1 else tree["w"]
        nan = reducer(tree)
        with pytest.raises(gccomm.NonFiniteError, match="rank 1: input holds inf or NaN"):
            comm.compressed_allreduce(tree["w"], nonfinite="raise")
        return site.back(without["v"]), site.back(nan["w"])

    for site.floats in (False, True):
        for without, nan in site.run(4, program):
            assert np.allclose(without, 3, rtol=0.02)
            assert np.isnan(nan[1024:2048]).all()
            assert np.allclose(nan[:1024], 4, rtol=0.02)


def test_splits_asynchronous_calls_and_closing(site: HostSite) -> None:
    tree = large(0, 4)
    wanted = flat("uniform", 4, lambda _step, _ranks: tree, 1)[0][0]

    def program(comm: Communicator) -> Any:
        there = site.there(tree[comm.rank], comm.rank)
        reducer = gccomm.Reducer("uniform", comm=comm, op="sum")
        first = reducer(there)
        for _ in range(2):
            for key, x in there.items():
                reducer.push(key, x)
            reducer.wait()
        work = comm.compressed_allreduce_async(there["large"], codec="raw")
        part = comm.split(comm.rank % 2, comm.rank)
        assert part is not None
        total = part.compressed_allreduce(there["large"], codec="raw")
        assert part.backend == "local+nccl"
        part.close()
        x = np.full(5, comm.rank, np.float32)
        assert comm.allreduce(x).tolist() == [6.0] * 5
        assert comm.broadcast(x, root=3).tolist() == [3.0] * 5
        return site.back(first), site.back(work.wait()), site.back(total)

    arrays = [t["large"] for t in tree]
    for rank, (first, whole, part) in enumerate(site.run(4, program)):
        assert same(first, wanted)
        assert np.allclose(whole, sum(arrays), atol=1e-4)
        assert np.allclose(part, arrays[rank % 2] + arrays[rank % 2 + 2], atol=1e-4)


def test_a_call_cannot_be_captured(site: HostSite) -> None:
    def program(comm: Communicator) -> Any:
        x = site.there(np.ones(3000, np.float32), comm.rank)
        for _ in range(3):
            comm.compressed_allreduce(x, codec="uniform")
        stream = site.machine.current_stream(comm.rank)
        stream.begin_capture()
        try:
            with pytest.raises(gccomm.NegotiationError, match="cannot be captured"):
                comm.compressed_allreduce(x, codec="uniform")
        finally:
            stream.end_capture()

    site.run(4, program)


# What goes wrong


@pytest.mark.parametrize("floats_first", [False, True])
def test_hosts_of_unequal_numbers_are_staged(site: HostSite, floats_first: bool) -> None:
    site.hosts, site.floats = (0, 1, 1), floats_first
    texts = _staged(site)
    assert all("hosts have 1 to 2 ranks" in text for text in texts)


def test_ranks_that_share_a_device_are_staged(site: HostSite, monkeypatch: pytest.MonkeyPatch) -> None:
    same_one = {"uuid": bytes(16), "name": b"fake"}
    monkeypatch.setattr(site.machine.cupy.cuda.runtime, "getDeviceProperties", lambda _number: same_one)
    texts = _staged(site)
    assert all("ranks 0 and 1 have the same GPU" in text for text in texts)
    assert site.nccl.comms == []


def _staged(site: HostSite) -> list[str]:
    """Check that calls go by the host's memory, and return what ranks are warned of."""
    ranks, barrier, tree = len(site.hosts), threading.Barrier(len(site.hosts)), floats(0, len(site.hosts))
    how: dict[str, Any] = {"hosts": site.hosts} if site.floats else {}
    wanted = testing.simulate(tree, "uniform", **how)[0][0]

    def program(comm: Communicator) -> Any:
        there = site.there(tree[comm.rank], comm.rank)
        barrier.wait(30)
        found = [site.back(comm.compressed_allreduce(there, codec="uniform"))]
        barrier.wait(30)
        for _ in range(2):
            comm.compressed_allreduce(there, codec="uniform")
        return found[0], comm.backend

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = site.run(ranks, program)
    assert all(same(found, wanted) and name == "local" for found, name in results)
    return [str(note.message) for note in caught]


@pytest.mark.parametrize("floats_first", [False, True])
def test_a_failure_of_nccl_reaches_every_rank(site: HostSite, floats_first: bool) -> None:
    """Also those that wait for others within NCCL."""
    site.floats = floats_first
    results: list[Any] = [None] * 4
    marks = threading.Barrier(4)

    def program(comm: Communicator) -> None:
        x = site.there(np.ones(50_000, np.float32), comm.rank)
        comm.compressed_allreduce(x, codec="uniform")
        comm.compressed_allreduce(x, codec="uniform")
        marks.wait(30)
        if comm.rank == 2:
            own = comm._backend._nccl.channel.comm  # type: ignore[attr-defined]

            def refuse(*_args: Any) -> None:
                raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR: a link is down")

            own.reduce_scatter = own.reduce = refuse
        try:
            comm.compressed_allreduce(x, codec="uniform")
        except gccomm.GccommError as error:
            results[comm.rank] = error
        with pytest.raises(gccomm.BackendError, match="this communicator is broken"):
            comm.barrier()

    site.run(4, program, closes=False)
    assert all(isinstance(error, gccomm.BackendError) for error in results), results
    assert "rank 2: NCCL failed in" in str(results[2])
    assert "a link is down" in str(results[2])
    assert all("a link is down" in str(error) for error in results), results


def test_a_rank_that_leaves_a_call_is_missed(site: HostSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the other of its host within NCCL, by those of the other host between hosts, whoever is first."""
    monkeypatch.setenv("GCCOMM_TIMEOUT_S", "1")
    results: list[Any] = [None] * 4
    marks, missed, gone = threading.Barrier(4), threading.Barrier(3), threading.Event()

    def leave(*_args: Any) -> None:
        assert gone.wait(30)
        raise gccomm.BackendError("it has left")

    def program(comm: Communicator) -> None:
        x = site.there(np.ones(50_000, np.float32), comm.rank)
        for _ in range(2):
            comm.compressed_allreduce(x, codec="uniform")
        marks.wait(30)
        if comm.rank == 3:
            comm._backend._trips.begin = leave  # type: ignore[attr-defined]
        try:
            comm.compressed_allreduce(x, codec="uniform")
        except gccomm.GccommError as error:
            results[comm.rank] = error
        if comm.rank < 3:
            missed.wait(30)
            gone.set()
        comm.close()  # waits for nobody

    site.run(4, program, closes=False)
    assert all(isinstance(e, gccomm.CollectiveTimeout | gccomm.BackendError) for e in results), results
    assert all("has waited 1." in str(error) for error in results[:3]), results
