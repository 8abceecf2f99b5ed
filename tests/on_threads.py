"""Ranks that are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["on_threads", "raised"]


def on_threads(work: Callable[[Any], Any], ranks: Iterable[Any], timeout_s: float = 60) -> list[Any]:
    """Call ``work`` on a thread for each of ``ranks``; return what each call returned, or raised."""
    places = list(ranks)
    results: list[Any] = [None] * len(places)

    def body(place: int) -> None:
        try:
            results[place] = work(places[place])
        except BaseException as error:
            results[place] = error

    threads = [threading.Thread(target=body, args=(place,), daemon=True) for place in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
        assert not thread.is_alive(), "a rank hangs"
    return results


def raised(results: list[Any]) -> list[Any]:
    """Return results, or raise what one of the calls raised."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
