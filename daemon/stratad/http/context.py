"""What the HTTP endpoints share, and the steps that all of them take."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive, Scope
from stratad.errors import StrataError
from stratad.http import json_body, params
from stratad.http.drain import Drain
from stratad.http.exchange import now
from stratad.http.params import Fields
from stratad.model_file import Model
from stratad.settings import Settings
from stratad.types import GenRequest, Service


@dataclass
class HttpContext:
    """The daemon as HTTP sees it. `model` is None until the model file has been read."""

    service: Service
    settings: Settings
    model: Model | None = None
    drain: Drain = field(default_factory=Drain)

    def require_model(self) -> Model:
        """The model, or StrataError `engine_loading`."""
        if self.model is None:
            raise StrataError("engine_loading", "the model is being loaded", retry_after=5)
        return self.model

    def max_context(self, model: Model) -> int:
        """Tokens of the longest conversation; while the engine is not there yet, what the file says."""
        facts = self.service.facts
        return facts.max_context if facts is not None else model.trained_context

    def fingerprint(self) -> str | None:
        """`system_fingerprint`: the beginning of the engine's numeric identity."""
        facts = self.service.facts
        identity = facts.info.get("identity") if facts is not None else None
        return f"strata-{identity[:12]}" if identity else None


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one answer repeats."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str | None

    def members(self, kind: str | None = None) -> dict[str, Any]:
        """The members, `object` replaced by `kind` if that is given."""
        return {
            "id": self.id,
            "object": kind or self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


def new_head(context: HttpContext, model: Model, prefix: str, kind: str) -> Head:
    """A fresh id and the time; the model's name is the served one, whatever the request called it."""
    return Head(f"{prefix}-{secrets.token_hex(12)}", kind, now(), model.name, context.fingerprint())


async def read_fields(receive: Receive) -> Fields:
    """The request's JSON object. Raises StrataError `invalid_json` or `invalid_value`."""
    message = await receive()
    data: bytes = message.get("body", b"")
    if len(data) > json_body.OFF_LOOP_BYTES:
        return Fields(await asyncio.to_thread(json_body.parse_object, data))
    return Fields(json_body.parse_object(data))


def client_of(scope: Scope) -> str:
    """Who asks, for fairness between clients: the address without the port."""
    client = scope.get("client")
    return str(client[0]) if client else "local"


async def encode_within(context: HttpContext, model: Model, text: str, place: str) -> list[int]:
    """The prompt's ids. A text that is certainly too long is refused without the work of encoding it."""
    limit = context.max_context(model)
    least = model.tokens.least_count(text)
    if least >= limit > 0:
        raise params.context_exceeded(least, limit, place, at_least=True)
    try:
        return await model.tokens.encode_prompt_async(text)
    except ValueError as error:
        raise StrataError("invalid_value", f"{place} cannot be encoded: {error}", param=place) from None


@dataclass(frozen=True, slots=True)
class Common:
    """What both completion endpoints take from a request besides the prompt."""

    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: int | None


def read_common(fields: Fields, logprobs: int | None) -> Common:
    """Stop strings, streaming and the model's name, checked."""
    params.check_model(fields)
    stream, usage = params.stream_options(fields)
    return Common(params.stops(fields), stream, usage, logprobs)


def make_request(
    context: HttpContext,
    model: Model,
    fields: Fields,
    common: Common,
    prompt: tuple[list[int], str],
    budget_names: tuple[str, ...],
    client: str,
) -> GenRequest:
    """The request for the scheduler; `prompt` is the ids and the field they came from."""
    ids, place = prompt
    limit = context.max_context(model)
    return GenRequest(
        prompt_ids=tuple(ids),
        max_new=params.budget(
            fields, budget_names, params.Room(len(ids), limit, place), context.settings.integer("max_tokens")
        ),
        sampling=params.sampling(
            fields,
            context.settings,
            model.recommended,
            params.Vocabulary(model.tokens.size, model.tokens.end_ids, limit),
            common.logprobs,
        ),
        client=client,
        end_ids=model.tokens.end_ids,
        tune=params.tune(fields),
    )
