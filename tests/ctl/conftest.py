from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.control.support import Daemon, running

SNAPSHOT = {
    "version": "0.1.0",
    "pid": 4711,
    "uptime_s": 7384.2,
    "state": "ready",
    "state_detail": "",
    "model": {"name": "strata-tiny-moe-Q4_0", "arch": "qwen35moe", "context": 4096},
    "engine": {"pid": 4712, "restarts": 0, "info": {"isa": "avx512", "threads": "2", "kv": "int8"}, "stderr": []},
    "requests": {"running": 1, "queued": 0, "finished": 12, "cancelled": 1, "failed": 0, "refused": 0},
    "rates": {"decode_tok_s": 812.3, "prompt_tok_s": None},
    "concurrency": {"serving": 3, "requested": 4},
    "slots": [
        {"slot": 0, "state": "idle", "held_tokens": 900},
        {
            "slot": 1,
            "state": "decoding",
            "prompt_tokens": 24,
            "prompt_read": 24,
            "generated": 130,
            "elapsed_s": 2.4,
            "tok_s": 61.2,
        },
        {
            "slot": 2,
            "state": "reading",
            "prompt_tokens": 4000,
            "prompt_read": 512,
            "generated": 0,
            "elapsed_s": 71.0,
            "tok_s": None,
        },
    ],
    "listeners": ["127.0.0.1:8080"],
    "settings": {"threads": 2},
}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A control socket over a service that says SNAPSHOT."""
    with running(tmp_path / "control.sock") as made:
        made.service.ready()
        made.service.snapshot = dict(SNAPSHOT)
        yield made


@pytest.fixture
def no_daemon_here() -> None:
    """For tests of what is found without --socket: a daemon that runs in this checkout would be found first."""
    if (Path(__file__).parents[2] / ".run" / "control.sock").exists():
        pytest.skip("a daemon runs in this checkout (make run)")
