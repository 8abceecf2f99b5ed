"""The NCCL back end over the ranks of this run, as far as it goes without GPUs."""

from __future__ import annotations

import sys
from typing import Any

import gccomm_mpi
import gccomm_nccl
import numpy as np
import pytest
from gccomm_nccl.joining import BackendPeers, host_name

from gccomm.errors import BackendError


def test_ranks_exchange_what_they_bring(world: Any) -> None:
    peers = BackendPeers(gccomm_mpi.connect())
    mine = {"rank": world.rank, "host": host_name(), "text": "é" * world.rank}
    assert peers.exchange(mine) == world.allgather(mine)
    assert (peers.rank, peers.size, peers.local_rank) == (world.rank, world.size, world.rank)
    assert peers.lost() is None
    peers.close()


def test_a_rank_without_cupy_is_named_on_all(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GCCOMM_NCCL", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", None)
    for comm in (None, world):
        with pytest.raises(BackendError, match=r"rank 0: the back end `nccl` cannot use .* needs CuPy"):
            gccomm_nccl.connect(comm)
    backend = gccomm_mpi.connect()
    words = np.ones(1, np.uint32)
    backend.sum_words(words)  # nothing is broken
    assert int(words[0]) == world.size
    backend.close()
