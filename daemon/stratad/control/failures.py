"""Varlink errors of `io.strata.Control`, made from the daemon's one failure table where they coincide.

A `StrataError` called `engine_down` leaves the socket as `io.strata.Control.EngineDown`, with its message, the
parameter at fault and whether a retry makes sense. Failures that only a socket knows are declared below the table.
The interface description is computed from the annotations here, so their evaluation must not be postponed.
"""

import types
from typing import Any

from asyncvarlink import TypedVarlinkErrorReply
from stratad.errors import KINDS, StrataError

INTERFACE = "io.strata.Control"

# Rows of the failure table that a control method can answer with; the rest belong to requests for tokens.
SHARED: dict[str, str] = {
    "invalid_value": "A parameter has a value that its setting or method does not take.",
    "not_found": "No object of that name exists.",
    "engine_loading": "The engine is still loading its model.",
    "engine_down": "No engine is running.",
    "draining": "The daemon is about to stop.",
    "internal": "The daemon failed; its log has the details.",
}


def _shared_error(kind: str, doc: str) -> type[TypedVarlinkErrorReply]:
    """One Varlink error class for one row of the failure table: `engine_down` becomes `EngineDown`."""
    if kind not in KINDS:
        raise LookupError(f"{kind!r} is not in the failure table")
    name = "".join(word.capitalize() for word in kind.split("_"))
    parameters = type("Parameters", (), {"__annotations__": {"message": str, "parameter": str | None, "retry": bool}})

    def body(namespace: dict[str, Any]) -> None:
        namespace.update(__doc__=doc, __module__=__name__, Parameters=parameters)

    made = types.new_class(name, (TypedVarlinkErrorReply,), {"interface": INTERFACE}, body)
    assert issubclass(made, TypedVarlinkErrorReply)
    return made


_SHARED_CLASSES = {kind: _shared_error(kind, doc) for kind, doc in SHARED.items()}


class PermissionDenied(TypedVarlinkErrorReply, interface=INTERFACE):
    """The caller may not use this method. `needs` says who may."""

    class Parameters:
        method: str
        needs: str


class TooManyConnections(TypedVarlinkErrorReply, interface=INTERFACE):
    """All connections are taken. Sent unasked to a client that connects; the connection then ends."""

    class Parameters:
        limit: int


class ProtocolViolation(TypedVarlinkErrorReply, interface=INTERFACE):
    """What arrived is not a Varlink call, or too large, or too slow. The connection then ends."""

    class Parameters:
        message: str


ERRORS: tuple[type[TypedVarlinkErrorReply], ...] = (
    *_SHARED_CLASSES.values(),
    PermissionDenied,
    TooManyConnections,
    ProtocolViolation,
)


def from_strata(err: StrataError) -> TypedVarlinkErrorReply:
    """The Varlink error of a named failure. Names that no control method should meet count as `internal`."""
    made = _SHARED_CLASSES.get(err.name, _SHARED_CLASSES["internal"])
    return made(message=err.message, parameter=err.param, retry=err.kind.retry)


def internal(message: str) -> TypedVarlinkErrorReply:
    """The error for a fault of the daemon itself."""
    return from_strata(StrataError("internal", message))
