"""Where other pieces are on a slow link, kernels of lanes do a portion of a piece's blocks at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from gccomm import batch, codecs, kernels, testing
from gccomm.agreement import Links
from gccomm.lanes import safe_limit
from gccomm.operand import Operand
from gccomm.options import Place
from gccomm.plan import Plan
from gccomm.steps import Context
from gccomm.testing import simulate

SIZES = 9000, 5123  # 9 and 6 blocks, two of them short
BLOCKS = 15
CONTEXT = Context(1, 3, 21845, measure=True)
LIMIT = safe_limit(8, 3)


@pytest.fixture(autouse=True)
def portion(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many threads there are."""
    monkeypatch.setattr(batch, "PORTION", 2)
    monkeypatch.setattr(kernels, "threads", lambda: 2)


def pauses(blocks: int) -> int:
    """Return how often something else may go on."""
    return -(-blocks // 4) - 1


class Work:
    """An operand over two arrays, and what its kernels have written."""

    def __init__(self, meanwhile: Callable[[], object] | None) -> None:
        draws = np.random.default_rng(5)
        arrays = [draws.standard_normal(size).astype(np.float32) for size in SIZES]
        self.results = [np.zeros(size, np.float32) for size in SIZES]
        keys = np.arange(4, dtype=np.uint32).reshape(2, 2)
        codec = codecs.get_codec("rotated:wire_bits=8")
        self.operand = Operand.of_arrays(codec, arrays, self.results, keys)
        self.operand.meanwhile = meanwhile
        self.scales, self.energy, self.own = np.zeros((3, BLOCKS), np.uint32)
        self.words = np.zeros(self.operand.words, np.uint32)
        self.checks = np.zeros((2, 2 * BLOCKS), np.uint32)

    def written(self) -> list[bytes]:
        """Return all of it."""
        arrays = self.scales, self.energy, self.own, self.words, self.checks, *self.results
        return [array.tobytes() for array in arrays] + [x.energy.tobytes() for x in self.operand.samples]


def in_place(work: Work, lo: int) -> None:
    x, n = work.operand, BLOCKS - lo
    x.maxima(work.scales, work.energy, 1)
    how: dict[str, Any] = {"rotations": 1, "subtract": True}
    own = work.own[:n]
    x.encode(lo, BLOCKS, work.words, work.scales, 8, LIMIT, CONTEXT, check=work.checks[0], maxima=own, **how)
    x.decode(lo, BLOCKS, work.words, work.scales, 8, LIMIT, CONTEXT, check=work.checks[1], **how)


def kept(work: Work, lo: int) -> None:
    x = work.operand.rotate(work.scales, work.energy, 1)
    assert x is not work.operand
    x.encode(lo, BLOCKS, work.words, work.scales, 8, LIMIT, CONTEXT, check=work.checks[0])


@pytest.mark.parametrize("lo", [0, 2])
@pytest.mark.parametrize("do", [in_place, kept])
def test_kernels_write_the_same_in_portions(do: Callable[[Work, int], None], lo: int) -> None:
    called: list[int] = []
    whole, parts = Work(None), Work(lambda: called.append(0))
    do(whole, lo)
    do(parts, lo)
    assert parts.written() == whole.written()
    assert any(parts.checks[0])
    later = pauses(BLOCKS - lo)
    assert len(called) == pauses(BLOCKS) + (2 * later if do is in_place else later)
    for x in (parts.operand, *(parts.operand.rotated or ())[:1]):
        parts.operand.forget()
        assert x.meanwhile is None


def test_an_error_of_what_goes_on_comes_out() -> None:
    def fail() -> None:
        raise RuntimeError("the link is gone")

    with pytest.raises(RuntimeError, match="the link is gone"):
        in_place(Work(fail), 0)


def run(monkeypatch: pytest.MonkeyPatch, codec: str, slow: bool, size: int) -> tuple[list[Any], int]:
    """Return the results of three steps, and how often what was on its way went on."""
    called: list[int] = []
    place = partial(Place, links=Links(slow=slow), go_on=lambda: called.append(0))
    monkeypatch.setattr(testing, "Place", place)
    plans: set[Plan] = set()
    let_go_on = Plan.let_go_on

    def noted(plan: Plan, meanwhile: Any) -> None:
        plans.add(plan)
        let_go_on(plan, meanwhile)

    monkeypatch.setattr(Plan, "let_go_on", noted)
    xs = [np.random.default_rng(r).standard_normal(size).astype(np.float32) for r in range(3)]
    found, _ = simulate(xs, codec, steps=3, piece_coordinates=64 << 10, one_host=False)
    assert all(x.meanwhile is None for plan in plans for x in plan.operands)  # the calls are over
    assert bool(plans) is (slow and size > 64 << 10)
    return found, len(called)


CODECS = "uniform", "uniform:scales=predicted", "uniform:wire_bits=8,widening=true", "thc"
ROTATED = "rotated", "rotated:headroom=checked", "rotated:headroom=clipped"


@pytest.mark.parametrize("codec", CODECS + ROTATED)
def test_over_slow_links_pieces_go_on_meanwhile(monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    whole, none = run(monkeypatch, codec, slow=False, size=200_000)
    found, some = run(monkeypatch, codec, slow=True, size=200_000)
    for a, b in zip(whole, found, strict=True):
        np.testing.assert_array_equal(a, b)
    assert none == 0
    assert some > 0


def test_one_piece_alone_has_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    _, some = run(monkeypatch, "uniform", slow=True, size=60_000)
    assert some == 0
