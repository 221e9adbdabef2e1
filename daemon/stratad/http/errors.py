"""Failures as HTTP answers, all in the OpenAI form and all made from `stratad.errors.KINDS`."""

from __future__ import annotations

import json
import math
from typing import Any

from starlette.types import Send
from stratad.errors import StrataError

encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def error_object(error: StrataError) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`."""
    kind = error.kind
    return {
        "error": {"message": error.message, "type": kind.openai_type, "param": error.param, "code": error.name},
    }


def error_headers(error: StrataError) -> dict[str, str]:
    """`Retry-After` for failures that pass by themselves."""
    if error.retry_after is None and not error.kind.retry:
        return {}
    return {"Retry-After": str(max(1, math.ceil(error.retry_after or 1)))}


def json_bytes(value: object) -> bytes:
    """Compact UTF-8 JSON; text that is no UTF-8 (a lone surrogate) is replaced."""
    return encode_json(value).encode("utf-8", "replace")


async def send_json(
    send: Send, status: int, value: object, headers: dict[str, str] | None = None, *, more: bool = False
) -> None:
    """A whole JSON answer. With `more` the answer is complete for the client, but the exchange stays open."""
    body = json_bytes(value)
    head = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    raw = [(name.lower().encode(), text.encode("latin-1", "replace")) for name, text in head.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def send_error(send: Send, error: StrataError, *, more: bool = False) -> None:
    """The HTTP answer for a named failure."""
    await send_json(send, error.kind.status, error_object(error), error_headers(error), more=more)
