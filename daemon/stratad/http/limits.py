"""What a request may cost before anybody looks at it: size, time and form of its body."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from stratad.errors import StrataError
from stratad.http.drain import Drain
from stratad.http.errors import send_error

LINGER_S = 5.0
LINGER_BYTES = 256 * 1024 * 1024
"""How long and how much of a refused body is still read, so that a client that only sends gets to see the answer."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest request body in bytes, and the seconds it may take to arrive."""

    body_bytes: int
    body_seconds: float


class _ClientLeft(Exception):
    """The connection went away while the body was being read."""


class BodyLimits:
    """ASGI middleware: reads the body within `limits()`, then runs the application with the whole of it.

    Answers 413 while reading (what was read is dropped), 408 for a slow body, 415 for a compressed one, 503 once the
    server drains. Content types are not looked at: clients send JSON under many names.
    """

    def __init__(self, app: ASGIApp, limits: Callable[[], Limits], drain: Drain) -> None:
        self._app, self._limits, self._drain = app, limits, drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        reader = _BodyReader(receive, self._limits())
        try:
            reader.check_headers(scope)
            body = await self._read(reader)
        except _ClientLeft:
            return
        except StrataError as error:
            await _refuse(reader, send, error)
            return
        await self._app(scope, _replay(body, receive), send)

    async def _read(self, reader: _BodyReader) -> bytes:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(reader.limits.body_seconds) as timer:
                with self._drain.at_begin(lambda: timer.reschedule(loop.time())):
                    return await reader.read()
        except TimeoutError:
            if self._drain.begun:
                raise StrataError("draining", "the server is stopping") from None
            text = f"the request body did not arrive within {reader.limits.body_seconds:g} s"
            raise StrataError("request_timeout", text) from None


class _BodyReader:
    def __init__(self, receive: Receive, limits: Limits) -> None:
        self.limits = limits
        self.complete = False
        self._receive = receive

    def check_headers(self, scope: Scope) -> None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        encoding = headers.get(b"content-encoding", b"identity").decode("latin-1").strip().lower()
        if encoding not in ("", "identity"):
            text = f"Content-Encoding {encoding} is not supported; send the body uncompressed"
            raise StrataError("unsupported_media_type", text)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.limits.body_bytes:
            raise self._too_large()

    async def read(self) -> bytes:
        """The whole body. Raises StrataError `body_too_large` as soon as it is."""
        body = bytearray()
        while not self.complete:
            body += await self._next()
            if len(body) > self.limits.body_bytes:
                body.clear()  # the error's traceback would keep it
                raise self._too_large()
        return bytes(body)

    async def linger(self) -> None:
        """Read on and drop what comes, for a while."""
        dropped = 0
        while not self.complete and dropped < LINGER_BYTES:
            dropped += len(await self._next())

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise _ClientLeft
        self.complete = not message.get("more_body", False)
        data: bytes = message.get("body", b"")
        return data

    def _too_large(self) -> StrataError:
        return StrataError("body_too_large", f"the request body is larger than {self.limits.body_bytes} bytes")


async def _refuse(reader: _BodyReader, send: Send, error: StrataError) -> None:
    await send_error(send, error, more=True)
    if error.name != "draining":
        try:
            async with asyncio.timeout(LINGER_S):
                await reader.linger()
        except (TimeoutError, _ClientLeft):
            pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body as one message and then what the connection says."""
    first = True

    async def replay() -> Message:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replay
