"""A running `strata-engine` as a Python object: send lines, take lines, generate.

`STRATA_ENGINE` names another program (a sanitizer build); `STRATA_PATIENCE` multiplies every limit of
time and memory for a slow one.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "native" / "models" / "strata-tiny-moe-Q4_0.gguf"
ENGINE = Path(os.environ.get("STRATA_ENGINE") or Path(sys.executable).parent / "strata-engine").resolve()
PATIENCE = float(os.environ.get("STRATA_PATIENCE", "1"))
DONE_FIELDS = [
    "generated",
    "prompt_tokens",
    "prompt_ms",
    "decode_ms",
    "finish",
    "drafts_accepted",
    "drafts_offered",
    "reused",
    "hits",
    "lookups",
    "ram_blobs",
    "file_blobs",
    "file_mb",
    "prompt_tokens_read",
    "offloaded",
]


class Refused(Exception):
    """An `ERR name text` line in place of an answer."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name
        self.text = text


@dataclass
class Answer:
    """What one GEN brought: the lines in order, and their meaning."""

    lines: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[dict[int, float]] = field(default_factory=list)
    progress: list[tuple[int, int]] = field(default_factory=list)  # (position, total) of each PP
    resumed: int = -1
    reused: int = -1
    done: dict[str, str] = field(default_factory=dict)

    @property
    def finish(self) -> str:
        return self.done["finish"]

    def take(self, line: str) -> bool:
        """Account for one line of the answer; True when it was the last. Raises Refused."""
        self.lines.append(line)
        word, *rest = line.split(" ")
        if word == "ERR":
            raise Refused(rest[0], " ".join(rest[1:]))
        if word == "RESUME":
            self.resumed = int(rest[0])
        elif word == "REUSED":
            self.reused = int(rest[0])
        elif word == "PP":
            self.progress.append((int(rest[0]), int(rest[1])))
        elif word == "T":
            self._token(rest)
        elif word == "DONE":
            assert len(rest) == len(DONE_FIELDS), line
            self.done = dict(zip(DONE_FIELDS, rest, strict=True))
            return True
        else:
            assert word == "STAT", f"a line that does not belong to an answer: {line!r}"
        return False

    def _token(self, rest: list[str]) -> None:
        self.tokens.append(int(rest[0]))
        extra = dict(item.split("=", 1) for item in rest[1:])
        if "lp" in extra:
            self.logprobs.append(float(extra["lp"]))
            pairs = (pair.split(":") for pair in extra.get("top", "").split(",") if pair)
            self.tops.append({int(i): float(lp) for i, lp in pairs})


def gen(ids: Sequence[int], max_new: int, **keys: Any) -> str:
    """The GEN line of a request."""
    return " ".join(["GEN", str(max_new), *(f"{k}={v}" for k, v in keys.items()), ",".join(map(str, ids))])


