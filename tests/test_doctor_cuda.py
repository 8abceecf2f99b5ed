"""`gccomm doctor` on GPUs: stand-ins for the driver, CuPy and nccl4py, for machines that have none."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from gccomm_launch.doctor_cuda import devices_of, judge_cuda, nccl_text
from gccomm_launch.doctor_driver import driver
from gccomm_launch.doctor_findings import Answer, Finding, ask, outside
from gccomm_launch.doctor_trials import trials

LIMIT_S = 60
DRIVER = r"""
#include <stdlib.h>
#include <string.h>
static int number(const char* name, int other) { return getenv(name) ? atoi(getenv(name)) : other; }
extern "C" {
int cuInit(unsigned) { return number("FAKE_INIT", 0); }
int cuDriverGetVersion(int* version) { *version = 13010; return 0; }
int cuDeviceGetCount(int* count) { *count = number("FAKE_COUNT", 2); return 0; }
int cuGetErrorName(int code, const char** name) {
    *name = code == 803 ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" : 0;
    return 0;
}
int cuDeviceGet(int* handle, int place) { *handle = 70 + place; return 0; }
int cuDeviceGetName(char* name, int room, int handle) {
    strncpy(name, handle == 70 ? "First card" : "Second card", room);
    return 0;
}
int cuDeviceGetPCIBusId(char* bus, int room, int handle) {
    strncpy(bus, handle == 70 ? "0000:01:00.0" : "0000:02:00.0", room);
    return 0;
}
int cuDeviceTotalMem_v2(size_t* bytes, int handle) { *bytes = size_t(handle) << 30; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int) { *value = attribute == 75 ? 9 : 0; return 0; }
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a driver's library, made for the purpose."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler (set CXX)")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.cpp").write_text(DRIVER)
    made = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", str(folder / "driver.cpp"), "-o", str(made)], check=True)
    return made


def test_the_driver_tells_of_its_devices(library: Path) -> None:
    found = driver(str(library))
    assert found == {
        "version": 13010,
        "devices": [
            {"name": "First card", "capability": "9.0", "bytes": 70 << 30, "bus": "0000:01:00.0"},
            {"name": "Second card", "capability": "9.0", "bytes": 71 << 30, "bus": "0000:02:00.0"},
        ],
    }


def test_a_driver_that_does_not_start_is_told_of(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_INIT", "803")
    found = driver(str(library))
    assert found == {"version": 13010, "error": 803, "name": "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"}
    monkeypatch.setenv("FAKE_INIT", "4")
    assert driver(str(library))["name"] == "error 4"
    assert "cannot open shared object" in driver("libnone.so.1")["missing"]


# Programs that import stand-ins

CUPY = """
__version__ = "14.9"
class cuda:
    class runtime:
        runtimeGetVersion = staticmethod(lambda: 13000)
    class nvrtc:
        getVersion = staticmethod(lambda: (13, 0))
"""


def package(folder: Path, name: str, module: str, text: str) -> None:
    """Write a package as an installer would, its distribution named `name`."""
    path = folder / f"{module}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    info = folder / f"{name.replace('-', '_')}-14.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 14.9\n")


def asked(folder: Path, library: Path, timeout_s: float = LIMIT_S, **variables: str) -> Answer:
    paths = {"PYTHONPATH": str(folder), "LD_LIBRARY_PATH": str(library.parent)}
    return ask(["-m", "gccomm_launch.doctor_gpu"], timeout_s, {**outside(os.environ), **paths, **variables})


def by_subject(found: list[Finding]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in found}


def test_what_is_installed_is_asked_in_a_process_of_its_own(tmp_path: Path, library: Path) -> None:
    package(tmp_path, "cupy-cuda13x", "cupy", CUPY)
    nccl = (
        "from types import SimpleNamespace as S\n"
        "get_version = lambda: S(libnccl=S(version=S(release=(2, 30, 3))))\n"
    )
    package(tmp_path, "nccl4py", "nccl/core", nccl)
    found = by_subject(judge_cuda(asked(tmp_path, library), {}))
    assert [(f.subject, f.status) for f in found.values()] == [
        (name, "ok") for name in ("CUDA", "cuda:0", "cuda:1", "CuPy", "NVRTC", "NCCL")
    ]
    assert found["CUDA"].text == "driver for CUDA 13.1, 2 devices"
    assert found["cuda:1"].text == "Second card, capability 9.0, 71 GiB, 0000:02:00.0"
    assert found["CuPy"].text == "14.9 for CUDA 13.0"
    assert found["NVRTC"].text == "13.0"
    assert found["NCCL"].text == "2.30.3 by nccl4py; ranks may share a device"
    assert [d["name"] for d in devices_of(list(found.values()))] == ["First card", "Second card"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "was ended by SIGSEGV"),
        ("import time\ntime.sleep(1000)", "has not ended within 5 s and was stopped"),
    ],
)
def test_a_library_that_crashes_or_hangs_is_a_problem(
    tmp_path: Path, library: Path, text: str, expected: str
) -> None:
    package(tmp_path, "cupy-cuda13x", "cupy", text)
    (found,) = judge_cuda(asked(tmp_path, library, 5 if "sleep" in text else LIMIT_S), {})
    assert (found.subject, found.status) == ("CUDA", "problem")
    assert found.text.endswith(expected)
    assert found.remedy


