"""The daemon as a process: start, status, reload, and every way to end, with the fake engine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FAKE = str(ROOT / "tests" / "fake_engine" / "__main__.py")
MODEL = str(ROOT / "native" / "models" / "strata-tiny-moe-Q4_0.gguf")


def call(path: Path, method: str) -> dict[str, Any]:
    """One call of io.strata.Control over the socket."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5)
        client.connect(str(path))
        client.sendall(json.dumps({"method": f"io.strata.Control.{method}"}).encode() + b"\0")
        data = b""
        while not data.endswith(b"\0"):
            part = client.recv(65536)
            assert part, "the control socket hung up"
            data += part
    answer: dict[str, Any] = json.loads(data[:-1])["parameters"]
    return answer


class Running:
    """A stratad process with its own directories. `engine` are flags of the fake engine."""

    def __init__(self, tmp_path: Path, *options: str, engine: str = "", environ: dict[str, str] | None = None) -> None:
        self.control = tmp_path / "c.sock"
        self.state = tmp_path / "state"
        arguments = ["--control", str(self.control), "--state", str(self.state), "--engine", FAKE, "--model", MODEL,
                     "--listen", "127.0.0.1:0"]  # fmt: skip
        if engine:
            arguments.append(f"--engine-args={engine}")
        command = [sys.executable, "-c", "import sys; from stratad.cli import main; sys.exit(main())"]
        self.log: list[str] = []
        self.clients: list[HTTPConnection] = []
        self.responses: list[HTTPResponse] = []
        self.process = subprocess.Popen(
            [*command, *arguments, *options],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **(environ or {})},
        )
        self.reader = threading.Thread(target=self._read_log)
        self.reader.start()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip("\n"))

    def until(self, condition: Callable[[], object], seconds: float = 15.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "\n".join(self.log)
            time.sleep(0.01)

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = call(self.control, "Status")["status"]
        return status

    def state_is(self, *states: str) -> bool:
        with contextlib.suppress(OSError):
            return self.status()["state"] in states
        return False

    def ready(self) -> Running:
        self.until(lambda: any(": ready: " in line for line in self.log))
        return self

    def http(self, method: str, path: str, body: object = None, timeout: float = 10) -> tuple[int, Any]:
        with contextlib.closing(self.connect(timeout)) as client:
            client.request(method, path, None if body is None else json.dumps(body))
            response = client.getresponse()
            return response.status, json.loads(response.read())

    def connect(self, timeout: float = 10) -> HTTPConnection:
        host, port = self.status()["listeners"][0].split(":")
        return HTTPConnection(host, int(port), timeout=timeout)

    def stream(self, max_tokens: int) -> Any:
        """The response of a streamed completion, its first line read."""
        client = self.connect()
        self.clients.append(client)
        body = {"prompt": "once upon a time", "max_tokens": max_tokens, "stream": True}
        client.request("POST", "/v1/completions", json.dumps(body))
        response = client.getresponse()
        self.responses.append(response)
        assert response.status == 200 and response.readline()
        return response

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, seconds: float = 15.0) -> int:
        """Wait for the end and close what was opened; returns the exit code."""
        code = self.process.wait(seconds)
        self.reader.join(5)
        for response in self.responses:
            response.close()
        for client in self.clients:
            client.close()
        return code

    def logged(self, words: str) -> bool:
        return any(words in line for line in self.log)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(*options: str, **others: Any) -> Running:
        started.append(Running(tmp_path, *options, **others))
        return started[-1]

    yield start
    for running in started:
        if running.process.poll() is None:
            running.process.kill()
        running.end()
        assert running.process.stderr is not None
        running.process.stderr.close()
        assert not running.logged("Traceback"), "\n".join(running.log)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_start_answer_and_stop_leave_nothing_behind(start: Callable[..., Running]) -> None:
    running = start().ready()
    status = running.status()
    assert status["state"] == "ready" and status["pid"] == running.process.pid
    assert status["model"]["arch"] == "fake" and status["model"]["context"] == 4096
    assert set(status["requests"]) == {
        "running", "queued", "submitted", "started", "finished", "cancelled", "failed", "refused",
    }  # fmt: skip
    code, answer = running.http("POST", "/v1/completions", {"prompt": "hello", "max_tokens": 5})
    assert code == 200 and answer["usage"]["completion_tokens"] == 5
    assert running.status()["requests"]["finished"] == 1
    engine = running.status()["engine"]["pid"]
    running.signal(signal.SIGTERM)
    assert running.end() == 0
    assert not running.control.exists() and not alive(engine)
    assert (running.state / "lock").read_text() == ""
    assert not running.logged("hello")


