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
