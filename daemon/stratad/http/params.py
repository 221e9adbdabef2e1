"""Request parameters: one table says which there are, their type, range, default and what they set.

A wrong value is answered with 400 `invalid_value` naming the field and what it may be. `null` means absent
throughout, numbers are never taken from strings, and ranges are those of the settings of the same name.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from stratad.errors import StrataError
from stratad.http.json_body import kind_of
from stratad.settings import BY_NAME, Settings
from stratad.types import Sampling

log = logging.getLogger(__name__)

MAX_STOPS = 4
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
BIAS_RANGE = 100.0
NEVER = -1e9
"""The bias that `ignore_eos` gives the tokens that end an answer."""

WHOLE_CONTEXT = -1


@dataclass(frozen=True, slots=True)
class Parameter:
    """One sampling parameter. `special` values lie outside the range and stand for another one."""

    name: str  # also the setting's name, whose type and range hold here
    field: str  # of `stratad.types.Sampling`
    default: float  # where neither the request, the settings nor the model file say
    aliases: tuple[str, ...] = ()
    special: tuple[tuple[int, int], ...] = ()  # (value, what it stands for)

    @property
    def integer(self) -> bool:
        """Whether only whole numbers are taken."""
        return BY_NAME[self.name].kind == "int"

    def in_range(self, value: float) -> bool:
        """Whether the setting of this name could have this value."""
        row = BY_NAME[self.name]
        return (row.low is None or value >= row.low) and (row.high is None or value <= row.high)

    def check(self, name: str, value: object) -> float:
        """The value from a request that calls it `name`. Raises StrataError `invalid_value`."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            for given, meant in self.special:
                if value == given:
                    return meant
            whole = float(value).is_integer() if self.integer else True
            if whole and self.in_range(value):
                return int(value) if self.integer else float(value)
        raise invalid(name, f"must be {'a whole number' if self.integer else 'a number'} {self.range}", value)

    @property
    def range(self) -> str:
        """The allowed values in words."""
        return BY_NAME[self.name].range + "".join(f", or {value}" for value, _ in self.special)


SAMPLING: tuple[Parameter, ...] = (
    Parameter("temperature", "temperature", 1.0),
    Parameter("top_p", "top_p", 1.0),
    Parameter("top_k", "top_k", 0, special=((-1, 0),)),
    Parameter("min_p", "min_p", 0.0),
    Parameter("presence_penalty", "penalty_present", 0.0),
    Parameter("frequency_penalty", "penalty_freq", 0.0),
    Parameter("repetition_penalty", "penalty_repeat", 1.0, aliases=("repeat_penalty",)),
    Parameter("penalty_last_n", "penalty_last_n", 64, aliases=("repeat_last_n",), special=((-1, WHOLE_CONTEXT),)),
)

COMMON_NAMES = frozenset(
    {"model", "stream", "stream_options", "seed", "stop", "logit_bias", "logprobs", "ignore_eos", "n", "max_tokens"}
    | {"strata_tune"}
    | {name for row in SAMPLING for name in (row.name, *row.aliases)}
)
"""Fields that every endpoint understands."""

IGNORED = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "parallel_tool_calls", "modalities", "prediction", "verbosity", "cache_prompt", "id_slot", "timings_per_token",
        "return_progress", "typical_p", "xtc_probability", "xtc_threshold", "mirostat", "mirostat_tau", "mirostat_eta",
        "dynatemp_range", "dynatemp_exponent", "dry_multiplier", "samplers", "keep_alive", "options",
    }
)  # fmt: skip
"""Fields that other servers know and that change nothing here."""

