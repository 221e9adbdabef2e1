from __future__ import annotations

import os
from pathlib import Path

import pytest
from stratad import launch
from stratad.launch import PRIVATE_VARIABLES, check_places, engine_command, engine_path, model_name, model_path
from stratad.settings import BY_NAME, Effective, Settings
from stratad.supervisor import CommandError


def limits(**values: object) -> Settings:
    return Settings({name: Effective(BY_NAME[name].check(value), "file", "here:1") for name, value in values.items()})


@pytest.fixture
def places(tmp_path: Path) -> dict[str, object]:
    """A model and an engine that exist."""
    model, engine = tmp_path / "big.gguf", tmp_path / "engine"
    model.write_bytes(b"GGUF")
    engine.write_text("#!/bin/sh\n")
    engine.chmod(0o755)
    return {"model": str(model), "engine": str(engine)}


def test_defaults_are_left_to_the_engine(places: dict[str, object]) -> None:
    argv = [places["engine"], "--model", places["model"], "--parallel", "4"]  # the engine by itself has one slot
    assert list(engine_command(limits(**places), {}).argv) == argv
    assert list(engine_command(limits(parallel=1, **places), {}).argv) == argv[:3]


def test_what_is_set_is_passed_on_and_the_words_of_the_user_come_last(places: dict[str, object]) -> None:
    values = {
        "max_context": 8192, "threads": 2, "isa": "avx2", "allow_untrained_context": True, "parallel": 8, "spec": 0,
        "decode_share": 0.25, "prompt_cache_mib": 64,
    }  # fmt: skip
    settings = limits(engine_args=["--chunk", "9"], engine_env={"A": 1}, **values, **places)
    command = engine_command(settings, {"HOME": "/h", "STRATA_ISA": "scalar", **dict.fromkeys(PRIVATE_VARIABLES, "x")})
    assert list(command.argv[3:]) == [
        "--max-context", "8192", "--threads", "2", "--isa", "avx2", "--parallel", "8", "--spec", "0",
        "--decode-share", "0.25", "--prompt-cache-mib", "64", "--allow-untrained-context", "--chunk", "9",
    ]  # fmt: skip
    assert command.env == {"HOME": "/h", "A": "1"}


def test_the_name_of_the_model(places: dict[str, object]) -> None:
    assert model_name(limits(**places)) == "big"
    assert model_name(limits(model_name="flash", **places)) == "flash"


def test_what_is_missing_is_named_with_the_place_that_names_it(places: dict[str, object], tmp_path: Path) -> None:
    assert check_places(limits(**places)) == []
    assert [str(problem) for problem in check_places(limits(model="/no/m.gguf", engine=str(tmp_path)))] == [
        "here:1: model: there is no file /no/m.gguf",
        f"here:1: engine: {tmp_path} is not a program that can be run",
    ]
    with pytest.raises(CommandError, match="there is no file"):
        engine_command(limits(model="/no/m.gguf"), {})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_model_that_may_not_be_read(places: dict[str, object]) -> None:
    Path(str(places["model"])).chmod(0)
    assert "may not be read" in str(check_places(limits(**places))[0])


def test_without_a_setting_both_are_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert str(model_path(Settings())).endswith(launch.EMBEDDED_MODEL)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(launch, "embedded_model", lambda: None)
    assert engine_path(Settings()) is None
    assert ["must be set" in str(problem) for problem in check_places(Settings())] == [True, True]
    for directory in (tmp_path / "bin", tmp_path):  # the one beside the program wins over the one on PATH
        directory.mkdir(exist_ok=True)
        program = directory / launch.ENGINE_NAME
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        assert engine_path(Settings()) == str(program)
