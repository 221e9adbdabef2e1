"""The program from outside: what it prints where, and every exit code."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import stratactl as package
from stratactl.verbs import EXIT_CODES, VERBS
from stratad.control import Limits
from stratad.settings import SETTINGS

from tests.ctl.conftest import SNAPSHOT
from tests.ctl.support import PROGRAM, environment, puppet, stratactl
from tests.daemon.control.support import Daemon, running

STATUS = """\
state     ready
model     strata-tiny-moe-Q4_0 (qwen35moe) context 4096
engine    pid 4712, avx512, 2 threads, kv int8
requests  1 running, 0 queued, 12 finished, 1 cancelled, 0 failed, 0 refused
rates     decode 812 tokens/s
slots     1 decoding, 1 reading, 1 idle, 4 were asked for
serves    http://127.0.0.1:8080
settings  threads=2
daemon    0.1.0, pid 4711, up 2 h 3 min
  slot 1  decoding  prompt 24, 130 new  61 tokens/s  for 2 s
  slot 2  reading   prompt 512 of 4000               for 1 min 11 s
"""


@pytest.fixture(autouse=True)
def same_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon's version depends on what is installed; here it is ours."""
    monkeypatch.setattr("stratad.control.interface.daemon_version", lambda: package.__version__)


# --- 0: done ---


def test_status(daemon: Daemon) -> None:
    done = stratactl("--socket", daemon.path, "status")
    assert (done.returncode, done.stdout, done.stderr) == (0, STATUS, "")


def test_status_json_is_the_snapshot(daemon: Daemon) -> None:
    done = stratactl("status", "--json", STRATA_SOCKET=daemon.path)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == SNAPSHOT


def test_status_of_a_failed_engine_shows_its_last_words(daemon: Daemon) -> None:
    daemon.service.snapshot = {
        "state": "failed",
        "state_detail": "the engine ended: exit code 78",
        "engine": {"pid": None, "stderr": ["model_format: bad magic \x1b[2J"]},
    }
    done = stratactl("--socket", daemon.path, "status")
    assert done.stdout == (
        "state   failed: the engine ended: exit code 78\n"
        "engine  not running\n"
        "last words of the engine:\n"
        "  model_format: bad magic \ufffd[2J\n"
    )


def test_status_of_a_bare_snapshot(daemon: Daemon) -> None:
    daemon.service.snapshot = {}
    done = stratactl("--socket", daemon.path, "status")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("state ")


def test_version(daemon: Daemon) -> None:
    done = stratactl("--socket", daemon.path, "version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"stratactl      {package.__version__}",
        f"stratad        {package.__version__} (control protocol 1)",
        "strata-engine  0.1.0 (protocol 1, arithmetic 1, model type qwen35moe)",
        f"socket         {daemon.path}",
    ]
    parsed = json.loads(stratactl("--socket", daemon.path, "version", "--json").stdout)
    assert parsed["stratactl"] == package.__version__ and parsed["stratad"]["arithmetic"] == 1


def test_get_lists_every_setting(daemon: Daemon) -> None:
    done = stratactl("--socket", daemon.path, "get")
    head, *rows = done.stdout.splitlines()
    assert head.split() == ["NAME", "VALUE", "SOURCE", "APPLIES"]
    assert [row.split()[0] for row in rows] == [setting.name for setting in SETTINGS]
    names = stratactl("--socket", daemon.path, "get", "--names").stdout.split()
    assert names == [setting.name for setting in SETTINGS]


def test_get_explains_a_setting(daemon: Daemon) -> None:
    done = stratactl("get", "threads", "--socket", daemon.path)
    assert done.stdout.splitlines()[0].split() == ["threads", "0"]
    assert "allowed  0 to 1024" in done.stdout and "--threads, STRATA_THREADS" in done.stdout
    parsed = json.loads(stratactl("--socket", daemon.path, "get", "--json", "threads").stdout)
    assert [(row["name"], row["value"], row["source"]) for row in parsed] == [("threads", 0, "default")]


