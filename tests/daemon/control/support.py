"""A control socket on a loop of its own thread, over a small service, so that tests can be plain blocking clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stratad.control import ControlServer, Limits, serve
from stratad.settings import Settings
from stratad.types import EngineFacts, Generation, GenRequest

INFO = {"engine": "0.1.0", "protocol": "1", "arithmetic": "1", "arch": "qwen35moe"}


class SmallService:
    """The part of the daemon that control sees; tests change `snapshot`, `facts` and `rows` at will."""

    def __init__(self) -> None:
        self.snapshot: dict[str, object] = {"state": "loading", "uptime_s": 1.5}
        self.facts: EngineFacts | None = None
        self.rows: Sequence[Mapping[str, object]] = Settings().describe()

    def status(self) -> dict[str, object]:
        if "fault" in self.snapshot:
            raise RuntimeError("made to fail")
        return dict(self.snapshot)

    def submit(self, request: GenRequest) -> Generation:
        raise NotImplementedError

    def ready(self) -> None:
        self.facts = EngineFacts(4096, INFO)
        self.snapshot = {**self.snapshot, "state": "ready"}


class Daemon:
    """A served control socket. Use `running`."""

    def __init__(self, server: ControlServer, service: SmallService, loop: asyncio.AbstractEventLoop) -> None:
        self.server = server
        self.service = service
        self.path = server.path
        self._loop = loop

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.server.close(), self._loop).result(10)

    def on_loop(self, function: Any) -> Any:
        """Run `function` on the server's loop and return its result."""

        async def call() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(10)


@contextlib.contextmanager
def running(path: Path, limits: Limits | None = None, group: int | None = None) -> Iterator[Daemon]:
    """Serve at `path` for the length of the block."""
    service = SmallService()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        starting = serve(service, path, settings_rows=lambda: service.rows, group=group, limits=limits)
        daemon = Daemon(asyncio.run_coroutine_threadsafe(starting, loop).result(10), service, loop)
        try:
            yield daemon
        finally:
            daemon.close()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


class Raw:
    """A client that sends whatever bytes it is told to."""

    def __init__(self, path: str | Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(10)
        self._received = b""
        try:
            self._connect(str(path))
        except OSError:
            self.sock.close()
            raise

    def _connect(self, path: str) -> None:
        while True:
            try:
                return self.sock.connect(path)
            except BlockingIOError:  # the backlog is full
                time.sleep(0.01)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, data: bytes | dict[str, object]) -> None:
        self.sock.sendall(data if isinstance(data, bytes) else json.dumps(data).encode() + b"\0")

    def reply(self) -> dict[str, Any]:
        """The next message; an empty dict when the server has hung up."""
        while b"\0" not in self._received:
            try:
                data = self.sock.recv(65536)
            except ConnectionResetError:
                data = b""
            if not data:
                return {}
            self._received += data
        message, _, self._received = self._received.partition(b"\0")
        parsed: dict[str, Any] = json.loads(message)
        return parsed

    def call(self, method: str, **extra: object) -> dict[str, Any]:
        self.send({"method": method, **extra})
        return self.reply()
