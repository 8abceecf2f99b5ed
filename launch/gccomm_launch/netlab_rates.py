"""Rates of links: how they are written, what the shaper needs, and results that no link could give."""

from __future__ import annotations

import argparse
import re

__all__ = ["FasterThanLinkError", "burst", "check_not_faster", "format_rate", "rate"]

_UNITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}

# Slack of the check: a median of few calls may start behind an idle time in which the shapers saved tokens.
_SLACK = 1.02


class FasterThanLinkError(RuntimeError):
    """A transfer took less time than its link needs, so that it went some other way."""


def rate(text: str) -> int:
    """Return bits per second from a number with the unit kbit, mbit or gbit, as tc writes it.

    Raises
    ------
    argparse.ArgumentTypeError
        `text` is no such rate, or is outside of 1mbit to 100gbit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", text.strip().lower())
    bits = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if not 10**6 <= bits <= 10**11:
        message = f"a rate is between 1mbit and 100gbit, as 1gbit or 100mbit; got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return bits


def format_rate(bits: int) -> str:
    """Return a rate in bits per second as :func:`rate` reads it, in the largest unit that leaves it whole."""
    unit = next((name for name in ("gbit", "mbit", "kbit") if bits % _UNITS[name] == 0), None)
    return f"{bits // _UNITS[unit]}{unit}" if unit else f"{bits / 1e3:.3f}kbit"


def burst(bits: int) -> int:
    """Return the bytes of burst that a token bucket needs for `bits` per second.

    A bucket is filled when a timer fires, so that it must hold what the link carries meanwhile: 0.2 ms. No
    more, for what it holds goes at the speed of memory. At least 256 KiB, for several segments of 64 KiB,
    which virtual links do not cut.
    """
    return max(256 << 10, bits // 8 // 5000)


def check_not_faster(payload: float, seconds: float, bits: int) -> None:
    """Refuse a measurement that is faster than its link.

    Parameters
    ----------
    payload : float
        Bytes that had to cross the link, in the direction in which more did.
    seconds : float
        Time it took.
    bits : int
        Rate of the link, bits per second, as given to ``gccomm netlab up``.

    Raises
    ------
    FasterThanLinkError
        The link cannot have carried so much, its two buckets of burst included.
    """
    possible = seconds * bits / 8 * _SLACK + 2 * burst(bits)
    if payload > possible:
        message = (
            f"{payload / 1e6:.3f} MB in {seconds * 1e3:.3f} ms is faster than the link: {format_rate(bits)} "
            f"carries at most {possible / 1e6:.3f} MB in that time; the bytes went another way (shared "
            "memory, the host's own interface?), so this is no measurement of the link"
        )
        raise FasterThanLinkError(message)
