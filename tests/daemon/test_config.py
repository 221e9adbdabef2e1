from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stratad import config
from stratad.config import ConfigError, Inputs, load
from stratad.settings import BY_NAME, SETTINGS


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, object], Path]:
    def write(name: str, content: object) -> Path:
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content, indent=1))
        return path

    return write


def inputs(tmp_path: Path, *files: Path, environ: dict[str, str] | None = None, **options: str | bool) -> Inputs:
    return Inputs(
        files=files,
        options=options,
        environ={"STATE_DIRECTORY": str(tmp_path / "state"), **(environ or {})},
        system_config=tmp_path / "etc.toml",
    )


def problems_of(given_inputs: Inputs) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(given_inputs)
    return [str(problem) for problem in caught.value.problems]


def test_without_anything_every_value_is_the_default(tmp_path: Path) -> None:
    loaded = load(inputs(tmp_path))
    assert loaded.files == () and loaded.notes == ()
    assert all(loaded.settings.effective(row.name).source == "default" for row in SETTINGS)


def test_the_order_of_precedence_layer_by_layer(tmp_path: Path, write: Callable[[str, object], Path]) -> None:
    toml = write("strata.toml", 'model = "m.gguf"\nqueue_limit = 1\n')
    write("strata-m.json", {"queue_limit": 2})
    (tmp_path / "state").mkdir()
    override = write("state/override.toml", "version = 1\nqueue_limit = 3\n")
    environ = {"STRATA_QUEUE_LIMIT": "4"}

    def in_force(given_inputs: Inputs) -> tuple[object, str, str]:
        item = load(given_inputs).settings.effective("queue_limit")
        return item.value, item.source, item.origin

    strongest = inputs(tmp_path, toml, environ=environ, queue_limit="5")
    assert in_force(strongest) == (5, "command-line", "--queue-limit")
    assert in_force(inputs(tmp_path, toml, environ=environ)) == (4, "environment", "STRATA_QUEUE_LIMIT")
    assert in_force(inputs(tmp_path, toml)) == (3, "override", f"{override}:2")
    override.unlink()
    assert in_force(inputs(tmp_path, toml)) == (2, "model-file", f"{tmp_path}/strata-m.json:2")
    (tmp_path / "strata-m.json").unlink()
    assert in_force(inputs(tmp_path, toml)) == (1, "file", f"{toml}:2")


def test_the_system_file_is_read_only_when_no_file_is_named(
    tmp_path: Path, write: Callable[[str, object], Path]
) -> None:
    write("etc.toml", "threads = 7\n")
    assert load(inputs(tmp_path)).settings["threads"] == 7
    assert load(inputs(tmp_path, write("strata.toml", ""))).settings["threads"] == 0
    named = write("other.toml", "threads = 8\n")
    assert load(inputs(tmp_path, environ={"STRATA_CONFIG": str(named)})).settings["threads"] == 8


def test_paths_in_a_file_are_relative_to_it(tmp_path: Path, write: Callable[[str, object], Path]) -> None:
    toml = write("strata.toml", 'model = "models/a.gguf"\nengine = "/opt/engine"\n')
    settings = load(inputs(tmp_path, toml)).settings
    assert settings["model"] == str(tmp_path / "models/a.gguf")
    assert settings["engine"] == "/opt/engine"
    assert load(inputs(tmp_path, model="a.gguf")).settings["model"] == "a.gguf"


def test_every_problem_is_found_and_named(tmp_path: Path, write: Callable[[str, object], Path]) -> None:
    toml = write("strata.toml", '# a comment\nmax_contxt = 12\nkv = "int9"\n\n[sampling]\ntemperature = 1\n')
    assert problems_of(inputs(tmp_path, toml, environ={"STRATA_THREADS": "many"}, top_p="2")) == [
        "STRATA_THREADS: must be a whole number 0 to 1024, not 'many'",
        "--top-p: must be a number 0 to 1, not 2.0",
        f'{toml}:2: unknown setting "max_contxt"; did you mean "max_context"?',
        f"{toml}:3: kv must be one of int8, f16, f32, not 'int9'",
        f'{toml}:5: unknown setting "sampling"; write temperature and the like outside of any section',
    ]


