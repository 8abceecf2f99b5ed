"""How processes of the NCCL back end find each other without MPI: variables, and a meeting over TCP."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import gccomm_nccl
import numpy as np
import pytest
from gccomm_nccl.store import Store
from gccomm_nccl.surroundings import Surroundings, surroundings

from gccomm import backends
from gccomm.errors import BackendError, CollectiveTimeout
from tests.fake_gpu import Machine
from tests.fake_nccl import install
from tests.on_threads import on_threads

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}
JAX = {"JAX_PROCESS_ID": "3", "JAX_NUM_PROCESSES": "4", "JAX_COORDINATOR_ADDRESS": "h:1234"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    monkeypatch.setenv("GCCOMM_TIMEOUT_S", "20")
    return "127.0.0.1", free_port()


# Variables


def test_variables_of_launchers() -> None:
    assert surroundings({}) is None
    assert surroundings({"WORLD_SIZE": "2"}) is None
    assert surroundings(TORCHRUN) == Surroundings("torchrun", 1, 2, 1, "h", 29501)
    assert surroundings({**TORCHRUN, "GCCOMM_PORT": "77"}) == Surroundings("torchrun", 1, 2, 1, "h", 77)
    assert surroundings({"RANK": "0", "WORLD_SIZE": "1"}) == Surroundings("torchrun", 0, 1, None, "", 0)
    assert surroundings(JAX) == Surroundings("JAX", 3, 4, None, "h", 1235)
    assert surroundings({**JAX, "JAX_COORDINATOR_ADDRESS": "[::1]:9"}) == Surroundings(
        "JAX", 3, 4, None, "::1", 10
    )


@pytest.mark.parametrize(
    ("base", "changes", "text"),
    [
        (TORCHRUN, {"RANK": "2"}, "torchrun's variables say rank 2 of 2"),
        (TORCHRUN, {"RANK": "first"}, "RANK must be a number, 0 or more; got 'first'"),
        (TORCHRUN, {"MASTER_ADDR": ""}, "MASTER_ADDR must name the host of rank 0"),
        (TORCHRUN, {"MASTER_PORT": "x"}, "MASTER_PORT must be a number"),
        (
            TORCHRUN,
            {"MASTER_PORT": "65535"},
            "the next one after the launcher's 65535, is no port: set",
        ),
        (TORCHRUN, {"GCCOMM_PORT": "70000"}, "GCCOMM_PORT=70000 is no port: set GCCOMM_PORT"),
        (JAX, {"JAX_COORDINATOR_ADDRESS": "h"}, "JAX_COORDINATOR_ADDRESS must be host:port, got 'h'"),
        (JAX, {"JAX_PROCESS_ID": "-1"}, "JAX_PROCESS_ID must be a number"),
    ],
)
def test_wrong_variables_are_named(base: Mapping[str, str], changes: Mapping[str, str], text: str) -> None:
    with pytest.raises(BackendError, match=text):
        surroundings({**base, **changes})


def test_auto_takes_nccl_where_these_launchers_started_several() -> None:
    assert backends.detect(TORCHRUN) == "nccl"
    assert backends.detect(JAX) == "nccl"
    assert backends.detect({**TORCHRUN, "WORLD_SIZE": "1"}) == "local"
    assert backends.detect({"WORLD_SIZE": "4"}) == "local"
    assert backends.detect({**TORCHRUN, "PMI_SIZE": "2", "PMI_RANK": "0"}) == "mpi"


@pytest.mark.parametrize("name", ["WORLD_SIZE", "JAX_NUM_PROCESSES"])
def test_several_processes_of_unknown_places_are_warned_of(name: str) -> None:
    """Each would train alone, as rank 0 of 1, and nothing would tell."""
    program = "import gccomm\nprint(gccomm.init().size, gccomm.init().size)"
    hidden = (*TORCHRUN, *JAX, "PMI_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_SIZE")
    environ = {key: value for key, value in os.environ.items() if key not in hidden}

    def run(program: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program]
        return subprocess.run(
            command, env={**environ, name: "4"}, capture_output=True, text=True, check=True, timeout=60
        )

    done = run(program)
    assert done.stdout.split() == ["1", "1"]
    assert done.stderr.count("UserWarning") == 1
    assert f"{name}=4 says that there are several processes" in done.stderr
    assert run(program.replace("init()", "init('local')")).stderr == ""
    assert backends.half_named(TORCHRUN) is None
    assert backends.half_named({**JAX, "JAX_NUM_PROCESSES": "1"}) is None


# The meeting


@pytest.fixture
def three(address: tuple[str, int]) -> Iterator[list[Store]]:
    stores = on_threads(lambda rank: Store(rank, 3, address, "job"), range(3))
    assert all(isinstance(store, Store) for store in stores), stores
    yield stores
    for store in stores:
        store.close(whole=False)


def soon(store: Store) -> str | None:
    end = time.monotonic() + 10
    while (lost := store.lost()) is None and time.monotonic() < end:
        time.sleep(0.01)
    return lost


def test_all_get_what_each_brings(three: list[Store]) -> None:
    for turn in range(2):
        mine = [{"rank": rank, "turn": turn, "x": "é" * 999} for rank in range(3)]
        found = on_threads(lambda rank: three[rank].exchange(mine[rank]), range(3))  # noqa: B023
        assert found == [[{"rank": rank, "turn": turn, "x": "é" * 999} for rank in range(3)]] * 3
    assert [store.lost() for store in three] == [None] * 3


def test_one_that_says_why_it_gives_up_is_heard_by_all(three: list[Store]) -> None:
    three[2].warn("rank 2 ran out of memory")
    assert soon(three[0]) == "rank 2 ran out of memory"
    assert soon(three[1]) == "rank 2 ran out of memory"


def test_one_that_goes_without_a_word_is_missed_by_all(three: list[Store]) -> None:
    three[1].close(whole=False)
    assert soon(three[0]) == "rank 1 has gone"
    assert soon(three[2]) == "rank 1 has gone"


def test_an_orderly_end_is_no_loss(three: list[Store]) -> None:
    three[1].close()
    three[0].close()
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        assert three[2].lost() is None
        assert three[0].lost() is None


def test_one_of_another_job_is_sent_away(address: tuple[str, int]) -> None:
    started = threading.Thread(target=lambda: found.append(Store(0, 2, address, "mine")), daemon=True)
    found: list[Store] = []
    started.start()
    with pytest.raises(BackendError, match=r"belongs to another job: job is 'other', expected 'mine'"):
        Store(1, 2, address, "other")
    with pytest.raises(BackendError, match="size is 3, expected 2"):
        Store(1, 3, address, "mine")
    with pytest.raises(BackendError, match="rank 5 is none of 1 to 1"):
        Store(5, 2, address, "mine")
    with socket.create_connection(address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")  # neither a rank nor the end of it
    mine = Store(1, 2, address, "mine")
    started.join(10)
    mine.close(whole=False)
    found[0].close(whole=False)


def test_a_second_process_of_a_rank_is_sent_away(address: tuple[str, int]) -> None:
    stores: list[Store] = []
    first = threading.Thread(target=lambda: stores.append(Store(0, 3, address)), daemon=True)
    first.start()
    stores.append(Store(1, 3, address))
    with pytest.raises(BackendError, match="there are two processes of rank 1"):
        Store(1, 3, address)
    stores.append(Store(2, 3, address))
    first.join(10)
    assert sorted(store.rank for store in stores) == [0, 1, 2]
    for store in stores:
        store.close(whole=False)


def test_a_taken_port_is_named(address: tuple[str, int]) -> None:
    with (
        socket.create_server(address),
        pytest.raises(BackendError, match=rf"rank 0 cannot listen at 127.0.0.1:{address[1]}.*GCCOMM_PORT"),
    ):
        Store(0, 2, address)


def test_what_is_no_rank_0_is_named(address: tuple[str, int]) -> None:
    def answer(server: socket.socket) -> None:
        connection, _ = server.accept()
        connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
        connection.recv(1000)
        connection.close()

    with socket.create_server(address) as server:
        thread = threading.Thread(target=answer, args=(server,), daemon=True)
        thread.start()
        with pytest.raises(BackendError, match="is not gccomm's rank 0"):
            Store(1, 2, address)
        thread.join(10)


@pytest.mark.parametrize("rank", [0, 1])
def test_who_waits_in_vain_gets_a_timeout(
    address: tuple[str, int], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GCCOMM_TIMEOUT_S", "0.3")
    with pytest.raises(CollectiveTimeout, match=f"rank {rank} of 2 has waited .* waiting for"):
        Store(rank, 2, address)


def test_a_process_that_goes_while_starting(three: list[Store]) -> None:
    three[2].close(whole=False)
    results = on_threads(lambda rank: three[rank].exchange({}), range(2))
    assert all(isinstance(result, BackendError) for result in results)
    assert all("a process has gone while starting" in str(result) for result in results)


# Processes


PROGRAM = """
import json, os, sys
from gccomm_nccl.store import Store, job_name
from gccomm_nccl.surroundings import surroundings
from gccomm_nccl.joining import host_name
found = surroundings()
store = Store(found.rank, found.size, (found.host, found.port), job_name())
all_ = store.exchange({"rank": found.rank, "pid": os.getpid(), "host": host_name()})
store.close()
print(json.dumps(all_))
"""

CONNECT = """
import sys
sys.modules["cupy"] = None
import gccomm
try:
    gccomm.init()
