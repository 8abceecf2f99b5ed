"""Words on the wire and bits of results, compared with digests that were stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gccomm.codecs.exact import Integers
from tests.conformance import ROWS, Row, over
from tests.conformance_golden import FOLDER, INTEGERS, case, cases, digest, fixed, stored

HINT = "the wire format or the arithmetic of {} changed: give it a new id, or restore it"


@over(ROWS)
def test_words_and_results_are_those_of_old(row: Row) -> None:
    codec = row.carrier()
    held = {(e["codec"], e["dtype"], *e["shape"], e["ranks"]): e for e in stored(codec.id)}
    for found in cases(row):
        key = (found["codec"], found["dtype"], *found["shape"], found["ranks"])
        assert held.get(key) == found, HINT.format(codec.id)


def test_integers_travel_as_of_old() -> None:
    assert stored("integers") == [case(Integers(), "integers", *x) for x in INTEGERS], HINT.format("integers")


def test_every_id_has_a_file_and_every_file_its_cases() -> None:
    rows: dict[str, set[str]] = {"integers": {"integers"}}
    for row in ROWS:
        codec_id = row.carrier().id
        rows.setdefault(codec_id, set()).add("two-words" if row.exact_below else row.codec)
    assert {path.stem for path in FOLDER.glob("*.json")} == set(rows)
    for codec_id, codecs in rows.items():
        entries = stored(codec_id)
        assert {entry["codec"] for entry in entries} == codecs
        assert all(entry["count"] for entry in entries)


def test_inputs_are_the_same_everywhere() -> None:
    x = fixed(1, 2, "float32", (5,))
    np.testing.assert_array_equal(x, [-1.544921875, -24.25, 0.1953125, 2.693359375, -95.1875])
    assert digest([x]) != digest([x[:4], x[4:]])


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "complex64"])
def test_inputs_are_exact_in_their_dtype(dtype: str) -> None:
    wide: Any = fixed(0, 0, "float64" if dtype != "complex64" else dtype, (3000,))
    if dtype != "bfloat16":
        np.testing.assert_array_equal(fixed(0, 0, dtype, (3000,)), wide)
    assert np.unique(np.abs(wide)).size > 1000
