"""Checks of the caller's options; every message repeats the value and says what would do."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

__all__ = ["check_options", "integer", "one_of", "pattern_choice"]


def integer(
    name: str, value: object, meaning: str, minimum: int | None = None, maximum: int | None = None
) -> int:
    """Return ``value`` as an int.

    Parameters
    ----------
    name, meaning : str
        What the argument is called and what it is, for the error.
    value : object
        Anything with ``__index__`` but a bool.
    minimum, maximum : int, optional
        Bounds, inclusive.

    Raises
    ------
    TypeError
        Not an integer.
    ValueError
        Out of bounds.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        msg = f"`{name}` must be {meaning}, got {value!r} of type {type(value).__name__}"
        raise TypeError(msg)
    number = operator.index(value)
    if (minimum is not None and number < minimum) or (maximum is not None and number > maximum):
        above = f"at least {minimum}" if maximum is None else f"{minimum} to {maximum}"
        msg = f"`{name}` must be {meaning}, {above}, got {number}"
        raise ValueError(msg)
    return number


def one_of(name: str, value: Any, choices: Collection[Any]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        msg = f"`{name}` must be {' or '.join(map(repr, choices))}, got {value!r}"
        raise ValueError(msg)


def check_options(op: object, exact_below: object, nonfinite: object) -> int:
    """Raise for options that no call can have; return ``exact_below`` as an int."""
    one_of("op", op, ("sum", "mean"))
    one_of("nonfinite", nonfinite, ("propagate", "raise"))
    return integer("exact_below", exact_below, "a number of coordinates", 0)


def pattern_choice(value: Any, name: str, default: Any) -> Callable[[str], Any]:
    """Return the function from key to choice that a plain value or a mapping of patterns means.

    Parameters
    ----------
    value : Any
        One value for every key, or a mapping from pattern (``fnmatch`` style, first match wins) to value.
    name : str
        Argument name, for errors.
    default : Any
        Value for keys that no pattern matches.
    """
    if not isinstance(value, Mapping):
        return lambda _key: value
    for pattern in value:
        if not isinstance(pattern, str):
            msg = f"`{name}` maps patterns (str) to values, got the key {pattern!r}"
            raise TypeError(msg)
    items = list(value.items())

    def choose(key: str) -> Any:
        return next((v for pattern, v in items if fnmatchcase(key, pattern)), default)

    return choose
