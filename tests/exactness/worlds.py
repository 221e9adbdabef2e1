"""A world: a model, its oracle, and random conversations in its vocabulary."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.exactness.slots import Oracle, Request, Slots, request


@dataclass(frozen=True)
class World:
    """What the tests of one model share."""

    name: str
    model: Path
    oracle: Oracle
    vocab: int  # ids below this are ordinary text
    turn: int  # starts a turn
    ends: tuple[int, ...]  # end an answer
    context: int
    temperatures: tuple[float, ...]  # from sure to wavering

    def __str__(self) -> str:
        return self.name

    @property
    def endless(self) -> dict[str, Any]:
        """Keys under which no answer ends by itself."""
        return {"logit_bias": ",".join(f"{i}:-1000" for i in self.ends)} if self.ends else {}

    def slots(self, *args: str | float | Path, env: dict[str, str] | None = None) -> Slots:
        """An engine on this model."""
        return Slots(*map(str, args), model=self.model, env=env)

    def words(self, rng: random.Random, n: int) -> list[int]:
        """n ordinary tokens."""
        return [rng.randrange(self.vocab) for _ in range(n)]

    def conversation(self, rng: random.Random, system: int = 80, user: int = 20) -> list[int]:
        """A system prompt, a turn of the user, and the beginning of an answer."""
        head = [self.turn, *self.words(rng, system), self.turn, *self.words(rng, user)]
        return [*head, self.turn, *self.words(rng, 2)]

    def keys(self, rng: random.Random, endless: bool | None = None) -> dict[str, Any]:
        """Any mixture of what a request may ask for that decides its text."""
        keys: dict[str, Any] = {"temperature": rng.choice(self.temperatures)}
        if keys["temperature"]:
            keys["seed"] = rng.randrange(-(2**63), 2**64)
        choices: dict[str, Any] = {
            "top_p": rng.choice([0.5, 0.95]),
            "top_k": rng.choice([1, 5, 40]),
            "min_p": rng.choice([0.01, 0.2]),
            "penalty_repeat": rng.choice([0.8, 1.3]),
            "penalty_freq": rng.choice([-0.3, 0.6]),
            "penalty_present": rng.choice([-0.5, 1.0]),
            "penalty_last_n": rng.choice([-1, 0, 7, 64]),
            "choice": rng.randrange(4),
        }
        keys |= {k: v for k, v in choices.items() if rng.random() < 0.25}
        keys["logprobs"] = rng.choice([0, 1, 5])
        bias = [f"{rng.randrange(self.vocab)}:{rng.choice(['-inf', -2.5, 1.5])}" for _ in range(rng.randrange(3))]
        if endless or (endless is None and rng.random() < 0.6):
            bias += [f"{i}:-1000" for i in self.ends]
        if bias:
            keys["logit_bias"] = ",".join(bias)
        return keys

    def request(self, rng: random.Random, tokens: int, *, endless: bool | None = None) -> Request:
        """A random conversation with random wishes."""
        ids = self.conversation(rng, rng.randrange(120), rng.randrange(1, 40))
        return request(ids, tokens, **self.keys(rng, endless))

    def requests(self, rng: random.Random, n: int, tokens: int, **how: Any) -> Iterator[Request]:
        return (self.request(rng, tokens, **how) for _ in range(n))