_UNSUPPORTED_GRAMMAR = "is not supported: answers cannot be held to a grammar"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A field that must not be passed over in silence: allowed is only what asks for nothing."""

    allowed: Callable[[Any], bool]
    text: str


def _only(*values: object) -> Callable[[Any], bool]:
    return lambda value: any(value == allowed and type(value) is type(allowed) for allowed in values)


REFUSALS: dict[str, Refusal] = {
    "n": Refusal(_only(1), "must be 1"),
    "best_of": Refusal(_only(1), "must be 1"),
    "echo": Refusal(_only(False), "must be false: the prompt is not repeated"),
    "suffix": Refusal(_only(""), "is not supported"),
    "response_format": Refusal(
        lambda value: isinstance(value, dict) and value.get("type") == "text",
        'must be {"type": "text"}: answers cannot be held to a schema',
    ),
    "functions": Refusal(_only([]), 'is not supported; use "tools"'),
    "function_call": Refusal(_only("none", "auto"), 'is not supported; use "tools"'),
    "tool_choice": Refusal(_only("none", "auto"), 'must be "none" or "auto"'),
    "audio": Refusal(_only(), "is not supported"),
    "web_search_options": Refusal(_only(), "is not supported"),
    "grammar": Refusal(_only(""), _UNSUPPORTED_GRAMMAR),
    "json_schema": Refusal(_only(), _UNSUPPORTED_GRAMMAR),
    "guided_json": Refusal(_only(), _UNSUPPORTED_GRAMMAR),
    "guided_regex": Refusal(_only(), _UNSUPPORTED_GRAMMAR),
    "guided_choice": Refusal(_only(), _UNSUPPORTED_GRAMMAR),
    "guided_grammar": Refusal(_only(), _UNSUPPORTED_GRAMMAR),
    "structured_outputs": Refusal(_only(), _UNSUPPORTED_GRAMMAR),
}
"""Fields by which a client asks for something that is not done; answered with 400 rather than with something else."""


def invalid(name: str, text: str, value: object = None) -> StrataError:
    """The failure for a wrong field: `<name> <text>, not <value>`."""
    shown = "" if value is None else f", not {_show(value)}"
    return StrataError("invalid_value", f"{name} {text}{shown}", param=name)


def _show(value: object) -> str:
    if isinstance(value, dict | list):
        return kind_of(value)
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    return text if len(text) <= 40 else text[:37] + "..."


class Fields:
    """The fields of one request body."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = {name: value for name, value in body.items() if value is not None}

    def get(self, name: str) -> Any:
        """The value, or None when the field is absent or null."""
        return self._body.get(name)

    def first(self, *names: str) -> tuple[str, Any]:
        """The first of several names for one thing that is given, and its value (None when none is)."""
        return next(((name, self._body[name]) for name in names if name in self._body), (names[0], None))

    def boolean(self, name: str, default: bool = False) -> bool:
        """A truth value."""
        value = self._body.get(name, default)
        if not isinstance(value, bool):
            raise invalid(name, "must be true or false", value)
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        """A whole number from `low` to `high`."""
        value = self._body.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high):
            raise invalid(name, f"must be a whole number from {low} to {high}", value)
        return value

    def object(self, name: str) -> dict[str, Any]:
        """A JSON object; empty when absent."""
        value = self._body.get(name, {})
        if not isinstance(value, dict):
            raise invalid(name, "must be an object", value)
        return value

    def check_names(self, known: Collection[str]) -> None:
        """Refuse what must not be ignored; note once what is."""
        for name, value in self._body.items():
            refusal = REFUSALS.get(name)
            if refusal is not None and not refusal.allowed(value):
                raise StrataError("invalid_value", f"{name} {refusal.text}", param=name)
            if refusal is None and name not in known and name not in IGNORED:
                _note_unknown(name)


_noted: set[str] = set()


