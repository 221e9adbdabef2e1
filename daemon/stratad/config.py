"""Where settings come from: default < strata.toml < strata-<model>.json < override file < environment < command line.

Reading is strict and collects every problem, so that one run of `--check-config` shows all of them. A `Problem` names
the file and line (where the text shows it), the key, and what would be right. Paths in a file are relative to it.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stratad.settings import (
    BY_NAME,
    SETTINGS,
    SOURCES,
    Effective,
    SettingError,
    Settings,
    Source,
    Value,
    state_directory,
    suggest,
)

SYSTEM_CONFIG = Path("/etc/strata/strata.toml")
OVERRIDE_NAME = "override.toml"
OVERRIDE_VERSION = 1
SIZE_LIMIT = 1 << 20  # bytes; a configuration file is read whole


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with the configuration. `place` is a file and line, a variable or an option."""

    place: str
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message}" if self.place else self.message


class ConfigError(Exception):
    """The configuration cannot be used; `problems` holds every reason."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__(str(problems[0]))
        self.problems = problems

    def one_line(self) -> str:
        """The first problem, and how many more there are."""
        more = len(self.problems) - 1
        return str(self.problems[0]) + (f" (and {more} more; --check-config shows all)" if more else "")


@dataclass(slots=True)
class Layers:
    """Values by source as they are collected, with what is wrong and what deserves a word (`notes`)."""

    values: dict[Source, dict[str, Effective]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)

    def put(self, source: Source, name: str, value: Value, origin: str) -> None:
        """Set one checked value in the layer of `source`."""
        self.values.setdefault(source, {})[name] = Effective(value, source, origin)

    def merged(self) -> Settings:
        """The strongest value of every setting."""
        chosen: dict[str, Effective] = {}
        for source in SOURCES:
            chosen.update(self.values.get(source, {}))
        return Settings(chosen)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything a reading of the configuration depends on, so that a reload can repeat it.

    `files`: what `--config` named (strata.toml or strata-<model>.json); none: the system's file, if there is one.
    `options`: values of the command line by setting name, still as text except for booleans.
    """

    files: tuple[Path, ...] = ()
    options: Mapping[str, str | bool] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    system_config: Path = SYSTEM_CONFIG


@dataclass(frozen=True, slots=True)
class Loaded:
    """A valid configuration: its settings, the files that were read, and notes worth a log line."""

    settings: Settings
    files: tuple[Path, ...]
    notes: tuple[Problem, ...]


def load(inputs: Inputs) -> Loaded:
    """Read every layer. Raises ConfigError with all problems."""
    layers = Layers()
    files = _main_files(inputs)
    _read_environment(layers, inputs.environ)
    _read_options(layers, inputs.options)
    for path in files:
        _read_file(layers, path)
    override = _read_override(layers, inputs.environ)  # before the next, since it may name the model
    if not any(path.suffix == ".json" for path in files):
        files += _read_model_file(layers, files)
    files += override
    if layers.problems:
        raise ConfigError(layers.problems)
    return Loaded(layers.merged(), tuple(files), tuple(layers.notes))


def _main_files(inputs: Inputs) -> list[Path]:
    if inputs.files:
        return list(inputs.files)
    if inputs.environ.get("STRATA_CONFIG"):
        return [Path(inputs.environ["STRATA_CONFIG"])]
    return [inputs.system_config] if inputs.system_config.is_file() else []


def _read_file(layers: Layers, path: Path) -> None:
    if path.suffix == ".json":
        _read_json(layers, path)
    else:
        _read_toml(layers, path, "file")


def _read_model_file(layers: Layers, main: list[Path]) -> list[Path]:
    """`strata-<model>.json` beside strata.toml or beside the model, if there is one."""
    model = layers.merged().text("model")
    if not model:
        return []
    name = f"strata-{Path(model).stem}.json"
    for directory in [path.parent for path in main] + [Path(model).parent]:
        if (directory / name).is_file():
            _read_json(layers, directory / name)
            return [directory / name]
    return []


