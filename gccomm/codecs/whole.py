"""What codecs of whole tensors share: scaling by powers of two, and tensors that are not finite."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from gccomm.operand import Operand

__all__ = ["exponents", "keep_old", "lose", "scaled"]

SPARE = 60  # magnitudes of 2^-60 to 2^60 leave room for sums and products in float32 as they are


def exponents(values: npt.NDArray[np.float64]) -> list[int]:
    """Return the power of two to divide by, so that numbers as large as these come near 1; 0 where they are
    neither huge nor tiny.
    """
    found = np.frexp(np.where(np.isfinite(values), values, 0))[1]
    return [int(e) if abs(e) > SPARE else 0 for e in found]


def scaled(values: npt.NDArray[Any], exponent: int) -> npt.NDArray[Any]:
    """Return values times 2^exponent, the same array where that is 1."""
    if exponent == 0:
        return values
    with np.errstate(over="ignore", under="ignore"):
        product: npt.NDArray[Any] = np.ldexp(values, exponent)
    return product


def lose(x: Operand, i: int) -> None:
    """Make segment ``i``'s result NaN and keep its residual: some rank holds inf or NaN."""
    size = int(x.lengths[x.bounds[i] : x.bounds[i + 1]].sum())
    x.store(i, np.full(size, np.nan, dtype=np.float32))
    keep_old(x, i)


def keep_old(x: Operand, i: int) -> None:
    """Keep segment ``i``'s residual as it is."""
    if x.feedback:
        old = x.kept(i)
        size = int(x.lengths[x.bounds[i] : x.bounds[i + 1]].sum())
        x.keep(i, np.zeros(size, dtype=np.float64 if x.float64 else np.float32) if old is None else old)
