"""The `gccomm` command: arguments, `codecs`, and how `bench` starts and stops ranks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gccomm_launch import bench as bench_module
from gccomm_launch import run as run_module
from gccomm_launch.bench import byte_count, parse, sizes
from gccomm_launch.cli import main
from gccomm_launch.codecs import describe
from gccomm_launch.mpiexec import NoLauncherError, find_launcher

import gccomm
from gccomm.codecs import registry

LIMIT_S = 120
GCCOMM = [sys.executable, "-m", "gccomm_launch.cli"]


def status_of(argv: Sequence[str]) -> int:
    """Return the exit status of a call that ends in SystemExit."""
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(["--version"]) == 0
    assert capsys.readouterr().out == f"gccomm {version('gccomm')}\n"


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {command} " in out for command in ("run", "netlab", "bench", "codecs", "doctor"))


@pytest.mark.parametrize("command", ["run", "netlab", "bench", "codecs", "doctor"])
def test_help_of_a_command_is_its_own(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of([command, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: gccomm {command} ")


def test_a_reader_that_has_had_enough_gets_no_traceback() -> None:
    with subprocess.Popen([*GCCOMM, "codecs"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, stderr = process.communicate(timeout=LIMIT_S)
    assert stderr == b""
    assert process.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize("argv", [[], ["train"], ["--codec"]])
def test_wrong_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(argv) == 2
    assert capsys.readouterr().err.startswith("usage: gccomm ")


def test_arguments_and_status_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def run(argv: list[str]) -> int:
        seen.append(argv)
        return 7

    monkeypatch.setattr(run_module, "run", run)
    assert main(["run", "-n", "3", "train.py", "--", "-n", "--version"]) == 7
    assert seen == [["-n", "3", "train.py", "--", "-n", "--version"]]


def test_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "run", run)
    assert main(["run", "-n", "2", "train.py"]) == 130
    assert capsys.readouterr().err == "gccomm run: interrupted\n"


def test_codecs_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["codecs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["id", "wire"]
    assert [line.split()[0] for line in lines[1:] if line[0] != " "] == gccomm.list_codecs()
    assert any(line.strip().startswith("options: wire_bits=8, headroom=auto") for line in lines)
    assert all(len(line) <= 110 for line in lines)


def test_codecs_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["codecs", "--json"]) == 0
    found = {info["id"]: info for info in json.loads(capsys.readouterr().out)}
    assert sorted(found) == gccomm.list_codecs()
    assert (found["raw"]["wire_bits"], found["raw"]["sums_as"]) == (pytest.approx(32, abs=0.03), "float32")
    assert (found["bf16"]["wire_bits"], found["bf16"]["sums_as"]) == (pytest.approx(16, abs=0.03), "bfloat16")
    uniform = found["uniform"]
    assert uniform["wire_bits"] == pytest.approx(
        8 + 32 / 1024, abs=0.001
    )  # a lane and a share of the block's scale
    assert (uniform["sums_as"], uniform["rounding"]) == ("integer lanes", "unbiased")
    assert uniform["options"] == {"wire_bits": 8, "scales": "agreed", "widening": False}
    assert all(info["description"] and not info["problem"] for info in found.values())


@pytest.mark.parametrize("name", gccomm.list_codecs())
def test_codecs_wire_bits_are_those_of_a_call(name: str) -> None:
    x = np.random.default_rng(0).standard_normal((256, 1024), np.float32)
    _, stats = gccomm.testing.simulate([x, x], codec=name)
    bits = describe(name).wire_bits
    assert bits is not None
    assert (stats[0].wire_bytes - stats[0].measure_bytes) * 8 / x.size == pytest.approx(
        bits, abs=0.1
    )  # headers apart


def test_codec_that_fails_is_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(registry._BUILT_IN, "gone", "gccomm.codecs.nowhere:Gone")
    assert main(["codecs"]) == 1
    text = capsys.readouterr().out
    assert "ModuleNotFoundError: No module named 'gccomm.codecs.nowhere'" in text
    assert any(line.split()[0] == "uniform" and "integer lanes" in line for line in text.splitlines())


@pytest.mark.parametrize(
    ("text", "size"), [("8", 8), ("65536", 65536), ("64K", 65536), ("1m", 1 << 20), ("2GB", 2 << 30)]
)
def test_byte_count(text: str, size: int) -> None:
    assert byte_count(text) == size


def test_bench_sizes() -> None:
    assert sizes(parse(["-b", "1K", "-e", "100K", "-f", "4"])) == [1024, 4096, 16384, 65536]
    assert sizes(parse(["-b", "128M"])) == [128 << 20]


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["-b", "4"], "at least 8 bytes"),
        (["-b", "x"], "at least 8 bytes"),
        (["-b", "2M", "-e", "1M"], "--maxbytes 1048576 is less than --minbytes 2097152"),
        (["-f", "1"], "at least 2"),
        (["-i", "0"], "at least 1"),
        (["-n", "0"], "at least 1"),
        (["-w", "-1"], "-w"),
        (["--codecs", "uniforms"], "did you mean 'uniform'"),
        (["--codecs", "uniform:wire_bits=7"], "`wire_bits` must be one of"),
        (["--dtype", "int32"], "invalid choice"),
        (["--json", "no/such/folder/file.json"], "there is no folder"),
        (["--json", "."], "is a folder: name a file in it"),
    ],
)
def test_bench_rejects_before_it_starts_ranks(
    argv: list[str], reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_module, "_on_ranks", None)
    monkeypatch.setattr(run_module, "run", None)
    assert status_of(["bench", *argv]) == 2
    assert reason in " ".join(capsys.readouterr().err.split())


@pytest.fixture(scope="module")
def _launcher() -> None:
    try:
        find_launcher()
    except NoLauncherError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("_launcher")
def test_bench_starts_ranks(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    argv = [
        "bench",
        "-n",
        "2",
        "-b",
        "16K",
        "-e",
        "64K",
        "-f",
        "4",
        "-i",
        "2",
        "-w",
        "1",
        "--json",
        str(path),
    ]
    done = subprocess.run(
        [*GCCOMM, *argv],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(path.read_text())
    assert report["ranks"] == 2
    assert {row["size"] for row in report["rows"]} == {16384, 65536}
    assert all(f" {row['codec']} " in done.stdout for row in report["rows"])
    assert list(report["comparisons"][0]["speedup"]) == ["raw", "bf16", *bench_module.DEFAULT_CODECS]
    assert "best uncompressed way, new result each call: " in done.stdout


@pytest.mark.usefixtures("_launcher")
def test_bench_ends_cleanly_when_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    argv = [*GCCOMM, "bench", "-b", "16K", "-e", "16K", "-i", "1000000", "--json", str(path)]
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        for line in job.stdout:
            if "size(B)" in line:  # the ranks are about to measure
                break
        job.send_signal(signal.SIGINT)
        _, errors = job.communicate(timeout=LIMIT_S)
    assert job.returncode == 130
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []
