"""The status snapshot: one dictionary for `stratactl status --json`, `GET /v1/status` and `Watch`.

It is made from what the daemon knows already, so it can be had while the engine loads, hangs or is dead.

| key | what it holds |
|---|---|
| version, pid, uptime_s | of the daemon |
| state | `starting`, `loading`, `ready`, `restarting`, `failed`, `stopping`, `stopped`, or `draining` |
| state_detail | one line: percent loaded, why it failed, for how long the engine has been silent |
| model | path, name, arch, fingerprint, identity, context, trained_context; null where the engine has not said yet |
| engine | pid, state, load_percent, restarts, last_exit, info, stat, stderr (last lines), silent_s |
| engine.last_exit | reason, code, signal, at (seconds since 1970), stderr |
| requests | running, queued, submitted, started, finished, cancelled, failed, refused (since the daemon started) |
| concurrency | serving: slots that the engine runs; requested: the setting `parallel` |
| slots | one row a slot: slot, state (`idle`, `reading`, `decoding`), held_tokens, or how far its request is |
| rates | decode_tok_s, prompt_tok_s of the last request, in engine time |
| store | state (`ok`, `off`, `opening`, `degraded: ...`), path, conversations, bytes, budget, hits and more |
| listeners | HTTP addresses that are served |
| settings | values that are not the default |
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from stratad.launch import model_name, model_path
from stratad.scheduler import Scheduler
from stratad.settings import Settings
from stratad.storage import Storage
from stratad.supervisor import EngineState, Supervisor
from stratad.version import daemon_version

STDERR_SHOWN = 20  # lines


def snapshot(
    settings: Settings,
    supervisor: Supervisor,
    scheduler: Scheduler,
    storage: Storage,
    listeners: Sequence[str],
    uptime_s: float,
) -> dict[str, object]:
    """The state of everything now, JSON-ready; see the table above."""
    return {
        "version": daemon_version(),
        "pid": os.getpid(),
        "uptime_s": round(uptime_s, 1),
        "state": state_word(supervisor, scheduler),
        "state_detail": state_detail(supervisor, scheduler),
        "model": _model(settings, supervisor),
        "engine": _engine(supervisor),
        "requests": {"running": scheduler.running, "queued": scheduler.queued, **asdict(scheduler.tally.requests)},
        "concurrency": {"serving": scheduler.serving, "requested": settings.integer("parallel")},
        "slots": scheduler.slots(),
        "rates": asdict(scheduler.tally.rates),
        "store": storage.describe(),
        "listeners": list(listeners),
        "settings": settings.summary(),
    }


SILENT_S, IDLE_SILENT_S = 5, 60  # silence worth a word; an idle engine speaks only when it is asked, every half minute


def state_word(supervisor: Supervisor, scheduler: Scheduler) -> str:
    """The daemon's state: the engine's, unless it drains."""
    if scheduler.draining and supervisor.state is EngineState.READY:
        return "draining"
    return supervisor.state.value


def state_detail(supervisor: Supervisor, scheduler: Scheduler) -> str:
    """One line about the state, empty when there is nothing to say."""
    if supervisor.state in (EngineState.FAILED, EngineState.RESTARTING):
        return supervisor.reason
    if supervisor.state is EngineState.LOADING and supervisor.load_percent is not None:
        return f"loading the model, {supervisor.load_percent} %"
    silent = supervisor.silent_s
    if silent is not None and silent > (SILENT_S if scheduler.running else IDLE_SILENT_S):
        return f"the engine has been silent for {silent:.0f} s"
    if scheduler.draining and scheduler.running:
        return "waiting for running answers to end"
    return ""


def _number(info: Mapping[str, str], key: str) -> int | None:
    text = info.get(key, "")
    return int(text) if text.isascii() and text.isdecimal() else None


def _model(settings: Settings, supervisor: Supervisor) -> dict[str, object]:
    info = supervisor.facts.info if supervisor.facts is not None else {}
    path = model_path(settings)
    return {
        "path": str(path) if path else None,
        "name": model_name(settings),
        "arch": info.get("arch"),
        "fingerprint": info.get("fingerprint"),
        "identity": info.get("identity"),
        "context": supervisor.facts.max_context if supervisor.facts is not None else None,
        "trained_context": _number(info, "trained_context"),
    }


def _engine(supervisor: Supervisor) -> dict[str, object]:
    silent = supervisor.silent_s
    return {
        "pid": supervisor.pid,
        "state": supervisor.state.value,
        "load_percent": supervisor.load_percent,
        "restarts": supervisor.restarts,
        "last_exit": supervisor.last_exit,
        "info": dict(supervisor.facts.info) if supervisor.facts is not None else {},
        "stat": dict(supervisor.engine_stat),
        "stderr": list(supervisor.stderr)[-STDERR_SHOWN:],
        "silent_s": None if silent is None else round(silent, 1),
    }
