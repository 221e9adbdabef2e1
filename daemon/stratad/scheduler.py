"""Decides which requests the engine works on: a bounded queue, fair between clients, as many at once as it has slots.

    submit ─► queued ─► reading ─► decoding ─► ended          queued: in the fair queue, not begun
                 ▲         │           │                      front: begun before; goes on as soon as a slot is free
                 │         │ gave way, engine died,           reading, decoding: in a slot, a leg of it runs
               front ◄─────┴───────────┘ end of a probation

A request keeps a resume record, so that nothing that happens to the engine ends it: when the engine dies at whatever
moment, every request that ran goes to the front and is taken on by the next engine, with the very tokens it would
have had. Who ran in two engines that died soon is on probation: it runs alone for `PROBATION` tokens, one suspect
after the other. Only a request that was alone in two engines that died is failed.

What is bounded: waiting (`queue_wait_limit_s`, and `restart_wait_limit_s` while the engine is down); the engine's
silence, and the end of a stopped request (the supervisor kills the engine); the silence of one slot beside others
that talk (the engine is asked; a slot that it does not know to be busy, or that decodes without getting on, means
that it is out of step). A cancelled request keeps its slot until the engine has said BDONE: nobody ever reads another
one's tokens.

All of it runs on the event loop; nothing here awaits between reading the state and changing it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeGuard

from stratad.child import Effects
from stratad.engine_protocol import (
    Answer,
    Err,
    SlotAdmitted,
    SlotDone,
    SlotErr,
    SlotProgress,
    SlotResume,
    SlotStop,
    SlotToken,
    SlotYield,
    StatLine,
    Yielded,
    format_line,
)
from stratad.errors import StrataError
from stratad.fair_queue import FairQueue
from stratad.generation import ScheduledGeneration
from stratad.lanes import Lane, Leg, choose_lane, chunk_allowance, longest_held, silence_allowance
from stratad.settings import Settings
from stratad.supervisor import EngineState
from stratad.tally import Tally
from stratad.types import EngineFacts, FinishReason, GenRequest, Progress, Token

_logger = logging.getLogger("stratad.scheduler")

MANY_FAILURES = 3  # engine lives that end early in a row; from then on new requests are not asked to wait
TICK_S = 0.5  # how often limits are looked at, while somebody waits or runs
MOST_YIELDS = 2  # times that a read gives way to shorter prompts
LEAST_UNREAD = 512  # tokens; a read that is nearer to its end is not worth interrupting
SUSPECT_DEATHS = 2  # engines in a row
DEADLY_ALONE = 2  # engines that die with one request alone, which then is the culprit
PROBATION = 32  # tokens; also how far a request must get to be above suspicion

ENGINE_REFUSALS = {
    "context_full": "context_length_exceeded",
    "pool_full": "context_length_exceeded",
    "token_range": "invalid_value",
    "no_candidates": "invalid_value",
    "non_finite": "engine_failed",
    "internal": "engine_failed",
}
"""What a BERR means to the client; any other name is a fault of ours (`internal`)."""

OUT_OF_STEP = frozenset({"busy", "bad_slot"})
"""BERR names by which the engine says that it and we disagree about its slots."""


class Engine(Protocol):
    """What the scheduler needs of the supervisor."""

    state: EngineState
    facts: EngineFacts | None
    reason: str

    @property
    def failures(self) -> int: ...
    def send(self, line: bytes) -> None: ...
    def expect(self, silence: float | None, end_by: float | None = None) -> None: ...
    def ask(self) -> bool: ...
    def kill(self, reason: str) -> None: ...


class Scheduler:
    """Implements `Service.submit`, and is the supervisor's `EngineWatcher`."""

    def __init__(self, settings: Settings, effects: Effects) -> None:
        self._settings, self._effects = settings, effects
        self._engine: Engine | None = None
        self._queue = FairQueue()
        self._front: list[ScheduledGeneration] = []  # in the order in which they came in
        self._lanes: list[Lane] = []  # of the engine that runs
        self._broken = False  # the engine is out of step and being killed; nothing it said after that counts
        self._numbers = itertools.count(1)
        self._work = asyncio.Event()  # somebody waits or runs
        self._idle = asyncio.Event()  # nothing that began is unfinished
        self._idle.set()
        self._down_since: float | None = None
        self._info: Mapping[str, str] = {}  # of the engine that runs, or of the last one
        self.draining = False
        self.tally = Tally()

    def attach(self, engine: Engine) -> None:
        """Name the engine to work with; once, before anything else."""
        self._engine = engine

    @property
    def engine(self) -> Engine:
        """The supervisor."""
        assert self._engine is not None, "attach() comes first"
        return self._engine

    # -- what others ask

    @property
    def lanes(self) -> list[Lane]:
        """The slots of the engine that runs; none while there is no engine."""
        return self._lanes

    @property
    def serving(self) -> int:
        """Slots of the engine that runs, or of the last one that was ready."""
        facts = self.engine.facts
        return slots_of(facts) if facts is not None else 0

    @property
    def queued(self) -> int:
        """Requests that wait and have not begun."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Requests that have begun: in a slot, or about to go on in one."""
        return len(self._front) + sum(1 for _ in self._legs())

    def slots(self) -> list[dict[str, object]]:
        """One row for each slot: what it holds, or how far its request is. JSON-ready."""
        now = self._effects.now()
        return [lane.describe(now) for lane in self._lanes]

    def _legs(self) -> Iterator[Leg]:
        return (lane.leg for lane in self._lanes if lane.leg is not None)

    # -- coming in

    def submit(self, request: GenRequest) -> ScheduledGeneration:
        """Queue a request. Raises StrataError `queue_full`, `engine_loading`, `engine_down` or `draining` at once."""
        try:
            self._check_request(request)
            self._check_engine()
            self._check_queue()
        except StrataError:
            self.tally.requests.refused += 1
            raise
        generation = ScheduledGeneration(self.cancel, request, next(self._numbers), self._effects.now())
        generation.deadline = self._waits_until()
        self.tally.requests.submitted += 1
        self._queue.put(generation, len(request.prompt_ids) - longest_held(self._lanes, request.prompt_ids))
        self._pump()
        return generation

    @staticmethod
    def _check_request(request: GenRequest) -> None:
        if not request.prompt_ids:
            raise StrataError("invalid_value", "the prompt is empty: it must have at least one token", param="prompt")
        if request.max_new < 1:
            text = f"max_tokens must be 1 or more, not {request.max_new}"
            raise StrataError("invalid_value", text, param="max_tokens")

    def _check_engine(self) -> None:
        engine = self.engine
        if self.draining or engine.state is EngineState.STOPPING:
            raise StrataError("draining", "the server is stopping", retry_after=10)
        if engine.state is EngineState.READY:
            return
        if engine.state is EngineState.FAILED:
            raise StrataError("engine_down", f"the engine does not run: {engine.reason}")
        if engine.facts is None and engine.state is not EngineState.RESTARTING:
            raise StrataError("engine_loading", "the model is being loaded", retry_after=5)
        if engine.facts is None or engine.failures >= MANY_FAILURES:
            raise StrataError("engine_down", f"the engine is being started again: {engine.reason}", retry_after=10)

    def _check_queue(self) -> None:
        free = any(lane.leg is None for lane in self._lanes) and not self._queue and not self._front
        if not free and len(self._queue) >= self._settings.integer("queue_limit"):
            raise StrataError("queue_full", f"{len(self._queue)} requests wait already; try again", retry_after=2)

    def _waits_until(self) -> float | None:
        wait = self._settings.number("queue_wait_limit_s")
        return self._effects.now() + wait if wait > 0 else None

    # -- going to the engine

    def _pump(self) -> None:
        """Start whatever the engine has room for; ask a long read to give way to a short prompt."""
        while self._takes_requests() and (generation := self._next()) is not None:
            self._start(generation)
        self._ask_to_give_way()
        self._note_work()

    def _takes_requests(self) -> bool:
        ready = self.engine.state is EngineState.READY and not self._broken
        return ready and any(lane.leg is None for lane in self._lanes)

    def _next(self) -> ScheduledGeneration | None:
        """Who may begin now: suspects alone, then who has begun before, then the queue."""
        suspects = [generation for generation in self._front if _suspect(generation)]
        if suspects:
            alone = next(self._legs(), None) is None
            return self._from_front(suspects[0]) if alone else None
        if any(_suspect(leg.generation) for leg in self._legs()):
            return None
        if self._front:
            return self._from_front(self._front[0])
        return None if self.draining else self._queue.take()

    def _from_front(self, generation: ScheduledGeneration) -> ScheduledGeneration:
        self._front.remove(generation)
        return generation

    def _to_front(self, generation: ScheduledGeneration) -> None:
        generation.deadline = self._waits_until()
        self._front.append(generation)
        self._front.sort(key=lambda one: one.number)

    def _start(self, generation: ScheduledGeneration) -> None:
        record, now = generation.record, self._effects.now()
        ids = record.ids
        lane = choose_lane(self._lanes, ids)
        assert lane is not None
        budget = min(PROBATION, record.remaining) if _suspect(generation) else record.remaining
        try:
            line = record.line(lane.slot, budget)
        except ValueError as error:
            self._fail(generation, StrataError("invalid_value", f"the request cannot be sent: {error}"))
            return
        if generation.figures.began is None:
            generation.figures.began = now
            self.tally.requests.started += 1
            self.tally.queue_wait.observe(now - generation.submitted)
        generation.deadline = None
        allowance = silence_allowance(self._settings.number("stall_limit_s"), len(ids))
        lane.leg = Leg(generation, ids, budget, now, allowance, now)
        lane.held, lane.used = (), now
        self._expect()
        self.engine.send(line)
        _logger.debug("request %d in slot %d: %d tokens to read", generation.number, lane.slot, len(ids))

    def _ask_to_give_way(self) -> None:
        """If every slot is taken and a prompt waits that is under half as long as what a read has left."""
        waiting = self._queue.shortest()
        if waiting is None or self._broken or self.draining or not self._lanes or not self._may_yield():
            return
        generation, unread = waiting
        legs = [(lane.leg.unread, lane.slot, lane.leg) for lane in self._lanes if _may_give_way(lane.leg)]
        left, slot, leg = max(legs, default=(0, 0, None), key=lambda one: one[0])
        if leg is not None and left >= max(LEAST_UNREAD, 2 * unread):
            leg.generation.yields += 1
            leg.yield_for = generation
            self.engine.send(format_line(SlotYield(slot)))

    def _may_yield(self) -> bool:
        """One at a time; not beside a free slot or a suspect; and without a cache the read would be lost."""
        legs = list(self._legs())
        if len(legs) < len(self._lanes) or self._settings.integer("prompt_cache_mib") == 0:
            return False
        return not any(leg.yield_for is not None or _suspect(leg.generation) for leg in legs)

    # -- cancelling

    def cancel(self, generation: ScheduledGeneration) -> None:
        """What `Generation.cancel` does."""
        if generation.ended or generation.cancelled:
            return
        generation.cancelled = True
        if self._queue.remove(generation):
            self._finish(generation, "cancel")
        elif generation in self._front:
            self._front.remove(generation)
            self._finish(generation, "cancel")
        else:
            self._stop(generation)
        self._pump()

    def _stop(self, generation: ScheduledGeneration) -> None:
        for lane in self._lanes:
            if lane.leg is not None and lane.leg.generation is generation and lane.leg.end_by is None:
                limit = self._settings.number("stall_limit_s")
                lane.leg.end_by = self._effects.now() + (limit if limit > 0 else float("inf"))
                self.engine.send(format_line(SlotStop(lane.slot)))
                self._expect()

    # -- coming back from the engine

    def engine_ready(self, facts: EngineFacts) -> None:
        """The engine takes requests: go on with those that ran, then with those that wait."""
        self._down_since = None
        self._broken = False
        self._compare_engines(facts)
        self._lanes = [Lane(slot) for slot in range(slots_of(facts))]
        self._pump()

    def _compare_engines(self, facts: EngineFacts) -> None:
        """Another model does not know the ids of what waits; other numbers would end an answer as it had not begun."""
        before, self._info = self._info, facts.info
        names = ("fingerprint", "identity")
        changed = {name for name in names if before.get(name, "") not in ("", facts.info.get(name))}
        if "fingerprint" in changed:
            self._fail_all("engine_down", "another model is served now; send the request again")
        elif "identity" in changed:
            text = "the answer was cut off: the engine was started again with settings that change answers"
            for generation in [one for one in self._front if one.record.output]:
                self._fail(self._from_front(generation), StrataError("engine_failed", text))

    def engine_answers(self, answers: list[Answer]) -> None:
        """Lines of slots, as many as came together; ends of requests start the next ones."""
        now = self._effects.now()
        for answer in answers:
            if self._broken:
                return
            if type(answer) is SlotToken:
                self._token(answer, now)
            elif isinstance(answer, SlotResume | SlotProgress | SlotAdmitted | SlotDone | SlotErr | Yielded):
                self._slot_answer(answer, now)
            elif isinstance(answer, StatLine):
                self._heed_stat(answer.values)
            elif not isinstance(answer, Err):
                self._break(f"it sent {type(answer).__name__}, which nobody asked for")
            elif answer.name != "internal":  # after that one the engine ends by itself
                self._break(f"it refused a line: {answer.name}: {answer.text}")

    def _break(self, reason: str) -> None:
        self._broken = True
        self.engine.kill(reason)

    def _lane(self, slot: int, what: str) -> Lane | None:
        """The busy lane that an answer is about; without one the engine is out of step."""
        if 0 <= slot < len(self._lanes) and self._lanes[slot].leg is not None:
            return self._lanes[slot]
        self._break(f"it sent {what} for slot {slot}, where no request runs")
        return None

    def _token(self, answer: SlotToken, now: float) -> None:
        lane = self._lane(answer.slot, "a token")
        if lane is None or lane.leg is None:
            return
        leg = lane.leg
        if leg.tokens >= leg.budget or not leg.resumed:
            self._break("it produced more tokens than were asked for" if leg.resumed else "it sent a token too early")
            return
        if leg.reading:
            self._decoding(leg, now)
        generation, figures = leg.generation, leg.generation.figures
        if figures.first_token is None:
            figures.first_token = now
            self.tally.first_token.observe(now - generation.submitted)
        else:
            self.tally.token_gap.observe(now - leg.heard)
        leg.heard = now
        leg.tokens += 1
        self.tally.output_tokens += 1
        generation.record.output.append(answer.id)
        generation.push(Token(answer.id, answer.logprob, answer.top))

    def _decoding(self, leg: Leg, now: float) -> None:
        leg.position = len(leg.ids)
        leg.reading = False
        leg.yield_for = None  # too late: the engine drops the wish
        leg.decoding_since = now
        leg.samples.clear()
        leg.allowance = self._settings.number("stall_limit_s")
        self._expect()

    def _slot_answer(
        self, answer: SlotResume | SlotProgress | SlotAdmitted | SlotDone | SlotErr | Yielded, now: float
    ) -> None:
        lane = self._lane(answer.slot, type(answer).__name__)
        if lane is None or lane.leg is None:
            return
        lane.leg.heard = now
        lane.leg.asked = None
        if isinstance(answer, SlotDone):
            self._done(lane, lane.leg, answer, now)
        elif isinstance(answer, SlotErr):
            self._refused(lane, lane.leg, answer, now)
        elif isinstance(answer, SlotProgress):
            self._progress(lane.leg, answer)
        elif isinstance(answer, SlotResume):
            self._resumed(lane.leg, answer)
        elif isinstance(answer, Yielded):
            lane.leg.gave_way = True
        elif answer.decoding and lane.leg.reading:
            self._decoding(lane.leg, now)

    def _resumed(self, leg: Leg, answer: SlotResume) -> None:
        leg.reused = leg.position = answer.tokens
        leg.resumed = True
        figures = leg.generation.figures
        if figures.reused is None:
            figures.reused = answer.tokens
            self.tally.prompt_tokens += len(leg.ids)
            self.tally.reused_tokens += answer.tokens

    def _progress(self, leg: Leg, answer: SlotProgress) -> None:
        chunk = answer.position - leg.position
        leg.position = answer.position
        leg.allowance = chunk_allowance(self._settings.number("stall_limit_s"), chunk, answer.tok_s)
        self._expect()
        prompt = len(leg.generation.record.prompt)
        if not leg.generation.record.output:  # reading again is nothing that a client needs to know
            leg.generation.push(Progress(min(answer.position, prompt), prompt, leg.generation.figures.reused or 0))

    # -- the end of a leg

    def _done(self, lane: Lane, leg: Leg, answer: SlotDone, now: float) -> None:
        wanted = leg.end_by is not None or leg.gave_way or answer.finish != "cancel"
        if answer.finish not in ("stop", "length", "cancel") or answer.generated != leg.tokens or not wanted:
            came = f"{leg.tokens} of {answer.generated} tokens"
            self._break(f"it ended a request with {answer.finish!r} and {came}")
            return
        self._account(lane, leg, answer)
        generation, stopped = leg.generation, leg.end_by is not None
        held = generation.record.ids[:-1] if leg.tokens else leg.ids[: answer.reused + answer.prompt_tokens_read]
        self._free(lane, held, now)
        reason = _finish_of(leg, answer, stopped)
        if generation.ended:  # its client was told already
            pass
        elif reason is not None:
            self._finish(generation, reason)
        else:
            self._go_on_later(lane, leg)
        self._pump()

    def _go_on_later(self, lane: Lane, leg: Leg) -> None:
        """The leg is over but not the request: it gave way, or its probation is over."""
        generation = leg.generation
        if not leg.gave_way and leg.tokens >= leg.budget:
            generation.deaths = generation.alone_deaths = 0
        self._to_front(generation)
        if leg.gave_way:
            self.tally.yields += 1
            if leg.yield_for is not None and self._takes_requests() and self._queue.remove(leg.yield_for):
                self._start(leg.yield_for)

    def _account(self, lane: Lane, leg: Leg, answer: SlotDone) -> None:
        tally, figures = self.tally, leg.generation.figures
        read = answer.prompt_tokens_read
        tally.draft(lane.slot, answer.drafts_offered, answer.drafts_accepted)
        tally.read_tokens += read
        tally.prompt_seconds += answer.prompt_ms / 1000
        tally.decode_seconds += answer.decode_ms / 1000
        if len(leg.ids) == len(leg.generation.record.prompt):  # else it was read again
            figures.prompt_ms += answer.prompt_ms if leg.tokens else answer.ms
        figures.decode_ms += answer.decode_ms
        figures.drafts_offered += answer.drafts_offered
        figures.drafts_accepted += answer.drafts_accepted
        if answer.generated > 1 and answer.decode_ms > 0:
            tally.rates.decode_tok_s = round((answer.generated - 1) * 1000 / answer.decode_ms, 2)
        if read > 1 and answer.prompt_ms > 0:
            tally.rates.prompt_tok_s = round(read * 1000 / answer.prompt_ms, 2)

    def _refused(self, lane: Lane, leg: Leg, answer: SlotErr, now: float) -> None:
        if answer.name in OUT_OF_STEP:
            self._break(f"it refused a request: {answer.name}: {answer.text}")
            return
        generation = leg.generation
        self._free(lane, (), now)
        _logger.warning("request %d refused by the engine: %s: %s", generation.number, answer.name, answer.text)
        if answer.name == "context_full" and generation.record.output and not generation.ended:
            self._finish(generation, "length")
        elif not generation.ended:
            name = ENGINE_REFUSALS.get(answer.name, "internal")
            self._fail(generation, StrataError(name, f"the engine refused the request: {answer.text or answer.name}"))
        self._pump()

    def _free(self, lane: Lane, held: tuple[int, ...], now: float) -> None:
        lane.leg = None
        lane.held, lane.used = held, now
        self._expect()

    def _finish(self, generation: ScheduledGeneration, reason: FinishReason) -> None:
        self._ended(generation, reason)
        generation.finish(reason)
        _logger.info(
            "request %d: %s, %d prompt tokens, %d new", generation.number, reason, len(generation.record.prompt),
            len(generation.record.output),
        )  # fmt: skip

    def _fail(self, generation: ScheduledGeneration, error: StrataError) -> None:
        if not generation.ended:
            self._ended(generation, "draining" if error.name == "draining" else "error")
            generation.fail(error)

    def _ended(self, generation: ScheduledGeneration, finish: str) -> None:
        self.tally.end(generation, finish, self._effects.now(), self._effects.wall())

    # -- the end of an engine

    def engine_down(self, reason: str, permanent: bool, planned: bool = False) -> None:
        """The engine ended: what ran goes to the front and waits for the next engine, if there will be one.

        Nobody is a suspect when the end was `planned`.
        """
        legs, self._lanes = list(self._legs()), []
        self._broken = False
        if self._down_since is None:
            self._down_since = self._effects.now()
        self.engine.expect(None)
        for leg in legs:
            self._lost(leg, alone=len(legs) == 1, reason=reason, planned=planned)
        if permanent:
            name = "draining" if self.draining else "engine_down"
            self._fail_all(name, "the server is stopping" if self.draining else reason)
        self._note_work()

    def _lost(self, leg: Leg, alone: bool, reason: str, planned: bool) -> None:
        generation, record = leg.generation, leg.generation.record
        self.tally.read_tokens += leg.fresh
        if leg.decoding_since is not None:  # the engine did not live to say how long it took
            generation.figures.decode_ms += (leg.heard - leg.decoding_since) * 1000
            if len(leg.ids) == len(record.prompt):
                generation.figures.prompt_ms += (leg.decoding_since - leg.began) * 1000
        if generation.ended:
            return
        if generation.cancelled:
            self._finish(generation, "cancel")
        elif record.finish is not None:
            self._finish(generation, record.finish)
        elif not planned and self._is_culprit(leg, alone):
            self._fail(generation, StrataError("engine_failed", f"the answer was cut off: {reason}"))
        else:
            self.tally.recovered += 1
            self._to_front(generation)

    @staticmethod
    def _is_culprit(leg: Leg, alone: bool) -> bool:
        """Count a death. A request that got on well since it went on is no suspect for what happened before."""
        generation = leg.generation
        if leg.tokens >= PROBATION:
            generation.deaths = generation.alone_deaths = 0
        generation.deaths += 1
        generation.alone_deaths += alone
        return generation.alone_deaths >= DEADLY_ALONE

    def _fail_all(self, name: str, text: str) -> None:
        self._fail_front(name, text)
        self._fail_queue(name, text)

    def _fail_front(self, name: str, text: str) -> None:
        front, self._front = self._front, []
        for generation in front:
            self._fail(generation, StrataError(name, f"the answer was cut off: {text}", retry_after=10))

    def _fail_queue(self, name: str, text: str) -> None:
        for generation in self._queue.clear():
            self._fail(generation, StrataError(name, text, retry_after=10))

    # -- limits

    def _expect(self) -> None:
        """Tell the supervisor how long the engine may be silent, and by when stopped requests must have ended."""
        legs = list(self._legs())
        if not legs:
            self.engine.expect(None)
            return
        allowances = [leg.allowance for leg in legs]
        ends = [leg.end_by for leg in legs if leg.end_by is not None]
        self.engine.expect(max(allowances) if all(allowances) else 0.0, min(ends, default=None))

    def _note_work(self) -> None:
        """Keep `_idle` and `_work` true to their names."""
        begun = self.running > 0
        (self._idle.clear if begun else self._idle.set)()
        (self._work.set if begun or self._queue else self._work.clear)()

    async def run(self) -> None:
        """The task that looks after limits."""
        while True:
            await self._work.wait()
            await self._effects.sleep(TICK_S)
            self._tick()

    def _tick(self) -> None:
        now = self._effects.now()
        limit = self._settings.number("restart_wait_limit_s")
        if self._down_since is not None and now - self._down_since > limit:
            self._fail_all("engine_down", f"the engine did not come back within {limit:g} s: {self.engine.reason}")
        for generation in [one for one in self._front if one.deadline is not None and one.deadline < now]:
            self._fail(self._from_front(generation), _waited_too_long())
        for generation in [one for one in self._queue if one.deadline is not None and one.deadline < now]:
            self._queue.remove(generation)
            self._fail(generation, _waited_too_long())
        for leg in self._legs():
            leg.sample(now)
        self._ask_about_silence(now)
        self._pump()

    def _ask_about_silence(self, now: float) -> None:
        """A slot that is silent beside others that talk may be waiting for room, or be forgotten."""
        limit = self._settings.number("stall_limit_s")
        if limit <= 0:
            return
        silent = [leg for leg in self._legs() if now - leg.heard > max(limit, leg.allowance)]
        if any(leg.asked is None for leg in silent) and self.engine.ask():  # that an answer comes is the supervisor's
            for leg in silent:
                leg.asked = (leg.position, leg.tokens)

    def _heed_stat(self, stat: Mapping[str, Any]) -> None:
        """Does the engine agree about who is busy?"""
        rows = stat.get("slots")
        for row in rows if isinstance(rows, list) else ():
            slot = row.get("slot") if isinstance(row, dict) else None
            if isinstance(slot, int) and 0 <= slot < len(self._lanes):
                self._compare(self._lanes[slot], row)

    def _compare(self, lane: Lane, row: Mapping[str, Any]) -> None:
        leg = lane.leg
        if leg is None:
            if row.get("held_tokens") == 0:
                lane.held = ()  # the engine needed the room
            return
        if leg.asked is None:
            return
        stuck = row.get("state") == "decoding" and not row.get("parked")
        if row.get("state") == "idle" or (stuck and leg.asked == (leg.position, leg.tokens)):
            self._break(f"slot {lane.slot} has fallen silent: {row.get('state')}")
        else:
            leg.heard, leg.asked = self._effects.now(), None

    # -- stopping

    async def drain(self, limit_s: float) -> bool:
        """Begin nothing more, refuse what waits, give what began so long. Returns whether it ended by itself.

        What is cut off ends with `draining`; its slots are left to the engine's end.
        """
        self.draining = True
        self._fail_queue("draining", "the server is stopping")
        self._note_work()
        if limit_s > 0 and await self._effects.wait(self._idle, limit_s):
            return True
        return not self.cut()

    def cut(self) -> bool:
        """End what began for its clients now. Returns whether there was any."""
        cut = [leg.generation for leg in self._legs() if not leg.generation.ended] + self._front
        self._front = []
        for generation in cut:
            text = "the server is stopping; the answer was cut off"
            self._fail(generation, StrataError("draining", text, retry_after=10))
            self._stop(generation)
        self._note_work()
        return bool(cut)


def slots_of(facts: EngineFacts) -> int:
    """Slots that the engine runs; one where it does not say."""
    text = facts.info.get("batch_slots", "")
    return max(1, int(text)) if text.isascii() and text.isdecimal() else 1


def _may_give_way(leg: Leg | None) -> TypeGuard[Leg]:
    return leg is not None and leg.end_by is None and leg.generation.yields < MOST_YIELDS


def _suspect(generation: ScheduledGeneration) -> bool:
    return generation.deaths >= SUSPECT_DEATHS


def _finish_of(leg: Leg, answer: SlotDone, stopped: bool) -> FinishReason | None:
    """Why the request is over; None: only this leg is."""
    if answer.finish == "stop":
        return "stop"
    if answer.finish == "cancel":
        return "cancel" if stopped else None
    whole = leg.generation.record.remaining > 0 and leg.tokens >= leg.budget
    return None if whole else "length"


def _waited_too_long() -> StrataError:
    return StrataError("queue_timeout", "the request waited too long for its turn", retry_after=10)
