"""Kernels on blocks of tensors, compiled once per instruction-set level.

Common parameters: `table` is the address of `nseg` records of :data:`gccomm.kernels.table.SEGMENT`; the
blocks ``lo <= block < hi`` of the batch are worked on; `scales` is the address of the scale words (uint32) of
the whole batch; `words` is the address of the words of block `lo`, whose offset in the batch is `word_base`;
`n` is the number of ranks. An address of 0 means absent where a default says so.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

def maxima(
    table: int,
    nseg: int,
    lo: int,
    hi: int,
    out: int,
    energy: int = 0,
    rotations: int = 0,
    kept: int = 0,
) -> bool:
    """Write the scale word of each block, that of x + residual where there is one, to ``out[block - lo]``.

    With `rotations`, 1 or 2, that of the rotated block; `energy` is the address of uint32[hi - lo] for the
    energies: sums of ``rint(|y| * 1024 / M)**2`` over the coordinates y of a block, M the largest.

    `kept` is the address of float32 for the rotated blocks, each of a length rounded up to a multiple of 64;
    not for float64 tensors. Encoding those without a rotation gives the words of the blocks themselves if
    the function returns True: then no number on the way was subnormal.

    Raises
    ------
    ValueError
        `rotations` is not 0, 1 or 2.
    """

def encode(
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
    """Round, pack into lanes of `width` bits, and leave residuals behind.

    `limit` is the fixed-point value of the scale (2**-16 levels), `clamp` the largest fixed-point value (0:
    `limit`), `shift` this rank's shift of the dither, `check` the address of uint32[hi - lo][2] for the check
    words. `ratios` is the address of float32 for all blocks of the batch, as `scales`: the level of a block
    as a multiple of its scale, 2**-40 to 2**40 (0: the block sends zeros); `limit` is then ignored, and
    `clamp` needed.
    `rotations`, 0 to 2, says how often blocks are rotated; rotated blocks have the words of a block whose
    length is the next multiple of 64. `maxima` is the address of uint32[hi - lo] for the scale words that
    the blocks have of their own. `subtract` says that decoding takes the dither off: residuals then leave out
    this rank's share of it. `grid` is the address of int32[1 + 2 g]: g, then for k = 0 ... g - 1 the
    largest grid point among 0 ... g that is at most k, then the way from there to the next one; it needs
    `ratios` and takes the place of `clamp`: values are rounded to grid points, less (g + 1) // 2; `subtract`
    then has no say.
    `gains` is the address of float32 for all blocks of the batch: what values are multiplied by before they
    are clamped and rounded; residuals know of it.

    Raises
    ------
    ValueError
        No such width or number of rotations, a limit or clamp outside 1 ... 32767 * 65536, a grid of more
        than 1023 steps or without ratios, or ratios with neither clamp nor grid.
    """

def decode(
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
    """Turn summed lanes into results.

    `subtract` takes the shared dither off, `stream` writes results past the caches, `offset` is added to
    every sum, in units of 2**-15 levels. `energy` is the address of uint32[hi - lo] for the sum of squares of
    each block, in units of 2**(width - 11) levels, mod 2**32 (0 for lanes of 32 bits). `limit`, `ratios` and
    `rotations` are those of :func:`encode`. `dithers` is the number of ranks' dithers that are in a sum, 0
    for `n`: a sum that was rounded again holds one.
    """

def hop_encode(
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
    rotations: int,
) -> None:
    """Rotate, round and pack blocks against the largest value that each has of its own.

    That scale word goes to ``scales[block - lo]``; `limit` is the fixed-point value that it becomes, `shift`
    this rank's shift of the dither, which decoding takes off; `rotations` is 1 or 2.

    Raises
    ------
    ValueError
        No such width up to 16, number of rotations or limit.
    """

def hop_fold(
    table: int,
    again: int,
    nseg: int,
    lo: int,
    hi: int,
    parts: int,
    ranks: int,
    shifts: int,
    out: int,
    word_base: int,
    lane_words: int,
    width: int,
    limit: int,
    down: int,
) -> None:
    """Add up the rotated blocks of all ranks, as :func:`hop_encode` made them, and round the sums likewise.

    `parts` is the address of the addresses (uint64) of the ranks' words, `lane_words` of lanes and then a
    scale a block; `out` is made the same way. `shifts` is the address of the ranks' shifts (uint32), `again`
    that of a table that differs from `table` in the keys of the noise: those of the sum's. A sum's scale word
    stands for ``2**-down`` of it; it is NaN where a part's is inf or NaN.

    Raises
    ------
    ValueError
        No such width up to 16 or limit, no rank, or `down` outside 0 to 30.
    """

def widen_lanes(
    table: int,
    nseg: int,
    lo: int,
    hi: int,
    parts: int,
    ranks: int,
    out: int,
    word_base: int,
    narrow: int,
    width: int,
    padded: bool,
) -> None:
    """Add up lanes of `narrow` bits, and write the sums in lanes of `width` bits.

    `parts` is the address of the addresses (uint64) of the ranks' words, `word_base` the offset of the first
    narrow word in the batch; `padded` says that blocks travel as multiples of 64 coordinates.

    Raises
    ------
    ValueError
        No such widths up to 16, or no rank.
    """

def exact_encode(
    table: int, nseg: int, lo: int, hi: int, scales: int, words: int, word_base: int, n: int
) -> None:
    """Write each coordinate as two words of fixed point; a residual, if any, goes along and becomes zero."""

def exact_decode(
    table: int, nseg: int, lo: int, hi: int, scales: int, words: int, word_base: int, n: int, mean: bool
) -> None:
    """Turn summed pairs of words into results."""

def int_range(table: int, nseg: int, out: int) -> None:
    """Write for each segment the smallest B with ``-2**B <= x < 2**B`` to ``out[segment]`` (uint32)."""

def int_encode(table: int, nseg: int, lo: int, hi: int, words: int, word_base: int) -> None:
    """Write integers into lanes or 16-bit digits, as each segment's `width` and `digits` say."""

