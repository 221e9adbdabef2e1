"""Where a request begins - its slot's own session, a checkpoint, another slot's - never changes what it says."""

from __future__ import annotations

import random

import pytest

from tests.exactness.slots import HIDDEN, Request, Slots, Stream, request
from tests.exactness.worlds import World

SLOW = pytest.mark.slow


def boundary(world: World, ids: tuple[int, ...]) -> int:
    """Where the last turn of a prompt begins."""
    return max(i for i, token in enumerate(ids) if token == world.turn)


def first_turn(world: World, slots: Slots, rng: random.Random, slot: int = 0, **more: int) -> Stream:
    """A conversation's first answer, of 40 tokens."""
    keys = {**world.keys(rng, True), **more}
    return slots.run(slot, request(world.conversation(rng), 40, **keys))


def next_turn(world: World, rng: random.Random, stream: Stream, answer: list[int]) -> Request:
    """The same conversation with `answer` as what was said, and one more turn."""
    more = [world.turn, *world.words(rng, 9), world.turn, *world.words(rng, 2)]
    return request([*stream.request.ids, *answer, *more], 30, **world.keys(rng, True))


def test_the_next_turn_goes_on_in_its_slot(world: World) -> None:
    rng = random.Random(1)
    with world.slots("--parallel", 2) as slots:
        first = first_turn(world, slots, rng)
        second = slots.run(0, next_turn(world, rng, first, first.tokens))
        third = slots.run(0, next_turn(world, rng, second, second.tokens))
    for before, after in ((first, second), (second, third)):
        assert after.resumed == len(before.request.ids) + len(before.texts) - 1  # the last token was never forwarded
    world.oracle.check(first, second, third)


def test_the_next_turn_without_the_thinking_starts_at_the_turn(world: World) -> None:
    rng = random.Random(2)
    with world.slots("--parallel", 2) as slots:
        first = first_turn(world, slots, rng)
        second = slots.run(0, next_turn(world, rng, first, first.tokens[15:]))
    ids = first.request.ids
    assert second.resumed == (len(ids) if world.name == "dense" else boundary(world, ids))
    world.oracle.check(first, second)


@pytest.mark.parametrize("slot", [1, HIDDEN])
def test_the_next_turn_in_another_slot_starts_from_the_checkpoint(world: World, slot: int) -> None:
    if world.name == "dense":
        pytest.skip("the model has no marks of turns")
    rng = random.Random(3)
    with world.slots("--parallel", 2) as slots:
        first = first_turn(world, slots, rng)
        other = slots.run(slot, next_turn(world, rng, first, first.tokens))
        own = slots.run(0, next_turn(world, rng, first, first.tokens))
    assert other.resumed is not None and other.resumed >= boundary(world, first.request.ids)
    assert own.resumed == len(first.request.ids) + len(first.texts) - 1
    world.oracle.check(first, other, own)


def test_what_a_slot_held_is_kept_for_others_though_it_ended_amid_drafts(moe: World) -> None:
    """An answer that ends with accepted drafts leaves them still to be replayed; the checkpoint must hold them."""
    rng = random.Random(8)
    streams: list[Stream] = []
    with moe.slots("--parallel", 2, "--spec", 8, "--spec-fixed", "--spec-min-p", 0) as slots:
        for length in range(20, 36):
            first = slots.run(0, request(moe.conversation(rng), length, temperature=0, **moe.endless))
            slots.run(0, request(moe.conversation(rng), 2))
            second = slots.run(1, next_turn(moe, rng, first, first.tokens))
            assert second.resumed == len(first.request.ids) + len(first.texts) - 1
            streams += [first, second]
    moe.oracle.check(*streams)


def test_a_regenerated_answer_reads_only_the_turn_again(world: World) -> None:
    rng = random.Random(4)
    with world.slots("--parallel", 2) as slots:
        first = first_turn(world, slots, rng)
        again = [slots.run(0, request(first.request.ids, 40, **world.keys(rng))) for _ in range(3)]
        same = slots.run(0, first.request)
    ids = first.request.ids
    for stream in (*again, same):
        assert stream.resumed == (len(ids) - 1 if world.name == "dense" else boundary(world, ids))
    assert same.texts == first.texts
    world.oracle.check(first, *again, same)


