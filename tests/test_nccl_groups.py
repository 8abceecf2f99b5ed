"""Sums of one piece that are ready at once: one group, one launch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gccomm
from gccomm import testing
from gccomm.communicator import Communicator
from tests.fake_nccl import MAX, SUM
from tests.nccl_site import Site, floats, same, site

__all__ = ["site"]

CODECS = {"half": "bf16", "double": "raw", "brain": "fp16", "complex": "raw", "*": "rotated:headroom=safe"}


def logged(site: Site, rank: int) -> list[Any]:
    (comm,) = (comm for comm in site.nccl.comms if comm.rank == rank)
    return comm.log


def test_words_and_floats_go_as_one_group(site: Site) -> None:
    """Each reduction as it would be by itself: the bits do not change, nor what is counted."""

    def steps(comm: Communicator, there: Any) -> Any:
        reducer = gccomm.Reducer(CODECS, comm=comm, op="sum")
        return [reducer(there(floats(step, 2)[comm.rank])) for step in range(6)], reducer.stats

    def program(comm: Communicator) -> Any:
        results, stats = steps(comm, lambda x: site.there(x, comm.rank))
        return [site.back(x) for x in results], stats

    found, expected = site.run(2, program), testing.run(lambda comm: steps(comm, lambda x: x), 2)
    for (results, stats), (others, plain) in zip(found, expected, strict=True):
        assert all(map(same, results, others))
        assert (stats.messages, stats.wire_bytes) == (plain.messages, plain.wire_bytes)
    for rank in range(2):
        groups = [entry for entry in logged(site, rank) if entry[-1]]
        assert [entry[3] for entry in groups] == [3, 6, 7, 8, 9] * 6
        assert all(entry[4] == SUM for entry in groups)
        assert all(entry[0] % 16 == 0 for entry in groups)
        assert not any(entry[-1] for entry in logged(site, rank) if entry[4] == MAX)


@pytest.mark.parametrize("codec", ["uniform", "raw"])
def test_one_sum_is_no_group(site: Site, codec: str) -> None:
    def program(comm: Communicator) -> None:
        x = site.there(np.ones(3000, np.float32), comm.rank)
        for _ in range(3):
            comm.compressed_allreduce(x, codec=codec)

    site.run(2, program)
    assert not any(entry[-1] for entry in logged(site, 0))


def test_energies_of_all_pieces_go_as_one_message(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gccomm.flowing.PIECE_COORDINATES", 0)
    sizes = (3000, 4000, 5000)

    def steps(comm: Communicator, there: Any) -> Any:
        reducer = gccomm.Reducer("rotated:headroom=checked", comm=comm, bucket_bytes=1)
        found = []
        for step in range(5):
            rng = np.random.default_rng([step, comm.rank])
            found.append(reducer(there({str(n): rng.standard_normal(n).astype(np.float32) for n in sizes})))
        return found

    def program(comm: Communicator) -> Any:
        found = steps(comm, lambda x: site.there(x, comm.rank))
        return [site.back(x) for x in found], logged(site, comm.rank)

    expected = testing.run(lambda comm: steps(comm, lambda x: x), 4)
    for (found, log), others in zip(site.run(4, program), expected, strict=True):
        assert all(map(same, found, others))
        blocks = sum(-(-n // 1024) for n in sizes)
        assert [entry[2] for entry in log if entry[4] == SUM].count(blocks) == 5
