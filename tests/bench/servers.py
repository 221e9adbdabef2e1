"""stratad and llama-server as processes: started, waited for, ended."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from types import TracebackType

from tests.bench.engine import BenchError
from tests.bench.machine import share_priority
from tests.bench.peer import Peer

STRATAD = Path(sys.executable).parent / "stratad"
READY_S = 120.0
POLL_S = 0.1


def free_port() -> int:
    """A TCP port of the loopback interface that nobody uses now."""
    with closing(socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """A server process; `with server:` waits until it answers and ends it."""

    command: list[str]
    port: int
    folder: tempfile.TemporaryDirectory[str] | None = None
    process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Its process id. Raises BenchError when it does not run."""
        if self.process is None or self.process.poll() is not None:
            raise BenchError(f"{self.name} does not run")
        return self.process.pid

    @property
    def name(self) -> str:
        """The program's name."""
        return Path(self.command[0]).name

    def __enter__(self) -> Server:
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            self._wait_healthy()
            share_priority(self.pid)  # stratad's engine has a session of its own
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _wait_healthy(self) -> None:
        end = time.monotonic() + READY_S
        while time.monotonic() < end:
            _ = self.pid
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except urllib.error.HTTPError as error:
                error.close()
            except OSError:
                pass
            time.sleep(POLL_S)
        raise BenchError(f"{self.name} was not ready within {READY_S:.0f} s")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with ExitStack() as stack:
            if self.folder:
                stack.callback(self.folder.cleanup)
            if self.process and self.process.poll() is None:
                self.process.terminate()
                try:
                    self.process.wait(15)
                except subprocess.TimeoutExpired:
                    self.process.kill()
                    self.process.wait()


def strata_server(model: Path, threads: int, clients: int, context: int) -> Server:
    """stratad on `model`, with a slot of `context` tokens for every client where it has slots."""
    if not STRATAD.exists():
        raise BenchError(f"no daemon at {STRATAD}: run `make build`")
    folder = tempfile.TemporaryDirectory(prefix="strata-bench-")
    port = free_port()
    command = [str(STRATAD), "--model", str(model), "--threads", str(threads), "--listen", f"127.0.0.1:{port}"]
    command += ["--control", f"{folder.name}/control.sock", "--state", f"{folder.name}/state", "--log-level", "warning"]
    command += ["--max-context", str(context)]
    if daemon_knows("--parallel"):
        command += ["--parallel", str(clients)]
    return Server(command, port, folder)


def daemon_knows(option: str) -> bool:
    """Whether the daemon's help names `option`."""
    return option in subprocess.run([str(STRATAD), "--help"], capture_output=True, text=True, check=False).stdout


def peer_server(peer: Peer, model: Path, threads: int, clients: int, context: int) -> Server:
    """llama-server on `model` with a slot and `context` tokens for every client."""
    port = free_port()
    command = [str(peer.program("llama-server")), "-m", str(model), "-t", str(threads), "-np", str(clients)]
    command += ["-c", str(context * clients), "--host", "127.0.0.1", "--port", str(port)]
    return Server(command, port)