def _read_override(layers: Layers, environ: Mapping[str, str]) -> list[Path]:
    path = state_directory(layers.merged(), environ) / OVERRIDE_NAME
    try:
        if not path.is_file():
            return []
    except PermissionError:  # whether the directory can be used is decided when it is locked
        return []
    _read_toml(layers, path, "override")
    return [path]


# ---------------------------------------------------------------------------------------------------------------------
# TOML


def _read_text(layers: Layers, path: Path) -> str | None:
    try:
        with path.open("rb") as stream:
            data = stream.read(SIZE_LIMIT + 1)
        if len(data) > SIZE_LIMIT:
            layers.problems.append(Problem(str(path), f"larger than {SIZE_LIMIT // 1024} KiB; is this the right file?"))
            return None
        return data.decode("utf-8")
    except OSError as error:
        layers.problems.append(Problem(str(path), f"cannot be read: {error.strerror}"))
    except UnicodeDecodeError as error:
        layers.problems.append(Problem(str(path), f"is not UTF-8 text (byte {error.start})"))
    return None


def _read_toml(layers: Layers, path: Path, source: Source) -> None:
    text = _read_text(layers, path)
    if text is None:
        return
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        layers.problems.append(Problem(str(path), f"is not valid TOML: {error}"))
        return
    except RecursionError:
        layers.problems.append(Problem(str(path), "is nested too deeply"))
        return
    if source == "override":
        version = document.pop("version", OVERRIDE_VERSION)
        if version != OVERRIDE_VERSION:
            layers.problems.append(Problem(str(path), f"version must be {OVERRIDE_VERSION}, not {version!r}"))
            return
    for key, value in document.items():
        _put_checked(layers, source, key, value, _Place(path, _toml_line(text, key)))


def _toml_line(text: str, key: str) -> int | None:
    pattern = re.compile(rf"""^\s*(?:\[\s*)?["']?{re.escape(key)}["']?\s*(?:=|\.|\])""")
    return next((number for number, line in enumerate(text.splitlines(), 1) if pattern.match(line)), None)


@dataclass(frozen=True, slots=True)
class _Place:
    path: Path
    line: int | None = None

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" if self.line else str(self.path)


def _put_checked(layers: Layers, source: Source, key: str, value: object, place: _Place) -> None:
    if key not in BY_NAME:
        layers.problems.append(Problem(str(place), f'unknown setting "{key}"{_suggest_setting(key, value)}'))
        return
    try:
        checked = BY_NAME[key].check(value)
    except SettingError as error:
        layers.problems.append(Problem(str(place), f"{error.name} {error.message}"))
        return
    layers.put(source, key, _from_file(key, checked, place.path), str(place))


def _suggest_setting(key: str, value: object) -> str:
    if isinstance(value, Mapping) and value and all(inner in BY_NAME for inner in value):
        return f"; write {next(iter(value))} and the like outside of any section"
    return suggest(key, BY_NAME)


def _from_file(name: str, value: Value, path: Path) -> Value:
    """Make a path that a file names relative to that file."""
    row = BY_NAME[name]
    if row.kind != "path" or not isinstance(value, str) or not value or value in row.words:
        return value
    expanded = Path(value).expanduser()
    return str(expanded if expanded.is_absolute() else path.parent / expanded)


# ---------------------------------------------------------------------------------------------------------------------
# Environment and command line

OTHER_VARIABLES = frozenset({"STRATA_CONFIG", "STRATA_SOCKET"})  # read elsewhere: --config, stratactl --socket


def _read_environment(layers: Layers, environ: Mapping[str, str]) -> None:
    by_variable = {row.env: row for row in SETTINGS}
    for variable, text in environ.items():
        if not variable.startswith("STRATA_") or variable in OTHER_VARIABLES:
            continue
        row = by_variable.get(variable)
        if row is None:  # the environment is shared with other programs, so this is no error
            layers.notes.append(Problem(variable, f"is not a setting{suggest(variable, by_variable)}"))
            continue
        _put_parsed(layers, "environment", row.name, text, variable)


