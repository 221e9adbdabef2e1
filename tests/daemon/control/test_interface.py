"""The methods, called by the reference Varlink client, which shares no code with the daemon."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import varlink
from stratad.control import interface as module
from stratad.control.failures import SHARED, from_strata
from stratad.errors import KINDS, StrataError
from stratad.settings import SETTINGS
from stratad.version import daemon_version

from tests.daemon.control.support import Daemon, Raw

NAME = "io.strata.Control"


@pytest.fixture
def client(daemon: Daemon) -> Iterator[varlink.Client]:
    with varlink.Client(f"unix:{daemon.path}") as made:
        yield made


@pytest.fixture
def control(client: varlink.Client) -> Iterator[Any]:
    with client.open(NAME) as made:
        yield made


def error_of(call: Any, *args: Any, **kwargs: Any) -> tuple[str, dict[str, Any]]:
    with pytest.raises(varlink.VarlinkError) as caught:
        call(*args, **kwargs)
    return caught.value.error(), caught.value.parameters()


# --- introspection ---


def test_the_service_names_itself_and_its_interfaces(client: varlink.Client) -> None:
    with client.open("org.varlink.service") as service:
        info = service.GetInfo()
    assert (info["vendor"], info["product"]) == ("Strata", "stratad")
    assert info["interfaces"] == [NAME, "org.varlink.service"]


def test_the_description_parses_and_is_commented(client: varlink.Client) -> None:
    described = client.get_interface(NAME)
    kinds = {name: type(member).__name__ for name, member in described.members.items()}
    methods = {name for name, kind in kinds.items() if kind == "_Method"}
    assert methods == {"Get", "ListSettings", "Status", "Version", "Watch"}
    assert {"PermissionDenied", "TooManyConnections", "ProtocolViolation", "EngineDown"} <= kinds.keys()
    assert all(described.members[name].doc for name in methods)


def test_unknown_interface_and_method(daemon: Daemon, client: varlink.Client) -> None:
    with client.open("org.varlink.service") as service:
        name, parameters = error_of(service.GetInterfaceDescription, "io.strata.Nothing")
    assert name == "org.varlink.service.InterfaceNotFound" and parameters["interface"] == "io.strata.Nothing"
    with Raw(daemon.path) as raw:
        assert raw.call("io.strata.Nothing.Status") == {
            "error": "org.varlink.service.InterfaceNotFound",
            "parameters": {"interface": "io.strata.Nothing"},
        }
        assert raw.call(f"{NAME}.Nothing")["error"] == "org.varlink.service.MethodNotFound"
        assert "parameters" in raw.call(f"{NAME}.Status"), "the connection goes on after an error"


# --- Status, Version ---


def test_status_is_the_snapshot(daemon: Daemon, control: Any) -> None:
    daemon.service.snapshot = {"state": "loading", "state_detail": "40 %", "engine": {"slots": [1, None, 2.5]}}
    reply = control.Status()
    assert (reply["state"], reply["state_detail"], reply["version"]) == ("loading", "40 %", daemon_version())
    assert reply["status"] == daemon.service.snapshot


def test_versions_before_and_after_the_engine_is_ready(daemon: Daemon, control: Any) -> None:
    before = control.Version()
    assert before == {"version": daemon_version(), "protocol": module.PROTOCOL}
    daemon.service.ready()
    engine = {"engine": "0.1.0", "engine_protocol": 1, "arithmetic": 1, "arch": "qwen35moe"}
    assert control.Version() == {**before, **engine}


def test_a_fault_of_the_daemon_is_an_error_not_a_traceback(
    daemon: Daemon, control: Any, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.service.snapshot = {"fault": True}
    name, parameters = error_of(control.Status)
    assert name == f"{NAME}.Internal"
    assert parameters == {
        "message": f"{NAME}.Status failed; the log of stratad says why",
        "parameter": None,
        "retry": False,
    }
    assert "made to fail" in caplog.text
    daemon.service.snapshot = {"state": "ready"}
    assert control.Status()["state"] == "ready"


# --- Watch ---


def test_watch_speaks_at_once_and_on_change(daemon: Daemon, control: Any) -> None:
    replies = control.Watch(50, _more=True)
    started = time.monotonic()
    assert next(replies)["state"] == "loading"
    daemon.service.ready()
    assert next(replies)["state"] == "ready"
    assert time.monotonic() - started < 3


def test_watch_is_silent_while_only_time_passes_then_speaks(
    daemon: Daemon, control: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SPEAK_EVERY_S", 0.5)
    daemon.service.snapshot["engine"] = {"silent_s": 1.0}
    replies = control.Watch(50, _more=True)
    next(replies)
    daemon.service.snapshot = {**daemon.service.snapshot, "uptime_s": 99.0, "engine": {"silent_s": 2.0}}
    started = time.monotonic()
    assert next(replies)["status"]["uptime_s"] == 99.0
    assert 0.3 < time.monotonic() - started < 3


def test_watch_ends_with_a_last_word_when_the_daemon_stops(daemon: Daemon) -> None:
    with Raw(daemon.path) as raw:
        raw.send({"method": f"{NAME}.Watch", "more": True})
        assert raw.reply()["continues"]
        daemon.close()
        last = raw.reply()
        assert last["parameters"]["state"] == "loading" and "continues" not in last
        assert raw.reply() == {}


def test_watch_needs_more_and_a_sane_interval(daemon: Daemon) -> None:
    with Raw(daemon.path) as raw:
        assert raw.call(f"{NAME}.Watch")["error"] == "org.varlink.service.ExpectedMore"
        refused = raw.call(f"{NAME}.Watch", more=True, parameters={"interval_ms": 1})
    assert refused == {
        "error": f"{NAME}.InvalidValue",
        "parameters": {
            "message": "interval_ms must be 50 to 60000, not 1",
            "parameter": "interval_ms",
            "retry": False,
        },
    }


# --- settings ---


def test_settings_are_the_rows_of_the_table(daemon: Daemon, control: Any) -> None:
    settings = control.ListSettings()["settings"]
    assert [setting["name"] for setting in settings] == [row.name for row in SETTINGS]
    asked = control.Get(["threads", "listen"])["settings"]
    assert [(setting["name"], setting["value"]) for setting in asked] == [
        ("threads", 0),
        ("listen", ["127.0.0.1:8080"]),
    ]


def test_a_setting_has_every_member_of_its_row(daemon: Daemon) -> None:
    with Raw(daemon.path) as raw:
        settings = raw.call(f"{NAME}.ListSettings")["parameters"]["settings"]
    assert settings == daemon.service.rows


def test_an_unknown_setting_is_named(control: Any) -> None:
    name, parameters = error_of(control.Get, ["threads", "thread"])
    assert name == f"{NAME}.NotFound"
    assert parameters["parameter"] == "thread" and "'thread'" in parameters["message"]


@pytest.mark.parametrize(
    ("parameters", "culprit"),
    [({}, "names"), ({"names": "threads"}, "names"), ({"names": [3]}, "names.0"), ({"names": [], "x": 1}, "x")],
)
def test_bad_parameters_are_named(daemon: Daemon, parameters: dict[str, object], culprit: str) -> None:
    with Raw(daemon.path) as raw:
        reply = raw.call(f"{NAME}.Get", parameters=parameters)
    assert reply["error"] == "org.varlink.service.InvalidParameter"
    assert reply["parameters"] == {"parameter": culprit}


# --- failures ---


def test_named_failures_become_varlink_errors_of_the_same_name() -> None:
    assert SHARED.keys() <= KINDS.keys()
    error = from_strata(StrataError("engine_down", "no engine", param="model"))
    assert error.name == f"{NAME}.EngineDown"
    assert error.paramstojson() == {"message": "no engine", "parameter": "model", "retry": True}
    assert from_strata(StrataError("queue_full", "full")).name == f"{NAME}.Internal"
