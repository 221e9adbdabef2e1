from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def quick_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: for loops in which the disk's own speed would only be waited for."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(prefix="strata-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
