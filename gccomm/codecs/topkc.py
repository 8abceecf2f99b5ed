"""``topkc``: the chunks of coordinates with the most energy over all ranks, the same ones on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from gccomm import kernels
from gccomm.checks import integer, one_of
from gccomm.codecs.base import Codec, State, lane_width
from gccomm.codecs.floats import BFloat16
from gccomm.codecs.uniform import Uniform
from gccomm.codecs.whole import exponents, lose, scaled
from gccomm.operand import Operand
from gccomm.steps import Agree, Context, Energies, Steps, Words, float_sum

if TYPE_CHECKING:
    from gccomm.steps import Buffer

__all__ = ["TopKC"]

MOST_CHUNK = 1 << 16


class TopKC(Codec):
    """Cut each tensor into chunks, add up their energies over the ranks, and reduce only the chunks that have
    most.

    The energy of a chunk is its squared norm. Relative to the largest on any rank (agreed under MAX, one word
    a tensor) it travels as an integer of at most (2^32 - 1) / n, one word a chunk under SUM; all ranks then
    pick the same J = ceil(fraction * chunks) by energy, the first of equals, without sending where they are.
    Coordinates of other chunks are 0 in the result and stay in the residual, with what rounding left of those
    that were sent.

    Parameters
    ----------
    fraction : float
        Part of the chunks that are sent, above 0 and at most 1; at least one of a tensor is.
    chunk : int
        Consecutive coordinates of a chunk, 1 to 65536; the last one of a tensor may be short.
    values : str
        "bf16": sums of bfloat16; or "lanes": those of the codec ``uniform`` on the chosen coordinates.
    wire_bits : int
        Lane width for "lanes": 2, 3, 4, 5, 6, 8, 10 or 16; leave it at 8 with "bf16".

    Notes
    -----
    W. Han et al., "Beyond Throughput and Compression Ratios: Towards High End-to-end Utility of Gradient
    Compression" (HotNets 2024), where energies are 16-bit floats. A coordinate costs 32 / chunk bits for the
    energies and fraction times the bits of a value: 0.5 + 1.6 by default. Works on whole tensors, of which it
    makes up to three copies.
    """

    id: ClassVar[str] = "topkc"
    unit: ClassVar[str] = "tensor"
    rounding = "biased"
    biased = True

    def __init__(
        self, fraction: float = 0.1, chunk: int = 64, values: str = "bf16", wire_bits: int = 8
    ) -> None:
        self.fraction = _fraction(fraction)
        self.chunk = integer("chunk", chunk, "a number of coordinates", 1, MOST_CHUNK)
        one_of("values", values, ("bf16", "lanes"))
        self.values = values
        self.wire_bits = lane_width(wire_bits)
        if values == "bf16" and wire_bits != 8:
            msg = f'`wire_bits` is of values="lanes" and does nothing with values="bf16", got {wire_bits!r}'
            raise ValueError(msg)
        self.sums_as = "bfloat16" if values == "bf16" else "integer lanes"

    def require_size(self, size: int, item_bytes: int) -> None:
        """Refuse more ranks than lanes have room for."""
        if self.values == "lanes":
            Uniform(self.wire_bits).require_size(size, item_bytes)

    def require_feedback(self, size: int) -> None:
        """Refuse lanes in which residuals would grow for ever."""
        if self.values == "lanes":
            Uniform(self.wire_bits).require_feedback(size)

    def block_words(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the lengths: what chunks take is only known later, and less."""
        return lengths

    def steps(self, x: Operand, state: Sequence[State | None], ctx: Context) -> Steps:
        """Agree on the largest chunk, add up energies, then sum the chosen chunks."""
        del state
        sizes = [x.chunk_norms(i, self.chunk) for i in range(x.count)]
        largest = x.scale_words(np.array([s.max(initial=0) for s in sizes]))
        agreed = yield Agree(x.count, lambda out: np.copyto(out, largest))
        assert agreed is not None
        bad = x.nonfinite_scales(agreed)
        top = x.scale_values(np.where(bad, np.uint32(0), agreed))
        own = [_energies(s, t, ctx.size) for s, t in zip(sizes, top, strict=True)]
        sums = yield Energies(sum(map(len, own)), lambda out: np.copyto(out, np.concatenate(own)))
        assert sums is not None
        ends = np.cumsum([len(e) for e in own])[:-1]
        chosen = [self._choose(e) for e in np.split(sums, ends)]
        for i in np.flatnonzero(bad).tolist():
            lose(x, i)
        finite = [i for i in range(x.count) if not bad[i]]
        yield from self._sum(x, finite, chosen, exponents(top), ctx)

    def _choose(self, energies: Words) -> npt.NDArray[np.intp]:
        """Return the chunks with most energy, in order; none that has none."""
        count = math.ceil(self.fraction * len(energies) - 1e-9)
        most = np.argsort(~energies, kind="stable")[: max(1, count)]
        chosen: npt.NDArray[np.intp] = np.sort(most[energies[most] > 0])
        return chosen

    def _sum(
        self,
        x: Operand,
        finite: Sequence[int],
        chosen: Sequence[npt.NDArray[np.intp]],
        powers: Sequence[int],
        ctx: Context,
    ) -> Steps:
        tensors = [_Tensor(x, i, chosen[i], powers[i], self.chunk) for i in finite]
        sent = [t for t in tensors if t.sent.size]
        if sent:
            yield from self._reduce(x, sent, ctx)
        for t in tensors:
            t.finish()

    def _reduce(self, x: Operand, sent: Sequence[_Tensor], ctx: Context) -> Steps:
        """Sum the chosen coordinates of all tensors; rounding errors go into their ``rest``."""
        inner = Uniform(self.wire_bits) if self.values == "lanes" else BFloat16()
        keys = np.ascontiguousarray(x.keys[[t.i for t in sent]])
        sub = Operand.of_arrays(inner, [t.sent for t in sent], [t.sums for t in sent], keys)
        if x.feedback:
            sub.table["res_out"] = [kernels.address(t.rest) for t in sent]
        if self.values == "lanes":
            yield from inner.steps(sub, [None] * len(sent), ctx)
        else:
            wire = np.empty(sub.words, dtype=np.uint16)
            sub.encode_floats(0, sub.blocks, wire, "bfloat16")
            yield float_sum(wire, "bfloat16")
            sub.decode_floats(0, sub.blocks, wire, "bfloat16", ctx)