def _read_options(layers: Layers, options: Mapping[str, str | bool]) -> None:
    for name, text in options.items():
        if isinstance(text, bool):
            layers.put("command-line", name, text, BY_NAME[name].flag)
        else:
            _put_parsed(layers, "command-line", name, text, BY_NAME[name].flag)


def _put_parsed(layers: Layers, source: Source, name: str, text: str, origin: str) -> None:
    try:
        layers.put(source, name, BY_NAME[name].parse(text), origin)
    except SettingError as error:
        layers.problems.append(Problem(origin, error.message))


# ---------------------------------------------------------------------------------------------------------------------
# strata-<model>.json: our own names, and the keys that earlier installations of Strata have in such a file

NOT_SERVED: Mapping[str, str] = {
    "backend": "there is one engine program",
    "gpu": "the engine runs on the CPU",
    "hip_ordinal": "the engine runs on the CPU",
    "gpu_order": "the engine runs on the CPU",
    "layer_split": "the engine runs on the CPU",
    "split_skip_if_fits": "the engine runs on the CPU",
    "head_device": "the engine runs on the CPU",
    "replicas": "the engine runs on the CPU",
    "replica_cpus": "the engine runs on the CPU",
    "replica_load_tokens": "the engine runs on the CPU",
    "min_free_vram_mib": "the engine runs on the CPU",
    "vram_elastic": "the engine runs on the CPU",
    "vram_segment_mib": "the engine runs on the CPU",
    "lib_dirs": "the engine finds its libraries itself",
    "cwd": "the engine needs no working directory",
    "log": "the log goes to standard error or the journal",
    "tokenizer": "it is made from the model file",
    "vision": "text only",
    "aliases": "the model has one name, model_name",
    "fit_max_tokens": "a request that does not fit is refused, naming both numbers",
    "idle_unload_s": "the model stays loaded",
    "lazy_load": "the model is loaded at the start",
    "before_load": "no command is run before loading",
    "expert_profile_save": "every expert is resident",
    "expert_profile_save_every": "every expert is resident",
    "slot_save_path": "sessions are not saved to files",
    "reasoning_effort": "set it in chat_template_kwargs",
    "reasoning_budget_tokens": "thinking has no budget of its own",
    "reasoning_close_retry": "an answer is what the model says",
    "literal_think_guard": "an answer is what the model says",
    "reasoning_loop_recovery": "an answer is what the model says",
    "repeat_stop_tokens": "an answer is what the model says",
    "tool_call_recovery": "an answer is what the model says",
    "effort_position": "the chat template decides it",
    "anthropic_thinking": "only the OpenAI API is served",
    "codex_thread_titles": "only the OpenAI API is served",
    "codex_compaction_cache": "only the OpenAI API is served",
    "experimental_responses": "only the OpenAI API is served",
    "api_monitor": "prompts are never recorded",
    "cors_origins": "no other origin is let in",
    "trusted_origins": "no other origin is let in",
    "mcp": "tools are run by the client",
    "mcp_servers": "tools are run by the client",
    "mcpServers": "tools are run by the client",
    "prevent_sleep": "the system decides when to sleep",
    "open_browser": "a service opens no browser",
    "memory_policy": "memory is planned at the start",
    "resource_presets": "memory is planned at the start",
}
"""Keys that are accepted and have no effect, each with what holds instead."""

REFUSED: Mapping[str, str] = {
    "api_key": "keys are not checked, so leaving it in would only look safe; remove it and listen on 127.0.0.1",
    "allowed_hosts": "host names are not checked, so leaving it in would only look safe; remove it",
}
"""Keys that would leave the service more open than the file says."""

SAMPLING_NAMES: Mapping[str, str] = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "repeat_penalty": "repetition_penalty",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "penalty_last_n": "penalty_last_n",
    "repeat_last_n": "penalty_last_n",
    "max_tokens": "max_tokens",
}


