"""The engine's line protocol: one table of lines, from which both reading and writing are made.

A line is UTF-8 text ended by one newline: a word, then fields separated by single blanks. `ANSWERS` lists what the
engine says, `REQUESTS` what it is told; the keys of `GEN` and `BGEN` stand in `GEN_KEYS`, those of a token in
`TOKEN_KEYS`. Lines that begin with B belong to a slot and name it; several slots are served at once.
Readers skip unknown words, unknown keys and unknown trailing fields, so that either side may grow first. A known word
with a missing or unreadable field is a `Malformed` line: the other side is out of step and cannot be trusted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stratad.types import Sampling

LINE_LIMIT = 1 << 20
"""Longest answer line in bytes; a longer one is a fault of the engine."""

# ---- values ---------------------------------------------------------------------------------------------------------


def _read_int(text: str) -> int:
    digits = text[1:] if text[:1] in "+-" else text
    if not digits.isascii() or not digits.isdecimal() or len(digits) > 20:
        raise ValueError(text)
    return int(text)


def _read_float(text: str) -> float:
    if "_" in text:
        raise ValueError(text)
    return float(text)


def _write_float(value: float) -> str:
    if not math.isfinite(value):
        raise ValueError(f"{value} cannot be sent")
    return repr(float(value))


def _read_pairs(text: str) -> tuple[tuple[int, float], ...]:
    """`id:number,id:number` (may be empty)."""
    pairs = [part.partition(":") for part in text.split(",") if part]
    return tuple((_read_int(left), _read_float(right)) for left, _, right in pairs)


def _write_pairs(pairs: tuple[tuple[int, float], ...]) -> str:
    return ",".join(f"{left}:{_write_float(right)}" for left, right in pairs)


def _read_ids(text: str) -> tuple[int, ...]:
    return tuple(_read_int(part) for part in text.split(","))


def _write_ids(ids: tuple[int, ...]) -> str:
    return ",".join(map(str, ids))


def _read_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def _write_object(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Kind:
    """How a field's text is read and written. `rest`: it takes the remainder of the line, blanks included."""

    read: Callable[[str], Any]
    write: Callable[[Any], str]
    rest: bool = False


INT = Kind(_read_int, str)
FLOAT = Kind(_read_float, _write_float)
WORD = Kind(str, str)
IDS = Kind(_read_ids, _write_ids)
PAIRS = Kind(_read_pairs, _write_pairs)
TEXT = Kind(str, str, rest=True)
OBJECT = Kind(_read_object, _write_object, rest=True)

# ---- lines ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Info:
    """`INFO k=v k=v`: facts about the engine, before READY."""

    values: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Ready:
    """`READY <max_context> stop`: the model is loaded; `stop` says that STOP is honoured in mid-request."""

    max_context: int
    features: str = ""


@dataclass(frozen=True, slots=True)
class Err:
    """`ERR <name> <text>`: the load or the request failed; a refused request leaves the engine idle."""

    name: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Resume:
    """`RESUME <n>`: so many prompt tokens come from a held session."""

    tokens: int


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """`PP <position> <total> <ms> <tok_s>`, once per prompt chunk."""

    position: int
    total: int
    ms: float = 0.0
    tok_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Reused:
    """`REUSED <n>`: the prompt is read, decoding starts."""

    tokens: int


@dataclass(frozen=True, slots=True)
class TokenLine:
    """`T <id> [lp=<logprob> top=<id>:<lp>,...]`: one produced token, the end token included."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class DoneLine:
    """`DONE ...`: the request ended. Times in milliseconds; the fields after `finish` grew over time."""

    generated: int
    prompt_tokens: int
    prompt_ms: float
    decode_ms: float
    finish: str
    drafts_accepted: int = 0
    drafts_offered: int = 0
    reused: int = 0
    hits: int = 0
    lookups: int = 0
    ram_blobs: int = 0
    file_blobs: int = 0
    file_mb: float = 0.0
    prompt_tokens_read: int = 0
    offloaded: int = 0


@dataclass(frozen=True, slots=True)
class SlotResume:
    """`BRESUME <slot> <n>`: the request is in the slot; so many prompt tokens come from a held session."""

    slot: int
    tokens: int


@dataclass(frozen=True, slots=True)
class SlotProgress:
    """`BPP <slot> <position> <total> <ms> <tok_s>`, once per window with rows of this prompt."""

    slot: int
    position: int
    total: int
    ms: float = 0.0
    tok_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SlotAdmitted:
    """`BADM <slot> <1|0>`: the prompt is read, decoding starts (1)."""

    slot: int
    decoding: int


@dataclass(slots=True)  # not frozen, which makes one twice as fast; there is one for every token
class SlotToken:
    """`BT <slot> <id> [lp=<logprob> top=<id>:<lp>,...]`: one produced token, the end token included."""

    slot: int
    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SlotDone:
    """`BDONE ...`: the slot's request ended and the slot is free; times in milliseconds."""

    slot: int
    generated: int
    finish: str
    ms: float
    drafts_accepted: int = 0
    drafts_offered: int = 0
    prompt_tokens: int = 0
    reused: int = 0
    prompt_ms: float = 0.0
    decode_ms: float = 0.0
    prompt_tokens_read: int = 0


