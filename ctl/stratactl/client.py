"""A synchronous Varlink client: one JSON object, one NUL byte, over a Unix socket. Small, because start-up counts."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator

TYPE_CHECKING = False  # spares the import of typing at run time
if TYPE_CHECKING:
    from typing import Any

PATH_LIMIT = 107  # bytes: sun_path holds 108 with its NUL
_CHUNK = 1 << 16


class ClientError(Exception):
    """Talking to the daemon failed. The subclass says how; the message is for the user."""


class NotRunning(ClientError):
    """Nobody answers at the socket, or whoever did is gone."""


class Denied(ClientError):
    """The socket may not be opened by this user."""


class TimedOut(ClientError):
    """No answer within the time allowed."""


class Refused(ClientError):
    """The daemon answered with a Varlink error: its qualified `name` and `parameters`."""

    def __init__(self, name: str, parameters: dict[str, Any]) -> None:
        self.name = name
        self.parameters = parameters
        super().__init__(parameters.get("message") or _in_words(name, parameters))


def _in_words(name: str, parameters: dict[str, Any]) -> str:
    details = ", ".join(f"{key} {value}" for key, value in parameters.items())
    return f"{name} ({details})" if details else name


class Client:
    """A connection to the socket at `path`. `timeout_s` bounds connecting, sending and each wait for a reply."""

    def __init__(self, path: str, timeout_s: float) -> None:
        self.path = path
        self._timeout_s = timeout_s
        self._received = b""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Kernel timeouts rather than settimeout(): they also bound a connect() that waits for a full backlog.
        limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, limit)
        self._connect()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The reply of a method that replies once."""
        self._send({"method": method, "parameters": parameters})
        answer: dict[str, Any] = self._receive()["parameters"]
        return answer

    def stream(self, method: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        """The replies of a method called with `more`, until the last."""
        self._send({"method": method, "parameters": parameters, "more": True})
        while True:
            reply = self._receive()
            yield reply["parameters"]
            if not reply.get("continues"):
                return

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _connect(self) -> None:
        try:
            self._socket.connect(self.path)
        except PermissionError:
            self._socket.close()
            raise Denied(f"{self.path}: permission denied; the group of the socket may connect") from None
        except BlockingIOError:
            self._socket.close()
            raise self._late() from None
        except OSError as err:
            self._socket.close()
            reason = "nobody listens there" if isinstance(err, ConnectionRefusedError) else err.strerror
            raise NotRunning(f"{self.path}: {reason}") from None

    def _send(self, call: dict[str, Any]) -> None:
        try:
            # No signal: SIGPIPE must stay what ends us when our *output* is closed.
            self._socket.sendall(json.dumps(call).encode() + b"\0", socket.MSG_NOSIGNAL)
        except BlockingIOError:
            raise self._late() from None
        except ConnectionError:
            pass  # a daemon that turns us away has written why before it closed

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            self._received += self._chunk()
        message, _, self._received = self._received.partition(b"\0")
        try:
            reply = json.loads(message)
        except ValueError:
            reply = None
        if not isinstance(reply, dict) or not isinstance(reply.setdefault("parameters", {}), dict):
            raise ClientError(f"{self.path} does not speak Varlink")
        if reply.get("error") is not None:
            raise Refused(str(reply["error"]), reply["parameters"])
        return reply

    def _chunk(self) -> bytes:
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            raise self._late() from None
        except ConnectionError:
            data = b""
        if not data:
            raise NotRunning(f"{self.path}: the daemon hung up")
        return data

    def _late(self) -> TimedOut:
        return TimedOut(f"{self.path}: no answer within {self._timeout_s:g} seconds")


def path_fault(path: str) -> str | None:
    """What is wrong with a socket path, in words, or None."""
    size = len(os.fsencode(path))
    if not 0 < size <= PATH_LIMIT or "\0" in path:
        return f"a socket path has 1 to {PATH_LIMIT} bytes, this one {size}: {path!r}"
    return None