def _note_unknown(name: str) -> None:
    if name not in _noted and len(_noted) < 256:
        _noted.add(name)
        log.debug("unknown request field %.60r is ignored (said once)", name)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What of the model the sampling parameters depend on."""

    size: int
    end_ids: Collection[int]
    max_context: int


def sampling(
    fields: Fields,
    settings: Settings,
    recommended: Mapping[str, float],
    vocabulary: Vocabulary,
    logprobs: int | None,
) -> Sampling:
    """How to sample: request > settings > the model file's recommendation > OpenAI's defaults.

    Without a seed (or with -1) a random one is drawn, so that the answer can be repeated by its record.
    """
    values: dict[str, Any] = {row.field: _value(row, fields, settings, recommended) for row in SAMPLING}
    if values["penalty_last_n"] == WHOLE_CONTEXT:
        values["penalty_last_n"] = vocabulary.max_context
    seed = fields.integer("seed", -(2**63), 2**64 - 1)
    biases = logit_bias(fields, vocabulary.size)
    if fields.boolean("ignore_eos"):
        biases |= dict.fromkeys(vocabulary.end_ids, NEVER)
    return Sampling(
        **values,
        seed=secrets.randbits(63) if seed is None or seed == -1 else seed,
        logit_bias=biases,
        logprobs=logprobs,
    )


def _value(row: Parameter, fields: Fields, settings: Settings, recommended: Mapping[str, float]) -> float:
    name, value = fields.first(row.name, *row.aliases)
    if value is not None:
        return row.check(name, value)
    for candidate in (settings[row.name], recommended.get(row.name)):
        if isinstance(candidate, int | float) and row.in_range(candidate):
            return int(candidate) if row.integer else float(candidate)
    return row.default


def logit_bias(fields: Fields, vocabulary: int) -> dict[int, float]:
    """`{"<token id>": bias}` with biases from -100 to 100."""
    given = fields.object("logit_bias")
    if len(given) > MAX_BIASES:
        raise invalid("logit_bias", f"must have at most {MAX_BIASES} entries")
    biases: dict[int, float] = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocabulary):
            raise invalid("logit_bias", f"must have token ids from 0 to {vocabulary - 1} as names", key)
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -BIAS_RANGE <= bias <= BIAS_RANGE:
            raise StrataError(
                "invalid_value", f"logit_bias[{key}] must be a number from -100 to 100, not {_show(bias)}",
                param="logit_bias",
            )  # fmt: skip
        biases[int(key)] = float(bias)
    return biases


TUNE = ("spec_min_p", "spec_p_cum", "spec_p_cum_deep")
"""What `strata_tune` may hold: limits of drafting for this request, each from 0 to 1. They change speed only."""

TUNE_IGNORED = frozenset({"pcie_frac", "aux_cpus"})
"""Members for hardware that this engine does not use."""


def tune(fields: Fields) -> dict[str, float]:
    """The object `strata_tune`."""
    chosen: dict[str, float] = {}
    for name, value in fields.object("strata_tune").items():
        place = f"strata_tune.{name}"
        if name in TUNE_IGNORED or value is None:
            continue
        if name not in TUNE:
            raise invalid(place, f"is not known; strata_tune takes {', '.join(TUNE)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise invalid(place, "must be a number from 0 to 1", value)
        chosen[name] = float(value)
    return chosen


def stops(fields: Fields) -> tuple[str, ...]:
    """The stop strings: one, or a list of up to four; an empty one would match at once and is refused."""
    value = fields.get("stop")
    if value is None:
        return ()
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not all(isinstance(item, str) for item in given):
        raise invalid("stop", f"must be a string or a list of up to {MAX_STOPS} strings")
    if len(given) > MAX_STOPS:
        raise invalid("stop", f"must have at most {MAX_STOPS} strings", len(given))
    if not all(given):
        raise invalid("stop", "must not hold an empty string")
    return tuple(dict.fromkeys(given))


def stream_options(fields: Fields) -> tuple[bool, bool]:
    """Whether to stream, and whether the stream ends with a chunk of usage figures."""
    options = Fields(fields.object("stream_options"))
    try:
        usage = options.boolean("include_usage")
    except StrataError as error:
        raise StrataError(error.name, f"stream_options.{error.message}", param="stream_options.include_usage") from None
    return fields.boolean("stream"), usage


def check_model(fields: Fields) -> None:
    """Any name is taken, as there is one model; the answer says which one it was."""
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise invalid("model", "must be a string", model)


@dataclass(frozen=True, slots=True)
class Room:
    """A prompt in the context: their lengths in tokens, and the field the prompt came from."""

    prompt_tokens: int
    max_context: int
    place: str

    @property
    def left(self) -> int:
        """Tokens for the answer."""
        return self.max_context - self.prompt_tokens


def budget(fields: Fields, names: tuple[str, ...], room: Room, default: int) -> int:
    """The largest number of new tokens. Absent, null, 0 and -1 mean what is left of the context.

    More than what is left is cut to that: the answer then ends with `length`. `default` is the setting `max_tokens`
    (0: none). Raises StrataError `context_length_exceeded` when the prompt leaves no room for one token.
    """
    name, value = fields.first(*names)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < -1):
        raise invalid(name, "must be a whole number of tokens, 1 or more (0 or -1: what is left of the context)", value)
    if room.left < 1:
        raise context_exceeded(room.prompt_tokens, room.max_context, room.place)
    wanted = default if value is None else value
    return min(wanted, room.left) if wanted > 0 else room.left


def context_exceeded(prompt_tokens: int, max_context: int, place: str, *, at_least: bool = False) -> StrataError:
    """The failure for a prompt that is too long, with both numbers."""
    return StrataError(
        "context_length_exceeded",
        f"the prompt has {'at least ' if at_least else ''}{prompt_tokens} tokens, the context holds {max_context}, "
        "and the answer needs at least one of them",
        param=place,
    )
