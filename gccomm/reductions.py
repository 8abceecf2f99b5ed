"""The reductions of a communicator's functions, which keep their plans, by their options."""

from __future__ import annotations

from operator import is_

from gccomm.checks import check_options
from gccomm.codecs import Codec, get_codec
from gccomm.reduction import Options, Reduction

__all__ = ["Reductions"]

MOST = 64  # option sets whose plans are kept


class Reductions(dict[object, Reduction]):
    """Reductions by their options, those used last at the end."""

    def __init__(self) -> None:
        super().__init__()
        self._last: tuple[tuple[object, ...], Reduction] | None = None  # options asked for last, one by one

    def of(
        self, op: str, codec: str | Codec, exact_below: int, nonfinite: str
    ) -> tuple[Reduction, BaseException | None]:
        """Return the reduction that keeps the plans of these options, and what is wrong with them."""
        last, asked = self._last, (op, codec, exact_below, nonfinite)
        if last is not None and all(map(is_, last[0], asked)):
            return last[1], None
        reduction, error = self._chosen(*asked)
        self._last = (asked, reduction) if error is None else None
        return reduction, error

    def _chosen(
        self, op: str, codec: str | Codec, exact_below: int, nonfinite: str
    ) -> tuple[Reduction, BaseException | None]:
        error: BaseException | None = None
        try:
            exact_below = check_options(op, exact_below, nonfinite)
            chosen = get_codec(codec)
        except Exception as bad:  # whatever the caller's objects raise is shared with the other ranks
            error, op, chosen, exact_below, nonfinite = bad, "sum", get_codec("raw"), 1024, "propagate"
        signature = (op, chosen, exact_below, nonfinite)
        reduction = self.pop(signature, None)
        if reduction is None:
            reduction = Reduction(Options.single(chosen, op, False, exact_below, nonfinite))
            while len(self) >= MOST:
                self.pop(next(iter(self)))
        self[signature] = reduction
        return reduction, error
