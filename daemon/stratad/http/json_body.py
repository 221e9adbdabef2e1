"""Reading a request's JSON strictly: what is ambiguous or dangerous is refused, with the reason."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from stratad.errors import StrataError

DEPTH_LIMIT = 64
"""Nesting allowed in a request; tool schemas stay far below it."""

OFF_LOOP_BYTES = 256 * 1024
"""Larger bodies are parsed on a thread."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class _Strict(ValueError):
    """Something that JSON or we do not allow; the text is for the user."""


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`. Raises StrataError `invalid_json` (or `invalid_value` for another JSON value)."""
    if not data.strip():
        raise StrataError("invalid_json", "the request has no body; a JSON object is needed")
    value = _parse(data)
    if not isinstance(value, dict):
        raise StrataError("invalid_value", f"the request body must be a JSON object, not {kind_of(value)}")
    return value


def kind_of(value: object) -> str:
    """The JSON name of a value's type, for messages."""
    if value is None:
        return "null"
    return _KINDS[type(value)]


_KINDS = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array", dict: "an object"}


def _parse(data: bytes) -> object:
    try:
        text = data.decode("utf-8-sig")
        value = json.loads(
            text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_without_duplicates
        )
        _check_depth(value)
        if _SURROGATE.search(data):
            _check_surrogates(value)
    except UnicodeDecodeError as error:
        raise StrataError("invalid_json", f"the request body is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise StrataError("invalid_json", _too_deep()) from None
    except _Strict as error:
        raise StrataError("invalid_json", str(error)) from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise StrataError("invalid_json", f"the request body is not valid JSON: {error.msg} at {where}") from None
    except ValueError as error:  # a whole number of thousands of digits
        raise StrataError("invalid_json", f"the request body holds a number that is too long: {error}") from None
    return value


def _refuse_constant(name: str) -> object:
    raise _Strict(f"{name} is not a JSON value")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise _Strict(f"the number {text[:40]} is too large")
    return number


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise _Strict(f"the name {json.dumps(twice)} stands twice in one object")
    return members


def _too_deep() -> str:
    return f"the request body is nested more than {DEPTH_LIMIT} levels deep"


def _members(value: object) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(DEPTH_LIMIT):
        level = [item for parent in level for item in _members(parent) if isinstance(item, dict | list)]
        if not level:
            return
    raise _Strict(_too_deep())


def _check_surrogates(value: object) -> None:
    """Refuse half a character: it has no UTF-8 form, so no tokens."""
    stack: list[object] = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            try:
                item.encode()
            except UnicodeEncodeError as error:
                code = ord(item[error.start])
                raise _Strict(f"\\u{code:04x} alone is half a character (a lone surrogate)") from None
        elif isinstance(item, dict):
            stack += item.keys()
            stack += item.values()
        elif isinstance(item, list):
            stack += item
