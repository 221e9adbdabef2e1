"""Log lines on standard error: with the journal's level prefix (`<6>`) under systemd, with time and level elsewhere.

No part of a prompt or an answer is ever logged.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (0, 7))


class JournalFormatter(logging.Formatter):
    """`<6>stratad.scheduler: text`, every line of a message with the prefix."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as the journal reads it."""
        priority = next(number for level, number in _PRIORITIES if record.levelno >= level)
        text = super().format(record)
        return "\n".join(f"<{priority}>{line}" for line in text.splitlines() or [""])


def under_journal(environ: Mapping[str, str], descriptor: int = 2) -> bool:
    """Whether the descriptor is the journal that systemd connected (JOURNAL_STREAM names device and inode)."""
    device, _, inode = environ.get("JOURNAL_STREAM", "").partition(":")
    if not device.isdecimal() or not inode.isdecimal():
        return False
    try:
        status = os.fstat(descriptor)
    except OSError:
        return False
    return (status.st_dev, status.st_ino) == (int(device), int(inode))


def set_up(level: str, environ: Mapping[str, str]) -> None:
    """Send every log record to standard error, in the form its reader wants."""
    handler = logging.StreamHandler(sys.stderr)
    if under_journal(environ):
        handler.setFormatter(JournalFormatter("%(name)s: %(message)s"))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    logging.basicConfig(handlers=[handler], force=True)
    set_level(level)


def set_level(level: str) -> None:
    """Change the least important level that is logged; libraries stay at warnings unless it is `debug`."""
    logging.getLogger().setLevel(LEVELS[level] if level in ("debug", "error") else logging.WARNING)
    for name in ("stratad", "strata-engine"):
        logging.getLogger(name).setLevel(LEVELS[level])
    logging.getLogger("asyncio").setLevel(logging.WARNING)
