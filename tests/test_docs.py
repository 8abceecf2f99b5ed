"""The documentation is true: its examples run, its links lead somewhere, its variables exist.

Run with a path, this file runs the examples of that Markdown file or Python module in its own process.
"""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from gccomm_launch.mpiexec import NoLauncherError, find_launcher

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
TEXTS = [*PAGES, *sorted(ROOT.glob("C*.md"))]  # those without examples too
PACKAGES = ("gccomm", "gccomm_mpi", "gccomm_local", "gccomm_launch")
OPTIONAL = ("jax", "torch", "mpi4py", "ml_dtypes", "cupy")
OPTIONS = doctest.ELLIPSIS
LAUNCHERS = ("OMPI_", "PMI", "MPI_LOCALNRANKS", "MV2_", "SLURM_", "GCCOMM_")


class Block(NamedTuple):
    """A fenced block: its language, its text, and the line on which that begins."""

    language: str
    text: str
    line: int


def blocks(markdown: str) -> list[Block]:
    found = []
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", markdown, re.MULTILINE | re.DOTALL):
        found.append(Block(match[1], match[2], markdown.count("\n", 0, match.start(2)) + 1))
    return found


def prose(markdown: str) -> str:
    """Return the text without fenced blocks and code spans."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL))


def anchors(markdown: str) -> set[str]:
    """Return the fragments that headings can be reached by."""
    text = re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def missing_library(source: str) -> str | None:
    """Return an optional library that `source` imports and this environment lacks."""
    wanted = re.findall(r"^(?:>>> )?(?:import|from) (\w+)", source, re.MULTILINE)
    absent = [name for name in wanted if name in OPTIONAL and importlib.util.find_spec(name) is None]
    if not absent and "cupy" in wanted and not has_device():
        return "a CUDA device"
    return absent[0] if absent else None


def has_device() -> bool:
    """Whether CuPy finds a device."""
    cupy = importlib.import_module("cupy")
    try:
        return bool(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return False


def run_page(path: Path) -> int:
    """Run the blocks of a page in order, in one namespace; return how many were run."""
    module = types.ModuleType("example")
    sys.modules["example"] = module  # classes that an example defines look their module up
    names: dict[str, Any] = module.__dict__
    count = 0
    for language, text, line in blocks(path.read_text(encoding="utf-8")):
        if language not in ("python", "pycon"):
            continue
        library = missing_library(text)
        if library is not None:
            print(f"line {line} needs {library}")
            continue
        if language == "python":
            exec(compile("\n" * (line - 1) + text, str(path), "exec"), names)
        else:
            run_session(text, names, path, line)
        count += 1
    return count


def run_session(text: str, names: dict[str, Any], path: Path, line: int) -> None:
    test = doctest.DocTestParser().get_doctest(text, names, path.name, str(path), line - 1)
    assert test.examples, f"line {line}: a pycon block without examples"
    test.globs = names  # get_doctest copies: what one block defines, the next may use
    result = doctest.DocTestRunner(optionflags=OPTIONS).run(test, clear_globs=False)
    assert not result.failed, f"{result.failed} examples failed"


def run_module(name: str) -> int:
    result = doctest.testmod(importlib.import_module(name), optionflags=OPTIONS)
    assert not result.failed, f"{result.failed} examples failed"
    return result.attempted


def examples_of(target: str | Path) -> subprocess.CompletedProcess[str]:
    """Run this file on a page or module in a clean process, alone in its world, warnings being errors."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    command = [sys.executable, "-W", "error", __file__, str(target)]
    with tempfile.TemporaryDirectory() as folder:  # for the files that examples write
        return subprocess.run(
            command, env=environ, cwd=folder, capture_output=True, text=True, timeout=300, check=False
        )


def sources() -> Iterator[tuple[str, Path]]:
    """Yield name and file of each installed module."""
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        for folder in spec.submodule_search_locations or ():
            for path in sorted(Path(folder).rglob("*.py")):
                parts = path.relative_to(folder).with_suffix("").parts
                name = ".".join((package, *parts)).removesuffix(".__init__")
                yield name, path


def modules_with_examples() -> list[str]:
    return [name for name, path in sources() if re.search(r"^\s*>>> ", path.read_text(), re.MULTILINE)]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_examples_of_a_page(page: Path) -> None:
    runnable = [b for b in blocks(page.read_text(encoding="utf-8")) if b.language in ("python", "pycon")]
    done = examples_of(page)
    assert done.returncode == 0, done.stdout + done.stderr
    skipped = sum(" needs " in line for line in done.stdout.splitlines())
    assert f"{len(runnable) - skipped} blocks or examples" in done.stdout


