"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.types import Receive, Scope, Send
from stratad.errors import StrataError
from stratad.http import messages, params, sse
from stratad.http.answer import Piece, chat_logprobs
from stratad.http.context import (
    Common,
    Head,
    HttpContext,
    client_of,
    encode_within,
    make_request,
    new_head,
    read_common,
    read_fields,
)
from stratad.http.exchange import Job, run
from stratad.http.params import COMMON_NAMES, Fields
from stratad.model_file import Model
from stratad.tokens import Tokens

CHUNK = "chat.completion.chunk"

NAMES = COMMON_NAMES | {
    "messages", "tools", "tool_choice", "top_logprobs", "max_completion_tokens", "chat_template_kwargs",
    "reasoning_effort",
}  # fmt: skip
"""Fields that this endpoint understands."""


class ChatCompletions:
    """The endpoint, as an ASGI application."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = self._context
        fields = await read_fields(receive)
        fields.check_names(NAMES)
        common = read_common(fields, _logprobs(fields))
        model = context.require_model()
        text = await self._render(model, fields)
        ids = await encode_within(context, model, text, "messages")
        request = make_request(
            context, model, fields, common, (ids, "messages"), ("max_completion_tokens", "max_tokens"), client_of(scope)
        )
        head = new_head(context, model, "chatcmpl", "chat.completion")
        dialect = ChatDialect(head, model.tokens, common)
        job = Job(
            context.service.submit(request), dialect, model.tokens, len(ids), common.stops,
            common.logprobs is not None, common.stream,
        )  # fmt: skip
        await run(job, receive, send, context.drain)

    async def _render(self, model: Model, fields: Fields) -> str:
        conversation = messages.messages(fields)
        tools = messages.tools(fields)
        variables = {**self._context.settings.table("chat_template_kwargs"), **fields.object("chat_template_kwargs")}
        effort = fields.get("reasoning_effort")
        if effort is not None:
            if not isinstance(effort, str):
                raise params.invalid("reasoning_effort", "must be a string", effort)
            variables.setdefault("reasoning_effort", effort)
        if model.template is None:
            raise StrataError(
                "template_failed", "this model has no usable chat template; use /v1/completions", param="messages"
            )
        return await model.template.render_async(conversation, tools, variables)


def _logprobs(fields: Fields) -> int | None:
    """How many alternatives per token, None without logprobs."""
    top = fields.integer("top_logprobs", 0, params.MAX_TOP_LOGPROBS)
    if fields.boolean("logprobs"):
        return top or 0
    if top:
        raise params.invalid("top_logprobs", 'needs "logprobs": true')
    return None


class ChatDialect:
    """Chat chunks and the whole chat answer."""

    def __init__(self, head: Head, tokens: Tokens, common: Common) -> None:
        self._head, self._tokens, self._common = head, tokens, common
        self._text = sse.EventTemplate(self._chunk({"content": sse.SLOT}))

    def opening(self) -> bytes:
        """The role, before anything else."""
        return sse.event(self._chunk({"role": "assistant", "content": ""}))

    def text(self, text: str) -> bytes:
        """One delta."""
        return self._text.fill(text)

    def piece(self, piece: Piece) -> bytes:
        """One delta, with logprobs if they are wanted."""
        return sse.event(self._chunk({"content": piece.text}, logprobs=self._logprobs([piece])))

    def closing(self, finish: str, usage: Mapping[str, Any], timings: Mapping[str, Any] | None) -> bytes:
        """The finish reason; then, if asked for, usage in a chunk without choices."""
        last = self._chunk({}, finish)
        if timings is not None:
            last["timings"] = timings
        data = sse.event(last)
        if self._common.include_usage:
            data += sse.event({**self._head.members(CHUNK), "choices": [], "usage": usage})
        return data

    def whole(
        self, pieces: Sequence[Piece], finish: str, usage: Mapping[str, Any], timings: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """The answer in one object."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "".join(piece.text for piece in pieces), "refusal": None},
            "logprobs": self._logprobs(pieces),
            "finish_reason": finish,
        }
        body = {**self._head.members(), "choices": [choice], "usage": usage}
        return body if timings is None else {**body, "timings": timings}

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        if self._common.logprobs is None:
            return None
        return {"content": chat_logprobs(pieces, self._tokens), "refusal": None}

    def _chunk(
        self, delta: Mapping[str, Any], finish: str | None = None, logprobs: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        chunk = {**self._head.members(CHUNK), "choices": [choice]}
        return {**chunk, "usage": None} if self._common.include_usage else chunk
