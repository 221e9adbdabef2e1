"""One table of every setting: name, type, range, default, unit, when a change applies, flag, environment, help.

The command line, the check of configuration files, `stratactl get`, completion and the manual are made from
`SETTINGS`; nothing about a setting is written down anywhere else. A live `Settings` object holds the effective
values; it is changed in place by a reload or at run time, so everyone may keep a reference to it. All of it is used
from the event loop's thread only.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

Kind = Literal["bool", "int", "float", "text", "path", "choice", "list", "table"]
Applies = Literal["now", "next-request", "engine-restart", "daemon-restart"]
Source = Literal["default", "file", "model-file", "override", "environment", "command-line", "runtime"]
Value = bool | int | float | str | tuple[str, ...] | Mapping[str, Any] | None

SOURCES: tuple[Source, ...] = (
    "default", "file", "model-file", "override", "environment", "command-line", "runtime",
)  # fmt: skip
"""Where a value may come from, weakest first."""


class SettingError(ValueError):
    """A value that a setting cannot take. `name` is the setting; the message says what would be right."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name
        self.message = message


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table. `low` and `high` are inclusive; `optional` settings may be unset (None)."""

    name: str
    kind: Kind
    default: Value
    applies: Applies
    help: str
    group: str
    unit: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    optional: bool = False
    shell_words: bool = False  # a list written as one string is split like a shell command, not at commas
    metavar: str = ""
    words: tuple[str, ...] = ()  # values of a path that are no paths
    well_formed: Callable[[str], object] | None = None  # raises ValueError for a bad text or list element

    @property
    def flag(self) -> str:
        """The command line option, `--max-context` for `max_context`."""
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        """The environment variable, `STRATA_MAX_CONTEXT` for `max_context`."""
        return "STRATA_" + self.name.upper()

    @property
    def range(self) -> str:
        """The allowed values in words, for help, errors and `stratactl get`."""
        if self.choices:
            return " | ".join(self.choices)
        if self.kind == "bool":
            return "true | false"
        if self.kind in ("int", "float"):
            return _interval(self.low, self.high)
        return {"path": "a path", "text": "text", "list": "a list of texts", "table": "a table"}[self.kind]

    def check(self, value: object) -> Value:
        """The value in its stored form, from a typed one (TOML, JSON). Raises SettingError naming type and range."""
        if value is None and self.optional:
            return None
        checked = _CHECKS[self.kind](self, value)
        if checked is _WRONG:
            raise SettingError(self.name, f"must be {self._expects()}, not {_show(value)}")
        if self.well_formed is not None:
            self._check_form(checked if isinstance(checked, tuple) else (checked,))
        return checked  # type: ignore[return-value]

    def parse(self, text: str) -> Value:
        """The value from the text of a flag, a variable or `stratactl set`. Raises SettingError as `check` does."""
        if self.optional and text.strip().lower() in ("", "unset"):
            return None
        return self.check(_PARSES.get(self.kind, lambda _setting, plain: plain)(self, text))

    def _check_form(self, texts: Iterable[object]) -> None:
        assert self.well_formed is not None
        for text in texts:
            try:
                self.well_formed(str(text))
            except ValueError as error:
                raise SettingError(self.name, str(error)) from None

    def _expects(self) -> str:
        noun = {
            "bool": "true or false",
            "int": "a whole number",
            "float": "a number",
            "text": "a text",
            "path": "a path",
            "choice": f"one of {', '.join(self.choices)}",
            "list": "a list of texts",
            "table": "a table",
        }[self.kind]
        bounds = f" {self.range}" if self.kind in ("int", "float") and self.range != "any" else ""
        return noun + bounds + (f" ({self.unit})" if self.unit else "")


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT` or `[IPV6]:PORT`; port 0 lets the system choose. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host or host.startswith("["):
        raise ValueError(f"must be HOST:PORT, an IPv6 address in brackets as in [::1]:8080, not {_show(text)}")
    if not colon or not host or not port.isascii() or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"must be HOST:PORT with a port 0 to 65535, as in 127.0.0.1:8080, not {_show(text)}")
    return host, int(port)


_WRONG = object()


def _interval(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f"{low:g} to {high:g}" if max(abs(low), abs(high)) < 1e6 else f"{low:.0f} to {high:.0f}"
    if low is not None:
        return f"{low:g} or more"
    return "any" if high is None else f"{high:g} or less"


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _in_range(setting: Setting, value: float) -> bool:
    return (setting.low is None or value >= setting.low) and (setting.high is None or value <= setting.high)


def _check_bool(_setting: Setting, value: object) -> object:
    return value if isinstance(value, bool) else _WRONG


def _check_int(setting: Setting, value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int) or not _in_range(setting, value):
        return _WRONG
    return value


def _check_float(setting: Setting, value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float) or not _in_range(setting, value):
        return _WRONG
    try:
        return float(value) if math.isfinite(value) else _WRONG
    except OverflowError:  # a whole number beyond every float
        return _WRONG


def _check_text(_setting: Setting, value: object) -> object:
    return value if isinstance(value, str) and "\0" not in value and "\n" not in value else _WRONG


def _check_choice(setting: Setting, value: object) -> object:
    return value if isinstance(value, str) and value in setting.choices else _WRONG


def _check_list(setting: Setting, value: object) -> object:
    if isinstance(value, str):  # one element needs no brackets
        value = [value]
    if not isinstance(value, list | tuple) or any(_check_text(setting, item) is _WRONG for item in value):
        return _WRONG
    return tuple(value)


def _check_table(_setting: Setting, value: object) -> object:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        return _WRONG
    try:
        json.dumps(value, allow_nan=False)  # it goes into JSON and templates: no dates, no NaN
    except (TypeError, ValueError, RecursionError):
        return _WRONG
    return dict(value)


_CHECKS = {
    "bool": _check_bool,
    "int": _check_int,
    "float": _check_float,
    "text": _check_text,
    "path": _check_text,
    "choice": _check_choice,
    "list": _check_list,
    "table": _check_table,
}

_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _parse_bool(_setting: Setting, text: str) -> object:
    return _BOOLEANS.get(text.strip().lower(), text)


def _parse_int(_setting: Setting, text: str) -> object:
    plain_digits = re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", text)
    return int(text) if plain_digits else text


def _parse_float(_setting: Setting, text: str) -> object:
    try:
        return float(text) if text.isascii() and "_" not in text else text
    except ValueError:
        return text


def _parse_list(setting: Setting, text: str) -> object:
    if not setting.shell_words:
        return [part.strip() for part in text.split(",") if part.strip()]
    try:
        return shlex.split(text)
    except ValueError as error:
        raise SettingError(setting.name, f"cannot be split into words: {error}") from None


def _parse_table(setting: Setting, text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        raise SettingError(setting.name, f'must be a JSON object such as {{"key": true}}, not {_show(text)}') from None


_PARSES = {"bool": _parse_bool, "int": _parse_int, "float": _parse_float, "list": _parse_list, "table": _parse_table}

# ---------------------------------------------------------------------------------------------------------------------

ENGINE = "Model and engine"
PLACES = "Addresses and places"
STORE = "Conversation store"
REQUESTS = "Requests"
SAMPLING = "Sampling where a request says nothing (unset: the model file's own recommendation)"
TIMES = "Limits and times"
LOGS = "Logging"

SETTINGS: tuple[Setting, ...] = (
    Setting("model", "path", "", "engine-restart", "GGUF file to serve; empty: the small embedded model.", ENGINE,
            metavar="FILE"),
    Setting("model_name", "text", "", "next-request", "Name under which clients see the model; empty: the file's stem.",
            ENGINE, metavar="NAME"),
    Setting("engine", "path", "", "engine-restart",
            "The strata-engine program; empty: the one beside this program, else the one on PATH.", ENGINE,
            metavar="FILE"),
    Setting("max_context", "int", 0, "engine-restart",
            "Largest number of tokens of one conversation; 0: as many as the model was trained for.", ENGINE,
            unit="tokens", low=0, high=16_777_216, metavar="N"),
    Setting("allow_untrained_context", "bool", False, "engine-restart",
            "Allow max_context beyond what the model was trained for (answers get worse there).", ENGINE),
    Setting("threads", "int", 0, "engine-restart", "Threads that compute; 0: one per processor.", ENGINE,
            low=0, high=1024, metavar="N"),
    Setting("kv", "choice", "int8", "engine-restart",
            "How keys and values are held; part of the numeric identity. f16 and f32 are slow references.", ENGINE,
            choices=("int8", "f16", "f32")),
    Setting("isa", "choice", "auto", "engine-restart", "Kernels to use; every choice gives the same bits.", ENGINE,
            choices=("auto", "scalar", "avx2", "avxvnni", "avx512")),
    Setting("parallel", "int", 4, "engine-restart",
            "Requests that are worked on at once, each in a slot of its own that keeps its conversation; the engine "
            "runs fewer where memory does not suffice.", ENGINE, low=1, high=64, metavar="N"),
    Setting("memory_mib", "int", 0, "engine-restart",
            "Memory for weights, slots and conversations together; 0: nine tenths of what is free.", ENGINE,
            unit="MiB", low=0, high=67_108_864, metavar="N"),
    Setting("prompt_cache_mib", "int", 256, "engine-restart",
            "Memory for checkpoints, from which a later prompt with the same beginning goes on; 0: none.", ENGINE,
            unit="MiB", low=0, high=16_777_216, metavar="N"),
    Setting("prompt_cache_every", "int", 4096, "engine-restart",
            "A checkpoint every so many prompt tokens, besides those between turns; 0: only between turns.", ENGINE,
            unit="tokens", low=0, high=16_777_216, metavar="N"),
    Setting("stall_target_ms", "float", 250.0, "engine-restart",
            "Longest gap that an answer may see while another prompt is read; lower reads long prompts more slowly.",
            ENGINE, unit="milliseconds", low=1, high=100_000, metavar="MS"),
    Setting("decode_share", "float", 0.5, "engine-restart",
            "Time for answers after each part of a prompt, as a share of the time which that part took.", ENGINE,
            low=0, high=100, metavar="F"),
    Setting("spec", "int", 3, "engine-restart",
            "Most tokens that the model's own drafter guesses ahead; fewer are tried where they do not pay. 0: none.",
            ENGINE, unit="tokens", low=0, high=8, metavar="N"),
    Setting("spec_min_p", "float", 0.5, "engine-restart", "A guess that is less probable ends the guessing.", ENGINE,
            low=0, high=1, metavar="F"),
    Setting("engine_args", "list", (), "engine-restart", "Further options for strata-engine, as they are.", ENGINE,
            shell_words=True, metavar="WORDS"),
    Setting("engine_env", "table", {}, "engine-restart", "Environment variables to set for strata-engine.", ENGINE,
            metavar="JSON"),
    Setting("listen", "list", ("127.0.0.1:8080",), "daemon-restart",
            "Address that serves HTTP; may be repeated. IPv6 as [::1]:8080.", PLACES, metavar="HOST:PORT",
            well_formed=parse_address),
    Setting("control", "path", "", "daemon-restart",
            "Control socket; empty: control.sock in the run-time directory (/run/strata for the service).", PLACES,
            metavar="SOCKET"),
    Setting("state", "path", "", "daemon-restart",
            "Directory for what outlives a restart; empty: /var/lib/strata for the service, "
            "~/.local/state/strata otherwise.", PLACES, metavar="DIR"),
    Setting("store", "path", "", "daemon-restart",
            "Directory of the conversation store; empty: store in the state directory; off: none.", STORE,
            metavar="DIR", words=("off",)),
    Setting("store_max_mib", "int", 8192, "now",
            "Disk for stored conversations; less where that would take more than half of what the disk has to spare.",
            STORE, unit="MiB", low=16, high=16_777_216, metavar="N"),
    Setting("store_half_life_s", "float", 21_600.0, "daemon-restart",
            "After this long a use of a conversation counts half when it is decided which of them makes room.", STORE,
            unit="seconds", low=1, high=1_000_000_000, metavar="S"),
    Setting("queue_limit", "int", 64, "now", "Requests that may wait for a slot; one more is answered with 429.",
            REQUESTS, low=0, high=100_000, metavar="N"),
    Setting("max_tokens", "int", 0, "next-request",
            "Longest answer where the request names none; 0: what is left of the context.", REQUESTS, unit="tokens",
            low=0, high=16_777_216, metavar="N"),
    Setting("chat_template_kwargs", "table", {}, "next-request",
            "Variables for the chat template; those of a request win.", REQUESTS, metavar="JSON"),
    Setting("temperature", "float", None, "next-request", "0: always the likeliest token.", SAMPLING,
            low=0, high=100, optional=True, metavar="F"),
    Setting("top_k", "int", None, "next-request", "Sample among the k likeliest tokens; 0: among all.", SAMPLING,
            low=0, high=1_000_000, optional=True, metavar="N"),
    Setting("top_p", "float", None, "next-request", "Sample among the likeliest tokens that make up this mass.",
            SAMPLING, low=0, high=1, optional=True, metavar="F"),
    Setting("min_p", "float", None, "next-request", "Drop tokens less likely than this share of the likeliest one.",
            SAMPLING, low=0, high=1, optional=True, metavar="F"),
    Setting("repetition_penalty", "float", None, "next-request", "Divide the logits of recent tokens; 1: off.",
            SAMPLING, low=0.01, high=100, optional=True, metavar="F"),
    Setting("frequency_penalty", "float", None, "next-request", "Subtract this per use of a token in the answer.",
            SAMPLING, low=-100, high=100, optional=True, metavar="F"),
    Setting("presence_penalty", "float", None, "next-request", "Subtract this once for a token already in the answer.",
            SAMPLING, low=-100, high=100, optional=True, metavar="F"),
    Setting("penalty_last_n", "int", None, "next-request", "How many recent tokens repetition_penalty looks at.",
            SAMPLING, unit="tokens", low=0, high=16_777_216, optional=True, metavar="N"),
    Setting("ready_timeout_s", "float", 900.0, "now", "Time for the engine to load; 0: no limit.", TIMES,
            unit="seconds", low=0, high=86_400, metavar="S"),
    Setting("stall_limit_s", "float", 90.0, "now",
            "Silence of the engine after which it is killed and started again; 0: never.", TIMES, unit="seconds",
            low=0, high=86_400, metavar="S"),
    Setting("stop_timeout_s", "float", 10.0, "now", "Time for the engine to end by itself before it is killed.", TIMES,
            unit="seconds", low=0, high=3600, metavar="S"),
    Setting("drain_limit_s", "float", 25.0, "now", "Time for running answers to end when the daemon stops.", TIMES,
            unit="seconds", low=0, high=86_400, metavar="S"),
    Setting("queue_wait_limit_s", "float", 600.0, "now",
            "Longest wait in the queue before a request is refused; 0: no limit.", TIMES, unit="seconds", low=0,
            high=86_400, metavar="S"),
    Setting("restart_wait_limit_s", "float", 120.0, "now",
            "Longest time that waiting requests are kept while the engine is being started again.", TIMES,
            unit="seconds", low=0, high=86_400, metavar="S"),
    Setting("body_limit_mib", "int", 32, "next-request", "Largest request body.", TIMES, unit="MiB", low=1, high=1024,
            metavar="N"),
    Setting("header_limit_kib", "int", 64, "next-request", "Largest request head.", TIMES, unit="KiB", low=4, high=1024,
            metavar="N"),
    Setting("header_limit_s", "float", 10.0, "next-request", "Time for the head of a request to arrive.", TIMES,
            unit="seconds", low=0.1, high=3600, metavar="S"),
    Setting("request_limit_s", "float", 60.0, "next-request", "Time for the body of a request to arrive.", TIMES,
            unit="seconds", low=0.1, high=86_400, metavar="S"),
    Setting("keep_alive_s", "float", 75.0, "next-request", "How long an unused connection stays open.", TIMES,
            unit="seconds", low=0, high=86_400, metavar="S"),
    Setting("connection_limit", "int", 1000, "now", "Connections over all addresses; one more is turned away.", TIMES,
            low=1, high=100_000, metavar="N"),
    Setting("log_level", "choice", "info", "now", "Least important message that is logged.", LOGS,
            choices=("debug", "info", "warning", "error")),
)  # fmt: skip

BY_NAME: dict[str, Setting] = {setting.name: setting for setting in SETTINGS}


def suggest(word: str, known: Iterable[str]) -> str:
    """`; did you mean "..."?` for the known word closest to `word`, or an empty text when none is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f'; did you mean "{close[0]}"?' if close else ""


