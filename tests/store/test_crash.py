"""Writers that are killed leave a store that opens, is whole, and has everything that was acknowledged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.store import crash

ROOT = Path(__file__).parents[2]


def kill_many(directory: Path, seed: int, kills: int) -> str:
    command = [sys.executable, "-m", "tests.store.crash", str(directory), str(seed), str(kills)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_some_kills(quick_path: Path) -> None:
    assert "killed: " in kill_many(quick_path, seed=1, kills=15)


@pytest.mark.slow
def test_a_thousand_kills_pass_every_point(quick_path: Path) -> None:
    passed = kill_many(quick_path, seed=100_000, kills=1000)
    for point in (*crash.POINTS, crash.ANY_TIME):
        assert point in passed


@pytest.mark.slow
def test_kills_on_a_disk(tmp_path: Path) -> None:
    kill_many(tmp_path, seed=200_000, kills=100)
