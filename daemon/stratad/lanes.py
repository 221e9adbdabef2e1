"""The daemon's view of the engine's slots: what each one holds, and the leg of a request that runs in it.

A leg is one BGEN and what follows, to its BDONE or BERR. A request mostly has one leg; it has more when its read gave
way, when the engine died, or when it is on probation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stratad.generation import ScheduledGeneration

SLOWEST_READ_TOK_S = 50.0  # prompt reading is given this much time per token before its first report
LONGEST_READ_TOKENS = 32768
RATE_SAMPLES = 5  # of the tick: the rate that is shown is one over about two seconds


@dataclass(slots=True)
class Leg:
    """One stay of a request in a slot."""

    generation: ScheduledGeneration
    ids: tuple[int, ...]  # what it began with
    budget: int
    began: float
    allowance: float  # silence it may keep, seconds; 0: any
    heard: float  # when it was last heard
    resumed: bool = False  # the engine has said where it begins
    reused: int = 0
    position: int = 0  # of ids, read
    tokens: int = 0
    reading: bool = True
    decoding_since: float | None = None
    end_by: float | None = None  # it was stopped, and must have ended by then
    yield_for: ScheduledGeneration | None = None  # it was asked to give way to this one
    gave_way: bool = False
    asked: tuple[int, int] | None = None  # position and tokens when the engine was asked about its silence
    samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RATE_SAMPLES))

    @property
    def unread(self) -> int:
        """Prompt tokens that are still to be read."""
        return len(self.ids) - self.position if self.reading else 0

    @property
    def fresh(self) -> int:
        """Prompt tokens read so far."""
        return max(0, self.position - self.reused)

    def rate(self, now: float) -> float | None:
        """Tokens per second lately: prompt tokens while reading, new ones while decoding."""
        since, count = self.samples[0] if self.samples else (self.decoding_since or self.began, 0)
        done = (self.fresh if self.reading else self.tokens) - count
        return done / (now - since) if now > since and done > 0 else None

    def sample(self, now: float) -> None:
        """Note how far it is, for `rate`."""
        self.samples.append((now, self.fresh if self.reading else self.tokens))


@dataclass(slots=True)
class Lane:
    """One slot."""

    slot: int
    held: Sequence[int] = ()  # tokens of the session it keeps while idle
    used: float = 0.0
    leg: Leg | None = None

    def describe(self, now: float) -> dict[str, object]:
        """What the slot holds, or how far its request is; JSON-ready."""
        leg = self.leg
        if leg is None:
            return {"slot": self.slot, "state": "idle", "held_tokens": len(self.held)}
        record, rate = leg.generation.record, leg.rate(now)
        return {
            "slot": self.slot,
            "state": "reading" if leg.reading else "decoding",
            "prompt_tokens": len(record.prompt),
            "prompt_read": min(leg.position, len(record.prompt)),
            "generated": len(record.output),
            "elapsed_s": round(now - leg.generation.submitted, 2),
            "tok_s": None if rate is None else round(rate, 1),
        }


def held_prefix(held: Sequence[int], ids: tuple[int, ...]) -> int:
    """How many tokens need not be read again: all that are held if they begin `ids` and leave one to read, or none."""
    length = len(held)
    if not 0 < length < len(ids) or held[-1] != ids[length - 1]:  # the cheap look first
        return 0
    return length if ids[:length] == tuple(held) else 0


def choose_lane(lanes: Iterable[Lane], ids: tuple[int, ...]) -> Lane | None:
    """The free slot that holds the longest beginning of `ids`, else an empty one, else the least recently used."""
    free = [lane for lane in lanes if lane.leg is None]
    if not free:
        return None
    return max(free, key=lambda lane: (held_prefix(lane.held, ids), not lane.held, -lane.used, -lane.slot))


def longest_held(lanes: Iterable[Lane], ids: tuple[int, ...]) -> int:
    """Tokens of `ids` that some slot holds."""
    return max((held_prefix(lane.held, ids) for lane in lanes), default=0)


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
