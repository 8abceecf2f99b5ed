"""What `gccomm doctor` makes of driver, devices, CuPy, NVRTC and NCCL."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from gccomm_launch.doctor_findings import Answer, Finding, ask, version_text

__all__ = ["cuda", "devices_of", "judge_cuda", "nccl_text"]

_REMEDIES = {
    802: "start nvidia-fabricmanager, which this machine's NVSwitch needs, and wait until it is ready",
    803: "reboot, or load the kernel module of the driver's own version: it and libcuda.so.1 differ",
    804: "remove the compatibility libraries of CUDA (LD_LIBRARY_PATH), which this device does not support",
    999: "see whether nvidia-smi works; reload nvidia_uvm, or start the container anew with its GPUs",
}
_NO_DEVICE = 100
_SHARED_FROM = 23000  # NCCL lets ranks share a device from 2.30 on


def cuda(timeout_s: float) -> list[Finding]:
    """Return what is found about GPUs; imports CuPy in a process of its own."""
    return judge_cuda(ask(["-m", "gccomm_launch.doctor_gpu"], timeout_s), os.environ)


def devices_of(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return the devices that findings tell of."""
    return [finding.facts for finding in findings if finding.subject.startswith("cuda:")]


def judge_cuda(answer: Answer, environ: Mapping[str, str]) -> list[Finding]:
    """Return what an answer means.

    Parameters
    ----------
    answer : Answer
        Of `gccomm_launch.doctor_gpu`, run as a program.
    environ : mapping
        Variables.
    """
    if answer.facts is None:
        text = f"a program that asks the CUDA driver and imports CuPy and NCCL {answer.failure}"
        return [Finding("CUDA", "problem", text, "see whether nvidia-smi and `import cupy` work here")]
    facts = answer.facts
    first = _driver(facts["driver"], facts["cupy"].get("packages", []), environ)
    if not facts["driver"].get("devices"):
        return [first]  # what is installed for GPUs does nothing here
    version = facts["driver"]["version"]
    devices = _devices(facts["driver"]["devices"])
    return [first, *devices, *_cupy(facts["cupy"], version), *_nccl(facts, version)]


def _driver(facts: Mapping[str, Any], packages: list[str], environ: Mapping[str, str]) -> Finding:
    also = f" ({', '.join(packages)} is installed)" if packages else ""
    if "missing" in facts:
        return Finding("CUDA", "absent", f"no NVIDIA driver here, so no GPU is used{also}", facts=dict(facts))
    version, visible = version_text(facts["version"]), environ.get("CUDA_VISIBLE_DEVICES")
    if facts.get("error", 0) == _NO_DEVICE or facts.get("devices") == []:
        text = f"a driver (CUDA {version}), but no device that this process sees{also}"
        if visible is None:
            return Finding("CUDA", "absent", text, facts=dict(facts))
        text += f"; CUDA_VISIBLE_DEVICES is {visible!r}"
        if visible in ("", "-1"):
            return Finding("CUDA", "absent", text, facts=dict(facts))
        return Finding("CUDA", "problem", text, "unset CUDA_VISIBLE_DEVICES, or name devices that exist")
    if "error" in facts:
        remedy = _REMEDIES.get(facts["error"], "see whether nvidia-smi works here")
        text = f"the driver (CUDA {version}) does not start: {facts['name']} ({facts['error']})"
        return Finding("CUDA", "problem", text, remedy, dict(facts))
    text = f"driver for CUDA {version}, {len(facts['devices'])} devices"
    return Finding("CUDA", "ok", text.replace("1 devices", "1 device"), facts=dict(facts))


def _devices(devices: list[dict[str, Any]]) -> list[Finding]:
    found = []
    for place, one in enumerate(devices):
        text = f"{one['name']}, capability {one['capability']}, {one['bytes'] / 2**30:.0f} GiB, {one['bus']}"
        found.append(Finding(f"cuda:{place}", "ok", text, facts=one))
    return found


def _extra(version: int) -> str:
    """Return the command that installs what fits a driver."""
    return f'pip install "gccomm[nccl{13 if version >= 13000 else 12}]"'


def _cupy(facts: Mapping[str, Any], driver_version: int) -> list[Finding]:
    packages = facts["packages"]
    if len(packages) > 1:
        text = f"{' and '.join(packages)} are in one environment, where they overwrite each other's files"
        remedy = (
            f"pip uninstall {' '.join(name.split()[0] for name in packages)}, then {_extra(driver_version)}"
        )
        return [Finding("CuPy", "problem", text, remedy)]
    if "error" in facts:
        if not packages:
            text = "not installed: gccomm takes no GPU arrays"
            return [Finding("CuPy", "absent", text, _extra(driver_version))]
        return [Finding("CuPy", "problem", f"cannot be imported: {facts['error']}", _extra(driver_version))]
    runtime = facts["runtime"]
    text = f"{facts['version']} for CUDA {version_text(runtime)}"
    if runtime // 1000 > driver_version // 1000:
        text += f", which the driver (CUDA {version_text(driver_version)}) is too old for"
        return [Finding("CuPy", "problem", text, f"a newer driver, or {_extra(driver_version)}", dict(facts))]
    found = [Finding("CuPy", "ok", text, facts=dict(facts))]
    if "nvrtc_error" in facts:
        text = f"CuPy cannot use it ({facts['nvrtc_error']}): kernels cannot be compiled"
        return [*found, Finding("NVRTC", "problem", text, _extra(driver_version))]
    return [*found, Finding("NVRTC", "ok", ".".join(map(str, facts["nvrtc"])))]


def _nccl(facts: Mapping[str, Any], driver_version: int) -> list[Finding]:
    ways = {"nccl4py": facts["nccl4py"], "CuPy's wrapper": facts["cupy"].get("nccl", {})}
    loaded = {way: said["library"] for way, said in ways.items() if said.get("library")}
    broken = {way: said["error"] for way, said in ways.items() if said.get("installed") and "error" in said}
    found = [
        Finding("NCCL", "problem", f"{way} does not work: {error}", _extra(driver_version))
        for way, error in broken.items()
    ]
    if loaded:
        code = max(loaded.values())
        text = ", ".join(f"{nccl_text(code)} by {way}" for way, code in loaded.items())
        text += (
            "; ranks may share a device" if code >= _SHARED_FROM else "; each rank needs a device of its own"
        )
        return [Finding("NCCL", "ok", text, facts=loaded), *found]
    return found or [Finding("NCCL", "absent", "not installed: GPUs reduce over MPI", _extra(driver_version))]


def nccl_text(code: int) -> str:
    """Return "2.30.3" for 23003, as NCCL counts its versions."""
    return f"{code // 10000}.{code % 10000 // 100}.{code % 100}"
