"""NCCL within hosts and MPI between them, in the memory of devices that do not exist: hosts are made up."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gccomm_mpi.channel
import numpy as np
import pytest
from gccomm_launch import doctor_trials
from gccomm_launch.doctor_findings import Answer
from gccomm_nccl import by_host, trips

import gccomm
from gccomm.kernels.cuda import on_cupy
from tests.cuda_on_cpu import OnCpu, kernels_on_cpu
from tests.devices import FAKE_NVRTC, trees
from tests.fake_gpu import Machine
from tests.fake_nccl import install
from tests.gpu import programs
from tests.mpi.remote_nccl import RemoteNccl
from tests.mpi.test_hierarchy import OnHosts
from tests.nccl_site import Site, same

CODECS = (
    "uniform:wire_bits=5",
    "rotated:wire_bits=4,headroom=checked",
    "thc",
    "raw",
)
EVEN = {"pairs": lambda rank: rank // 2, "two of every second": lambda rank: rank % 2}


@pytest.fixture
def site(world: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Site]:
    """A machine with a device for every rank; each process has a stand-in of its own."""
    shim = kernels_on_cpu("random").launcher
    assert isinstance(shim, OnCpu)
    machine = Machine(world.size, shim, FAKE_NVRTC)
    nccl = RemoteNccl(machine, world)
    install(monkeypatch, machine, nccl=nccl)
    monkeypatch.setenv("GCCOMM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("GCCOMM_ALLREDUCE", "ring")  # whose order float sums have
    monkeypatch.setattr(by_host, "SLICED_BYTES", 2000)
    monkeypatch.setattr(trips, "CHUNK_BYTES", 4096)
    on_cupy.forget_devices()
    with machine.cupy.cuda.Device(world.rank), machine.cupy.cuda.Stream(non_blocking=True):
        yield Site(machine, nccl)
    on_cupy.forget_devices()
    nccl.close()


def on_hosts(monkeypatch: pytest.MonkeyPatch, host_of: Any) -> None:
    duplicate = gccomm_mpi.channel._duplicate
    monkeypatch.setattr(gccomm_mpi.channel, "_duplicate", lambda comm: OnHosts(duplicate(comm), host_of))


@pytest.fixture(params=EVEN)
def even(request: pytest.FixtureRequest, world: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A communicator over hosts of two ranks."""
    if world.size != 4:
        pytest.skip("four ranks make two hosts of two")
    on_hosts(monkeypatch, EVEN[request.param])
    made = world.Dup()
    yield made
    made.Free()


def steps(comm: Any, site: Site, codec: str, *, there: bool, **options: Any) -> list[Any]:
    """Return the results of three steps, of arrays of the host or on devices."""
    reducer = gccomm.Reducer(codec, comm=comm, op="sum", error_feedback=True, **options)
    found = []
    for step in range(3):
        tree = {k: v for k, v in trees(step, comm.size)[comm.rank].items() if v.dtype.kind in "fV"}
        rng = np.random.default_rng([step, comm.rank])
        tree["large"] = rng.standard_normal((3, 9_000)).astype(np.float32)
        result = reducer(site.there(tree, comm.rank) if there else tree)
        found.append(site.back(result) if there else result)
    return found


