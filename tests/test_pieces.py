"""Two pieces of a call on their way at once: which they are must not show in the results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gccomm
from gccomm import testing

CODECS = {"long": "qsgd-mn:norm=max", "low*": "powersgd", "own*": "thc:saturate=true", "*": "uniform"}


def trees(n: int) -> list[Any]:
    """Pieces of many messages beside short ones, and codecs of two and three rounds."""
    rng = np.random.default_rng(n)
    shapes = {"a": (40, 1024), "low": (90, 300), "long": (3000, 1024), "own": (5000,), "x": (2000, 1024)}
    shapes |= {"y": (700, 1024), "z": (1 << 16,), "counts": (5000,)}
    made = [{k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()} for _ in range(n)]
    for tree in made:
        tree["counts"] = (tree["counts"] * 100).astype(np.int64)
    return made


def run(xs: list[Any], keys: list[str], **options: Any) -> list[Any]:
    def program(comm: gccomm.Communicator) -> Any:
        reducer = gccomm.Reducer(CODECS, comm=comm, op="sum", error_feedback=False, **options)
        tree = {key: xs[comm.rank][key] for key in keys}
        return [reducer(tree) for _ in range(2)][1]

    return testing.run(program, len(xs))


@pytest.mark.parametrize("bucket_bytes", [1 << 15, 1 << 20, 25 << 20])
def test_results_do_not_depend_on_what_else_is_on_its_way(bucket_bytes: int) -> None:
    xs = trees(2)
    together = run(xs, list(xs[0]), bucket_bytes=bucket_bytes)
    for key in xs[0]:
        alone = run(xs, [key])
        for found in together:
            if key == "low":  # float sums
                np.testing.assert_allclose(found[key], alone[0][key], rtol=1e-4, atol=1e-4)
            else:
                np.testing.assert_array_equal(found[key], alone[0][key])
    np.testing.assert_array_equal(together[0]["counts"], xs[0]["counts"] + xs[1]["counts"])


def test_figures_count_every_piece() -> None:
    xs = trees(2)
    ys, stats = testing.simulate(xs, "uniform", bucket_bytes=1 << 18)
    total = sum(x.size for key, x in xs[0].items() if key != "counts")
    assert stats[0].codecs["uniform"] == total
    assert stats[0].wire_bytes >= total
    np.testing.assert_array_equal(ys[1]["counts"], xs[0]["counts"] + xs[1]["counts"])
