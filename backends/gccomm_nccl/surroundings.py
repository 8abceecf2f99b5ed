"""What launchers' variables say of a process: its rank, how many there are, and where they can meet."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from gccomm.errors import BackendError

__all__ = ["Surroundings", "surroundings"]


class Surroundings(NamedTuple):
    """One process of a job; ``local_rank`` is None where its launcher does not tell."""

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    host: str
    port: int


def surroundings(environ: Mapping[str, str] | None = None) -> Surroundings | None:
    """Return what torchrun's or JAX's variables say; None where there are none.

    torchrun: ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``, ``MASTER_PORT``. JAX:
    ``JAX_PROCESS_ID``, ``JAX_NUM_PROCESSES``, ``JAX_COORDINATOR_ADDRESS``. The port is the next one after
    theirs, on which they listen themselves, or ``GCCOMM_PORT``.

    Raises
    ------
    BackendError
        One of them is missing or no number.
    """
    env = os.environ if environ is None else environ
    if "WORLD_SIZE" in env and "RANK" in env:
        rank, size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
        local = _number(env, "LOCAL_RANK") if "LOCAL_RANK" in env else None
        if size == 1:  # there is nobody to meet
            return _checked(Surroundings("torchrun", rank, size, local, "", 0))
        host, port = _text(env, "MASTER_ADDR"), _port(env, _number(env, "MASTER_PORT"))
        return _checked(Surroundings("torchrun", rank, size, local, host, port))
    if "JAX_NUM_PROCESSES" in env and "JAX_PROCESS_ID" in env:
        rank, size = _number(env, "JAX_PROCESS_ID"), _number(env, "JAX_NUM_PROCESSES")
        address = _text(env, "JAX_COORDINATOR_ADDRESS")
        host, _, text = address.rpartition(":")
        if not host or not text.isdecimal():
            raise BackendError(f"JAX_COORDINATOR_ADDRESS must be host:port, got {address!r}")
        return _checked(Surroundings("JAX", rank, size, None, host.strip("[]"), _port(env, int(text))))
    return None


def _checked(found: Surroundings) -> Surroundings:
    if not 0 <= found.rank < found.size:
        raise BackendError(f"{found.launcher}'s variables say rank {found.rank} of {found.size}")
    return found


def _port(env: Mapping[str, str], theirs: int) -> int:
    given = "GCCOMM_PORT" in env
    port = _number(env, "GCCOMM_PORT") if given else theirs + 1
    if not 0 < port < 65536:
        what = f"GCCOMM_PORT={port}" if given else f"{port}, the next one after the launcher's {theirs},"
        raise BackendError(
            f"{what} is no port: set GCCOMM_PORT to one from 1 to 65535 that is free on rank 0"
        )
    return port


def _text(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        raise BackendError(f"the environment variable {name} must name the host of rank 0; it is not set")
    return env[name]


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    if not text.isdecimal():
        raise BackendError(f"the environment variable {name} must be a number, 0 or more; got {text!r}")
    return int(text)
