"""Compressed all-reduce for any array library: exact integer sums on the wire, identical results on every
rank.
"""

from __future__ import annotations

from importlib.metadata import version as _version

from gccomm import errors, testing
from gccomm.api import allreduce, broadcast, compressed_allreduce, compressed_allreduce_async, init
from gccomm.codecs import Codec, get_codec, list_codecs, register_codec
from gccomm.communicator import Communicator
from gccomm.errors import (
    BackendError,
    CollectiveTimeout,
    GccommError,
    MismatchError,
    NegotiationError,
    NonFiniteError,
    UnknownCodecError,
)
from gccomm.reducer import Reducer
from gccomm.traces import from_environment as _trace_from_environment
from gccomm.traces import tracing
from gccomm.work import Work

__version__ = _version("gccomm")

__all__ = [
    "BackendError",
    "Codec",
    "CollectiveTimeout",
    "Communicator",
    "GccommError",
    "MismatchError",
    "NegotiationError",
    "NonFiniteError",
    "Reducer",
    "UnknownCodecError",
    "Work",
    "allreduce",
    "broadcast",
    "compressed_allreduce",
    "compressed_allreduce_async",
    "errors",
    "get_codec",
    "init",
    "list_codecs",
    "register_codec",
    "testing",
    "tracing",
]

_trace_from_environment()
