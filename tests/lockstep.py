"""A driver of collective calls in lockstep, without threads, that shows what travels."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from gccomm.engine import Outcome
from gccomm.transfers import Maximum, Transfer, WordAdd, at_once

Array = np.ndarray[Any, Any]
Runs = Sequence[Generator[Transfer, None, Outcome]]


def drive(
    runs: Runs,
    *,
    signed: bool = False,
    around: Callable[[int], AbstractContextManager[Any]] = lambda _: nullcontext(),
) -> tuple[list[Outcome], list[list[Array]]]:
    """Advance the ranks in step; return outcomes and what each sent under MAX, by transfer and rank."""
    sent: list[list[Array]] = []
    while True:
        transfers: list[Transfer] = []
        outcomes: list[Outcome] = []
        for rank, run in enumerate(runs):
            with around(rank):
                try:
                    transfers.append(next(run))
                except StopIteration as stop:
                    outcomes.append(stop.value)
        if outcomes:
            assert not transfers, "some ranks end before the others"
            return outcomes, sent
        transfers = list(at_once(transfers))
        if not transfers:
            continue
        if all(isinstance(t, Maximum) for t in transfers):
            sent.append([t.words.copy() for t in transfers if isinstance(t, Maximum)])
            typed = [s.view(np.int32) if signed else s for s in sent[-1]]
            result = np.max(typed, axis=0).view(np.uint32)
        else:
            assert all(isinstance(t, WordAdd) for t in transfers)
            result = np.sum([t.words for t in transfers if isinstance(t, WordAdd)], axis=0, dtype=np.uint32)
        for t in transfers:
            assert isinstance(t, Maximum | WordAdd)
            t.words[...] = result
