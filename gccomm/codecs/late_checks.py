"""Checked headroom of words that stay on a device: the host looks at spans once all has been enqueued.

Energies, steps and check words are the device's to compute, with the bits that NumPy gives. What the host is
to see goes to pinned memory in stream order: which spans are wrong and, where codecs adapt, what the next c
is made of. It is read after :class:`~gccomm.steps.Look`; failed spans are then sent again as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gccomm import kernels
from gccomm.codecs.headroom import CLAMP, Checked, Rotating, Sizes
from gccomm.steps import Agree, Context, Energies, Look, Redo, Steps, Sum, Words

if TYPE_CHECKING:
    from gccomm.operand import Operand

__all__ = ["late_steps"]


def late_steps(x: Operand, ratios: Sequence[float], ctx: Context, width: int, rotations: int) -> Steps:
    """Reduce as :func:`gccomm.codecs.headroom.checked_steps` does; returns the same, or None where nothing is
    adapted.
    """
    run = _OnDevice(x, ctx, width, rotations)
    run.scales = yield Agree(x.blocks, run.measure)
    energies: Words | None = None
    if ctx.size > 3:  # below, the safe step is the smaller one
        energies = yield Energies(x.blocks, run.share)
    run.choose(energies, ratios)
    yield Sum(x.blocks, run.size, run.encode, run.decode)
    yield Look()
    found = run.seen()
    if found.failed:
        yield Redo(
            tuple(found.failed), found.wide_size, found.wide_encode, found.wide_decode, found.wide_lanes
        )
    return found.learn(run.host[2]) if ctx.stateful else None


class _OnDevice:
    """One operand on a device.

    Attributes
    ----------
    scales : DeviceWords
        The agreed maxima.
    host : array of uint32, shape (4, blocks)
        In pinned memory, where codecs adapt: scales, steps (as float32), energies, and energies of the sum.
    """

    def __init__(self, x: Operand, ctx: Context, width: int, rotations: int) -> None:
        self.x, self.ctx, self.width, self.rotations = x, ctx, width, rotations
        self.scales: Any = None
        self._launcher = x.kernels.launcher
        self._queue = x.kernels.launcher.queue
        self._source = Rotating(x, ctx, rotations)
        self._starts = x.span_starts
        self._own, self._energy = self._words(x.blocks), self._words(x.blocks)
        self._steps = self._queue.empty(x.blocks, np.float32)
        self._energies: Any = None
        self._wrong = self._pinned(len(self._starts))
        self.host = self._pinned(4 * x.blocks if ctx.stateful else 0).reshape(4, -1)

    def _words(self, count: int) -> Any:
        return self._queue.empty(count, np.uint32)

    def _pinned(self, count: int) -> Words:
        words: Words = self._queue.pinned_bytes(4 * count).view(np.uint32)
        return words

    def measure(self, out: Words) -> None:
        """Write the maxima of the rotated blocks, and keep them with their energies."""
        self._source.maxima(out, self._energy)
        self._queue.move(self._own.address, kernels.address(out), 4 * self.x.blocks)

    def share(self, out: Words) -> None:
        """Write this rank's energies relative to the agreed maxima."""
        from gccomm.kernels.cuda.headroom import share

        own, scales, to = self._own.address, kernels.address(self.scales), kernels.address(out)
        share(self._launcher, self.x.table, own, self._energy.address, scales, self.ctx.size, to)

    def choose(self, energies: Words | None, ratios: Sequence[float]) -> None:
        """Choose the steps."""
        from gccomm.kernels.cuda.headroom import steps

        self._energies, sizes = energies, Sizes.of(self.ctx.size, self.width)
        used = 0 if energies is None or sizes.bracket <= 0 else kernels.address(energies)
        learnt, scales = np.asarray(ratios, dtype=np.float64), kernels.address(self.scales)
        steps(self._launcher, self.x.table, scales, used, learnt, sizes, self._steps.address)

    def size(self, lo: int, hi: int) -> int:
        """Return the words of all blocks and of the check words behind them."""
        return self.x.size(lo, hi) + 2 * len(self._starts)

    def encode(self, lo: int, hi: int, out: Words) -> None:
        """Write lanes, then two check words a span."""
        check, how = self._words(2 * (hi - lo)), {"clamp": CLAMP, "ratios": self._steps}
        self._source.encode(lo, hi, out, self.scales, self.width, 1, self.ctx, check=check, **how)
        self._span_checks(check, 0, kernels.address(out) + 4 * self.x.size(lo, hi))

    def decode(self, lo: int, hi: int, words: Words) -> None:
        """Write the results, and have what the host is to look at brought there."""
        x, check, energy = self.x, self._words(2 * (hi - lo)), self._words(hi - lo)
        x.decode(
            lo, hi, words, self.scales, self.width, 1, self.ctx, subtract=True, ratios=self._steps,
            rotations=self.rotations, check=check, energy=energy,
        )  # fmt: skip
        wrong = self._words(len(self._starts))
        self._span_checks(check, kernels.address(words) + 4 * x.size(lo, hi), wrong.address)
        self._queue.download(self._wrong.view(np.uint8), wrong.address)
        if self.ctx.stateful:
            for row, array in zip(self.host, (self.scales, self._steps, self._energies, energy), strict=True):
                if array is None:
                    row[:] = 0
                else:
                    self._queue.download(row.view(np.uint8), kernels.address(array))

    def _span_checks(self, check: Any, expected: int, out: int) -> None:
        from gccomm.kernels.cuda.headroom import span_checks

        span_checks(self._launcher, check.address, self._starts, self.x.blocks, expected, out)

    # Once the host has looked

    def seen(self) -> Checked:
        """Return what goes on by what the device has found, its arrays on the host."""
        x, wrong = self.x, self._wrong != 0
        if self.ctx.stateful:
            found = self._checked(self.host[:2], wrong)
            found.energy = self.host[3]
            return found
        arrays = np.empty((2, x.blocks), np.uint32)
        if wrong.any():
            for row, array in zip(arrays, (self.scales, self._steps), strict=True):
                self._queue.download(row.view(np.uint8), kernels.address(array))
            self._queue.wait()
        return self._checked(arrays, wrong)

    def _checked(self, arrays: npt.NDArray[np.uint32], wrong: npt.NDArray[np.bool_]) -> Checked:
        """Return that of scales and steps."""
        found = Checked(self._source, arrays[0], arrays[1].view(np.float32), self.ctx, self.width)
        found.note(wrong)
        return found
