from __future__ import annotations

import os
from pathlib import Path

import pytest
from stratad.lock import LockError, StateLock


def test_one_owner_at_a_time_and_the_error_names_it(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    with StateLock(directory):
        assert directory.stat().st_mode & 0o777 == 0o700
        with pytest.raises(LockError, match=f"belongs to a running stratad, pid {os.getpid()}"), StateLock(directory):
            pass
        assert (directory / "lock").read_text() == f"{os.getpid()}\n"
    with StateLock(directory):
        pass


def test_a_lock_file_that_somebody_left_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("999999999 and more text than a pid has\n")
    with StateLock(tmp_path):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LockError, match="choose one with --state"), StateLock(tmp_path / "file" / "x"):
        pass
