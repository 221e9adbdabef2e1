"""A client that leaves takes its work with it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from stratad.http.feed import HELD_EVENTS
from stratad.types import EngineFacts, Token

from tests.daemon.http.conftest import Server, request_bytes, until, within


def chat_body(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("abort", [True, False])
async def test_a_client_that_leaves_stops_the_engine(server: Server, stream: bool, abort: bool) -> None:
    server.service.steps = [*server.service.say("abc")[:-1], asyncio.Event()]
    reader, writer = await server.connect()
    writer.write(request_bytes(chat_body(stream=stream)))
    await until(lambda: bool(server.service.generations))
    if stream:
        await within(3, reader.readuntil(b"\n\n"))
    generation = server.service.generations[0]
    assert not generation.cancelled.is_set()
    if abort:
        writer.transport.abort()
    else:
        writer.close()
    await until(generation.cancelled.is_set, 0.5)
    await until(lambda: server.listeners.connections == 0)


async def test_a_client_that_leaves_before_anything_starts(server: Server) -> None:
    server.service.steps = [asyncio.Event()]  # queued: nothing comes
    _reader, writer = await server.connect()
    writer.write(request_bytes(chat_body(stream=True)))
    await until(lambda: bool(server.service.generations))
    writer.close()
    await until(server.service.generations[0].cancelled.is_set, 0.5)


async def test_a_client_that_leaves_in_mid_body_starts_nothing(server: Server) -> None:
    _reader, writer = await server.connect()
    writer.write(request_bytes(chat_body())[:-5])
    await writer.drain()
    writer.close()
    await until(lambda: server.listeners.connections == 0)
    assert server.service.generations == []


async def test_a_client_that_leaves_a_torrent(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """A generation that never waits must neither block the loop nor write to a closed connection."""
    server.service.facts = EngineFacts(10**6, {})
    token = server.service.tokens.encode("word")[0]
    server.service.steps = [Token(token)] * 200_000
    reader, writer = await server.connect()
    writer.write(request_bytes(chat_body(stream=True)))
    await within(3, reader.readuntil(b"word"))
    writer.transport.abort()
    await until(lambda: server.listeners.connections == 0)
    assert server.service.generations[0].tokens < 100_000
    assert "socket.send() raised" not in caplog.text


async def test_a_client_that_does_not_read_holds_back_only_itself(server: Server) -> None:
    server.service.facts = EngineFacts(10**6, {})
    token = server.service.tokens.encode("word")[0]
    server.service.steps = [Token(token)] * 200_000
    _reader, writer = await server.connect()
    writer.write(request_bytes(chat_body(stream=True)))
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    await until(lambda: bool(server.service.generations))
    generation = server.service.generations[0]
    seen = -1
    while seen != generation.tokens:  # until the buffers on the way are full
        seen = generation.tokens
        await asyncio.sleep(0.1)
    assert seen < 100_000
    assert (await within(2, server.client.get("/health"))).status_code == 200
    writer.transport.abort()
    await until(lambda: server.listeners.connections == 1)  # the one that asked for health
    assert generation.tokens < seen + 2 * HELD_EVENTS


async def test_pipelined_requests_on_one_connection_are_answered_in_turn(server: Server) -> None:
    reader, writer = await server.connect()
    writer.write(request_bytes(chat_body()) * 2)
    data = b""
    while data.count(b"Hello there.") < 2:
        data += await within(3, reader.read(65536))
    writer.close()
    assert len(server.service.generations) == 2
