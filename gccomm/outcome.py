"""What a collective call came to: its error, its figures, and what codecs returned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gccomm.plan import Plan
from gccomm.running import Running
from gccomm.stats import Stats

__all__ = ["Outcome", "overflow_of", "parts_of"]


@dataclass(slots=True)
class Outcome:
    """What a collective call came to.

    Attributes
    ----------
    error : BaseException or None
        Raised by the caller, on every rank alike.
    stats : Stats
        What was done.
    present : array of bool or None
        Which leaves some rank had a value for; None where nobody was missing one.
    parts : dict of int to list
        By leaf: what codecs returned for its segments, in order, for their next state.
    """

    error: BaseException | None = None
    stats: Stats = field(default_factory=Stats)
    present: Any = None
    parts: dict[int, list[Any]] = field(default_factory=dict)


def parts_of(ended: Sequence[Running]) -> dict[int, list[Any]]:
    """Collect by leaf what the codecs returned."""
    found: dict[int, list[Any]] = {}
    for r in ended:
        if r.parts is not None and r.operand.codec.stateful:
            for segment, part in zip(r.operand.segments, r.parts, strict=True):
                found.setdefault(segment.leaf, []).append(part)
    return found


def overflow_of(plan: Plan) -> OverflowError | None:
    """Return the error of integer sums that do not fit their dtype: equal on all ranks, as the sums are."""
    counts: dict[int, int] = {}
    for x in plan.operands:
        for leaf, count in x.overflows.items():
            counts[leaf] = counts.get(leaf, 0) + count
    parts = []
    for leaf, count in sorted(counts.items()):
        spec = plan.specs[leaf]
        where = f" in {spec.key!r}" if spec.key else ""
        parts.append(f"{count} integer sums do not fit {spec.dtype}{where}")
    if not parts:
        return None
    return OverflowError(f"{'; '.join(parts)}; reduce in a wider dtype. Nothing was changed")
