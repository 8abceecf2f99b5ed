"""The table of segments that describes a batch of tensor blocks to the native kernels."""

from __future__ import annotations

import numpy as np

__all__ = ["DTYPES", "DTYPE_CODES", "JOININGS", "SEGMENT"]

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
