"""What a codec computes on: the blocks of one or more tensors in a piece, through one native call each.

An operand hides where the coordinates lie and of which dtype they are. Its kernels read each tensor where it
lies and write each result where it belongs.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gccomm import kernels
from gccomm.batch import CUT_BLOCKS, Batch, Sample, segment_table
from gccomm.kernels.table import DTYPE_CODES
from gccomm.layout import BLOCK, MIN_PART, Geometry, LeafSpec, Range
from gccomm.noise import private_keys
from gccomm.sketch import Estimate
from gccomm.steps import Buffer, Context, Words

if TYPE_CHECKING:
    from gccomm.codecs.base import Codec

__all__ = ["CUT_BLOCKS", "Operand", "Sample", "segment_table"]

INFINITY_32, INFINITY_64 = 0x7F800000, 0x7FF00000
NAN_32, NAN_64, LARGEST_64 = 0x7FC00000, 0x7FF80000, 0x7FEFFFFF
_LOW = 0xFFFFFFFF


class Operand(Batch):
    """Blocks of tensors that share codec and op, with the kernels that lane codecs compute by.

    Each kernel reads every tensor where it lies and writes every result where it belongs.
    """

    @classmethod
    def of_arrays(
        cls,
        codec: Codec,
        arrays: Sequence[Buffer],
        results: Sequence[Buffer],
        keys: npt.NDArray[np.uint32],
        *,
        mean: bool = False,
        rank: int | None = None,
    ) -> Operand:
        """Return an operand over scratch arrays.

        Parameters
        ----------
        codec : Codec
            Of which ``block_words`` and ``weight`` are used.
        arrays, results : sequence of 1-D arrays
            float32, or all float64.
        keys : array of uint32, shape (arrays, 2)
            Step keys.
        mean : bool
            Whether decoding divides by n.
        rank : int, optional
            Make the noise this rank's own.
        """
        specs = [LeafSpec("", str(a.dtype), a.shape, a.shape, codec, mean) for a in arrays]
        segments = [Range(i, 0, Geometry.of(a.shape).blocks) for i, a in enumerate(arrays)]
        table = segment_table(segments, specs)
        table["src"] = [kernels.address(a) for a in arrays]
        table["dst"] = [kernels.address(a) for a in results]
        own = keys if rank is None else private_keys(keys, rank)
        table["key0"], table["key1"] = own[:, 0], own[:, 1]
        table["sign0"], table["sign1"] = keys[:, 0], keys[:, 1]
        made = cls(codec, specs, segments, table)
        made.keys, made.alive = keys, (list(arrays), list(results))
        return made

    # Scales

    def maxima(
        self,
        out: Words,
        energy: Words | None = None,
        rotations: int = 0,
        lo: int = 0,
        hi: int | None = None,
    ) -> None:
        """Write the maximum of each block as a scale word; of the rotated block, with its energy, if asked.

        The energy is the sum of rint(|y| 1024 / M)^2, M the block's own maximum.
        """
        self._maxima(lo, self.blocks if hi is None else hi, out, energy, rotations)

    def _maxima(
        self,
        lo: int,
        hi: int,
        out: Words,
        energy: Words | None,
        rotations: int,
        kept: tuple[int, npt.NDArray[np.int64]] | None = None,
    ) -> bool:
        """Do that, and keep rotated blocks from an address on, in places; return whether they are kept."""
        address, whole = kernels.address, True
        scales, energies = address(out), 0 if energy is None else address(energy)
        for low, high in self.portions(lo, hi):
            at = scales + 4 * (low - lo), energies and energies + 4 * (low - lo)
            where: tuple[int, ...] = ()
            if kept is not None:
                first, places = kept
                where = first + 4 * int(places[low] - places[lo]), address(places)
            whole &= bool(self.kernels.maxima(self.source, self.count, low, high, *at, rotations, *where))
        return whole

    def rotate(self, out: Words, energy: Words | None, rotations: int) -> Operand:
        """Do what :meth:`maxima` does, and return the operand whose :meth:`encode` gives the words of rotated
        blocks in the least time: with rotations=0 if it is another one, over the rotated blocks.
        """
        if self.float64 or self.feedback or not self.on_host:
            self.maxima(out, energy, rotations)
            return self
        if self.rotated is None:
            self.rotated = self._twin(self.codec.carried(self.lengths))
        kept = kernels.pool_empty(4 * int(self.rotated[2][-1]))
        places = self.rotated[2]  # coordinates before each block
        if not self._maxima(0, self.blocks, out, energy, rotations, (kernels.address(kept), places)):
            return self
        made, _ = self.rotated_blocks(kernels.address(kept))
        made.alive = kept
        return made

    def rotated_blocks(self, address: int = 0) -> tuple[Operand, npt.NDArray[np.int64]]:
        """Return an operand with the same noise over rotated blocks in float32, which lie one behind the
        other from an address on, and the coordinates before each of them, shape (blocks + 1,).
        """
        if self.rotated is None:
            self.rotated = self._twin(self.codec.carried(self.lengths))
        twin: tuple[Operand, npt.NDArray[np.uint64], npt.NDArray[np.int64]] = self.rotated
        made, offsets, places = twin
        table = made.table
        fixed = table["size"].copy(), table["row"].copy()
        table[:] = self.table
        table["size"], table["row"] = fixed
        table["src"] = offsets + np.uint64(address)
        table["dtype"] = DTYPE_CODES["float32"]
        table["res_in"] = table["res_out"] = 0
        made.keys, made.meanwhile = self.keys, self.meanwhile
        return made, places

    def _twin(
        self, lengths: npt.NDArray[np.int64]
    ) -> tuple[Operand, npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """Return what of that does not change from call to call: all but addresses and noise."""
        made = copy(self)
        made.table, made.lengths, made.direct = self.table.copy(), lengths, None
        made.address = kernels.address(made.table)
        made.read_from(made.table)
        rotated = [geometry.padded(MIN_PART) for geometry in self.geometries]
        places = np.cumsum([0, *lengths], dtype=np.int64)
        before = [g.offset(s.start) for g, s in zip(rotated, self.segments, strict=True)]
        made.table["size"], made.table["row"] = [g.size for g in rotated], [g.row for g in rotated]
        return made, (4 * (places[self.bounds[:-1]] - np.array(before))).astype(np.uint64), places

    def scale_values(self, scales: Words) -> npt.NDArray[np.float64]:
        """Return scale words as numbers."""
        if self.float64:
            return (scales.astype(np.uint64) << np.uint64(32)).view(np.float64)
        return scales.view(np.float32).astype(np.float64)

    def scale_words(self, values: npt.NDArray[np.float64]) -> Words:
        """Return non-negative numbers as scale words, rounded up; finite ones stay finite."""
        if self.float64:
            bits = values.view(np.uint64)
            up = (bits >> np.uint64(32)) + ((bits & np.uint64(_LOW)) != 0)
            words: Words = np.minimum(up, np.uint64(LARGEST_64)).astype(np.uint32)
            special, infinite, largest = np.uint32(NAN_64), np.uint32(INFINITY_64), words
        else:
            with np.errstate(over="ignore", under="ignore"):
                near = values.astype(np.float32)
            words = near.view(np.uint32) + (near < values)
            special, infinite = np.uint32(NAN_32), np.uint32(INFINITY_32)
            largest = np.minimum(words, np.uint32(INFINITY_32 - 1))
        words = np.where(np.isfinite(values), largest, np.where(np.isnan(values), special, infinite))
        return words.astype(np.uint32)

    def nonfinite_scales(self, scales: Words) -> npt.NDArray[np.bool_]:
        """Tell which scale words stand for inf or NaN."""
        return scales >= np.uint32(INFINITY_64 if self.float64 else INFINITY_32)

    # Lane codecs

    def base(self, lo: int, width: int) -> int:
        """Return where the words of block ``lo`` would lie in lanes of ``width`` bits."""
        i = int(np.searchsorted(self.bounds, lo, "right")) - 1
        before = self.codec.carried(self.lengths[self.bounds[i] : lo])
        return int(self.table["word0"][i]) + int((-(-before // (32 // width))).sum())

    def encode(
        self,
        lo: int,
        hi: int,
        out: Words,
        scales: Words,
        width: int,
        limit: int,
        ctx: Context,
        *,
        clamp: int = 0,
        ratios: npt.NDArray[np.float32] | None = None,
        rotations: int = 0,
        check: Words | None = None,
        maxima: Words | None = None,
        grid: npt.NDArray[np.int32] | None = None,
        gains: npt.NDArray[np.float32] | None = None,
        subtract: bool = False,
        base: int | None = None,
    ) -> None:
        """Quantise blocks ``lo`` to ``hi`` against ``scales`` into lanes.

        ``limit`` is the fixed-point value, in 2^-16 levels, that the scale becomes; or ``ratios`` gives each
        block's step over its scale, and ``clamp`` the largest fixed-point value. ``check`` receives two words
        a block, ``maxima`` each block's own scale word (shape (hi - lo,)); ``grid`` is a table to round to,
        ``gains`` are what blocks are multiplied by before they are clamped;
        with ``subtract`` residuals leave out the rank's share of the dither, as :meth:`decode` does; ``base``
        is :meth:`base` of another lane width.
        """
        place = int(self.offsets[lo]) if base is None else base
        address = kernels.address
        factors = 0 if ratios is None else address(ratios)
        checks = 0 if check is None else address(check)
        own = 0 if maxima is None else address(maxima)
        points = 0 if grid is None else address(grid)
        gained = 0 if gains is None else address(gains)
        lanes = address(scales), address(out), place, width, limit, ctx.shift
        for low, high in self.portions(lo, hi):
            done = low - lo
            at = checks and checks + 8 * done, clamp, factors, rotations, own and own + 4 * done
            self.kernels.encode(
                self.source, self.count, low, high, *lanes, *at, subtract=subtract, grid=points, gains=gained
            )
        if self.sketch is not None and base is None and hi == self.blocks:
            self.sketch.project(scales, 65536 / limit if ratios is None else ratios, width)

    def decode(
        self,
        lo: int,
        hi: int,
        words: Words,
        scales: Words,
        width: int,
        limit: int,
        ctx: Context,
        *,
        subtract: bool = False,
        ratios: npt.NDArray[np.float32] | None = None,
        rotations: int = 0,
        check: Words | None = None,
        offset: int = 0,
        base: int | None = None,
        energy: Words | None = None,
    ) -> None:
        """Write the results of blocks ``lo`` to ``hi`` from the summed lanes; arguments as of
        :meth:`encode`. ``energy`` receives what is measured, which is kept in ``samples`` otherwise.
        """
        keeps = energy is None and (ctx.measure or self.sketch is not None)
        if keeps:
            energy = np.empty(hi - lo, dtype=np.uint32)
        place = int(self.offsets[lo]) if base is None else base
        address = kernels.address
        lanes = address(scales), address(words), place, width, limit
        how = ctx.divisor, subtract, self.mean, ctx.streams(rotations)
        checks = 0 if check is None else address(check)
        energies = 0 if energy is None else address(energy)
        factors = 0 if ratios is None else address(ratios)
        for low, high in self.portions(lo, hi):
            done = low - lo
            at = checks and checks + 8 * done, energies and energies + 4 * done
            rest = factors, rotations, offset, ctx.size
            self.kernels.decode(self.address, self.count, low, high, *lanes, *how, *at, *rest)
        if keeps:
            assert energy is not None
            steps = 65536 / limit if ratios is None else ratios[lo:hi]
            weight = BLOCK if rotations else 1  # rotated coordinates are 1 / 32 of what they stand for
            self.samples.append(Sample(lo, hi, energy, width, scales[lo:hi].copy(), steps, weight))

    def measured(
        self, samples: Sequence[Sample]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.longdouble]]:
        """Return what decodes measured: of each block the sum of the squares of its decoded coordinates, in
        steps^2, and its step squared; zeros where nothing was measured or a block is not finite.
        """
        energy, squares = np.zeros(self.blocks), np.zeros(self.blocks, dtype=np.longdouble)
        for sample in samples:
            at = slice(sample.lo, sample.hi)
            # The kernel counts squares of 2^(width + 4 - 15) levels.
            energy[at] = sample.energy * 4.0 ** (sample.width - 11)
            finite = np.where(self.nonfinite_scales(sample.scales), np.uint32(0), sample.scales)
            squares[at] = (self.scale_values(finite).astype(np.longdouble) * sample.steps) ** 2
        return energy, squares

    def measured_energy(self, samples: Sequence[Sample]) -> Estimate:
        """Return the squared norm of the sum that was decoded, where it was measured. What makes it uncertain
        is the rounding of the kernel's counts: much of it where values are small for their lanes.
        """
        energy, squares = self.measured(samples)
        weights, units = np.zeros(self.blocks), np.zeros(self.blocks)
        for sample in samples:
            at = slice(sample.lo, sample.hi)
            weights[at], units[at] = sample.weight, 4.0 ** (sample.width - 11)
        total: np.longdouble = (energy * weights * squares).sum()
        rounding: np.longdouble = (self.lengths / 12 * units * weights * squares).sum()
        return Estimate(total, rounding**2)

    # Whole tensors as NumPy arrays

    def shape(self, i: int) -> tuple[int, ...]:
        """Return the shape of segment ``i``'s tensor, complex numbers as pairs."""
        return self.specs[i].row_shape

    def _alone(self, i: int, table: Any = None, **fields: Any) -> Any:
        """Return a table of segment ``i`` alone."""
        row = (self.table if table is None else table)[i : i + 1].copy()
        row["base"] = row["word0"] = row["res_out"] = 0
        for name, value in fields.items():
            row[name] = value
        return row

    def _float_dtype(self) -> str:
        return "float64" if self.float64 else "float32"

    def load(self, i: int) -> Buffer:
        """Return a copy of segment ``i``'s coordinates plus its residual: 1-D float32, or float64."""
        return self._read(self._alone(i, self.inputs), i)

    def _read(self, row: Any, i: int) -> Buffer:
        dtype = self._float_dtype()
        values = np.empty(int(self.lengths[self.bounds[i] : self.bounds[i + 1]].sum()), dtype=dtype)
        blocks, where = self.segments[i].blocks, kernels.address(row)
        self.kernels.float_encode(where, 1, 0, blocks, kernels.address(values), DTYPE_CODES[dtype])
        return values

    def store(self, i: int, values: Buffer, power: int = 0) -> None:
        """Write the sum's values, 1-D float32 or float64, times 2^power, as segment ``i``'s result."""
        n = self.ranks if self.mean else 1
        if power:  # in float64, divided first: means of numbers near the largest are no larger
            with np.errstate(over="ignore", under="ignore"):
                values, n = np.ldexp(values.astype(np.float64) / n, power), 1
        self._write(self._alone(i), i, values, n, n > 1)

    def keep(self, i: int, rest: Buffer) -> None:
        """Set segment ``i``'s next residual, where residuals are kept."""
        residual = self.table["res_out"][i]
        if residual:
            code = DTYPE_CODES[self._float_dtype()]
            self._write(self._alone(i, dst=residual, dtype=code), i, rest, 1, False)

    def kept(self, i: int) -> Buffer | None:
        """Return a copy of segment ``i``'s residual, or None where there is none yet."""
        residual = self.table["res_in"][i]
        if not residual:
            return None
        code = DTYPE_CODES[self._float_dtype()]
        return self._read(self._alone(i, src=residual, dst=0, res_in=0, dtype=code), i)

    def left(self, i: int) -> Buffer:
        """Return a copy of segment ``i``'s next residual, as encoding left it."""
        code = DTYPE_CODES[self._float_dtype()]
        return self._read(self._alone(i, src=self.table["res_out"][i], dst=0, res_in=0, dtype=code), i)

    def _write(self, row: Any, i: int, values: Buffer, n: int, mean: bool) -> None:
        flat = np.ascontiguousarray(values).reshape(-1)
        code = DTYPE_CODES[str(flat.dtype)]
        blocks, where = self.segments[i].blocks, kernels.address(row)
        self.kernels.float_decode(where, 1, 0, blocks, kernels.address(flat), code, n, mean, False)

    # Chunks of whole tensors

    def length_of(self, i: int) -> int:
        """Return how many coordinates segment ``i`` has."""
        return int(self.lengths[self.bounds[i] : self.bounds[i + 1]].sum())

    def chunk_norms(self, i: int, size: int) -> npt.NDArray[np.float64]:
        """Return the root of the mean square of each chunk of ``size`` coordinates of segment ``i``, residual
        included, over the chunk's full length: never above the largest magnitude.
        """
        row, power = self._alone(i, self.inputs), 0
        if self.float64:  # squares of these may leave its range
            words = np.zeros(self.segments[i].blocks, dtype=np.uint32)
            where = kernels.address(row), 1, 0, len(words), kernels.address(words)
            self.kernels.maxima(*where)
            most = words.max(initial=0)
            power = 0 if self.nonfinite_scales(most) else -int(np.frexp(self.scale_values(most))[1])
        energies = np.zeros(-(-self.length_of(i) // size))
        self.kernels.chunk_energies(kernels.address(row), size, power, kernels.address(energies))
        with np.errstate(under="ignore"):
            norms: npt.NDArray[np.float64] = np.ldexp(np.sqrt(energies / size), -power)
        return norms

    def take_chunks(self, i: int, size: int, power: int, chosen: npt.NDArray[np.int64]) -> Buffer:
        """Return the coordinates of the chosen chunks of a device's segment ``i``, times 2^power."""
        short = len(chosen) > 0 and (int(chosen[-1]) + 1) * size > self.length_of(i)
        count = len(chosen) * size - ((int(chosen[-1]) + 1) * size - self.length_of(i) if short else 0)
        row, out = self._alone(i, self.inputs), np.empty(count, dtype=self._float_dtype())
        where = kernels.address(chosen), len(chosen), kernels.address(out)
        self.kernels.chunk_take(kernels.address(row), size, power, *where)
        return out

    def put_chunks(
        self, i: int, size: int, power: int, chosen: npt.NDArray[np.int64], sums: Buffer, rest: Buffer
    ) -> None:
        """Write result and residual of a device's segment ``i``: in the chosen chunks the sums, and the rest,
        times 2^power, elsewhere 0, and what was not sent.
        """
        places = np.full(-(-self.length_of(i) // size), -1, dtype=np.int32)
        places[chosen] = np.arange(len(chosen), dtype=np.int32)
        rows = np.repeat(self._alone(i, self.inputs, dst=0), 2)  # hosts' sums have a dtype of their own
        rows[1:] = self._alone(i, res_out=self.table["res_out"][i])
        table, *arrays = (kernels.address(x) for x in (rows, places, sums, rest))
        self.kernels.chunk_put(table, size, power, *arrays, len(sums), self.ranks if self.mean else 1)