def test_a_system_prompt_is_read_once_for_all(world: World) -> None:
    if world.name == "dense":
        pytest.skip("the model has no marks of turns")
    rng = random.Random(5)
    head = [world.turn, *world.words(rng, 80)]
    with world.slots("--parallel", 3) as slots:
        streams = []
        for slot in (0, 1, 2, 0):
            ids = [*head, world.turn, *world.words(rng, 12), world.turn, *world.words(rng, 2)]
            streams.append(slots.run(slot, request(ids, 20, **world.keys(rng))))
    assert [s.resumed for s in streams] == [0, 81, 81, 81]
    world.oracle.check(*streams)


def test_ckpt_0_leaves_nothing_but_what_all_share(world: World) -> None:
    rng = random.Random(6)
    with world.slots("--parallel", 2, "--prompt-cache-root", 100000) as slots:
        first = first_turn(world, slots, rng, ckpt=0)
        stat = slots.stat()
        assert stat["pool"]["blocks"] == stat["prompt_cache"]["checkpoints"] == 0
        assert stat["slots"][0]["held_tokens"] == 0
        second = slots.run(0, next_turn(world, rng, first, first.tokens))
        assert second.resumed == 0
    world.oracle.check(first, second)


def test_what_is_pinned_outlives_what_is_not(world: World) -> None:
    """A cache of 1 MiB and conversations enough to fill it several times."""
    rng = random.Random(7)
    pinned = request(world.conversation(rng), 5, pin=70, **world.endless)
    loose = request(world.conversation(rng), 5, **world.endless)
    mib = 1 if world.name != "embedded" else 16
    with world.slots("--parallel", 2, "--prompt-cache-mib", mib, "--prompt-cache-root", 100000) as slots:
        streams = [slots.run(0, pinned), slots.run(1, loose)]
        checkpoints = []
        for i in range(400):
            streams.append(slots.run(i % 2, request(world.conversation(rng), 1, **world.endless)))
            checkpoints.append(slots.stat()["prompt_cache"])
            if len(checkpoints) > 60 and checkpoints[-1]["checkpoints"] <= checkpoints[-30]["checkpoints"]:
                break
        assert max(c["mib"] for c in checkpoints) <= mib
        again = [slots.run(0, pinned), slots.run(1, loose)]
    assert again[0].resumed == 70
    assert again[1].resumed in (0, 1)  # all conversations begin with the same token
    world.oracle.check(*streams[:10], *again)


@pytest.mark.parametrize("mib", [0, 1, 256])
@pytest.mark.parametrize("seed", [1, *(pytest.param(s, marks=SLOW) for s in range(2, 9))])
def test_trees_of_turns_over_slots_and_caches(world: World, seed: int, mib: int) -> None:
    """Conversations that go on, go back, lose their thinking or begin again, wherever there is a free slot."""
    rng = random.Random(100 * seed + mib)
    known: list[Stream] = []
    with world.slots(
        "--parallel", 3, "--prompt-cache-mib", mib, "--chunk", rng.choice([16, 512]), "--prompt-cache-every", 50
    ) as slots:
        for _ in range(20 if world.name == "embedded" else 60):
            free = [i for i in range(-1, 3) if i not in slots.running]
            if len(free) < 2:
                slots.finish(rng.choice(list(slots.running.values())))
                continue
            old = rng.choice(known) if known and rng.random() < 0.8 else None
            if old is None or not old.ended or len(old.request.ids) > 1500:
                req = world.request(rng, 20)
            elif rng.random() < 0.3:
                req = request(old.request.ids, 20, **world.keys(rng))
            else:
                req = next_turn(world, rng, old, old.tokens[rng.choice([0, 0, 7]) :])
            keys = {"ckpt": rng.choice([0, 1, 1, 1]), "pin": rng.randrange(60)}
            known.append(slots.begin(rng.choice(free), Request(req.ids, req.max_new, (*req.keys, *keys.items()))))
        slots.finish()
    if mib > (1 if world.name == "embedded" else 0):  # one of its checkpoints is larger than that
        assert any(s.resumed for s in known)
    world.oracle.check(*known)
