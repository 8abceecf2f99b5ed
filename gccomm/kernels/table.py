"""The table of segments that describes a batch of tensor blocks to the native kernels."""

from __future__ import annotations

import numpy as np

__all__ = ["CALL", "DTYPES", "DTYPE_CODES", "EXCHANGE", "JOININGS", "LANES", "LEARNT", "SEGMENT"]

DTYPES = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
)
"""Names of the dtypes that the kernels know, in the order of their codes."""

DTYPE_CODES = {name: code for code, name in enumerate(DTYPES)}
"""Code of each dtype in the ``dtype`` field of a segment."""

JOININGS = {
    name: code for code, name in enumerate(("words", "maximum", "float32", "float64", "bfloat16", "float16"))
}
"""Code of each way to join the arrays of ranks: sums of words, their maxima, sums of floats."""

SEGMENT = np.dtype(
    {
        "names": [
            "src",
            "dst",
            "res_in",
            "res_out",
            "size",
            "row",
            "block0",
            "nblocks",
            "base",
            "word0",
            "key0",
            "key1",
            "sign0",
            "sign1",
            "dtype",
            "width",
            "digits",
        ],
        "formats": ["<u8"] * 4 + ["<i8"] * 6 + ["<u4"] * 4 + ["u1"] * 3,
        "offsets": [*range(0, 80, 8), 80, 84, 88, 92, 96, 97, 98],
        "itemsize": 104,
    }
)
"""One run of blocks of a tensor; a 1-D C-contiguous array of these is a batch.

Fields
------
src, dst, res_in, res_out
    Addresses of the tensor's first element: input, result, old and new residual. 0: absent (an absent input
    counts as zeros).
size, row
    Coordinates of the whole tensor and of one row; rows are cut into blocks of 1024, the last one short.
block0, nblocks
    Number of the first block in the tensor, and how many blocks there are.
base, word0
    Number of the first block in the batch, and place of its words among those of the batch.
key0, key1
    Step key of the tensor, from :func:`gccomm.noise.step_key`: that of its rounding noise, which a rank may
    have of its own.
sign0, sign1
    The step key that all ranks share, for the signs of rotations.
dtype
    One of :data:`DTYPE_CODES`.
width, digits
    Integers only: lane width in bits, or number of 16-bit digits (0: lanes).
"""

EXCHANGE = np.dtype(
    [(name, "<u8") for name in ("slots", "up", "down", "own")]
    + [(name, "<i8") for name in ("slot_bytes", "turns", "ranks", "rank", "spins")]
    + [("times", "<f8", (6,)), ("samples", "<i8", (3,)), ("forced", "<i8")]
    + [(name, "<i8") for name in ("posted", "finished", "event")]
    + [("encode_s", "<f8"), ("decode_s", "<f8")]
    + [(name, "<u4") for name in ("number", "kept", "apart", "in_turns")]
)
"""Memory that ranks share, and how far an exchange through it has come; one record.

Fields
------
slots, up, down
    Addresses of tables of addresses: of all ranks' slots, shape (turns, ranks), and of their flags, each a
    uint32: up to which message the rank has posted, and up to which it has finished.
own
    Address of memory of this rank alone, of the size of three slots.
slot_bytes, turns, ranks, rank
    Size of a slot, slots of each rank, number of ranks, and this one.
spins
    Looks at a flag before a call returns to be called again.
times, samples
    0 at first; how long it takes to write slots through the caches and past them.
forced
    0: slots are written the faster way; 1: through the caches, 2: past them, both by a copy.
posted, finished, event, kept, apart, in_turns
    0 at first; how many messages this rank has posted and finished, and what comes next.
encode_s, decode_s
    Seconds spent on that: added to.
number
    Of the last message before: message k has number ``number`` + k + 1, mod 2^32, and slot number mod turns.
"""

LEARNT = np.dtype(
    [(name, "<f8") for name in ("energy", "noise", "parts")] + [("exponent", "<i4"), ("valid", "<i4")]
)
"""What the sum of one segment says about its energies: see :class:`gccomm.codecs.headroom.Learnt`."""

LANES = np.dtype(
    [(name, "<u8") for name in ("table", "kept_table", "kept", "places", "words", "scales", "maxima")]
    + [(name, "<i8") for name in ("segments", "blocks", "chunk")]
    + [("width", "<i4"), ("limit", "<i4"), ("shift", "<u4"), ("tag", "<u4")]
    + [(name, "u1") for name in ("rotations", "agree", "subtract", "mean", "stream")]
    + [("unused", "V3")]
)
"""Blocks whose lanes are to be summed; one record.

Fields
------
table, segments, blocks
    The batch: address of its segments, their number, and that of the blocks.
kept_table, kept, places
    Rotated float32 blocks may be kept between their maxima and their lanes: a table of segments that lie one
    behind the other from address 0 on, address of room for two chunks, and int64 coordinates before each
    block, shape (blocks + 1,). 0: blocks are rotated again.
words
    Address of the words before each block, int64, shape (blocks + 1,).
scales, maxima
    Addresses of uint32, shape (blocks,): agreed scale words, written where ``agree`` is 1; 0 or where each
    block's own one goes.
chunk
    Blocks that are reduced at once.
width, limit, shift, rotations, subtract, mean, stream
    As of ``encode`` and ``decode``.
tag
    Of the first message, equal on all ranks.
agree
    Whether maxima are agreed first.
"""

CALL = np.dtype(
    [(name, "<u8") for name in ("header", "agreed", "table", "twin", "lanes", "sums", "places")]
    + [(name, "<i8") for name in ("header_words", "words", "compared", "values", "step_at")]
    + [(name, "<i8") for name in ("blocks", "count", "item", "chunk", "n")]
    + [("key0", "<u4"), ("key1", "<u4"), ("tag", "<u4"), ("phase", "<i4"), ("kind", "<i4"), ("wire", "<i4")]
    + [("mean", "u1"), ("unused", "V7")]
)
"""A call on one tensor whose steps are known: agreement on its header, then the sum; one record.

Fields
------
header, header_words
    Address of this rank's header, uint32; ``begin_call`` changes the step in it and the word on links.
values, step_at
    Values in the header, in pairs with their complements from its start, and the place of the step's.
agreed, words
    Address of the first message, uint32, which is the header, and zeros.
compared
    Words of the header that are equal on all ranks which make the same call; the word on links comes next.
table, twin, blocks
    Addresses of the tensor's segment and of another one that has the same keys, or 0; blocks.
key0, key1
    Key of the tensor, from :func:`gccomm.noise.tensor_key`.
lanes
    Address of a :data:`LANES` record, or 0: floats are summed.
sums, places, wire
    Address of floats of the dtype that travels, of the number of them before each block, int64, shape
    (blocks + 1,), and the dtype's code; 0: the tensor's own travel.
count, item, kind, chunk
    Of the floats: their number, bytes of each, one of :data:`JOININGS`, and how many are reduced at once.
n, mean
    As of ``float_decode``.
tag, phase
    Written by ``begin_call``: what tags of sums are made of; and by ``exchange_call``.

Where ranks swap the tensor (``swap_pack``, ``swap_finish``), ``words``, ``chunk``, ``twin``, ``places``,
``tag`` and ``phase`` do not count, nor do tag and kept blocks of the lanes.
"""