@pytest.mark.parametrize("levels", ["words", "floats"])
@pytest.mark.parametrize("codec", CODECS)
def test_steps_give_the_bits_of_numpy(
    codec: str, levels: str, even: Any, site: Site, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GCCOMM_HIERARCHY", levels)
    with gccomm.init(comm=even) as comm:
        wanted = steps(comm, site, codec, there=False)
        assert comm.backend == "mpi"
        found = steps(comm, site, codec, there=True)  # NCCL joins after the first one
        assert comm.backend == "mpi+nccl-by-host"
        again = steps(comm, site, codec, there=True, bucket_bytes=20_000)
        for one in (found, again):
            if codec == "raw":
                for mine, other in zip(one, wanted, strict=True):
                    for key, exact in other.items():
                        wide = exact.astype(float)
                        step = 1e-2 if exact.dtype.itemsize == 2 else 1e-6
                        assert np.allclose(
                            mine[key].astype(float), wide, rtol=0, atol=step * abs(wide).max(initial=1)
                        )
            else:
                assert all(map(same, one, wanted))
            assert len(set(world.allgather(b"".join(y[k].tobytes() for y in one for k in sorted(y))))) == 1
        assert [made.group.size for made in site.nccl.comms] == [2]
        asked = {entry[6] for entry in site.nccl.comms[0].log}
        if codec == "thc":  # whose words go by the host
            assert asked == set()
        elif levels == "floats" and codec != "raw":
            assert asked >= {"one"}
        else:
            assert asked >= {"scatter", "gather"}
    assert site.nccl.comms[0].destroyed


def test_calls_that_differ_and_calls_on_the_host(even: Any, site: Site, world: Any) -> None:
    with gccomm.init(comm=even, hierarchical=True) as comm:
        x = site.there(np.full(3000, comm.rank + 1, np.float32), comm.rank)
        for _ in range(3):
            comm.compressed_allreduce(x, codec="uniform")
        texts = []
        for other in (site.there(np.ones(4000, np.float32), comm.rank), np.ones(3000, np.float32)):
            with pytest.raises(gccomm.MismatchError) as caught:
                comm.compressed_allreduce(other if comm.rank == 3 else x, codec="uniform")
            texts.append(str(caught.value))
        assert len(set(world.allgather(tuple(texts)))) == 1
        total = comm.compressed_allreduce(np.full(200_000, comm.rank + 1, np.float32), codec="uniform")
        assert np.allclose(total, 10, rtol=0.02)
        assert (site.back(comm.compressed_allreduce(x, codec="raw")) == 10).all()
        comm.synchronize()
        with comm.split(comm.rank % 2, comm.rank) as part:
            found = site.back(part.compressed_allreduce(x, codec="raw"))
            assert part.backend == "mpi+nccl"
            assert (found == (4 if comm.rank % 2 == 0 else 6)).all()
        with gccomm.init(comm=even) as other:
            assert (other.allreduce(np.ones(9)) == 4).all()


def test_pushed_steps_and_asynchronous_calls(even: Any, site: Site) -> None:
    with gccomm.init(comm=even, hierarchical=True) as comm:
        tree = {"a": np.full(40_000, comm.rank + 1, np.float32), "b": np.full(3000, 2, np.float32)}
        there = site.there(tree, comm.rank)
        reducer = gccomm.Reducer("uniform", comm=comm, op="sum")
        reducer(there)
        works = [comm.compressed_allreduce_async(there["a"], codec="bf16") for _ in range(3)]
        for key in there:
            reducer.push(key, there[key])
        found = site.back(reducer.wait())
        assert np.allclose(found["a"], 10, rtol=0.02)
        assert np.allclose(found["b"], 8, rtol=0.02)
        assert all(np.allclose(site.back(work.wait()), 10) for work in works)


@pytest.mark.parametrize("levels", ["words", "floats"])
def test_the_program_for_gpus_runs(
    levels: str, site: Site, world: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if world.size != 4:
        pytest.skip("four ranks make two hosts of two")
    monkeypatch.setattr(
        gccomm_mpi.channel, "_duplicate", gccomm_mpi.channel._duplicate
    )  # restored at the end
    monkeypatch.setattr(programs, "ON_DEVICE", programs.ON_DEVICE[::2])
    monkeypatch.setenv("GCCOMM_HIERARCHY", levels)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    site.machine.cupy.float32 = np.float32
    site.machine.cupy.ones = lambda count, dtype: site.machine.cupy.asarray(np.ones(count, dtype))
    programs.main("by-host")
    assert f"rank {world.rank} of 4: 3 codecs" in capsys.readouterr().out


def test_hosts_of_unequal_numbers_are_staged(site: Site, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if world.size < 3:
        pytest.skip("too few ranks for two hosts, one of them of two")
    on_hosts(monkeypatch, lambda rank: min(rank, 1))
    parent = world.Dup()
    with gccomm.init(comm=parent, hierarchical=True) as comm:
        x = site.there(np.full(5000, comm.rank + 1, np.float32), comm.rank)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = [site.back(comm.compressed_allreduce(x, codec="uniform")) for _ in range(3)]
        assert [f"hosts have 1 to {world.size - 1} ranks" in str(note.message) for note in caught] == [True]
        assert comm.backend == "mpi"
        assert all(np.allclose(y, world.size * (world.size + 1) / 2, rtol=0.02) for y in found)
    parent.Free()


def test_the_doctor_tries_it(even: Any, site: Site, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    del even
    staged = doctor_trials.by_host()  # by their local ranks two of them use one device
    assert staged["back_end"] == "mpi"
    finding = doctor_trials.judge_trial("nccl-by-host", Answer(staged))
    assert finding.status == "absent"
    assert "have the same GPU" in finding.text
    monkeypatch.setenv("GCCOMM_CUDA_DEVICE", str(world.rank))
    found = doctor_trials.by_host()
    assert found["back_end"] == "mpi+nccl-by-host"
    finding = doctor_trials.judge_trial("nccl-by-host", Answer(found))
    assert finding.text == "4 ranks: sums of raw, uniform, rotated are right, and the same on all"
    assert not site.nccl.comms[-1].aborted


@pytest.mark.parametrize("host_of", [lambda _rank: 0, lambda rank: rank], ids=["one host", "alone"])
def test_nccl_takes_all_ranks_of_one_host_and_of_hosts_of_one(
    host_of: Any, site: Site, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_hosts(monkeypatch, host_of)
    parent = world.Dup()
    with gccomm.init(comm=parent, hierarchical=True) as comm:
        x = site.there(np.full(5000, comm.rank + 1, np.float32), comm.rank)
        found = [site.back(comm.compressed_allreduce(x, codec="uniform")) for _ in range(3)]
        assert comm.backend == "mpi+nccl"
        assert all(np.allclose(y, world.size * (world.size + 1) / 2, rtol=0.02) for y in found)
    parent.Free()
