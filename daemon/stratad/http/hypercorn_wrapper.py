"""The only place that knows Hypercorn's insides (pinned to 0.18): one connection, served by its protocol classes.

Hypercorn's own server loop is not used: it waits for `asyncio.Server.wait_closed`, which on Python 3.12 and later
does not return while a stream is open. What is used: `TCPServer`, one per connection, and `WorkerContext`, whose
`terminated` event closes idle connections at once and the others after their answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.asyncio.tcp_server import MAX_RECV, TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData
from hypercorn.protocol.h2 import H2Protocol
from starlette.types import ASGIApp, Receive, Scope, Send

log = logging.getLogger(__name__)


class Connection:
    """One accepted connection. `serve` returns when it is closed."""

    def __init__(
        self,
        app: ASGIApp,
        context: WorkerContext,
        config: Config,
        header_seconds: float,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        self._app = app
        self._context, self._config = context, config
        self._reader, self._writer = streams
        self._head = _HeadTimer(header_seconds, self.abort)
        self._requests = 0

    async def serve(self) -> None:
        """Speak HTTP/1.1 (or HTTP/2 with prior knowledge) until either side closes."""
        loop = asyncio.get_running_loop()
        app: Any = ASGIWrapper(self._request)  # type: ignore[arg-type]
        server = _Server(app, loop, self._config, self._context, {}, self._reader, self._writer)
        server.on_data = lambda: self._on_data(server)
        try:
            await server
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            _log_failure(error)
        finally:
            self._head.cancel()
            self.abort()

    def abort(self) -> None:
        """Close at once, dropping what has not been sent."""
        self._writer.transport.abort()

    def _on_data(self, server: _Server) -> None:
        """Bytes came: between HTTP/1 requests they begin a head, which then has to be complete in time."""
        if self._requests == 0 and not isinstance(server.protocol.protocol, H2Protocol):
            self._head.start()

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._head.cancel()
        self._requests += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._requests -= 1


class _HeadTimer:
    """Calls back unless cancelled in time; starting it twice keeps the first time."""

    def __init__(self, seconds: float, late: Callable[[], None]) -> None:
        self._seconds, self._late = seconds, late
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(self._seconds, self._late)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class _Server(TCPServer):
    """Hypercorn's connection, with a word to us for every read, and without waiting for a client that has left."""

    on_data: Callable[[], None]
    _over = False

    async def _read_data(self) -> None:
        while not self.reader.at_eof():
            try:
                data = await self.reader.read(MAX_RECV)
            except OSError:
                break
            if data:
                self.on_data()
            await self.protocol.handle(RawData(data))
        self._over = True
        await self.idle_task.stop()
        await self.protocol.handle(Closed())

    async def protocol_send(self, event: Event) -> None:
        """As Hypercorn's, without lock and wait where the kernel takes everything at once."""
        if type(event) is RawData and not self.send_lock.locked() and not self.writer.is_closing():
            self.writer.write(event.data)
            if self.writer.transport.get_write_buffer_size() == 0:
                return
            event = RawData(b"")
        await super().protocol_send(event)

    async def _idle_timeout(self) -> None:
        if not self._over:  # else the connection would be kept for the rest of the time
            await super()._idle_timeout()


def _log_failure(error: BaseException) -> None:
    """A fault in the protocol classes costs one connection; a reset by the client is no fault."""
    parts = error.exceptions if isinstance(error, BaseExceptionGroup) else (error,)
    if not all(isinstance(part, OSError) for part in parts):
        log.warning("a connection failed: %s", "; ".join(repr(part) for part in parts))
    for part in parts:
        if isinstance(part, KeyboardInterrupt | SystemExit):
            raise part


def make_config(header_bytes: int, keep_alive_seconds: float) -> Config:
    """Hypercorn's settings for a connection."""
    config = Config()
    config.h11_max_incomplete_size = header_bytes
    config.h2_max_header_list_size = header_bytes
    config.keep_alive_timeout = keep_alive_seconds
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = log
    return config


def new_context() -> WorkerContext:
    """State that the connections of one address share."""
    return WorkerContext(None)
