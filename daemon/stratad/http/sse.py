"""Server-sent events, built so that a token costs one small string to encode and a few bytes to join."""

from __future__ import annotations

from typing import Any

from stratad.errors import StrataError
from stratad.http.errors import encode_json, error_object, json_bytes

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

SLOT = "\ue000slot\ue000"
"""Stands for the text in the value of an `EventTemplate`."""


def event(value: object) -> bytes:
    """One event with a JSON value."""
    return b"data: " + json_bytes(value) + b"\n\n"


def error_event(error: StrataError) -> bytes:
    """The event that ends a stream which has failed."""
    return event(error_object(error))


class EventTemplate:
    """An event whose JSON stays the same but for one text."""

    __slots__ = ("_after", "_before")

    def __init__(self, value: Any) -> None:
        """`value` holds `SLOT` exactly once, as a text."""
        before, after = event(value).split(json_bytes(SLOT))
        self._before, self._after = before, after

    def fill(self, text: str) -> bytes:
        """The event with `text` in its place."""
        return b"".join((self._before, encode_json(text).encode(), self._after))
