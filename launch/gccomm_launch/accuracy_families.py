"""Inputs of `gccomm bench --accuracy`: families of gradient-like arrays, and recordings of real gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

__all__ = ["FAMILIES", "LAYERS", "MULTIPLE", "ROW", "Family", "Recording"]

Floats: TypeAlias = npt.NDArray[np.float32]
# From ranks, step, seed and coordinates to one float32 array or tree of them a rank, always the same.
Family: TypeAlias = Callable[[int, int, int, int], list[Any]]

LAYERS = 64
SPREAD = 1.5  # standard deviation of the logarithms of magnitudes
CORRELATION = 0.5  # of two ranks
ROW = 128  # coordinates of an embedding
TOUCHED = 0.05  # share of the rows that a rank touches in a step
MULTIPLE = LAYERS * ROW  # what the number of coordinates must be a multiple of

# Streams of random numbers; a tuple (seed, stream, step, rank) starts one.
_OWN, _COMMON, _SCALES = range(3)


def gaussian(n: int, step: int, seed: int, coordinates: int) -> list[Floats]:
    """Return independent standard normal coordinates, shape (coordinates,)."""
    return [_own(seed, step, rank).standard_normal(coordinates, np.float32) for rank in range(n)]


def heavy(n: int, step: int, seed: int, coordinates: int) -> list[Floats]:
    """Return lognormal magnitudes, exp(1.5 z) with z standard normal, with random signs."""

    def draw(rng: np.random.Generator) -> Floats:
        magnitudes = np.exp(np.float32(SPREAD) * rng.standard_normal(coordinates, np.float32))
        signed: Floats = np.copysign(magnitudes, rng.random(coordinates, np.float32) - np.float32(0.5))
        return signed

    return [draw(_own(seed, step, rank)) for rank in range(n)]


def layers(n: int, step: int, seed: int, coordinates: int) -> list[Floats]:
    """Return an array of 64 equally long layers, each normal, with lognormal scales that stay over steps."""
    scales = _scales(seed, coordinates)
    return [scales * x for x in gaussian(n, step, seed, coordinates)]


def correlated(n: int, step: int, seed: int, coordinates: int) -> list[Floats]:
    """Return :func:`layers` of which any two ranks have the correlation 0.5."""
    common = _rng(seed, _COMMON, step, 0).standard_normal(coordinates, np.float32)
    common *= np.float32(np.sqrt(CORRELATION))
    rest = np.float32(np.sqrt(1 - CORRELATION))
    scales = _scales(seed, coordinates)
    return [scales * (common + rest * x) for x in gaussian(n, step, seed, coordinates)]


def embedding(n: int, step: int, seed: int, coordinates: int) -> list[Floats]:
    """Return gradients of a table, shape (coordinates / 128, 128): 5 % of the rows, each rank's own, are
    standard normal, the others zero.
    """
    rows = coordinates // ROW

    def draw(rng: np.random.Generator) -> Floats:
        table = np.zeros((rows, ROW), np.float32)
        touched = rng.choice(rows, max(1, round(TOUCHED * rows)), replace=False)
        table[touched] = rng.standard_normal((len(touched), ROW), np.float32)
        return table

    return [draw(_own(seed, step, rank)) for rank in range(n)]


FAMILIES: Mapping[str, Family] = {
    "gaussian": gaussian,
    "heavy": heavy,
    "layers": layers,
    "correlated": correlated,
    "embedding": embedding,
}


class Recording:
    """Gradients of a real training, read from a file; a :data:`Family`.

    Parameters
    ----------
    path : path
        NumPy's ``.npz``: one float32 array a parameter, shape (steps, ranks, *shape of the parameter).

    Attributes
    ----------
    name : str
        Stem of the file's name.
    steps, ranks, coordinates : int
        How many steps and ranks it holds, and coordinates of one rank.

    Raises
    ------
    ValueError
        The file is something else.
    OSError
        It cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        self._arrays = _arrays(path)
        self.steps, self.ranks = next(iter(self._arrays.values())).shape[:2]
        self.coordinates = sum(array[0, 0].size for array in self._arrays.values())

    def __call__(self, n: int, step: int, seed: int = 0, coordinates: int = 0) -> list[dict[str, Floats]]:
        """Return what the first ``n`` ranks recorded in a step; the recording sets all else."""
        del seed, coordinates
        return [{key: array[step, rank] for key, array in self._arrays.items()} for rank in range(n)]


def _arrays(path: Path) -> dict[str, Floats]:
    try:
        with path.open("rb") as stream:
            loaded = np.load(stream)
            if isinstance(loaded, np.ndarray):
                raise ValueError("it holds one array without a name")
            arrays = {key: loaded[key] for key in loaded.files}
    except (ValueError, EOFError, BadZipFile) as error:
        message = f"{path} is not a .npz file of arrays: {error}"
        raise ValueError(message) from error
    found = {key: f"{array.dtype}{list(array.shape)}" for key, array in arrays.items()}
    starts = {array.shape[:2] if array.size and array.ndim > 1 else () for array in arrays.values()}
    if len(starts) != 1 or () in starts or any(array.dtype != np.float32 for array in arrays.values()):
        message = (
            f"{path} must hold float32 arrays (steps, ranks, ...), equal in steps and ranks; got {found}"
        )
        raise ValueError(message)
    return arrays


def _rng(seed: int, stream: int, step: int, rank: int) -> np.random.Generator:
    return np.random.default_rng((seed, stream, step, rank))


def _own(seed: int, step: int, rank: int) -> np.random.Generator:
    return _rng(seed, _OWN, step, rank)


def _scales(seed: int, coordinates: int) -> Floats:
    """Return the scale of each coordinate's layer."""
    scales = np.exp(SPREAD * _rng(seed, _SCALES, 0, 0).standard_normal(LAYERS))
    return np.repeat(scales.astype(np.float32), coordinates // LAYERS)
