"""Addresses come and go; the end is orderly with streams, idle connections and half requests open."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send
from stratad.http.drain import Drain
from stratad.http.listeners import BindError, Listeners, port_owner
from stratad.settings import Settings
from stratad.types import EngineFacts, Token

from tests.daemon.http.conftest import Server, cut_off, events_of, request_bytes, until, within


async def hello(_scope: Scope, _receive: Receive, send: Send) -> None:
    """An application."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello", "more_body": False})


@pytest.fixture
async def listeners() -> AsyncIterator[Listeners]:
    """Listeners without an address."""
    made = Listeners(Settings(), Drain())
    await made.start(hello)
    yield made
    await made.close(0)


async def get(address: str) -> str:
    async with httpx.AsyncClient(verify=False) as client:
        return (await client.get(f"http://{address}/")).text


async def test_addresses_come_and_go_while_others_serve(listeners: Listeners) -> None:
    await listeners.add("127.0.0.1:0")
    first = listeners.addresses[0]
    await listeners.add("[::1]:0")
    assert listeners.addresses[1].startswith("[::1]:")
    assert [await get(address) for address in listeners.addresses] == ["hello", "hello"]
    await listeners.remove("127.0.0.1:0")
    with pytest.raises(httpx.ConnectError):
        await get(first)
    assert await get(listeners.addresses[0]) == "hello"
    await until(lambda: len(listeners.addresses) == 1)
    await listeners.add("127.0.0.1:0")
    assert len(listeners.addresses) == 2


async def test_a_removed_address_lets_its_answer_end(server: Server) -> None:
    go = asyncio.Event()
    server.service.steps = [*server.service.say("first")[:-1], go, *server.service.say(" last")]
    task = asyncio.create_task(server.stream())
    await until(lambda: bool(server.service.generations))
    await server.listeners.remove("127.0.0.1:0")
    assert server.listeners.addresses == []
    go.set()
    assert "last" in json.dumps(await within(3, task))
    await until(lambda: server.listeners.connections == 0)


async def test_a_name_with_two_families_uses_one_port(listeners: Listeners) -> None:
    await listeners.add("localhost:0")
    assert len({address.rpartition(":")[2] for address in listeners.addresses}) == 1


def test_a_taken_port_is_named_with_its_owner() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        comm = Path(f"/proc/{os.getpid()}/comm").read_text().strip()
        assert port_owner(port) == f"{comm} (pid {os.getpid()})"
        with pytest.raises(BindError, match=rf"cannot listen on 127.0.0.1:{port}: the port is in use by .*pid"):
            Listeners(Settings(), Drain()).bind(f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("address", "words"),
    [("192.0.2.1:80", "cannot listen on 192.0.2.1:80: "), ("no.such.host.invalid:80", "no.such.host.invalid:80")],
)
def test_an_address_that_is_not_ours_is_named(address: str, words: str) -> None:
    with pytest.raises(BindError, match=words):
        Listeners(Settings(), Drain()).bind(address)


def test_nobody_owns_a_free_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert port_owner(port) is None


async def test_a_port_can_be_taken_again_at_once(server: Server) -> None:
    """Connections that this side closed linger in TIME_WAIT; they must not be in the way."""
    for _ in range(3):
        await server.chat()
    await server.listeners.close(0)
    again = Listeners(Settings(), Drain())
    again.bind(f"127.0.0.1:{server.port}")
    await again.close(0)


async def test_connections_beyond_the_limit_are_closed(server: Server) -> None:
    server.service.settings.set_runtime("connection_limit", 2)
    kept = [await server.connect() for _ in range(2)]
    await until(lambda: server.listeners.connections == 2)
    reader, writer = await server.connect()
    assert await cut_off(reader)
    for _, other in [*kept, (reader, writer)]:
        other.close()
    await until(lambda: server.listeners.connections == 0)
    assert (await server.client.get("/health")).status_code == 200


async def open_stream(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A stream of which the first text has arrived."""
    reader, writer = await server.connect()
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    writer.write(request_bytes(body))
    await within(3, reader.readuntil(b'"content":"a"'))
    return reader, writer


async def rest_of_stream(reader: asyncio.StreamReader) -> list[Any]:
    """Its last events, without the transfer encoding."""
    data = (await within(3, reader.read())).decode()
    payload = "".join(line for line in data.split("\r\n") if "data: " in line)
    return events_of("data: " + payload.partition("data: ")[2])


async def test_the_end_with_everything_open(server: Server) -> None:
    server.service.steps = [*server.service.say("a")[:-1], asyncio.Event()]
    streams = [await open_stream(server) for _ in range(2)]
    plain = asyncio.create_task(server.chat())
    idle = await server.connect()
    half_head = await server.connect()
    half_head[1].write(b"POST /v1/completions HTTP/1.1\r\nHos")
    half_body = await server.connect()
    half_body[1].write(request_bytes({"prompt": "hi"})[:-3])
    await until(lambda: server.listeners.connections == 6 and len(server.service.generations) == 3)
    await asyncio.sleep(0.05)

    await server.listeners.stop_accepting()
    assert server.listeners.addresses == []
    with pytest.raises(ConnectionRefusedError):
        await server.connect()
    assert await within(1, idle[0].read()) == b""
    assert await within(1, half_head[0].read()) == b""
    assert (await within(1, half_body[0].read())).startswith(b"HTTP/1.1 503")
    await until(lambda: server.listeners.connections == 3)
    assert not any(generation.cancelled.is_set() for generation in server.service.generations)

    started = time.monotonic()
    await server.listeners.close(0.2)
    assert time.monotonic() - started < 1.0
    for reader, writer in streams:
        events = await rest_of_stream(reader)
        assert events[-2]["error"]["code"] == "draining"
        assert events[-1] == "[DONE]"
        writer.close()
    response = await plain
    assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
    assert all(generation.cancelled.is_set() for generation in server.service.generations)
    for _, writer in (idle, half_head, half_body):
        writer.close()


async def test_answers_that_end_in_time_are_complete(server: Server) -> None:
    server.service.steps = [*server.service.say("a")[:-1], 0.2, *server.service.say(" whole answer")]
    reader, writer = await open_stream(server)
    await server.listeners.stop_accepting()
    await server.listeners.close(3)
    events = await rest_of_stream(reader)
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    writer.close()


async def test_a_client_that_does_not_read_cannot_delay_the_end(server: Server) -> None:
    server.service.facts = EngineFacts(10**6, {})
    token = server.service.tokens.encode(" word")[0]
    server.service.steps = [Token(token)] * 50_000
    assert server.context.model is not None
    reader, writer = await server.connect()
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    writer.write(request_bytes(body))
    await until(lambda: bool(server.service.generations))
    started = time.monotonic()
    await server.listeners.close(0.1)
    assert time.monotonic() - started < 4
    assert server.listeners.connections == 0
    writer.close()
    del reader


async def test_closing_twice_and_without_a_start_is_fine() -> None:
    listeners = Listeners(Settings(), Drain())
    listeners.bind("127.0.0.1:0")
    await listeners.close(0)
    await listeners.close(0)
    assert listeners.addresses == []