def test_control_and_health_answer_while_loading(start: Callable[..., Running]) -> None:
    running = start(engine="--load-s 60")
    running.until(lambda: running.state_is("loading") and running.status()["engine"]["load_percent"] >= 0)
    assert "loading the model" in running.status()["state_detail"]
    running.until(lambda: running.http("GET", "/health")[0] == 503)
    code, answer = running.http("POST", "/v1/completions", {"prompt": "a"})
    assert (code, answer["error"]["code"]) == (503, "engine_loading")
    running.signal(signal.SIGINT)
    assert running.end() == 0


@pytest.mark.parametrize("code", [2, 78])
def test_a_first_load_that_can_never_succeed_ends_the_daemon_with_78(start: Callable[..., Running], code: int) -> None:
    running = start(engine=f"--load-exit {code} --load-err 'model_format no layers'")
    assert running.end() == 78
    assert running.logged("model_format: no layers")
    assert not running.control.exists()


def test_a_model_file_that_is_none_ends_the_daemon_with_78(start: Callable[..., Running], tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"nothing of the kind")
    running = start("--model", str(bad))
    assert running.end() == 78
    assert running.logged(f"stratad: configuration: {bad}: ")


def test_a_crash_later_on_is_mended_and_seen(start: Callable[..., Running], tmp_path: Path) -> None:
    running = start(engine=f"--exit-after 2 --exit-code -11 --once {tmp_path / 'once'}").ready()
    code, answer = running.http("POST", "/v1/completions", {"prompt": "a", "max_tokens": 5})
    assert code == 200 and answer["usage"]["completion_tokens"] == 5  # by two engines
    engine = running.status()["engine"]
    assert (engine["restarts"], engine["last_exit"]["signal"]) == (1, 11)
    assert running.http("POST", "/v1/completions", {"prompt": "a", "max_tokens": 5})[1]["choices"] == answer["choices"]


def test_status_answers_while_the_engine_is_frozen(start: Callable[..., Running]) -> None:
    running = start("--stall-limit-s", "1.5", engine="--delay-s 0.01").ready()
    response = running.stream(200)
    os.kill(running.status()["engine"]["pid"], signal.SIGSTOP)
    started = time.monotonic()
    assert running.status()["requests"]["running"] == 1
    with contextlib.closing(running.connect()) as client:
        client.request("GET", "/metrics")
        assert b"\nstrata_requests_running 1\n" in client.getresponse().read()
    assert time.monotonic() - started < 0.5
    text = response.read().decode()  # goes on after the silence, in a new engine
    assert "error" not in text and '"finish_reason":"length"' in text and time.monotonic() - started < 12
    assert running.status()["engine"]["restarts"] == 1


@pytest.mark.parametrize("taken", ["address", "state"])
def test_what_is_taken_is_known_before_the_model_is_loaded(
    start: Callable[..., Running], tmp_path: Path, taken: str
) -> None:
    first = start().ready()
    if taken == "address":
        other = start("--listen", first.status()["listeners"][0], "--state", str(tmp_path / "b"), "--control",
                      str(tmp_path / "b.sock"))  # fmt: skip
    else:
        other = start()
    assert other.end() == 1
    assert len(other.log) == 1 and f"pid {first.process.pid}" in other.log[0]
    assert first.status()["state"] == "ready"


# -- stopping with work to do