@dataclass(frozen=True, slots=True)
class SlotErr:
    """`BERR <slot> <name> <text>`: the slot's request was refused or failed, and has ended."""

    slot: int
    name: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Yielded:
    """`YIELDED <slot> <tokens>`: the read gave way with so many tokens read; `BDONE ... cancel` follows."""

    slot: int
    tokens: int


@dataclass(frozen=True, slots=True)
class StatLine:
    """`STAT {...}`: the engine's figures."""

    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Gen:
    """`GEN <max_new> [key=value ...] <ids>`: generate up to `max_new` tokens after the prompt `ids`."""

    max_new: int
    ids: tuple[int, ...]
    keys: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stop:
    """`STOP`: end the running request at the next window."""


@dataclass(frozen=True, slots=True)
class SlotGen:
    """`BGEN <slot> <max_new> [key=value ...] <ids>`: the same in a slot, which must be idle."""

    slot: int
    max_new: int
    ids: tuple[int, ...]
    keys: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SlotStop:
    """`BSTOP <slot>`: end the slot's request at its next window or prompt chunk."""

    slot: int


@dataclass(frozen=True, slots=True)
class SlotYield:
    """`BYIELD <slot>`: the slot's read is to give way at its next chunk; nothing that was read is lost."""

    slot: int


@dataclass(frozen=True, slots=True)
class Stat:
    """`STAT`: answer with one STAT line, at any time."""


@dataclass(frozen=True, slots=True)
class Quit:
    """`QUIT`: finish and exit."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A line whose word is in no table; skipped."""

    text: str


@dataclass(frozen=True, slots=True)
class Malformed:
    """A line with a known word that cannot be read; `reason` names the field."""

    text: str
    reason: str


SlotAnswer = SlotResume | SlotProgress | SlotAdmitted | SlotToken | SlotDone | SlotErr | Yielded
Answer = (
    Info | Ready | Err | Resume | PromptProgress | Reused | TokenLine | DoneLine | StatLine | SlotAnswer | Unknown
    | Malformed
)  # fmt: skip
Request = Gen | Stop | SlotGen | SlotStop | SlotYield | Stat | Quit | Unknown | Malformed


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a line: its name in the message, its kind, whether an older peer may leave it out."""

    name: str
    kind: Kind
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Keys:
    """`key=value` fields. `into`: the message's mapping that takes them; "" = each key is an attribute.

    `kinds` None: any key, its value a word. Unknown keys are skipped otherwise.
    """

    kinds: Mapping[str, tuple[str, Kind]] | None
    into: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the table: word, message class, fields in order, and where `key=value` fields stand (before the
    field numbered `keys_at`)."""

    word: str
    message: type
    fields: tuple[Field, ...] = ()
    keys: Keys | None = None
    keys_at: int = 0


TOKEN_KEYS: Mapping[str, tuple[str, Kind]] = {"lp": ("logprob", FLOAT), "top": ("top", PAIRS)}

GEN_KEYS: Mapping[str, tuple[str, Kind]] = {
    name: (name, kind)
    for name, kind in (
        ("temperature", FLOAT),
        ("top_p", FLOAT),
        ("top_k", INT),
        ("min_p", FLOAT),
        ("seed", INT),
        ("choice", INT),
        ("penalty_repeat", FLOAT),
        ("penalty_freq", FLOAT),
        ("penalty_present", FLOAT),
        ("penalty_last_n", INT),
        ("logit_bias", PAIRS),
        ("logprobs", INT),
        ("ckpt", INT),
        ("pin", INT),
        ("out_from", INT),
        ("spec_min_p", FLOAT),
        ("spec_p_cum", FLOAT),
        ("spec_p_cum_deep", FLOAT),
    )
}

