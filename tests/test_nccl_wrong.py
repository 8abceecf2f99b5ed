"""Calls over NCCL whose words stay on a device, where ranks differ, stop, or hold what they should not."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import gccomm
from gccomm.communicator import Communicator
from tests.nccl_site import Site, all_raise, site, warm

__all__ = ["site"]


@pytest.mark.parametrize("other", ["shape", "dtype", "host", "barrier", "codec", "key"])
def test_a_rank_that_makes_another_call_is_told_and_the_others_get_nans(site: Site, other: str) -> None:
    """The one that differs sees it in its own header; the others go on, and hear of it afterwards."""
    marks = threading.Barrier(3)
    nans: list[Any] = []

    def program(comm: Communicator) -> Any:
        x = warm(comm, site)
        marks.wait(30)
        if comm.rank == 1:
            if other == "barrier":
                return comm.barrier()
            strange: Any = {
                "shape": np.ones(4000, np.float32),
                "dtype": np.ones(3000, np.float64),
                "key": {"w": np.ones(3000, np.float32)},
            }.get(other, np.ones(3000, np.float32))
            there = strange if other == "host" else site.there(strange, 1)
            return comm.compressed_allreduce(
                there, codec="uniform:wire_bits=4" if other == "codec" else "uniform"
            )
        y = comm.compressed_allreduce(x, codec="uniform")
        try:
            comm.synchronize()
        finally:
            nans.append(site.back(y))
        return None

    results = all_raise(site, 3, program)
    assert all(isinstance(result, gccomm.MismatchError) for result in results), results
    assert "rank 1: " in str(results[1])
    assert "Others go on by a layout that had been agreed on" in str(results[1])
    assert "another rank made another call" in str(results[0])
    assert len(nans) == 2
    assert all(np.isnan(y).all() for y in nans)


def test_a_bad_argument_after_the_layout_is_known(site: Site) -> None:
    def program(comm: Communicator) -> Any:
        x = warm(comm, site)
        if comm.rank == 1:
            return comm.compressed_allreduce(x, op="max", codec="uniform")
        y = comm.compressed_allreduce(x, codec="uniform")
        comm.synchronize()
        return y

    results = all_raise(site, 2, program)
    assert isinstance(results[1], ValueError)
    assert isinstance(results[0], gccomm.MismatchError)


def test_a_missing_array_after_the_layout_is_known(site: Site) -> None:
    def program(comm: Communicator) -> Any:
        reducer = gccomm.Reducer("uniform", comm=comm)
        tree = site.there({"w": np.ones(3000, np.float32), "v": np.ones(2000, np.float32)}, comm.rank)
        for _ in range(4):
            reducer(tree)
        reducer({**tree, "v": None} if comm.rank else tree)
        return comm.synchronize()

    results = all_raise(site, 2, program)
    assert all(isinstance(result, gccomm.MismatchError) for result in results)
    assert "has None for an array" in str(results[1])


def test_a_sum_of_other_messages_is_nan(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tag that does not add up."""
    spoil: list[bool] = []
    from gccomm_nccl.backend import NcclBackend

    original = NcclBackend.sum_words

    def sum_words(self: Any, words: Any, /) -> None:
        original(self, words)
        if spoil and not isinstance(words, np.ndarray):
            words[len(words) - 1] = 12345

    monkeypatch.setattr(NcclBackend, "sum_words", sum_words)
    results: dict[int, Any] = {}
    marks = threading.Barrier(2)

    def program(comm: Communicator) -> None:
        x = warm(comm, site)
        marks.wait(30)
        spoil.append(True)
        y = comm.compressed_allreduce(x, codec="uniform")
        with pytest.raises(gccomm.BackendError, match="the tag of a sum is wrong"):
            comm.synchronize()
        results[comm.rank] = site.back(y)
        with pytest.raises(gccomm.BackendError, match="this communicator is broken"):
            comm.barrier()

    site.run(2, program, closes=False)
    assert all(np.isnan(y).all() for y in results.values())


@pytest.mark.parametrize("codec", ["uniform", "raw", "bf16"])
def test_a_sum_that_is_aborted_leaves_nans(site: Site, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCCOMM_TIMEOUT_S", "0.3")
    done = threading.Event()

    def program(comm: Communicator) -> Any:
        x = site.there(np.ones(3001, np.float32), comm.rank)
        for _ in range(2):
            comm.compressed_allreduce(x, codec=codec)
        if comm.rank == 1:
            done.wait(30)
            return None
        y = comm.compressed_allreduce(x, codec=codec)
        with pytest.raises(gccomm.CollectiveTimeout, match="rank 0 of 2 has waited"):
            comm.synchronize()
        done.set()
        with pytest.raises(gccomm.BackendError, match="broken"):
            comm.compressed_allreduce(x, codec=codec)
        return site.back(y)

    assert np.isnan(site.run(2, program, closes=False)[0]).all()


def test_arrays_on_another_device_are_refused_on_all_ranks(site: Site) -> None:
    def program(comm: Communicator) -> Any:
        x = site.there(np.ones(3000, np.float32), 3 if comm.rank else 0)
        with pytest.raises(ValueError, match=r"rank 1: arrays lie on cuda:3, but rank 1 .* works on cuda:1"):
            comm.compressed_allreduce(x, codec="uniform")
        return site.back(
            comm.compressed_allreduce(site.there(np.ones(3000, np.float32), comm.rank), codec="uniform")
        )

    assert all((found == 2).all() for found in site.run(2, program))


def test_arrays_of_host_and_device_together(site: Site) -> None:
    tree = {"a": np.ones(3000, np.float32), "b": np.full(2000, 2, np.float32)}

    def program(comm: Communicator) -> Any:
        mixed = {"a": tree["a"], "b": site.there(tree["b"], comm.rank)}
        found = comm.compressed_allreduce(mixed, codec="uniform")
        return found["a"], site.back(found["b"])

    for a, b in site.run(2, program):
        assert (a == 2).all()
        assert (b == 4).all()