class Engine:
    """One engine process. `with Engine(...) as e` waits for READY and ends it, checking that it ends well."""

    def __init__(
        self,
        *args: str | Path,
        model: str | Path | None = MODEL,
        env: dict[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        command = [str(ENGINE), *(["--model", str(model)] if model else []), *map(str, args)]
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, **(env or {})},
            pass_fds=tuple(pass_fds),
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reading = threading.Event()
        self._reading.set()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self.info: dict[str, str] = {}
        self.load_percent: list[int] = []
        self.ready: list[str] = []

    # -- lines ---------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        assert self.process.stdout
        fd, rest = self.process.stdout.fileno(), b""
        while self._reading.wait() and (data := os.read(fd, 65536)):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._lines.put(line.decode())
        self._lines.put(None)

    def pause(self) -> None:
        """Stop taking the engine's output (one more read may be under way)."""
        self._reading.clear()

    def resume(self) -> None:
        self._reading.set()

    def send(self, line: str | bytes) -> None:
        """Write one line (the newline is added)."""
        self.write((line.encode() if isinstance(line, str) else line) + b"\n")

    def write(self, data: bytes) -> None:
        assert self.process.stdin
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def line(self, timeout: float = 60) -> str:
        """The next line; AssertionError when none comes or the engine is gone."""
        try:
            line = self._lines.get(timeout=timeout * PATIENCE)
        except queue.Empty:
            raise AssertionError(f"no line within {timeout} s\n{self.stderr()}") from None
        if line is None:
            self._lines.put(None)
            raise AssertionError(f"the engine ended ({self.process.poll()})\n{self.stderr()}")
        return line

    def has_line(self, timeout: float = 0) -> bool:
        """Whether a line is there, or comes within that time."""
        end = time.monotonic() + timeout
        while self._lines.empty() and time.monotonic() < end:
            time.sleep(0.001)
        return not self._lines.empty()

    def rest(self, timeout: float = 20) -> list[str]:
        """All lines up to the end of the output."""
        lines = []
        while (line := self._lines.get(timeout=timeout * PATIENCE)) is not None:
            lines.append(line)
        return lines

    def until(self, word: str, timeout: float = 60) -> list[str]:
        """Lines up to and with the first that begins with `word`."""
        lines = [self.line(timeout)]
        while lines[-1].split(" ")[0] != word:
            lines.append(self.line(timeout))
        return lines

    def stderr(self) -> str:
        """What the engine has logged so far."""
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace")

    # -- requests ------------------------------------------------------------------------------------------------

    def start(self) -> Engine:
        """Read INFO lines up to READY. Raises Refused for a load failure."""
        while True:
            word, *rest = self.line().split(" ")
            if word == "ERR":
                raise Refused(rest[0], " ".join(rest[1:]))
            if word == "READY":
                self.ready = rest
                return self
            assert word == "INFO", (word, rest)
            facts = dict(item.split("=", 1) for item in rest)
            if "load_percent" in facts:
                self.load_percent.append(int(facts["load_percent"]))
            self.info.update(facts)

    def answer(self, timeout: float = 60) -> Answer:
        """The lines of a GEN that was sent, to its end."""
        answer = Answer()
        while not answer.take(self.line(timeout)):
            pass
        return answer

    def generate(self, ids: Sequence[int], max_new: int, timeout: float = 60, **keys: Any) -> Answer:
        """One GEN and its whole answer. Raises Refused."""
        self.send(gen(ids, max_new, **keys))
        return self.answer(timeout)

    # -- end -----------------------------------------------------------------------------------------------------

    def wait(self, timeout: float = 20) -> int:
        """The exit status."""
        return self.process.wait(timeout * PATIENCE)

    def close(self) -> int:
        """QUIT, or nothing when it has ended already; the exit status. Kills one that does not go."""
        self.resume()
        try:
            if self.process.poll() is None:
                with contextlib.suppress(BrokenPipeError):
                    self.send("QUIT")
            return self.wait()
        finally:
            self.kill()

    def kill(self) -> None:
        """End it in any case and free everything."""
        self.resume()
        self.process.kill()
        self.process.wait()
        self._thread.join(10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        if not self._stderr.closed:
            self._stderr.close()

    def __enter__(self) -> Engine:
        try:
            return self.start()
        except BaseException:
            self.kill()
            raise

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if exc is not None:
            self.kill()
            return
        log = self.stderr()
        status = self.close()
        assert status == 0, f"the engine ended with {status}\n{log}"


def run(*args: str | Path, env: dict[str, str] | None = None, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """The engine with nothing on its input, to its end."""
    return subprocess.run(
        [str(ENGINE), *map(str, args)],
        input="",
        capture_output=True,
        text=True,
        timeout=timeout * PATIENCE,
        env={**os.environ, **(env or {})},
    )


def resident_mib(pid: int) -> float:
    """Memory of a process that is in RAM."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def eventually(what: str, check: Any, timeout: float = 10) -> None:
    """Wait until check() is true."""
    end = time.monotonic() + timeout * PATIENCE
    while not check():
        assert time.monotonic() < end, f"not within {timeout} s: {what}"
        time.sleep(0.01)
