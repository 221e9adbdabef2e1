from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from stratad import logs


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in ("stratad", "strata-engine", "asyncio"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def record(level: int, text: str) -> logging.LogRecord:
    return logging.LogRecord("stratad.x", level, __file__, 1, text, None, None)


@pytest.mark.parametrize(("level", "prefix"), [(logging.DEBUG, "<7>"), (logging.INFO, "<6>"), (logging.WARNING, "<4>"),
                                               (logging.ERROR, "<3>"), (logging.CRITICAL, "<3>")])  # fmt: skip
def test_the_journal_reads_the_level_from_every_line(level: int, prefix: str) -> None:
    text = logs.JournalFormatter("%(name)s: %(message)s").format(record(level, "one\ntwo"))
    assert text == f"{prefix}stratad.x: one\n{prefix}two"


def test_the_journal_is_known_by_device_and_inode(tmp_path: Path) -> None:
    with (tmp_path / "stream").open("w") as stream:
        status = os.fstat(stream.fileno())
        name = f"{status.st_dev}:{status.st_ino}"
        assert logs.under_journal({"JOURNAL_STREAM": name}, stream.fileno())
        assert not logs.under_journal({"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino + 1}"}, stream.fileno())
        assert not logs.under_journal({"JOURNAL_STREAM": "what"}, stream.fileno())
        assert not logs.under_journal({}, stream.fileno())
    assert not logs.under_journal({"JOURNAL_STREAM": name}, 9999)


def test_levels_can_change_and_libraries_stay_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    logs.set_up("info", {})
    logging.getLogger("stratad.app").info("seen")
    logging.getLogger("stratad.app").debug("unseen")
    logging.getLogger("hypercorn").info("unseen")
    logs.set_level("error")
    logging.getLogger("stratad.app").warning("unseen")
    logs.set_level("debug")
    logging.getLogger("stratad.app").debug("also seen")
    text = capsys.readouterr().err
    assert "INFO stratad.app: seen" in text and "also seen" in text and "unseen" not in text
