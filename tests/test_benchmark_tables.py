"""The tables in the docs are those of the committed results."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tables() -> Any:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["README.md", "docs/codecs/rehop.md"])
def test_they_are(tables: Any, name: str) -> None:
    text = (ROOT / name).read_text()
    assert tables.rewritten(text, tables.TABLES[name]) == text, "run: python benchmarks/tables.py"


def test_other_figures_are_noticed(tables: Any) -> None:
    text, mine = (ROOT / "README.md").read_text(), tables.TABLES["README.md"]
    row = next(line for line in text.splitlines() if line.startswith("| gccomm `raw` |"))
    assert tables.rewritten(text.replace(row, "| gccomm `raw` | 1.0 | 2.0 |"), mine) == text


def test_a_table_that_is_gone_is_an_error(tables: Any) -> None:
    with pytest.raises(SystemExit, match="0 tables that begin with"):
        tables.rewritten("no tables here", tables.TABLES["README.md"])
