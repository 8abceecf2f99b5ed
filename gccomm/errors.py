"""Exceptions that gccomm raises.

Errors of the caller's own argument are the built-in ``TypeError``, ``ValueError``, ``BufferError`` and
``OverflowError``; like every error of a collective call they are raised on *all* ranks, with the same text,
and the communicator stays usable.
"""

from __future__ import annotations

__all__ = [
    "BackendError",
    "CollectiveTimeout",
    "GccommError",
    "MismatchError",
    "NegotiationError",
    "NonFiniteError",
    "UnknownCodecError",
]


class GccommError(RuntimeError):
    """Base class of the errors that are gccomm's own."""


class MismatchError(GccommError):
    """Ranks called different collectives, or the same one with different arguments. The text names ranks and
    differences.
    """


class NegotiationError(GccommError):
    """Ranks agree on what to do, but it cannot be done (say, too many ranks for the lane width)."""


class NonFiniteError(GccommError):
    """A rank's input holds inf or NaN and the call asked for ``nonfinite="raise"``. Nothing was changed."""


class CollectiveTimeout(GccommError):
    """A rank waited longer than ``GCCOMM_TIMEOUT_S`` seconds for its peers: the communicator is broken. Or an
    asynchronous call was not complete when :meth:`gccomm.Work.wait` had waited long enough: it goes on.
    """


class BackendError(GccommError):
    """The transport failed, or this communicator is broken or closed."""


class UnknownCodecError(GccommError, ValueError):
    """No codec is registered under this id.

    Attributes
    ----------
    codec_id : str
        The id that was asked for.
    """

    def __init__(self, codec_id: str, message: str) -> None:
        super().__init__(message)
        self.codec_id = codec_id

    def __reduce__(self) -> tuple[type[UnknownCodecError], tuple[str, str]]:
        return type(self), (self.codec_id, str(self))