@pytest.mark.parametrize("module", modules_with_examples())
def test_examples_of_docstrings(module: str) -> None:
    done = examples_of(module)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[-4]) > 0


def test_a_wrong_example_is_noticed(tmp_path: Path) -> None:
    for body in ("```pycon\n>>> 1 + 1\n3\n```\n", "```python\nassert 1 + 1 == 3\n```\n"):
        page = tmp_path / "page.md"
        page.write_text(body)
        assert examples_of(page).returncode != 0


@pytest.fixture(scope="module")
def launcher() -> None:
    """Skip where ranks of MPI cannot be started."""
    pytest.importorskip("pytest_mpi")
    try:
        find_launcher()
    except NoLauncherError as error:
        pytest.skip(str(error))


def run_mpi_example(
    folder: Path, ranks: int, old: str = "", new: str = ""
) -> subprocess.CompletedProcess[str]:
    """Write the test of docs/running.md, with a text replaced, and run it by the command that follows it."""
    found = blocks((ROOT / "docs" / "running.md").read_text(encoding="utf-8"))
    place = next(i for i, block in enumerate(found) if block.text.startswith("# tests/test_sum.py\n"))
    body, command = found[place].text, shlex.split(found[place + 1].text)
    assert command[:3] == ["gccomm", "run", "-n"]
    assert old in body
    (folder / "tests").mkdir()
    (folder / "tests" / "test_sum.py").write_text(body.replace(old, new) if old else body)
    environ = {**os.environ, "PYTEST_ADDOPTS": "-p no:cacheprovider -W error"}
    start = "import sys; from gccomm_launch.run import run; sys.exit(run(sys.argv[1:]))"
    command = [sys.executable, "-c", start, "-n", str(ranks), *command[4:]]
    return subprocess.run(
        command, env=environ, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_mpi_test_of_the_documentation_passes(tmp_path: Path, ranks: int) -> None:
    done = run_mpi_example(tmp_path, ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("1 passed") == ranks, done.stdout


@pytest.mark.usefixtures("launcher")
def test_the_mpi_test_of_the_documentation_notices_a_wrong_sum(tmp_path: Path) -> None:
    done = run_mpi_example(tmp_path, 2, "(comm.size + 1) / 2", "(comm.size + 2) / 2")
    assert done.returncode != 0
    assert "1 failed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("page", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"https?://|mailto:", target):
            continue
        name, _, fragment = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.is_relative_to(ROOT), f"{target} leads out of the repository"
        assert file.exists(), f"{target}: there is no {file}"
        if fragment:
            assert fragment in anchors(file.read_text(encoding="utf-8")), f"{target}: no such heading"


def variables_in_source() -> set[str]:
    found: set[str] = set()
    for folder in ("gccomm", "backends", "launch"):
        for path in (ROOT / folder).rglob("*.py"):
            found |= set(re.findall(r"\bGCCOMM_[A-Z0-9_]+", path.read_text(encoding="utf-8")))
        for path in (p for suffix in ("cpp", "h") for p in (ROOT / folder).rglob(f"*.{suffix}")):
            found |= set(re.findall(r'getenv\("(GCCOMM_\w+)"\)', path.read_text(encoding="utf-8")))
    return found


def test_environment_variables_are_documented() -> None:
    text = (ROOT / "docs" / "using.md").read_text(encoding="utf-8")
    table = set(re.findall(r"^\| `(GCCOMM_\w+)` \|", text, re.MULTILINE))
    assert table == variables_in_source()
    assert {"GCCOMM_TIMEOUT_S", "GCCOMM_ISA"} <= table
    for page in TEXTS:
        assert set(re.findall(r"\bGCCOMM_[A-Z0-9_]+", page.read_text(encoding="utf-8"))) <= table, page


def test_codecs_are_documented() -> None:
    import gccomm

    linked = (ROOT / "docs" / "using.md").read_text(encoding="utf-8")
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "codecs").glob("*.md"))
    for codec in gccomm.list_codecs():
        assert f"`{codec}`" in linked
        assert re.search(rf"^# .*\b{codec}\b|^\| `{codec}` \|", pages, re.MULTILINE), codec


def test_subcommands_are_those_of_the_command() -> None:
    from gccomm_launch.cli import _COMMANDS

    shell = [b.text for page in TEXTS for b in blocks(page.read_text(encoding="utf-8")) if b.language == "sh"]
    named = set(re.findall(r"(?:^|/)gccomm ([a-z]+)", "\n".join(shell), re.MULTILINE))
    assert named
    assert named <= set(_COMMANDS)


if __name__ == "__main__":
    wanted = sys.argv[1]
    number = run_page(Path(wanted)) if wanted.endswith(".md") else run_module(wanted)
    print(f"{number} blocks or examples")
