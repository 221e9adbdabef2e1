"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from stratad.errors import StrataError
from stratad.http.context import HttpContext


class Models:
    """The two endpoints; there is one model."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context

    async def all(self, _request: Request) -> Response:
        """All models; none while the file is still being read."""
        return JSONResponse({"object": "list", "data": self._entries()})

    async def one(self, request: Request) -> Response:
        """One model by its id."""
        name = request.path_params["id"]
        for entry in self._entries():
            if entry["id"] == name:
                return JSONResponse(entry)
        raise StrataError("model_not_found", f"there is no model {name!r} here", param="model")

    def _entries(self) -> list[dict[str, Any]]:
        model = self._context.model
        if model is None:
            return []
        return [
            {
                "id": model.name,
                "object": "model",
                "created": model.created,
                "owned_by": "strata",
                "meta": {
                    "n_ctx": self._context.max_context(model),
                    "n_ctx_train": model.trained_context,
                    "n_vocab": model.tokens.size,
                },
            }
        ]
