"""Codecs by id: the built-in ones, those of installed packages (entry points ``gccomm.codecs``), and the ids'
options.
"""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from gccomm.codecs.base import Codec
from gccomm.errors import UnknownCodecError

__all__ = ["get_codec", "list_codecs", "register_codec"]

_BUILT_IN = {
    "raw": "gccomm.codecs.floats:Raw",
    "bf16": "gccomm.codecs.floats:BFloat16",
    "fp16": "gccomm.codecs.floats:Float16",
    "uniform": "gccomm.codecs.uniform:Uniform",
    "rehop": "gccomm.codecs.rehop:Rehop",
    "rotated": "gccomm.codecs.rotated:Rotated",
    "thc": "gccomm.codecs.thc:THC",
    "topkc": "gccomm.codecs.topkc:TopKC",
    "powersgd": "gccomm.codecs.powersgd:PowerSGD",
    "qsgd-mn": "gccomm.codecs.qsgd:QSGDMaxNorm",
    "qsgd-mn-ts": "gccomm.codecs.qsgd:QSGDMultiScale",
    "grandk-mn": "gccomm.codecs.grandk:GlobalRandK",
    "grandk-mn-ts": "gccomm.codecs.grandk:GlobalRandKMultiScale",
    "global-qsgd": "gccomm.codecs.global_qsgd:GlobalQSGD",
    "intsgd": "gccomm.codecs.intsgd:IntSGD",
}
_loaded: dict[str, type[Codec]] = {}
_made: dict[str, Codec] = {}  # codecs by the text that asked for them: they are immutable
MADE_LIMIT = 256


def list_codecs() -> list[str]:
    """Return the ids of all codecs that can be had, sorted."""
    points = {point.name for point in entry_points(group="gccomm.codecs")}
    return sorted({*_BUILT_IN, *_loaded, *points})


def register_codec(codec: type[Codec], *, replace: bool = False) -> type[Codec]:
    """Add a codec class under its ``id``; usable as a decorator. Again it does nothing, nor where
    the class has an entry point.

    Raises
    ------
    TypeError
        ``codec`` is not a subclass of :class:`~gccomm.codecs.base.Codec` with an ``id``.
    ValueError
        The id is taken and ``replace`` is false: an id names one wire format.
    """
    if not _is_codec(codec):
        msg = f"a codec is a subclass of gccomm.codecs.base.Codec with an `id`, got {codec!r}"
        raise TypeError(msg)
    if codec.id in list_codecs() and not (replace or _is_known(codec)):
        msg = f"a codec with the id {codec.id!r} exists already; pass replace=True to replace it"
        raise ValueError(msg)
    _loaded[codec.id] = codec
    _made.clear()
    return codec


def _is_known(codec: type[Codec]) -> bool:
    """Whether this very class has been registered, or is what an entry point names."""
    if codec.id in _loaded or codec.id in _BUILT_IN:
        return _loaded.get(codec.id) is codec
    here = f"{codec.__module__}:{codec.__qualname__}"
    return any(p.name == codec.id and p.value == here for p in entry_points(group="gccomm.codecs"))


def get_codec(codec: str | dict[str, Any] | Codec, **options: Any) -> Codec:
    """Return a codec object.

    Parameters
    ----------
    codec : str, dict or Codec
        An id (``"uniform"``), an id with options (``"uniform:wire_bits=4"``; several separated by commas), a
        configuration as ``codec.config()`` gives, or a codec, which is returned as it is.
    **options
        Options of the codec; they override those in ``codec``.

    Raises
    ------
    UnknownCodecError
        No codec has this id.
    TypeError, ValueError
        An option is unknown or has a bad value.

    Examples
    --------
    >>> get_codec("uniform", wire_bits=4)
    Uniform(wire_bits=4)
    >>> get_codec("uniform:wire_bits=5").config()
    {'id': 'uniform', 'wire_bits': 5, 'scales': 'agreed', 'widening': False}
    """
    if isinstance(codec, Codec):
        if options:
            msg = f"options {sorted(options)} cannot be given together with the codec object {codec!r}"
            raise TypeError(msg)
        _ = codec.fingerprint  # from here on it cannot be changed
        return codec
    if isinstance(codec, str) and not options and codec in _made:
        return _made[codec]
    name, given = _parse(codec)
    kind = _load(name)
    merged = {**given, **options}
    known = inspect.signature(kind).parameters
    for option in merged:
        if option not in known:
            msg = f"codec {name!r} has no option {option!r}; it has {', '.join(known) or 'none'}"
            raise TypeError(msg)
    made = kind(**merged)
    _ = made.fingerprint  # from here on it cannot be changed
    if isinstance(codec, str) and not options and len(_made) < MADE_LIMIT:
        _made[codec] = made
    return made


def _parse(codec: object) -> tuple[str, dict[str, Any]]:
    if isinstance(codec, dict) and isinstance(codec.get("id"), str):
        return codec["id"], {k: v for k, v in codec.items() if k != "id"}
    if not isinstance(codec, str):
        msg = f"`codec` must be an id, a configuration with an 'id', or a Codec, got {codec!r}"
        raise TypeError(msg)
    name, _, rest = codec.partition(":")
    options: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        option, equals, text = item.partition("=")
        if not equals:
            msg = f"options are written id:option=value,option=value, got {codec!r}"
            raise ValueError(msg)
        if option.strip() in options:
            msg = f"the option {option.strip()!r} is given twice in {codec!r}"
            raise ValueError(msg)
        options[option.strip()] = _value(text.strip())
    return name.strip(), options


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def _load(name: str) -> type[Codec]:
    if name in _loaded:
        return _loaded[name]
    loader: Callable[[], Any] | None = None
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        loader = lambda: getattr(import_module(module), attribute)  # noqa: E731
    else:
        points = {point.name: point for point in entry_points(group="gccomm.codecs")}
        if name in points:
            loader = points[name].load
    if loader is None:
        near = difflib.get_close_matches(name, list_codecs(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        msg = f"no codec has the id {name!r}{hint} Known: {', '.join(list_codecs())}"
        raise UnknownCodecError(name, msg)
    kind = loader()
    if not _is_codec(kind) or kind.id != name:
        msg = f"what is installed as the codec {name!r} is no codec with this id: {kind!r}"
        raise TypeError(msg)
    _loaded[name] = kind
    return _loaded[name]


def _is_codec(kind: Any) -> bool:
    return inspect.isclass(kind) and issubclass(kind, Codec) and isinstance(getattr(kind, "id", None), str)