@dataclass(frozen=True, slots=True)
class _Option:
    """An option in the `args` list: how many values follow it, and the setting it means ("" = without effect)."""

    values: int
    setting: str = ""


_VALUE_WITHOUT_EFFECT = """
    --adapt-async --adapt-decay --adapt-every --adapt-min-gain --adapt-swaps --batch-groups
    --control-vector-scaled --conversation-cache-mib --conversation-cache-min-free-mib --conversation-cache-slots
    --cvec-mode --expert-cache --expert-profile --expert-profile-save --expert-profile-save-every --gpu --host-core
    --kv-resident --layer-split --lookup-chain --lookup-chain-min --mtp --mtp-max-t --mtp-window --pack --pcie-frac
    --pcie-mode --pipeline-windows --ple-gguf --ple-io --pool-tasks --pool-workers --prefill --prompt-cache
    --prompt-cache-root --resident-budget-gib --session-min-free-mib --short-read
    --split-device --suffix-draft --tail-role-token --turn-token --vision --vram-reserve-later-mib
    --vram-reserve-mib --vram-segment-mib
"""
_FLAGS_WITHOUT_EFFECT = """
    --batch-mtp --kv-grow --mmap-experts --no-prefill-borrow --prompt-cache-tail --resident-experts
    --split-skip-if-fits --stats --trim-stage-weights --vram-elastic
"""

ENGINE_OPTIONS: Mapping[str, _Option] = {
    "--max-context": _Option(1, "max_context"),
    "--kv": _Option(1, "kv"),
    "--native": _Option(1, "model"),
    "--model": _Option(1, "model"),
    "--threads": _Option(1, "threads"),
    "--isa": _Option(1, "isa"),
    "--parallel": _Option(1, "parallel"),
    "--batch": _Option(1, "parallel"),
    "--slots": _Option(1, "parallel"),
    "--spec": _Option(1, "spec"),
    "--spec-min-p": _Option(1, "spec_min_p"),
    "--stall-target-ms": _Option(1, "stall_target_ms"),
    "--decode-share": _Option(1, "decode_share"),
    "--prompt-cache-mib": _Option(1, "prompt_cache_mib"),
    "--prompt-cache-every": _Option(1, "prompt_cache_every"),
    "--memory-mib": _Option(1, "memory_mib"),
    "--allow-untrained-context": _Option(0, "allow_untrained_context"),
    "--serve": _Option(0),
    **dict.fromkeys(_VALUE_WITHOUT_EFFECT.split(), _Option(1)),
    **dict.fromkeys(_FLAGS_WITHOUT_EFFECT.split(), _Option(0)),
}
"""The engine options that an `args` list may have."""


def _read_json(layers: Layers, path: Path) -> None:
    text = _read_text(layers, path)
    if text is None:
        return
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        layers.problems.append(Problem(f"{path}:{error.lineno}", f"is not valid JSON: {error.msg}"))
        return
    except RecursionError:
        layers.problems.append(Problem(str(path), "is nested too deeply"))
        return
    if not isinstance(document, dict):
        layers.problems.append(Problem(str(path), "must be a JSON object"))
        return
    reader = _JsonReader(layers, path, text)
    for key, value in document.items():
        reader.read(key, value)
    reader.finish()


