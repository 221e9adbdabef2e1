from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from stratad.child import Command, Effects, real_effects
from stratad.engine_protocol import LINE_LIMIT, Answer, Err, SlotToken, StatLine
from stratad.settings import BY_NAME, Effective, Settings
from stratad.supervisor import (
    BACKOFF_MOST_S,
    RESTART_TEXT,
    CommandError,
    EngineState,
    Supervisor,
    backoff,
    exit_text,
)
from stratad.types import EngineFacts

from tests.daemon.virtual import PaperChild, World, settle

FAKE = [sys.executable, str(Path(__file__).parents[1] / "fake_engine" / "__main__.py")]


def limits(**values: float) -> Settings:
    return Settings({name: Effective(BY_NAME[name].check(value)) for name, value in values.items()})


class Watcher:
    """Writes down what the supervisor tells the scheduler."""

    def __init__(self) -> None:
        self.readies: list[EngineFacts] = []
        self.answers: list[Answer] = []
        self.downs: list[tuple[str, bool]] = []
        self.plans: list[bool] = []

    def engine_ready(self, facts: EngineFacts) -> None:
        self.readies.append(facts)

    def engine_answers(self, answers: list[Answer]) -> None:
        self.answers += answers

    def engine_down(self, reason: str, permanent: bool, planned: bool) -> None:
        self.plans.append(planned)
        self.downs.append((reason, permanent))


class Case:
    """A supervisor in a world of paper."""

    def __init__(self, settings: Settings, on_spawn: Callable[[PaperChild], None]) -> None:
        self.world = World(on_spawn)
        self.watcher = Watcher()
        self.states: list[str] = []
        self.supervisor = Supervisor(
            lambda: Command(["engine"], {}), settings, self.world.effects(), self.watcher,
            lambda: self.states.append(self.supervisor.state.value),
        )  # fmt: skip

    @property
    def child(self) -> PaperChild:
        return self.world.child

    @property
    def first(self) -> PaperChild:
        return self.world.children[0]

    def state(self) -> EngineState:
        return self.supervisor.state

    async def ready(self) -> None:
        await settle()
        self.child.say("INFO arch=fake", "READY 4096 stop")
        await settle()


@asynccontextmanager
async def running(
    settings: Settings | None = None, on_spawn: Callable[[PaperChild], None] = lambda _child: None
) -> AsyncIterator[Case]:
    case = Case(settings or limits(), on_spawn)
    task = asyncio.create_task(case.supervisor.run())
    await settle()
    yield case
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


# -- loading


async def test_loading_shows_its_progress_and_ends_in_ready() -> None:
    async with running() as case:
        assert case.state() is EngineState.STARTING
        case.child.say("INFO engine=0.1.0 arch=qwen35moe", "INFO load_percent=40")
        assert case.state() is EngineState.LOADING and case.supervisor.load_percent == 40
        case.child.say("INFO identity=00ff", "READY 4096 stop")
        assert case.state() is EngineState.READY
        facts = case.watcher.readies[0]
        assert facts.max_context == 4096
        assert facts.info == {"engine": "0.1.0", "arch": "qwen35moe", "identity": "00ff"}
        assert list(dict.fromkeys(case.states)) == ["starting", "loading", "ready"]


async def test_an_engine_that_is_never_ready_is_killed_and_started_again() -> None:
    async with running(limits(ready_timeout_s=20)) as case:
        await case.world.time.advance(19.9)
        assert case.child.signals == []
        await case.world.time.advance(0.2)
        assert case.child.signals == [signal.SIGKILL]
        assert case.state() is EngineState.RESTARTING
        assert "not ready within 20 s" in case.supervisor.reason
        await case.world.time.advance(1)
        assert len(case.world.children) == 2


async def test_without_a_ready_limit_the_engine_may_load_for_hours() -> None:
    async with running(limits(ready_timeout_s=0)) as case:
        await case.world.time.advance(36_000)
        assert case.state() is EngineState.STARTING and not case.child.signals


@pytest.mark.parametrize("code", [2, 78])
async def test_a_failure_that_would_come_again_is_not_tried_again(code: int) -> None:
    async with running() as case:
        case.child.listener.child_error_line("the file is cut short")
        case.child.say("ERR model_format tensor 3 lies beyond the end")
        case.child.exit(code)
        await settle()
        assert case.state() is EngineState.FAILED and case.supervisor.permanent_at_start
        assert case.watcher.downs == [
            (
                f"the engine could not load the model: exit code {code} "
                "(model_format: tensor 3 lies beyond the end)", True,
            )
        ]  # fmt: skip
        last_exit = case.supervisor.last_exit
        assert last_exit is not None and last_exit["code"] == code and last_exit["stderr"] == ["the file is cut short"]
        await case.world.time.advance(3600)
        assert len(case.world.children) == 1
        case.supervisor.retry()
        await settle()
        assert len(case.world.children) == 2


