"""Company never changes an answer: whoever else reads, decodes, comes, goes or gives way."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from tests.exactness.slots import HIDDEN, Request, Slots, Stream, request
from tests.exactness.worlds import World
from tests.native.conftest import load_prompts

PROMPTS = load_prompts()


def eight(world: World, args: Sequence[str], seed: int, tokens: int = 150) -> None:
    """Eight conversations at once."""
    rng = random.Random(seed)
    with world.slots("--parallel", 8, *args) as slots:
        streams = [slots.begin(i, r) for i, r in enumerate(world.requests(rng, 8, tokens, endless=True))]
        slots.finish()
        assert all(len(s.texts) == tokens for s in streams)
        world.oracle.check(*streams)


# ---- side by side ----------------------------------------------------------------------------------------------

WAYS = [
    (),
    ("--spec", "0"),
    ("--spec", "5", "--spec-fixed", "--spec-min-p", "0", "--chunk", "16"),
    ("--threads", "1", "--isa", "avx2"),
]


@pytest.mark.parametrize("args", WAYS, ids=" ".join)
def test_eight_conversations_of_150_tokens(moe: World, args: Sequence[str]) -> None:
    eight(moe, args, seed=1)


def embedded_eight(world: World) -> list[Request]:
    """The reference's prompts and two longer ones; greedy, sampled and penalised."""
    rng = random.Random(5)
    prompts = [list(p.ids) for p in PROMPTS]
    prompts += [p + world.words(rng, 20) for p in prompts[:2]]
    wishes: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 2},
        {"temperature": 6, "seed": 5},
        {"temperature": 4, "top_p": 0.9, "seed": -7, "penalty_repeat": 1.2, "penalty_last_n": 32, "logprobs": 1},
        {"temperature": 0, "penalty_freq": 0.5},
    ]
    return [request(ids, 150, **wishes[i % 4], **world.endless) for i, ids in enumerate(prompts)]


SLOW = pytest.mark.slow


@pytest.mark.parametrize("args", [WAYS[0], *(pytest.param(w, marks=SLOW) for w in WAYS[1:])], ids=" ".join)
def test_eight_conversations_of_the_embedded_model(embedded: World, args: Sequence[str]) -> None:
    with embedded.slots("--parallel", 8, *args) as slots:
        streams = [slots.begin(i, r) for i, r in enumerate(embedded_eight(embedded))]
        slots.finish()
        embedded.oracle.check(*streams)


def test_the_oracle_says_what_a_fresh_engine_says(world: World) -> None:
    """It serves all requests from one process that keeps nothing; the first must not differ from the last."""
    rng = random.Random(2)
    for req in world.requests(rng, 3, 30):
        with world.slots("--spec", 0, "--threads", 1) as fresh:
            world.oracle.check(fresh.run(HIDDEN, req))


# ---- joins and leaves ------------------------------------------------------------------------------------------


def come_and_go(world: World, slots: Slots, rng: random.Random, n: int, places: int, tokens: int = 60) -> list[Stream]:
    """n requests over `places` slots (and GEN): begun at random moments, a quarter of them stopped at random ones."""
    waiting, seen = [world.request(rng, rng.randrange(1, tokens)) for _ in range(n)], []
    while waiting or slots.running:
        free = [i for i in range(-1, places) if i not in slots.running]
        if waiting and free and (not slots.running or rng.random() < 0.05):
            seen.append(slots.begin(rng.choice(free), waiting.pop()))
        if slots.running and rng.random() < 0.25 / tokens:
            slot = rng.choice(list(slots.running))
            slots.engine.send("STOP" if slot == HIDDEN else f"BSTOP {slot}")
        slots.take()
    return seen


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(s, marks=SLOW) for s in range(3, 20))])
def test_joins_and_leaves_at_random_windows(world: World, seed: int) -> None:
    rng = random.Random(seed)
    with world.slots("--parallel", 4, "--spec", rng.randrange(6), "--chunk", rng.choice([3, 16, 512])) as slots:
        streams = come_and_go(world, slots, rng, 12 if world.name == "embedded" else 30, 4)
    world.oracle.check(*streams)
    assert {"length"} <= {s.finish for s in streams}


