"""The scripts against the built engine and a running server: they pass, they fail where they should, they explain."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.exactness import models
from tests.integration.test_service import service
from tests.native.driver import ENGINE

HERE = Path(__file__).parent
SCRIPTS = ("batch_test.py", "interleave_test.py", "parking_test.py", "early_close_test.py")
OF_ENGINES = SCRIPTS[:3]


def run(script: str, *args: str | int | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(HERE / script), *map(str, args)], capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_they_explain_themselves(script: str) -> None:
    done = run(script, "--help")
    assert done.returncode == 0 and "usage:" in done.stdout and "xits with 1" in " ".join(done.stdout.split())


@pytest.mark.parametrize("script", OF_ENGINES)
@pytest.mark.parametrize("extra", ["--spec 0", "--spec 4 --spec-fixed --spec-min-p 0"])
def test_an_engine_passes(script: str, extra: str, tmp_path: Path) -> None:
    model = models.moe(tmp_path / "moe.gguf")
    done = run(script, "--model", model, "--keys", "temperature=0.5 seed=7 logprobs=1", "--extra", extra)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all equal\n") and "FAIL" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("script", OF_ENGINES)
def test_the_embedded_model_passes(script: str) -> None:
    done = run(script)
    assert done.returncode == 0, done.stdout + done.stderr


LYING_ENGINE = """#!{python}
import os, subprocess, sys
# The real engine, but the fifth token of slot 1 is another one.
real = subprocess.Popen([{engine!r}, *sys.argv[1:]], stdin=0, stdout=subprocess.PIPE, text=True)
seen = 0
for line in real.stdout:
    if line.startswith("BT 1 "):
        seen += 1
        if seen == 5:
            line = "BT 1 3\\n"
    sys.stdout.write(line)
    sys.stdout.flush()
sys.exit(real.wait())
"""


def test_a_wrong_token_is_found(tmp_path: Path) -> None:
    liar = tmp_path / "liar"
    liar.write_text(LYING_ENGINE.format(python=sys.executable, engine=str(ENGINE)))
    liar.chmod(0o755)
    model = models.moe(tmp_path / "moe.gguf")
    done = run("batch_test.py", "--engine", liar, "--model", model, "--n", 2, "--max-new", 20)
    assert done.returncode == 1, done.stdout
    assert "FAIL  slot 1: slot 1 differs at 4" in done.stdout and "ok    slot 0" in done.stdout


@pytest.mark.parametrize("script", OF_ENGINES)
def test_an_engine_that_does_not_start_is_one_line(script: str, tmp_path: Path) -> None:
    done = run(script, "--model", tmp_path / "none.gguf")
    assert done.returncode == 1
    assert done.stderr.startswith("FAIL  model_open: ") and "Traceback" not in done.stderr


def test_a_server_passes(tmp_path: Path) -> None:
    with service(tmp_path, "--parallel", "2") as server:
        done = run("early_close_test.py", server.url, "--rounds", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok") == 8


@contextmanager
def leaky_server() -> Iterator[str]:
    """Begins every answer with what the last client did not read."""
    left: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            words = [*left, *("ABCDEFGHIJ" if "story" in body else "xyz")]
            left.clear()
            self.send_response(200)
            self.end_headers()
            try:
                for i, word in enumerate(words):
                    self.wfile.write(b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n' % word.encode())
                    self.wfile.flush()
                    if i > 1:
                        self.connection.settimeout(0.2)
                        if "story" in body and self.rfile.peek(1) == b"":  # type: ignore[attr-defined]
                            raise ConnectionError
            except (OSError, ConnectionError) as error:
                if not isinstance(error, TimeoutError):
                    left.extend(words[2:])
                    return
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, format: str, *args: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_tokens_left_to_the_next_client_are_found() -> None:
    with leaky_server() as url:
        done = run("early_close_test.py", url, "--rounds", 1)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAIL  after a client that left" in done.stdout


def test_no_server_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "early_close_test.py"), "http://127.0.0.1:9"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "STRATA_KEY": "k"},
    )
    assert done.returncode == 1
    assert done.stderr.startswith("FAIL  ") and "Traceback" not in done.stderr