def int_decode(table: int, nseg: int, lo: int, hi: int, words: int, word_base: int, n: int) -> int:
    """Turn summed words into integers; return how many sums their dtype cannot hold.

    Those are stored mod 2**bits. A segment without `dst` is only counted.
    """

def float_encode(table: int, nseg: int, lo: int, hi: int, buffer: int, wire: int) -> None:
    """Convert to the float dtype with code `wire`, contiguous from block `lo` on; leave residuals behind."""

def float_decode(
    table: int, nseg: int, lo: int, hi: int, buffer: int, wire: int, n: int, mean: bool, stream: bool
) -> None:
    """Convert summed wire values back, divided by `n` for a mean."""

def nonfinite(table: int, nseg: int, lo: int, hi: int) -> int:
    """Return 1 if any input (plus residual) is inf or NaN, else 0."""

def chunk_energies(table: int, size: int, power: int, out: int) -> None:
    """Write the sum of squares of each chunk of `size` coordinates of the table's one tensor, times 4**power,
    to `out` (float64).
    """

def reduce_op(name: str) -> int:
    """Return the address of a C function that adds 16-bit floats elementwise.

    Its signature is ``void f(void *in, void *inout, int *len, void *datatype)``, that of an MPI reduction;
    `name` is "bfloat16" or "float16"; sums are formed in float32 and rounded to nearest even.
    """

