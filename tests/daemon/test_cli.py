from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stratad.cli import build_parser, inputs_of, main, parse_arguments
from stratad.settings import SETTINGS
from stratad.version import daemon_version

FAKE = str(Path(__file__).parents[1] / "fake_engine" / "__main__.py")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path / "state"))
    monkeypatch.setenv("STRATA_ENGINE", FAKE)
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    monkeypatch.setenv("STRATA_MODEL", str(model))


def outcome(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one command line."""
    try:
        code = main(arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_names_every_setting_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = outcome(capsys, "--help")
    assert (code, err) == (0, "")
    words = " ".join(out.split())
    for row in SETTINGS:
        assert f"{row.flag} " in words or f"{row.flag}, " in words
        assert row.help in words
        assert row.group in out
    assert "default 127.0.0.1:8080" in words and "78 the configuration" in words
    assert max(map(len, out.splitlines())) <= 110


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(capsys, "--version") == (0, f"stratad {daemon_version()}\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--modle", "x"], 'unknown option --modle; did you mean "--model"?'),
        (["--modle=x"], 'unknown option --modle; did you mean "--model"?'),
        (["extra"], "unknown argument extra"),
        (["--threads"], "expected one argument"),
        (["--threads", "many"], "--threads must be a whole number 0 to 1024, not 'many'"),
        (["--listen", "8080"], "--listen must be HOST:PORT"),
        (["--thread", "2"], "unknown option --thread"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    code, out, err = outcome(capsys, *arguments)
    assert (code, out) == (2, "")
    assert words in err and err.startswith("stratad: ") and err.count("\n") == 1


def test_options_become_inputs() -> None:
    arguments = parse_arguments(
        ["--config", "a.toml", "--config", "b.json", "--listen", "a:1", "--listen", "b:2,c:3", "--threads", "2",
         "--allow-untrained-context", "--engine-args", "--x 1", "--engine-args=-y"]
    )  # fmt: skip
    inputs = inputs_of(arguments, {})
    assert inputs.files == (Path("a.toml"), Path("b.json"))
    assert inputs.options == {
        "listen": "a:1,b:2,c:3", "threads": "2", "allow_untrained_context": True, "engine_args": "--x 1 -y",
    }  # fmt: skip
    assert inputs_of(parse_arguments(["--no-allow-untrained-context"]), {}).options == {
        "allow_untrained_context": False
    }


def test_flags_are_the_tables() -> None:
    flags = {option for action in build_parser()._actions for option in action.option_strings}
    assert {row.flag for row in SETTINGS} <= flags
    own = {"--config", "--check-config", "--verbose", "-v", "--version", "--help", "-h"}
    assert flags - {row.flag for row in SETTINGS} - own == {
        f"--no-{row.flag[2:]}" for row in SETTINGS if row.kind == "bool"
    }


def test_check_config_says_ok_and_shows_sources(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "strata.toml"
    path.write_text("queue_limit = 3\nchat_template_kwargs = { enable_thinking = false }\n")
    code, out, err = outcome(capsys, "--check-config", "--config", str(path))
    assert (code, out, err) == (0, "configuration ok\n", "")
    code, out, err = outcome(capsys, "--check-config", "-v", "--config", str(path), "--isa", "scalar")
    lines = out.splitlines()
    assert code == 0 and lines[-1] == "configuration ok"
    assert f"queue_limit = 3  # file {path}:1" in lines
    assert "chat_template_kwargs = {enable_thinking = false}  # file " + f"{path}:2" in lines
    assert 'isa = "scalar"  # command-line --isa' in lines
    assert f'engine = "{FAKE}"  # environment STRATA_ENGINE' in lines
    assert "top_p = (unset)  # default" in lines
    assert len(lines) == len(SETTINGS) + 1


def test_check_config_shows_every_problem_and_a_start_shows_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "strata.toml"
    path.write_text("max_contxt = 3\nthreads = -1\n")
    code, out, err = outcome(capsys, "--check-config", "--config", str(path))
    assert (code, out) == (78, "")
    assert err.splitlines() == [
        f'stratad: configuration: {path}:1: unknown setting "max_contxt"; did you mean "max_context"?',
        f"stratad: configuration: {path}:2: threads must be a whole number 0 to 1024, not -1",
    ]
    code, out, err = outcome(capsys, "--config", str(path))
    assert code == 78 and err.count("\n") == 1 and "and 1 more" in err


@pytest.mark.parametrize(
    ("option", "words"), [("--model", "model: there is no file"), ("--engine", "is not a program that can be run")]
)
def test_files_that_are_not_there_are_configuration_errors(
    capsys: pytest.CaptureFixture[str], option: str, words: str
) -> None:
    code, _, err = outcome(capsys, "--check-config", option, "/nowhere/x")
    assert code == 78 and words in err and option in err


def test_notes_do_not_fail_the_check(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "strata-m.json"
    path.write_text('{"lazy_load": true}')
    code, out, err = outcome(capsys, "--check-config", "--config", str(path))
    assert (code, out) == (0, "configuration ok\n")
    assert re.search(r"note: .*strata-m.json:1: lazy_load has no effect", err)


def test_help_is_quick_and_needs_little() -> None:
    """The network stack, the tokenizer and the control library are not imported to print a text."""
    code = (
        "import sys; from stratad.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
        "print([name for name in ('hypercorn', 'starlette', 'tokenizers', 'asyncvarlink') if name in sys.modules])"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert time.monotonic() - started < 3
