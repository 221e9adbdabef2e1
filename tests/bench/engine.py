"""A running strata-engine, read with as little processor time as can be: lines are looked at after the answer."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tests.bench.machine import peak_mib

ENGINE = Path(os.environ.get("STRATA_ENGINE") or Path(sys.executable).parent / "strata-engine")
PATIENCE_S = 300.0


class BenchError(Exception):
    """A side that could not be measured, and why."""


@dataclass(frozen=True)
class Done:
    """The DONE line of a request. Times in ms; `decode_ms` is for all tokens but the first."""

    generated: int
    prompt_tokens: int
    prompt_ms: float
    decode_ms: float
    finish: str
    reused: int
    accepted: int = 0  # drafts that became tokens
    offered: int = 0  # drafts that windows carried

    @classmethod
    def parse(cls, line: str) -> Done:
        """From `DONE generated prompt prompt_ms decode_ms finish accepted offered reused ...`."""
        words = line.split()
        if len(words) < 9 or words[0] != "DONE":
            raise BenchError(f"the engine answered {line!r} where DONE was expected")
        accepted, offered, reused = map(int, words[6:9])
        return cls(int(words[1]), int(words[2]), float(words[3]), float(words[4]), words[5], reused, accepted, offered)

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first."""
        return (self.generated - 1) * 1e3 / self.decode_ms if self.generated > 1 and self.decode_ms > 0 else 0.0

    @property
    def windows(self) -> int:
        """Passes that made all tokens but the first: one token each, and what was accepted besides."""
        return self.generated - 1 - self.accepted

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens read per second."""
        return (self.prompt_tokens - self.reused) * 1e3 / self.prompt_ms if self.prompt_ms > 0 else 0.0


@dataclass(frozen=True)
class Timed:
    """One output line and when it had arrived (seconds of the monotonic clock)."""

    at: float
    line: str


def lines_of(blocks: Sequence[tuple[float, bytes]]) -> list[Timed]:
    """Whole lines of what was read block by block; a line arrived with the block that ended it."""
    lines: list[Timed] = []
    rest = b""
    for at, data in blocks:
        *whole, rest = (rest + data).split(b"\n")
        lines += [Timed(at, line.decode(errors="replace")) for line in whole]
    return lines


def gen_line(ids: Sequence[int], max_new: int, keys: str) -> str:
    """A GEN request."""
    return " ".join(filter(None, ["GEN", str(max_new), keys, ",".join(map(str, ids))]))


def knows(option: str) -> bool:
    """Whether the engine's help names `option`."""
    return option in subprocess.run([str(ENGINE), "--help"], capture_output=True, text=True, check=False).stdout


class Engine:
    """One engine process. `with Engine(...) as engine` waits until it is ready and ends it."""

    def __init__(self, model: Path, *args: str) -> None:
        if not ENGINE.exists():
            raise BenchError(f"no engine at {ENGINE}: run `make build`")
        self._process = subprocess.Popen(
            [str(ENGINE), "--model", str(model), *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdin and self._process.stdout
        self._in, self._out = self._process.stdin, self._process.stdout.fileno()
        self._rest = b""  # the begin of a line whose end has not arrived
        self.info: dict[str, str] = {}

    def __enter__(self) -> Engine:
        for timed in self.read_until(b"READY"):
            if timed.line.startswith("INFO "):
                words = (word.partition("=") for word in timed.line.split()[1:])
                self.info.update((name, value) for name, _, value in words)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._in.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout
        self._process.stdout.close()

    def send(self, *lines: str) -> float:
        """Write lines in one go; the time when that began (monotonic clock)."""
        began = time.monotonic()
        self._in.write("".join(line + "\n" for line in lines).encode())
        self._in.flush()
        return began

    def read_until(self, word: bytes, count: int = 1) -> list[Timed]:
        """All lines up to the `count`-th that starts with `word`. Raises BenchError for ERR, silence or the end."""
        blocks: list[tuple[float, bytes]] = []
        seen, tail = 0, b"\n"
        while seen < count:
            if not select.select([self._out], [], [], PATIENCE_S)[0]:
                raise BenchError(f"the engine said nothing for {PATIENCE_S:.0f} s")
            data = os.read(self._out, 1 << 16)
            if not data:
                raise BenchError(f"the engine ended: {_last_error(blocks) or 'no reason given'}")
            blocks.append((time.monotonic(), self._rest + data))
            tail += self._rest + data
            self._rest = b""
            if b"\nERR " in tail or b"\nBERR " in tail:
                raise BenchError(f"the engine refused: {_last_error(blocks)}")
            *whole, last = tail.split(b"\n")
            seen += sum(line.split(b" ", 1)[0] == word for line in whole[1:])
            tail = b"\n" + last
        self._rest = tail[1:]
        return lines_of(blocks)

    def generate(self, ids: Sequence[int], max_new: int, keys: str) -> tuple[Done, list[int], float]:
        """One GEN: its DONE line, the tokens, and the seconds from the request to DONE."""
        began = self.send(gen_line(ids, max_new, keys))
        lines = self.read_until(b"DONE")
        tokens = [int(timed.line.split()[1]) for timed in lines if timed.line.startswith("T ")]
        return Done.parse(lines[-1].line), tokens, lines[-1].at - began

    @property
    def peak_mib(self) -> float:
        """Largest resident set so far, in MiB."""
        return peak_mib(self._process.pid)


def _last_error(blocks: Sequence[tuple[float, bytes]]) -> str:
    errors = [timed.line for timed in lines_of(blocks) if timed.line.startswith(("ERR ", "BERR "))]
    return errors[-1] if errors else ""
