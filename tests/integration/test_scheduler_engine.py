"""Supervisor and scheduler with the real engine and the embedded model."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from stratad.child import real_effects
from stratad.errors import StrataError
from stratad.launch import engine_command, engine_path
from stratad.scheduler import ScheduledGeneration, Scheduler
from stratad.settings import BY_NAME, Effective, Settings
from stratad.supervisor import EngineState, Supervisor
from stratad.types import Done, Event, GenRequest, Progress, Sampling, Token

pytestmark = pytest.mark.skipif(engine_path(Settings()) is None, reason="strata-engine is not built")

MODEL = str(Path(__file__).parents[2] / "native" / "models" / "strata-tiny-moe-Q4_0.gguf")
PROMPT = (8186, 284, 198, 500, 501, 502)
GREEDY = Sampling(temperature=0.0, seed=1)


def limits(**values: object) -> Settings:
    values = {"model": MODEL, **values}
    return Settings({name: Effective(BY_NAME[name].check(value)) for name, value in values.items()})


@asynccontextmanager
async def engine(**values: object) -> AsyncIterator[tuple[Scheduler, Supervisor]]:
    effects, settings = real_effects(), limits(**values)
    scheduler = Scheduler(settings, effects)
    supervisor = Supervisor(lambda: engine_command(settings, os.environ), settings, effects, scheduler)
    scheduler.attach(supervisor)
    tasks = [asyncio.create_task(supervisor.run()), asyncio.create_task(scheduler.run())]
    try:
        await until(supervisor, EngineState.READY)
        yield scheduler, supervisor
    finally:
        await supervisor.stop()
        tasks[1].cancel()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
        assert supervisor.last_exit is not None and supervisor.last_exit["signal"] in (None, signal.SIGKILL)


async def until(supervisor: Supervisor, state: EngineState) -> None:
    async with asyncio.timeout(20):
        while supervisor.state is not state:
            assert supervisor.state is not EngineState.FAILED, supervisor.reason
            await asyncio.sleep(0.01)


async def collect(generation: ScheduledGeneration) -> list[Event]:
    async with asyncio.timeout(30):
        return [event async for event in generation]


def ids(events: list[Event]) -> list[int]:
    return [event.id for event in events if isinstance(event, Token)]


async def test_facts_and_a_whole_answer() -> None:
    async with engine() as (scheduler, supervisor):
        assert supervisor.facts is not None and supervisor.facts.max_context == 4096
        assert supervisor.facts.info["arch"] == "qwen35moe" and len(supervisor.facts.info["identity"]) == 32
        events = await collect(scheduler.submit(GenRequest(PROMPT, 12, GREEDY)))
        assert isinstance(events[0], Progress) and events[0].total == len(PROMPT)
        done = events[-1]
        assert isinstance(done, Done) and done.generated == len(ids(events)) and done.prompt_tokens == len(PROMPT)
        again = await collect(scheduler.submit(GenRequest(PROMPT, 12, GREEDY)))
        assert ids(again) == ids(events)


async def test_every_sampling_parameter_is_understood_and_a_seed_repeats() -> None:
    bias = {7: -100.0, 9: 1.5}
    everything = Sampling(0.9, 50, 0.95, 0.01, 1.1, 0.1, 0.1, 32, seed=2**64 - 1, choice=3, logit_bias=bias, logprobs=3)
    async with engine() as (scheduler, _):
        first = await collect(scheduler.submit(GenRequest(PROMPT, 8, everything)))
        second = await collect(scheduler.submit(GenRequest(PROMPT, 8, everything)))
        assert ids(first) == ids(second)
        tokens = [event for event in first if isinstance(event, Token)]
        assert all(token.logprob is not None and token.logprob <= 0 and len(token.top) == 3 for token in tokens)


async def test_refusals_leave_the_engine_in_step() -> None:
    async with engine() as (scheduler, supervisor):
        for request, name in (
            (GenRequest((1, 999_999), 4, GREEDY), "invalid_value"),
            (GenRequest(tuple(range(1, 4200)), 4, GREEDY), "context_length_exceeded"),
        ):
            with pytest.raises(StrataError) as caught:
                await collect(scheduler.submit(request))
            assert caught.value.name == name
        assert len(ids(await collect(scheduler.submit(GenRequest(PROMPT, 4, GREEDY))))) == 4
        assert supervisor.restarts == 0


async def test_cancel_while_decoding_and_while_reading() -> None:
    keep_on = Sampling(temperature=0.0, seed=1, logit_bias={8184: -100.0, 8185: -100.0, 8186: -100.0, 8187: -100.0})
    async with engine() as (scheduler, _):
        alone = ids(await collect(scheduler.submit(GenRequest(PROMPT, 20, GREEDY))))
        for prompt, max_new in ((PROMPT, 3000), (tuple(range(100, 3600)), 100)):
            cancelled = scheduler.submit(GenRequest(prompt, max_new, keep_on))
            await anext(cancelled)
            waiting = scheduler.submit(GenRequest(PROMPT, 20, GREEDY))
            started = time.monotonic()
            await cancelled.cancel()
            events = await collect(cancelled)
            assert isinstance(events[-1], Done) and events[-1].finish == "cancel"
            assert time.monotonic() - started < 2
            assert ids(await collect(waiting)) == alone


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_killed_or_frozen_engine_is_replaced_and_gives_the_same_answer(number: signal.Signals) -> None:
    async with engine(stall_limit_s=1.0) as (scheduler, supervisor):
        alone = ids(await collect(scheduler.submit(GenRequest(PROMPT, 20, GREEDY))))
        broken = scheduler.submit(GenRequest(PROMPT, 3000, Sampling(temperature=1.0, seed=3)))
        waiting = scheduler.submit(GenRequest(PROMPT, 20, GREEDY))
        await anext(broken)
        assert supervisor.pid is not None
        os.kill(supervisor.pid, number)
        with pytest.raises(StrataError) as caught:
            await collect(broken)
        assert caught.value.name == "engine_failed"
        assert ids(await collect(waiting)) == alone
        assert supervisor.restarts == 1


async def test_an_idle_engine_answers_stat_and_stays() -> None:
    async with engine(stall_limit_s=0.6) as (_, supervisor):
        await asyncio.sleep(1.5)
        assert supervisor.engine_stat["phase"] == "idle" and supervisor.restarts == 0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_context": 9999}, "allow-untrained-context"),
        ({"engine_args": ["--frobnicate"]}, "frobnicate"),
        ({"model": __file__}, "model_format"),
    ],
)
async def test_what_can_never_load_is_reported_once(values: dict[str, object], words: str) -> None:
    effects, settings = real_effects(), limits(**values)
    scheduler = Scheduler(settings, effects)
    supervisor = Supervisor(lambda: engine_command(settings, os.environ), settings, effects, scheduler)
    scheduler.attach(supervisor)
    task = asyncio.create_task(supervisor.run())
    async with asyncio.timeout(20):
        while supervisor.state is not EngineState.FAILED:
            await asyncio.sleep(0.01)
    assert supervisor.permanent_at_start
    assert words in supervisor.reason + " ".join(supervisor.stderr)
    await supervisor.stop()
    await asyncio.wait_for(task, 5)


def test_the_embedded_model_is_found() -> None:
    command = engine_command(Settings(), {"NOTIFY_SOCKET": "/x", "HOME": "/h", "STRATA_ISA": "scalar"})
    assert Path(command.argv[2]).name == "strata-tiny-moe-Q4_0.gguf"
    assert command.env == {"HOME": "/h"}
