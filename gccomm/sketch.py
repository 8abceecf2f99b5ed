"""How large the error of a reduction is, measured: random projections of every rank's own rounding errors.

A rank knows what it sent and so its own error e_r; the error of the sum is the sum of the e_r, which nobody
knows. But projections are linear: each rank multiplies the errors of a block with the same random signs s,
and the words sum_i s_i e_ri travel behind a sum's lanes. Their sums over the ranks are sum_i s_i e_i, whose
mean square is ||e||^2, however the errors of ranks depend on each other (N. Alon, Y. Matias, M. Szegedy, "The
space complexity of approximating the frequency moments", 1996). Blocks are drawn in proportion to their
squared steps: some hundred projections say it to a few percent, whatever the blocks' magnitudes. The inputs
travel too, added up with random signs in a few hundred buckets, whose squares add up to the energy of the sum
(M. Charikar, K. Chen, M. Farach-Colton, "Finding frequent items in data streams", 2002): where the error is
as large as the sum, that tells its energy better than what was decoded does, which is the two together.

The projections are made in C++, specified by :mod:`gccomm.kernels.reference.sketches`; what lies on a
device is read by the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gccomm import kernels, memory
from gccomm.kernels import DTYPE_CODES
from gccomm.layout import BLOCK

if TYPE_CHECKING:
    from gccomm.operand import Operand
    from gccomm.steps import Words

__all__ = ["LARGEST", "Estimate", "Sketch", "chosen"]

FEW = 4  # operands that are all measured; of more, one
PROJECTIONS = 1024  # of an operand's errors, at most
BUCKETS = 512  # of its inputs, at most
LARGEST = 1 << 21  # coordinates of an operand whose errors are kept for a moment
UNIT = 1 / 64  # of a step, in which projections of errors travel


class Estimate(NamedTuple):
    """A figure, and its variance."""

    value: np.longdouble
    variance: np.longdouble

    def plus(self, other: Estimate) -> Estimate:
        """Return the sum of independent estimates."""
        return Estimate(self.value + other.value, self.variance + other.variance)


def chosen(count: int, step: int) -> range:
    """Return which of ``count`` operands are measured in a step: all of a few, one of many, by turns."""
    return range(count) if count <= FEW else range(step % count, step % count + 1)


class Sketch:
    """Projections of the errors of one operand.

    Attributes
    ----------
    words : array of uint32
        What travels: this rank's, then, summed, all ranks'. First those of errors, then those of inputs.
    """

    def __init__(self, x: Operand) -> None:
        self.x = x
        count = min(PROJECTIONS, x.coordinates // 16)
        self.buckets = min(BUCKETS, 1 << max(0, (x.coordinates // 16).bit_length() - 1)) if count else 0
        self.words = np.zeros(count + self.buckets, dtype=np.uint32)
        self.blocks = np.zeros(count, dtype=np.int64)  # that the projections are of
        self.total = 0.0  # sum of all blocks' lengths times squared steps, over the largest step's square
        self.top = np.longdouble(0)  # the largest step
        self.exponent = 0  # of two, above the largest input
        self.steps = np.zeros(x.blocks, dtype=np.longdouble)
        self.starts = np.cumsum(x.lengths) - x.lengths
        self.device = x.specs[0].worked_on
        self.errors = self._memory(x.coordinates)
        self.done = False
        self.lent = not x.feedback
        if self.lent:
            self._lend()

    def _memory(self, count: int) -> Any:
        return memory.empty(self.device, count, np.float64 if self.x.float64 else np.float32)

    def _lend(self) -> None:
        """Let encoding leave its errors here, as if they were residuals."""
        self.x.table["res_out"] = self._addresses(self.errors)

    def _addresses(self, values: Any) -> npt.NDArray[np.uint64]:
        """Return where each tensor would begin whose blocks lie in an array, one behind the other."""
        x, item, base = self.x, values.dtype.itemsize, memory.address(values)
        places = zip(x.bounds, x.geometries, x.segments, strict=False)
        inside = [int(self.starts[bound]) - geometry.offset(s.start) for bound, geometry, s in places]
        return np.array([(base + item * n) % (1 << 64) for n in inside], np.uint64)

    def give_back(self) -> None:
        """Stop that."""
        if self.lent:
            self.x.table["res_out"] = self.x.inputs["res_out"] = 0
        self.errors = self._memory(0)

    def project(self, scales: Words, ratios: Any, width: int) -> None:
        """Write the projections of all blocks, just encoded, in units of their steps (ratio times scale).

        Once: blocks may be encoded again for other reasons. Lanes of ``width`` bits hold no input larger than
        2^(width - 1) steps: that tells how fine a unit has room for the inputs' projections.
        """
        if self.done:
            return
        self.done, x = True, self.x
        finite = np.where(x.nonfinite_scales(scales), np.uint32(0), scales)
        self.steps = x.scale_values(finite).astype(np.longdouble) * ratios
        self.top = self.steps.max(initial=0)
        if self.top == 0 or not len(self.blocks):
            return
        weights = np.cumsum(x.lengths * (self.steps / self.top).astype(np.float64) ** 2)
        self.total = float(weights[-1])
        count = len(self.blocks)
        marks = (np.arange(count) + 0.5) * (self.total / count)
        self.blocks = np.minimum(np.searchsorted(weights, marks), x.blocks - 1)
        with np.errstate(all="ignore"):
            self.words[:count] = self._levels(self._projected() / (self.steps[self.blocks] * UNIT))
            self.exponent = int(np.frexp(self.top)[1]) + width - 1
            self.words[count:] = self._levels(self._inputs() / self._input_unit)

    @property
    def _input_unit(self) -> float:
        """Unit in which sums of inputs travel; 8 standard deviations of the largest have room."""
        return float(8 * np.sqrt(self.x.coordinates) * self.x.ranks / 2**31)

    def _levels(self, values: npt.NDArray[Any]) -> Words:
        """Return values in words whose sum over the ranks does not overflow."""
        most = float(2**31 // self.x.ranks - 1)
        levels = np.where(np.isfinite(values), np.clip(np.rint(values), -most, most), most)
        words: Words = levels.astype(np.int64).astype(np.uint32)
        return words

    def _inputs(self) -> npt.NDArray[np.float64]:
        """Return all inputs plus residuals, in buckets by their places in blocks, in units of 2^exponent."""
        x = self.x
        places, table = np.empty(BLOCK), x.table
        if not x.on_host:
            values = np.concatenate([x.load(i) for i in range(x.count)])
            table = table.copy()
            table["src"], table["res_in"], table["res_out"] = self._addresses(values), 0, 0
            table["dtype"] = DTYPE_CODES[values.dtype.name]
        source = x.source if x.on_host else kernels.address(table)
        kernels.sum_inputs(source, x.count, 0, x.blocks, -self.exponent, kernels.address(places))
        sums: npt.NDArray[np.float64] = places.reshape(-1, self.buckets).sum(axis=0)
        return sums

    def _projected(self) -> npt.NDArray[np.float64]:
        """Return the projections of errors: the k-th of a block is by the k-th signs."""
        x, found, address = self.x, np.empty(len(self.blocks)), kernels.address
        errors = np.asarray(self.errors) if self.lent else np.concatenate([x.left(i) for i in range(x.count)])
        where = address(self.starts), address(x.lengths), address(self.blocks), len(found), address(found)
        kernels.project_errors(address(errors), errors.dtype == np.float64, *where)
        return found

    def noise(self) -> Estimate:
        """Return the squared error of the operand's sum, from the summed words."""
        if self.top == 0 or not len(self.blocks):
            return Estimate(np.longdouble(0), np.longdouble(0))
        count = len(self.blocks)
        parts = (self.words[:count].view(np.int32) * UNIT) ** 2 / self.x.lengths[self.blocks]
        whole = np.longdouble(self.total) * self.top**2
        return Estimate(parts.mean() * whole, parts.var() / count * whole**2)

    def signal(self) -> Estimate:
        """Return the squared norm of the operand's exact sum, from the summed words."""
        words = self.words[len(self.blocks) :].view(np.int32)
        if self.top == 0 or not len(words):
            return Estimate(np.longdouble(0), np.longdouble(0))
        value = np.ldexp(np.longdouble(np.sum((words * self._input_unit) ** 2)), 2 * self.exponent)
        return Estimate(value, 2 / len(words) * value**2)