def test_libraries_that_cannot_be_imported_are_problems(tmp_path: Path, library: Path) -> None:
    package(tmp_path, "cupy-cuda12x", "cupy", "raise ImportError('libcudart.so.12: no such file')")
    package(tmp_path, "nccl4py", "nccl/core", "raise ImportError('no bindings')")
    found = by_subject(judge_cuda(asked(tmp_path, library), {}))
    assert found["CuPy"].status == found["NCCL"].status == "problem"
    assert "libcudart.so.12: no such file" in found["CuPy"].text
    assert "nccl4py does not work: ImportError: no bindings" in found["NCCL"].text
    assert found["CuPy"].remedy == found["NCCL"].remedy == 'pip install "gccomm[nccl13]"'


def test_packages_that_overwrite_each_other(tmp_path: Path, library: Path) -> None:
    package(tmp_path, "cupy-cuda12x", "cupy", CUPY)
    package(tmp_path, "cupy-cuda13x", "cupy", CUPY)
    found = by_subject(judge_cuda(asked(tmp_path, library), {}))["CuPy"]
    assert found.status == "problem"
    assert "cupy-cuda12x 14.9 and cupy-cuda13x 14.9 are in one environment" in found.text
    assert found.remedy.startswith("pip uninstall cupy-cuda12x cupy-cuda13x, then ")


# What answers mean

DEVICE = {"name": "card", "capability": "8.0", "bytes": 1 << 34, "bus": "01:"}
GOOD = {
    "driver": {"version": 12040, "devices": [DEVICE]},
    "cupy": {
        "packages": ["cupy-cuda12x 14"],
        "version": "14.0",
        "runtime": 12090,
        "nvrtc": [12, 9],
        "nccl": {},
    },
    "nccl4py": {"installed": False},
}


def judged(part: str, **changes: Any) -> dict[str, Finding]:
    return by_subject(judge_cuda(Answer({**GOOD, part: {**GOOD[part], **changes}}), {}))


def test_a_device_without_libraries_is_no_fault_but_has_a_remedy() -> None:
    facts = {**GOOD, "cupy": {"packages": [], "error": "ModuleNotFoundError: No module named 'cupy'"}}
    found = by_subject(judge_cuda(Answer(facts), {}))
    assert [f.status for f in found.values()] == ["ok", "ok", "absent", "absent"]
    assert found["CuPy"].remedy == found["NCCL"].remedy == 'pip install "gccomm[nccl12]"'


def test_a_runtime_newer_than_the_driver() -> None:
    found = judged("cupy", runtime=13000)["CuPy"]
    assert found.status == "problem"
    assert "14.0 for CUDA 13.0, which the driver (CUDA 12.4) is too old for" in found.text
    assert judged("cupy")["CuPy"].status == "ok"  # minor versions may differ


def test_nvrtc_that_cannot_be_loaded() -> None:
    found = judged("cupy", nvrtc_error="RuntimeError: no libnvrtc")
    assert (found["NVRTC"].status, found["CuPy"].status) == ("problem", "ok")
    assert "RuntimeError: no libnvrtc" in found["NVRTC"].text


def test_nccl_of_cupys_wrapper() -> None:
    found = judged("cupy", nccl={"library": 22703})["NCCL"]
    assert found.status == "ok"
    assert found.text == "2.27.3 by CuPy's wrapper; each rank needs a device of its own"
    assert judged("cupy", nccl={"error": "AttributeError: none"})["NCCL"].status == "absent"
    assert nccl_text(23012) == "2.30.12"


@pytest.mark.parametrize(
    ("facts", "environ", "status", "text"),
    [
        ({"missing": "x"}, {}, "absent", "so no GPU is used (cupy-cuda12x 14 is installed)"),
        ({"error": 100, "name": "n"}, {}, "absent", "no device that this process sees"),
        ({"devices": []}, {"CUDA_VISIBLE_DEVICES": ""}, "absent", "CUDA_VISIBLE_DEVICES is ''"),
        ({"error": 100, "name": "n"}, {"CUDA_VISIBLE_DEVICES": "7"}, "problem", "is '7'"),
        ({"error": 803, "name": "MISMATCH"}, {}, "problem", "does not start: MISMATCH (803)"),
        ({"error": 5, "name": "n"}, {}, "problem", "does not start: n (5)"),
    ],
)
def test_drivers_without_devices(
    facts: dict[str, Any], environ: dict[str, str], status: str, text: str
) -> None:
    (found,) = judge_cuda(Answer({**GOOD, "driver": {"version": 12040, **facts}}), environ)
    assert found.status == status
    assert text in found.text
    assert bool(found.remedy) == (status == "problem")


def test_self_tests_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[str]] = []

    def note(arguments: list[str], timeout_s: float) -> Answer:
        made.append(arguments)
        return Answer(None, "was not run")

    monkeypatch.setattr("gccomm_launch.doctor_trials.ask", note)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    names = ["local", "mpi", "nccl"]

    def subjects(launched: bool, devices: int) -> list[str]:
        return [f.subject.removeprefix("self-test ") for f in trials(names, launched, devices, 1)]

    assert subjects(launched=False, devices=0) == ["local"]
    assert subjects(launched=True, devices=0) == ["local", "mpi"]
    assert subjects(launched=False, devices=1) == ["local", "nccl", "cuda"]
    assert made[-2] == ["-m", "gccomm_launch.doctor_trials", "nccl"]
    assert subjects(launched=True, devices=1) == ["local", "mpi", "nccl", "cuda", "mpi-gpu"]
    run = ["-m", "gccomm_launch", "run", "-n"]
    assert made[-3] == [*run, "1", "-m", "gccomm_launch.doctor_trials", "nccl"]
    assert subjects(launched=True, devices=4)[2] == "nccl"
    assert made[-3][:5] == [*run, "2"]
