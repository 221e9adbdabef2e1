"""Threads, kernels, chunks, a pool that is too small and the end of the context: none of them changes an answer."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from strata_native import ffi, lib

from tests.exactness.slots import Request, request
from tests.exactness.worlds import World

SLOW = pytest.mark.slow


def side_by_side(world: World, args: Sequence[str | int], seed: int, n: int = 4, tokens: int = 50) -> None:
    rng = random.Random(seed)
    with world.slots("--parallel", n, *args) as slots:
        streams = [slots.begin(i, r) for i, r in enumerate(world.requests(rng, n, tokens))]
        slots.finish()
    world.oracle.check(*streams)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 7, 64, 4000])
def test_threads_and_chunks(world: World, threads: int, chunk: int) -> None:
    side_by_side(world, ("--threads", threads, "--chunk", chunk), seed=21)


@pytest.mark.parametrize("isa", ["avx512", "avxvnni", "avx2", "scalar"])
def test_instruction_sets(world: World, isa: str) -> None:
    if lib.st_kernels_find(isa.encode(), ffi.NULL) == ffi.NULL:
        pytest.skip(f"this processor has no {isa}, or this build")
    scalar = isa == "scalar" and world.name == "embedded"
    side_by_side(world, ("--isa", isa, "--spec", 3, "--spec-fixed"), seed=22, tokens=8 if scalar else 50)


@pytest.mark.parametrize("kv", ["f16", "f32"])
def test_other_types_of_keys_and_values(moe: World, kv: str) -> None:
    """They give other answers than int8, but the same alone and in company."""
    rng = random.Random(23)
    reqs = [request(r.ids, 60, **dict(r.keys)) for r in moe.requests(rng, 3, 60)]
    with moe.slots("--kv", kv, "--spec", 0, "--threads", 1) as slots:
        alone = [slots.run(-1, Request(r.ids, 60, (*r.keys, ("ckpt", 0)))).texts for r in reqs]
    with moe.slots("--kv", kv, "--parallel", 3, "--spec", 4, "--spec-fixed", "--spec-min-p", 0) as slots:
        streams = [slots.begin(i, r) for i, r in enumerate(reqs)]
        slots.finish()
    assert [s.texts for s in streams] == alone


@pytest.mark.parametrize("spec", [0, 5])
@pytest.mark.parametrize("blocks", [5, 7, 12])
@pytest.mark.parametrize("seed", [31, *(pytest.param(s, marks=SLOW) for s in range(32, 40))])
def test_a_full_pool_parks_and_goes_on(world: World, blocks: int, spec: int, seed: int) -> None:
    """Six conversations of up to five blocks each in a pool of 5, 7 and 12."""
    rng = random.Random(seed)
    args = ("--pool-blocks", blocks, "--spec", spec, "--spec-fixed", "--spec-min-p", 0, "--chunk", 40)
    with world.slots("--parallel", 6, *args) as slots:
        streams = []
        for i in range(6):
            ids = world.conversation(rng, rng.randrange(150), 20)
            streams.append(slots.begin(i, request(ids, 310 - len(ids), **world.keys(rng, True))))
        slots.finish()
        pool = slots.stat()["pool"]
        assert pool["limit"] == blocks >= pool["blocks"]
        assert pool["parked"] or blocks == 12
    assert all(len(s.request.ids) + len(s.texts) == 310 for s in streams)
    world.oracle.check(*streams)


def test_a_request_too_large_for_the_pool_alone_says_so(world: World) -> None:
    rng = random.Random(24)
    with world.slots("--parallel", 2, "--pool-blocks", 4, "--spec", 3) as slots:
        large = slots.begin(0, request(world.words(rng, 400), 5))
        small = slots.begin(1, request(world.words(rng, 30), 60, **world.endless))
        slots.finish()
        assert large.error and large.error[0] == "pool_full"
        growing = slots.run(0, request(world.words(rng, 100), 1000, **world.endless))
        assert growing.error and growing.error[0] == "pool_full"
        assert 4 * 64 - 100 <= len(growing.texts) <= 4 * 64 - 99
        after = slots.run(0, request(world.words(rng, 100), 4 * 64 - 100, **world.endless))
    world.oracle.check(small, after)


@pytest.mark.parametrize("context", [300, 320])
@pytest.mark.parametrize("depth", [0, 3, 8])
def test_the_end_of_the_context(world: World, context: int, depth: int) -> None:
    """Answers that run into it, and prompts that leave room for one token, two, up to twelve."""
    rng = random.Random(25)
    args = ("--max-context", context, "--spec", depth, "--spec-fixed", "--spec-min-p", 0)
    with world.slots("--parallel", 4, *args) as slots:
        streams = []
        for left in (100, *range(1, 13)):
            ids = world.words(rng, context - left)
            while len(slots.running) == 4:
                slots.take()
            slot = next(s for s in range(4) if s not in slots.running)
            streams.append(slots.begin(slot, request(ids, 1000, **world.keys(rng, True))))
        slots.finish()
        full = slots.run(0, request(world.words(rng, context), 1))
    assert full.error and full.error[0] == "context_full"
    for s in streams:
        left = context - len(s.request.ids)
        assert (len(s.texts), s.finish) == (left, "length")
        s.request = request(s.request.ids, left, **dict(s.request.keys))  # the oracle's context is longer
    world.oracle.check(*streams)
