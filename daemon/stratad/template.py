"""The chat template of the model file: Jinja, in a sandbox, with limits on time and size.

Templates come with downloaded files, so they are compiled in jinja2's immutable sandbox and may neither run long nor
grow large. What a user wrote is guarded before it is rendered (`stratad.tokens`), so only the template's own words
can become control tokens.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from stratad.errors import StrataError
from stratad.tokens import SENTINEL, Tokens

TIME_LIMIT_S = 10.0
SIZE_LIMIT = 64 * 1024 * 1024
"""Characters of one rendered prompt, and of any text a template builds on the way."""

OFF_LOOP_CHARS = 16_384
"""Requests with more text than this are rendered on a thread."""

RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"})
"""Names that `chat_template_kwargs` may not set."""

Message = Mapping[str, Any]

_deadline: ContextVar[float] = ContextVar("_deadline", default=float("inf"))


class _Refused(Exception):
    """The template called `raise_exception`, or went over a limit; the text is for the user."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks answers for training; here it only passes its content on."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox, with the clock looked at in every call, attribute and sum, and with sizes bounded."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call(self, *args: Any, **kwargs: Any) -> Any:
        _look_at_clock()
        return super().call(*args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        _look_at_clock()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: str | Any) -> Any:
        _look_at_clock()
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _look_at_clock()
        if operator == "**" or (operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left)):
            raise _Refused(f"the template uses {operator} in a way that is not allowed")
        if operator == "*" and (_length(left) or 1) * (_length(right) or 1) * _count(left) * _count(right) > SIZE_LIMIT:
            raise _Refused("the template builds a text that is too large")
        if operator == "+" and _length(left) + _length(right) > SIZE_LIMIT:
            raise _Refused("the template builds a text that is too large")
        return super().call_binop(context, operator, left, right)


_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)")


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _count(value: Any) -> int:
    return abs(value) if isinstance(value, int) and value else 1


def _look_at_clock() -> None:
    if time.monotonic() > _deadline.get():
        raise _Refused(f"rendering took longer than {TIME_LIMIT_S:g} s")


def _raise_exception(message: object) -> None:
    raise _Refused(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it: not escaped for HTML, sentinels kept as they are."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return re.sub(rf"[^\x00-\x7f{SENTINEL}]+", lambda m: json.dumps(m.group())[1:-1], text) if ensure_ascii else text


def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One compiled template. Rendering may run on any thread."""

    def __init__(self, source: str, tokens: Tokens) -> None:
        """Compile `source`. Raises StrataError `template_failed` naming the line of a syntax error."""
        environment = _environment()
        self.source = source
        self._tokens = tokens
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            raise _failed(f"line {error.lineno}: {error.message}") from None
        self._open_ends = tokens.open_ends(_literals(tree))
        named = {"bos_token": tokens.bos_id, "eos_token": tokens.eos_id, "pad_token": tokens.pad_id}
        self._specials = {name: tokens.text_of(token) for name, token in named.items() if token is not None}

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt up to where the assistant speaks, ready for `Tokens.encode`.

        `messages` have text contents; `variables` are `chat_template_kwargs`. Raises StrataError `template_failed`
        with the template's own words, `invalid_value` when a variable has a reserved name.
        """
        taken = RESERVED.intersection(variables or ())
        if taken:
            name = sorted(taken)[0]
            raise StrataError(
                "invalid_value", f"chat_template_kwargs cannot set {name}", param=f"chat_template_kwargs.{name}"
            )
        if any(message.get("tool_calls") for message in messages) and not self._takes_argument_texts:
            messages = [_with_argument_objects(message) for message in messages]
        guarded: dict[str, Any] = {"messages": messages, "tools": tools or None, **(variables or {})}
        return self._run(self._guard(guarded))

    async def render_async(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """`render`, on a thread when there is much to render."""
        size = sum(len(message.get("content") or "") + 64 for message in messages) + 512 * len(tools or ())
        if size <= OFF_LOOP_CHARS:
            return self.render(messages, tools, variables)
        return await asyncio.to_thread(self.render, messages, tools, variables)

    def _run(self, variables: Mapping[str, Any]) -> str:
        token = _deadline.set(time.monotonic() + TIME_LIMIT_S)
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate({**self._specials, "add_generation_prompt": True, **variables}):
                pieces.append(piece)
                size += len(piece)
                if size > SIZE_LIMIT:
                    raise _Refused(f"the prompt is longer than {SIZE_LIMIT} characters")
                _look_at_clock()
        except _Refused as error:
            raise _failed(str(error)) from None
        except Exception as error:  # whatever a template does wrong is the template's failure
            raise _failed(f"{type(error).__name__}: {error}") from None
        finally:
            _deadline.reset(token)
        return "".join(pieces)

    def _guard(self, value: Any) -> Any:
        """A copy of a JSON value with every text guarded, the names in objects too."""
        if isinstance(value, str):
            return self._tokens.guard(value, self._open_ends)
        if isinstance(value, Mapping):
            return {self._tokens.guard(str(key), self._open_ends): self._guard(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._guard(item) for item in value]
        return value

    @cached_property
    def _takes_argument_texts(self) -> bool:
        """Whether a tool call's arguments may stay the text they were sent as, which keeps a prompt's prefix equal.

        Some templates walk through the arguments and drop a text, or quote it once more; those get objects.
        """
        arguments = '{"probe": "value"}'
        call = {"type": "function", "id": "probe", "function": {"name": "probe", "arguments": arguments}}
        messages = [{"role": "user", "content": "probe"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        try:
            return arguments in self._run({"messages": messages, "tools": None})
        except StrataError:
            return False


def _failed(reason: str) -> StrataError:
    reason = reason.replace(SENTINEL, "")
    return StrataError("template_failed", f"the model's chat template failed: {reason}", param="messages")


def _literals(tree: nodes.Template) -> set[str]:
    """Every text that the template itself may write."""
    constants = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return constants | {node.data for node in tree.find_all(nodes.TemplateData)}


def _with_argument_objects(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_with_argument_object(call) for call in calls]}


def _with_argument_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": parsed}} if isinstance(parsed, dict) else call
