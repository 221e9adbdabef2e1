"""Decides which request the engine works on: a bounded queue, fair between clients, one request at a time.

Every client has its own first-in-first-out line; the lines take turns. A request is `queued`, then `running`, then
`ended`; its `Generation` collects events until somebody reads them, so that the engine's pipe is always emptied
(tokens are tiny, and `max_new` bounds how many can wait). A cancelled running request is stopped, and the lane stays
its own until the engine has said DONE: nobody ever reads another one's tokens.

What is bounded: waiting (`queue_wait_limit_s`, and `restart_wait_limit_s` while the engine is down), the silence of a
running request and the end of a stopped one (the supervisor kills the engine, which ends the request). Queued
requests outlive an engine; a running one ends with `engine_failed`.

All of it runs on the event loop; nothing here awaits between reading the state and changing it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, get_args

from stratad.child import Effects
from stratad.engine_protocol import (
    Answer,
    DoneLine,
    Err,
    Gen,
    PromptProgress,
    Resume,
    Reused,
    Stop,
    TokenLine,
    format_line,
    sampling_keys,
)
from stratad.errors import StrataError
from stratad.settings import Settings
from stratad.supervisor import EngineState
from stratad.types import Done, EngineFacts, Event, FinishReason, GenRequest, Progress, Token

_logger = logging.getLogger("stratad.scheduler")

MANY_FAILURES = 3  # engine lives that end early in a row; from then on new requests are not asked to wait
TICK_S = 0.5  # how often the limits of the queue are looked at, while somebody waits
SLOWEST_READ_TOK_S = 50.0  # prompt reading is given this much time per token before its first report
LONGEST_READ_TOKENS = 32768

ENGINE_REFUSALS = {
    "context_full": "context_length_exceeded",
    "token_range": "invalid_value",
    "non_finite": "engine_failed",
    "internal": "engine_failed",
}
"""What an ERR for a request means to its client; any other name is a fault of ours (`internal`)."""


class Engine(Protocol):
    """What the scheduler needs of the supervisor."""

    state: EngineState
    facts: EngineFacts | None
    reason: str

    @property
    def failures(self) -> int: ...
    def send(self, line: bytes) -> None: ...
    def begin(self, allowance: float) -> None: ...
    def allow(self, allowance: float) -> None: ...
    def expect_end(self, seconds: float) -> None: ...
    def end(self) -> None: ...
    def kill(self, reason: str) -> None: ...


@dataclass(slots=True)
class Counters:
    """Requests since the daemon started; they never go down."""

    submitted: int = 0
    started: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    refused: int = 0


@dataclass(slots=True)
class Rates:
    """Tokens per second of the last request that had any, in engine time."""

    decode_tok_s: float | None = None
    prompt_tok_s: float | None = None


class ScheduledGeneration:
    """One request on its way. Read by one consumer; `cancel` may be called from anywhere on the loop."""

    __slots__ = ("_end", "_error", "_events", "_owner", "_waiter", "cancelled", "deadline", "number", "request")

    def __init__(self, owner: Scheduler, request: GenRequest, number: int, deadline: float | None) -> None:
        self.request = request
        self.number = number
        self.deadline = deadline  # by then it must have started
        self.cancelled = False
        self._owner = owner
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._end = False
        self._error: StrataError | None = None

    @property
    def ended(self) -> bool:
        """Whether its last event is known (it may still wait to be read)."""
        return self._end

    def push(self, event: Event) -> None:
        """Add an event; progress that nobody has read yet is replaced by newer progress."""
        if self._end:
            return
        if type(event) is Progress and self._events and type(self._events[-1]) is Progress:
            self._events[-1] = event
        else:
            self._events.append(event)
        self._wake()

    def finish(self, done: Done) -> None:
        """Add the last event."""
        self.push(done)
        self._end = True

    def fail(self, error: StrataError) -> None:
        """End with an error, after the events that are there."""
        if not self._end:
            self._end, self._error = True, error
            self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def __aiter__(self) -> ScheduledGeneration:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._end:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._events.popleft()

    async def cancel(self) -> None:
        """Leave the queue, or stop within one token or chunk. Idempotent; does not wait for the engine."""
        self._owner.cancel(self)


@dataclass(slots=True)
class _Lane:
    """A place in the engine that works on one request at a time (later: one per slot)."""

    current: ScheduledGeneration | None = None
    stopping: bool = False
    broken: bool = False  # the engine is out of step and being killed; nothing it said after that counts
    reused: int = 0
    position: int = 0  # prompt tokens read
    reading: bool = True
    tokens: int = 0


class _FairQueue:
    """First in, first out for each client; the clients take turns."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[ScheduledGeneration]] = OrderedDict()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[ScheduledGeneration]:
        return (generation for line in self._lines.values() for generation in line)

    def put(self, generation: ScheduledGeneration) -> None:
        """To the end of its client's line; a client without a line gets the last turn."""
        self._lines.setdefault(generation.request.client, deque()).append(generation)
        self._length += 1

    def take(self) -> ScheduledGeneration | None:
        """The next of the client whose turn it is, which then is the last to have a turn."""
        if not self._lines:
            return None
        client, line = next(iter(self._lines.items()))
        generation = line.popleft()
        self._length -= 1
        if line:
            self._lines.move_to_end(client)
        else:
            del self._lines[client]
        return generation

    def remove(self, generation: ScheduledGeneration) -> bool:
        """Take one out of the middle; returns whether it was there."""
        line = self._lines.get(generation.request.client)
        if line is None or generation not in line:
            return False
        line.remove(generation)
        self._length -= 1
        if not line:
            del self._lines[generation.request.client]
        return True

    def clear(self) -> list[ScheduledGeneration]:
        """Take all of them out."""
        everyone = list(self)
        self._lines.clear()
        self._length = 0
        return everyone


