"""The events of one generation, and its client's leaving, in one place to wait for."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from types import TracebackType

from starlette.types import Receive
from stratad.errors import StrataError
from stratad.http.drain import Drain
from stratad.types import Event, Generation

log = logging.getLogger(__name__)

HELD_EVENTS = 512
"""Events taken from a generation while the client does not read; beyond that they wait where they are made."""

END_WAIT_S = 10.0
"""How long a stopped generation may take to say so before it is left alone."""


class ClientLeft(Exception):
    """Nobody waits for this answer any more."""


class Feed:
    """An async context manager around a generation; leaving it stops the generation if it still runs.

    Events that arrive together are taken together, which is what makes many tokens per second cheap.
    """

    def __init__(self, generation: Generation, receive: Receive, drain: Drain) -> None:
        self._generation, self._receive = generation, receive
        self._events: deque[Event] = deque()
        self._ended = False
        self._gone = False
        self._closing = False  # nobody takes events any more
        self._error: StrataError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._room = asyncio.Event()
        self._cut = drain.at_cut(self._on_cut)
        self._silence = _SilenceTimer(self._wake)

    async def __aenter__(self) -> Feed:
        self._pump_task = asyncio.create_task(self._pump())
        self._watch_task = asyncio.create_task(self._watch())
        self._cut.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cut.__exit__(kind, error, trace)
        self._silence.close()
        self._watch_task.cancel()
        if not self._pump_task.done():
            self._closing = True
            self._room.set()
            await self._generation.cancel()
            await asyncio.wait([self._pump_task], timeout=END_WAIT_S)
            self._pump_task.cancel()
        await asyncio.wait([self._pump_task, self._watch_task])

    async def take(self, silence_s: float | None = None) -> list[Event] | None:
        """The events since the last call. An empty list after `silence_s` without one; None after the last.

        Raises ClientLeft as soon as the client is known to have gone, and the generation's StrataError after the
        events before it.
        """
        if not (self._events or self._ended or self._gone):
            self._silence.begin(silence_s)
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
            self._silence.end()
        if self._gone:
            raise ClientLeft
        if self._events:
            events = list(self._events)
            self._events.clear()
            self._room.set()
            return events
        if self._error is not None:
            raise self._error
        return None if self._ended else []

    async def stop(self) -> list[Event]:
        """Stop the generation and return what it still had to say; errors no longer matter."""
        await self._generation.cancel()
        rest: list[Event] = []
        try:
            async with asyncio.timeout(END_WAIT_S):
                while (events := await self.take()) is not None:
                    rest += events
        except (StrataError, TimeoutError):
            pass
        return rest

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _on_cut(self) -> None:
        self._events.clear()
        self._error = self._error or StrataError("draining", "the server is stopping; the answer was cut off")
        self._ended = True
        self._wake()

    async def _pump(self) -> None:
        try:
            async for event in self._generation:
                self._events.append(event)
                self._wake()
                if self._closing or self._ended:
                    self._events.clear()
                elif len(self._events) >= HELD_EVENTS:
                    self._room.clear()
                    await self._room.wait()
        except StrataError as error:
            self._error = self._error or error
        except Exception:
            log.exception("a generation failed")
            self._error = StrataError("internal", "the answer failed for a reason that is in the log")
        finally:
            self._ended = True
            self._wake()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._wake()


class _SilenceTimer:
    """Calls back after a silence. One timer of the loop serves many waits, as most end long before it is due."""

    def __init__(self, silent: Callable[[], None]) -> None:
        self._silent = silent
        self._due: float | None = None  # None: nobody waits, or without a limit
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, seconds: float | None) -> None:
        """Somebody begins to wait."""
        if seconds is None:
            return
        loop = asyncio.get_running_loop()
        self._due = loop.time() + seconds
        if self._timer is None or self._timer.when() > self._due:
            self.close()
            self._timer = loop.call_at(self._due, self._look)

    def end(self) -> None:
        """The wait is over."""
        self._due = None

    def close(self) -> None:
        """No more waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._due is None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() >= self._due:
            self._silent()
        else:
            self._timer = loop.call_at(self._due, self._look)
