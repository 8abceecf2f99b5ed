"""Digests of what codecs put on the wire and make of the sums: an id names one format for ever.

``python -m tests.golden`` writes them anew, for a codec with a new id. Inputs are made of integers, so that
they are the same everywhere. Of codecs that sum floats only what is sent is fixed, where that is the same on
all processors: of ``powersgd`` not what its matrix products give. Agreed words of ``topkc`` come out of float
sums whose last bit may differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gccomm.codecs import Codec
from gccomm.codecs.exact import Integers
from tests.conformance import ROWS, Row
from tests.conformance_bounds import FORMATS, Array
from tests.conformance_driver import Ranks

FOLDER = Path(__file__).parent / "golden"
STEPS = 3
INPUTS: list[tuple[str, tuple[int, ...], int]] = [  # dtype, shape, ranks
    ("float32", (50, 100), 4),
    ("float32", (65 * 1024 + 37,), 2),
    ("float64", (1025,), 3),
    ("bfloat16", (3, 700), 1),
    ("complex64", (1000,), 5),
]
INTEGERS: list[tuple[str, tuple[int, ...], int]] = [("int64", (1000,), 3), ("uint8", (3, 700), 4)]


def fixed(rank: int, step: int, dtype: str, shape: tuple[int, ...]) -> Any:
    """Return numbers of 12 bits times powers of two, by a hash; the magnitude differs between blocks."""
    size = int(np.prod(shape)) * (2 if dtype == "complex64" else 1)
    i = np.arange(size, dtype=np.uint64)
    h = i * np.uint64(0x9E3779B97F4A7C15) + np.uint64(1 + 1000 * rank + step)
    h = (h ^ (h >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(32))) * np.uint64(0x94D049BB133111EB)
    whole = (h >> np.uint64(52)).astype(np.int64) - 2048
    if dtype in ("int64", "uint8"):
        return (whole * (1 << 40 if dtype == "int64" else 1)).astype(dtype).reshape(shape)
    power = (h % np.uint64(8)).astype(np.int64) - 11 - 2 * (i >> np.uint64(10)).astype(np.int64) % 5
    values = np.ldexp(whole.astype(np.float64), power)
    if dtype == "complex64":
        return values.astype(np.float32).view(np.complex64).reshape(shape)
    return values.astype(FORMATS[dtype].dtype).reshape(shape)


def digest(parts: Sequence[Array]) -> str:
    hashed = hashlib.blake2b(digest_size=16)
    for part in parts:
        hashed.update(len(part).to_bytes(8, "little"))
        hashed.update(np.ascontiguousarray(part).view(np.uint8).data)
    return hashed.hexdigest()


def case(codec: Codec, name: str, dtype: str, shape: tuple[int, ...], n: int) -> dict[str, Any]:
    """Return what one configuration does with one input over a few steps, as digests."""
    feedback = codec.biased and codec.rounds
    ranks = Ranks(codec, n, mean=codec.id != "integers", feedback=feedback, seed=12345, step=7)
    entry: dict[str, Any] = {"codec": name, "dtype": dtype, "shape": list(shape), "ranks": n}
    return entry | run(ranks, [[fixed(r, step, dtype, shape) for r in range(n)] for step in range(STEPS)])


def run(ranks: Ranks, steps: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return digests of what rank 0 sends and of the results of these steps."""
    agreed: list[Array] = []
    words: list[Array] = []
    results: list[Array] = []
    for xs in steps:
        results.append(ranks.reduce(xs).copy())
        for sent in ranks.sent:
            into = agreed if sent.kind in ("Agree", "Energies") else words
            into.append(sent.words[0])
    codec, entry = ranks.codec, {"words": digest(words), "count": sum(map(len, words))}
    if agreed and codec.id != "topkc":
        entry["agreed"] = digest(agreed)
    if codec.sums_as in ("integer lanes", "own operation"):
        entry["result"] = digest(results)
    return entry


def redone(codec: Codec, name: str) -> dict[str, Any]:
    """Return the case of equal ranks of which too small a sum is expected: spans travel again."""
    n, shape = 8, (66 * 1024,)
    ranks = Ranks(codec, n, seed=1, state={"ratio": 0.05})
    entry: dict[str, Any] = {"codec": name, "dtype": "float32", "shape": list(shape), "ranks": n}
    entry |= run(ranks, [[fixed(0, 0, "float32", shape)] * n])
    assert "Redo" in [sent.kind for sent in ranks.sent]
    return entry


def cases(row: Row) -> list[dict[str, Any]]:
    """Return the cases of a row; of codecs that multiply matrices with vectors alone."""
    codec, name = row.carrier(), "two-words" if row.exact_below else row.codec
    chosen = [x for x in INPUTS if codec.id != "powersgd" or len(x[1]) == 1]
    found = [case(codec, name, *x) for x in chosen]
    return [*found, redone(codec, name)] if "checked" in row.codec else found


def all_cases() -> dict[str, list[dict[str, Any]]]:
    """Return all cases by id."""
    found: dict[str, list[dict[str, Any]]] = {
        "integers": [case(Integers(), "integers", *x) for x in INTEGERS]
    }
    for row in ROWS:
        found.setdefault(row.carrier().id, []).extend(cases(row))
    return found


def text(codec_id: str, entries: list[dict[str, Any]]) -> str:
    """Return a file's contents, a case a line."""
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in entries)
    return f'{{"id": {json.dumps(codec_id)}, "steps": {STEPS}, "cases": [\n{lines}\n]}}\n'


def stored(codec_id: str) -> list[dict[str, Any]]:
    """Return the cases that a file holds."""
    held = json.loads((FOLDER / f"{codec_id}.json").read_text())
    assert (held["id"], held["steps"]) == (codec_id, STEPS)
    entries: list[dict[str, Any]] = held["cases"]
    return entries


def write() -> list[str]:
    """Write all files; return the ids whose file changed."""
    changed = []
    for codec_id, entries in all_cases().items():
        path, new = FOLDER / f"{codec_id}.json", text(codec_id, entries)
        if not path.exists() or path.read_text() != new:
            path.write_text(new)
            changed.append(codec_id)
    return changed
