"""Completion scripts, asked by the shells themselves where they are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from stratactl.verbs import VERBS
from stratad.settings import SETTINGS

from tests.ctl.support import environment, stratactl
from tests.daemon.control.support import Daemon

SHELLS = ("bash", "zsh", "fish")
BASH_DRIVER = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_stratactl
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A folder with a command called stratactl, for PATH."""
    command = tmp_path / "bin" / "stratactl"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m stratactl "$@"\n')
    command.chmod(0o755)
    return command.parent


def bash(program: Path, script: Path, *words: str, socket: str = "") -> list[str]:
    path = f"{program}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", BASH_DRIVER, "bash", str(script), *words],
        env=environment(PATH=path, STRATA_SOCKET=socket),
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_name_every_verb(shell: str) -> None:
    done = stratactl("completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(verb.name in done.stdout for verb in VERBS)


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_parse(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    script.write_text(stratactl("completion", shell).stdout)
    subprocess.run([shell, "-n", str(script)], check=True, timeout=30)


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes(program: Path, tmp_path: Path, daemon: Daemon) -> None:
    script = tmp_path / "script"
    script.write_text(stratactl("completion", "bash").stdout)
    verbs = [verb.name for verb in VERBS]
    assert bash(program, script, "stratactl", "st") == ["status"]
    assert set(bash(program, script, "stratactl", "")) >= set(verbs)
    assert bash(program, script, "stratactl", "status", "--j") == ["--json"]
    assert bash(program, script, "stratactl", "--socket", "x", "stat") == ["status"]
    assert bash(program, script, "stratactl", "completion", "f") == ["fish"]
    assert bash(program, script, "stratactl", "help", "ver") == ["version"]
    names = bash(program, script, "stratactl", "get", "keep", socket=daemon.path)
    assert names == [setting.name for setting in SETTINGS if setting.name.startswith("keep")] != []
    assert bash(program, script, "stratactl", "get", "keep", socket="/nonexistent") == []


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes(program: Path, tmp_path: Path, daemon: Daemon) -> None:
    script = tmp_path / "script"
    script.write_text(stratactl("completion", "fish").stdout)

    def fish(line: str) -> set[str]:
        path = f"{program}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["fish", "--no-config", "-c", 'source $argv[1]; complete -C "$argv[2]"', str(script), line],
            env=environment(PATH=path, STRATA_SOCKET=daemon.path, HOME=str(tmp_path)),
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
        return {word.split("\t")[0] for word in done.stdout.splitlines()}

    assert fish("stratactl st") == {"status"}
    assert fish("stratactl get --n") == {"--names"}
    assert fish("stratactl get keep") == {setting.name for setting in SETTINGS if setting.name.startswith("keep")}
    assert fish("stratactl completion f") == {"fish"}


ZSH_DRIVER = """
compdef() { : }
compadd() { print -l -- "${@:2}" }
_describe() { print -l -- "${(@P)2}" }
source $1; shift
words=("$@"); CURRENT=$#
_stratactl
"""


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes(program: Path, tmp_path: Path, daemon: Daemon) -> None:
    script = tmp_path / "script"
    script.write_text(stratactl("completion", "zsh").stdout)

    def zsh(*words: str) -> list[str]:
        path = f"{program}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["zsh", "-f", "-c", ZSH_DRIVER, "zsh", str(script), *words],
            env=environment(PATH=path, STRATA_SOCKET=daemon.path),
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
        assert done.stderr == ""
        return done.stdout.splitlines()

    assert {f"{verb.name}:{verb.summary}" for verb in VERBS} <= set(zsh("stratactl", ""))
    assert "--names" in zsh("stratactl", "get", "")
    assert {setting.name for setting in SETTINGS} <= set(zsh("stratactl", "--timeout", "1", "get", ""))
    assert {"bash", "zsh", "fish"} <= set(zsh("stratactl", "completion", ""))
