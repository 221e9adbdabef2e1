"""Bodies that are too large, too slow, broken or disguised; the others never notice."""

from __future__ import annotations

import asyncio
import gzip
import json
import resource

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stratad.errors import StrataError
from stratad.http.json_body import DEPTH_LIMIT, parse_object

from tests.daemon.http.conftest import Server, cut_off, within

MIB = 1024 * 1024


def nested(levels: int) -> bytes:
    return b'{"a":' * (levels - 1) + b"{}" + b"}" * (levels - 1)


BROKEN: list[tuple[bytes, str]] = [
    (b"", "no body"),
    (b"   ", "no body"),
    (b'{"messages":', "not valid JSON: .* at line 1 column 13"),
    (b'{"messages": [1,]}', "not valid JSON"),
    (b'{"a": NaN}', "NaN is not a JSON value"),
    (b'{"a": -Infinity}', "-Infinity is not a JSON value"),
    (b'{"a": 1e999}', "number 1e999 is too large"),
    (b'{"a": ' + b"9" * 5000 + b"}", "number that is too long"),
    (b"[" * 100_000, "nested more than 64"),
    (nested(DEPTH_LIMIT + 1), "nested more than 64"),
    (b'{"a": "\\ud800"}', r"\\ud800 alone is half a character"),
    (b'{"\\udfff": 1}', r"\\udfff alone is half a character"),
    (b'{"a": "\\ud83d\\u0041"}', "half a character"),
    (b'{"a": 1, "b": 2, "a": 3}', 'name "a" stands twice'),
    ('{"a": "é"}'.encode("latin-1"), r"not UTF-8 \(byte 7\)"),
    (b"\x1f\x8b\x08", "not UTF-8"),
    (b"a=b&c=d", "not valid JSON"),
]


@pytest.mark.parametrize(("body", "words"), BROKEN, ids=lambda value: str(value)[:30])
def test_broken_json_is_named(body: bytes, words: str) -> None:
    with pytest.raises(StrataError, match=words) as caught:
        parse_object(body)
    assert caught.value.name == "invalid_json"


@pytest.mark.parametrize("body", [b"[]", b'"x"', b"3", b"null", b"true"])
def test_other_json_values_are_no_request(body: bytes) -> None:
    with pytest.raises(StrataError, match="must be a JSON object, not ") as caught:
        parse_object(body)
    assert caught.value.name == "invalid_value"


def test_what_is_allowed() -> None:
    assert parse_object(nested(DEPTH_LIMIT)) is not None
    assert parse_object(b'\xef\xbb\xbf{"a": "\\ud83d\\ude38 \\u0000"}') == {"a": "😸 \0"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), JSON, max_size=4), st.booleans())
def test_every_ordinary_object_is_read_as_it_is(value: dict[str, object], ascii_only: bool) -> None:
    assert parse_object(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(st.binary(max_size=60))
def test_arbitrary_bytes_never_do_worse_than_an_error(data: bytes) -> None:
    try:
        parse_object(data)
    except StrataError as error:
        assert error.kind.status == 400


@pytest.mark.parametrize(("body", "words"), BROKEN[2:5], ids=lambda value: str(value)[:30])
async def test_broken_json_is_a_400_over_http(server: Server, body: bytes, words: str) -> None:
    response = await server.post_raw(body)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "nonsense"])
async def test_content_types_are_not_looked_at(server: Server, kind: str) -> None:
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    assert (await server.post_raw(body, **{"Content-Type": kind})).status_code == 200


async def test_compressed_bodies_are_refused_without_being_opened(server: Server) -> None:
    bomb = gzip.compress(b" " * 10 * MIB)
    response = await server.post_raw(bomb, **{"Content-Encoding": "gzip"})
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_media_type")
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    assert (await server.post_raw(body, **{"Content-Encoding": "identity"})).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_a_413_with_memory_flat(server: Server, chunked: bool) -> None:
    server.service.settings.set_runtime("body_limit_mib", 1)
    piece = b"x" * 65536

    async def body() -> object:
        for _ in range(100 * MIB // len(piece)):
            yield piece

    headers = {} if chunked else {"Content-Length": str(100 * MIB)}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    response = await server.client.post("/v1/completions", content=body(), headers=headers)  # type: ignore[arg-type]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    assert grown < 20 * 1024  # KiB


async def test_a_body_at_the_limit_is_read(server: Server) -> None:
    server.service.settings.set_runtime("body_limit_mib", 1)
    start = b'{"prompt": "hi", "user": "'
    body = start + b"x" * (MIB - len(start) - 2) + b'"}'
    assert len(body) == MIB
    assert (await server.post_raw(body, "/v1/completions")).status_code == 200
    assert (await server.post_raw(body + b" ", "/v1/completions")).status_code == 413


async def test_a_slow_body_is_a_408(server: Server) -> None:
    server.service.settings.set_runtime("request_limit_s", 0.2)
    reader, writer = await server.connect()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n")

    async def drip() -> None:
        for _ in range(50):
            writer.write(b"x")
            await asyncio.sleep(0.05)

    dripping = asyncio.create_task(drip())
    answer = await within(3, reader.readuntil(b"\r\n\r\n"))
    assert answer.startswith(b"HTTP/1.1 408")
    assert (await server.chat()).status_code == 200  # the others are unaffected
    dripping.cancel()
    writer.close()


async def test_a_head_that_does_not_end_is_cut(server: Server) -> None:
    server.service.settings.set_runtime("header_limit_s", 0.1)
    reader, writer = await server.connect()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-")
    assert await cut_off(reader)


async def test_a_head_that_is_too_large_is_refused(server: Server) -> None:
    server.service.settings.set_runtime("header_limit_kib", 4)
    with pytest.raises(httpx.RemoteProtocolError):  # cut while it is still being sent, or refused in words
        response = await server.client.get("/health", headers={"X-Long": "x" * 200_000})
        assert response.status_code == 431
        raise httpx.RemoteProtocolError("refused")


async def test_an_unused_connection_is_closed(server: Server) -> None:
    server.service.settings.set_runtime("keep_alive_s", 0.1)
    reader, writer = await server.connect()
    assert await within(2, reader.read()) == b""
    writer.close()