_DONE_KINDS = {"prompt_ms": FLOAT, "decode_ms": FLOAT, "finish": WORD, "file_mb": FLOAT, "ms": FLOAT}


def _done_fields(message: type, needed: int) -> tuple[Field, ...]:
    """The fields of an end line in the order of its message; those after the first `needed` came later."""
    names: tuple[str, ...] = message.__slots__  # type: ignore[attr-defined]
    return tuple(Field(name, _DONE_KINDS.get(name, INT), index >= needed) for index, name in enumerate(names))


_SLOT = Field("slot", INT)
_READ = (Field("position", INT), Field("total", INT), Field("ms", FLOAT, True), Field("tok_s", FLOAT, True))

ANSWERS: tuple[Line, ...] = (
    Line("INFO", Info, keys=Keys(None, into="values")),
    Line("READY", Ready, (Field("max_context", INT), Field("features", TEXT, optional=True))),
    Line("ERR", Err, (Field("name", WORD), Field("text", TEXT, optional=True))),
    Line("RESUME", Resume, (Field("tokens", INT),)),
    Line("PP", PromptProgress, _READ),
    Line("REUSED", Reused, (Field("tokens", INT),)),
    Line("T", TokenLine, (Field("id", INT),), Keys(TOKEN_KEYS), keys_at=1),
    Line("DONE", DoneLine, _done_fields(DoneLine, needed=5)),
    Line("BRESUME", SlotResume, (_SLOT, Field("tokens", INT))),
    Line("BPP", SlotProgress, (_SLOT, *_READ)),
    Line("BADM", SlotAdmitted, (_SLOT, Field("decoding", INT))),
    Line("BT", SlotToken, (_SLOT, Field("id", INT)), Keys(TOKEN_KEYS), keys_at=2),
    Line("BDONE", SlotDone, _done_fields(SlotDone, needed=4)),
    Line("BERR", SlotErr, (_SLOT, Field("name", WORD), Field("text", TEXT, optional=True))),
    Line("YIELDED", Yielded, (_SLOT, Field("tokens", INT))),
    Line("STAT", StatLine, (Field("values", OBJECT),)),
)

REQUESTS: tuple[Line, ...] = (
    Line("GEN", Gen, (Field("max_new", INT), Field("ids", IDS)), Keys(GEN_KEYS, into="keys"), keys_at=1),
    Line("STOP", Stop),
    Line("BGEN", SlotGen, (_SLOT, Field("max_new", INT), Field("ids", IDS)), Keys(GEN_KEYS, into="keys"), keys_at=2),
    Line("BSTOP", SlotStop, (_SLOT,)),
    Line("BYIELD", SlotYield, (_SLOT,)),
    Line("STAT", Stat),
    Line("QUIT", Quit),
)

_ANSWER_BY_WORD = {line.word: line for line in ANSWERS}
_REQUEST_BY_WORD = {line.word: line for line in REQUESTS}
_BY_MESSAGE = {line.message: line for line in (*ANSWERS, *REQUESTS)}

# ---- reading --------------------------------------------------------------------------------------------------------


def parse_answer(line: bytes) -> Answer:
    """The message in one line of the engine (without its newline). Never raises."""
    if line.startswith(b"BT "):  # the one line per token: its plain form
        slot, _, token = line[3:].partition(b" ")
        if slot.isdigit() and token.isdigit() and len(line) < 24:
            return SlotToken(int(slot), int(token))
    message: Answer = _parse(line, _ANSWER_BY_WORD)
    return message


def parse_request(line: bytes) -> Request:
    """The message in one line to the engine (without its newline). Never raises."""
    message: Request = _parse(line, _REQUEST_BY_WORD)
    return message


def _parse(raw: bytes, table: Mapping[str, Line]) -> Any:
    text = raw.decode("utf-8", "replace").removesuffix("\r")
    word, _, rest = text.partition(" ")
    spec = table.get(word)
    if spec is None:
        return Unknown(text)
    try:
        return spec.message(**_read_fields(spec, rest))
    except _FieldError as error:
        return Malformed(text, f"{word}: {error}")


