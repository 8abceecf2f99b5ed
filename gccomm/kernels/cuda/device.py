"""The functions of :mod:`gccomm.kernels` on blocks, done by a device.

Addresses of tensors, in the table of segments, are the device's.  All other arrays (words, scales, check
words, ...) may lie in its memory, where they stay, or in the host's: then they are copied, and the call waits
for what it has to bring back.  The table itself is always the host's, and so is a grid.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from gccomm.kernels.table import SEGMENT

__all__ = ["DeviceKernels", "Launcher", "host_bytes"]

WARPS, WARP = 4, 32  # of a thread block, and its threads
BLOCK, PART = 1024, 64  # coordinates of a block, and of the smallest part that is rotated
_LARGEST_LIMIT = 32767 * 65536
_WIDTHS = (2, 3, 4, 5, 6, 8, 10, 16, 32)
_DOUBLE = 1  # code of float64
_ITEM_BYTES = dict(enumerate((4, 8, 2, 2)))  # of the float dtypes
Table = npt.NDArray[np.void]
Counts = npt.NDArray[np.int64]
WordCount = Callable[[Table, Any], Any]


class Launcher(ABC):
    """What a device does for :class:`DeviceKernels`, in the order of the calls.

    Attributes
    ----------
    counter : int
        Address of what counts the launches of the graph that is captured; 0: none is.
    """

    counter: int = 0

    @abstractmethod
    def owns(self, address: int) -> bool:
        """Return whether kernels can use this address."""

    @abstractmethod
    def take(self, nbytes: int, *, zero: bool = False) -> int:
        """Return device memory, 16-byte aligned, valid until :meth:`finish`."""

    @abstractmethod
    def upload(self, to: int, source: npt.NDArray[np.uint8]) -> None:
        """Copy a host array, which may change afterwards, into device memory."""

    @abstractmethod
    def download(self, to: npt.NDArray[np.uint8], source: int) -> None:
        """Copy device memory into a host array, which holds it after :meth:`finish`."""

    @abstractmethod
    def clear(self, address: int, nbytes: int) -> None:
        """Fill device memory with zeros."""

    @abstractmethod
    def launch(self, name: str, blocks: int, args: list[np.generic]) -> None:
        """Start a kernel that has `blocks` blocks of coordinates to do."""

    @abstractmethod
    def finish(self, *, wait: bool) -> None:
        """End a call: give memory back; with `wait`, when all of it is done."""


def renew(launcher: Launcher, table: int, count: int, counter: int, tick: int) -> None:
    """Have the device count on by `tick`, or make a table's keys those of the launch that it has counted."""
    args = np.uint64(table), np.int64(count), np.uint64(counter), np.uint32(tick)
    launcher.launch("gccomm_renew", 1, list(args))


class _Call:
    """One call of a kernel: arguments of the host's are copied there and back."""

    def __init__(self, launcher: Launcher, table: int, count: int) -> None:
        self.launcher = launcher
        self.count = count
        self.table = host_bytes(table, count * SEGMENT.itemsize).view(SEGMENT)
        self.back: list[tuple[npt.NDArray[np.uint8], int]] = []

    def read(self, address: int, nbytes: int) -> np.uint64:
        """Return the device's address of an input, or null."""
        if address == 0 or nbytes == 0 or self.launcher.owns(address):
            return np.uint64(address)
        there = self.launcher.take(nbytes)
        self.launcher.upload(there, host_bytes(address, nbytes))
        return np.uint64(there)

    def write(self, address: int, nbytes: int, *, zero: bool = False) -> np.uint64:
        """Return the device's address of an output, or null; of zeros, if asked."""
        if address == 0 or nbytes == 0:
            return np.uint64(address)
        if self.launcher.owns(address):
            if zero:
                self.launcher.clear(address, nbytes)
            return np.uint64(address)
        there = self.launcher.take(nbytes, zero=zero)
        self.back.append((host_bytes(address, nbytes), there))
        return np.uint64(there)

    def run(self, name: str, lo: int, hi: int, *args: np.generic) -> None:
        """Launch a kernel on blocks lo to hi, and end the call."""
        wait = bool(self.back)
        try:
            if hi > lo and self.count:
                table = self.launcher.take(self.table.nbytes)
                self.launcher.upload(table, self.table.view(np.uint8))
                if self.launcher.counter:
                    renew(self.launcher, table, self.count, self.launcher.counter, 0)
                head = np.uint64(table), np.int64(self.count), np.int64(lo), np.int64(hi)
                self.launcher.launch(name, hi - lo, [*head, *args])
            for to, source in self.back:
                self.launcher.download(to, source)
        finally:
            self.launcher.finish(wait=wait)