def test_one_line_says_how_many_more_there_are(tmp_path: Path, write: Callable[[str, object], Path]) -> None:
    toml = write("strata.toml", "a = 1\nb = 2\n")
    with pytest.raises(ConfigError) as caught:
        load(inputs(tmp_path, toml))
    assert caught.value.one_line() == f'{toml}:1: unknown setting "a" (and 1 more; --check-config shows all)'


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"a = ", "is not valid TOML"), (b"\xff", "is not UTF-8"), (b"x" * (config.SIZE_LIMIT + 1), "larger than"),
     (b"a = " + b"[" * 100_000, "nested too deeply")],
    ids=["syntax", "encoding", "size", "depth"],
)  # fmt: skip
def test_a_file_that_is_no_configuration(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "strata.toml"
    path.write_bytes(content)
    assert words in problems_of(inputs(tmp_path, path))[0]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert problems_of(inputs(tmp_path, tmp_path / "no.toml"))[0].endswith("cannot be read: No such file or directory")


def test_an_unknown_variable_is_a_note_since_others_share_the_environment(tmp_path: Path) -> None:
    loaded = load(inputs(tmp_path, environ={"STRATA_KW": "1", "STRATA_SOCKET": "/s", "HOME": "/"}))
    assert [str(note) for note in loaded.notes] == ['STRATA_KW: is not a setting; did you mean "STRATA_KV"?']


def test_an_override_file_of_another_version_is_refused(tmp_path: Path, write: Callable[[str, object], Path]) -> None:
    (tmp_path / "state").mkdir()
    write("state/override.toml", "version = 2\nqueue_limit = 3\n")
    assert "version must be 1, not 2" in problems_of(inputs(tmp_path))[0]


# -- strata-<model>.json


def test_the_keys_of_an_earlier_installation(tmp_path: Path, write: Callable[[str, object], Path]) -> None:
    path = write(
        "strata-flash.json",
        {
            "exe": "bin/strata",
            "args": ["--native", "m/a.gguf", "--max-context", 8192, "--kv=int8", "--spec", "4", "--batch-mtp", "--port",
                     "9000"],
            "host": "::1",
            "model_name": "flash",
            "env": {"STRATA_TRACE": "1"},
            "sampling": {"temperature": 0.6, "repeat_penalty": 1.1},
            "engine_silence_s": 300,
            "parallel": 6,
            "idle_unload_s": 600,
            "queue_limit": 8,
        },
    )  # fmt: skip
    loaded = load(inputs(tmp_path, path))
    values = loaded.settings
    assert values["engine"] == str(tmp_path / "bin/strata")
    assert values["model"] == str(tmp_path / "m/a.gguf")
    assert (values["max_context"], values["kv"], values["listen"]) == (8192, "int8", ("[::1]:9000",))
    assert (values["model_name"], values["engine_env"]) == ("flash", {"STRATA_TRACE": "1"})
    assert (values["temperature"], values["repetition_penalty"], values["top_p"]) == (0.6, 1.1, None)
    assert (values["stall_limit_s"], values["queue_limit"]) == (300.0, 8)
    assert values.effective("temperature").source == "model-file"
    assert [note.message for note in loaded.notes] == [
        "--batch-mtp in args has no effect",
        "idle_unload_s has no effect: the model stays loaded",
    ]
    assert (values["parallel"], values["spec"]) == (6, 4)


def test_what_is_wrong_in_it_is_named_with_its_line(tmp_path: Path, write: Callable[[str, object], Path]) -> None:
    path = write(
        "strata-m.json",
        {"paralel": 3, "args": ["--frob", "1", "--spec-mn-p", "2", "--threads"], "sampling": {"top_p": 2, "heat": 1},
         "api_key": "secret", "host": 3, "kv": "q4_0"},
    )  # fmt: skip
    assert problems_of(inputs(tmp_path, path)) == [
        f'{path}:2: unknown key "paralel"; did you mean "parallel"?',
        f'{path}:3: unknown option "--frob" in args',
        f'{path}:3: unknown option "--spec-mn-p" in args; did you mean "--spec-min-p"?',
        f"{path}:3: --threads needs a value in args",
        f"{path}:11: top_p must be a number 0 to 1, not 2",
        f'{path}:12: unknown key "heat" in sampling',
        f"{path}:14: api_key is refused: {config.REFUSED['api_key']}",
        f"{path}:15: host must be a host name or address, not 3",
        f"{path}:16: kv must be one of int8, f16, f32, not 'q4_0'",
    ]


def test_a_secret_never_gets_into_a_message(tmp_path: Path, write: Callable[[str, object], Path]) -> None:
    path = write("strata-m.json", {"api_key": "tell-nobody"})
    assert "tell-nobody" not in "".join(problems_of(inputs(tmp_path, path)))


@pytest.mark.parametrize("content", ["{", "[]", "3", '{"args": 3}', '{"sampling": []}', '{"port": 0}', "[" * 100_000])
def test_json_that_is_no_configuration(tmp_path: Path, write: Callable[[str, object], Path], content: str) -> None:
    assert len(problems_of(inputs(tmp_path, write("strata-m.json", content)))) == 1


def test_no_key_is_in_two_tables() -> None:
    tables = [set(BY_NAME), set(config.NOT_SERVED), set(config.REFUSED)]
    assert sum(map(len, tables)) == len(set().union(*tables))
    assert set(config.SAMPLING_NAMES.values()) <= set(BY_NAME)
    assert {option.setting for option in config.ENGINE_OPTIONS.values()} - {""} <= set(BY_NAME)


NAMES = st.sampled_from([*BY_NAME, *config.NOT_SERVED, "args", "sampling", "host", "port", "env", "exe", "x"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
@given(st.dictionaries(NAMES, JSON, max_size=5))
def test_any_document_gives_settings_or_problems(tmp_path: Path, document: dict[str, object]) -> None:
    path = tmp_path / "strata-any.json"
    path.write_text(json.dumps(document))
    try:
        loaded = load(inputs(tmp_path, path))
    except ConfigError as error:
        assert error.problems
        return
    for row in SETTINGS:
        value = loaded.settings[row.name]
        assert row.check(list(value) if isinstance(value, tuple) else value) == value