def test_get_shows_what_waits(daemon: Daemon) -> None:
    row = next(dict(row) for row in daemon.service.rows if row["name"] == "threads")
    daemon.service.rows = [{**row, "pending": 8, "source": "file", "origin": "strata.toml:3"}]
    text = stratactl("--socket", daemon.path, "get", "threads").stdout
    assert "pending  8\n" in text and "source   file (strata.toml:3)\n" in text


def test_help_needs_no_daemon() -> None:
    whole = stratactl("help")
    assert whole.returncode == 0 and whole.stdout == stratactl("--help").stdout
    for verb in VERBS:
        asked = stratactl("help", verb.name)
        assert asked.stdout == stratactl(verb.name, "--help").stdout and asked.stderr == ""
        assert verb.summary in re.sub(r"\s+", " ", whole.stdout)
        assert all(command in asked.stdout for command, _ in verb.examples) and verb.examples


def test_version_option_is_the_version_of_the_distribution() -> None:
    table = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert stratactl("--version").stdout == f"stratactl {table['project']['version']}\n"


# --- 1: refused or failed ---


def test_an_unknown_setting(daemon: Daemon) -> None:
    done = stratactl("--socket", daemon.path, "get", "thread")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "stratactl: no setting is called 'thread'\n"


def test_a_fault_in_the_daemon(daemon: Daemon) -> None:
    daemon.service.snapshot = {"fault": True}
    done = stratactl("--socket", daemon.path, "status")
    assert done.returncode == 1 and "the log of stratad says why" in done.stderr


def test_all_connections_taken(tmp_path: Path) -> None:
    with running(tmp_path / "control.sock", Limits(connections=0)) as daemon:
        done = stratactl("--socket", daemon.path, "status")
    assert (done.returncode, done.stderr) == (1, "stratactl: the daemon serves 0 connections already; try again\n")


@pytest.mark.parametrize(
    "reply", [b"220 mail ESMTP\0", b"[]\0", b'"text"\0', b'{"parameters":[]}\0', b'{"error":{}}\0', b"{}\0"]
)
def test_a_peer_that_speaks_something_else(tmp_path: Path, reply: bytes) -> None:
    with puppet(tmp_path / "other.sock", reply) as path:
        done = stratactl("--socket", str(path), "status")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)


def test_output_that_cannot_be_written(daemon: Daemon) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*PROGRAM, "--socket", daemon.path, "status"],
            env=environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=30,
        )
    assert (done.returncode, done.stderr) == (1, "stratactl: cannot write: No space left on device\n")


# --- 2: usage ---


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["stat"],
        ["status", "--jso"],
        ["status", "extra"],
        ["get", "--json", "--names"],
        ["completion"],
        ["completion", "tcsh"],
        ["help", "stat"],
        ["--timeout", "0", "status"],
        ["--timeout", "soon", "status"],
        ["--timeout", "nan", "status"],
        ["--socket", "x" * 108, "status"],
        ["--socket", "\u00e9" * 54, "status"],
    ],
)
def test_wrong_usage(words: list[str]) -> None:
    done = stratactl(*words)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr and "Traceback" not in done.stderr


# --- 3: not running ---


def test_nobody_there(tmp_path: Path) -> None:
    done = stratactl("--socket", str(tmp_path / "none.sock"), "status")
    assert (done.returncode, done.stdout) == (3, "")
    assert str(tmp_path / "none.sock") in done.stderr


def test_a_stale_socket_and_a_file(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "stale.sock"))
    (tmp_path / "file").write_text("")
    for name in ("stale.sock", "file"):
        done = stratactl("--socket", str(tmp_path / name), "status")
        assert (done.returncode, "nobody listens there" in done.stderr) == (3, True)


def test_a_daemon_that_hangs_up(tmp_path: Path) -> None:
    with puppet(tmp_path / "short.sock") as path:
        done = stratactl("--socket", str(path), "status")
    assert done.returncode == 3 and "hung up" in done.stderr


