"""Varlink messages as bytes: one JSON object, ended by a NUL byte, within limits a hostile peer cannot stretch.

The framing is ours rather than the library's because a control socket must survive any input: `decode` bounds size
(by the reader's limit), nesting and spelling before a single value is looked at.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from asyncvarlink import VarlinkMethodCall, VarlinkMethodReply

END = b"\0"
MESSAGE_LIMIT = 1 << 20  # bytes of one message without its NUL
DEPTH_LIMIT = 64  # arrays and objects inside each other


class WireError(Exception):
    """Bytes that are not a Varlink call. The connection cannot be trusted to be in step afterwards and is closed."""


def decode(message: bytes) -> VarlinkMethodCall:
    """The call in `message` (without its NUL). Raises WireError with a sentence that says what is wrong."""
    try:
        value = json.loads(message.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        raise WireError(_TOO_DEEP) from None
    except ValueError as err:  # UnicodeDecodeError, JSONDecodeError and numbers of absurd length
        raise WireError(f"the message is not JSON: {err}") from None
    _check_depth(value)
    try:
        return VarlinkMethodCall.fromjson(value)
    except (TypeError, ValueError) as err:
        raise WireError(f"the message is not a Varlink call: {err}") from None


def encode(reply: VarlinkMethodReply) -> bytes:
    """The bytes of one reply, NUL included. ASCII only, so lone surrogates in echoed names cannot fail."""
    return json.dumps(reply.tojson(), separators=(",", ":"), allow_nan=False).encode("ascii") + END


_TOO_DEEP = f"the message nests deeper than {DEPTH_LIMIT} levels"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _check_depth(value: Any) -> None:
    """Walk level by level: recursion here would be the very fault this guards against."""
    level = [value]
    for _ in range(DEPTH_LIMIT):
        level = [child for node in level for child in _children(node) if isinstance(child, dict | list)]
        if not level:
            return
    raise WireError(_TOO_DEEP)


def _children(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return list(node.values())
    return node if isinstance(node, list) else []
