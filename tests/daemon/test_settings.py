from __future__ import annotations

import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stratad.settings import (
    BY_NAME,
    SETTINGS,
    Effective,
    Setting,
    SettingError,
    Settings,
    control_socket,
    lookup,
    parse_address,
    state_directory,
    suggest,
)


def test_every_row_is_complete_and_its_default_is_a_value_it_accepts() -> None:
    assert len(BY_NAME) == len(SETTINGS)
    for row in SETTINGS:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", row.name)
        assert row.help.endswith((".", ")")) and row.group
        assert (row.kind == "choice") == bool(row.choices)
        assert row.default is not None or row.optional
        assert row.check(row.default if not isinstance(row.default, tuple) else list(row.default)) == row.default


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max_context", " 8192 ", 8192),
        ("temperature", "0.5", 0.5),
        ("temperature", "unset", None),
        ("isa", "avx2", "avx2"),
        ("allow_untrained_context", "Yes", True),
        ("allow_untrained_context", "0", False),
        ("listen", "127.0.0.1:1, [::1]:2,localhost:0", ("127.0.0.1:1", "[::1]:2", "localhost:0")),
        ("engine_args", "--a 'b c' -d", ("--a", "b c", "-d")),
        ("chat_template_kwargs", '{"enable_thinking": false}', {"enable_thinking": False}),
    ],
)
def test_text_becomes_a_typed_value(name: str, text: str, value: object) -> None:
    assert BY_NAME[name].parse(text) == value


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("max_context", "8k", "a whole number 0 to 16777216 (tokens), not '8k'"),
        ("max_context", "-1", "0 to 16777216"),
        ("threads", "1_0", "a whole number"),
        ("temperature", "nan", "a number 0 to 100"),
        ("temperature", "warm", "a number 0 to 100"),
        ("kv", "int9", "one of int8, f16, f32, not 'int9'"),
        ("allow_untrained_context", "maybe", "true or false"),
        ("listen", "8080", "HOST:PORT"),
        ("listen", "::1:8080", "brackets"),
        ("listen", "host:99999", "0 to 65535"),
        ("chat_template_kwargs", "{", "JSON object"),
        ("chat_template_kwargs", "[1]", "a table"),
        ("engine_args", "'", "split into words"),
        ("model", "a\nb", "a path"),
    ],
)
def test_a_wrong_text_is_refused_with_what_would_be_right(name: str, text: str, words: str) -> None:
    with pytest.raises(SettingError) as caught:
        BY_NAME[name].parse(text)
    assert words in caught.value.message
    assert caught.value.name == name


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_context", True), ("max_context", 1.0), ("temperature", False), ("temperature", math.inf), ("kv", 8),
     ("temperature", 10**400), ("max_context", 10**400), ("engine_env", {"a": math.nan}), ("engine_env", {1: 2}),
     ("temperature", 10**400), ("max_context", 10**400), ("engine_env", {"a": math.nan}), ("engine_env", {1: 2}),
     ("listen", [1]), ("listen", 8080), ("engine_env", []), ("log_level", None), ("model", "a\0b")],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_refused(name: str, value: object) -> None:
    with pytest.raises(SettingError):
        BY_NAME[name].check(value)


@given(st.sampled_from(SETTINGS), st.text(max_size=30))
def test_no_text_breaks_a_parser_and_what_is_accepted_is_accepted_again(row: Setting, text: str) -> None:
    try:
        value = row.parse(text)
    except SettingError:
        return
    if value is not None:
        assert row.check(list(value) if isinstance(value, tuple) else value) == value


def test_addresses() -> None:
    assert parse_address("0.0.0.0:80") == ("0.0.0.0", 80)
    assert parse_address("[fe80::1%lo]:80") == ("fe80::1%lo", 80)
    for text in ("", ":", "a:", ":1", "a:b", "a:-1", "a:+1", "[::1]", "a:１"):  # noqa: RUF001 - a full-width digit
        with pytest.raises(ValueError, match="HOST:PORT"):
            parse_address(text)


