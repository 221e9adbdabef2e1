"""POST /v1/completions: text goes to the model as it is, control tokens in it included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.types import Receive, Scope, Send
from stratad.http import params, sse
from stratad.http.answer import Piece, completion_logprobs
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

NAMES = COMMON_NAMES | {"prompt"}
"""Fields that this endpoint understands."""


class Completions:
    """The endpoint, as an ASGI application."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = self._context
        fields = await read_fields(receive)
        fields.check_names(NAMES)
        common = read_common(fields, fields.integer("logprobs", 0, params.MAX_TOP_LOGPROBS))
        model = context.require_model()
        ids = await self._ids(model, prompt(fields, model.tokens.size))
        request = make_request(context, model, fields, common, (ids, "prompt"), ("max_tokens",), client_of(scope))
        head = new_head(context, model, "cmpl", "text_completion")
        dialect = CompletionDialect(head, model.tokens, common)
        job = Job(
            context.service.submit(request), dialect, model.tokens, len(ids), common.stops,
            common.logprobs is not None, common.stream,
        )  # fmt: skip
        await run(job, receive, send, context.drain)

    async def _ids(self, model: Model, given: str | list[int]) -> list[int]:
        ids = given if isinstance(given, list) else await encode_within(self._context, model, given, "prompt")
        if not ids:
            raise params.invalid("prompt", "must have at least one token")
        return ids


def prompt(fields: Fields, vocabulary: int) -> str | list[int]:
    """The prompt: a text, a list of token ids, or a list with one of these."""
    given = fields.get("prompt")
    if isinstance(given, list) and len(given) == 1 and isinstance(given[0], str | list):
        given = given[0]
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not all(isinstance(item, int) and not isinstance(item, bool) for item in given):
        many = isinstance(given, list) and len(given) > 1 and all(isinstance(item, str | list) for item in given)
        text = "must be one prompt a request" if many else "must be a string or a list of token ids"
        raise params.invalid("prompt", text)
    wrong = next((item for item in given if not 0 <= item < vocabulary), None)
    if wrong is not None:
        raise params.invalid("prompt", f"must hold token ids from 0 to {vocabulary - 1}", wrong)
    return given


class CompletionDialect:
    """Completion chunks and the whole completion."""

    def __init__(self, head: Head, tokens: Tokens, common: Common) -> None:
        self._head, self._tokens, self._common = head, tokens, common
        self._text = sse.EventTemplate(self._chunk(sse.SLOT))

    def opening(self) -> bytes:
        """Nothing: completions have no roles."""
        return b""

    def text(self, text: str) -> bytes:
        """One chunk."""
        return self._text.fill(text)

    def piece(self, piece: Piece) -> bytes:
        """One chunk, with logprobs if they are wanted."""
        return sse.event(self._chunk(piece.text, logprobs=self._logprobs([piece])))

    def closing(self, finish: str, usage: Mapping[str, Any], timings: Mapping[str, Any] | None) -> bytes:
        """The finish reason; then, if asked for, usage in a chunk without choices."""
        last = self._chunk("", finish)
        if timings is not None:
            last["timings"] = timings
        data = sse.event(last)
        if self._common.include_usage:
            data += sse.event({**self._head.members(), "choices": [], "usage": usage})
        return data

    def whole(
        self, pieces: Sequence[Piece], finish: str, usage: Mapping[str, Any], timings: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """The answer in one object."""
        choice = {
            "index": 0,
            "text": "".join(piece.text for piece in pieces),
            "logprobs": self._logprobs(pieces),
            "finish_reason": finish,
        }
        body = {**self._head.members(), "choices": [choice], "usage": usage}
        return body if timings is None else {**body, "timings": timings}

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, list[object]] | None:
        return None if self._common.logprobs is None else completion_logprobs(pieces, self._tokens)

    def _chunk(self, text: str, finish: str | None = None, logprobs: Mapping[str, Any] | None = None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}
        chunk = {**self._head.members(), "choices": [choice]}
        return {**chunk, "usage": None} if self._common.include_usage else chunk