@pytest.mark.usefixtures("no_daemon_here")
def test_without_a_socket_option_all_places_are_named(tmp_path: Path) -> None:
    done = stratactl("status", XDG_RUNTIME_DIR=str(tmp_path))
    assert done.returncode == 3
    assert f"{tmp_path}/strata/control.sock" in done.stderr and "/run/strata/control.sock" in done.stderr


# --- 4: permission ---


def test_a_closed_socket(daemon: Daemon, tmp_path: Path) -> None:
    os.chmod(tmp_path, 0)  # also when root runs this: a user who is not root gets no further
    root = os.geteuid() == 0
    command = [*PROGRAM, "--socket", daemon.path, "status"]
    user = {"user": 12345, "group": 12345, "extra_groups": []} if root else {}
    try:
        if root and subprocess.run([*PROGRAM, "--version"], env=environment(), capture_output=True, **user).returncode:
            pytest.skip("other users cannot run stratactl from here")
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=30, **user)
    except PermissionError:
        pytest.skip("other users cannot run this Python")
    finally:
        os.chmod(tmp_path, 0o700)
    assert (done.returncode, done.stdout, "permission denied" in done.stderr) == (4, "", True)


def test_a_method_that_is_not_for_us(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratad.control.peer.Policy.allows", lambda *_: False)
    done = stratactl("--socket", daemon.path, "status")
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == (
        "stratactl: permission denied: io.strata.Control.Status needs membership in the group of the control socket\n"
    )


# --- 5: timed out ---


def test_a_daemon_that_does_not_answer(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "silent.sock"))
        silent.listen()
        done = stratactl("--socket", str(tmp_path / "silent.sock"), "--timeout", "0.2", "status")
    assert (done.returncode, "no answer within 0.2 seconds" in done.stderr) == (5, True)


def test_a_daemon_whose_backlog_is_full(tmp_path: Path) -> None:
    path = str(tmp_path / "full.sock")
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as waiting:
        silent.bind(path)
        silent.listen(0)
        waiting.connect(path)
        done = stratactl("--socket", path, "--timeout", "0.2", "status")
    assert (done.returncode, "no answer within 0.2 seconds" in done.stderr) == (5, True)


def test_exit_codes_are_documented() -> None:
    shown = stratactl("--help").stdout
    assert all(f"  {code}  {meaning}" in shown for code, meaning in EXIT_CODES)
    assert [code for code, _ in EXIT_CODES] == [0, 1, 2, 3, 4, 5]


# --- versions that differ ---


