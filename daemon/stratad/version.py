"""The version of the daemon, from the one place that has it: the installed distribution."""

from __future__ import annotations

import functools
import importlib.metadata


@functools.cache
def daemon_version() -> str:
    """The version of this distribution; `0` where it is not installed (a bare source tree)."""
    try:
        return importlib.metadata.version("strata-server")
    except importlib.metadata.PackageNotFoundError:
        return "0"