def host_bytes(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Return memory of the host at an address."""
    if nbytes == 0:
        return np.empty(0, np.uint8)
    found: npt.NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
    return found


def _words(table: Table, lo: int, hi: int, count: WordCount) -> int:
    """Return how many words blocks lo to hi have."""
    first, end = (_before(table, block, count) for block in (lo, hi))
    return int((end - first).sum())


def _before(table: Table, block: int, count: WordCount) -> Counts:
    """Return for each segment the words of its tensor's blocks before `block` of the batch."""
    per_row = np.maximum(-(-table["row"] // BLOCK), 1)
    numbers = table["block0"] + np.clip(block - table["base"], 0, table["nblocks"])
    rows, within = numbers // per_row, numbers % per_row
    full, last = count(table, BLOCK), count(table, table["row"] - (per_row - 1) * BLOCK)
    before: Counts = rows * ((per_row - 1) * full + last) + within * full
    return before


def _lane_words(width: int, rotations: int) -> WordCount:
    lanes, part = 32 // width, PART if rotations else 1
    return lambda _table, length: -(-(-(-length // part) * part) // lanes)


def _integer_words(table: Table, length: Any) -> Any:
    digits, width = table["digits"].astype(np.int64), table["width"].astype(np.int64)
    lanes = 32 // np.maximum(width, 1)
    return np.where(digits > 0, digits * length, np.where(width > 0, -(-length // lanes), 0))


def _require(good: bool, what: str) -> None:
    if not good:
        raise ValueError(what)


def _check_lanes(width: int, limit: int, rotations: int) -> None:
    _require(width in _WIDTHS, f"no such lane width: {width}; there are: {', '.join(map(str, _WIDTHS))}")
    _require(1 <= limit <= _LARGEST_LIMIT, f"limit {limit} is outside 1 ... 32767 * 65536")
    _require(0 <= rotations <= 2, f"rotations must be 0, 1 or 2, not {rotations}")


class DeviceKernels:
    """The functions of :mod:`gccomm.kernels` on blocks of tensors that lie in a device's memory.

    Arguments, results and errors are those of the functions of the same name there; ``stream`` has no effect.
    :meth:`chunk_take` and :meth:`chunk_put` do what NumPy does for tensors of the host.

    Parameters
    ----------
    launcher : Launcher
        The device.
    """

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher

    def _call(self, table: int, nseg: int) -> _Call:
        return _Call(self.launcher, table, nseg)

    def maxima(
        self,
        table: int,
        nseg: int,
        lo: int,
        hi: int,
        out: int,
        energy: int = 0,
        rotations: int = 0,
        kept: int = 0,
    ) -> bool:
        """Write scale words, and energies.  Nothing is left at `kept`, and the result is False: rotating anew
        takes a device less time than to write and read what it rotated.
        """
        _require(0 <= rotations <= 2, f"rotations must be 0, 1 or 2, not {rotations}")
        _require(kept == 0 or rotations != 0, "only rotated blocks are kept")
        call, nbytes = self._call(table, nseg), 4 * (hi - lo)
        where = call.write(out, nbytes), call.write(energy, nbytes)
        call.run("gccomm_maxima", lo, hi, *where, np.int32(rotations))
        return False

    def encode(
        self,
        table: int,
        nseg: int,
        lo: int,
        hi: int,
        scales: int,
        words: int,
        word_base: int,
        width: int,
        limit: int,
        shift: int,
        check: int = 0,
        clamp: int = 0,
        ratios: int = 0,
        rotations: int = 0,
        maxima: int = 0,
        subtract: bool = False,
        grid: int = 0,
        gains: int = 0,
    ) -> None:
        """Round and pack."""
        _check_lanes(width, limit if ratios == 0 else 1, rotations)
        _require(clamp != 0 or ratios == 0 or grid != 0, "with ratios a clamp or a grid is needed")
        _require(ratios != 0 or grid == 0, "a grid needs ratios")
        _require(0 <= clamp <= _LARGEST_LIMIT, f"clamp {clamp} is outside 1 ... 32767 * 65536")
        steps = int(host_bytes(grid, 4).view(np.int32)[0]) if grid else 1
        _require(1 <= steps <= 1023, f"a grid of {steps} steps; there may be 1 to 1023")
        call, each = self._call(table, nseg), 4 * (hi - lo)
        count = _words(call.table, lo, hi, _lane_words(width, rotations))
        call.run(
            "gccomm_encode", lo, hi,
            _entry(call, scales, lo, each), call.write(words, 4 * count), np.int64(word_base),
            np.int32(width), np.int32(limit if ratios == 0 else 1), np.uint32(shift),
            call.write(check, 2 * each), np.int32(clamp), _entry(call, ratios, lo, each),
            np.int32(rotations), call.write(maxima, each), np.int32(subtract),
            call.read(grid, 4 * (1 + 2 * steps)), _entry(call, gains, lo, each),
        )  # fmt: skip

    def decode(
        self,
        table: int,
        nseg: int,
        lo: int,
        hi: int,
        scales: int,
        words: int,
        word_base: int,
        width: int,
        limit: int,
        n: int,
        subtract: bool,
        mean: bool,
        stream: bool,
        check: int = 0,
        energy: int = 0,
        ratios: int = 0,
        rotations: int = 0,
        offset: int = 0,
        dithers: int = 0,
    ) -> None:
        """Turn summed lanes into results."""
        del stream
        _check_lanes(width, limit if ratios == 0 else 1, rotations)
        _require(1 <= n < 2**31, f"n = {n} is outside 1 ... 2^31 - 1")
        call, each = self._call(table, nseg), 4 * (hi - lo)
        count = _words(call.table, lo, hi, _lane_words(width, rotations))
        call.run(
            "gccomm_decode", lo, hi,
            _entry(call, scales, lo, each), call.read(words, 4 * count), np.int64(word_base),
            np.int32(width), np.int32(limit if ratios == 0 else 1), np.int64(n), np.int32(subtract),
            np.int32(mean), call.write(check, 2 * each), call.write(energy, each),
            _entry(call, ratios, lo, each), np.int32(rotations), np.int32(offset), np.int64(dithers or n),
        )  # fmt: skip

    def exact_encode(
        self, table: int, nseg: int, lo: int, hi: int, scales: int, words: int, word_base: int, n: int
    ) -> None:
        """Write two words a coordinate."""
        _require(1 <= n <= 2**29, f"n = {n} is outside 1 ... 2^29")
        call = self._call(table, nseg)
        count = _words(call.table, lo, hi, lambda _, length: 2 * length)
        where = _entry(call, scales, lo, 4 * (hi - lo)), call.write(words, 4 * count)
        call.run("gccomm_exact_encode", lo, hi, *where, np.int64(word_base), np.int64(n))

    def exact_decode(
        self,
        table: int,
        nseg: int,
        lo: int,
        hi: int,
        scales: int,
        words: int,
        word_base: int,
        n: int,
        mean: bool,
    ) -> None:
        """Turn summed pairs of words into results."""
        _require(1 <= n <= 2**29, f"n = {n} is outside 1 ... 2^29")
        call = self._call(table, nseg)
        count = _words(call.table, lo, hi, lambda _, length: 2 * length)
        where = _entry(call, scales, lo, 4 * (hi - lo)), call.read(words, 4 * count)
        call.run("gccomm_exact_decode", lo, hi, *where, np.int64(word_base), np.int64(n), np.int32(mean))

    def int_range(self, table: int, nseg: int, out: int) -> None:
        """Write the range of each segment."""
        call = self._call(table, nseg)
        call.table = _placed(call.table)
        blocks = int(call.table["nblocks"].sum())
        call.run("gccomm_int_range", 0, blocks, call.write(out, 4 * nseg, zero=True))

    def int_encode(self, table: int, nseg: int, lo: int, hi: int, words: int, word_base: int) -> None:
        """Write integers into lanes or digits."""
        call = self._call(table, nseg)
        where = call.write(words, 4 * _words(call.table, lo, hi, _integer_words))
        call.run("gccomm_int_encode", lo, hi, where, np.int64(word_base))

    def int_decode(self, table: int, nseg: int, lo: int, hi: int, words: int, word_base: int, n: int) -> int:
        """Turn summed words into integers; return how many sums do not fit."""
        _require(1 <= n < 2**31, f"n = {n} is outside 1 ... 2^31 - 1")
        call, lost = self._call(table, nseg), np.zeros(1, np.uint32)
        where = call.read(words, 4 * _words(call.table, lo, hi, _integer_words))
        count = call.write(lost.ctypes.data, 4, zero=True)
        call.run("gccomm_int_decode", lo, hi, where, np.int64(word_base), count)
        return int(lost[0])

    def float_encode(self, table: int, nseg: int, lo: int, hi: int, buffer: int, wire: int) -> None:
        """Convert to floats of the wire."""
        call, base, nbytes = self._floats(table, nseg, lo, hi, wire)
        call.run("gccomm_float_encode", lo, hi, call.write(buffer, nbytes), base, np.int32(wire))

    def float_decode(
        self,
        table: int,
        nseg: int,
        lo: int,
        hi: int,
        buffer: int,
        wire: int,
        n: int,
        mean: bool,
        stream: bool,
    ) -> None:
        """Convert floats of the wire back."""
        del stream
        _require(1 <= n < 2**31, f"n = {n} is outside 1 ... 2^31 - 1")
        call, base, nbytes = self._floats(table, nseg, lo, hi, wire)
        args = base, np.int32(wire), np.int64(n), np.int32(mean)
        call.run("gccomm_float_decode", lo, hi, call.read(buffer, nbytes), *args)

    def renew(self, table: int, nseg: int, counter: int, tick: int) -> None:
        """Count a launch of a graph (`tick` = 1), or change the keys of a table, on the device, by the count:
        so that launches differ in their noise, and ranks do not.
        """
        renew(self.launcher, table, nseg, counter, tick)

    def guard(
        self, got: int, expected: int, count: int, flags: int, bit: int, spoilt: int, halves: int
    ) -> None:
        """Compare words on the device; where they differ, or the flags (of the host, at an address that the
        device can use) say that something is wrong, note it there and write NaNs, in 16-bit halves.
        """
        args = (
            np.uint64(got), np.uint64(expected), np.int32(count), np.uint64(flags), np.uint32(bit),
            np.uint64(spoilt), np.int64(halves),
        )  # fmt: skip
        self.launcher.launch("gccomm_guard", max(1, -(-halves // (2 * BLOCK))), list(args))

    def nonfinite(self, table: int, nseg: int, lo: int, hi: int) -> int:
        """Return 1 if any input (plus residual) is inf or NaN, else 0."""
        call, flag = self._call(table, nseg), np.zeros(1, np.uint32)
        call.run("gccomm_nonfinite", lo, hi, call.write(flag.ctypes.data, 4, zero=True))
        return int(flag[0])

    def chunk_energies(self, table: int, size: int, power: int, out: int) -> None:
        """Write energies of chunks."""
        call, count = self._chunks(table, size)
        where = call.write(out, 8 * count)
        call.run("gccomm_chunk_energies", 0, -(-count // WARPS), np.int32(size), np.int32(power), where)

    def chunk_take(self, table: int, size: int, power: int, chosen: int, count: int, out: int) -> None:
        """Write the coordinates of chosen chunks of the table's one tensor, times 2**power, to `out`.

        Parameters
        ----------
        table, size, power, out
            As of `chunk_energies`; `out` has the dtype in which coordinates are computed, float32 or float64.
        chosen : int
            Address of the numbers of the chunks (int64), ascending.
        count : int
            How many they are.
        """
        call, _ = self._chunks(table, size)
        tensor, numbers = call.table[0], host_bytes(chosen, 8 * count).view(np.int64)
        last = int(min(size, tensor["size"] - numbers[-1] * size)) if count else 0
        taken = (count - 1) * size + last if count else 0
        where = call.read(chosen, 8 * count), np.int64(count), call.write(out, _real_bytes(tensor) * taken)
        head = np.int32(size), np.int32(power)
        call.run("gccomm_chunk_take", 0, -(-taken // (WARPS * WARP)), *head, *where)

    def chunk_put(
        self, table: int, size: int, power: int, places: int, sums: int, rest: int, count: int, n: int
    ) -> None:
        """Write result and residual of a tensor: 0 and what was not sent outside of the chosen chunks, in
        them the sums over `n`, and `rest`, times 2**power.

        Parameters
        ----------
        table : int
            Address of two segments of the tensor: one to read it by, one to write result and residual by.
        size, power
            As of `chunk_energies`.
        places : int
            Address of one int32 a chunk: its place among the chosen ones, or -1.
        sums, rest : int
            Addresses of what :meth:`chunk_take` wrote, summed, and of what rounding has left of it; `rest`
            only where there is a residual.
        count : int
            How many numbers these have.
        n : int
            What sums are divided by.
        """
        call, chunks = self._chunks(table, size, 2)
        nbytes, blocks = _real_bytes(call.table[0]) * count, -(-int(call.table[0]["size"]) // (WARPS * WARP))
        where = call.read(places, 4 * chunks), call.read(sums, nbytes), call.read(rest, nbytes)
        call.run("gccomm_chunk_put", 0, blocks, np.int32(size), np.int32(power), *where, np.int64(n))

    def _chunks(self, table: int, size: int, segments: int = 1) -> tuple[_Call, int]:
        """Return a call on one tensor, and how many chunks that has."""
        _require(size >= 1, f"chunks have at least one coordinate, not {size}")
        call = self._call(table, segments)
        return call, -(-int(call.table[0]["size"]) // size)

    def _floats(self, table: int, nseg: int, lo: int, hi: int, wire: int) -> tuple[_Call, np.int64, int]:
        """Return a call whose table counts coordinates, where those of block lo begin, and bytes."""
        _require(wire in _ITEM_BYTES, f"wire must be the code of a float dtype, not {wire}")
        call = self._call(table, nseg)
        call.table = _counted(call.table)
        base = _words(call.table, 0, lo, _coordinates)
        return call, np.int64(base), _ITEM_BYTES[wire] * _words(call.table, lo, hi, _coordinates)


def _real_bytes(segment: np.void) -> int:
    """Return the bytes of a number in the dtype that a tensor is computed in."""
    return 8 if segment["dtype"] == _DOUBLE else 4


def _coordinates(_: Table, length: Any) -> Any:
    return length


def _counted(table: Table) -> Table:
    """Return the table with words counted as coordinates, from the batch's first on."""
    counted = table.copy()
    end = int((table["base"] + table["nblocks"]).max(initial=0))
    sizes = _before(table, end, _coordinates) - _before(table, 0, _coordinates)
    counted["word0"] = np.cumsum(sizes) - sizes
    return counted


def _placed(table: Table) -> Table:
    """Return the table with its segments' blocks one behind the other."""
    placed = table.copy()
    placed["base"] = np.cumsum(table["nblocks"]) - table["nblocks"]
    return placed


def _entry(call: _Call, address: int, lo: int, nbytes: int) -> np.uint64:
    """Return where the entry of block lo lies, of an array with one of 4 bytes a block of the batch."""
    return call.read(address + 4 * lo if address else 0, nbytes)
