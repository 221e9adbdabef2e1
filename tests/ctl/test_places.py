"""Where the socket is looked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from stratactl.places import SYSTEM, candidates
from stratad.settings import Settings, control_socket

from tests.ctl.support import stratactl
from tests.daemon.control.support import Daemon, running

CHECKOUT = Path(__file__).parents[2]


def test_order_is_nearest_first(tmp_path: Path) -> None:
    found = candidates({"XDG_RUNTIME_DIR": "/run/user/7"}, prefix=str(CHECKOUT / ".venv"))
    assert found == [str(CHECKOUT / ".run" / "control.sock"), "/run/user/7/strata/control.sock", SYSTEM]
    assert candidates({"XDG_RUNTIME_DIR": "/run/user/7"}, prefix=str(tmp_path / ".venv"))[0].startswith("/run/user/7")


@pytest.mark.parametrize("environ", [{"XDG_RUNTIME_DIR": "/run/user/7"}, {"XDG_STATE_HOME": "/home/u/state"}, {}])
def test_the_users_place_is_where_the_daemon_puts_it(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("HOME", "/home/u")
    assert str(control_socket(Settings(), environ)) in candidates(environ, prefix=str(tmp_path / ".venv"))


def test_the_systems_place_is_where_the_service_puts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert str(control_socket(Settings(), {})) == SYSTEM


@pytest.mark.usefixtures("no_daemon_here")
def test_the_option_beats_the_variable_and_the_variable_the_places(daemon: Daemon, tmp_path: Path) -> None:
    with running(tmp_path / "strata" / "control.sock") as users:
        users.service.snapshot = {"state": "users"}
        nowhere = str(tmp_path / "none.sock")
        assert "users" in stratactl("status", XDG_RUNTIME_DIR=str(tmp_path)).stdout
        assert stratactl("status", XDG_RUNTIME_DIR=str(tmp_path), STRATA_SOCKET=nowhere).returncode == 3
        assert "ready" in stratactl("--socket", daemon.path, "status", STRATA_SOCKET=nowhere).stdout
