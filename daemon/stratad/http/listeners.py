"""Addresses that serve HTTP. They can come and go while others serve; the order of the end is ours.

1. `stop_accepting`: listening sockets are closed, unused connections too, unfinished requests are turned away.
2. Running answers go on; each connection closes after its own.
3. `close`: what still runs gets its last words (an error event in a stream), then connections are cut.

Nothing here waits for `asyncio.Server.wait_closed`, which may never return while a stream is open.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hypercorn.asyncio.worker_context import WorkerContext
from starlette.types import ASGIApp
from stratad.http.drain import Drain
from stratad.http.hypercorn_wrapper import Connection, make_config, new_context
from stratad.settings import Settings, parse_address

log = logging.getLogger(__name__)

BACKLOG = 512
CUT_WAIT_S = 1.0
"""For connections to end after they were cut."""


class BindError(OSError):
    """An address that cannot be served; the message names it, and its owner where /proc tells."""


@dataclass
class _Address:
    sockets: list[socket.socket]
    context: WorkerContext = field(default_factory=new_context)
    servers: list[asyncio.Server] = field(default_factory=list)
    connections: dict[asyncio.Task[None], Connection] = field(default_factory=dict)
    stopped: bool = False

    @property
    def bound(self) -> list[str]:
        return [_name(sock.getsockname()) for sock in self.sockets]


class Listeners:
    """All addresses of the daemon, and the application behind them."""

    def __init__(self, settings: Settings, drain: Drain) -> None:
        self._settings, self._drain = settings, drain
        self._app: ASGIApp | None = None
        self._addresses: dict[str, _Address] = {}
        self._leaving: list[_Address] = []  # no longer served, kept for their open connections
        self._full = False

    @property
    def addresses(self) -> Sequence[str]:
        """Where it is served, as HOST:PORT, with the ports that the system chose."""
        return [name for address in self._addresses.values() for name in address.bound]

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return len(self._open())

    def bind(self, name: str) -> None:
        """Take an address (`HOST:PORT`, `[::1]:PORT`) without serving it yet. Raises BindError."""
        if name not in self._addresses:
            self._addresses[name] = _Address(_bind(name))

    async def start(self, app: ASGIApp) -> None:
        """Serve `app` on every address that is bound."""
        self._app = app
        for address in list(self._addresses.values()):
            await self._serve(address)

    async def add(self, name: str) -> None:
        """Bind and serve one more address. Raises BindError."""
        self.bind(name)
        await self._serve(self._addresses[name])

    async def remove(self, name: str) -> None:
        """Stop serving an address. Its running answers go on until `close`."""
        await self._stop(name)

    async def stop_accepting(self) -> None:
        """Step 1 of the end: nothing new."""
        self._drain.begin()
        for name in list(self._addresses):
            await self._stop(name)

    async def close(self, grace_s: float) -> None:
        """Step 3 of the end. Takes `grace_s` for answers to end by themselves, and at most 3 seconds more."""
        await self.stop_accepting()
        await self._wait_closed(grace_s)
        self._drain.cut()
        await self._wait_closed(CUT_WAIT_S)
        for task, connection in self._open():
            connection.abort()
            log.debug("connection %s did not end by itself", task.get_name())
        await self._wait_closed(CUT_WAIT_S)
        for task, _connection in self._open():
            task.cancel()
        await self._wait_closed(CUT_WAIT_S)

    async def _serve(self, address: _Address) -> None:
        if address.servers:
            return

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._connection(address, reader, writer)

        for sock in address.sockets:
            address.servers.append(await asyncio.start_server(accept, sock=sock, backlog=BACKLOG))

    async def _stop(self, name: str) -> None:
        address = self._addresses.pop(name)
        address.stopped = True
        self._leaving = [other for other in (*self._leaving, address) if other.connections]
        for server in address.servers:
            server.close()
        for sock in address.sockets:
            sock.close()
        await address.context.terminated.set()

    async def _connection(self, address: _Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._app is not None
        if not self._has_room() or address.stopped:
            writer.transport.abort()
            return
        _set_no_delay(writer)
        config = make_config(self._settings.integer("header_limit_kib") * 1024, self._settings.number("keep_alive_s"))
        seconds = self._settings.number("header_limit_s")
        connection = Connection(self._app, address.context, config, seconds, (reader, writer))
        task = asyncio.current_task()
        assert task is not None
        address.connections[task] = connection
        try:
            await connection.serve()
        finally:
            del address.connections[task]

    def _has_room(self) -> bool:
        limit = self._settings.integer("connection_limit")
        full = self.connections >= limit
        if full and not self._full:
            log.warning("connection_limit %d reached: further connections are closed at once", limit)
        self._full = full
        return not full

    def _open(self) -> list[tuple[asyncio.Task[None], Connection]]:
        addresses = (*self._addresses.values(), *self._leaving)
        return [item for address in addresses for item in address.connections.items()]

    async def _wait_closed(self, seconds: float) -> None:
        tasks = [task for task, _connection in self._open()]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)


def _set_no_delay(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _bind(name: str) -> list[socket.socket]:
    """Listening sockets for every address that the host has. A port in TIME_WAIT is no obstacle."""
    host, port = parse_address(name)
    bound: list[socket.socket] = []
    try:
        for family, address in _resolve(host, port):
            chosen = bound[0].getsockname()[1] if bound and port == 0 else address[1]
            bound.append(_listen(family, (address[0], chosen, *address[2:])))
    except OSError as error:
        for sock in bound:
            sock.close()
        raise BindError(error.errno or 0, f"cannot listen on {name}: {_reason(error, port)}") from None
    return bound


def _resolve(host: str, port: int) -> Iterable[tuple[int, tuple[str, int]]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return dict.fromkeys((int(family), address) for family, _, _, _, address in found)  # type: ignore[misc]


def _listen(family: int, address: tuple[str | int, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _name(address: tuple[str, int]) -> str:
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _reason(error: OSError, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        owner = port_owner(port)
        return f"the port is in use{f' by {owner}' if owner else ''}"
    if error.errno == errno.EACCES:
        return "this user may not use the port (below 1024 needs CAP_NET_BIND_SERVICE)"
    return error.strerror or str(error)


def port_owner(port: int) -> str | None:
    """`name (pid N)` of the process that listens on a TCP port, where /proc tells; None otherwise."""
    inodes = {inode for table in ("tcp", "tcp6") for inode in _listening_inodes(Path("/proc/net") / table, port)}
    if not inodes:
        return None
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            links = (os.readlink(link) for link in (process / "fd").iterdir())
            if any(match and match[1] in inodes for match in map(re.compile(r"socket:\[(\d+)\]").fullmatch, links)):
                return f"{(process / 'comm').read_text().strip()} (pid {process.name})"
    return None


def _listening_inodes(table: Path, port: int) -> Iterable[str]:
    """Inodes of sockets in state LISTEN (0A) on `port`: columns are sl, local, remote, state, ..., inode."""
    try:
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
    except OSError:
        return []
    return [row[9] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port]