def test_an_unknown_name_gets_a_suggestion() -> None:
    assert suggest("max_contxt", BY_NAME) == '; did you mean "max_context"?'
    assert suggest("zzz", BY_NAME) == ""
    with pytest.raises(SettingError, match='did you mean "threads"'):
        lookup("thread")


def test_access_by_kind() -> None:
    settings = Settings({"threads": Effective(3, "file", "strata.toml:1")})
    assert settings.integer("threads") == 3
    assert settings.number("stall_limit_s") == 90.0
    assert settings.texts("listen") == ("127.0.0.1:8080",)
    assert settings["temperature"] is None
    assert settings.summary() == {"threads": 3}
    with pytest.raises(SettingError):
        settings["thread"]


def test_describe_is_json_with_everything_a_user_may_ask() -> None:
    rows = json.loads(json.dumps(Settings({"isa": Effective("avx2", "environment", "STRATA_ISA")}).describe()))
    assert [row["name"] for row in rows] == [row.name for row in SETTINGS]
    row = next(row for row in rows if row["name"] == "isa")
    assert row["value"] == "avx2" and row["default"] == "auto" and row["pending"] is None
    assert (row["source"], row["origin"], row["range"]) == (
        "environment",
        "STRATA_ISA",
        "auto | scalar | avx2 | avxvnni | avx512",
    )
    assert (row["applies"], row["flag"], row["env"]) == ("engine-restart", "--isa", "STRATA_ISA")


def configured(**values: object) -> Settings:
    return Settings(
        {name: Effective(BY_NAME[name].check(value), "file", "strata.toml") for name, value in values.items()}
    )


def test_a_reload_changes_what_applies_now_and_keeps_the_rest_for_later() -> None:
    settings = configured(queue_limit=5, threads=2)
    changes = settings.reload(configured(queue_limit=6, threads=4, listen=["[::1]:1"]))
    assert settings["queue_limit"] == 6
    assert settings["threads"] == 2 and settings.effective("threads").pending == (4, "file", "strata.toml")
    assert settings["listen"] == ("127.0.0.1:8080",)
    assert changes == [
        "threads: 2 stays until engine-restart, then 4",
        "listen: ['127.0.0.1:8080'] stays until daemon-restart, then ['[::1]:1']",
        "queue_limit: 5 -> 6 (file strata.toml)",
    ]
    settings.adopt("engine-restart")
    assert settings["threads"] == 4 and settings.effective("threads").pending is None
    assert settings["listen"] == ("127.0.0.1:8080",)


def test_a_reload_that_takes_a_change_back_leaves_nothing_pending() -> None:
    settings = configured(threads=2)
    settings.reload(configured(threads=4))
    settings.reload(configured(threads=2))
    assert settings.effective("threads") == Effective(2, "file", "strata.toml")
    assert settings.reload(configured(threads=2)) == []


def test_a_reload_keeps_runtime_values() -> None:
    settings = configured(queue_limit=5)
    settings.set_runtime("queue_limit", 9)
    assert settings.reload(configured(queue_limit=6)) == []
    assert settings["queue_limit"] == 9 and settings.effective("queue_limit").source == "runtime"


def test_places_follow_the_setting_then_systemd_then_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("HOME", "/home/u")
    plain = Settings()
    assert str(state_directory(plain, {})) == "/home/u/.local/state/strata"
    assert str(state_directory(plain, {"XDG_STATE_HOME": "/x"})) == "/x/strata"
    assert str(state_directory(plain, {"STATE_DIRECTORY": "/var/lib/strata:/b"})) == "/var/lib/strata"
    assert str(state_directory(configured(state="/mine"), {"STATE_DIRECTORY": "/b"})) == "/mine"
    assert str(control_socket(plain, {"RUNTIME_DIRECTORY": "/run/strata"})) == "/run/strata/control.sock"
    assert str(control_socket(plain, {"XDG_RUNTIME_DIR": "/run/user/1"})) == "/run/user/1/strata/control.sock"
    assert str(control_socket(configured(control="/c"), {})) == "/c"
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert str(control_socket(plain, {})) == "/run/strata/control.sock"
    assert str(state_directory(plain, {})) == "/var/lib/strata"
