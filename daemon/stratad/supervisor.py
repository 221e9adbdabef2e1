"""Keeps one engine running: start, READY, silence, exit, stop order, start again.

    stopped ── start ──► starting ─► loading ─► ready ─┐
                             ▲          │         │    │ exit, stall, a line that cannot be read
                             │          ▼         ▼    │
                             └───── restarting ◄───────┘       (back-off, capped)
                                        │
                     exit 2 or 78 ──► failed      stop() from anywhere ──► stopping ──► stopped

An exit code of 2 (usage) or 78 (bad model or configuration) would come again at every start, so the engine is not
started again by itself: the daemon stays up and says so (`failed`), and a reload of the configuration tries again.
Only when the very first start fails so, `permanent_at_start` is set and the daemon itself ends with 78.

Every wait has a limit: loading (`ready_timeout_s`), running requests (`stall_limit_s` of silence, longer while a long
prompt is read), the end of a stopped request, the answer to STAT (an idle engine is asked now and then), stopping
(`stop_timeout_s`, then SIGKILL). An engine that served is started again at once the first time: requests wait for it.
Everything runs on the event loop; effects are injected.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from stratad.child import Child, Command, Effects
from stratad.engine_protocol import (
    Answer,
    Err,
    Info,
    Malformed,
    Quit,
    Ready,
    Stat,
    StatLine,
    Unknown,
    format_line,
    parse_answer,
)
from stratad.settings import Settings
from stratad.types import EngineFacts

_logger = logging.getLogger("stratad.supervisor")
_engine_logger = logging.getLogger("strata-engine")

STDERR_LINES = 200
BACKOFF_FIRST_S = 0.25
BACKOFF_MOST_S = 30.0
HEALTHY_S = 60.0  # an engine that served so long starts the back-off anew
KILL_WAIT_S = 10.0  # a killed process that does not end by then hangs in the kernel
PERMANENT_EXITS = frozenset({2, 78})
PERMANENT_ERRNOS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ENOEXEC, errno.ELOOP})
UNKNOWN_LINES_LOGGED = 5
STAT_FRESH_S = 1.0
RESTART_TEXT = "the engine is being started again, as was asked"


class EngineState(StrEnum):
    """Where the engine is in its life."""

    STOPPED = "stopped"
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"
    RESTARTING = "restarting"
    FAILED = "failed"


class EngineWatcher(Protocol):
    """Who uses the engine (the scheduler). Called on the event loop, never after an exit for the engine that ended."""

    def engine_ready(self, facts: EngineFacts) -> None:
        """The engine takes requests."""
        ...

    def engine_answers(self, answers: list[Answer]) -> None:
        """Lines of running requests and answers to STAT, in order, as many as had arrived."""
        ...

    def engine_down(self, reason: str, permanent: bool, planned: bool) -> None:
        """The engine ended; `permanent`: it will not be started again by itself; `planned`: it was asked to end."""
        ...


class CommandError(Exception):
    """There is no command to start, and trying again would not help: no program, no model."""


@dataclass(slots=True)
class _Life:
    """One engine process, from its start to its exit."""

    child: Child | None = None
    info: dict[str, str] = field(default_factory=dict)
    stat: Mapping[str, Any] = field(default_factory=dict)
    stat_at: float = 0.0
    error: Err | None = None
    ready_at: float | None = None
    exit_code: int | None = None
    permanent: bool = False
    kill_reason: str = ""
    planned: bool = False  # it ends because another is wanted in its place
    unknown_lines: int = 0
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    exited: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _Watch:
    """What the monitor looks at: when something was heard last, and what must happen by when."""

    heard_at: float = 0.0
    silence: float | None = None  # allowed now, seconds (0: any); None: the engine is idle
    end_by: float | None = None  # a stopped request must have ended by then
    asked_at: float | None = None  # a STAT question is open

    @property
    def busy(self) -> bool:
        """Whether requests run."""
        return self.silence is not None


def exit_text(code: int) -> str:
    """An exit code in words: `exit code 3`, `killed by SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def backoff(failures: int) -> float:
    """Seconds before the next start after so many lives in a row that did not last."""
    return float(min(BACKOFF_MOST_S, BACKOFF_FIRST_S * 2 ** min(max(0, failures - 1), 16)))


class Supervisor:
    """One engine at a time. `run()` is the task that keeps it; the rest may be called from the loop at any time."""

    def __init__(
        self,
        command: Callable[[], Command],
        settings: Settings,
        effects: Effects,
        watcher: EngineWatcher,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._command, self._settings, self._effects = command, settings, effects
        self._watcher, self._changed = watcher, changed
        self._life = _Life()
        self._watch = _Watch()
        self._stopping = asyncio.Event()
        self._retry = asyncio.Event()
        self._failures = 0
        self.state = EngineState.STOPPED
        self.reason = ""  # why it is restarting or failed
        self.load_percent: int | None = None
        self.restarts = 0
        self.last_exit: dict[str, object] | None = None
        self.facts: EngineFacts | None = None  # of the running engine, or of the last one that was ready
        self.permanent_at_start = False
        self.stderr: deque[str] = deque(maxlen=STDERR_LINES)

    # -- what others ask

    @property
    def pid(self) -> int | None:
        """Process id of the engine that runs."""
        running = self._life.child is not None and self._life.exit_code is None
        return self._life.child.pid if running and self._life.child else None

    @property
    def engine_stat(self) -> Mapping[str, Any]:
        """The engine's last STAT answer (it is asked while idle, and when somebody looks)."""
        return self._life.stat

    @property
    def failures(self) -> int:
        """Lives in a row that ended early."""
        return self._failures

    @property
    def silent_s(self) -> float | None:
        """Seconds since the engine was last heard, while something is expected of it."""
        expecting = self._watch.busy or self._watch.asked_at is not None
        return self._effects.now() - self._watch.heard_at if expecting and self.pid else None

    # -- what the scheduler does

    def send(self, line: bytes) -> None:
        """Write one protocol line; dropped when no engine runs."""
        if self._life.child is not None:
            self._life.child.write(line)

    def expect(self, silence: float | None, end_by: float | None = None) -> None:
        """What the engine owes now: a sign of life every `silence` seconds (0: never), the end of something stopped.

        None: nothing, no request runs.
        """
        if silence is None or not self._watch.busy:  # an idle engine has nothing to say
            self._watch.heard_at = self._effects.now()
        self._watch.silence, self._watch.end_by = silence, end_by

    def ask(self) -> bool:
        """Have the engine answer STAT. Returns False, and does nothing, while an answer is awaited already."""
        if self._watch.asked_at is not None or self.state is not EngineState.READY:
            return False
        self._watch.asked_at = self._effects.now()
        self.send(format_line(Stat()))
        return True

    def refresh_stat(self) -> None:
        """See to it that `engine_stat` is soon no older than `STAT_FRESH_S`."""
        if self._effects.now() - self._life.stat_at > STAT_FRESH_S:
            self.ask()

    def kill(self, reason: str) -> None:
        """End an engine that cannot be trusted any more; it is started again."""
        if self._life.child is not None and not self._life.exited.is_set() and not self._life.kill_reason:
            _logger.error("killing the engine: %s", reason)
            self._life.kill_reason = reason
            self._life.child.signal(signal.SIGKILL)

    def retry(self) -> None:
        """Try a failed engine again, or do not wait for the back-off."""
        self._retry.set()

    async def restart(self) -> None:
        """End the engine in an orderly way and start another; no failure of anybody. Returns when the old one is gone.

        What runs goes on in the new engine. One that waits to be started again, or has failed, is started now.
        """
        life = self._life
        if self._stopping.is_set() or life.planned:
            return
        if life.child is None or life.exited.is_set():
            self.retry()
            return
        _logger.info("ending the engine to start it again")
        life.planned = True
        self._watch = _Watch(heard_at=self._effects.now())
        self.reason = RESTART_TEXT
        self._set_state(EngineState.RESTARTING)
        await self._quit(life, self._settings.number("stop_timeout_s"))

    # -- life and death

    async def run(self) -> None:
        """Keep an engine running until `stop()`."""
        while not self._stopping.is_set():
            self._retry.clear()
            permanent = await self._live()
            if self._stopping.is_set():
                break
            await self._pause(permanent)
        self._set_state(EngineState.STOPPED)

    async def _pause(self, permanent: bool) -> None:
        once_only = self._failures == 1 and self._life.ready_at is not None  # requests wait for it
        at_once = permanent or self._life.planned or once_only
        delay = 0.0 if at_once else backoff(self._failures)
        if not permanent:
            _logger.warning("starting the engine again%s", f" in {delay:.2g} s" if delay else "")
        waits = (asyncio.ensure_future(self._stopping.wait()), asyncio.ensure_future(self._retry.wait()))
        timer = () if permanent else (asyncio.ensure_future(self._effects.sleep(delay)),)
        try:
            await asyncio.wait((*waits, *timer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*waits, *timer):
                task.cancel()
        if not self._stopping.is_set():
            self.restarts += 1

    async def _live(self) -> bool:
        """One life of the engine. Returns whether starting it again would be of no use."""
        life = self._life = _Life()
        self._watch = _Watch(heard_at=self._effects.now())
        self.load_percent = None
        self._set_state(EngineState.STARTING)
        try:
            command = self._command()
            life.child = self._effects.spawn(command, _Ears(self, life))
        except CommandError as error:
            return self._over(life, str(error), permanent=True)
        except OSError as error:
            text = f"{command.argv[0]} cannot be started: {error.strerror}"
            return self._over(life, text, permanent=error.errno in PERMANENT_ERRNOS)
        _logger.info("engine started, pid %d", life.child.pid)
        if not await self._until_ready(life):
            await self._wait_dead(life)
            return life.permanent
        monitor = asyncio.ensure_future(self._monitor(life))
        try:
            await life.exited.wait()
        finally:
            monitor.cancel()
            await asyncio.wait([monitor])  # awaiting the monitor itself could mistake our cancellation for its own
        return life.permanent

    async def _until_ready(self, life: _Life) -> bool:
        limit = self._settings.number("ready_timeout_s")
        if not await self._effects.wait(life.ready, limit):
            self.kill(f"not ready within {limit:g} s")
        return life.ready_at is not None

    async def _wait_dead(self, life: _Life) -> None:
        """See to it that an engine which failed to load really ends."""
        assert life.child is not None
        life.child.close_input()
        limit = self._settings.number("stop_timeout_s") or KILL_WAIT_S
        if not await self._effects.wait(life.exited, limit):
            self.kill("it failed to load but did not end")
            if not await self._effects.wait(life.exited, KILL_WAIT_S):
                _logger.error("the killed engine (pid %s) does not end; it hangs in the kernel", self.pid)
                await life.exited.wait()

    def exited(self, life: _Life, code: int) -> None:
        """The process of this life ended. All that follows from it happens at once, before anyone can send to it."""
        life.exit_code = code
        how = life.kill_reason or exit_text(code)
        if life.planned:
            text = RESTART_TEXT
        elif life.ready_at is None:
            cause = f" ({life.error.name}: {life.error.text})" if life.error else ""
            text = f"the engine could not load the model: {how}{cause}"
        else:
            cause = f" ({life.error.name}: {life.error.text})" if life.error and not life.kill_reason else ""
            text = f"the engine ended: {how}{cause}"
        own_end = not life.kill_reason and not life.planned
        self._over(life, text, permanent=code in PERMANENT_EXITS and own_end)
        life.exited.set()
        life.ready.set()

    def _over(self, life: _Life, reason: str, permanent: bool) -> bool:
        served = 0.0 if life.ready_at is None else self._effects.now() - life.ready_at
        self._failures = 0 if life.planned else 1 if served >= HEALTHY_S else self._failures + 1
        self.last_exit = {
            "reason": reason,
            "code": life.exit_code if life.exit_code is None or life.exit_code >= 0 else None,
            "signal": -life.exit_code if life.exit_code is not None and life.exit_code < 0 else None,
            "at": self._effects.wall(),
            "stderr": list(self.stderr)[-5:],
        }
        self._watch = _Watch()
        life.permanent = permanent
        if self._stopping.is_set():
            self._watcher.engine_down(reason, True, life.planned)
            return True
        if permanent and self.facts is None:
            self.permanent_at_start = True
        _logger.log(logging.ERROR if permanent else logging.INFO if life.planned else logging.WARNING, "%s", reason)
        self.reason = reason
        self._set_state(EngineState.FAILED if permanent else EngineState.RESTARTING)
        self._watcher.engine_down(reason, permanent, life.planned)
        return permanent

    async def stop(self, timeout_s: float | None = None) -> None:
        """End the engine: QUIT and SIGTERM, wait, SIGKILL. Returns when it is gone (or hangs in the kernel)."""
        self._stopping.set()
        life = self._life
        if life.child is None or life.exited.is_set():
            return
        self._set_state(EngineState.STOPPING)
        await self._quit(life, self._settings.number("stop_timeout_s") if timeout_s is None else timeout_s)

    async def _quit(self, life: _Life, limit: float) -> None:
        assert life.child is not None
        life.child.write(format_line(Quit()))
        life.child.close_input()
        life.child.signal(signal.SIGTERM)
        if limit > 0 and await self._effects.wait(life.exited, limit):
            return
        self.kill(f"it did not end within {limit:g} s")
        if not await self._effects.wait(life.exited, KILL_WAIT_S):
            _logger.error("the killed engine (pid %d) does not end; it hangs in the kernel", life.child.pid)

    # -- watching

    async def _monitor(self, life: _Life) -> None:
        while not life.exited.is_set():
            limit = self._settings.number("stall_limit_s")
            step = min(1.0, limit / 8) if limit > 0 else 1.0
            before = self._effects.now()
            await self._effects.sleep(step)
            now = self._effects.now()
            if now - before > 2 * step + 1:  # the daemon itself was held up; nobody could have been heard
                self._watch.heard_at = now
                self._watch.asked_at = None if self._watch.asked_at is None else now
            elif not life.exited.is_set() and not life.planned:
                self._check(now, limit)

    def _check(self, now: float, limit: float) -> None:
        watch = self._watch
        silent = now - watch.heard_at
        if watch.end_by is not None and now > watch.end_by:
            self.kill("a stopped request did not end in time")
        elif watch.silence is not None and 0 < watch.silence < silent:
            self.kill(f"silent for {silent:.3g} s with a request running")
        elif limit <= 0:
            return
        elif watch.asked_at is not None and now - watch.asked_at > max(limit, watch.silence or 0.0):
            self.kill(f"no answer to STAT for {now - watch.asked_at:.3g} s")
        elif not watch.busy and silent > limit / 3:
            self.ask()

    # -- what the engine says

    def heard(self, life: _Life, lines: list[bytes]) -> None:
        """Lines of the engine of this life, as they come from the pipe."""
        self._watch.heard_at = self._effects.now()
        if life.kill_reason or life.planned:
            return  # the last words of an engine that was killed, or is being replaced, belong to nobody
        answers = [parse_answer(line) for line in lines]
        if life.ready_at is None:
            answers = self._loading(life, answers)
        answers = [answer for answer in answers if not self._own(life, answer)]
        if answers and not life.kill_reason:
            self._watcher.engine_answers(answers)

    def _own(self, life: _Life, answer: Answer) -> bool:
        """Handle what does not belong to a request; returns whether it was that."""
        kind = type(answer)
        if kind is Malformed or kind is Ready:
            text = answer.reason if isinstance(answer, Malformed) else "READY twice"
            self.kill(f"it sent a line that cannot be: {text}")
        elif kind is Unknown:
            self._note_unknown(life, answer)
        elif isinstance(answer, Info):
            life.info.update(answer.values)
        else:
            if isinstance(answer, Err) and answer.name == "internal":
                life.error = answer  # the engine ends after it; other names refuse a request and no more
            elif isinstance(answer, StatLine):
                life.stat, life.stat_at = answer.values, self._effects.now()
                self._watch.asked_at = None
            return False
        return True

    def _note_unknown(self, life: _Life, answer: Answer) -> None:
        life.unknown_lines += 1
        if life.unknown_lines <= UNKNOWN_LINES_LOGGED:
            _logger.warning("the engine sent a line that is no protocol line (%d characters)", len(str(answer)))

    def _loading(self, life: _Life, answers: list[Answer]) -> list[Answer]:
        """Take the lines up to READY; returns those after it."""
        for position, answer in enumerate(answers):
            if isinstance(answer, Ready):
                self._ready(life, answer)
                return answers[position + 1 :]
            if isinstance(answer, Info):
                self._take_info(life, answer)
            elif isinstance(answer, Err):
                life.error = answer
                life.ready.set()  # there will be no READY; what is left is to end
            elif isinstance(answer, Unknown):
                self._note_unknown(life, answer)
            else:
                self.kill("it sent an answer before READY")
        return []

    def _take_info(self, life: _Life, answer: Info) -> None:
        values = dict(answer.values)
        percent = values.pop("load_percent", "")
        if percent.isdecimal():
            self.load_percent = min(100, int(percent))
        life.info.update(values)
        if self.state in (EngineState.STARTING, EngineState.LOADING):
            self._set_state(EngineState.LOADING)

    def _ready(self, life: _Life, answer: Ready) -> None:
        life.ready_at = self._effects.now()
        life.error = None
        self.load_percent = 100
        self.reason = ""
        self.facts = EngineFacts(answer.max_context, dict(life.info))
        life.ready.set()
        if not self._stopping.is_set():
            _logger.info("engine ready, context %d", answer.max_context)
            self._set_state(EngineState.READY)
            self._watcher.engine_ready(self.facts)

    def error_line(self, line: str) -> None:
        """A line of the engine's standard error: kept for the status, and logged."""
        self.stderr.append(line)
        _engine_logger.info("%s", line)

    def _set_state(self, state: EngineState) -> None:
        self.state = state
        self._changed()


class _Ears:
    """Passes a child's words on with the life they belong to."""

    def __init__(self, supervisor: Supervisor, life: _Life) -> None:
        self._supervisor, self._life = supervisor, life

    def child_lines(self, lines: list[bytes]) -> None:
        self._supervisor.heard(self._life, lines)

    def child_overlong(self) -> None:
        self._supervisor.kill("it sent a line without an end")

    def child_error_line(self, line: str) -> None:
        self._supervisor.error_line(line)

    def child_exited(self, code: int) -> None:
        self._supervisor.exited(self._life, code)
