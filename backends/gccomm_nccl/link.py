"""A connection on which JSON objects travel, each behind its length."""

from __future__ import annotations

import json
import selectors
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

__all__ = ["NAP_S", "Link"]

MOST_BYTES = 1 << 20
NAP_S = 0.05
_LENGTH = struct.Struct("!I")


class Link:
    """One end of a connection.

    Parameters
    ----------
    connection : socket
        Owned from here on.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._pending = b""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def send(self, value: dict[str, Any]) -> None:
        """Send one; OSError where the other end has gone or does not read."""
        text = json.dumps(value).encode()
        self._socket.settimeout(5)
        self._socket.sendall(_LENGTH.pack(len(text)) + text)

    def receive(self, until: float | None, look: Callable[[], object] = lambda: None) -> dict[str, Any]:
        """Wait for one, calling `look` meanwhile; OSError where the other end has gone or is late."""
        while True:
            if (found := self._take()) is not None:
                return found
            look()
            if until is not None and time.monotonic() >= until:
                raise OSError("the other end says nothing")
            self._read(NAP_S)

    def poll(self) -> dict[str, Any] | None:
        """Return one if it is here."""
        found = self._take()
        if found is None and self._read(0):
            found = self._take()
        return found

    def _read(self, timeout_s: float) -> bool:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                return False
        data = self._socket.recv(1 << 16)
        if not data:
            raise OSError("the other end has closed the connection")
        self._pending += data
        return True

    def _take(self) -> dict[str, Any] | None:
        if len(self._pending) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack(self._pending[: _LENGTH.size])
        if length > MOST_BYTES:
            raise ValueError(f"a message of {length} bytes")
        end = _LENGTH.size + length
        if len(self._pending) < end:
            return None
        text, self._pending = self._pending[_LENGTH.size : end], self._pending[end:]
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError(f"not an object: {value!r:.80}")
        return value

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