# ---- a long prompt beside two streams --------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [256, pytest.param(64, marks=SLOW)])
def test_a_long_prompt_is_read_beside_two_streams(world: World, chunk: int) -> None:
    rng = random.Random(3)
    long = world.words(rng, world.context // 2 + 500)
    # Eight windows with prompt rows at least, whatever the machine: the chunk bounds them.
    with world.slots("--parallel", 3, "--chunk", chunk) as slots:
        streams = [slots.begin(i, request(world.conversation(rng), 4000, **world.keys(rng, True))) for i in (0, 1)]
        while not all(len(s.texts) > 3 for s in streams):
            slots.take()
        reader = slots.begin(2, request(long, 12, logprobs=2, **world.endless))
        counts = []
        while not reader.ended and not any(s.ended for s in streams):
            word, stream = slots.take()
            if word == "BPP" and stream is reader:
                counts.append(sum(len(s.texts) for s in streams))
        assert len(counts) >= 8
        assert all(b > a for a, b in pairwise(counts)), "the streams were silent during the read"
        for s in streams:
            if not s.ended:
                slots.engine.send(f"BSTOP {s.slot}")
        slots.finish()
        world.oracle.check(reader)
        for s in streams:  # their first 150 tokens: the oracle need not say them all
            short = Stream(
                s.slot, Request(s.request.ids, 150, s.request.keys), s.texts[:150], done={"finish": "cancel"}
            )
            world.oracle.check(short)


# ---- giving way ------------------------------------------------------------------------------------------------


def chunks_read(slots: Slots, stream: Stream, n: int) -> None:
    while len(stream.progress) < n:
        slots.take()


@pytest.mark.parametrize("keep", [1, 0])
def test_a_prompt_that_gave_way_goes_on_where_it_was(world: World, keep: int) -> None:
    rng = random.Random(4)
    long = request(world.words(rng, 1500), 20, logprobs=1, ckpt=keep, **world.endless)
    with world.slots("--parallel", 2, "--chunk", 32) as slots:
        other = slots.begin(1, world.request(rng, 4000, endless=True))
        first = slots.begin(0, long)
        chunks_read(slots, first, 3)
        slots.engine.send("BYIELD 0")
        slots.finish(first)
        assert (first.finish, first.texts) == ("cancel", [])
        assert first.yielded == first.progress[-1]
        between = slots.run(HIDDEN, request(world.conversation(rng), 10))
        second = slots.begin(0, long)
        slots.finish(second)
        assert second.resumed == first.yielded
        slots.engine.send("BSTOP 1")
        slots.finish(other)
    world.oracle.check(between, second)


@pytest.mark.parametrize("keep", [1, 0])
def test_a_gen_hands_what_it_has_read_to_a_slot(world: World, keep: int) -> None:
    rng = random.Random(5)
    long = request(world.words(rng, 1500), 20, ckpt=keep, **world.endless)
    turn = world.request(rng, 20)
    with world.slots("--parallel", 2, "--chunk", 32) as slots:
        slots.run(1, turn)
        gen = slots.begin(HIDDEN, long)
        chunks_read(slots, gen, 3)
        slots.engine.send("BYIELD 1")
        slots.finish(gen)
        assert (gen.finish, gen.texts, gen.done["prompt_tokens_read"]) == ("cancel", [], str(gen.yielded))
        assert slots.yields == [(1, gen.yielded)]
        second = slots.run(1, long)
        assert second.resumed == gen.yielded
        world.oracle.check(second)
        again = slots.run(0, turn)
        world.oracle.check(again)


def test_byield_is_heard_by_nobody_who_decodes_or_rests(world: World) -> None:
    rng = random.Random(6)
    with world.slots("--parallel", 2) as slots:
        slots.engine.send("BYIELD 1")
        stream = slots.begin(0, world.request(rng, 40, endless=True))
        while not stream.texts:
            slots.take()
        slots.engine.send("BYIELD 0")
        slots.engine.send("BYIELD 1")
        slots.finish()
        assert (stream.finish, slots.yields) == ("length", [])
        slots.engine.send("BYIELD 2")
        slots.take()
        assert slots.idle_errors == ["bad_slot there is no slot 2; slots are 0 to 1"]
    world.oracle.check(stream)


# ---- stops -----------------------------------------------------------------------------------------------------


def test_a_stop_ends_a_read_at_once_and_an_answer_within_a_window(world: World) -> None:
    rng = random.Random(7)
    with world.slots("--parallel", 2, "--chunk", 16) as slots:
        reader = slots.begin(0, request(world.words(rng, 1500), 5))
        chunks_read(slots, reader, 2)
        slots.engine.send("BSTOP 0")
        slots.finish(reader)
        assert (reader.finish, reader.texts) == ("cancel", [])
        assert int(reader.done["prompt_tokens_read"]) == reader.progress[-1] < 1500
        talker = slots.begin(1, world.request(rng, 3500, endless=True))
        while not talker.texts:
            slots.take()
        slots.engine.send("BSTOP 1")
        begin = time.monotonic()
        slots.finish(talker)
        assert talker.finish == "cancel"
        assert time.monotonic() - begin < 5
