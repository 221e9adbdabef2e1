"""The `messages` and `tools` of a chat request, checked and brought to the form that templates expect."""

from __future__ import annotations

from typing import Any

from stratad.errors import StrataError
from stratad.http.json_body import kind_of
from stratad.http.params import Fields, invalid

ROLES: dict[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""Role in a request -> role in the template (no template knows "developer")."""

TEXT_PARTS: dict[str, str] = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Type of a content part -> the field with its text."""

PASSED_TEXTS = ("name", "tool_call_id", "reasoning_content")


def messages(fields: Fields) -> list[dict[str, Any]]:
    """The conversation, contents as one text each. Raises StrataError `invalid_value` with the place as `param`.

    Any order of roles is taken; what a model's template makes of an odd one is the template's business.
    """
    given = fields.get("messages")
    if not isinstance(given, list) or not given:
        raise _wrong("messages", "must be a list with at least one message", given)
    return [_message(f"messages[{i}]", message) for i, message in enumerate(given)]


def tools(fields: Fields) -> list[dict[str, Any]] | None:
    """The tools to show the model; none with `"tool_choice": "none"`."""
    given = fields.get("tools")
    if given is None:
        return None
    if not isinstance(given, list):
        raise _wrong("tools", "must be a list", given)
    for i, tool in enumerate(given):
        _check_tool(f"tools[{i}]", tool)
    return None if fields.get("tool_choice") == "none" else given


def _wrong(place: str, text: str, value: object) -> StrataError:
    shown = "" if isinstance(value, str) else f", not {kind_of(value)}"
    return StrataError("invalid_value", f"{place} {text}{shown}", param=place)


def _message(place: str, message: object) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _wrong(place, "must be an object", message)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{place}.role", f"must be one of {', '.join(ROLES)}", role or "absent")
    checked: dict[str, Any] = {"role": ROLES[role]}
    for name in PASSED_TEXTS:
        text = message.get(name)
        if text is not None and not isinstance(text, str):
            raise _wrong(f"{place}.{name}", "must be a string", text)
        if text is not None:
            checked[name] = text
    if message.get("tool_calls"):
        checked["tool_calls"] = _tool_calls(f"{place}.tool_calls", message["tool_calls"])
    checked["content"] = _content(f"{place}.content", message.get("content"), may_lack=role == "assistant")
    return checked


def _content(place: str, content: object, may_lack: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_lack:
        return ""
    if not isinstance(content, list) or not content:
        raise _wrong(place, "must be a string or a list of text parts", content)
    return "\n".join(_part(f"{place}[{i}]", part) for i, part in enumerate(content))


def _part(place: str, part: object) -> str:
    if not isinstance(part, dict):
        raise _wrong(place, "must be an object", part)
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise invalid(f"{place}.type", 'must be "text": this model reads text only', kind or "absent")
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise _wrong(f"{place}.{TEXT_PARTS[kind]}", "must be a string", text)
    return text


def _tool_calls(place: str, calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _wrong(place, "must be a list", calls)
    return [_tool_call(f"{place}[{i}]", call) for i, call in enumerate(calls)]


def _tool_call(place: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise _wrong(place, 'must be an object with an object "function"', call)
    arguments = function.get("arguments", "{}")
    if not isinstance(function.get("name"), str):
        raise _wrong(f"{place}.function.name", "must be a string", function.get("name"))
    if not isinstance(arguments, str | dict):
        raise _wrong(f"{place}.function.arguments", "must be a string or an object", arguments)
    checked = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {**checked, "id": call["id"]} if isinstance(call.get("id"), str) else checked


def _check_tool(place: str, tool: object) -> None:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise _wrong(place, 'must be an object of type "function"', tool)
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise _wrong(f"{place}.function", "must be an object with a name", function)
