"""A child process with line-wise pipes on the event loop, and the effects that the supervisor needs injected.

Why not `asyncio.subprocess`: its `wait()` also waits for the pipes, which a grandchild may keep open, and it wakes a
task per line. Here the exit is seen through a pidfd at once, whatever the pipes do, and one read hands over every
complete line it brought.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from stratad.engine_protocol import LINE_LIMIT

_logger = logging.getLogger("stratad.supervisor")

READ_SIZE = 1 << 16  # the capacity of a pipe: one read takes all there is
LAST_WORDS_LIMIT = 64 * READ_SIZE  # what is read from a pipe after the exit; a grandchild might write for ever
ERROR_LINE_LIMIT = 4096
EXIT_POLL_S = 0.05  # where the kernel has no pidfd
OOM_SCORE_ADJ = 500  # the engine is the better victim: it can be started again without losing the daemon


@dataclass(frozen=True, slots=True)
class Command:
    """What to start: program and arguments, and the whole environment."""

    argv: Sequence[str]
    env: Mapping[str, str]


class ChildListener(Protocol):
    """Called on the event loop. No call comes after `child_exited`."""

    def child_lines(self, lines: list[bytes]) -> None:
        """Complete lines of standard output, without their newlines."""
        ...

    def child_overlong(self) -> None:
        """A line passed LINE_LIMIT; nothing more of the output will be delivered."""
        ...

    def child_error_line(self, line: str) -> None:
        """One line of standard error."""
        ...

    def child_exited(self, code: int) -> None:
        """The process ended: its exit code, or minus the signal. Everything it printed was delivered before."""
        ...


class Child(Protocol):
    """A started process."""

    @property
    def pid(self) -> int: ...

    def write(self, data: bytes) -> None:
        """Queue bytes for standard input; never blocks; bytes for a dead process are dropped."""
        ...

    def close_input(self) -> None:
        """End standard input once what was queued is written."""
        ...

    def signal(self, number: int) -> None:
        """Send a signal to the process and everything it started (its group)."""
        ...


Spawn = Callable[[Command, ChildListener], Child]


@dataclass(frozen=True, slots=True)
class Effects:
    """What the supervisor and the scheduler do to the world: tests put their own in."""

    spawn: Spawn
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    wall: Callable[[], float] = time.time

    async def wait(self, event: asyncio.Event, seconds: float) -> bool:
        """Wait for the event, at most so long (0: without limit). Returns whether it is set."""
        if seconds <= 0 or event.is_set():
            await event.wait()
            return True
        waiter = asyncio.ensure_future(event.wait())
        timer = asyncio.ensure_future(self.sleep(seconds))
        try:
            await asyncio.wait((waiter, timer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiter.cancel()
            timer.cancel()
        return event.is_set()


def real_effects() -> Effects:
    """Effects on the running event loop."""
    return Effects(spawn=spawn)


def spawn(command: Command, listener: ChildListener) -> Child:
    """Start a process in a session of its own. Raises OSError when the program cannot be started."""
    return _Process(command, listener)


class _Process:
    def __init__(self, command: Command, listener: ChildListener) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._popen = subprocess.Popen(
            list(command.argv),
            env=dict(command.env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self._popen.stdin and self._popen.stdout and self._popen.stderr
        self._stdin, self._stdout, self._stderr = self._popen.stdin, self._popen.stdout, self._popen.stderr
        for stream in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(stream.fileno(), False)
        self._out_tail = self._err_tail = b""
        self._pending = bytearray()
        self._closing = self._overlong = self._over = False
        self._raise_oom_score()
        self._loop.add_reader(self._stdout.fileno(), self._read_out)
        self._loop.add_reader(self._stderr.fileno(), self._read_err)
        self._watch_exit()

    @property
    def pid(self) -> int:
        return self._popen.pid

    # -- exit

    def _raise_oom_score(self) -> None:
        try:
            with open(f"/proc/{self.pid}/oom_score_adj", "w", encoding="ascii") as stream:
                stream.write(str(OOM_SCORE_ADJ))
        except OSError as error:
            _logger.debug("oom_score_adj of the engine stays as it is: %s", error.strerror)

    def _watch_exit(self) -> None:
        self._pidfd: int | None
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:
            self._pidfd = None
            self._loop.call_later(EXIT_POLL_S, self._poll_exit)
        else:
            self._loop.add_reader(self._pidfd, self._exited)

    def _poll_exit(self) -> None:
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            self._loop.call_later(EXIT_POLL_S, self._poll_exit)
        else:
            self._exited()

    def _exited(self) -> None:
        # The group goes first: while the leader is not waited for, its number cannot belong to another group.
        self.signal(signal.SIGKILL)
        code = self._popen.wait()
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._drain(self._read_out)
        self._drain(self._read_err)
        self._over = True
        for stream in (self._stdin, self._stdout, self._stderr):
            if not stream.closed:
                self._loop.remove_reader(stream.fileno())
                self._loop.remove_writer(stream.fileno())
                stream.close()
        if self._err_tail:
            self._listener.child_error_line(self._err_tail.decode("utf-8", "replace"))
        self._listener.child_exited(code)

    @staticmethod
    def _drain(read: Callable[[], int]) -> None:
        taken = 0
        while taken < LAST_WORDS_LIMIT:
            count = read()
            if count == 0:
                return
            taken += count

    # -- output

    def _take(self, descriptor: int) -> bytes | None:
        """What a pipe holds now; empty at its end; None when it holds nothing yet."""
        try:
            return os.read(descriptor, READ_SIZE)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _read_out(self) -> int:
        data = self._take(self._stdout.fileno())
        if not data:
            if data is not None:
                self._loop.remove_reader(self._stdout.fileno())
            return 0
        if self._overlong:
            return len(data)
        lines = (self._out_tail + data if self._out_tail else data).split(b"\n")
        self._out_tail = lines.pop()
        if lines:
            self._listener.child_lines(lines)
        if len(self._out_tail) > LINE_LIMIT:
            self._overlong, self._out_tail = True, b""
            self._listener.child_overlong()
        return len(data)

    def _read_err(self) -> int:
        data = self._take(self._stderr.fileno())
        if not data:
            if data is not None:
                self._loop.remove_reader(self._stderr.fileno())
            return 0
        lines = (self._err_tail + data).split(b"\n")
        self._err_tail = lines.pop()
        if len(self._err_tail) > ERROR_LINE_LIMIT:
            lines.append(self._err_tail)
            self._err_tail = b""
        for line in lines:
            self._listener.child_error_line(line[:ERROR_LINE_LIMIT].decode("utf-8", "replace"))
        return len(data)

    # -- input

    def write(self, data: bytes) -> None:
        if self._over or self._closing or self._stdin.closed:
            return
        self._pending += data
        self._flush()

    def close_input(self) -> None:
        if not self._closing and not self._stdin.closed:
            self._closing = True
            self._flush()

    def _flush(self) -> None:
        try:
            while self._pending:
                del self._pending[: os.write(self._stdin.fileno(), self._pending[:READ_SIZE])]
        except BlockingIOError:
            self._loop.add_writer(self._stdin.fileno(), self._flush)
            return
        except OSError:  # a broken pipe: the exit will tell
            self._pending.clear()
        self._loop.remove_writer(self._stdin.fileno())
        if self._closing:
            self._stdin.close()

    def signal(self, number: int) -> None:
        if not self._over:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)
