"""The HTTP service on a real socket, with a scripted service behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from stratad.http.app import build_app
from stratad.http.context import HttpContext
from stratad.http.listeners import Listeners
from stratad.model_file import Model

from tests.daemon.scripted import ScriptedService

Events = list[dict[str, Any] | str]


class Server:
    """A running HTTP service, a client for it, and the script behind it."""

    def __init__(self, model: Model) -> None:
        self.service = ScriptedService(model.tokens)
        self.context = HttpContext(self.service, self.service.settings, model)
        self.listeners = Listeners(self.service.settings, self.context.drain)
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> None:
        self.listeners.bind("127.0.0.1:0")
        await self.listeners.start(build_app(self.context))
        self.url = f"http://{self.listeners.addresses[0]}"
        self.port = int(self.url.rpartition(":")[2])
        self.client = httpx.AsyncClient(base_url=self.url, timeout=10, verify=False)  # no TLS here; saves loading CAs

    async def stop(self) -> None:
        await self.client.aclose()
        await self.listeners.close(0)
        for writer in self._writers:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def chat(self, **fields: Any) -> httpx.Response:
        """POST a chat with one user message, unless `messages` is given."""
        body = {"messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def complete(self, **fields: Any) -> httpx.Response:
        """POST a completion."""
        return await self.client.post("/v1/completions", json={"prompt": "hi", **fields})

    async def stream(self, path: str = "/v1/chat/completions", **fields: Any) -> Events:
        """The events of a streamed answer: parsed JSON, or the text of what is none."""
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}
        response = await self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return events_of(response.text)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A bare connection, closed at the latest when the server stops."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._writers.append(writer)
        return reader, writer

    async def post_raw(self, body: bytes, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
        """POST bytes as they are."""
        return await self.client.post(path, content=body, headers={"Content-Type": "application/json", **headers})


def events_of(text: str) -> Events:
    """Events of an SSE body; comments are left out."""
    assert text.endswith("\n\n")
    blocks = [block for block in text[:-2].split("\n\n") if not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [json.loads(block[6:]) if block[6:] != "[DONE]" else "[DONE]" for block in blocks]


def request_bytes(body: bytes | dict[str, Any], path: str = "/v1/chat/completions") -> bytes:
    """A whole HTTP/1.1 request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


async def until(condition: Callable[[], bool], seconds: float = 3.0) -> None:
    """Wait for something to become true, or fail."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def within(seconds: float, work: Awaitable[Any]) -> Any:
    """The result of `work`, which must not take longer."""
    async with asyncio.timeout(seconds):
        return await work


async def cut_off(reader: asyncio.StreamReader) -> bool:
    """Whether the other side closes the connection, in whatever way, without having said anything."""
    try:
        return await within(2, reader.read()) == b""
    except ConnectionResetError:
        return True


@pytest.fixture
async def server(model: Model) -> AsyncIterator[Server]:
    """A service that answers "Hello there."."""
    running = Server(model)
    await running.start()
    yield running
    await running.stop()