def silence_allowance(stall_limit_s: float, unread: int) -> float:
    """Silence allowed after a prompt with so many unread tokens was sent, until its first report (0: any)."""
    if stall_limit_s <= 0:
        return 0.0
    return stall_limit_s + min(unread, LONGEST_READ_TOKENS) / SLOWEST_READ_TOK_S


def chunk_allowance(stall_limit_s: float, chunk: int, tok_s: float) -> float:
    """Silence allowed until the next report of a prompt that is read in such chunks at such a rate (0: any)."""
    if stall_limit_s <= 0:
        return 0.0
    return max(stall_limit_s, 3 * chunk / tok_s) if tok_s > 0 else stall_limit_s


class Scheduler:
    """Implements `Service.submit`, and is the supervisor's `EngineWatcher`."""

    def __init__(self, settings: Settings, effects: Effects) -> None:
        self._settings, self._effects = settings, effects
        self._engine: Engine | None = None
        self._queue = _FairQueue()
        self._lane = _Lane()
        self._numbers = itertools.count(1)
        self._waiting = asyncio.Event()  # somebody is in the queue
        self._idle = asyncio.Event()  # the lane is free
        self._idle.set()
        self._down_since: float | None = None
        self.draining = False
        self.counters = Counters()
        self.rates = Rates()

    def attach(self, engine: Engine) -> None:
        """Name the engine to work with; once, before anything else."""
        self._engine = engine

    @property
    def engine(self) -> Engine:
        """The supervisor."""
        assert self._engine is not None, "attach() comes first"
        return self._engine

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Requests that the engine works on."""
        return 1 if self._lane.current is not None else 0

    # -- coming in

    def submit(self, request: GenRequest) -> ScheduledGeneration:
        """Queue a request. Raises StrataError `queue_full`, `engine_loading`, `engine_down` or `draining` at once."""
        try:
            self._check_request(request)
            self._check_engine()
            self._check_queue()
        except StrataError:
            self.counters.refused += 1
            raise
        wait = self._settings.number("queue_wait_limit_s")
        deadline = self._effects.now() + wait if wait > 0 else None
        generation = ScheduledGeneration(self, request, next(self._numbers), deadline)
        self.counters.submitted += 1
        self._queue.put(generation)
        self._waiting.set()
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
        limit = self._settings.integer("queue_limit")
        free = self.engine.state is EngineState.READY and self._lane.current is None and not self._queue
        if not free and len(self._queue) >= limit:
            raise StrataError("queue_full", f"{len(self._queue)} requests wait already; try again", retry_after=2)

    # -- going to the engine

    def _pump(self) -> None:
        """Start the next request if the engine is ready for one."""
        free = self._lane.current is None and not self._lane.broken
        if free and self.engine.state is EngineState.READY and not self.draining:
            generation = self._queue.take()
            if generation is not None:
                self._start(generation)
        if not self._queue:
            self._waiting.clear()

    def _start(self, generation: ScheduledGeneration) -> None:
        request = generation.request
        try:
            line = format_line(Gen(request.max_new, request.prompt_ids, sampling_keys(request.sampling)))
        except ValueError as error:
            self.counters.failed += 1
            generation.fail(StrataError("invalid_value", f"the request cannot be sent: {error}"))
            self._pump()
            return
        self._lane = _Lane(generation)
        self._idle.clear()
        self.counters.started += 1
        self.engine.begin(silence_allowance(self._settings.number("stall_limit_s"), len(request.prompt_ids)))
        self.engine.send(line)
        _logger.debug("request %d started: %d prompt tokens", generation.number, len(request.prompt_ids))

    def cancel(self, generation: ScheduledGeneration) -> None:
        """What `Generation.cancel` does."""
        if generation.ended or generation.cancelled:
            return
        generation.cancelled = True
        if self._queue.remove(generation):
            self.counters.cancelled += 1
            generation.finish(Done("cancel", 0, len(generation.request.prompt_ids), 0, 0.0, 0.0))
            self._pump()
        elif self._lane.current is generation:
            self._stop()

    def _stop(self) -> None:
        if not self._lane.stopping:
            self._lane.stopping = True
            self.engine.send(format_line(Stop()))
            self.engine.expect_end(self._settings.number("stall_limit_s"))

    # -- coming back from the engine

    def engine_ready(self, facts: EngineFacts) -> None:
        """The engine takes requests: go on with those that wait."""
        self._down_since = None
        self._pump()

    def engine_answers(self, answers: list[Answer]) -> None:
        """Lines of the running request; ends of requests start the next one."""
        for answer in answers:
            generation = self._lane.current
            if self._lane.broken:
                return
            if generation is None:
                self._break(f"it sent {type(answer).__name__} with no request running")
            elif type(answer) is TokenLine:
                self._token(generation, answer)
            else:
                self._other(generation, answer)

    def _break(self, reason: str) -> None:
        self._lane.broken = True
        self.engine.kill(reason)

    def _token(self, generation: ScheduledGeneration, answer: TokenLine) -> None:
        lane = self._lane
        lane.tokens += 1
        if lane.reading:
            lane.reading = False
            self.engine.allow(self._settings.number("stall_limit_s"))
        if lane.tokens > generation.request.max_new:
            self._break("it produced more tokens than were asked for")
            return
        generation.push(Token(answer.id, answer.logprob, answer.top))

    def _other(self, generation: ScheduledGeneration, answer: Answer) -> None:
        if isinstance(answer, DoneLine):
            self._done(generation, answer)
        elif isinstance(answer, Err):
            self._refused(generation, answer)
        elif isinstance(answer, PromptProgress):
            self._progress(generation, answer)
        elif isinstance(answer, Resume | Reused):
            self._lane.reused = answer.tokens

    def _progress(self, generation: ScheduledGeneration, answer: PromptProgress) -> None:
        lane = self._lane
        chunk = answer.position - max(lane.position, lane.reused)
        lane.position = answer.position
        self.engine.allow(chunk_allowance(self._settings.number("stall_limit_s"), chunk, answer.tok_s))
        generation.push(Progress(answer.position, answer.total, lane.reused))

    def _done(self, generation: ScheduledGeneration, answer: DoneLine) -> None:
        if answer.finish not in get_args(FinishReason):
            self._break(f"it ended a request with the word {answer.finish!r}")
            return
        finish: FinishReason = answer.finish  # type: ignore[assignment]
        self._rate(answer)
        self._free()
        if not generation.ended:
            if finish == "cancel":
                self.counters.cancelled += 1
            else:
                self.counters.finished += 1
        prompt = answer.prompt_tokens
        generation.finish(Done(finish, answer.generated, prompt, answer.reused, answer.prompt_ms, answer.decode_ms))
        _logger.info("request %d: %s, %d prompt tokens, %d new", generation.number, finish, prompt, answer.generated)
        self._pump()

    def _rate(self, answer: DoneLine) -> None:
        if answer.generated > 1 and answer.decode_ms > 0:
            self.rates.decode_tok_s = round(answer.generated * 1000 / answer.decode_ms, 2)
        read = answer.prompt_tokens_read or answer.prompt_tokens - answer.reused
        if read > 1 and answer.prompt_ms > 0:
            self.rates.prompt_tok_s = round(read * 1000 / answer.prompt_ms, 2)

    def _refused(self, generation: ScheduledGeneration, answer: Err) -> None:
        self._free()
        self.counters.failed += not generation.ended
        name = ENGINE_REFUSALS.get(answer.name, "internal")
        _logger.warning("request %d refused by the engine: %s: %s", generation.number, answer.name, answer.text)
        generation.fail(StrataError(name, f"the engine refused the request: {answer.text or answer.name}"))
        if answer.name != "internal":  # after that one the engine ends; what waits goes to its successor
            self._pump()

    def _free(self) -> None:
        self._lane = _Lane()
        self._idle.set()
        self.engine.end()

    def engine_down(self, reason: str, permanent: bool) -> None:
        """The engine ended: its request fails, the queue waits for the next engine if there will be one."""
        lane, self._lane = self._lane, _Lane()
        self._idle.set()
        if lane.current is not None and not lane.current.ended:
            self._lost(lane.current, lane.tokens, reason)
        if self._down_since is None:
            self._down_since = self._effects.now()
        if permanent:
            name = "draining" if self.draining else "engine_down"
            self._fail_queue(name, "the server is stopping" if self.draining else reason)

    def _lost(self, generation: ScheduledGeneration, tokens: int, reason: str) -> None:
        if generation.cancelled:
            self.counters.cancelled += 1
            generation.finish(Done("cancel", tokens, len(generation.request.prompt_ids), 0, 0.0, 0.0))
            return
        self.counters.failed += 1
        if self.draining:
            generation.fail(StrataError("draining", "the server is stopping", retry_after=10))
        else:
            generation.fail(StrataError("engine_failed", f"the answer was cut off: {reason}"))

    def _fail_queue(self, name: str, text: str) -> None:
        for generation in self._queue.clear():
            self.counters.failed += 1
            generation.fail(StrataError(name, text, retry_after=10))
        self._waiting.clear()

    # -- limits of waiting

    async def run(self) -> None:
        """The task that ends waits which last too long."""
        while True:
            await self._waiting.wait()
            await self._effects.sleep(TICK_S)
            self._expire()

    def _expire(self) -> None:
        now = self._effects.now()
        limit = self._settings.number("restart_wait_limit_s")
        if self._down_since is not None and now - self._down_since > limit:
            self._fail_queue("engine_down", f"the engine did not come back within {limit:g} s: {self.engine.reason}")
        late = [one for one in self._queue if one.deadline is not None and one.deadline < now]
        for generation in late:
            self._queue.remove(generation)
            self.counters.failed += 1
            generation.fail(StrataError("queue_timeout", "the request waited too long for its turn", retry_after=10))
        if not self._queue:
            self._waiting.clear()

    # -- stopping

    async def drain(self, limit_s: float) -> bool:
        """Take nothing more, refuse what waits, give what runs so long. Returns whether it ended by itself.

        What is cut off ends with `draining`; its lane is left to the engine's end.
        """
        self.draining = True
        self._fail_queue("draining", "the server is stopping")
        if limit_s > 0 and await self._effects.wait(self._idle, limit_s):
            return True
        return not self.cut()

    def cut(self) -> bool:
        """End the running request for its client now. Returns whether there was one."""
        generation = self._lane.current
        if generation is None:
            return False
        self.counters.failed += not generation.ended
        generation.fail(StrataError("draining", "the server is stopping; the answer was cut off", retry_after=10))
        self._stop()
        return True
