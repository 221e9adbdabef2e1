"""The Varlink interface `io.strata.Control`: what `stratactl` and every other Varlink client can ask of the daemon.

Types and the interface description are computed by asyncvarlink from the annotations in this module, so it must not
postpone their evaluation. Every answer is made from the snapshot; no method waits for the engine.
"""

import asyncio
import dataclasses
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

from asyncvarlink import LastResult, VarlinkInterface, VarlinkInterfaceRegistry, VarlinkMethodCall, varlinkmethod
from asyncvarlink.serviceinterface import VarlinkServiceInterface
from stratad.control.failures import ERRORS, INTERFACE, PermissionDenied
from stratad.control.peer import Access, Peer, Policy, access_of
from stratad.errors import StrataError
from stratad.types import Service
from stratad.version import daemon_version

PROTOCOL = 1  # of this interface; raised when an existing method changes its meaning
SPEAK_EVERY_S = 5.0  # Watch is never silent for longer
INTERVAL_MS = (50, 60_000)  # how often Watch may look for a change
# Members of the snapshot, at any depth, that only say how time passes: no change worth telling.
RESTLESS = frozenset({"uptime_s", "silent_s", "elapsed_s", "retry_in_s"})

_logger = logging.getLogger("stratad.control")

Rows = Callable[[], Sequence[Mapping[str, object]]]


@dataclasses.dataclass
class Setting:
    """One setting: the value in force, where it came from, what it may be, and when a change would apply."""

    name: str
    value: Any
    default: Any
    pending: Any
    source: str
    origin: str
    kind: str
    range: str
    unit: str
    applies: str
    help: str
    group: str
    flag: str
    env: str


class _Version(TypedDict):
    version: str
    protocol: int
    engine: str | None
    engine_protocol: int | None
    arithmetic: int | None
    arch: str | None


class _Status(TypedDict):
    version: str
    state: str
    state_detail: str
    status: Any


class Control(VarlinkInterface, name=INTERFACE):
    """Look at a running Strata daemon."""

    errors = ERRORS

    def __init__(self, service: Service, settings_rows: Rows, closing: asyncio.Event) -> None:
        """`closing` is set when the daemon stops, so that watchers get a last word instead of a broken line."""
        self._service = service
        self._rows = settings_rows
        self._closing = closing

    @varlinkmethod
    def Version(self) -> _Version:
        """Versions of the daemon, of this interface, and of the engine once it has said READY."""
        facts = self._service.facts
        info = facts.info if facts is not None else {}
        return {
            "version": daemon_version(),
            "protocol": PROTOCOL,
            "engine": info.get("engine"),
            "engine_protocol": _whole(info.get("protocol")),
            "arithmetic": _whole(info.get("arithmetic")),
            "arch": info.get("arch"),
        }

    @varlinkmethod(allow_foreign=True)
    def Status(self) -> _Status:
        """The state in one word, what there is to say about it, and the complete snapshot as an object."""
        return self._status()

    @varlinkmethod(allow_foreign=True, delay_generator=False)
    async def Watch(self, *, interval_ms: int | None = None) -> AsyncIterator[_Status]:
        """The status now, after every change, and at least every 5 seconds. Call with "more".
        interval_ms (50 to 60000, 1000 if absent) is how often the daemon looks for a change.
        """
        interval = _interval(interval_ms)
        clock = asyncio.get_running_loop().time
        told, told_at = None, 0.0
        while not self._closing.is_set():
            status = self._status()
            digest = _digest(status["status"])
            if digest != told or clock() - told_at >= SPEAK_EVERY_S:
                told, told_at = digest, clock()
                yield status
            until = min(interval, max(0.0, told_at + SPEAK_EVERY_S - clock()))
            try:
                await asyncio.wait_for(self._closing.wait(), until)
            except TimeoutError:
                continue
        raise LastResult(self._status())

    @varlinkmethod(allow_foreign=True, return_parameter="settings")
    def Get(self, *, names: list[str]) -> list[Setting]:
        """The named settings, in the order asked for."""
        rows = {str(row["name"]): row for row in self._rows()}
        unknown = next((name for name in names if name not in rows), None)
        if unknown is not None:
            raise StrataError("not_found", f"no setting is called {unknown!r}", param=unknown)
        return [_setting(rows[name]) for name in names]

    @varlinkmethod(allow_foreign=True, return_parameter="settings")
    def ListSettings(self) -> list[Setting]:
        """Every setting, in the order of the manual."""
        return [_setting(row) for row in self._rows()]

    def _status(self) -> _Status:
        snapshot = self._service.status()
        return {
            "version": daemon_version(),
            "state": str(snapshot.get("state", "unknown")),
            "state_detail": str(snapshot.get("state_detail", "")),
            "status": snapshot,
        }


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def _interval(milliseconds: int | None) -> float:
    low, high = INTERVAL_MS
    if milliseconds is None:
        return 1.0
    if not low <= milliseconds <= high:
        raise StrataError(
            "invalid_value", f"interval_ms must be {low} to {high}, not {milliseconds}", param="interval_ms"
        )
    return milliseconds / 1000


def _digest(snapshot: Mapping[str, object]) -> str:
    """A text that is equal for equal snapshots, but for what is restless."""
    return json.dumps(_settled(snapshot), default=str)


def _settled(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _settled(member) for key, member in value.items() if key not in RESTLESS}
    return [_settled(member) for member in value] if isinstance(value, list) else value


def _setting(row: Mapping[str, object]) -> Setting:
    fields: Iterable[str] = (field.name for field in dataclasses.fields(Setting))
    return Setting(**{name: row.get(name) for name in fields})  # type: ignore[arg-type]


class PeerRegistry(VarlinkInterfaceRegistry):
    """The interfaces as one connected process may use them. One per connection, since it carries the peer."""

    def __init__(self, peer: Peer, policy: Policy) -> None:
        super().__init__()
        self._peer = peer
        self._policy = policy

    def lookup_method(self, call: VarlinkMethodCall) -> Any:
        """As the library's, and raises PermissionDenied; a change that is allowed is logged with who asked."""
        found = super().lookup_method(call)
        access = access_of(call.method)
        if not self._policy.allows(self._peer, access):
            _logger.warning("refused %s to %s", call.method, self._peer)
            raise PermissionDenied(method=call.method, needs=access.value)
        if access is Access.CHANGE:
            _logger.info("%s by %s", call.method, self._peer)
        return found


def registry_for(peer: Peer, policy: Policy, control: VarlinkInterface) -> PeerRegistry:
    """The registry of one connection: `control` and the introspection interface."""
    registry = PeerRegistry(peer, policy)
    registry.register_interface(control)
    registry.register_interface(VarlinkServiceInterface("Strata", "stratad", daemon_version(), "", registry))
    return registry