def test_a_stream_that_ends_in_time_is_not_cut(start: Callable[..., Running]) -> None:
    running = start(engine="--delay-s 0.02").ready()
    response = running.stream(40)
    running.signal(signal.SIGTERM)
    text = response.read().decode()
    assert text.count("data: ") >= 40 and text.rstrip().endswith("[DONE]") and "error" not in text
    assert running.end() == 0


def test_a_stream_that_takes_too_long_gets_a_last_word(start: Callable[..., Running]) -> None:
    running = start("--drain-limit-s", "0.3", engine="--delay-s 0.02").ready()
    response = running.stream(4000)
    started = time.monotonic()
    running.signal(signal.SIGTERM)
    assert '"draining"' in response.read().decode()
    assert running.end() == 0 and time.monotonic() - started < 4


def test_a_second_signal_hurries(start: Callable[..., Running]) -> None:
    running = start("--stop-timeout-s", "60", engine="--delay-s 0.02 --ignore-sigterm --deaf").ready()
    response = running.stream(4000)
    engine = running.status()["engine"]["pid"]
    started = time.monotonic()
    running.signal(signal.SIGTERM)
    running.until(lambda: running.state_is("draining"))
    running.signal(signal.SIGTERM)
    response.read()
    assert running.end() == 0 and time.monotonic() - started < 6
    assert not alive(engine)


def test_a_stop_while_the_engine_is_down(start: Callable[..., Running]) -> None:
    running = start(engine="--load-exit 1")
    running.until(lambda: running.state_is("restarting"))
    running.signal(signal.SIGTERM)
    assert running.end() == 0


def test_the_engine_ends_when_the_daemon_is_killed(start: Callable[..., Running]) -> None:
    running = start().ready()
    engine = running.status()["engine"]["pid"]
    running.signal(signal.SIGKILL)
    running.end()
    running.until(lambda: not alive(engine), 3)
    again = start().ready()  # a stale socket and lock are no obstacle
    assert again.status()["state"] == "ready"


# -- reload


def test_reload_takes_over_what_can_change_and_refuses_what_is_wrong(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    path = tmp_path / "strata.toml"
    path.write_text("queue_limit = 5\nthreads = 1\n")
    running = start("--config", str(path)).ready()

    path.write_text("queue_limit = 6\nthreads = 2\n")
    running.signal(signal.SIGHUP)
    running.until(lambda: running.logged("configuration read again"))
    rows = {row["name"]: row for row in call(running.control, "ListSettings")["settings"]}
    assert rows["queue_limit"]["value"] == 6
    assert (rows["threads"]["value"], rows["threads"]["pending"]) == (1, 2)
    assert running.logged("changed: threads: 1 stays until engine-restart, then 2")

    path.write_text("queue_limit = 7\nqueue_limt = 7\n")
    running.signal(signal.SIGHUP)
    running.until(lambda: running.logged("reload refused, everything stays as it was: "))
    assert running.status()["settings"]["queue_limit"] == 6

    os.kill(running.status()["engine"]["pid"], signal.SIGKILL)
    running.until(lambda: running.status()["settings"].get("threads") == 2)


# -- systemd


def test_systemd_hears_of_every_step_and_the_engine_of_none(start: Callable[..., Running], tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(tmp_path / "notify"))
        notify.settimeout(10)
        running = start(environ={"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "1000000"}).ready()
        environment = Path(f"/proc/{running.status()['engine']['pid']}/environ").read_bytes()
        assert b"NOTIFY_SOCKET" not in environment and b"WATCHDOG" not in environment
        running.signal(signal.SIGHUP)
        running.until(lambda: running.logged("configuration read again"))
        running.signal(signal.SIGTERM)
        assert running.end() == 0
        notify.setblocking(False)
        messages = []
        with contextlib.suppress(BlockingIOError):
            while True:
                messages.append(notify.recv(4096).decode())
    plain = [message for message in messages if not message.startswith("STATUS=")]
    assert plain[0] == "READY=1" and plain[2:] == ["READY=1", "STOPPING=1"]
    assert plain[1].startswith("RELOADING=1\nMONOTONIC_USEC=")
    assert "STATUS=ready" in messages