class _FieldError(ValueError):
    pass


def _read_fields(spec: Line, rest: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    position = 0
    for position, field_spec in enumerate(spec.fields):
        if spec.keys is not None and position == spec.keys_at:
            rest = _read_keys(spec.keys, rest, values)
        rest = rest.lstrip(" ")
        if not rest and field_spec.optional:
            return values
        part, _, remaining = (rest, "", "") if field_spec.kind.rest else rest.partition(" ")
        values[field_spec.name] = _read_value(field_spec.name, field_spec.kind, part)
        rest = remaining
    if spec.keys is not None and spec.keys_at >= len(spec.fields):
        _read_keys(spec.keys, rest, values)
    return values


def _read_keys(keys: Keys, rest: str, values: dict[str, Any]) -> str:
    """Take leading `key=value` words off `rest`; returns what follows them."""
    into: dict[str, Any] = values.setdefault(keys.into, {}) if keys.into else values
    while True:
        part, _, remaining = rest.lstrip(" ").partition(" ")
        key, equals, value = part.partition("=")
        if not equals:
            return rest
        if keys.kinds is None:
            into[key] = value
        elif key in keys.kinds:
            name, kind = keys.kinds[key]
            into[name] = _read_value(key, kind, value)
        rest = remaining


def _read_value(name: str, kind: Kind, text: str) -> Any:
    try:
        return kind.read(text)
    except (ValueError, RecursionError):
        shown = text if len(text) <= 40 else text[:37] + "..."
        raise _FieldError(f"{name} cannot be read from {shown!r}") from None


# ---- writing --------------------------------------------------------------------------------------------------------


def format_line(message: Answer | Request) -> bytes:
    """One message as a line with its newline. Raises ValueError for a text that would break the line."""
    spec = _BY_MESSAGE[type(message)]
    parts = [spec.word]
    for position, field_spec in enumerate(spec.fields):
        if spec.keys is not None and position == spec.keys_at:
            parts += _write_keys(spec.keys, message)
        parts.append(field_spec.kind.write(getattr(message, field_spec.name)))
    if spec.keys is not None and spec.keys_at >= len(spec.fields):
        parts += _write_keys(spec.keys, message)
    text = " ".join(part for part in parts if part)
    if "\n" in text or "\r" in text:
        raise ValueError("a line cannot hold a line break")
    return text.encode("utf-8", "replace") + b"\n"


def _write_keys(keys: Keys, message: object) -> list[str]:
    if keys.into:
        given: Mapping[str, Any] = getattr(message, keys.into)
        kinds = keys.kinds
        if kinds is None:
            return [f"{key}={value}" for key, value in given.items()]
        return [f"{key}={kinds[key][1].write(value)}" for key, value in given.items()]
    assert keys.kinds is not None
    named = [(key, kind, getattr(message, attribute)) for key, (attribute, kind) in keys.kinds.items()]
    return [f"{key}={kind.write(value)}" for key, kind, value in named if value not in (None, ())]


# ---- sampling as keys -----------------------------------------------------------------------------------------------


def sampling_keys(sampling: Sampling) -> dict[str, Any]:
    """The keys of `GEN` for these sampling parameters: what differs from the engine's own defaults, and the seed."""
    keys: dict[str, Any] = {"seed": sampling.seed}
    if sampling.choice:
        keys["choice"] = sampling.choice
    if sampling.temperature > 0:
        keys["temperature"] = sampling.temperature
        keys |= {} if sampling.top_k <= 0 else {"top_k": sampling.top_k}
        keys |= {} if sampling.top_p >= 1 else {"top_p": sampling.top_p}
        keys |= {} if sampling.min_p <= 0 else {"min_p": sampling.min_p}
    penalties = {
        "penalty_repeat": (sampling.penalty_repeat, 1.0),
        "penalty_freq": (sampling.penalty_freq, 0.0),
        "penalty_present": (sampling.penalty_present, 0.0),
    }
    active = {name: value for name, (value, off) in penalties.items() if value != off}
    if active:
        keys |= active | {"penalty_last_n": sampling.penalty_last_n}
    if sampling.logit_bias:
        keys["logit_bias"] = tuple(sorted(sampling.logit_bias.items()))
    if sampling.logprobs is not None:
        keys["logprobs"] = sampling.logprobs
    return keys