def lookup(name: str) -> Setting:
    """The row of `name`. Raises SettingError with a suggestion when there is none."""
    if name not in BY_NAME:
        raise SettingError(name, f'unknown setting "{name}"{suggest(name, BY_NAME)}')
    return BY_NAME[name]


@dataclass(frozen=True, slots=True)
class Effective:
    """The value in force, where it came from (`strata.toml:12`, `STRATA_KV`, `--kv`), and a value that waits."""

    value: Value
    source: Source = "default"
    origin: str = ""
    pending: tuple[Value, Source, str] | None = None  # takes force at the restart that the setting's row names


class Settings:
    """Every setting's effective value. Typed access by the row's kind: `settings.integer("queue_limit")`."""

    def __init__(self, values: Mapping[str, Effective] | None = None) -> None:
        self._values = {row.name: Effective(row.default) for row in SETTINGS}
        for name, effective in (values or {}).items():
            self._values[lookup(name).name] = effective

    def __getitem__(self, name: str) -> Value:
        return self._values[lookup(name).name].value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def effective(self, name: str) -> Effective:
        """Value, source, origin and pending value of one setting."""
        return self._values[lookup(name).name]

    def integer(self, name: str) -> int:
        """The value of an `int` setting that is never unset."""
        value = self[name]
        assert isinstance(value, int) and not isinstance(value, bool), name
        return value

    def number(self, name: str) -> float:
        """The value of an `int` or `float` setting that is never unset."""
        value = self[name]
        assert isinstance(value, int | float) and not isinstance(value, bool), name
        return float(value)

    def boolean(self, name: str) -> bool:
        """The value of a `bool` setting."""
        value = self[name]
        assert isinstance(value, bool), name
        return value

    def text(self, name: str) -> str:
        """The value of a `text`, `path` or `choice` setting."""
        value = self[name]
        assert isinstance(value, str), name
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """The value of a `list` setting."""
        value = self[name]
        assert isinstance(value, tuple), name
        return value

    def table(self, name: str) -> Mapping[str, Any]:
        """The value of a `table` setting."""
        value = self[name]
        assert isinstance(value, Mapping), name
        return value

    def reload(self, configured: Settings) -> list[str]:
        """Take over what a fresh reading of the configuration says; returns one line per change.

        Runtime values stay. A setting that applies only at a restart keeps its value in force and notes the new one
        as pending.
        """
        changes = []
        for row in SETTINGS:
            old, new = self._values[row.name], configured._values[row.name]
            merged = _merge(row, old, new)
            self._values[row.name] = merged
            if old != merged and (old.value != merged.value or merged.pending is not None):
                changes.append(_describe_change(row, old, merged))
        return changes

    def set_runtime(self, name: str, value: Value) -> None:
        """Set a value for this run only (already checked by the caller through `Setting.check` or `.parse`)."""
        row = lookup(name)
        self._values[name] = _merge(row, self._values[name], Effective(value, "runtime", "runtime"))

    def adopt(self, restart: Applies) -> None:
        """Let the values that waited for this kind of restart take force."""
        for row in SETTINGS:
            old = self._values[row.name]
            if old.pending is not None and row.applies == restart:
                self._values[row.name] = Effective(*old.pending)

    def after(self, restart: Applies) -> Settings:
        """What would be in force after this kind of restart."""
        found = Settings(self._values)
        found.adopt(restart)
        return found

    def describe(self) -> list[dict[str, object]]:
        """One row per setting for `stratactl get`, the manual and completion (JSON-ready values)."""
        return [_describe(row, self._values[row.name]) for row in SETTINGS]

    def summary(self) -> dict[str, object]:
        """The settings that do not have their default value, for the status snapshot."""
        return {name: plain(item.value) for name, item in self._values.items() if item.source != "default"}


