"""Types of command-line arguments: each returns the value or says what is wrong with the text."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

__all__ = [
    "FIGURES",
    "byte_count",
    "codec",
    "coordinate_count",
    "factor",
    "figure",
    "natural",
    "output",
    "positive",
]

FIGURES = (".pdf", ".png", ".svg")
_SUFFIXES = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def byte_count(text: str) -> int:
    """Return a size of at least 8 bytes, in bytes, from a number with an optional suffix K, M or G."""
    size = _scaled(text.strip().upper().removesuffix("B"))
    if size is None or size < 8:
        message = f"a size is at least 8 bytes, as 65536 or 64K; got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return size


def coordinate_count(text: str) -> int:
    """Return a positive number with an optional suffix K, M or G."""
    count = _scaled(text.strip().upper())
    if not count:
        message = f"must be a number of coordinates, as 262144 or 256K; got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return count


def _scaled(digits: str) -> int | None:
    unit = _SUFFIXES.get(digits[-1:])
    if unit is not None:
        digits = digits[:-1]
    return int(digits) * (unit or 1) if digits.isdecimal() else None


def _integer(text: str, least: int) -> int:
    if not text.strip().isdecimal() or int(text) < least:
        message = f"must be an integer of at least {least}; got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return int(text)


def natural(text: str) -> int:
    """Return an integer of at least 0."""
    return _integer(text, 0)


def positive(text: str) -> int:
    """Return an integer of at least 1."""
    return _integer(text, 1)


def factor(text: str) -> int:
    """Return an integer of at least 2."""
    return _integer(text, 2)


def codec(text: str) -> str:
    """Return the id of a codec, with options, as it is, if there is such a codec."""
    from gccomm import get_codec

    try:
        get_codec(text)
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def output(text: str) -> Path:
    """Return the path of a file to write; its folder exists."""
    path = Path(text)
    if not path.absolute().parent.is_dir():
        message = f"there is no folder {path.absolute().parent}"
        raise argparse.ArgumentTypeError(message)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: name a file in it")
    return path


def figure(text: str) -> Path:
    """Return the path of a figure to write; matplotlib is there to draw it."""
    path = output(text)
    if path.suffix not in FIGURES:
        message = f"must end with one of {', '.join(FIGURES)}; got {text!r}"
        raise argparse.ArgumentTypeError(message)
    if importlib.util.find_spec("matplotlib") is None:
        message = "needs matplotlib: pip install 'gccomm[cli]'"
        raise argparse.ArgumentTypeError(message)
    return path