def pool_empty(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return an uninitialised uint8 array, shape (nbytes,), 64-byte aligned, from the pool of results.

    Its memory goes back to the pool when the last array or view on it is dropped.

    Raises
    ------
    ValueError
        `nbytes` is negative.
    MemoryError
        There is not so much memory.
    """

def pool_stats() -> dict[str, int]:
    """Return the pool's bytes: ``outstanding``, ``free``, and the ``high_water`` of those outstanding."""

def pool_trim() -> None:
    """Free all memory of the pool that is not in use."""

def address(array: npt.NDArray[Any]) -> int:
    """Return the address of the first element of any NumPy array."""

def isas() -> list[str]:
    """Return the instruction-set levels usable on this machine, the best last."""

def isa() -> str:
    """Return the level in use: the best, or what the environment variable GCCOMM_ISA says."""

def set_isa(name: str) -> None:
    """Use another level from now on, in the whole process.

    Raises
    ------
    ValueError
        This machine has no such level.
    """

def saturating_add(a: int, b: int, out: int, count: int, width: int) -> None:
    """Add `count` words of saturating lanes of `width` bits; `out` may be `a` or `b`.

    Raises
    ------
    ValueError
        No such width up to 16, or a negative count.
    """

def exponent_add(a: int, b: int, out: int, count: int, seed: int, start: int) -> None:
    """Add `count` words of the exponent format, rounded at random; `out` may be `a` or `b`.

    `seed` is the 32-bit seed of this addition, `start` the number of the first word in the whole array.

    Raises
    ------
    ValueError
        A negative count.
    """

def exponent_encode(values: int, out: int, count: int, key0: int, key1: int, start: int) -> None:
    """Round `count` float32 values at random to bytes of the exponent format, zeros to the end of a word.

    The noise of value i is the hash of number ``start + i`` under the 32-bit words `key0` and `key1`.

    Raises
    ------
    ValueError
        A negative count.
    """

def exponent_decode(words: int, out: int, count: int) -> None:
    """Write the float32 values of `count` bytes of the exponent format.

    Raises
    ------
    ValueError
        A negative count.
    """

def join_parts(parts: int, ranks: int, out: int, count: int, kind: int, stream: bool = False) -> None:
    """Join arrays of `count` elements, whose addresses are at `parts`, in their order.

    `kind` is one of :data:`gccomm.kernels.JOININGS`: sums of words mod 2^32, their maxima, sums of floats.
    16-bit floats are added in float32 and rounded once. `out` may be one of the arrays unless `stream`, which
    writes past the caches.

    Raises
    ------
    ValueError
        No such kind, no array, or a negative count.
    """

def count_intervals(own: int, scales: int, blocks: int, wide: bool, bits: int, counters: int) -> int:
    """Write a one into one of the eight counters of each block, of `bits` bits.

    `own` and `scales` are the addresses of this rank's scale words and the predicted ones; `wide` says that
    they are those of float64. Returns how many blocks lie beyond their predictions.

    Raises
    ------
    ValueError
        Counters have other bits than 4, 8, 16 or 32, or there is a negative number of blocks.
    """

def highest_intervals(counters: int, blocks: int, bits: int, ranks: int, intervals: int) -> int:
    """Write the highest counter of each block that is not zero to ``intervals[block]`` (uint32).

    Returns the highest of all, or -1 where the counters of some block do not add up to `ranks`.

    Raises
    ------
    ValueError
        As for :func:`count_intervals`.
    """

def predict_scales(scales: int, intervals: int, blocks: int, wide: bool, predicted: int) -> None:
    """Write the next prediction of each block's scale word; interval 8 stands for an agreed one.

    Raises
    ------
    ValueError
        There is a negative number of blocks.
    """

def digest(data: int, nbytes: int, seed: int) -> int:
    """Return a check sum of 64 bits, not cryptographic, that begins with `seed` (uint64).

    Raises
    ------
    ValueError
        `nbytes` is negative.
    """

def share_energies(own: int, energy: int, scales: int, blocks: int, wide: bool, ranks: int, out: int) -> None:
    """Write this rank's energies relative to the agreed maxima, one word (uint32) a block.

    `own` and `energy` are the addresses of what :func:`maxima` wrote, `scales` that of the agreed words;
    `wide` says that they are those of float64.

    Raises
    ------
    ValueError
        There is a negative number of blocks, or no rank.
    """

def project_errors(
    errors: int, wide: bool, starts: int, lengths: int, blocks: int, count: int, out: int
) -> None:
    """Write the projections, by random signs, of blocks of errors.

    `errors` is the address of float32 or (`wide`) float64 values, of which block b has ``lengths[b]`` from
    ``starts[b]`` on (int64). `blocks` names `count` blocks in ascending order (int64), the k-th time that one
    is named for the k-th signs; `out` gets a float64 each.

    Raises
    ------
    ValueError
        There is a negative number of projections.
    """

def sum_inputs(table: int, nseg: int, lo: int, hi: int, power: int, out: int) -> None:
    """Add up blocks, residuals included, with random signs, times 2^power: 1024 float64 at the address `out`.

    Raises
    ------
    ValueError
        A number is negative that must not be, or `power` is outside -2000 ... 2000.
    """

def choose_steps(
    table: int,
    nseg: int,
    blocks: int,
    scales: int,
    energies: int,
    ratios: int,
    unit: float,
    deviations: float,
    bracket: float,
    safe: float,
    least: float,
    out: int,
) -> None:
    """Write each block's step over its maximum (float32).

    `energies` is the address of the sums of all ranks' energies, 0: every step is `safe`; `ratios` that of
    float64[nseg]; the numbers are those of :class:`gccomm.codecs.headroom.Sizes`.

    Raises
    ------
    ValueError
        There is a negative number of blocks or segments.
    """

def sum_spans(check: int, starts: int, spans: int, blocks: int, out: int, expected: int = 0) -> int:
    """Add up check words, two a block, by span.

    `starts` is the address of the first block of each span (int64). The sums go to `out`, two words a span;
    with `expected`, the address of as many, ``out[span]`` becomes 1 where they differ from it, else 0.
    Returns how many spans do.

    Raises
    ------
    ValueError
        There is a negative number of blocks or spans.
    """

def learn_energies(
    table: int,
    nseg: int,
    blocks: int,
    scales: int,
    steps: int,
    energies: int,
    energy: int,
    redone: int,
    unit: float,
    noise: float,
    part: float,
    out: int,
) -> None:
    """Write what the sum of each segment says, a record of :data:`gccomm.kernels.LEARNT`.

    `steps` is the address of the steps over the maxima (float32), `energies` that of the ranks' energies (0:
    none), in units of `part`, `energy` that of what :func:`decode` measured, in units of `unit`; `noise` is
    that of a coordinate. `redone` is the address of one byte a block, or 0: 1 leaves a block out.

    Raises
    ------
    ValueError
        There is a negative number of blocks or segments.
    """

def exchange_array(
    exchange: int, send: int, recv: int, count: int, item: int, chunk: int, kind: int, stream: bool
) -> bool:
    """Reduce `count` elements of `item` bytes from `send` to `recv` over ranks that share memory, in chunks.

    `exchange` is the address of an :data:`~gccomm.kernels.EXCHANGE` record; `chunk` elements fit into a slot.
    Returns whether all is done; if not, a flag was not up after its ``spins`` looks, and the same call goes
    on.

    Raises
    ------
    ValueError
        An argument is out of range.
    """

def exchange_lanes(exchange: int, job: int) -> bool:
    """Agree on the scales of blocks and sum their lanes over ranks that share memory, chunk by chunk.

    `exchange` and `job` are the addresses of an :data:`~gccomm.kernels.EXCHANGE` and a
    :data:`~gccomm.kernels.LANES` record. Returns as :func:`exchange_array`.

    Raises
    ------
    ValueError
        A field is out of range.
    RuntimeError
        A tag was wrong.
    """

def begin_call(call: int, src: int, dst: int, step: int, slow: bool) -> None:
    """Write what is of one call alone into the :data:`~gccomm.kernels.CALL` record at `call` and what it
    names: addresses of the tensor and of its result, noise of a step, header, tag.
    """

def exchange_call(exchange: int, call: int) -> int:
    """Make a call over ranks that share memory.

    `exchange` and `call` are the addresses of an :data:`~gccomm.kernels.EXCHANGE` and a
    :data:`~gccomm.kernels.CALL` record. Returns 0 if a flag was not up after its ``spins`` looks, and the
    same call goes on; 1 if all is done; 2 if ranks differ in what they call: nothing was summed.

    Raises
    ------
    ValueError
        A field is out of range.
    RuntimeError
        A tag was wrong.
    """

def swap_bytes(call: int) -> tuple[int, int]:
    """Return the bytes of a rank's part, its tensor or the floats that travel, and of the message with it, of
    a call whose ranks swap their tensors.

    `call` is the address of a :data:`~gccomm.kernels.CALL` record, here and below. Records are checked.

    Raises
    ------
    ValueError
        A field is out of range, or the tensor is none of floats.
    """

def swap_pack(call: int, out: int) -> None:
    """Write a message, the header and this rank's part, to `out`; errors as of :func:`swap_bytes`."""

def swap_finish(call: int, messages: int, shifts: int, ranks: int, rank: int) -> int:
    """Agree on the header, and make of the parts of all ranks what messages would have made of them.

    `messages` and `shifts` are addresses of the addresses of all ranks' messages, uint64, and of the shifts
    of their dither, uint32. Returns 1, or 2 if ranks differ in what they call: nothing was summed. Errors as
    of :func:`swap_bytes`.
    """

def threads() -> int:
    """Return how many threads share the blocks of `maxima`, `encode` and `decode`: GCCOMM_NUM_THREADS."""

def raise_flag(flag: int, number: int) -> None:
    """Write `number` to the uint32 at `flag`, after all that this thread has written before."""

def await_flags(flags: int, count: int, number: int, spins: int) -> bool:
    """Return whether the `count` uint32s whose addresses are at `flags` have come to `number` (mod 2^32).

    Looks up to `spins` times at those that have not.
    """