def _fraction(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.floating):
        msg = f"`fraction` must be a part of the chunks, got {value!r} of type {type(value).__name__}"
        raise TypeError(msg)
    if not 0 < value <= 1:
        raise ValueError(f"`fraction` must be a part of the chunks, above 0 and at most 1, got {value!r}")
    return float(value)


def _energies(sizes: npt.NDArray[np.float64], largest: float, n: int) -> Words:
    """Return energies as integers that n ranks can add up; at least 1 where there is any."""
    most = (2**32 - 1) // n
    if largest == 0:
        return np.zeros(len(sizes), dtype=np.uint32)
    levels = np.rint((sizes / largest) ** 2 * most)
    return np.where(sizes > 0, np.clip(levels, 1, most), 0).astype(np.uint32)


@dataclass
class _Tensor:
    """One tensor's chosen coordinates, divided by 2^power, their sums, and what rounding left of them."""

    x: Operand
    i: int
    chosen: npt.NDArray[np.intp]
    power: int
    chunk: int

    def __post_init__(self) -> None:
        self.values: Buffer | None = None
        if self.x.on_host:
            values = self.x.load(self.i)
            parts = [values[at] for at in self._places()]
            taken = np.concatenate([p.reshape(-1) for p in parts]) if parts else values[:0]
            self.sent = scaled(taken, -self.power)
            self.values = values if self.x.feedback else None
        else:
            self.sent = self.x.take_chunks(self.i, self.chunk, -self.power, self.chosen)
        self.sums, self.rest = np.empty_like(self.sent), np.empty_like(self.sent)

    def _places(self) -> Iterator[Any]:
        """Yield indices of runs of the chosen coordinates: of all whole chunks, and of a short last one."""
        size = self.x.length_of(self.i)
        whole = size // self.chunk
        inner = self.chosen[self.chosen < whole]
        if len(inner):
            yield (inner[:, None] * self.chunk + np.arange(self.chunk)).reshape(-1)
        if len(inner) < len(self.chosen):
            yield slice(whole * self.chunk, size)

    def _put(self, parts: Buffer, into: Buffer) -> None:
        start = 0
        for at in self._places():
            end = start + len(into[at])
            into[at] = parts[start:end]
            start = end

    def finish(self) -> None:
        """Write result and residual."""
        x, i = self.x, self.i
        if not x.on_host:
            x.put_chunks(i, self.chunk, self.power, self.chosen, self.sums, self.rest)
            return
        result = np.zeros(x.length_of(i), dtype=self.sums.dtype)
        self._put(self.sums, result)
        x.store(i, result, self.power)
        if self.values is not None:
            # Exact but for what lies below 2^-149 of the largest, where numbers are huge.
            self._put(scaled(self.rest, self.power), self.values)
            x.keep(i, self.values)