except gccomm.BackendError as error:
    print(error)
"""


def processes(program: str, environments: list[dict[str, str]]) -> list[str]:
    """Run a program once for each environment; return what they print."""
    hidden = ("RANK", "WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_SIZE", "GCCOMM_NCCL")
    base = {k: v for k, v in os.environ.items() if k not in hidden}
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", program],
            env={**base, "GCCOMM_TIMEOUT_S": "60", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in environments
    ]
    try:
        ended = [process.communicate(timeout=90) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [p.returncode for p in running] == [0] * len(running), [err for _, err in ended]
    return [out for out, _ in ended]


def torchrun(rank: int, size: int, port: int) -> dict[str, str]:
    names = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
    }
    return {**{k: str(v) for k, v in names.items()}, "TORCHELASTIC_RUN_ID": "run"}


def jax(rank: int, size: int, port: int) -> dict[str, str]:
    names = {
        "JAX_PROCESS_ID": rank,
        "JAX_NUM_PROCESSES": size,
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
    }
    return {k: str(v) for k, v in names.items()}


@pytest.mark.parametrize("launcher", [torchrun, jax])
def test_processes_meet_beside_their_launchers_port(launcher: Any) -> None:
    port = free_port() - 1
    with socket.create_server(("127.0.0.1", port)):  # the launcher's own
        printed = processes(PROGRAM, [launcher(rank, 3, port) for rank in range(3)])
    found = [json.loads(text) for text in printed]
    assert found[0] == found[1] == found[2]
    assert [entry["rank"] for entry in found[0]] == [0, 1, 2]
    assert len({entry["pid"] for entry in found[0]}) == 3
    assert len({entry["host"] for entry in found[0]}) == 1


def test_processes_without_cupy_all_say_so() -> None:
    port = free_port() - 1
    printed = processes(CONNECT, [torchrun(rank, 2, port) for rank in range(2)])
    assert printed[0] == printed[1]
    assert "rank 0: the back end `nccl` cannot use" in printed[0]
    assert 'pip install "gccomm[nccl12]"' in printed[0]


# The whole


def test_one_process_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "JAX_PROCESS_ID", "PMI_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    machine = Machine(1)
    nccl = install(monkeypatch, machine)
    first, second = gccomm_nccl.connect(), gccomm_nccl.connect()
    assert (first.rank, first.size, first.local_rank, first.device) == (0, 1, 0, "cuda:0")
    assert first.channel is second.channel
    words = np.ones(2, np.uint32)
    second.sum_words(words)
    first.close()
    second.close()
    assert nccl.comms[0].destroyed
    third = gccomm_nccl.connect()
    assert third.channel is not first.channel
    third.close()


def test_a_communicator_over_nccl_reduces_arrays_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of a communicator, in words and floats of the host."""
    import gccomm
    from gccomm.communicator import Communicator
    from tests.test_nccl_backend import on_ranks, raised

    install(monkeypatch, Machine(3))

    def work(backend: Any) -> Any:
        comm = Communicator(backend)
        x = np.random.default_rng(comm.rank).standard_normal(3000).astype(np.float32)
        found = [
            comm.compressed_allreduce({"x": x, "n": np.arange(5) * comm.rank}, codec=c)
            for c in ("rotated", "raw")
        ]
        with pytest.raises(gccomm.MismatchError, match="array"):
            comm.compressed_allreduce(np.zeros(3 + comm.rank, np.float32))
        with pytest.raises(gccomm.NegotiationError, match="this back end lacks"):
            comm.compressed_allreduce(x, codec="rehop")
        part = comm.split(comm.rank % 2)
        assert part is not None
        found.append(part.allreduce(np.ones(2)))
        part.close()
        found.append(comm.broadcast(np.full(3, comm.rank), root=1))
        comm.barrier()
        comm.close()
        return found

    results = raised(on_ranks(3, work, closes=False))
    xs = [np.random.default_rng(rank).standard_normal(3000).astype(np.float32) for rank in range(3)]
    expected, _ = gccomm.testing.simulate([{"x": x, "n": np.arange(5) * r} for r, x in enumerate(xs)])
    for rank, (rotated, raw, part, sent) in enumerate(results):
        assert rotated["x"].tobytes() == expected[0]["x"].tobytes()
        assert rotated["n"].tolist() == [0, 3, 6, 9, 12]
        np.testing.assert_allclose(raw["x"], np.sum(xs, axis=0), rtol=1e-5, atol=1e-5)
        assert part.tolist() == [1.0 if rank == 1 else 2.0] * 2
        assert sent.tolist() == [1, 1, 1]
