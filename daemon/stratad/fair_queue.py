"""Who is next: first come first served for each client, fair between clients, short prompts before long ones.

Every request gets a number of virtual tokens at which it would be finished if the clients shared the engine evenly:
the later of now and its client's previous request, plus its own cost. The smallest number is next. Virtual time moves
on to it, and with the clock. So a client with many requests waits behind one with few, a short prompt overtakes a long
one, and nobody waits for ever: the number of a request that waits stands still while those of new ones grow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from stratad.generation import ScheduledGeneration

ANSWER_COST = 256
"""What a request costs besides reading its prompt, in tokens: how long an answer will be, nobody knows."""

AGEING_TOK_S = 200
"""How fast virtual time goes at least: a prompt longer by so many tokens is overtaken for no more than a second."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    generation: ScheduledGeneration
    unread: int
    finish: int  # in virtual tokens

    @property
    def rank(self) -> tuple[int, int]:
        return self.finish, self.generation.number


class FairQueue:
    """Requests that have not begun."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[_Waiting]] = {}
        self._last: dict[str, int] = {}  # by client, where its newest request finishes
        self._now = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[ScheduledGeneration]:
        return (waiting.generation for line in self._lines.values() for waiting in line)

    def put(self, generation: ScheduledGeneration, unread: int) -> None:
        """To the end of its client's line; `unread` prompt tokens must be read for it."""
        client = generation.request.client
        self._now = max(self._now, int(generation.submitted * AGEING_TOK_S))
        finish = max(self._now, self._last.get(client, 0)) + unread + ANSWER_COST
        self._last[client] = finish
        self._lines.setdefault(client, deque()).append(_Waiting(generation, unread, finish))
        self._length += 1

    def take(self) -> ScheduledGeneration | None:
        """The next one."""
        if not self._lines:
            return None
        waiting = min((line[0] for line in self._lines.values()), key=lambda one: one.rank)
        self._now = max(self._now, waiting.finish)
        self._last = {client: last for client, last in self._last.items() if last > self._now}
        self.remove(waiting.generation)
        return waiting.generation

    def shortest(self) -> tuple[ScheduledGeneration, int] | None:
        """The one with the least to read among those that are first of their line, and how much that is."""
        if not self._lines:
            return None
        waiting = min((line[0] for line in self._lines.values()), key=lambda one: (one.unread, one.rank))
        return waiting.generation, waiting.unread

    def remove(self, generation: ScheduledGeneration) -> bool:
        """Take one out of the middle; returns whether it was there."""
        client = generation.request.client
        line = self._lines.get(client, deque())
        found = next((one for one in line if one.generation is generation), None)
        if found is None:
            return False
        line.remove(found)
        self._length -= 1
        if not line:
            del self._lines[client]
        return True

    def clear(self) -> list[ScheduledGeneration]:
        """Take all of them out."""
        everyone = list(self)
        self._lines.clear()
        self._length = 0
        return everyone
