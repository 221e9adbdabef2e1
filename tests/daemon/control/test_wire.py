"""Messages as bytes: what is taken, and that nothing a peer can write gets past `decode` as anything but WireError."""

from __future__ import annotations

import json

import pytest
from asyncvarlink import VarlinkMethodReply
from stratad.control.wire import DEPTH_LIMIT, WireError, decode, encode

METHOD = "io.strata.Control.Status"


def nested(levels: int) -> bytes:
    """A call whose own braces are two of the `levels`."""
    inner = "[" * (levels - 2) + "]" * (levels - 2)
    return f'{{"method":"{METHOD}","parameters":{{"x":{inner}}}}}'.encode()


def test_a_call_is_read() -> None:
    call = decode(b'{"method":"io.strata.Control.Watch","parameters":{"interval_ms":100},"more":true}')
    assert (call.method, call.parameters, call.more) == ("io.strata.Control.Watch", {"interval_ms": 100}, True)


def test_unknown_members_of_a_call_are_skipped() -> None:
    assert decode(f'{{"method":"{METHOD}","later":1}}'.encode()).method == METHOD


def test_depth_at_the_limit_passes_and_one_more_does_not() -> None:
    assert decode(nested(DEPTH_LIMIT)).method == METHOD
    with pytest.raises(WireError, match="deeper than 64"):
        decode(nested(DEPTH_LIMIT + 1))


def test_depth_beyond_any_stack() -> None:
    with pytest.raises(WireError, match="deeper than 64"):
        decode(nested(200_000))


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"{",
        b"nonsense",
        b"\xff\xfe{}",
        b'{"method":"io.strata.Control.Status","parameters":{"x":NaN}}',
        b'{"method":"io.strata.Control.Status","parameters":{"x":-Infinity}}',
        b'{"method":"io.strata.Control.Status","parameters":{"x":' + b"9" * 5000 + b"}}",
        '{"method":"io.strata.Control.Status"}'.encode("utf-16"),
    ],
)
def test_what_is_not_json_is_refused(message: bytes) -> None:
    with pytest.raises(WireError, match="not JSON"):
        decode(message)


@pytest.mark.parametrize(
    "value",
    [
        [],
        None,
        "io.strata.Control.Status",
        {},
        {"method": 3},
        {"method": "Status"},
        {"method": "io.strata.Control.status"},
        {"method": "io.strata.Control."},
        {"method": ".Status"},
        {"method": METHOD, "parameters": []},
        {"method": METHOD, "more": 1},
        {"method": METHOD, "oneway": True, "more": True},
    ],
)
def test_json_that_is_not_a_call_is_refused(value: object) -> None:
    with pytest.raises(WireError, match="not a Varlink call"):
        decode(json.dumps(value).encode())


def test_replies_are_ascii_and_hold_any_text() -> None:
    data = encode(VarlinkMethodReply({"text": "caf\u00e9 \ud800 \0"}))
    assert data.endswith(b"\0") and data.count(b"\0") == 1
    assert json.loads(data[:-1])["parameters"]["text"] == "caf\u00e9 \ud800 \0"