def end_soon(child: PaperChild) -> None:
    asyncio.get_running_loop().call_soon(child.exit, 1)


async def test_a_failure_that_may_pass_is_tried_again_with_growing_pauses() -> None:
    async with running(on_spawn=end_soon) as case:
        starts = []
        for _ in range(600):
            await case.world.time.advance(1.0)
            starts.append(len(case.world.children))
        assert starts[0] == 3  # at 0, 0.25 and 0.75 s
        assert starts[59] == 8  # ... 1.75, 3.75, 7.75, 15.75, 31.75
        assert starts[-1] - starts[-1 - int(3 * BACKOFF_MOST_S)] == 3
        assert case.state() is EngineState.RESTARTING


def test_the_pause_is_capped() -> None:
    assert [backoff(number) for number in (0, 1, 2, 3)] == [0.25, 0.25, 0.5, 1.0]
    assert backoff(10) == backoff(10**6) == BACKOFF_MOST_S


@pytest.mark.parametrize(
    ("number", "state"), [(errno.ENOENT, EngineState.FAILED), (errno.ENOMEM, EngineState.RESTARTING)]
)
async def test_a_program_that_cannot_be_started(number: int, state: EngineState) -> None:
    def refuse(_child: PaperChild) -> None:
        raise OSError(number, os.strerror(number))

    async with running(on_spawn=refuse) as case:
        assert case.state() is state
        assert case.supervisor.reason == f"engine cannot be started: {os.strerror(number)}"


async def test_a_command_that_cannot_be_made_is_a_lasting_failure() -> None:
    def no_command() -> Command:
        raise CommandError("model must be set")

    supervisor = Supervisor(no_command, limits(), World().effects(), Watcher())
    task = asyncio.create_task(supervisor.run())
    await settle()
    assert (supervisor.state, supervisor.reason) == (EngineState.FAILED, "model must be set")
    await supervisor.stop()
    await asyncio.wait_for(task, 1)


async def test_an_engine_that_reports_failure_but_does_not_end_is_killed() -> None:
    async with running(limits(stop_timeout_s=5)) as case:
        case.child.say("ERR no_memory 3 GiB are missing")
        await settle()
        assert case.child.input_closed
        await case.world.time.advance(5.1)
        assert case.child.signals == [signal.SIGKILL]
        assert "no_memory: 3 GiB are missing" in case.supervisor.reason


async def test_a_token_before_ready_is_a_fault() -> None:
    async with running() as case:
        case.child.say("BT 0 5")
        await settle()
        assert case.child.signals == [signal.SIGKILL]
        assert case.watcher.answers == []


# -- running


async def test_answers_are_passed_on_and_the_rest_is_not() -> None:
    async with running() as case:
        await case.ready()
        case.child.say("BT 0 5", "what is this", "INFO later=1", 'STAT {"windows": 3}', "BT 0 6", "ERR bad_ids no")
        assert case.watcher.answers == [
            SlotToken(0, 5), StatLine({"windows": 3}), SlotToken(0, 6), Err("bad_ids", "no"),
        ]  # fmt: skip
        assert case.supervisor.engine_stat == {"windows": 3}


@pytest.mark.parametrize("line", ["BT 0 x", "BDONE 0 1", "READY 5"])
async def test_a_line_that_cannot_be_kills_the_engine_and_nothing_after_it_counts(line: str) -> None:
    async with running() as case:
        await case.ready()
        case.child.say("BT 0 1", line)
        case.child.say("BT 0 2")
        await settle()
        assert SlotToken(0, 2) not in case.watcher.answers
        assert case.child.signals == [signal.SIGKILL]
        assert "line that cannot be" in case.watcher.downs[0][0]


async def test_an_exit_is_told_at_once_and_the_next_engine_comes() -> None:
    async with running() as case:
        await case.ready()
        case.child.exit(-signal.SIGSEGV)
        assert case.watcher.downs == [("the engine ended: killed by SIGSEGV", False)]
        assert case.state() is EngineState.RESTARTING and case.supervisor.pid is None
        await case.world.time.advance(0.3)
        await case.ready()
        assert case.state() is EngineState.READY
        assert (case.supervisor.restarts, len(case.watcher.readies)) == (1, 2)


