"""The HTTP service: which paths there are, and how it is bound, started and ended.

| method and path | answer |
|---|---|
| POST /v1/chat/completions | OpenAI chat, streamed or not |
| POST /v1/completions | OpenAI completion, streamed or not |
| GET /v1/models, /v1/models/{id} | the model |
| GET /v1/status | the snapshot that `stratactl status --json` shows |
| GET /metrics | figures for Prometheus, or as JSON where `Accept` names application/json |
| GET /health | 200, or 503 with a reason and how far loading is |

Every failure has the form `{"error": {"message", "type", "param", "code"}}`, other paths and methods included.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from stratad.config import ConfigError, Problem
from stratad.errors import StrataError
from stratad.http.context import HttpContext
from stratad.http.errors import error_headers, error_object, json_bytes, send_error
from stratad.http.limits import BodyLimits, Limits
from stratad.http.listeners import Listeners
from stratad.http.models import Models
from stratad.http.openai_chat import ChatCompletions
from stratad.http.openai_completions import Completions
from stratad.launch import model_name, model_path
from stratad.model_file import load_model
from stratad.settings import Settings
from stratad.types import Service

log = logging.getLogger(__name__)

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def build_app(context: HttpContext) -> ASGIApp:
    """The whole service as one ASGI application."""
    models = Models(context)
    operations = _Operations(context)
    routes = [
        Route("/v1/chat/completions", ChatCompletions(context), methods=["POST"]),
        Route("/v1/completions", Completions(context), methods=["POST"]),
        Route("/v1/models", models.all, methods=["GET"]),
        Route("/v1/models/{id:path}", models.one, methods=["GET"]),
        Route("/v1/status", operations.status, methods=["GET"]),
        Route("/metrics", operations.metrics, methods=["GET"]),
        Route("/health", operations.health, methods=["GET"]),
    ]
    app = Starlette(routes=routes, exception_handlers={StrataError: _strata_error, HTTPException: _http_error})
    app.router.redirect_slashes = False

    def limits() -> Limits:
        settings = context.settings
        return Limits(settings.integer("body_limit_mib") * 1024 * 1024, settings.number("request_limit_s"))

    return _LastResort(BodyLimits(app, limits, context.drain))


async def _strata_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, StrataError)
    return _json(error_object(error), error.kind.status, error_headers(error))


async def _http_error(request: Request, error: Exception) -> Response:
    """404 and 405 from the router."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        failure = StrataError("method_not_allowed", f"{request.method} is not allowed for {path}; allowed: {allowed}")
        return _json(error_object(failure), 405, dict(error.headers or {}))
    failure = StrataError("not_found", f"there is nothing at {path}")
    return _json(error_object(failure), failure.kind.status, {})


def _json(value: object, status: int, headers: dict[str, str]) -> Response:
    return Response(json_bytes(value), status, headers, media_type="application/json")


class _Operations:
    """What a monitor asks."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def status(self, _request: Request) -> Response:
        return _json(self._context.service.status(), 200, {})

    async def metrics(self, request: Request) -> Response:
        if wants_json(request.headers.get("accept", "")):
            return _json(self._context.service.metrics(), 200, {"Vary": "Accept"})
        text = self._context.service.metrics_text()
        return Response(text, 200, {"Vary": "Accept", "Content-Type": METRICS_TYPE})

    async def health(self, _request: Request) -> Response:
        ok, body = health(self._context)
        return _json(body, 200 if ok else 503, {} if ok else {"Retry-After": "5"})


def wants_json(accept: str) -> bool:
    """Whether an Accept header prefers JSON to text: it names it, with no less weight than text and above nothing."""
    weights = {"application/json": 0.0, "text/plain": 0.0}
    for part in accept.split(","):
        kind, *parameters = (piece.strip().lower() for piece in part.split(";"))
        quality = next((piece[2:] for piece in parameters if piece.startswith("q=")), "1")
        if kind in weights:
            weights[kind] = float(quality) if re.fullmatch(r"[01](\.\d*)?", quality) else 1.0
    return weights["application/json"] > 0 and weights["application/json"] >= weights["text/plain"]


def health(context: HttpContext) -> tuple[bool, dict[str, Any]]:
    """Whether a request would be served now, and why not. Made from the snapshot; never waits for the engine."""
    status = context.service.status()
    state = str(status.get("state", "unknown"))
    engine = status.get("engine")
    percent = engine.get("load_percent") if isinstance(engine, dict) else None
    if state == "ready" and context.model is not None:
        return True, {"status": "ok", "service": "strata", "model": context.model.name}
    if state == "ready":
        state = "loading"
    reason = str(status.get("state_detail") or f"the engine is {state}")
    return False, {"status": state, "service": "strata", "reason": reason, "load_percent": percent}


class _LastResort:
    """Turns whatever else goes wrong into a 500 in the usual form. The reason goes to the log, not to the client."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            log.exception("internal error in %s %s", scope.get("method"), scope.get("path"))
            if scope["type"] == "http" and not started:
                await send_error(send, StrataError("internal", "internal error; the reason is in the server's log"))


class HttpDaemon(Service, Protocol):
    """What the HTTP service needs of the daemon."""

    settings: Settings


class HttpFront:
    """The HTTP service as the daemon's life has it (`stratad.app.Front`)."""

    def __init__(self, daemon: HttpDaemon) -> None:
        self.context = HttpContext(daemon, daemon.settings)
        self._listeners = Listeners(daemon.settings, self.context.drain)

    @property
    def addresses(self) -> Sequence[str]:
        """Where it is served, as HOST:PORT."""
        return self._listeners.addresses

    def bind(self) -> None:
        """Take every address of the setting `listen`. Raises BindError."""
        for name in self.context.settings.texts("listen"):
            self._listeners.bind(name)

    async def start(self) -> None:
        """Accept connections, then read the model file; until that is done requests get 503.

        Raises ConfigError for a model file that cannot be used.
        """
        await self._listeners.start(build_app(self.context))
        settings = self.context.settings
        path = model_path(settings)
        if path is None:
            raise ConfigError([Problem("", "model must be set: the embedded model is not installed")])
        try:
            self.context.model = await asyncio.to_thread(load_model, path, model_name(settings))
        except (ValueError, OSError) as error:
            raise ConfigError([Problem(str(path), str(error))]) from None

    async def stop_accepting(self) -> None:
        """Accept no more; running answers go on."""
        await self._listeners.stop_accepting()

    async def close(self, grace_s: float) -> None:
        """End what is still open, after so many seconds at most."""
        await self._listeners.close(grace_s)


async def open_http(daemon: HttpDaemon) -> HttpFront:
    """Bind the addresses (`stratad.app.OpenHttp`). Raises BindError naming the address and its owner."""
    front = HttpFront(daemon)
    front.bind()
    return front
