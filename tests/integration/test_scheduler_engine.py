"""Supervisor and scheduler with the real engine and the embedded model."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
from stratad.child import real_effects
from stratad.errors import StrataError
from stratad.generation import ScheduledGeneration
from stratad.launch import engine_command, engine_path
from stratad.scheduler import Scheduler
from stratad.settings import BY_NAME, Effective, SettingError, Settings
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
    async with asyncio.timeout(60):
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


# -- several at once

NEVER = dict.fromkeys((8184, 8185, 8186, 8187), -100.0)  # so that answers are as long as they may be
MIXED = (
    GenRequest(PROMPT, 120, Sampling(0.0, logit_bias=NEVER)),
    GenRequest(tuple(range(900, 960)), 150, Sampling(1.0, seed=11, logit_bias=NEVER)),
    GenRequest(PROMPT[:3], 100, Sampling(0.8, 40, 0.95, seed=12, penalty_repeat=1.2, logprobs=2, logit_bias=NEVER)),
    GenRequest(tuple(range(2000, 2700)), 60, Sampling(0.0, penalty_present=0.5, logit_bias=NEVER)),
    GenRequest(PROMPT, 90, Sampling(1.0, seed=13, choice=1), tune={"spec_min_p": 0.9}),
    GenRequest(tuple(range(3000, 3100)), 80, Sampling(0.0, logit_bias=NEVER), tune={"spec_p_cum": 0.3}),
    GenRequest(tuple(range(900, 1000)), 70, Sampling(0.6, seed=14, penalty_freq=0.3, logit_bias=NEVER)),
    GenRequest(PROMPT[1:], 130, Sampling(1.0, min_p=0.05, seed=15, logprobs=0, logit_bias=NEVER)),
)


def said(events: list[Event]) -> list[tuple[int, float | None, tuple[tuple[int, float], ...]]]:
    """Tokens with everything that was said about them."""
    return [(event.id, event.logprob, event.top) for event in events if isinstance(event, Token)]


Said = list[list[tuple[int, float | None, tuple[tuple[int, float], ...]]]]


@pytest.fixture(scope="module")
def alone() -> Said:
    """The answers to MIXED, each asked by itself of an engine with one slot and no drafts."""

    async def ask_all() -> Said:
        async with engine(parallel=1, spec=0) as (scheduler, _):
            return [said(await collect(scheduler.submit(request))) for request in MIXED]

    return asyncio.run(ask_all())


async def test_as_many_slots_as_asked_for_and_no_more_than_fit() -> None:
    async with engine(parallel=64) as (scheduler, supervisor):
        assert supervisor.facts is not None and supervisor.facts.info["batch_slots"] == "64"
        assert scheduler.serving == len(scheduler.slots()) == 64
    async with engine(parallel=64, memory_mib=60, prompt_cache_mib=4) as (scheduler, _):
        assert 1 <= scheduler.serving < 64
        assert len(ids(await collect(scheduler.submit(GenRequest(PROMPT, 4, GREEDY))))) == 4


def test_99_slots_are_refused_by_name() -> None:
    with pytest.raises(SettingError, match="1 to 64"):
        BY_NAME["parallel"].check(99)


async def test_eight_at_once_get_what_each_gets_alone(alone: Said) -> None:
    async with engine(parallel=4) as (scheduler, supervisor):
        generations = [scheduler.submit(request) for request in MIXED]
        assert (scheduler.running, scheduler.queued) == (4, 4)
        answers = await asyncio.gather(*map(collect, generations))
        assert [said(answer) for answer in answers] == alone
        supervisor.refresh_stat()
        tally = scheduler.tally
        assert tally.output_tokens == sum(map(len, alone)) and tally.requests.finished == len(MIXED)
        assert sum(slot.offered for slot in tally.drafts) >= sum(slot.accepted for slot in tally.drafts) > 0
        for request, answer in zip(MIXED, answers, strict=True):
            done = answer[-1]
            assert isinstance(done, Done) and done.prompt_tokens == len(request.prompt_ids)


async def test_the_next_turn_goes_to_the_slot_that_holds_the_conversation() -> None:
    async with engine(parallel=4) as (scheduler, _):
        turns = [(PROMPT + tuple(range(100 * n, 100 * n + 60))) for n in range(1, 4)]
        first = [await collect(scheduler.submit(GenRequest(turn, 10, GREEDY))) for turn in turns]
        for turn, answer in zip(turns, first, strict=True):
            longer = (*turn, *ids(answer), 400, 401)
            done = (await collect(scheduler.submit(GenRequest(longer, 4, GREEDY))))[-1]
            assert isinstance(done, Done) and done.reused == len(turn) + len(ids(answer)) - 1


async def test_who_leaves_disturbs_nobody(alone: Said) -> None:
    """Leaving while decoding, while reading and while waiting; with four others all the time."""
    async with engine(parallel=4) as (scheduler, _):
        stay = [scheduler.submit(request) for request in (MIXED[1], MIXED[2])]
        decoding = scheduler.submit(GenRequest(PROMPT, 3000, Sampling(0.0, logit_bias=NEVER)))
        reading = scheduler.submit(GenRequest(tuple(range(100, 3900)), 100, GREEDY))
        waiting = [scheduler.submit(request) for request in (MIXED[0], MIXED[4])]
        async for event in decoding:
            if isinstance(event, Token):
                break
        started = scheduler.tally.requests.started
        await waiting[1].cancel()
        assert scheduler.tally.requests.started == started
        for generation in (decoding, reading):
            before = time.monotonic()
            await generation.cancel()
            done = (await collect(generation))[-1]
            assert isinstance(done, Done) and done.finish == "cancel" and time.monotonic() - before < 2
        answers = [said(await collect(generation)) for generation in (*stay, waiting[0])]
        assert answers == [alone[1], alone[2], alone[0]]
        assert scheduler.tally.requests.cancelled == 3


async def test_a_long_read_gives_way_and_both_answers_are_right() -> None:
    long = GenRequest(tuple(range(100, 2600)), 20, GREEDY)
    short = GenRequest(PROMPT, 20, GREEDY)
    async with engine(parallel=1) as (scheduler, _):
        alone = [ids(await collect(scheduler.submit(request))) for request in (long, short)]
    async with engine(parallel=1, engine_args=["--chunk", "128"]) as (scheduler, _):
        first = scheduler.submit(long)
        await anext(first)
        second = scheduler.submit(short)
        assert ids(await collect(second)) == alone[1] and not first.ended
        events = await collect(first)
        assert ids(events) == alone[0] and scheduler.tally.yields == 1
        done = events[-1]
        assert isinstance(done, Done) and done.reused == 0
        assert scheduler.tally.read_tokens == len(long.prompt_ids) + len(short.prompt_ids)  # nothing was read twice


# -- engines that die

SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM, signal.SIGSTOP)
QUICK = {(signal.SIGKILL, 0), (signal.SIGSEGV, 1), (signal.SIGKILL, 130), (signal.SIGSTOP, 130), (signal.SIGTERM, 300)}
DEATHS = [
    pytest.param(
        number, moment, id=f"{number.name}-{moment}", marks=() if (number, moment) in QUICK else pytest.mark.slow
    )
    for number in SIGNALS
    for moment in (0, 1, 130, 300)
]


@pytest.mark.parametrize(("number", "moment"), DEATHS)
async def test_a_death_at_any_moment_is_not_noticed(number: signal.Signals, moment: int, alone: Said) -> None:
    """Four streams, after so many tokens together."""
    limit = 2.0 if number is signal.SIGSTOP else 90.0
    async with engine(parallel=4, stall_limit_s=limit) as (scheduler, supervisor):
        generations = [scheduler.submit(request) for request in MIXED[:4]]
        readers = [asyncio.create_task(collect(generation)) for generation in generations]
        while scheduler.tally.output_tokens < moment:
            await asyncio.sleep(0)
        assert supervisor.pid is not None
        os.kill(supervisor.pid, number)
        assert [said(answer) for answer in await asyncio.gather(*readers)] == alone[:4]
        assert supervisor.restarts >= 1 and scheduler.tally.requests.finished == 4
        for request, generation in zip(MIXED, generations, strict=False):
            assert generation.figures.reused == 0 and len(generation.record.output) == request.max_new


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))])
async def test_deaths_one_after_the_other_at_random(seed: int, alone: Said) -> None:
    random = Random(seed)
    async with engine(parallel=4) as (scheduler, supervisor):
        readers = [asyncio.create_task(collect(scheduler.submit(request))) for request in MIXED]
        for _ in range(4):
            wanted = scheduler.tally.output_tokens + random.randrange(150, 250)
            while scheduler.tally.output_tokens < wanted and not all(reader.done() for reader in readers):
                await asyncio.sleep(0)
            if supervisor.pid is not None:
                os.kill(supervisor.pid, signal.SIGKILL)
            await asyncio.sleep(0.05)
        assert [said(answer) for answer in await asyncio.gather(*readers)] == alone
        assert supervisor.restarts >= 3 and scheduler.tally.requests.failed == 0


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