async def test_the_engines_own_reason_is_kept() -> None:
    async with running() as case:
        await case.ready()
        case.child.say("ERR bad_ids a refused request is no reason")
        case.child.say("ERR internal the window failed")
        case.child.exit(1)
        assert case.watcher.downs[0][0] == "the engine ended: exit code 1 (internal: the window failed)"


async def test_a_lasting_failure_later_on_leaves_the_daemon_up() -> None:
    async with running() as case:
        await case.ready()
        case.child.exit(78)
        await settle()
        assert case.state() is EngineState.FAILED and not case.supervisor.permanent_at_start


async def test_an_engine_that_served_long_is_started_again_soon() -> None:
    async with running(limits(stall_limit_s=0)) as case:
        for _ in range(6):
            await case.ready()
            case.child.exit(1)
            await case.world.time.advance(BACKOFF_MOST_S)
        await case.ready()
        await case.world.time.advance(61)
        case.child.exit(1)
        await case.world.time.advance(0.3)
        assert len(case.world.children) == 8


# -- silence


async def test_silence_with_a_request_running_is_a_stall() -> None:
    async with running(limits(stall_limit_s=8)) as case:
        await case.ready()
        case.supervisor.expect(8)
        await case.world.time.advance(7)
        case.child.say("BT 0 1")
        await case.world.time.advance(7)
        assert not case.first.signals and case.supervisor.silent_s == pytest.approx(7)
        await case.world.time.advance(3)
        assert case.first.signals == [signal.SIGKILL]
        assert "silent for" in case.watcher.downs[0][0]


async def test_more_silence_is_allowed_where_it_is_asked_for() -> None:
    async with running(limits(stall_limit_s=8)) as case:
        await case.ready()
        case.supervisor.expect(100)
        await case.world.time.advance(99)
        assert not case.first.signals
        case.supervisor.expect(8)
        await case.world.time.advance(2)
        assert case.first.signals == [signal.SIGKILL]


async def test_no_limit_means_none() -> None:
    async with running(limits(stall_limit_s=0)) as case:
        await case.ready()
        case.supervisor.expect(0)
        await case.world.time.advance(1000)
        assert not case.first.signals


async def test_an_idle_engine_is_asked_now_and_then_and_killed_if_it_hangs() -> None:
    async with running(limits(stall_limit_s=9)) as case:
        await case.ready()
        await case.world.time.advance(5)
        assert case.first.heard == ["STAT"]
        case.child.say("STAT {}")
        await case.world.time.advance(5)
        assert case.first.heard == ["STAT", "STAT"] and not case.first.signals
        await case.world.time.advance(12)
        assert case.first.signals == [signal.SIGKILL]
        assert "no answer to STAT" in case.watcher.downs[0][0]


async def test_a_stopped_request_must_end_in_time_even_if_it_goes_on_talking() -> None:
    async with running(limits(stall_limit_s=8)) as case:
        await case.ready()
        case.supervisor.expect(8)
        case.supervisor.expect(8, case.world.time.now() + 8)
        for _ in range(9):
            case.child.say("BT 0 1")
            await case.world.time.advance(1)
        await case.world.time.advance(1.1)
        assert case.first.signals == [signal.SIGKILL]
        assert "did not end in time" in case.watcher.downs[0][0]


async def test_a_daemon_that_was_held_up_does_not_blame_the_engine() -> None:
    async with running(limits(stall_limit_s=8)) as case:
        await case.ready()
        case.supervisor.expect(8)
        case.world.time.jump(3600)
        await case.world.time.advance(1)
        assert not case.first.signals


# -- stopping


async def test_stopping_asks_first_and_kills_later() -> None:
    async with running(limits(stop_timeout_s=5)) as case:
        await case.ready()
        stop = asyncio.create_task(case.supervisor.stop())
        await settle()
        assert case.state() is EngineState.STOPPING
        assert (case.child.heard, case.child.input_closed) == (["QUIT"], True)
        assert case.child.signals == [signal.SIGTERM]
        await case.world.time.advance(5.1)
        assert case.child.signals == [signal.SIGTERM, signal.SIGKILL]
        await asyncio.wait_for(stop, 1)
        await settle()
        assert case.state() is EngineState.STOPPED
        assert len(case.world.children) == 1


async def test_an_engine_that_ends_by_itself_is_not_killed() -> None:
    async with running() as case:
        await case.ready()
        case.child.dies_of.add(signal.SIGTERM)
        await asyncio.wait_for(case.supervisor.stop(), 1)
        assert case.child.signals == [signal.SIGTERM]


