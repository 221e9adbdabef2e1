"""Injected effects for tests: a clock that only moves when told to, and children that exist on paper."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import signal
from collections.abc import Callable

from stratad.child import ChildListener, Command, Effects

SETTLE_TURNS = 30  # loop turns after which everything that can go on without time passing has gone on


async def settle() -> None:
    """Let every task run that does not wait for time."""
    for _ in range(SETTLE_TURNS):
        await asyncio.sleep(0)


class VirtualTime:
    """A clock for `Effects`: `advance` fires the sleeps that fall into the step, in order."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._order = itertools.count()
        self._timers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._timers, (self._now + seconds, next(self._order), future))
        await future

    def jump(self, seconds: float) -> None:
        """Move the clock while nothing runs, as when the machine was asleep."""
        self._now += seconds

    async def advance(self, seconds: float) -> None:
        end = self._now + seconds
        await settle()
        while self._timers and self._timers[0][0] <= end:
            due, _, future = heapq.heappop(self._timers)
            self._now = max(self._now, due)
            if not future.done():
                future.set_result(None)
            await settle()
        self._now = end
        await settle()


class PaperChild:
    """A child that does what the test says."""

    def __init__(self, pid: int, command: Command, listener: ChildListener) -> None:
        self.pid = pid
        self.command = command
        self.listener = listener
        self.written = b""
        self.input_closed = False
        self.signals: list[int] = []
        self.dies_of: set[int] = {signal.SIGKILL}
        self.gone = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close_input(self) -> None:
        self.input_closed = True

    def signal(self, number: int) -> None:
        if self.gone:
            return
        self.signals.append(number)
        if number in self.dies_of:
            asyncio.get_running_loop().call_soon(self.exit, -number)

    def say(self, *lines: str) -> None:
        self.listener.child_lines([line.encode() for line in lines])

    def exit(self, code: int) -> None:
        if not self.gone:
            self.gone = True
            self.listener.child_exited(code)

    @property
    def heard(self) -> list[str]:
        """Lines written to it."""
        return self.written.decode().splitlines()


class World:
    """Time, and every child that was started in it. `on_spawn` may raise OSError or make the child talk."""

    def __init__(self, on_spawn: Callable[[PaperChild], None] = lambda _child: None) -> None:
        self.time = VirtualTime()
        self.children: list[PaperChild] = []
        self.on_spawn = on_spawn

    @property
    def child(self) -> PaperChild:
        """The last child started."""
        return self.children[-1]

    def effects(self) -> Effects:
        return Effects(spawn=self._spawn, now=self.time.now, sleep=self.time.sleep, wall=lambda: 1_700_000_000.0)

    def _spawn(self, command: Command, listener: ChildListener) -> PaperChild:
        child = PaperChild(100 + len(self.children), command, listener)
        self.on_spawn(child)
        self.children.append(child)
        return child
