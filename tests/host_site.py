"""Ranks on several hosts with a device each: NCCL within hosts, and between them a back end of threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gccomm_nccl.pair import complete

from gccomm.communicator import Communicator
from gccomm.hosts import Hosts
from tests.nccl_site import Site

__all__ = ["HostSite", "OnHosts"]


class OnHosts:
    """A thread of a group, on a made-up host: what of the back end mpi the one by hosts needs.

    Parameters
    ----------
    base : LocalBackend
        Of all ranks. Making this object is collective.
    hosts : sequence of int
        Of every rank, numbered by their first ranks.
    floats : bool
        Whether hosts add up floats first.
    """

    one_host = False

    def __init__(self, base: Any, hosts: Sequence[int], floats: bool) -> None:
        mine, sizes = hosts[base.rank], [hosts.count(host) for host in set(hosts)]
        self._base, self._host = base, base.split(mine, base.rank)
        self.local_rank = place = self._host.rank
        self._column = base.split(place if place < min(sizes) else None, mine)
        self.hosts = Hosts(len(sizes), mine, place, min(sizes)) if floats else None
        self.layered = list(hosts)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._base, name)

    def forsake(self, reason: str) -> None:
        self._base.abort(reason)

    def column(self) -> OnColumn:
        return OnColumn(self._column)

    def host_sum(self, send: Any, recv: Any, dtype: Any, place: int) -> None:
        total = send.copy()
        self._host.sum_floats(total, total, dtype)
        if recv is not None:
            recv[...] = total

    def between(self, place: int) -> OnBetween:
        return OnBetween(self, place)


class OnColumn:
    """Reductions over a column, complete at once."""

    def __init__(self, column: Any) -> None:
        self._column = column

    def begin(self, kind: str, words: Any) -> None:
        complete(self._column, kind, words, words)


class OnBetween:
    """Reductions of host memory over the ranks at a place."""

    def __init__(self, on: OnHosts, place: int) -> None:
        self._on, self._place = on, place

    def _spread(self, kind: str, words: Any) -> None:
        if self._on.local_rank == self._place:
            complete(self._on._column, kind, words, words)
        self._on._host.broadcast(words.view(np.uint8), self._place)

    def maximum(self, words: Any) -> None:
        self._spread("maximum", words)

    def sum_words(self, words: Any) -> None:
        self._spread("words", words)

    def sum_floats(self, send: Any, recv: Any, dtype: Any) -> None:
        assert send is recv
        self._spread(dtype, recv)

    def begin(self, kind: str, send: Any, recv: Any) -> None:
        assert send is recv
        self._spread(kind, recv)


class HostSite(Site):
    """Ranks on hosts, which NCCL joins.

    Attributes
    ----------
    hosts : sequence of int
        The host of every rank.
    floats : bool
        Whether hosts add up floats first.
    """

    hosts: Sequence[int] = (0, 0, 1, 1)
    floats = False

    def communicator(self, base: Any) -> Communicator:
        return Communicator(OnHosts(base, self.hosts, self.floats), joins=True)