@pytest.mark.parametrize("wait_s", [0.0, 0.4])
async def test_stopping_while_loading_or_pausing(wait_s: float) -> None:
    async with running() as case:
        case.child.dies_of.add(signal.SIGTERM)
        if wait_s:
            case.child.exit(1)
            await settle()
        await asyncio.wait_for(case.supervisor.stop(), 1)
        await settle()
        assert case.state() is EngineState.STOPPED
        await case.world.time.advance(100)
        assert len(case.world.children) == 1


async def test_a_process_that_cannot_even_be_killed_does_not_hold_the_daemon() -> None:
    async with running(limits(stop_timeout_s=5)) as case:
        await case.ready()
        case.child.dies_of.clear()
        stop = asyncio.create_task(case.supervisor.stop())
        await case.world.time.advance(20)
        assert stop.done()


# -- starting again as asked


async def test_a_restart_that_was_asked_for_is_no_failure() -> None:
    async with running(limits(stop_timeout_s=5)) as case:
        await case.ready()
        case.supervisor.expect(8)
        restart = asyncio.create_task(case.supervisor.restart())
        await settle()
        assert case.state() is EngineState.RESTARTING
        assert (case.first.heard, case.first.signals) == (["QUIT"], [signal.SIGTERM])
        case.first.say("BT 0 5", "nonsense that would have it killed", "READY 1 stop")
        assert case.watcher.answers == []
        case.first.exit(0)
        await asyncio.wait_for(restart, 1)
        await case.world.time.advance(0)
        await case.ready()
        assert len(case.world.children) == 2 and case.state() is EngineState.READY
        assert (case.supervisor.failures, case.supervisor.restarts) == (0, 1)
        assert case.watcher.downs == [(RESTART_TEXT, False)] and case.watcher.plans == [True]


async def test_an_engine_that_does_not_make_room_for_the_next_is_killed() -> None:
    async with running(limits(stop_timeout_s=5, stall_limit_s=2)) as case:
        await case.ready()
        case.supervisor.expect(2)
        restart = asyncio.create_task(case.supervisor.restart())
        await case.world.time.advance(4.9)
        assert case.first.signals == [signal.SIGTERM]  # its silence is nothing to kill it for
        await case.world.time.advance(0.2)
        assert case.first.signals == [signal.SIGTERM, signal.SIGKILL]
        await asyncio.wait_for(restart, 1)
        await case.ready()
        assert case.state() is EngineState.READY and case.supervisor.failures == 0


@pytest.mark.parametrize("code", [1, 78])
async def test_asked_for_while_no_engine_runs_it_starts_one_at_once(code: int) -> None:
    async with running() as case:
        for _ in range(4):
            if len(case.world.children) < 4 and case.state() is not EngineState.FAILED:
                case.child.exit(code)
                await settle()
                await case.supervisor.restart()
                await settle()
        assert len(case.world.children) >= 2 and case.state() is EngineState.STARTING


async def test_asked_for_while_stopping_nothing_starts() -> None:
    async with running() as case:
        await case.ready()
        case.child.dies_of.add(signal.SIGTERM)
        await case.supervisor.stop()
        await case.supervisor.restart()
        await case.world.time.advance(100)
        assert len(case.world.children) == 1 and case.state() is EngineState.STOPPED


async def test_stopping_amid_a_restart_stops() -> None:
    async with running(limits(stop_timeout_s=5)) as case:
        await case.ready()
        restart = asyncio.create_task(case.supervisor.restart())
        await settle()
        stop = asyncio.create_task(case.supervisor.stop())
        await settle()
        case.child.exit(0)
        await asyncio.wait_for(asyncio.gather(restart, stop), 1)
        await case.world.time.advance(100)
        assert len(case.world.children) == 1 and case.state() is EngineState.STOPPED


def test_exits_in_words() -> None:
    assert exit_text(3) == "exit code 3"
    assert exit_text(-9) == "killed by SIGKILL"
    assert exit_text(-250) == "killed by signal 250"


# -- real processes


class Real:
    """A supervisor with the fake engine as a real process."""

    def __init__(self, *flags: str, **values: float) -> None:
        self.watcher = Watcher()
        self.changed = asyncio.Event()
        self.supervisor = Supervisor(
            lambda: Command([*FAKE, *flags], dict(os.environ)), limits(**values), self.effects(), self.watcher,
            self.changed.set,
        )  # fmt: skip

    @staticmethod
    def effects() -> Effects:
        return real_effects()

    async def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> float:
        """Wait until it holds; returns the seconds that took."""
        started = time.monotonic()
        while not condition():
            assert time.monotonic() - started < seconds, "it did not happen in time"
            await asyncio.sleep(0.002)
        return time.monotonic() - started

    async def state(self, state: EngineState) -> float:
        return await self.until(lambda: self.supervisor.state is state)


