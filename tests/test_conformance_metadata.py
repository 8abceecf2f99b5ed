"""What every codec must keep of its options: they round-trip, are documented, checked, and never change."""

from __future__ import annotations

import inspect
import json
import pickle
from typing import Any

import numpy as np
import pytest

from gccomm.codecs import get_codec, list_codecs
from gccomm.operations import FOLD
from tests.conformance import ROWS, Row, over

IDS = sorted({row.make().id for row in ROWS})
ids = pytest.mark.parametrize("codec_id", IDS)


@over(ROWS)
def test_configuration_round_trips(row: Row) -> None:
    codec = row.make()
    config = json.loads(json.dumps(codec.config()))
    again = get_codec(config)
    assert again == codec
    assert hash(again) == hash(codec)
    assert again.config() == codec.config() == config
    assert again.fingerprint == codec.fingerprint
    assert eval(repr(codec), {type(codec).__name__: type(codec)}) == codec
    assert pickle.loads(pickle.dumps(codec)) == codec
    text = ",".join(f"{k}={json.dumps(v)}" for k, v in config.items() if k != "id" and v is not None)
    assert get_codec(f"{codec.id}:{text}".replace('"', "")) == codec


@over(ROWS)
def test_descriptions(row: Row) -> None:
    codec = row.make()
    assert codec.id in list_codecs()
    assert get_codec(codec.id).id == codec.id == codec.config()["id"]
    assert codec.unit == ("tensor" if row.spoils == "tensor" else "blocks")
    assert codec.rounding in {"unbiased", "to nearest", "biased", "none"}
    assert codec.biased == (codec.rounding == "biased")
    if not row.exact_below:
        assert (codec.rounding == "unbiased") == row.unbiased
    sums = {"integer lanes", "own operation", "float16", "bfloat16", "float32"}
    assert codec.sums_as in sums
    assert (codec.sums_as == "own operation") == (codec.operation is not None)
    assert row.bits == (codec.sums_as == "integer lanes" or codec.operation == FOLD)


def test_configurations_differ_from_each_other() -> None:
    distinct = {row.codec for row in ROWS if not row.exact_below}
    codecs = [get_codec(codec) for codec in distinct]
    assert len(set(codecs)) == len({c.fingerprint for c in codecs}) == len({repr(c) for c in codecs})
    assert len(set(codecs)) == len(distinct)


@ids
def test_options_are_documented_attributes(codec_id: str) -> None:
    codec = get_codec(codec_id)
    text = inspect.getdoc(type(codec)) or ""
    for name, parameter in inspect.signature(type(codec)).parameters.items():
        assert name in text, f"{name} is not documented"
        assert getattr(codec, name) == parameter.default
        assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


@ids
def test_unknown_options_are_refused_with_the_known_ones(codec_id: str) -> None:
    known = list(inspect.signature(type(get_codec(codec_id))).parameters)
    with pytest.raises(TypeError, match=f"'{codec_id}' has no option 'wibble'") as caught:
        get_codec(codec_id, wibble=1)
    assert all(name in str(caught.value) for name in known or ["none"])


BAD: dict[type, list[Any]] = {
    int: ["nonsense", -1, 2.5, 10**9, True, None],
    float: ["nonsense", -1.0, float("nan"), float("inf"), 1e9, True, None],
    bool: ["nonsense", 2, None],
    str: ["nonsense", "", 3, None],
    type(None): ["nonsense", -1, 2.5, 10**9, True],
}


@ids
def test_bad_values_are_refused_with_option_and_value(codec_id: str) -> None:
    for name, parameter in inspect.signature(type(get_codec(codec_id))).parameters.items():
        for value in BAD[type(parameter.default)]:
            with pytest.raises((TypeError, ValueError)) as caught:
                get_codec(codec_id, **{name: value})
            assert f"`{name}`" in str(caught.value), value
            assert repr(value) in str(caught.value), name


@ids
def test_numbers_of_numpy_are_numbers(codec_id: str) -> None:
    """A configuration read from an array is as good, and still goes into JSON."""
    for name, parameter in inspect.signature(type(get_codec(codec_id))).parameters.items():
        if type(parameter.default) in (int, float):
            kind = np.int64 if isinstance(parameter.default, int) else np.float64
            codec = get_codec(codec_id, **{name: kind(parameter.default)})
            assert codec == get_codec(codec_id)
            assert json.loads(json.dumps(codec.config())) == get_codec(codec_id).config()


@over(ROWS)
def test_codecs_are_immutable_once_used(row: Row) -> None:
    codec = row.make()
    for name in inspect.signature(type(codec)).parameters or ["rounding"]:
        with pytest.raises(AttributeError, match="immutable"):
            setattr(codec, name, getattr(codec, name))