def test_both_versions_are_told(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratad.control.interface.daemon_version", lambda: "9.8.7")
    for verb in ("status", "version"):
        done = stratactl("--socket", daemon.path, verb)
        assert done.returncode == 0
        assert done.stderr == f"stratactl: stratactl is version {package.__version__}, the daemon is version 9.8.7\n"


def test_a_daemon_that_lacks_a_method(tmp_path: Path) -> None:
    missing = b'{"error":"org.varlink.service.MethodNotFound","parameters":{"method":"ListSettings"}}\0'
    with puppet(tmp_path / "old.sock", missing, b'{"parameters":{"version":"0.0.1"}}\0') as path:
        done = stratactl("--socket", str(path), "get")
    assert done.returncode == 1
    assert "does not know ListSettings" in done.stderr
    assert package.__version__ in done.stderr and "0.0.1" in done.stderr


# --- watching, signals, terminals ---


def test_watch_prints_one_json_document_a_line(daemon: Daemon) -> None:
    with watching(daemon, "--json") as watcher:
        assert watcher.stdout is not None
        assert json.loads(watcher.stdout.readline())["state"] == "ready"
        daemon.service.snapshot["state"] = "draining"
        assert json.loads(watcher.stdout.readline())["state"] == "draining"
        daemon.close()
        rest, notes = watcher.communicate(timeout=10)
    assert json.loads(rest)["state"] == "draining"
    assert (watcher.returncode, notes) == (0, "stratactl: the daemon is stopping\n")


def test_interrupt_is_silent(daemon: Daemon) -> None:
    with watching(daemon) as watcher:
        assert watcher.stdout is not None
        watcher.stdout.readline()
        watcher.send_signal(signal.SIGINT)
        _, notes = watcher.communicate(timeout=10)
    assert (watcher.returncode, notes) == (-signal.SIGINT, "")


def test_a_reader_that_leaves_ends_it_silently(daemon: Daemon) -> None:
    with watching(daemon, "--json") as watcher:
        assert watcher.stdout is not None and watcher.stderr is not None
        watcher.stdout.readline()
        watcher.stdout.close()
        daemon.service.snapshot["state"] = "draining"
        assert (watcher.wait(10), watcher.stderr.read()) == (-signal.SIGPIPE, "")


def test_a_daemon_that_hangs_up_on_a_request_is_no_broken_pipe(tmp_path: Path) -> None:
    """SIGPIPE ends stratactl when its output closes; the socket must not be able to do the same."""
    path = tmp_path / "hasty.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        child = subprocess.Popen(
            [*PROGRAM, "--socket", str(path), "get", *["x" * 1000] * 400],
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        client, _ = listener.accept()
        client.close()
        _, notes = child.communicate(timeout=10)
    assert (child.returncode, "hung up" in notes) == (3, True)


def watching(daemon: Daemon, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*PROGRAM, "--socket", daemon.path, "status", "--watch", *words],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def on_terminal(words: list[str], until: Callable[[str], bool] = lambda text: False, **extra: str) -> str:
    """What the program writes to a terminal, up to its end or until `until` says enough."""
    ours, theirs = pty.openpty()
    child = subprocess.Popen([*PROGRAM, *words], env=environment(**extra), stdout=theirs, stderr=theirs)
    os.close(theirs)
    text = ""
    deadline = time.monotonic() + 10
    with contextlib.suppress(OSError):  # EIO: the other side is closed
        while not until(text) and time.monotonic() < deadline:
            text += os.read(ours, 65536).decode()
    os.close(ours)
    child.terminate()
    child.wait(10)
    return text.replace("\r\n", "\n")


def test_colour_is_for_terminals_that_want_it(daemon: Daemon) -> None:
    words = ["--socket", daemon.path, "status"]
    assert on_terminal(words) == STATUS.replace("ready", "\x1b[32mready\x1b[0m")
    assert on_terminal(words, NO_COLOR="1") == STATUS
    assert on_terminal(words, TERM="dumb") == STATUS


def test_watch_redraws_a_terminal(daemon: Daemon) -> None:
    def change(text: str) -> bool:
        if "up 2 h" in text:
            daemon.service.snapshot["state"] = "draining"
        return text.count("11 s\r\n") == 2

    text = on_terminal(["--socket", daemon.path, "status", "--watch"], change, NO_COLOR="1")
    assert text == STATUS + f"\x1b[{STATUS.count(chr(10))}A\x1b[J" + STATUS.replace("ready", "draining")


# --- start-up ---


def test_little_is_imported() -> None:
    """Start-up time is what this is about; imports are what can be counted without a clock."""
    listed = subprocess.run(
        [sys.executable, "-c", "import stratactl.__main__, sys; print(*sys.modules)"],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    bare = subprocess.run([sys.executable, "-c", "import sys; print(*sys.modules)"], capture_output=True, text=True)
    added = set(listed.stdout.split()) - set(bare.stdout.split())
    assert "stratactl.verbs" in added
    assert not added & {"asyncio", "dataclasses", "importlib.metadata", "inspect", "logging", "subprocess", "tomllib"}
    assert not added & {"stratad", "typing", "ssl", "stratactl.completion"}
    assert len(added) < 60


def test_errno_of_a_missing_folder(tmp_path: Path) -> None:
    done = stratactl("--socket", str(tmp_path / "no" / "control.sock"), "status")
    assert (done.returncode, os.strerror(errno.ENOENT) in done.stderr) == (3, True)