@asynccontextmanager
async def real(*flags: str, **values: float) -> AsyncIterator[Real]:
    case = Real(*flags, **values)
    task = asyncio.create_task(case.supervisor.run())
    try:
        yield case
    finally:
        await case.supervisor.stop(0.5)
        await asyncio.wait_for(task, 5)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stream:
            return stream.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_real_load_answer_and_stop() -> None:
    async with real("--load-s", "0.1", "--stderr-lines", "300", "--half-lines") as case:
        await case.state(EngineState.READY)
        pid = case.supervisor.pid
        assert pid is not None and os.getsid(pid) == pid and os.getpgid(pid) == pid
        case.supervisor.expect(5)
        case.supervisor.send(b"BGEN 0 3 5,6,7\n")
        await case.until(lambda: len(case.watcher.answers) >= 7)
        assert [answer.id for answer in case.watcher.answers if isinstance(answer, SlotToken)] == [8, 9, 10]
        await case.until(lambda: len(case.supervisor.stderr) == 200)
        assert case.supervisor.stderr[-1] == "log line 299"
        await case.supervisor.stop()
        assert not alive(pid) and case.supervisor.last_exit is not None
        assert case.supervisor.last_exit["code"] == 0, case.supervisor.last_exit


async def test_real_exit_is_seen_within_a_tenth_of_a_second_with_all_that_was_said() -> None:
    async with real("--exit-after", "2", "--exit-code", "3", "--cut-line") as case:
        await case.state(EngineState.READY)
        case.supervisor.send(b"BGEN 0 5 1\n")
        await case.until(lambda: bool(case.watcher.downs))
        assert [answer.id for answer in case.watcher.answers if isinstance(answer, SlotToken)] == [2, 3]
        assert case.watcher.downs == [("the engine ended: exit code 3", False)]
        await case.state(EngineState.READY)
        assert case.supervisor.pid is not None
        os.kill(case.supervisor.pid, signal.SIGKILL)
        assert await case.until(lambda: len(case.watcher.downs) == 2) < 0.1


async def test_real_grandchild_that_keeps_the_pipes_open_holds_nothing_up_and_is_ended() -> None:
    async with real("--grandchild") as case:
        await case.state(EngineState.READY)
        pid = case.supervisor.pid
        assert pid is not None
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as stream:
            grandchild = int(stream.read().split()[0])
        os.kill(pid, signal.SIGKILL)
        assert await case.until(lambda: bool(case.watcher.downs)) < 0.1
        await case.until(lambda: not alive(grandchild), 2)


async def test_real_sigterm_ignored_ends_in_sigkill() -> None:
    async with real("--ignore-sigterm") as case:
        await case.state(EngineState.READY)
        pid = case.supervisor.pid
        assert pid is not None
        started = time.monotonic()
        await case.supervisor.stop(0.2)
        assert 0.2 <= time.monotonic() - started < 1.0
        assert not alive(pid)


async def test_real_stopped_process_counts_as_silent() -> None:
    async with real(stall_limit_s=0.3) as case:
        await case.state(EngineState.READY)
        assert case.supervisor.pid is not None
        os.kill(case.supervisor.pid, signal.SIGSTOP)
        case.supervisor.expect(0.3)
        await case.until(lambda: bool(case.watcher.downs), 2)
        assert "silent for" in case.watcher.downs[0][0]


async def test_real_line_without_an_end_is_bounded() -> None:
    async with real("--huge-line") as case:
        await case.state(EngineState.READY)
        case.supervisor.send(b"BGEN 0 1 1\n")
        await case.until(lambda: bool(case.watcher.downs))
        assert "line without an end" in case.watcher.downs[0][0]
        assert LINE_LIMIT == 1 << 20


async def test_real_long_request_does_not_block_the_loop() -> None:
    async with real("--read-delay-s", "0.2", "--chunk", "1000000") as case:
        await case.state(EngineState.READY)
        ids = ",".join(["4095"] * 200_000).encode()
        started = time.monotonic()
        case.supervisor.send(b"BGEN 0 1 " + ids + b"\n")
        assert time.monotonic() - started < 0.1
        await case.until(lambda: any(isinstance(answer, SlotToken) for answer in case.watcher.answers))


async def test_real_engine_is_the_better_victim_and_knows_nothing_of_systemd() -> None:
    async with real() as case:
        await case.state(EngineState.READY)
        with open(f"/proc/{case.supervisor.pid}/oom_score_adj", encoding="ascii") as stream:
            assert int(stream.read()) >= 500
