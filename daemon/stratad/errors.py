"""One table of failures: every name the daemon can answer with, its HTTP status and its Varlink error.

A failure is a value with a name. HTTP bodies, Varlink errors and log lines are all made from this table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """How one named failure looks: HTTP status, the OpenAI `type`, and whether a client may simply try again."""

    status: int
    openai_type: str
    retry: bool = False


KINDS: dict[str, ErrorKind] = {
    "invalid_value": ErrorKind(400, "invalid_request_error"),
    "unknown_field": ErrorKind(400, "invalid_request_error"),
    "invalid_json": ErrorKind(400, "invalid_request_error"),
    "context_length_exceeded": ErrorKind(400, "invalid_request_error"),
    "template_failed": ErrorKind(400, "invalid_request_error"),
    "not_found": ErrorKind(404, "invalid_request_error"),
    "model_not_found": ErrorKind(404, "invalid_request_error"),
    "method_not_allowed": ErrorKind(405, "invalid_request_error"),
    "request_timeout": ErrorKind(408, "invalid_request_error"),
    "body_too_large": ErrorKind(413, "invalid_request_error"),
    "unsupported_media_type": ErrorKind(415, "invalid_request_error"),
    "queue_full": ErrorKind(429, "rate_limit_error", retry=True),
    "queue_timeout": ErrorKind(503, "server_error", retry=True),
    "engine_loading": ErrorKind(503, "server_error", retry=True),
    "engine_down": ErrorKind(503, "server_error", retry=True),
    "draining": ErrorKind(503, "server_error", retry=True),
    "cancelled": ErrorKind(503, "server_error", retry=True),
    "engine_failed": ErrorKind(500, "server_error"),
    "internal": ErrorKind(500, "server_error"),
}


class StrataError(Exception):
    """A named failure. `param` names the offending field or option, when there is one."""

    def __init__(self, name: str, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.name = name
        self.message = message
        self.param = param
        self.retry_after = retry_after

    @property
    def kind(self) -> ErrorKind:
        """The table row of this failure (unknown names count as `internal`)."""
        return KINDS.get(self.name, KINDS["internal"])