def _merge(row: Setting, old: Effective, new: Effective) -> Effective:
    if old.source == "runtime" and new.source != "runtime":
        return old
    waits = row.applies in ("engine-restart", "daemon-restart")
    if not waits or old.value == new.value:
        return replace(new, pending=None)
    return replace(old, pending=(new.value, new.source, new.origin))


def _describe_change(row: Setting, old: Effective, new: Effective) -> str:
    if new.pending is not None:
        return f"{row.name}: {plain(old.value)!r} stays until {row.applies}, then {plain(new.pending[0])!r}"
    return f"{row.name}: {plain(old.value)!r} -> {plain(new.value)!r} ({new.source} {new.origin})".replace(" )", ")")


def plain(value: Value) -> object:
    """A setting's value as JSON has it."""
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


def _describe(row: Setting, effective: Effective) -> dict[str, object]:
    return {
        "name": row.name,
        "value": plain(effective.value),
        "default": plain(row.default),
        "source": effective.source,
        "origin": effective.origin,
        "kind": row.kind,
        "range": row.range,
        "unit": row.unit,
        "applies": row.applies,
        "help": row.help,
        "group": row.group,
        "flag": row.flag,
        "env": row.env,
        "pending": None if effective.pending is None else plain(effective.pending[0]),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Places that depend on who runs the daemon, so that they cannot be constants of the table.


def state_directory(settings: Settings, environ: Mapping[str, str] = os.environ) -> Path:
    """The state directory: the setting, else systemd's STATE_DIRECTORY, /var/lib/strata for root, the user's own."""
    if settings.text("state"):
        return Path(settings.text("state"))
    if environ.get("STATE_DIRECTORY"):
        return Path(environ["STATE_DIRECTORY"].split(":")[0])
    if os.geteuid() == 0:
        return Path("/var/lib/strata")
    base = environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(base) / "strata"


def control_socket(settings: Settings, environ: Mapping[str, str] = os.environ) -> Path:
    """The control socket: the setting, else control.sock in RUNTIME_DIRECTORY, /run/strata or the user's own."""
    if settings.text("control"):
        return Path(settings.text("control"))
    if environ.get("RUNTIME_DIRECTORY"):
        return Path(environ["RUNTIME_DIRECTORY"].split(":")[0]) / "control.sock"
    if os.geteuid() == 0:
        return Path("/run/strata/control.sock")
    runtime = environ.get("XDG_RUNTIME_DIR")
    return (Path(runtime) / "strata" if runtime else state_directory(settings, environ)) / "control.sock"
