"""What a stored conversation is worth: how often it is used, what making it again would cost, how much room it takes.

worth = weight * cost / bytes. The weight counts uses, each of which counts half after every half-life: a conversation
used ten times yesterday yields to one used twice an hour ago. Time that runs backwards is no time; who finds a use in
the future writes it down as of now (`settle`), or it would never age again.
"""

from __future__ import annotations

from stratastore.records import Usage


def weight(usage: Usage, now: float, half_life_s: float) -> float:
    """The decayed number of uses at `now`."""
    age = max(0.0, now - usage.last_use)
    return usage.weight * float(0.5 ** min(age / half_life_s, 1000.0))


def use(usage: Usage, now: float, half_life_s: float, hits: int = 1) -> None:
    """Note uses at `now`."""
    usage.weight = weight(usage, now, half_life_s) + 1.0
    usage.last_use = now
    usage.hits += hits


def settle(usage: Usage, now: float) -> bool:
    """Bring a use of the future to now; whether there was one."""
    if usage.last_use <= now:
        return False
    usage.last_use = now
    return True


def worth(usage: Usage, now: float, half_life_s: float) -> float:
    """What its place in the store is worth; a conversation without a cost is judged by its tokens."""
    cost = usage.cost or float(usage.tokens or 1)
    return weight(usage, now, half_life_s) * cost / max(usage.bytes, 1)