class _JsonReader:
    """Reads one strata-<model>.json: keys by our names first, then those of the mapping tables."""

    def __init__(self, layers: Layers, path: Path, text: str) -> None:
        self.layers, self.path, self.text = layers, path, text
        self.host: str | None = None
        self.port: int | None = None
        self.special: Mapping[str, Callable[[str, Any], None]] = {
            "exe": lambda _key, value: self.put("engine", value, "exe"),
            "env": lambda _key, value: self.put("engine_env", value, "env"),
            "engine_silence_s": lambda _key, value: self.put("stall_limit_s", value, "engine_silence_s"),
            "args": self.args,
            "sampling": self.sampling,
            "host": self.host_key,
            "port": self.port_key,
        }

    def place(self, key: str) -> _Place:
        pattern = re.compile(re.escape(json.dumps(key)) + r"\s*:")
        found = pattern.search(self.text)
        return _Place(self.path, self.text.count("\n", 0, found.start()) + 1 if found else None)

    def problem(self, key: str, message: str) -> None:
        self.layers.problems.append(Problem(str(self.place(key)), message))

    def read(self, key: str, value: object) -> None:
        if key in self.special:
            self.special[key](key, value)
        elif key in BY_NAME:
            self.put(key, value, key)
        elif key in REFUSED:
            self.problem(key, f"{key} is refused: {REFUSED[key]}")
        elif key in NOT_SERVED:
            self.layers.notes.append(Problem(str(self.place(key)), f"{key} has no effect: {NOT_SERVED[key]}"))
        else:
            known = [*BY_NAME, *self.special, *NOT_SERVED]
            self.problem(key, f'unknown key "{key}"{suggest(key, known)}')

    def put(self, name: str, value: object, key: str) -> None:
        place = self.place(key)
        try:
            checked = BY_NAME[name].check(value)
        except SettingError as error:
            self.problem(key, f"{key} {error.message}")
            return
        self.layers.put("model-file", name, _from_file(name, checked, self.path), str(place))

    def sampling(self, key: str, value: object) -> None:
        if not isinstance(value, dict):
            self.problem(key, f"sampling must be a table, not {value!r}")
            return
        for name, number in value.items():
            if name in SAMPLING_NAMES:
                self.put(SAMPLING_NAMES[name], number, name)
            else:
                self.problem(name, f'unknown key "{name}" in sampling{suggest(name, SAMPLING_NAMES)}')

    def host_key(self, key: str, value: object) -> None:
        if not isinstance(value, str) or not value:
            self.problem(key, f"host must be a host name or address, not {value!r}")
        else:
            self.host = value

    def port_key(self, key: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 65536:
            self.problem(key, f"port must be a whole number 1 to 65535, not {value!r}")
        else:
            self.port = value

    def args(self, key: str, value: object) -> None:
        if not isinstance(value, list) or not all(isinstance(word, str | int | float) for word in value):
            self.problem(key, f"args must be a list of words, not {value!r}")
            return
        words = [str(word) for word in value]
        while words:
            option, _, joined = words.pop(0).partition("=")
            if option == "--host" or option == "--port":
                self.server_option(option, joined or (words.pop(0) if words else ""))
            elif option in ENGINE_OPTIONS:
                self.engine_option(option, joined, words)
            else:
                self.problem(key, f'unknown option "{option}" in args{suggest(option, ENGINE_OPTIONS)}')
                while words and not words[0].startswith("--"):  # its values would only repeat the complaint
                    words.pop(0)

    def server_option(self, option: str, text: str) -> None:
        if option == "--host":
            self.host_key("args", text)
        else:
            self.port_key("args", int(text) if text.isdecimal() else text)

    def engine_option(self, option: str, joined: str, words: list[str]) -> None:
        spec = ENGINE_OPTIONS[option]
        if spec.values == 0:
            value: str = "true"
        elif joined:
            value = joined
        elif words and not words[0].startswith("--"):
            value = words.pop(0)
        else:
            self.problem("args", f"{option} needs a value in args")
            return
        if not spec.setting:
            self.layers.notes.append(Problem(str(self.place("args")), f"{option} in args has no effect"))
            return
        try:
            self.put(spec.setting, BY_NAME[spec.setting].parse(value), "args")
        except SettingError as error:
            self.problem("args", f"{option} in args {error.message}")

    def finish(self) -> None:
        if self.host is None and self.port is None:
            return
        host = self.host or "127.0.0.1"
        bracketed = f"[{host}]" if ":" in host and not host.startswith("[") else host
        origin = str(self.place("host" if self.host else "port"))
        self.layers.put("model-file", "listen", (f"{bracketed}:{self.port or 8080}",), origin)
