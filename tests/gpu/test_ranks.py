"""Two ranks on one GPU, over NCCL where it allows that, and over MPI; on two GPUs where there are two."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gccomm_launch.doctor_cuda import nccl_text
from gccomm_launch.doctor_findings import outside
from gccomm_launch.mpiexec import NoLauncherError, find_launcher

import gccomm
from tests.gpu.programs import ALL_CODECS, ON_DEVICE, own_operation

PROGRAM = str(Path(__file__).with_name("programs.py"))
LIMIT_S = 400
SHARED_FROM = 23000


def environment(**variables: str) -> dict[str, str]:
    return {**outside(os.environ), "GCCOMM_TIMEOUT_S": "120", **variables}


def nccl_version() -> int:
    cupy = pytest.importorskip("cupy.cuda.nccl", reason="CuPy has no wrapper of NCCL")
    return int(cupy.get_version())


def over_nccl(devices: list[int], **variables: str) -> None:
    """Run the program on a rank a device; as torchrun would start it."""
    if "nccl" not in gccomm.backends.available():
        pytest.skip("no back end `nccl` is installed")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    common = {"WORLD_SIZE": str(len(devices)), "MASTER_ADDR": "127.0.0.1", "GCCOMM_PORT": str(port)}
    processes = []
    for rank, device in enumerate(devices):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GCCOMM_CUDA_DEVICE": str(device)}
        env = environment(**common, **own, MASTER_PORT=str(port), **variables)
        command, pipe = [sys.executable, PROGRAM, "nccl"], subprocess.PIPE
        processes.append(subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True))
    try:
        ended = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    codecs = sum(not own_operation(codec) for codec in ALL_CODECS)
    for rank, (out, err) in enumerate(ended):
        assert f"rank {rank} of {len(devices)}: {codecs} codecs" in out, err[-3000:]


def test_two_ranks_share_a_gpu_over_nccl() -> None:
    version = nccl_version()
    if version < SHARED_FROM:
        pytest.skip(f"NCCL {nccl_text(version)} lets no ranks share a GPU; 2.30 does")
    over_nccl([0, 0], NCCL_MULTI_RANK_GPU_ENABLE="1")


def test_two_gpus_over_nccl(cupy: Any) -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("there is one GPU")
    over_nccl([0, 1])


def over_mpi(ranks: int, what: str, codecs: int, **variables: str) -> None:
    """Run the program under a launcher of MPI's."""
    try:
        find_launcher()
    except NoLauncherError as error:
        pytest.skip(str(error))
    command = [sys.executable, "-m", "gccomm_launch", "run", "-n", str(ranks), PROGRAM, what]
    env = environment(**variables)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(ranks):
        assert f"rank {rank} of {ranks}: {codecs} codecs" in done.stdout


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_a_gpu_over_mpi(ranks: int) -> None:
    over_mpi(ranks, "mpi", len(ALL_CODECS))


@pytest.mark.parametrize("levels", ["words", "floats"])
def test_nccl_within_made_up_hosts_that_share_a_gpu(levels: str) -> None:
    version = nccl_version()
    if version < SHARED_FROM:
        pytest.skip(f"NCCL {nccl_text(version)} lets no ranks share a GPU; 2.30 does")
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "GCCOMM_HIERARCHY": levels}
    over_mpi(4, "by-host", len(ON_DEVICE), **shared)
