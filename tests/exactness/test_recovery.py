"""An answer that was cut off goes on with the very tokens it would have had: from its prompt and what it had said."""

from __future__ import annotations

import random

import pytest

from tests.exactness.slots import HIDDEN, Request
from tests.exactness.worlds import World

SLOW = pytest.mark.slow


def test_prompt_and_partial_output_go_on(world: World) -> None:
    """Wherever it is cut; penalties see which part is output (out_from), draws their position."""
    rng = random.Random(41)
    with world.slots("--parallel", 2) as slots:
        for req in world.requests(rng, 6, 40):
            texts, finish = world.oracle(req)
            for cut in sorted({1, len(texts) // 3, len(texts) // 2, len(texts) - 1} - {0, len(texts)}):
                rest = slots.run(rng.randrange(2), req.after(texts[:cut]))
                assert (rest.texts, rest.finish) == (texts[cut:], finish)


def test_a_gen_that_was_stopped_goes_on_in_a_slot(world: World) -> None:
    rng = random.Random(42)
    req = world.request(rng, 3000, endless=True)
    with world.slots("--parallel", 2) as slots:
        gen = slots.begin(HIDDEN, req)
        while len(gen.texts) < 20:
            slots.take()
        slots.engine.send("STOP")
        slots.finish(gen)
        more = req.after(gen.texts)
        rest = slots.run(1, Request(more.ids, 30, more.keys))
    short = Request(req.ids, len(gen.texts) + 30, req.keys)
    assert (gen.texts + rest.texts, rest.finish) == world.oracle(short)


@pytest.mark.parametrize("seed", [1, *(pytest.param(s, marks=SLOW) for s in range(2, 12))])
def test_killed_at_random_windows_under_four_streams(world: World, seed: int) -> None:
    """Each time the engine dies, whatever has not ended is sent again with what it had said."""
    rng = random.Random(seed)
    requests = list(world.requests(rng, 4, 80))
    said: list[list[str]] = [[] for _ in requests]
    finishes = ["" for _ in requests]
    for life in range(20):
        slots = world.slots("--parallel", 4, "--spec", rng.randrange(5), "--chunk", rng.choice([8, 512]))
        slots.engine.start()
        try:
            streams = {}
            for i in rng.sample(range(4), 4):
                if not finishes[i]:
                    streams[i] = slots.begin(i, requests[i].after(said[i]) if said[i] else requests[i])
            lines = rng.randrange(1, 150) if life < 5 else 10**6
            while slots.running and (lines := lines - 1):
                slots.take()
        finally:
            slots.engine.kill()
        for i, stream in streams.items():
            said[i] += stream.texts
            if stream.ended:
                finishes[i] = stream.finish
            elif said[i] and stream.tokens and stream.tokens[-1] in world.ends:
                finishes[i] = "stop"  # its last token was heard, its last line was not
            elif len(said[i]) == requests[i].max_new:
                finishes[i] = "length"
        if all(finishes):
            break
    for req, texts, finish in zip(requests, said, finishes, strict=True):
        assert (texts, finish) == world.oracle(req)
