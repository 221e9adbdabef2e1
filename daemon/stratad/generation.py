"""One request on its way through the daemon: its events for the reader, and its resume record for the engine.

The resume record is what makes an engine's death invisible: prompt, output so far and sampling keys decide every
further token, so that any engine goes on exactly where another one ended. What depends on text (stop strings, half
characters) lives with the reader and never notices.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stratad.engine_protocol import SlotGen, format_line, sampling_keys
from stratad.errors import StrataError
from stratad.types import Done, Event, FinishReason, GenRequest, Progress


@dataclass(slots=True)
class ResumeRecord:
    """Everything an engine needs to go on with an answer: prompt, output received, keys and what is left to say."""

    prompt: tuple[int, ...]
    max_new: int
    keys: Mapping[str, Any]
    end_ids: frozenset[int]
    output: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, request: GenRequest) -> ResumeRecord:
        """The record of a request that has not begun."""
        keys = {**sampling_keys(request.sampling), **request.tune}
        return cls(request.prompt_ids, request.max_new, keys, request.end_ids)

    @property
    def remaining(self) -> int:
        """Tokens that may still be produced."""
        return self.max_new - len(self.output)

    @property
    def ids(self) -> tuple[int, ...]:
        """What the engine is to read: the prompt and what was said after it."""
        return (*self.prompt, *self.output) if self.output else self.prompt

    @property
    def finish(self) -> FinishReason | None:
        """Why the answer is complete, if the last token received completed it."""
        if self.output and self.output[-1] in self.end_ids:
            return "stop"
        return "length" if self.remaining <= 0 else None

    def line(self, slot: int, budget: int) -> bytes:
        """The BGEN line that goes on in `slot` for at most `budget` tokens. Raises ValueError for a bad number."""
        keys = {**self.keys, "out_from": len(self.prompt)} if self.output else self.keys
        return format_line(SlotGen(slot, budget, self.ids, keys))


@dataclass(slots=True)
class Figures:
    """What the engine said about a request, over all the slots it was in."""

    reused: int | None = None  # prompt tokens that were held when it first began; None: not known yet
    prompt_ms: float = 0.0
    decode_ms: float = 0.0
    drafts_offered: int = 0
    drafts_accepted: int = 0
    began: float | None = None  # daemon time of the first BGEN
    first_token: float | None = None
    ended: float | None = None


class ScheduledGeneration:
    """One request. Read by one consumer; `cancel` may be called from anywhere on the loop.

    Events wait here until they are read, so that the engine's pipe is always emptied (tokens are tiny, and `max_new`
    bounds how many can wait): a slow reader holds nobody up.
    """

    __slots__ = (
        "_cancel", "_end", "_error", "_events", "_waiter", "alone_deaths", "cancelled", "deadline", "deaths",
        "figures", "number", "record", "request", "submitted", "yields",
    )  # fmt: skip

    def __init__(
        self, cancel: Callable[[ScheduledGeneration], None], request: GenRequest, number: int, submitted: float
    ) -> None:
        self.request = request
        self.number = number
        self.submitted = submitted
        self.record = ResumeRecord.of(request)
        self.figures = Figures()
        self.deadline: float | None = None  # by then it must be in the engine; only while it waits
        self.cancelled = False
        self.yields = 0  # times its read gave way
        self.deaths = 0  # engines in a row that died with it running and little progress made
        self.alone_deaths = 0  # of these, with nobody else running
        self._cancel = cancel
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
        if self._waiter is not None:
            self._wake()

    def finish(self, reason: FinishReason) -> None:
        """Add the last event."""
        figures = self.figures
        self.push(
            Done(
                reason, len(self.record.output), len(self.record.prompt), figures.reused or 0, figures.prompt_ms,
                figures.decode_ms, figures.drafts_offered, figures.drafts_accepted,
            )
        )  # fmt: skip
        self._end = True

    def fail(self, error: StrataError) -> None:
        """End with an error, after the events that are there."""
        if not self._end:
            self._end, self._error = True, error
            self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
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
        """Leave the queue, or stop within one window or chunk. Idempotent; does not wait for the engine."""
        self._cancel(self)

    def take(self) -> list[Event]:
        """The events that are there now, without waiting."""
        events = list(self._events)
        self._events.clear()
        return events
