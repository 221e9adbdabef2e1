from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.control.support import Daemon, running


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with running(tmp_path / "control.sock") as made:
        yield made
