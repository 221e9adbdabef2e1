"""From settings to the engine's command: which program, which model, which options, which environment."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from stratad.child import Command
from stratad.config import Problem
from stratad.settings import BY_NAME, Settings
from stratad.supervisor import CommandError

ENGINE_NAME = "strata-engine"
EMBEDDED_MODEL = "strata-tiny-moe-Q4_0.gguf"

ENGINE_FLAGS: Mapping[str, str] = {
    "max_context": "--max-context",
    "threads": "--threads",
    "kv": "--kv",
    "isa": "--isa",
    "parallel": "--parallel",
    "spec": "--spec",
    "spec_min_p": "--spec-min-p",
    "stall_target_ms": "--stall-target-ms",
    "decode_share": "--decode-share",
    "prompt_cache_mib": "--prompt-cache-mib",
    "prompt_cache_every": "--prompt-cache-every",
    "memory_mib": "--memory-mib",
}
"""Settings that are passed on when they differ from the engine's default, with the engine's option."""

ENGINE_DEFAULTS: Mapping[str, object] = {**{name: BY_NAME[name].default for name in ENGINE_FLAGS}, "parallel": 1}
"""What the engine does without the option: by itself it has one slot, ours are meant to serve several clients."""

PRIVATE_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")
"""Between systemd and the daemon; an engine that saw them could speak in the daemon's name."""


def engine_path(settings: Settings) -> str | None:
    """The engine program: the setting, else the one beside this Python, else the one on PATH; None: there is none."""
    if settings.text("engine"):
        return settings.text("engine")
    beside = Path(sys.executable).parent / ENGINE_NAME
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(ENGINE_NAME)


def embedded_model() -> Path | None:
    """The model that comes with Strata: in the checkout, or where an installation puts it."""
    checkout = Path(__file__).resolve().parents[2] / "native" / "models" / EMBEDDED_MODEL
    installed = Path(sys.prefix) / "share" / "strata" / "models" / EMBEDDED_MODEL
    return next((path for path in (checkout, installed) if path.is_file()), None)


def model_path(settings: Settings) -> Path | None:
    """The model file: the setting, else the embedded model; None when there is neither."""
    return Path(settings.text("model")) if settings.text("model") else embedded_model()


def model_name(settings: Settings) -> str:
    """What clients call the model."""
    path = model_path(settings)
    return settings.text("model_name") or (path.stem if path else "")


def check_places(settings: Settings) -> list[Problem]:
    """What is wrong with the files that a valid configuration names."""
    problems = []
    model = model_path(settings)
    if model is None:
        problems.append(Problem("", "model must be set: the embedded model is not installed"))
    elif not model.is_file():
        problems.append(Problem(_place(settings, "model"), f"model: there is no file {model}"))
    elif not os.access(model, os.R_OK):
        problems.append(Problem(_place(settings, "model"), f"model: {model} may not be read by this user"))
    engine = engine_path(settings)
    if engine is None:
        text = f"engine must be set: {ENGINE_NAME} is neither beside {sys.executable} nor on PATH"
        problems.append(Problem("", text))
    elif not os.access(engine, os.X_OK) or not Path(engine).is_file():
        problems.append(Problem(_place(settings, "engine"), f"engine: {engine} is not a program that can be run"))
    return problems


def _place(settings: Settings, name: str) -> str:
    return settings.effective(name).origin


def engine_command(settings: Settings, environ: Mapping[str, str]) -> Command:
    """The command that starts the engine. Raises CommandError when a file is missing."""
    problems = check_places(settings)
    if problems:
        raise CommandError("; ".join(str(problem) for problem in problems))
    argv = [str(engine_path(settings)), "--model", str(model_path(settings))]
    for name, option in ENGINE_FLAGS.items():
        value = settings[name]
        if value != ENGINE_DEFAULTS[name]:
            argv += [option, f"{value:g}" if isinstance(value, float) else str(value)]
    if settings.boolean("allow_untrained_context"):
        argv.append("--allow-untrained-context")
    return Command(argv + list(settings.texts("engine_args")), _environment(settings, environ))


def _environment(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    # STRATA_ISA and the like have been taken into the settings, which decide from here on
    kept = {name: value for name, value in environ.items() if name not in PRIVATE_VARIABLES and name != "STRATA_ISA"}
    return kept | {name: str(value) for name, value in settings.table("engine_env").items()}
