"""Anything in any order: thousands of admissions, stops, yields, questions and bad lines from a seed.

Every line of the engine must belong to something (slots.py sees to that), every request ends exactly once, every text
is the oracle's, and afterwards the page pool holds what idle sessions hold and no block more.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from tests.exactness.slots import HIDDEN, Request, Slots, Stream, request
from tests.exactness.worlds import World

SLOW = pytest.mark.slow
CONTEXT = 420
BAD_LINES = {
    "BGEN": "bad_slot",
    "BGEN x 5 1": "bad_slot",
    "BGEN -1 5 1": "bad_slot",
    "BGEN 99 5 1,2": "bad_slot",
    "BGEN 0 0 1": "bad_max_new",
    "BGEN 0 5 top_p=7 1": "bad_key",
    "BGEN 0 5 spec_p_cum=2 1": "bad_key",
    "BGEN 0 5 1,,2": "bad_ids",
    "BGEN 0 5": "bad_ids",
    "BGEN 0 5 1 2": "bad_ids",
    "BGEN 0 5 999999": "token_range",
    "BGEN 0 5 logit_bias=999999:1 1": "token_range",
    "GEN 5 out_from=9 1,2": "bad_key",
    "BSTOP": "bad_slot",
    "BSTOP 77": "bad_slot",
    "BYIELD -1": "bad_slot",
    "BYIELD 77": "bad_slot",
    "bgen 0 5 1": "bad_command",
    "NONSENSE 0 1 2": "bad_command",
    "BGEN 0 5 1\0": "bad_command",
}


ENGINE_WISHES: dict[str, list[float]] = {
    "ckpt": [0, 1],
    "pin": [1, 64, 100],
    "spec_min_p": [0, 0.3],
    "spec_p_cum": [0.1],
    "spec_p_cum_deep": [0.9],
}


@dataclass
class Chaos:
    """Does one thing after another; remembers every request and every error that must come."""

    world: World
    slots: Slots
    rng: random.Random
    places: int
    streams: list[Stream] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def free(self) -> list[int]:
        return [i for i in range(-1, self.places) if i not in self.slots.running]

    def fresh(self) -> Request:
        """A new conversation, or the next turn, another answer or the rest of one that has ended."""
        rng, known = self.rng, [s for s in self.streams if s.ended]
        old = rng.choice(known[-12:]) if known and rng.random() < 0.6 else None
        if old is None or len(old.request.ids) > 220:
            req = self.world.request(rng, rng.randrange(1, 40))
        elif old.finish == "cancel" and len(old.texts) < old.request.max_new and rng.random() < 0.7:
            return old.request.after(old.texts) if old.texts else old.request
        else:
            more = [*old.tokens[rng.choice([0, 0, 5]) :], self.world.turn, *self.world.words(rng, rng.randrange(1, 30))]
            ids = [*old.request.ids, *(more if rng.random() < 0.7 else [])]
            req = request(ids, rng.randrange(1, 40), **self.world.keys(rng))
        keys = dict(req.keys)
        for name, values in ENGINE_WISHES.items():
            if rng.random() < 0.2:
                keys[name] = rng.choice(values)
        return Request(req.ids, req.max_new, tuple(keys.items()))

    def begin(self) -> None:
        if free := self.free():
            self.streams.append(self.slots.begin(self.rng.choice(free), self.fresh()))

    def begin_where_it_is_busy(self) -> None:
        if busy := [i for i in self.slots.running if i not in self.slots.pushed]:
            self.streams.append(self.slots.push(self.rng.choice(busy), self.fresh()))

    def begin_too_long(self) -> None:
        if free := self.free():
            ids = self.world.words(self.rng, CONTEXT + self.rng.randrange(3))
            self.streams.append(self.slots.begin(self.rng.choice(free), request(ids, 5)))

    def stop(self) -> None:
        slot = self.rng.randrange(-1, self.places)
        self.slots.engine.send("STOP" if slot == HIDDEN else f"BSTOP {slot}")

    def give_way(self) -> None:
        self.slots.engine.send(f"BYIELD {self.rng.randrange(self.places)}")

    def ask(self) -> None:
        self.slots.engine.send("STAT")

    def say_nonsense(self) -> None:
        line = self.rng.choice(list(BAD_LINES))
        self.slots.engine.send(line)
        self.errors.append(BAD_LINES[line])

    def listen(self) -> None:
        for _ in range(self.rng.randrange(30)):
            if not self.slots.running:
                return
            self.slots.take(20)

    def run(self, requests: int) -> None:
        """Until so many requests were sent and all have ended."""
        weights = {
            self.listen: 10,
            self.begin: 8,
            self.stop: 1,
            self.give_way: 1.5,
            self.ask: 0.5,
            self.say_nonsense: 0.5,
            self.begin_where_it_is_busy: 0.5,
            self.begin_too_long: 0.2,
        }
        while len(self.streams) < requests:
            self.rng.choices(list(weights), list(weights.values()))[0]()
        while self.slots.running:
            self.slots.take(20)
        self.slots.stat()

    def check(self) -> None:
        assert sorted(e.split(" ")[0] for e in self.slots.idle_errors) == sorted(self.errors)
        for stream in self.streams:
            assert stream.ended
            if stream.error is None:
                self.world.oracle.check(stream)
            elif len(stream.request.ids) >= CONTEXT:
                assert stream.error[0] in ("context_full", "busy")
            else:
                assert stream.error[0] == "busy"


def pool_holds_what_idle_slots_hold(world: World, slots: Slots, places: int, blocks: int, mib: int) -> None:
    """Sessions and what the last window had reserved for them; nothing at all when nothing is kept."""
    nothing = request([1, 2, 3], 1, ckpt=0)
    slots.run(HIDDEN, nothing)
    stat = slots.stat()
    held = [s["held_tokens"] for s in stat["slots"]]
    assert all(s["state"] == "idle" and not s["parked"] for s in stat["slots"])
    if not mib:
        assert stat["prompt_cache"] == {"checkpoints": 0, "mib": 0}
        assert sum(-(-n // 64) for n in held) <= stat["pool"]["blocks"] <= sum(-(-(n + 9) // 64) for n in held)
    for slot in range(places):
        slots.run(slot, nothing)
    if blocks:  # one request that needs every block: whatever was kept makes room
        room = min(64 * blocks, CONTEXT)
        whole = request(world.words(random.Random(0), room - 20), 20, ckpt=0, **world.endless)
        world.oracle.check(slots.run(0, whole))
    stat = slots.stat()
    if blocks and 64 * blocks <= CONTEXT:
        assert stat["prompt_cache"]["checkpoints"] == 0
    if not stat["prompt_cache"]["checkpoints"]:
        assert stat["pool"]["blocks"] == 0


def anything(world: World, seed: int, requests: int) -> None:
    rng = random.Random(seed)
    places, blocks = rng.randrange(1, 9), rng.choice([0, 6, 6, 8, 20])
    mib = rng.choice([0, 1, 64])
    args: list[str | float] = ["--parallel", places, "--pool-blocks", blocks, "--prompt-cache-mib", mib]
    args += ["--max-context", CONTEXT, "--prompt-cache-every", rng.choice([0, 40]), "--threads", rng.choice([1, 2])]
    args += ["--chunk", rng.choice([1, 5, 32, 512]), "--spec", rng.choice([0, 2, 5, 8])]
    args += ["--spec-min-p", rng.choice([0, 0.5])]
    with world.slots(*args, *(["--spec-fixed"] if rng.random() < 0.5 else [])) as slots:
        chaos = Chaos(world, slots, rng, places)
        chaos.run(requests)
        chaos.check()
        pool_holds_what_idle_slots_hold(world, slots, places, blocks, mib)


@pytest.mark.parametrize("seed", range(6))
def test_anything_in_any_order(moe: World, seed: int) -> None:
    anything(moe, seed, 150)


@pytest.mark.parametrize("seed", range(3))
def test_anything_without_recurrent_layers(dense: World, seed: int) -> None:
    anything(dense, 100 + seed, 120)


@SLOW
@pytest.mark.parametrize("seed", range(1000, 1012))
def test_anything_for_long(moe: World, dense: World, seed: int) -> None:
    anything(moe if seed % 3 else dense, seed, 2500)
