"""Where the control socket is looked for: the nearest daemon first, a checkout's, the user's, the system's."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

SYSTEM = "/run/strata/control.sock"


def candidates(environ: Mapping[str, str], prefix: str = sys.prefix) -> list[str]:
    """Socket paths to try in turn when neither --socket nor STRATA_SOCKET names one."""
    return [*_of_checkout(prefix), _of_user(environ), SYSTEM]


def _of_checkout(prefix: str) -> list[str]:
    """`.run/control.sock` of the source tree whose virtual environment runs this program, if one does."""
    root = os.path.dirname(prefix)
    if not os.path.isfile(os.path.join(root, "ctl", "stratactl", "places.py")):
        return []
    return [os.path.join(root, ".run", "control.sock")]


def _of_user(environ: Mapping[str, str]) -> str:
    """Where a daemon started by a user without --control puts its socket."""
    folder = environ.get("XDG_RUNTIME_DIR") or environ.get("XDG_STATE_HOME")
    if not folder:
        folder = os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(folder, "strata", "control.sock")
